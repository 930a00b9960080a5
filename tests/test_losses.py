"""Losses and reductions: numbers by hand, masks, clipping, and micro-batches that add up."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramet.errors import ForestError
from ramet.losses import (
    Mismatch,
    clip_fraction,
    clipped,
    constant_mean,
    importance_weights,
    mismatch,
    policy_gradient,
    sequence_lengths,
    sequence_mean,
    token_mean,
)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Per token -----------------------------------------------------------------------------------------------------------


def test_policy_gradient_by_hand() -> None:
    """-A * log p * w: -2 * -1 * 0.5 = 1 and -(-3) * -0.5 * 2 = -3; slopes -A * w = -1 and 6."""
    log_probs = float64(-1.0, -0.5).requires_grad_()
    loss = policy_gradient(log_probs, float64(2.0, -3.0), weights=float64(0.5, 2.0))
    assert loss.tolist() == [1.0, -3.0]
    assert torch.autograd.grad(loss.sum(), log_probs)[0].tolist() == [-1.0, 6.0]


# ratio, advantage, loss, slope with respect to the log-prob (-A * ratio where not held), for a range of 0.8 to 1.3
CLIPPED = [
    (1.0, 2.0, -2.0, -2.0),
    (1.25, 2.0, -2.5, -2.5),
    (1.5, 2.0, -2.6, 0.0),  # held at 1.3
    (0.5, 2.0, -1.0, -1.0),  # below the range, but the advantage pulls it back: not held
    (1.5, -2.0, 3.0, 3.0),  # above the range, pulled back: not held
    (0.75, -2.0, 1.6, 0.0),  # held at 0.8
    (0.9, -2.0, 1.8, 1.8),
    (1.5, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "expected", "slope"), CLIPPED)
def test_clipped_by_hand(ratio: float, advantage: float, expected: float, slope: float) -> None:
    """Tolerance 1e-12."""
    start = float64(-1.0)
    log_probs = (start + math.log(ratio)).requires_grad_()
    loss = clipped(log_probs, start, float64(advantage), clip_low=0.2, clip_high=0.3)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.grad(loss.sum(), log_probs)[0].item() == pytest.approx(slope, abs=1e-12)


def test_clip_fraction_counts_the_tokens_without_gradient() -> None:
    """Two of the eight cases above are held; the one with advantage 0 has nothing to hold."""
    ratios, advantages = (float64(*column) for column in list(zip(*CLIPPED, strict=True))[:2])
    found = clip_fraction(ratios.log(), torch.zeros(8).double(), advantages, tokens=8, clip_low=0.2, clip_high=0.3)
    assert found.item() == 0.25


def test_clipped_at_ratio_one_has_the_gradient_of_the_policy_gradient_even_without_room() -> None:
    """With the range closed to 1 the token is on the edge, not over it. Tolerance 1e-12, float64."""
    advantages, weights = float64(1.0, -2.0, 0.0), float64(0.5, 1.0, 2.0)
    for room in (0.0, 0.2):
        log_probs = float64(-1.0, -0.3, -4.0).requires_grad_()
        start = log_probs.detach().clone()
        ours = clipped(log_probs, start, advantages, clip_low=room, clip_high=room, weights=weights)
        theirs = policy_gradient(log_probs, advantages, weights=weights)
        first, second = (torch.autograd.grad(loss.sum(), log_probs)[0] for loss in (ours, theirs))
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("difference", [-torch.inf, -1e4, -50.0, 50.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_lost_policy_gives_large_numbers_not_nan(difference: float, advantage: float) -> None:
    log_probs = torch.tensor([difference], requires_grad=True)
    loss = clipped(log_probs, torch.zeros(1), torch.tensor([advantage]))
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), log_probs)[0].isfinite().all()


MASK = torch.tensor([True, False, True, False, False])
RUBBISH = float64(0.0, math.nan, 0.0, math.inf, -math.inf)


def spoil(*values: float) -> Tensor:
    """Values at the unmasked slots, rubbish elsewhere."""
    return RUBBISH.masked_scatter(MASK, float64(*values))


PER_TOKEN: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "policy_gradient": lambda x, m: policy_gradient(
        x, spoil(1.0, -2.0) if m is not None else float64(1.0, -2.0), mask=m
    ),
    "clipped": lambda x, m: (
        clipped(x, spoil(-1.2, -2.0), spoil(1.0, -2.0), mask=m, weights=spoil(0.5, 2.0))
        if m is not None
        else clipped(x, float64(-1.2, -2.0), float64(1.0, -2.0), weights=float64(0.5, 2.0))
    ),
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_rubbish_in_masked_slots_changes_neither_loss_nor_gradient(name: str) -> None:
    masked, plain = spoil(-1.0, -2.1).requires_grad_(), float64(-1.0, -2.1).requires_grad_()
    found, expected = PER_TOKEN[name](masked, MASK), PER_TOKEN[name](plain, None)
    assert torch.equal(found[MASK], expected)
    assert found[~MASK].tolist() == [0.0, 0.0, 0.0]
    ours, theirs = torch.autograd.grad(found.sum(), masked)[0], torch.autograd.grad(expected.sum(), plain)[0]
    assert torch.equal(ours[MASK], theirs)
    assert ours[~MASK].tolist() == [0.0, 0.0, 0.0]


def test_only_the_current_log_probs_get_a_gradient() -> None:
    tensors = [float64(x).requires_grad_() for x in (-1.0, -1.1, 2.0, 0.7)]
    current, start, advantages, weights = tensors
    clipped(current, start, advantages, weights=weights).sum().backward()
    policy_gradient(current, advantages, weights=weights).sum().backward()
    assert [t.grad is not None for t in tensors] == [True, False, False, False]


# Sampler and trainer -------------------------------------------------------------------------------------------------


def test_importance_weights_by_hand() -> None:
    """Ratios 0.5/0.25 = 2, 0.3/0.6 = 0.5, 0.9/0.1 = 9, cut at 3. Tolerance 1e-12."""
    start, sampler = float64(0.5, 0.3, 0.9).log().requires_grad_(), float64(0.25, 0.6, 0.1).log()
    found = importance_weights(start, sampler, cap=3.0)
    assert not found.requires_grad
    assert found.tolist() == pytest.approx([2.0, 0.5, 3.0], abs=1e-12)
    assert importance_weights(start, sampler, cap=math.inf).tolist() == pytest.approx([2.0, 0.5, 9.0], abs=1e-12)


def test_an_overflowing_weight_is_the_cap() -> None:
    assert importance_weights(torch.tensor([0.0]), torch.tensor([-200.0]), cap=2.0).tolist() == [2.0]


def test_mismatch_by_hand() -> None:
    """The ratio start/sampler is 2 and 1/4; k3 with r = -log of it: 2 - 1 - log 2 and 1/4 - 1 + log 4.

    Their mean is (1/4 + log 2) / 2; the largest difference is log 4. Tolerance 1e-12.
    """
    sampler = float64(-3.0, -1.0)
    found = mismatch(sampler + float64(math.log(2), -math.log(4)), sampler)
    assert found.kl == pytest.approx((0.25 + math.log(2)) / 2, abs=1e-12)
    assert found.largest == pytest.approx(math.log(4), abs=1e-12)
    assert found.tokens == 2


def test_masked_slots_have_weight_zero_and_no_part_in_the_mismatch() -> None:
    """Weights 1 and exp(0.5), tolerance 1e-12, float64; the mismatch is that of the rest, exactly."""
    start, sampler = spoil(-1.0, -2.0), spoil(-1.0, -2.5)
    found = importance_weights(start, sampler, cap=10.0, mask=MASK)
    torch.testing.assert_close(found, float64(1.0, 0.0, math.exp(0.5), 0.0, 0.0), rtol=0, atol=1e-12)
    assert mismatch(start, sampler, mask=MASK) == mismatch(float64(-1.0, -2.0), float64(-1.0, -2.5))
    assert mismatch(start, sampler, mask=torch.zeros_like(MASK)) == Mismatch(0.0, 0.0, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["sampler", "start"])
def test_a_missing_log_prob_is_an_error_and_never_zero(which: str, value: float) -> None:
    whole, broken = torch.full((4,), -1.0), torch.tensor([-1.0, -1.0, value, value])
    start, sampler = (whole, broken) if which == "sampler" else (broken, whole)
    mask = torch.tensor([True, True, True, False])
    for measure in (
        lambda: importance_weights(start, sampler, cap=2.0, mask=mask),
        lambda: mismatch(start, sampler, mask=mask),
    ):
        with pytest.raises(ForestError, match=rf"finite {which} log-prob: found {value} at \[2\], 1 of 4"):
            measure()


# Reductions ----------------------------------------------------------------------------------------------------------

LOSSES = float64(1.0, 2.0, 3.0, 10.0, 5.0, 7.0)
SEQUENCES = torch.tensor([4, 4, 4, 0, 9, 9])
COUNTS = torch.tensor([True, True, True, True, True, False])


def test_reductions_by_hand() -> None:
    """Sequences (1 2 3), (10), (5 and a masked 7).

    sequence mean: (6/3 + 10/1 + 5/1) / 3 = 17/3; token mean: 21/5; constant: 21 / (3 * 8) = 0.875. Tolerance 1e-12.
    """
    lengths = sequence_lengths(SEQUENCES, mask=COUNTS)
    assert lengths.tolist() == [3, 3, 3, 1, 1, 1]
    assert sequence_lengths(SEQUENCES).tolist() == [3, 3, 3, 1, 2, 2]
    assert sequence_mean(LOSSES, lengths, sequences=3, mask=COUNTS).item() == pytest.approx(17 / 3, abs=1e-12)
    assert token_mean(LOSSES, tokens=5, mask=COUNTS).item() == pytest.approx(4.2, abs=1e-12)
    assert constant_mean(LOSSES, sequences=3, max_tokens=8, mask=COUNTS).item() == 0.875


def reductions(sequences: Tensor, mask: Tensor) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Each reduction of a selection of tokens, with the denominators of the whole batch."""
    lengths = sequence_lengths(sequences, mask=mask)
    count, tokens = max(1, len(sequences[mask].unique())), max(1, int(mask.sum()))
    return {
        "sequence": lambda x, rows: sequence_mean(x[rows], lengths[rows], sequences=count, mask=mask[rows]),
        "constant": lambda x, rows: constant_mean(x[rows], sequences=count, max_tokens=7, mask=mask[rows]),
        "token": lambda x, rows: token_mean(x[rows], tokens=tokens, mask=mask[rows]),
    }


