"""Text generation: the observation grows by exactly the action, in every layout, and rows end at eos."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    set_capture_non_tensor_stack,
)

import ramet.ragged as ragged
from ramet.envs.check import check_env_specs
from ramet.envs.llm import LLMEnv
from ramet.ragged import Ragged, Text
from ramet.ragged.text import text_of
from ramet.specs import Bounded, Categorical, NonTensor, Unbounded
from ramet.transforms.step_counter import StepCounter

fast = settings(deadline=None, max_examples=40)
EOS = 0  # also what padding is made of, here
LAYOUTS = ["padded", "jagged", "jagged, no mask", "lazy"]


def token_env(**options):
    return LLMEnv(**{"from_text": False, "eos_token_id": EOS, **options})


def ids(rows):
    return [torch.tensor(row, dtype=torch.int64) for row in rows]


def jagged(rows):
    return Ragged.from_rows(ids(rows)).jagged()


def prompts(rows, layout, **more):
    size = [len(rows)]
    made = Ragged.from_rows(ids(rows))
    if layout == "lazy":
        ones = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        return lazy_stack(
            [TensorDict({"tokens": r, "attention_mask": m}, []) for r, m in zip(ids(rows), ones, strict=True)]
        ).update(TensorDict(more, size))
    if layout == "padded":
        tokens, mask = made.padded("left", EOS)
        return TensorDict({"tokens": tokens, "attention_mask": mask, **more}, size)
    mask = {"attention_mask": Ragged.from_rows([r == r for r in ids(rows)]).jagged()} if layout == "jagged" else {}
    return TensorDict({"tokens": made.jagged(), **mask, **more}, size)


def read(td, key="tokens"):
    return [row.tolist() for row in ragged.rows(td, key)]


@st.composite
def episodes(draw):
    """Prompts [B], and actions of any length [T][B], over three tokens of which one is the eos and the padding."""
    count = draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 2), max_size=4)
    batch = st.lists(row, min_size=count, max_size=count)
    return draw(batch), draw(st.lists(batch, min_size=1, max_size=3))


@fast
@given(episodes(), st.sampled_from(LAYOUTS))
def test_an_observation_is_the_last_one_and_the_action(episode, layout):
    """In each layout it equals a loop over lists, keeps its layout, and rows end where their action holds the eos."""
    rows, actions = episode
    env = token_env()
    state = env.reset(prompts(rows, layout))
    for action in actions:
        state["tokens_response"] = jagged(action)
        td = env.step(state)
        rows = [old + new for old, new in zip(rows, action, strict=True)]
        assert read(td["next"]) == rows
        ended = [[EOS in new] for new in action]
        assert td["next", "done"].tolist() == td["next", "terminated"].tolist() == ended
        assert not td["next", "truncated"].any()
        state = env.step_mdp(td)
        if layout == "lazy":
            assert isinstance(td["next"], LazyStackedTensorDict)
        else:
            assert td["next", "tokens"].is_nested == layout.startswith("jagged")
        assert ("attention_mask" in td["next"].keys()) == (layout != "jagged, no mask")  # noqa: SIM118
    if layout in ("jagged", "lazy"):
        assert [row.tolist() for row in ragged.rows(state, "attention_mask")] == [[True] * len(row) for row in rows]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_actions_fit_every_layout(layout):
    """A dense action is all real."""
    env = token_env()
    state = env.reset(prompts([[1], [2, 3]], layout))
    state["tokens_response"] = torch.tensor([[4, 5], [6, 0]])
    td = env.step(state)
    assert read(td["next"]) == [[1, 4, 5], [2, 3, 6, 0]]
    assert td["next", "done"].tolist() == [[False], [True]]


def test_padded_rows_are_realigned_to_the_left():
    """By hand: the shorter action's row moves right; zeros on the left are padding whatever the eos is."""
    env = token_env()
    state = env.reset(prompts([[1, 2], [3]], "padded"))
    state["tokens_response"] = jagged([[5], [6, 7]])
    next_td = env.step(state)["next"]
    assert next_td["tokens"].tolist() == [[1, 2, 5], [3, 6, 7]]
    state["tokens_response"] = jagged([[5, 5], []])
    next_td = env.step(state)["next"]
    assert next_td["tokens"].tolist() == [[1, 2, 5, 5], [0, 0, 0, 3]]
    assert next_td["attention_mask"].tolist() == [[True] * 4, [False, False, False, True]]


