"""Proofs by enumeration: expected gradients of the estimators against autograd on the exact objective.

The model is a table of logits per prefix: tokens 0 and 1, and 2 ends a sequence; the third token ends it too. That
makes 15 sequences: (2), (0 2), (1 2) and twelve of three tokens. An expectation is a sum over all of them, or over all
groups of G of them, so nothing here is random and every tolerance (1e-12, float64) is rounding alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ramet.advantages import group_mean, leave_one_out
from ramet.errors import ConfigError
from ramet.kl import Estimator, kl, kl_in_loss, kl_penalty
from ramet.losses import (
    clipped,
    constant_mean,
    importance_weights,
    mismatch,
    policy_gradient,
    sequence_lengths,
    sequence_mean,
    token_mean,
)

END, LONGEST = 2, 3
PREFIXES = [prefix for n in range(LONGEST) for prefix in itertools.product((0, 1), repeat=n)]
SEQUENCES = [
    (*prefix, token) for prefix in PREFIXES for token in (0, 1, END) if token == END or len(prefix) == LONGEST - 1
]
MASK = torch.tensor([[t < len(s) for t in range(LONGEST)] for s in SEQUENCES])
STATE = torch.tensor([[PREFIXES.index(s[:t]) if t < len(s) else 0 for t in range(LONGEST)] for s in SEQUENCES])
TOKEN = torch.tensor([[s[t] if t < len(s) else 0 for t in range(LONGEST)] for s in SEQUENCES])
ROW = torch.arange(len(SEQUENCES))[:, None].expand(-1, LONGEST)
SCORES = torch.cos(2.3 * torch.arange(len(SEQUENCES), dtype=torch.float64))


def table(phase: float) -> Tensor:
    """Logits [7, 3] of some model."""
    return 1.2 * torch.sin(phase + 1.7 * torch.arange(len(PREFIXES) * 3, dtype=torch.float64)).view(-1, 3)


POLICY, REFERENCE, SAMPLER = table(0.0), table(0.6), table(-0.4)


def token_log_probs(logits: Tensor) -> Tensor:
    """Log-probs of every token of every sequence [15, 3]; NaN after the end, so that a mask that leaks is seen."""
    return torch.where(MASK, logits.log_softmax(1)[STATE, TOKEN], torch.nan)


def probabilities(logits: Tensor) -> Tensor:
    """The probability of each sequence [15]."""
    return torch.where(MASK, token_log_probs(logits), 0.0).sum(1).exp()


def per_row(values: Tensor) -> Tensor:
    """The same value at each token of a row."""
    return values[:, None].expand(-1, LONGEST)


def gradient(objective: Callable[[Tensor], Tensor], at: Tensor = POLICY) -> Tensor:
    logits = at.clone().requires_grad_()
    return torch.autograd.grad(objective(logits), logits)[0]


def mean_over(distribution: Tensor, per_token: Tensor) -> Tensor:
    """The expectation of the sum over a sequence's tokens, the distribution held fixed as sampling holds it."""
    return (distribution.detach() * torch.where(MASK, per_token, 0.0).sum(1)).sum()


def expected_score(logits: Tensor) -> Tensor:
    return (probabilities(logits) * SCORES).sum()


def exact_kl(logits: Tensor) -> Tensor:
    p, q = probabilities(logits), probabilities(REFERENCE)
    return (p * (p.log() - q.log())).sum()


