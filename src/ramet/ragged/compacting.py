"""Copies that hold what is there, and no room to grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor, lazy_stack
from torch import Tensor

from ramet.ragged.reading import check_td
from ramet.ragged.storage import Ragged, is_jagged


def compact(td: TensorDictBase) -> TensorDictBase:
    """Copy a TensorDict or a rollout to memory of its own, of the size of its tokens.

    Observations are views of buffers that have room to grow and hold all rows of the batch; `torch.save` writes the
    whole of them. Save the copy. Layouts, nested keys and texts stay, and the steps of a rollout still share what they
    have in common.

    >>> from tensordict import TensorDict
    >>> buffer = torch.arange(1000).view(10, 100)
    >>> kept = compact(TensorDict({"tokens": buffer[:, :3]}, [10])[:2])
    >>> kept["tokens"].tolist(), kept["tokens"].untyped_storage().nbytes()
    ([[0, 1, 2], [100, 101, 102]], 48)
    """
    check_td(td)
    groups: dict[Any, list[Tensor]] = {}
    for tensor in _tensors(td):
        groups.setdefault(_place(tensor), []).append(tensor)
    copies: dict[int, Tensor] = {}
    for tensors in groups.values():
        copies |= _copied_jagged(tensors) if is_jagged(tensors[0]) else _copied_dense(tensors)
    return _rebuilt(td, copies)


def _tensors(td: TensorDictBase) -> Iterator[Tensor]:
    if isinstance(td, LazyStackedTensorDict):
        for part in td.tensordicts:
            yield from _tensors(part)
        return
    for value in td.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, TensorDictBase) and not is_leaf_nontensor(type(value)):
            yield from _tensors(value)


def _place(tensor: Tensor) -> Any:
    """Say where a tensor begins and how its rows lie: tensors that agree in it are views of one buffer."""
    if not is_jagged(tensor):
        layout = tensor.data_ptr(), tensor.dtype, tensor.device, tensor.stride(), tensor.shape[:-1]
        return layout if tensor.dim() and tensor.numel() else id(tensor)
    rows = Ragged.from_jagged(tensor)
    return rows.values.data_ptr(), rows.values.dtype, rows.values.device, tuple(rows.offsets.tolist())


def _copied_dense(tensors: list[Tensor]) -> dict[int, Tensor]:
    if not tensors[0].dim():
        return {id(tensor): tensor.clone() for tensor in tensors}
    longest = max(tensors, key=lambda tensor: tensor.shape[-1]).clone(memory_format=torch.contiguous_format)
    return {id(tensor): longest[..., : tensor.shape[-1]] for tensor in tensors}


def _copied_jagged(tensors: list[Tensor]) -> dict[int, Tensor]:
    rows = [Ragged.from_jagged(tensor) for tensor in tensors]
    most = torch.stack([row.lengths for row in rows]).amax(0)
    whole = Ragged(rows[0].values, rows[0].offsets, most).compact()
    copies = {}
    for tensor, row in zip(tensors, rows, strict=True):
        sizes = None if torch.equal(row.lengths, most) else row.lengths
        copies[id(tensor)] = Ragged(whole.values, whole.offsets, sizes).jagged()
    return copies


def _rebuilt(td: TensorDictBase, copies: dict[int, Tensor]) -> TensorDictBase:
    if isinstance(td, LazyStackedTensorDict):
        return lazy_stack([_rebuilt(part, copies) for part in td.tensordicts], td.stack_dim)
    made = td.empty()
    for key, value in td.items():
        if isinstance(value, Tensor):
            made.set(key, copies[id(value)])
        elif isinstance(value, TensorDictBase) and not is_leaf_nontensor(type(value)):
            made.set(key, _rebuilt(value, copies))
        else:
            made.set(key, value.clone())
    return made
