"""A short supervised start on reference answers, for models that would otherwise never be right by chance."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from tensordict import TensorDict

from ramet.config import TrainConfig, WarmStartConfig
from ramet.envs.chat_calls import Caller, Work
from ramet.episodes import into_forest, play_episodes, starts_of
from ramet.errors import ConfigError
from ramet.evaluation import evaluate
from ramet.events import WarmStarted, WarmStartStep, Watcher
from ramet.forest import Forest
from ramet.learner import checked_step, micro_batches
from ramet.policies.reference import ReferencePolicy, as_text
from ramet.prompts import Prompts
from ramet.prompts.prompts import Row
from ramet.rollouts import Playing, Turns
from ramet.scoring import score
from ramet.tasks import Task
from ramet.tasks.copies import own
from ramet.tasks.verdicts import FAILURES, Raised
from ramet.types import Key, Kind, Sampling, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def split_rows(task: Task, rows: Sequence[Row], settings: WarmStartConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return the rows that validate, the first `settings.check_problems`, and those that are imitated.

    Raises `ConfigError` for a task without reference answers, or with no row left to imitate.
    """
    if task.answer is None and task.player is None:
        raise ConfigError(
            f"task {task.name} has no reference answers, which a warm start imitates", hint="remove [warm_start]"
        )
    if len(rows) <= settings.check_problems:
        raise ConfigError(
            f"warm_start.check_problems = {settings.check_problems} leaves none of {len(rows)} training rows to learn",
            hint="lower it",
        )
    return rows[: settings.check_problems], rows[settings.check_problems :]


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[Row],
    config: TrainConfig,
    *,
    prompts_of: Callable[[Sequence[Row]], Prompts],
    play: Playing,
    sampling: Sampling,
    watcher: Watcher,
) -> WarmStarted:
    """Minimise the cross-entropy of the task's reference answers, up to a validation score or a number of steps.

    `rows` are the training rows, of which some validate and are not imitated (see `split_rows`); held-out rows are not
    touched. `prompts_of` tokenises rows as the run does. Raises `ModelError` as `checked_step` does.
    """
    settings = config.warm_start or WarmStartConfig()
    validation, lessons = map(prompts_of, split_rows(task, rows, settings))
    teach = _turns_of(play, lessons) if isinstance(play, Turns) else _answers_of(task, tokenizer, lessons)
    betas, rate = config.optimizer.betas, settings.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=0.0, fused=True)

    def validate() -> float:
        scored = evaluate(
            play,
            validation,
            problems=len(validation),
            sampling=sampling,
            seed=config.seed,
            when="warm start",
            step=0,
            decodings=("greedy",),
        )
        return scored.held_out()["greedy"]["score"] if scored.scores["greedy"] else 0.0

    reached: float | None = None
    for step in range(1, settings.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / max(1, settings.warmup_steps))
        td = lessons.batch((step - 1) * settings.batch_rows, settings.batch_rows)
        loss = _imitate(model, optimizer, teach(td), config)
        if step % settings.check_every == 0 or step == settings.max_steps:
            reached = validate()
            watcher(WarmStartStep(step, settings.max_steps, loss, reached))
            if settings.until is not None and reached >= settings.until:
                return WarmStarted(step, reached)
        else:
            watcher(WarmStartStep(step, settings.max_steps, loss))
    return WarmStarted(settings.max_steps, reached)


Teach: TypeAlias = Callable[[TensorDict], Forest]
"""From a batch of prompts to a forest in which what is to be imitated stands where a policy's tokens would."""


def _answers_of(task: Task, tokenizer: PreTrainedTokenizerBase, lessons: Prompts) -> Teach:
    """Return a teacher that writes the reference answer behind each prompt."""
    answers = [_answer_tokens(tokenizer, text) for text in _written(task, lessons.rows)]

    def teach(td: TensorDict) -> Forest:
        indices = td[Key.PROMPT_INDEX].tolist()
        forest = Forest()
        rollouts = forest.plant([lessons.tokens[i] for i in indices], groups=indices, members=[0] * len(indices))
        taught = [answers[i] for i in indices]
        # The teacher's tokens have no density, which is what NaN says.
        unknown = [torch.full((len(row),), torch.nan) for row in taught]
        forest.grow(rollouts, taught, Kind.SAMPLED, log_probs=unknown, versions=[-1] * len(taught))
        return forest

    return teach


def _turns_of(play: Turns, lessons: Prompts) -> Teach:
    """Return a teacher that plays whole episodes, with the environment's replies and the tools as they are."""
    rules = replace(play.rules, lockstep=False)  # the reference answers each row by itself

    def teach(td: TensorDict) -> Forest:
        teacher = ReferencePolicy(play.task, play.template.tokenizer)  # it keeps the episodes that it has played
        starts = [
            replace(start, row=teacher.row_of(start.row, group=start.group, member=start.member))
            for start in starts_of(td, lessons.rows)
        ]
        played = play_episodes(teacher.task, teacher, starts, template=play.template, rules=rules)
        for episode in played:
            if episode.stop.truncated or episode.stop is StopReason.ERROR:
                why = "" if episode.outcome is None else f": {episode.outcome.reason}"
                raise ConfigError(
                    f"a warm start imitates whole episodes of the reference, and the one of the training row "
                    f"{episode.start.prompt_index} ended by {episode.stop.value}{why}",
                    hint="raise the limit, or see with ramet check what is wrong with the task",
                )
        forest = Forest()
        into_forest(played, forest)
        return forest

    return teach


def _written(task: Task, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the reference answers of rows; those of an async `answer` are awaited together."""
    assert task.answer is not None  # `split_rows` has seen to it
    caller, answer = Caller(), task.answer
    with contextlib.closing(caller):
        values = caller(Work(answer, (own(row),)) for row in rows)
    for number, value in enumerate(values):
        try:
            if isinstance(value, Raised):
                raise value.error
            yield as_text(value)
        except FAILURES as error:
            raise ConfigError(
                f"a warm start imitates the reference answers of the task {task.name}, and that of the training row "
                f"{number} failed: {type(error).__name__}: {error}",
                hint="see with ramet check what is wrong with the task",
            ) from error


def _answer_tokens(tokenizer: PreTrainedTokenizerBase, answer: str) -> torch.Tensor:
    ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return torch.tensor(ids + end, dtype=torch.int64)


def _imitate(model: PreTrainedModel, optimizer: torch.optim.Optimizer, forest: Forest, config: TrainConfig) -> float:
    """Take one supervised step on a forest of lessons; return the mean cross-entropy of what is to be imitated."""
    rollouts = range(len(forest.rollouts))
    optimizer.zero_grad(set_to_none=True)
    total, tokens = 0.0, len(forest.sampled(rollouts).index)
    for part in micro_batches(model, forest, rollouts, config):
        log_probs = score(
            model,
            forest,
            rollouts=part,
            autocast=config.autocast_dtype,
            gradient_checkpointing=config.optimizer.gradient_checkpointing,
        ).log_probs
        loss = -log_probs[forest.sampled(part).index].sum() / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    checked_step(model, optimizer, config.optimizer.gradient_clip)
    return total
