"""Visits, values and priors are sums that go with the forest, and always those of the rollouts that there are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.types import Kind, Outcome


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def told_slowly(forest: Forest) -> list[tuple[int, float, float]]:
    """Visits, value and prior of every node, from the rows alone."""
    rows = [forest.path(number).tolist() for number in range(len(forest.rollouts))]
    told = []
    for node in range(forest.node_count):
        prefix = forest.tokens[forest.node_index(node)].tolist()
        start = forest.depth(forest.parent(node)) if node else 0
        through = [r for r, row in zip(forest.rollouts, rows, strict=True) if row[: len(prefix)] == prefix]
        returns = [r.total for r in through if r.total is not None]
        chances = []
        for rollout in through:
            kinds = rollout.kinds[start : len(prefix)].tolist()
            log_probs = [float(x) for x in rollout.log_probs[start : len(prefix)]]
            known = [x for x, kind in zip(log_probs, kinds, strict=True) if kind == Kind.SAMPLED]
            if known and Kind.PROMPT not in kinds and not any(math.isnan(x) for x in known):
                chances.append(math.exp(sum(known)))
        value, prior = (sum(x) / len(x) if x else math.nan for x in (returns, chances))
        told.append((len(through), value, prior))
    return told


def told(forest: Forest) -> list[tuple[int, float, float]]:
    numbers = (forest.visits.tolist(), forest.values.tolist(), forest.priors.tolist())
    return list(zip(*numbers, strict=True))


def check(forest: Forest) -> None:
    np.testing.assert_allclose(told(forest), told_slowly(forest), rtol=1e-6)
    trees = [forest.get_tree(node) for node in range(forest.node_count)]
    np.testing.assert_array_equal([(t.visits, t.value, t.prior) for t in trees], told(forest))
    for node in range(forest.node_count):
        passing = [n for n in range(len(forest.rollouts)) if node in forest.ancestors(forest.rollouts[n].end)]
        assert forest.rollouts_through(node) == passing


def play(forest: Forest, prompt: list[int], answer: list[int], reward: float | None, known: bool) -> None:
    after: dict[str, object] = {"tokens": ids(*prompt, *answer)}
    if reward is not None:
        after["reward"] = torch.tensor([reward])
    step = {"tokens": ids(*prompt), "tokens_response": ids(*answer)}
    if known:
        step["log_probs"] = -torch.arange(1.0, len(answer) + 1) / 4
    forest.extend(TensorDict({**step, "next": TensorDict(after)}))


TOKENS = st.lists(st.integers(1, 2), max_size=5)
PLAYED = st.tuples(st.just("play"), TOKENS, TOKENS, st.sampled_from([None, 0.5, 2.0]), st.booleans())
GROWN = st.tuples(st.just("grow"), st.integers(0, 99), TOKENS, st.booleans())
PLANTED = st.tuples(st.just("plant"), TOKENS)
JUDGED = st.tuples(st.just("judge"), st.integers(0, 99), st.sampled_from([None, 1.0, 1e300]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(PLAYED, GROWN, PLANTED, JUDGED, st.just(("read",))), max_size=14))
def test_whatever_comes_and_whenever_they_are_read_they_are_those_of_the_rows(drawn: list[tuple[object, ...]]) -> None:
    forest, planted = Forest(), list[int]()
    for verb, *of in drawn:
        match verb, of:
            case "play", [list() as prompt, list() as answer, (None | float()) as reward, bool() as known]:
                play(forest, prompt, answer, reward, known)
            case "plant", [list() as prompt]:
                planted += forest.plant([ids(*prompt)], groups=[0], members=[0])
            case "grow", [int() as which, list() as tokens, bool() as sampled] if planted:
                log_probs = [-torch.arange(1.0, len(tokens) + 1) / 8] if sampled else None
                forest.grow(
                    [planted[which % len(planted)]],
                    [ids(*tokens)],
                    Kind.SAMPLED if sampled else Kind.ENVIRONMENT,
                    log_probs=log_probs,
                    versions=[0] if sampled else None,
                )
            case "judge", [int() as which, (None | float()) as score] if forest.rollouts:
                outcome = Outcome.abstained() if score is None else Outcome.scored(score)
                forest.rollouts[which % len(forest.rollouts)].outcome = outcome
            case "read", []:
                check(forest)
    check(forest)


def test_the_upper_part_of_a_cut_inherits_and_priors_are_told_apart() -> None:
    forest = Forest()
    play(forest, [1], [5, 6, 7], 1.0, True)
    assert told(forest)[-1] == (1, 1.0, pytest.approx(math.exp(-1.5)))
    play(forest, [1], [5, 6, 8], 0.0, False)
    at = forest.get_tree(ids(1, 5, 6))
    assert (at.visits, at.value, at.prior) == (2, 0.5, pytest.approx(math.exp(-0.75)))
    assert at.subtree[0].prior == pytest.approx(math.exp(-0.75))


def test_a_judgement_that_is_taken_back_leaves_nothing_behind() -> None:
    forest = Forest()
    for reward in (2.0**100, 0.5):
        play(forest, [1], [2], reward, False)
    assert forest.get_tree(ids(1)).value == 2.0**99
    forest.rollouts[0].outcome = Outcome.scored(1.0)
    assert forest.get_tree(ids(1)).value == 0.75
    forest.rollouts[0].outcome = None
    assert forest.get_tree(ids(1)).value == 2.0**99


def test_a_subset_and_a_loaded_forest_count_their_own() -> None:
    forest = Forest()
    for reward in (1.0, 0.0, 0.5):
        play(forest, [1], [2, 3], reward, True)
    assert forest.subset([0, 2]).visits.tolist() == [2, 2, 2]
    assert forest.subset([0, 2]).values.tolist() == [0.75] * 3
    assert Forest.from_arrays(forest.to_arrays()).values.tolist() == [0.5] * 3


def test_no_rollouts_pass_a_node_that_is_not_there() -> None:
    with pytest.raises(ForestError, match="no node 1"):
        Forest().rollouts_through(1)
