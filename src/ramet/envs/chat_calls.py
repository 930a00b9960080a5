"""How the functions of a task are called for the rows of a batch: in turn, together, or in threads and in time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ramet.concurrency import Calls, EventLoop, Threads, by_threads
from ramet.tasks.verdicts import FAILURES, Raised, settle

THREADS = 4096
"""How many functions run at once in threads, those that never end included."""


@dataclass(frozen=True, slots=True)
class Work:
    """A function and what it is called with; `timed` is False for what keeps its own time, as tools do.

    `made` is handed what comes of it as soon as that is there, whoever waits for it still, and returns what is
    returned.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    timed: bool = True
    made: Callable[[Any], Any] = lambda value: value

    def __call__(self) -> Any:
        """Return what the function returns, or what it raises as a `Raised`: it costs its own row."""
        try:
            value = self.function(*self.arguments)
            return value if inspect.isawaitable(value) else self.made(value)
        except FAILURES as error:
            return Raised(error)

    async def awaited(self, value: Awaitable[Any]) -> Any:
        """Return what comes of an awaitable that the function returned, or what it raises as a `Raised`."""
        found = await settle(value)
        return found if isinstance(found, Raised) else self.made(found)


class Caller:
    """Call functions for the rows of a batch, and return what they return, or what they raise as `Raised`.

    Async functions run together. Others run one after another in the thread that calls; with `seconds` all of them run
    together, each in a thread of its own. What takes longer than `seconds` has then raised `TimeoutError`: an async
    function is cancelled, another is left to end by itself, for a thread can not be stopped.

    >>> caller = Caller()
    >>> caller([Work(str.upper, ("a",)), None])
    ['A', None]
    >>> caller.close()
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._loop: EventLoop | None = None
        self._threads: Threads | None = None
        self._calls: Calls | None = None

    def __call__(self, works: Iterable[Work | None]) -> list[Any]:
        """Return one value for each of `works`, in order; None for none. What ends the program is raised."""
        if self._seconds is not None:
            return self._in_threads(list(works))
        works, values = list(works), list[Any]()
        try:
            values.extend(None if work is None else work() for work in works)
        except BaseException:  # Ctrl-C: nobody will wait for the coroutines that are there
            for value in filter(inspect.iscoroutine, values):
                value.close()
            raise
        pending = {number: work for number, work in enumerate(works) if work and inspect.isawaitable(values[number])}
        if pending:
            found = self._gathered([work.awaited(values[number]) for number, work in pending.items()])
            for number, value in zip(pending, found, strict=True):
                values[number] = value
        return values

    def close(self) -> None:
        """End the threads and the event loop; a later call starts others."""
        threads, self._threads, self._calls = self._threads, None, None
        loop, self._loop = self._loop, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        if loop is not None:
            loop.close()

    def _in_threads(self, works: Sequence[Work | None]) -> list[Any]:
        given = [number for number, work in enumerate(works) if work is not None]
        values: list[Any] = [None] * len(works)
        if not given:
            return values
        if self._calls is None:
            self._threads = Threads(THREADS, "ramet chat")
            self._calls = Calls(by_threads(self._threads))
        calls = self._calls
        found = self._gathered([self._in_time(calls, work) for work in works if work is not None])
        for number, value in zip(given, found, strict=True):
            values[number] = value
        return values

    async def _in_time(self, calls: Calls, work: Work) -> Any:
        clock = asyncio.timeout(self._seconds if work.timed else None)
        try:
            async with clock:
                return await calls(work.function, *work.arguments, made=work.made)
        except BaseException as error:  # an exit as well: the others go on to their ends
            late = isinstance(error, TimeoutError) and clock.expired()
            return Raised(TimeoutError(f"it took longer than {self._seconds:g} s") if late else error)

    def _gathered(self, pending: Sequence[Awaitable[Any]]) -> list[Any]:
        async def gathered() -> list[Any]:
            return list(await asyncio.gather(*pending))

        if self._loop is None:
            self._loop = EventLoop("ramet chat")
        try:
            return self._loop.run(lambda here: gathered())
        except BaseException:  # Ctrl-C: that loop may be busy, and is left to itself
            self._loop = None
            raise
