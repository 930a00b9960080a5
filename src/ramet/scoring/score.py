"""`score(model, forest)`: the only way from tokens to log-probs, for training, for references and for checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ramet.errors import ModelError
from ramet.forest import Forest
from ramet.scoring.adapter import WithoutAdapter
from ramet.scoring.budget import tokens_that_fit
from ramet.scoring.check import ENGINES, Engine, engine_for
from ramet.scoring.counting import counted_tokens
from ramet.scoring.head import CHUNK
from ramet.scoring.in_file import InFile
from ramet.scoring.lengths import forget_lengths, text_config
from ramet.scoring.rows import Options
from ramet.scoring.running import one_thread
from ramet.types import Support

Scorer = nn.Module | WithoutAdapter | InFile
"""What can give log-probs."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says of the tokens of a forest: each field is [number of tokens], aligned with `Forest.tokens`.

    NaN where nothing was asked for (prompts, and rollouts that were left out). `entropy` is that of the whole
    next-token distribution at the given temperature, cut to the support if there is one, in nats;
    `reference_log_probs` never carry a gradient. `engine` made the log-probs, for which the model ran `tokens_computed`
    tokens, padding included; the reference's are not counted.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    reference_log_probs: Tensor | None = None
    engine: Engine = "rows"
    tokens_computed: int = 0


def score(
    model: Scorer,
    forest: Forest,
    *,
    rollouts: Sequence[int] | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    reference: Scorer | None = None,
    support: Support | None = None,
    max_tokens: int | None = None,
    chunk: int = CHUNK,
    autocast: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
    engine: Engine | Literal["auto"] = "auto",
) -> Scores:
    """Score every distinct sampled token of `rollouts` (all by default) once, with gradient unless it is switched off.

    `temperature` divides the logits and `support` cuts them, so that the log-probs are those of the distribution that
    was sampled from. `reference` adds the log-probs of a second model, of the same one under its adapter
    (`without_adapter`) or as a file holds it (`in_file`), without gradient. `max_tokens` bounds the tokens of one
    forward pass: without gradient, None stands for what fits into memory, and with gradient for all, since the backward
    pass needs them together; `chunk` bounds the rows of logits in one softmax. With `gradient_checkpointing` each layer
    is computed again in the backward pass instead of being kept. Log-probs are float32 (float64 for a float64 model).

    "flat" and "nodes" run shared prefixes once, "rows" runs each distinct path; "auto" is the first of them that is
    right for the model, as is found out on a small tree on its first use (`ramet.scoring.check`).

    Raises `ForestError` where a sampled token has no token before it, `ModelError` for a model in training mode
    (dropout would make the log-probs those of no model), and `ValueError` for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to score: found {temperature} (greedy decoding has no density)")
    numbers = range(len(forest.rollouts)) if rollouts is None else rollouts
    options = Options(temperature, entropy, max_tokens, chunk, autocast, gradient_checkpointing, support)
    scores = _score("model", model, forest, numbers, options, engine)
    if reference is None:
        return scores
    with torch.no_grad():
        options = replace(options, entropy=False)
        beside = _score("reference", reference, forest, numbers, options, engine)
    return replace(scores, reference_log_probs=beside.log_probs)


def _score(
    name: str,
    scorer: Scorer,
    forest: Forest,
    rollouts: Sequence[int],
    options: Options,
    engine: Engine | Literal["auto"],
) -> Scores:
    with one_thread(scorer if isinstance(scorer, nn.Module) else scorer.model), _module(scorer) as model:
        if model.training:
            raise ModelError(
                f"score: the {name} is in training mode, where dropout makes noise", hint="call model.eval()"
            )
        if len(forest.sampled(rollouts).index) == 0:
            engine = "rows"  # nothing is run
        elif engine == "auto":
            table = forest.nodes.table
            longest = max(table[forest.rollouts[number].end].depth for number in rollouts)
            engine = engine_for(model, longest, gradient_checkpointing=options.gradient_checkpointing)
            if options.max_tokens is None and not torch.is_grad_enabled() and text_config(model) is not None:
                fitting = tokens_that_fit(model, training=False, autocast=options.autocast)
                options = replace(options, max_tokens=fitting)
        forget_lengths(model)
        with counted_tokens(model) as count:
            log_probs, entropy = ENGINES[engine](model, forest, rollouts, options)
    return Scores(log_probs, entropy if options.entropy else None, engine=engine, tokens_computed=count.total)


@contextlib.contextmanager
def _module(scorer: Scorer) -> Iterator[nn.Module]:
    """Give the module that is run; one that is lent for the while has no gradient, for it would be gone by then."""
    if isinstance(scorer, WithoutAdapter):
        with torch.no_grad(), scorer.off() as model:
            yield model
    elif isinstance(scorer, InFile):
        with torch.no_grad(), scorer.lent() as model:
            yield model
    else:
        yield scorer
