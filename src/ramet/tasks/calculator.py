"""Sums too long to be done in one's head, and a calculator."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ramet.errors import ConfigError
from ramet.tasks.options import one_of, whole
from ramet.tasks.problems import drawn, exact_match, reference_answer, whole_numbers
from ramet.tasks.readings import as_number, last_number
from ramet.tasks.task import Task
from ramet.tools.calculator import calculator as calculate
from ramet.types import Episode, Sample


def calculator(
    *,
    seed: int = 0,
    digits: int = 3,
    steps: int | Sequence[int] = 2,
    operations: str = "+-*",
    turns: int = 3,
    form: str = "text",
    train_size: int = 2000,
    held_out_size: int = 200,
) -> Task:
    """Make a task of problems like "347*86+512=", which want a call of a calculator; the right number earns 1.0.

    A problem joins numbers of `digits` digits by `steps` of the `operations`; it can be worked out in a single call,
    whose result is then to be copied. `turns` are how many the model may take in all.

    The calculator is a tool, called in whatever form a model writes calls. In the form "text" the prompt is the problem
    alone, nothing says that there is a tool, and the answer is a turn of the number and no more: short enough for a
    tiny model of characters, which has learned from the reference how a call is written. In the form "chat" the
    template offers the tool, and the last number of the last turn is the answer.

    Held-out problems are always the same ones; `seed` chooses the training problems. Each row has "prompt", "answer",
    "expression" and "difficulty", the number of steps. Raises `ConfigError` for an option that makes no sense.

    >>> task = calculator(train_size=2, held_out_size=1)
    >>> task.held_out[0]["prompt"], task.answer(task.held_out[0])
    ('882-746*528=', '-393006')
    """
    counts = whole_numbers("steps", list(steps) if isinstance(steps, tuple) else steps, low=1, high=8)
    if whole("digits", digits, low=1) > 9:
        raise ConfigError(f"task.options.digits: expected at most 9, found {digits}")
    if not isinstance(operations, str) or not operations or not set(operations) <= set("+-*"):
        raise ConfigError(f"task.options.operations: expected some of + - *, found {operations!r}")
    whole("turns", turns, low=2)
    chat = one_of("form", form, ("text", "chat")) == "chat"

    def make(rng: random.Random) -> dict[str, Any]:
        return _problem(rng, digits, rng.choice(counts), operations, chat)

    train, held_out = drawn("calculator", make, seed=seed, train_size=train_size, held_out_size=held_out_size)
    answers = Counter(row["answer"] for row in held_out)
    return Task(
        "calculator",
        train,
        held_out,
        last_number_is_right if chat else exact_match,
        answer=reference_answer,
        chance=max(answers.values()) / len(held_out) if held_out else None,
        tools=(calculate,),
        max_turns=turns,
        player=play_chat if chat else play_text,
    )


def last_number_is_right(sample: Sample) -> float:
    """Return 1.0 if the last number of what the model wrote last is the row's "answer", else 0.0."""
    found = last_number(sample.completion)
    return float(found is not None and as_number(found) == int(sample.row["answer"]))


def play_text(episode: Episode) -> str:
    """Call the calculator, as a line of Python is written, and then copy what it answers."""
    if not episode.turns:
        return f'[calculator(expression="{episode.row["expression"]}")]'
    return str(episode.messages[-1]["content"]).strip()


def play_chat(episode: Episode) -> str:
    """Call the calculator, as Hermes and Qwen models write it, and then copy what it answers."""
    if not episode.turns:
        call = {"name": "calculator", "arguments": {"expression": episode.row["expression"]}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return str(episode.messages[-1]["content"]).strip()


def _problem(rng: random.Random, digits: int, steps: int, operations: str, chat: bool) -> dict[str, Any]:
    low, high = 10 ** (digits - 1), 10**digits - 1
    expression = str(rng.randint(low, high))
    for _ in range(steps):
        expression += rng.choice(operations) + str(rng.randint(low, high))
    prompt: Any = f"{expression}="
    if chat:
        prompt = [{"role": "user", "content": f"What is {expression}? Use the calculator, then give the number alone."}]
    return {"prompt": prompt, "answer": calculate(expression), "expression": expression, "difficulty": steps}
