"""Gradient checkpointing: the layers of a model are computed again in the backward pass instead of being kept.

transformers' own switch works in training mode alone, where dropout would make the log-probs those of no model.
https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ramet.errors import ModelError


@contextlib.contextmanager
def recomputed(model: nn.Module, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Let each layer of `model` keep its input alone; `around` is the context in which it is computed again.

    Raises `ModelError` for a model whose layers transformers does not know how to checkpoint.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that can be checkpointed", hint="leave gradient checkpointing off"
        )
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, around)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _checkpointed(forward: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with around():
            return forward(*args, **kwargs)

    def again(*args: Any, **kwargs: Any) -> Any:
        # Nothing in a layer is random in eval mode: the global random state is neither saved nor set.
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return again
