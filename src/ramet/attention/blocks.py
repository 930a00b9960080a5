"""Which pairs of tokens of a tree attend to each other, cut into blocks of dense arithmetic.

A forest is laid out as one row of tokens in depth-first order, so that the descendants of a token are the tokens right
behind it: `last[i]` is where they end. Token i attends to token j exactly if j <= i < last[j]. That is all that
attention has to know of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

SIZE = 128
"""The largest subtree that is computed as one square, its pairs that do not attend included."""

FILL = 0.75
"""Squares are padded to the largest of their batch, down to this fraction of it."""


@dataclass(frozen=True, slots=True)
class Squares:
    """N small subtrees, padded to S tokens: `index` int64 [N, S] says which tokens (padding repeats the first one).

    `real` bool [N, S] is false for padding; `hidden` bool [N, S, S] says which query (dim 1) does not attend to which
    key; `filled` int64 are the places of what is real in `index`, laid out flat, and None where everything is.
    """

    index: Tensor
    real: Tensor
    hidden: Tensor
    filled: Tensor | None

    @property
    def flat(self) -> Tensor:
        """The tokens, int64 [N * S]."""
        return self.index.view(-1)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A run of keys that every token of a run of queries behind them attends to.

    With a window, `hidden` bool [queries, keys] says which pairs are too far apart; None where none are.
    """

    queries: slice
    keys: slice
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Every pair (token, ancestor or itself) exactly once: squares first, then rectangles."""

    squares: list[Squares]
    rectangles: list[Rectangle]


@dataclass(frozen=True, eq=False)
class Layout:
    """A forest as one row of T tokens: `last` int64 [T] and `positions` int64 [T], each token's depth in its path.

    >>> layout = Layout(np.array([4, 4, 3, 4]), np.array([0, 1, 2, 2]))          # two tokens, and two that follow them
    >>> layout.allowed(np.arange(4), np.arange(4)).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """

    last: Ints
    positions: Ints
    size: int = SIZE

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1: found {self.size}")

    def __len__(self) -> int:
        return len(self.last)

    def allowed(self, queries: Ints, keys: Ints, window: int | None = None) -> NDArray[np.bool_]:
        """Say which of `queries` attend to which of `keys`: [queries, keys]; `window` counts the token itself."""
        query = queries[:, None]
        found = (keys <= query) & (query < self.last[keys])
        if window is not None:
            found &= self.positions[queries][:, None] - self.positions[keys] < window
        return found

    @cached_property
    def _cuts(self) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Return squares (start, end) and rectangles (start of keys, their end = start of queries, end of queries)."""
        squares, rectangles = [], []
        start, total = 0, len(self)
        while start < total:
            last = int(self.last[start])
            if last - start <= self.size:
                squares.append((start, last))
                start = last
                continue
            # The run of tokens that have the same descendants: a segment, or the rest of one.
            run = self.last[start : start + self.size]
            same = int(np.argmax(run != last)) if bool((run != last).any()) else len(run)
            end = start + same
            squares.append((start, end))
            if end < last:
                rectangles.append((start, end, last))
            start = end
        return squares, rectangles

    def blocks(self, window: int | None, device: torch.device) -> Blocks:
        """Return the blocks of attention to all ancestors, or to those at most `window` - 1 positions above."""
        squares, rectangles = self._cuts
        return Blocks(self._squares(squares, window, device), self._rectangles(rectangles, window, device))

    def _squares(self, cuts: list[tuple[int, int]], window: int | None, device: torch.device) -> list[Squares]:
        batches: list[list[tuple[int, int]]] = []
        widest = 0
        for start, end in sorted(cuts, key=lambda cut: cut[0] - cut[1]):
            if not batches or end - start < FILL * widest:
                batches.append([])
                widest = end - start
            batches[-1].append((start, end))
        return [self._square_batch(batch, window, device) for batch in batches]

    def _square_batch(self, cuts: list[tuple[int, int]], window: int | None, device: torch.device) -> Squares:
        starts = np.array([start for start, _ in cuts])
        lengths = np.array([end - start for start, end in cuts])
        column = np.arange(lengths.max())
        real = column < lengths[:, None]
        index = np.where(real, starts[:, None] + column, starts[:, None])
        key, query = index[:, None, :], index[:, :, None]
        allowed = (key <= query) & (query < self.last[index][:, None, :]) & real[:, None, :]
        if window is not None:
            allowed &= self.positions[index][:, :, None] - self.positions[index][:, None, :] < window
        filled = None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(device)
        tokens, there, hidden = (torch.from_numpy(array).to(device) for array in (index, real, ~allowed))
        return Squares(tokens, there, hidden, filled)

    def _rectangles(
        self, cuts: list[tuple[int, int, int]], window: int | None, device: torch.device
    ) -> list[Rectangle]:
        found = []
        for start, end, last in cuts:
            keys, queries = slice(start, end), slice(end, last)
            if window is None:
                found.append(Rectangle(queries, keys))
                continue
            near = self.positions[queries][:, None] - self.positions[keys] < window
            if near.all():
                found.append(Rectangle(queries, keys))
            elif near.any():
                found.append(Rectangle(queries, keys, torch.from_numpy(~near).to(device)))
        return found
