"""Tokens behind tokens say what all of them say, and a text behind a text becomes what all of it becomes."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat.vocabularies import KINDS, vocabulary
from transformers import PreTrainedTokenizerBase

from ramet.chat.behind import decoder_of, ids_behind, same_beginning, text_behind

SPECIAL = ["<|im_start|>", "<|im_end|>"]
PARTS = st.lists(
    st.sampled_from(
        ["It is four.", " and", "\n", "  ", "<|im_end|>", "<|im_start|>", "user", "é", "☃🌲", "Falcon:", "x", " {"]
    ),
    max_size=6,
).map("".join)


@functools.cache
def made(kind: str) -> PreTrainedTokenizerBase:
    return vocabulary(kind, SPECIAL, "<s>", "</s>")


def encode(kind: str, text: str) -> list[int]:
    return list(made(kind)(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
@given(before=PARTS, text=PARTS, behind=PARTS)
@settings(max_examples=60, deadline=None)
def test_a_window_says_what_all_tokens_say(kind: str, before: str, text: str, behind: str) -> None:
    decode = decoder_of(made(kind))
    front, tokens = encode(kind, before), encode(kind, text + behind)
    for cut in range(len(tokens) + 1):
        added = text_behind(decode, front, tokens[:cut])
        whole, known = decode([*front, *tokens[:cut]]), decode(front)
        if front and known.strip() and not known.endswith("\ufffd") and whole.startswith(known):
            assert added == whole[len(known) :]


@pytest.mark.parametrize("kind", KINDS)
@given(before=PARTS, text=PARTS)
@settings(max_examples=60, deadline=None)
def test_ids_behind_a_seam_are_those_of_the_whole(kind: str, before: str, text: str) -> None:
    front, whole = encode(kind, before), encode(kind, before + text)
    found = ids_behind(lambda some: encode(kind, some), text, before)
    if front and whole[: len(front)] == front and len(whole) > len(front):
        assert [*front, *found] == whole
    else:  # they grow together: what was seen stays, and what comes is said in full
        assert bool(found) is bool(text)


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.text(st.sampled_from("It isfour.\n<>"), max_size=12).filter(lambda text: "<" not in text or ">" not in text)
)
@settings(max_examples=40, deadline=None)
def test_what_is_encoded_behind_a_special_token_is_decoded_to_the_same(kind: str, text: str) -> None:
    decode = decoder_of(made(kind))
    for front in ("<|im_end|>", "<s>", "<|im_start|>user\n"):
        ids = ids_behind(lambda some: encode(kind, some), text, front)
        if [*encode(kind, front), *ids] == encode(kind, front + text):
            assert text_behind(decode, encode(kind, front), ids) == text


def test_a_decoder_that_adds_a_space_behind_special_tokens_is_known_by_trying() -> None:
    tokenizer = made("pieces")
    ids = encode("pieces", "<s>user<|im_end|>It")
    assert tokenizer.decode(ids) == "<s> user<|im_end|> It"
    assert decoder_of(tokenizer)(ids) == "<s>user<|im_end|>It"


@given(one=st.text("ab", max_size=20), other=st.text("ab", max_size=20))
def test_the_same_beginning_by_counting(one: str, other: str) -> None:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert same_beginning(one, other) == count
