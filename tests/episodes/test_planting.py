"""From what was played to a forest: one rollout a piece, token for token."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ramet.chat import Piece
from ramet.episodes import Played, Start, into_forest
from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.types import Kind, Outcome, Sample, StopReason

P, S, E = Kind.PROMPT, Kind.SAMPLED, Kind.ENVIRONMENT


def _piece(text: str, versions: str) -> Piece:
    """Make a piece of letters p, s and e for kinds; `versions` has a digit for each that is sampled, else a dash."""
    kinds = [{"p": P, "s": S, "e": E}[letter] for letter in text]
    log_probs = [-0.5 * place if kind is S else math.nan for place, kind in enumerate(kinds)]
    return Piece(
        [100 + place for place in range(len(text))],
        kinds,
        log_probs,
        [-1 if version == "-" else int(version) for version in versions],
    )


def _played(group: int, member: int, *pieces: Piece, outcome: Outcome | None = None) -> Played:
    sample = Sample("", "", (), (), {}, StopReason.EOS, group=group, member=member)
    return Played(Start({}, group, member, prompt_index=group + 1), pieces, StopReason.EOS, outcome, sample)


def test_every_token_keeps_its_kind_its_log_prob_and_its_version() -> None:
    forest = Forest()
    piece = _piece("ppsseess", "--33--45")
    assert into_forest([_played(7, 2, piece, outcome=Outcome.scored(0.5))], forest) == [[0]]
    [rollout] = forest.rollouts
    assert forest.path(0).tolist() == piece.tokens
    assert rollout.kinds.tolist() == piece.kinds
    assert rollout.versions.tolist() == piece.versions
    assert rollout.log_probs.tolist() == pytest.approx(piece.log_probs, nan_ok=True)
    assert (rollout.group, rollout.member, rollout.prompt_index, rollout.part) == (7, 2, 8, 0)
    assert (rollout.stop, rollout.outcome) == (StopReason.EOS, Outcome.scored(0.5))
    assert rollout.segments == [2, 2, 2, 1, 1]  # weights that changed within a turn part it


def test_each_piece_is_a_part_and_parts_stand_one_behind_the_other() -> None:
    forest = Forest()
    outcome = Outcome.scored(1.0)
    numbers = into_forest(
        [
            _played(0, 0, _piece("ps", "-0"), _piece("pppse", "---1-"), outcome=outcome),
            _played(0, 1, _piece("ps", "-0")),
            _played(1, 0, _piece("ps", "-0"), _piece("ppp", "---")),
        ],
        forest,
    )
    assert numbers == [[0, 1], [2], [3]]  # the last piece has nothing that was sampled
    assert [(r.group, r.member, r.part) for r in forest.rollouts] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert forest.episodes == [0, 0, 2, 3]
    assert [rollout.outcome for rollout in forest.rollouts] == [outcome, outcome, None, None]


def test_a_forest_that_is_there_grows() -> None:
    forest = Forest()
    into_forest([_played(0, 0, _piece("ps", "-0"))], forest)
    assert into_forest([_played(0, 1, _piece("ps", "-0")), _played(0, 2, _piece("pss", "-00"))], forest) == [[1], [2]]
    assert into_forest([], forest) == []
    assert forest.node_count == 4  # nothing, the prompt, and two answers, one of which begins the other


def test_an_episode_that_came_to_no_prompt_is_a_rollout_without_tokens(tmp_path: Path) -> None:
    forest = Forest()
    failed = Outcome.error("the prompt: DataError")
    assert into_forest([_played(0, 0, Piece(), outcome=failed), _played(0, 1, _piece("s", "0"))], forest) == [[0], [1]]
    assert forest.path(0).tolist() == []
    assert forest.path(1).tolist() == [100]
    forest.save(tmp_path / "forest.safetensors")
    again = Forest.load(tmp_path / "forest.safetensors")
    assert again.same_as(forest)
    assert again.rollouts[0].outcome == failed


def test_pieces_that_can_not_be_are_refused() -> None:
    short = _piece("ps", "-0")
    short.log_probs.pop()
    with pytest.raises(ForestError, match="for each token of a piece"):
        into_forest([_played(0, 0, short)], Forest())
    with pytest.raises(ForestError, match="more of it at token 2"):
        into_forest([_played(0, 0, _piece("psp", "-0-"))], Forest())
