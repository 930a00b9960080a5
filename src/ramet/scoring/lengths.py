"""What a model does differently from some length on: windows, chunks, and rotary positions that depend on the length.

Rotary positions of two kinds, "longrope" and "dynamic", are a function of the longest row of a forward pass, so that a
row's log-probs depend on what runs beside it (https://arxiv.org/abs/2402.13753 and https://arxiv.org/abs/2309.00071).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_LENGTHS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window")
"""The names under which configs say how far attention reaches."""


def text_config(model: nn.Module) -> Any:
    """Return the config of the part of `model` that reads text; None for a model without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def lengths_that_change(model: nn.Module) -> tuple[int, ...]:
    """Return the lengths of a path, ascending, beyond which `model` does something that it did not do before.

    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> config = MistralConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, sliding_window=16,
    ...     intermediate_size=8, vocab_size=8, num_key_value_heads=2)
    >>> lengths_that_change(MistralForCausalLM(config))
    (16,)
    """
    config = text_config(model)
    reaches = [getattr(config, name, None) for name in _LENGTHS]
    found = {reach for reach in reaches if isinstance(reach, int) and not isinstance(reach, bool) and reach > 0}
    turns = turning_lengths(config)
    return tuple(sorted(found | set(turns.values())))


def turning_lengths(config: Any) -> dict[str, int]:
    """Return, for "longrope" and "dynamic" rotary positions, the length beyond which they turn in another way."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [one for one in parameters.values() if isinstance(one, Mapping)] or [parameters]
    found: dict[str, int] = {}
    for one in each:  # one for each type of layer, or one for all
        kind = one.get("rope_type")
        if kind == "longrope":
            named = [one.get("original_max_position_embeddings"), getattr(config, "max_position_embeddings", None)]
            found["longrope"] = next(length for length in named if length is not None)
        elif kind is not None and "dynamic" in kind:
            found["dynamic"] = config.max_position_embeddings
    return found


def company(config: Any, length: int) -> tuple[int, ...]:
    """Say which rows may run beside one of `length` tokens without changing it: those of which this is the same."""
    return tuple(
        length if kind == "dynamic" and length > turn else int(length > turn)
        for kind, turn in turning_lengths(config).items()
    )


def forget_lengths(model: nn.Module) -> None:
    """Put "dynamic" rotary positions back as they were made: they stay as the longest row so far left them."""
    if "dynamic" not in turning_lengths(text_config(model)):
        return
    for module in model.modules():
        original = getattr(module, "original_max_seq_len", None)
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, original)
        for name, buffer in dict(module.named_buffers(recurse=False)).items():
            if name.endswith("original_inv_freq"):
                module.register_buffer(name.replace("original_inv_freq", "inv_freq"), buffer.clone(), persistent=False)