TOKENS = st.lists(
    st.tuples(st.floats(-5, 5), st.integers(0, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=20
)


@settings(deadline=None, max_examples=60)
@given(tokens=TOKENS)
def test_micro_batches_add_up_to_the_batch(tokens: list[tuple[float, int, bool, int]]) -> None:
    """Value and gradient, however the tokens are cut, in the middle of a sequence too. float64, tolerance 1e-12."""
    values = float64(*(t[0] for t in tokens)).requires_grad_()
    sequences, mask, part = (torch.tensor([t[i] for t in tokens]) for i in (1, 2, 3))
    for name, reduce in reductions(sequences, mask).items():
        whole = reduce(values, torch.ones_like(mask))
        pieces = torch.stack([reduce(values, part == p) for p in range(3)]).sum()
        torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12, msg=name)
        ours, theirs = (torch.autograd.grad(loss, values)[0] for loss in (pieces, whole))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=name)


@settings(deadline=None, max_examples=40)
@given(tokens=TOKENS)
def test_masked_tokens_are_out_of_numerator_and_denominator(tokens: list[tuple[float, int, bool, int]]) -> None:
    """The batch with rubbish in masked slots equals the batch without those slots. Tolerance 1e-12."""
    sequences, mask = (torch.tensor([t[i] for t in tokens]) for i in (1, 2))
    values = torch.where(mask, float64(*(t[0] for t in tokens)), math.nan).requires_grad_()
    kept = values.detach()[mask].requires_grad_()
    full, part = reductions(sequences, mask), reductions(sequences[mask], torch.ones_like(mask[mask]))
    for name in full:
        found, expected = full[name](values, torch.ones_like(mask)), part[name](kept, torch.ones_like(mask[mask]))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=name)
        slope = torch.autograd.grad(found, values)[0]
        torch.testing.assert_close(slope[mask], torch.autograd.grad(expected, kept)[0], rtol=0, atol=1e-12, msg=name)
        assert not slope[~mask].any()


