"""A short supervised start on reference answers, for models that would otherwise never be right by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ramet.config import TrainConfig, WarmStartConfig
from ramet.envs.env import EnvBase
from ramet.errors import ConfigError
from ramet.evaluation import evaluate
from ramet.events import Event, WarmStarted, WarmStartStep
from ramet.forest import Forest
from ramet.learner import checked_step, micro_batches
from ramet.policies.transformers import TransformersPolicy
from ramet.prompts import Prompts
from ramet.prompts.prompts import Row
from ramet.scoring import score
from ramet.tasks import Judge, Task
from ramet.types import Kind, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def split_rows(task: Task, rows: Sequence[Row], settings: WarmStartConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return the rows that validate, the first `settings.check_problems`, and those that are imitated.

    Raises `ConfigError` for a task without reference answers, or with no row left to imitate.
    """
    if task.answer is None:
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
    policy: TransformersPolicy,
    env: EnvBase,
    judge: Judge,
    sampling: Sampling,
    watcher: Callable[[Event], None],
) -> WarmStarted:
    """Minimise the cross-entropy of the task's reference answers, up to a validation score or a number of steps.

    `rows` are the training rows, of which some validate and are not imitated (see `split_rows`); held-out rows are not
    touched. `prompts_of` tokenises rows as the run does. Raises `ModelError` as `checked_step` does.
    """
    settings = config.warm_start or WarmStartConfig()
    validation, lessons = map(prompts_of, split_rows(task, rows, settings))
    answer = task.answer
    assert answer is not None  # `split_rows` has seen to it
    answers = [_answer_tokens(tokenizer, answer, row) for row in lessons.rows]
    betas, rate = config.optimizer.betas, settings.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=0.0, fused=True)

    def validate() -> float:
        scored = evaluate(
            env,
            policy,
            validation,
            tokenizer,
            judge,
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
        loss = _imitate(model, optimizer, lessons, answers, settings, config, step)
        if step % settings.check_every == 0 or step == settings.max_steps:
            reached = validate()
            watcher(WarmStartStep(step, settings.max_steps, loss, reached))
            if settings.until is not None and reached >= settings.until:
                return WarmStarted(step, reached)
        else:
            watcher(WarmStartStep(step, settings.max_steps, loss))
    return WarmStarted(settings.max_steps, reached)


def _answer_tokens(
    tokenizer: PreTrainedTokenizerBase, answer: Callable[[Mapping[str, Any]], str], row: Mapping[str, Any]
) -> torch.Tensor:
    ids = list(tokenizer(answer(row), add_special_tokens=False)["input_ids"])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return torch.tensor(ids + end, dtype=torch.int64)


def _imitate(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    lessons: Prompts,
    answers: list[torch.Tensor],
    settings: WarmStartConfig,
    config: TrainConfig,
    step: int,
) -> float:
    """Take one supervised step on the next rows of the stream; return the mean cross-entropy of an answer's token."""
    td = lessons.batch((step - 1) * settings.batch_rows, settings.batch_rows)
    indices = td["prompt_index"].tolist()
    forest = Forest()
    rollouts = forest.plant([lessons.tokens[i] for i in indices], groups=indices, members=[0] * len(indices))
    taught = [answers[i] for i in indices]
    # The teacher's tokens stand where a policy's would; they have no density, which is what NaN says.
    unknown = [torch.full((len(row),), torch.nan) for row in taught]
    forest.grow(rollouts, taught, Kind.SAMPLED, log_probs=unknown, versions=[-1] * len(taught))
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
