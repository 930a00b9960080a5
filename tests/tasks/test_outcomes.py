"""The page on tasks: its table of outcomes is what the learner does, and its examples run."""

from __future__ import annotations

import doctest
import itertools
import re
from pathlib import Path

import pytest
import torch

from ramet.advantages import group_mean
from ramet.forest import Forest
from ramet.learner import outcomes_of
from ramet.tasks.build import BY_NAME, OF_PACKAGES
from ramet.types import Outcome, OutcomeKind, StopReason

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
NEVER = {(OutcomeKind.SCORED, StopReason.ERROR), (OutcomeKind.ABSTAINED, StopReason.ERROR)}  # these are not judged


def table() -> dict[tuple[OutcomeKind, StopReason], dict[str, bool]]:
    """Outcome and stop reason, and whether such a rollout counts with each setting."""
    part = PAGE.read_text(encoding="utf-8").split("## Outcomes", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("|")][2:]
    return {
        (OutcomeKind(outcome), StopReason(stop)): {"score": keep == "yes", "drop": drop == "yes"}
        for outcome, stops, keep, drop in rows
        for stop in stops.split(", ")
    }


def outcome_of(kind: OutcomeKind) -> Outcome:
    return Outcome.scored(1.0) if kind is OutcomeKind.SCORED else Outcome(kind, reason="why")


def test_the_table_has_every_case_once() -> None:
    assert set(table()) == set(itertools.product(OutcomeKind, StopReason)) - NEVER


@pytest.mark.parametrize("truncated", ["score", "drop"])
def test_the_table_says_what_the_learner_does(truncated: str) -> None:
    """One member of each kind in a group beside two that have scores of 0 and 3."""
    cases = table()
    forest = Forest()
    prompt = torch.tensor([1, 2, 3])
    count = 3 * len(cases)
    groups = [number // 3 for number in range(count)]
    forest.plant([prompt] * count, groups=groups, members=[number % 3 for number in range(count)])
    for number, (kind, stop) in enumerate(cases):
        low, high, odd = forest.rollouts[3 * number : 3 * number + 3]
        for rollout, score in ((low, 0.0), (high, 3.0)):
            rollout.outcome, rollout.stop = Outcome.scored(score), StopReason.EOS
        odd.outcome, odd.stop = outcome_of(kind), stop
    scores, found, valid = outcomes_of(forest, truncated=truncated)
    gains = group_mean(scores, found, valid=valid).reshape(-1, 3).tolist()
    for (case, counts), gain, counted in zip(cases.items(), gains, valid.reshape(-1, 3).tolist(), strict=True):
        assert counted == [True, True, counts[truncated]], case
        # With the odd one, which scores 1, the mean of the group is 4/3; without it, 3/2, and it has no advantage.
        assert gain == pytest.approx([-4 / 3, 5 / 3, -1 / 3] if counts[truncated] else [-1.5, 1.5, 0.0]), case


def test_the_page_names_every_task() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in BY_NAME:
        assert f"| `{name}` |" in text
    for name in OF_PACKAGES:
        assert f"| `{name}:" in text
    for module, function in re.findall(r"`(ramet\.tasks\.\w+)\.(\w+)` \|$", text, re.M):
        assert callable(getattr(__import__(module, fromlist=["_"]), function))


def test_the_examples_of_the_page_run() -> None:
    failed, attempted = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert (failed, attempted > 12) == (0, True)
