"""Attention over a tree: each pair of a token and one of its ancestors is computed once, and no other.

The blocks of a layout are computed one after the other and joined by their normalisers, as in
https://arxiv.org/abs/2205.14135: the output of a token is the mean of its blocks' outputs, each weighted by the mass it
holds of the softmax. Only queries, keys, values, the output and one normaliser per token and head are kept; the
backward pass computes the probabilities again from the normaliser.

Scores, sums and gradients are float32 even of bfloat16 inputs: a score of 20 in bfloat16 is off by up to 0.06, which is
6 percent of its probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ramet.attention.blocks import Blocks, Rectangle, Squares

SCORES = 2**20
"""How many scores of one rectangle exist at once: bounds memory, and keeps them in the cache of a CPU."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a layer attends: the scores are `scale` times the products, and `softcap` bounds them.

    Of the tokens before it, itself included, one attends to the last `window`. `sinks` float [Hq] are scores of
    nothing, which take their share of each softmax.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


def tree_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, rule: Rule) -> Tensor:
    """Return the attention output [T, Hq, E] of `query` [Hq, T, D], `key` [Hk, T, D] and `value` [Hk, T, E].

    Hq is a multiple of Hk; query head h reads key head h // (Hq / Hk). `blocks` are those for the window of `rule`.
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    run: Any = _TreeAttention.apply
    with torch.autocast(kind, enabled=False):
        # The rule stays with the backward pass, the sinks as one of the tensors that are saved for it.
        rest = replace(rule, sinks=None)
        output: Tensor = run(query.to(dtype), key.to(dtype), value.to(dtype), rule.sinks, blocks, rest)
    return output


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, blocks: Blocks, whole_rule: Rule
    ) -> Tensor:
        q, k, v, rule = _laid_out(query, key, value, whole_rule)
        heads, total, shared, _ = q.shape
        # Every token is in one square: what is made here empty is full before a rectangle adds to it.
        out = torch.empty(heads, total, shared, v.shape[-1], dtype=_wide(v), device=v.device)
        mass = torch.empty(out.shape[:-1], dtype=out.dtype, device=v.device)
        for square in blocks.squares:
            scores, values = _square_scores(q, k, v, square, rule)
            partial, normaliser = _softmax(scores, values)
            _put(out, square, partial.view(heads, -1, shared, values.shape[-1]))
            _put(mass, square, normaliser.view(heads, -1, shared))
        for part in _in_pieces(blocks.rectangles, heads * shared):
            partial, normaliser = _softmax(_rectangle_scores(q, k, part, rule), v[:, part.keys])
            _join(out, mass, part, partial, normaliser)
        if sinks is not None:
            whole = torch.logaddexp(mass, _by_head(sinks, heads).to(mass))
            out *= (mass - whole).exp_()[..., None]
            mass = whole
        ctx.save_for_backward(query, key, value, sinks, out, mass)
        ctx.blocks, ctx.rule = blocks, whole_rule
        return out.transpose(0, 1).reshape(total, heads * shared, v.shape[-1]).to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, mass = ctx.saved_tensors
        q, k, v, rule = _laid_out(query, key, value, ctx.rule)
        heads, total, shared, _ = q.shape
        g = gradient.view(total, heads, shared, v.shape[-1]).transpose(0, 1).contiguous().to(v.dtype)
        inner = (g * out).sum(-1)
        given = _Given(q, k, v, g, mass, inner)
        dq, dk, dv = (torch.empty_like(tensor, dtype=out.dtype) for tensor in (q, k, v))
        into = _Given(dq, dk, dv, g, mass, inner)
        for square in ctx.blocks.squares:
            _square_backward(square, given, into, rule)
        for part in _in_pieces(ctx.blocks.rectangles, heads * shared):
            _rectangle_backward(part, given, into, rule)
        d_sinks = None
        if sinks is not None:
            share = (_by_head(sinks, heads).to(mass) - mass).exp()
            d_sinks = -(share * inner).sum(1).flatten().to(sinks.dtype)
        d_query = torch.empty_like(query)
        torch.mul(into.q.transpose(1, 2), ctx.rule.scale, out=d_query.view(heads, shared, *query.shape[1:]))
        d_key = into.k if rule.scale == 1 else into.k.mul_(rule.scale)
        return d_query, d_key.to(key.dtype), into.v.to(value.dtype), d_sinks, None, None


@dataclass(frozen=True, slots=True)
class _Given:
    """Queries [Hk, T, R, D], keys [Hk, T, D], values [Hk, T, E], and of the output [Hk, T, R, E] what came back.

    `mass` [Hk, T, R] are the normalisers, `inner` [Hk, T, R] the products of the output with its gradient `g`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    mass: Tensor
    inner: Tensor


