"""Trees: what a forest holds below a prefix, and rollouts read back from it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from ramet.envs.hashing import LLMHashingEnv
from ramet.errors import ForestError
from ramet.forest import ROOT, Forest, Tree
from ramet.ragged import rows
from ramet.types import Kind, Outcome, StopReason


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def step(prompt: list[int], answer: list[int], reward: float | None = None, **more: object) -> TensorDict:
    after: dict[str, object] = {"tokens": ids(*prompt, *answer)}
    if reward is not None:
        after["reward"] = torch.tensor([reward])
    return TensorDict({"tokens": ids(*prompt), "tokens_response": ids(*answer), **more, "next": TensorDict(after)})


@pytest.fixture
def forest() -> Forest:
    """Three answers to 1 2, one of which is the beginning of another, and one to 8."""
    made = Forest()
    made.extend(step([1, 2], [5, 6], 1.0, log_probs=torch.tensor([0.5, 0.5]).log()))
    made.extend(step([1, 2], [5, 6, 7], 0.0, log_probs=torch.tensor([0.5, 0.5, 0.2]).log()))
    made.extend(step([1, 2], [4], 0.5))
    made.extend(step([8], [9, 9]))
    return made


GOLDEN = """\
() []  visits 4  value 0.5
  (0,) [1, 2]  visits 3  value 0.5
    (0, 0) [5, 6]  visits 2  value 0.5  prior 0.25
      (0, 0, 0) [7]  visits 1  value 0  prior 0.2
    (0, 1) [4]  visits 1  value 0.5
  (1,) [8]  visits 1
    (1, 0) [9, 9]  visits 1"""

INSIDE = """\
() [1, 2, 5]  visits 2  value 0.5
  (0,) [6]  visits 2  value 0.5
    (0, 0) [7]  visits 1  value 0  prior 0.2"""


def test_a_small_forest_as_text(forest: Forest) -> None:
    assert forest.to_string() == GOLDEN
    assert forest.get_tree().to_string() == GOLDEN


def test_a_prefix_that_ends_inside_a_segment_is_a_root_and_changes_nothing(forest: Forest) -> None:
    tree = forest.get_tree(ids(1, 2, 5))
    assert tree.to_string() == INSIDE
    assert (tree.node, tree.depth, tree.visits, tree.num_children) == (-1, 3, 2, 1)
    assert tree.prefix.tolist() == tree.tokens.tolist() == [1, 2, 5]
    assert math.isnan(tree.prior)
    assert list(tree.valid_paths()) == [(0,), (0, 0)]
    assert forest.to_string() == GOLDEN
    env = LLMHashingEnv(vocab_size=10, eos_token_id=3)
    assert tree.hash == env.reset(TensorDict({"observation": ids(1, 2, 5)}))["hashing"].item()


def test_text_of_tokens_by_decode_and_labels_of_ones_own(forest: Forest) -> None:
    letters: Callable[[list[int]], str] = lambda tokens: "".join(" abcdefghi"[t] for t in tokens)  # noqa: E731
    assert forest.to_string(ids(1, 2), decode=letters).splitlines()[:2] == [
        "() 'ab'  visits 3  value 0.5",
        "  (0,) 'ef'  visits 2  value 0.5  prior 0.25",
    ]
    shown = forest.to_string(ids(1, 2), lambda tree: {"visits": tree.visits})
    assert shown == "() {'visits': 3}\n  (0,) {'visits': 2}\n    (0, 0) {'visits': 1}\n  (1,) {'visits': 1}"


def test_a_forest_of_text_shows_text() -> None:
    forest = Forest()
    for answer in ("bc", "bd"):
        forest.extend(
            TensorDict({"text": "a\n", "text_response": answer, "next": TensorDict({"text": "a\n" + answer})})
        )
    assert forest.to_string("a\n") == (
        "() 'a\\n'  visits 2\n  (0,) 'b'  visits 2\n    (0, 0) 'c'  visits 1\n    (0, 1) 'd'  visits 1"
    )
    assert forest.get_tree(TensorDict({"text": "a\nb"})).num_children == 2


ROOTS: dict[str, Callable[[Forest], object]] = {
    "tokens": lambda _: ids(1, 2),
    "tokens of another integer type": lambda _: ids(1, 2).int(),
    "a node": lambda f: f.parent(f.rollouts[2].end),
    "a TensorDict": lambda _: TensorDict({"tokens": ids(1, 2)}),
    "a TensorDict of one row, padded": lambda _: TensorDict(
        {"tokens": ids(0, 1, 2)[None], "attention_mask": torch.tensor([[False, True, True]])}, [1]
    ),
    "the first step of a rollout": lambda _: step([1, 2], [5]),
    "a prefix": lambda _: TensorDict({"observation": ids(1, 2)}),
    "a stack of one row": lambda _: lazy_stack([TensorDict({"tokens": ids(1, 2)})], 0),
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS.keys())
def test_a_root_is_a_node_or_a_prefix_in_any_form(forest: Forest, root: Callable[[Forest], object]) -> None:
    tree = forest.get_tree(root(forest))  # type: ignore[arg-type]
    assert (tree.prefix.tolist(), tree.visits, tree.num_children) == ([1, 2], 3, 2)
    assert list(tree.valid_paths()) == [(0,), (0, 0), (1,)]


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (ids(1, 2, 7), "begins with these 3 tokens: one begins with the first 2, and then another token comes than 7"),
        (ids(3), "the first 0"),
        (ids(1, 2, 4, 4), "the first 3"),
        (99, "no node 99"),
        (-1, "no node -1"),
        (ids(1)[None], "the root: expected token ids"),
        (torch.tensor([1.0]), "the root: expected token ids"),
        (TensorDict({"tokens": ids(1)[None].expand(2, 1)}, [2]), "of one row"),
        (TensorDict({"other": ids(1)}), "no prefix of tokens"),
        ("ab", "holds tokens"),
    ],
)
def test_a_root_that_is_not_there_is_refused(forest: Forest, root: Tensor | int, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        forest.get_tree(root)


def test_numbers_of_a_tree(forest: Forest) -> None:
    tree = forest.get_tree()
    assert (tree.node, tree.max_length(), tree.num_vertices(), tree.is_terminal) == (ROOT, 3, 7, False)
    assert forest.leaves() == tree.leaves() == [forest.rollouts[n].end for n in (1, 2, 3)]
    assert forest.leaves(ids(8)) == [forest.rollouts[3].end]
    assert sorted(tree.edges()) == sorted((forest.parent(n), n) for n in range(1, forest.node_count))
    assert {n: t.prefix.tolist() for n, t in tree.vertices(key_type="id").items()} == {
        n: forest.tokens[forest.node_index(n)].tolist() for n in range(forest.node_count)
    }
    assert set(tree.vertices()) == {forest.hash(n) for n in range(forest.node_count)}
    by_path = tree.vertices(key_type="path")
    assert by_path[0, 0, 0].tokens.tolist() == [7]
    assert by_path[0, 0, 0].is_terminal
    assert by_path[0, 0].parent is not None
    assert by_path[0, 0].parent.tokens.tolist() == [1, 2]
    last = forest.rollouts[1].end
    assert tree.get_vertex_by_id(last).prefix.tolist() == [1, 2, 5, 6, 7]
    assert tree.get_vertex_by_hash(forest.hash(last)).node == last
    with pytest.raises(KeyError):
        forest.get_tree(ids(8)).get_vertex_by_id(last)
    with pytest.raises(ValueError, match='"id", "hash" or "path"'):
        tree.vertices(key_type="name")  # type: ignore[arg-type]


def test_valid_paths_lead_to_every_place_where_a_rollout_ends(forest: Forest) -> None:
    tree = forest.get_tree()
    assert list(forest.valid_paths()) == [(0, 0), (0, 0, 0), (0, 1), (1, 0)]
    assert {tree.at(path).node for path in tree.valid_paths()} == {r.end for r in forest.rollouts}


def test_a_view_goes_with_the_forest(forest: Forest) -> None:
    tree, inner = forest.get_tree(ids(8)), forest.get_tree(ids(8, 9, 9))
    assert (list(tree.valid_paths()), inner.hash) == ([(0,)], forest.hash(forest.rollouts[3].end))
    forest.extend(step([8, 9], [3]))
    assert list(tree.valid_paths()) == [(0, 0), (0, 1)]
    assert (tree.visits, inner.visits, inner.prefix.tolist()) == (2, 1, [8, 9, 9])


def test_a_forest_without_rollouts_has_no_valid_path() -> None:
    assert list(Forest().valid_paths()) == []
    forest = Forest()
    forest.extend(step([], []))  # one that ends with the empty prefix
    assert list(forest.valid_paths()) == [()]
    assert rows(forest.rollout_from_path(())["next"], "tokens")[0].tolist() == []


def chain(length: int) -> Forest:
    """One rollout, a node for each token."""
    forest = Forest()
    [number] = forest.plant([ids(1)], groups=[0], members=[0])
    for _ in range(length - 1):
        forest.grow([number], [ids(2)], Kind.ENVIRONMENT)
    return forest


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda tree: pickle.loads(pickle.dumps(tree))])
def test_a_tree_deeper_than_the_stack_is_drawn_compared_and_copied(copied: Callable[[Tree], Tree]) -> None:
    deep = chain(1500)
    tree = deep.get_tree()
    while tree.subtree:
        [tree] = tree.subtree
    again = copied(tree)
    assert (again.depth, again.tokens.tolist(), again.hash) == (1500, [2], tree.hash)
    assert again.parent is not None
    assert again.parent.depth == 1499
    assert (again.forest is deep) == (copied is copy.copy)
    assert again.forest.same_as(deep)
    assert deep.to_string(node_format_fn=lambda tree: tree.depth).splitlines()[3] == "      (0, 0, 0) 3"
    assert len(deep.plot().data[1].hovertext) == 1501


# ---------------------------------------------------------------- visits, values, priors


def test_visits_values_and_priors_by_hand(forest: Forest) -> None:
    at = {tuple(forest.get_tree(n).prefix.tolist()): n for n in range(forest.node_count)}
    assert {k: int(forest.visits[n]) for k, n in at.items()} == {
        (): 4, (1, 2): 3, (1, 2, 5, 6): 2, (1, 2, 5, 6, 7): 1, (1, 2, 4): 1, (8,): 1, (8, 9, 9): 1,
    }  # fmt: skip
    values = {k: float(forest.values[n]) for k, n in at.items() if not math.isnan(forest.values[n])}
    assert values == {(): 0.5, (1, 2): 0.5, (1, 2, 5, 6): 0.5, (1, 2, 5, 6, 7): 0.0, (1, 2, 4): 0.5}
    priors = {k: float(forest.priors[n]) for k, n in at.items() if not math.isnan(forest.priors[n])}
    assert priors == pytest.approx({(1, 2, 5, 6): 0.25, (1, 2, 5, 6, 7): 0.2})
    tree = forest.get_tree(ids(1, 2, 5, 6))
    assert (tree.visits, tree.value, tree.prior) == (2, 0.5, pytest.approx(0.25))


def test_a_prior_is_the_mean_of_the_probabilities_of_those_that_sampled_the_whole_segment() -> None:
    forest = Forest()
    for chances in ([0.5, 0.5], [0.5, 0.1]):
        forest.extend(step([1], [5, 6], log_probs=torch.tensor(chances).log()))
    forest.extend(step([1], [5, 6]))  # nobody knows its log-probs
    forest.extend(step([1, 5], [6], log_probs=torch.tensor([0.9]).log()))  # sampled half of what was the segment
    by_prefix = {tuple(forest.get_tree(n).prefix.tolist()): float(forest.priors[n]) for n in range(1, 4)}
    assert by_prefix.pop((1, 5)) == pytest.approx((0.5 + 0.5) / 2)
    assert by_prefix.pop((1, 5, 6)) == pytest.approx((0.5 + 0.1 + 0.9) / 3)
    assert math.isnan(by_prefix.pop((1,)))


def test_tokens_of_the_environment_leave_a_prior_as_it_is() -> None:
    forest = Forest()
    [a] = forest.plant([ids(1)], groups=[0], members=[0])
    forest.grow([a], [ids(2)], Kind.SAMPLED, log_probs=[torch.tensor([-0.5])], versions=[0])
    forest.grow([a], [ids(3)], Kind.ENVIRONMENT)
    assert forest.get_tree(ids(1, 2)).prior == pytest.approx(math.exp(-0.5))
    assert math.isnan(forest.get_tree(ids(1, 2, 3)).prior)


def test_a_judgement_is_the_return_and_one_without_a_score_counts_for_nothing(forest: Forest) -> None:
    forest.rollouts[0].outcome = Outcome.scored(0.25)
    forest.rollouts[2].outcome = Outcome.abstained()
    tree = forest.get_tree(ids(1, 2))
    assert (tree.value, tree.visits) == (pytest.approx((0.25 + 0.0) / 2), 3)
    assert math.isnan(forest.get_tree(ids(1, 2, 4)).value)


# ---------------------------------------------------------------- read back


def check_equal(found: TensorDictBase, expected: TensorDictBase) -> None:
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in found.keys(True, True):
        assert torch.equal(found[key], expected[key]), key
        assert found[key].dtype == expected[key].dtype


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("integer", [torch.int64, torch.int32])
def test_any_path_read_back_is_what_went_in(masked: bool, integer: torch.dtype) -> None:
    env = LLMHashingEnv(vocab_size=50, eos_token_id=49)
    actions = iter(torch.tensor([[5, 5], [6, 6], [7, 8]]))
    prompt = TensorDict({"observation": torch.tensor([[1, 2], [1, 2]], dtype=integer), "answer": torch.ones(2, 3)}, [2])
    if masked:
        prompt["attention_mask"] = torch.tensor([[0, 1], [1, 1]])
    td = env.rollout(3, lambda td: td.set("action", next(actions)[:, None]), tensordict=prompt)
    forest = Forest()
    forest.extend(td)
    tree = forest.get_tree()
    paths = list(tree.valid_paths())
    assert len(paths) == 2
    for number, path in enumerate(paths):
        back = tree.rollout_from_path(path)
        assert back.batch_size == (3,)
        for t in range(3):
            expected = td[:, t][number].clone()
            if masked:  # padding is not kept
                for part in (expected, expected["next"]):
                    real = part["attention_mask"].bool()
                    part["observation"], part["attention_mask"] = (
                        part["observation"][real],
                        part["attention_mask"][real],
                    )
            check_equal(back[t], expected)


def test_rollouts_on_one_path_are_counted_by_which() -> None:
    forest = Forest()
    for reward in (1.0, 0.0):
        forest.extend(step([1], [2], reward))
    given_back = [forest.rollout_from_path((0,), ids(1), which=i)["next", "reward"].item() for i in (0, 1)]
    assert given_back == [1.0, 0.0]
    with pytest.raises(ForestError, match="has 2 rollouts"):
        forest.rollout_from_path((0,), ids(1), which=2)


def test_a_path_to_a_node_where_none_ends_gives_those_that_pass() -> None:
    env, forest = LLMHashingEnv(vocab_size=50, eos_token_id=49), Forest()
    actions = iter(torch.tensor([[5, 5], [6, 6], [7, 8]]))
    start = TensorDict({"observation": torch.tensor([[1, 2], [1, 2]])}, [2])
    td = env.rollout(3, lambda td: td.set("action", next(actions)[:, None]), tensordict=start)
    forest.extend(td)
    back = forest.rollout_from_path((0,), ids(1, 2), which=1)
    assert [t.tolist() for t in rows(back["next"], "observation")] == [[1, 2, 5], [1, 2, 5, 6]]
    below = forest.rollout_from_path((0, 1), ids(1, 2, 5))
    assert [t.tolist() for t in rows(below["next"], "observation")] == [[1, 2, 5, 6], [1, 2, 5, 6, 8]]


def test_steps_are_never_cut() -> None:
    forest = Forest()
    forest.extend(step([1], [2, 3, 4]))
    forest.extend(step([1], [2, 5]))
    back = forest.get_tree(ids(1, 2)).rollout_from_path((0,))
    assert rows(back["next"], "tokens")[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("path", [(2,), (0, 0, 0, 0), (-1,)])
def test_a_path_that_leads_nowhere_is_refused(forest: Forest, path: tuple[int, ...]) -> None:
    with pytest.raises(ForestError, match="no path"):
        forest.rollout_from_path(path, ids(1, 2))


def test_a_planted_rollout_is_given_back_by_its_sampled_runs() -> None:
    forest = Forest()
    [a, b] = forest.plant([ids(1), ids(1)], groups=[4, 4], members=[0, 1])
    forest.grow([a], [ids(2, 3)], Kind.SAMPLED, log_probs=[torch.tensor([-0.5, -1.0])], versions=[6])
    forest.grow([a], [ids(7)], Kind.ENVIRONMENT)
    forest.grow([a], [ids(8)], Kind.SAMPLED, log_probs=[torch.tensor([-2.0])], versions=[7])
    forest.rollouts[a].stop, forest.rollouts[a].outcome = StopReason.NEW_TOKENS, Outcome.scored(0.5)
    td = forest.rollout(a)
    assert [t.tolist() for t in rows(td, "tokens")] == [[1], [1, 2, 3, 7]]
    assert [t.tolist() for t in rows(td, "tokens_response")] == [[2, 3], [8]]
    assert [t.tolist() for t in rows(td, "log_probs")] == [[-0.5, -1.0], [-2.0]]
    assert td["next", "truncated"].tolist() == td["next", "done"].tolist() == [[False], [True]]
    assert td["next", "terminated"].tolist() == [[False], [False]]
    assert td["next", "reward"].tolist() == [[0.0], [0.5]]
    again = Forest()
    [number] = again.extend(td)
    for name in ("kinds", "log_probs", "versions"):
        assert getattr(again.rollouts[number], name).tolist()[1:3] == getattr(forest.rollouts[a], name).tolist()[1:3]
    assert (again.rollouts[number].group, again.rollouts[number].total) == (4, 0.5)
    with pytest.raises(ForestError, match="no sampled token"):
        forest.rollout(b)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 2), max_size=3), st.lists(st.integers(1, 2), max_size=4)), min_size=1)
)
def test_trees_agree_with_rows_kept_as_lists(drawn: list[tuple[list[int], list[int]]]) -> None:
    forest = Forest()
    for prompt, answer in drawn:
        forest.extend(step(prompt, answer, 1.0))
    whole = [p + a for p, a in drawn]
    for _, tree in forest.get_tree()._walk():
        prefix = tree.prefix.tolist()
        assert tree.visits == sum(row[: len(prefix)] == prefix for row in whole)
        assert tree.rollouts == [n for n, row in enumerate(whole) if row == prefix]
    tree = forest.get_tree()
    found = [tree.at(path).prefix.tolist() for path in tree.valid_paths()]
    assert sorted(found) == sorted([list(row) for row in {tuple(row) for row in whole}])
    for path in tree.valid_paths():
        for which, number in enumerate(tree.at(path).rollouts):
            [back] = tree.rollout_from_path(path, which=which).unbind(0)
            assert (back["tokens"].tolist(), back["tokens_response"].tolist()) == drawn[number]
            assert back["next", "tokens"].tolist() == whole[number]
    for row in whole:  # a view at every prefix, inside segments too
        for cut in range(len(row) + 1):
            assert forest.get_tree(ids(*row[:cut])).visits == sum(r[:cut] == row[:cut] for r in whole)


# ---------------------------------------------------------------- the figure


def test_the_figure_has_every_node_once_with_its_line(forest: Forest) -> None:
    figure = forest.plot(ids(1, 2))
    lines, nodes = figure.data
    assert [*nodes.text] == ["3", "2", "1", "1"]
    assert [*nodes.hovertext] == [line.strip() for line in forest.to_string(ids(1, 2)).splitlines()]
    assert ([*nodes.x], [*nodes.y]) == ([0.5, 0.0, 0.0, 1.0], [0, -1, -2, -1])
    assert lines.x.count(None) == 3
    labelled = forest.get_tree(ids(1, 2)).plot(make_labels=lambda tree: f"<b>{tree.visits}")
    assert labelled.data[1].hovertext[0] == "() &lt;b&gt;3"


def test_a_tree_shows_itself(forest: Forest) -> None:
    tree = forest.get_tree(ids(1, 2))
    assert isinstance(tree, Tree)
    assert repr(tree) == "Tree(depth=2, visits=3, children=2)"
