"""Strings of a batch that grow at the cost of what is appended, and are joined when they are read.

A text is a chain: the text before, and the part that was appended. So all the texts of an episode share their parts,
and two continuations of one text do not know of each other. Once a text was read, it holds what it adds to an earlier
one that was read; so tokens are decoded once, whatever is read from there. Only the latest keeps its strings joined.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tensordict import NonTensorStack
from torch import Tensor

from ramet.ragged.text_ends import (
    WINDOW,
    Decoder,
    End,
    Run,
    decoded,
    fits,
    ids_of_rows,
    joined_rows,
    replaced,
    shortened,
)
from ramet.ragged.text_entry import column_of, entry_of

if TYPE_CHECKING:
    from ramet.ragged.storage import Ragged


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """A part that is still to be decoded, and what stands before it."""

    tokens: Ragged
    decode: Decoder
    context: Ragged | None

    def only(self, mask: Tensor) -> _Tokens:
        tokens = self.tokens
        kept = type(tokens)(tokens.values, tokens.offsets, tokens.lengths * mask.to(tokens.offsets.device))
        return _Tokens(kept, self.decode, self.context)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Strings, and what stands at their ends where those are tokens: what follows is decoded together with it."""

    strings: list[str]
    ends: list[End | None] | None = None
    decode: Decoder | None = None  # of the ends

    def ends_of(self, decode: Decoder | None) -> list[End | None]:
        known = self.ends is not None and self.decode == decode
        return self.ends if known and self.ends is not None else [None] * len(self.strings)


@dataclass(frozen=True, slots=True, eq=False)
class _Growth:
    """What a text that was read is beyond an earlier one: so many characters of each string, and others after them."""

    base: Text | None
    kept: list[int]
    added: list[str]
    ends: list[End | None] | None
    decode: Decoder | None

    @classmethod
    def between(cls, base: Text | None, before: _Read, after: _Read) -> _Growth:
        kept = [_kept(*pair) for pair in zip(before.strings, after.strings, strict=True)]
        added = [string[count:] for string, count in zip(after.strings, kept, strict=True)]
        return cls(base, kept, added, after.ends, after.decode)


_Part: TypeAlias = "_Read | _Tokens"


