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
def test_how_the_edge_is_looked_for_changes_nothing(rule: Support, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the largest or among all, in few buckets or many, one row at a time or all; the loop says the same."""
    logits = wide_rows()
    found = []
    for narrow, buckets, searched in ((2048, 2048, 2**18), (10, 2048, 2**18), (699, 7, 1), (700, 2, 2**20)):
        monkeypatch.setattr(support, "NARROW", narrow)
        monkeypatch.setattr(support, "BUCKETS", buckets)
        monkeypatch.setattr(support, "SEARCHED", searched)
        found.append(kept(logits, rule, rule, rule))
    assert all(sets == found[0] for sets in found)
    assert found[0] == [slow_kept(row.double().tolist(), rule) for row in logits]


@pytest.mark.parametrize("narrow", [0, 2048])
def test_ties_across_the_edge_are_told_apart_in_many_rows(narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "TIED_ROWS", 2)
    monkeypatch.setattr(support, "NARROW", narrow)
    rules = [Support(top_k=n + 1) for n in range(5)]
    assert kept(torch.zeros(5, 5), *rules) == [set(range(n + 1)) for n in range(5)]
    assert kept(torch.full((5, 5), -1e30), *rules) == [set(range(n + 1)) for n in range(5)]
    rules = [Support(top_k=4, top_p=p) for p in (0.1, 0.25, 0.3, 0.75, 1.0)]
    assert kept(torch.zeros(5, 5), *rules) == [set(range(n)) for n in (1, 1, 2, 3, 4)]


# ---------------------------------------------------------------- against sorting everything


def sorted_edge(row: Tensor, rule: Support) -> tuple[float, int]:
    """Sort all of a row, add up exp of it in float64, and walk: the value and the id of the last token kept.

    Ids are those of the most probable first, of equals the lower; min-p, which knows no ids, is left out.
    """
    order = row.sort(descending=True, stable=True).indices[: rule.top_k]
    reached = (row[order].double() - row.max().double()).exp().cumsum(0)
    at = len(order) - 1
    if rule.top_p < 1:
        at = int(torch.searchsorted(reached, rule.top_p * reached[-1]))
    return row[order[at]].item(), int(order[at])


def is_cut_at(row: Tensor, rule: Support, value: float, last: int) -> bool:
    """Say whether keeping what comes up to a token is right to 1e-6 of the mass: the float32 exp may err by as much."""
    lower = sorted_edge(row, Support(rule.top_k, rule.top_p * (1 - 1e-6))) if rule.top_p < 1 else (value, last)
    upper = sorted_edge(row, Support(rule.top_k, min(1.0, rule.top_p * (1 + 1e-6))))
    return (-upper[0], upper[1]) >= (-value, last) >= (-lower[0], lower[1])


def random_row(seed: int, size: int, scale: float, shape: str) -> Tensor:
    """Steep and flat rows, float32; some full of ties, some with neighbours in one bucket and others far away."""
    generator = torch.Generator().manual_seed(seed)
    row = scale * torch.randn(size, generator=generator)
    pick = torch.rand(size, generator=generator)
    if shape == "bfloat16":
        return row.bfloat16().float()
    if shape == "rounded":
        return row.round()
    if shape == "with impossible ones":
        return torch.where(pick >= pick.median(), row, -torch.inf)
    if shape == "one far above":
        return torch.where(pick == pick.max(), row + 20, row)
    if shape == "far below":
        return torch.where(pick < 0.3, -3e38, row)
    return -(row.abs() ** 3) if shape == "skewed" else row


ROWS = st.builds(
    random_row,
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 17, 300, 5000]),
    st.sampled_from([1e-40, 1e-6, 0.01, 0.5, 3.0, 30.0, 1e5]),
    st.sampled_from(["float32", "bfloat16", "rounded", "with impossible ones", "one far above", "far below", "skewed"]),
)
RULES = st.builds(
    Support,
    top_k=st.none() | st.sampled_from([1, 2, 16, 290, 2048, 2049, 4000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.9, 0.5, 0.25, 1e-9]),
)


@settings(deadline=None, max_examples=150)
@given(ROWS, RULES)
def test_the_edge_is_where_sorting_everything_puts_it(row: Tensor, rule: Support) -> None:
    """And equals are kept up to the id that sorting stops at; it says nothing which impossible tokens are kept."""
    cuts = Cuts.of([rule])
    if cuts is None:
        return
    likely = row.max() - row < support.NEVER
    found = edge_of(row[None], cuts).kept(row[None])[0].bool() & likely
    value = row[found].min()
    last = int(torch.nonzero(found & (row == value)).max())
    beyond = (row < value) | ((row == value) & (torch.arange(len(row)) > last))
    assert torch.equal(found, ~beyond & likely)
    most = min(int(likely.sum()), rule.top_k or len(row))
    assert is_cut_at(row, Support(most, rule.top_p), value.item(), last)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(ROWS, RULES), min_size=2, max_size=6), st.sampled_from([1, 2**13, 2**18]))
def test_a_row_has_the_same_edge_to_the_last_bit_alone_and_in_any_company(
    rows: list[tuple[Tensor, Support]], searched: int
) -> None:
    """The sampler looks at a batch with a rule a row, the scorer at other batches with one rule for all."""
    width = max(len(row) for row, _ in rows)
    logits = torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=-torch.inf) for row, _ in rows])
    cuts = Cuts.of([rule for _, rule in rows])
    if cuts is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "SEARCHED", searched)
        together = edge_of(logits, cuts)
    for n, (_, rule) in enumerate(rows):
        cuts_of_one = Cuts.of([rule])
        if cuts_of_one is not None:
            for batch in (logits[n : n + 1], logits):
                alone = edge_of(batch, cuts_of_one)
                place = 0 if len(batch) == 1 else n
                assert alone.value[place] == together.value[n]
                assert alone.last[place] == together.last[n]


def test_threads_move_no_edge() -> None:
    """A row alone is added up by several threads, rows of a batch by one each: 49,152 tokens, and rounding decides.

    Each top_p is the share of a whole number of tokens, so that the last bit of a sum would move the edge.
    """
    logits = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(1))
    masses = (logits - logits.amax(-1, keepdim=True)).exp().mul(support._unit(49_152)).long()
    reached = masses.sort(descending=True).values.cumsum(-1)
    rules = [Support(top_p=int(row[5000 * n + 500]) / int(row[-1])) for n, row in enumerate(reached)]
    cuts, threads, found = Cuts.of(rules), torch.get_num_threads(), []
    assert cuts is not None
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(edge_of(logits, cuts).value.tolist())
            alone = [(logits[n : n + 1], Cuts.of([rule])) for n, rule in enumerate(rules)]
            found.append([edge_of(row, cut).value.item() for row, cut in alone if cut is not None])
    finally:
        torch.set_num_threads(threads)
    assert found == [found[0]] * 4


@pytest.mark.parametrize("rule", [Support(top_p=0.5), Support(top_k=2), Support(3, 0.5), Support(min_p=0.1)])
@pytest.mark.parametrize("narrow", [0, 2048])
@pytest.mark.parametrize("broken", [[math.nan, 0.0, 1.0, 2.0], [math.inf, 0.0, -math.inf, 2.0], [-math.inf] * 4])
def test_a_row_that_is_no_distribution_disturbs_no_other(
    broken: list[float], narrow: int, rule: Support, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "NARROW", narrow)
    sane = [0.0, 2.0, 1.0, 0.5]
    [_, found] = kept(torch.tensor([broken, sane]), rule, rule)
    assert found == slow_kept(sane, rule)
    values, _ = token_log_probs(torch.tensor([broken, sane]), torch.tensor([3, 1]), support=rule)
    assert values.isnan().tolist() == [True, False]


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
