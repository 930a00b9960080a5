"""What is cut from a distribution, against a loop that sorts tokens and adds their probabilities up."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramet.policies.draws import draw_tokens
from ramet.scoring import support
from ramet.scoring.head import token_log_probs
from ramet.scoring.support import Cuts, edge_of, scaled_logits
from ramet.types import Support

ANY = st.builds(
    Support,
    top_k=st.none() | st.integers(1, 12),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.25, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.25, 1.0]),
)
# Few distinct values, so that there are ties; their sums do not lie on the edges 0.9, 0.5 and so on by design alone.
LOGITS = st.lists(st.sampled_from([-math.inf, -2.0, -0.3, 0.0, 0.7, 1.1, 3.0]), min_size=1, max_size=9).filter(
    lambda row: max(row) > -math.inf
)


def slow_kept(logits: list[float], rule: Support) -> set[int]:
    """Most probable first, the lower id of equals first: k of them, then by mass of what is left, then by ratio."""
    total = math.fsum(math.exp(x) for x in logits)
    probabilities = [math.exp(x) / total for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: rule.top_k]
    left = math.fsum(probabilities[token] for token in order)
    if rule.top_p < 1:
        reached, kept = 0.0, []
        for token in order:
            kept.append(token)
            reached += probabilities[token] / left
            if reached >= rule.top_p:
                break
        order = kept
    largest = max(probabilities)
    floor = rule.min_p * largest * (1 - 1e-9)
    return {token for token in order if probabilities[token] >= floor}


def kept(logits: Tensor, *rules: Support) -> list[set[int]]:
    """Which tokens are kept in each row; those that are impossible anyway are left out."""
    cuts = Cuts.of(rules)
    every = torch.ones_like(logits) if cuts is None else edge_of(logits, cuts).kept(logits)
    return [set(torch.nonzero(row).flatten().tolist()) for row in every * logits.isfinite()]


def possible(logits: list[float], tokens: set[int]) -> set[int]:
    return {token for token in tokens if logits[token] > -math.inf}


def on_an_edge(logits: list[float], rule: Support) -> bool:
    """True where rounding decides: a little more or less of top_p keeps another set."""
    sets = [
        slow_kept(logits, Support(rule.top_k, min(1 - 1e-12, rule.top_p * (1 + d)), rule.min_p))
        for d in (-1e-6, 1e-6)
        if rule.top_p < 1
    ]
    return len(sets) == 2 and possible(logits, sets[0]) != possible(logits, sets[1])


@settings(deadline=None, max_examples=150)
@given(LOGITS, ANY)
def test_what_is_kept_is_what_a_loop_keeps(logits: list[float], rule: Support) -> None:
    if on_an_edge(logits, rule):
        return
    for dtype in (torch.float32, torch.float64):
        [found] = kept(torch.tensor([logits], dtype=dtype), rule)
        assert found == possible(logits, slow_kept(logits, rule))
        assert found


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(LOGITS, ANY), min_size=1, max_size=5))
def test_rows_of_one_batch_may_differ_in_everything_and_are_cut_as_alone(
    rows: list[tuple[list[float], Support]],
) -> None:
    width = max(len(logits) for logits, _ in rows)
    logits = torch.tensor([[*row, *[-math.inf] * (width - len(row))] for row, _ in rows])
    together = kept(logits, *(rule for _, rule in rows))
    assert together == [kept(logits[n : n + 1], rule)[0] for n, (_, rule) in enumerate(rows)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Support(), {0, 1, 2, 3, 4}),
        (Support(top_k=1), {1}),
        (Support(top_k=2), {1, 2}),
        (Support(top_k=4), {0, 1, 2, 3}),
        (Support(top_k=9), {0, 1, 2, 3, 4}),
        (Support(top_p=0.2), {1}),
        (Support(top_p=0.55), {1, 2}),
        (Support(top_p=0.65), {0, 1, 2}),
        (Support(top_k=2, top_p=0.6), {1, 2}),  # 0.3 of the 0.6 that top_k leaves is half, which is below 0.6
        (Support(top_k=2, top_p=0.45), {1}),
        (Support(min_p=0.5), {0, 1, 2, 3}),
        (Support(min_p=0.7), {1, 2}),
        (Support(top_p=0.65, min_p=0.7), {1, 2}),
        (Support(top_k=1, min_p=1.0), {1}),
        (Support(min_p=1.0), {1, 2}),
    ],
)
def test_worked_out_by_hand(rule: Support, expected: set[int]) -> None:
    """Probabilities 0.17, 0.3, 0.3, 0.17, 0.06: of the equal ones the lower id is kept first."""
    assert kept(torch.tensor([[0.17, 0.3, 0.3, 0.17, 0.06]]).log(), rule) == [expected]


def wide_rows() -> Tensor:
    """Steep, flat, and full of ties, over 3,000 tokens."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, 3000, generator=generator)
    return torch.stack([8 * noise[0], 0.5 * noise[1], (2 * noise[2]).round()])


