"""Stop strings against decoding the whole completion after each token, with decoders of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ramet.models.tiny import tiny_tokenizer
from ramet.policies.stops import BROKEN, StopWatch, decoder_of

Decode = Callable[[Sequence[int]], str]


def first_stop(decode: Decode, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    """Decode everything after each token; return the number of tokens with which a stop first stands in the text."""
    for n in range(1, len(tokens) + 1):
        if any(stop in decode(tokens[:n]) for stop in stops):
            return n
    return None


def watched(decode: Decode, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    watch = StopWatch(decode, stops)
    return next((n for n, token in enumerate(tokens, 1) if watch.add(token)), None)


# ---------------------------------------------------------------- decoders


def whole_bytes(pieces: Sequence[bytes]) -> Decode:
    """Like byte-level BPE: the bytes of all tokens, and a mark for what is no character."""
    return lambda tokens: b"".join(pieces[token] for token in tokens).decode("utf-8", errors="replace")


def made(pieces: Sequence[str], decoder: object) -> Decode:
    tokenizer = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.decoder = decoder  # type: ignore[assignment]
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


BYTES = [
    b"a",
    b"E",
    b"N",
    b"EN",
    b"xEND",
    b"ND",
    b"END.",
    b" ",
    b"",
    b"\n",
    *(bytes([n]) for n in "é漢😀".encode()),
    b"\xffE",
]
BYTES += [b"\xa2E", "é".encode() + b"\xe6"]
LETTERS = ["a", "E", "N", "D", "é", "漢", "\n", ""]
FALLBACK = ["▁a", "E", "N", "D", "▁", "▁END", "a", *(f"<0x{n:02X}>" for n in sorted(set("é漢😀".encode()))), "<0xFF>"]
SUBWORDS = ["un", "##E", "E", "##N", "N", "D", "##D", ".", "'", "s"]
DECODERS: dict[str, tuple[Decode, int]] = {
    "a letter each": (lambda tokens: "".join(LETTERS[token] for token in tokens), len(LETTERS)),
    "bytes": (whole_bytes(BYTES), len(BYTES)),
    "bytes, marks left out": (lambda t: whole_bytes(BYTES)(t).replace(BROKEN, ""), len(BYTES)),
    "words and byte fallback": (
        made(
            FALLBACK,
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
        ),
        len(FALLBACK),
    ),
    "subwords": (made(SUBWORDS, decoders.WordPiece(prefix="##", cleanup=True)), len(SUBWORDS)),
}
STOPS = [["END"], ["EN", "漢"], ["E"], [" a"], ["é😀"], ["a\n", "N.D"], ["DD", "ND ", "E'"], ["END END END a"]]


@pytest.mark.parametrize("name", DECODERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_completion_ends_where_decoding_all_of_it_shows_a_stop(name: str, data: st.DataObject) -> None:
    decode, size = DECODERS[name]
    tokens = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=80))
    stops = data.draw(st.sampled_from(STOPS))
    assert watched(decode, tokens, stops) == first_stop(decode, tokens, stops)


@pytest.mark.parametrize("name", DECODERS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_stop_far_behind_is_found_as_one_at_the_start(name: str, data: st.DataObject) -> None:
    """Long stretches of the same few tokens, so that windows are shortened many times and at every kind of place."""
    decode, size = DECODERS[name]
    any_token = st.integers(0, size - 1)
    stretch = data.draw(st.lists(any_token, min_size=1, max_size=4))
    tokens = stretch * (120 // len(stretch)) + data.draw(st.lists(any_token, max_size=12))
    stops = data.draw(st.sampled_from(STOPS))
    assert watched(decode, tokens, stops) == first_stop(decode, tokens, stops)


def ids(pieces: Sequence[bytes], *wanted: bytes) -> list[int]:
    return [pieces.index(piece) for piece in wanted]


@pytest.mark.parametrize("before", [0, 1, 7, 60, 61, 62, 63, 200])
@pytest.mark.parametrize(
    ("wanted", "stop"),
    [
        ((b"EN", b"ND", b"E", b"ND"), "END"),  # straddles tokens, after a false start
        ((b"xEND",), "END"),  # one token holds it and more before
        ((b"END.",), "END"),  # and more behind
        (("é".encode()[:1], "é".encode()[1:]), "é"),  # half a character each
        (tuple(bytes([n]) for n in "漢é😀".encode()), "漢é😀"),
        ((b"\xff", b"E", b"", b"ND"), "END"),  # after what is no character, and across a token without text
    ],
)
def test_worked_out_by_hand(before: int, wanted: tuple[bytes, ...], stop: str) -> None:
    """Found with the last of the tokens and with none before it."""
    pieces = [*BYTES, b"\xff"]
    tokens = [*ids(pieces, b"a") * before, *ids(pieces, *wanted)]
    assert watched(whole_bytes(pieces), tokens, [stop]) == len(tokens)


def fallback(text: str) -> list[int]:
    """The ids of a text in which `?` is a byte that is no character, and letters that are no tokens are their bytes."""
    found = []
    for letter in text:
        encoded = b"\xff" if letter == "?" else letter.encode()
        names = [letter] if letter in FALLBACK else [f"<0x{byte:02X}>" for byte in encoded]
        found += [FALLBACK.index(name) for name in names]
    return found


@pytest.mark.parametrize("before", range(9))
@pytest.mark.parametrize(
    ("text", "stop"),
    [("é" * 60 + "漢", "漢"), ("漢" * 50 + "é😀", "é😀"), ("é漢" * 50 + "END", "漢END")],
    ids=["two bytes", "three bytes", "both"],
)
def test_long_runs_of_bytes_are_not_cut_inside_a_character(text: str, stop: str, before: int) -> None:
    """With byte fallback a run that begins inside a character is no text at all, up to its end."""
    decode, _ = DECODERS["words and byte fallback"]
    tokens = fallback("a" * before + text)
    assert watched(decode, tokens, [stop]) == first_stop(decode, tokens, [stop]) == len(tokens)


@pytest.mark.parametrize("before", range(9))
@pytest.mark.parametrize("letter", ["é", "漢"])
def test_what_the_window_shows_and_the_whole_text_does_not_ends_nothing(letter: str, before: int) -> None:
    """A byte that is no character spoils the run that it stands in, also when it has left the window."""
    decode, _ = DECODERS["words and byte fallback"]
    tokens = fallback("a" * before + "?" + letter * 60 + "a" + letter)
    assert watched(decode, tokens, [letter]) == first_stop(decode, tokens, [letter]) == len(tokens)


@pytest.mark.parametrize("name", DECODERS)
def test_what_a_token_costs_does_not_grow(name: str) -> None:
    """At most 48 tokens are ever decoded at once, of 2,000, and 60 a token on average: 16 would be the least."""
    decode, size = DECODERS[name]
    sizes: list[int] = []

    def counted(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return decode(tokens)

    assert watched(counted, [n * n % size for n in range(2000)], ["QUIT"]) is None
    assert max(sizes) <= 48
    assert sum(sizes) <= 60 * 2000


def test_a_decoder_for_which_every_token_matters_is_given_all_of_them() -> None:
    """Its text begins with the number of tokens, so no window is the end of another; still every stop is found."""

    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens[::-1])

    text = "ab" * 100 + "DNE"
    assert watched(decode, [ord(letter) for letter in text], ["END"]) == len(text)


def test_no_stop_decodes_nothing_and_stops_nothing() -> None:
    def decode(tokens: Sequence[int]) -> str:
        raise AssertionError("nothing is to be decoded")

    watch = StopWatch(decode, [])
    assert not any(watch.add(token) for token in range(100))


@pytest.mark.parametrize("stops", [["a", ""], "END"])
def test_stops_that_would_end_everything_or_are_no_list_are_refused(stops: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="a sequence of strings, none of them empty"):
        StopWatch(lambda tokens: "", stops)


def test_special_tokens_are_part_of_the_text_that_is_watched() -> None:
    tokenizer = tiny_tokenizer()
    decode = decoder_of(tokenizer)
    tokens = [*tokenizer("ab", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert decode(tokens) == "ab<eos>"
    assert watched(decode, tokens, ["b<eos>"]) == 3
