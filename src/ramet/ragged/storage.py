"""How rows of different lengths are stored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor

from ramet.ragged.text import text_in
from ramet.ragged.text_entry import column_of, entry_of

Side: TypeAlias = Literal["left", "right"]

# torch logs a note for its own developers when the first jagged tensor of a process is made: keep it from the terminal.
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in record.getMessage())


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths in one flat tensor.

    `values` [total, ...]; row b starts at `offsets[b]` (int64 [B+1], not falling). With `sizes` (int64 [B]) it holds
    that many entries and what follows is room to grow; without, it reaches to the start of the next row.

    >>> rows = Ragged.from_rows([torch.tensor([1, 2]), torch.tensor([]).long(), torch.tensor([3])])
    >>> rows.append(Ragged.from_padded(torch.tensor([[7], [8], [9]]))).rows()
    [tensor([1, 2, 7]), tensor([8]), tensor([3, 9])]
    """

    values: Tensor
    offsets: Tensor
    sizes: Tensor | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Ragged:
        """Take rows [L, ...] of one dtype and device; at least one."""
        if not rows:
            raise ValueError("no rows: an empty list has no dtype or device to make a ragged tensor of")
        dtypes = {row.dtype for row in rows}
        if len(dtypes) > 1:
            raise ValueError(f"rows must share one dtype: found {sorted(map(str, dtypes))}")
        return cls(torch.cat(list(rows)), offsets_of(torch.tensor([len(row) for row in rows], device=rows[0].device)))

    @classmethod
    def from_padded(cls, padded: Tensor, mask: Tensor | None = None) -> Ragged:
        """Take the entries of `padded` [B, L, ...] where `mask` [B, L] is true (or 1); all without a mask."""
        if mask is None:
            size, width = padded.shape[:2]
            offsets = torch.arange(size + 1, device=padded.device) * width
            return cls(padded.reshape(-1, *padded.shape[2:]), offsets)
        if mask.shape != padded.shape[:2]:
            raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit a tensor of {tuple(padded.shape)}")
        real = mask.bool()
        values = padded.masked_select(real) if padded.dim() == 2 else padded[real]
        return cls(values, offsets_of(real.sum(1)))

    @classmethod
    def from_jagged(cls, jagged: Any) -> Ragged:
        """Share the storage of a jagged nested tensor [B, ragged, ...]."""
        if not is_jagged(jagged):
            raise ValueError(f"expected a nested tensor of layout torch.jagged, found layout {jagged.layout}")
        inside = jagged._values  # the method takes 30 microseconds, for gradients that whole numbers do not have
        values = jagged.values() if inside.is_floating_point() else inside
        offsets, sizes = jagged.offsets(), jagged.lengths()
        if sizes is None and (int(offsets[0]) != 0 or int(offsets[-1]) != len(values)):
            sizes = offsets.diff()  # a slice of a larger tensor: its values hold other rows too
        return cls(values, offsets, sizes)

    @classmethod
    def from_any(cls, value: Any, mask: Any = None) -> Ragged:
        """Take rows in any form: list of tensors, jagged nested tensor, dense tensor, padded tensor and its mask.

        A mask of a jagged tensor or of a list has the same form as the value.
        """
        if isinstance(value, Tensor):
            if not is_jagged(value) and not value.is_nested:
                return cls.from_padded(value, mask)
            rows = cls.from_jagged(value)
        else:
            rows = cls.from_rows(value)
        return rows if mask is None else rows._masked(cls.from_any(mask))

    @property
    def lengths(self) -> Tensor:
        """How many entries each row has, int64 [B]."""
        return self.offsets.diff() if self.sizes is None else self.sizes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Tensor | Sequence[int] | slice) -> Ragged:
        """Pick rows: by numbers, a slice, or a boolean mask [B]. The picked rows are copied."""
        starts, lengths = self.offsets[:-1][index], self.lengths[index]
        return Ragged(self.values[positions(starts, lengths)], offsets_of(lengths))

    def compact(self) -> Ragged:
        """Return the rows without room between them; itself if there is none."""
        return self if self.sizes is None else self[:]

    def rows(self) -> list[Tensor]:
        """Return the B rows [L, ...], as views."""
        starts, lengths = self.offsets.tolist(), self.lengths.tolist()
        return [self.values[start : start + n] for start, n in zip(starts[:-1], lengths, strict=True)]

    def jagged(self) -> Tensor:
        """Return a jagged nested tensor [B, ragged, ...] over the same storage."""
        if self.values.requires_grad:
            return torch.nested.nested_tensor_from_jagged(self.values, self.offsets, self.sizes)
        nested: Tensor = _nested_tensor()(self.values, self.offsets, lengths=self.sizes)  # at a quarter of the cost
        return nested

    def padded(self, side: Side, value: float = 0, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the rows padded on one side to `width` (the longest row): tensor [B, L, ...] and bool mask [B, L].

        >>> tokens, mask = Ragged.from_rows([torch.tensor([1, 2]), torch.tensor([3])]).padded("left", 0)
        >>> tokens.tolist(), mask.tolist()
        ([[1, 2], [0, 3]], [[True, True], [False, True]])
        """
        _check_side(side)
        lengths = self.lengths
        longest = int(lengths.max()) if len(self) else 0
        width = longest if width is None else width
        if width < longest:
            raise ValueError(f"a row of {longest} entries does not fit a width of {width}")
        columns = torch.arange(width, device=lengths.device)
        mask = columns >= (width - lengths)[:, None] if side == "left" else columns < lengths[:, None]
        size = (len(self), width, *self.values.shape[1:])
        of_entry = mask.view(*mask.shape, *([1] * (len(size) - 2)))
        padded = self.values.new_full(size, value)
        return padded.masked_scatter_(of_entry, self.compact().values), mask

    def append(self, other: Ragged) -> Ragged:
        """Return each row followed by the row of `other`."""
        if len(self) != len(other):
            raise ValueError(f"{len(other)} rows can not be appended to {len(self)} rows")
        mine, theirs = self.lengths, other.lengths
        offsets = offsets_of(mine + theirs)
        values = self.values.new_empty((int(offsets[-1]), *self.values.shape[1:]))
        values[positions(offsets[:-1], mine)] = self.compact().values
        values[positions(offsets[:-1] + mine, theirs)] = other.compact().values.to(values.dtype)
        return Ragged(values, offsets)

    def where(self, mask: Tensor, other: Ragged) -> Ragged:
        """Return the rows of this where `mask` [B] is true, the rows of `other` elsewhere."""
        mine = Ragged(self.values, self.offsets, self.lengths * mask)
        return mine.append(Ragged(other.values, other.offsets, other.lengths * ~mask))

    def any(self) -> Tensor:
        """Say for each row whether one of its values [total] is true: bool [B]."""
        rows = self.compact()
        return offsets_of(rows.values)[rows.offsets].diff() > 0

    def _masked(self, mask: Ragged) -> Ragged:
        if not torch.equal(self.lengths, mask.lengths):
            raise ValueError("the rows of the mask are not as long as the rows of the values")
        rows, real = self.compact().values, mask.compact().values.bool()
        return Ragged(rows[real], offsets_of(real)[offsets_of(self.lengths)])


def is_jagged(value: Any) -> bool:
    """Say whether a value is a nested tensor of layout torch.jagged."""
    return type(value) is not Tensor and isinstance(value, _nested_tensor())


def _nested_tensor() -> Any:
    from torch.nested._internal.nested_tensor import NestedTensor  # when it is needed: it takes a while to import

    return NestedTensor


def positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the flat places of rows that start at `starts` [B] and have `lengths` [B], row after row: int64 [total].

    >>> positions(torch.tensor([10, 20]), torch.tensor([2, 1])).tolist()
    [10, 11, 20]
    """
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    shift = torch.repeat_interleave(starts - (ends - lengths), lengths, output_size=total)
    return shift + torch.arange(total, device=lengths.device)


def choose(mask: Tensor, new: Any, old: Any) -> Any:
    """Return the rows of `new` where `mask` [*B] is true and those of `old` elsewhere, for tensors and text.

    Dense tensors must have equal shapes: how to pad them is not known here (ValueError).
    """
    if not mask.dim():
        return new if bool(mask) else old
    if not isinstance(new, Tensor):
        text, before = text_in(new), text_in(old)
        if text is not None and before is not None:
            return text.where(mask, before).entry()
        column, other = column_of(new), column_of(old)
        if column is not None and type(column) is type(other):
            return entry_of(column.where(mask, other), True)
        items = zip(mask.tolist(), new.tolist(), old.tolist(), strict=True)
        return NonTensorStack(*[NonTensorData(n if flag else o) for flag, n, o in items])
    if is_jagged(new) or is_jagged(old):
        return Ragged.from_any(new).where(mask, Ragged.from_any(old)).jagged()
    if new.shape != old.shape:
        raise ValueError(
            f"rows of width {new.shape[-1]} and of width {old.shape[-1]} can not be mixed in one dense tensor: "
            "use jagged tokens"
        )
    return torch.where(mask.view(*mask.shape, *([1] * (new.dim() - mask.dim()))), new, old)


def choose_padded(mask: Tensor, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the rows of `new` where `mask` [B] is true and those of `old` elsewhere, left-padded with 0.

    `new`, `old` and the result are padded tensors [B, L] with masks [B, L]; the widths may differ.
    """
    mixed = Ragged.from_padded(*new).where(mask, Ragged.from_padded(*old))
    padded, real = mixed.padded("left", 0)
    return padded, real.to(new[1].dtype)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return 0 and the running sums of `lengths` [B]: int64 [B+1]."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _check_side(side: str) -> None:
    if side not in ("left", "right"):
        raise ValueError(f'side must be "left" or "right": found {side!r}')
