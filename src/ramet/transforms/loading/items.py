"""What the items of a loader are: a row of named values, or a batch of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ramet.errors import DataError
from ramet.ragged import Ragged
from ramet.specs import KeyPath

Values: TypeAlias = dict[KeyPath, Any]
"""The values of one row: tensors without a batch dimension, strings and other objects; or columns of several rows."""
_PLAIN = (Tensor, str, int, float, bool, type(None))


class Reader:
    """Reads items into rows.

    `data_keys` name the columns of tuples and lists; `bare_key` names the column of an item that is a bare value.
    `batched` is what the loader says of its items: batches, rows, or (None) nothing; `infer` lets the data speak then.
    `dims` holds, for the keys of which it is known, how many dimensions a value of one row has. `turned` says that the
    lists in the items are columns of the lists that the rows have: torch's default `collate_fn` makes them so.
    """

    def __init__(
        self,
        data_keys: Sequence[KeyPath] | None,
        batched: bool | None,
        infer: bool,
        bare_key: Callable[[bool], KeyPath],
        dims: Mapping[KeyPath, int],
        turned: bool = False,
    ) -> None:
        self._data_keys, self._batched, self._infer = data_keys, batched, infer
        self._bare_key, self._dims, self._turned = bare_key, dims, turned
        self._single: set[Any] = set()  # what mappings have in common that are single rows, and need no more reading

    def read(self, item: Any) -> tuple[Values, int | None]:
        """Return the columns of an item as they are, and how many rows they hold; None for a single row."""
        if type(item) is dict:
            likeness = (*item, *[value.dim() if type(value) is Tensor else type(value) for value in item.values()])
            if likeness in self._single:
                return item, None
            columns = self._columns(item)
            if self._always_single(item, columns):
                self._single.add(likeness)
            return columns, self._size(columns)
        if isinstance(item, TensorDictBase):
            return self._read_td(item)
        if self._data_keys is None and isinstance(item, str):
            return {self._bare_key(True): item}, None
        if self._data_keys is None and isinstance(item, list | tuple) and not item:
            return {}, 0
        if self._batched is not False and isinstance(item, list) and item and all(map(self._is_row, item)):
            return _together([self._one(row) for row in item]), len(item)
        columns = self._columns(item)
        return columns, self._size(columns)

    def _is_row(self, item: Any) -> bool:
        """Say whether a part of a list is a row for itself, and not the value of a column."""
        if isinstance(item, TensorDictBase):
            return not item.batch_dims and self._data_keys is None
        return isinstance(item, Mapping) and (self._data_keys is None or all(key in item for key in self._data_keys))

    def _one(self, item: Any) -> Values:
        return self._read_td(item)[0] if isinstance(item, TensorDictBase) else self._of_mapping(item, False)

    def _of_mapping(self, item: Mapping[Any, Any], every: bool) -> Values:
        flat = _flat(item, every, self._dims)
        return flat if self._data_keys is None else {key: _picked(item, flat, key) for key in self._data_keys}

    def _always_single(self, item: dict[Any, Any], columns: Values) -> bool:
        """Say whether mappings with the same keys, types and dimensions are single rows whatever their sizes are."""
        if self._data_keys is not None or self._batched or any(type(value) not in _PLAIN for value in item.values()):
            return False
        kinds = {_kind(value, self._dims.get(key)) for key, value in columns.items()}
        return self._batched is False or not self._infer or "row" in kinds or "batch" not in kinds

    def _columns(self, item: Any) -> Values:
        columns = self._named(item)
        return {key: _turned_back(key, value) for key, value in columns.items()} if self._turned else columns

    def _named(self, item: Any) -> Values:
        keys = self._data_keys
        if isinstance(item, Mapping):
            return self._of_mapping(item, self._batched is True)
        if keys is None:
            return {self._bare_key(_is_text(item)): item}
        if len(keys) == 1:
            return {keys[0]: item}
        if not isinstance(item, list | tuple) or len(item) != len(keys):
            found = f"{len(item)} of them" if isinstance(item, list | tuple) else f"a {type(item).__name__}"
            raise DataError(
                f"expected items of {len(keys)} columns, {list(keys)}: found {found}",
                hint="data_keys needs a name for each column of an item",
            )
        return dict(zip(keys, item, strict=True))

    def _size(self, columns: Values) -> int | None:
        """Return how many rows the columns hold; None if they are one row."""
        kinds = {key: _kind(value, self._dims.get(key)) for key, value in columns.items()}
        if self._batched is False or not columns or (not self._infer and self._batched is None):
            return None
        sizes = {key: len(value) for key, value in columns.items() if kinds[key] != "row" or _sized(value)}
        if self._batched:
            if len(columns) == 1 and not sizes:
                return None  # the loader gives batches, and one of them is a bare value
            if len(sizes) < len(columns) or len(set(sizes.values())) > 1:
                raise DataError(
                    f"the loader gives batches, and the columns of an item must be of one length: found {sizes}, "
                    f"and no length in {[key for key in columns if key not in sizes]}"
                )
            return next(iter(sizes.values()))
        found = set(kinds.values())
        if "row" in found or "batch" not in found or len(set(sizes.values())) > 1:
            return None
        return next(iter(sizes.values()))

    def _td_keys(self, td: TensorDictBase) -> list[KeyPath]:
        keys = list(td.keys(True, True, is_leaf=is_leaf_nontensor))
        if self._data_keys is None:
            return keys
        for key in self._data_keys:
            if key not in keys:
                raise DataError(f"an item has no {key!r}, which data_keys names: it has {sorted(map(str, keys))}")
        return list(self._data_keys)

    def _read_td(self, td: TensorDictBase) -> tuple[Values, int | None]:
        if not td.batch_dims:
            return {key: _unwrapped(td.get(key)) for key in self._td_keys(td)}, None
        if td.batch_dims > 1:
            raise DataError(
                f"expected TensorDicts without batch or of batch size (n,): found {tuple(td.batch_size)}",
                hint="reshape(-1) makes rows of all",
            )
        if not isinstance(td, LazyStackedTensorDict):
            return {key: td.get(key) for key in self._td_keys(td)}, len(td)
        rows = [self._read_td(row)[0] for row in td.unbind(0)]
        return _together(rows), len(rows)


def said_of_batches(loader: Any) -> tuple[int | None, bool | None]:
    """Return what a loader says of the batches that it gives: how large, and whether its items are batches at all.

    None where it says nothing. The items of a TensorDict and of a dataset of the library `datasets` are rows.
    """
    if isinstance(loader, TensorDictBase) or type(loader).__module__.partition(".")[0] == "datasets":
        return None, False
    if not hasattr(loader, "batch_size"):
        return None, None
    size = loader.batch_size
    if isinstance(loader, DataLoader):
        return size, loader.batch_sampler is not None
    return (size if isinstance(size, int) and not isinstance(size, bool) else None), bool(size)


def turns_lists(loader: Any) -> bool:
    """Say whether a loader makes batches by torch's `default_collate`, and so turns rows of lists into columns."""
    return isinstance(loader, DataLoader) and loader.batch_sampler is not None and loader.collate_fn is default_collate


