"""A time limit that does not count the waiting for one's turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """Gives a coroutine `seconds` (None: all it wants), in which the clock stands still inside `standing()`.

    So what shares a few seats with others is not charged for their time in them. A clock that is made inside another's
    coroutine stands still together with it.

    >>> async def main() -> bool:
    ...     clock = Clock(5.0)
    ...     return await clock.in_time(clock.start(asyncio.sleep(0)))
    >>> asyncio.run(main())
    True
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        outer = _clock.get()
        self._outer = outer if outer is not None and outer.here else None
        self._limit: asyncio.Timeout | None = None
        self._left: float | None = None
        self._standing = 0

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Return a task of `work`, for which this is the clock."""
        before = _clock.set(self)
        try:
            return asyncio.ensure_future(work)
        finally:
            _clock.reset(before)

    async def in_time(self, task: asyncio.Task[Any]) -> bool:
        """Wait for the end of `task` or of its time; return whether it has ended. Nothing is cancelled."""
        try:
            async with asyncio.timeout(self._seconds) as self._limit:
                await asyncio.wait({task})
        except TimeoutError:
            return task.done()
        finally:
            self._limit = None
        return True

    def stop(self) -> None:
        """Stand still until `go` was called as often."""
        if self._outer is not None:
            self._outer.stop()
        self._standing += 1
        if (
            self._standing == 1
            and self._limit is not None
            and not self._limit.expired()
            and (end := self._limit.when()) is not None
        ):
            self._left = end - self._loop.time()
            self._limit.reschedule(None)

    def go(self) -> None:
        """Go on."""
        if self._outer is not None:
            self._outer.go()
        self._standing -= 1
        if not self._standing and self._limit is not None and self._left is not None:
            self._limit.reschedule(self._loop.time() + self._left)
            self._left = None

    @property
    def here(self) -> bool:
        """Whether it belongs to the loop that runs."""
        return self._loop is asyncio.get_running_loop()


_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextlib.contextmanager
def standing() -> Iterator[None]:
    """Let the clock stand still that counts for the coroutine that runs, if one does."""
    clock = _clock.get()
    if clock is None or not clock.here:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.go()
