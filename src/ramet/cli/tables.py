"""Numbers with their intervals, in columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramet.metrics import Interval
from ramet.viewer.summary import number
from ramet.viewer.text import visible


def shown(interval: Interval | None) -> str:
    """Return a number with the ends of its interval, where it has them.

    >>> shown(Interval(0.5, 0.25, 0.75)), shown(Interval(0.5, float("-inf"), float("inf"))), shown(None)
    ('0.500 (0.250 to 0.750)', '0.500', '-')
    """
    if interval is None:
        return "-"
    value, low, high = interval
    ends = f" ({number(low)} to {number(high)})" if math.isfinite(low) and math.isfinite(high) else ""
    return number(value) + ends


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells under a head; text, not markup, with hidden characters spelled out."""
    console = Console(highlight=False)
    if not console.is_terminal:  # where nobody looks, a table may be as wide as it is
        console = Console(highlight=False, width=10_000)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in head:
        table.add_column(Text(visible(name)))
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())
