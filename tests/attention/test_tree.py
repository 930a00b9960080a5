"""`tree_attention` against the obvious oracle: all scores at once in float64, -inf where a pair does not attend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.trees import Segments, forests, laid_out, wanted
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ramet.attention import tree
from ramet.attention.tree import Rule, tree_attention

CPU = torch.device("cpu")
TREE: Segments = [(9, -1), (7, 0), (3, 1), (5, 1), (4, 0), (1, 4), (1, 4), (6, -1), (2, 7), (1, -1)]
"""Three trees of 28, 8 and 1 tokens, the first of three levels."""


PLAIN = Rule(0.3)


@dataclass(frozen=True)
class Case:
    """Inputs of one call: heads of queries and of keys, widths of keys and of values."""

    segments: Segments
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (8, 8)
    size: int = 5
    window: int | None = None
    rule: Rule = PLAIN
    sinks: bool = False
    spread: float = 1.0
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def inputs(self) -> list[Tensor]:
        """Return query, key, value and, if there are any, sinks: leaves that want a gradient."""
        generator = torch.Generator().manual_seed(self.seed)
        total = sum(length for length, _ in self.segments)
        shapes = [
            (self.heads[0], total, self.widths[0]),
            (self.heads[1], total, self.widths[0]),
            (self.heads[1], total, self.widths[1]),
            *([(self.heads[0],)] if self.sinks else []),
        ]
        return [
            (self.spread * torch.randn(shape, generator=generator, dtype=torch.float64)).to(self.dtype).requires_grad_()
            for shape in shapes
        ]

    def mine(self, *inputs: Tensor) -> Tensor:
        layout, _ = laid_out(self.segments, self.size)
        rule = replace(self.rule, window=self.window, sinks=inputs[3] if self.sinks else None)
        return tree_attention(*inputs[:3], layout.blocks(self.window, CPU), rule)

    def oracle(self, *inputs: Tensor) -> Tensor:
        _, paths = laid_out(self.segments, self.size)
        mask = torch.from_numpy(wanted(paths, self.window)).bool()
        return dense(*inputs[:3], mask, self.rule, *inputs[3:])


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: Rule, sinks: Tensor | None = None) -> Tensor:
    """Attention by all scores at once: [T, Hq, E] in float64."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (tensor.repeat_interleave(len(q) // len(k), 0) for tensor in (k, v))
    scores = rule.scale * q @ k.transpose(1, 2)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:2], 1)], -1)
    return (scores.softmax(-1)[..., : mask.shape[-1]] @ v).transpose(0, 1)


