"""Advantages: numbers by hand, groups by id, what leaves the baseline alone, groups without variance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramet.advantages import group_mean, leave_one_out
from ramet.errors import ForestError, RewardError


def scaled(scores: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    return group_mean(scores, groups, valid=valid, scale_by_std=True)


Estimator = Callable[..., Tensor]
ALL = [group_mean, scaled, leave_one_out]

# (score, group, valid): scores on a coarse grid, so that ties and unanimous groups are common.
ROWS = st.lists(
    st.tuples(st.sampled_from([-1.5, 0.0, 0.1, 0.25, 1.0, 3.0]), st.integers(-2, 3), st.booleans()), max_size=16
)


def columns(rows: list[tuple[float, int, bool]]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.tensor([r[0] for r in rows], dtype=torch.float64),
        torch.tensor([r[1] for r in rows], dtype=torch.int64),
        torch.tensor([r[2] for r in rows], dtype=torch.bool),
    )


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_numbers_by_hand() -> None:
    """One group of scores 1, 2, 6, tolerance 1e-12: mean 3, distances -2, -1, 3.

    Sample variance (4 + 1 + 9) / 2 = 7. Leave one out: 1 - 8/2, 2 - 7/2, 6 - 3/2.
    """
    scores, groups = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64), int64(0, 0, 0)
    root = math.sqrt(7)
    expected = {
        "mean": (group_mean(scores, groups), [-2.0, -1.0, 3.0]),
        "std": (group_mean(scores, groups, scale_by_std=True, eps=0.0), [-2 / root, -1 / root, 3 / root]),
        "eps": (group_mean(scores, groups, scale_by_std=True, eps=1.0), [x / (root + 1) for x in (-2.0, -1.0, 3.0)]),
        "loo": (leave_one_out(scores, groups), [-3.0, -1.5, 4.5]),
    }
    for name, (found, values) in expected.items():
        assert found.tolist() == pytest.approx(values, abs=1e-12), name


def test_two_members_one_right() -> None:
    """Mean 1/2; std of (1, 0) is sqrt(1/2), so +-0.5 / sqrt(0.5) = +-sqrt(0.5); leave one out +-1. Float32, 1e-6."""
    scores, groups = torch.tensor([1.0, 0.0]), int64(5, 5)
    assert group_mean(scores, groups).tolist() == [0.5, -0.5]
    found = group_mean(scores, groups, scale_by_std=True, eps=0.0).tolist()
    assert found == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6)
    assert leave_one_out(scores, groups).tolist() == [1.0, -1.0]


@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
def test_equal_to_a_slow_loop_over_groups(rows: list[tuple[float, int, bool]]) -> None:
    """Each estimator against the statistics module, group by group. Tolerance 1e-12."""
    scores, groups, valid = columns(rows)
    means, stds, others = (f(scores, groups, valid=valid).tolist() for f in ALL)
    for i, (score, group, counts) in enumerate(rows):
        peers = [s for s, g, v in rows if v and g == group]
        if not counts or len(set(peers)) < 2:
            assert (means[i], stds[i], others[i]) == (0.0, 0.0, 0.0)
            continue
        centred = score - statistics.fmean(peers)
        rest = (sum(peers) - score) / (len(peers) - 1)
        assert means[i] == pytest.approx(centred, abs=1e-12)
        assert stds[i] == pytest.approx(centred / (statistics.stdev(peers) + 1e-6), abs=1e-12)
        assert others[i] == pytest.approx(score - rest, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(rows=ROWS, data=st.data())
def test_a_permutation_of_the_rows_permutes_the_result_bit_for_bit(
    rows: list[tuple[float, int, bool]], data: st.DataObject
) -> None:
    scores, groups, valid = columns(rows)
    scores = scores * (1 + 1e-3 * torch.arange(len(rows)).double().sin())
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))), dtype=torch.int64)
    for estimator in ALL:
        found = estimator(scores[order], groups[order], valid=valid[order])
        assert torch.equal(found, estimator(scores, groups, valid=valid)[order])


@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
def test_what_is_not_valid_might_as_well_not_be_there(rows: list[tuple[float, int, bool]]) -> None:
    """Dropping a member moves no other, and NaN or inf in its slot is not read."""
    scores, groups, valid = columns(rows)
    rubbish = torch.where(valid, scores, torch.where(groups > 0, torch.nan, -torch.inf))
    for estimator in ALL:
        found = estimator(rubbish, groups, valid=valid)
        assert torch.equal(found[valid], estimator(scores[valid], groups[valid]))
        assert torch.equal(found[~valid], torch.zeros(int((~valid).sum()), dtype=torch.float64))


@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
def test_advantages_of_a_group_sum_to_zero(rows: list[tuple[float, int, bool]]) -> None:
    """Tolerance 1e-9: the std of a group is at least 0.07 here unless it has none, so nothing is blown up."""
    scores, groups, valid = columns(rows)
    for estimator in ALL:
        found = estimator(scores, groups, valid=valid)
        for group in set(groups.tolist()):
            assert float(found[groups == group].sum()) == pytest.approx(0.0, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
def test_leave_one_out_is_the_group_mean_times_g_over_g_minus_one(rows: list[tuple[float, int, bool]]) -> None:
    """G counts the valid members. Tolerance 1e-12."""
    scores, groups, valid = columns(rows)
    members = torch.tensor([sum(v and g == group for _, g, v in rows) for _, group, _ in rows]).double()
    expected = group_mean(scores, groups, valid=valid) * members / (members - 1).clamp(min=1)
    torch.testing.assert_close(leave_one_out(scores, groups, valid=valid), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize(
    "scores",
    [[0.1] * 7, [0.1 + 0.2, 0.3, 0.3], [1e30] * 3, [0.0, -0.0], [-7.3] * 5, [100.00001, 100.0]],
    ids=["tenths", "rounding", "huge", "signed zero", "negative", "float32 rounding"],
)
def test_a_group_without_variance_has_exactly_zero_advantage(estimator: Estimator, scores: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        tensor = torch.tensor(scores, dtype=dtype)
        found = estimator(tensor, torch.zeros(len(scores), dtype=torch.int64))
        assert torch.equal(found, torch.zeros_like(tensor))


def test_without_eps_a_unanimous_group_is_still_zero() -> None:
    """Exactly; the other, of scores 1 and 3 with std sqrt(2), has +-sqrt(0.5) within 1e-6, float32."""
    found = group_mean(torch.tensor([2.0, 2.0, 1.0, 3.0]), int64(0, 0, 1, 1), scale_by_std=True, eps=0.0).tolist()
    assert found[:2] == [0.0, 0.0]
    assert found[2:] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-6)


@pytest.mark.parametrize("estimator", ALL)
def test_a_group_of_one_has_zero_advantage(estimator: Estimator) -> None:
    assert estimator(torch.tensor([3.0, -2.0]), int64(1, 0)).tolist() == [0.0, 0.0]
    lonely = estimator(torch.tensor([3.0, torch.nan]), int64(1, 1), valid=torch.tensor([True, False]))
    assert lonely.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ALL)
def test_no_rollouts_and_no_valid_rollouts_are_legal(estimator: Estimator) -> None:
    assert estimator(torch.zeros(0), int64()).shape == (0,)
    nobody = estimator(torch.tensor([torch.nan, torch.inf]), int64(1, 1), valid=torch.tensor([False, False]))
    assert nobody.tolist() == [0.0, 0.0]


def test_equal_scores_in_separate_groups_stay_separate() -> None:
    """Groups 0 (1, 0) and 1 (1, 1), interleaved."""
    found = group_mean(torch.tensor([1.0, 1.0, 0.0, 1.0]), int64(0, 1, 0, 1))
    assert found.tolist() == [0.5, 0.0, -0.5, 0.0]


@pytest.mark.parametrize("estimator", ALL)
def test_dtype_is_kept_and_no_gradient_flows(estimator: Estimator) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        scores = torch.tensor([1.0, 0.0], dtype=dtype, requires_grad=True)
        found = estimator(scores, int64(0, 0))
        assert found.dtype is dtype
        assert not found.requires_grad


def test_what_does_not_fit_is_refused() -> None:
    scores, groups = torch.zeros(2), int64(0, 0)
    with pytest.raises(ForestError, match=r"scores \[2\], groups \[3\]"):
        group_mean(scores, int64(0, 0, 0))
    with pytest.raises(ForestError, match=r"scores \[1, 2\], groups \[1, 2\]"):
        leave_one_out(scores[None], groups[None])
    with pytest.raises(ForestError, match=r"valid .*\[2\]: found \[3\]"):
        group_mean(scores, groups, valid=torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"valid must be bool: found torch.float32"):
        group_mean(scores, groups, valid=torch.ones(2))
    with pytest.raises(TypeError, match=r"found torch.float32 and torch.int32"):
        group_mean(scores, groups.int())
    with pytest.raises(TypeError, match=r"found torch.int64 and torch.int64"):
        group_mean(groups, groups)
    with pytest.raises(ValueError, match="eps must be at least 0: found -1"):
        group_mean(scores, groups, scale_by_std=True, eps=-1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_valid_score_that_is_not_finite_is_an_error_that_names_the_row(value: float) -> None:
    with pytest.raises(RewardError, match=rf"found {value} at row 2, 1 in all"):
        group_mean(torch.tensor([0.0, 1.0, value]), int64(0, 0, 0))
