"""Settings that are each right and can not be together.

Only values are looked at, never whether they were written down: a configuration that is written with all its defaults
loads again. So a setting that another one makes void is refused where it differs from its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramet.config.sections import KLConfig, LossConfig, ModelConfig, RolloutConfig, Section, TaskConfig, TrainConfig

Contradiction = tuple[str, str]
"""What is wrong, and what to do."""


def contradictions(config: TrainConfig) -> Iterator[Contradiction]:
    """Yield (message, hint) for each setting that another one makes void or impossible."""
    yield from () if config.model is None else _of_the_model(config.model)
    yield from () if config.task is None else _of_the_task(config.task)
    yield from _of_the_rollout(config.rollout)
    yield from _of_the_kl(config.kl)
    yield from _of_the_kl_and_the_support(config)
    yield from _of_the_loss(config.loss)
    yield from _of_the_updates(config)
    yield from _of_the_steps(config)
    yield from _of_the_lockstep(config)
    yield from _of_the_staleness(config)


def _of_the_model(model: ModelConfig) -> Iterator[Contradiction]:
    if model.autocast and model.dtype != "float32":
        yield (
            f'model.autocast = "{model.autocast}" works over float32 weights: found model.dtype = "{model.dtype}"',
            'leave model.autocast out, or set model.dtype = "float32"',
        )
    if model.options and model.name != "tiny-llama":
        yield f'model.options shapes "tiny-llama" only: found model.name = "{model.name}"', "leave model.options out"
    if model.attention is not None and model.name == "tiny-llama":
        yield 'model.attention is for pretrained models: found model.name = "tiny-llama"', "leave model.attention out"
    if model.revision is not None and model.name in ("tiny-llama", "smollm2"):
        yield f'model.revision has no meaning for model.name = "{model.name}"', "leave model.revision out"


def _of_the_task(task: TaskConfig) -> Iterator[Contradiction]:
    for key in ("prompts", "held_out", "reward"):
        given = getattr(task, key) is not None
        if task.name == "file" and not given and key != "held_out":
            yield f'task.name = "file" needs task.{key}: found none', f"set task.{key}"
        if task.name != "file" and given:
            yield f'task.{key} is read by task.name = "file" only: found "{task.name}"', f"leave task.{key} out"


def _of_the_rollout(rollout: RolloutConfig) -> Iterator[Contradiction]:
    if rollout.top_k != 1:
        return
    for key in _changed(rollout, "temperature", "top_p", "min_p"):
        yield (
            f"rollout.{key} is void beside rollout.top_k = 1, which leaves one token at each place",
            f"leave rollout.{key} out, or set rollout.top_k to 2 or more",
        )


def _of_the_kl(kl: KLConfig) -> Iterator[Contradiction]:
    if kl.coefficient == 0:
        for key in _changed(kl, "estimator", "place", "unbiased"):
            yield (
                f"kl.{key} is about a penalty, and kl.coefficient = 0 charges none",
                f"leave kl.{key} out, or set kl.coefficient above 0",
            )
        return
    if kl.unbiased and kl.estimator == "k2":
        yield 'kl.unbiased needs kl.estimator "k1" or "k3": found "k2"', 'set kl.estimator = "k3", which has less noise'
    if kl.unbiased and kl.place == "reward":
        yield 'kl.unbiased is about the penalty in the loss: found kl.place = "reward"', "leave kl.unbiased out"
    if kl.estimator == "k2" and kl.place == "reward":
        yield (
            'kl.estimator = "k2" is about the penalty in the loss, and the reward always uses "k1": '
            'found kl.place = "reward"',
            "leave kl.estimator out",
        )
    if kl.estimator == "k1" and kl.place != "reward" and not kl.unbiased:
        yield (
            f'kl.estimator = "k1" in the loss (kl.place = "{kl.place}") has no gradient in expectation: '
            "it adds noise and pulls nowhere",
            'set kl.estimator = "k3", or kl.unbiased = true',
        )


def _of_the_kl_and_the_support(config: TrainConfig) -> Iterator[Contradiction]:
    if config.kl.coefficient > 0 and config.kl.unbiased:
        for key in _changed(config.rollout, "top_k", "top_p", "min_p"):
            yield (
                f"kl.unbiased is exact over whole distributions only: found rollout.{key}, which cuts them",
                f"leave kl.unbiased or rollout.{key} out",
            )


def _of_the_loss(loss: LossConfig) -> Iterator[Contradiction]:
    if loss.kind == "policy_gradient":
        for key in _changed(loss, "clip_low", "clip_high"):
            yield (
                f'loss.{key} is read by loss.kind = "clipped" only: found "policy_gradient"',
                f'leave loss.{key} out, or set loss.kind = "clipped"',
            )


def _of_the_updates(config: TrainConfig) -> Iterator[Contradiction]:
    pieces, epochs = config.optimizer.updates_per_step, config.optimizer.epochs_per_step
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    if pieces > rows:
        yield (
            f"optimizer.updates_per_step = {pieces} cuts the {rows} rollouts of a step "
            "(rollout.prompts_per_step x rollout.group_size) into more pieces than there are",
            f"set optimizer.updates_per_step to at most {rows}",
        )
    if config.loss.kind == "policy_gradient" and pieces * epochs > 1:
        yield (
            f'loss.kind = "policy_gradient" is right for the first update on a step\'s rollouts only: found '
            f"{pieces * epochs} (optimizer.updates_per_step x optimizer.epochs_per_step), and the later ones would "
            "train on samples of other weights without correcting for it",
            'set loss.kind = "clipped", or both to 1',
        )


def _of_the_steps(config: TrainConfig) -> Iterator[Contradiction]:
    if config.steps == 0:
        return
    if config.optimizer.warmup_steps > config.steps:
        yield (
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps} is more than steps = {config.steps}: "
            "the learning rate would never be reached",
            f"set optimizer.warmup_steps to at most {config.steps}",
        )
    if config.rollout.top_k == 1:
        yield (
            "rollout.top_k = 1 teaches nothing: all completions of a prompt are the same one, with the log-prob 0",
            "set rollout.top_k to 2 or more, or leave it out",
        )
    if config.rollout.group_size < 2 and (config.kl.coefficient == 0 or config.kl.place == "reward"):
        yield (
            f"rollout.group_size = {config.rollout.group_size} teaches nothing: a rollout is compared with the others "
            "of its group, and alone its advantage is 0",
            "set rollout.group_size to 2 or more",
        )


def _of_the_lockstep(config: TrainConfig) -> Iterator[Contradiction]:
    if config.rollout.lockstep and config.server is not None:
        yield (
            "rollout.lockstep is for a model in the process: a server completes rows as they come",
            "leave [server] or rollout.lockstep out",
        )


def _of_the_staleness(config: TrainConfig) -> Iterator[Contradiction]:
    stale = config.rollout.staleness
    if stale and config.server is None:
        yield (
            f"rollout.staleness = {stale} needs a server: a model in the process is either sampled from or trained",
            "set [server], or rollout.staleness = 0",
        )
    if stale and config.loss.importance_cap is None:
        yield (
            f"rollout.staleness = {stale} trains on samples of older weights, and nothing corrects for it",
            "set loss.importance_cap, for example to 2.0",
        )


def _changed(section: Section, *keys: str) -> Iterator[str]:
    """Yield the keys whose value is not the default."""
    fields = type(section).model_fields
    yield from (key for key in keys if getattr(section, key) != fields[key].default)
