"""What is asked, and how an answer is judged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ramet.types import Outcome, Sample

Verdict: TypeAlias = float | Mapping[str, float] | Outcome | None
"""A score, named rewards that are added up, a whole outcome, or None (abstain)."""

Reward: TypeAlias = Callable[[Sample], Verdict | Awaitable[Verdict]]
"""A reward function, sync or async."""


@dataclass(frozen=True, slots=True)
class Task:
    """Rows to train on, rows that are held out, and a reward.

    Each row is a mapping with "prompt" (text or messages) and any other columns, which the reward finds in
    `sample.row`. `answer` gives the reference answer of a row where there is one: it is what a supervised warm start
    imitates and what must earn the full reward. `chance` is the mean reward of guessing among well-formed answers.
    """

    name: str
    train: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    reward: Reward
    answer: Callable[[Mapping[str, Any]], str] | None = None
    chance: float | None = None
