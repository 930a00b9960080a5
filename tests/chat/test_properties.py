"""Random conversations over every template: the fast way is the plain way, and nothing is lost or said twice."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat.conformance import FAMILIES, TOOLS, Family, tokenizer_of
from tests.chat.measured import ROUNDS, held, rendered, scenarios
from tests.chat.oracle import PlainConversation
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from ramet.chat import ChatTemplate, Conversation
from ramet.errors import DataError
from ramet.models.tiny import tiny_tokenizer
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


def markers(family: Family) -> st.SearchStrategy[str]:
    """Texts that hold what the template itself looks for or writes."""
    own = st.sampled_from([*family.special, family.bos, family.eos, family.end])
    return st.one_of(TEXTS, own, st.tuples(TEXTS, own, TEXTS).map("".join))


def check_columns(talk: Conversation, sampled: list[tuple[int, float, int]]) -> None:
    """Each piece has one entry a token in each column, and what was sampled is marked so, once, in order."""
    found = []
    for piece in talk.pieces:
        assert len({len(piece.tokens), len(piece.kinds), len(piece.log_probs), len(piece.versions)}) == 1
        for entry in zip(piece.tokens, piece.kinds, piece.log_probs, piece.versions, strict=True):
            token, kind, log_prob, version = entry
            if kind is Kind.SAMPLED:
                found.append((token, log_prob, version))
            else:
                assert math.isnan(log_prob)
                assert version == -1
    assert found == sampled


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}-{family.package}")
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_after_each_turn_the_ids_are_those_of_the_templates_own_rendering(family: Family, data: st.DataObject) -> None:
    """With one token a character, so that no answer can be written in other tokens; else the texts are equal.

    Contents hold the template's own markers; turns have calls and results, several at once, or none; a piece is what
    the template wrote when it began, and what was sampled and written behind that.
    """
    kind = data.draw(st.sampled_from(["characters", "characters", "bytes", "pieces"]), "kind")
    try:
        template = template_of(family, kind)
    except LookupError as error:
        pytest.skip(str(error))
    texts = markers(family)
    offered = TOOLS if data.draw(st.booleans(), "tools") else []
    prompt: list[Message] = [{"role": "user", "content": data.draw(texts, "question")}]
    if data.draw(st.booleans(), "system"):
        prompt = [{"role": "system", "content": data.draw(texts, "system prompt")}, *prompt]
    exact = kind == "characters" and family.name != "SmolLM2"
    sampled: list[tuple[int, float, int]] = []
    try:
        talk = Conversation(template, prompt, offered)
    except DataError:
        return
    begun = list(talk.piece.tokens)
    for number in range(data.draw(st.integers(0, 4), "turns")):
        _, ended, calls, reply = data.draw(turns(), "turn")
        tokens = template.encode(data.draw(texts, "answer"), opening=False)
        end = template.tokenizer.convert_tokens_to_ids(family.end)
        assert isinstance(end, int)
        tokens = [*tokens, end] if ended else tokens
        log_probs = [-1.0 - number - at / 100 for at in range(len(tokens))]
        talk.answer(tokens, log_probs, number, ended=ended, read=functools.partial(reader, calls))
        sampled += zip(tokens, log_probs, [number] * len(tokens), strict=True)
        check_columns(talk, sampled)
        pieces, before, said = len(talk.pieces), list(talk.piece.tokens), len(talk.messages)
        try:
            talk.reply(reply)
        except DataError:
            assert (len(talk.pieces), talk.piece.tokens, len(talk.messages)) == (pieces, before, said)
            return
        check_columns(talk, sampled)
        assert talk.messages[said:] == reply
        assert talk.pieces[pieces - 1].tokens[: len(before)] == before
        assert before[: len(begun)] == begun
        if len(talk.pieces) > pieces:  # the piece before holds nothing behind its last answer
            assert talk.pieces[pieces - 1].tokens == before
            assert set(talk.piece.kinds) == {Kind.PROMPT}
            begun = list(talk.piece.tokens)
        assert len(talk.forks) == len(talk.pieces) - 1
        view = talk._settled
        assert len(view) == len(talk.messages)
        assert all(  # a turn goes in as it was understood, or as the text that it is
            one == other or (one["role"] == other["role"] == "assistant" and set(one) == {"role", "content"})
            for one, other in zip(view, talk.messages, strict=True)
        )
        assert talk.text == rendered(template, view, offered, tokenize=False)
        if exact:
            assert held(talk) == rendered(template, view, offered, tokenize=True)


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_that_looks_like_the_beginning_of_a_token_of_the_templates_is_not_taken_for_it(ended: bool) -> None:
    """The template writes "<|channel|>" where the model has written "<": alike by accident, and no prefix."""
    (family,) = [one for one in FAMILIES if one.name == "gpt-oss"]
    try:
        template = template_of(family, "characters")
    except LookupError as error:
        pytest.skip(str(error))
    talk = Conversation(template, [{"role": "user", "content": "?"}])
    end = template.tokenizer.convert_tokens_to_ids(family.end)
    tokens = [*template.encode("<", opening=False), *([end] if ended else [])]
    talk.answer(tokens, [-1.0] * len(tokens), 0, ended=ended)
    talk.reply([{"role": "user", "content": "!"}])
    assert len(talk.forks) == 1
    assert held(talk) == rendered(template, talk._settled, [], tokenize=True)


def test_nor_for_a_token_that_is_no_special_one_but_a_text_of_its_own() -> None:
    tokenizer = tokenizer_of_characters_with("<think>")
    talk = Conversation(ChatTemplate(tokenizer), [{"role": "user", "content": "?"}])
    talk.answer(tokenizer("<", add_special_tokens=False)["input_ids"], [-1.0], 0, ended=False)
    talk.reply([{"role": "user", "content": "!"}])
    assert len(talk.forks) == 1
    assert talk.verify() is None


def tokenizer_of_characters_with(text: str) -> PreTrainedTokenizerBase:
    """One token a character, and one for `text`, which the template writes in front of what was said."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}" + text + "{% endif %}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer
