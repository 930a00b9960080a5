"""Expressions: parsed and worked out exactly, and nothing else is one."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.tasks.expressions import NoExpression, work_out


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, [7]),
        ("0+100", 100, [0, 100]),
        (" 25+50 + 7 ", 82, [25, 50, 7]),
        ("100-4*5", 80, [100, 4, 5]),
        ("(100-4)*5", 480, [100, 4, 5]),
        ("10/4", Fraction(5, 2), [10, 4]),
        ("10/4/5", Fraction(1, 2), [10, 4, 5]),
        ("1/3+1/3+1/3", 1, [1, 3, 1, 3, 1, 3]),
        ("10-4-3", 3, [10, 4, 3]),
        ("6×7−2", 40, [6, 7, 2]),
        ("84÷2", 42, [84, 2]),
    ],
)
def test_the_value_is_exact_and_the_numbers_are_those_that_stand_there(
    text: str, value: Any, numbers: list[int]
) -> None:
    assert work_out(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "2**9",
        "7//2",
        "7%2",
        "-7",
        "3*-7",
        "+7",
        "1.5",
        "1e3",
        "1_000",
        "0x10",
        "007",
        "00",
        "1+00",
        "(1",
        "1)",
        "1 2",
        "()",
        "(1,2)",
        "1/0",
        "1/(2-2)",
        "7=7",
        "abs(7)",
        "__import__('os')",
        "٣+١",
        "1+" * 200 + "1",
        "(" * 99 + "1" + ")" * 99 + "+",
        "1\n+2\n",
        "9" * 201,
    ],
)
def test_what_is_no_expression_is_told_apart(text: str) -> None:
    with pytest.raises(NoExpression):
        work_out(text)


TREES: Any = st.recursive(
    st.integers(0, 99), lambda parts: st.tuples(parts, st.sampled_from("+-*/"), parts), max_leaves=6
)


def exact(tree: Any) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    left, sign, right = exact(tree[0]), tree[1], exact(tree[2])
    return {"+": left + right, "-": left - right, "*": left * right}[sign] if sign != "/" else left / right


def written(tree: Any) -> str:
    return str(tree) if isinstance(tree, int) else f"({written(tree[0])}{tree[1]}{written(tree[2])})"


@settings(deadline=None, max_examples=100)
@given(TREES)
def test_it_agrees_with_fractions_worked_out_along_the_tree(tree: Any) -> None:
    try:
        expected = exact(tree)
    except ZeroDivisionError:
        with pytest.raises(NoExpression):
            work_out(written(tree))
        return
    assert work_out(written(tree))[0] == expected


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="0123456789+-*/() xe._", max_size=30))
def test_any_text_is_an_expression_or_none_and_raises_nothing_else(text: str) -> None:
    try:
        value, numbers = work_out(text)
    except NoExpression:
        return
    assert isinstance(value, Fraction)
    assert "".join(map(str, numbers)) == "".join(c for c in text if c.isdigit())
