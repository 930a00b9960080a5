"""How much better each rollout did than its group: scores [R] to advantages [R].

A group is named by an explicit id: members may come in any order, interleaved with other groups, and a member that
failed or was dropped moves no other. `valid` says who has a score: the others (abstained, errors, time-outs) leave
the baseline alone and get advantage 0, whatever stands in their slot, NaN included. They must also be masked in the
loss, so that they count in no denominator. Everything is computed on the CPU in float64, in an order that depends on
scores and ids alone: permuting the rows permutes the result, bit for bit.

A group has *no variance* if its valid scores agree to one part in a million of the largest: then all its advantages
are exactly 0. The rule is there because a std that is only rounding (0.1 + 0.2 against 0.3) would be blown up to +-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ramet.errors import ForestError, RewardError

SAME = 1e-6
"""Scores of one group that differ by no more than this share of the largest magnitude count as equal."""


def group_mean(
    scores: Tensor,
    groups: Tensor,
    *,
    valid: Tensor | None = None,
    scale_by_std: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Subtract from each score the mean of its group's valid scores.

    `scores` float [R], `groups` int64 [R], `valid` bool [R] (None: all); returns the dtype of `scores`, [R].
    Advantages of a group sum to 0. A group of one, or without variance, has advantage 0.

    `scale_by_std=False` is Dr. GRPO (https://arxiv.org/abs/2503.20783): its expected gradient is (G-1)/G times the
    exact one, because a score is part of its own baseline. `scale_by_std=True` is GRPO
    (https://arxiv.org/abs/2402.03300): divided by std + eps, where std is the sample standard deviation (n - 1 under
    the root) of the valid scores; it weights groups by how unanimous they are, so its expected gradient is of another
    objective.

    Raises `ForestError` where shapes differ, `RewardError` for a valid score that is not finite.

    >>> scores, groups = torch.tensor([1.0, 5.0, 0.0, 5.0, 2.0]), torch.tensor([3, 8, 3, 8, 3])
    >>> group_mean(scores, groups)                       # group 3 has mean 1; group 8 is unanimous
    tensor([ 0.,  0., -1.,  0.,  1.])
    >>> group_mean(scores, groups, valid=torch.tensor([True, True, True, True, False]))
    tensor([ 0.5000,  0.0000, -0.5000,  0.0000,  0.0000])
    """
    stats = _statistics(scores, groups, valid)
    advantages = stats.centred
    if scale_by_std:
        if not eps >= 0:
            raise ValueError(f"eps must be at least 0: found {eps}")
        variance = stats.sum_of_squares / (stats.count - 1).clamp(min=1)
        # Where there is no variance the advantage is 0 already; a divisor of 1 keeps eps=0 from making it 0/0.
        advantages = advantages / torch.where(stats.flat, 1.0, variance.sqrt() + eps)
    return advantages.to(scores)


def leave_one_out(scores: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Subtract from each score the mean of the *other* valid scores of its group: RLOO.

    Shapes, dtypes and errors as in `group_mean`; equals `group_mean` times G/(G-1), G the number of valid members.
    The baseline does not depend on the rollout itself, so the expected gradient is exact. A rollout that is the only
    valid one has no baseline and gets advantage 0. There is no scaling by std: a std that contains the rollout's own
    score would take away the one property this estimator is for. https://arxiv.org/abs/2402.14740

    >>> leave_one_out(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0, 0, 0]))   # 1 - 2/2, 0 - 3/2, 2 - 1/2
    tensor([ 0.0000, -1.5000,  1.5000])
    """
    stats = _statistics(scores, groups, valid)
    return (stats.centred * stats.count / (stats.count - 1).clamp(min=1)).to(scores)


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Per rollout [R], float64: distance from its group's mean; its group's count, squares and flatness (bool)."""

    centred: Tensor
    count: Tensor
    sum_of_squares: Tensor
    flat: Tensor


def _statistics(scores: Tensor, groups: Tensor, valid: Tensor | None) -> _Statistics:
    valid = _check(scores, groups, valid).cpu()
    exact = torch.where(valid, scores.detach().cpu().double(), 0.0)
    ids, row = torch.unique(groups.cpu(), return_inverse=True)
    # Sums run in the order (group, score): equal scores are interchangeable, so the order of rows can not be seen.
    order = torch.argsort(exact, stable=True)
    order = order[torch.argsort(row[order], stable=True)]

    def total(values: Tensor) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.float64).index_add_(0, row[order], values[order])

    def extreme(how: str, start: float) -> Tensor:
        return torch.full((len(ids),), start, dtype=torch.float64).scatter_reduce_(0, row[valid], exact[valid], how)

    count = total(valid.double())
    highest, lowest = extreme("amax", -torch.inf), extreme("amin", torch.inf)
    flat = (highest - lowest <= SAME * torch.maximum(highest.abs(), lowest.abs())) | (count == 0)
    mean = total(exact) / count.clamp(min=1)
    centred = torch.where(valid & ~flat[row], exact - mean[row], 0.0)
    return _Statistics(centred, count[row], total(centred.square())[row], flat[row])


def _check(scores: Tensor, groups: Tensor, valid: Tensor | None) -> Tensor:
    """Return `valid` as a mask, or raise what does not fit."""
    if scores.ndim != 1 or groups.shape != scores.shape:
        raise ForestError(
            f"scores and groups must both be [R]: found scores {list(scores.shape)}, groups {list(groups.shape)}",
            hint="give one score and one group id for each rollout",
        )
    if not scores.is_floating_point() or groups.dtype is not torch.int64:
        raise TypeError(f"scores must be float and groups int64: found {scores.dtype} and {groups.dtype}")
    if valid is None:
        valid = torch.ones_like(groups, dtype=torch.bool)
    if valid.dtype is not torch.bool:
        raise TypeError(f"valid must be bool: found {valid.dtype}")
    if valid.shape != scores.shape:
        raise ForestError(f"valid must have the shape of the scores {list(scores.shape)}: found {list(valid.shape)}")
    broken = (valid & ~scores.isfinite()).nonzero().flatten().tolist()
    if broken:
        raise RewardError(
            f"a valid score must be finite: found {scores[broken[0]].item()} at row {broken[0]}, {len(broken)} in all",
            hint="a rollout without a score is marked by valid=False",
        )
    return valid
