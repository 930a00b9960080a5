"""Copies of rows for the functions of a task: what one of them changes, no other sees, nor what is stored."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar

from ramet.types import Sample

T = TypeVar("T")


def own(value: T) -> T:
    """Return a deep copy of `value`; what no copy can be made of is shared: a column of a row, or all of it.

    >>> row = {"prompt": "2+2=", "answers": ["4"], "open": (line for line in "ab")}
    >>> copied = own(row)
    >>> copied["answers"].append("four")
    >>> row["answers"], copied["open"] is row["open"]
    (['4'], True)
    """
    try:
        return copy.deepcopy(value)
    except Exception:  # a row may hold anything
        return _in_part(value) if isinstance(value, MutableMapping) else value


class Marked(dict[str, Any]):
    """A row whose copies say of which episode they are (`key`), and are remembered: `copies`.

    >>> row = Marked({"prompt": "2+2="}, key=7)
    >>> own(row).key, row.copies
    (7, [{'prompt': '2+2='}])
    """

    def __init__(self, row: Mapping[str, Any], key: Any, copies: list[Marked] | None = None) -> None:
        super().__init__(row)
        self.key = key
        self.copies: list[Marked] = [] if copies is None else copies

    def __copy__(self) -> Marked:
        return self._kept(dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Marked:
        return self._kept(copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # for another process, which sees a row

    def _kept(self, row: dict[str, Any]) -> Marked:
        self.copies.append(Marked(row, self.key, self.copies))
        return self.copies[-1]


def own_sample(sample: Sample) -> Sample:
    """Return a sample whose prompt, row and messages are copies; the state is the episode's, and is the same."""
    row, messages = own(sample.row), own(sample.messages)
    return dataclasses.replace(sample, prompt=own(sample.prompt), row=row, messages=messages)


def _in_part(row: T) -> T:
    try:
        made = copy.copy(row)
        assert isinstance(made, MutableMapping)
        for name, column in list(made.items()):
            made[name] = _deep(column)
    except Exception:
        return row
    return made


def _deep(column: T) -> T:
    try:
        return copy.deepcopy(column)
    except Exception:
        return column