@pytest.mark.parametrize(
    "rule", [Support(top_p=0.3), Support(top_p=0.9), Support(top_p=0.9999), Support(top_k=700), Support(700, 0.9, 0.05)]
)
def test_how_many_of_the_largest_are_tried_first_changes_nothing(
    rule: Support, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 4 on, over 64 and 1,024, and all at once; the loop says the same."""
    logits = wide_rows()
    found = []
    for head in (4, 256, 3000):
        monkeypatch.setattr(support, "HEAD", head)
        found.append(kept(logits, rule, rule, rule))
    assert found[0] == found[1] == found[2]
    assert found[0] == [slow_kept(row.double().tolist(), rule) for row in logits]


def test_ties_across_the_edge_are_told_apart_in_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "TIED_ROWS", 2)
    rules = [Support(top_k=n + 1) for n in range(5)]
    assert kept(torch.zeros(5, 5), *rules) == [set(range(n + 1)) for n in range(5)]


def test_where_nothing_is_cut_nothing_is_done() -> None:
    assert Cuts.of([Support(), Support(top_p=1.0, min_p=0.0)]) is None
    logits = torch.randn(2, 5)
    assert scaled_logits(logits, None) is logits


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Support(top_k=0), "top_k must be at least 1, or None to keep every token: found 0"),
        (lambda: Support(top_p=0.0), "top_p must be above 0 and at most 1 .*: found 0.0"),
        (lambda: Support(top_p=1.5), "top_p must be above 0 and at most 1 .*: found 1.5"),
        (lambda: Support(top_p=math.nan), "top_p must be above 0 and at most 1 .*: found nan"),
        (lambda: Support(min_p=-0.1), "min_p must be from 0 .* to 1: found -0.1"),
        (lambda: Support(min_p=1.1), "min_p must be from 0 .* to 1: found 1.1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make: Callable[[], Support], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- one rule for the sampler and the scorer


@settings(deadline=None, max_examples=80)
@given(LOGITS, ANY, st.sampled_from([0.3, 1.0, 1.7]), st.floats(0, 1, exclude_max=True))
def test_what_the_sampler_reports_is_what_the_scorer_finds(
    logits: list[float], rule: Support, temperature: float, point: float
) -> None:
    """At equal weights: the token drawn lies in the support, and both log-probs agree within 1e-6, float32."""
    row = torch.tensor([logits])
    place = torch.tensor([point], dtype=torch.float64)
    tokens, sampled = draw_tokens(row, place, torch.tensor([temperature]), Cuts.of([rule]))
    scored, _ = token_log_probs(row, tokens, temperature=temperature, support=rule)
    [tokens_kept] = kept(scaled_logits(row, torch.tensor([temperature])), rule)
    assert tokens.item() in tokens_kept
    torch.testing.assert_close(sampled, scored, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_and_scorer_agree_over_a_wide_vocabulary(dtype: torch.dtype, temperature: float) -> None:
    """Rows with different rules in one batch; log-probs within 2e-6, float32. bfloat16 logits are full of ties."""
    logits = wide_rows().to(dtype)
    rules = [Support(top_p=0.8), Support(top_k=40, min_p=0.3), Support(min_p=0.1)]
    points = torch.tensor([0.1, 0.5, 0.999], dtype=torch.float64)
    tokens, sampled = draw_tokens(logits, points, torch.full((3,), temperature), Cuts.of(rules))
    for n, rule in enumerate(rules):
        scored, _ = token_log_probs(logits[n : n + 1], tokens[n : n + 1], temperature=temperature, support=rule)
        torch.testing.assert_close(sampled[n : n + 1], scored, rtol=2e-6, atol=2e-6)
    assert torch.isfinite(sampled).all()
