"""An event loop with a clock of its own: when nothing is left to do, it is at once the time of the next timer.

So a test of hours ends in milliseconds, and says to the last digit what happened when. Threads have no place in it:
what they do takes no time that such a clock could know of.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Everybody waits, and there is no timer that could wake anybody."""


class _Jumping(selectors.SelectSelector):
    """A selector that does not wait: the time that it was to wait for has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock(f"at {self.now:g} s everybody waits, and there is no timer")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0 and passes only where everybody waits."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, *_: Any) -> Any:
        raise AssertionError("a thread under a virtual clock: call sync functions inline")


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, float]:
    """Return what the coroutine returns, and how many seconds it took; no task may be left behind."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(work())
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert left == [], f"left behind: {left}"
        return result, loop.time()
    finally:
        loop.close()


async def inline(function: Callable[[], T], /) -> T:
    """Call a sync function where the coroutine is: the time that it takes is none."""
    return function()
