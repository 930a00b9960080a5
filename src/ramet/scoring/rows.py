"""The plain engine: each distinct path is a padded row of one forward pass. Slow where much is shared, and right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.scoring.head import CHUNK, token_log_probs
from ramet.scoring.lengths import company, forget_lengths, text_config
from ramet.scoring.recompute import recomputed
from ramet.scoring.running import forward_logits
from ramet.types import Support


@dataclass(frozen=True, slots=True)
class Options:
    """How a forest is scored, whichever engine does it: see `score`.

    With `keep_logits` the last chunk of them is kept for a backward pass that comes next: see `Halves.log_probs`.
    """

    temperature: float = 1.0
    entropy: bool = False
    max_tokens: int | None = None
    chunk: int = CHUNK
    autocast: torch.dtype | None = None
    gradient_checkpointing: bool = False
    support: Support | None = None
    keep_logits: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One padded row: where its tokens lie in the forest, and at which of its positions a token is wanted."""

    index: Tensor
    wanted: Tensor


def rows_to_score(forest: Forest, rollouts: Sequence[int]) -> list[Row]:
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
        rows.append(Row(index[: int(wanted[-1]) + 1], wanted))  # what comes after the last wanted token decides nothing
    return rows


def score_rows(
    model: nn.Module, forest: Forest, rollouts: Sequence[int], options: Options
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies [number of tokens], NaN where nothing was asked for.

    Where positions depend on the longest row of a pass, rows run beside their like alone; a token that rows of several
    lengths share has then the log-prob that it has in the first of them.
    """
    places, log_probs, entropies = [], [], []
    config = text_config(model)
    for batch in _in_budget(rows_to_score(forest, rollouts), options.max_tokens, partial(company, config)):
        forget_lengths(model)
        with _layers_kept_or_not(model, options):
            logits, targets, place = _logits_at_wanted(model, forest, batch, options.autocast)
        values, entropy = token_log_probs(
            logits,
            targets,
            temperature=options.temperature,
            entropy=options.entropy,
            chunk=options.chunk,
            support=options.support,
        )
        places.append(place)
        log_probs.append(values)
        entropies.append(entropy)
    return spread(places, log_probs, entropies, len(forest.tokens))


def spread(
    places: list[Tensor], log_probs: list[Tensor], entropies: list[Tensor | None], total: int
) -> tuple[Tensor, Tensor | None]:
    """Put values of batches at their places among `total` tokens: float [total], NaN elsewhere."""
    if not places:
        return torch.full((total,), torch.nan), torch.full((total,), torch.nan)
    where = torch.cat(places)
    known = [entropy for entropy in entropies if entropy is not None]
    return _spread(torch.cat(log_probs), where, total), _spread(torch.cat(known), where, total) if known else None


def _layers_kept_or_not(model: nn.Module, options: Options) -> contextlib.AbstractContextManager[object]:
    if options.gradient_checkpointing and torch.is_grad_enabled():
        return recomputed(model, contextlib.nullcontext)
    return contextlib.nullcontext()


def _in_budget(rows: list[Row], max_tokens: int | None, like: Callable[[int], tuple[int, ...]]) -> list[list[Row]]:
    """Put rows into batches of at most `max_tokens` padded tokens, each of lengths of which `like` is the same."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.index)):  # sorted, so little is padded; values do not depend on it
        fits = max_tokens is None or (batches and len(row.index) * (len(batches[-1]) + 1) <= max_tokens)
        if batches and fits and like(len(row.index)) == like(len(batches[-1][0].index)):
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _spread(values: Tensor, where: Tensor, total: int) -> Tensor:
    return torch.full((total,), torch.nan, dtype=values.dtype, device=values.device).index_put((where,), values)


def _logits_at_wanted(
    model: nn.Module, forest: Forest, rows: list[Row], autocast: torch.dtype | None
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
