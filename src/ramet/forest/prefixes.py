"""Prefixes of all rows at once, in whatever layout an environment keeps them.

Most steps need no copy: what an environment appends to is one buffer, and the layouts themselves show that one prefix
begins with the other. Where they do not, prefixes are compared as one matrix of tokens from the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.entries import NAMES, Step, first_of, names_of, needed
from ramet.forest.nodes import Ints
from ramet.forest.rollout import Form, Path, Unit
from ramet.ragged import Ragged, read_text
from ramet.ragged import rows as read_rows
from ramet.types import Key


def code_points(text: str) -> Ints:
    """Return a text as integers, one for each character."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)


def text_of(points: Ints) -> str:
    """Return integers as the text that they are the characters of."""
    return points.astype(np.uint32).tobytes().decode("utf-32-le", "surrogatepass")


@dataclass(eq=False)
class Prefixes:
    """The tokens of B rows: padded, `raw` [B, W] with those that `real` [B, W] names (all without), or ragged.

    Row b has `lengths[b]` of them. `entry` and `mask` are the objects that they were read from.
    """

    lengths: Ints
    raw: NDArray[Any] | None = None
    real: NDArray[np.bool_] | None = None
    ragged: Ragged | None = None
    entry: object = None
    mask: object = None

    @cached_property
    def matrix(self) -> NDArray[Any]:
        """The tokens from the left: [B, L]."""
        if self.raw is not None and self.real is None:
            return self.raw
        if self.ragged is not None:
            padded: NDArray[Any] = self.ragged.padded("right", 0)[0].cpu().numpy()
            return padded
        assert self.raw is not None
        left = np.zeros((len(self.lengths), int(self.lengths.max(initial=0))), dtype=self.raw.dtype)
        left[np.arange(left.shape[1]) < self.lengths[:, None]] = self.raw[self.real]
        return left

    def row(self, number: int) -> Ints:
        """Return a copy of the tokens of one row."""
        if self.ragged is not None:
            start = int(self.ragged.offsets[number])
            tokens = self.ragged.values[start : start + int(self.lengths[number])].cpu().numpy()
            return np.array(tokens, dtype=np.int64)
        assert self.raw is not None
        return np.array(self.raw[number] if self.real is None else self.raw[number][self.real[number]], dtype=np.int64)

    def same(self, other: Prefixes) -> NDArray[np.bool_]:
        """Say for each row whether its tokens are those of `other`."""
        equal: NDArray[np.bool_] = (self.lengths == other.lengths) & self.begins_with(other)
        return equal

    def begins_with(self, other: Prefixes) -> NDArray[np.bool_]:
        """Say for each row whether its tokens begin with those of `other`."""
        if self is other or self._evidently_begins_with(other):
            return np.ones(len(self.lengths), dtype=bool)
        width = min(self.matrix.shape[1], other.matrix.shape[1])
        equal = self.matrix[:, :width] == other.matrix[:, :width]
        equal |= np.arange(width) >= other.lengths[:, None]
        agrees: NDArray[np.bool_] = equal.all(1) & (other.lengths <= self.lengths)
        return agrees

    def _evidently_begins_with(self, other: Prefixes) -> bool:
        """Say whether the layouts show it for all rows: the same columns, and more, or more of the same memory."""
        if self.raw is not None and other.raw is not None and (self.real is None) == (other.real is None):
            if not _begins_with(self.raw, other.raw):
                return False
            return self.real is None or other.real is None or _begins_with(self.real, other.real)
        if self.ragged is None or other.ragged is None or not bool((self.lengths >= other.lengths).all()):
            return False
        mine, theirs = self.ragged, other.ragged
        return mine.values.data_ptr() == theirs.values.data_ptr() and torch.equal(mine.offsets, theirs.offsets)

    def show(self, number: int) -> str:
        """Return the tokens of a row for a message, the last ones of a long row."""
        tokens = self.row(number).tolist()
        return str(tokens) if len(tokens) <= 12 else f"[... {', '.join(map(str, tokens[-12:]))}]"


def _begins_with(columns: NDArray[Any], first: NDArray[Any]) -> bool:
    """Say whether the first columns of one array are the other: those of the same memory are, and are not read."""
    width = first.shape[1]
    if width > columns.shape[1]:
        return False
    mine, theirs = columns.__array_interface__, first.__array_interface__
    same = mine["data"] == theirs["data"] and columns.strides == first.strides and columns.dtype == first.dtype
    return (same and len(columns) == len(first)) or np.array_equal(columns[:, :width], first)


