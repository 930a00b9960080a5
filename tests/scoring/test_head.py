"""Log-probs and entropies under a cut distribution, values and gradients, against plain autograd in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ramet.scoring.head import token_log_probs
from ramet.scoring.support import Cuts, edge_of, scaled_logits
from ramet.types import Support

RULES = st.builds(
    Support,
    top_k=st.none() | st.integers(1, 6),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.2]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
)
VALUES = st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.0, 0.5, 2.0])


def oracle(
    logits: Tensor, targets: Tensor, temperature: float, support: Support | None, of: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and the gradient of their weighted sums, float64: one row and one token at a time."""
    leaf = logits.double().requires_grad_(True)
    values, entropies = [], []
    cuts = None if support is None else Cuts.of([support])
    scaled = scaled_logits(logits, torch.tensor([temperature], dtype=torch.float64))
    keep = torch.ones_like(scaled) if cuts is None else edge_of(scaled, cuts).kept(scaled)
    for row, target, kept in zip(leaf, targets.tolist(), keep, strict=True):
        kept[target] = 1
        ids = [n for n in range(len(row)) if kept[n] == 1 and row[n] > -math.inf]
        log_p = (row[ids] / temperature).log_softmax(-1)
        values.append(log_p[ids.index(target)] if target in ids else row.sum() * 0 - math.inf)
        entropies.append(-(log_p.exp() * log_p).sum())
    found, spread = torch.stack(values), torch.stack(entropies)
    of_values, of_entropies = of
    total = sum((a * w for a, w in [*zip(found, of_values, strict=True), *zip(spread, of_entropies, strict=True)]))
    assert isinstance(total, Tensor)
    [gradient] = torch.autograd.grad(total, leaf)
    return found.detach(), spread.detach(), gradient


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.lists(VALUES, min_size=6, max_size=6), min_size=1, max_size=4),
    rule=st.none() | RULES,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    chunk=st.integers(1, 5),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_values_entropies_and_gradients_are_the_oracles(
    rows: list[list[float]], rule: Support | None, temperature: float, chunk: int, dtype: torch.dtype, seed: int
) -> None:
    """With ties and with logits of -inf; float64 within 1e-12, float32 within 2e-6. The targets are possible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.tensor(rows, dtype=dtype)
    targets = torch.randint(6, (len(rows),), generator=generator)
    logits[torch.arange(len(rows)), targets] = logits[torch.arange(len(rows)), targets].clamp_min(-3.0)
    of = tuple(torch.randn(2, len(rows), generator=generator, dtype=torch.float64))
    expected = oracle(logits, targets, temperature, rule, (of[0], of[1]))
    leaf = logits.clone().requires_grad_(True)
    values, entropies = token_log_probs(leaf, targets, temperature=temperature, entropy=True, chunk=chunk, support=rule)
    assert entropies is not None
    assert values.dtype == entropies.dtype == dtype
    [gradient] = torch.autograd.grad((values * of[0] + entropies * of[1]).sum(), leaf)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for found, right in zip((values, entropies, gradient), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), right, rtol=tolerance, atol=tolerance)


def test_worked_out_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8. Of two, the second has 1/3; of two and the target, the target has 1/7."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).double().log().expand(3, -1)
    values, entropies = token_log_probs(logits, torch.tensor([1, 2, 3]), entropy=True, support=Support(top_k=2))
    assert entropies is not None
    torch.testing.assert_close(values.exp(), torch.tensor([1 / 3, 1 / 7, 1 / 7]).double())
    two = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    three = -(4 / 7 * math.log(4 / 7) + 2 / 7 * math.log(2 / 7) + 1 / 7 * math.log(1 / 7))
    torch.testing.assert_close(entropies, torch.tensor([two, three, three]).double())


def test_a_token_outside_the_support_pulls_itself_up_and_the_rest_of_the_support_down() -> None:
    """The tokens that are cut away, and they alone, get no gradient."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).double().requires_grad_(True)
    values, _ = token_log_probs(logits, torch.tensor([3]), support=Support(top_k=2))
    [gradient] = torch.autograd.grad(values.sum(), logits)
    p = torch.tensor([3.0, 2.0, 0.0]).double().softmax(-1)
    torch.testing.assert_close(gradient, torch.tensor([[-p[0], -p[1], 0.0, 1 - p[2]]]).double())


