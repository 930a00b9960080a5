"""Where the answer stands in what a model wrote."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"(?<![\w.,])[-+−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?")
_FULL = re.compile(r"[-+]?\d+(?:\.\d+)?(?:/\d+)?")
LONGEST = 100
"""Characters of a number that is still read: a longer one is none."""


def boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` whose braces close; None without one.

    >>> boxed(r"so \boxed{\frac{1}{2}} of it")
    '\\frac{1}{2}'
    """
    head = "\\boxed{"
    start = text.rfind(head)
    while start >= 0:
        depth = 1
        for at in range(start + len(head), len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                return text[start + len(head) : at].strip()
        text = text[:start]
        start = text.rfind(head)
    return None


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
