"""The loop: prompts, rollouts, judgement, update, and a run folder that says what happened."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from ramet.assembly import (
    model_of,
    playing_of,
    policy_of,
    prompt_limit,
    reference_of,
    refuse_text_alone,
    sampling_of,
    score_limit,
    server_of,
    settled_turns,
    tools_of,
)
from ramet.checkpoint import (
    REFERENCE,
    RunState,
    load_optimizer,
    load_weights,
    newest_checkpoint,
    read_state,
    refuse_other_settings,
    save_checkpoint,
    save_model,
)
from ramet.config import TaskConfig, TrainConfig, dump, load
from ramet.episodes import in_steps
from ramet.errors import CheckpointError, ConfigError, RunExists, TooManyFailures
from ramet.evaluation import Evaluation, difference, evaluate, rollout_records
from ramet.events import CheckpointWritten, Evaluated, Event, RunEnded, RunStarted, StepDone, Stopping, When
from ramet.forest import Forest
from ramet.interrupts import interrupts
from ramet.learner import prepare, reward_metrics, token_budget, update
from ramet.metrics import MetricsLog, entries, finite
from ramet.prompts import Prompts, read_rows, refuse_shared
from ramet.prompts.prompts import Row
from ramet.rollouts import Turns, failed_fraction, first_failure
from ramet.scoring.score import Scorer
from ramet.tasks import Judge, Reward, Task, build_task
from ramet.types import Sample
from ramet.warm_start import split_rows, warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EVALUATION_SEED = 2**62
"""Added to the seed for held-out draws: no training rollout shares its random numbers with an evaluation."""

Watcher = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended: its folder, its newest checkpoint, whether Ctrl-C ended it, and what `summary.json` holds."""

    folder: Path
    checkpoint: Path
    interrupted: bool
    summary: Mapping[str, Any]


