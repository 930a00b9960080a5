"""Tools of many rows at once: how long the rows take together, and what a busy scorer costs the others.

    python benchmarks/concurrency.py                       # a few seconds

64 rows call one tool each, which takes 0.1 s: an async function, and one that blocks. The target is that 64 rows end in
under 0.4 s. Then a scorer computes in a thread, without a pause, and the rows are run again beside it: what they take
longer is what it adds.

The second table is of scorers that hold Python's lock: a regular expression that goes astray, for about a second. Two
of them are judged while the 64 rows call the tool that blocks: in threads, and in processes. It says how long the rows
take, and by how much the last of them is late. Figures are medians over the rounds, in seconds. The last line is of
Python code, each in a process of its own, as many at once as there are processors.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ramet.tasks import Judge, in_processes
from ramet.tasks.processes import Scorer
from ramet.tools import Tool, Toolbox, python_tool
from ramet.types import Episode, Sample, StopReason, ToolCall

WAIT = 0.1
TARGET = 0.4
SCORERS = 2
HELD = 1.0
"""About how many seconds a scorer holds Python's lock."""


async def sleep() -> str:
    """Wait without a thread."""
    await asyncio.sleep(WAIT)
    return "done"


def block() -> str:
    """Wait in a thread."""
    time.sleep(WAIT)
    return "done"


@contextmanager
def busy_scorer() -> Iterator[None]:
    """Let a thread compute in Python without a pause."""
    end = threading.Event()

    def score() -> None:
        total = 0
        while not end.is_set():
            total += sum(number * number for number in range(1000))

    thread = threading.Thread(target=score)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


async def seconds_of(box: Toolbox, rows: int, name: str, arguments: dict[str, Any]) -> float:
    """Run one call for each of `rows` rows at once; return how long all of them take."""
    episodes = [Episode({}, [], random.Random(row)) for row in range(rows)]
    begin = time.perf_counter()
    answers = await asyncio.gather(*(box.run([ToolCall(name, arguments)], episode) for episode in episodes))
    taken = time.perf_counter() - begin
    wrong = [message["content"] for row in answers for message in row if message["content"].strip() != "done"]
    if wrong:
        raise SystemExit(f"{name}: a tool answered {wrong[0]!r}")
    return taken


def median(rounds: int, tools: Sequence[Tool | Callable[..., Any]], rows: int, name: str, arguments: Any) -> float:
    """Return the median over `rounds`, each with threads of its own, as a run begins."""
    found = []
    for _ in range(rounds):
        box = Toolbox(tools)
        try:
            found.append(asyncio.run(seconds_of(box, rows, name, arguments)))
        finally:
            box.close()
    return statistics.median(found)


def scorer() -> Scorer:
    """Return a reward that holds Python's lock: for about `HELD` seconds where the completion is as long as it says."""

    def score(sample: Sample) -> float:
        return float(re.match(r"(a+)+$", sample.completion + "b") is None)

    return score


def length_of_hold() -> int:
    """Return how long a completion is with which it takes about `HELD` seconds: each letter doubles it."""
    length, taken = 16, 0.0
    while taken < HELD / 1.5:
        length += 1
        begin = time.perf_counter()
        re.match(r"(a+)+$", "a" * length + "b")
        taken = time.perf_counter() - begin
    return length


def sample_of(completion: str) -> Sample:
    """Return a sample with this completion."""
    return Sample("", completion, (), (), {}, StopReason.EOS, group=0, member=0)


async def beside(judge: Judge, box: Toolbox, rows: int, length: int) -> float:
    """Return how long the rows take while some completions are judged."""
    await asyncio.gather(*(judge.judged(sample_of("")) for _ in range(SCORERS)))  # what is started once is started
    scores = [asyncio.ensure_future(judge.judged(sample_of("a" * length))) for _ in range(SCORERS)]
    await asyncio.sleep(0)
    taken = await seconds_of(box, rows, "block", {})
    found = [outcome.score for outcome in await asyncio.gather(*scores)]
    if found != [1.0] * SCORERS:
        raise SystemExit(f"expected a score of 1 from each of {SCORERS} scorers: found {found}")
    return taken


def median_beside(rounds: int, rows: int, length: int, reward: Any) -> float:
    """Return the median over `rounds`, each with threads and processes of its own."""
    found = []
    for _ in range(rounds):
        box, judge = Toolbox([block]), Judge(reward)
        try:
            found.append(asyncio.run(beside(judge, box, rows, length)))
        finally:
            box.close()
            judge.close()
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    tools = [sleep, block]
    print(f"{options.rows} rows with one tool of {WAIT:g} s each, seconds (target: under {TARGET:g})")
    print(f"{'tool':<28} {'alone':>8} {'beside a busy scorer':>22} {'it adds':>9}")
    for name, label in (("sleep", "async function"), ("block", "function, in threads")):
        alone = median(options.rounds, tools, options.rows, name, {})
        with busy_scorer():
            beside = median(options.rounds, tools, options.rows, name, {})
        print(f"{label:<28} {alone:>8.3f} {beside:>22.3f} {beside - alone:>9.3f}")
    length = length_of_hold()
    print(f"\n{options.rows} rows beside {SCORERS} scorers that hold Python's lock for about {HELD:g} s each")
    print(f"{'scorers':<28} {'the rows':>8} {'the last one is late by':>25}")
    for label, reward in (("in threads", scorer()), ("in processes", in_processes(scorer(), SCORERS))):
        taken = median_beside(options.rounds, options.rows, length, reward)
        print(f"{label:<28} {taken:>8.3f} {taken - WAIT:>25.3f}")
    code = {"code": "print('done')"}
    taken = median(1, [python_tool()], options.rows, "python", code)
    print(f"\n{options.rows} rows that run Python code, each in a process of its own: {taken:.2f} s")


if __name__ == "__main__":
    main()
