"""A tree small enough to be run on the first use of a model, and rich enough to show what the model makes of trees."""

from __future__ import annotations

import torch
from torch import Tensor

from ramet.forest import Forest
from ramet.types import Kind


def small_forest(vocabulary: int, *, reach: int = 0, limit: int | None = None, seed: int = 0) -> Forest:
    """Make a tree of two levels with leaves of different lengths, ids below `vocabulary` that are a function of `seed`.

    Its paths lie on both sides of `reach` tokens, and none is longer than `limit`.

    >>> forest = small_forest(64)
    >>> sorted({len(forest.path(number)) for number in range(len(forest.rollouts))})
    [17, 20, 23, 24, 27, 35]
    """
    prompt, left, right = reach - 2 if reach > 2 else 16, 8, 2
    leaves: tuple[int, ...] = (1, 3, 11, 2, 5)
    if limit is not None and prompt + left + max(leaves) > limit:
        share = max(limit - 3, 1) / (prompt + left + max(leaves))
        prompt, left, right = (max(1, int(size * share)) for size in (prompt, left, right))
        leaves = tuple(max(1, int(size * share)) for size in leaves)
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randint(0, vocabulary, (count,), generator=generator)

    start, branches = draw(prompt), (draw(left), draw(right))
    paths = [[draw(leaves[0])], [branches[0]], [branches[0], draw(leaves[1])], [branches[0], draw(leaves[2])]]
    paths += [[branches[1], draw(leaves[3])], [branches[1], draw(leaves[4])]]
    forest = Forest()
    numbers = forest.plant([start] * len(paths), groups=[0] * len(paths), members=range(len(paths)))
    for number, path in zip(numbers, paths, strict=True):
        answer = torch.cat(path)
        forest.grow([number], [answer], Kind.SAMPLED, log_probs=[torch.zeros(len(answer))], versions=[0])
    return forest
