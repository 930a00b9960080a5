"""Actions of any length in each row, dense or ragged, on their way through a step."""

from __future__ import annotations

import torch
from torch import Tensor

from ramet.ragged import Ragged
from ramet.specs import KeyPath, describe


def check_ids(tokens: Tensor, key: KeyPath) -> None:
    """Raise a TypeError for tokens that are not int64."""
    if tokens.dtype is not torch.int64:
        raise TypeError(f"{key!r} must hold token ids, int64, as reset gives them: found {describe(tokens)}")


def values_of(action: Tensor | Ragged) -> Tensor:
    """Return the tokens of an action, in whatever shape they are stored."""
    return action.values if isinstance(action, Ragged) else action


def with_values(action: Tensor | Ragged, values: Tensor) -> Tensor | Ragged:
    """Return values, one for each token as `values_of` gives them, in the rows of an action."""
    return Ragged(values, action.offsets, action.sizes) if isinstance(action, Ragged) else values


def outside(action: Tensor | Ragged) -> Tensor:
    """Return rows as a TensorDict holds them."""
    return action.jagged() if isinstance(action, Ragged) else action


def stepped(action: Tensor | Ragged, mask: Tensor | None) -> Tensor | Ragged:
    """Return what is appended: the action, of no tokens in the rows that `mask` does not name."""
    if mask is None:
        return action
    if not mask.dim():
        return values_of(action)[:0]
    rows = action if isinstance(action, Ragged) else Ragged.from_padded(action)
    return Ragged(rows.values, rows.offsets, rows.lengths * mask)
