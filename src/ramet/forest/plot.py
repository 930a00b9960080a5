"""Trees as they are drawn: their nodes in order, and the figure."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramet.forest.tree import Tree


@dataclass(frozen=True, slots=True)
class Place:
    """A node of a tree that is drawn: how many steps below the root, by which ones, and the number of the one above."""

    tree: Tree
    level: int
    inner: str
    parent: int

    @property
    def path(self) -> str:
        """Its path, as Python writes a tuple."""
        return f"({self.inner},)" if self.level == 1 else f"({self.inner})"


def places(tree: Tree) -> Iterator[Place]:
    """Yield every node, each before its children, with its path as text, which goes on from that of its parent."""
    waiting = [Place(tree, 0, "", -1)]
    for number in itertools.count():
        if not waiting:
            return
        place = waiting.pop()
        yield place
        behind = f"{place.inner}, " if place.level else ""
        below = [Place(t, place.level + 1, f"{behind}{i}", number) for i, t in enumerate(place.tree.subtree)]
        waiting += reversed(below)


@dataclass(frozen=True, slots=True)
class Mark:
    """A node: the mark of its parent (-1: none), how far below the root it is, what it shows, and under the pointer."""

    parent: int
    level: int
    name: str
    label: str


def tree_figure(marks: Sequence[Mark]) -> Any:
    """Draw nodes (each before its children) and the lines between them; return a plotly figure."""
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    across = _positions([mark.parent for mark in marks])
    lines_x: list[float | None] = []
    lines_y: list[float | None] = []
    for mark, x in zip(marks, across, strict=True):
        if mark.parent >= 0:
            lines_x += [across[mark.parent], x, None]
            lines_y += [1.0 - mark.level, -float(mark.level), None]
    # plotly reads tags in its labels: what a model wrote is shown as it is.
    lines = go.Scatter(x=lines_x, y=lines_y, mode="lines", hoverinfo="skip", line={"color": "#9aa5b1"})
    nodes = go.Scatter(
        x=across,
        y=[-mark.level for mark in marks],
        mode="markers+text",
        text=[html.escape(mark.name) for mark in marks],
        textposition="top center",
        hovertext=[html.escape(mark.label) for mark in marks],
        hoverinfo="text",
        marker={"size": 12, "color": "#3578d4"},
    )
    figure = go.Figure([lines, nodes])
    figure.update_layout(showlegend=False, plot_bgcolor="white")
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def _positions(parents: Sequence[int]) -> list[float]:
    """Place leaves side by side, and every other node above the middle of its children."""
    across = [0.0] * len(parents)
    below: list[list[float]] = [[] for _ in parents]
    leaves = len(parents) - len({parent for parent in parents if parent >= 0})
    for number in range(len(parents) - 1, -1, -1):  # children before their parent, leaves from the right
        if below[number]:
            across[number] = (min(below[number]) + max(below[number])) / 2
        else:
            leaves -= 1
            across[number] = float(leaves)
        if parents[number] >= 0:
            below[parents[number]].append(across[number])
    return across
