"""What a template's memory learned from one conversation is right for every other."""

from __future__ import annotations

import importlib.util
from itertools import permutations
from pathlib import Path

import pytest

from ramet.chat import ChatTemplate
from ramet.checking.stand_in import byte_tokenizer
from ramet.episodes import Rules, Start, play_episodes
from ramet.policies.scripted import ScriptedPolicy
from ramet.tasks import Judge, Task
from ramet.types import Sampling

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ROW = {"prompt": [{"role": "user", "content": "1+2?"}]}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def source(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["diffusion_gemma", "diffusion_gemma_training", "qwen3"])
def test_rounds_in_another_order_are_another_history(name: str) -> None:
    """These write nothing in front of an answer to a call, but where another turn stood between them."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = source(name)
    task = Task(
        "sums", [ROW], [], lambda sample: 1.0, tools=[add], max_turns=5,
        reply=lambda episode: None if episode.text == "end" else "Sure?",
    )  # fmt: skip

    def pieces(template: ChatTemplate, turns: tuple[str, ...]) -> list[list[int]]:
        policy = ScriptedPolicy(
            lambda asked: [*tokenizer(turns[asked.draw.turn], add_special_tokens=False)["input_ids"], 257],
            eos_token_id=257,
        )
        [played] = play_episodes(
            task, policy, [Start(ROW, 0)], template=template, rules=Rules(Sampling(200), 0), judge=Judge(task.score)
        )
        return [piece.tokens for piece in played.pieces]

    shared = ChatTemplate(tokenizer)
    for order in permutations([CALL, "It is three.", "It is."]):
        turns = (*order, "end")
        assert pieces(shared, turns) == pieces(ChatTemplate(tokenizer), turns), order
