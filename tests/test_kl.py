"""KL estimators: numbers by hand, signs, extremes, masks. Proofs are in test_enumerated.py."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramet.errors import ConfigError, ForestError
from ramet.kl import Estimator, k1, k2, k3, kl, kl_in_loss, kl_penalty, sum_of_later

ESTIMATORS = get_args(Estimator)
LOG_RATIOS = st.floats(-1e4, 1e4, allow_nan=False, width=32)


def gradient_at(estimator: Estimator, log_ratio: float, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Value and derivative of an estimator at one log-ratio, through the public function."""
    policy = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    value = kl(policy, torch.zeros(1, dtype=dtype), estimator)
    return value.item(), torch.autograd.grad(value.sum(), policy)[0].item()


def test_numbers_by_hand() -> None:
    """The policy gives a token 1/2, the reference 1/8: r = log 4 = 1.3863. Tolerance 1e-12.

    k1 = log 4; k2 = (log 4)^2 / 2; k3 = 1/4 - 1 + log 4.
    """
    policy, reference = torch.tensor([0.5, 0.125], dtype=torch.float64).log()[:, None]
    expected = {"k1": math.log(4), "k2": math.log(4) ** 2 / 2, "k3": 0.25 - 1 + math.log(4)}
    for estimator, value in expected.items():
        assert kl(policy, reference, estimator).item() == pytest.approx(value, abs=1e-12)


def test_derivatives_by_hand() -> None:
    """At r = -log 2: dk1 = 1, dk2 = r, dk3 = 1 - exp(-r) = -1. Tolerance 1e-12."""
    r = -math.log(2)
    for estimator, slope in {"k1": 1.0, "k2": r, "k3": -1.0}.items():
        assert gradient_at(estimator, r, torch.float64)[1] == pytest.approx(slope, abs=1e-12)


@settings(deadline=None, max_examples=100)
@given(r=LOG_RATIOS)
def test_k3_is_never_negative_and_finite_with_a_finite_gradient(r: float) -> None:
    value, slope = gradient_at("k3", r)
    assert value >= 0.0
    assert math.isfinite(value)
    assert math.isfinite(slope)


@settings(deadline=None, max_examples=100)
@given(r=st.floats(-59.0, 300.0))
def test_k3_equals_its_definition_down_to_minus_sixty(r: float) -> None:
    """float64, relative 1e-12 with one rounding of r as the absolute error."""
    assert k3(torch.tensor(r, dtype=torch.float64)).item() == pytest.approx(
        math.expm1(-r) + r, rel=1e-12, abs=4e-16 * abs(r)
    )


