"""Digits to be put in order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ramet.tasks.options import flag
from ramet.tasks.problems import numbered, split, whole_numbers
from ramet.tasks.task import Task

DIGITS = "0123456789"


def sorting(
    *,
    seed: int = 0,
    lengths: int | Sequence[int] = (3, 4, 5),
    distinct: bool = True,
    train_size: int | None = None,
    held_out_size: int = 500,
) -> Task:
    """Make a task of problems like ">5290=" with the answer "0259", which earns 1.0; anything else earns 0.0.

    `lengths` are how many digits there may be; with `distinct` no digit comes twice in a problem. How the problems are
    split, ordered by `seed` and guessed by chance is said at `problems.split`. Raises `ConfigError` for an option that
    makes no sense.

    >>> task = sorting(lengths=3, held_out_size=5)
    >>> len(task.train), len(task.held_out), task.answer({"prompt": ">312=", "answer": "123"})
    (715, 5, '123')
    """
    longest = len(DIGITS) if flag("distinct", distinct) else 18
    words = _words(whole_numbers("lengths", lengths, low=1, high=longest), distinct)
    problems = ((f">{word}=", "".join(sorted(word))) for word in words)
    return split("sorting", problems, seed=seed, train_size=train_size, held_out_size=held_out_size)


def _words(lengths: list[int], distinct: bool) -> Iterator[str]:
    """Yield the digits of every problem, or of a fixed draw."""
    counts = [math.perm(10, length) if distinct else 10**length for length in lengths]
    ends = list(itertools.accumulate(counts))
    part = 0
    for number in numbered(ends[-1]):
        while number >= ends[part]:
            part += 1
        yield _word(ends[part] - 1 - number, lengths[part], distinct)


def _word(number: int, length: int, distinct: bool) -> str:
    """Return the digits that a number stands for: each number from 0 on gives other ones."""
    left, word = list(DIGITS), ""
    for _ in range(length):
        number, place = divmod(number, len(left))
        word += left.pop(place) if distinct else left[place]
    return word
