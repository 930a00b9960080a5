"""How a causal model of `transformers` is called."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from ramet.errors import ModelError


def forward_logits(
    model: nn.Module, ids: Tensor, mask: Tensor, *, keep: int, autocast: torch.dtype | None = None
) -> Tensor:
    """Run right-padded rows `ids` [B, L] with `mask` [B, L]; return the logits of the last `keep` columns [B, keep, V].

    Positions are given explicitly where the model takes them. A model that knows `logits_to_keep` computes no more
    logits than that; another's are cut.
    """
    known = forward_parameters(model)
    options: dict[str, Tensor | int | bool] = {"use_cache": False}
    if "position_ids" in known:
        options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
    if "logits_to_keep" in known:
        options["logits_to_keep"] = keep
    with autocast_context(ids.device, autocast):
        logits: Tensor = model(input_ids=ids, attention_mask=mask.long(), **options).logits
    return logits[:, logits.shape[1] - keep :]


def forward_parameters(model: nn.Module) -> Collection[str]:
    """Return the names that `model` takes in its forward pass, seen through wrappers that pass all on (peft's)."""
    inner = getattr(model, "get_base_model", None)
    return inspect.signature((model if inner is None else inner()).forward).parameters


def autocast_context(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Return torch's autocast to `dtype` on `device`, or a context that does nothing for None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextlib.contextmanager
def one_thread(model: nn.Module) -> Iterator[None]:
    """Keep other threads from running `model` as well: sharing changes its attention and its body for the while.

    Raises `ModelError` in the second thread. One thread may be inside several times.
    """
    me = threading.get_ident()
    wrapped = getattr(model, "get_base_model", None)  # peft's wrapper and what it wraps are one model
    key: nn.Module = model if wrapped is None else wrapped()
    with _LOCK:
        thread, depth = _INSIDE.get(key, (me, 0))
        if thread != me:
            raise ModelError(
                f"{type(model).__name__} is being run by another thread, and would be wrong in both",
                hint="score and sample in one thread, or give each a copy of the model",
            )
        _INSIDE[key] = me, depth + 1
    try:
        yield
    finally:
        with _LOCK:
            if depth:
                _INSIDE[key] = me, depth
            else:
                del _INSIDE[key]


_LOCK = threading.Lock()
_INSIDE: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()
