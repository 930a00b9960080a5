"""The flat engine: every distinct token of many trees once, as one row, with tree attention in a stock model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ramet.attention.blocks import Blocks, Layout
from ramet.attention.registration import Attending
from ramet.attention.tree import Shape, tree_attention
from ramet.forest import Forest
from ramet.scoring.halves import Halves
from ramet.scoring.layout import batches, flatten
from ramet.scoring.recompute import recomputed
from ramet.scoring.rows import Options, spread
from ramet.scoring.running import autocast_context


class TreeScoring:
    """The `Attention` of a forward pass over a layout: nothing is remembered from one layer to the next."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._blocks: dict[int | None, Blocks] = {}

    def attend(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention output [T, Hq, E]."""
        if window not in self._blocks:
            self._blocks[window] = self._layout.blocks(window, self._device)
        return tree_attention(query, key, value, self._blocks[window], Shape(scale, softcap), sinks)


def score_flat(
    model: nn.Module, forest: Forest, rollouts: Sequence[int], options: Options
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies [number of tokens], NaN where nothing was asked for, as `score_rows` does."""
    places, log_probs, entropies = [], [], []
    parts = [list(rollouts)] if options.max_tokens is None else batches(forest, rollouts, options.max_tokens)
    scored = torch.zeros(len(forest.tokens), dtype=torch.bool)
    for part in parts:
        flat = flatten(forest, part)
        fresh = ~scored[flat.places]  # a token that two batches share is scored in the first
        scored[flat.places] = True
        if not bool(fresh.any()):
            continue
        values, entropy = _score_batch(
            model, forest, flat.index, flat.layout, flat.sources[fresh], flat.places[fresh], options
        )
        places.append(flat.places[fresh].to(values.device))
        log_probs.append(values)
        entropies.append(entropy)
    return spread(places, log_probs, entropies, len(forest.tokens))


def _score_batch(
    model: nn.Module, forest: Forest, index: Tensor, layout: Layout, sources: Tensor, places: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    device = next(model.parameters()).device
    halves, attending = Halves(model), Attending(model, TreeScoring(layout, device))
    positions = torch.from_numpy(layout.positions)[None].to(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(attending)
        stack.enter_context(autocast_context(device, options.autocast))
        if options.gradient_checkpointing and torch.is_grad_enabled():
            stack.enter_context(recomputed(model, lambda: attending))
        hidden = halves.body(forest.tokens[index][None].to(device), positions)[0]
    return halves.log_probs(hidden[sources.to(device)], forest.tokens[places].to(device), options)