def weights_like(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the output and the gradients of a weighted sum of it."""
    found = function(*inputs)
    return found.detach(), list(torch.autograd.grad((found.double() * weights_like(found)).sum(), inputs))


def agree(case: Case, value: float, gradient: float) -> None:
    """Compare output and gradients with the oracle's, relative to the largest entry of each."""
    inputs = case.inputs()
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, slopes = gradients(case.mine, inputs)
    expected, true_slopes = gradients(case.oracle, exact)
    assert found.dtype == case.dtype
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= value * float(expected.abs().max())
    for input_, slope, true in zip(inputs, slopes, true_slopes, strict=True):
        assert slope.dtype == input_.dtype
        assert slope.shape == input_.shape
        assert float((slope.double() - true).abs().max()) <= gradient * max(float(true.abs().max()), 0.1)


CASES = {
    "plain": Case(TREE),
    "one head each": Case(TREE, heads=(1, 1)),
    "no groups": Case(TREE, heads=(3, 3)),
    "one key head": Case(TREE, heads=(6, 1)),
    "values are narrower": Case(TREE, widths=(8, 3)),
    "values are wider": Case(TREE, widths=(2, 7)),
    "softcap": Case(TREE, rule=Rule(0.9, 1.5), spread=2.0),
    "window": Case(TREE, window=4),
    "window of the token alone": Case(TREE, window=1),
    "window longer than any path": Case(TREE, window=1000),
    "sinks": Case(TREE, sinks=True),
    "sinks that take nearly all": Case(TREE, sinks=True, spread=5.0),
    "all at once": Case(TREE, window=6, rule=Rule(0.7, 2.0), sinks=True, widths=(4, 5), heads=(6, 2)),
    "squares of one token": Case(TREE, size=1),
    "one square a tree": Case(TREE, size=64),
    "one token": Case([(1, -1)]),
    "one token and sinks": Case([(1, -1)], sinks=True),
    "a chain": Case([(70, -1)], size=8),
    "a chain, far past its window": Case([(70, -1)], size=8, window=9),
    "a star": Case([(20, -1)] + [(3, 0)] * 12, size=4),
    "a star, its window reaching some answers only in part": Case([(20, -1)] + [(7, 0)] * 4, size=4, window=5),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_float64(name: str) -> None:
    agree(CASES[name], 1e-13, 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_float32(name: str) -> None:
    agree(replace(CASES[name], dtype=torch.float32), 2e-6, 1e-5)


@pytest.mark.parametrize("name", ["plain", "softcap", "window", "sinks", "all at once", "a chain"])
def test_values_and_gradients_bfloat16(name: str) -> None:
    """A bfloat16 has 8 bits: the output is rounded by up to 4e-3, and the gradients of what came back so as well."""
    agree(replace(CASES[name], dtype=torch.bfloat16), 4e-3, 8e-3)


def off(case: Case) -> list[float]:
    """Return how far output and gradients are from the oracle's, relatively, in Euclidean norms."""
    inputs = case.inputs()
    found, slopes = gradients(case.mine, inputs)
    expected, true_slopes = gradients(case.oracle, [tensor.detach().double().requires_grad_() for tensor in inputs])
    pairs = zip([found, *slopes], [expected, *true_slopes], strict=True)
    return [float((mine.double() - true).norm() / true.norm()) for mine, true in pairs]


SHARP = Case(TREE, widths=(64, 64), rule=Rule(0.1), spread=3.0, dtype=torch.bfloat16)
"""Scores of some ±7 and up to 25: rounded to bfloat16 themselves, they would be off by up to 0.06."""


def test_only_inputs_and_outputs_are_rounded_to_bfloat16() -> None:
    """Rounding is off by some 1.5e-3 on the whole: of outputs once, of gradients and of what comes back once each."""
    value, *slopes = off(SHARP)
    assert value < 2e-3
    assert max(slopes) < 4e-3


def bmm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """The `torch.bmm` that CUDA alone has."""
    assert left.dtype == right.dtype == torch.bfloat16
    return left.to(out_dtype) @ right.to(out_dtype)


@pytest.fixture
def sums_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products of bfloat16 made as on CUDA: of 16 bits, summed up in float32."""
    monkeypatch.setattr(tree, "_sums_wide", lambda _: True)
    monkeypatch.setattr(torch, "bmm", bmm)


@pytest.mark.usefixtures("sums_wide")
@pytest.mark.parametrize("name", CASES)
def test_products_of_bfloat16_that_are_float32(name: str) -> None:
    agree(replace(CASES[name], dtype=torch.bfloat16), 5e-3, 1e-2)
    agree(replace(CASES[name], dtype=torch.float32), 2e-6, 1e-5)


@pytest.mark.usefixtures("sums_wide")
def test_scores_are_not_rounded_where_products_of_bfloat16_are_float32() -> None:
    """Probabilities are, and what comes back to the scores."""
    value, *slopes = off(SHARP)
    assert value < 2e-3
    assert max(slopes) < 5e-3


@settings(deadline=None, max_examples=40)
@given(
    segments=forests(longest=9, most=10),
    size=st.integers(1, 12),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.just(2.0),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_tree(
    segments: Segments,
    size: int,
    window: int | None,
    softcap: float | None,
    heads: tuple[int, int],
    sinks: bool,
    seed: int,
) -> None:
    case = Case(
        segments, heads, (4, 3), size, window, Rule(0.5, softcap), sinks, spread=2.0, dtype=torch.float64, seed=seed
    )
    agree(case, 1e-12, 1e-11)


@pytest.mark.parametrize("name", ["plain", "all at once", "one key head"])
def test_gradcheck(name: str) -> None:
    case = replace(CASES[name], segments=[(3, -1), (2, 0), (1, 0), (1, -1)], size=2, widths=(2, 3))
    assert torch.autograd.gradcheck(case.mine, case.inputs())


@pytest.mark.parametrize("name", ["plain", "all at once", "a chain"])
def test_pieces_of_rectangles_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few scores may exist at once; 1 is less than one row of them."""
    for scores in (1, 37, 200):
        monkeypatch.setattr(tree, "SCORES", scores)
        agree(CASES[name], 1e-13, 1e-12)


def test_by_hand() -> None:
    """Two answers of one token behind a prompt of one: equal scores give halves, and neither sees the other."""
    layout, _ = laid_out([(1, -1), (1, 0), (1, 0)])
    value = torch.tensor([[[2.0], [4.0], [10.0]]])
    blank = torch.zeros(1, 3, 1)
    found = tree_attention(blank, blank, value, layout.blocks(None, CPU), Rule(1.0))
    assert found.flatten().tolist() == [2.0, 3.0, 6.0]
    sunk = tree_attention(blank, blank, value, layout.blocks(None, CPU), Rule(1.0, sinks=torch.zeros(1)))
    torch.testing.assert_close(sunk.flatten(), torch.tensor([1.0, 2.0, 4.0]))  # nothing takes a half, then a third


# ---------------------------------------------------------------- hard numbers


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [4, 64])
def test_large_equal_scores_share_alike(scale: float, sign: float, size: int) -> None:
    """Scores of ±scale, all equal and exact in float32: each key has the same share, to the last bit of the score."""
    layout, paths = laid_out(TREE, size)
    tolerance = 2e-6 + 3e-7 * scale
    total = len(layout)
    value = torch.randn(1, total, 3, generator=torch.Generator().manual_seed(1))
    query, key = torch.full((1, total, 1), scale), torch.full((1, total, 1), sign)
    query, key, value = (tensor.requires_grad_() for tensor in (query, key, value))
    blocks = layout.blocks(None, CPU)
    found, slopes = gradients(lambda *given: tree_attention(*given, blocks, Rule(1.0)), [query, key, value])
    means = torch.stack([value[0, path].double().mean(0) for path in paths])
    torch.testing.assert_close(found[:, 0].double(), means.detach(), rtol=0, atol=tolerance)
    pulled = weights_like(found)[:, 0]
    expected = torch.zeros_like(pulled)
    for token, path in enumerate(paths):
        expected[path] += pulled[token] / len(path)
    torch.testing.assert_close(slopes[2][0].double(), expected, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("spread", [30.0, 100.0])
def test_peaked_scores_are_finite_and_right(spread: float) -> None:
    """Scores of some ±spread²: one key takes all, but for a few ties, and gradients are tiny where they are not 0."""
    case = Case(TREE, spread=spread, rule=Rule(1.0), dtype=torch.float64)
    agree(case, 1e-9, 1e-7)
    inputs = replace(case, dtype=torch.float32).inputs()
    found, slopes = gradients(replace(case, dtype=torch.float32).mine, inputs)
    assert all(bool(tensor.isfinite().all()) for tensor in (found, *slopes))
    bound = inputs[2].detach().abs().max()
    assert float(found.abs().max()) <= float(bound) * 1.001


@pytest.mark.parametrize("place", [0, 9, 27])
@pytest.mark.parametrize("height", [1e4, -1e4])
def test_one_score_far_from_the_rest(place: int, height: float) -> None:
    """A key that takes all, or nothing, in whichever block it lies; integers, so that float32 holds the scores."""
    layout, paths = laid_out(TREE, 4)
    total = len(layout)
    key = torch.zeros(1, total, 1)
    key[0, place] = height
    value = torch.arange(total, dtype=torch.float32)[None, :, None]
    found = tree_attention(torch.ones(1, total, 1), key, value, layout.blocks(None, CPU), Rule(1.0))
    for token, path in enumerate(paths):
        kept = [place] if place in path and height > 0 else [at for at in path if at != place or path == [place]]
        assert found[token, 0, 0].item() == pytest.approx(np.mean(kept), rel=1e-5, abs=1e-5)


def test_long_chains_across_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "SCORES", 4096)
    agree(Case([(700, -1), (150, 0), (300, 0)], size=64, heads=(2, 1), dtype=torch.float32), 1e-5, 2e-5)


def test_five_hundred_tiny_trees() -> None:
    """Each tree alone gives the same, so no two trees know of each other."""
    segments: Segments = []
    for number in range(500):
        segments += [(1 + number % 3, -1), (1 + number % 2, len(segments))]
    case = Case(segments, heads=(2, 1), size=128, dtype=torch.float32)
    agree(case, 2e-6, 1e-5)
    q, k, v = (tensor.detach() for tensor in case.inputs())
    whole = case.mine(q, k, v)
    start = 0
    for number in range(0, 1000, 2):
        pair = segments[number][0] + segments[number + 1][0]
        part = slice(start, start + pair)
        if number % 100 == 0:
            alone = Case([(pair, -1)]).mine(q[:, part], k[:, part], v[:, part])
            torch.testing.assert_close(alone, whole[part], rtol=1e-5, atol=1e-6)
        start += pair


# ---------------------------------------------------------------- how it is called


def test_what_is_far_away_does_not_matter() -> None:
    """Infinite and absent numbers in one tree leave the others alone, gradients included."""
    case = Case([(6, -1), (7, -1), (3, 1)], size=4)
    q, k, v = case.inputs()
    clean = case.mine(q, k, v)
    for bad in (torch.nan, torch.inf):
        spoilt = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        with torch.no_grad():
            for tensor in spoilt:
                tensor[:, 6:] = bad
        found = case.mine(*spoilt)
        assert torch.equal(found[:6], clean[:6])
        for slope in torch.autograd.grad(found[:6].sum(), spoilt):
            assert bool(slope[:, :6].isfinite().all())


@pytest.mark.parametrize("size", [4, 64])
def test_answers_do_not_see_each_other(size: int) -> None:
    """Changing one answer changes no output of another, to the last bit."""
    case = Case([(6, -1), (5, 0), (4, 0)], size=size)
    q, k, v = (tensor.detach() for tensor in case.inputs())
    before = case.mine(q, k, v)
    changed = [tensor.clone() for tensor in (q, k, v)]
    for tensor in changed:
        tensor[:, 6:11] += 3
    after = case.mine(*changed)
    assert torch.equal(before[11:], after[11:])
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6:11], after[6:11])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_that_are_not_contiguous(dtype: torch.dtype) -> None:
    """As models give them: [T, H, D] transposed, one slice of a fused projection, one vector expanded."""
    case = replace(CASES["all at once"], dtype=dtype)
    q, k, v, sinks = (tensor.detach() for tensor in case.inputs())
    expected, slopes = gradients(case.mine, [tensor.clone().requires_grad_() for tensor in (q, k, v, sinks)])
    strided = [
        q.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        torch.stack([k, k], -1)[..., 1].requires_grad_(),
        v.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        torch.stack([sinks, sinks], -1)[:, 0].requires_grad_(),
    ]
    assert not any(tensor.is_contiguous() for tensor in strided)
    found, found_slopes = gradients(case.mine, strided)
    for mine, plain in zip([found, *found_slopes], [expected, *slopes], strict=True):
        torch.testing.assert_close(mine, plain)


