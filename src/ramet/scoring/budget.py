"""How many tokens a pass of a model may run at once: what one of them needs, measured, against the memory there is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ramet.errors import ModelError
from ramet.forest import Forest
from ramet.scoring.check import ENGINES, Engine, at_rest, choice_of, state_of
from ramet.scoring.counting import counted_saved, counted_tokens, own_storages
from ramet.scoring.halves import LOGITS
from ramet.scoring.lengths import lengths_that_change, text_config
from ramet.scoring.memory import FRACTION, Memory, Needs, memory_of, tokens_in
from ramet.scoring.rows import Options
from ramet.scoring.small_tree import small_forest

LOGIT_BYTES = 16
"""What a logit takes while its softmax is differentiated: itself, its probability, its gradient, and one to spare."""
TRAINED = 3
"""What training adds to a weight: its gradient, and the two moments of Adam."""


def tokens_that_fit(
    model: nn.Module,
    *,
    training: bool = True,
    gradient_checkpointing: bool = False,
    autocast: torch.dtype | None = None,
    memory: Memory | None = None,
    fraction: float = FRACTION,
) -> int:
    """Return how many tokens one forward pass of `model` may run, its backward pass included if it is for `training`.

    A power of two, at least 1. `memory` is that of the model's device where none is given, and `fraction` of it is
    planned for; gradients and the moments of Adam count where they are not there yet.
    """
    there = memory_of(next(model.parameters()).device) if memory is None else memory
    needs = needs_of(model, training=training, gradient_checkpointing=gradient_checkpointing, autocast=autocast)
    added = 0
    if training:
        missing = [one for one in model.parameters() if one.requires_grad and one.grad is None]
        added = sum(TRAINED * one.numel() * one.element_size() for one in missing)
    return tokens_in(there, Needs(needs.token, needs.fixed + added), fraction=fraction)


def needs_of(
    model: nn.Module, *, training: bool, gradient_checkpointing: bool, autocast: torch.dtype | None = None
) -> Needs:
    """Measure what a pass keeps for each token on a small tree; it is measured once for a model as it is.

    A model that keeps whole matrices of attention, as BLOOM does, keeps more for a token of a longer path.
    """
    key = (state_of(model), training, gradient_checkpointing, autocast)
    known = _NEEDS.setdefault(model, {})
    if key not in known:
        known[key] = _measure(model, training, gradient_checkpointing, autocast)
    return known[key]


_NEEDS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Needs]] = weakref.WeakKeyDictionary()


def _measure(model: nn.Module, training: bool, gradient_checkpointing: bool, autocast: torch.dtype | None) -> Needs:
    config = text_config(model)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:
        raise ModelError(
            f"{type(model).__name__} has no config that tells its vocabulary, so what it needs can not be measured",
            hint="give max_tokens",
        )
    engine = choice_of(model, gradient_checkpointing=gradient_checkpointing).engine
    layers = max(1, getattr(config, "num_hidden_layers", 1))
    plain = _kept(model, vocabulary, engine, Options(autocast=autocast))
    head = LOGIT_BYTES * max(LOGITS, vocabulary)
    if not training:
        # Nothing is kept, but for the logits of rows; what exists at once is one layer's.
        return Needs(plain.token if engine == "rows" else 2 * plain.token / layers, plain.fixed + head)
    if not gradient_checkpointing:
        return Needs(plain.token, plain.fixed + head)
    kept = _kept(model, vocabulary, engine, Options(autocast=autocast, gradient_checkpointing=True))
    return Needs(kept.token + plain.token / layers, kept.fixed + head)  # and one layer, computed again


def _kept(model: nn.Module, vocabulary: int, engine: Engine, options: Options) -> Needs:
    """Run two trees of different sizes; return the bytes kept for each token more, and those kept for none."""
    limit = min(lengths_that_change(model), default=None)
    forest = small_forest(vocabulary, limit=limit)
    counts = range(2, len(forest.rollouts) + 1, len(forest.rollouts) - 2)
    with at_rest(model), _something_trained(model):
        (few, little), (many, much) = (_pass(model, forest, count, engine, options) for count in counts)
    token = max(1.0, (much - little) / max(1, many - few))
    fixed = max(0, int(little - token * few))
    # Rows have logits at every position behind their prompt, of which the small tree has few: two numbers for each.
    return Needs(token + 2 * 4 * vocabulary if engine == "rows" else token, fixed)


def _pass(model: nn.Module, forest: Forest, count: int, engine: Engine, options: Options) -> tuple[int, int]:
    """Run the first `count` rollouts; return the tokens that were run and the bytes that were kept."""
    with counted_tokens(model) as tokens, counted_saved(own_storages(model)) as saved:
        values, _ = ENGINES[engine](model, forest, range(count), replace(options, keep_logits=False))
        kept = sum(saved.values())
        del values  # only now: what is freed within may leave its address to another
    return tokens.total, kept


@contextlib.contextmanager
def _something_trained(model: nn.Module) -> Iterator[None]:
    """Let a frozen model keep what it would keep if it were trained; freeze it again."""
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    floats = [parameter for parameter in model.parameters() if frozen and parameter.is_floating_point()]
    for parameter in floats:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in floats:
            parameter.requires_grad_(False)
