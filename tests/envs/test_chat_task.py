"""Conversations with a task: replies, tools, ends and scores, and tokens that are what the template writes."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tests.envs.chat_templates import FORGETS, assistant, marked, tokenizer_with, user
from tests.envs.test_chat import HISTORY, MODES, TOKENIZER, ids, say, shown

from ramet.envs.chat import ChatEnv
from ramet.envs.check import check_env_specs
from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.policies.scripted import ScriptedPolicy
from ramet.ragged import rows
from ramet.rollouts import collect
from ramet.tasks import Task
from ramet.tasks.task import rng_of
from ramet.types import Episode, Kind, Outcome, Sample, Sampling, StopReason

ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": [user("2+2?")], "answer": "4"}]
TALKS = [{**ROWS[0], "prompt": [user("1+1?")]}, ROWS[1]]
"""The same, through the template: a prompt that is text goes on as text."""


def right(sample: Sample) -> float:
    return float(sample.completion == sample.row["answer"])


def hint(episode: Episode) -> str | None:
    return None if episode.text == episode.row["answer"] else f"no, {episode.turns}"


def task_of(reply: Any = hint, **options: Any) -> Task:
    given: dict[str, Any] = {"max_turns": 3, **options}
    score, data = given.pop("score", right), given.pop("data", ROWS)
    return Task("sums", data, data, score, reply=reply, **given)


def begun(mode: Any, task: Task, count: int = 2, **options: Any) -> tuple[ChatEnv, TensorDictBase]:
    env = ChatEnv(input_mode=mode, tokenizer=TOKENIZER, task=task, **options)
    return env, env.reset(TensorDict({"prompt_index": torch.arange(count) % 2}, [count]))


def step(env: ChatEnv, td: TensorDictBase, mode: str, *texts: str) -> TensorDictBase:
    """Answer, and return what is under "next"."""
    next_td: TensorDictBase = env.step(say(td.copy(), mode, list(texts)))["next"]
    return next_td


def on(env: ChatEnv, td: TensorDictBase, mode: str, *texts: str) -> TensorDictBase:
    return env.step_mdp(env.step(say(td.copy(), mode, list(texts))))


# ---------------------------------------------------------------- the way of an episode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [None, 3])
def test_the_contract_holds(mode: str, size: int | None) -> None:
    task = task_of(begin=lambda row, rng: {"number": rng.random()})
    env = ChatEnv(input_mode=mode, tokenizer=TOKENIZER, task=task, batch_size=size)
    given = TensorDict(
        {"prompt_index": torch.zeros((size,) if size else (), dtype=torch.int64)}, [size] if size else []
    )
    check_env_specs(env, tensordict=given, max_steps=5)


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_in_each_mode(mode: str) -> None:
    env, td = begun(mode, task_of())
    assert [one.turns for one in rows(td, "episode")] == [0, 0]
    first = step(env, td, mode, "2", "5")
    assert first["terminated"].tolist() == [[True], [False]]
    assert first["truncated"].tolist() == [[False], [False]]
    assert first["reward"].dtype is torch.float32
    assert first["reward"].tolist() == [[1.0], [0.0]]
    assert rows(first, "outcome") == [Outcome.scored(1.0), None]
    assert rows(first, HISTORY) == [
        [user("1+1?"), assistant("2")],
        [user("2+2?"), assistant("5"), user("no, 1")],
    ]
    td = on(env, td, mode, "2", "5")
    assert "reward" not in td.keys()  # noqa: SIM118 (a TensorDict iterates over its rows)
    second = step(env, td, mode, "ignored", "4")  # the first row has ended: it stays as it is
    assert second["done"].tolist() == [[True], [True]]
    assert second["reward"].tolist() == [[0.0], [1.0]]
    assert rows(second, HISTORY)[0] == [user("1+1?"), assistant("2")]
    assert [one.turns for one in rows(second, "episode")] == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_the_limit_of_turns_truncates(mode: str) -> None:
    env, td = begun(mode, task_of())
    for _ in range(2):
        td = on(env, td, mode, "x", "x")
    last = step(env, td, mode, "2", "x")
    assert last["terminated"].tolist() == [[True], [False]]
    assert last["truncated"].tolist() == [[False], [True]]
    assert last["reward"].tolist() == [[1.0], [0.0]]


def test_a_task_of_one_turn_ends_with_it() -> None:
    env, td = begun("history", task_of(None, max_turns=1))
    assert step(env, td, "history", "2", "3")["terminated"].tolist() == [[True], [True]]


@pytest.mark.parametrize("mode", ["text", "tokens"])
@settings(max_examples=15, deadline=None)
@given(said=st.lists(st.lists(st.text("ab !", max_size=3), min_size=2, max_size=2), min_size=1, max_size=4))
def test_after_any_number_of_turns_a_row_is_what_the_template_writes(mode: str, said: list[list[str]]) -> None:
    env, td = begun(mode, task_of(lambda episode: f"and {episode.turns}", max_turns=9, data=TALKS))
    for texts in said:
        td = on(env, td, mode, *texts)
        found = [marked(talk) for talk in rows(td, HISTORY)]
        assert shown(td, mode) == ([ids(text) for text in found] if mode == "tokens" else found)


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_a_template_that_rewrites_what_was_said_makes_the_row_anew(mode: Any) -> None:
    tokenizer = tokenizer_with(FORGETS)
    env = ChatEnv(input_mode=mode, tokenizer=tokenizer, task=task_of(max_turns=5, data=TALKS))
    td = env.reset(TensorDict({"prompt_index": torch.tensor([0, 1])}, [2]))
    for texts in (["think!5", "5"], ["6", "why!6"]):
        td = on(env, td, mode, *texts)
        wanted = [
            tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            for talk in rows(td, HISTORY)
        ]
        assert shown(td, mode) == ([ids(text) for text in wanted] if mode == "tokens" else wanted)
    assert "think!" not in (wanted[0] + wanted[1]), "the template forgets it, so this is not the text that was seen"


def test_what_a_reward_is_shown() -> None:
    seen: list[Sample] = []

    def score(sample: Sample) -> float:
        seen.append(sample)
        return 0.5

    eos = int(TOKENIZER.eos_token_id)
    env, td = begun("tokens", task_of(score=score, begin=lambda row, rng: "mine", data=TALKS), count=1)
    td = td.set("group_id", torch.tensor([7])).set("repeat_index", torch.tensor([3]))
    td = env.reset(td)
    td = on(env, td, "tokens", "x")
    env.step(td.set(("tokens", "response"), torch.tensor([[*ids("2"), eos]])))
    (sample,) = seen
    assert sample.prompt == [user("1+1?")]
    assert sample.completion == "2"
    assert sample.prompt_tokens == tuple(ids(marked([user("1+1?")])))
    assert sample.completion_tokens == (*ids("x"), *ids("2"), eos)
    assert (sample.group, sample.member, sample.stop, sample.state) == (7, 3, StopReason.EOS, "mine")
    assert list(sample.messages) == [user("1+1?"), assistant("x"), user("no, 1"), assistant("2")]


# ---------------------------------------------------------------- state and random numbers


def counting(episode: Episode) -> str:
    episode.state["said"].append(episode.text)
    return f"{episode.state['said']} {episode.rng.random():.6f}"


@pytest.mark.parametrize("mode", MODES)
def test_a_state_stepped_twice_gives_two_episodes(mode: str) -> None:
    """In any order: what is gone on with first, last or in between does not matter."""
    task = task_of(counting, begin=lambda row, rng: {"said": [], "first": rng.random()}, max_turns=9)
    env, td = begun(mode, task)
    start = on(env, td, mode, "a", "b")
    one = on(env, start, mode, "c", "d")
    other = on(env, start, mode, "e", "f")
    third = on(env, one, mode, "g", "h")
    again = on(env, on(env, start, mode, "c", "d"), mode, "g", "h")
    assert shown(third, mode) == shown(again, mode)
    assert rows(third, HISTORY) == rows(again, HISTORY)
    assert [state.state["said"] for state in rows(third, "episode")] == [["a", "c", "g"], ["b", "d", "h"]]
    assert [state.state["said"] for state in rows(other, "episode")] == [["a", "e"], ["b", "f"]]
    assert [state.state["said"] for state in rows(start, "episode")] == [["a"], ["b"]]
    numbers = [talk[-1]["content"].split()[-1] for talk in (*rows(one, HISTORY), *rows(other, HISTORY))]
    assert numbers[:2] == numbers[2:], "the random numbers of an episode belong to its turn"


def test_members_of_a_group_meet_one_world_and_a_seed_fixes_it() -> None:
    def world(seed: int, index: list[int]) -> list[float]:
        env = ChatEnv(task=task_of(begin=lambda row, rng: rng.random()))
        env.set_seed(seed)
        td = env.reset(TensorDict({"prompt_index": torch.tensor(index)}, [len(index)]))
        return [one.state for one in rows(td, "episode")]

    first = world(0, [0, 0, 1])
    assert first[0] == first[1] != first[2]
    assert world(0, [1, 0]) == [first[2], first[0]]
    assert world(1, [0])[0] != first[0]


def test_the_world_of_an_episode_is_that_of_the_episodes_that_are_collected() -> None:
    env = ChatEnv(task=task_of(begin=lambda row, rng: rng.random()))
    env.set_seed(3)
    td = env.reset(TensorDict({"prompt_index": torch.tensor([1])}, [1]))
    assert rows(td, "episode")[0].state == rng_of(3, 1).random()


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_goes_on_after_it_was_saved(mode: str) -> None:
    env, td = begun(mode, task_of(), count=2)
    td = on(env, td, mode, "x", "y")
    saved = pickle.loads(pickle.dumps(rows(td, "episode")))
    again = td.copy().set("episode", saved)
    assert shown(on(env, again, mode, "z", "4"), mode) == shown(on(env, td, mode, "z", "4"), mode)


class Live:
    """A state that can not be copied."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.closed = 0

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")

    def close(self) -> None:
        self.closed += 1