def test_gradients_that_are_not_contiguous() -> None:
    case = CASES["plain"]
    inputs = case.inputs()
    weights = weights_like(case.mine(*inputs))
    for pulled in (weights.permute(2, 1, 0).contiguous().permute(2, 1, 0), weights[:1, :1, :1].expand_as(weights)):
        found = torch.autograd.grad(case.mine(*inputs), inputs, pulled)
        expected = torch.autograd.grad(case.oracle(*inputs), inputs, pulled)
        for mine, true in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, true)


def test_an_expanded_key_gets_the_sum_of_its_gradients() -> None:
    case = replace(CASES["plain"], heads=(4, 2))
    q, k, v = case.inputs()
    one = k[:1].detach().requires_grad_()
    [found] = torch.autograd.grad(case.mine(q, one.expand_as(k), v).square().sum(), [one])
    [expected] = torch.autograd.grad(case.oracle(q, one.expand_as(k), v).square().sum(), [one])
    torch.testing.assert_close(found, expected)


def test_the_same_blocks_serve_again() -> None:
    """Twice in one graph, and for other widths, heads and dtypes."""
    layout, _ = laid_out(TREE, 5)
    blocks = layout.blocks(None, CPU)
    for case in (CASES["plain"], replace(CASES["plain"], heads=(2, 2), widths=(3, 5), dtype=torch.float32)):
        q, k, v = case.inputs()
        first, second = (tree_attention(q, k, v, blocks, case.rule) for _ in range(2))
        assert torch.equal(first, second)
        [both] = torch.autograd.grad((first + second).square().sum(), [q], retain_graph=True)
        [alone] = torch.autograd.grad((2 * case.mine(q, k, v)).square().sum(), [q])
        torch.testing.assert_close(both, alone)
        torch.autograd.grad(first.sum(), [q], retain_graph=True)
        torch.autograd.grad(first.sum(), [q])


