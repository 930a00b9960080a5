"""Random numbers by address: a row's uniforms do not depend on what runs beside it, before it or after it."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

from ramet.errors import ModelError
from ramet.scoring.head import token_log_probs
from ramet.types import Draw


def uniforms(draw: Draw, count: int) -> np.ndarray:
    """Return `count` float64 numbers in [0, 1) that are a function of `draw` alone (a Philox counter stream).

    >>> uniforms(Draw(seed=0, prompt=3, member=1), 5)[:2].tolist() == uniforms(Draw(0, 3, 1), 2).tolist()
    True
    """
    address = struct.pack("<4Q", *(number % 2**64 for number in (draw.seed, draw.prompt, draw.member, draw.turn)))
    key = hashlib.blake2b(address, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.random(count)


def draw_tokens(logits: Tensor, points: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by the inverse of the cumulative distribution.

    `logits` [B, V], `points` float64 [B] in [0, 1), `temperatures` float [B]; 0 takes the largest logit. Returns tokens
    int64 [B] and their log-probs float32 [B] under softmax(logits / temperature), NaN in greedy rows. A token whose
    probability is 0 is never drawn. Raises `ModelError` for a row whose logits are no distribution (NaN, +inf, or
    nothing but -inf).

    >>> tokens, _ = draw_tokens(torch.log(torch.tensor([[0.25, 0.75]])), torch.tensor([0.2]).double(), torch.ones(1))
    >>> tokens.tolist()
    [0]
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    # In float64 the edges between tokens do not move with the batch, nor with 50,000 roundings.
    cumulative = scaled.double().softmax(-1).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    broken = torch.nonzero(total.isnan().squeeze(-1)).flatten()
    if len(broken):
        raise ModelError(
            f"the model's logits are no distribution in row {int(broken[0])} of {len(logits)}: "
            "found NaN, +inf or nothing but -inf",
            hint="look at the learning rate and at the last update's grad_norm; the weights may hold NaN",
        )
    tokens = torch.searchsorted(cumulative, points[:, None] * total, right=True).squeeze(-1)
    # u * total may round up to the total: then the last token that has any probability is meant.
    last = torch.searchsorted(cumulative, total, right=False).squeeze(-1)
    tokens = torch.minimum(tokens, last)
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    log_probs, _ = token_log_probs(scaled, tokens)
    return tokens, torch.where(greedy, torch.nan, log_probs.float())
