"""`score(model, forest)`: the only way from tokens to log-probs, for training, for references and for checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ramet.errors import ModelError
from ramet.forest import Forest
from ramet.scoring.head import CHUNK
from ramet.scoring.rows import Options, rows_to_score, score_rows


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says of the tokens of a forest: each field is [number of tokens], aligned with `Forest.tokens`.

    NaN where nothing was asked for (prompts, and rollouts that were left out). `entropy` is that of the whole
    next-token distribution at the given temperature, in nats; `reference_log_probs` never carry a gradient.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    reference_log_probs: Tensor | None = None


def score(
    model: nn.Module,
    forest: Forest,
    *,
    rollouts: Sequence[int] | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    reference: nn.Module | None = None,
    max_tokens: int | None = None,
    chunk: int = CHUNK,
    autocast: torch.dtype | None = None,
) -> Scores:
    """Score every distinct sampled token of `rollouts` (all by default) once, with gradient unless it is switched off.

    `temperature` divides the logits, so that the log-probs are those of the distribution that was sampled from.
    `reference` adds the log-probs of a second model, without gradient. `max_tokens` bounds the padded tokens of one
    forward pass; `chunk` the rows of logits in one softmax. Log-probs are float32 (float64 for a float64 model).

    Raises `ForestError` where a sampled token has no token before it, `ModelError` for a model in training mode
    (dropout would make the log-probs those of no model), and `ValueError` for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to score: found {temperature} (greedy decoding has no density)")
    for name, scorer in (("model", model), ("reference", reference)):
        if scorer is not None and scorer.training:
            raise ModelError(
                f"score: the {name} is in training mode, where dropout makes noise", hint="call model.eval()"
            )
    numbers = range(len(forest.rollouts)) if rollouts is None else rollouts
    rows = rows_to_score(forest, numbers)
    options = Options(temperature, entropy, max_tokens, chunk, autocast)
    log_probs, entropies = score_rows(model, forest, rows, options)
    reference_log_probs = None
    if reference is not None:
        with torch.no_grad():
            options = Options(temperature, False, max_tokens, chunk, autocast)
            reference_log_probs, _ = score_rows(reference, forest, rows, options)
    return Scores(log_probs, entropies if entropy else None, reference_log_probs)
