"""The loop: prompts, rollouts, judgement, update, and a run folder that says what happened."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    refuse_no_config,
    refuse_parts,
    refuse_text_alone,
    sampling_of,
    score_limit,
    server_of,
    settled_turns,
    task_of,
    tools_of,
)
from ramet.checkpoint import REFERENCE, RunState, newest_checkpoint, refuse_other_settings
from ramet.config import TaskConfig, TrainConfig
from ramet.episodes import in_steps
from ramet.errors import ConfigError
from ramet.evaluation import EVALUATION_SEED, evaluate, rollout_records
from ramet.events import Evaluated, RunEnded, RunStarted, StepDone, Stopping, Watcher, When
from ramet.forest import Forest
from ramet.interrupts import interrupts
from ramet.learner import (
    flat_groups,
    nothing_learned,
    optimizer_of,
    prepare,
    reward_metrics,
    set_learning_rate,
    token_budget,
    update,
)
from ramet.prompts import Prompts, read_rows, refuse_shared
from ramet.prompts.prompts import Row
from ramet.rollouts import Turns, refuse_failures
from ramet.run_folder import RunFolder
from ramet.scoring.score import Scorer
from ramet.tasks import Judge, Reward, Task
from ramet.types import Sample
from ramet.warm_start import split_rows, warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        refuse_parts(model, task, config)
        self._build(model, task, tokenizer, config.model_copy(update={"task": None}), watcher, resume)

    @classmethod
    def from_config(cls, config: TrainConfig, *, watcher: Watcher | None = None, resume: bool = False) -> Trainer:
        """Make the trainer that `config` describes, its model and its task included."""
        refuse_no_config(config)
        if config.model is None or config.task is None:
            missing = " and ".join(f"[{name}]" for name in ("model", "task") if getattr(config, name) is None)
            raise ConfigError(
                f"a run from a configuration needs the sections [model] and [task]: there is no {missing}",
                hint=f"add {missing}, with a name: what they may be, `ramet settings` says at model.name and task.name",
            )
        task = task_of(config.task, config.seed)
        refuse_parts(config.model.name, task, config)
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
        refuse_parts(model, task, config)
        for rows in (task.train, *([task.held_out] if task.held_out else [])):
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
        self._warned = False
        self._outages = 0, 0
        """How often the server has been away so far, and the last step in which it was."""
        self.task = task
        kept = config.folder / REFERENCE if resume else None
        self.model, self.tokenizer, self._model_config = model_of(model, tokenizer, config, kept=kept)
        self._task_is_named = config.task is not None
        rollout = settled_turns(task, config.rollout)
        settled = {"model": self._model_config, "task": config.task or TaskConfig(name=task.name), "rollout": rollout}
        self.config = config.model_copy(update=settled)
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
        self.optimizer = optimizer_of(self.model, config)

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
        run = self._opened()
        with run, self._closing():
            reference = self._resumed(run) if self._resume else self._started(run)
            ended_before = self._resume and self._is_over(run)
            with interrupts(lambda: self._watch(Stopping())) as interrupted, run.saving():

                def learn(step: int, played: tuple[Forest, list[Sample]]) -> None:
                    state, metrics = self._learn(run, played, reference)
                    run.stepped(state)
                    self._sample_from(state.version)
                    self._watch(StepDone(state.step, metrics))
                    run.save_if_due(last=state.step == self.config.steps)
                    if not interrupted():
                        self._evaluate(run)
                    self._step_began = time.monotonic()

                self._sample_from(run.state.version)
                self._evaluate(run)
                self._step_began = time.monotonic()
                self._make_steps(learn, run.state.step, interrupted)
            checkpoint = newest_checkpoint(run.checkpoints)
            if not self._is_over(run):
                return Result(run.path, checkpoint, interrupted=True, summary={})
        summary = (run.summary() if ended_before else {}) or run.sum_up(
            steps=self.config.steps, chance=self.task.chance, seconds=time.monotonic() - began
        )
        self._watch(RunEnded(run.path, summary))
        return Result(run.path, checkpoint, interrupted=False, summary=summary)

    def _is_over(self, run: RunFolder) -> bool:
        return run.state.step == self.config.steps and not self._due(run)

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
            play = partial(self.play.in_loop, prompts=self.prompts, sampling=self.sampling, seed=self.config.seed)
            loop, ahead = self.play.loop, staleness
            in_steps(
                loop, lambda n: play(self._prompts_of_step(n)), learn, first, steps, staleness=ahead, ending=ending
            )
            return
        for step in range(first, steps):
            if ending():
                return
            td = self._prompts_of_step(step)
            learn(step, self.play(td, self.prompts, sampling=self.sampling, seed=self.config.seed))

    def _prompts_of_step(self, step: int) -> TensorDict:
        """Return the prompts of a step, counted from 0."""
        rollout = self.config.rollout
        position = step * rollout.prompts_per_step
        return self.prompts.batch(position, rollout.prompts_per_step, group_size=rollout.group_size)

    def _learn(
        self, run: RunFolder, played: tuple[Forest, list[Sample]], reference: Scorer
    ) -> tuple[RunState, dict[str, Any]]:
        """Learn from a step's episodes, and write it down; return the state after it and the metrics of the step."""
        config, state, step = self.config, run.state, run.state.step + 1
        forest, samples = played
        try:
            refuse_failures(forest, self._may_fail(step), self.judge, where=f"step {step}")
            batch = prepare(self.model, reference, forest, config, step=step)
        finally:  # before a weight moves, and whatever comes: no rollout is lost
            run.rollouts.extend(rollout_records(forest, samples, when="train", step=step))
        flat = flat_groups(forest)
        if flat == 1 and not self._warned:
            self._warned = True
            logging.getLogger(__name__).warning(nothing_learned(forest, step))
        rate = set_learning_rate(self.optimizer, config, step)
        logged = update(self.model, self.optimizer, forest, batch, config)
        self.optimizer.zero_grad(set_to_none=True)  # as large as the weights, and of no use to the next samples
        oldest = int(batch.sampled.versions.min()) if len(batch.sampled.versions) else state.version
        seconds = time.monotonic() - self._step_began
        sampled = len(forest.sampled(range(len(forest.rollouts))).index)
        metrics = {
            "step": step,
            **reward_metrics(forest),
            "flat_groups": flat,
            **logged,
            "staleness": state.version - oldest,
            "learning_rate": rate,
            "tokens_sampled": sampled,
            "tokens_per_second": sampled / seconds,
            "seconds": seconds,
        }
        run.log.append(metrics)
        return RunState(step, state.position + config.rollout.prompts_per_step, state.version + 1), metrics

    def _may_fail(self, step: int) -> float:
        """Return the fraction of a step's rollouts that may fail: all, where the server was away in the meantime.

        What ran out of time then is what an outage costs; the weights of the step wait for the server anyhow.
        """
        if self.server is not None and self.server.outages > self._outages[0]:
            self._outages = self.server.outages, step
        lately = step - self._outages[1] <= self.config.rollout.staleness
        return 1.0 if self._outages[0] and lately else self.config.rollout.max_failed_fraction

    # ---------------------------------------------------------------- how it begins

    def _opened(self) -> RunFolder:
        """Return the folder of the run: a new one, or the one to go on in, with the settings of now in it."""
        config = self.config
        run = RunFolder(config.folder, self.model, self.tokenizer, self.optimizer, config.checkpoint, self._watch)
        if not self._resume:
            run.make()
            return run
        before = run.settings()
        self._set_token_budget(before.optimizer.micro_batch_tokens)
        # A task that was handed over has its reward's name, and a reward may be mended.
        refuse_other_settings(before, self.config, free=() if self._task_is_named else ("task",))
        run.write_settings(self.config)
        return run

    def _set_token_budget(self, before: int | None) -> None:
        """Settle how many tokens a pass may run, once for a run: a resumed one cuts its batches as it did before."""
        section = self.config.optimizer
        if section.micro_batch_tokens is None:
            budget = {"micro_batch_tokens": token_budget(self.model, self.config) if before is None else before}
            self.config = self.config.model_copy(update={"optimizer": section.model_copy(update=budget)})

    def _started(self, run: RunFolder) -> Scorer:
        """Start a run, with its supervised steps where it has some, and return its reference."""
        with run.undone_on_error():
            self._set_token_budget(None)
            run.write_settings(self.config)
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
            run.start(self.policy.version)
            return reference_of(self.model, run.reference)

    def _resumed(self, run: RunFolder) -> Scorer:
        """Go on where the newest checkpoint stands, and return the reference of the run."""
        reference = run.resume(self.config.steps, partial(reference_of, self.model))
        self.policy.version = run.state.version
        self._watch(self._run_started(first_step=run.state.step + 1))
        return reference

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

    # ---------------------------------------------------------------- held-out scores

    def _due(self, run: RunFolder) -> list[When]:
        """Name the evaluations that belong after the steps so far and have not been made."""
        if self.held_out is None:
            return []
        return run.due(steps=self.config.steps, every=self.config.evaluation.every)

    def _evaluate(self, run: RunFolder) -> None:
        """Make the evaluations that are due."""
        for when in self._due(run):
            assert self.held_out is not None
            made = evaluate(
                self.play,
                self.held_out,
                problems=self.config.evaluation.problems,
                sampling=self.sampling,
                seed=self.config.seed + EVALUATION_SEED,
                when=when,
                step=run.state.step,
                max_failed_fraction=lambda: self._may_fail(run.state.step),
                refused=run.rollouts.extend,
            )
            run.note(made, when)
            self._watch(Evaluated(run.state.step, when, made.held_out()))
