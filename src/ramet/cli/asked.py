"""What the commands that play a task have in common: which task, which of its rows, and what is set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ramet import toml
from ramet.config import TaskConfig, TrainConfig, checked
from ramet.errors import ConfigError, nearest
from ramet.prompts import read_rows
from ramet.tasks import Task, build_task

TASK_KEYS = ("task.options", "task.prompts", "task.held_out", "task.reward")
OPTIONS = {"seed": "--seed", "task.name": "TASK, the first word behind the command"}
"""Keys of a recipe that are said in another way on the command line."""
Split: TypeAlias = Literal["held-out", "train"]


def read_settings(
    task: str,
    overrides: Iterable[str],
    *,
    seed: int,
    keys: Sequence[str] = (),
    given: Mapping[str, Mapping[str, Any]] | None = None,
    options: Mapping[str, str] | None = None,
) -> TrainConfig:
    """Return the settings of a command: `given` ones by section, and `--set KEY=VALUE` on top.

    `keys` are those that the command reads, beside those of the task; all others have values that mean nothing.
    `options` are keys that have an option of the command in their place. Raises `ConfigError` for another key, and for
    a value that a key can not have.
    """
    read = (*TASK_KEYS, *keys)
    instead = {**OPTIONS, **(options or {})}
    data: dict[str, Any] = {
        "seed": seed,
        "steps": 0,
        "rollout": {"max_new_tokens": 1},
        "optimizer": {"learning_rate": 1.0},
    }
    for section, values in (given or {}).items():
        data.setdefault(section, {}).update(values)
    data["task"] = {"name": task}
    sources: dict[str, str] = {}
    for text in overrides:
        key = toml.override(data, text)
        if not any(key == known or key.startswith(f"{known}.") for known in read):
            hint = f"give {instead[key]}" if key in instead else nearest(key, read)
            raise ConfigError(f'{key} is not read here: found the override "{text}"', hint=hint)
        sources[key] = f'the override "{text}"'
    return checked(data, "the command line", sources)


def task_of(config: TrainConfig) -> Task:
    """Build the task that `config` names; refuse tools and rows that are none."""
    assert config.task is not None
    from ramet.assembly import tools_of

    task = task_with(config.task, config.seed)
    tools_of(task)
    for rows in (task.train, task.held_out):
        if rows:
            read_rows(rows)
    return task


def task_with(section: TaskConfig, seed: int) -> Task:
    """Build the task of a section of the settings, with a seed of its own; refuse rows that are no mappings."""
    task = build_task(
        section.name,
        section.options,
        seed=seed,
        prompts=section.prompts,
        held_out=section.held_out,
        reward=section.reward,
    )
    for half, rows in (("train", task.train), ("held_out", task.held_out)):
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"the task {task.name}: row {number} of {half} must be a mapping: found {type(row).__name__}",
                    hint='write a row as {"prompt": "...", ...}',
                )
    return task


def rows_of(task: Task, split: Split) -> Sequence[Mapping[str, Any]]:
    """Return the rows of one half of a task; raise `ConfigError` where there are none."""
    rows = task.held_out if split == "held-out" else task.train
    if not rows:
        other = "train" if split == "held-out" else "held-out"
        empty = not (task.train or task.held_out)
        hint = "do its options leave nothing?" if empty else f"give --split {other}"
        raise ConfigError(f"the task {task.name} has no {split} rows", hint=hint)
    return rows
