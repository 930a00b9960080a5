"""Digits to be put in order: the answers are right, the problems are all there, the split does not move."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.errors import ConfigError
from ramet.tasks import Judge, Task
from ramet.tasks.sorting import sorting
from ramet.types import Sample, StopReason


def score(task: Task, row: Any, completion: str) -> float | None:
    sample = Sample(row["prompt"], completion, (1,), (2,), row, StopReason.EOS, group=0, member=0)
    (outcome,) = Judge(task.score)([sample])
    return outcome.score


def prompts(task: Task) -> list[str]:
    return [row["prompt"] for row in [*task.train, *task.held_out]]


@settings(deadline=None, max_examples=15)
@given(st.sampled_from([2, 3, [1, 3], [3, 2]]), st.booleans(), st.integers(0, 3))
def test_every_answer_is_right_and_earns_the_full_reward(lengths: Any, distinct: bool, seed: int) -> None:
    task = sorting(lengths=lengths, distinct=distinct, seed=seed, held_out_size=8)
    assert task.answer is not None
    for row in [*task.train[:60], *task.held_out]:
        digits = [int(digit) for digit in row["prompt"][1:-1]]
        answer = "".join(map(str, sorted(digits)))
        assert task.answer(row) == answer
        assert score(task, row, answer) == 1.0
        assert score(task, row, answer + "0") == 0.0
        if digits != sorted(digits):
            assert score(task, row, row["prompt"][1:-1]) == 0.0


def test_the_problems_are_all_there_are() -> None:
    distinct = [f">{''.join(p)}=" for n in (3, 4) for p in itertools.permutations("0123456789", n)]
    assert sorted(prompts(sorting(lengths=[3, 4], held_out_size=10))) == sorted(distinct)
    repeated = [f">{number:02d}=" for number in range(100)]
    assert sorted(prompts(sorting(lengths=2, distinct=False, held_out_size=10))) == repeated


def test_the_default_is_three_to_five_different_digits() -> None:
    task = sorting()
    assert len(task.train) == math.perm(10, 3) + math.perm(10, 4) + math.perm(10, 5) - 500
    assert len(task.held_out) == 500
    # 120 + 210 + 252 answers; 500 problems over them, so that some answer comes up a few times.
    assert task.chance == pytest.approx(0.01, abs=0.008)


def test_what_is_held_out_depends_on_neither_seed_nor_sizes() -> None:
    one, other = sorting(lengths=3, seed=0, held_out_size=9), sorting(lengths=3, seed=1, held_out_size=9, train_size=50)
    assert one.held_out == other.held_out
    assert one.train[:50] != other.train
    assert not {row["prompt"] for row in one.held_out} & {row["prompt"] for row in one.train}


def test_a_space_too_large_to_list_is_drawn_from_in_a_fixed_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramet.tasks.problems.POOL", 300)
    task = sorting(lengths=[3, 9], held_out_size=10)
    assert len(set(prompts(task))) == 300
    assert prompts(sorting(lengths=[3, 9], held_out_size=10)) == prompts(task)
    assert all(len(set(prompt[1:-1])) == len(prompt) - 2 for prompt in prompts(task))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": 0}, "lengths: expected a whole number from 1 on"),
        ({"lengths": "3"}, "lengths"),
        ({"lengths": [3, 3]}, "at most once"),
        ({"lengths": 11}, "at most 10, found 11"),
        ({"lengths": 19, "distinct": False}, "at most 18, found 19"),
        ({"distinct": 1}, "distinct: expected true or false"),
        ({"lengths": 1, "held_out_size": 10}, "10 held-out and 1 training problems are more than the 10"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sorting(**options)
