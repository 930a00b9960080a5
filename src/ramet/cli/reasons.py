"""Why rollouts have no score: the most frequent reasons, told on stderr."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ramet.viewer.text import visible

MOST = 3
"""How many reasons are told."""


def reasons_of(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the most frequent reasons why records have no score, and how many have each.

    >>> reasons_of([{"score": None, "reason": "", "outcome": "abstained"}, {"score": 1.0}])
    {'abstained': 1}
    """
    found = Counter(record.get("reason") or str(record.get("outcome")) for record in records if record["score"] is None)
    return dict(found.most_common(MOST))


def tell(reasons: Mapping[str, int], records: Sequence[Mapping[str, Any]]) -> int:
    """Tell the reasons on stderr; return the exit code: 1 where no record has a score, else 0."""
    for reason, count in reasons.items():
        click.echo(visible(f"{count} without a score: {reason}"), err=True)
    return 0 if any(record["score"] is not None for record in records) else 1
