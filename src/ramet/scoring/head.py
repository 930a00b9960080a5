"""From logits to the log-probs and entropies of tokens, in pieces: no softmax over everything exists at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 1024
"""How many rows of logits are turned into log-probs at once: bounds the memory of the softmax, changes no value."""


def token_log_probs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, entropy: bool = False, chunk: int = CHUNK
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs [M] of `targets` int64 [M] under softmax(`logits` / temperature), and entropies [M] if asked.

    `logits` are [M, V] of any float type; the softmax runs in float32 or better, `chunk` rows at a time, and is
    computed again in the backward pass instead of being kept.

    >>> values, entropy = token_log_probs(torch.zeros(1, 4), torch.tensor([2]), entropy=True)
    >>> round(values.item(), 4), round(entropy.item(), 4)          # log(1/4), log(4)
    (-1.3863, 1.3863)
    """
    if logits.shape[:1] != targets.shape:
        raise ValueError(
            f"expected one row of logits for each target: found logits {tuple(logits.shape)}, "
            f"targets {tuple(targets.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1: found {chunk}")

    def piece(part: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        scaled = (part if part.dtype == torch.float64 else part.float()) / temperature
        normaliser = scaled.logsumexp(-1)
        values = scaled.gather(-1, ids[:, None]).squeeze(-1) - normaliser
        if not entropy:
            return values, values.detach()
        # H = log Z - sum p * x; a logit of -inf has p = 0 and adds nothing.
        weighted = torch.where(scaled.isneginf(), 0.0, scaled) * (scaled - normaliser[:, None]).exp()
        return values, normaliser - weighted.sum(-1)

    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    results: list[tuple[Tensor, Tensor]] = []
    for part, ids in zip(torch.split(logits, chunk), torch.split(targets, chunk), strict=True):
        if needs_gradient:
            # Nothing in a piece is random: the global random state is neither saved nor set.
            results.append(checkpoint(piece, part, ids, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(piece(part, ids))
    if not results:
        return logits.new_zeros(0, dtype=torch.float32), logits.new_zeros(0, dtype=torch.float32) if entropy else None
    values = torch.cat([value for value, _ in results])
    return values, torch.cat([e for _, e in results]) if entropy else None
