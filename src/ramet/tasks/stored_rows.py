"""Data rows in files of JSON: readable as they stand, and the same values again when they are read back.

JSON knows text, numbers, lists and mappings with keys of text. A value of another kind is written in those terms, and
beside the row stands what it was: `kinds` are pairs of a place in the row, as keys and numbers, and a name.
"""

from __future__ import annotations

import base64
import copy
import datetime
import decimal
import fractions
import math
import pathlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

Place: TypeAlias = tuple[str | int, ...]

# By the name of a kind: its type, how a value of it is written, and how it is read back.
_KINDS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "seconds": (datetime.timedelta, datetime.timedelta.total_seconds, lambda value: datetime.timedelta(seconds=value)),
    "base64": (bytes, lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "path": (pathlib.PurePath, str, pathlib.Path),
    "complex": (complex, str, complex),
}


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row as JSON can hold it: its `columns`, the `kinds` of what is written in other terms, what is `left_out`.

    `left_out` says of each column that can not be written why.
    """

    columns: dict[str, Any]
    kinds: list[tuple[Place, str]]
    left_out: dict[str, str]


def stored(row: Mapping[Any, Any]) -> StoredRow:
    """Write a row in terms of JSON; a column that holds something else is left out, by name.

    >>> found = stored({"day": datetime.date(2024, 2, 29), "size": (2, 3), "ask": print})
    >>> found.columns, found.kinds
    ({'day': '2024-02-29', 'size': [2, 3]}, [(('day',), 'date'), (('size',), 'tuple')])
    >>> found.left_out
    {'ask': 'JSON can not hold a value of type builtin_function_or_method'}
    """
    columns: dict[str, Any] = {}
    kinds: list[tuple[Place, str]] = []
    left_out: dict[str, str] = {}
    for name, value in row.items():
        if not isinstance(name, str):
            left_out[str(name)] = f"its name is no text: {name!r}"
            continue
        own: list[tuple[Place, str]] = []
        try:
            columns[name] = _plain(value, (name,), own)
        except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
            left_out[name] = str(error) or type(error).__name__
        else:
            kinds += own
    return StoredRow(columns, kinds, left_out)


def read_back(columns: Mapping[str, Any], kinds: Iterable[Sequence[Any]] = ()) -> dict[str, Any]:
    """Return the row that `stored` wrote; raise `ValueError` for a kind or a place that is none.

    >>> read_back({"size": [2, 3]}, [[["size"], "tuple"]])
    {'size': (2, 3)}
    """
    row = copy.deepcopy(dict(columns))
    for place, kind in kinds:  # what is inside comes before what holds it
        *above, last = place
        holder: Any = row
        try:
            for part in above:
                holder = holder[part]
            holder[last] = _read(holder[last], str(kind))
        except (LookupError, TypeError, ArithmeticError) as error:
            raise ValueError(f"the row has no {kind} at {list(place)}: {error}") from error
    return row


def _plain(value: Any, place: Place, kinds: list[tuple[Place, str]]) -> Any:
    """Return `value` in terms of JSON, and add to `kinds` what was another."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        kinds.append((place, "float"))
        return str(float(value))
    if isinstance(value, Mapping):
        return _plain_mapping(value, place, kinds)
    if isinstance(value, list):
        return _items(value, place, kinds)
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            items = _items(value, place, kinds)
            kinds.append((place, name))
            return items
    if isinstance(value, torch.Tensor):
        plain, name = _plain(value.detach().cpu().tolist(), place, kinds), str(value.dtype).removeprefix("torch.")
        kinds.append((place, f"tensor {name} {_shape(value.shape)}"))
        return plain
    if isinstance(value, (np.ndarray, np.generic)):
        plain = _plain(value.tolist(), place, kinds)
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        kinds.append((place, f"{name} {value.dtype.str} {_shape(value.shape)}"))
        return plain
    for name, (own, write, _) in _KINDS.items():
        if isinstance(value, own):
            kinds.append((place, name))
            return write(value)
    where = "" if len(place) == 1 else f" at {list(place)}"
    raise TypeError(f"JSON can not hold a value of type {type(value).__name__}{where}")


def _plain_mapping(value: Mapping[Any, Any], place: Place, kinds: list[tuple[Place, str]]) -> Any:
    if all(isinstance(key, str) for key in value):
        return {key: _plain(inner, (*place, key), kinds) for key, inner in value.items()}
    pairs = [
        [_plain(key, (*place, number, 0), kinds), _plain(inner, (*place, number, 1), kinds)]
        for number, (key, inner) in enumerate(value.items())
    ]
    kinds.append((place, "pairs"))
    return pairs


def _items(values: Iterable[Any], place: Place, kinds: list[tuple[Place, str]]) -> list[Any]:
    return [_plain(inner, (*place, number), kinds) for number, inner in enumerate(values)]


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "-"


def _read(plain: Any, kind: str) -> Any:
    name, _, details = kind.partition(" ")
    match name:
        case "float":
            return float(plain)
        case "tuple":
            return tuple(plain)
        case "set":
            return set(plain)
        case "frozenset":
            return frozenset(plain)
        case "pairs":
            return dict(plain)
        case "tensor" | "array" | "scalar":
            dtype, _, sides = details.rpartition(" ")
            shape = [] if sides == "-" else [int(side) for side in sides.split("x")]
            if name == "tensor":
                return torch.tensor(plain, dtype=getattr(torch, dtype)).reshape(shape)
            array = np.array(plain, dtype=np.dtype(dtype)).reshape(shape)
            return array if name == "array" else array[()]
    if name not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    return _KINDS[name][2](plain)