def assert_exact(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_the_enumeration_is_complete() -> None:
    assert len(SEQUENCES) == 15
    for logits in (POLICY, REFERENCE, SAMPLER):
        assert_exact(probabilities(logits).sum(), torch.tensor(1.0, dtype=torch.float64))


# Policy gradients ----------------------------------------------------------------------------------------------------


def group_gradient(
    size: int, advantages: Callable[[Tensor, Tensor], Tensor], scores: Tensor = SCORES, *, by_length: bool = False
) -> Tensor:
    """The expected gradient of the loss over all groups of `size` sequences, each group weighted by its probability."""
    members = torch.cartesian_prod(*[torch.arange(len(SEQUENCES))] * size)
    rows, groups = members.flatten(), torch.arange(len(members)).repeat_interleave(size)
    chance = probabilities(POLICY)[members].prod(1).repeat_interleave(size)
    advantage = advantages(scores[rows], groups)

    def loss(logits: Tensor) -> Tensor:
        per_token = policy_gradient(
            token_log_probs(logits)[rows], per_row(advantage), mask=MASK[rows], weights=per_row(chance)
        )
        if by_length:
            lengths = sequence_lengths(per_row(torch.arange(len(rows))), mask=MASK[rows])
            return sequence_mean(per_token, lengths, sequences=size, mask=MASK[rows])
        return constant_mean(per_token, sequences=size, max_tokens=1, mask=MASK[rows])

    return gradient(loss)


def test_policy_gradient_without_a_baseline_is_exact() -> None:
    found = gradient(
        lambda x: mean_over(probabilities(POLICY), policy_gradient(token_log_probs(x), per_row(SCORES), mask=MASK))
    )
    assert_exact(found, -gradient(expected_score))


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_is_exact(size: int) -> None:
    assert_exact(group_gradient(size, leave_one_out), -gradient(expected_score))


@pytest.mark.parametrize("size", [2, 3])
def test_group_mean_is_the_exact_gradient_times_one_minus_one_over_g(size: int) -> None:
    expected = -(size - 1) / size * gradient(expected_score)
    assert_exact(group_gradient(size, group_mean), expected)


def test_unanimous_groups_are_no_exception() -> None:
    """With scores of 0 and 1 most groups have no variance: setting them to zero costs no bias."""
    scores = (SCORES > 0).double()
    found = group_gradient(2, leave_one_out, scores)
    assert_exact(found, -gradient(lambda x: (probabilities(x) * scores).sum()))


def test_scaling_by_std_and_dividing_by_length_change_the_objective() -> None:
    """Documented biases: no rescaling of either gradient gives the exact one (their angles to it are not zero)."""
    exact = -gradient(expected_score)
    scaled = group_gradient(3, lambda s, g: group_mean(s, g, scale_by_std=True))
    shortened = group_gradient(2, leave_one_out, by_length=True)
    for found in (scaled, shortened):
        cosine = float(torch.nn.functional.cosine_similarity(found.flatten(), exact.flatten(), dim=0))
        assert 0.8 < cosine < 0.999


def test_clipped_at_ratio_one_is_the_policy_gradient() -> None:
    start = token_log_probs(POLICY)
    found = gradient(
        lambda x: mean_over(probabilities(POLICY), clipped(token_log_probs(x), start, per_row(SCORES), mask=MASK))
    )
    assert_exact(found, -gradient(expected_score))


# Groups of two under their own objective ------------------------------------------------------------------------------

LOW, HIGH = 0.2, 0.3
CASES = {
    "policy gradient": ("policy_gradient", POLICY),
    "clipped at ratio one": ("clipped", POLICY),
    "clipped off ratio one": ("clipped", SAMPLER),
}
"""The loss, and the sampler, which is also where the batch starts."""


def by_hand(kind: str, mine: float, other: float) -> float:
    """The advantage over the other member of a group of two, whose sample standard deviation is |mine - other| / √2."""
    if kind == "leave_one_out":
        return mine - other
    return (mine - other) / 2 / (abs(mine - other) / math.sqrt(2) + 1e-6 if kind == "group_mean_std" else 1)


def objective_of_pairs(logits: Tensor, sampler: Tensor, advantage: str, reduction: str) -> Tensor:
    """The sum over all pairs of P(pair) * sum of min(ratio A, clip(ratio) A) / denominator, token by token."""
    table = (logits.log_softmax(1) - sampler.log_softmax(1)).exp()
    ratios = [[table[PREFIXES.index(s[:t]), token] for t, token in enumerate(s)] for s in SEQUENCES]
    chances, scores = probabilities(sampler).tolist(), SCORES.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(len(SEQUENCES)), repeat=2):
        for mine, other in (pair, pair[::-1]):
            gain, length = by_hand(advantage, scores[mine], scores[other]), len(SEQUENCES[mine])
            denominator = {
                "constant_mean": 2 * LONGEST,
                "sequence_mean": 2 * length,
                "token_mean": length + len(SEQUENCES[other]),
            }[reduction]
            weight = chances[mine] * chances[other] / denominator
            for ratio in ratios[mine]:
                held = 1 - LOW if ratio < 1 - LOW else 1 + HIGH if ratio > 1 + HIGH else ratio
                total = total + weight * min(ratio * gain, held * gain)
    return total


