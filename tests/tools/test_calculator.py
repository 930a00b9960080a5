"""The calculator is exact, and refuses what it is not for."""

from __future__ import annotations

import operator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.tools import calculator

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("2**10 - 24", "1000"),
        ("0.1 + 0.2", "0.3"),
        ("1/3 + 1/3", "2/3"),
        ("-1/4", "-0.25"),
        ("-7 % 3", "2"),
        ("-7 // 2", "-4"),
        ("2**-2", "0.25"),
        ("(-1)**1001", "-1"),
        ("0**0", "1"),
        ("(-1)**10**9", "1"),
        ("3 × 4 ÷ 6 − 1", "1"),
        ("1e3 + 1_000", "2000"),
        ("1e-3", "0.001"),
        (" 5. ", "5"),
        ("[2 + 3] * 4", "20"),
        ("123456789123456789 * 987654321987654321", "121932631356500531347203169112635269"),
    ],
)
def test_answers_are_exact(expression: str, answer: str) -> None:
    assert calculator(expression) == answer


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "invalid syntax"),
        ("((1)", "never closed"),
        ("2^3", r"powers are written \*\*"),
        ("x", "found 'x'"),
        ("__import__('os')", "found"),
        ("1,2", "found ','"),
        ("1.5.2", "can not be read"),
        ("(1)(2)", "no arithmetic"),
        ("5 5", "can not be read"),
        ("1 << 2", "found '<'"),
        ("4**0.5", "whole number"),
        ("2**99999", "2048 bits"),
        ("9**9**9**9", "2048 bits"),
        ("1e99999", "can not be read"),
        ("1e2048", "2048 bits"),
        ("9" * 501, "500 characters"),
        ("(" * 400, "can not be read"),
    ],
)
def test_everything_else_is_a_value_error(expression: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        calculator(expression)


@pytest.mark.parametrize("expression", ["1/0", "1//0", "1%0", "0**-1"])
def test_division_by_zero_says_so(expression: str) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        calculator(expression)


def test_the_largest_numbers_can_be_written() -> None:
    assert calculator("2**-2047").startswith("0.000")
    assert calculator("3 * 2**2046") == str(3 * 2**2046)


NUMBERS = st.integers(-999, 999) | st.decimals(-99, 99, places=2).map(str)
TREES = st.recursive(
    NUMBERS.map(lambda number: (f"({number})", Fraction(number))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda parts: (f"({parts[0][0]} {parts[1]} {parts[2][0]})", OPERATIONS[parts[1]](parts[0][1], parts[2][1]))
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_any_expression_equals_the_fractions(tree: tuple[str, Fraction]) -> None:
    expression, value = tree
    if len(expression) <= 500:
        assert Fraction(calculator(expression)) == value
