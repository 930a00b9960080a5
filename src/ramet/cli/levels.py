"""How difficult each row is: the value of a column, which may lie inside another one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramet.errors import ConfigError, nearest

COLUMNS = ("difficulty", "level", "entry.metadata.difficulty")
"""Where a row may say how difficult it is, looked for in this order."""


def column_of(rows: Sequence[Mapping[str, Any]], asked: str | None) -> str | None:
    """Return the column that the rows are told apart by; None where nobody asked and there is none.

    Of `COLUMNS` it is the first that every row has and that differs between them. Raises `ConfigError` for a column
    that was asked for and that a row does not have.
    """
    if asked is None:
        there = (name for name in COLUMNS if all(_has(row, name) for row in rows))
        return next((name for name in there if len({level_of(row, name) for row in rows}) > 1), None)
    for number, row in enumerate(rows):
        if not _has(row, asked):
            raise ConfigError(f'row {number} has no column "{asked}"', hint=nearest(asked, _paths(row)))
    return asked


def level_of(row: Mapping[str, Any], column: str) -> str:
    """Return the value of a column as text; `column` may be a path, as "entry.metadata.difficulty".

    >>> level_of({"entry": {"metadata": {"difficulty": {"terms": (2, 3)}}}}, "entry.metadata.difficulty")
    '{"terms": [2, 3]}'
    """
    value = _value(row, column)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def in_order(levels: Sequence[str]) -> list[str]:
    """Return the different levels in order: by number where all of them are numbers, else as text.

    >>> in_order(["10", "9", "10"]), in_order(["hard", "easy"])
    (['9', '10'], ['easy', 'hard'])
    """
    different = sorted(set(levels))
    try:
        return sorted(different, key=float)
    except ValueError:
        return different


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return what lies at the end of a path; raise `KeyError` where it leads nowhere."""
    if column in row:
        return row[column]
    first, dot, rest = column.partition(".")
    inner = row.get(first)
    if not dot or not isinstance(inner, Mapping):
        raise KeyError(column)
    return _value(inner, rest)


def _has(row: Mapping[str, Any], column: str) -> bool:
    try:
        _value(row, column)
    except KeyError:
        return False
    return True


def _paths(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all columns, those inside others too."""
    for name, value in row.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")
