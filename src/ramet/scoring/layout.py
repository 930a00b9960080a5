"""Which tokens of a forest a model must see to score some rollouts, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramet.attention.blocks import Layout
from ramet.errors import ForestError
from ramet.forest import ROOT, Forest


@dataclass(frozen=True, slots=True)
class FlatForest:
    """The distinct tokens that are needed, each once, as one row of T tokens in depth-first order.

    `index` int64 [T] says which tokens of the forest they are. The M wanted tokens lie at `places` int64 [M] of the
    forest; what the model says at `sources` int64 [M] of the row is its prediction of them.
    """

    index: Tensor
    layout: Layout
    places: Tensor
    sources: Tensor


def flatten(forest: Forest, rollouts: Sequence[int]) -> FlatForest:
    """Lay out what scoring the sampled tokens of `rollouts` needs; what comes behind the last of them is left out.

    Raises `ForestError` where a sampled token has no token before it.
    """
    wanted = np.zeros(len(forest.tokens), dtype=bool)
    wanted[forest.sampled(rollouts).index.numpy()] = True
    order, kids = _needed(forest, rollouts)
    table = forest.nodes.table
    if any(wanted[table[child].start] for child in kids[ROOT]):
        raise ForestError(
            "score: a sampled token has no token before it, so a causal model gives it no distribution",
            hint="start the prompt with a beginning-of-text token",
        )
    # From the leaves up: a segment is needed whole if something hangs from it, else up to the last source in it.
    sizes: dict[int, int] = {}
    alive: dict[int, bool] = {}
    found = {node: np.flatnonzero(wanted[table[node].start : table[node].end]) for node in order[1:]}
    for node in reversed(order[1:]):
        entry, inside = table[node], found[node]
        whole = any(alive[child] for child in kids[node])
        sizes[node] = entry.end - entry.start if whole else int(inside[-1]) if inside.size else 0
        alive[node] = whole or bool(inside.size)
    spans, depths = [], []
    ends: dict[int, int] = {}
    offset: dict[int, int] = {}
    total = 0
    for node in order[1:]:
        offset[node] = total
        total += sizes[node]
        spans.append(np.arange(table[node].start, table[node].start + sizes[node]))
        depths.append(np.arange(sizes[node]) + table[table[node].parent].depth)
    for node in reversed(order[1:]):
        ends[node] = max([offset[node] + sizes[node], *(ends[child] for child in kids[node])])
    places, sources = [], []
    for node in order[1:]:
        entry, inside = table[node], found[node]
        if inside.size:
            before = offset[node] + inside - 1
            if inside[0] == 0:
                before[0] = offset[entry.parent] + sizes[entry.parent] - 1
            places.append(entry.start + inside)
            sources.append(before)
    last = np.concatenate([np.full(sizes[node], ends[node], dtype=np.int64) for node in order[1:]] or [_NONE])
    return FlatForest(
        torch.from_numpy(np.concatenate([*spans, _NONE])),
        Layout(last, np.concatenate([*depths, _NONE])),
        torch.from_numpy(np.concatenate([*places, _NONE])),
        torch.from_numpy(np.concatenate([*sources, _NONE])),
    )


_NONE = np.zeros(0, dtype=np.int64)


def _needed(forest: Forest, rollouts: Sequence[int]) -> tuple[list[int], dict[int, list[int]]]:
    """Return the nodes on the paths of `rollouts`, each after its parent and before its siblings' children."""
    kids: dict[int, list[int]] = {ROOT: []}
    for number in rollouts:
        node, below = forest.rollouts[number].end, -1
        while node not in kids:
            kids[node] = [below] if below >= 0 else []
            node, below = forest.parent(node), node
        if below >= 0:
            kids[node].append(below)
    order, stack = [], [ROOT]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += reversed(kids[node])
    return order, kids


def batches(forest: Forest, rollouts: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Cut `rollouts` into runs of at most `max_tokens` distinct tokens, between trees where a tree is not larger.

    A rollout that is longer goes alone. Segments are counted whole, of which `flatten` may need less.
    """
    batch: list[int] = []
    held = 0
    for tree in _by_tree(forest, rollouts):
        whole = _distinct(forest, tree)
        if batch and held + whole > max_tokens:
            yield batch
            batch, held = [], 0
        if whole <= max_tokens:
            batch, held = batch + tree, held + whole
            continue
        pieces = list(_pieces(forest, tree, max_tokens))
        yield from pieces[:-1]
        batch, held = pieces[-1], _distinct(forest, pieces[-1])
    if batch:
        yield batch


def _by_tree(forest: Forest, rollouts: Sequence[int]) -> list[list[int]]:
    """Group neighbours whose paths begin with the same node."""
    trees: list[list[int]] = []
    before: int | None = None
    for number in rollouts:
        root = ROOT
        for node in forest.ancestors(forest.rollouts[number].end):
            if node != ROOT:
                root = node
        if root != before:
            trees.append([])
        trees[-1].append(number)
        before = root
    return trees


def _distinct(forest: Forest, rollouts: Sequence[int]) -> int:
    nodes = {node for number in rollouts for node in forest.ancestors(forest.rollouts[number].end)}
    return sum(len(forest.nodes.segment(node)) for node in nodes)


def _pieces(forest: Forest, rollouts: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    seen: set[int] = set()
    held = 0
    for number in rollouts:
        path = list(forest.ancestors(forest.rollouts[number].end))
        fresh = [node for node in path if node not in seen]
        size = sum(len(forest.nodes.segment(node)) for node in fresh)
        if batch and held + size > max_tokens:
            yield batch
            batch, seen, fresh = [], set(), path
            held, size = 0, sum(len(forest.nodes.segment(node)) for node in path)
        batch.append(number)
        seen.update(fresh)
        held += size
    yield batch
