"""Rows that grow at the cost of what is appended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ramet.ragged.storage import Ragged, is_jagged, offsets_of, positions


@dataclass(slots=True)
class _Buffer:
    """What the latest view of some rows is a view of: room for more of them, and of their mask."""

    tokens: Tensor  # dense [B, capacity], jagged [total]
    mask: Tensor | None
    mask_view: Tensor | None
    room: int = 0  # entries that each row can still take
    offsets: Tensor | None = None  # of a jagged buffer: int64 [B+1]
    lengths: Tensor | None = None  # of a jagged buffer: how much of each row is filled, int64 [B]

    def takes(self, mask: Tensor | None, n: int) -> bool:
        """Say whether rows with this mask can grow by n in place."""
        frozen = self.tokens.is_inference() and not torch.is_inference_mode_enabled()
        return self.mask_view is mask and n <= self.room and not frozen


class Appender:
    """Appends to rows at the cost of what is appended.

    The rows live in buffers with room to grow, and what is handed out is a view of what is filled. Only the latest
    view of a buffer may grow in place; appending to anything else copies it into a buffer of its own. So two
    continuations of one observation never meet. The memory of what was passed in from outside is never written to.

    >>> appender, prompt = Appender(), torch.tensor([[1, 2]])
    >>> a, _ = appender.append(prompt, None, torch.tensor([[3]]))
    >>> b, _ = appender.append(a, None, torch.tensor([[4]]))
    >>> c, _ = appender.append(a, None, torch.tensor([[5]]))
    >>> b.tolist(), c.tolist(), b.data_ptr() == a.data_ptr(), c.data_ptr() == a.data_ptr()
    ([[1, 2, 3, 4]], [[1, 2, 3, 5]], True, False)
    """

    def __init__(self) -> None:
        self._latest: Any = WeakTensorKeyDictionary()  # view of tokens -> its _Buffer, as long as the view lives

    def __reduce__(self) -> tuple[type[Appender], tuple[()]]:
        return (Appender, ())  # a copy of an environment starts without buffers: its first append copies

    def append(self, tokens: Tensor, mask: Tensor | None, new: Tensor | Ragged) -> tuple[Tensor, Tensor | None]:
        """Return tokens and mask with `new` at the end of each row, in the layout of `tokens`.

        `tokens` dense or left-padded [B, L] (or [L]), or jagged; `mask` of the same shape, or None; `new` dense [B, n]
        (or [n]), or any number of entries for each row. The mask grows by ones. A padded batch whose rows grow by
        different numbers is realigned, padded with 0 on the left; without a mask that is a ValueError.
        """
        jagged = is_jagged(tokens)
        if mask is not None and (is_jagged(mask) != jagged or mask.shape[:1] != tokens.shape[:1]):
            raise ValueError("the mask must have the layout of the tokens: one is a jagged nested tensor, one is not")
        if jagged:
            return self._append_jagged(tokens, mask, new if isinstance(new, Ragged) else Ragged.from_padded(new))
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit tokens of {tuple(tokens.shape)}")
        if isinstance(new, Ragged):
            n = int(new.lengths.max()) if len(new) else 0
            if n and bool((new.lengths != n).any()):
                return _realigned(tokens, mask, new)
            new = new.compact().values.view(*tokens.shape[:-1], n)
        buffer: _Buffer | None = self._latest.pop(tokens, None)
        if buffer is None or not buffer.takes(mask, new.shape[-1]):
            if mask is not None and not _left_padded(mask):
                return _realigned(tokens, mask, Ragged.from_padded(_batched(new)))
            buffer = _dense_buffer(tokens, mask, new.shape[-1])
        return self._grow_dense(buffer, tokens.shape[-1], new)

    def _grow_dense(self, buffer: _Buffer, filled: int, new: Tensor) -> tuple[Tensor, Tensor | None]:
        end = filled + new.shape[-1]
        buffer.tokens[..., filled:end] = new
        buffer.room -= new.shape[-1]
        view = buffer.tokens[..., :end]
        if buffer.mask is not None:
            buffer.mask[..., filled:end] = 1
            buffer.mask_view = buffer.mask[..., :end]
        self._latest[view] = buffer
        return view, buffer.mask_view

    def _append_jagged(self, tokens: Tensor, mask: Tensor | None, new: Ragged) -> tuple[Tensor, Tensor | None]:
        lengths = new.lengths
        n = int(lengths.max()) if len(new) else 0
        buffer: _Buffer | None = self._latest.pop(tokens, None)
        if buffer is None or not buffer.takes(mask, n):
            buffer = _jagged_buffer(tokens, mask, n)
        assert buffer.offsets is not None
        assert buffer.lengths is not None
        where = positions(buffer.offsets[:-1] + buffer.lengths, lengths)
        buffer.tokens[where] = new.compact().values.to(buffer.tokens.dtype)
        buffer.lengths = buffer.lengths + lengths
        buffer.room -= n
        view = Ragged(buffer.tokens, buffer.offsets, buffer.lengths).jagged()
        if buffer.mask is not None:
            buffer.mask[where] = 1
            buffer.mask_view = Ragged(buffer.mask, buffer.offsets, buffer.lengths).jagged()
        self._latest[view] = buffer
        return view, buffer.mask_view


def _dense_buffer(tokens: Tensor, mask: Tensor | None, n: int) -> _Buffer:
    width = tokens.shape[-1]
    room = n + max(8 * n, width)  # a copy is paid for by the appends that it makes room for; old ones are held by views
    grown = tokens.new_empty((*tokens.shape[:-1], width + room))
    grown[..., :width] = tokens
    if mask is None:
        return _Buffer(grown, None, None, room)
    grown_mask = mask.new_empty(grown.shape)
    grown_mask[..., :width] = mask
    return _Buffer(grown, grown_mask, mask, room)


def _jagged_buffer(tokens: Tensor, mask: Tensor | None, n: int) -> _Buffer:
    rows = Ragged.from_jagged(tokens)
    lengths = rows.lengths
    room = n + max(8 * n, int(lengths.sum()) // max(len(rows), 1))
    offsets = offsets_of(lengths + room)
    where, total = positions(offsets[:-1], lengths), int(offsets[-1])
    grown = rows.values.new_zeros(total)
    grown[where] = rows.compact().values
    if mask is None:
        return _Buffer(grown, None, None, room, offsets, lengths)
    real = Ragged.from_jagged(mask)
    if not torch.equal(real.lengths, lengths):
        raise ValueError("the rows of the mask are not as long as the rows of the tokens")
    grown_mask = real.values.new_zeros(total)
    grown_mask[where] = real.compact().values
    return _Buffer(grown, grown_mask, mask, room, offsets, lengths)


def _realigned(tokens: Tensor, mask: Tensor | None, new: Ragged) -> tuple[Tensor, Tensor]:
    if mask is None:
        raise ValueError(
            "the rows of a dense batch without a mask can not grow by different numbers of tokens "
            f"({new.lengths.tolist()}): pass the mask, or jagged tokens"
        )
    size, rows, real = tokens.shape[:-1], _batched(tokens), _batched(mask)
    if _left_padded(real):
        grown, grown_mask = _shifted(rows, real, new)
    else:
        grown, flags = Ragged.from_padded(rows, real).append(new).padded("left", 0)
        grown_mask = flags.to(mask.dtype)
    return grown.view(*size, grown.shape[-1]), grown_mask.view(*size, grown.shape[-1])


def _shifted(tokens: Tensor, mask: Tensor, new: Ragged) -> tuple[Tensor, Tensor]:
    """Append `new` to left-padded rows: each row of the result is one window of [zeros, tokens, right-padded new]."""
    added, flags = new.padded("right", 0)
    lengths = new.lengths
    (count, old), width = tokens.shape, int((mask.bool().sum(1) + lengths).max())
    zeros = max(width - old - int(lengths.min()), 0)
    starts, row = zeros + old + lengths - width, torch.arange(count, device=tokens.device)

    def window(left: Tensor, right: Tensor) -> Tensor:
        joined = torch.cat([left.new_zeros(count, zeros), left, right.to(left.dtype)], 1)
        return joined.unfold(1, width, 1)[row, starts] if width else joined[:, :0]

    return window(tokens, added), window(mask, flags)


def _batched(tokens: Tensor) -> Tensor:
    return tokens[None] if tokens.dim() == 1 else tokens


def _left_padded(mask: Tensor) -> bool:
    real = mask.bool()
    return bool((real[..., 1:] >= real[..., :-1]).all())