def test_inputs_are_left_alone() -> None:
    """Queries, keys, values and sinks, as they were after forward and backward."""
    inputs = CASES["all at once"].inputs()
    before = [tensor.detach().clone() for tensor in inputs]
    gradients(CASES["all at once"].mine, inputs)
    assert all(torch.equal(tensor.detach(), copy) for tensor, copy in zip(inputs, before, strict=True))


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_one_input_alone_wants_a_gradient(at: int) -> None:
    case = CASES["all at once"]
    inputs = case.inputs()
    everything = torch.autograd.grad(case.mine(*inputs).square().sum(), inputs)
    alone = [tensor.detach().requires_grad_(number == at) for number, tensor in enumerate(inputs)]
    [found] = torch.autograd.grad(case.mine(*alone).square().sum(), [alone[at]])
    torch.testing.assert_close(found, everything[at])


def test_no_gradient_where_none_is_wanted() -> None:
    case = CASES["all at once"]
    inputs = case.inputs()
    with torch.no_grad():
        silent = case.mine(*inputs)
    assert not silent.requires_grad
    assert torch.equal(silent, case.mine(*inputs).detach())
    with torch.inference_mode():
        assert torch.equal(case.mine(*inputs), silent)


def test_an_in_place_change_between_forward_and_backward_is_refused() -> None:
    q, k, v = CASES["plain"].inputs()
    found = CASES["plain"].mine(q * 1, key := k * 1, v)
    key += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_second_derivatives_are_refused() -> None:
    inputs = CASES["plain"].inputs()
    [slope] = torch.autograd.grad(CASES["plain"].mine(*inputs).square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("name", ["plain", "all at once"])
def test_under_checkpointing(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    expected, slopes = gradients(case.mine, inputs)
    found, again = gradients(lambda *given: checkpoint(case.mine, *given, use_reentrant=False), inputs)
    assert torch.equal(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(again, slopes, strict=True))


@pytest.mark.parametrize("values", [torch.bfloat16, torch.float32])
def test_under_autocast(values: torch.dtype) -> None:
    """Autocast computes in its dtype, whatever mix it is given, and gradients have the dtypes of the inputs."""
    case = replace(CASES["sinks"], dtype=torch.float32)
    q, k, v, sinks = case.inputs()
    mixed = [q, k, v.detach().to(values).requires_grad_(), sinks]
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, mixed[2], sinks)]
    with torch.autocast("cpu", torch.bfloat16):
        found = case.mine(*mixed)
    assert found.dtype == torch.bfloat16
    slopes = torch.autograd.grad((found.double() * weights_like(found)).sum(), mixed)
    expected, true_slopes = gradients(case.oracle, exact)
    assert float((found.detach().double() - expected).abs().max()) < 1e-2 * float(expected.abs().max())
    for tensor, slope, true in zip(mixed, slopes, true_slopes, strict=True):
        assert slope.dtype == tensor.dtype
        assert float((slope.double() - true).abs().max()) < 2e-2 * float(true.abs().max())


