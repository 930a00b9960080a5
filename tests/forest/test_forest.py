"""The forest against an obvious oracle: rows kept as lists, and the set of prefixes where something ends or parts."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest import ROOT, Forest, Sampled
from ramet.forest.hashing import PrefixHash, SipHash, initial, prefix_hashes
from ramet.types import Kind

Prefix: TypeAlias = tuple[int, ...]
Drawn: TypeAlias = list[tuple[list[int], list[tuple[Kind, list[int]]]]]
"""For each row its prompt, and its segments."""


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def constant(pairs: Tensor) -> Tensor:
    return torch.zeros(len(pairs), dtype=torch.int64)


def modulo_3(pairs: Tensor) -> Tensor:
    return pairs.sum(1) % 3


@dataclass
class Row:
    """What a rollout is, without a forest: its segments (kind, tokens, log-probs, version)."""

    group: int
    segments: list[tuple[Kind, list[int], list[float], int]] = field(default_factory=list)

    @property
    def ends(self) -> list[Prefix]:
        path: Prefix = ()
        found = [path]
        for _, tokens, _, _ in self.segments:
            path = (*path, *tokens)
            found.append(path)
        return found


SEGMENTS = st.lists(
    st.tuples(st.sampled_from([Kind.SAMPLED, Kind.ENVIRONMENT]), st.lists(st.integers(0, 2), max_size=4)), max_size=3
)
ROWS = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), SEGMENTS), min_size=1, max_size=7)


def rows_from(drawn: Drawn) -> list[Row]:
    """Number everything, so that a log-prob or a version in the wrong place shows."""
    rows, stamp = [], 0.0
    for group, (prompt, segments) in enumerate(drawn):
        row = Row(group, [(Kind.PROMPT, prompt, [], -1)])
        for turn, (kind, tokens) in enumerate(segments):
            sampled = kind is Kind.SAMPLED
            row.segments.append(
                (kind, tokens, [-(stamp := stamp + 1.0) for _ in tokens] if sampled else [], turn if sampled else -1)
            )
        rows.append(row)
    return rows


def append(forest: Forest, number: int, segment: tuple[Kind, list[int], list[float], int]) -> None:
    kind, tokens, log_probs, version = segment
    if kind is Kind.SAMPLED:
        forest.grow([number], [ids(*tokens)], kind, log_probs=[torch.tensor(log_probs)], versions=[version])
    else:
        forest.grow([number], [ids(*tokens)], kind)


def grown(rows: Sequence[Row], hashing: PrefixHash | None = None, shuffle: random.Random | None = None) -> Forest:
    """Feed the rows in order, or with their operations interleaved at random (each row's own order is kept)."""
    forest = Forest(hashing)
    numbers: dict[int, int] = {}
    turns = [index for index, row in enumerate(rows) for _ in row.segments]
    if shuffle is not None:
        shuffle.shuffle(turns)
    at = Counter[int]()
    for index in turns:
        segment = rows[index].segments[at[index]]
        if at[index] == 0:
            [numbers[index]] = forest.plant([ids(*segment[1])], groups=[rows[index].group], members=[0])
        else:
            append(forest, numbers[index], segment)
        at[index] += 1
    return forest


def content(forest: Forest) -> tuple[frozenset[object], list[object]]:
    """The forest without its numbers: (prefix, prefixes of children) of each node, and every rollout as it is."""
    prefix = {node: tuple(forest.tokens[forest.node_index(node)].tolist()) for node in range(forest.node_count)}
    nodes = [(prefix[n], frozenset(prefix[c] for c in forest.children(n))) for n in prefix]
    assert len(set(nodes)) == len(nodes)  # no prefix has two nodes
    rollouts = sorted(
        (
            r.group,
            prefix[r.end],
            *(tuple(np.nan_to_num(f, nan=9.0).tolist()) for f in (r.kinds, r.log_probs, r.versions)),
        )
        for r in forest.rollouts
    )
    return frozenset(nodes), list(rollouts)


def expected_prefixes(rows: Sequence[Row]) -> set[Prefix]:
    """Every place where a segment of some rollout ended, and every place where two rollouts part."""
    ends = {end for row in rows for end in row.ends} | {()}
    nexts: dict[Prefix, set[int]] = {}
    for row in rows:
        path = row.ends[-1]
        for cut, token in enumerate(path):
            nexts.setdefault(path[:cut], set()).add(token)
    return ends | {prefix for prefix, tokens in nexts.items() if len(tokens) > 1}


@settings(deadline=None, max_examples=40)
@given(ROWS)
def test_nodes_are_exactly_the_ends_and_the_partings(drawn: Drawn) -> None:
    rows = rows_from(drawn)
    forest = grown(rows)
    prefixes = {tuple(forest.tokens[forest.node_index(node)].tolist()) for node in range(forest.node_count)}
    assert prefixes == expected_prefixes(rows)
    assert forest.node_count == len(prefixes)


@settings(deadline=None, max_examples=40)
@given(ROWS)
def test_each_distinct_token_is_stored_once(drawn: Drawn) -> None:
    rows = rows_from(drawn)
    distinct = {end[:cut] for row in rows for end in [row.ends[-1]] for cut in range(1, len(end) + 1)}
    forest = grown(rows)
    assert len(forest.tokens) == len(distinct)
    own = [forest.node_index(node)[forest.depth(forest.parent(node)) :] for node in range(1, forest.node_count)]
    places = torch.cat(own).tolist() if own else []
    assert sorted(places) == list(range(len(forest.tokens)))  # the nodes' own tokens partition the storage


@settings(deadline=None, max_examples=40)
@given(ROWS, st.randoms(use_true_random=False))
def test_rollouts_keep_their_rows_through_every_split(drawn: Drawn, order: random.Random) -> None:
    rows = rows_from(drawn)
    forest = grown(rows, shuffle=order)
    for number, rollout in enumerate(forest.rollouts):
        row = rows[rollout.group]
        tokens = [t for _, part, _, _ in row.segments for t in part]
        kinds = [kind for kind, part, _, _ in row.segments for _ in part]
        log_probs = [
            x
            for kind, part, given, _ in row.segments
            for x in (given if kind is Kind.SAMPLED else [np.nan] * len(part))
        ]
        versions = [version for _, part, _, version in row.segments for _ in part]
        assert forest.path(number).tolist() == tokens
        assert rollout.kinds.tolist() == kinds
        assert rollout.versions.tolist() == versions
        np.testing.assert_array_equal(rollout.log_probs, np.array(log_probs, dtype=np.float32))
        assert (
            len(tokens)
            == len(rollout.kinds)
            == len(rollout.log_probs)
            == len(rollout.versions)
            == forest.depth(rollout.end)
        )


@settings(deadline=None, max_examples=40)
@given(ROWS, st.randoms(use_true_random=False))
def test_any_order_gives_the_same_forest(drawn: Drawn, order: random.Random) -> None:
    rows = rows_from(drawn)
    assert content(grown(rows)) == content(grown(rows, shuffle=order)) == content(grown(rows[::-1]))


@pytest.mark.parametrize("weak", [constant, modulo_3])
@settings(deadline=None, max_examples=40)
@given(drawn=ROWS)
def test_a_weak_hash_changes_nothing(weak: PrefixHash, drawn: Drawn) -> None:
    rows = rows_from(drawn)
    assert content(grown(rows, weak)) == content(grown(rows))


@pytest.mark.parametrize("module", [SipHash(), SipHash(bytes(16)), modulo_3])
@settings(deadline=None, max_examples=30)
@given(drawn=ROWS)
def test_a_nodes_hash_is_the_fold_of_its_prefix(module: PrefixHash, drawn: Drawn) -> None:
    forest = grown(rows_from(drawn), module)
    assert forest.hash(ROOT) == initial(module)
    for node in range(1, forest.node_count):
        prefix = forest.tokens[forest.node_index(node)]
        from_scratch = prefix_hashes(prefix, torch.tensor([0, len(prefix)]), module)
        assert forest.hash(node) == int(from_scratch[-1])


@settings(deadline=None, max_examples=40)
@given(ROWS)
def test_parents_children_and_depths_agree(drawn: Drawn) -> None:
    forest = grown(rows_from(drawn))
    assert (forest.parent(ROOT), forest.depth(ROOT), forest.node_tokens(ROOT).tolist()) == (-1, 0, [])
    for node in range(1, forest.node_count):
        parent = forest.parent(node)
        assert forest.children(parent).count(node) == 1
        assert forest.depth(node) == forest.depth(parent) + len(forest.node_tokens(node))
        assert len(forest.node_tokens(node)) > 0
        assert list(forest.ancestors(node)) == [node, *forest.ancestors(parent)]
    firsts = [[int(forest.node_tokens(c)[0]) for c in forest.children(n)] for n in range(forest.node_count)]
    assert all(len(set(tokens)) == len(tokens) for tokens in firsts)  # children part at their first token


def test_eight_identical_completions_are_one_path_and_eight_rollouts() -> None:
    forest = Forest()
    numbers = forest.plant([ids(5, 6)] * 8, groups=[3] * 8, members=range(8), prompt_indices=[7] * 8)
    log_probs = [torch.tensor([-1.0, -float(i)]) for i in range(8)]
    forest.grow(numbers, [ids(8, 9)] * 8, Kind.SAMPLED, log_probs=log_probs, versions=range(8))
    for number in numbers:
        forest.rollouts[number].advantage = float(number)
    assert forest.tokens.tolist() == [5, 6, 8, 9]
    assert forest.node_count == 3
    assert len({rollout.end for rollout in forest.rollouts}) == 1
    assert [rollout.member for rollout in forest.rollouts] == list(range(8))
    assert [rollout.advantage for rollout in forest.rollouts] == list(range(8))
    assert [rollout.log_probs[-1] for rollout in forest.rollouts] == [-float(i) for i in range(8)]
    assert [rollout.versions.tolist() for rollout in forest.rollouts] == [[-1, -1, i, i] for i in range(8)]
    assert {(rollout.group, rollout.prompt_index) for rollout in forest.rollouts} == {(3, 7)}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_completion_may_be_the_prefix_of_another(order: tuple[int, int]) -> None:
    completions = [ids(7), ids(7, 8, 9)]
    forest = Forest()
    for which in order:
        [number] = forest.plant([ids(5)], groups=[which], members=[0])
        answer = completions[which]
        forest.grow([number], [answer], Kind.SAMPLED, log_probs=[torch.zeros(len(answer))], versions=[0])
    by_group = {rollout.group: rollout.end for rollout in forest.rollouts}
    assert sorted(forest.tokens.tolist()) == [5, 7, 8, 9]
    assert forest.parent(by_group[1]) == by_group[0]
    assert forest.children(by_group[0]) == [by_group[1]]
    assert [forest.path(n).tolist() for n in (order.index(0), order.index(1))] == [[5, 7], [5, 7, 8, 9]]


def test_a_split_leaves_numbers_ends_and_children_right() -> None:
    forest = Forest()
    forest.plant([ids(1, 2, 3, 4), ids(1, 2, 3, 4, 5), ids(1, 2, 3, 4, 6)], groups=[0, 1, 2], members=[0, 0, 0])
    before = [rollout.end for rollout in forest.rollouts]
    children = forest.children(before[0])
    forest.plant([ids(1, 2, 9)], groups=[3], members=[0])
    assert [rollout.end for rollout in forest.rollouts[:3]] == before
    assert forest.children(before[0]) == children
    assert forest.node_tokens(before[0]).tolist() == [3, 4]
    assert forest.node_tokens(forest.parent(before[0])).tolist() == [1, 2]
    forest.plant([ids(1, 2, 3, 4, 6, 7), ids(1, 2, 9, 1)], groups=[4, 5], members=[0, 0])  # found again after the split
    assert sorted(forest.tokens.tolist()) == [1, 1, 2, 3, 4, 5, 6, 7, 9]


def test_empty_prompts_and_completions_are_legal() -> None:
    forest = Forest()
    a, b = forest.plant([ids(), ids(4)], groups=[0, 1], members=[0, 0])
    forest.grow([a, b], [ids(), ids()], Kind.SAMPLED, log_probs=[torch.zeros(0)] * 2, versions=[0, 0])
    assert forest.rollouts[a].end == ROOT
    assert [forest.path(n).tolist() for n in (a, b)] == [[], [4]]
    assert forest.sampled([a, b]).index.numel() == 0
    assert forest.sampled([a, b]).lengths.numel() == 0
    forest.grow([a], [ids(4)], Kind.SAMPLED, log_probs=[torch.tensor([-2.0])], versions=[1])
    assert forest.rollouts[a].end == forest.rollouts[b].end
    assert (forest.rollouts[a].kinds.tolist(), forest.rollouts[b].kinds.tolist()) == ([Kind.SAMPLED], [Kind.PROMPT])


def test_what_was_not_sampled_has_no_log_prob_and_no_version() -> None:
    forest = Forest()
    [a] = forest.plant([ids(1)], groups=[0], members=[0])
    forest.grow([a], [ids(2)], Kind.SAMPLED, log_probs=[torch.tensor([-0.5])], versions=[4])
    forest.grow([a], [ids(3, 3)], Kind.ENVIRONMENT)
    assert np.isnan(forest.rollouts[a].log_probs).tolist() == [True, False, True, True]
    assert forest.rollouts[a].versions.tolist() == [-1, 4, -1, -1]
    assert forest.rollouts[a].kinds.dtype == np.int8
    assert forest.rollouts[a].log_probs.dtype == np.float32
    assert forest.rollouts[a].versions.dtype == np.int32


def test_sampled_tokens_are_flat_in_the_order_that_was_asked_for() -> None:
    forest = Forest()
    a, b = forest.plant([ids(1), ids(1)], groups=[0, 0], members=[0, 1])
    forest.grow(
        [a, b],
        [ids(2, 3), ids(2, 4)],
        Kind.SAMPLED,
        log_probs=[torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0])],
        versions=[5, 6],
    )
    forest.grow([a], [ids(9)], Kind.ENVIRONMENT)
    forest.grow([a], [ids(8)], Kind.SAMPLED, log_probs=[torch.tensor([-7.0])], versions=[6])
    flat: Sampled = forest.sampled([b, a])
    assert forest.tokens[flat.index].tolist() == [2, 4, 2, 3, 8]
    assert flat.row.tolist() == [0, 0, 1, 1, 1]
    assert flat.lengths.tolist() == [2, 2, 3, 3, 3]
    assert flat.log_probs.tolist() == [-3.0, -4.0, -1.0, -2.0, -7.0]
    assert flat.versions.tolist() == [6, 6, 5, 5, 6]
    assert flat.index[0] == flat.index[2]  # the shared token is one token


