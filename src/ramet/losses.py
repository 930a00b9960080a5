"""From log-probs and advantages to a number to descend: per-token losses, then one reduction.

Three log-probs of a sampled token meet here: `log_probs`, of the weights that are being trained now, with gradient;
`start_log_probs`, of the trainer's weights at the start of the batch; `sampler_log_probs`, as the sampler reported
them. current/start is the ratio that `clipped` keeps close to 1; start/sampler is the mismatch between two programs
that should agree, and `importance_weights` corrects it.

Tensors are flat over sampled tokens [M], or of any other shape; `mask` is bool, True on tokens that count. What
stands in a masked slot, NaN and inf included, changes neither loss nor gradient. Only `log_probs` gets a gradient:
the rest is data.

A loss is `reduction(per_token(...), denominator)`. The denominator is of the *whole batch* and is passed in, so the
reductions of micro-batches add up to the reduction of the batch, however it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ramet.errors import ForestError
from ramet.kl import k3

LARGEST_LOG_RATIO = 60.0
"""A log-ratio of current to start is held here (exp(60) = 1.1e26): a lost policy gives large numbers, not NaN."""


def policy_gradient(
    log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return -advantage * log-prob for each token: REINFORCE.

    All float, of one shape ([M]); `weights` are importance weights. Raises `ForestError` where shapes differ.

    >>> policy_gradient(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -1.0]))
    tensor([ 0.5000, -2.0000])
    """
    _check(log_probs, advantages=advantages, mask=mask, weights=weights)
    return -_weighted(_data(advantages, mask), weights, mask) * _unmasked(log_probs, mask)