class Trainer:
    """Make `model` better at what `reward` measures.

    `model` is a `transformers` causal model, its name or its folder; `prompts` a list, a JSONL path or a `datasets`
    dataset of strings, message lists or mappings with "prompt" (other columns reach the reward as `sample.row`);
    `reward` a function, sync or async, of a `Sample`. `held_out` are prompts that are scored and never trained on.
    `tokenizer` None takes the model's own. `config` holds everything else. `watcher` is called with each `Event`.
    `resume` continues the run in the folder `config.runs`/`config.name` from its newest checkpoint.

    Nothing is written before `train`. Raises `DataError`, `ModelError` or `ConfigError` for what can not be trained
    with.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        prompts: str | Path | Iterable[Any],
        reward: Reward,
        *,
        config: TrainConfig,
        held_out: str | Path | Iterable[Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        watcher: Watcher | None = None,
        resume: bool = False,
    ) -> None:
        # Read at once: an iterator gives its rows once, and they are needed more often.
        train, test = read_rows(prompts), [] if held_out is None else read_rows(held_out)
        refuse_shared(train, test)
        task = Task(name=getattr(reward, "__name__", "reward"), train=train, held_out=test, score=reward)
        self._build(model, task, tokenizer, config.model_copy(update={"task": None}), watcher, resume)

    @classmethod
    def from_config(cls, config: TrainConfig, *, watcher: Watcher | None = None, resume: bool = False) -> Trainer:
        """Make the trainer that `config` describes, its model and its task included."""
        if config.model is None or config.task is None:
            raise ConfigError("a run from a configuration needs the sections [model] and [task]")
        section = config.task
        task = build_task(
            section.name,
            section.options,
            seed=config.seed,
            prompts=section.prompts,
            held_out=section.held_out,
            reward=section.reward,
        )
        trainer = cls.__new__(cls)
        trainer._build(config.model.name, task, None, config, watcher, resume)
        return trainer

    @classmethod
    def from_task(
        cls,
        model: PreTrainedModel | str | Path,
        task: Task,
        *,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        watcher: Watcher | None = None,
        resume: bool = False,
    ) -> Trainer:
        """Make the trainer of a `Task`: with replies of its environment, tools, and what else it has."""
        for rows, called in ((task.train, "train"), (task.held_out, "held_out")):
            if rows or called == "train":
                read_rows(rows)
        refuse_shared(task.train, task.held_out)
        trainer = cls.__new__(cls)
        trainer._build(model, task, tokenizer, config.model_copy(update={"task": None}), watcher, resume)
        return trainer

    def _build(
        self,
        model: PreTrainedModel | str | Path,
        task: Task,
        tokenizer: PreTrainedTokenizerBase | None,
        config: TrainConfig,
        watcher: Watcher | None,
        resume: bool,
    ) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._watch: Watcher = watcher or (lambda event: None)
        self._resume = resume
        self.task = task
        self.model, self.tokenizer, self._model_config = model_of(model, tokenizer, config)
        named = {"model": self._model_config, "task": config.task or TaskConfig(name=task.name)}
        self.config = config.model_copy(update=named)
        self._task_is_named = config.task is not None
        self.config = self.config.model_copy(update={"rollout": settled_turns(task, config.rollout)})
        rollout = self.config.rollout
        self.sampling = sampling_of(self.tokenizer, rollout)
        self._prompt_limit = prompt_limit(self.model, rollout)
        self.prompts = self._prompts_of(task.train, "training row")
        self.held_out = self._prompts_of(task.held_out, "held-out row") if task.held_out else None
        if config.warm_start is not None:
            split_rows(task, self.prompts.rows, config.warm_start)  # refused here, before anything is written
        self.judge = Judge(task.score, seconds=score_limit(task, rollout))
        self.policy = policy_of(self.model, self.tokenizer, self.config)
        self.server = None if config.server is None else server_of(config.server, self.tokenizer)
        parts = (self.model, self.tokenizer, self.judge, self.config)
        self._play_here = playing_of(task, self.policy, *parts)
        self.play = self._play_here if self.server is None else playing_of(task, self.server, *parts)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self._weights_moved = False
        self.optimizer.register_step_pre_hook(self._note_that_weights_move)
        self._evaluations: dict[tuple[When, int], Evaluation] = {}

    def _prompts_of(self, rows: Sequence[Row], called: str = "row") -> Prompts:
        return Prompts(
            rows,
            self.tokenizer,
            seed=self.config.seed,
            limit=self._prompt_limit,
            too_long=self.config.rollout.too_long,
            called=called,
            tools=tools_of(self.task),
        )

    # ---------------------------------------------------------------- the loop

    def train(self) -> Result:
        """Run all steps, or as many as Ctrl-C allows; return where everything lies.

        Raises `RunExists` for a run folder that is there already, `RewardError` and `TooManyFailures` with a checkpoint
        of the last whole step written first.
        """
        began = time.monotonic()
        if self.server is not None:
            refuse_text_alone(self.server)
        folder = self._open_folder()
        logs = MetricsLog(folder / "metrics.jsonl"), MetricsLog(folder / "rollouts.jsonl")
        with logs[0] as log, logs[1] as rollouts, self._closing():
            state, reference = self._resumed(log, rollouts) if self._resume else self._started_or_undone(folder)
            saved = state if self._resume else None
            ended_before = self._resume and state.step == self.config.steps and not self._due(state.step)
            with interrupts(lambda: self._watch(Stopping())) as interrupted:

                def learn(step: int, played: tuple[Forest, list[Sample]]) -> None:
                    nonlocal state, saved
                    state, metrics = self._learn(state, played, reference, log, rollouts)
                    self._weights_moved = False  # since `state`: an interrupt before this line saves nothing
                    self._sample_from(state.version)
                    self._watch(StepDone(state.step, metrics))
                    if self._checkpoint_is_due(state.step):
                        saved = self._save(folder, state)
                    if not interrupted():
                        self._evaluate(state.step, log, rollouts)
                    self._step_began = time.monotonic()

                try:
                    self._sample_from(state.version)
                    self._evaluate(state.step, log, rollouts)
                    self._step_began = time.monotonic()
                    self._make_steps(learn, state.step, interrupted)
                except BaseException as error:
                    if saved != state and not isinstance(error, CheckpointError):
                        self._save_what_is_whole(folder, state, error)
                    raise
                if saved != state:
                    self._save(folder, state)
            checkpoint = newest_checkpoint(folder / "checkpoints")
            if state.step < self.config.steps or self._due(state.step):
                return Result(folder, checkpoint, interrupted=True, summary={})
        summary = self._summary(folder, seconds=time.monotonic() - began, ended_before=ended_before)
        self._watch(RunEnded(folder, summary))
        return Result(folder, checkpoint, interrupted=False, summary=summary)

    def _closing(self) -> contextlib.ExitStack:
        """Return a context that ends what was started for playing."""
        stack = contextlib.ExitStack()
        for part in (self.play, self._play_here, self.server):
            if part is not None:
                stack.callback(part.close)
        return stack

    def _sample_from(self, version: int) -> None:
        """Let what is sampled from now on be of the weights as they are, which are called `version`."""
        if self.server is not None:
            self.server.update(self.model, version=version)
        self.policy.version = version

    def _make_steps(
        self, learn: Callable[[int, tuple[Forest, list[Sample]]], None], first: int, ending: Callable[[], bool]
    ) -> None:
        """Sample, learn, sample, learn; with a staleness, the next steps are sampled while one is learned from."""
        steps, staleness = self.config.steps, self.config.rollout.staleness
        if staleness and isinstance(self.play, Turns):
            collect = self.play.in_loop
            in_steps(
                self.play.loop,
                lambda step: collect(
                    self._prompts_of_step(step), self.prompts, sampling=self.sampling, seed=self.config.seed
                ),
                learn,
                first,
                steps,
                staleness=staleness,
                ending=ending,
            )
            return
        for step in range(first, steps):
            if ending():
                return
            learn(
                step,
                self.play(self._prompts_of_step(step), self.prompts, sampling=self.sampling, seed=self.config.seed),
            )

    def _prompts_of_step(self, step: int) -> TensorDict:
        """Return the prompts of a step, counted from 0."""
        rollout = self.config.rollout
        position = step * rollout.prompts_per_step
        return self.prompts.batch(position, rollout.prompts_per_step, group_size=rollout.group_size)

    def _learn(
        self,
        state: RunState,
        played: tuple[Forest, list[Sample]],
        reference: Scorer,
        log: MetricsLog,
        rollouts: MetricsLog,
    ) -> tuple[RunState, dict[str, Any]]:
        """Learn from a step's episodes, and write it down; return the state and the metrics of the step."""
        config, step = self.config, state.step + 1
        forest, samples = played
        failed = failed_fraction(forest)
        if failed > config.rollout.max_failed_fraction:
            rollouts.extend(rollout_records(forest, samples, when="train", step=step))
            raise TooManyFailures(
                f"step {step}: {failed:.0%} of the rollouts failed, and rollout.max_failed_fraction allows "
                f"{config.rollout.max_failed_fraction:.0%}; the first says: {first_failure(forest)}",
                hint=f"mend what it names (the reward is {self.judge.name}) and go on with resume, or raise "
                "rollout.max_failed_fraction",
            )
        batch = prepare(self.model, reference, forest, config, step=step)
        # Written before a weight moves: what fails after this loses no rollout.
        rollouts.extend(rollout_records(forest, samples, when="train", step=step))
        rate = self._set_learning_rate(step)
        logged = update(self.model, self.optimizer, forest, batch, config)
        self.optimizer.zero_grad(set_to_none=True)  # as large as the weights, and of no use to the next samples
        oldest = int(batch.sampled.versions.min()) if len(batch.sampled.versions) else state.version
        seconds = time.monotonic() - self._step_began
        sampled = len(forest.sampled(range(len(forest.rollouts))).index)
        metrics = {
            "step": step,
            **reward_metrics(forest),
            **logged,
            "staleness": state.version - oldest,
            "learning_rate": rate,
            "tokens_sampled": sampled,
            "tokens_per_second": sampled / seconds,
            "seconds": seconds,
        }
        log.append(metrics)
        return RunState(step, state.position + config.rollout.prompts_per_step, state.version + 1), metrics

    def _set_learning_rate(self, step: int) -> float:
        """Set and return the rate, a function of the step, so that resuming needs no memory of it."""
        warmup, steps = self.config.optimizer.warmup_steps, self.config.steps
        share = min(1.0, step / warmup) if warmup else 1.0
        if self.config.optimizer.schedule == "linear" and step > warmup:
            share = (steps - step + 1) / (steps - warmup)
        rate = self.config.optimizer.learning_rate * share
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    # ---------------------------------------------------------------- the run folder

    def _open_folder(self) -> Path:
        folder = self.config.folder
        if self._resume:
            newest_checkpoint(folder / "checkpoints")
            before = load(folder / "config.toml")
            self._set_token_budget(before.optimizer.micro_batch_tokens)
            # A task that was handed over has its reward's name, and a reward may be mended.
            free = () if self._task_is_named else ("task",)
            refuse_other_settings(before, self.config, free=free)
            (folder / "config.toml").write_text(dump(self.config), encoding="utf-8")
            return folder
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            raise RunExists(
                f"the run folder {folder} is there already: a new run would mix with it",
                hint="go on with resume, give the run another name, or remove the folder",
            ) from error
        except OSError as error:
            raise ConfigError(f"the run folder {folder} can not be made: {error}", hint="set runs and name") from error
        return folder

    def _set_token_budget(self, before: int | None) -> None:
        """Settle how many tokens a pass may run, once for a run: a resumed one cuts its batches as it did before."""
        optimizer = self.config.optimizer
        if optimizer.micro_batch_tokens is None:
            budget = token_budget(self.model, self.config) if before is None else before
            settled = optimizer.model_copy(update={"micro_batch_tokens": budget})
            self.config = self.config.model_copy(update={"optimizer": settled})

    def _started_or_undone(self, folder: Path) -> tuple[RunState, Scorer]:
        """Start a run; where that fails or is interrupted, its folder goes, for there is nothing in it to resume."""
        try:
            return self._started(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _started(self, folder: Path) -> tuple[RunState, Scorer]:
        self._set_token_budget(None)
        (folder / "config.toml").write_text(dump(self.config), encoding="utf-8")
        self._watch(self._run_started(first_step=1))
        if self.config.warm_start is not None:
            done = warm_start(
                self.model,
                self.tokenizer,
                self.task,
                self.prompts.rows,
                self.config,
                prompts_of=self._prompts_of,
                play=self._play_here,
                sampling=self.sampling,
                watcher=self._watch,
            )
            self._watch(done)
        save_model(folder / REFERENCE, self.model, self.tokenizer)
        return RunState(0, 0, self.policy.version), reference_of(self.model, folder / REFERENCE)

    def _resumed(self, log: MetricsLog, rollouts: MetricsLog) -> tuple[RunState, Scorer]:
        """Read model, optimiser and evaluations back, and strike from the logs what the checkpoint does not know of."""
        folder, steps = self.config.folder, self.config.steps
        checkpoint = newest_checkpoint(folder / "checkpoints")
        state = read_state(checkpoint)
        if state.step > steps:
            raise ConfigError(f"steps is {steps}, and {checkpoint} has {state.step} behind it", hint="raise steps")
        load_weights(folder / REFERENCE, self.model)
        reference = reference_of(self.model, folder / REFERENCE)
        load_weights(checkpoint, self.model)
        load_optimizer(checkpoint, self.optimizer)
        self.policy.version = state.version
        self._weights_moved = False
        # The end of a run that is made longer is no end: then only the evaluation after the new last step counts.
        log.keep(lambda line: line["step"] <= state.step and (line.get("when") != "after" or line["step"] == steps))
        made = {(line["when"], line["step"]) for line in entries(log.path) if "when" in line}
        train = {("train", step) for step in range(state.step + 1)}
        rollouts.keep(lambda line: (line["when"], line["step"]) in made | train)
        records: dict[tuple[When, int], list[Mapping[str, Any]]] = {evaluation: [] for evaluation in made}
        for record in entries(rollouts.path):
            if record["when"] != "train":
                records[record["when"], record["step"]].append(record)
        self._evaluations = {evaluation: Evaluation.from_records(kept) for evaluation, kept in records.items()}
        self._watch(self._run_started(first_step=state.step + 1))
        return state, reference

    def _run_started(self, *, first_step: int) -> RunStarted:
        return RunStarted(
            folder=self.config.folder,
            name=self.config.name,
            task=self.task.name,
            model=self._model_config.name,
            device=str(self.model.device),
            first_step=first_step,
            steps=self.config.steps,
        )

    def _checkpoint_is_due(self, step: int) -> bool:
        every = self.config.checkpoint.every
        return step == self.config.steps or (every > 0 and step % every == 0)

    def _save(self, folder: Path, state: RunState) -> RunState:
        keep = self.config.checkpoint.keep
        path = save_checkpoint(folder / "checkpoints", state, self.model, self.tokenizer, self.optimizer, keep=keep)
        self._watch(CheckpointWritten(state.step, path))
        return state

    def _save_what_is_whole(self, folder: Path, state: RunState, error: BaseException) -> None:
        """Save the last whole step before `error` ends the run; where its weights are gone, an older one stands."""
        if self._weights_moved:
            return
        try:
            self._save(folder, state)
        except CheckpointError as second:
            error.add_note(f"and the checkpoint of the last whole step is lost: {second}")

    def _note_that_weights_move(self, *_: object) -> None:
        self._weights_moved = True

    # ---------------------------------------------------------------- held-out scores

    def _due(self, step: int) -> list[When]:
        """Name the evaluations that belong after `step` steps and have not been made."""
        if self.held_out is None:
            return []
        every, steps = self.config.evaluation.every, self.config.steps
        during = 0 < step < steps and every > 0 and step % every == 0
        wanted: dict[When, bool] = {"before": step == 0, "during": during, "after": step == steps}
        return [when for when, due in wanted.items() if due and (when, step) not in self._evaluations]

    def _evaluate(self, step: int, log: MetricsLog, rollouts: MetricsLog) -> None:
        """Make the evaluations that are due; their line in `metrics.jsonl` comes last: all of it is there."""
        for when in self._due(step):
            assert self.held_out is not None
            made = evaluate(
                self.play,
                self.held_out,
                problems=self.config.evaluation.problems,
                sampling=self.sampling,
                seed=self.config.seed + EVALUATION_SEED,
                when=when,
                step=step,
                max_failed_fraction=self.config.rollout.max_failed_fraction,
            )
            rollouts.extend(made.records if when != "during" else ())
            log.append({"step": step, "when": when, "held_out": made.held_out()})
            self._evaluations[when, step] = Evaluation(made.scores, (), made.failed, made.abstained)
            self._watch(Evaluated(step, when, made.held_out()))

    def _summary(self, folder: Path, *, seconds: float, ended_before: bool) -> Mapping[str, Any]:
        """Write and return `summary.json`; a run that had ended keeps the one it has."""
        steps, path = self.config.steps, folder / "summary.json"
        if ended_before and path.is_file():
            kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return kept
        summary: dict[str, Any] = {"steps": steps, "chance": self.task.chance}
        before, after = self._evaluations.get(("before", 0)), self._evaluations.get(("after", steps))
        if after is not None:
            ends = {"before": before, "after": after}
            summary["held_out"] = {when: made.held_out() for when, made in ends.items() if made is not None}
        if before is not None and after is not None:
            changes = {name: difference(before, after, name) for name in before.scores}
            summary["difference"] = {name: change._asdict() for name, change in changes.items() if change is not None}
        summary["seconds"] = seconds
        partial = path.with_name("summary.json.partial")
        partial.write_text(json.dumps(finite(summary, "summary"), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
        return summary
