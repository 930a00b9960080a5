"""From a task's name and options to the task."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from ramet.errors import ConfigError, RametError, nearest
from ramet.tasks.arithmetic import arithmetic
from ramet.tasks.calculator import calculator
from ramet.tasks.countdown import countdown
from ramet.tasks.file import file
from ramet.tasks.gym import gym
from ramet.tasks.maths import maths
from ramet.tasks.named import load
from ramet.tasks.options import options_of, refuse_unknown
from ramet.tasks.sorting import sorting
from ramet.tasks.task import Task
from ramet.tasks.text_arena import text_arena
from ramet.tasks.word_guessing import word_guessing

GYM, ARENA = "reasoning-gym", "textarena"
BY_NAME: Mapping[str, Callable[..., Task]] = {
    "arithmetic": arithmetic,
    "sorting": sorting,
    "countdown": countdown,
    "word_guessing": word_guessing,
    "calculator": calculator,
    "maths": maths,
}
OF_PACKAGES: Mapping[str, Callable[..., Task]] = {GYM: gym, ARENA: text_arena}
KNOWN = (*BY_NAME, f"{GYM}:DATASET", f"{ARENA}:GAME", "file", "path/to/file.py:NAME", "package.module:NAME")


def build_task(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    prompts: str | None = None,
    held_out: str | None = None,
    reward: str | None = None,
) -> Task:
    """Make the task `name`, one of `KNOWN`.

    `options` go to the function of that name, which says what they are; of a data set of reasoning-gym or a game of
    textarena, those that `gym` or `text_arena` does not have itself are its own. `prompts`, `held_out` and `reward` are
    the three settings of "file", which has no options. A task of your own is named by its file or module: a `Task`, or
    a function that returns one and takes the options by name, and `seed` if it wants it. `seed` is the run's: it may
    choose training problems, and never changes a held-out one. Raises `ConfigError` for an unknown name or option, with
    the nearest known one.

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
    if name in BY_NAME:
        refuse_unknown(options, options_of(BY_NAME[name]), name)
        return BY_NAME[name](seed=seed, **options)
    if kind in OF_PACKAGES and colon:
        builder = OF_PACKAGES[kind]
        own = {key: options.pop(key) for key in options_of(builder) if key in options}
        return builder(dataset, seed=seed, options=options, **own)
    meant = kind.lower().replace("_", "-")
    if meant in OF_PACKAGES and colon:  # as the packages are imported, or write themselves
        raise ConfigError(f'no task is called "{name}"', hint=f'did you mean "{meant}:{dataset}"?')
    if colon and _NAMED.fullmatch(name):
        return _named(name, options, seed)
    if name.endswith(".py"):
        raise ConfigError(
            f'":NAME" is missing: found the task "{name}"', hint=f"{name}:NAME, a Task or what returns one"
        )
    raise ConfigError(f'no task is called "{name}"', hint=nearest(name, KNOWN))


_NAMED = re.compile(r".*\.py:\w+|[\w.]+:\w+", re.DOTALL)


def _named(name: str, options: Mapping[str, Any], seed: int) -> Task:
    """Return a task of the user's own, or what their function makes of the options."""
    found = load(name, "task")
    if isinstance(found, Task):
        refuse_unknown(options, (), name)
        return found
    if not callable(found):
        raise ConfigError(
            f'the task "{name}" must be a Task, or a function that returns one: found {type(found).__name__}'
        )
    parameters = inspect.signature(found).parameters
    taken = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        refuse_unknown(options, [key for key in taken if key != "seed"], name)
    given = {**options, "seed": seed} if "seed" in taken else dict(options)
    missing = [key for key in taken if parameters[key].default is inspect.Parameter.empty and key not in given]
    if missing:
        raise ConfigError(f'the task "{name}" needs the option "{missing[0]}"', hint=f"set task.options.{missing[0]}")
    try:
        made = found(**given)
    except RametError:
        raise
    except (Exception, SystemExit) as error:  # a function of the user's may raise anything
        raise ConfigError(
            f'the task "{name}": calling {name.rpartition(":")[2]} failed with {type(error).__name__}: {error}',
            hint="--traceback shows where",
        ) from error
    if not isinstance(made, Task):
        raise ConfigError(f'the task "{name}" must return a Task: found {type(made).__name__}')
    return made
