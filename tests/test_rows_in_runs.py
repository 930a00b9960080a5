"""Functions that change the row that they are given: a run, its resume and judging again see the rows as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.test_trainer import assert_same, interrupt_after, what_a_run_left
from tests.test_turns import config, trainer

from ramet.metrics import read
from ramet.tasks import Judge, Task
from ramet.tasks.rescoring import rescore
from ramet.types import Episode, Sample

SETTINGS = (
    "steps=2",
    "rollout.prompts_per_step=1",
    "rollout.group_size=2",
    "rollout.max_new_tokens=4",
    "evaluation.every=1",
    "checkpoint.every=1",
)


def greedy(row: Any) -> float:
    """Count in the row itself, at the top and below."""
    row["x"] += 1
    row["deep"]["x"] += 1
    return float(row["x"] + row["deep"]["x"])


def score(sample: Sample) -> float:
    return greedy(sample.row) + len(set(sample.completion_tokens)) / 8


def reply(episode: Episode) -> str | None:
    greedy(episode.row)
    return "1" if episode.turns < 2 else None


PARTS: dict[str, dict[str, Any]] = {
    "one turn": {},
    "turns": {"max_turns": 2, "reply": reply},
}


def made(parts: str) -> Task:
    train, held_out = (
        [{"prompt": [{"role": "user", "content": said}], "answer": "2", "x": 0, "deep": {"x": 0}}] for said in "12"
    )
    return Task("greedy", train, held_out, score, **PARTS[parts])


@pytest.mark.parametrize("parts", PARTS)
def test_a_change_of_a_row_lasts_for_its_call_alone(parts: str, tmp_path: Path) -> None:
    trainer(config(tmp_path / "whole", *SETTINGS), task=made(parts)).train()
    folder = tmp_path / "whole" / "run"
    records = read(folder / "rollouts.jsonl")
    assert sum(record["when"] == "train" for record in records) == 4  # 2 steps of 2 members
    for record in records:
        assert 2 < record["score"] <= 3
        assert record["row"] == {"answer": "2", "x": 0, "deep": {"x": 0}}
    assert [one["score"] for one in rescore(records, Judge(score))] == [one["score"] for one in records]
    broken = config(tmp_path / "broken", *SETTINGS)
    assert trainer(broken, task=made(parts), watcher=interrupt_after(1)).train().interrupted
    trainer(broken, task=made(parts), resume=True).train()
    assert_same(what_a_run_left(broken.folder), what_a_run_left(folder))
