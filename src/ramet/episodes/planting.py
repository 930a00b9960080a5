"""From episodes that were played to the rollouts of a forest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramet.chat import Piece
from ramet.episodes.played import Played
from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.types import Kind


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours in a piece of one kind and one version."""

    kind: Kind
    tokens: Tensor
    log_probs: Tensor
    version: int


def into_forest(played: Sequence[Played], forest: Forest) -> list[list[int]]:
    """Plant each piece of each episode as a rollout; return the numbers of each episode's rollouts.

    They come in the order of `played`, the parts of an episode one behind the other. A piece that comes after the first
    and in which nothing was sampled is left out. Every part has the episode's stop reason and outcome.

    >>> from ramet.types import Sample, Sampling, StopReason
    >>> from ramet.episodes.played import Start
    >>> piece = Piece([5, 6, 7], [Kind.PROMPT, Kind.PROMPT, Kind.SAMPLED], [float("nan")] * 2 + [-0.5], [-1, -1, 0])
    >>> sample = Sample("", "", (5, 6), (7,), {}, StopReason.EOS, group=3, member=0)
    >>> forest = Forest()
    >>> into_forest([Played(Start({}, group=3), (piece,), StopReason.EOS, None, sample)], forest)
    [[0]]
    >>> forest.path(0).tolist(), forest.rollouts[0].group
    ([5, 6, 7], 3)
    """
    parts = [(episode, part, piece) for episode in played for part, piece in enumerate(_kept(episode.pieces))]
    runs = [list(_runs(piece)) for _, _, piece in parts]
    prompts = [of_piece.pop(0).tokens if of_piece and of_piece[0].kind is Kind.PROMPT else _NONE for of_piece in runs]
    numbers = forest.plant(
        prompts,
        groups=[episode.start.group for episode, _, _ in parts],
        members=[episode.start.member for episode, _, _ in parts],
        prompt_indices=[episode.start.prompt_index for episode, _, _ in parts],
        parts=[part for _, part, _ in parts],
    )
    for wave in itertools.zip_longest(*runs):
        for kind in (Kind.SAMPLED, Kind.ENVIRONMENT):
            _grow(forest, kind, [(number, run) for number, run in zip(numbers, wave, strict=True) if _is(run, kind)])
    found: list[list[int]] = []
    for number, (episode, part, _) in zip(numbers, parts, strict=True):
        forest.rollouts[number].stop, forest.rollouts[number].outcome = episode.stop, episode.outcome
        if part == 0:
            found.append([])
        found[-1].append(number)
    return found


_NONE = torch.zeros(0, dtype=torch.int64)


def _kept(pieces: Sequence[Piece]) -> list[Piece]:
    return [piece for place, piece in enumerate(pieces) if place == 0 or Kind.SAMPLED in piece.kinds]


def _runs(piece: Piece) -> Iterator[_Run]:
    """Yield the piece in runs of one kind and version; the first is its prompt, and no other is."""
    lengths = {len(piece.tokens), len(piece.kinds), len(piece.log_probs), len(piece.versions)}
    if len(lengths) != 1:
        raise ForestError(
            f"expected a kind, a log-prob and a version for each token of a piece: found {lengths} of them"
        )
    start = 0
    for (kind, version), members in itertools.groupby(zip(piece.kinds, piece.versions, strict=True)):
        end = start + len(list(members))
        if kind is Kind.PROMPT and start:
            raise ForestError(f"expected the prompt at the beginning of a piece: found more of it at token {start}")
        tokens = torch.tensor(piece.tokens[start:end], dtype=torch.int64)
        yield _Run(kind, tokens, torch.tensor(piece.log_probs[start:end], dtype=torch.float32), version)
        start = end


def _is(run: _Run | None, kind: Kind) -> bool:
    return run is not None and run.kind is kind


def _grow(forest: Forest, kind: Kind, runs: Sequence[tuple[int, _Run]]) -> None:
    if not runs:
        return
    sampled = kind is Kind.SAMPLED
    forest.grow(
        [number for number, _ in runs],
        [run.tokens for _, run in runs],
        kind,
        log_probs=[run.log_probs for _, run in runs] if sampled else None,
        versions=[run.version for _, run in runs] if sampled else None,
    )
