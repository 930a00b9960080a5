"""Random forests of segments, and which of their tokens attend to which, from each token's path alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ramet.attention.blocks import Layout

Segments = list[tuple[int, int]]
"""Each segment's length and its parent's number, -1 for a root; a parent comes before its children."""


def laid_out(segments: Segments, size: int = 128) -> tuple[Layout, list[list[int]]]:
    """Return the layout of a forest, and for each token its ancestors and itself, from the root down."""
    kids: dict[int, list[int]] = {-1: []}
    for number, (_, parent) in enumerate(segments):
        kids[number] = []
        kids[parent].append(number)
    paths: list[list[int]] = []
    last: list[int] = []

    def visit(node: int, above: list[int]) -> None:
        first = len(paths)
        for _ in range(segments[node][0]):
            above = [*above, len(paths)]
            paths.append(above)
            last.append(0)
        middle = len(paths)
        for kid in kids[node]:
            visit(kid, above)
        last[first:middle] = [len(paths)] * (middle - first)

    for root in kids[-1]:
        visit(root, [])
    depths = [len(path) - 1 for path in paths]
    return Layout(np.array(last, dtype=np.int64), np.array(depths, dtype=np.int64), size), paths


@st.composite
def forests(draw: st.DrawFn, longest: int = 12, most: int = 14) -> Segments:
    """Draw a forest of up to `most` segments: chains, stars, and several trees."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    return [(length, draw(st.integers(-1, number - 1))) for number, length in enumerate(lengths)]


def wanted(paths: list[list[int]], window: int | None) -> np.ndarray[Any, Any]:
    """Say which token [T] attends to which [T], from each token's path alone."""
    found = np.zeros((len(paths), len(paths)), dtype=np.int64)
    for token, path in enumerate(paths):
        found[token, path if window is None else path[-window:]] = 1
    return found
