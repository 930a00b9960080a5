"""Random numbers by address, and tokens by the inverse of the cumulative distribution."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramet.errors import ModelError
from ramet.policies.draws import draw_tokens, uniforms
from ramet.scoring.support import Cuts, edge_of
from ramet.types import Draw, Support

BELOW_1 = 1.0 - 2.0**-53
"""The largest number that the generator can return."""
INT64 = st.integers(-(2**63), 2**63 - 1)


def draw(logits: Tensor, points: list[float], temperatures: list[float]) -> tuple[list[int], Tensor]:
    tokens, log_probs = draw_tokens(logits, torch.tensor(points, dtype=torch.float64), torch.tensor(temperatures))
    return tokens.tolist(), log_probs


def slow_inverse(probabilities: list[float], point: float) -> int:
    """Walk along the cumulative sum until it is above the point; skip what has no probability."""
    total, reached, last = sum(probabilities), 0.0, -1
    for token, probability in enumerate(probabilities):
        if probability > 0:
            last = token
            reached += probability / total
            if point < reached:
                return token
    return last


@settings(deadline=None, max_examples=40)
@given(INT64, INT64, INT64, INT64, st.integers(0, 20), st.integers(0, 20))
def test_uniforms_are_a_function_of_the_address(
    seed: int, prompt: int, member: int, turn: int, n: int, more: int
) -> None:
    """Asking for more changes none of the first; all lie in [0, 1)."""
    address = Draw(seed, prompt, member, turn)
    few, many = uniforms(address, n), uniforms(address, n + more)
    assert few.dtype == np.float64
    assert few.tolist() == many[:n].tolist()
    assert all(0 <= u < 1 for u in many)


def test_no_two_addresses_share_their_uniforms() -> None:
    """Neither neighbours nor permutations of the same four integers; 1 in 2**53 is not met here."""
    addresses = [Draw(s, p, m, t) for s in range(3) for p in range(3) for m in range(3) for t in range(3)]
    addresses += [Draw(2**62, 0, 0), Draw(2**63 - 1, 0, 0), Draw(2**62 + 2**63 - 1, 0, 0), Draw(-1, 0, 0)]
    assert len({uniforms(address, 1)[0] for address in addresses}) == len(addresses)


def test_uniforms_are_the_same_in_every_process() -> None:
    """Frozen: resumed runs and other machines must draw the same."""
    assert uniforms(Draw(1, 2, 3, 4), 2).tolist() == [0.9287107116537447, 0.5240976634742821]


def test_drawing_touches_no_global_random_state() -> None:
    np_state = np.random.get_state()
    before = (torch.get_rng_state().tolist(), random.getstate(), str(np_state))
    uniforms(Draw(0, 0, 0), 100)
    draw(torch.zeros(2, 5), [0.1, 0.9], [1.0, 0.0])
    after = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    assert after == before


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.one_of(st.just(-np.inf), st.floats(-5, 5)), min_size=1, max_size=8).filter(lambda x: max(x) > -np.inf),
    st.floats(0, BELOW_1),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(
    logits: list[float], point: float, temperature: float
) -> None:
    """Against a loop; a point within 1e-6 of an edge may fall to either side, for the loop sums in another order.

    Log-probs within 1e-5, float32.
    """
    row = torch.tensor([logits], dtype=torch.float32)
    scaled = row.double() / temperature
    probabilities = scaled.softmax(-1)[0].tolist()
    [token], log_probs = draw(row, [point], [temperature])
    near = {slow_inverse(probabilities, min(max(point + d, 0.0), BELOW_1)) for d in (-1e-6, 0.0, 1e-6)}
    assert token in near
    assert probabilities[token] > 0
    assert log_probs.item() == pytest.approx(torch.log_softmax(scaled, -1)[0, token].item(), abs=1e-5)


@pytest.mark.parametrize("point", [0.0, 2.0**-53, 0.5, 0.5 - 2.0**-54, BELOW_1])
@pytest.mark.parametrize("logits", [[-np.inf, 0.0, 0.0, -np.inf], [-np.inf, 3.0, -np.inf], [-2000.0, 0.0, -2000.0]])
def test_a_token_without_probability_is_never_drawn(logits: list[float], point: float) -> None:
    """At both ends and at the edge between two tokens; exp(-2000) is 0 in float64."""
    [token], log_probs = draw(torch.tensor([logits]), [point], [1.0])
    assert logits[token] >= 0
    assert log_probs.isfinite().all()


def test_the_edges_belong_to_the_token_above() -> None:
    """Two tokens of one half each: 0 and just below 0.5 are the first, 0.5 is the second."""
    tokens, _ = draw(torch.zeros(4, 2), [0.0, 0.5 - 2.0**-54, 0.5, BELOW_1], [1.0] * 4)
    assert tokens == [0, 0, 1, 1]


def test_rounding_at_the_upper_end_stays_inside_the_vocabulary() -> None:
    """50,000 equal tokens do not sum to exactly 1; the last is the answer just below 1."""
    [token], _ = draw(torch.zeros(1, 50_000), [BELOW_1], [1.0])
    assert token == 49_999


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_the_distribution(temperature: float) -> None:
    """40,000 draws, 6 tokens, one impossible: chi-square with 4 degrees of freedom is below 18.5 (p = 0.001)."""
    logits = torch.tensor([[0.3, -1.0, 1.2, -np.inf, 0.0, 2.0]])
    points = torch.from_numpy(uniforms(Draw(11, 0, 0), 40_000))
    tokens, _ = draw_tokens(logits.expand(40_000, -1), points, torch.full((40_000,), temperature))
    expected = (logits[0].double() / temperature).softmax(-1) * 40_000
    counts = torch.bincount(tokens, minlength=6).double()
    kept = expected > 0
    assert counts[~kept].tolist() == [0]
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 18.5


def test_a_row_is_drawn_alike_alone_and_in_any_batch() -> None:
    """The same token; its log-prob within 1e-6, relative and absolute, float32."""
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    points, temperatures = [0.1, 0.5, 0.9, 0.3, 0.7, 0.2], [1.0, 0.0, 0.5, 2.0, 1.0, 0.0]
    tokens, log_probs = draw(logits, points, temperatures)
    for i in range(6):
        [token], log_prob = draw(logits[i : i + 1], points[i : i + 1], temperatures[i : i + 1])
        assert token == tokens[i]
        torch.testing.assert_close(log_prob, log_probs[i : i + 1], rtol=1e-6, atol=1e-6, equal_nan=True)


def test_greedy_takes_the_largest_logit_and_the_lower_id_on_a_tie() -> None:
    """It has no density: log-prob NaN, whatever the point."""
    tokens, log_probs = draw(
        torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0], [-np.inf, -5.0, -6.0]]), [0.99] * 3, [0.0] * 3
    )
    assert tokens == [1, 0, 1]
    assert log_probs.isnan().all()


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution_are_refused(bad: list[float], temperature: float) -> None:
    with pytest.raises(ModelError, match="row 1 of 2"):
        draw(torch.tensor([[0.0, 0.0], bad]), [0.5, 0.5], [temperature] * 2)


# ---------------------------------------------------------------- many tokens, and supports


def wide(rows: int, vocabulary: int) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))


def exact(logits: Tensor, kept: Tensor, temperatures: Tensor) -> Tensor:
    """Return the distribution that is drawn from, float64 [B, V]."""
    return (logits.double() / temperatures[:, None]).masked_fill(kept == 0, -np.inf).softmax(-1)


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("rule", [Support(), Support(top_k=300), Support(top_p=0.7), Support(min_p=0.01)])
def test_edges_are_within_1e_6_of_the_exact_ones_whatever_the_size_of_the_vocabulary(
    vocabulary: int, rule: Support
) -> None:
    """Against float64 sums over all tokens; log-probs within 1e-5, float32. Nothing outside the support is drawn."""
    rows = 40
    logits, temperatures = wide(rows, vocabulary), torch.full((rows,), 0.8)
    points = torch.from_numpy(uniforms(Draw(5, 0, 0), rows))
    points[0], points[1] = 0.0, BELOW_1
    cuts = Cuts.of([rule] * rows)
    scaled = logits / temperatures[:, None]
    kept = torch.ones_like(logits) if cuts is None else edge_of(scaled, cuts).kept(scaled)
    tokens, log_probs = draw_tokens(logits, points, temperatures, cuts)
    probabilities = exact(logits, kept, temperatures)
    cumulative = probabilities.cumsum(-1)
    chosen = tokens[:, None]
    assert (probabilities.gather(-1, chosen) > 0).all()
    above, below = cumulative.gather(-1, chosen), (cumulative - probabilities).gather(-1, chosen)
    assert (below.squeeze(1) - 1e-6 <= points).all()
    assert (points <= above.squeeze(1) + 1e-6).all()
    expected = probabilities.gather(-1, chosen).squeeze(1).log().float()
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)


def test_a_row_with_its_support_is_drawn_alike_alone_and_in_any_batch() -> None:
    """Supports, temperatures and greedy rows mixed; log-probs within 1e-6, relative and absolute, float32."""
    rules = [
        Support(),
        Support(top_k=3),
        Support(top_p=0.5),
        Support(min_p=0.2),
        Support(4, 0.9, 0.01),
        Support(top_k=1),
    ]
    logits, temperatures = wide(6, 600), torch.tensor([1.0, 0.5, 1.0, 2.0, 0.0, 0.7])
    points = torch.from_numpy(uniforms(Draw(6, 0, 0), 6))
    tokens, log_probs = draw_tokens(logits, points, temperatures, Cuts.of(rules))
    for i, rule in enumerate(rules):
        one = slice(i, i + 1)
        token, log_prob = draw_tokens(logits[one], points[one], temperatures[one], Cuts.of([rule]))
        assert token.tolist() == tokens[one].tolist()
        torch.testing.assert_close(log_prob, log_probs[one], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert tokens[4] == logits[4].argmax()
    assert log_probs.isnan().tolist() == [False] * 4 + [True, False]
    assert (tokens[5], log_probs[5]) == (logits[5].argmax(), 0.0)


@pytest.mark.parametrize("rule", [Support(top_k=3), Support(top_p=0.8), Support(min_p=0.3), Support(4, 0.9, 0.05)])
def test_frequencies_are_the_truncated_distribution(rule: Support) -> None:
    """40,000 draws from 6 tokens; each frequency within 0.0115 (4.6 standard errors at most), none outside."""
    logits = torch.tensor([[0.3, -1.0, 1.2, -np.inf, 0.0, 2.0]]).expand(40_000, -1)
    cuts = Cuts.of([rule])
    assert cuts is not None
    kept = edge_of(logits[:1], cuts).kept(logits[:1])
    tokens, _ = draw_tokens(logits, torch.from_numpy(uniforms(Draw(12, 0, 0), 40_000)), torch.ones(40_000), cuts)
    expected = exact(logits[:1], kept, torch.ones(1))[0]
    frequencies = torch.bincount(tokens, minlength=6) / 40_000
    assert 1 < int((expected > 0).sum()) < 5
    assert frequencies[expected == 0].tolist() == [0.0] * int((expected == 0).sum())
    torch.testing.assert_close(frequencies.double(), expected, rtol=0, atol=0.0115)


@pytest.mark.parametrize("rule", [Support(top_k=1), Support(top_p=0.5), Support(min_p=0.5)])
@pytest.mark.parametrize("bad", [[np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]])
def test_logits_that_are_no_distribution_are_refused_with_a_support_as_well(bad: list[float], rule: Support) -> None:
    with pytest.raises(ModelError, match="row 1 of 2"):
        draw_tokens(torch.tensor([[0.0, 0.0], bad]), torch.tensor([0.5, 0.5]).double(), torch.ones(2), Cuts.of([rule]))


def test_drawing_carries_no_gradient_and_leaves_the_logits_alone() -> None:
    logits = wide(2, 300).requires_grad_(True)
    before = logits.tolist()
    _, log_probs = draw_tokens(logits, torch.tensor([0.3, 0.6]).double(), torch.ones(2), Cuts.of([Support(top_k=5)]))
    assert not log_probs.requires_grad
    assert logits.tolist() == before
