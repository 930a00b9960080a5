"""From logits to the log-probs and entropies of tokens, in pieces: no softmax over everything exists at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ramet.scoring.support import Cuts, Edge, edge_of, scaled_logits
from ramet.types import Support

CHUNK = 1024
"""How many rows of logits are turned into log-probs at once: bounds the memory of the softmax, changes no value."""
CACHED = 2**19
"""How many logits a softmax looks at in one go: few enough to stay in the cache of a CPU between two operations."""
LEAST = -1e4
"""Stands for log 0, whose product with a probability of 0 would be NaN; exp is 0 from far above it on."""


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int = CHUNK,
    support: Support | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs [M] of `targets` int64 [M] under softmax(`logits` / temperature), and entropies [M] if asked.

    `logits` are [M, V] of any float type; the softmax runs in float32 or better, `chunk` rows at a time. Nothing of
    its size is kept for the backward pass, which makes it again from the logits.

    `support` cuts the distribution as the sampler does, and renormalises it; the target itself is always kept, so that
    a token that was drawn from other weights has a log-prob. What is kept is a constant to the gradient.

    >>> values, entropy = token_log_probs(torch.zeros(1, 4), torch.tensor([2]), entropy=True)
    >>> round(values.item(), 4), round(entropy.item(), 4)          # log(1/4), log(4)
    (-1.3863, 1.3863)
    >>> values, _ = token_log_probs(torch.zeros(2, 4), torch.tensor([0, 3]), support=Support(top_k=2))
    >>> [round(value, 4) for value in values.tolist()]             # one of two, and the third beside two
    [-0.6931, -1.0986]
    """
    if logits.shape[:1] != targets.shape:
        raise ValueError(
            f"expected one row of logits for each target: found logits {tuple(logits.shape)}, "
            f"targets {tuple(targets.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1: found {chunk}")
    cuts = None if support is None else Cuts.of([support], logits.device)
    divisor = None if temperature == 1 else torch.full((1,), temperature, dtype=torch.float64, device=logits.device)
    values, entropies = _TokenLogProbs.apply(logits, targets, divisor, cuts, entropy, chunk)  # type: ignore[no-untyped-call]
    return values, entropies


class _TokenLogProbs(torch.autograd.Function):
    """Log-probs and entropies whose backward pass writes the gradient of the logits down, row by row.

    With p the distribution, H its entropy and x the scaled logits: d log p_t / dx_i = [i = t] - p_i, and
    dH / dx_i = -p_i (log p_i + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, divisor: Tensor | None, cuts: Cuts | None, entropy: bool, chunk: int
    ) -> tuple[Tensor, Tensor | None]:
        rows = len(targets)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        values, normalisers, entropies, edge_values = (logits.new_empty(rows, dtype=dtype) for _ in range(4))
        edge_ids = torch.empty_like(targets)
        spans = _spans(logits, chunk)
        # One place for all spans: memory that was just written to is in the cache, and memory that is new is not.
        size = spans[0].stop if spans else 0, logits.shape[-1]
        first = logits.new_empty(size, dtype=dtype)
        second = logits.new_empty(size, dtype=dtype) if entropy else None
        for span in spans:
            scaled, ids = scaled_logits(logits[span], divisor), targets[span]
            edge = None if cuts is None else edge_of(scaled, cuts)
            if edge is not None:
                edge_values[span], edge_ids[span] = edge.value, edge.last
            kept = _kept(scaled, ids, edge)
            normalisers[span], entropies[span] = _normaliser(
                scaled, kept, first[: len(ids)], None if second is None else second[: len(ids)]
            )
            values[span] = scaled.gather(-1, ids[:, None]).squeeze(-1) - normalisers[span]
        ctx.save_for_backward(logits, targets, normalisers, entropies, edge_values, edge_ids, divisor)
        ctx.cut, ctx.chunk = cuts is not None, chunk
        ctx.set_materialize_grads(False)
        return values, entropies if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_values: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, normalisers, entropies, edge_values, edge_ids, divisor = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for span in _spans(logits, ctx.chunk):
            scaled, ids = scaled_logits(logits[span], divisor), targets[span]
            edge = Edge(edge_values[span], edge_ids[span]) if ctx.cut else None
            pull = torch.zeros_like(normalisers[span]) if of_values is None else of_values[span]
            place = gradient[span]
            if of_entropies is None and edge is None:
                into = place if place.dtype == scaled.dtype else torch.empty_like(scaled)
                of_scaled = torch.sub(scaled, normalisers[span, None], out=into).exp_().mul_(-pull[:, None])
            elif of_entropies is None:
                of_scaled = _distribution(scaled, normalisers[span], _kept(scaled, ids, edge))[1].mul_(-pull[:, None])
            else:
                log_p, p = _distribution(scaled, normalisers[span], _kept(scaled, ids, edge))
                log_p.add_(entropies[span, None]).mul_(of_entropies[span, None]).add_(pull[:, None])
                of_scaled = p.mul_(log_p).neg_()
            of_scaled.scatter_add_(-1, ids[:, None], pull[:, None])
            if divisor is not None:
                of_scaled.div_(divisor.to(of_scaled.dtype))
            if of_scaled is not place:
                place.copy_(of_scaled)
        return gradient, None, None, None, None, None


def _spans(logits: Tensor, chunk: int) -> list[slice]:
    """Cut the rows of `logits` [M, V] into runs of at most `chunk`; on a CPU, into runs that stay in its cache."""
    rows, width = logits.shape
    step = chunk if logits.is_cuda else min(chunk, max(1, CACHED // max(1, width)))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _kept(scaled: Tensor, targets: Tensor, edge: Edge | None) -> Tensor | None:
    """Return 1 for the tokens of the support and the target, 0 for the others; None where nothing is cut."""
    return None if edge is None else edge.kept(scaled).scatter_(-1, targets[:, None], 1.0)


def _normaliser(
    scaled: Tensor, kept: Tensor | None, shifted: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """Return the normalisers [M] and the entropies [M], NaN where there is no place for `weights`.

    `shifted` and `weights` [M, V] are written over. With x the logits less their largest, w = exp x and W their sum,
    the entropy is log W - sum(w x) / W.
    """
    largest = scaled.amax(-1, keepdim=True)  # never cut away
    torch.sub(scaled, largest, out=shifted)
    weights = torch.exp(shifted, out=shifted if weights is None else weights)
    if kept is not None:
        weights.mul_(kept)
    mass = weights.sum(-1)
    logs = mass.log()
    if weights is shifted:
        return logs + largest.squeeze(-1), torch.nan
    means = shifted.clamp_(min=LEAST).mul_(weights).sum(-1) / mass
    return logs + largest.squeeze(-1), logs - means


def _distribution(scaled: Tensor, normaliser: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log p, with a finite number in place of -inf, and p, which is 0 outside the support."""
    log_p = scaled - normaliser[:, None]
    p = log_p.exp()
    if kept is not None:
        p.mul_(kept)
    return log_p.clamp_(min=LEAST), p
