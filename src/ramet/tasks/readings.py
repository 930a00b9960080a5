"""Where the answer stands in what a model wrote."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"(?<![\w.,])[-+−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?")
_BRACE = re.compile(r"\\boxed\{|[{}]")
_FULL = re.compile(r"[-+]?\d+(?:\.\d+)?(?:/\d+)?")
LONGEST = 100
"""Characters of a number that is still read: a longer one is none."""


def boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` whose braces close; None without one.

    >>> boxed(r"so \boxed{\frac{1}{2}} of it")
    '\\frac{1}{2}'
    """
    found = None
    last = -1
    open_braces: list[tuple[bool, int]] = []  # whether it is a box's, and where what it holds begins
    for mark in _BRACE.finditer(text):  # once, however many boxes are begun: a model may write nothing else
        if mark[0] != "}":
            open_braces.append((len(mark[0]) > 1, mark.end()))
        elif open_braces:
            boxes, start = open_braces.pop()
            if boxes and start > last:
                last, found = start, text[start : mark.start()].strip()
    return found


def last_number(text: str) -> str | None:
    """Return the last number of a text as it is written; None without one.

    A minus is a sign where nothing that could be subtracted from stands in front of it.

    >>> last_number("It costs $1,250.50, not -3."), last_number("100-58"), last_number("none")
    ('-3', '58', None)
    """
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def as_number(text: str) -> Fraction | None:
    """Return the exact value of a number with digits, a sign, commas between thousands, a point or a fraction bar.

    >>> as_number(" 1,250.50 "), as_number("-3/4"), as_number("x"), as_number("1/0")
    (Fraction(2501, 2), Fraction(-3, 4), None, None)
    """
    plain = text.strip().strip("$").replace("−", "-")
    plain = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", plain)
    if len(plain) > LONGEST or not _FULL.fullmatch(plain):
        return None
    whole, _, below = plain.partition("/")
    return None if below and not int(below) else Fraction(whole) / (int(below) if below else 1)
