"""Where a penalty is taken from a reward: row by row, token by token, or a reward of a whole row among its tokens.

Shapes: *B is the batch size of a TensorDict, T the tokens of an action, the same for all rows (dense, or padded with a
mask of the real ones) or different (jagged nested tensors, lazy stacks of rows).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from ramet import kl
from ramet.errors import RewardError
from ramet.ragged import Ragged
from ramet.specs import KeyPath, describe

Placement: TypeAlias = Literal["last", "spread"]
"""Which tokens get the reward of a whole row: the last one, or each an equal share."""


def log_ratio(
    current: Tensor, reference: Tensor, *, real: Tensor | None = None, name: str = "the current log-probs"
) -> Tensor:
    """Return the k1 estimate for each log-prob, in the layout of `current`: log pi - log rho, float32 or better.

    `current` and `reference` are dense of one shape (a last dimension of 1 may be there or not), or ragged with rows
    of equal lengths. Where `real`, bool of the shape of a dense `current`, is False the result is 0. Raises ValueError
    with both shapes and the first row that differs.

    >>> log_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    tensor([0.5000, 0.0000])
    """
    dtype = torch.promote_types(torch.promote_types(current.dtype, reference.dtype), torch.float32)
    what = (name, "the reference's log-probs")
    if current.is_nested or reference.is_nested:
        mine, theirs = _per_token(current, what, reference), _per_token(reference, what, current)
        _check_rows(mine.lengths, theirs.lengths, what)
        return Ragged(kl.kl(mine.values.to(dtype), theirs.values.to(dtype), "k1"), mine.offsets).jagged()
    if current.shape not in (reference.shape, (*reference.shape, 1)) and reference.shape != (*current.shape, 1):
        raise ValueError(_different(what, current, reference))
    return kl.kl(current.to(dtype), reference.to(dtype).reshape(current.shape), "k1", mask=real)


def check_finite(ratio: Tensor, current: Tensor, reference: Tensor, *, name: str = "the current log-probs") -> None:
    """Raise a RewardError for the first log-ratio that is not finite, with its row and both log-probs.

    An action may be so far out that a distribution can not say how probable it is, or be impossible under one. Then
    there is no penalty that would be right.
    """
    values = Ragged.from_jagged(ratio).compact().values if ratio.is_nested else ratio
    if bool(values.isfinite().all()):
        return
    if ratio.is_nested:
        rows = Ragged.from_jagged(ratio).rows()
        row = next(row for row, of_row in enumerate(rows) if not bool(of_row.isfinite().all()))
        place = (row, *torch.nonzero(~rows[row].isfinite())[0].tolist())
    else:
        place = tuple(torch.nonzero(~ratio.isfinite())[0].tolist())
    pair = (_at(current, place), _at(reference.reshape_as(ratio) if _is_dense(ratio, reference) else reference, place))
    raise RewardError(
        f"row {place[0] if place else 0}, place {list(place)}: {name} is {pair[0]} and the reference's is {pair[1]}, "
        "so there is no finite reward",
        hint="keep actions off the edge of what both distributions can score, such as 1 behind a tanh",
    )


def _is_dense(ratio: Tensor, other: Tensor) -> bool:
    return not (ratio.is_nested or other.is_nested)


def _at(value: Tensor, place: tuple[int, ...]) -> float:
    """Return the number at a place; of jagged rows, in the row."""
    found = Ragged.from_jagged(value).rows()[place[0]] if value.is_nested else value
    for index in place[1:] if value.is_nested else place:
        found = found[index]
    return float(found)


def subtract(
    penalty: Tensor,
    reward: Tensor | None,
    size: torch.Size,
    *,
    placement: Placement = "last",
    real: Tensor | None = None,
    sequence: bool = False,
    key: KeyPath = "reward",
) -> Tensor:
    """Return `reward - penalty`, of the shape and dtype of the reward, or (*B, T, 1) where it is one for each token.

    `penalty` is (*B,), or for each token (*B, T) or (*B, T, 1). `reward` is (*B, T), (*B, T, 1) or (*B, 1); None counts
    as zero. Either may be jagged: then the result is. A reward (*B, 1) of a whole row with a penalty for each token is
    put on the last token, or spread over all; a row without tokens has no place for it, and its result is empty.

    `real` (*B, T) says which tokens of a padded row there are. For T = 1 a penalty (*B, 1) may be of a row or of its
    token: the result is (*B, 1), but (*B, 1, 1) if `sequence` says that the reward is one of a row of tokens. Raises
    ValueError, with both shapes, where they do not fit.

    >>> penalty = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    >>> subtract(penalty, torch.tensor([[1.0], [2.0]]), torch.Size([2])).squeeze(-1)
    tensor([[-0.1000,  0.8000],
            [-0.3000,  1.6000]])
    """
    if penalty.is_nested or (reward is not None and reward.is_nested):
        return _subtract_ragged(penalty, reward, placement, real, key)
    rows, one = tuple(size), (*size, 1)
    for_row = reward is None or reward.shape in (rows, one)
    if penalty.shape == rows or (penalty.shape == one and for_row and not sequence):
        if not for_row:
            raise ValueError(_different((repr(key), "the log-probs"), reward, penalty))
        of_row = penalty.reshape(one)
        return 0 - of_row if reward is None else _minus(reward, of_row.reshape(reward.shape))
    of_token = penalty.squeeze(-1) if penalty.shape[len(rows) + 1 :] == (1,) else penalty
    if of_token.shape[:-1] != rows or penalty.dim() == len(rows):
        raise ValueError(
            f"the log-probs must have the shape {rows} or {(*rows, 'T')}: found a {describe(penalty)}, with {key!r} "
            + ("missing" if reward is None else describe(reward))
        )
    return _subtract_dense(of_token, reward, len(rows), placement, real, sequence, key)


def _subtract_dense(
    penalty: Tensor,
    reward: Tensor | None,
    dims: int,
    placement: Placement,
    real: Tensor | None,
    sequence: bool,
    key: KeyPath,
) -> Tensor:
    """Subtract a penalty for each token (*B, T) of a batch of `dims` dimensions."""
    if reward is None:
        return 0 - penalty[..., None]
    rows = penalty.shape[:dims]
    if reward.shape == (*penalty.shape, 1):
        return _minus(reward, penalty[..., None])
    if reward.shape == penalty.shape and not (sequence and reward.shape == (*rows, 1)):
        return _minus(reward, penalty)
    if reward.shape not in (rows, (*rows, 1)):
        raise ValueError(_different((repr(key), "the log-probs"), reward, penalty))
    mask = torch.ones_like(penalty, dtype=torch.bool) if real is None else real.reshape(penalty.shape)
    width = penalty.shape[-1]
    placed = share(reward.reshape(-1), mask.reshape(rows.numel(), width), placement)
    return _minus(placed.reshape(penalty.shape), penalty)[..., None]


def share(reward: Tensor, real: Tensor, placement: Placement) -> Tensor:
    """Give the reward [B] of each row to its tokens, `real` bool [B, T]: [B, T], 0 where there is no token.

    >>> real = torch.tensor([[True, True, False], [True, True, True]])
    >>> share(torch.tensor([4.0, 6.0]), real, "last").tolist(), share(torch.tensor([4.0, 6.0]), real, "spread").tolist()
    ([[0.0, 4.0, 0.0], [0.0, 0.0, 6.0]], [[2.0, 2.0, 0.0], [2.0, 2.0, 2.0]])
    """
    if not reward.dtype.is_floating_point:
        reward = reward.float()
    if placement == "spread":
        part, place = reward / real.sum(1).clamp(min=1), real
    else:
        part, place = reward, real & (real.flip(1).cumsum(1).flip(1) == 1)  # real, and none is after it
    return torch.where(place, part[:, None], torch.zeros((), dtype=part.dtype, device=part.device))


def _subtract_ragged(
    penalty: Tensor, reward: Tensor | None, placement: Placement, real: Tensor | None, key: KeyPath
) -> Tensor:
    what = (repr(key), "the log-probs")
    tokens = _per_token(penalty, what, reward, real)
    if reward is None:
        return Ragged(0 - tokens.values[:, None], tokens.offsets).jagged()
    if not reward.is_nested and reward.shape in ((len(tokens), 1), (len(tokens),)):
        lengths = tokens.lengths
        longest = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
        placed = share(reward.reshape(-1), mask, placement)[mask]
        return Ragged(_minus(placed, tokens.values)[:, None], tokens.offsets).jagged()
    rewards = _per_token(reward, what, penalty)
    _check_rows(rewards.lengths, tokens.lengths, what)
    values = _minus(rewards.values, tokens.values)
    return Ragged(values if reward.dim() == 2 else values[:, None], tokens.offsets).jagged()


def _per_token(value: Tensor, what: tuple[str, str], other: Tensor | None, real: Tensor | None = None) -> Ragged:
    """Return rows of single numbers, without room between them."""
    last = value.shape[2:]
    if value.dim() < 2 or last not in ((), (1,)):
        found = describe(value) if other is None else f"{describe(value)} beside a {describe(other)}"
        raise ValueError(f"{what[0]} and {what[1]} do not fit: expected a number for each token, found {found}")
    rows = Ragged.from_jagged(value).compact() if value.is_nested else Ragged.from_padded(value, real)
    return Ragged(rows.values.reshape(-1), rows.offsets)


def _check_rows(mine: Tensor, theirs: Tensor, what: tuple[str, str]) -> None:
    if len(mine) != len(theirs):
        raise ValueError(f"{what[0]} and {what[1]} do not fit: {len(mine)} rows and {len(theirs)} rows")
    wrong = torch.nonzero(mine != theirs).flatten()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{what[0]} and {what[1]} do not fit in row {row} of {len(mine)}: found {int(mine[row])} and "
            f"{int(theirs[row])} tokens (shapes {(int(mine[row]),)} and {(int(theirs[row]),)}); "
            f"{len(wrong)} rows differ"
        )


def _minus(reward: Tensor, penalty: Tensor) -> Tensor:
    dtype = reward.dtype if reward.dtype.is_floating_point else torch.float32
    return (reward.to(torch.promote_types(dtype, penalty.dtype)) - penalty).to(dtype)


def _different(what: tuple[str, str], first: Tensor | None, second: Tensor) -> str:
    return f"{what[0]} and {what[1]} do not fit: found a {describe(first)} and a {describe(second)}"


def read(td: TensorDictBase, key: KeyPath) -> Any:
    """Return what is under `key` for all rows, jagged where the rows of a lazy stack differ; None if nothing is."""
    if not isinstance(td, LazyStackedTensorDict):
        return td.get(key, None)
    parts = [read(part, key) for part in td.unbind(td.stack_dim)]
    if any(part is None for part in parts):
        return None
    if _stackable(parts):
        return td.get(key)
    if td.batch_dims != 1:
        raise ValueError(f"{key!r} is ragged in a batch of size {tuple(td.batch_size)}: take its parts one by one")
    return Ragged.from_rows(parts).jagged()


def is_ragged(td: TensorDictBase, key: KeyPath) -> bool:
    """Say whether the parts of a lazy stack have under `key` what can not be stacked."""
    if not isinstance(td, LazyStackedTensorDict):
        value = td.get(key, None)
        return isinstance(value, Tensor) and value.is_nested
    parts = td.unbind(td.stack_dim)
    return any(is_ragged(part, key) for part in parts) or not _stackable([read(part, key) for part in parts])


def write(td: TensorDictBase, key: KeyPath, value: Tensor) -> None:
    """Set an entry, of each row where `td` is a lazy stack of rows and `value` is jagged."""
    if value.is_nested and isinstance(td, LazyStackedTensorDict):
        for row, part in zip(td.unbind(td.stack_dim), Ragged.from_jagged(value).rows(), strict=True):
            row.set(key, part)
        return
    td.set(key, value)


def _stackable(parts: list[Any]) -> bool:
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return not any(part.is_nested for part in tensors) and len({part.shape for part in tensors}) <= 1
