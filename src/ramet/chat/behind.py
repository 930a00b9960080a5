"""Tokens behind tokens: what they say, and which ones a text becomes, where neither stands alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], list[int]]

WINDOWS = (8, 64)
"""How many tokens in front are looked at, before all of them are."""
ROOM = 1000
"""How many windows are remembered."""
BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""
ANCHORS = ("x", ".", "\n", "0", " ")
"""What a text may be encoded behind, where what stands in front of it would grow together with it."""


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the function from ids to text, special tokens included, of which the encoder gives the ids back.

    Some tokenizers put a space in front of each text between special tokens, and take away the first alone when they
    decode. Whether this one does is tried with one of its special tokens; if so, each such text is decoded by itself.

    >>> from ramet.models.tiny import tiny_tokenizer
    >>> decoder_of(tiny_tokenizer())([1, 5, 76])
    '<bos>1+'
    """

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}

    def decode_apart(ids: Sequence[int]) -> str:
        runs = itertools.groupby(ids, key=lambda number: number in added)
        return "".join(
            "".join(added[number] for number in run) if is_added else decode(list(run)) for is_added, run in runs
        )

    for text in added.values():
        if decode(tokenizer(text + "x", add_special_tokens=False)["input_ids"]) == text + " x":
            return decode_apart
    return decode


def text_behind(
    decode: Decode, before: Sequence[int], tokens: Sequence[int], known: dict[tuple[int, ...], str] | None = None
) -> str:
    """Return the text that `tokens` add behind `before`; a few tokens of `before` are decoded as well.

    Some decoders leave out the space in front of the first token, and a character may be in several tokens. `known`
    remembers the texts of the first few in front.

    >>> text_behind(lambda ids: "".join(map(chr, ids)).lstrip(), [65], [32, 66])
    ' B'
    """
    if not tokens:
        return ""
    for size in (*(size for size in WINDOWS if size < len(before)), len(before)):
        window = before[len(before) - size :]
        front = _remembered(decode, window, known) if size == WINDOWS[0] and known is not None else decode(window)
        if size < len(before) and (not front.strip() or front.startswith(BROKEN)):
            continue
        whole = decode([*window, *tokens])
        if whole.startswith(front):
            return whole[len(front) :]
    return decode(tokens)


def _remembered(decode: Decode, window: Sequence[int], known: dict[tuple[int, ...], str]) -> str:
    key = tuple(window)
    if key not in known:
        if len(known) >= ROOM:
            known.clear()
        known[key] = decode(window)
    return known[key]


def ids_behind(encode: Encode, text: str, front: str) -> list[int]:
    """Return the ids of `text` where it stands behind `front`, of which the end is enough.

    They are those behind the ids of `front`, where the two have a seam between tokens. Where they have none, the
    tokens of `front` have been seen already and stay: those of `text` are taken from behind another character.

    >>> ids_behind(lambda text: [len(word) for word in text.split("-")], "-ab-c", "abc")
    [2, 1]
    """
    if not text:
        return []
    for anchor in (front, *ANCHORS):
        if not anchor:
            continue
        alone = encode(anchor)
        both = encode(anchor + text)
        if alone and both[: len(alone)] == alone and len(both) > len(alone):
            return both[len(alone) :]
    return encode(text)


def splits_an_added_token(template: object, before: str, behind: str) -> bool:
    """Say whether a token that is a text of its own, special or not, stands across the place between two texts."""
    tokenizer: PreTrainedTokenizerBase | None = getattr(template, "tokenizer", None)
    if tokenizer is None or not before or not behind:
        return False
    return any(
        before.endswith(token.content[:cut]) and behind.startswith(token.content[cut:])
        for token in tokenizer.added_tokens_decoder.values()
        for cut in range(1, len(token.content))
    )


def same_beginning(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike.

    >>> same_beginning("abc", "abd!")
    2
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