def clipped(
    log_probs: Tensor,
    start_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) per token, ratio = current / start: PPO.

    All float, of one shape ([M]). At ratio 1 the gradient is that of `policy_gradient`; a token whose ratio has left
    the range in the direction of its advantage A has none (see `clip_fraction`). `clip_high > clip_low` leaves more
    room upwards (DAPO, https://arxiv.org/abs/2503.14476). A log-ratio above 60 is held at 60 and has no gradient.

    Raises `ForestError` where shapes differ, `ValueError` for a range that is none. https://arxiv.org/abs/1707.06347

    >>> start = torch.tensor([0.5, 0.5, 0.5]).log()
    >>> now = torch.tensor([0.5, 0.75, 0.75]).log()                  # ratios 1, 1.5, 1.5
    >>> clipped(now, start, torch.tensor([1.0, 1.0, -1.0]))          # the second is held at 1.2
    tensor([-1.0000, -1.2000,  1.5000])
    """
    _check(log_probs, start_log_probs=start_log_probs, advantages=advantages, mask=mask, weights=weights)
    _check_clip(clip_low, clip_high)
    ratio = (_unmasked(log_probs, mask) - _data(start_log_probs, mask)).clamp(max=LARGEST_LOG_RATIO).exp()
    gain = _data(advantages, mask)
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip_low, 1 + clip_high))
    return _weighted(loss, weights, mask)


def clip_fraction(
    log_probs: Tensor,
    start_log_probs: Tensor,
    advantages: Tensor,
    *,
    tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
) -> Tensor:
    """Count the tokens that `clipped` gives no gradient, as a share of `tokens`: a scalar.

    `tokens` is the number that count in the whole batch; the other arguments are those of `clipped`. No gradient
    flows.

    >>> start, now = torch.tensor([0.5, 0.5, 0.5]).log(), torch.tensor([0.5, 0.75, 0.75]).log()
    >>> clip_fraction(now, start, torch.tensor([1.0, 1.0, -1.0]), tokens=3)
    tensor(0.3333)
    """
    _check(log_probs, start_log_probs=start_log_probs, advantages=advantages, mask=mask)
    _check_clip(clip_low, clip_high)
    ratio = (_data(log_probs, mask) - _data(start_log_probs, mask)).exp()
    gain = _data(advantages, mask)
    held = ((gain > 0) & (ratio > 1 + clip_high)) | ((gain < 0) & (ratio < 1 - clip_low))
    return held.sum() / _denominator("tokens", tokens)


def importance_weights(
    start_log_probs: Tensor, sampler_log_probs: Tensor, *, cap: float, mask: Tensor | None = None
) -> Tensor:
    """Return min(start / sampler, cap) for each token: the weights that undo the sampler's mismatch.

    Floats of one shape ([M]); the result is detached, and 0 where masked. `cap` above 0, `math.inf` for none.
    Truncation bounds the variance and biases towards the sampler (truncated importance sampling, Ionides 2008; for
    language models https://fengyao.notion.site/off-policy-rl). The ratio is the token's own: exact for one token, and
    an approximation for the tokens before it that the sampler chose.

    Raises `ForestError` where shapes differ, or where an unmasked log-prob is NaN or infinite: a sampler log-prob
    that is missing is never taken as 0.

    >>> importance_weights(torch.tensor([0.4, 0.5, 0.9]).log(), torch.tensor([0.5, 0.5, 0.3]).log(), cap=2.0)
    tensor([0.8000, 1.0000, 2.0000])
    """
    if not cap > 0:
        raise ValueError(f"cap must be above 0: found {cap}")
    return _unmasked(_log_ratio(start_log_probs, sampler_log_probs, mask).exp().clamp(max=cap), mask)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the trainer's log-probs are from the sampler's, over `tokens` unmasked tokens, for the log.

    `kl` is the mean k3 estimate of KL(sampler, trainer) in nats per token; `largest` the largest |difference| of
    log-probs.
    """

    kl: float
    largest: float
    tokens: int


def mismatch(start_log_probs: Tensor, sampler_log_probs: Tensor, *, mask: Tensor | None = None) -> Mismatch:
    """Measure how far the trainer's log-probs are from the sampler's; all zero when there is no token.

    Shapes and errors as in `importance_weights`.

    >>> mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0]))
    Mismatch(kl=0.0, largest=0.0, tokens=2)
    """
    log_ratio = -_log_ratio(start_log_probs, sampler_log_probs, mask).cpu().double()
    tokens = log_ratio.numel() if mask is None else int(mask.sum())
    if tokens == 0:
        return Mismatch(0.0, 0.0, 0)
    return Mismatch(float(k3(log_ratio).sum() / tokens), float(log_ratio.abs().max()), tokens)


def sequence_mean(per_token: Tensor, lengths: Tensor, *, sequences: int, mask: Tensor | None = None) -> Tensor:
    """Average over each sequence's tokens, then over `sequences`, the number in the whole batch: GRPO. A scalar.

    `per_token` float [M]; `lengths` int64 [M]: for each token, how many tokens that count its *whole* rollout has (see
    `sequence_lengths`), so that a rollout cut into pieces keeps the weight of one. https://arxiv.org/abs/2402.03300

    Raises `ForestError` where shapes differ or an unmasked token's length is below 1.

    >>> losses = torch.tensor([3.0, 5.0, 2.0])                       # (3 + 5)/2 and 2/1, over two sequences
    >>> sequence_mean(losses, torch.tensor([2, 2, 1]), sequences=2)
    tensor(3.)
    """
    _check(per_token, lengths=lengths, mask=mask)
    wrong = (lengths < 1) if mask is None else (lengths < 1) & mask
    if bool(wrong.any()):
        raise ForestError(
            f"the length of a token's sequence is at least 1: found {int(lengths[wrong].min())}",
            hint="mask the tokens of sequences in which no token counts",
        )
    return (_unmasked(per_token, mask) / lengths.clamp(min=1)).sum() / _denominator("sequences", sequences)


def constant_mean(per_token: Tensor, *, sequences: int, max_tokens: int, mask: Tensor | None = None) -> Tensor:
    """Sum and divide by `sequences` of the whole batch times the constant `max_tokens`: Dr. GRPO. A scalar.

    `per_token` float [M]; `max_tokens` is the limit of a rollout's length, not the longest one that was sampled: no
    token's weight depends on how long its rollout came out. https://arxiv.org/abs/2503.20783

    >>> constant_mean(torch.tensor([3.0, 5.0, 2.0]), sequences=2, max_tokens=5)
    tensor(1.)
    """
    _check(per_token, mask=mask)
    denominator = _denominator("sequences", sequences) * _denominator("max_tokens", max_tokens)
    return _unmasked(per_token, mask).sum() / denominator


def token_mean(per_token: Tensor, *, tokens: int, mask: Tensor | None = None) -> Tensor:
    """Average over all tokens alike; `tokens` is the number that count in the whole batch: DAPO. A scalar.

    `per_token` float [M]. https://arxiv.org/abs/2503.14476

    >>> token_mean(torch.tensor([3.0, 5.0, 1.0]), tokens=3)
    tensor(3.)
    """
    _check(per_token, mask=mask)
    return _unmasked(per_token, mask).sum() / _denominator("tokens", tokens)


def sequence_lengths(sequences: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Count, for each token, the tokens of its sequence that count: what `sequence_mean` divides by.

    `sequences` int64 [M], which rollout a token belongs to, in any order; returns int64 [M]. Call it on the whole
    batch, before it is cut into micro-batches.

    >>> sequence_lengths(torch.tensor([4, 9, 4]), mask=torch.tensor([True, True, True]))
    tensor([2, 1, 2])
    """
    _check(sequences, mask=mask)
    ids, row = torch.unique(sequences, return_inverse=True)
    counted = torch.ones_like(row) if mask is None else mask.long()
    return torch.zeros_like(ids).index_add_(0, row.flatten(), counted.flatten())[row]


def _log_ratio(start_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    _check(start_log_probs, sampler_log_probs=sampler_log_probs, mask=mask)
    for name, found in (("sampler", sampler_log_probs), ("start", start_log_probs)):
        broken = ~_data(found, mask).isfinite()
        if bool(broken.any()):
            where = broken.nonzero()[0].tolist()
            raise ForestError(
                f"every token that counts needs a finite {name} log-prob: found {found[broken][0].item()} at {where}, "
                f"{int(broken.sum())} of {found.numel()} tokens",
                hint="mask tokens without a log-prob (greedy decoding has none); give sampler and trainer one support",
            )
    return _data(start_log_probs, mask) - _data(sampler_log_probs, mask)


def _check(like: Tensor, **others: Tensor | None) -> None:
    for name, found in others.items():
        if found is None:
            continue
        if found.shape != like.shape:
            raise ForestError(f"{name} must have the shape of the tokens {list(like.shape)}: found {list(found.shape)}")
        if name == "mask" and found.dtype is not torch.bool:
            raise TypeError(f"mask must be bool: found {found.dtype}")


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"clip_low must be in 0 to 1 and clip_high at least 0: found {clip_low} and {clip_high}")


def _denominator(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1: found {value}; skip a batch in which nothing counts")
    return value


def _unmasked(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Put 0 in masked slots *before* anything is computed: NaN times 0 is NaN, forward and backward."""
    return tensor if mask is None else torch.where(mask, tensor, torch.zeros_like(tensor))


def _data(tensor: Tensor, mask: Tensor | None) -> Tensor:
    return _unmasked(tensor.detach(), mask)


def _weighted(loss: Tensor, weights: Tensor | None, mask: Tensor | None) -> Tensor:
    return loss if weights is None else loss * _data(weights, mask)