@pytest.mark.parametrize("r", [-50.0, 50.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_is_finite_at_log_ratios_of_fifty(estimator: Estimator, r: float) -> None:
    """Value and slope by their formulas, relative 1e-5: float32, whose exp(50) has lost some digits."""
    value, slope = gradient_at(estimator, r)
    expected = {"k1": r, "k2": 1250.0, "k3": math.exp(-r) - 1 + r}[estimator]
    assert value == pytest.approx(expected, rel=1e-5)
    assert slope == pytest.approx({"k1": 1.0, "k2": r, "k3": 1 - math.exp(-r)}[estimator], rel=1e-5)


def test_k3_goes_on_as_its_tangent_below_minus_sixty() -> None:
    """k3(-60) = exp(60) - 61, slope 1 - exp(60): at -70 that is exp(60) - 61 + 10 (exp(60) - 1). Relative 1e-12."""
    value, slope = gradient_at("k3", -70.0, torch.float64)
    assert value == pytest.approx(11 * math.exp(60) - 71, rel=1e-12)
    assert slope == pytest.approx(1 - math.exp(60), rel=1e-12)
    assert gradient_at("k3", -60.0, torch.float64)[1] == pytest.approx(1 - math.exp(60), rel=1e-12)


def test_k3_is_right_near_zero() -> None:
    """r^2/2 - r^3/6 at r = 1e-4: exp(-r) - 1 + r done naively in float32 is off by 10x. Absolute 1e-4 * 2^-23."""
    r = torch.tensor(1e-4)
    assert k3(r).item() == pytest.approx(0.5e-8 - 1e-12 / 6, abs=1e-4 * 2**-23)
    assert k3(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert gradient_at("k3", 0.0)[1] == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rounding_makes_no_k3_negative(dtype: torch.dtype) -> None:
    """A dense grid near zero, where expm1(-r) and r nearly cancel and the rounding of either can tip the sum."""
    r = torch.logspace(-12, 0, 20_001, dtype=torch.float64)
    assert k3(torch.cat([r, -r]).to(dtype)).min() >= 0.0


def test_infinite_log_ratios_are_infinite_not_nan() -> None:
    infinite = torch.tensor([-torch.inf, torch.inf])
    assert k3(infinite).tolist() == [math.inf, math.inf]
    assert k2(infinite).tolist() == [math.inf, math.inf]
    assert k1(infinite).tolist() == [-math.inf, math.inf]


@settings(deadline=None, max_examples=50)
@given(r=st.floats(0.01, 20.0), further=st.floats(0.01, 5.0), sign=st.sampled_from([-1.0, 1.0]))
def test_moving_a_token_away_from_the_reference_raises_k2_and_k3(r: float, further: float, sign: float) -> None:
    for estimator in ("k2", "k3"):
        near, far = (gradient_at(estimator, sign * d, torch.float64)[0] for d in (r, r + further))
        assert far > near


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_log_probs_have_no_kl(estimator: Estimator) -> None:
    same = torch.tensor([[-0.1, -3.0], [-700.0, 0.0]])
    assert torch.equal(kl(same, same.clone(), estimator), torch.zeros(2, 2))


def masked_case() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, reference and mask; the second and the last slot hold rubbish."""
    policy = torch.tensor([-1.0, torch.nan, -2.0, -torch.inf], dtype=torch.float64)
    reference = torch.tensor([-1.5, torch.inf, torch.log(torch.tensor(0.3)), torch.nan], dtype=torch.float64)
    return policy, reference, torch.tensor([True, False, True, False])


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_masked_slots_change_neither_value_nor_gradient(estimator: Estimator, unbiased: bool) -> None:
    policy, reference, mask = masked_case()
    sequences, weights = torch.zeros(4, dtype=torch.int64), torch.tensor([1.5, torch.nan, 0.5, torch.inf]).double()

    def run(keep: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = slice(None) if keep is None else keep
        leaf = policy[rows].clone().requires_grad_()
        value = kl_in_loss(
            leaf,
            reference[rows],
            estimator,
            unbiased=unbiased,
            sequences=sequences[rows],
            mask=mask if keep is None else None,
            weights=weights[rows],
        )
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    with_rubbish, without = run(None), run(mask)
    for found, expected in zip(with_rubbish, without, strict=True):
        assert torch.equal(found[mask], expected)
        assert torch.equal(found[~mask], torch.zeros(2, dtype=torch.float64))


def test_unbiased_gradient_by_hand() -> None:
    """Two rollouts, interleaved: a of three tokens with r = 1, 2, 3, b of one token with r = 4; k1. Exact.

    Own r plus the later ones of the same rollout: a: 1+2+3 = 6, 2+3 = 5, 3; b: 4. The value is r.
    """
    policy = torch.tensor([1.0, 4.0, 2.0, 3.0], requires_grad=True)
    loss = kl_in_loss(policy, torch.zeros(4), "k1", unbiased=True, sequences=torch.tensor([9, 2, 9, 9]))
    assert loss.tolist() == [1.0, 4.0, 2.0, 3.0]
    assert torch.autograd.grad(loss.sum(), policy)[0].tolist() == [6.0, 4.0, 5.0, 3.0]


def test_unbiased_gradient_of_k3_by_hand() -> None:
    """Log-ratios log 2, log 4: own r plus the later k3 = 1/4 - 1 + log 4: log 8 - 3/4, and log 4. Tolerance 1e-12."""
    policy = torch.tensor([2.0, 4.0], dtype=torch.float64).log().requires_grad_()
    loss = kl_in_loss(policy, torch.zeros(2).double(), "k3", unbiased=True, sequences=torch.zeros(2, dtype=torch.int64))
    expected = torch.tensor([math.log(8) - 0.75, math.log(4)], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), policy)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_sequence_cut_over_calls_has_the_gradient_of_the_whole(estimator: Estimator) -> None:
    """Its end first: the sum of what those calls returned is what follows. Bit for bit, exact binary fractions."""
    reference = torch.zeros(4, dtype=torch.float64)
    policy = torch.tensor([-0.5, 0.25, -1.0, 2.0], dtype=torch.float64).requires_grad_()
    one = torch.zeros(4, dtype=torch.int64)
    whole = kl_in_loss(policy, reference, estimator, unbiased=True, sequences=one)
    end = kl_in_loss(policy[2:], reference[2:], estimator, unbiased=True, sequences=one[2:])
    later = torch.full((2,), float(end.detach().sum()), dtype=torch.float64)
    front = kl_in_loss(policy[:2], reference[:2], estimator, unbiased=True, sequences=one[:2], later=later)
    assert torch.equal(torch.cat([front, end]), whole)
    found, wanted = (torch.autograd.grad(loss.sum(), policy)[0] for loss in (torch.cat([front, end]), whole))
    torch.testing.assert_close(found, wanted, rtol=1e-15, atol=0.0)
    alone = kl_in_loss(policy[:2], reference[:2], estimator, unbiased=True, sequences=one[:2])
    assert not torch.allclose(torch.autograd.grad(alone.sum(), policy)[0][:2], wanted[:2])
    with pytest.raises(ForestError, match=r"later must have the shape of the log-probs \[2\]: found \[1\]"):
        kl_in_loss(policy[:2], reference[:2], estimator, unbiased=True, sequences=one[:2], later=later[:1])


def test_weights_multiply_value_and_gradient_and_get_none() -> None:
    """Biased k2 at r = 3 with weight 0.5: value 0.5 * 4.5, slope 0.5 * 3."""
    policy, weights = torch.tensor([3.0], requires_grad=True), torch.tensor([0.5], requires_grad=True)
    loss = kl_in_loss(policy, torch.zeros(1), "k2", unbiased=False, weights=weights)
    assert loss.item() == 2.25
    loss.sum().backward()
    assert policy.grad is not None
    assert policy.grad.item() == 1.5
    assert weights.grad is None


def test_the_reference_gets_no_gradient_from_the_loss_and_the_penalty_gives_none() -> None:
    policy, reference = (torch.tensor([x], requires_grad=True) for x in (-1.0, -2.0))
    for unbiased in (False, True):
        loss = kl_in_loss(policy, reference, "k3", unbiased=unbiased, sequences=torch.tensor([0]))
        assert torch.autograd.grad(loss.sum(), [policy, reference], allow_unused=True)[1] is None
    assert not kl_penalty(policy, reference, coef=0.1).requires_grad


def test_penalty_is_the_coefficient_times_the_estimate() -> None:
    policy, reference = torch.tensor([-1.0, -0.5]), torch.tensor([-3.0, -0.25])
    for estimator in ESTIMATORS:
        found = kl_penalty(policy, reference, coef=0.25, estimator=estimator)
        assert torch.equal(found, 0.25 * kl(policy, reference, estimator))


SEQUENCED = st.lists(st.tuples(st.integers(-3, 3), st.integers(-64, 64)), max_size=24)


@settings(deadline=None, max_examples=50)
@given(tokens=SEQUENCED)
def test_sum_of_later_equals_a_double_loop(tokens: list[tuple[int, int]]) -> None:
    """Small integers: float sums are exact, so equality is."""
    expected = [
        float(sum(value for other, value in tokens[i + 1 :] if other == sequence))
        for i, (sequence, _) in enumerate(tokens)
    ]
    sequences = torch.tensor([s for s, _ in tokens], dtype=torch.int64)
    assert sum_of_later(torch.tensor([float(v) for _, v in tokens]), sequences).tolist() == expected


def test_a_sequence_that_explodes_leaves_the_others_alone() -> None:
    values, sequences = torch.tensor([0.1, 1e30, 0.2, torch.inf, 0.3]), torch.tensor([0, 1, 0, 1, 0])
    alone = sum_of_later(values[sequences == 0], torch.zeros(3, dtype=torch.int64))
    assert torch.equal(sum_of_later(values, sequences)[sequences == 0], alone)


def test_rows_of_a_table_are_read_as_the_flat_tokens_are() -> None:
    values, sequences = torch.arange(6.0).view(2, 3), torch.tensor([[0, 0, 0], [1, 1, 1]])
    assert sum_of_later(values, sequences).tolist() == [[3.0, 2.0, 0.0], [9.0, 5.0, 0.0]]


def test_what_does_not_fit_is_refused() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(ForestError, match=r"reference_log_probs .*\[2\]: found \[3\]"):
        kl(two, three)
    with pytest.raises(ForestError, match=r"mask .*\[2\]: found \[3\]"):
        kl(two, two, mask=three.bool())
    with pytest.raises(TypeError, match=r"mask must be bool: found torch.float32"):
        kl(two, two, mask=two)
    with pytest.raises(ConfigError, match="'k4'"):
        kl(two, two, "k4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float16"):
        kl(two.half(), two.half(), "k3")
    with pytest.raises(ConfigError, match="needs `sequences`"):
        kl_in_loss(two, two, unbiased=True)
    with pytest.raises(ForestError, match=r"weights .*\[2\]: found \[3\]"):
        kl_in_loss(two, two, unbiased=False, weights=three)
    with pytest.raises(ForestError, match=r"sequences .*\[2\]: found \[3\]"):
        kl_in_loss(two, two, unbiased=True, sequences=three.long())


def test_no_token_at_all_is_legal() -> None:
    empty = torch.zeros(0)
    for estimator in ("k1", "k3"):
        assert kl_in_loss(empty, empty, estimator, unbiased=True, sequences=empty.long()).shape == (0,)
