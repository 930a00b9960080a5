"""The flat engine: every distinct token of many trees once, as one row, with tree attention in a stock model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ramet.attention.blocks import Blocks, Layout
from ramet.attention.registration import Attending
from ramet.attention.tree import Rule, tree_attention
from ramet.forest import Forest
from ramet.scoring.halves import Halves
from ramet.scoring.layout import FlatForest, batches, flatten
from ramet.scoring.recompute import recomputed
from ramet.scoring.rows import Options, spread
from ramet.scoring.running import autocast_context


class TreeScoring:
    """The `Attention` of a forward pass over a layout: nothing is remembered from one layer to the next."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._blocks: dict[int | None, Blocks] = {}

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Return the attention output [T, Hq, E]."""
        if rule.window not in self._blocks:
            self._blocks[rule.window] = self._layout.blocks(rule.window, self._device)
        return tree_attention(query, key, value, self._blocks[rule.window], rule)


def score_flat(
    model: nn.Module, forest: Forest, rollouts: Sequence[int], options: Options
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies [number of tokens], NaN where nothing was asked for, as `score_rows` does."""
    places, log_probs, entropies = [], [], []
    parts = [list(rollouts)] if options.max_tokens is None else [*batches(forest, rollouts, options.max_tokens)]
    scored = torch.zeros(len(forest.tokens), dtype=torch.bool)
    for part in parts:
        flat = flatten(forest, part)
        fresh = ~scored[flat.places]  # a token that two batches share is scored in the first
        scored[flat.places] = True
        if not bool(fresh.any()):
            continue
        wanted = flat.sources[fresh], flat.places[fresh]
        values, entropy = _score_batch(model, forest, flat, wanted, options, alone=len(parts) == 1)
        places.append(flat.places[fresh].to(values.device))
        log_probs.append(values)
        entropies.append(entropy)
    return spread(places, log_probs, entropies, len(forest.tokens))


def _score_batch(
    model: nn.Module, forest: Forest, flat: FlatForest, wanted: tuple[Tensor, Tensor], options: Options, *, alone: bool
) -> tuple[Tensor, Tensor | None]:
    """Score the tokens at `wanted` (sources and places as in `FlatForest`); `alone` if its backward pass comes next."""
    device = next(model.parameters()).device
    halves, attending = Halves(model), Attending(model, TreeScoring(flat.layout, device))
    positions = torch.from_numpy(flat.layout.positions)[None].to(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(attending)
        stack.enter_context(autocast_context(device, options.autocast))
        if options.gradient_checkpointing and torch.is_grad_enabled():
            stack.enter_context(recomputed(model, lambda: attending))
        hidden = halves.body(forest.tokens[flat.index][None].to(device), positions)[0]
    sources, places = wanted
    return halves.log_probs(
        hidden[sources.to(device)], forest.tokens[places].to(device), options, keep=alone and options.keep_logits
    )