def test_sinks_of_another_dtype() -> None:
    """Sinks stay in float32 in many models of bfloat16."""
    case = replace(CASES["sinks"], dtype=torch.bfloat16)
    q, k, v, sinks = case.inputs()
    wide = sinks.detach().float().requires_grad_()
    found = case.mine(q, k, v, wide)
    assert found.dtype == torch.bfloat16
    [slope] = torch.autograd.grad(found.sum(), [wide])
    assert slope.dtype == torch.float32


def test_no_tokens() -> None:
    """An empty row has an empty answer, and its gradient is empty as well."""
    layout, _ = laid_out([], 5)
    q, k, v = (torch.zeros(heads, 0, 4, requires_grad=True) for heads in (4, 2, 2))
    found = tree_attention(q, k, v, layout.blocks(None, CPU), Rule(1.0))
    assert found.shape == (0, 4, 4)
    [slope] = torch.autograd.grad(found.sum(), [q])
    assert slope.shape == q.shape


def test_what_is_kept_for_the_backward_pass_is_linear_in_the_tokens() -> None:
    """No scores: queries, keys, values, the output and one normaliser per token and head."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    case = Case([(400, -1)], heads=(4, 2), widths=(8, 8), size=64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.mine(*case.inputs())
    assert 0 < sum(kept) <= 400 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8 + 4)


def test_scale_is_that_of_the_products() -> None:
    case = CASES["plain"]
    q, k, v = case.inputs()
    doubled = replace(case, rule=Rule(2 * case.rule.scale)).mine(q, k, v)
    torch.testing.assert_close(doubled, case.mine(2 * q, k, v))
