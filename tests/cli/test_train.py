"""`ramet train` ends with the results, or says where the checkpoint is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ramet.cli.train import run
from ramet.config import TrainConfig, dump, parse
from ramet.errors import RewardError
from ramet.events import CheckpointWritten, Event, RunEnded, RunStarted, StepDone
from ramet.metrics import MetricsLog

Watcher = Callable[[Event], None]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    overrides = [f"runs='{tmp_path}'", "name=a", "rollout.max_new_tokens=1", "optimizer.learning_rate=1"]
    return parse("steps = 2", overrides)


@pytest.fixture
def train_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TrainConfig, Watcher], bool]], None]:
    """Put a function (config, watcher) -> interrupted in the trainer's place."""

    def replace(train: Callable[[TrainConfig, Watcher], bool]) -> None:
        class Trainer:
            @classmethod
            def from_config(cls, config: TrainConfig, *, watcher: Watcher, resume: bool) -> SimpleNamespace:
                def go() -> SimpleNamespace:
                    interrupted = train(config, watcher)
                    return SimpleNamespace(folder=config.folder, interrupted=interrupted)

                return SimpleNamespace(train=go)

        module = ModuleType("ramet.trainer")
        module.Trainer = Trainer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ramet.trainer", module)

    return replace


def one_step(config: TrainConfig, watcher: Watcher) -> None:
    config.folder.mkdir()
    (config.folder / "config.toml").write_text(dump(config), encoding="utf-8")
    watcher(RunStarted(config.folder, "a", "t", "m", "cpu", 1, 2))
    with MetricsLog(config.folder / "metrics.jsonl") as log:
        log.append({"step": 1, "reward": 0.5})
    watcher(StepDone(1, {"reward": 0.5}))
    watcher(CheckpointWritten(1, config.folder / "checkpoints" / "step-000001"))


def test_a_run_that_ends_prints_its_page_and_its_folder(
    config: TrainConfig, train_with: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig, watcher: Watcher) -> bool:
        one_step(config, watcher)
        watcher(RunEnded(config.folder, {"held_out": {"before": {"greedy": {"score": 0.25}}}}))
        return False

    train_with(train)
    assert run(config) == 0
    out, err = capsys.readouterr()
    assert "held-out    greedy" in out
    assert "before      0.250" in out
    assert out.endswith(f"report: {config.folder / 'report.html'}\nrun: {config.folder}\n")
    assert (config.folder / "report.html").is_file()
    assert "step 1/2  reward 0.500" in err


def test_an_interrupted_run_says_where_the_checkpoint_is_and_how_to_go_on(
    config: TrainConfig, train_with: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig, watcher: Watcher) -> bool:
        one_step(config, watcher)
        return True

    train_with(train)
    assert run(config) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(
        f"stopped after step 1, checkpoint: {config.folder / 'checkpoints' / 'step-000001'}\n"
        f"go on with: ramet train {config.folder} --resume\n"
    )


def test_an_interrupt_that_the_trainer_does_not_catch_ends_the_same_way(
    config: TrainConfig, train_with: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig, watcher: Watcher) -> bool:
        raise KeyboardInterrupt

    train_with(train)
    assert run(config) == 130
    assert capsys.readouterr().err == "stopped before a checkpoint was written\n"


def test_an_error_passes_through_and_the_checkpoint_is_named(
    config: TrainConfig, train_with: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig, watcher: Watcher) -> bool:
        one_step(config, watcher)
        raise RewardError("the reward is not finite")

    train_with(train)
    with pytest.raises(RewardError, match="not finite"):
        run(config)
    assert "stopped after step 1, checkpoint: " in capsys.readouterr().err