def test_a_state_that_can_not_be_copied_goes_on_once_and_is_closed_once() -> None:
    made: list[Live] = []

    def begin(row: Any, rng: random.Random) -> Live:
        made.append(Live())
        return made[-1]

    env, td = begun("history", task_of(begin=begin), count=2)
    after = on(env, td, "history", "2", "x")
    assert [one.closed for one in made] == [1, 0]
    with pytest.raises(RuntimeError, match=r"row 1: the state of its episode, a Live, can not be copied"):
        env.step(say(td.copy(), "history", ["2", "x"]).set("_step", torch.tensor([False, True])))
    env.reset(after.copy().set("_reset", torch.tensor([False, True])))
    assert [one.closed for one in made] == [1, 1, 0]
    env.close()
    assert [one.closed for one in made] == [1, 1, 1]


# ---------------------------------------------------------------- where rows come from


def test_the_row_of_an_episode_is_what_the_loader_gave() -> None:
    env = ChatEnv.from_dataloader(ROWS[:1] * 2, data_key="prompt", task=task_of(), batch_size=2)
    state = env.reset()
    assert [one.row["answer"] for one in rows(state, "episode")] == ["2", "2"]
    td = env.step(say(state, "history", ["2", "3"]))
    assert td["next", "reward"].tolist() == [[1.0], [0.0]]
    td, state = env.step_and_maybe_reset(say(env.step_mdp(td), "history", ["", "2"]))
    assert state["done"].tolist() == [[False], [False]]
    assert rows(state, HISTORY) == [[user("1+1?")], [user("1+1?")]]