class Text:
    """Strings [B] that are never changed: to append makes a new text, at the cost of what is appended.

    >>> prompts = Text.of(["a", "a"])
    >>> one, other = prompts.append(Text.of(["b", "c"])), prompts.append(Text.of(["d", ""]))
    >>> one.tolist(), other.tolist()
    (['ab', 'ac'], ['ad', 'a'])

    `entry` is what a TensorDict holds; `read_text` finds the text in it again, unread.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"text": one.entry()}, [2])
    >>> list(td["text"]), td[1]["text"]
    (['ab', 'ac'], 'ac')
    """

    __slots__ = ("_count", "_depth", "_growth", "_parent", "_part", "_strings")

    _count: int
    _depth: int
    _parent: Text | None
    _part: _Part | Text
    _growth: _Growth | None  # once it was read, unless it is made of strings
    _strings: list[str] | None

    @classmethod
    def _made(cls, count: int, part: _Part | Text, parent: Text | None = None) -> Text:
        text = cls.__new__(cls)
        text._count, text._part, text._parent = count, part, parent
        text._depth, text._growth, text._strings = 0 if parent is None else parent._depth + 1, None, None
        return text

    @classmethod
    def of(cls, strings: Sequence[str]) -> Text:
        """Take strings."""
        return cls._made(len(strings), _Read(list(strings)))

    @classmethod
    def decoded(cls, tokens: Ragged, decode: Decoder, context: Ragged | None = None) -> Text:
        """Take tokens, to be decoded when the text is read.

        `context` are the tokens before them, if they are known: the text is then what they add to those. Tokens that
        are appended to tokens of the same decoder are decoded together with them, so a character may lie across both.

        >>> import torch
        >>> from ramet.ragged import Ragged
        >>> halves = [Ragged.from_padded(torch.tensor([[byte]])) for byte in "é".encode()]
        >>> decode = lambda rows: [bytes(row).decode(errors="replace") for row in rows]
        >>> first, second = (Text.decoded(half, decode) for half in halves)
        >>> first.tolist(), first.append(second).tolist()
        (['\ufffd'], ['é'])
        """
        own = type(tokens)(tokens.values.clone(), tokens.offsets, tokens.sizes)  # the policy may reuse its memory
        return cls._made(len(tokens), _Tokens(own, decode, context))

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        return (Text.of, (self.tolist(),))

    def __repr__(self) -> str:
        return f"Text({self.tolist()})"

    def append(self, other: Text) -> Text:
        """Return each string followed by that of `other`; nothing is read."""
        if self._count != other._count:
            raise ValueError(f"{other._count} strings can not be appended to {self._count} strings")
        return Text._made(self._count, other._part if other._parent is None else other, self)

    @property
    def bare(self) -> bool:
        """Whether it is strings alone, of which no tokens are known."""
        return self._parent is None and isinstance(self._part, _Read) and self._part.ends is None

    def grew_by(self, before: Text, added: Text, mask: Tensor | None = None) -> bool:
        """Say whether this text is `before` with `added` appended, in the rows of `mask` [B] if there is one.

        `before` is not read for it, so False may also mean that it was not made by appending.

        >>> before, added = Text.of(["a", "b"]), Text.of(["c", "d"])
        >>> before.append(added).grew_by(before, added), before.append(before).grew_by(before, added)
        (True, False)
        """
        if self._parent is not before:
            return False
        mine, theirs = self._part, added._part if added._parent is None else added
        if mine is theirs and mask is None:
            return True
        if isinstance(mine, _Tokens) and isinstance(theirs, _Tokens) and mine.tokens.values is theirs.tokens.values:
            lengths = theirs.tokens.lengths if mask is None else theirs.only(mask).tokens.lengths
            return torch.equal(mine.tokens.lengths, lengths)
        expected = added if mask is None else added.only(mask)
        found = mine if isinstance(mine, Text) else Text._made(self._count, mine)
        return found.tolist() == expected.tolist()

    def only(self, mask: Tensor) -> Text:
        """Return the strings where `mask` [B] is true, and empty ones elsewhere."""
        if self._parent is None and isinstance(self._part, _Tokens):
            return Text._made(self._count, self._part.only(mask))
        return self.where(mask, Text.of([""] * self._count))

    def where(self, mask: Tensor, other: Text) -> Text:
        """Return the strings of this where `mask` [B] is true, those of `other` elsewhere."""
        flags, mine, theirs = mask.tolist(), self._settled(), other._settled()
        strings = _chosen(flags, mine.strings, theirs.strings)
        decode = theirs.decode if mine.decode is None else mine.decode
        if decode is None:
            return Text.of(strings)
        ends = _chosen(flags, mine.ends_of(decode), theirs.ends_of(decode))
        return Text._made(self._count, _Read(strings, ends, decode))

    def tolist(self) -> list[str]:
        """Return the strings."""
        return list(self._settled().strings)

    def entry(self, batch: bool = True) -> Any:
        """Return what a TensorDict holds: for a batch [B], or without one."""
        return entry_of(self, batch)

    def _settled(self) -> _Read:
        """Read this text, from the nearest one before it that was read."""
        base: Text | None = self
        path: list[Text] = []
        while base is not None and (read := base._known()) is None:
            path.append(base)
            base = base._parent
        read = _Read([""] * self._count) if base is None else read
        assert read is not None
        # Stops at round numbers of appends, fewer and fewer: to read from the last text to the first is quick as well.
        stops, depth, start, parts = set(), self._depth, base, []
        while depth > 0:
            stops.add(depth)
            depth &= depth - 1
        for node in reversed(path):
            parts.append(node._part)
            if node is self or node._depth in stops:
                before, read = read, _grown(read, parts[::-1])
                node._growth = _Growth.between(base, before, read)
                base, parts = node, []
        if start is not None:
            start._strings = None  # handed on
        if self._growth is not None:
            self._strings = read.strings
        return read

    def _known(self) -> _Read | None:
        """Return what was read; None if nothing was."""
        if self._growth is None:
            return self._part if self._parent is None and isinstance(self._part, _Read) else None
        strings = self._strings if self._strings is not None else self._joined()
        return _Read(strings, self._growth.ends, self._growth.decode)

    def _joined(self) -> list[str]:
        """Join what this text and those before it have added."""
        node: Text | None = self
        limits, pieces = [sys.maxsize] * self._count, [[""] for _ in range(self._count)]
        while node is not None and node._growth is not None and node._strings is None:
            grown = node._growth
            for row, (kept, added) in enumerate(zip(grown.kept, grown.added, strict=True)):
                pieces[row].append(added if limits[row] >= kept + len(added) else added[: max(limits[row] - kept, 0)])
                limits[row] = min(limits[row], kept)
            node = grown.base
        read = None if node is None else node._known()
        if read is not None:
            for string, limit, row_pieces in zip(read.strings, limits, pieces, strict=True):
                row_pieces.append(string[:limit])
        return ["".join(reversed(row_pieces)) for row_pieces in pieces]


def text_of(value: Any) -> Text | None:
    """Return the text of an entry that is unread still; None for any other value."""
    column = column_of(value)
    return column if isinstance(column, Text) else None


def text_in(value: Any) -> Text | None:
    """Return the text of an entry of a batch [B] of strings, read if it is plain; None for anything else."""
    text = text_of(value)
    if text is not None or type(value) is not NonTensorStack or value.stack_dim != 0 or value.batch_dims != 1:
        return text
    try:  # the method takes 5 microseconds a row with tensordict 0.14
        strings = [row.__dict__["_non_tensordict"]["data"] for row in value.tensordicts]
    except KeyError:
        strings = value.tolist()
    return Text.of(strings) if {*map(type, strings)} <= {str} else None


