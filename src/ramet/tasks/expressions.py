"""Arithmetic expressions: parsed and worked out exactly, never evaluated as code."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

LONGEST = 200
"""Characters of an expression that is still read: a longer one is none."""

_ALLOWED = re.compile(r"[0-9+\-*/() ]*")
_LEADING_ZERO = re.compile(r"(?<!\d)0\d")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "\N{EN DASH}": "-"})
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class NoExpression(ValueError):
    """A text that is no expression of whole numbers, `+ - * /` and brackets, or one that divides by zero."""


def work_out(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression, and the numbers that stand in it, in their order.

    There are whole numbers, `+ - * /`, brackets and spaces; `× ÷ −` are read as well, and a sign in front of a number
    is not. Raises `NoExpression` for everything else, for more than `LONGEST` characters and for a division by zero.

    >>> work_out("(100 - 4) / 5")
    (Fraction(96, 5), [100, 4, 5])
    """
    text = text.strip().translate(_SIGNS)
    if len(text) > LONGEST:
        raise NoExpression(f"expected at most {LONGEST} characters: found {len(text)}")
    if not _ALLOWED.fullmatch(text) or _LEADING_ZERO.search(text):
        raise NoExpression(f"expected whole numbers, + - * / and brackets: found {text!r}")
    try:
        tree = ast.parse(text, mode="eval")
        numbers: list[int] = []
        return _value(tree.body, numbers), numbers
    except NoExpression:
        raise
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError, ValueError) as error:
        raise NoExpression(f"{text!r} can not be worked out: {type(error).__name__}") from error


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left = _value(node.left, numbers)
        return _OPERATIONS[type(node.op)](left, _value(node.right, numbers))
    raise NoExpression("expected two numbers around each of + - * /")
