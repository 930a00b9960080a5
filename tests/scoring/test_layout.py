"""`flatten` and `batches` against brute force over each rollout's own path."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.scoring.layout import FlatForest, batches, flatten
from ramet.types import Kind

Turns = list[tuple[Kind, list[int]]]
SAY, ENV = Kind.SAMPLED, Kind.ENVIRONMENT


def forest_of(*rollouts: tuple[list[int], Turns]) -> Forest:
    forest = Forest()
    for group, (prompt, turns) in enumerate(rollouts):
        [number] = forest.plant([torch.tensor(prompt, dtype=torch.int64)], groups=[group], members=[0])
        for kind, tokens in turns:
            row = torch.tensor(tokens, dtype=torch.int64)
            if kind is SAY:
                forest.grow([number], [row], kind, log_probs=[torch.zeros(len(tokens))], versions=[0])
            else:
                forest.grow([number], [row], kind)
    return forest


TOKENS = st.lists(st.integers(0, 2), max_size=5)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
TURNS = st.lists(st.tuples(st.sampled_from([SAY, SAY, ENV]), TOKENS), max_size=4)
ROLLOUTS = st.lists(st.tuples(PROMPTS, TURNS), min_size=1, max_size=8)
"""Three tokens alone, so that prefixes meet by chance, duplicates and rollouts that say nothing included."""


def needed(forest: Forest, rollouts: Sequence[int]) -> tuple[set[int], set[int]]:
    """Return the places that are wanted, and those that a model must see: each path up to before its last wanted."""
    wanted: set[int] = set()
    for number in rollouts:
        rollout = forest.rollouts[number]
        index = forest.node_index(rollout.end).tolist()
        wanted |= {index[at] for at in range(len(index)) if rollout.kinds[at] == SAY}
    seen: set[int] = set()
    for number in rollouts:
        index = forest.node_index(forest.rollouts[number].end).tolist()
        last = max((at for at, place in enumerate(index) if place in wanted), default=0)
        seen |= set(index[:last])
    return wanted, seen


def check(forest: Forest, rollouts: Sequence[int]) -> FlatForest:
    """Compare everything that `flatten` says with brute force."""
    flat = flatten(forest, rollouts)
    wanted, seen = needed(forest, rollouts)
    row, total = flat.index.tolist(), len(flat.index)
    assert len(set(row)) == total == len(flat.layout)
    assert set(row) == seen
    assert sorted(flat.places.tolist()) == sorted(wanted)
    assert {tensor.dtype for tensor in (flat.index, flat.places, flat.sources)} == {torch.int64}
    where = {place: at for at, place in enumerate(row)}
    sources = dict(zip(flat.places.tolist(), flat.sources.tolist(), strict=True))
    expected = np.zeros((total, total), dtype=bool)
    for number in rollouts:
        index = forest.node_index(forest.rollouts[number].end).tolist()
        for at, place in enumerate(index):
            if place in where:
                expected[where[place], [where[above] for above in index[: at + 1]]] = True
                assert flat.layout.positions[where[place]] == at
            if place in sources:
                assert row[sources[place]] == index[at - 1]
    everything = np.arange(total)
    np.testing.assert_array_equal(flat.layout.allowed(everything, everything), expected)
    return flat


@settings(deadline=None, max_examples=80)
@given(rollouts=ROLLOUTS)
def test_any_forest(rollouts: list[tuple[list[int], Turns]]) -> None:
    check(forest := forest_of(*rollouts), range(len(forest.rollouts)))


@settings(deadline=None, max_examples=50)
@given(rollouts=ROLLOUTS, data=st.data())
def test_any_part_of_any_forest_in_any_order(rollouts: list[tuple[list[int], Turns]], data: st.DataObject) -> None:
    """Rollouts may be named twice."""
    forest = forest_of(*rollouts)
    check(forest, data.draw(st.lists(st.integers(0, len(rollouts) - 1), max_size=10)))


def test_by_hand() -> None:
    """A prompt of three tokens, an answer, a longer answer that goes on from it, and another."""
    forest = forest_of(([1, 2, 3], [(SAY, [4, 5])]), ([1, 2, 3], [(SAY, [4, 5, 6])]), ([1, 2, 3], [(SAY, [7])]))
    flat = check(forest, [0, 1, 2])
    assert forest.tokens[flat.index].tolist() == [1, 2, 3, 4, 5]  # 6 and 7 are last: nothing reads them
    assert flat.layout.last.tolist() == [5, 5, 5, 5, 5]
    assert flat.layout.positions.tolist() == [0, 1, 2, 3, 4]
    said = dict(zip(forest.tokens[flat.places].tolist(), flat.sources.tolist(), strict=True))
    assert said == {4: 2, 5: 3, 6: 4, 7: 2}


def test_words_of_the_environment() -> None:
    """In the middle they are seen and not wanted; at the end they are not even seen."""
    forest = forest_of(([1], [(SAY, [4]), (ENV, [5, 6]), (SAY, [7, 8]), (ENV, [9, 9])]))
    flat = check(forest, [0])
    assert forest.tokens[flat.index].tolist() == [1, 4, 5, 6, 7]
    assert sorted(forest.tokens[flat.places].tolist()) == [4, 7, 8]


def test_a_token_that_one_rollout_said_and_another_was_told() -> None:
    forest = forest_of(([1, 2], [(ENV, [3]), (SAY, [4])]), ([1, 2], [(SAY, [3])]))
    assert sorted(forest.tokens[check(forest, [0, 1]).places].tolist()) == [3, 4]
    assert sorted(forest.tokens[check(forest, [0]).places].tolist()) == [4]
    assert sorted(forest.tokens[check(forest, [1]).places].tolist()) == [3]


def test_rollouts_that_said_nothing_need_nothing() -> None:
    forest = forest_of(([1, 2, 3], []), ([4, 5], [(ENV, [6])]), ([7, 8], [(SAY, [])]), ([], []))
    flat = check(forest, [0, 1, 2, 3])
    assert len(flat.index) == len(flat.places) == len(flat.layout) == 0
    beside = forest_of(([1, 2, 3], []), ([1, 2, 4], [(SAY, [5])]), ([9, 9], []))
    assert beside.tokens[check(beside, [0, 1, 2]).index].tolist() == [1, 2, 4]


def test_no_rollouts() -> None:
    flat = check(forest_of(([1], [(SAY, [2])])), [])
    assert len(flat.index) == len(flat.places) == len(flat.sources) == 0


@pytest.mark.parametrize("others", [[], [([1, 2], [(SAY, [3])])], [([5], [(ENV, [1]), (SAY, [3])])]])
def test_a_sampled_first_token_has_no_distribution(others: list[tuple[list[int], Turns]]) -> None:
    forest = forest_of(*others, ([], [(SAY, [5, 6])]))
    with pytest.raises(ForestError, match=r"no token before it[\s\S]*beginning-of-text"):
        flatten(forest, range(len(forest.rollouts)))
    check(forest, range(len(others)))  # without that rollout the others are scored


def test_an_empty_prompt_is_fine_where_the_environment_speaks_first() -> None:
    forest = forest_of(([], [(ENV, [1, 2]), (SAY, [3])]))
    assert forest.tokens[check(forest, [0]).index].tolist() == [1, 2]


def test_a_deep_forest_is_no_deep_recursion() -> None:
    """A rollout of 500 turns: twice as many nodes on one path."""
    forest = forest_of(([1], [(SAY, [2]), (ENV, [3])] * 500), ([1], [(SAY, [2, 2])]))
    flat = flatten(forest, range(2))
    assert len(flat.places) == 500 + 1
    assert flat.layout.positions.max() == 998  # the prompt and 998 more stand before the last token that was said


# ---------------------------------------------------------------- batches


def distinct(forest: Forest, rollouts: Sequence[int]) -> int:
    return len({place for number in rollouts for place in forest.node_index(forest.rollouts[number].end).tolist()})


@settings(deadline=None, max_examples=60)
@given(rollouts=ROLLOUTS, budget=st.integers(0, 40), data=st.data())
def test_batches_keep_to_the_budget_and_lose_nothing(
    rollouts: list[tuple[list[int], Turns]], budget: int, data: st.DataObject
) -> None:
    """In order, each rollout once, within the budget where it can be, and no tree cut that fits."""
    forest = forest_of(*rollouts)
    numbers = data.draw(st.permutations(range(len(rollouts))))
    found = list(batches(forest, numbers, budget))
    assert [number for batch in found for number in batch] == list(numbers)
    for batch in found:
        assert batch
        assert len(batch) == 1 or distinct(forest, batch) <= budget
    # The nodes below the empty prefix begin with different tokens, so neighbours with one first token are one tree.
    for _, neighbours in itertools.groupby(numbers, lambda number: int(forest.path(number)[0])):
        tree = list(neighbours)
        assert distinct(forest, tree) > budget or any(set(tree) <= set(batch) for batch in found)


def test_a_shared_prompt_counts_once_a_batch() -> None:
    forest = forest_of(*[([1, 2, 3, 4], [(SAY, [5, number])]) for number in range(4)])
    assert list(batches(forest, range(4), 7)) == [[0, 1], [2, 3]]  # 4 + 1 + 2
    assert list(batches(forest, range(4), 9)) == [[0, 1, 2, 3]]
    assert list(batches(forest, range(4), 1)) == [[0], [1], [2], [3]]


def test_no_rollouts_are_no_batch() -> None:
    assert list(batches(forest_of(([1], [(SAY, [2])])), [], 10)) == []


def test_batches_are_cut_between_trees_where_a_tree_fits() -> None:
    """Trees of 4 + 2 x 3 = 10 tokens under a budget of 15: one tree a batch, and room that is left stays unused."""
    forest = Forest()
    for group in range(3):
        prompt = torch.tensor([10 * group, 1, 2, 3])
        numbers = forest.plant([prompt] * 2, groups=[group] * 2, members=[0, 1])
        answers = [torch.tensor([4, 5, 6]), torch.tensor([7, 8, 9])]
        forest.grow(numbers, answers, Kind.SAMPLED, log_probs=[torch.zeros(3)] * 2, versions=[0, 0])
    assert list(batches(forest, range(6), 15)) == [[0, 1], [2, 3], [4, 5]]
    assert list(batches(forest, range(6), 20)) == [[0, 1, 2, 3], [4, 5]]
    assert list(batches(forest, range(6), 8)) == [[0], [1], [2], [3], [4], [5]]
