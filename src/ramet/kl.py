"""How far a policy is from its reference: estimators of KL(policy, reference) per sampled token.

The policy is pi, the reference is rho, and r = log pi - log rho is the log-ratio of a token sampled from pi. Moving
the policy away from the reference raises the penalty, descent on the penalty lowers it. The estimators are those of
http://joschu.net/blog/kl-approx.html::

                        mean over pi      gradient of the estimate itself, in expectation over pi
    k1 = r              the KL, exactly   zero: useless in a loss, right in a reward
    k2 = r^2 / 2        not the KL        the KL's, with the states before each token held fixed
    k3 = exp(-r)-1+r    the KL, exactly   that of KL(reference, policy), with the states held fixed

"The states held fixed" means: what a token does to the KL of the tokens *after* it is left out. For one token,
nothing is left out and k2's gradient is exact. For sequences it is not, and `kl_in_loss(..., unbiased=True)` puts it
back::

    grad KL = E[ sum_t  grad log pi(t) * (r(t) + sum_{s>t} k(s)) ],   k = k1 or k3

The sequence is all that the policy samples in one episode, each token once, in order of time; where an episode goes on
in a rollout of its own (its past was rewritten), the later tokens are there as well. Counting those of a token's own
rollout alone would be off by 26% on the 21 episodes of tests/test_learner.py.

Every ingredient is proved by enumeration in tests/test_enumerated.py. There, on a model of 15 sequences of up to 3
tokens, the expected gradients are off by this much, |g - exact| / |exact|::

    k1 100%     k2 14%     k3 46%     unbiased, k1 or k3: 0 (to 1e-12)
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

import torch
from torch import Tensor

from ramet.errors import ConfigError, ForestError

Estimator = Literal["k1", "k2", "k3"]

STEEPEST = 60.0
"""Below a log-ratio of -60, `k3` goes on as its tangent: exp(60) = 1.1e26 is well inside float32, exp(89) is not."""


def k1(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio r itself, any shape: right on average, below zero for some tokens.

    >>> k1(torch.tensor([-0.5, 0.0, 2.0]))
    tensor([-0.5000,  0.0000,  2.0000])
    """
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return r^2 / 2, any shape: never below zero, not the KL on average, its gradient is the token's KL gradient.

    >>> k2(torch.tensor([-0.5, 0.0, 2.0]))
    tensor([0.1250, 0.0000, 2.0000])
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-r) - 1 + r, any shape: never below zero and right on average.

    Near zero the error is one rounding of r, not of 1. Below r = -60 the curve goes on as the straight line that
    touches it there, of slope 1 - exp(60), so that value and gradient stay finite in float32. Finite is not harmless:
    at r = -50 the gradient is 5e21. float16 can not hold that and is refused.

    >>> k3(torch.tensor([-1.0, 0.0, 1.0]))   # e - 2, 0, 1/e
    tensor([0.7183, 0.0000, 0.3679])
    >>> k3(torch.tensor([-1000.0, -50.0, 50.0])).isfinite().all()
    tensor(True)
    """
    if log_ratio.dtype is torch.float16:
        raise TypeError("k3 needs the range of float32: found log-probs in float16; give them as .float()")
    curve = torch.expm1(-log_ratio.clamp(min=-STEEPEST)) + log_ratio.clamp(min=-STEEPEST)
    beyond = math.expm1(STEEPEST) * torch.relu(-STEEPEST - log_ratio)
    # The exact k3 is not negative. Whether the sum can round below zero is up to the device's expm1: leave it no say.
    return (curve + beyond).clamp(min=0.0)


def kl(
    log_probs: Tensor, reference_log_probs: Tensor, estimator: Estimator = "k3", *, mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy, reference) for each sampled token.

    `log_probs` and `reference_log_probs` are float, of one shape (flat [M], or any other), of tokens sampled from the
    policy; both get gradients (detach the reference). `mask` is bool of that shape: where it is False the result is
    0, whatever is there, NaN included. Raises `ForestError` where shapes differ.

    Used as it is for KL in a reward and for logging; for the loss read `kl_in_loss`.
    http://joschu.net/blog/kl-approx.html

    >>> policy, reference = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    >>> kl(policy, reference, "k1")          # log 1, log 1/2
    tensor([ 0.0000, -0.6931])
    >>> kl(policy, reference, "k3")          # 0, 2 - 1 - log 2
    tensor([0.0000, 0.3069])
    """
    _check("reference_log_probs", reference_log_probs, log_probs)
    log_ratio = _unmasked(log_probs, mask) - _unmasked(reference_log_probs, mask)
    match estimator:
        case "k1":
            return k1(log_ratio)
        case "k2":
            return k2(log_ratio)
        case "k3":
            return k3(log_ratio)
        case _:
            if estimator in ("k1", "k2", "k3"):
                assert_never(estimator)
            raise ConfigError(f"no KL estimator is named {estimator!r}", hint="use k1, k2 or k3")


def kl_penalty(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    *,
    coef: float,
    estimator: Estimator = "k1",
    mask: Tensor | None = None,
) -> Tensor:
    """Return what each token costs in reward, `coef * kl(...)`, detached: subtract it from the reward.

    Subtracting the sum over a rollout of the k1 penalties from its score, before the advantages, gives exactly the
    gradient of E[score] - coef * KL(policy, reference) over sequences. k2 and k3 do not, in a reward: their own
    gradient is missing there. Shapes and errors as in `kl`. Do not also use `kl_in_loss`: that would count the
    penalty twice.

    >>> kl_penalty(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]), coef=0.1)
    tensor([0.0500, 0.0000])
    """
    return coef * kl(log_probs, reference_log_probs, estimator, mask=mask).detach()


