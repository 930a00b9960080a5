"""A calculator: arithmetic with exact numbers of bounded size, read as a tree and never evaluated as Python."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

CHARACTERS = 500
BITS = 2048

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
_ALLOWED = re.compile(r"[0-9.eE_+\-*/%()\s]*")
_NUMBER = re.compile(r"(?P<digits>[0-9_]*\.?[0-9_]*)(?:[eE](?P<exponent>[+-]?[0-9_]{1,4}))?")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression exactly, with + - * / // % ** and parentheses.

    Args:
        expression: the expression, such as "(12.5 - 3) * 4 / 7"

    Returns:
        a whole number, a decimal where it ends, else a fraction

    Raises `ValueError` for anything else and for numbers of more than 2048 bits, `ZeroDivisionError` for division by
    zero.

    >>> calculator("2**10 - 24"), calculator("0.1 + 0.2"), calculator("1/3 + 1/3")
    ('1000', '0.3', '2/3')
    """
    text = expression.translate(_SIGNS).strip()
    if len(text) > CHARACTERS:
        raise ValueError(f"an expression has at most {CHARACTERS} characters: found {len(text)}")
    if not _ALLOWED.fullmatch(text):
        wrong = next(character for character in text if not _ALLOWED.fullmatch(character))
        hint = ": powers are written **" if wrong == "^" else ""
        raise ValueError(f"an expression has numbers, + - * / // % ** and parentheses: found {wrong!r}{hint}")
    try:
        tree = ast.parse(text, mode="eval")
        return _written(_value(tree.body, text))
    except (SyntaxError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
        raise ValueError(f"the expression can not be read: {reason}") from None


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.BinOp):
        a, b = _value(node.left, text), _value(node.right, text)
        if b == 0 and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
            raise ZeroDivisionError("division by zero")
        return _bounded(_power(a, b) if isinstance(node.op, ast.Pow) else _operation(node.op)(a, b))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return _number(ast.get_source_segment(text, node) or "")
    raise ValueError(f"the expression can not be read: {ast.get_source_segment(text, node)!r} is no arithmetic")


def _operation(kind: ast.operator) -> Callable[[Fraction, Fraction], Fraction]:
    if type(kind) not in _OPERATIONS:
        raise ValueError(f"the operators are + - * / // % **: found {type(kind).__name__}")
    return _OPERATIONS[type(kind)]


def _number(text: str) -> Fraction:
    """Read a decimal number exactly, where a float would round it."""
    match = _NUMBER.fullmatch(text)
    exponent = int(match["exponent"] or 0) if match else 0
    if match is None or abs(exponent) > BITS:
        raise ValueError(f"a number of this form or size can not be read: {text[:40]!r}")
    return _bounded(Fraction(match["digits"].replace("_", "")) * Fraction(10) ** exponent)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError(f"an exponent must be a whole number: found {exponent}")
    if base == 0 and exponent < 0:
        raise ZeroDivisionError("division by zero")
    if abs(base) in (0, 1):  # whose powers are small, whatever the exponent
        return Fraction(1) if exponent == 0 else base if exponent % 2 else abs(base)
    if abs(exponent) * (_bits(base) - 1) > BITS:
        raise ValueError(f"the result would have more than {BITS} bits")
    return Fraction(base**exponent.numerator)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > BITS:
        raise ValueError(f"a number has more than {BITS} bits")
    return value


def _written(value: Fraction) -> str:
    """Write a whole number, a decimal where it ends, else a fraction."""
    twos, fives, rest = 0, 0, value.denominator
    while rest % 2 == 0:
        twos, rest = twos + 1, rest // 2
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    if value.denominator == 1 or rest != 1:
        return str(value)
    places = max(twos, fives)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
