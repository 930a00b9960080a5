"""Rows read out of TensorDicts, whatever their layout."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase
from torch import Tensor

from ramet.ragged.storage import Ragged, Side
from ramet.ragged.text import Text, text_of

KeyPath: TypeAlias = str | tuple[str, ...]
_MASK, _MASKED = "attention_mask", ("tokens", "attention_mask")


def check_td(td: Any) -> None:
    """Raise a TypeError for what is no TensorDict."""
    if not isinstance(td, TensorDictBase):
        raise TypeError(f"expected a TensorDict, found a {type(td).__name__}")


def rows(td: TensorDictBase, key: KeyPath, *, mask: KeyPath | None = None) -> list[Any]:
    """Read the rows of an entry in any layout, without padding: 1-D tensors [L], or strings.

    A TensorDict [B] gives B rows, a rollout [B, T] gives B*T of them, the steps of the first row first. A padded entry
    needs its mask, an entry of the same shape: `mask` names it. For an entry called "tokens" it is the
    "attention_mask" beside it, if there is one. No other entry has a mask unless it is named. KeyError if there is no
    such entry.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> tokens, mask = torch.tensor([[0, 5], [6, 7]]), torch.tensor([[False, True], [True, True]])
    >>> rows(TensorDict({"tokens": tokens, "attention_mask": mask}, [2]), "tokens")
    [tensor([5]), tensor([6, 7])]
    """
    check_td(td)
    path = (key,) if isinstance(key, str) else tuple(key)
    if isinstance(td, LazyStackedTensorDict):  # whether there is a mask, each part says for itself
        return _in_order(td, [rows(part, key, mask=mask) for part in td.unbind(td.stack_dim)])
    cells = _cells(td, path)
    if mask is None and path[-1] in _MASKED and _has(td, (*path[:-1], _MASK)):
        mask = (*path[:-1], _MASK)
    if mask is None:
        return cells
    real = _cells(td, (mask,) if isinstance(mask, str) else tuple(mask))
    for number, (row, m) in enumerate(zip(cells, real, strict=True)):
        if row.shape[:1] != m.shape:
            raise ValueError(f"{key!r}, row {number}: its mask {mask!r} has {len(m)} entries for {len(row)}")
    return [row[m.bool()] for row, m in zip(cells, real, strict=True)]


def pad(
    td: TensorDictBase, key: KeyPath, side: Side, value: float, *, mask: KeyPath | None = None
) -> tuple[Tensor, Tensor]:
    """Read the rows of an entry as one tensor, padded with `value` on one side: tensor [B, L] and bool mask [B, L].

    Rows are read as by `rows`; a rollout [B, T] gives [B, T, L].

    >>> import torch
    >>> from tensordict import TensorDict
    >>> tokens, mask = torch.tensor([[0, 5], [6, 7]]), torch.tensor([[False, True], [True, True]])
    >>> pad(TensorDict({"tokens": tokens, "attention_mask": mask}, [2]), "tokens", "right", -1)[0].tolist()
    [[5, -1], [6, 7]]
    """
    cells = rows(td, key, mask=mask)
    if not all(isinstance(cell, Tensor) for cell in cells):
        raise TypeError(f"{key!r} holds {type(cells[0]).__name__}, not tensors: it can be read by rows, not padded")
    padded, real = Ragged.from_rows(cells).padded(side, value)
    size = td.batch_size if td.batch_size.numel() == len(cells) else (len(cells),)
    return padded.view(*size, *padded.shape[1:]), real.view(*size, real.shape[1])


def read_text(td: TensorDictBase, key: KeyPath) -> Text:
    """Find the text of an entry: strings of B rows, or of one where `td` has no batch.

    A `Text` is found unread; strings in any other form are read. KeyError if there is no such entry; TypeError, which
    names key, row and type, for anything but `str`.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"text": Text.of(["a", "b"]).entry()}, [2])
    >>> read_text(td, "text").append(Text.of(["c", ""])).tolist()
    ['ac', 'b']
    """
    path = (key,) if isinstance(key, str) else tuple(key)
    value = None if isinstance(td, LazyStackedTensorDict) else td.get(path, None)
    text = text_of(value)
    if text is not None:
        return text
    if isinstance(value, Tensor):
        raise TypeError(f"{key!r}, row 0: expected str, found a tensor")
    strings = _cells(td, path) if value is None else _strings_in(value)
    for row, string in enumerate(strings):
        if not isinstance(string, str):
            kind = "a tensor" if isinstance(string, Tensor) else type(string).__name__
            raise TypeError(f"{key!r}, row {row}: expected str, found {kind}")
    return Text.of(strings)


def _strings_in(value: Any) -> list[Any]:
    """Read non-tensor data; a sequence of B things for B rows is one for each, whatever container it came in."""
    if isinstance(value, NonTensorData) and len(value.batch_size) == 1:
        data, count = value.data, value.batch_size[0]
        data = data.tolist() if isinstance(data, np.ndarray) else data
        return list(data) if isinstance(data, list | tuple) and len(data) == count else [data] * count
    return _flat(value.tolist(), len(value.batch_size))


def _has(td: TensorDictBase, path: tuple[str, ...]) -> bool:
    if isinstance(td, LazyStackedTensorDict):
        return _has(td.unbind(td.stack_dim)[0], path)
    inner = td.get(path[0], None) if path[0] in td.keys() else None  # noqa: SIM118 (a TensorDict iterates over its rows)
    return inner is not None and (len(path) == 1 or (isinstance(inner, TensorDictBase) and _has(inner, path[1:])))


def _in_order(td: LazyStackedTensorDict, parts: list[list[Any]]) -> list[Any]:
    """Put the rows of the parts of a lazy stack into the order of the stack's batch."""
    dim = td.stack_dim
    outer, inner = td.batch_size[:dim].numel(), td.batch_size[dim + 1 :].numel()
    return [cell for i in range(outer) for part in parts for cell in part[i * inner : (i + 1) * inner]]


def _cells(td: TensorDictBase, path: tuple[str, ...]) -> list[Any]:
    if isinstance(td, LazyStackedTensorDict):
        return _in_order(td, [_cells(part, path) for part in td.unbind(td.stack_dim)])
    value = td.get(path[0], None)
    if value is None:
        raise KeyError(f"no entry {path[0]!r}; there are {sorted(map(str, td.keys()))}")
    if len(path) > 1:
        if not isinstance(value, TensorDictBase):
            raise KeyError(f"{path[0]!r} holds no entries, so there is no {path[1:]!r} in it")
        return _cells(value, path[1:])
    if not isinstance(value, Tensor):
        return _flat(value.tolist(), len(value.batch_size))
    if value.is_nested:
        return Ragged.from_jagged(value).rows()
    if value.dim() == td.batch_dims:
        raise ValueError(f"{path[0]!r} holds one number for each row, not rows: read it by td[{path[0]!r}]")
    return list(value.flatten(0, td.batch_dims - 1)) if td.batch_dims else [value]


def _flat(items: Any, depth: int) -> list[Any]:
    return [items] if depth == 0 else [leaf for item in items for leaf in _flat(item, depth - 1)]
