"""Problems of arithmetic: the answers are right, the split is clean and does not move."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.errors import ConfigError
from ramet.tasks import Judge, Task
from ramet.tasks.arithmetic import arithmetic
from ramet.types import Sample, StopReason


def score(task: Task, row: Any, completion: str) -> float | None:
    sample = Sample(row["prompt"], completion, (1,), (2,), row, StopReason.EOS, group=0, member=0)
    (outcome,) = Judge(task.score)([sample])
    return outcome.score


def prompts(rows: Any) -> list[str]:
    return [row["prompt"] for row in rows]


OPTIONS = st.fixed_dictionaries(
    {
        "operations": st.sampled_from(["+", "-", "*", "+-", ["-", "*"]]),
        "digits": st.sampled_from([1, 2, [1, 2]]),
        "same_digits": st.booleans(),
        "reverse": st.booleans(),
        "modulus": st.sampled_from([0, 2, 97]),
        "held_out_size": st.sampled_from([1, 20]),
        "seed": st.integers(0, 3),
    }
)


@settings(deadline=None, max_examples=15)
@given(OPTIONS)
def test_every_answer_is_right_and_earns_the_full_reward(options: dict[str, Any]) -> None:
    task = arithmetic(**options)
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    assert task.answer is not None
    for row in [*task.train[:50], *task.held_out]:
        a, sign, b = re.fullmatch(r"(\d+)([-+*])(\d+)=", row["prompt"]).groups()  # type: ignore[union-attr]
        result = signs[sign](int(a), int(b))
        result = result % options["modulus"] if options["modulus"] else result
        written = str(result)[::-1] if options["reverse"] else str(result)
        assert task.answer(row) == written
        assert score(task, row, f" {written}\n") == 1.0
        assert score(task, row, written + "0") == 0.0
        assert len(a) == len(b) or not options["same_digits"]


@settings(deadline=None, max_examples=10)
@given(OPTIONS)
def test_every_problem_is_on_one_side_once(options: dict[str, Any]) -> None:
    task = arithmetic(**options)
    both = prompts(task.train) + prompts(task.held_out)
    assert len(set(both)) == len(both)
    assert len(task.held_out) == options["held_out_size"]


def test_the_problems_are_all_there_are() -> None:
    sums = arithmetic(operations="+", digits=1, held_out_size=7)
    assert sorted(prompts([*sums.train, *sums.held_out])) == sorted(f"{a}+{b}=" for a in range(10) for b in range(10))
    differences = arithmetic(operations="-", digits=1, held_out_size=7)
    expected = sorted(f"{a}-{b}=" for a in range(10) for b in range(a + 1))
    assert sorted(prompts([*differences.train, *differences.held_out])) == expected
    both = arithmetic(digits=[1, 2], same_digits=True)
    assert len(both.train) + len(both.held_out) == 100 + 90 * 90


def test_what_is_held_out_depends_on_neither_seed_nor_sizes() -> None:
    one = arithmetic(seed=0, held_out_size=40)
    assert arithmetic(seed=1, held_out_size=40).held_out == one.held_out
    assert arithmetic(seed=0, held_out_size=40, train_size=10).held_out == one.held_out
    assert arithmetic(held_out_size=90).held_out[:40] == one.held_out
    assert prompts(one.held_out[:3]) == ["20+78=", "53+28=", "26+24="], "the held-out problems of earlier runs moved"


def test_the_seed_orders_the_training_problems() -> None:
    one, other = arithmetic(seed=0).train, arithmetic(seed=1).train
    assert one != other
    assert sorted(prompts(one)) == sorted(prompts(other))
    assert arithmetic(seed=0).train == one
    assert arithmetic(seed=0, train_size=100).train == one[:100]


def test_chance_is_a_uniform_guess_or_the_best_constant_whichever_is_more() -> None:
    # Modulo 2 of 100 products of digits: 75 are even, so a constant "0" beats a guess between two answers.
    task = arithmetic(operations="*", digits=1, modulus=2, held_out_size=99)
    zeros = sum(row["answer"] == "0" for row in task.held_out)
    assert task.chance == zeros / 99
    assert 74 <= zeros <= 75
    # One held-out problem: its own answer is a constant that is always right.
    assert arithmetic(digits=1, held_out_size=1).chance == 1.0
    assert arithmetic(digits=1, held_out_size=0).chance is None
    assert arithmetic().chance == pytest.approx(0.016, abs=0.008)  # 181 sums from 20 to 198


def test_a_space_too_large_to_list_is_drawn_from_in_a_fixed_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramet.tasks.problems.POOL", 500)
    task = arithmetic(digits=6, held_out_size=10)
    assert len(task.train) + len(task.held_out) == 500
    assert arithmetic(digits=6, held_out_size=10, seed=5, train_size=3).held_out == task.held_out
    assert all(re.fullmatch(r"[1-9]\d{5}\+[1-9]\d{5}=", prompt) for prompt in prompts(task.held_out))
    mixed = arithmetic(operations="+-", digits=[1, 3], held_out_size=10)
    kinds = {re.sub(r"\d+", lambda found: str(len(found[0])), prompt) for prompt in prompts(mixed.train)}
    assert kinds >= {"3+3=", "3-3="}
    assert kinds <= {"3+3=", "3-3=", "1+3=", "3+1=", "3-1=", "1+1=", "1-1="}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": "/"}, r"operations.*\+ - \*.*'/'"),
        ({"operations": ""}, "operations"),
        ({"operations": "++"}, "at most once"),
        ({"operations": 3}, "operations"),
        ({"digits": 0}, "digits: expected a whole number from 1 on, found 0"),
        ({"digits": True}, "digits"),
        ({"digits": "2"}, "digits"),
        ({"digits": []}, "digits"),
        ({"digits": 10}, "digits: expected at most 9, found 10"),
        ({"digits": [2, 2]}, "at most once"),
        ({"modulus": 1}, "modulus"),
        ({"modulus": -3}, "modulus"),
        ({"reverse": 1}, "reverse: expected true or false"),
        ({"same_digits": "yes"}, "same_digits"),
        ({"held_out_size": -1}, "held_out_size"),
        ({"train_size": 0}, "train_size"),
        ({"digits": 1, "held_out_size": 100}, "more than the 100 there are"),
        ({"digits": 1, "held_out_size": 90, "train_size": 11}, "90 held-out and 11 training"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arithmetic(**options)
