"""Data rows in files of JSON: readable as they stand, and the same values again when they are read back.

JSON knows text, numbers, lists and mappings with keys of text. A value of another kind is written in those terms, and
beside the row stands what it was: `kinds` are pairs of a place in the row, as keys and numbers, and a name. Types are
taken at their word: a value of a subclass (a named tuple, an enum of numbers, a time of pandas) would come back as
another, and is left out. A tensor comes back on the CPU, and without its gradient.
"""

from __future__ import annotations

import base64
import copy
import datetime
import decimal
import fractions
import math
import pathlib
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

Place: TypeAlias = tuple[str | int, ...]

# The longest integer that every process reads in decimals: Python's limit may be set as low as 640 of them.
_LONGEST = 2048
# Deeper than this, the log or the reader of its file may run out of stack.
_DEEPEST = 100
# Two characters that JSON writes as it writes the one character which they are the halves of.
_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_TENSORS = frozenset(
    {
        *(torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)


def _iso(value: datetime.datetime | datetime.time) -> str:
    text = value.isoformat()
    if repr(type(value).fromisoformat(text)) != repr(value.replace(fold=0)):
        raise TypeError(f"its time zone can not be written as an offset: {value.tzinfo!r}")
    return text


def _fraction(value: fractions.Fraction) -> str:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _LONGEST:
        raise TypeError(f"a fraction is written with integers of at most {_LONGEST} bits")
    return str(value)


# By the name of a kind: its type, how a value of it is written, and how it is read back.
_KINDS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, str, float),  # those that are not finite
    "int": (int, hex, lambda text: int(text, 16)),  # the long ones
    "escaped": (  # text with halves
        str,
        lambda text: text.encode("unicode_escape").decode("ascii"),
        lambda text: text.encode("ascii").decode("unicode_escape"),
    ),
    "datetime": (datetime.datetime, _iso, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, _iso, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "base64": (bytes, lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, _fraction, fractions.Fraction),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "path": (type(pathlib.Path()), str, pathlib.Path),
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
        own: list[tuple[Place, str]] = []
        try:
            if not _is_text(name):
                raise TypeError(f"its name is no text: {name!r}")
            columns[name] = _plain(value, (name,), own)
        except Exception as error:  # a row holds anything, and so raises anything: it must not end a run
            left_out[_shown(name)] = str(error) or type(error).__name__
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
        except (LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the row has no {kind} at {list(place)}: {error}") from error
    return row


def _is_text(value: Any) -> bool:
    return type(value) is str and (value.isascii() or not _HALVES.search(value))


def _shown(name: Any) -> str:
    try:
        return str(name)
    except Exception:  # as above
        return f"a name of type {type(name).__name__}"


def _plain(value: Any, place: Place, kinds: list[tuple[Place, str]]) -> Any:
    """Return `value` in terms of JSON, and add to `kinds` what was another."""
    if len(place) > _DEEPEST:
        raise TypeError(f"it is nested deeper than {_DEEPEST} levels")
    own = type(value)
    if (
        value is None
        or own is bool
        or _is_text(value)
        or (own is int and value.bit_length() <= _LONGEST)
        or (own is float and math.isfinite(value))
    ):
        return value
    if own is dict:
        return _plain_mapping(value, place, kinds)
    if own is list:
        return _items(value, place, kinds)
    if own in (tuple, set, frozenset):
        items = _items(value, place, kinds)
        kinds.append((place, own.__name__))
        return items
    if own is torch.Tensor and value.layout is torch.strided and value.dtype in _TENSORS:
        plain = _plain(value.detach().cpu().tolist(), place, kinds)
        kinds.append((place, f"tensor {str(value.dtype).removeprefix('torch.')} {_shape(value.shape)}"))
        return plain
    if own is np.ndarray or isinstance(value, np.generic):
        return _plain_array(value, place, kinds)
    for name, (kind, write, _) in _KINDS.items():
        if own is kind:
            kinds.append((place, name))
            if getattr(value, "fold", 0):  # the second of two hours that read alike, as a clock is put back
                kinds.append((place, "fold"))
            return write(value)
    raise _no_room(own.__name__, place)


def _plain_mapping(value: dict[Any, Any], place: Place, kinds: list[tuple[Place, str]]) -> Any:
    if all(_is_text(key) for key in value):
        return {key: _plain(inner, (*place, key), kinds) for key, inner in value.items()}
    pairs = [
        [_plain(key, (*place, number, 0), kinds), _plain(inner, (*place, number, 1), kinds)]
        for number, (key, inner) in enumerate(value.items())
    ]
    kinds.append((place, "pairs"))
    return pairs


def _plain_array(value: Any, place: Place, kinds: list[tuple[Place, str]]) -> Any:
    """Write a NumPy array or scalar; fields, long doubles and dtypes of other packages have no room in JSON."""
    dtype, name = value.dtype, "array" if type(value) is np.ndarray else "scalar"
    if dtype.kind not in "biufcSUmMO" or dtype.char in "gG" or np.dtype(dtype.str) != dtype:
        raise _no_room(f"{type(value).__name__} of {dtype}", place)
    if name == "scalar":
        back = np.array(value, dtype.str)[()]  # drops zeros at the end of a text; two types of one size are one
        if type(back) is not type(value) or (dtype.kind in "SU" and len(back) != len(value)):
            raise _no_room(type(value).__name__, place)
    if dtype.kind == "O":
        plain: Any = _items(value.flat, place, kinds)  # flat: a list in it is no side of it
    elif dtype.kind in "mM":
        plain = value.astype("i8").tolist()  # as it counts them: Python's times are coarser, and end earlier
    else:
        plain = _plain(value.tolist(), place, kinds)
    kinds.append((place, f"{name} {dtype.str} {_shape(value.shape)}"))
    return plain


def _no_room(name: str, place: Place) -> TypeError:
    where = "" if len(place) == 1 else f" at {list(place)}"
    return TypeError(f"JSON can not hold a value of type {name}{where}")


def _items(values: Iterable[Any], place: Place, kinds: list[tuple[Place, str]]) -> list[Any]:
    return [_plain(inner, (*place, number), kinds) for number, inner in enumerate(values)]


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "-"


def _read(plain: Any, kind: str) -> Any:
    name, _, details = kind.partition(" ")
    match name:
        case "tuple":
            return tuple(plain)
        case "set":
            return set(plain)
        case "frozenset":
            return frozenset(plain)
        case "pairs":
            return dict(plain)
        case "fold":
            return plain.replace(fold=1)
        case "tensor" | "array" | "scalar":
            dtype, _, sides = details.rpartition(" ")
            shape = [] if sides == "-" else [int(side) for side in sides.split("x")]
            if name == "tensor":
                return torch.tensor(plain, dtype=getattr(torch, dtype)).reshape(shape)
            array = _array(plain, np.dtype(dtype)).reshape(shape)
            return array if name == "array" else array[()]
    if name not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    return _KINDS[name][2](plain)


def _array(plain: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype.kind == "O":
        return np.fromiter(plain, dtype=dtype)
    if dtype.kind in "mM":
        return np.array(plain, dtype="i8").astype(dtype)
    return np.array(plain, dtype=dtype)