def kl_in_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    estimator: Estimator = "k3",
    *,
    unbiased: bool,
    sequences: Tensor | None = None,
    later: Tensor | None = None,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return a per-token loss whose value estimates KL(policy, reference) and whose gradient pulls it down.

    Floats of one shape (flat [M], or any other), as in `kl`; the reference gets no gradient. Reduce like the rest of
    the loss.

    `unbiased=False`: the estimate's own gradient, cheap and biased (table at the top of this file): k2 is exact for
    the token alone, k3 descends KL(reference, policy), k1 has no gradient in expectation.

    `unbiased=True`: the expected gradient of the sum over a sequence is the exact gradient of the sequence's KL, on
    samples of the current policy. It needs `sequences`, int64 of the same shape: which episode each token belongs to,
    each episode's tokens in order of time; episodes may be interleaved. All that the policy samples in an episode is
    one sequence, whatever an environment says in between, and where it goes on in a rollout of its own likewise: leave
    out what follows in other rollouts, and the gradient is off by grad log pi times the KL there. Where an episode is
    cut over calls, take its end first, and give `later`, float of the same shape and taken as data: the sum of what
    the calls for the later tokens of its episode returned. k1 or k3 (less noise); k2 does not estimate the KL and is
    refused. Exact under a constant denominator (`losses.constant_mean`); denominators that depend on the sampled
    lengths, `sequence_mean` and `token_mean`, change the objective.

    `weights`, float, taken as data: importance weights for tokens that another policy sampled. The unbiased gradient
    stays exact with the likelihood ratio current/sampler of each token's whole sequence, or of its prefix up to and
    with the token; the ratio of the token alone, or a truncated one, is an approximation.

    Raises `ForestError` where shapes differ, `ConfigError` for unbiased k2 or unbiased without `sequences`.

    >>> policy = torch.tensor([-1.0, -2.0]).requires_grad_()
    >>> loss = kl_in_loss(policy, torch.tensor([-1.5, -1.0]), "k1", unbiased=True, sequences=torch.tensor([7, 7]))
    >>> loss
    tensor([ 0.5000, -1.0000], grad_fn=<AddBackward0>)
    >>> torch.autograd.grad(loss.sum(), policy)      # 0.5 - 1.0 for the first token and what follows it; -1.0
    (tensor([-0.5000, -1.0000]),)
    """
    _check("reference_log_probs", reference_log_probs, log_probs)
    reference = reference_log_probs.detach()
    weight = torch.ones_like(log_probs) if weights is None else _check("weights", weights, log_probs)
    weight = _unmasked(weight.detach(), mask)
    if not unbiased:
        return weight * kl(log_probs, reference, estimator, mask=mask)
    if estimator == "k2":
        raise ConfigError("the mean of k2 is not the KL, so there is no unbiased k2", hint="use k3, or unbiased=False")
    if sequences is None:
        raise ConfigError(
            "unbiased KL needs `sequences`, the episode of each token: found None",
            hint="a token's gradient counts the KL of the tokens after it in the same episode",
        )
    _check("sequences", sequences, log_probs)
    value = weight * kl(log_probs.detach(), reference, estimator, mask=mask)
    own = weight * kl(log_probs.detach(), reference, "k1", mask=mask)
    policy = _unmasked(log_probs, mask)
    follows = sum_of_later(value, sequences)
    if later is not None:
        follows = follows + _unmasked(_check("later", later, log_probs).detach(), mask)
    # `policy - policy.detach()` is zero with the gradient of the log-probs: value and gradient are chosen apart.
    return value + (own + follows) * (policy - policy.detach())


def sum_of_later(values: Tensor, sequences: Tensor) -> Tensor:
    """Sum, for each token, what the later tokens of its sequence hold; 0 for the last one.

    `values` float and `sequences` int64 ids, of one shape (read row by row if not flat); a sequence's tokens are in
    order of time but need not be neighbours. A sequence's result does not depend on the others, whatever they hold.

    >>> sum_of_later(torch.tensor([1.0, 10.0, 2.0, 3.0]), torch.tensor([0, 5, 0, 0]))
    tensor([5., 0., 3., 0.])
    """
    _check("sequences", sequences, values)
    if values.numel() == 0:
        return values.clone()
    flat = values.flatten()
    order = torch.argsort(sequences.flatten(), stable=True)
    _, counts = torch.unique_consecutive(sequences.flatten()[order], return_counts=True)
    row = torch.repeat_interleave(torch.arange(len(counts), device=flat.device), counts)
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[row]
    # One row per sequence, one empty column at the end: a running sum over all would leak rounding between sequences.
    table = flat.new_zeros(len(counts), int(counts.max()) + 1)
    table[row, place] = flat[order]
    rest = table.flip(1).cumsum(1).flip(1)
    result = torch.empty_like(flat)
    result[order] = rest[row, place + 1]
    return result.view(values.shape)


def _check(name: str, found: Tensor, log_probs: Tensor) -> Tensor:
    if found.shape != log_probs.shape:
        expected = list(log_probs.shape)
        raise ForestError(f"{name} must have the shape of the log-probs {expected}: found {list(found.shape)}")
    return found


def _unmasked(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Put 0 in masked slots *before* anything is computed: NaN times 0 is NaN, forward and backward."""
    if mask is None:
        return tensor
    if mask.dtype is not torch.bool:
        raise TypeError(f"mask must be bool: found {mask.dtype}")
    _check("mask", mask, tensor)
    return torch.where(mask, tensor, torch.zeros_like(tensor))
