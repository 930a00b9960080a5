"""From a task's name and options to the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ramet.errors import ConfigError, nearest
from ramet.tasks.arithmetic import arithmetic
from ramet.tasks.file import file
from ramet.tasks.gym import gym
from ramet.tasks.options import options_of, refuse_unknown
from ramet.tasks.sorting import sorting
from ramet.tasks.task import Task

GYM = "reasoning-gym"
MADE_UP: Mapping[str, Callable[..., Task]] = {"arithmetic": arithmetic, "sorting": sorting}
KNOWN = (*MADE_UP, f"{GYM}:DATASET", "file")


def build_task(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    prompts: str | None = None,
    held_out: str | None = None,
    reward: str | None = None,
) -> Task:
    """Make the task `name`: "arithmetic", "sorting", "reasoning-gym:DATASET" or "file".

    `options` go to `arithmetic`, `sorting` or `gym`, which say what they are; of `gym`, those that it does not have
    itself are the dataset's. `prompts`, `held_out` and `reward` are the three settings of "file", which has no options.
    `seed` is the run's: it may choose training problems, and never changes a held-out one. Raises `ConfigError` for an
    unknown name or option, with the nearest known one.

    >>> task = build_task("arithmetic", {"digits": 1, "held_out_size": 10})
    >>> len(task.train), len(task.held_out)
    (90, 10)
    """
    options = dict(options or {})
    kind, colon, dataset = name.partition(":")
    if name == "file":
        refuse_unknown(options, (), name)
        if prompts is None or reward is None:
            raise ConfigError(
                "the task file needs prompts (a JSONL file) and a reward", hint="set task.prompts and task.reward"
            )
        return file(prompts, reward, held_out=held_out)
    for key, value in {"prompts": prompts, "held_out": held_out, "reward": reward}.items():
        if value is not None:
            raise ConfigError(
                f'task.{key} is read by the task file only: found the task "{name}"', hint=f"leave task.{key} out"
            )
    if name in MADE_UP:
        refuse_unknown(options, options_of(MADE_UP[name]), name)
        return MADE_UP[name](seed=seed, **options)
    if kind == GYM and colon:
        own = {key: options.pop(key) for key in options_of(gym) if key in options}
        return gym(dataset, seed=seed, options=options, **own)
    raise ConfigError(f'no task is called "{name}"', hint=nearest(name, KNOWN))