def estimate_of_pairs(case: str, advantage: str, reduction: str) -> Tensor:
    """The expected gradient of the loss of a batch that is one pair, each pair a batch with its own denominator."""
    kind, sampler = CASES[case]
    pairs = torch.cartesian_prod(*[torch.arange(len(SEQUENCES))] * 2)
    rows, groups = pairs.flatten(), torch.arange(len(pairs)).repeat_interleave(2)
    start, chances, mask = token_log_probs(sampler)[rows], probabilities(sampler)[pairs].prod(1), MASK[rows]
    estimator = {
        "leave_one_out": leave_one_out,
        "group_mean": group_mean,
        "group_mean_std": functools.partial(group_mean, scale_by_std=True),
    }[advantage]
    gains = per_row(estimator(SCORES[rows], groups))

    def loss(logits: Tensor) -> Tensor:
        current = token_log_probs(logits)[rows]
        if kind == "clipped":
            per_token = clipped(current, start, gains, clip_low=LOW, clip_high=HIGH, mask=mask)
        else:
            per_token = policy_gradient(current, gains, mask=mask)
        batches = zip(per_token.split(2), mask.split(2), strict=True)
        return torch.stack([reduced(*batch, reduction) for batch in batches]) @ chances

    return gradient(loss)


def reduced(per_token: Tensor, mask: Tensor, reduction: str) -> Tensor:
    if reduction == "constant_mean":
        return constant_mean(per_token, sequences=2, max_tokens=LONGEST, mask=mask)
    if reduction == "token_mean":
        return token_mean(per_token, tokens=int(mask.sum()), mask=mask)
    lengths = sequence_lengths(per_row(torch.arange(2)), mask=mask)
    return sequence_mean(per_token, lengths, sequences=2, mask=mask)


@pytest.mark.parametrize("reduction", ["constant_mean", "sequence_mean", "token_mean"])
@pytest.mark.parametrize("advantage", ["leave_one_out", "group_mean", "group_mean_std"])
@pytest.mark.parametrize("case", CASES)
def test_each_loss_advantage_and_reduction_is_exact_for_its_own_objective(
    case: str, advantage: str, reduction: str
) -> None:
    """The objective written out in plain loops over the 225 pairs, differentiated by autograd."""
    exact = gradient(lambda x: objective_of_pairs(x, CASES[case][1], advantage, reduction))
    assert exact.abs().max() > 1e-3
    assert_exact(estimate_of_pairs(case, advantage, reduction), -exact)


def test_off_ratio_one_the_cut_changes_the_gradient() -> None:
    """The ratio alone has another gradient; the mean advantage over all partners is the score less the mean score."""
    gains = per_row(SCORES - probabilities(SAMPLER) @ SCORES)
    plain = gradient(
        lambda x: mean_over(probabilities(SAMPLER), (token_log_probs(x) - token_log_probs(SAMPLER)).exp() * gains)
    )
    found = LONGEST * estimate_of_pairs("clipped off ratio one", "leave_one_out", "constant_mean")
    assert relative(found, -plain) > 0.1


@pytest.mark.parametrize("case", ["policy gradient", "clipped at ratio one"])
def test_of_the_reductions_only_the_constant_one_descends_the_plain_objective(case: str) -> None:
    """It is the exact gradient divided by its constant; no rescaling of the two others is (documented biases)."""
    exact = -gradient(expected_score)
    assert_exact(estimate_of_pairs(case, "leave_one_out", "constant_mean"), exact / LONGEST)
    for reduction in ("sequence_mean", "token_mean"):
        found = estimate_of_pairs(case, "leave_one_out", reduction)
        cosine = float(torch.nn.functional.cosine_similarity(found.flatten(), exact.flatten(), dim=0))
        assert 0.8 < cosine < 0.999


def test_scaling_pairs_by_std_climbs_the_rate_of_beating_ones_frozen_self() -> None:
    """P(better) - P(worse) against the sampler held fixed, over √2: by how much better does not matter."""
    rivals = probabilities(POLICY)
    better = (SCORES[:, None] - SCORES[None, :]).sign()
    exact = gradient(lambda x: probabilities(x) @ better @ rivals)
    found = group_gradient(2, functools.partial(group_mean, scale_by_std=True, eps=0.0))
    assert_exact(found, -exact / math.sqrt(2))


# Samples of another policy -------------------------------------------------------------------------------------------


def log_ratios() -> Tensor:
    return torch.where(MASK, token_log_probs(POLICY) - token_log_probs(SAMPLER), 0.0)


def off_policy(weights: Tensor) -> Tensor:
    return gradient(
        lambda x: mean_over(
            probabilities(SAMPLER), policy_gradient(token_log_probs(x), per_row(SCORES), mask=MASK, weights=weights)
        )
    )


