"""Random conversations over every template: the fast way is the plain way, and nothing is lost or said twice."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat.conformance import FAMILIES, ROUNDS, TOOLS, Family, scenarios, tokenizer_of
from tests.chat.oracle import PlainConversation

from ramet.chat import ChatTemplate, Conversation
from ramet.errors import DataError
from ramet.types import Kind, Message

OWN = [family for family in FAMILIES if not family.package]
TEXTS = st.one_of(
    st.sampled_from(["", " ", "\n", "yes", "no: too low", "<|im_end|>", "</s>", "<think>", "</think>", "[INST] x"]),
    st.sampled_from(
        ["<think>\na\n</think>\n\nb", "<think></think>b", "naïve ☃ 🌲", "user", "\n\nUSER: hi", "a  b", " é"]
    ),
    st.text(st.sampled_from("ab \n<>|é☃{}\"'"), max_size=12),
)
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


@functools.cache
def template_of(family: Family, kind: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_of(family, kind), family.options)


@st.composite
def turns(draw: st.DrawFn) -> tuple[str, bool, int, list[Message]]:
    """What is written, whether an end token follows, how many calls are read in it, and the reply."""
    calls = draw(st.sampled_from([0, 0, 0, 1, 2]))
    if calls:
        reply = [
            {"role": "tool", "name": "add", "content": draw(TEXTS), "tool_call_id": f"call0000{i}"}
            for i in range(calls)
        ]
    else:
        reply = [{"role": "user", "content": draw(TEXTS)} for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2])))]
    return draw(TEXTS), draw(st.booleans()), calls, list(reply)


def reader(calls: int, text: str) -> Message:
    if not calls:
        return {"role": "assistant", "content": text}
    made = [{**CALL, "id": f"call0000{i}"} for i in range(calls)]
    return {"role": "assistant", "content": text, "tool_calls": made}


PROMPTS = st.tuples(st.booleans(), TEXTS).map(
    lambda drawn: [
        *([{"role": "system", "content": "Be brief."}] if drawn[0] else []),
        {"role": "user", "content": drawn[1]},
    ]
)


@pytest.mark.parametrize("family", OWN, ids=lambda family: family.name)
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@given(prompt=PROMPTS, tools=st.booleans(), said=st.lists(turns(), max_size=5))
@settings(max_examples=6, deadline=None)
def test_a_conversation_is_what_the_plain_way_makes_of_it(
    family: Family, kind: str, prompt: list[Message], tools: bool, said: Sequence[Any]
) -> None:
    template = template_of(family, kind)
    offered = TOOLS if tools else []
    try:
        talk, plain = Conversation(template, prompt, offered), PlainConversation(template, prompt, offered)
    except DataError:
        return
    sampled: list[tuple[int, float]] = []
    for number, (text, ended, calls, reply) in enumerate(said):
        tokens = template.encode(text, opening=False)
        end = template.tokenizer.convert_tokens_to_ids(family.end)
        assert isinstance(end, int)
        tokens = [*tokens, end] if ended else tokens
        log_probs = [-1.0 - number - i / 100 for i in range(len(tokens))]
        read = functools.partial(reader, calls)
        before = talk.copy()
        talk.answer(tokens, log_probs, number, ended=ended, read=read)
        try:
            talk.reply(reply)
        except DataError:  # refused, or left out: nothing has changed but the turn, and the plain way may say more
            assert talk.pieces[-1].tokens == [*before.pieces[-1].tokens, *tokens]
            talk = before
            break
        plain.turn(tokens, ended, read, reply)
        sampled += zip(tokens, log_probs, strict=True)
        assert talk.text == plain.text == template.render(talk._settled, offered)
        assert [list(zip(piece.tokens, piece.kinds, strict=True)) for piece in talk.pieces] == plain.pieces
        assert len(talk.forks) == len(talk.pieces) - 1
        parting = talk.verify()
        assert parting is None or parting.token is not None
    found = [
        (token, log_prob)
        for piece in talk.pieces
        for token, kind, log_prob in zip(piece.tokens, piece.kinds, piece.log_probs, strict=True)
        if kind is Kind.SAMPLED
    ]
    assert found == sampled
    assert {len(column) - len(piece.tokens) for piece in talk.pieces for column in (piece.kinds, piece.versions)} == {0}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("kind", ["bytes", "pieces", "characters"])
def test_what_a_familys_model_writes_is_what_the_plain_way_makes_of_it(family: Family, kind: str) -> None:
    try:
        template = ChatTemplate(tokenizer_of(family, kind), family.options)
    except LookupError as error:
        pytest.skip(str(error))
    for _, prompt, tools, script in scenarios(family):
        try:
            talk, plain = Conversation(template, prompt, tools), PlainConversation(template, prompt, tools)
            for turn in script[:ROUNDS]:
                tokens = template.encode(turn.text, opening=False)
                read = lambda _, turn=turn: turn.message  # noqa: E731
                talk.answer(tokens, [-1.0] * len(tokens), 0, read=read)
                talk.reply(turn.reply)
                plain.turn(tokens, False, read, turn.reply)
        except DataError:
            continue
        assert [list(zip(piece.tokens, piece.kinds, strict=True)) for piece in talk.pieces] == plain.pieces
