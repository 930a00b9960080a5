"""Stop strings, found in the text of a completion token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPARE = 8
"""How many characters a window holds beyond what a stop string may reach back: the last ones may yet change."""
BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return the function from token ids to text in which stop strings are looked for: special tokens included.

    >>> from ramet.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> decoder_of(tokenizer)(tokenizer("ab")["input_ids"])
    '<bos>ab'
    """

    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    return decode


class StopWatch:
    """Say of one completion, as its tokens come, when its text holds one of the stop strings.

    The answer is that of decoding the whole completion after each token; what it costs does not grow with the length
    of the completion. A window of the last tokens is decoded. It is shortened where the text of what is left is the
    end of its whole text, so that no token loses the neighbours that it is decoded with; with a decoder for which that
    is never so, the window stays whole. What the window shows is believed once the whole text shows it as well.

    `decode` turns token ids into text; tokens that are part of a character only may give anything.

    >>> watch = StopWatch(lambda tokens: "".join(chr(token) for token in tokens), ["END"])
    >>> [watch.add(ord(letter)) for letter in "ENEND"]
    [False, False, False, False, True]
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        if isinstance(stops, str) or "" in stops:
            raise ValueError(f"stops must be a sequence of strings, none of them empty: found {stops!r}")
        self._decode = decode
        self._stops = tuple(stops)
        self._reach = max(map(len, self._stops), default=0) + SPARE
        self._tokens: list[int] = []
        self._first = 0
        """Where the window begins in the completion."""
        self._limit = 2 * self._reach
        """How many tokens the window may hold before it is shortened."""

    def add(self, token: int) -> bool:
        """Take the next token; return whether a stop string stands in the text with it."""
        self._tokens.append(token)
        if not self._stops:
            return False
        window = self._tokens[self._first :]
        text = self._decode(window)
        if self._stands_in(text):
            return self._first == 0 or self._stands_in(self._decode(self._tokens))
        if len(window) > self._limit:
            self._shorten(window, text)
        return False

    def _stands_in(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)

    def _shorten(self, window: list[int], text: str) -> None:
        """Leave the older half of the window out if the newer half means the same without it."""
        # The last character may still be incomplete: wait, but no longer than a character has bytes.
        if text.endswith(BROKEN) and len(window) <= self._limit + 4:
            return
        half = len(window) // 2
        for start in range(half, max(half - 4, 0), -1):  # one of four neighbours is the start of a character
            rest = self._decode(window[start:])
            if len(rest) >= self._reach and text.endswith(rest):
                self._first += start
                # Room for more than a character, so that the next time is not in the middle of one.
                self._limit = max(2 * self._reach, len(window) - start + self._reach)
                return
        self._limit = 2 * len(window)  # try again, rarely