def test_an_impossible_target_has_the_log_prob_minus_infinity_with_and_without_support() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    for rule in (None, Support(top_k=1), Support(top_p=0.9), Support(min_p=0.1)):
        values, entropy = token_log_probs(logits, torch.tensor([2]), entropy=True, support=rule)
        assert entropy is not None
        assert values.tolist() == [-math.inf]
        assert entropy.isfinite().all()


def test_a_support_that_cuts_nothing_changes_no_bit() -> None:
    logits, targets = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    plain = token_log_probs(logits, targets, entropy=True)
    for rule in (Support(), Support(top_k=None, top_p=1.0, min_p=0.0)):
        found = token_log_probs(logits, targets, entropy=True, support=rule)
        assert [a.tolist() for a in found if a is not None] == [a.tolist() for a in plain if a is not None]


@pytest.mark.parametrize("rule", [None, Support(top_p=0.7)])
def test_half_precision_logits_are_worked_on_in_float32_and_get_their_gradient_in_their_own(
    rule: Support | None,
) -> None:
    """bfloat16 gradients within 2**-8 of those of the same logits in float32."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = torch.tensor([0, 3, 8, 8])
    found = []
    for leaf in (logits.clone().requires_grad_(True), logits.float().requires_grad_(True)):
        values, entropies = token_log_probs(leaf, targets, entropy=True, support=rule)
        assert entropies is not None
        assert values.dtype == torch.float32
        [gradient] = torch.autograd.grad((values + entropies).sum(), leaf)
        assert gradient.dtype == leaf.dtype
        found.append((values.detach(), entropies.detach(), gradient.float()))
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=0, atol=0)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rule", [None, Support(top_k=3, min_p=0.1)])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_head_may_make_its_logits_again_in_the_backward_pass(rule: Support | None, entropy: bool) -> None:
    """Under checkpoint, a chunk of hidden states at a time: values and gradients bit for bit those of one piece."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(6, 4, generator=generator), torch.randn(8, 4, generator=generator)
    targets = torch.randint(8, (6,), generator=generator)

    def loss(states: Tensor, head: Tensor, ids: Tensor) -> Tensor:
        values, entropies = token_log_probs(states @ head.T, ids, entropy=entropy, support=rule)
        return values.sum() if entropies is None else values.sum() + 0.1 * entropies.sum()

    found = []
    for again in (False, True):
        leaves = hidden.clone().requires_grad_(True), weight.clone().requires_grad_(True)
        value = checkpoint(loss, *leaves, targets, use_reentrant=False) if again else loss(*leaves, targets)
        found.append((value.detach(), *torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_nothing_of_the_size_of_the_softmax_is_kept_for_the_backward_pass() -> None:
    """What autograd keeps are the logits themselves and numbers for each row."""
    logits = torch.randn(16, 1000, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        values, _ = token_log_probs(logits, torch.zeros(16, dtype=torch.int64), entropy=True, support=Support(50))
    assert values.requires_grad
    large = [t for t in kept if t.numel() > 16]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]


def test_only_what_is_used_has_to_have_a_gradient() -> None:
    """The entropies alone, the log-probs alone, and no rows at all."""
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)).double().requires_grad_(True)
    targets = torch.tensor([0, 1, 2])
    values, entropies = token_log_probs(logits, targets, entropy=True, temperature=0.7)
    assert entropies is not None
    log_p = (logits / 0.7).log_softmax(-1)
    for found, right in ((values, log_p[range(3), targets]), (entropies, -(log_p.exp() * log_p).sum(-1))):
        a, b = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (found, right))
        torch.testing.assert_close(a, b)
    none, nothing = token_log_probs(logits[:0], targets[:0], entropy=True, support=Support(top_k=2))
    assert nothing is not None
    assert none.shape == nothing.shape == (0,)
    assert torch.autograd.grad(none.sum(), logits)[0].abs().max() == 0