def test_queries_and_other_entries_are_a_row_as_well() -> None:
    env = ChatEnv(task=task_of())
    given = TensorDict({"query": ["1+1?", "2+2?"], "answer": ["2", "4"], "level": torch.tensor([1, 2])}, [2])
    td = env.reset(given)
    assert [dict(one.row) for one in rows(td, "episode")][1] == {"prompt": "2+2?", "answer": "4", "level": 2}


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_plays_until_all_are_done(mode: str) -> None:
    env = ChatEnv(input_mode=mode, tokenizer=TOKENIZER, task=task_of())

    def policy(td: TensorDictBase) -> TensorDictBase:
        return say(td, mode, ["2", "5", "6"])

    given = TensorDict({"prompt_index": torch.tensor([0, 1, 1])}, [3])
    td = env.rollout(9, policy, break_when_all_done=True, tensordict=given)
    assert td.batch_size == (3, 3)
    assert td["next", "reward"].squeeze(-1).sum(1).tolist() == [1.0, 0.0, 0.0]
    td = env.rollout(4, policy, break_when_any_done=False, tensordict=given)
    assert td["next", "terminated"].squeeze(-1)[0].tolist() == [True] * 4
    assert td["next", "truncated"].squeeze(-1)[1].tolist() == [False, False, True, False]


def test_wrong_rows_are_named() -> None:
    env = ChatEnv(task=task_of())
    with pytest.raises(ValueError, match=r"row 1: 'prompt_index' must be the number of one of 2 rows: found 2"):
        env.reset(TensorDict({"prompt_index": torch.tensor([0, 2])}, [2]))
    with pytest.raises(ValueError, match=r'row 0 of the task has no "prompt": it has \[\'ask\'\]'):
        ChatEnv(task=task_of(), rows=[{"ask": "?"}]).reset(TensorDict({"prompt_index": torch.tensor([0])}, [1]))
    td = env.reset(TensorDict({"prompt_index": torch.tensor([0])}, [1]))
    with pytest.raises(TypeError, match=r"'episode', row 0: expected where its episode stands"):
        env.step(say(td, "history", ["x"]).set("episode", ["lost"]))


# ---------------------------------------------------------------- into a forest


def collected(tokenizer: Any, answers: list[str]) -> Forest:
    """Let a policy say `answers`, turn by turn, in one episode of tokens."""
    env = ChatEnv(
        input_mode="tokens",
        tokenizer=tokenizer,
        task=task_of(data=TALKS),
        observation_key="tokens",
        action_key="tokens_response",
    )
    policy = ScriptedPolicy(lambda request: ids(answers[request.draw.turn]))
    td = TensorDict({key: torch.tensor([0]) for key in ("prompt_index", "group_id", "repeat_index")}, [1])
    return collect(env, policy, td, sampling=Sampling(max_new_tokens=20), seed=0, max_turns=3)


def test_a_forest_holds_what_was_sampled_and_what_the_template_wrote() -> None:
    forest = collected(TOKENIZER, ["5", "2"])
    (rollout,) = forest.rollouts
    assert TOKENIZER.decode(forest.path(0)) == "<user>1+1?|\n<assistant>5|\n<user>no, 1|\n<assistant>2"
    sampled = [int(token) for token, kind in zip(forest.path(0), rollout.kinds, strict=True) if kind == Kind.SAMPLED]
    assert TOKENIZER.decode(sampled) == "52"
    assert rollout.stop is StopReason.STOP


def test_a_forest_of_one_piece_refuses_a_template_that_rewrites() -> None:
    with pytest.raises(ForestError, match="which does not begin with what the policy saw and sampled"):
        collected(tokenizer_with(FORGETS), ["think!5", "2"])
