"""The plain engine: each distinct path is a padded row of one forward pass. Slow where much is shared, and right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.scoring.head import token_log_probs
from ramet.scoring.running import forward_logits


@dataclass(frozen=True, slots=True)
class Options:
    temperature: float
    entropy: bool
    max_tokens: int | None
    chunk: int
    autocast: torch.dtype | None


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


def score_rows(model: nn.Module, forest: Forest, rows: list[Row], options: Options) -> tuple[Tensor, Tensor | None]:
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


def _in_budget(rows: list[Row], max_tokens: int | None) -> list[list[Row]]:
    if max_tokens is None:
        return [rows] if rows else []
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.index)):  # sorted, so little is padded; values do not depend on it
        if batches and len(row.index) * (len(batches[-1]) + 1) <= max_tokens:
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
