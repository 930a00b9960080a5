"""Stack TensorDicts whose entries differ in length: n items, each with its own L."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict import is_leaf_nontensor as is_leaf
from torch import Tensor

from ramet.ragged.storage import Ragged, offsets_of
from ramet.ragged.text import Text

KeyPath: TypeAlias = str | tuple[str, ...]


def as_nested_tensor(list: Sequence[TensorDictBase]) -> TensorDict:  # noqa: A002 (the public name)
    """Stack n TensorDicts into one, of batch size [n, *item]; entries that differ in length become jagged.

    A tensor that differs along one dimension is a jagged nested tensor; one that does not is stacked, as strings and
    other non-tensors are, each row with its own. ValueError for an empty list, and, naming the key and the row, for
    different keys or dtypes, for an entry that is a tensor in one row and none in another, or that differs along
    several dimensions.

    >>> rows = [TensorDict({"tokens": torch.tensor(ids), "text": str(ids)}) for ids in ([1, 2], [3])]
    >>> td = as_nested_tensor(rows)
    >>> td.batch_size, [row.tolist() for row in td["tokens"].unbind()], list(td["text"])
    (torch.Size([2]), [[1, 2], [3]], ['[1, 2]', '[3]'])
    """
    entries = _entries(list)
    size = _one_size(list)
    stacked = TensorDict({}, [len(list), *size], device=list[0].device)
    for key, values in entries.items():
        stacked.set(key, _nested(key, values) if isinstance(values[0], Tensor) else _stack_others(values, 0))
    return stacked


def as_padded_tensor(list: Sequence[TensorDictBase], dim: int = 0, stack_dim: int = 0) -> TensorDict:  # noqa: A002
    """Stack n TensorDicts along `stack_dim`, entries padded with zeros on the left of `dim` to the longest.

    `dim` counts the dimensions of an entry before it is stacked, its batch included. Entries that do not vary along
    `dim` are stacked as they are, and so are strings and other non-tensors, each row with its own. Batch size: that of
    an item, with n at `stack_dim` where the item has so many dimensions. No mask is made: which zeros are padding, the
    masks among the entries say. ValueError for a negative `dim`, an empty list, and, naming the key and the row, for
    different keys or dtypes or for shapes that differ along another dimension.

    >>> rows = [TensorDict({"tokens": torch.tensor(ids), "text": str(ids)}) for ids in ([1, 2], [3])]
    >>> td = as_padded_tensor(rows)
    >>> td.batch_size, td["tokens"].tolist(), list(td["text"])
    (torch.Size([2]), [[1, 2], [0, 3]], ['[1, 2]', '[3]'])
    """
    for name, value in (("dim", dim), ("stack_dim", stack_dim)):
        if type(value) is not int:
            raise TypeError(f"{name} must be a whole number: found {value!r}")
    if dim < 0:
        raise ValueError(f"dim must be >= 0: found {dim}")
    if stack_dim < 0:
        raise ValueError(f"stack_dim must be >= 0: found {stack_dim}")
    entries = _entries(list)
    size = [*_one_size(list, dim)]
    if dim < len(size):
        size[dim] = max(td.batch_size[dim] for td in list)
    stacked = TensorDict({}, _inserted(size, len(list), stack_dim), device=list[0].device)
    for key, values in entries.items():
        if isinstance(values[0], Tensor):
            stacked.set(key, _padded(key, values, dim, stack_dim))
        elif dim < len(size) and len({td.batch_size[dim] for td in list}) > 1:
            raise ValueError(f"{key!r} holds no tensor and can not be padded along dimension {dim} of the batch")
        else:
            stacked.set(key, _stack_others(values, min(stack_dim, len(size))))
    return stacked


def _entries(items: Sequence[TensorDictBase]) -> dict[KeyPath, list[Any]]:
    """Return the leaves of all items by key, of the same keys, kinds and dtypes in each."""
    if isinstance(items, TensorDictBase) or not isinstance(items, Sequence):
        raise TypeError(f"expected a list of TensorDicts, found a {type(items).__name__}")
    if not len(items):
        raise ValueError("an empty list can not be stacked: expected at least one TensorDict")
    for number, item in enumerate(items):
        if not isinstance(item, TensorDictBase):
            raise TypeError(f"row {number}: expected a TensorDict, found {type(item).__name__}")
    leaves = [_leaves(item) for item in items]
    first = leaves[0]
    for number, other in enumerate(leaves):
        if other.keys() != first.keys():
            missing, more = sorted(map(str, first.keys() - other.keys())), sorted(map(str, other.keys() - first.keys()))
            raise ValueError(f"row {number} has other keys than row 0: missing {missing}, more {more}")
        for key, value in other.items():
            if _kind(value) != _kind(first[key]):
                raise ValueError(
                    f"{key!r} must be of one dtype: row 0 holds {_kind(first[key])}, row {number} holds {_kind(value)}"
                )
    return {key: [other[key] for other in leaves] for key in first}


def _leaves(item: TensorDictBase) -> dict[KeyPath, Any]:
    return {key: item.get(key) for key in item.keys(True, True, is_leaf=is_leaf)}


def _kind(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else "no tensor"


def _one_size(items: Sequence[TensorDictBase], but: int | None = None) -> torch.Size:
    """Return the batch size of the items, which may differ in dimension `but` alone."""
    size = items[0].batch_size
    for number, item in enumerate(items):
        other = item.batch_size
        if len(other) != len(size) or any(a != b for d, (a, b) in enumerate(zip(size, other, strict=True)) if d != but):
            raise ValueError(f"rows must share one batch size: row 0 has {tuple(size)}, row {number} {tuple(other)}")
    return size


def _differing(key: KeyPath, values: Sequence[Tensor]) -> list[int]:
    """Return the dimensions along which the shapes differ."""
    shape = values[0].shape
    for number, value in enumerate(values):
        if value.is_nested:
            raise ValueError(f"{key!r}, row {number}, is a nested tensor already: unbind it into rows first")
        if value.dim() != len(shape):
            raise ValueError(
                f"{key!r} must have as many dimensions in each row: row 0 has {tuple(shape)}, "
                f"row {number} {tuple(value.shape)}"
            )
    return [d for d in range(len(shape)) if len({value.shape[d] for value in values}) > 1]


def _nested(key: KeyPath, values: list[Tensor]) -> Tensor:
    ragged = _differing(key, values)
    if not ragged:
        return torch.stack(values)
    if len(ragged) > 1:
        raise ValueError(
            f"{key!r} differs along the dimensions {ragged}, and a jagged tensor along one: "
            f"shapes {sorted({tuple(value.shape) for value in values})}"
        )
    dim = ragged[0]
    if dim == 0:
        return Ragged.from_rows(values).jagged()
    offsets = offsets_of(torch.tensor([value.shape[dim] for value in values], device=values[0].device))
    return torch.nested.nested_tensor_from_jagged(torch.cat(values, dim), offsets, jagged_dim=dim + 1)


def _padded(key: KeyPath, values: list[Tensor], dim: int, stack_dim: int) -> Tensor:
    ragged = _differing(key, values)
    if ragged not in ([], [dim]):
        raise ValueError(
            f"{key!r} differs along the dimensions {ragged}, and is padded along {dim} alone: "
            f"shapes {sorted({tuple(value.shape) for value in values})}"
        )
    if stack_dim > values[0].dim():
        raise ValueError(f"{key!r} has the shape {tuple(values[0].shape)}: it can not be stacked along {stack_dim}")
    if not ragged:
        return torch.stack(values, stack_dim)
    width = max(value.shape[dim] for value in values)
    room = [
        value.new_zeros((*value.shape[:dim], width - value.shape[dim], *value.shape[dim + 1 :])) for value in values
    ]
    return torch.stack([torch.cat(pair, dim) for pair in zip(room, values, strict=True)], stack_dim)


def _inserted(size: Sequence[int], n: int, where: int = 0) -> list[int]:
    return [*size[:where], n, *size[where:]] if where <= len(size) else [*size]


def _stack_others(values: list[Any], dim: int) -> Any:
    if dim == 0 and all(not value.batch_size for value in values):
        if all(isinstance(value.data, str) for value in values):
            return Text.of([value.data for value in values]).entry()
        return NonTensorStack(*[NonTensorData(value.data) for value in values])
    return LazyStackedTensorDict.lazy_stack(values, dim)
