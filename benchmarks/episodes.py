"""How long many episodes take: 64 rollouts with one tool call of 0.1 s each, an awaited one and one that blocks.

    python benchmarks/episodes.py [--rollouts 64] [--seconds 0.1] [--runs 5]

A scripted policy writes the call and then the answer, so that what is measured is the machinery: templates, calls,
threads, scores and the forest. The floor is the time of one tool; one after another they would take as many of them as
there are rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from ramet.chat import ChatTemplate
from ramet.episodes import EventLoop, Start, collect_episodes
from ramet.models.tiny import tiny_tokenizer
from ramet.policies.scripted import ScriptedPolicy
from ramet.tasks.judge import Judge
from ramet.tasks.task import Task
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


def measure(tool: Callable[..., Any], rollouts: int, loop: EventLoop) -> float:
    """Return how many seconds `rollouts` episodes with one call of `tool` each take."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    call = tokenizer('<tool_call>{"name": "look", "arguments": {}}</tool_call>', add_special_tokens=False)["input_ids"]
    answer = tokenizer("done", add_special_tokens=False)["input_ids"]

    def write(request: Request) -> list[int]:
        return [*(call if request.draw.turn == 0 else answer), EOS]

    def score(sample: Sample) -> float:
        return float(sample.completion == "done" and sample.messages[-2]["content"] == "seen")

    row = {"prompt": [{"role": "user", "content": "What is there?"}]}
    task = Task("look", [row], [], score, tools=[tool], max_turns=3)
    starts = [Start(row, group, prompt_index=0) for group in range(rollouts)]
    began = time.perf_counter()
    forest = collect_episodes(
        task,
        ScriptedPolicy(write, eos_token_id=EOS),
        starts,
        sampling=Sampling(100),
        seed=0,
        template=ChatTemplate(tokenizer),
        judge=Judge(score),
        loop=loop,
    )
    seconds = time.perf_counter() - began
    scores = [rollout.outcome.score for rollout in forest.rollouts if rollout.outcome is not None]
    if scores != [1.0] * rollouts:
        raise RuntimeError(f"expected {rollouts} rollouts with a score of 1: found {scores}")
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with EventLoop() as loop:
        for name, tool in tools(options.seconds).items():
            measure(tool, options.rollouts, loop)  # what is made once is made
            taken = [measure(tool, options.rollouts, loop) for _ in range(options.runs)]
            print(
                f"{options.rollouts} rollouts, a tool of {options.seconds:g} s each, {name}: median "
                f"{statistics.median(taken):.3f} s, {min(taken):.3f} to {max(taken):.3f} s"
            )


if __name__ == "__main__":
    main()