def test_an_integer_mask_stays_one():
    """It grows by ones of its own dtype."""
    env = token_env()
    td = TensorDict({"tokens": torch.tensor([[0, 1]]), "attention_mask": torch.tensor([[0, 1]])}, [1])
    td["tokens_response"] = torch.tensor([[2, 3]])
    assert env.step(td)["next", "attention_mask"].tolist() == [[0, 1, 1, 1]]
    assert env.step(td)["next", "attention_mask"].dtype is torch.int64


def test_ragged_actions_on_a_dense_batch_need_a_mask():
    """Dense rows that grow alike need none; without attention a mask is not looked at."""
    env = token_env()
    state = env.reset(TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2]))
    state["tokens_response"] = torch.tensor([[5], [6]])
    assert env.step(state)["next", "tokens"].tolist() == [[1, 2, 5], [3, 4, 6]]
    state["tokens_response"] = jagged([[5], [6, 7]])
    with pytest.raises(ValueError, match="without a mask can not grow by different numbers"):
        env.step(state)
    state["attention_mask"] = torch.ones(2, 2, dtype=torch.bool)
    assert read(env.step(state)["next"]) == [[1, 2, 5], [3, 4, 6, 7]]
    with pytest.raises(ValueError, match="without a mask"):
        token_env(has_attention=False).step(state)


