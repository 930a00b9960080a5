"""The numbers game: every problem has a solution, and only an expression over its numbers earns anything."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.checking import check_task
from ramet.errors import ConfigError
from ramet.tasks import Judge, Task
from ramet.tasks.countdown import countdown
from ramet.tasks.expressions import work_out
from ramet.types import Sample, StopReason

SMALL: dict[str, Any] = {"train_size": 40, "held_out_size": 10}


def score(task: Task, row: Any, completion: str) -> float | None:
    sample = Sample(row["prompt"], completion, (1,), (2,), row, StopReason.EOS, group=0, member=0)
    (outcome,) = Judge(task.score)([sample])
    return outcome.score


@settings(deadline=None, max_examples=15)
@given(
    st.fixed_dictionaries(
        {
            "numbers": st.sampled_from([2, 3, 6, (3, 4), [2, 5]]),
            "largest": st.sampled_from([10, 99]),
            "largest_target": st.sampled_from([50, 999]),
            "use_all": st.booleans(),
            "form": st.sampled_from(["text", "chat"]),
            "seed": st.integers(0, 3),
        }
    )
)
def test_every_problem_has_its_solution(options: dict[str, Any]) -> None:
    task = countdown(train_size=10, held_out_size=5, **options)
    counts = options["numbers"]
    assert task.answer is not None
    for row in [*task.train, *task.held_out]:
        value, used = work_out(row["answer"])
        assert value == row["target"]
        assert 1 <= row["target"] <= options["largest_target"]
        assert Counter(used) <= Counter(row["numbers"])
        assert len(used) == len(row["numbers"]) or not options["use_all"]
        assert len(row["numbers"]) == row["difficulty"]
        assert row["difficulty"] in ([counts] if isinstance(counts, int) else counts)
        assert all(1 <= number <= options["largest"] for number in row["numbers"])
        assert score(task, row, task.answer(row)) == 1.0


@pytest.mark.parametrize(
    ("answer", "at_most_once", "exactly_once"),
    [
        ("25+50+7", 1.0, 0.0),  # 3 is left over
        ("(7-3)*25-50+32", 0.0, 0.0),  # 32 is not there
        ("3*25+7", 1.0, 0.0),
        ("7*(25-50/3)+3", 0.0, 0.0),
        ("25+50+7*3/3", 0.0, 0.0),  # 3 twice
        ("82", 0.0, 0.0),
        ("25+50+7=82", 0.0, 0.0),
        ("25+50+7 is it", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_each_number_may_be_used_once(answer: str, at_most_once: float, exactly_once: float) -> None:
    row = {"prompt": "3 7 25 50: 82=", "numbers": [3, 7, 25, 50], "target": 82}
    assert score(countdown(**SMALL), row, answer) == at_most_once
    assert score(countdown(**SMALL, use_all=True), row, answer) == exactly_once


def test_with_use_all_every_number_must_be_there_and_equal_ones_as_often_as_they_are() -> None:
    row = {"prompt": "", "numbers": [4, 4, 2], "target": 10}
    task = countdown(**SMALL, use_all=True)
    assert [score(task, row, text) for text in ("4+4+2", "2+4+4", "4*2+2", "4+4+4-2")] == [1.0, 1.0, 0.0, 0.0]


def test_a_fraction_on_the_way_is_exact() -> None:
    row = {"prompt": "", "numbers": [8, 3, 8, 3], "target": 24}
    assert score(countdown(**SMALL), row, "8/(3-8/3)") == 1.0


def test_a_chat_is_told_the_rules_and_answers_between_tags() -> None:
    task = countdown(**SMALL, form="chat", use_all=True)
    row = {**task.train[0], "numbers": [3, 7], "target": 21}
    (message,) = task.train[0]["prompt"]
    assert message["role"] == "user"
    assert "exactly once" in message["content"]
    assert all(re.search(rf"\b{number}\b", message["content"]) for number in task.train[0]["numbers"])
    assert score(task, row, "Let me see: <answer>3+7</answer> no, <answer> 3*7 </answer>.") == 1.0
    assert score(task, row, "<answer>3*7</answer> or <answer>3+7</answer>") == 0.0
    assert score(task, row, "3*7") == 0.0


def test_held_out_problems_stay_and_the_seed_chooses_the_others() -> None:
    one, other, again = countdown(seed=0, **SMALL), countdown(seed=1, **SMALL), countdown(seed=0, **SMALL)
    assert one.held_out == other.held_out == again.held_out
    assert one.train == again.train != other.train
    assert countdown(seed=0, train_size=5, held_out_size=4).held_out == one.held_out[:4]
    prompts = [row["prompt"] for row in (*one.train, *one.held_out)]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("form", ["text", "chat"])
def test_the_task_is_proved(form: str) -> None:
    report = check_task(countdown(**SMALL, form=form), build=lambda seed: countdown(seed=seed, form=form, **SMALL))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numbers": 1}, "numbers: expected a whole number from 2 on"),
        ({"numbers": 7}, "at most 6"),
        ({"numbers": []}, "numbers"),
        ({"numbers": "34"}, "numbers"),
        ({"largest": 0}, "largest"),
        ({"largest_target": 0}, "largest_target"),
        ({"largest_target": 1, "largest": 10**9}, "10000 draws made no target up to 1"),
        ({"use_all": 1}, "use_all: expected true or false"),
        ({"form": "prose"}, "text, chat"),
        ({"train_size": 0}, "train_size"),
        ({"held_out_size": -1}, "held_out_size"),
        ({"numbers": 2, "largest": 2, "train_size": 500}, "6 distinct problems .*200 are wanted"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        countdown(**options)
