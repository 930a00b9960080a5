"""Options of a task, checked by hand: they come from a file, and every mistake in one is a `ConfigError`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ramet.errors import ConfigError, nearest


def options_of(builder: Callable[..., Any]) -> list[str]:
    """Return the options that a task's builder has: what it takes by keyword, without the run's `seed`."""
    parameters = inspect.signature(builder).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("seed", "options")]


def refuse_unknown(found: Iterable[str], known: Collection[str], task: str) -> None:
    """Raise `ConfigError` for the first name of `found` that is not `known`."""
    for name in found:
        if name not in known:
            raise ConfigError(f'the task {task} has no option "{name}"', hint=nearest(name, known))


def whole(name: str, value: Any, *, low: int) -> int:
    """Return an option that must be a whole number from `low` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"task.options.{name}: expected a whole number from {low} on, found {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    """Return an option that must be true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"task.options.{name}: expected true or false, found {value!r}")
    return value


def one_of(name: str, value: Any, known: Collection[str]) -> str:
    """Return an option that must be one of a few words."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"task.options.{name}: expected one of {', '.join(known)}, found {value!r}")
    return value


def text(name: str, value: Any) -> str:
    """Return an option that must be a string."""
    if not isinstance(value, str):
        raise ConfigError(f"task.options.{name}: expected a string, found {value!r}")
    return value