def test_a_td_without_batch_is_one_row():
    """Flags have shape (1,)."""
    env = token_env()
    state = env.reset(TensorDict({"tokens": torch.tensor([1, 2])}, []))
    state["tokens_response"] = torch.tensor([3, EOS])
    next_td = env.step(state)["next"]
    assert next_td["tokens"].tolist() == [1, 2, 3, EOS]
    assert next_td["done"].tolist() == [True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stepping_twice_gives_two_independent_results(layout):
    """After several steps in one buffer: each branch goes on alone, and the stem stays as it was."""
    env = token_env()
    state = env.reset(prompts([[1], [2, 3]], layout))
    state["tokens_response"] = torch.tensor([[4], [5]])
    stem = env.step_mdp(env.step(state))
    branches = []
    for token in (6, 7):
        branch = stem.copy()
        for _ in range(2):
            branch["tokens_response"] = torch.tensor([[token], [token]])
            branch = env.step_mdp(env.step(branch))
        branches.append(branch)
    assert read(branches[0]) == [[1, 4, 6, 6], [2, 3, 5, 6, 6]]
    assert read(branches[1]) == [[1, 4, 7, 7], [2, 3, 5, 7, 7]]
    assert read(stem) == [[1, 4], [2, 3, 5]]


def test_a_copied_environment_is_independent():
    """It extends nothing of the original's."""
    env = token_env()
    state = env.reset(prompts([[1]], "padded"))
    state["tokens_response"] = torch.tensor([[2]])
    state = env.step_mdp(env.step(state))
    for other, token in ((env, 3), (copy.deepcopy(env), 4)):
        state["tokens_response"] = torch.tensor([[token]])
        assert other.step(state)["next", "tokens"].tolist() == [[1, 2, token]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_mask_leaves_rows_alone(layout):
    """Their tokens and flags stay, whatever their action says; their mask grows by nothing."""
    env = token_env(assign_done=layout != "lazy", assign_reward=True)
    flags = {"done": torch.tensor([[True], [False], [False]]), "terminated": torch.tensor([[True], [False], [False]])}
    state = prompts([[1], [2, 3], []], layout, **flags)
    state["tokens_response"] = torch.tensor([[4], [EOS], [EOS]])
    state["_step"] = torch.tensor([False, True, False])
    td = env.step(state)
    assert read(td["next"]) == [[1], [2, 3, EOS], []]
    assert td["next", "done"].tolist() == td["next", "terminated"].tolist() == [[True], [True], [False]]
    if layout != "lazy":
        assert [row.tolist() for row in ragged.rows(td, ("next", "tokens_data", "done"))] == [[False], [True], [False]]


def test_a_reset_mask_clears_the_flags_of_its_rows():
    """The observations are what the TensorDict holds; foreign keys survive."""
    env = token_env()
    state = env.reset(prompts([[1], [2, 3]], "jagged", label=torch.tensor([7, 8])))
    state["done"] = state["terminated"] = torch.tensor([[True], [True]])
    state["_reset"] = torch.tensor([[False], [True]])
    out = env.reset(state)
    assert out["done"].tolist() == out["terminated"].tolist() == [[True], [False]]
    assert read(out) == [[1], [2, 3]]
    assert out["label"].tolist() == [7, 8]


def test_the_way_of_a_rollout_collector():
    """Jagged prompts with their ids, jagged answers with log-probs, of no tokens for some rows; read by rows."""
    env = LLMEnv(from_text=False, eos_token_id=EOS)
    number = torch.arange(2)
    given = {"group_id": number, "repeat_index": number, "prompt_index": number}
    td = env.reset(prompts([[1, 2], [3]], "jagged, no mask", **given))
    td["tokens_response"] = jagged([[], [4, EOS]])
    td["log_probs"] = Ragged.from_rows([torch.zeros(0), torch.tensor([-0.5, -1.0])]).jagged()
    out = env.step(td)
    assert read(out["next"]) == read(out, ("next", "tokens")) == [[1, 2], [3, 4, EOS]]
    assert out["next", "done"].tolist() == [[False], [True]]
    td = env.step_mdp(out)
    assert read(td) == [[1, 2], [3, 4, EOS]]
    assert read(td, "log_probs") == [[], [-0.5, -1.0]]
    assert td["group_id"].tolist() == [0, 1]
    assert "tokens_response" not in td.keys()  # noqa: SIM118


@pytest.mark.parametrize("form", ["dense", "jagged"])
def test_rewards_and_flags_for_each_token(form):
    """Zeros of the action's shape; flags exactly at the eos, and the row is done if any is."""
    env = token_env(assign_reward=True, assign_done=True)
    state = env.reset(prompts([[1], [2]], "padded"))
    action = [[3, EOS], [4, 5]] if form == "dense" else [[3, EOS, EOS], [4]]
    state["tokens_response"] = torch.tensor(action) if form == "dense" else jagged(action)
    next_td = env.step(state)["next"]
    expected = [[token == EOS for token in row] for row in action]
    for flag in ("done", "terminated"):
        assert read(next_td, ("tokens_data", flag)) == expected
        assert next_td["tokens_data", flag].is_nested == (form == "jagged")
        assert next_td[flag].tolist() == [[True], [False]]
    assert read(next_td, "reward") == [[0.0] * len(row) for row in action]
    assert next_td["reward"].dtype is torch.float32
    flags = {"done", "terminated", "truncated", ("tokens_data", "done"), ("tokens_data", "terminated")}
    assert set(env.done_keys) == flags


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollout_goes_on_with_flags_for_each_token(layout):
    """A row that ended is reset with all flags false, also those of its tokens, and goes on from what it holds."""
    answers = iter([[[EOS], [5, 6]], [[3, 3], [7]], [[4], [EOS, 8]]])

    def policy(td):
        td["tokens_response"] = jagged(next(answers))

    env = token_env(assign_done=True, assign_reward=True)
    td = env.rollout(3, policy, break_when_any_done=False, tensordict=prompts([[1], [2]], layout))
    assert read(td[:, -1]["next"]) == [[1, EOS, 3, 3, 4], [2, 5, 6, 7, EOS, 8]]
    assert td["next", "done"].squeeze(-1).tolist() == [[True, False, False], [False, False, True]]
    assert not td["done"].any()
    flags = read(td, ("next", "tokens_data", "done"))
    assert flags == [[True], [False] * 2, [False], [False] * 2, [False], [True, False]]
    assert read(td, ("next", "reward")) == [[0.0], [0.0] * 2, [0.0], [0.0] * 2, [0.0], [0.0] * 2]
    assert not any(any(row) for row in read(td[:, 1], ("tokens_data", "done")))


def test_a_rollout_without_batch_and_with_one():
    """Without a batch of its own it plays a TensorDict of three rows, [3, T]; observations extend each other."""
    env = token_env(eos_token_id=-1)
    td = env.rollout(3, auto_reset=False, tensordict=prompts([[1], [2, 3], []], "jagged"))
    assert td.batch_size == (3, 3)
    before, after, action = read(td), read(td, ("next", "tokens")), read(td, "tokens_response")
    assert [len(row) for row in before] == [1, 2, 3, 2, 3, 4, 0, 1, 2]
    assert after == [old + new for old, new in zip(before, action, strict=True)]
    assert ragged.pad(td, "tokens", "left", 0)[0].shape == (3, 3, 4)
    assert env.rollout(2, tensordict=TensorDict({"tokens": torch.tensor([1])}, [])).batch_size == (2,)
    with pytest.raises(ValueError, match=r"without batch or of batch size \(B,\): found \(1, 1\)"):
        env.reset(TensorDict({"tokens": torch.zeros(1, 1, 1)}, [1, 1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ended_rows_are_left_alone_in_a_rollout(layout):
    """Until all have ended, or the step counter cuts them."""

    def policy(td):
        td["tokens_response"] = torch.tensor([[EOS], [5]])

    env = token_env().append_transform(StepCounter(3))
    td = env.rollout(9, policy, break_when_all_done=True, tensordict=prompts([[1], [2, 3]], layout))
    assert read(td[:, -1]["next"]) == [[1, EOS], [2, 3, 5, 5, 5]]
    assert td[:, -1]["next", "terminated"].tolist() == [[True], [False]]
    assert td[:, -1]["next", "truncated"].tolist() == [[False], [True]]


# Construction and specs.


def test_keys_and_their_defaults():
    """None resolves to the default names; the mask is the sibling of the tokens."""
    env, text = token_env(), LLMEnv(eos_token_id=0)
    assert (env.token_key, env.attention_key, env.action_key) == ("tokens", "attention_mask", "tokens_response")
    assert (text.str_key, text.action_key) == ("text", "text_response")
    keys = {"token_key": ("data", "ids"), "action_key": ("data", "answer"), "reward_key": ("data", "r")}
    nested = token_env(assign_reward=True, **keys)
    assert nested.attention_key == ("data", "attention_mask")
    assert nested.reward_keys == [("data", "r")]
    given_td = TensorDict({"data": {"ids": torch.tensor([[1]]), "label": torch.tensor([3])}}, [1])
    td = nested.rollout(2, tensordict=given_td)
    assert [row[0] for row in read(td, ("next", "data", "ids"))] == [1, 1]
    assert td["data", "label"].tolist() == [[3, 3]]


@pytest.mark.parametrize(
    ("given_size", "size"), [(None, ()), (0, ()), (3, (3,)), ((3,), (3,)), ((), ()), (torch.Size([2]), (2,))]
)
def test_batch_sizes(given_size, size):
    """None and 0 are no batch; a batch is locked, no batch is not."""
    env = token_env(batch_size=given_size)
    assert env.batch_size == size
    assert env.batch_locked == bool(size)


def test_more_than_one_batch_dimension_is_refused():
    """As is another batch than the locked one, and a negative one."""
    with pytest.raises(TypeError, match="0 or 1d"):
        token_env(batch_size=(2, 3))
    with pytest.raises(ValueError, match="negative"):
        token_env(batch_size=-1)
    with pytest.raises(ValueError, match=r"batch size \(3,\).*found \(1,\)"):
        token_env(batch_size=3).reset(prompts([[1]], "jagged"))


def test_warnings_and_refusals_at_construction():
    """A missing eos warns, once, and nothing else does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LLMEnv(from_text=False)
        LLMEnv(eos_token_id=3)
    assert [(w.category, "eos_token_id" in str(w.message)) for w in caught] == [(UserWarning, True)]
    for option in ("assign_reward", "assign_done"):
        with pytest.raises(ValueError, match="from_text"):
            LLMEnv(eos_token_id=0, **{option: True})
    with pytest.raises(NotImplementedError):
        LLMEnv(eos_token_id=0, as_llm_data=True)


def test_token_specs():
    """Unbounded, or bounded with vocab_size itself out; with the mask if there is attention; no reward by itself."""
    env = token_env()
    assert env.observation_spec["tokens"] == env.action_spec == Unbounded((-1,), dtype=torch.int64)
    assert env.observation_spec["attention_mask"] == Categorical(2, (-1,), dtype=torch.bool)
    bounded = token_env(vocab_size=5, batch_size=2)
    assert bounded.action_spec == Bounded(0, 4, (2, -1), dtype=torch.int64)
    assert "attention_mask" in bounded.observation_spec
    assert not bounded.action_spec.is_in(torch.tensor([[0], [5]]))
    assert bounded.action_spec.rand().shape == (2, 1)
    assert "attention_mask" not in token_env(has_attention=False).observation_spec
    assert env.reward_keys == []
    rewarded = token_env(assign_reward=True, batch_size=2)
    assert rewarded.reward_spec == Unbounded((2, -1), dtype=torch.float32)


@pytest.mark.parametrize(
    "options", [{}, {"vocab_size": 7}, {"has_attention": False}, {"assign_reward": True}, {"assign_done": True}]
)
@pytest.mark.parametrize("size", [None, 1, 3])
def test_the_contract_holds_for_tokens(options, size):
    """As the check that every author runs sees it."""
    check_env_specs(token_env(batch_size=size, **options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_contract_holds_for_given_rows(layout):
    """Also without a locked batch, with and without transforms."""
    env = token_env(has_attention=layout != "jagged, no mask")
    check_env_specs(env, tensordict=prompts([[1, 2], [3], []], layout))
    check_env_specs(env.append_transform(StepCounter(2)), tensordict=prompts([[1, 2], [3], []], layout))


def test_reset_without_an_observation_names_it():
    """Also where there is no TensorDict at all."""
    for env, key in ((token_env(), "tokens"), (LLMEnv(eos_token_id=0), "text"), (token_env(token_key=("a", "b")), "b")):
        for given_td in (None, TensorDict({"label": torch.zeros(2)}, [2])):
            with pytest.raises(KeyError, match=rf"{key}.*primer"):
                env.reset(given_td)


def test_actions_that_are_none_are_refused():
    """Missing, of the wrong shape, or no ids."""
    env = token_env()
    state = env.reset(prompts([[1], [2]], "padded"))
    with pytest.raises(KeyError, match="tokens_response"):
        env.step(state)
    with pytest.raises(KeyError, match="step needs the observation 'tokens'"):
        env.step(TensorDict({"tokens_response": torch.tensor([[1]])}, [1]))
    for action in (torch.tensor([1, 2]), torch.zeros(2, 1)):
        state["tokens_response"] = action
        with pytest.raises(TypeError, match=r"'tokens_response' must hold token ids.*found (int64|float32) tensor"):
            env.step(state)


# Text.


@pytest.fixture
def text_env():
    with pytest.warns(UserWarning, match="eos_token_id"):
        return LLMEnv()


def test_text_grows_row_by_row(text_env):
    """Equal prompts stay as many prompts as they are."""
    state = text_env.reset(TensorDict({"text": NonTensorStack("a", "a"), "label": torch.arange(2)}, [2]))
    state["text_response"] = NonTensorStack("b", "b")
    state = text_env.step_mdp(text_env.step(state))
    state["text_response"] = NonTensorStack("", "c")
    td = text_env.step(state)
    assert ragged.rows(td["next"], "text") == ["ab", "abc"]
    assert ragged.rows(td, "text") == ["ab", "ab"]
    assert list(td["next", "text"]) == ["ab", "abc"]
    assert td["label"].tolist() == [0, 1]
    assert not td["next", "done"].any()


@pytest.mark.filterwarnings("ignore:set_capture_non_tensor_stack:DeprecationWarning")
@pytest.mark.parametrize("flag", [True, False])
def test_no_global_flag_changes_a_batch_of_equal_texts(text_env, flag):
    """Whether or not tensordict is told to merge equal data."""
    with set_capture_non_tensor_stack(flag):
        state = text_env.reset(TensorDict({"text": NonTensorStack("a", "a")}, [2]))
        state["text_response"] = NonTensorStack("b", "b")
        td = text_env.rollout(2, lambda td: td.set("text_response", NonTensorStack("b", "b")), tensordict=state)
        assert ragged.rows(td, ("next", "text")) == ["ab", "abb"] * 2


def test_text_without_batch_and_as_one_string_for_all(text_env):
    """A single row; and non-tensor data that stands for every row of a batch."""
    state = text_env.reset(TensorDict({"text": "a"}, []))
    state["text_response"] = "b"
    assert text_env.step(state)["next", "text"] == "ab"
    state = text_env.reset(TensorDict({"text": NonTensorData("a", batch_size=[3])}, [3]))
    state["text_response"] = NonTensorStack("x", "y", "z")
    assert ragged.rows(text_env.step(state)["next"], "text") == ["ax", "ay", "az"]


def test_text_that_is_no_string_is_refused(text_env):
    """With key, row and type."""
    state = text_env.reset(TensorDict({"text": NonTensorStack("a", "b")}, [2]))
    state["text_response"] = NonTensorStack(NonTensorData("c"), NonTensorData(None))
    with pytest.raises(TypeError, match="'text_response', row 1: expected str, found NoneType"):
        text_env.step(state)
    state["text_response"] = torch.zeros(2)
    with pytest.raises(TypeError, match="'text_response', row 0: expected str, found a tensor"):
        text_env.step(state)
    with pytest.raises(KeyError, match="text_response"):
        text_env.step(state.exclude("text_response"))


def test_the_end_of_text_is_read_from_tokens():
    """From the tokens of the response, which must be there."""
    env = LLMEnv(eos_token_id=EOS)
    state = env.reset(TensorDict({"text": NonTensorStack("a", "b")}, [2]))
    state["text_response"] = NonTensorStack("c", "d")
    with pytest.raises(RuntimeError, match="'tokens_response' is missing"):
        env.step(state)
    state["tokens_response"] = jagged([[3], [4, EOS]])
    state["_step"] = torch.tensor([True, True])
    assert env.step(state)["next", "done"].tolist() == [[False], [True]]
    state["_step"] = torch.tensor([True, False])
    td = env.step(state)
    assert td["next", "done"].tolist() == [[False], [False]]
    assert ragged.rows(td["next"], "text") == ["ac", "b"]


def test_text_specs_and_the_contract(text_env):
    """Text is made up from an example."""
    assert text_env.observation_spec["text"] == text_env.action_spec == NonTensor(example_data="a string")
    check_env_specs(text_env)
    check_env_specs(text_env, tensordict=TensorDict({"text": NonTensorStack("a", "b")}, [2]))


def test_text_is_kept_in_segments_and_joined_when_read(text_env):
    """With a batch and without: what a step makes is unread, also after `step_mdp`, a step and a reset of some rows."""
    for size, batch in (([2], True), ([], False)):
        state = text_env.reset(TensorDict({"text": NonTensorStack("a", "b") if batch else "a"}, size))
        parts = [Text.of(["c", "d"]) if batch else Text.of(["c"]) for _ in range(3)]
        for part in parts:
            state.set("text_response", part.entry(batch))
            td = text_env.step(state)
            state = text_env.step_mdp(td)
            assert text_of(td["next"].get("text")) is text_of(state.get("text")) is not None
            assert text_of(td.get("text_response")) is part
        assert state["text"] == (["accc", "bddd"] if batch else "accc")
    state = text_env.reset(TensorDict({"text": NonTensorStack("a", "b")}, [2]))
    state.set("text_response", Text.of(["c", "d"]).entry())
    state["_step"] = torch.tensor([False, True])
    state = text_env.step_mdp(text_env.step(state))
    assert text_of(state.get("text")) is not None
    assert state["text"] == ["a", "bd"]
    state["_reset"] = torch.tensor([True, False])
    assert text_of(text_env.reset(state).get("text")) is not None


def test_a_list_is_an_action_and_other_strings_survive(text_env):
    """As people write it; a column of strings that the environment does not own is as it was, and may be changed."""
    given_td = TensorDict({"text": NonTensorStack("a", "a"), "answer": NonTensorStack("4", "5")}, [2])
    state = text_env.reset(given_td)
    state["text_response"] = ["b", "c"]
    state = text_env.step_mdp(text_env.step(state))
    assert state["text"] == ["ab", "ac"]
    assert state["answer"] == ["4", "5"]
    state["answer"][0] = "6"
    assert state["answer"] == ["6", "5"]
    assert given_td["answer"] == ["4", "5"]
    assert state[1]["text"] == "ac"


def test_keys_of_text_may_be_nested():
    env = LLMEnv(str_key=("data", "text"), action_key=("data", "answer"), eos_token_id=EOS)
    td = env.reset(TensorDict({"data": {"text": NonTensorStack("a", "b"), "id": torch.arange(2)}}, [2]))
    td["data", "answer"] = NonTensorStack("c", "d")
    td["tokens_response"] = torch.tensor([[EOS], [3]])
    td = env.step(td)
    assert ragged.rows(td, ("next", "data", "text")) == ["ac", "bd"]
    assert td["next", "done"].tolist() == [[True], [False]]
    state = env.step_mdp(td)
    assert state["data", "id"].tolist() == [0, 1]
    assert ("data", "answer") not in state.keys(True, True)
    state["data", "answer"] = NonTensorStack(NonTensorData("c"), NonTensorData(3))
    state["tokens_response"] = torch.tensor([[EOS], [3]])
    with pytest.raises(TypeError, match=r"\('data', 'answer'\), row 1: expected str, found int"):
        env.step(state)


def test_the_tokens_of_an_answer_do_not_end_the_next_one():
    """They are used up with the text of it; a policy that writes none the next time is told."""
    env = LLMEnv(eos_token_id=EOS)
    state = env.reset(TensorDict({"text": NonTensorStack("a", "b")}, [2]))
    state["text_response"], state["tokens_response"] = NonTensorStack("c", "d"), jagged([[EOS], [3]])
    state = env.step_mdp(env.step(state))
    assert "tokens_response" not in state.keys()  # noqa: SIM118
    state["text_response"] = NonTensorStack("c", "d")
    with pytest.raises(RuntimeError, match="'tokens_response' is missing"):
        env.step(state)


def test_a_random_text_is_the_example_and_a_random_row_has_one_token():
    """None asks for the text of a model."""
    env = LLMEnv(eos_token_id=EOS, batch_size=2)
    assert env.rand_action()["text_response"] == ["a string"] * 2
    assert token_env(batch_size=2, vocab_size=3).rand_action()["tokens_response"].shape == (2, 1)
    assert token_env().fake_tensordict()["tokens"].shape == (1,)


def test_jagged_input_updates_its_mask_too():
    """It grows by ones over the tokens of the action, and by none where there are none."""
    env = token_env()
    state = env.reset(prompts([[1, 2], [3]], "jagged"))
    state["tokens_response"] = jagged([[4], []])
    next_td = env.step(state)["next"]
    assert [row.tolist() for row in ragged.rows(next_td, "attention_mask")] == [[True] * 3, [True]]
    assert read(next_td) == [[1, 2, 4], [3]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_actions_of_no_tokens_are_legal(layout):
    """In all rows: nothing changes, nothing ends, nothing is rewarded."""
    env = token_env(assign_done=layout != "lazy", assign_reward=layout != "lazy")
    state = env.reset(prompts([[1, 2], [3]], layout))
    state["tokens_response"] = torch.zeros(2, 0, dtype=torch.int64)
    td = env.step(state)
    assert read(td["next"]) == [[1, 2], [3]]
    assert td["next", "done"].tolist() == [[False], [False]]
    if layout != "lazy":
        assert td["next", "reward"].shape == td["next", "tokens_data", "done"].shape == (2, 0)


def test_flags_are_true_exactly_at_eos_and_padding_is_never_counted():
    """Neither that of the prompt, made of the eos, nor any room behind the tokens of a jagged answer."""
    env = token_env(assign_done=True)
    state = env.reset(prompts([[5, 6], [7]], "padded"))
    roomy = Ragged(torch.tensor([3, EOS, 4, EOS, EOS]), torch.tensor([0, 3, 5]), torch.tensor([1, 1]))
    state["tokens_response"] = roomy.jagged()
    next_td = env.step(state)["next"]
    assert read(next_td, ("tokens_data", "done")) == [[False], [True]]
    assert read(next_td, ("tokens_data", "terminated")) == [[False], [True]]
    assert next_td["done"].tolist() == [[False], [True]]


def test_an_environment_without_batch_draws_as_many_rows_as_it_is_asked_for():
    """Three for a TensorDict of three; a rollout that begins there is [3, T]."""
    env = LLMEnv.from_dataloader([torch.tensor([1, 2]), torch.tensor([3, 4])], from_text=False, eos_token_id=-1)
    td = env.reset(TensorDict(batch_size=[3]))
    assert read(td) == [[1, 2], [3, 4], [1, 2]]
    assert env.rollout(3, auto_reset=False, tensordict=td).batch_size == (3, 3)
    assert env.reset().batch_size == ()


def test_a_long_episode_holds_its_tokens_a_few_times():
    """T steps of k tokens cost O(T k): the buffers of all observations together, dense and jagged, masks included."""
    for layout in ("padded", "jagged"):
        env = token_env()
        action = {"tokens_response": torch.ones(2, 10, dtype=torch.int64)}
        td = env.rollout(100, lambda td, given=action: td.update(given), tensordict=prompts([[1, 2], [3]], layout))
        storages = {}
        for step in td.unbind(1):
            for key in ("tokens", "attention_mask"):
                entry = step["next", key]
                storage = (entry.values() if entry.is_nested else entry).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        assert sum(storages.values()) < 5 * 2 * 1002 * 9


class _Answering(LLMEnv):
    """An environment of a user's own: it adds a token of its own behind each action, and ends rows on its own terms."""

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        next_td = super()._step(td)
        answer = torch.full((*td.batch_size, 1), 99)
        next_td["tokens"] = torch.cat([next_td["tokens"], answer], -1)
        next_td["terminated"] = next_td["tokens"][..., -2:-1] == 7
        del next_td["done"]
        return next_td


def test_a_subclass_may_override_step() -> None:
    env = _Answering(from_text=False, eos_token_id=2, has_attention=False)
    td = env.reset(TensorDict({"tokens": torch.tensor([[1], [3]])}, batch_size=[2]))
    td["tokens_response"] = torch.tensor([[7], [8]])
    after = env.step(td)["next"]
    assert after["tokens"].tolist() == [[1, 7, 99], [3, 8, 99]]
    assert after["terminated"].tolist() == after["done"].tolist() == [[True], [False]]


def test_right_the_mask_of_an_action_says_which_of_its_tokens_are_real():
    """Padding that has the id of the eos neither ends the row nor is appended."""
    env = LLMEnv(from_text=False, action_key=("said", "tokens"), eos_token_id=0, assign_done=True)
    ones = torch.ones(2, 2, dtype=torch.bool)
    td = env.reset(TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]]), "attention_mask": ones}, [2]))
    real = torch.tensor([[True, True], [True, False]])
    td["said"] = TensorDict({"tokens": torch.tensor([[5, 6], [7, 0]]), "attention_mask": real}, [2])
    after = env.step(td)["next"]
    assert [row.tolist() for row in ragged.rows(after, "tokens")] == [[1, 2, 5, 6], [3, 4, 7]]
    assert after["done"].tolist() == [[False], [False]]
    assert [flags.tolist() for flags in ragged.rows(after, ("tokens_data", "done"))] == [[False, False], [False]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_tokens_of_a_type_that_holds_no_ids_are_refused(dtype):
    env = LLMEnv(from_text=False, eos_token_id=9)
    with pytest.raises(TypeError, match="'tokens' must hold token ids, int64"):
        env.reset(TensorDict({"tokens": torch.tensor([[1, 0]]).to(dtype)}, [1]))
    td = env.reset(TensorDict({"tokens": torch.tensor([[1, 0]])}, [1]))
    with pytest.raises(TypeError, match="'tokens_response' must hold token ids"):
        env.step(td.set("tokens_response", torch.tensor([[1]]).to(dtype)))


def test_prompts_of_narrow_integers_take_any_token():
    """A token that does not fit into the type of the prompt is not cut."""
    env = LLMEnv(from_text=False, eos_token_id=9)
    td = env.reset(TensorDict({"tokens": torch.tensor([[1, 2]], dtype=torch.uint8)}, [1]))
    td["tokens_response"] = torch.tensor([[300]])
    assert env.step(td)["next", "tokens"].tolist() == [[1, 2, 300]]


def test_an_end_is_one_id():
    with pytest.raises(TypeError, match="eos_token_id must be one token id"):
        LLMEnv(eos_token_id=[1, 2])


def test_a_text_environment_with_an_end_keeps_its_contract_and_plays_without_a_policy():
    env = LLMEnv.from_dataloader(["a", "b"], eos_token_id=2)
    check_env_specs(env)
    assert env.rollout(2).batch_size == (2,)
