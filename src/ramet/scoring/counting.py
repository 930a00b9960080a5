"""What a pass of a model costs: the tokens that it runs, and the bytes that it keeps for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Count:
    """A number that grows while a context lasts."""

    def __init__(self) -> None:
        self.total = 0


@contextlib.contextmanager
def counted_tokens(model: nn.Module) -> Iterator[Count]:
    """Count the tokens, padding included, that `model` runs within: what its input embeddings, or it, is called on."""
    count = Count()
    embeddings: Any = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        embeddings = model.get_input_embeddings()  # type: ignore[operator]

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("input"))
        count.total += ids.numel() if isinstance(ids, Tensor) else 0

    handle = (model if embeddings is None else embeddings).register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()


@contextlib.contextmanager
def counted_saved(own: set[int]) -> Iterator[dict[int, int]]:
    """Count the bytes of each storage that is saved for the backward pass within, but for those in `own`.

    >>> weight = torch.ones(4, 4, requires_grad=True)
    >>> with counted_saved({weight.untyped_storage().data_ptr()}) as saved:
    ...     found = (torch.ones(2, 4) @ weight).exp()                 # keeps its input, and exp its output
    >>> sum(saved.values())
    64
    """
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def own_storages(model: nn.Module) -> set[int]:
    """Return the addresses of the weights and buffers of `model`: they are there anyway."""
    return {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