def test_the_likelihood_ratio_of_the_sequence_makes_samples_of_another_policy_exact() -> None:
    found = off_policy(per_row(log_ratios().sum(1).exp()))
    assert_exact(found, -gradient(expected_score))


def test_uncapped_importance_weights_are_exact_for_single_tokens() -> None:
    """Sequences of one token: three of them, the first distribution of each table."""
    scores = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    start, sampler = POLICY[0].log_softmax(0), SAMPLER[0].log_softmax(0)
    weights = importance_weights(start, sampler, cap=math.inf)
    found = gradient(lambda x: (sampler.exp() * policy_gradient(x[0].log_softmax(0), scores, weights=weights)).sum())
    assert_exact(found, -gradient(lambda x: (x[0].softmax(0) * scores).sum()))


def test_per_token_importance_weights_descend_the_surrogate_and_not_the_objective() -> None:
    """For sequences they follow sum_t ratio(t) * score under the sampler's prefixes: nearer to exact than none."""
    weights = importance_weights(token_log_probs(POLICY), token_log_probs(SAMPLER), cap=math.inf, mask=MASK)
    found = off_policy(weights)
    surrogate = gradient(
        lambda x: mean_over(
            probabilities(SAMPLER), (token_log_probs(x) - token_log_probs(SAMPLER)).exp() * per_row(SCORES)
        )
    )
    assert_exact(found, -surrogate)
    exact, uncorrected = -gradient(expected_score), off_policy(MASK.double())
    assert 0.01 < relative(found, exact) < relative(uncorrected, exact)


# KL: values ----------------------------------------------------------------------------------------------------------


def mean_estimate(estimator: Estimator, logits: Tensor = POLICY) -> Tensor:
    estimate = kl(token_log_probs(logits), token_log_probs(REFERENCE), estimator, mask=MASK)
    return mean_over(probabilities(logits), estimate)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_means_of_k1_and_k3_are_the_exact_kl(estimator: Estimator) -> None:
    assert_exact(mean_estimate(estimator), exact_kl(POLICY))


def test_mean_of_k2_is_not_the_kl() -> None:
    assert abs(float(mean_estimate("k2") / exact_kl(POLICY)) - 1) > 0.01


