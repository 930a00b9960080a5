"""How the turns of a conversation end, and how it begins: why a policy stopped, stop ids, prompts that are text."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.envs.chat_templates import assistant, marked, user
from tests.envs.test_chat import HISTORY, MODES, TOKENIZER, ids, say, shown
from tests.envs.test_chat_task import TALKS, begun, hint, on, task_of

from ramet.chat import PlainTemplate
from ramet.envs.chat import ChatEnv
from ramet.forest import Forest
from ramet.policies.policy import Actor
from ramet.policies.scripted import ScriptedPolicy
from ramet.ragged import rows
from ramet.rollouts import collect
from ramet.tasks import Task
from ramet.types import Episode, Key, OutcomeKind, Sample, Sampling, StopReason

# ---------------------------------------------------------------- why the policy stopped


@pytest.mark.parametrize("mode", MODES)
def test_a_turn_that_a_limit_cut_ends_its_row_with_that_reason(mode: str) -> None:
    seen: list[Sample] = []

    def score(sample: Sample) -> float:
        seen.append(sample)
        return 0.5

    env, td = begun(mode, task_of(score=score, data=TALKS), score_seconds=None)
    before = shown(td, mode)
    td = say(td, mode, ["5", "6"]).set("stop_reason", [StopReason.NEW_TOKENS, StopReason.STOP])
    state = env.step_mdp(env.step(td))
    assert state["truncated"].tolist() == [[True], [False]]
    assert state["terminated"].tolist() == [[False], [False]]
    assert rows(state, HISTORY)[0] == [user("1+1?"), assistant("5")], "nobody replies to it"
    assert rows(state, HISTORY)[1][2:] == [user("no, 1")]
    assert "stop_reason" not in state.keys()  # noqa: SIM118 (a TensorDict iterates over its rows)
    assert shown(state, mode)[0] == (rows(state, HISTORY)[0] if mode == "history" else added(before[0], "5", mode))
    (sample,) = seen
    assert (sample.stop, sample.completion) == (StopReason.NEW_TOKENS, "5")
    assert rows(state, "outcome")[0].score == 0.5
    after = env.step(say(state, mode, ["", "7"]))["next"]
    assert after["done"].tolist() == [[True], [False]], "where nothing is said it goes on"


def test_an_actor_says_which_turns_a_limit_cut() -> None:
    env = ChatEnv(
        input_mode="tokens", tokenizer=TOKENIZER, task=task_of(data=TALKS),
        observation_key=Key.TOKENS, action_key=Key.RESPONSE,
    )  # fmt: skip
    td = env.reset(TensorDict({"prompt_index": torch.tensor([0, 1])}, [2]))
    lengths = iter([2, 3])
    actor = Actor(ScriptedPolicy(lambda _: ids("567")[: next(lengths)]), Sampling(max_new_tokens=3))
    state = env.step(actor(td))["next"]
    assert state["truncated"].tolist() == [[False], [True]]
    env.close()


def judged() -> ChatEnv:
    """Four rows, of which the first abstains, the second raises and the third is late."""
    late = threading.Event()

    def score(sample: Sample) -> float | None:
        number = int(str(sample.row["prompt"][0]["content"]))
        if number == 1:
            raise ValueError("boom")
        if number == 2:
            late.wait(30)
        return None if number == 0 else 0.5

    data = [{"prompt": [user(str(number))]} for number in range(4)]
    task = Task("judged", data, [], score, reply=lambda _: None, max_turns=2)
    return ChatEnv(
        input_mode="tokens", tokenizer=TOKENIZER, task=task,
        observation_key=Key.TOKENS, action_key=Key.RESPONSE, score_seconds=0.5,
    )  # fmt: skip


def test_a_forest_has_the_outcomes_of_the_rows_and_none_of_them_is_a_score_of_zero() -> None:
    columns = {name: torch.arange(4) for name in ("prompt_index", "group_id", "repeat_index")}
    policy, sampling = ScriptedPolicy(lambda _: ids("5"), eos_token_id=ids("5")[-1]), Sampling(max_new_tokens=3)
    expected = [OutcomeKind.ABSTAINED, OutcomeKind.ERROR, OutcomeKind.TIMED_OUT, OutcomeKind.SCORED]
    env = judged()
    rollout = env.rollout(
        2, Actor(policy, sampling), auto_reset=False, tensordict=env.reset(TensorDict(columns.copy(), [4]))
    )
    forest = Forest()
    forest.extend(rollout)
    assert [one.outcome.kind for one in forest.rollouts if one.outcome] == expected
    assert [one.total for one in forest.rollouts] == [None, None, None, 0.5]
    assert forest.values[forest.rollouts[3].end] == 0.5
    assert bool(forest.values[forest.rollouts[1].end].isnan())
    collected = collect(env, policy, TensorDict(columns.copy(), [4]), sampling=sampling, seed=0, max_turns=2)
    assert [one.outcome.kind for one in collected.rollouts if one.outcome] == expected
    env.close()


def test_other_keys_are_told_of() -> None:
    env = ChatEnv(input_mode="tokens", tokenizer=TOKENIZER, task=task_of(data=TALKS))
    td = TensorDict({name: torch.arange(1) for name in ("prompt_index", "group_id", "repeat_index")}, [1])
    policy = ScriptedPolicy(lambda _: ids("5"))
    with pytest.raises(KeyError, match=r"collect reads 'tokens' and writes 'tokens_response': .* observation_key"):
        collect(env, policy, td, sampling=Sampling(3), seed=0)
    with pytest.raises(KeyError, match=r"an Actor reads 'tokens' .* observation_key"):
        Actor(policy, Sampling(3))(TensorDict({"text": torch.zeros(1)}, [1]))
    env.close()


def test_an_environment_with_a_loader_is_closed_like_the_one_inside() -> None:
    closed: list[str] = []

    class State:
        def close(self) -> None:
            closed.append("state")

    task = task_of(data=TALKS, begin=lambda row, rng: State())
    env = ChatEnv.from_dataloader(TALKS, task=task, data_key="prompt", batch_size=2)
    env.reset()
    env.close()
    assert closed == ["state", "state"]


def added(before: Any, text: str, mode: str) -> Any:
    return before + (ids(text) if mode == "tokens" else text)


@pytest.mark.parametrize("mode", MODES)
def test_a_limit_that_left_no_words_is_no_turn(mode: str) -> None:
    seen: list[Sample] = []

    def score(sample: Sample) -> None:
        seen.append(sample)

    env, td = begun(mode, task_of(score=score), count=1, score_seconds=None)
    first = on(env, td, mode, "5")
    last = env.step(say(first.copy(), mode, [""]).set("stop_reason", ["context_limit"]))["next"]
    assert last["truncated"].tolist() == [[True]]
    assert rows(last, HISTORY) == rows(first, HISTORY)
    assert shown(last, mode) == shown(first, mode)
    assert rows(last, "outcome")[0].kind is OutcomeKind.ABSTAINED
    assert (seen[0].stop, seen[0].completion) == (StopReason.CONTEXT, "5")


def test_a_policy_that_failed_costs_its_row_and_nobody_judges_it() -> None:
    env, td = begun("tokens", task_of())
    td = say(td, "tokens", ["", "4"]).set("stop_reason", ["error", "eos"])
    found = env.step(td)["next"]
    assert rows(found, "outcome")[0].reason == "the policy gave no completion"
    assert found["truncated"].tolist() == [[True], [False]]
    assert found["reward"].tolist() == [[0.0], [1.0]]


def test_a_reason_that_is_none_is_refused() -> None:
    env, td = begun("history", task_of())
    with pytest.raises(ValueError, match=r"'stop_reason', row 1: expected one of \['eos', .*'error'\], or None: found"):
        env.step(say(td, "history", ["1", "2"]).set("stop_reason", ["eos", "bored"]))


# ---------------------------------------------------------------- prompts that are text


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_a_prompt_that_is_text_goes_on_as_text_and_messages_through_the_template(mode: Any) -> None:
    env, td = begun(mode, task_of(hint, max_turns=9))
    start = [int(TOKENIZER.bos_token_id), *ids("1+1?")] if mode == "tokens" else "1+1?"
    assert shown(td, mode)[0] == start
    for _ in range(2):  # a state that is gone on with a second time goes on in the same way
        after = on(env, td, mode, "5", "5")
        assert shown(after, mode)[0] == added(added(start, "5", mode), "no, 1", mode)
        talk = marked([user("2+2?"), assistant("5"), user("no, 1")])
        assert shown(after, mode)[1] == (ids(talk) if mode == "tokens" else talk)


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_a_system_prompt_makes_a_text_a_message(mode: Any) -> None:
    _, td = begun(mode, task_of(), count=1, system_prompt="Be.")
    text = marked([{"role": "system", "content": "Be."}, user("1+1?")])
    assert shown(td, mode) == [ids(text) if mode == "tokens" else text]


def test_a_stop_that_is_text_is_part_of_what_was_said() -> None:
    (stop,) = ids("!")
    eos = int(TOKENIZER.eos_token_id)
    seen: list[str] = []

    def reply(episode: Episode) -> str:
        seen.append(episode.text)
        return "more"

    env = ChatEnv(input_mode="tokens", tokenizer=TOKENIZER, task=task_of(reply), stop_ids=[stop])
    td = env.reset(TensorDict({"prompt_index": torch.tensor([1, 1])}, [2]))
    env.step(td.set(("tokens", "response"), torch.tensor([[*ids("4"), stop], [*ids("4"), eos]])))
    assert seen == ["4!", "4"]


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_seams_of_text_are_learned_once(template: str) -> None:
    """A reply renders little once its like was seen, in whichever conversation, and is what the template writes."""
    rendered: list[int] = []

    class Counting(PlainTemplate):
        def render(self, messages: Any, tools: Any = ()) -> str:
            rendered.append(len(messages))
            return super().render(messages, tools)

    given = Counting(TOKENIZER) if template == "plain" else None
    task = task_of(lambda episode: "and?", max_turns=99)
    env = ChatEnv(input_mode="text", tokenizer=TOKENIZER, template=given, task=task, batch_size=1)
    for time in range(3):
        td = env.reset(TensorDict({"prompt_index": torch.tensor([1])}, [1]))
        rendered.clear()
        for _ in range(6):
            td = on(env, td, "text", "what")
        said = [user("2+2?"), *[assistant("what"), user("and?")] * 6]
        whole = "".join(message["content"] for message in said) if given else marked(said)
        assert shown(td, "text") == [whole]
        if time == 2 and given:
            assert max(rendered, default=0) <= 7, "of short conversations alone, or none"
