"""Rewards that compute: in processes of their own, where they hold up nobody and can be stopped."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable
from typing import Any

from ramet.concurrency import NotLoaded, Processes
from ramet.errors import ConfigError, RewardError
from ramet.tasks.task import Reopening, Verdict
from ramet.tasks.verdicts import name_of
from ramet.types import Sample

Scorer = Callable[[Sample], Verdict]
"""A sync reward."""


def in_processes(score: Scorer, processes: int = 2) -> InProcesses:
    """Make an async reward of a sync one that computes: its calls run in so many Python processes of their own.

    Python runs one thread at a time, so a reward that computes without a pause holds up every other rollout, and some
    (a regular expression that goes astray, sympy) even their own time limit. Here they hold up nobody. A call that runs
    into the limit of its `Judge`, or is cancelled, has its process killed; the limit counts from when a process is
    there for it. A process that dies costs the sample that it was at. What a reward returns or raises is the same as
    without.

    A call costs what it takes to pickle the sample, under a millisecond as a rule; a process starts at the first call,
    in about a tenth of a second and what the reward imports. It is a new interpreter, to which `score` is copied by
    cloudpickle as it is at the first call: lambdas, closures, and functions of scripts and notebooks too. What a
    reward changes there (a counter, a cache) nobody else sees.

    A `Judge` closes what it has open, as `close` does; a later call starts anew. Raises `ConfigError` for what is no
    sync function and for a number of processes below 1; the first call raises `RewardError` where `score` can not be
    copied, and a call `TypeError`, naming the field, where its sample can not.

    >>> import asyncio
    >>> from ramet.tasks import Judge
    >>> from ramet.types import StopReason
    >>> judge = Judge(in_processes(lambda sample: float(sample.completion == "4")), seconds=5)
    >>> judge([Sample("2+2=", "4", (1,), (2,), {}, StopReason.EOS, group=0, member=0)])[0].score
    1.0
    >>> judge.close()
    """
    return InProcesses(score, processes)


class InProcesses(Reopening):
    """What `in_processes` makes: an async reward."""

    def __init__(self, score: Scorer, processes: int) -> None:
        if not callable(score):
            raise ConfigError(f"in_processes: a reward must be a function of a sample: found {type(score).__name__}")
        if inspect.iscoroutinefunction(score) or isinstance(score, InProcesses):
            raise ConfigError(
                f"in_processes: {name_of(score)} must be a sync function: found an async one",
                hint="leave it as it is: it runs beside others already",
            )
        if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
            raise ConfigError(f"in_processes: processes must be a whole number from 1 on: found {processes!r}")
        self._score, self._count = score, processes
        self.__qualname__ = name_of(score)
        self._lock = threading.Lock()
        self._running: Processes | None = None

    async def __call__(self, sample: Sample) -> Any:
        """Return what the reward says of a sample, or raise what it raises."""
        running = self._opened()
        try:
            given = running.pickled(sample)
        except Exception as error:  # whatever the pickling of a user's object raises
            raise TypeError(_unpicklable(running, sample, error)) from error
        try:
            return await running.call(given)
        except NotLoaded as error:
            raise _not_copied(self.__qualname__, error) from error

    def close(self) -> None:
        """End the processes and the calls that they are at; a later call starts others."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return in_processes, (self._score, self._count)

    def _opened(self) -> Processes:
        with self._lock:
            if self._running is None:
                try:
                    self._running = Processes(self._score, self._count, self.__qualname__)
                except NotLoaded as error:
                    raise _not_copied(self.__qualname__, error) from error
            return self._running


def _not_copied(name: str, error: NotLoaded) -> RewardError:
    return RewardError(
        f"in_processes, reward {name}: {error}",
        hint="let it open files, load models and import what it needs where it first needs them",
    )


def _unpicklable(running: Processes, sample: Sample, error: Exception) -> str:
    """Say which part of a sample can not be pickled."""
    parts = {f"sample.{field.name}": getattr(sample, field.name) for field in dataclasses.fields(sample)}
    with_columns = {f"sample.row[{name!r}]": value for name, value in sample.row.items()} | parts
    for name, value in with_columns.items():
        try:
            running.pickled(value)
        except Exception as found:
            kind = type(value).__name__
            return f"{name} (a {kind}) can not be handed to another process: {type(found).__name__}: {found}"
    return f"the sample can not be handed to another process: {type(error).__name__}: {error}"