def _flat(parts: list[_Part | Text]) -> Iterator[Any]:
    """Yield the parts from the last of the list to the first, those inside a text in their place."""
    while parts:
        part = parts.pop()
        if not isinstance(part, Text):
            yield part
            continue
        node: Text | None = part
        while node is not None:
            parts.append(node._part)
            node = node._parent


def _decoder_of(part: _Part) -> Decoder | None:
    return part.decode if isinstance(part, _Tokens) else None


def _chosen(flags: list[bool], new: list[Any], old: list[Any]) -> list[Any]:
    return [a if flag else b for flag, a, b in zip(flags, new, old, strict=True)]


def _kept(before: str, after: str) -> int:
    """Return a number of characters that two strings have in common at their start: all, or about as many as can be."""
    kept, less = len(before), 8
    while not after.startswith(before[:kept]):
        kept, less = max(kept - less, 0), 2 * less
    return kept


def _grown(read: _Read, parts: list[_Part | Text]) -> _Read:
    """Append parts, from the last of the list to the first."""
    for decode, group in groupby(_flat(parts), _decoder_of):
        run = list(group)
        read = _with_strings(read, run) if decode is None else _with_tokens(read, run, decode)
    return read


def _with_strings(read: _Read, parts: list[_Read]) -> _Read:
    strings = ["".join(row) for row in zip(read.strings, *(part.strings for part in parts), strict=True)]
    if read.ends is None:
        added = zip(strings, parts[-1].strings, parts[-1].ends_of(parts[-1].decode), strict=True)
        ends = [end and end._replace(head=row[: len(row) - len(part)] + end.head) for row, part, end in added]
        return _Read(strings, ends, parts[-1].decode)
    same = [len(after) == len(before) for after, before in zip(strings, read.strings, strict=True)]
    return _Read(strings, _chosen(same, read.ends, [None] * len(same)), read.decode)


def _with_tokens(read: _Read, parts: list[_Tokens], decode: Decoder) -> _Read:
    """Decode the tokens of all parts at once, behind the end of each row.

    The text is that of all the tokens of the row, decoded together; but only the last of those before are decoded
    again, where that shows the same. It does where they are decoded alone as in the text, from a character on that is
    whole, and still are with what follows: a decoder may show a run of bytes of any length as broken, where its last
    character is not complete, and may show it whole later. All are decoded again otherwise.
    """
    new = ids_of_rows(parts[0].tokens if len(parts) == 1 else joined_rows([part.tokens for part in parts]))
    strings, ends = list(read.strings), _opened(read, parts[0].context, decode)
    rows = [row for row, ids in enumerate(new) if ids]
    ids = [ends[row].run.last(ends[row].width) + new[row] for row in rows]
    texts = decode(ids + [row[-WINDOW:] for row in ids]) if rows else []
    whole: dict[int, str | None] = {}  # what all tokens of a row show, where the last are not enough
    for row, text in zip(rows, texts, strict=False):
        end = ends[row]
        if end.width == sys.maxsize:
            whole[row] = text
        elif fits(strings[row][len(strings[row]) - end.shown :], text):
            strings[row] = strings[row][: len(strings[row]) - end.shown] + text
        else:
            whole[row] = None
    runs = {row: Run(array("q", new[row]), ends[row].run) for row in rows}
    whole |= decoded({row: runs[row].last(sys.maxsize) for row, every in whole.items() if every is None}, decode)
    before = decoded({row: runs[row].context() for row in whole}, decode)
    for row, every in whole.items():
        strings[row] = replaced(ends[row].head, before[row], every or "")
    for row, tail, now, alone in zip(rows, ids, texts, texts[len(rows) :], strict=False):
        end = End(runs[row], ends[row].head)
        longer = end if row in whole else end._replace(width=len(tail), shown=len(now))
        ends[row] = shortened(end, strings[row], alone) or longer
    return _Read(strings, list(ends), decode)


def _opened(read: _Read, context: Ragged | None, decode: Decoder) -> list[End]:
    """Return the ends of all rows; those that do not end in tokens begin, behind what is known to stand before."""
    ends = read.ends_of(decode)
    bare = [row for row, end in enumerate(ends) if end is None]
    before = ids_of_rows(context) if bare and context is not None else [[] for _ in ends]
    alone = decoded({row: before[row][-WINDOW:] for row in bare}, decode)
    found = []
    for row, (known, string) in enumerate(zip(ends, read.strings, strict=True)):
        end = known or End(Run(array("q", before[row]), None), string)
        found.append(known or shortened(end, string, alone[row]) or end)
    return found
