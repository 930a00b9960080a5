"""`score(model, forest)`: the only way from tokens to log-probs, for training, for references and for checks.

This version is the plain one: each distinct path is a padded row of one forward pass.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ramet.errors import ForestError, ModelError
from ramet.forest.forest import Forest

CHUNK = 1024
"""How many rows of logits are turned into log-probs at once: bounds the memory of the softmax, changes no value."""


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
    rows = _rows_to_score(forest, numbers)
    options = _Options(temperature, entropy, max_tokens, chunk, autocast)
    log_probs, entropies = _score_rows(model, forest, rows, options)
    reference_log_probs = None
    if reference is not None:
        with torch.no_grad():
            options = _Options(temperature, False, max_tokens, chunk, autocast)
            reference_log_probs, _ = _score_rows(reference, forest, rows, options)
    return Scores(log_probs, entropies if entropy else None, reference_log_probs)


@dataclass(frozen=True, slots=True)
class _Options:
    temperature: float
    entropy: bool
    max_tokens: int | None
    chunk: int
    autocast: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Row:
    """One padded row: where its tokens lie in the forest, and at which of its positions a token is wanted."""

    index: Tensor
    wanted: Tensor


def _rows_to_score(forest: Forest, rollouts: Sequence[int]) -> list[_Row]:
    """Each distinct end that no other end passes through, with every wanted token given to one row alone."""
    sampled = forest.sampled(rollouts)
    open_tokens = torch.zeros(len(forest.tokens), dtype=torch.bool)
    open_tokens[sampled.index] = True
    ends = list(dict.fromkeys(forest.rollouts[number].end for number in rollouts))
    inner = {above for end in ends for above in forest.ancestors(forest.parent(end))}
    rows = []
    for end in ends:
        if end in inner:
            continue
        index = forest.node_index(end)
        wanted = torch.nonzero(open_tokens[index]).squeeze(1)
        if wanted.numel() == 0:
            continue
        if wanted[0] == 0:
            raise ForestError(
                "score: a sampled token has no token before it, so a causal model gives it no distribution",
                hint="start the prompt with a beginning-of-text token",
            )
        open_tokens[index] = False
        rows.append(
            _Row(index[: int(wanted[-1]) + 1], wanted)
        )  # what comes after the last wanted token decides nothing
    return rows


def _score_rows(model: nn.Module, forest: Forest, rows: list[_Row], options: _Options) -> tuple[Tensor, Tensor | None]:
    places, log_probs, entropies = [], [], []
    for batch in _in_budget(rows, options.max_tokens):
        logits, targets, place = _logits_at_wanted(model, forest, batch, options.autocast)
        values, entropy = token_log_probs(
            logits, targets, temperature=options.temperature, entropy=options.entropy, chunk=options.chunk
        )
        places.append(place)
        log_probs.append(values)
        entropies.append(entropy)
    if not places:
        empty = torch.full((len(forest.tokens),), torch.nan)
        return empty, empty.clone() if options.entropy else None
    where = torch.cat(places)
    spread = [_spread(torch.cat(log_probs), where, len(forest.tokens))]
    if options.entropy:
        spread.append(_spread(torch.cat([e for e in entropies if e is not None]), where, len(forest.tokens)))
    return spread[0], spread[1] if options.entropy else None


def _in_budget(rows: list[_Row], max_tokens: int | None) -> list[list[_Row]]:
    if max_tokens is None:
        return [rows] if rows else []
    batches: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: len(row.index)):  # sorted, so little is padded; values do not depend on it
        if batches and len(row.index) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _spread(values: Tensor, where: Tensor, total: int) -> Tensor:
    return torch.full((total,), torch.nan, dtype=values.dtype, device=values.device).index_put((where,), values)


def _logits_at_wanted(
    model: nn.Module, forest: Forest, rows: list[_Row], autocast: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run padded rows; return logits [M, V] before each wanted token, the tokens [M] and their places [M]."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row.index) for row in rows])
    longest = int(lengths.max())
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row.index)] = forest.tokens[row.index]
    mask = torch.arange(longest) < lengths[:, None]
    line = torch.cat([torch.full_like(row.wanted, number) for number, row in enumerate(rows)])
    column = torch.cat([row.wanted for row in rows])
    place = torch.cat([row.index[row.wanted] for row in rows])
    first = int(column.min()) - 1
    logits = forward_logits(model, ids.to(device), mask.to(device), keep=longest - first, autocast=autocast)
    picked = logits[line.to(device), (column - 1 - first).to(device)]
    return picked, ids[line, column].to(device), place.to(device)


def forward_logits(
    model: nn.Module, ids: Tensor, mask: Tensor, *, keep: int, autocast: torch.dtype | None = None
) -> Tensor:
    """Run right-padded rows `ids` [B, L] with `mask` [B, L]; return the logits of the last `keep` columns [B, keep, V].

    Positions are given explicitly where the model takes them. A model that knows `logits_to_keep` computes no more
    logits than that; another's are cut.
    """
    known = forward_parameters(model)
    options: dict[str, Tensor | int | bool] = {"use_cache": False}
    if "position_ids" in known:
        options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
    if "logits_to_keep" in known:
        options["logits_to_keep"] = keep
    with autocast_context(ids.device, autocast):
        logits: Tensor = model(input_ids=ids, attention_mask=mask.long(), **options).logits
    return logits[:, logits.shape[1] - keep :]


def forward_parameters(model: nn.Module) -> Collection[str]:
    """Return the names that `model` takes in its forward pass, seen through wrappers that pass all on (peft's)."""
    inner = getattr(model, "get_base_model", None)
    return inspect.signature((model if inner is None else inner()).forward).parameters


def autocast_context(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Return torch's autocast to `dtype` on `device`, or a context that does nothing for None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


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