def test_cutting_an_episode_into_pieces_does_not_multiply_its_weight() -> None:
    """One episode of four tokens as two pieces of one and three tokens that keep its id: still the weight of one."""
    losses, episode = float64(1.0, 1.0, 1.0, 1.0), torch.zeros(4, dtype=torch.int64)
    lengths = sequence_lengths(episode)
    pieces = [sequence_mean(losses[s], lengths[s], sequences=1) for s in (slice(0, 1), slice(1, 4))]
    assert sum(piece.item() for piece in pieces) == 1.0


def test_tables_are_reduced_as_the_flat_tokens_are() -> None:
    table, ids = LOSSES.view(2, 3), SEQUENCES.view(2, 3)
    assert torch.equal(
        sequence_lengths(ids, mask=COUNTS.view(2, 3)).flatten(), sequence_lengths(SEQUENCES, mask=COUNTS)
    )
    assert (
        token_mean(table, tokens=5, mask=COUNTS.view(2, 3)).item() == token_mean(LOSSES, tokens=5, mask=COUNTS).item()
    )


def test_no_token_in_a_micro_batch_is_legal() -> None:
    empty = torch.zeros(0)
    assert sequence_lengths(empty.long()).shape == (0,)
    assert sequence_mean(empty, empty.long(), sequences=2).item() == 0.0
    assert token_mean(empty, tokens=3).item() == 0.0
    assert constant_mean(empty, sequences=1, max_tokens=2).item() == 0.0


