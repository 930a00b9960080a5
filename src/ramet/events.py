"""What a run tells whoever watches it. The trainer makes these, in this order; the command line shows them::

    RunStarted -> (WarmStartStep* -> WarmStarted)? -> Evaluated("before")
               -> (StepDone | Evaluated("during") | CheckpointWritten)* -> Evaluated("after") -> RunEnded

    Stopping, once the steps have begun: Ctrl-C was heard

A `Watcher` is a function of one event. A run that stops early ends without a `RunEnded`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Scores: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By decoding ("greedy", "sampled"): `score`, the ends `low` and `high` of its 95% interval, the number of `problems`
scored, and of those that `failed` or `abstained`; score and interval are None where no problem has a score."""


When: TypeAlias = Literal["before", "during", "after"]
"""When held-out problems were scored: before the first step, between two steps, after the last."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run has a folder, and everything in it is built.

    `first_step` is 1, or one more than the steps that a resumed run has done; `steps` is where the run ends.
    """

    folder: Path
    name: str
    task: str
    model: str
    device: str
    first_step: int
    steps: int


@dataclass(frozen=True, slots=True)
class WarmStartStep:
    """One supervised step; `score` is the greedy validation score where it was measured."""

    step: int
    steps: int
    loss: float
    score: float | None = None


@dataclass(frozen=True, slots=True)
class WarmStarted:
    """The supervised steps are over: how many there were, and the last greedy validation score (None without one)."""

    steps: int
    score: float | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out problems were scored after `step` steps."""

    step: int
    when: When
    held_out: Scores


@dataclass(frozen=True, slots=True)
class StepDone:
    """One step of reinforcement learning, with what was written to `metrics.jsonl` for it."""

    step: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint after `step` steps is complete at `path`."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Stopping:
    """Ctrl-C was heard: the run ends after the step that is running, with a checkpoint."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """All steps are done and everything is on disk; `summary` is what `summary.json` holds."""

    folder: Path
    summary: Mapping[str, Any]


Event: TypeAlias = (
    RunStarted | WarmStartStep | WarmStarted | Evaluated | StepDone | CheckpointWritten | Stopping | RunEnded
)

Watcher: TypeAlias = Callable[[Event], None]
"""What is told of a run."""