def read_prefixes(step: Step, form: Form, number: int, after: bool, known: Prefixes | None) -> Prefixes:
    """Read the prefix of every row, before the step or `after` it; `known` where it was read from the same objects."""
    path, td = form.observation, step.next if after else step.td
    where = f"step {number}, {('next', *path) if after else path}"
    if step.lazy:
        return _of_cells(read_rows(td, path, mask=form.mask), form, where)
    value = _entry(step, path, after)
    mask = None if form.mask is None else _entry(step, form.mask, after)
    if known is not None and known.entry is value and known.mask is mask:
        return known
    if not isinstance(value, Tensor):
        return _of_cells(read_text(td, path).tolist(), form, where)
    if form.unit == "text":
        raise ForestError(f"{where}: expected text, as in the first step: found a tensor of {value.dtype}")
    check_tokens(value, td.batch_dims + 1, where)
    if value.is_nested:
        ragged = Ragged.from_any(value, mask)
        return Prefixes(ragged.lengths.cpu().numpy(), ragged=ragged, entry=value, mask=mask)
    raw = value.detach().cpu().numpy().reshape(td.batch_size.numel(), -1)
    if mask is None:
        return Prefixes(np.full(len(raw), raw.shape[1], dtype=np.int64), raw, entry=value)
    if mask.shape != value.shape:
        raise ForestError(f"{where}: the mask has shape {list(mask.shape)}, the tokens {list(value.shape)}")
    real = mask.detach().cpu().numpy().astype(bool).reshape(raw.shape)
    return Prefixes(real.sum(1, dtype=np.int64), raw, real, entry=value, mask=mask)


def read_texts(steps: Sequence[Step], path: Path) -> list[list[Tensor]]:
    """Read what was written in each step, in each row, as characters."""
    return [[torch.from_numpy(code_points(text)) for text in read_text(step.td, path).tolist()] for step in steps]


def _entry(step: Step, path: Path, after: bool) -> Any:
    value = step.get(("next", *path) if after else path)
    return needed(step.next if after else step.td, path) if value is None else value


def _of_cells(cells: Sequence[Any], form: Form, where: str) -> Prefixes:
    text = form.unit == "text"
    if any(isinstance(cell, str) != text for cell in cells):
        raise ForestError(f"{where}: expected {'text' if text else 'tokens'} in every row, as in the first step")
    rows = [torch.from_numpy(code_points(cell)) for cell in cells] if text else list(cells)
    for row in rows:
        check_tokens(row, 1, where)
    ragged = Ragged.from_rows(rows)
    return Prefixes(ragged.lengths.cpu().numpy(), ragged=ragged)


def read_root(root: str | Tensor | TensorDictBase, unit: Unit) -> Ints:
    """Return a prefix as integers: given as such, as a string, or as the observation in a TensorDict of one row."""
    if isinstance(root, str):
        if unit != "text":
            raise ForestError(f"the root is the text {root!r}, and this forest holds tokens: pass their ids")
        return code_points(root)
    if isinstance(root, TensorDictBase):
        return _root_of(root, unit)
    check_tokens(root, 1, "the root")
    return root.detach().cpu().to(torch.int64).numpy()


def _root_of(td: TensorDictBase, unit: Unit) -> Ints:
    if td.batch_size.numel() != 1:
        raise ForestError(f"expected the root in a TensorDict of one row: found a batch of {tuple(td.batch_size)}")
    first = first_of(td)
    named = [path for path, _ in NAMES if first.get(path, None) is not None]
    if unit == "text":
        named = [path for path in named if not isinstance(first.get(path), Tensor)]
    if not named:
        raise ForestError(f"found no prefix of {unit} for a root: there are {names_of(first)}")
    mask = (Key.MASK,) if named[0] == (Key.TOKENS,) and first.get(Key.MASK, None) is not None else None
    [cell] = read_rows(td, named[0], mask=mask)
    return read_root(cell, unit)


def check_tokens(value: Any, dims: int, where: str) -> None:
    """Raise `ForestError` for what is not a tensor of integers with `dims` dimensions."""
    if not isinstance(value, Tensor) or value.dim() != dims or value.is_floating_point() or value.dtype == torch.bool:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ForestError(f"{where}: expected token ids, integers with {dims} dimensions: found {found}")
