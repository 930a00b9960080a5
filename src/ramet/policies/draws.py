"""Random numbers by address: a row's uniforms do not depend on what runs beside it, before it or after it."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

from ramet.errors import ModelError
from ramet.scoring.support import Cuts, edge_of, scaled_logits
from ramet.types import Draw

BLOCK = 256
"""How many neighbouring tokens are summed before their sums are: changes the rounding of edges alone."""


def uniforms(draw: Draw, count: int) -> np.ndarray:
    """Return `count` float64 numbers in [0, 1) that are a function of `draw` alone (a Philox counter stream).

    >>> uniforms(Draw(seed=0, prompt=3, member=1), 5)[:2].tolist() == uniforms(Draw(0, 3, 1), 2).tolist()
    True
    """
    address = struct.pack("<4Q", *(number % 2**64 for number in (draw.seed, draw.prompt, draw.member, draw.turn)))
    key = hashlib.blake2b(address, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.random(count)


@torch.no_grad()
def draw_tokens(
    logits: Tensor, points: Tensor, temperatures: Tensor, cuts: Cuts | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by the inverse of the cumulative distribution.

    `logits` [B, V], `points` float64 [B] in [0, 1), `temperatures` float [B]; 0 takes the largest logit. `cuts` hold
    the support of each row, None where every token may be drawn. Returns tokens int64 [B] and their log-probs float32
    [B] under the distribution that was drawn from, NaN in greedy rows. A token whose probability is 0 is never drawn.
    Raises `ModelError` for a row whose logits are no distribution (NaN, +inf, or nothing but -inf).

    >>> tokens, _ = draw_tokens(torch.log(torch.tensor([[0.25, 0.75]])), torch.tensor([0.2]).double(), torch.ones(1))
    >>> tokens.tolist()
    [0]
    """
    greedy = temperatures == 0
    warm = torch.where(greedy, 1.0, temperatures)
    scaled = scaled_logits(logits, None if bool((warm == 1).all()) else warm)
    weights = scaled.softmax(-1)
    if cuts is not None:
        weights *= edge_of(scaled, cuts).kept(scaled)
    blocks = _blocks(weights)
    # Each block is summed in float32, the blocks in float64: within 1e-6 of the exact edges, in two cheap passes.
    sums = blocks.sum(-1)
    reached = sums.double().cumsum(-1)
    total = reached[:, -1:].contiguous()
    broken = torch.nonzero(total.isnan().squeeze(-1)).flatten()
    if len(broken):
        raise ModelError(
            f"the model's logits are no distribution in row {int(broken[0])} of {len(logits)}: "
            "found NaN, +inf or nothing but -inf",
            hint="look at the learning rate and at the last update's grad_norm; the weights may hold NaN",
        )
    target = points[:, None] * total
    block = _first_above(reached, target)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(-1)].double().cumsum(-1)
    before = torch.where(block > 0, reached.gather(-1, (block - 1).clamp_min(0)), 0.0)
    # The block's own sum in float64 differs from the one in float32: the target keeps its place between its ends.
    share = (target - before) / sums.gather(-1, block).double()
    place = _first_above(inside, share * inside[:, -1:])
    tokens = (block * BLOCK + place).squeeze(-1)
    if bool(greedy.any()):
        tokens = torch.where(greedy, scaled.argmax(-1), tokens)
    # By way of the largest logit, for the probability of a rare token may have lost its digits.
    largest, weight = scaled.amax(-1).double(), blocks.amax((-2, -1)).double()
    log_probs = scaled.gather(-1, tokens[:, None]).squeeze(-1) - largest + (weight / total.squeeze(-1)).log()
    return tokens, torch.where(greedy, torch.nan, log_probs).float()


def _blocks(weights: Tensor) -> Tensor:
    """Return `weights` [B, V] in blocks of neighbours [B, blocks, BLOCK], with zeros behind the vocabulary."""
    rows, vocabulary = weights.shape
    if vocabulary % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK))
    return weights.view(rows, -1, BLOCK)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first place [B, 1] where the cumulative sum [B, n] is above the target [B, 1].

    A target that was rounded up to the last sum means the last place that added anything.
    """
    end = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, target, right=True)
    return torch.minimum(found, torch.searchsorted(cumulative, end, right=False))
