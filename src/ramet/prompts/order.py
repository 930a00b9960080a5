"""The order of prompts as a function: which row stands at which position of an endless, seeded stream."""

from __future__ import annotations

import functools

import numpy as np


def row_at(position: int, *, rows: int, seed: int) -> int:
    """Return the row at `position` (from 0) of the stream: epoch after epoch, each a fresh permutation of `rows` rows.

    A pure function, so that resuming is an integer, and ranks that take every n-th position see one order. A batch that
    reaches the end of an epoch goes on into the next one: no row is dropped and none comes twice in an epoch.

    >>> [row_at(position, rows=4, seed=0) for position in range(8)]
    [1, 2, 0, 3, 0, 3, 1, 2]
    """
    epoch, place = divmod(position, rows)
    return int(_permutation(rows, seed, epoch)[place])


@functools.lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(rows)
