"""Sums, differences and products of two whole numbers, small enough that every problem can be listed."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ramet.errors import ConfigError
from ramet.tasks.options import flag, whole
from ramet.tasks.problems import numbered, split, whole_numbers
from ramet.tasks.task import Task

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_Block = tuple[str, range, range]


def arithmetic(
    *,
    seed: int = 0,
    operations: str | Sequence[str] = "+",
    digits: int | Sequence[int] = 2,
    same_digits: bool = False,
    reverse: bool = False,
    modulus: int = 0,
    train_size: int | None = None,
    held_out_size: int = 500,
) -> Task:
    """Make a task of problems like "27+58=" with the answer "85", which earns 1.0; anything else earns 0.0.

    `operations` are some of "+", "-" and "*" ("+-" is both); a difference never falls below zero: the larger number
    comes first. `digits` are how many an operand may have: 2 is 10 to 99, [1, 2] is 0 to 99; with `same_digits` both
    operands have equally many. `reverse` writes the answer from the units up ("58"), the order in which carries arise.
    `modulus` from 2 on takes each answer modulo it.

    How the problems are split, ordered by `seed` and guessed by chance is said at `problems.split`. Raises
    `ConfigError` for an option that makes no sense.

    >>> task = arithmetic(operations="-", digits=1, held_out_size=5)
    >>> len(task.train), len(task.held_out), task.answer({"prompt": "7-3=", "answer": "4"})
    (50, 5, '4')
    """
    counts = whole_numbers("digits", digits, low=1, high=9)
    blocks = _blocks(_operations(operations), counts, flag("same_digits", same_digits))
    if whole("modulus", modulus, low=0) == 1:
        raise ConfigError("task.options.modulus: expected 0 (none) or a number from 2 on, found 1")
    flag("reverse", reverse)
    problems = (_written(*problem, modulus, reverse) for problem in _problems(blocks))
    return split("arithmetic", problems, seed=seed, train_size=train_size, held_out_size=held_out_size)


def _operations(operations: Any) -> list[str]:
    found = list(operations) if isinstance(operations, (str, list, tuple)) else []
    if not found or len(set(found)) < len(found) or not all(name in OPERATIONS for name in found):
        raise ConfigError(
            f"task.options.operations: expected some of {' '.join(OPERATIONS)}, each at most once, found {operations!r}"
        )
    return found


def _blocks(operations: list[str], digits: list[int], same_digits: bool) -> list[_Block]:
    """Return an operation and the ranges of its operands, for each pair of numbers of digits."""
    numbers = {count: range(0 if count == 1 else 10 ** (count - 1), 10**count) for count in digits}
    pairs = [(a, b) for a in digits for b in digits if a == b or not same_digits]
    return [(operation, numbers[a], numbers[b]) for operation in operations for a, b in pairs]


def _problems(blocks: list[_Block]) -> Iterator[tuple[str, int, int]]:
    """Yield every problem, or a fixed draw."""
    ends = list(itertools.accumulate(len(left) * len(right) for _, left, right in blocks))
    block, start = 0, 0
    for number in numbered(ends[-1]):
        while number >= ends[block]:
            block, start = block + 1, ends[block]
        operation, left, right = blocks[block]
        i, j = divmod(number - start, len(right))
        yield operation, left[i], right[j]


def _written(operation: str, a: int, b: int, modulus: int, reverse: bool) -> tuple[str, str]:
    if operation == "-" and a < b:  # the same problem a second time
        a, b = b, a
    result = OPERATIONS[operation](a, b)
    answer = str(result % modulus if modulus else result)
    return f"{a}{operation}{b}=", answer[::-1] if reverse else answer