def test_prompt_and_completion_part_at_the_first_token_that_is_not_prompt() -> None:
    forest = Forest()
    a, b = forest.plant([ids(1, 2), ids(1, 2)], groups=[0, 0], members=[0, 1])
    forest.grow([a], [ids(2, 3)], Kind.SAMPLED, log_probs=[torch.zeros(2)], versions=[0])
    forest.grow([a], [ids(4)], Kind.ENVIRONMENT)
    assert [part.tolist() for part in forest.prompt_and_completion(a)] == [[1, 2], [2, 3, 4]]
    assert [part.tolist() for part in forest.prompt_and_completion(b)] == [[1, 2], []]


def test_the_forest_keeps_copies() -> None:
    """What the caller does to its tensors afterwards changes nothing."""
    forest = Forest()
    prompt, answer, log_probs = ids(1), ids(2), torch.tensor([-1.0])
    [a] = forest.plant([prompt], groups=[0], members=[0])
    forest.grow([a], [answer], Kind.SAMPLED, log_probs=[log_probs], versions=[0])
    for tensor in (prompt, answer, log_probs):
        tensor.fill_(9)
    assert forest.path(a).tolist() == [1, 2]
    assert forest.rollouts[a].log_probs[1] == -1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_log_probs_of_any_float_type_and_ids_of_any_integer_type(dtype: torch.dtype) -> None:
    forest = Forest()
    [a] = forest.plant([ids(1).int()], groups=[0], members=[0])
    log_probs = torch.tensor([-0.5], dtype=dtype, requires_grad=True)
    forest.grow([a], [ids(2).to(torch.uint8)], Kind.SAMPLED, log_probs=[log_probs], versions=[0])
    assert forest.path(a).tolist() == [1, 2]
    assert forest.rollouts[a].log_probs[1] == -0.5


