"""Sums with a calculator: what a call is, what it is answered, and which number counts."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from ramet.checking import StandIn, check_task
from ramet.errors import ConfigError
from ramet.tasks import Judge, Task
from ramet.tasks.calculator import calculator
from ramet.tools.toolbox import Toolbox
from ramet.types import Sample, StopReason

SMALL: dict[str, Any] = {"train_size": 20, "held_out_size": 5}


def score(task: Task, row: Any, completion: str) -> float | None:
    sample = Sample(row["prompt"], completion, (1,), (2,), row, StopReason.EOS, group=0, member=0)
    (outcome,) = Judge(task.score)([sample])
    return outcome.score


def by_hand(expression: str) -> int:
    """Work out products first, and then what is left, from left to right."""
    total, sign = 0, 1
    for part in re.findall(r"[+-]|[\d*]+", expression):
        if part in "+-":
            sign = 1 if part == "+" else -1
            continue
        product = 1
        for number in part.split("*"):
            product *= int(number)
        total += sign * product
    return total


def test_the_answers_are_right_and_earn_the_full_reward() -> None:
    task = calculator(steps=[1, 2, 4], **SMALL)
    assert {row["difficulty"] for row in task.train} == {1, 2, 4}
    for row in [*task.train, *task.held_out]:
        assert row["prompt"] == row["expression"] + "="
        assert len(re.findall(r"\d{3}", row["expression"])) == row["difficulty"] + 1
        assert row["answer"] == str(by_hand(row["expression"]))
        assert score(task, row, f" {row['answer']}\n") == 1.0
        assert score(task, row, row["answer"] + "0") == 0.0
        assert score(task, row, f'[calculator(expression="{row["expression"]}")]') == 0.0


def test_the_reference_calls_once_and_copies() -> None:
    for form in ("text", "chat"):
        task = calculator(form=form, **SMALL)
        assert task.player is not None
        toolbox = Toolbox(task.tools)
        row = task.train[0]
        with StandIn(task) as stand_in:
            shown = asyncio.run(stand_in.alone(row, task.player))
        assert shown.written[1:] == [row["answer"]]
        assert row["expression"] in shown.written[0]
        assert len(shown.messages) == 4
        assert [message["role"] for message in shown.messages] == ["user", "assistant", "tool", "assistant"]
        assert [one["function"]["name"] for one in toolbox.schemas] == ["calculator"]
        toolbox.close()


def test_in_a_chat_the_last_number_counts() -> None:
    task = calculator(form="chat", **SMALL)
    row = {**task.train[0], "answer": "-1240"}
    assert score(task, row, "It is 7 less than zero: -1,240.") == 1.0
    assert score(task, row, "-1240.0") == 1.0
    assert score(task, row, "-1240, or 3") == 0.0
    assert score(task, row, "1240") == 0.0
    assert score(task, row, "") == 0.0


def test_problems_that_are_held_out_stay() -> None:
    one, other = calculator(seed=0, **SMALL), calculator(seed=1, **SMALL)
    assert one.held_out == other.held_out
    assert one.train != other.train


@pytest.mark.parametrize("form", ["text", "chat"])
def test_the_task_is_proved(form: str) -> None:
    report = check_task(calculator(form=form, **SMALL), build=lambda seed: calculator(seed=seed, form=form, **SMALL))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": 0}, "digits"),
        ({"digits": 10}, "at most 9"),
        ({"steps": 0}, "steps"),
        ({"steps": 9}, "at most 8"),
        ({"operations": "/"}, "operations"),
        ({"operations": ""}, "operations"),
        ({"operations": ["+"]}, "operations"),
        ({"turns": 1}, "turns: expected a whole number from 2 on"),
        ({"form": "speech"}, "form"),
        ({"digits": 1, "steps": 1, "operations": "+", "train_size": 500}, "distinct problems"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calculator(**options)
