"""The folder of a run: opened once, brought in step with its checkpoint, written to, and summed up at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ramet.checkpoint import (
    REFERENCE,
    RunState,
    load_optimizer,
    load_weights,
    newest_checkpoint,
    read_state,
    save_checkpoint,
    save_model,
)
from ramet.config import CheckpointConfig, TrainConfig, dump, load
from ramet.errors import CheckpointError, ConfigError, DataError, RametError, RunExists
from ramet.evaluation import Evaluation, RolloutLog, difference
from ramet.events import CheckpointWritten, Watcher, When
from ramet.metrics import MetricsLog, entries, finite
from ramet.scoring.score import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


LOG = logging.getLogger(__name__)


def write(path: Path, text: str) -> None:
    """Write a file of text; an `OSError` says which file, for a disk that is full in the middle does not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def refuse_existing(folder: Path) -> None:
    """Raise `RunExists` where the folder of a new run is there already."""
    if os.path.lexists(folder):
        raise RunExists(
            f"the run folder {folder} is there already: a new run would mix with it",
            hint="go on with --resume (in Python resume=True), give the run another name, or remove the folder",
        )


class RunFolder:
    """What a run keeps on disk, and the last whole `state` that it is in.

    `log` and `rollouts` are open while it is used as a context. `evaluations` are those that were made, with their
    scores; `watch` is told of each checkpoint.
    """

    def __init__(
        self,
        path: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: torch.optim.Optimizer,
        checkpoint: CheckpointConfig,
        watch: Watcher,
    ) -> None:
        self.path = path
        self.state = RunState(0, 0, 0)
        self.evaluations: dict[tuple[When, int], Evaluation] = {}
        self._saved: RunState | None = None
        self._weights_moved = False
        self._model, self._tokenizer, self._optimizer = model, tokenizer, optimizer
        self._checkpoint, self._watch = checkpoint, watch

    def __enter__(self) -> RunFolder:
        with contextlib.ExitStack() as opened:
            self.log = opened.enter_context(MetricsLog(self.path / "metrics.jsonl"))
            self.rollouts = opened.enter_context(RolloutLog(self.path / "rollouts.jsonl"))
            opened.callback(self._optimizer.register_step_pre_hook(self._note_that_weights_move).remove)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    # ---------------------------------------------------------------- opening

    def make(self) -> None:
        """Make the folder of a new run; raise `RunExists` where it is there already."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            refuse_existing(self.path)
            raise  # it is gone again
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.path} can not be made: {error}", hint="set runs and name"
            ) from error

    def settings(self) -> TrainConfig:
        """Return the settings that the run has been started with; raise `CheckpointError` without a checkpoint."""
        newest_checkpoint(self.checkpoints)
        return load(self.path / "config.toml")

    def write_settings(self, config: TrainConfig) -> None:
        """Write `config.toml`."""
        write(self.path / "config.toml", dump(config))

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Remove the folder where starting the run fails or is interrupted: there is nothing in it to resume."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def start(self, version: int) -> None:
        """Keep the model as it is, as the reference, before the first step."""
        save_model(self.reference, self._model, self._tokenizer)
        self.state = RunState(0, 0, version)

    def resume(self, steps: int, reference_of: Callable[[Path], Scorer]) -> Scorer:
        """Read model, optimiser and evaluations back, and strike from the logs what the checkpoint does not know of.

        Returns what `reference_of` makes of the reference's folder while the model holds its weights. Raises
        `ConfigError` for a run of fewer steps than it has behind it.
        """
        checkpoint = newest_checkpoint(self.checkpoints)
        state = read_state(checkpoint)
        if state.step > steps:
            raise ConfigError(f"steps is {steps}, and {checkpoint} has {state.step} behind it", hint="raise steps")
        load_weights(self.reference, self._model)
        reference = reference_of(self.reference)
        load_weights(checkpoint, self._model)
        load_optimizer(checkpoint, self._optimizer)
        self.state = self._saved = state
        self._weights_moved = False
        try:
            self.evaluations = self._undo(state.step)
        except (LookupError, TypeError, ValueError) as error:
            if isinstance(error, RametError):
                raise
            raise DataError(
                f"{self.log.path} or {self.rollouts.path} has a line that no run has written: "
                f"{type(error).__name__}: {error}",
                hint="has somebody changed it? remove that line, or start the run anew",
            ) from error
        return reference

    def _undo(self, step: int) -> dict[tuple[When, int], Evaluation]:
        """Strike from the logs what came after `step`, and what is not whole; return the evaluations that are there."""
        self.log.keep(lambda line: line["step"] <= step)
        self._tell_of_lost(
            self.log, Counter(line["step"] for line in entries(self.log.path) if "when" not in line), step
        )
        made = {(line["when"], line["step"]) for line in entries(self.log.path) if "when" in line}
        train = {("train", number) for number in range(step + 1)}
        self.rollouts.keep(lambda line: (line["when"], line["step"]) in made | train)
        records: dict[tuple[When, int], list[Mapping[str, Any]]] = {evaluation: [] for evaluation in made}
        trained: Counter[int] = Counter()
        for record in entries(self.rollouts.path):
            if record["when"] == "train":
                trained[record["step"]] += 1
            else:
                records[record["when"], record["step"]].append(record)
        self._tell_of_lost(self.rollouts, trained, step)
        for when, number in made:
            if when != "during" and not records[when, number]:
                LOG.warning("%s has lost the rollouts of the evaluation %s step %d", self.rollouts.path, when, number)
        return {evaluation: Evaluation.from_records(kept) for evaluation, kept in records.items()}

    def _tell_of_lost(self, log: MetricsLog, found: Counter[int], steps: int) -> None:
        """Warn of steps that are done and that a log has fewer lines of than of others: somebody cut it short."""
        whole = max(found.values(), default=1)
        lost = [number for number in range(1, steps + 1) if found[number] < whole]
        if lost:
            which = f"step {lost[0]}" if len(lost) == 1 else f"{len(lost)} steps, from {lost[0]} to {lost[-1]}"
            LOG.warning("%s has lost its lines of %s: the run goes on without them", log.path, which)

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def reference(self) -> Path:
        """Where the model lies as it was before the first step."""
        return self.path / REFERENCE

    # ---------------------------------------------------------------- checkpoints

    def stepped(self, state: RunState) -> None:
        """Note that a step is done, and whole."""
        self.state = state
        self._weights_moved = False  # since `state`: an interrupt before this line saves nothing

    def save_if_due(self, *, last: bool) -> None:
        """Save the step that is done: where it is the `last` one, and every so many steps."""
        every = self._checkpoint.every
        if last or (every > 0 and self.state.step % every == 0):
            self._save()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Save the last whole step at the end, whatever ends the run; where its weights are gone, an older one stands.

        A checkpoint that could not be written is not tried again.
        """
        try:
            yield
        except BaseException as error:
            if self._saved != self.state and not isinstance(error, CheckpointError) and not self._weights_moved:
                try:
                    self._save()
                except CheckpointError as second:
                    error.add_note(f"and the checkpoint of the last whole step is lost: {second}")
            raise
        if self._saved != self.state:
            self._save()

    def _save(self) -> None:
        path = save_checkpoint(
            self.checkpoints, self.state, self._model, self._tokenizer, self._optimizer, keep=self._checkpoint.keep
        )
        self._saved = self.state
        self._watch(CheckpointWritten(self.state.step, path))

    def _note_that_weights_move(self, *_: object) -> None:
        self._weights_moved = True

    # ---------------------------------------------------------------- what is written

    def due(self, *, steps: int, every: int) -> list[When]:
        """Name the evaluations that belong after the steps so far, of `steps`, and have not been made.

        Where a run ended once that goes on now, the one of that end stands for one between two steps.
        """
        step = self.state.step
        made = {when for when, number in self.evaluations if number == step}
        during = 0 < step < steps and every > 0 and step % every == 0 and "after" not in made
        wanted: dict[When, bool] = {"before": step == 0, "during": during, "after": step == steps}
        return [when for when, due in wanted.items() if due and when not in made]

    def note(self, made: Evaluation, when: When) -> None:
        """Write an evaluation down; its line in `metrics.jsonl` comes last: then all of it is there."""
        step = self.state.step
        self.rollouts.extend(made.records if when != "during" else ())
        self.log.append({"step": step, "when": when, "held_out": made.held_out()})
        self.evaluations[when, step] = Evaluation(made.scores, (), made.failed, made.abstained)

    def summary(self) -> dict[str, Any]:
        """Return what `summary.json` holds, empty where there is no whole one."""
        try:
            kept = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def sum_up(self, *, steps: int, chance: float | None, seconds: float) -> dict[str, Any]:
        """Write and return `summary.json`: the held-out scores before and after, and how they differ."""
        summary: dict[str, Any] = {"steps": steps, "chance": chance}
        before, after = self.evaluations.get(("before", 0)), self.evaluations.get(("after", steps))
        if after is not None:
            ends = {"before": before, "after": after}
            summary["held_out"] = {when: made.held_out() for when, made in ends.items() if made is not None}
        if before is not None and after is not None:
            changes = {name: difference(before, after, name) for name in before.scores}
            summary["difference"] = {name: change._asdict() for name, change in changes.items() if change is not None}
        summary["seconds"] = seconds
        partial = self.path / "summary.json.partial"
        write(partial, json.dumps(finite(summary, "summary"), indent=2) + "\n")
        os.replace(partial, self.path / "summary.json")
        return summary
