"""Rollouts of environments, taken into a forest, against rows kept as lists."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from ramet.envs.hashing import LLMHashingEnv
from ramet.envs.llm import LLMEnv
from ramet.errors import ForestError, RewardError
from ramet.forest import Forest, MCTSForest
from ramet.forest.hashing import absorb
from ramet.forest.prefixes import Prefixes
from ramet.ragged import Ragged, rows
from ramet.types import Kind, StopReason

Turns: TypeAlias = list[tuple[list[int], list[int]]]
"""Of each step what was written, and what the environment added."""


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def jagged(cells: list[list[int]]) -> Tensor:
    return Ragged.from_rows([ids(*cell) for cell in cells]).jagged()


def left_padded(cells: list[list[int]]) -> tuple[Tensor, Tensor]:
    return Ragged.from_rows([ids(*cell) for cell in cells]).padded("left", 0)


@dataclass
class Row:
    prompt: list[int]
    turns: Turns
    reward: float = 0.0

    def before(self, step: int) -> list[int]:
        return self.prompt + [t for turn in self.turns[:step] for part in turn for t in part]


def played(given: list[Row], layout: str = "jagged") -> TensorDictBase:
    """Play rows of different lengths at once, as `rollout(break_when_all_done=True)` does: [B, T]."""
    steps = []
    for t in range(max(len(row.turns) for row in given)):
        live = [t < len(row.turns) for row in given]
        done = torch.tensor([[t >= len(row.turns) - 1] for row in given])
        wrote = [row.turns[t][0] if on else [9] for row, on in zip(given, live, strict=True)]
        rewards = [[row.reward if t == len(row.turns) - 1 else 0.0] for row in given]
        step = TensorDict(
            {
                "done": ~torch.tensor(live)[:, None],
                "group_id": torch.arange(len(given)),
                "log_probs": Ragged.from_rows([-ids(*w).float() for w in wrote]).jagged(),
                "tokens_response": jagged(wrote),
                "next": {
                    "reward": torch.tensor(rewards),
                    "done": done,
                    "terminated": done,
                    "truncated": torch.zeros_like(done),
                },
            },
            [len(given)],
        )
        for under, at in (((), t), (("next",), t + 1)):
            cells = [row.before(at) for row in given]
            if layout == "jagged":
                step[(*under, "tokens")] = jagged(cells)
            else:
                step[(*under, "tokens")], step[(*under, "attention_mask")] = left_padded(cells)
        steps.append(in_rows(step) if layout == "rows" else step)
    return lazy_stack(steps, 1)


def in_rows(step: TensorDictBase) -> TensorDictBase:
    """The same step as a lazy stack of rows, without padding."""
    parts = []
    for i in range(step.batch_size[0]):
        part = TensorDict({key: step[key][i] for key in ("done", "group_id")}, [])
        part["next"] = TensorDict({key: step["next", key][i] for key in ("reward", "done", "terminated")}, [])
        for key in ("log_probs", "tokens_response"):
            part[key] = rows(step, key)[i]
        part["tokens"] = rows(step, "tokens")[i]
        part["next", "tokens"] = rows(step["next"], "tokens")[i]
        parts.append(part)
    return lazy_stack(parts, 0)


TOKEN = st.integers(1, 3)
TURNS = st.lists(st.tuples(st.lists(TOKEN, max_size=3), st.lists(TOKEN, max_size=2)), min_size=1, max_size=3)
ROWS = st.lists(
    st.builds(Row, st.lists(TOKEN, max_size=3), TURNS, st.sampled_from([0.0, 1.0, 0.5])), min_size=1, max_size=5
)


@pytest.fixture
def hashing_env() -> LLMHashingEnv:
    return LLMHashingEnv(vocab_size=100, eos_token_id=99)


def hashed(env: LLMHashingEnv, prompts: Tensor, actions: Tensor, **options: Any) -> TensorDictBase:
    """Play `actions` [B, T] behind `prompts` [B, L]."""
    taken = iter(actions.unbind(1))

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", next(taken)[:, None])

    start = TensorDict({"observation": prompts}, [len(prompts)])
    return env.rollout(actions.shape[1], policy, tensordict=start, **options)


# ---------------------------------------------------------------- what is read


def test_a_rollout_of_the_hashing_environment(hashing_env: LLMHashingEnv) -> None:
    forest = Forest()
    td = hashed(hashing_env, torch.tensor([[1, 2], [1, 2], [1, 3]]), torch.tensor([[5, 6, 7], [5, 6, 8], [5, 6, 7]]))
    assert forest.extend(td) == [0, 1, 2]
    assert [forest.path(i).tolist() for i in range(3)] == [[1, 2, 5, 6, 7], [1, 2, 5, 6, 8], [1, 3, 5, 6, 7]]
    assert sorted(forest.tokens.tolist()) == [1, 2, 3, 5, 5, 6, 6, 7, 7, 8]
    assert forest.rollouts[0].kinds.tolist() == [Kind.PROMPT] * 2 + [Kind.SAMPLED] * 3
    assert forest.node_count == 8  # the empty prefix, 1, its 2 and 3, 5 6 behind both, and then 7, 8 and 7
    assert [r.stop for r in forest.rollouts] == [None] * 3


def test_the_hash_of_a_node_is_the_environments(hashing_env: LLMHashingEnv) -> None:
    forest = Forest()
    td = hashed(hashing_env, torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]]))
    forest.extend(td)
    last = td[:, -1]["next", "hashing"].flatten().tolist()
    assert [forest.hash(rollout.end) for rollout in forest.rollouts] == last


def test_hashes_of_another_module_or_wrong_ones_are_not_believed(hashing_env: LLMHashingEnv) -> None:
    args = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[5, 6, 7], [5, 6, 8]])
    right = Forest()
    right.extend(hashed(hashing_env, *args))
    other = LLMHashingEnv(vocab_size=100, hashing_module=lambda pairs: pairs.sum(1))
    assert other.eos_token_id is None
    wrong = hashed(hashing_env, *args)
    for step in wrong.unbind(1):
        step["next", "hashing"] = torch.full_like(step["next", "hashing"], 3)
    shifted = hashed(hashing_env, *args)  # each follows from the one before, and the first from nothing
    hashes = torch.tensor([7, 7])
    for step in shifted.unbind(1):
        step["hashing"] = hashes[:, None]
        hashes = absorb(hashes, step["action"][:, 0])
        step["next", "hashing"] = hashes[:, None]
    for td in (hashed(other, *args), wrong, shifted, hashed(hashing_env, *args).exclude("hashing")):
        found = Forest()
        found.extend(td)
        assert {found.hash(n) for n in range(found.node_count)} == {right.hash(n) for n in range(right.node_count)}
        assert [r.segments for r in found.rollouts] == [r.segments for r in right.rollouts]


@pytest.mark.parametrize("layout", ["jagged", "padded", "rows"])
@settings(deadline=None, max_examples=25)
@given(given_rows=ROWS)
def test_paths_kinds_and_log_probs_are_those_of_the_rows_in_every_layout(layout: str, given_rows: list[Row]) -> None:
    forest = Forest()
    assert forest.extend(played(given_rows, layout)) == list(range(len(given_rows)))
    for number, row in enumerate(given_rows):
        rollout = forest.rollouts[number]
        kinds = [Kind.PROMPT] * len(row.prompt)
        log_probs = [np.nan] * len(row.prompt)
        for wrote, added in row.turns:
            kinds += [Kind.SAMPLED] * len(wrote) + [Kind.ENVIRONMENT] * len(added)
            log_probs += [-float(t) for t in wrote] + [np.nan] * len(added)
        assert forest.path(number).tolist() == row.before(len(row.turns))
        assert rollout.kinds.tolist() == kinds
        np.testing.assert_array_equal(rollout.log_probs, np.array(log_probs, dtype=np.float32))
        assert (rollout.group, rollout.member, rollout.stop) == (number, -1, StopReason.STOP)
        assert rollout.total == pytest.approx(row.reward)


@pytest.mark.parametrize("layout", ["dense", "padded", "jagged", "rows", "alone"])
def test_rollouts_of_the_text_generation_environment_in_every_layout(layout: str) -> None:
    env = LLMEnv(from_text=False, eos_token_id=9)
    prompt = {
        "dense": lambda: TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2]),
        "padded": lambda: TensorDict(
            {"tokens": torch.tensor([[0, 1], [3, 4]]), "attention_mask": torch.tensor([[0, 1], [1, 1]]).bool()}, [2]
        ),
        "jagged": lambda: TensorDict({"tokens": jagged([[1], [3, 4]])}, [2]),
        "rows": lambda: lazy_stack([TensorDict({"tokens": ids(1)}, []), TensorDict({"tokens": ids(3, 4)}, [])], 0),
        "alone": lambda: TensorDict({"tokens": ids(3, 4)}, []),
    }[layout]()
    answers = iter(([[5], [6]], [[7], [8]]))

    def policy(td: TensorDictBase) -> TensorDictBase:
        wrote = torch.tensor(next(answers))
        return td.set("tokens_response", wrote if td.batch_dims else wrote[1])

    forest = Forest()
    td = env.rollout(2, policy, tensordict=prompt)
    numbers = forest.extend(td)
    first = {"dense": [1, 2, 5, 7], "alone": [3, 4, 6, 8]}.get(layout, [1, 5, 7])
    assert [forest.path(n).tolist() for n in numbers] == ([first] if layout == "alone" else [first, [3, 4, 6, 8]])


def test_a_step_a_rollout_and_a_rollout_without_batch() -> None:
    whole = played([Row([1], [([2], []), ([3], [])]), Row([4], [([5], []), ([6], [])])])
    by_steps = Forest()
    assert by_steps.extend(whole[:, 0]) == [0, 1]
    assert [by_steps.path(n).tolist() for n in (0, 1)] == [[1, 2], [4, 5]]
    alone = Forest()
    assert alone.extend(whole[1]) == [0]
    assert alone.path(0).tolist() == [4, 5, 6]
    assert len(alone.rollouts[0].steps.starts) == 2  # type: ignore[union-attr]


def test_time_says_whether_one_dimension_is_steps_or_rows() -> None:
    step = TensorDict(
        {
            "tokens": torch.tensor([[1], [2]]),
            "tokens_response": torch.tensor([[5], [6]]),
            "next": {"tokens": torch.tensor([[1, 5], [2, 6]])},
        },
        [2],
    )
    forest = Forest()
    assert forest.extend(step) == [0, 1]
    assert forest.extend(step, time=False) == [2, 3]
    with pytest.raises(ForestError, match="row 0, step 1"):
        forest.extend(step, time=True)
    with pytest.raises(ForestError, match="time=False"):
        forest.extend(played([Row([1], [([2], [])])]), time=False)


def test_a_batch_of_more_dimensions_is_read_row_by_row(hashing_env: LLMHashingEnv) -> None:
    td = hashed(hashing_env, torch.arange(6)[:, None], torch.arange(12).view(6, 2))
    forest = Forest()
    assert forest.extend(lazy_stack([step.reshape(2, 3) for step in td.unbind(1)], 2)) == list(range(6))
    assert [forest.path(n).tolist() for n in range(6)] == [[n, 2 * n, 2 * n + 1] for n in range(6)]


def test_rows_that_ended_give_nothing_more(hashing_env: LLMHashingEnv) -> None:
    start = TensorDict({"observation": jagged([[1], [2]])}, [2])
    taken = iter(torch.tensor([[99, 5], [7, 6], [7, 99]]))
    td = hashing_env.rollout(
        5, lambda td: td.set("action", next(taken)[:, None]), tensordict=start, break_when_all_done=True
    )
    forest = Forest()
    assert (td.batch_size, forest.extend(td)) == ((2, 3), [0, 1])
    assert [forest.path(n).tolist() for n in (0, 1)] == [[1, 99], [2, 5, 6, 99]]
    assert [len(r.steps.starts) for r in forest.rollouts if r.steps is not None] == [1, 3]
    assert [r.stop for r in forest.rollouts] == [StopReason.STOP] * 2
    again = Forest()
    assert again.extend(td.exclude("done")) == [0, 1]  # an observation that stays says that it had ended
    assert [again.path(n).tolist() for n in (0, 1)] == [[1, 99], [2, 5, 6, 99]]


def test_rows_that_a_step_mask_leaves_out_give_nothing() -> None:
    env = LLMEnv(from_text=False, eos_token_id=9)
    td = TensorDict({"tokens": jagged([[1], [2]]), "tokens_response": jagged([[5], [6]])}, [2])
    mask = torch.tensor([True, False])
    first = env.step(td.clone().set("_step", mask)).set("_step", mask)
    then = env.step(env.step_mdp(first).exclude("_step").set("tokens_response", jagged([[7], [8]])))
    forest = Forest()
    assert forest.extend(first) == [0]
    assert forest.extend(lazy_stack([first, then.set("_step", torch.ones(2, dtype=torch.bool))], 1)) == [1, 2]
    assert [forest.path(n).tolist() for n in range(3)] == [[1, 5], [1, 5, 7], [2, 8]]


def reset_in_the_middle(**flags: bool) -> list[TensorDict]:
    """Row 0 ends with step 0 and begins again; row 1 goes on."""
    no = torch.zeros(2, 1, dtype=torch.bool)
    cells = [([[1], [2]], [[5], [6]], [[1, 5], [2, 6]]), ([[3], [2, 6]], [[7], [8]], [[3, 7], [2, 6, 8]])]
    steps = []
    for t, (before, wrote, after) in enumerate(cells):
        done = torch.tensor([[t == 0], [False]])
        steps.append(
            TensorDict(
                {
                    "tokens": jagged(before),
                    "tokens_response": jagged(wrote),
                    "next": {"tokens": jagged(after), "done": done, "terminated": no, "truncated": done},
                },
                [2],
            )
        )
        if flags.get("with_done", True):
            steps[-1]["done"] = no
    return steps


@pytest.mark.parametrize("with_done", [True, False])
def test_a_row_that_was_reset_is_a_rollout_of_its_own(with_done: bool) -> None:
    forest = Forest()
    assert forest.extend(lazy_stack(reset_in_the_middle(with_done=with_done), 1)) == [0, 1, 2]
    assert [forest.path(n).tolist() for n in range(3)] == [[1, 5], [3, 7], [2, 6, 8]]
    assert [r.stop for r in forest.rollouts] == [StopReason.TURNS, None, None]
    assert [r.kinds.tolist() for r in forest.rollouts] == [[0, 1], [0, 1], [0, 1, 1]]


def test_a_rollout_that_goes_on_from_another_is_a_second_one_over_the_shared_path(hashing_env: LLMHashingEnv) -> None:
    forest = Forest()
    first = hashed(hashing_env, torch.tensor([[1, 2]]), torch.tensor([[5, 6, 7]]))
    forest.extend(first)
    tokens = forest.tokens.tolist()
    middle = hashed(hashing_env, torch.tensor([[1, 2, 5]]), torch.tensor([[6, 7, 8]]))
    assert forest.extend(middle) == [1]
    assert [forest.path(n).tolist() for n in (0, 1)] == [[1, 2, 5, 6, 7], [1, 2, 5, 6, 7, 8]]
    assert forest.tokens.tolist() == [*tokens, 8]
    assert [r.kinds.tolist() for r in forest.rollouts] == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]]


def test_rewards_log_probs_and_versions_are_never_merged() -> None:
    forest = Forest()
    count = 8
    td = TensorDict(
        {
            "tokens": torch.tensor([[1, 2]] * count),
            "tokens_response": torch.tensor([[5, 6]] * count),
            "log_probs": -torch.arange(2.0 * count).view(count, 2),
            "policy_version": torch.arange(count),
            "group_id": torch.zeros(count, dtype=torch.int64),
            "repeat_index": torch.arange(count),
            "prompt_index": torch.full((count,), 7),
            "next": {"tokens": torch.tensor([[1, 2, 5, 6]] * count), "reward": torch.arange(8.0)[:, None]},
        },
        [count],
    )
    forest.extend(td)
    assert (forest.node_count, len({r.end for r in forest.rollouts})) == (3, 1)
    assert [r.total for r in forest.rollouts] == list(range(count))
    assert [r.log_probs[2:].tolist() for r in forest.rollouts] == [[-2.0 * i, -2.0 * i - 1] for i in range(count)]
    assert [r.versions.tolist() for r in forest.rollouts] == [[-1, -1, i, i] for i in range(count)]
    assert [(r.group, r.member, r.prompt_index) for r in forest.rollouts] == [(0, i, 7) for i in range(count)]


def test_a_log_prob_that_nobody_wrote_is_not_known_and_never_zero(hashing_env: LLMHashingEnv) -> None:
    forest = Forest()
    forest.extend(hashed(hashing_env, torch.tensor([[1, 2]]), torch.tensor([[5, 6]])))
    assert forest.rollouts[0].kinds.tolist() == [0, 0, 1, 1]
    assert np.isnan(forest.rollouts[0].log_probs).all()
    assert forest.rollouts[0].versions.tolist() == [-1] * 4


def test_a_turn_is_a_segment_and_a_step_of_one_token_is_none() -> None:
    turns = Forest()
    turns.extend(played([Row([1], [([2, 3], [4]), ([5], [])])]))
    assert [turns.node_tokens(n).tolist() for n in range(5)] == [[], [1], [2, 3], [4], [5]]
    steps = Forest()
    steps.extend(played([Row([1], [([2], []), ([3], []), ([4], [])])]))
    assert [steps.node_tokens(n).tolist() for n in range(3)] == [[], [1], [2, 3, 4]]


def test_text_without_tokens_is_a_forest_of_characters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        env = LLMEnv()
    answers = iter((["é🌲", "b"], ["", "cd"]))
    start = TensorDict({"text": NonTensorStack("ab ", "ab")}, [2])
    td = env.rollout(2, lambda td: td.set("text_response", NonTensorStack(*next(answers))), tensordict=start)
    forest = Forest()
    assert forest.extend(td) == [0, 1]
    assert forest.unit == "text"
    assert forest.path(0).tolist() == [ord(c) for c in "ab é🌲"]
    assert forest.path(1).tolist() == [ord(c) for c in "abbcd"]
    assert forest.get_tree("ab ").visits == 1
    assert forest.rollout(0)[1]["next", "text"] == "ab é🌲"
    assert forest.rollout(0)[0]["text_response"] == "é🌲"


def test_tokens_come_before_text_where_there_are_both() -> None:
    step = TensorDict(
        {
            "tokens": ids(1, 2),
            "tokens_response": ids(3),
            "text": "ab",
            "text_response": "c",
            "next": {"tokens": ids(1, 2, 3), "text": "abc"},
        }
    )
    forest = Forest()
    forest.extend(step)
    assert (forest.unit, forest.path(0).tolist()) == ("tokens", [1, 2, 3])
    assert "text" not in forest.rollout(0)[0].keys()  # noqa: SIM118


def test_other_names_and_nested_ones() -> None:
    step = TensorDict(
        {
            "chat": {"ids": torch.tensor([[0, 1]]), "real": torch.tensor([[False, True]])},
            "reply": torch.tensor([[5]]),
            "how_sure": torch.tensor([[-0.5]]),
            "weights": torch.tensor([3]),
            "next": {
                "chat": {"ids": torch.tensor([[0, 1, 5]]), "real": torch.tensor([[False, True, True]])},
                "pay": torch.tensor([[2.0]]),
            },
        },
        [1],
    )
    forest = MCTSForest()
    forest.extend(
        step,
        observation_key=("chat", "ids"),
        action_key="reply",
        mask_key=("chat", "real"),
        reward_key="pay",
        log_prob_key="how_sure",
        version_key="weights",
    )
    [rollout] = forest.rollouts
    assert (forest.path(0).tolist(), rollout.log_probs[1], rollout.versions[1], rollout.total) == ([1, 5], -0.5, 3, 2.0)
    assert forest.rollout(0)[0]["next", "chat", "ids"].tolist() == [1, 5]


def test_nothing_to_read_is_no_rollout() -> None:
    step = played([Row([1], [([2], [])])])[:, 0]
    forest = Forest()
    none = torch.zeros(0, 1, dtype=torch.int64)
    nothing = {"tokens": none, "tokens_response": none, "next": TensorDict({"tokens": torch.cat([none, none], 1)}, [0])}
    assert forest.extend(TensorDict(nothing, [0])) == []
    assert forest.extend(step.set("done", torch.ones(1, 1, dtype=torch.bool))) == []
    assert (forest.node_count, forest.rollouts) == (1, [])


def test_empty_prompts_and_empty_answers_are_legal() -> None:
    forest = Forest()
    assert forest.extend(played([Row([], [([], [])]), Row([], [([4], [])]), Row([4], [([], [])])])) == [0, 1, 2]
    assert [forest.path(n).tolist() for n in range(3)] == [[], [4], [4]]
    assert forest.rollouts[1].end == forest.rollouts[2].end
    assert [len(forest.rollout(n)) for n in range(3)] == [1, 1, 1]


def test_the_forest_keeps_copies(hashing_env: LLMHashingEnv) -> None:
    td = played([Row([1], [([2, 3], [])], 1.0)])
    forest = Forest()
    forest.extend(td)
    for value in (td[:, 0]["next", "tokens"], td[:, 0]["log_probs"]):
        value.values().fill_(7)
    td[:, 0]["next", "reward"].fill_(7)
    assert (forest.path(0).tolist(), forest.rollouts[0].total) == ([1, 2, 3], 1.0)
    assert forest.rollouts[0].log_probs[1:].tolist() == [-2.0, -3.0]


# ---------------------------------------------------------------- properties


@settings(deadline=None, max_examples=15)
@given(ROWS, st.randoms(use_true_random=False))
def test_any_order_and_any_batching_give_the_same_forest(given_rows: list[Row], order: random.Random) -> None:
    one_by_one, at_once = Forest(), Forest()
    at_once.extend(played(given_rows))
    numbered = list(enumerate(given_rows))
    order.shuffle(numbered)
    for number, row in numbered:
        td = played([row])
        for step in td.unbind(1):
            step["group_id"] = torch.tensor([number])
        one_by_one.extend(td)
    assert one_by_one.same_as(at_once)
    by_prefix = [
        {
            tuple(f.get_tree(n).prefix.tolist()): (f.visits[n].item(), repr(f.values[n].item()))
            for n in range(f.node_count)
        }
        for f in (one_by_one, at_once)
    ]
    assert by_prefix[0] == by_prefix[1]


@settings(deadline=None, max_examples=12)
@given(ROWS)
def test_a_hash_that_is_always_the_same_changes_nothing(given_rows: list[Row]) -> None:
    forests = [Forest(lambda pairs: torch.zeros(len(pairs), dtype=torch.int64)), Forest()]
    for forest in forests:
        forest.extend(played(given_rows))
    assert forests[0].to_string() == forests[1].to_string()
    assert [forests[0].path(n).tolist() for n in range(len(given_rows))] == [
        forests[1].path(n).tolist() for n in range(len(given_rows))
    ]


@settings(deadline=None, max_examples=12)
@given(ROWS, ROWS)
def test_what_comes_later_changes_no_earlier_answer(first: list[Row], second: list[Row]) -> None:
    forest = Forest()
    numbers = forest.extend(played(first))
    views = [forest.get_tree(forest.path(n)) for n in numbers]
    before = [forest.path(n).tolist() for n in numbers], [r.end for r in forest.rollouts], [v.hash for v in views]
    forest.extend(played(second))
    after = [forest.path(n).tolist() for n in numbers], [r.end for r in forest.rollouts][: len(numbers)]
    assert (*after, [v.hash for v in views]) == before
    assert [v.prefix.tolist() for v in views] == before[0]


def test_same_as_sees_every_difference() -> None:
    def forest(**changes: Any) -> Forest:
        made = Forest()
        made.extend(played([Row([1], [([2, 3], [])], 1.0)]))
        for name, value in changes.items():
            setattr(made.rollouts[0], name, value)
        return made

    assert forest().same_as(forest())
    assert not forest().same_as(forest(group=5))
    assert not forest().same_as(forest(stop=StopReason.TIMEOUT))
    assert not forest().same_as(forest(steps=None))
    assert not forest().same_as(Forest())
    for other in (Row([1], [([2, 4], [])], 1.0), Row([1], [([2, 3], [])], 0.5), Row([1, 2], [([3], [])], 1.0)):
        different = Forest()
        different.extend(played([other]))
        assert not forest().same_as(different)


# ---------------------------------------------------------------- what is refused


def broken(change: Callable[[LazyStackedTensorDict], object]) -> TensorDictBase:
    td = played([Row([1], [([2], []), ([3], [])]), Row([1], [([4], []), ([5], [])])])
    change(td.tensordicts)  # type: ignore[arg-type, union-attr, attr-defined]
    return td


MISTAKES: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "an observation that is not what came back": (
        lambda steps: steps[1].set("tokens", jagged([[1, 2], [1, 7]])),
        ForestError,
        r"row 1, step 1: the observation \[1, 7\] is not what step 0 came back with, \[1, 4\]",
    ),
    "what came back forgets what was seen": (
        lambda steps: steps[1].set(("next", "tokens"), jagged([[1, 2, 3], [7, 4, 5]])),
        ForestError,
        r"row 1, step 1: the observation \[1, 4\] is not the beginning of what came back, \[7, 4, 5\]",
    ),
    "another action than came back": (
        lambda steps: steps[0].set("tokens_response", jagged([[2], [7]])),
        ForestError,
        r"row 1, step 0: expected the action \[7\] behind what was observed: what came back goes on with \[4\]",
    ),
    "an action that did not come back whole": (
        lambda steps: steps[1].set("tokens_response", jagged([[3, 3], [5]])),
        ForestError,
        r"row 0, step 1: expected the action \[3, 3\]",
    ),
    "a log-prob too many": (
        lambda steps: steps[1].set("log_probs", Ragged.from_rows([torch.zeros(1), torch.zeros(2)]).jagged()),
        ForestError,
        "row 1, step 1: expected a log-prob .* each of 1 tokens .* found 2",
    ),
    "a reward that is no number": (
        lambda steps: steps[0].set(("next", "reward"), torch.tensor([[0.0], [float("nan")]])),
        RewardError,
        "row 1, step 0: the reward",
    ),
    "tokens that are floats": (
        lambda steps: steps[0].set("tokens", torch.tensor([[1.0], [1.0]])),
        ForestError,
        "step 0, .*expected token ids",
    ),
    "actions that are floats": (
        lambda steps: [step.set("tokens_response", torch.ones(2, 1)) for step in steps],
        ForestError,
        "the action: expected token ids",
    ),
    "one number for each row": (
        lambda steps: [step.set("tokens", torch.tensor([1, 2])) for step in steps],
        ForestError,
        "expected token ids, integers with 2 dimensions",
    ),
    "a version for each token": (
        lambda steps: [step.set("policy_version", torch.ones(2, 3)) for step in steps],
        ForestError,
        "expected one version for each step",
    ),
    "no result": (lambda steps: [step.pop("next") for step in steps], ForestError, 'under "next"'),
    "no action": (
        lambda steps: [step.pop("tokens_response") for step in steps],
        ForestError,
        "no prefix with an action",
    ),
    "an action in some steps alone": (lambda steps: steps[1].pop("tokens_response"), ForestError, "in every step"),
    "a result without tokens": (lambda steps: steps[1]["next"].pop("tokens"), ForestError, "no entry .*tokens"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_what_does_not_fit_raises_names_row_and_step_and_changes_nothing(
    mistake: tuple[Callable[[Any], object], type[Exception], str],
) -> None:
    change, error, message = mistake
    forest = Forest()
    forest.extend(played([Row([1], [([2], [])])]))
    before = forest.to_arrays()
    with pytest.raises(error, match=message):
        forest.extend(broken(change))
    after = forest.to_arrays()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in before)


@pytest.mark.parametrize("layout", ["dense", "padded", "jagged", "rows"])
def test_a_token_that_changed_is_found_in_every_layout(layout: str) -> None:
    rows_given = [Row([1], [([2], []), ([3], [])]), Row([4], [([5], []), ([6], [])])]
    td = played(rows_given, "padded" if layout == "dense" else layout)
    last = td.unbind(1)[1]
    if layout == "rows":
        last.unbind(0)[1]["next", "tokens"] = ids(7, 5, 6)
    else:
        last["next", "tokens"] = (
            jagged([[1, 2, 3], [7, 5, 6]]) if layout == "jagged" else torch.tensor([[1, 2, 3], [7, 5, 6]])
        )
    if layout == "dense":
        for step in td.unbind(1):
            for part in (step, step["next"]):
                part.pop("attention_mask")
    with pytest.raises(ForestError, match=r"row 1, step 1: the observation \[4, 5\] is not the beginning of"):
        Forest().extend(td)


def test_a_forest_does_not_mix_tokens_and_text() -> None:
    text = TensorDict({"text": "a", "text_response": "b", "next": TensorDict({"text": "ab"})})
    tokens = TensorDict({"tokens": ids(1), "tokens_response": ids(2), "next": TensorDict({"tokens": ids(1, 2)})})
    of_text, of_tokens = Forest(), Forest()
    of_text.extend(text)
    of_tokens.extend(tokens)
    with pytest.raises(ForestError, match="holds rollouts of text, and these are of tokens"):
        of_text.extend(tokens)
    with pytest.raises(ForestError, match="holds rollouts of text, and these are of tokens"):
        of_text.plant([ids(1)], groups=[0], members=[0])
    with pytest.raises(ForestError, match="holds rollouts of tokens, and these are of text"):
        of_tokens.extend(text)
    with pytest.raises(ForestError, match="holds tokens"):
        of_tokens.get_tree("a")
    assert (len(of_text.rollouts), len(of_tokens.rollouts)) == (1, 1)


def test_a_rollout_with_steps_does_not_grow_without_them() -> None:
    forest = Forest()
    forest.extend(played([Row([1], [([2], [])])]))
    with pytest.raises(ForestError, match="came from an environment"):
        forest.grow([0], [ids(3)], Kind.ENVIRONMENT)


def test_a_prefix_is_seen_to_begin_with_another_whatever_memory_it_is_in() -> None:
    def prefixes(raw: torch.Tensor) -> Prefixes:
        return Prefixes(np.full(len(raw), raw.shape[1]), raw.numpy())

    buffer = torch.arange(12).view(2, 6)
    longer = prefixes(buffer[:, :4])
    same, copy, other = buffer[:, :3], buffer[:, :3].clone(), buffer[:, 1:3]
    changed = copy.clone()
    changed[1, 2] = 0
    found = [longer.begins_with(prefixes(raw)).tolist() for raw in (same, copy, other, changed, buffer[:, :0], buffer)]
    assert found == [[True] * 2, [True] * 2, [False] * 2, [True, False], [True] * 2, [False] * 2]


@pytest.mark.parametrize("name", ["reward_key", "version_key", "log_prob_key"])
def test_a_key_that_is_given_and_is_not_there_is_refused(name: str) -> None:
    """A misspelt name is no rollout without rewards."""
    tokens, answers = torch.tensor([[1]]), torch.tensor([[2]])
    after = TensorDict({"tokens": torch.tensor([[1, 2]]), "reward": torch.ones(1, 1)}, [1])
    step = TensorDict({"tokens": tokens, "tokens_response": answers, "next": after}, [1])
    forest = Forest()
    options: dict[str, Any] = {name: "misspelt"}
    with pytest.raises(ForestError, match=r"under .*misspelt.*there are"):
        forest.extend(step, **options)
    assert not forest.rollouts
    assert forest.extend(step) == [0]