MISTAKES = {
    "a log-prob too few": lambda f: f.grow(
        [0, 1], [ids(7), ids(8, 9)], Kind.SAMPLED, log_probs=[torch.zeros(1)] * 2, versions=[0, 0]
    ),
    "no log-probs": lambda f: f.grow([0, 1], [ids(7), ids(8)], Kind.SAMPLED, versions=[0, 0]),
    "no versions": lambda f: f.grow([0, 1], [ids(7), ids(8)], Kind.SAMPLED, log_probs=[torch.zeros(1)] * 2),
    "log-probs of one row": lambda f: f.grow(
        [0, 1], [ids(7), ids(8)], Kind.SAMPLED, log_probs=[torch.zeros(1)], versions=[0, 0]
    ),
    "versions of one row": lambda f: f.grow(
        [0, 1], [ids(7), ids(8)], Kind.SAMPLED, log_probs=[torch.zeros(1)] * 2, versions=[0]
    ),
    "log-probs [n, 1]": lambda f: f.grow([0], [ids(7)], Kind.SAMPLED, log_probs=[torch.zeros(1, 1)], versions=[0]),
    "log-probs of the environment": lambda f: f.grow(
        [0], [ids(7)], Kind.ENVIRONMENT, log_probs=[torch.zeros(1)], versions=[0]
    ),
    "a version of the environment": lambda f: f.grow([0], [ids(7)], Kind.ENVIRONMENT, versions=[0]),
    "a row too few": lambda f: f.grow([0, 1], [ids(7)], Kind.ENVIRONMENT),
    "a rollout twice": lambda f: f.grow([0, 0], [ids(7), ids(8)], Kind.ENVIRONMENT),
    "an unknown rollout": lambda f: f.grow([0, 2], [ids(7), ids(8)], Kind.ENVIRONMENT),
    "a negative rollout": lambda f: f.grow([-1], [ids(7)], Kind.ENVIRONMENT),
    "tokens that are floats": lambda f: f.grow([0, 1], [ids(7), torch.tensor([1.5])], Kind.ENVIRONMENT),
    "tokens that are bools": lambda f: f.grow([0], [torch.tensor([True])], Kind.ENVIRONMENT),
    "tokens [1, n]": lambda f: f.grow([0, 1], [ids(7), ids(8)[None]], Kind.ENVIRONMENT),
    "a prompt of floats": lambda f: f.plant([ids(3), torch.tensor([1.5])], groups=[0, 0], members=[0, 1]),
    "a prompt [1, n]": lambda f: f.plant([ids(3)[None]], groups=[0], members=[0]),
    "a group too few": lambda f: f.plant([ids(3), ids(4)], groups=[0], members=[0, 1]),
    "a member too few": lambda f: f.plant([ids(3), ids(4)], groups=[0, 0], members=[0]),
    "a prompt index too few": lambda f: f.plant([ids(3), ids(4)], groups=[0, 0], members=[0, 1], prompt_indices=[0]),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_what_does_not_fit_raises_and_changes_nothing(mistake: object) -> None:
    assert callable(mistake)
    forest = Forest()
    forest.plant([ids(1, 2, 3), ids(1, 2)], groups=[0, 1], members=[0, 0])
    before = content(forest), forest.tokens.tolist(), forest.node_count
    with pytest.raises(ForestError):
        mistake(forest)
    assert (content(forest), forest.tokens.tolist(), forest.node_count) == before


def test_a_hashing_module_that_answers_wrongly_plants_nothing() -> None:
    forest = Forest(lambda pairs: constant(pairs) if len(pairs) == 1 else constant(pairs)[:1])
    with pytest.raises(ForestError, match="hashing module"):
        forest.plant([ids(1), ids(2)], groups=[0, 1], members=[0, 0])
    assert (forest.rollouts, forest.tokens.tolist(), forest.node_count) == ([], [], 1)


def test_nothing_at_all_is_legal() -> None:
    forest = Forest()
    assert forest.plant([], groups=[], members=[]) == []
    forest.grow([], [], Kind.ENVIRONMENT)
    assert (forest.node_count, forest.tokens.numel(), forest.sampled([]).index.numel()) == (1, 0, 0)
    assert list(forest.batches([], 10)) == []


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 40), st.randoms(use_true_random=False))
def test_batches_cut_in_order_and_stay_within_the_budget(lengths: list[int], budget: int, order: random.Random) -> None:
    forest = Forest()
    numbers = forest.plant([torch.arange(n) + 10 * i for i, n in enumerate(lengths)], groups=lengths, members=lengths)
    order.shuffle(numbers)
    found = list(forest.batches(numbers, budget))
    assert [number for batch in found for number in batch] == numbers
    for batch in found:
        assert batch
        assert len(batch) == 1 or len(batch) * max(lengths[n] for n in batch) <= budget
    for batch, following in itertools.pairwise(found):  # no batch ends early
        joined = [*batch, following[0]]
        assert len(joined) * max(lengths[n] for n in joined) > budget


def test_rows_longer_than_the_first_buffer_are_kept() -> None:
    forest = Forest()
    rows = [torch.arange(start, start + 3000) for start in (0, 5000)]
    forest.plant(rows, groups=[0, 1], members=[0, 0])
    assert [forest.path(n).tolist() for n in (0, 1)] == [row.tolist() for row in rows]