def test_with_equal_weights_the_ratio_is_one_and_the_kl_is_zero() -> None:
    same = token_log_probs(POLICY)
    assert torch.equal(importance_weights(same, same.clone(), cap=2.0, mask=MASK), MASK.double())
    assert mismatch(same, same.clone(), mask=MASK).kl == 0.0
    for estimator in ("k1", "k2", "k3"):
        assert torch.equal(kl(same, same.clone(), estimator, mask=MASK), torch.zeros(MASK.shape, dtype=torch.float64))
    assert torch.equal(
        clipped(same, same.clone(), per_row(SCORES), mask=MASK), -torch.where(MASK, per_row(SCORES), 0.0)
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_pushing_the_policy_away_raises_the_penalty(estimator: Estimator) -> None:
    """From the reference towards the policy's table and beyond."""
    path = [float(mean_estimate(estimator, REFERENCE + step * (POLICY - REFERENCE))) for step in (0.0, 0.5, 1.0, 2.0)]
    assert path[0] == 0.0
    assert path == sorted(set(path))


# KL: gradients -------------------------------------------------------------------------------------------------------


def kl_gradient(estimator: Estimator, *, unbiased: bool, at: Tensor = POLICY) -> Tensor:
    def loss(logits: Tensor) -> Tensor:
        per_token = kl_in_loss(
            token_log_probs(logits),
            token_log_probs(REFERENCE),
            estimator,
            unbiased=unbiased,
            sequences=ROW,
            mask=MASK,
        )
        return mean_over(probabilities(at), per_token)

    return gradient(loss, at)


def states_held_fixed(divergence: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The gradient of the sum over states of P(state is visited) * divergence at the state, the visits held fixed."""
    visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
    visits.index_add_(0, STATE[MASK], per_row(probabilities(POLICY))[MASK])
    return gradient(lambda x: (visits * divergence(x.log_softmax(1), REFERENCE.log_softmax(1))).sum())


def reverse(policy: Tensor, reference: Tensor) -> Tensor:
    return (policy.exp() * (policy - reference)).sum(1)


def forward(policy: Tensor, reference: Tensor) -> Tensor:
    return (reference.exp() * (reference - policy)).sum(1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_in_the_loss_has_the_exact_gradient_of_the_sequence_kl(estimator: Estimator) -> None:
    assert_exact(kl_gradient(estimator, unbiased=True), gradient(exact_kl))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_in_the_loss_has_the_value_of_the_kl(estimator: Estimator) -> None:
    policy, reference = token_log_probs(POLICY), token_log_probs(REFERENCE)
    found = kl_in_loss(policy, reference, estimator, unbiased=True, sequences=ROW, mask=MASK)
    assert_exact(mean_over(probabilities(POLICY), found), exact_kl(POLICY))


def test_k1_in_the_loss_has_no_gradient() -> None:
    assert_exact(kl_gradient("k1", unbiased=False), torch.zeros_like(POLICY))


def test_k2_in_the_loss_is_exact_with_the_states_held_fixed() -> None:
    assert_exact(kl_gradient("k2", unbiased=False), states_held_fixed(reverse))


def test_k3_in_the_loss_descends_the_other_kl_with_the_states_held_fixed() -> None:
    assert_exact(kl_gradient("k3", unbiased=False), states_held_fixed(forward))


@pytest.mark.parametrize(("estimator", "bias"), [("k1", 1.0), ("k2", 0.14), ("k3", 0.46)])
def test_the_documented_bias_of_kl_in_the_loss(estimator: Estimator, bias: float) -> None:
    """The table at the top of kl.py, to the two digits given there."""
    found = relative(kl_gradient(estimator, unbiased=False), gradient(exact_kl))
    assert found == pytest.approx(bias, abs=0.005)


def test_for_single_tokens_the_gradient_of_k2_is_exact() -> None:
    def first(logits: Tensor) -> Tensor:
        return logits[0].log_softmax(0)

    reference = first(REFERENCE)
    loss = lambda x: (first(POLICY).exp() * kl_in_loss(first(x), reference, "k2", unbiased=False)).sum()  # noqa: E731
    exact = gradient(lambda x: (first(x).exp() * (first(x) - reference)).sum())
    assert_exact(gradient(loss), exact)


def test_unbiased_k2_is_refused() -> None:
    with pytest.raises(ConfigError, match="no unbiased k2"):
        kl_gradient("k2", unbiased=True)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("ratio", ["sequence", "prefix"])
def test_unbiased_kl_in_the_loss_is_exact_on_samples_of_another_policy(estimator: Estimator, ratio: str) -> None:
    log_ratio = log_ratios()
    weights = per_row(log_ratio.sum(1).exp()) if ratio == "sequence" else log_ratio.cumsum(1).exp()

    def loss(logits: Tensor) -> Tensor:
        policy, reference = token_log_probs(logits), token_log_probs(REFERENCE)
        per_token = kl_in_loss(policy, reference, estimator, unbiased=True, sequences=ROW, mask=MASK, weights=weights)
        return mean_over(probabilities(SAMPLER), per_token)

    assert_exact(gradient(loss), gradient(exact_kl))


def descend(estimator: Estimator, *, unbiased: bool) -> list[float]:
    logits, path = POLICY.clone(), [float(exact_kl(POLICY))]
    for _ in range(8):
        logits = logits - 0.5 * kl_gradient(estimator, unbiased=unbiased, at=logits)
        path.append(float(exact_kl(logits)))
    return path


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k3", True), ("k2", False), ("k3", False)])
def test_descent_on_the_penalty_lowers_the_kl(estimator: Estimator, unbiased: bool) -> None:
    path = descend(estimator, unbiased=unbiased)
    assert path == sorted(path, reverse=True)
    assert path[-1] < 0.5 * path[0]


def test_descent_on_the_own_gradient_of_k1_does_nothing() -> None:
    path = descend("k1", unbiased=False)
    assert path[-1] == pytest.approx(path[0], abs=1e-12)


# KL in the reward ----------------------------------------------------------------------------------------------------


def penalised(estimator: Estimator) -> Tensor:
    cost = kl_penalty(token_log_probs(POLICY), token_log_probs(REFERENCE), coef=0.5, estimator=estimator, mask=MASK)
    return group_gradient(2, leave_one_out, SCORES - cost.sum(1))


def test_k1_in_the_reward_has_the_exact_gradient_of_the_penalised_objective() -> None:
    exact = -gradient(lambda x: expected_score(x) - 0.5 * exact_kl(x))
    assert_exact(penalised("k1"), exact)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_are_biased(estimator: Estimator) -> None:
    exact = -gradient(lambda x: expected_score(x) - 0.5 * exact_kl(x))
    assert relative(penalised(estimator), exact) > 0.01
