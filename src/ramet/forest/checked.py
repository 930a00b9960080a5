"""The arrays of a forest, proven to be one: whatever is not raises a `ForestError` that names the table and the row.

Letters: N nodes, R rollouts, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.nodes import Ints
from ramet.types import Kind


class Arrays:
    """Reads arrays by name: copies, on the CPU, of the dtype and the length that are expected."""

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        self._arrays = arrays
        self._unread = set(arrays)
        if "about" not in arrays:
            raise ForestError(f'expected the arrays of a forest, with an entry "about": found {sorted(arrays)[:8]}')

    def tensor(self, name: str, length: int | None = None) -> Tensor:
        """Return a tensor [length, ...]."""
        if name not in self._arrays:
            raise ForestError(f"these arrays of a forest lack {name!r}: there are {sorted(self._arrays)}")
        self._unread.discard(name)
        value = self._arrays[name]
        if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.dim():
            raise ForestError(f"{name}: expected a tensor of at least one dimension: found {value!r:.80}")
        if length is not None and len(value) != length:
            raise ForestError(f"{name}: expected {length} rows, as other tables say: found {len(value)}")
        return value.detach().to("cpu", copy=True)

    def numbers(self, name: str, length: int | None = None, dtype: torch.dtype = torch.int64) -> NDArray[Any]:
        """Return an array [length] of a dtype."""
        value = self.tensor(name, length)
        if value.dtype != dtype or value.dim() != 1:
            raise ForestError(f"{name}: expected {dtype} [n]: found {value.dtype} {list(value.shape)}")
        found: NDArray[Any] = value.contiguous().numpy()
        return found

    def ragged(self, name: str, count: int) -> list[Ints]:
        """Return `count` rows of int64 that lie one after the other."""
        counts = self.numbers(f"{name}.counts", count)
        values = self.numbers(name)
        refuse(f"{name}.counts", (counts < 0) | (counts > len(values)), f"0 to {len(values)}", counts)
        if counts.sum() != len(values):
            raise ForestError(f"{name}: expected {counts.sum()} rows, as {name}.counts says: found {len(values)}")
        return np.split(values, np.cumsum(counts))[:-1]

    def finish(self) -> None:
        """Refuse arrays that nobody read."""
        if self._unread:
            raise ForestError(f"these arrays belong to no table of a forest: {sorted(self._unread)}")


def refuse(table: str, wrong: NDArray[np.bool_], expected: str, found: NDArray[Any]) -> None:
    """Raise `ForestError` for the first row of a table that is `wrong`."""
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ForestError(f"{table}, row {row}: expected {expected}: found {found[row]}")


def read_nodes(arrays: Arrays) -> dict[str, Ints]:
    """Return the table of nodes: one tree over all tokens, in which no two siblings begin with the same token."""
    parent = arrays.numbers("nodes.parent")
    tokens, count = arrays.numbers("nodes.tokens"), len(parent)
    start, size, hashes = (arrays.numbers(f"nodes.{name}", count) for name in ("start", "size", "hash"))
    if not count:
        raise ForestError("nodes.parent: expected the empty prefix in row 0: found no row")
    is_root, every, total = np.arange(count) == 0, np.arange(count), len(tokens)
    refuse("nodes.parent", is_root & (parent != -1), "-1 for the empty prefix", parent)
    refuse("nodes.parent", ~is_root & ((parent < 0) | (parent >= count)), f"a node, 0 to {count - 1}", parent)
    refuse("nodes.size", is_root & (size != 0), "0 for the empty prefix", size)
    refuse("nodes.start", (start < 0) | (start > total), f"0 to {total}", start)
    refuse("nodes.size", ~is_root & ((size < 1) | (size > total - start)), f"1 to {total} - start tokens", size)
    _check_cover(start, size, total)
    above = np.maximum(parent, 0)
    for _ in range(count.bit_length()):  # 1, 2, 4, ... steps up
        above = above[above]
    refuse("nodes.parent", above != 0, "a node that hangs from the empty prefix", parent)
    _check_siblings(parent, np.append(tokens, 0)[start])
    children = arrays.numbers("nodes.children", count - 1)
    refuse("nodes.children", (children < 1) | (children >= count), f"1 to {count - 1}", children)
    again = np.ones(len(children), dtype=bool)
    again[np.unique(children, return_index=True)[1]] = False
    refuse("nodes.children", again, f"each of {every[1:].size} nodes once", children)
    return {"tokens": tokens, "start": start, "size": size, "parent": parent, "children": children, "hash": hashes}


def _check_cover(start: Ints, size: Ints, total: int) -> None:
    """Each token belongs to one node."""
    order = 1 + np.argsort(start[1:], kind="stable")
    ends = np.concatenate([[0], (start + size)[order]])
    wrong = np.zeros(len(start), dtype=bool)
    wrong[order] = start[order] != ends[:-1]
    refuse("nodes.start", wrong, "a place where no other node's tokens lie, behind those of another", start)
    if ends[-1] != total:
        raise ForestError(f"nodes.tokens: expected {ends[-1]} rows, as start and size say: found {total}")


def _check_siblings(parent: Ints, token: Ints) -> None:
    order = np.lexsort((token, parent))
    same = (np.diff(parent[order]) == 0) & (np.diff(token[order]) == 0)
    wrong = np.zeros(len(parent), dtype=bool)
    wrong[order[1:]] = same
    refuse("nodes.parent", wrong, "no two nodes with one parent and one first token", parent)


def check_text(tokens: Ints) -> None:
    """Raise `ForestError` for what is no character."""
    refuse("nodes.tokens", (tokens < 0) | (tokens > 0x10FFFF), "the number of a character", tokens)


def check_tokens_of_rollouts(kinds: NDArray[Any], log_probs: NDArray[Any], versions: NDArray[Any]) -> None:
    """Raise `ForestError` where a token has a kind that there is not, or is not sampled and has what sampled ones have.

    All are [L], over the paths of all rollouts.
    """
    refuse("rollouts.kinds", ~np.isin(kinds, [int(kind) for kind in Kind]), f"one of {list(map(int, Kind))}", kinds)
    others = kinds != Kind.SAMPLED
    refuse("rollouts.log_probs", others & ~np.isnan(log_probs), "nan for a token that was not sampled", log_probs)
    refuse("rollouts.versions", others & (versions != -1), "-1 for a token that was not sampled", versions)


def check_rows(name: str, row: int, wrong: bool, expected: str, found: object) -> None:
    """Raise `ForestError` for one row that is wrong."""
    if wrong:
        raise ForestError(f"{name}, row {row}: expected {expected}: found {found}")