def _laid_out(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Rule]:
    """Return queries [Hq, T, D] as [Hk, T, Hq / Hk, D], with keys and values, in the dtype of `_product`.

    A run of tokens is then one matrix per key head. Queries are scaled already, and the rule says so, where they are
    not of 16 bits, in which the scale would round them once more.
    """
    grouped = query.view(len(key), len(query) // len(key), *query.shape[1:]).transpose(1, 2)
    if value.dtype != _wide(value) and _sums_wide(value):
        return grouped.contiguous(), key.contiguous(), value.contiguous(), rule
    dtype = _wide(value)
    scaled = torch.mul(grouped.to(dtype), rule.scale, out=query.new_empty(grouped.shape, dtype=dtype))
    return scaled, key.contiguous().to(dtype), value.contiguous().to(dtype), replace(rule, scale=1.0)


def _by_head(sinks: Tensor, heads: int) -> Tensor:
    return sinks.view(heads, 1, -1)


def _flat(tensor: Tensor, part: slice) -> Tensor:
    """Return tokens of [Hk, T, R] or [Hk, T, R, E] as matrices [Hk, n * R] or [Hk, n * R, E], without a copy."""
    return tensor[:, part].flatten(1, 2)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _sums_wide(tensor: Tensor) -> bool:
    """Return whether products of 16 bits can be had in float32; where not, the factors are made float32 first."""
    return tensor.is_cuda and torch.version.cuda is not None


def _product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale * left @ right in float32 or float64; before it, `left` is rounded to the dtype of `right`."""
    if right.dtype == _wide(right):
        nothing = right.new_empty(1, 1, 1)  # beta = 0: it is not read
        return torch.baddbmm(nothing, left, right, beta=0, alpha=scale)
    product = torch.bmm(left.to(right.dtype), right, out_dtype=torch.float32)
    return product if scale == 1 else product.mul_(scale)


def _less(left: Tensor, right: Tensor, taken: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale * left @ right - taken[..., None], as `_product` does."""
    if right.dtype == taken.dtype:
        start = taken.neg()[..., None].expand(-1, -1, right.shape[2])
        return torch.baddbmm(start, left, right, alpha=scale)
    return _product(left, right, scale).sub_(taken[..., None])


def _scores(rows: Tensor, keys: Tensor, rule: Rule) -> Tensor:
    scores = _product(rows, keys.transpose(1, 2), rule.scale)
    return scores if rule.softcap is None else scores.div_(rule.softcap).tanh_().mul_(rule.softcap)


def _softmax(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a block by itself, and the logs of its masses; `scores` are used up."""
    top = scores.amax(-1, keepdim=True)
    top.clamp_min_(torch.finfo(top.dtype).min)  # where nothing is attended to, the mass is as good as none
    weights = scores.sub_(top).exp_()
    mass = weights.sum(-1, keepdim=True)
    partial = _product(weights, values)
    partial /= mass.clamp_min(torch.finfo(mass.dtype).tiny)
    return partial, top.add_(mass.log_()).squeeze(-1)


def _square_scores(q: Tensor, k: Tensor, v: Tensor, square: Squares, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return scores [Hk * N, S * R, S] and values [Hk * N, S, E] of a batch of squares."""
    rows, keys, values = (_gathered(tensor, square) for tensor in (q, k, v))
    scores = _scores(rows, keys, rule)
    _hide(scores, square, len(q))
    return scores, values


def _hide(scores: Tensor, square: Squares, heads: int) -> None:
    number, side = square.index.shape
    scores.view(heads, number, side, -1, side).masked_fill_(square.hidden[:, :, None, :], -torch.inf)


def _gathered(tensor: Tensor, square: Squares) -> Tensor:
    """Return the tokens of squares, of [Hk, T, (R,) D], as matrices [Hk * N, S (* R), D]."""
    return tensor.index_select(1, square.flat).reshape(len(tensor) * len(square.index), -1, tensor.shape[-1])


def _put(into: Tensor, square: Squares, found: Tensor) -> None:
    """Write [Hk, N * S, ...] to the tokens [Hk, T, ...] of squares."""
    if square.filled is None:
        into.index_copy_(1, square.flat, found)
    else:
        into.index_copy_(1, square.flat[square.filled], found.index_select(1, square.filled))


def _rectangle_scores(q: Tensor, k: Tensor, part: Rectangle, rule: Rule) -> Tensor:
    scores = _scores(_flat(q, part.queries), k[:, part.keys], rule)
    if part.hidden is not None:
        scores.view(len(q), -1, q.shape[2], scores.shape[-1]).masked_fill_(part.hidden[:, None, :], -torch.inf)
    return scores


def _join(out: Tensor, mass: Tensor, part: Rectangle, partial: Tensor, normaliser: Tensor) -> None:
    """Add a block's output, of which `normaliser` is the log of its mass, to what the queries have so far."""
    before, so_far = mass[:, part.queries], out[:, part.queries]
    added = normaliser.view(before.shape)
    whole = torch.logaddexp(before, added)
    so_far *= (before - whole).exp_()[..., None]
    so_far += partial.view(so_far.shape).mul_((added - whole).exp_()[..., None])
    before.copy_(whole)


def _in_pieces(rectangles: list[Rectangle], heads: int) -> Iterator[Rectangle]:
    """Cut rectangles into runs of queries of at most SCORES scores."""
    for whole in rectangles:
        step = max(1, SCORES // (heads * (whole.keys.stop - whole.keys.start)))
        for start in range(whole.queries.start, whole.queries.stop, step):
            stop = min(start + step, whole.queries.stop)
            begin = start - whole.queries.start
            hidden = None if whole.hidden is None else whole.hidden[begin : begin + stop - start]
            yield Rectangle(slice(start, stop), whole.keys, hidden)


def _backward(
    given: tuple[Tensor, ...], scores: Tensor, rule: Rule, capped: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a block's queries, keys and values; `scores` less their normalisers are used up."""
    rows, keys, values, upon, inner = given
    p = scores.exp_()
    dv = _product(p.transpose(1, 2), upon)
    ds = _less(upon, values.transpose(1, 2), inner).mul_(p)
    if capped is not None and rule.softcap is not None:  # tanh' = 1 - tanh^2; where p is 0, nothing comes back anyway
        ds *= 1 - (capped / rule.softcap).square_()
    ds = ds.to(rows.dtype)
    return _product(ds, keys), _product(ds.transpose(1, 2), rows), dv


def _again(rows: Tensor, keys: Tensor, mass: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Return the scores of the forward pass less their normalisers, and the scores themselves if they are capped."""
    if rule.softcap is None:
        return _less(rows, keys.transpose(1, 2), mass, rule.scale), None
    capped = _scores(rows, keys, rule)
    return capped - mass[..., None], capped


def _rectangle_backward(part: Rectangle, given: _Given, into: _Given, rule: Rule) -> None:
    rows, keys, values = _flat(given.q, part.queries), given.k[:, part.keys], given.v[:, part.keys]
    scores, capped = _again(rows, keys, _flat(given.mass, part.queries), rule)
    if part.hidden is not None:
        scores.view(len(keys), -1, given.q.shape[2], scores.shape[-1]).masked_fill_(part.hidden[:, None, :], -torch.inf)
    upon, inner = _flat(given.g, part.queries), _flat(given.inner, part.queries)
    dq, dk, dv = _backward((rows, keys, values, upon, inner), scores, rule, capped)
    target = into.q[:, part.queries]
    target += dq.view(target.shape)
    into.k[:, part.keys] += dk
    into.v[:, part.keys] += dv


def _square_backward(square: Squares, given: _Given, into: _Given, rule: Rule) -> None:
    rows, keys, values, upon = (_gathered(tensor, square) for tensor in (given.q, given.k, given.v, given.g))
    mass, inner = (_gathered(tensor[..., None], square).squeeze(-1) for tensor in (given.mass, given.inner))
    if square.filled is not None:  # padding is a token again: it sends nothing back
        real = square.real.view(1, -1, 1, 1)
        upon = (upon.view(len(given.q), real.shape[1], -1, upon.shape[-1]) * real).view_as(upon)
        inner = (inner.view(len(given.q), real.shape[1], -1) * real[..., 0]).view_as(inner)
    scores, capped = _again(rows, keys, mass, rule)
    _hide(scores, square, len(given.q))
    found = _backward((rows, keys, values, upon, inner), scores, rule, capped)
    for total, part in zip((into.q, into.k, into.v), found, strict=True):
        _put(total, square, part.view(len(total), len(square.flat), *total.shape[2:]))
