"""Conversations without a task: messages, text and tokens against lists of Python that say the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, TensorDictBase, is_leaf_nontensor, lazy_stack
from tests.envs.chat_templates import MARKED, assistant, marked, tokenizer_with, user

from ramet.chat import PlainTemplate
from ramet.envs.chat import ChatEnv
from ramet.envs.chat_history import History, Said, messages_entry, read_history
from ramet.envs.check import check_env_specs
from ramet.models.tiny import tiny_tokenizer
from ramet.ragged import Ragged, Text, rows

TOKENIZER = tokenizer_with(MARKED)
EOS = int(TOKENIZER.eos_token_id)
MODES = ("history", "text", "tokens")
HISTORY = ("history", "prompt")


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def env_of(mode: Any, **options: Any) -> ChatEnv:
    return ChatEnv(input_mode=mode, tokenizer=TOKENIZER, **options)


def queries(*texts: Any) -> TensorDict:
    return TensorDict({"query": messages_entry(list(texts), role="user")}, [len(texts)])


def say(td: TensorDictBase, mode: str, texts: list[str], key: str = "response") -> TensorDictBase:
    """Write an answer as a policy of this mode does."""
    if mode != "tokens":
        return td.set((mode, key), NonTensorStack(*texts) if td.batch_dims else texts[0])
    found = [torch.tensor(ids(text), dtype=torch.int64) for text in texts]
    return td.set((mode, key), Ragged.from_rows(found).jagged() if td.batch_dims else found[0])


def shown(td: TensorDictBase, mode: str) -> list[Any]:
    """Read the prompts as plain Python: messages, strings or lists of ids."""
    found = rows(td, (mode, "prompt"))
    return [row.tolist() for row in found] if mode == "tokens" else found


def written(messages: list[dict[str, Any]], said: str, mode: str) -> Any:
    """What stands in a row whose prompt was `messages`, after the policy said `said` in all, in a mode."""
    text = marked(messages) + said
    return ids(text) if mode == "tokens" else text


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [None, 1, 3])
def test_the_contract_holds(mode: str, size: int | None) -> None:
    td = queries("a", "bc", "")[: size or 3]
    check_env_specs(env_of(mode, batch_size=size), tensordict=TensorDict({"query": "x"}) if size is None else td)


@pytest.mark.parametrize("mode", MODES)
def test_the_contract_holds_with_a_loader(mode: str) -> None:
    check_env_specs(ChatEnv.from_dataloader(["a", "bc", "d"], tokenizer=TOKENIZER, input_mode=mode, batch_size=2))


# ---------------------------------------------------------------- the three modes


def test_what_a_prompt_is_in_each_mode() -> None:
    td = queries("2+2?", [user("hi"), assistant("yes?"), user("3?")])
    talks = [
        [{"role": "system", "content": "Be."}, user("2+2?")],
        [{"role": "system", "content": "Be."}, user("hi"), assistant("yes?"), user("3?")],
    ]
    for mode in MODES:
        state = env_of(mode, system_prompt="Be.").reset(td)
        assert rows(state, HISTORY) == talks
        if mode != "history":
            assert shown(state, mode) == [written(talk, "", mode) for talk in talks]
        assert state["done"].tolist() == [[False], [False]]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_puts_the_answer_behind_the_prompt_and_ends_nothing(mode: str) -> None:
    """As in the peer: no template writes anything between two prompts."""
    env = env_of(mode)
    td = env.step(say(env.reset(queries("a", "b")), mode, ["one", ""]))
    assert rows(td["next"], HISTORY) == [[user("a"), assistant("one")], [user("b"), assistant("")]]
    if mode != "history":
        assert shown(td["next"], mode) == [written([user("a")], "one", mode), written([user("b")], "", mode)]
        assert shown(td, mode) == [written([user("a")], "", mode), written([user("b")], "", mode)]
    assert td["next", "done"].tolist() == [[False], [False]]
    assert (mode, "response") not in td["next"].keys(True)
    state = env.step_mdp(td)
    assert set(state[mode].keys()) == {"prompt"}
    again = env.step(say(state, mode, ["!", "two"]))["next"]
    assert [message["content"] for message in rows(again, HISTORY)[1]] == ["b", "", "two"]


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_conversation_may_stand_in_place_of_the_answer(mode: str) -> None:
    env = env_of(mode)
    state = env.reset(queries("a", "b"))
    by_answer = env.step(say(state.copy(), mode, ["one", "2"]))["next"]
    talks = [[user("a"), assistant("one")], [user("b"), assistant("2")]]
    if mode == "history":
        state.set((mode, "full"), messages_entry(talks))
    else:
        texts = [marked([talk[0]]) + talk[1]["content"] for talk in talks]
        say(state, mode, texts, "full")
    td = env.step(state)
    assert shown(td["next"], mode) == shown(by_answer, mode)
    assert rows(td["next"], HISTORY) == rows(by_answer, HISTORY) == talks
    assert (mode, "full") not in env.step_mdp(td).keys(True)
    other = env.reset(queries("x", "y")).set((mode, "full"), state.get((mode, "full")))
    with pytest.raises(ValueError, match=r"row 0, does not begin with its prompt"):
        env.step(other)


def test_an_answer_of_messages_may_be_text_a_message_or_several() -> None:
    env = ChatEnv(policy_role="bot")
    state = env.reset(queries("a", "b", "c"))
    call = {"role": "tool", "name": "f", "content": "4"}
    state["history", "response"] = messages_entry(["x", assistant("y"), [assistant("z"), call]], role="bot")
    said = [row[1:] for row in rows(env.step(state)["next"], HISTORY)]
    assert said == [[{"role": "bot", "content": "x"}], [assistant("y")], [assistant("z"), call]]
    state["history", "response"] = ["x", "y", "z"]  # a plain list, of which tensordict makes a stack
    said = [row[1:] for row in rows(env.step(state)["next"], HISTORY)]
    assert said == [[{"role": "bot", "content": text}] for text in "xyz"]
    state["history", "response"] = [[assistant("x")], [assistant("y")], [assistant("z"), call]]
    assert [len(row) for row in rows(env.step(state)["next"], HISTORY)] == [2, 2, 3]


def test_tokens_stay_as_they_were_sampled_and_are_text_when_they_are_read() -> None:
    """The end of a turn is in the row of tokens, and not in the message."""
    env = env_of("tokens")
    said = torch.tensor([[*ids("ok"), EOS], [EOS, 0, 0]])
    td = env.step(env.reset(queries("a", "b")).set(("tokens", "response"), said))
    found = shown(td["next"], "tokens")
    assert [row[-3:] for row in found] == said.tolist()
    assert [talk[1]["content"] for talk in rows(td["next"], HISTORY)] == ["ok", ""]


def test_nothing_is_decoded_before_somebody_reads() -> None:
    class Counting:
        def __init__(self) -> None:
            self.decoded = 0

        def __call__(self, many: list[list[int]]) -> list[str]:
            self.decoded += len(many)
            return ["x" for _ in many]

    decode = Counting()
    tokens = Ragged.from_padded(torch.tensor([[1], [2]]))
    history = History.of([[user("a")], [user("b")]])
    for _ in range(3):
        history = history.append(Said("assistant", Text.decoded(tokens, decode)))
    kept = history.where(torch.tensor([True, False]), History.of([[], [user("c")]]))
    assert decode.decoded == 0
    assert kept.tolist() == [[user("a"), *[assistant("x")] * 3], [user("c")]]
    assert decode.decoded > 0


def test_messages_that_were_read_are_copies() -> None:
    env = ChatEnv()
    mine = [user("a")]
    state = env.reset(queries(mine))
    mine[0]["content"] = "changed"
    rows(state, HISTORY)[0][0]["content"] = "changed"
    assert rows(state, HISTORY) == [[user("a")]]


# ---------------------------------------------------------------- independence


@pytest.mark.parametrize("mode", MODES)
def test_one_state_stepped_twice_gives_two_results_that_do_not_know_of_each_other(mode: str) -> None:
    env = env_of(mode)
    state = env.step_mdp(env.step(say(env.reset(queries("a", "b")), mode, ["1", "2"])))
    one = env.step_mdp(env.step(say(state.copy(), mode, ["x", "y"])))
    other = env.step_mdp(env.step(say(state.copy(), mode, ["longer", ""])))
    longer = env.step(say(one.copy(), mode, ["!", "?"]))["next"]
    before = shown(other, mode)
    contents = [[m["content"] for m in talk] for talk in rows(longer, HISTORY)]
    assert contents == [["a", "1", "x", "!"], ["b", "2", "y", "?"]]
    assert [[m["content"] for m in talk] for talk in rows(other, HISTORY)] == [["a", "1", "longer"], ["b", "2", ""]]
    assert shown(other, mode) == before


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_and_a_state_can_be_copied_and_saved(mode: str) -> None:
    env = env_of(mode, system_prompt="Be.")
    state = env.step_mdp(env.step(say(env.reset(queries("a", "b")), mode, ["1", "22"])))
    for other in (pickle.loads(pickle.dumps(env)), copy.deepcopy(env)):
        again = pickle.loads(pickle.dumps(state)) if mode != "tokens" else state.clone()
        found, wanted = (e.step(say(s, mode, ["x", "y"]))["next"] for e, s in ((other, again), (env, state.clone())))
        assert shown(found, mode) == shown(wanted, mode)
        assert rows(found, HISTORY) == rows(wanted, HISTORY)
        assert rows(other.reset(queries("q")), HISTORY) == rows(env.reset(queries("q")), HISTORY)


@pytest.mark.parametrize("mode", MODES)
def test_a_lazy_stack_of_rows_is_as_good_as_a_batch(mode: str) -> None:
    env, texts = env_of(mode), ["one", "2"]
    single = [say(env.reset(TensorDict({"query": text})), mode, [said]) for text, said in zip("ab", texts, strict=True)]
    td = env.step(lazy_stack(single, 0))
    wanted = env.step(say(env.reset(queries("a", "b")), mode, texts))
    assert shown(td["next"], mode) == shown(wanted["next"], mode)
    state = env.step_mdp(td)
    assert rows(state, HISTORY) == rows(wanted["next"], HISTORY)
    assert shown(env.step(say_each(state, mode, texts))["next"], mode) == shown(
        env.step(say(env.step_mdp(wanted), mode, texts))["next"], mode
    )


def say_each(td: TensorDictBase, mode: str, texts: list[str]) -> TensorDictBase:
    for row, text in zip(td.unbind(0), texts, strict=True):
        say(row, mode, [text])
    return td


# ---------------------------------------------------------------- rollouts and loaders


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_has_the_prompt_of_each_turn(mode: str) -> None:
    env = env_of(mode)
    td = env.rollout(3, lambda td: say(td, mode, ["x", "yy"]), tensordict=queries("a", "b"))
    assert td.batch_size == (2, 3)
    counts = [len(talk) for talk in rows(td, ("next", "history", "prompt"))]
    assert counts == [2, 3, 4, 2, 3, 4]


def test_a_loader_gives_strings_rows_or_lists_of_messages() -> None:
    talk = [user("hi"), assistant("yes?")]
    for loader in (["a", "b"], [{"query": "a", "n": 1}, {"query": "b", "n": 2}]):
        state = ChatEnv.from_dataloader(loader, batch_size=2, system_prompt="Be.").reset()
        assert [row[1:] for row in rows(state, HISTORY)] == [[user("a")], [user("b")]]
    for loader in ([talk, talk[:1]], [{"query": talk}, {"query": talk[:1]}]):
        assert rows(ChatEnv.from_dataloader(loader, batch_size=2).reset(), HISTORY) == [talk, talk[:1]]
    state = ChatEnv.from_dataloader([{"ask": "a"}], data_key="ask", batch_size=1).reset()
    assert rows(state, HISTORY) == [[user("a")]]


def test_a_loader_deals_groups_and_a_row_that_ended_gets_the_next_prompt() -> None:
    env = ChatEnv.from_dataloader(["a", "b", "c"], batch_size=2, repeats=2, group_repeats=True)
    state = env.reset()
    assert [talk[0]["content"] for talk in rows(state, HISTORY)] == ["a", "a", "b", "b"]
    assert state["group_id"].tolist() == [0, 0, 1, 1]
    td = env.step(say(state, "history", ["1", "2", "3", "4"]))
    done = torch.tensor([[False], [True], [False], [False]])
    td = env.reset(env.step_mdp(td).set("_reset", done))
    assert [[m["content"] for m in talk] for talk in rows(td, HISTORY)] == [["a", "1"], ["c"], ["b", "3"], ["b", "4"]]


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_reset_gets_the_next_messages_of_the_loader(mode: Any) -> None:
    talks = [[user(text), assistant("yes?")] for text in "abc"]
    env = ChatEnv.from_dataloader(talks, batch_size=2, input_mode=mode, tokenizer=TOKENIZER)
    td = env.step_mdp(env.step(say(env.reset(), mode, ["1", "2"])))
    td = env.reset(td.set("_reset", torch.tensor([False, True])))
    assert rows(td, HISTORY) == [[*talks[0], assistant("1")], talks[2]]
    if mode != "history":
        assert shown(td, mode) == [written(talks[0], "1", mode), written(talks[2], "", mode)]


def test_the_state_after_a_step_keeps_what_is_nested_and_drops_what_was_used() -> None:
    """Whether or not the TensorDict is one that can be put together at no cost: one with names can not."""
    env = env_of("text", task=None)
    stepped = env.step(say(env.reset(queries("a", "b")), "text", ["1", "2"]))
    stepped["text", "mine"], stepped["more", "deep", "x"] = torch.tensor([1, 2]), torch.tensor([3, 4])
    stepped["next", "more", "deep", "y"], stepped["next", "new", "z"] = torch.tensor([5, 6]), torch.tensor([7, 8])
    wanted = {("history", "prompt"), ("text", "prompt"), ("text", "mine"), ("more", "deep", "x"), ("more", "deep", "y")}
    wanted |= {("new", "z"), ("query",), ("done",), ("terminated",), ("truncated",)}
    slow = stepped.copy()
    slow.names = ["batch"]
    for td in (stepped, slow):
        state = env.step_mdp(td)
        keys = state.keys(True, True, is_leaf=is_leaf_nontensor)
        assert {key if isinstance(key, tuple) else (key,) for key in keys} == wanted
        assert rows(state, ("text", "prompt"))[1].endswith("<assistant>2")
        assert state["more", "deep", "y"].tolist() == [5, 6]


def test_prompts_without_a_chat_template_are_text_as_it_is() -> None:
    tokenizer = tiny_tokenizer()
    env = ChatEnv(input_mode="tokens", tokenizer=tokenizer, template=PlainTemplate(tokenizer))
    assert shown(env.reset(queries("2+2=")), "tokens") == [tokenizer("2+2=")["input_ids"]]


def test_keys_of_its_own_and_foreign_ones() -> None:
    env = env_of("tokens", observation_key="tokens", action_key="tokens_response")
    state = env.reset(queries("a").set("kept", torch.tensor([7])))
    state["tokens_response"] = torch.tensor([[5, 6]])
    td = env.step_mdp(env.step(state))
    assert rows(td, "tokens")[0].tolist() == [*ids(marked([user("a")])), 5, 6]
    assert td["kept"].tolist() == [7]
    assert "tokens_response" not in td.keys()  # noqa: SIM118 (a TensorDict iterates over its rows)
    check_env_specs(env, tensordict=queries("a", "b"))


def test_everything_is_on_the_device() -> None:
    env = env_of("tokens", device="cpu")
    td = env.rollout(2, tensordict=queries("a"))
    assert td.device == td["next"].device == torch.device("cpu")


# ---------------------------------------------------------------- any order of steps and resets


class Plain:
    """What an environment should hold, in lists."""

    def __init__(self, mode: str, prompts: list[str]) -> None:
        self.mode = mode
        self.asked = [[user(text)] for text in prompts]
        self.said: list[list[str]] = [[] for _ in prompts]

    def rows(self) -> list[Any]:
        talks = [[*a, *map(assistant, s)] for a, s in zip(self.asked, self.said, strict=True)]
        if self.mode == "history":
            return talks
        return [written(a, "".join(s), self.mode) for a, s in zip(self.asked, self.said, strict=True)]


FLAGS = st.lists(st.booleans(), min_size=3, max_size=3)
TEXTS = st.lists(st.text("abc ", max_size=3), min_size=3, max_size=3)
MOVES = st.lists(st.tuples(st.sampled_from(["step", "reset", "back"]), FLAGS, TEXTS), max_size=8)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(moves=MOVES)
def test_any_order_of_steps_and_resets_of_some_rows_says_what_lists_say(mode: str, moves: list[Any]) -> None:
    """The move "back" goes on from an earlier state, whose rows must be as they were."""
    env, plain = env_of(mode, batch_size=3), Plain(mode, ["p", "q", "r"])
    state = env.reset(queries("p", "q", "r"))
    earlier = [(state, copy.deepcopy(plain))]
    for move, flags, texts in moves:
        if move == "back":
            state, plain = earlier[0][0], copy.deepcopy(earlier[0][1])
            continue
        mask = torch.tensor(flags)
        if move == "step":
            state = env.step_mdp(env.step(say(state.copy(), mode, texts).set("_step", mask)))
        else:
            state = env.reset(state.copy().set("query", messages_entry(texts, "user")).set("_reset", mask))
        for row, (flag, text) in enumerate(zip(flags, texts, strict=True)):
            if flag and move == "step":
                plain.said[row].append(text)
            elif flag:
                plain.asked[row], plain.said[row] = [user(text)], []
        assert shown(state, mode) == plain.rows()
        earlier.append((state, copy.deepcopy(plain)))
    for state, known in earlier:
        assert shown(state, mode) == known.rows()
        talks = [[*a, *map(assistant, s)] for a, s in zip(known.asked, known.said, strict=True)]
        assert read_history(state, HISTORY).tolist() == talks
