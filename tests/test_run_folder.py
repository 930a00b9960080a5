"""What a run keeps on disk: made once, saved when it is whole, and summed up by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ramet.checkpoint import RunState, checkpoints
from ramet.config import CheckpointConfig
from ramet.errors import CheckpointError, ConfigError, RunExists
from ramet.evaluation import Evaluation
from ramet.events import CheckpointWritten, Event
from ramet.metrics import read
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.run_folder import RunFolder

TOKENIZER = tiny_tokenizer()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


def run_in(path: Path, every: int = 0, keep: int = 1) -> tuple[RunFolder, torch.optim.Optimizer, list[Event]]:
    model = tiny_llama(TOKENIZER, hidden_size=8, layers=1, heads=2, intermediate_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[Event] = []
    settings = CheckpointConfig(every=every, keep=keep)
    return RunFolder(path, model, TOKENIZER, optimizer, settings, told.append), optimizer, told


def saved(run: RunFolder) -> list[str]:
    return [path.name for path in checkpoints(run.checkpoints)]


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    run, _, _ = run_in(tmp_path / "a" / "run")
    run.make()
    with pytest.raises(RunExists, match="is there already"):
        run.make()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can not be made"):
        run_in(tmp_path / "file" / "run")[0].make()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_start_that_fails_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    run, _, _ = run_in(tmp_path / "run")
    run.make()
    with pytest.raises(error), run, run.undone_on_error():
        raise error
    assert not run.path.exists()


def test_checkpoints_come_every_so_many_steps_at_the_last_and_at_the_end(tmp_path: Path) -> None:
    """Every second of five steps, of which the fourth is told to be the last; the fifth is saved at the end, once."""
    run, _, told = run_in(tmp_path / "run", every=2, keep=9)
    run.make()
    with run, run.saving():
        for step in range(1, 6):
            run.stepped(RunState(step, 0, step))
            run.save_if_due(last=step == 3)
        assert saved(run) == ["step-000002", "step-000003", "step-000004"]
    assert saved(run)[-1] == "step-000005"
    assert [event.step for event in told if isinstance(event, CheckpointWritten)] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("moved", "error", "names"),
    [
        (False, RuntimeError("out of memory"), ["step-000001"]),
        (True, RuntimeError("out of memory"), []),
        (False, CheckpointError("the disk is full"), []),
    ],
)
def test_an_error_saves_the_last_step_whose_weights_are_there(
    moved: bool, error: Exception, names: list[str], tmp_path: Path
) -> None:
    run, optimizer, _ = run_in(tmp_path / "run")
    run.make()

    def fail() -> None:
        with run, run.saving():
            run.stepped(RunState(1, 0, 1))
            if moved:
                optimizer.step()
            raise error

    with pytest.raises(type(error)):
        fail()
    assert saved(run) == names
    assert optimizer._optimizer_step_pre_hooks == {}


def test_an_error_whose_checkpoint_fails_says_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, _ = run_in(tmp_path / "run")
    run.make()

    def full(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(torch, "save", full)

    def fail() -> None:
        with run, run.saving():
            run.stepped(RunState(1, 0, 1))
            raise KeyError("x")

    with pytest.raises(KeyError) as raised:
        fail()
    assert "the checkpoint of the last whole step is lost: " in raised.value.__notes__[0]
    assert "no space" in raised.value.__notes__[0]


def test_each_evaluation_is_due_once_and_that_of_an_old_end_stands_for_one_between(tmp_path: Path) -> None:
    run, _, _ = run_in(tmp_path / "run")
    run.make()
    assert run.due(steps=3, every=1) == ["before"]
    assert run.due(steps=0, every=1) == ["before", "after"]
    run.stepped(RunState(3, 0, 3))
    assert [run.due(steps=steps, every=every) for steps, every in ((3, 1), (4, 1), (4, 2), (4, 0))] == [
        ["after"],
        ["during"],
        [],
        [],
    ]
    with run:
        run.note(Evaluation({"greedy": {}}, []), "after")
    assert [run.due(steps=steps, every=1) for steps in (3, 4)] == [[], []]


def test_a_summary_by_hand(tmp_path: Path) -> None:
    """Problem 0 is won, 1 stays; the difference is one half, and the scores are 0.5 and 1."""
    run, _, _ = run_in(tmp_path / "run")
    run.make()
    record = {"step": 0, "when": "before"}
    with run:
        run.note(Evaluation({"greedy": {0: 0.0, 1: 1.0}}, [record]), "before")
        run.stepped(RunState(2, 0, 2))
        assert run.due(steps=4, every=2) == ["during"]
        run.note(Evaluation({"greedy": {0: 1.0, 1: 1.0}}, [{"step": 2, "when": "during"}]), "during")
        assert run.due(steps=4, every=2) == []
        assert run.due(steps=2, every=2) == ["after"]
        run.note(Evaluation({"greedy": {0: 1.0, 1: 1.0}}, []), "after")
    assert run.due(steps=2, every=1) == []
    assert read(run.path / "rollouts.jsonl") == [record]  # those between two steps are not kept
    assert [line["when"] for line in read(run.path / "metrics.jsonl")] == ["before", "during", "after"]
    assert run.summary() == {}
    summary = run.sum_up(steps=2, chance=0.25, seconds=1.5)
    assert [summary[key] for key in ("steps", "chance", "seconds")] == [2, 0.25, 1.5]
    assert [summary["held_out"][when]["greedy"]["score"] for when in ("before", "after")] == [0.5, 1.0]
    assert summary["difference"]["greedy"]["value"] == 0.5
    assert run.summary() == json.loads(json.dumps(summary))
    (run.path / "summary.json").write_text('{"steps": 2', encoding="utf-8")
    assert run.summary() == {}
