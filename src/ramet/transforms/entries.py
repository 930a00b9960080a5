"""Entries of TensorDicts in any layout, found; and what a batch size and a mask of rows may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from ramet.ragged import Ragged
from ramet.specs import KeyPath, describe
from ramet.types import Key


def entry(td: TensorDictBase, key: KeyPath) -> Any:
    """Return what is under `key`, of the first row where `td` is a lazy stack; None if nothing is."""
    path = (key,) if isinstance(key, str) else key
    while isinstance(td, LazyStackedTensorDict):
        td = td.unbind(td.stack_dim)[0]  # rows may be ragged; whether they have the key, one tells
    found: Any = td
    for name in path:
        found = found.get(name, None) if isinstance(found, TensorDictBase) else None
    return found


def whole(td: TensorDictBase, key: KeyPath) -> Any:
    """Return what is under `key` for all rows, jagged where the rows of a lazy stack differ; None if one has none."""
    if not isinstance(td, LazyStackedTensorDict):
        return entry(td, key)
    rows = [entry(row, key) for row in td.unbind(td.stack_dim)]
    if any(row is None for row in rows):
        return None
    if all(isinstance(row, Tensor) for row in rows) and len({row.shape for row in rows}) > 1:
        return Ragged.from_rows(rows).jagged()
    return td.get(key)


def mask_of(tokens: KeyPath) -> KeyPath:
    """Return the key of the mask that stands beside tokens."""
    return Key.MASK if isinstance(tokens, str) else (*tokens[:-1], Key.MASK)


def row_mask(td: TensorDictBase, key: KeyPath) -> Tensor | None:
    """Return the mask of rows (*B) under `key`; None if there is none or if it names all rows."""
    mask = td.get(key, None)
    if mask is None:
        return None
    size = td.batch_size
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape not in (size, (*size, 1)):
        raise ValueError(f"{key!r} must be bool of shape {tuple(size)} or {(*size, 1)}: found {describe(mask)}")
    return None if bool(mask.all()) else mask.reshape(size)


def as_batch_size(batch_size: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return (n,), or () for None and 0; TypeError for more dimensions and for what is no whole number."""
    numbers = (batch_size,) if isinstance(batch_size, int) else batch_size or ()
    if isinstance(numbers, str) or not isinstance(numbers, Sequence) or any(type(n) is not int for n in numbers):
        raise TypeError(f"batch_size must be 0 or 1d, a whole number: found {batch_size!r}")
    size = tuple(numbers)
    if len(size) > 1:
        raise TypeError(f"batch_size must be 0 or 1d: found {size}")
    if any(n < 0 for n in size):
        raise ValueError(f"batch_size must not be negative: found {size}")
    return () if size == (0,) else size