def _turned_back(key: KeyPath, value: Any) -> Any:
    """Return a list for each row, of a list that has a tensor or a list of all rows for each place in it."""
    if not isinstance(value, list | tuple) or any(isinstance(part, str | bytes) for part in value):
        return value
    sized = [part for part in value if isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.ndim)]
    if len(sized) < len(value) or not value:
        raise DataError(
            f"{key!r}: torch's default collate_fn makes columns of what is in the lists of the rows, and there is no "
            f"way back to the rows from {'an empty list' if not value else 'this one'}",
            hint="DataLoader(..., collate_fn=list) leaves the rows as they are",
        )
    if all(isinstance(part, Tensor) for part in value):
        return torch.stack(list(value), 1)
    inner = [_turned_back(key, part) for part in value]
    inner = [part.tolist() if isinstance(part, Tensor) and part.dim() == 2 else part for part in inner]
    return [list(row) for row in zip(*inner, strict=True)]


def _together(rows: list[Values]) -> Values:
    """Return the columns of rows that were read one by one."""
    if any(row.keys() != rows[0].keys() for row in rows):
        raise DataError(f"the rows of an item must have the same keys: found {[sorted(map(str, row)) for row in rows]}")
    return {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}


def as_value(value: Any) -> Any:
    """Make a tensor of a number, an array or a list of numbers; other values stay as they are.

    >>> as_value([1, 2]), as_value(0.5), as_value("text")
    (tensor([1, 2]), tensor(0.5000), 'text')
    """
    if isinstance(value, str | Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        plain = np.asarray(value)
        if plain.dtype.kind in "US":
            return str(plain) if not plain.ndim else plain.tolist()
        return torch.from_numpy(np.array(plain)) if plain.dtype.kind in "biufc" else value
    if isinstance(value, list | tuple) and value and all(type(item) in (int, float, bool) for item in value):
        return as_tensor(value, {type(item) for item in value})
    return as_tensor(value, {type(value)}) if type(value) in (int, float, bool) else value


def rows_of(given: Values | list[Values]) -> list[Values]:
    """Return rows one by one, of the columns of a batch or of single rows as they were read."""
    if isinstance(given, list):
        return [{key: as_value(value) for key, value in row.items()} for row in given]
    return [dict(zip(given, row, strict=True)) for row in zip(*map(split, given.values()), strict=True)]


def examples(rows: list[Values], further: Iterable[Values], known: Collection[KeyPath]) -> Values:
    """Return a value of each key of the first row, that says what the column holds.

    An empty list does not: unless the key is `known`, the next that is not empty says it, of the other rows or of the
    columns of `further` items.
    """
    found = dict(rows[0])
    unclear = {key for key, value in found.items() if _is_empty(value) and key not in known}
    if not unclear:
        return found
    for columns in chain(({key: [row[key]] for key in row} for row in rows[1:]), further):
        for key in unclear & columns.keys():
            value = next((value for value in split(columns[key]) if not _is_empty(value)), None)
            if value is None:
                continue
            unclear.discard(key)
            if isinstance(value, list) or (isinstance(value, Tensor) and value.dim()):
                found[key] = value
        if not unclear:
            break
    return found


def _is_empty(value: Any) -> bool:
    return isinstance(value, list) and not value


def split(column: Any) -> list[Any]:
    """Return the values of a column, row by row."""
    if isinstance(column, Tensor):
        return Ragged.from_jagged(column).rows() if column.is_nested else list(column.unbind(0))
    items = column.tolist() if hasattr(column, "batch_size") else column  # non-tensor data of a TensorDict
    return [as_value(item) for item in items]


def as_tensor(value: Any, types: set[type]) -> Any:
    """Make a tensor of a number or a list of numbers of these types; a whole number may be too large, and stays."""
    dtype = torch.bool if types == {bool} else torch.float32 if float in types else torch.int64
    try:
        return torch.tensor(value, dtype=dtype)
    except (RuntimeError, OverflowError):  # a whole number that does not fit into 64 bits
        return value


def _unwrapped(value: Any) -> Any:
    return value if isinstance(value, Tensor) else value.data


def _sized(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)


def _kind(value: Any, dims: int | None) -> str:
    """Say what a column can be: the value of one row, a batch of values, or either."""
    if not _sized(value):
        return "row"
    if isinstance(value, Tensor | np.ndarray):
        if dims is not None:
            return "batch" if value.ndim > dims else "row"
        return "batch" if value.ndim > 1 else "either"
    first = value[0] if value else None
    if dims is not None and isinstance(first, int | float):
        return "row" if dims else "batch"
    return "batch" if isinstance(first, str | list | tuple | Tensor | np.ndarray) else "either"


def _is_text(item: Any) -> bool:
    """Say whether a bare item is text, or tensors; DataError if it is neither."""
    first = item[0] if isinstance(item, list | tuple) and item else item
    if isinstance(first, str):
        return True
    alone = not isinstance(item, list | tuple)
    if isinstance(first, Tensor | np.ndarray) and (alone or first.ndim == 1):
        return False
    if isinstance(first, int) and not isinstance(first, bool) and not alone:
        return False
    inside = "" if alone else f" of {type(first).__name__}" + (f" {tuple(first.shape)}" if _sized(first) else "")
    raise DataError(
        f"an item must be a mapping, a TensorDict, a string, a tensor, or a list of strings or of 1-D tensors: found a "
        f"{type(item).__name__}{inside if first is not item else ''}",
        hint="name the columns of tuples and lists by data_keys",
    )


def _picked(item: Mapping[Any, Any], flat: Values, key: KeyPath) -> Any:
    if key in flat:
        return flat[key]
    if isinstance(key, str) and key in item:
        return item[key]
    raise DataError(f"an item has no {key!r}, which data_keys names: it has {sorted(map(str, flat))}")


def _flat(item: Mapping[Any, Any], every: bool, known: Collection[KeyPath], above: tuple[str, ...] = ()) -> Values:
    """Return the values of a mapping and of the mappings in it that are nested entries.

    Those are the ones that hold a tensor or a known key; with `every`, all.
    """
    flat: Values = {}
    for name, value in item.items():
        if not isinstance(name, str):
            raise DataError(f"the keys of an item must be strings: found {name!r} of type {type(name).__name__}")
        path = (*above, name)
        if isinstance(value, Mapping) and (every or _holds_tensor(value) or _holds_known(path, known)):
            flat.update(_flat(value, every, known, path))
        else:
            flat[path if above else name] = value
    return flat


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, Tensor)


def _holds_known(path: tuple[str, ...], known: Collection[KeyPath]) -> bool:
    return any(isinstance(key, tuple) and key[: len(path)] == path for key in known)
