"""Where texts end in tokens: which of those are decoded again with what follows, and what that changes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from ramet.ragged.storage import Ragged

Decoder: TypeAlias = Callable[[list[list[int]]], list[str]]
"""From rows of token ids to their strings."""

WINDOW = 8  # tokens before that are decoded again, if that is safe: more than rules of spacing see
_BROKEN = "\ufffd"  # what decoders show for bytes that are no character, or not yet one


class Run(NamedTuple):
    """The tokens at the end of a row: those that came last, and those before them."""

    ids: array[int]
    before: Run | None

    def last(self, count: int) -> list[int]:
        """Return the last `count` ids."""
        pieces: list[array[int]] = []
        run: Run | None = self
        while run is not None and count > 0:
            pieces.append(run.ids[-count:])
            count -= len(run.ids)
            run = run.before
        return [i for piece in reversed(pieces) for i in piece]

    def context(self) -> list[int]:
        """Return the first ids: those that stand for text of the row from before the run."""
        run = self
        while run.before is not None:
            run = run.before
        return list(run.ids)


class End(NamedTuple):
    """Where a row ends in tokens: what follows is decoded together with the last of them."""

    run: Run
    head: str  # the text of the row from before the run
    width: int = sys.maxsize  # how many are decoded again: all, or those that are known to show the same alone
    shown: int = 0  # how many characters these are of the text


def decoded(ids: dict[int, list[int]], decode: Decoder) -> dict[int, str]:
    """Decode the ids of some rows."""
    some = {row: row_ids for row, row_ids in ids.items() if row_ids}
    shown = dict(zip(some, decode(list(some.values())), strict=True)) if some else {}
    return {row: shown.get(row, "") for row in ids}


def fits(before: str, now: str) -> bool:
    """Say whether tokens that showed `before` show themselves in `now`, or what was broken at their end is complete."""
    return now.startswith(before) or (_BROKEN in before and now[:1] == before[:1])


def shortened(end: End, string: str, alone: str) -> End | None:
    """Return the end that is the last few tokens, which show `alone`, if it is safe to begin there."""
    safe = alone != "" and alone[0] != _BROKEN and string.endswith(alone)
    return end._replace(width=WINDOW, shown=len(alone)) if safe else None


def replaced(text: str, end: str, now: str) -> str:
    """Return `text` with `now` in place of its `end`: more than `end`, or a character in it is complete by now."""
    if now.startswith(end):
        return text + now[len(end) :]
    same = next((i for i, (a, b) in enumerate(zip(end, now, strict=False)) if a != b), min(len(end), len(now)))
    return text.removesuffix(end[same:]) + now[same:]


def joined_rows(parts: list[Ragged]) -> Ragged:
    """Return the rows of the first part, each followed by that of the second, and so on, for all parts at once."""
    lengths = torch.stack([part.lengths for part in parts])
    values = torch.cat([part.compact().values for part in parts])
    row = torch.arange(lengths.shape[1], device=values.device).repeat(len(parts)).repeat_interleave(lengths.flatten())
    ends = lengths.sum(0).cumsum(0)
    return type(parts[0])(values[row.argsort(stable=True)], torch.cat([ends.new_zeros(1), ends]))


def ids_of_rows(tokens: Ragged) -> list[list[int]]:
    values, ends, ids = tokens.compact().values.tolist(), tokens.lengths.cumsum(0).tolist(), []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        ids.append(values[start:end])
    return ids
