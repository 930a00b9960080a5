"""How rows become a batch, and how some rows of a batch are replaced by others.

Letters: B rows of the batch, k of which are new; L entries of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from ramet.errors import DataError
from ramet.ragged import Ragged, Text, choose, choose_padded
from ramet.ragged.storage import offsets_of
from ramet.specs import KeyPath, describe
from ramet.transforms.entries import row_mask, whole
from ramet.transforms.loading.columns import Column, Columns, Part, Parts
from ramet.transforms.loading.items import Values

StackMethod: TypeAlias = (
    Callable[[list[TensorDictBase]], TensorDictBase] | Literal["as_nested_tensor", "as_padded_tensor"]
)

Layout: TypeAlias = Literal["jagged", "padded", "as_given"]


def row_tds(
    columns: Columns, pieces: Sequence[Parts], places: Tensor, device: torch.device | None
) -> list[TensorDictBase]:
    """Make a TensorDict of each of the rows that `places` names: no two of them, nor the loader, share memory."""
    order = places.tolist()
    lists = {column.key: _values(column, pieces, order) for column in columns if column.key != columns.made}
    if columns.made is not None:
        lists[columns.made] = [columns.mask_of(tokens) for tokens in lists[columns.masks[columns.made]]]
    tds: list[TensorDictBase] = []
    for values in zip(*lists.values(), strict=True):
        row = TensorDict({}, device=device)
        for key, value in zip(lists, values, strict=True):
            row.set(key, value)
        tds.append(row)
    return tds


def _values(column: Column, pieces: Sequence[Parts], order: list[int]) -> list[Any]:
    """Return what TensorDicts without batch hold of a column, row by row."""
    parts = [piece[column.key] for piece in pieces]
    rows: list[Any] = [value for part in parts for value in (part if isinstance(part, list) else _unbound(part))]
    values = [rows[place] for place in order]
    if column.text:
        return [Text.of([value]).entry(False) for value in values]
    return _apart(values) if column.dtype is not None else [NonTensorData(value) for value in values]


def _apart(values: list[Tensor]) -> list[Tensor]:
    """Return tensors in memory of their own, which is parts of one copy of all."""
    if any(value.is_nested for value in values) or len({value.device for value in values}) > 1:
        return [value.clone() for value in values]
    flat, ends = torch.cat([value.reshape(-1) for value in values]), accumulate(value.numel() for value in values)
    return [flat[end - value.numel() : end].view(value.shape) for value, end in zip(values, ends, strict=True)]


def _unbound(part: Tensor | Ragged) -> Sequence[Tensor]:
    return part.rows() if isinstance(part, Ragged) else part.unbind(0)


def batch(columns: Columns, pieces: Sequence[Parts], places: Tensor | None, layout: Layout) -> Values:
    """Return the entries of a batch of the rows that `places` names (None: all), in memory of their own.

    Columns that differ in length are left-padded with zeros, or jagged. "as_given" is for one piece: its tensors stay.
    """
    entries: Values = {}
    offsets: list[Tensor] = []
    for column in columns:
        key, made = column.key, columns.made_for(column.key)
        if key == columns.made:
            continue
        part = pieces[0][key] if layout == "as_given" else _joined([piece[key] for piece in pieces])
        if isinstance(part, list):
            entries[key] = _others(column, part if places is None else [part[place] for place in places.tolist()])
            continue
        if layout == "jagged" and column.ragged and not isinstance(part, Ragged):
            part = Ragged.from_padded(part)
        if layout == "padded" or not isinstance(part, Ragged):
            dense, real = part.padded("left") if isinstance(part, Ragged) else (part, None)
            entries[key] = _picked(dense, places)
            if made is not None:
                mask = columns.mask_of(dense) if real is None else real.to(columns[made].dtype)
                entries[made] = _picked(mask, places)
        else:
            rows = _sharing(part if places is None else _picked_rows(part, places), offsets)
            entries[key] = rows.jagged()
            if made is not None:
                entries[made] = Ragged(columns.mask_of(rows.values), rows.offsets).jagged()
    return entries


def _others(column: Column, values: list[Any]) -> Any:
    if column.dtype is not None:
        shapes = sorted({tuple(value.shape) for value in values})
        raise DataError(
            f"{column.key!r}: rows of the shapes {shapes} make no batch: they may differ in the first dimension alone",
            hint="stack_method=None or a function keeps them apart",
        )
    return Text.of(values).entry() if column.text else NonTensorStack(*map(NonTensorData, values))


def _joined(parts: list[Part]) -> Part:
    """Return the rows of all parts, which are of one column, in memory of their own."""
    if all(isinstance(part, Tensor) for part in parts) and len({part.shape[1:] for part in parts}) == 1:  # type: ignore[union-attr]
        return torch.cat(parts)  # type: ignore[arg-type]
    if any(isinstance(part, list) for part in parts):
        return [value for part in parts for value in part]  # type: ignore[union-attr]
    rows = [part if isinstance(part, Ragged) else Ragged.from_padded(part) for part in parts]  # type: ignore[arg-type]
    offsets = rows[0].offsets if len(rows) == 1 else offsets_of(torch.cat([part.lengths for part in rows]))
    return Ragged(torch.cat([part.values for part in rows]), offsets)


def _picked(rows: Tensor, places: Tensor | None) -> Tensor:
    return rows if places is None else rows.index_select(0, places.to(rows.device))


def _picked_rows(rows: Ragged, places: Tensor) -> Ragged:
    """Pick rows without room between them, as `rows[places]` does at twice the time."""
    places = places.to(rows.offsets.device)
    lengths = rows.lengths.index_select(0, places)
    offsets = offsets_of(lengths)
    shift = rows.offsets.index_select(0, places) - offsets[:-1]
    where = torch.repeat_interleave(shift, lengths, output_size=int(offsets[-1]))
    where += torch.arange(len(where), device=where.device)
    return Ragged(rows.values.index_select(0, where), offsets)


def _sharing(rows: Ragged, known: list[Tensor]) -> Ragged:
    """Return the rows with those of the `known` offsets that are equal to theirs: only so are jagged tensors alike."""
    for offsets in known:
        if torch.equal(offsets, rows.offsets):
            return Ragged(rows.values, offsets)
    known.append(rows.offsets)
    return rows


def by_method(method: Any, tds: list[TensorDictBase]) -> TensorDictBase:
    """Stack rows by the function of the user."""
    td = method(tds)
    if not isinstance(td, TensorDictBase) or td.batch_size[:1] != (len(tds),):
        found = f"batch size {tuple(td.batch_size)}" if isinstance(td, TensorDictBase) else type(td).__name__
        raise TypeError(
            f"stack_method {getattr(method, '__qualname__', method)!r} must make of {len(tds)} TensorDicts one of "
            f"batch size ({len(tds)},): found {found}"
        )
    return td


def put_rows(td: TensorDictBase, new: Sequence[TensorDictBase], mask: Tensor | None) -> TensorDictBase:
    """Return a lazy stack of the rows of `td`, those that `mask` (B,) names (None: all) updated with `new`."""
    if not list(td.keys()):
        return lazy_stack(list(new), 0)
    flags = [True] * len(new) if mask is None else mask.tolist()
    fresh, rows = iter(new), []
    for flag, row in zip(flags, td.unbind(0), strict=True):
        rows.append(row.copy().update(next(fresh)) if flag else row)
    return lazy_stack(rows, 0)


def put_entries(
    td: TensorDictBase, new: Mapping[KeyPath, Any], mask: Tensor | None, columns: Columns
) -> TensorDictBase:
    """Set the entries `new` in `td`; with a mask (B,), they are of the k rows that it names.

    Padded tokens are realigned with their mask; padded rows without one are padded on the left to the wider.
    """
    if mask is None:
        for key, value in new.items():
            if type(td) is TensorDict and type(key) is str and isinstance(value, Tensor):
                # To have it checked that a jagged tensor is of the batch size takes 30 microseconds.
                td._set_str(key, value, inplace=False, validated=True)
            else:
                td.set(key, value)
        return td
    mask = mask.to(td.device) if td.device is not None else mask
    old: Values = {key: td.get(key) for key in new}
    mixed: Values = {}
    for mask_key, tokens in columns.masks.items():
        if mask_key in new and tokens in new and not (new[tokens].is_nested or old[tokens].is_nested):
            pair = (_spread(new[tokens], mask), _spread(new[mask_key], mask))
            mixed[tokens], mixed[mask_key] = choose_padded(mask, pair, (old[tokens], old[mask_key]))
    for key, value in new.items():
        td.set(key, mixed[key] if key in mixed else mixed_rows(key, value, old[key], mask))
    return td


def named_rows(td: TensorDictBase, key: KeyPath) -> Tensor | None:
    """Return the mask of the rows to fill, (*B), that is under `key`; None for all. RuntimeError if it names none."""
    mask = row_mask(td, key)
    if mask is not None and not bool(mask.any()):
        raise RuntimeError("reset must have at least one True value.")
    return mask


def missing(td: TensorDictBase, keys: Sequence[KeyPath]) -> KeyPath | None:
    """Return the first key that `td` does not have."""
    if isinstance(td, LazyStackedTensorDict):
        td = td.unbind(td.stack_dim)[0]
    return next((key for key in keys if td.get(key, None) is None), None)


def mixed_rows(key: KeyPath, new: Any, old: Any, mask: Tensor) -> Any:
    """Return the B rows `old` of an entry, with the k rows `new` in the places of those that `mask` (B,) names."""
    if isinstance(new, Tensor) is not isinstance(old, Tensor):
        raise TypeError(
            f"{key!r}: the loader gives {describe(new)}, and the rows that stay hold {describe(old)}: where a reset "
            "makes tokens of strings, a partial reset of a batch needs rows that hold tokens already, as a "
            "Tokenizer(call_before_reset=True) before the loader makes them"
        )
    if not isinstance(new, Tensor):
        return choose(mask, _spread_others(new, mask), old)
    if new.dtype != old.dtype:
        raise TypeError(f"{key!r}: the loader gives {describe(new)}, and the rows that stay hold {describe(old)}")
    if new.is_nested or old.is_nested:
        return _scattered(Ragged.from_any(new), mask).where(mask, Ragged.from_any(old)).jagged()
    if new.dim() > 1:
        width = max(new.shape[1], old.shape[1])
        new, old = _widened(new, width), _widened(old, width)
    return old.masked_scatter(mask.view(-1, *[1] * (old.dim() - 1)), new)


def _widened(padded: Tensor, width: int) -> Tensor:
    if padded.shape[1] == width:
        return padded
    return torch.cat([padded.new_zeros(len(padded), width - padded.shape[1], *padded.shape[2:]), padded], 1)


def _spread(new: Tensor, mask: Tensor) -> Tensor:
    """Return k rows as B, at the places that `mask` names; the others are zeros."""
    spread = new.new_zeros(len(mask), *new.shape[1:])
    spread[mask] = new
    return spread


def _scattered(new: Ragged, mask: Tensor) -> Ragged:
    """Return k rows as B, at the places that `mask` names; the others are empty."""
    lengths = torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
    lengths[mask] = new.lengths
    return Ragged(new.compact().values, offsets_of(lengths))


def _spread_others(new: Any, mask: Tensor) -> Any:
    items, flags = iter(new.tolist()), mask.tolist()
    if any(flags) and all(isinstance(item, str) for item in new.tolist()):
        return Text.of([next(items) if flag else "" for flag in flags]).entry()
    return NonTensorStack(*[NonTensorData(next(items) if flag else None) for flag in flags])


def carry(td: TensorDictBase, next_td: TensorDictBase, keys: Sequence[KeyPath]) -> TensorDictBase:
    """Give `next_td` the entries of `td` under `keys`, unless it has its own: what a step leaves as it is."""
    if isinstance(td, LazyStackedTensorDict) and isinstance(next_td, LazyStackedTensorDict):
        for row, next_row in zip(td.unbind(0), next_td.unbind(0), strict=True):
            carry(row, next_row, keys)
        return next_td
    for key in keys:
        if next_td.get(key, None) is None:
            value = whole(td, key)
            if value is not None:
                next_td.set(key, value)
    return next_td
