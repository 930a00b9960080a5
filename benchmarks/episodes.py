"""How long many episodes take: 64 rollouts with one tool call of 0.1 s each, an awaited one and one that blocks.

    python benchmarks/episodes.py [--rollouts 64] [--seconds 0.1] [--runs 5]

A scripted policy writes the call and then the answer, so that what is measured is the machinery: templates, calls,
threads and scores. The floor is the time of one tool; one after another they would take as many of them as there are
rollouts. Then the score of the first rollout computes for a second in Python, in a thread and in a process: what counts
is when the other 63 have ended, tools, answers and scores included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from ramet.chat import ChatTemplate
from ramet.concurrency import EventLoop
from ramet.episodes import Played, Rules, Start, into_forest, play_episodes
from ramet.forest import Forest
from ramet.models.tiny import tiny_tokenizer
from ramet.policies.scripted import ScriptedPolicy
from ramet.tasks import Judge, Task, in_processes
from ramet.types import Request, Sample, Sampling

TEMPLATE = (
    "{% for tool in tools or [] %}+{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<eos>\n{% endfor %}assistant:"
)
EOS = 2


def tools(seconds: float) -> dict[str, Callable[..., Any]]:
    """Return a tool that is awaited and one that blocks its thread, both called `look`."""

    async def awaited() -> str:
        """Look around."""
        await asyncio.sleep(seconds)
        return "seen"

    def blocking() -> str:
        """Look around."""
        time.sleep(seconds)
        return "seen"

    found: dict[str, Callable[..., Any]] = {"awaited": awaited, "blocking": blocking}
    for function in found.values():
        function.__name__ = "look"
    return found


def computing(seconds: float) -> float:
    """Compute in Python for so long, and give a full score."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(number * number for number in range(1000))
    return 1.0


def scorer(name: str) -> Callable[[Sample], float]:
    """Return a score: of its own, or one that computes for a second on the first rollout."""

    def plain(sample: Sample) -> float:
        return float(sample.completion == "done" and sample.messages[-2]["content"] == "seen")

    def computes(sample: Sample) -> float:
        return computing(1.0) if sample.group == 0 else plain(sample)

    return plain if name == "plain" else computes


def measure(tool: Callable[..., Any], rollouts: int, loop: EventLoop, judge: Judge) -> float:
    """Return after how many seconds all of `rollouts` episodes with one call of `tool` have ended, but the first."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    call = tokenizer('<tool_call>{"name": "look", "arguments": {}}</tool_call>', add_special_tokens=False)["input_ids"]
    answer = tokenizer("done", add_special_tokens=False)["input_ids"]
    ends: list[float] = []

    def write(request: Request) -> list[int]:
        return [*(call if request.draw.turn == 0 else answer), EOS]

    def ended(played: Played) -> None:
        if played.start.group:
            ends.append(time.perf_counter())

    row = {"prompt": [{"role": "user", "content": "What is there?"}]}
    task = Task("look", [row], [], lambda sample: 1.0, tools=[tool], max_turns=3)
    starts = [Start(row, group, prompt_index=0) for group in range(rollouts)]
    began = time.perf_counter()
    played = play_episodes(
        task,
        ScriptedPolicy(write, eos_token_id=EOS),
        starts,
        template=ChatTemplate(tokenizer),
        rules=Rules(Sampling(100), 0),
        judge=judge,
        loop=loop,
        ended=ended,
    )
    into_forest(played, Forest())
    scores = [one.outcome.score for one in played if one.outcome is not None]
    if scores != [1.0] * rollouts:
        raise RuntimeError(f"expected {rollouts} rollouts with a score of 1: found {scores}")
    return max(ends) - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    judges = {
        "": Judge(scorer("plain")),
        ", beside a score that computes for 1 s": Judge(scorer("computes"), seconds=60),
        ", beside the same in a process": Judge(in_processes(scorer("computes")), seconds=60),
    }
    with EventLoop() as loop:
        for name, tool in tools(options.seconds).items():
            for beside, judge in judges.items():
                measure(tool, options.rollouts, loop, judge)  # what is made once is made
                taken = [measure(tool, options.rollouts, loop, judge) for _ in range(options.runs)]
                print(
                    f"{options.rollouts} rollouts, a tool of {options.seconds:g} s each, {name}{beside}: median "
                    f"{statistics.median(taken):.3f} s, {min(taken):.3f} to {max(taken):.3f} s"
                )
    for judge in judges.values():
        judge.close()


if __name__ == "__main__":
    main()