# Errors --------------------------------------------------------------------------------------------------------------

TWO, THREE = torch.zeros(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("advantages", lambda: policy_gradient(TWO, THREE)),
        ("weights", lambda: policy_gradient(TWO, TWO, weights=THREE)),
        ("start_log_probs", lambda: clipped(TWO, THREE, TWO)),
        ("advantages", lambda: clip_fraction(TWO, TWO, THREE, tokens=2)),
        ("sampler_log_probs", lambda: importance_weights(TWO, THREE, cap=2.0)),
        ("sampler_log_probs", lambda: mismatch(TWO, THREE)),
        ("lengths", lambda: sequence_mean(TWO, THREE.long(), sequences=1)),
        ("mask", lambda: constant_mean(TWO, sequences=1, max_tokens=1, mask=THREE.bool())),
        ("mask", lambda: token_mean(TWO, tokens=1, mask=THREE.bool())),
        ("mask", lambda: sequence_lengths(TWO.long(), mask=THREE.bool())),
    ],
)
def test_shapes_that_differ_are_refused_with_both_named(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ForestError, match=rf"{name} must have the shape of the tokens \[2\]: found \[3\]"):
        call()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: policy_gradient(TWO, TWO, mask=TWO), TypeError, "mask must be bool: found torch.float32"),
        (lambda: clipped(TWO, TWO, TWO, clip_low=1.5), ValueError, "found 1.5 and 0.2"),
        (lambda: clipped(TWO, TWO, TWO, clip_high=-0.1), ValueError, "found 0.2 and -0.1"),
        (lambda: importance_weights(TWO, TWO, cap=0.0), ValueError, "cap must be above 0: found 0.0"),
        (lambda: importance_weights(TWO, TWO, cap=math.nan), ValueError, "cap must be above 0: found nan"),
        (lambda: token_mean(TWO, tokens=0), ValueError, "tokens must be at least 1: found 0"),
        (lambda: constant_mean(TWO, sequences=1, max_tokens=0), ValueError, "max_tokens must be at least 1: found 0"),
        (lambda: sequence_mean(TWO, TWO.long() + 1, sequences=0), ValueError, "sequences must be at least 1: found 0"),
        (lambda: sequence_mean(TWO, TWO.long(), sequences=1), ForestError, "at least 1: found 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()
