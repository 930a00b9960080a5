"""Conversations, given what they can not take: one clear error, and the state is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.envs.chat_templates import tokenizer_with, user
from tests.envs.test_chat import HISTORY, TOKENIZER, env_of, queries, say

from ramet.envs.chat import ChatEnv
from ramet.envs.chat_history import messages_entry
from ramet.errors import DataError
from ramet.models.tiny import tiny_tokenizer
from ramet.ragged import rows
from ramet.tasks import Task


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"input_mode": "words"}, ValueError, r"must be one of \['history', 'text', 'tokens'\]: found 'words'"),
        ({"input_mode": "tokens"}, ValueError, "needs a tokenizer"),
        ({"input_mode": "text"}, ValueError, "needs a tokenizer"),
        ({"input_mode": "text", "tokenizer": tiny_tokenizer()}, DataError, "no chat template"),
        ({"observation_key": "messages"}, ValueError, r"messages are under \('history', 'prompt'\)"),
        ({"batch_size": (2, 3)}, TypeError, "batch_size must be 0 or 1d"),
        ({"template_kwargs": {"x": 1}, "template": object()}, ValueError, "template_kwargs are variables"),
        ({"policy_role": "bot", "task": Task("t", [], [], len)}, ValueError, "found policy_role='bot'"),
        (
            {"input_mode": "tokens", "tokenizer": TOKENIZER, "observation_key": "x", "action_key": "x"},
            ValueError,
            "a key of its own: found 'x' twice",
        ),
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any], error: type[Exception], parts: str) -> None:
    with pytest.raises(error, match=parts):
        ChatEnv(**options)


@pytest.mark.parametrize(
    ("entry", "error", "parts"),
    [
        (torch.tensor([1]), TypeError, "'query' must hold text or messages: found int64 tensor"),
        (messages_entry(["a"]), None, ""),
        ([{1, 2}], TypeError, "'query', row 0: expected text, a message or a list of messages, found set"),
        ([[{"content": "a"}]], TypeError, "'query', row 0: expected messages such as .* found dict"),
        ([["a"]], TypeError, "'query', row 0: expected messages such as .* found str"),
    ],
)
def test_wrong_queries(entry: Any, error: type[Exception] | None, parts: str) -> None:
    env, td = ChatEnv(), TensorDict({}, [1]).set("query", entry)
    if error is None:
        assert len(rows(env.reset(td), HISTORY)) == 1
        return
    with pytest.raises(error, match=parts):
        env.reset(td)


def test_a_reset_without_a_query_says_what_there_is() -> None:
    with pytest.raises(KeyError, match=r"reset needs 'query'.*from_dataloader.*\['prompt'\]"):
        ChatEnv().reset(TensorDict({"prompt": ["a"]}, [1]))


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_step_without_an_answer_says_what_there_is(mode: str) -> None:
    env = env_of(mode)
    state = env.reset(queries("a"))
    with pytest.raises(KeyError, match=rf"step needs an action .*{mode}.*response.*let the policy write it"):
        env.step(state)
    assert len(rows(env.step(say(state, mode, ["x"]))["next"], HISTORY)[0]) == 2


@pytest.mark.parametrize(
    ("mode", "answer", "parts"),
    [
        ("history", torch.tensor([[1]]), "must hold text or messages: found int64 tensor"),
        ("history", messages_entry([[{"role": "user"}]]), None),
        ("text", torch.tensor([[1]]), "row 0: expected str, found a tensor"),
        ("tokens", torch.tensor([[1.0]]), r"must hold token ids, an integer tensor \(1, 'n'\)"),
        ("tokens", ["a"], "must hold token ids"),
        ("tokens", torch.tensor([True]), "must hold token ids"),
    ],
)
def test_wrong_answers(mode: str, answer: Any, parts: str | None) -> None:
    env = env_of(mode)
    state = env.reset(queries("a"))
    wrong = state.copy().set((mode, "response"), answer)
    if parts is None:
        assert rows(env.step(wrong)["next"], HISTORY) == [[user("a"), {"role": "user"}]]
        return
    with pytest.raises(TypeError, match=parts):
        env.step(wrong)
    assert rows(state, HISTORY) == [[user("a")]]


def test_a_batch_of_another_size_and_of_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"expected a TensorDict of batch size \(2,\).*found \(1,\)"):
        ChatEnv(batch_size=2).reset(queries("a"))
    with pytest.raises(ValueError, match=r"without batch or of batch size \(B,\): found \(1, 1\)"):
        ChatEnv().reset(TensorDict({}, [1, 1]))


def test_messages_that_the_template_refuses() -> None:
    refusing = tokenizer_with("{{ raise_exception('no system') if messages[0].role == 'system' else 'x' }}")
    env = ChatEnv(input_mode="tokens", tokenizer=refusing, system_prompt="Be.")
    with pytest.raises(DataError, match="no system"):
        env.reset(queries("a"))


def test_an_entry_needs_an_item_for_each_row() -> None:
    with pytest.raises(TypeError, match="a sequence with an item for each row: found str 'abc'"):
        messages_entry("abc")
