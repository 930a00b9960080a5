"""Environments beside TorchRL's: the same work on both sides in one run, in milliseconds, with the targets.

    python benchmarks/environments.py                      # all parts, some minutes
    python benchmarks/environments.py --quick              # under two
    python benchmarks/environments.py --only tokens text --json figures.json

TorchRL runs in an interpreter of its own, in `benchmarks/.peers`, made on the first use from the versions of
`constraints.txt`; `--peer PYTHON` names one that is there already. Both sides are processes that are asked in turn (a
round of ours, a round of theirs, ...), each with `--threads` threads, so that both see the same noise; on a
machine that does other work, `--clock cpu` leaves it out. A figure is the median over the rounds of the mean of a
round; a ratio is their time by ours. Inputs are made outside the clock, and each call gets its own.

`primer` is the way of TorchRL's documentation: `LLMEnv.from_dataloader`, whose states are lazy stacks of rows there.
`given` is a TensorDict that is passed to `reset`: there TorchRL keeps dense tensors as they are, and steps them without
looking at rows, so there is nothing to win but not to lose either. The targets are for the documented way.

`chat` and `turns` are `ChatEnv` on both sides, with one template and tokenizer. Prompts are of one length, for
TorchRL's tokens take no others, and answers are made outside the clock. What is done, in each mode:

- A reset makes messages, and renders them ("text"), and tokenises that ("tokens"), on both sides.
- TorchRL's policy joins prompt and answer, and its step takes what that made as the next prompt: messages, strings, or
  one tensor, without messages in "text" and "tokens". "joined" has the joining on the clock as well.
- Our step is given the answer and appends it, to the messages in each mode; strings are joined when they are read.

No conversation ends. The targets are for the steps that are not "joined", in which TorchRL does less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from peers import torchrl_python

HERE = Path(__file__).resolve().parent
Ask: TypeAlias = tuple[str, str, dict[str, Any]]
"""Side ("ours" or "peer"), name of the work, its options."""


@dataclass(frozen=True)
class Line:
    """One line of the table. `value` is what the target is about: a ratio, or a figure of its own."""

    part: str
    what: str
    batch: int | None = None
    ours: float | None = None
    peer: float | None = None
    value: float | None = None
    low: float | None = None  # the worst and the best round of a ratio
    high: float | None = None
    target: str = ""
    met: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    long_rounds: int  # of works that take seconds
    seconds: float  # on the clock, for one side in one round
    text_batches: tuple[int, ...]
    reads: tuple[bool, ...]  # whether strings are read
    other_batches: tuple[int, ...]  # of the layouts that are not compared
    chat_batches: tuple[int, ...]


BATCHES = (1, 8, 64, 256, 1024)
CHAT_MODES = ("history", "text", "tokens")
CHAT_TURNS = (2, 8, 32, 128)
FULL = Plan(5, 3, 0.02, BATCHES, (False, True), BATCHES, BATCHES[:-1])
QUICK = Plan(2, 1, 0.005, (256,), (False,), (256,), (256,))


class Sides:
    """Two processes, asked in turn."""

    def __init__(self, pythons: Mapping[str, Path | str], threads: int, clock: str, plan: Plan) -> None:
        self.plan = plan
        self._logs = {side: tempfile.TemporaryFile("w+") for side in pythons}  # noqa: SIM115 (closed with the process)
        number = str(threads)
        settings = {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number, "TOKENIZERS_PARALLELISM": "false"}
        self._processes = {
            side: subprocess.Popen(
                [str(python), str(HERE / "sides" / f"{side}.py"), "--threads", number, "--clock", clock],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._logs[side],
                text=True,
                env={**os.environ, **settings},
            )
            for side, python in pythons.items()
        }
        self.versions = {side: self._hear(side) for side in pythons}

    def ask(self, asks: Mapping[str, Ask], rounds: int | None = None) -> dict[str, list[dict[str, Any]]]:
        """Measure each of `asks` once a round, in turn; the answers of each, round by round."""
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in asks}
        for _ in range(rounds or self.plan.rounds):
            for name, (side, work, options) in asks.items():
                if answers[name] and "error" in answers[name][-1]:
                    continue
                request = {"work": work, "options": options, "seconds": self.plan.seconds}
                pipe = self._processes[side].stdin
                assert pipe is not None
                print(json.dumps(request), file=pipe, flush=True)
                answers[name].append(self._hear(side))
        return answers

    def close(self) -> None:
        """End both processes."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)

    def _hear(self, side: str) -> dict[str, Any]:
        pipe = self._processes[side].stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            self._logs[side].seek(0)
            raise SystemExit(f"the side {side!r} ended:\n{self._logs[side].read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# ---------------------------------------------------------------- the parts


def tokens(sides: Sides) -> Iterator[Line]:
    """Reset and step of padded tokens against the peer's, and of the other layouts alone."""
    targets = {1: 1.0, 8: 1.0, 64: 10.0, 256: 20.0, 1024: 40.0}
    for batch in BATCHES:
        for way in ("primer", "given"):
            for call in ("reset", "step"):
                options = {"call": call, "way": way, "batch": batch}
                target = targets[batch] if way == "primer" else 1.0
                yield versus(sides, "tokens", f"{call}, {way}, padded", ("tokens", options), batch, target)
    for batch in sides.plan.other_batches:
        for layout in ("dense", "jagged", "lazy"):
            for call in ("reset", "step"):
                options = {"call": call, "way": "given", "batch": batch, "layout": layout}
                yield alone(sides, "tokens", f"{call}, given, {layout}", ("tokens", options), batch)


def text(sides: Sides) -> Iterator[Line]:
    """Reset and step of strings, read and not read, on both sides alike."""
    for batch in sides.plan.text_batches:
        for way in ("primer", "given"):
            for call in ("reset", "step"):
                for read in sides.plan.reads:
                    options = {"call": call, "way": way, "batch": batch, "read": read}
                    target = 15.0 if batch == 256 and way == "primer" else None
                    what = f"{call}, {way}, {'read' if read else 'not read'}"
                    yield versus(sides, "text", what, ("text", options), batch, target)


def growth(sides: Sides) -> Iterator[Line]:
    """Cost of a step in a long rollout against that in one of 8 steps, in time and in memory held."""
    batch, long = 32, 256
    for layout in ("text", "dense", "padded", "jagged"):
        for side in ("ours", "peer") if layout in ("text", "padded") else ("ours",):
            asks: dict[str, Ask] = {
                str(steps): (side, "rollout", {"layout": layout, "batch": batch, "steps": steps}) for steps in (8, long)
            }
            answers = sides.ask(asks, sides.plan.long_rounds)
            name = f"{layout} rollout, {'ours' if side == 'ours' else 'TorchRL'}"
            broken = failure(answers)
            if broken:
                yield Line("growth", name, batch, note=broken)
                continue
            yield from _growth(name, side, batch, long, answers)


def _growth(name: str, side: str, batch: int, long: int, answers: dict[str, list[dict[str, Any]]]) -> Iterator[Line]:
    short_ms, long_ms = middle(answers["8"]) / 8, middle(answers[str(long)]) / long
    judged = side == "ours"
    ours, peer = (long_ms, None) if judged else (None, long_ms)
    note = f"{short_ms:.3f} ms a step of 8, {long_ms:.3f} of {long}"
    yield judge(Line("growth", f"{name}, time", batch, ours, peer, value=long_ms / short_ms, note=note), 1.5, judged)
    for kind, words in (("data", "tensors and strings"), ("all", "with all objects")):
        short, much = (answers[str(n)][-1]["facts"][kind] / n / batch for n in (8, long))
        note = f"{short:,.0f} bytes a row and step of 8, {much:,.0f} of {long}"
        yield judge(Line("growth", f"{name}, held, {words}", batch, value=much / short, note=note), 1.5, judged)


def hashing(sides: Sides) -> Iterator[Line]:
    """A hashing environment with text, into a forest; and the hash of every prefix."""
    batch, steps = 64, 256
    asks: dict[str, Ask] = {
        "ours": ("ours", "hashing", {"batch": batch, "steps": steps}),
        "rollout": ("peer", "hashing", {"way": "rollout", "batch": batch, "steps": steps}),
        "loop": ("peer", "hashing", {"way": "loop", "batch": batch, "steps": steps}),
    }
    answers = sides.ask(asks, sides.plan.long_rounds)
    for way, words in (("rollout", "rollout, then its rows"), ("loop", "each step, as it is taken")):
        pair = {"ours": answers["ours"], "peer": answers[way]}
        what = f"{batch} rows x {steps} steps into a forest: {words}"
        yield compared("hashing", what, batch, pair, 50.0 if way == "rollout" else None)
    options = {"count": 1000, "length": 1000}
    line = alone(sides, "hashing", "every prefix of 1000 rows of 1000 tokens", ("prefixes", options), 1000)
    met = None if line.ours is None else line.ours < 1000
    yield replace(line, target="< 1000 ms", met=met)


def loader(sides: Sides) -> Iterator[Line]:
    """Prompts through the primer, 8 times each."""
    prompts, repeats = 32, 8
    for kind in ("strings", "as_nested_tensor", "as_padded_tensor"):
        options = {"kind": kind, "prompts": prompts, "repeats": repeats}
        line = versus(sides, "loader", f"{kind}, {repeats} times each", ("loader", options), prompts * repeats, 20.0)
        rates = [f"{name} {1e3 * prompts * repeats / ms:,.0f}" for name, ms in _both(line) if ms]
        yield replace(line, note=line.note or f"rows a second: {', '.join(rates)}")


def chat(sides: Sides) -> Iterator[Line]:
    """Reset, step, step and reset of conversations, in each mode; and steps with what the peer's policy does."""
    for batch in sides.plan.chat_batches:
        rounds = sides.plan.long_rounds if batch == 256 else None
        for mode in CHAT_MODES:
            for call in ("reset", "step", "step_and_maybe_reset"):
                options = {"call": call, "mode": mode, "batch": batch}
                target = 100.0 if batch == 256 and call != "reset" else None
                asks: dict[str, Ask] = {side: (side, "chat", options) for side in ("ours", "peer")}
                answers = sides.ask(asks, rounds)
                yield compared("chat", f"{call}, {mode}", batch, answers, target)
                if call != "reset":
                    joined = sides.ask({"peer": ("peer", "chat", {**options, "joined": True})}, rounds)
                    pair = {"ours": answers["ours"], **joined}
                    yield compared("chat", f"{call}, {mode}, joined", batch, pair, None)


def turns(sides: Sides) -> Iterator[Line]:
    """Mean cost of a turn in conversations of more and more turns, against that in one of 2; with a task as well."""
    for mode in CHAT_MODES:
        options = {"mode": mode, "batch": 32}
        peers = CHAT_TURNS[:-1] if mode == "history" else CHAT_TURNS  # 128 of those turns take minutes
        yield _turns(sides, "ours", CHAT_TURNS, mode, ("chat", {**options, "call": "step"}))
        yield _turns(sides, "ours", CHAT_TURNS, f"{mode}, with a task", ("chat_task", options))
        yield _turns(sides, "peer", peers, mode, ("chat", {**options, "call": "step"}))


def _turns(sides: Sides, side: str, counts: tuple[int, ...], what: str, work: tuple[str, dict[str, Any]]) -> Line:
    asks: dict[str, Ask] = {str(count): (side, work[0], {**work[1], "count": count}) for count in counts}
    answers = sides.ask(asks, sides.plan.long_rounds)
    line = Line("turns", f"step, {what}, {'ours' if side == 'ours' else 'TorchRL'}", 32, note=failure(answers))
    if line.note:
        return line
    means = {count: middle(found) for count, found in answers.items()}
    first, *_, last = means.values()
    note = ", ".join(f"{ms:.3f} ms in {count} turns" for count, ms in means.items())
    ours, peer = (last, None) if side == "ours" else (None, last)
    return judge(replace(line, ours=ours, peer=peer, value=last / first, note=note), 1.5, side == "ours")


def _both(line: Line) -> list[tuple[str, float | None]]:
    return [("ours", line.ours), ("TorchRL", line.peer)]


PARTS = {
    "tokens": tokens,
    "text": text,
    "growth": growth,
    "hashing": hashing,
    "loader": loader,
    "chat": chat,
    "turns": turns,
}

# ---------------------------------------------------------------- comparing


def versus(
    sides: Sides, part: str, what: str, work: tuple[str, dict[str, Any]], batch: int, target: float | None
) -> Line:
    """Measure one work on both sides."""
    answers = sides.ask({"ours": ("ours", *work), "peer": ("peer", *work)}, _rounds(sides, batch))
    return compared(part, what, batch, answers, target)


def alone(sides: Sides, part: str, what: str, work: tuple[str, dict[str, Any]], batch: int) -> Line:
    """Measure one work on this side."""
    answers = sides.ask({"ours": ("ours", *work)}, _rounds(sides, batch))
    broken = failure(answers)
    return Line(part, what, batch, note=broken) if broken else Line(part, what, batch, middle(answers["ours"]))


def _rounds(sides: Sides, batch: int) -> int:
    return min(sides.plan.rounds, 3) if batch > 256 else sides.plan.rounds


def compared(
    part: str, what: str, batch: int, answers: Mapping[str, list[dict[str, Any]]], target: float | None
) -> Line:
    """Compare the answers of "ours" and "peer"."""
    ms = {side: middle(found) for side, found in answers.items() if "error" not in found[-1]}
    line = Line(part, what, batch, ms.get("ours"), ms.get("peer"), note=failure(answers))
    if len(ms) < 2:
        return line if target is None else replace(line, target=f">= {target:g}x", met=False)
    ratios = [theirs["ms"] / own["ms"] for own, theirs in zip(answers["ours"], answers["peer"], strict=True)]
    value = ms["peer"] / ms["ours"]
    line = replace(line, value=value, low=min(ratios), high=max(ratios))
    return line if target is None else replace(line, target=f">= {target:g}x", met=value >= target)


def judge(line: Line, most: float, judged: bool) -> Line:
    """Say whether a value is small enough."""
    assert line.value is not None
    return replace(line, target=f"<= {most:g}x", met=line.value <= most) if judged else line


def middle(answers: list[dict[str, Any]]) -> float:
    """Return the median over rounds, in milliseconds."""
    return statistics.median([float(answer["ms"]) for answer in answers])


def failure(answers: Mapping[str, list[dict[str, Any]]]) -> str:
    """Say which of the answers are errors."""
    return "; ".join(f"{name}: {found[-1]['error'][:120]}" for name, found in answers.items() if "error" in found[-1])


# ---------------------------------------------------------------- the table

HEADER = f"{'':<8} {'':<52} {'B':>5} {'ours ms':>10} {'TorchRL':>10} {'ratio':>8} {'rounds':>13}  target"


def shown(line: Line) -> str:
    """Write a line of the table."""
    spread = "" if line.low is None or line.high is None else f"{line.low:.3g}-{line.high:.3g}"
    value = "" if line.value is None else f"{line.value:.3g}x"
    met = {None: "", True: "met", False: "MISSED"}[line.met]
    numbers = f"{_ms(line.ours):>10} {_ms(line.peer):>10} {value:>8} {spread:>13}"
    batch = "" if line.batch is None else line.batch
    return f"{line.part:<8} {line.what:<52} {batch:>5} {numbers}  {line.target} {met} {line.note}".rstrip()


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    """Run what the command line asks for, and print a table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: of the process, where others run"
    )
    parser.add_argument("--peer", type=Path, help="a Python that has the peer")
    parser.add_argument("--json", type=Path, help="write the lines there too")
    arguments = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()
    pythons: dict[str, Path | str] = {"ours": sys.executable, "peer": torchrl_python(arguments.peer)}
    plan = QUICK if arguments.quick else FULL
    sides = Sides(pythons, arguments.threads, arguments.clock, plan)
    print(f"{os.cpu_count()} cores, load {load[0]:.2f} {load[1]:.2f} {load[2]:.2f}", end=", ")
    print(f"{arguments.threads} thread(s) a side, {arguments.clock} time")
    for side, versions in sides.versions.items():
        print(f"{side}: " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    print(f"\n{HEADER}", flush=True)
    lines: list[Line] = []
    for part in arguments.only:
        started = time.monotonic()
        for line in PARTS[part](sides):
            print(shown(line), flush=True)
            lines.append(line)
        print(f"{part} took {time.monotonic() - started:.0f} s\n", flush=True)
    sides.close()
    missed = [f"{line.part}: {line.what}, B={line.batch}" for line in lines if line.met is False]
    judged = sum(line.met is not None for line in lines)
    after, spent = os.getloadavg()[0], time.monotonic() - began
    print(f"{judged - len(missed)} of {judged} targets met, {spent:.0f} s, load {after:.2f} at the end")
    print("\n".join(f"missed: {name}" for name in missed))
    if arguments.json is not None:
        facts = {
            "load": load,
            "cores": os.cpu_count(),
            "threads": arguments.threads,
            "clock": arguments.clock,
            "versions": sides.versions,
        }
        arguments.json.write_text(json.dumps({**facts, "lines": [asdict(line) for line in lines]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
