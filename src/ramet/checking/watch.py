"""A run that is watched: what holds up the event loop itself is found out, and left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

BEATS = 8
"""How often the loop shows that it is alive, in the time that it may be held up."""
GRACE = 5.0
"""How many seconds what is interrupted may take to end."""


class Hung(Exception):
    """Something of a task's did not come to its end: `check` is the check that it fails, `found` says what it was."""

    def __init__(self, check: str, found: str) -> None:
        super().__init__(found)
        self.check = check
        self.found = found


def watched(work: Callable[[], Coroutine[Any, Any, None]], seconds: float, doing: Callable[[], str]) -> None:
    """Run the coroutine `work()` in an event loop on a thread of its own, and wait for its end.

    Raises what it raises; and `Hung` where a coroutine holds up the loop for `seconds`, in which no limit of time could
    be kept: `doing` says what it was about. The thread is then left behind, and keeps nobody from ending.

    >>> watched(lambda: asyncio.sleep(0), 60.0, lambda: "nothing")
    """
    run = _Run(work, seconds / BEATS)
    thread = threading.Thread(target=run, name="ramet check", daemon=True)
    try:
        thread.start()  # in which Ctrl-C may be heard as well
        silent = 0
        while silent < 2 * BEATS:  # twice over, for the whole process may have been stopped and gone on
            before = run.beats
            if run.done.wait(seconds / BEATS):
                break
            silent = 0 if run.beats > before else silent + 1
        else:
            raise Hung("episodes", f"{doing()} hung: it held up the event loop for over {seconds:g} s")
    except BaseException as error:
        if not isinstance(error, Hung):  # Ctrl-C
            run.cancel()
            run.done.wait(GRACE)
        raise
    thread.join(GRACE)
    if run.error is not None:
        raise run.error


class _Run:
    """A coroutine that runs, its pulse, and how it ended."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], pause: float) -> None:
        self._work, self._pause = work, pause
        self._stop: Callable[[], object] = lambda: None
        self.beats = 0
        self._cancelled = False
        self.done = threading.Event()
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # for whoever waits
            self.error = error
        finally:
            self.done.set()

    def cancel(self) -> None:
        """Have the coroutine end."""
        self._cancelled = True
        self._stop()

    async def _main(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._cancelled:
            task.cancel()
        beating = asyncio.ensure_future(self._beat())
        try:
            await self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._stop = lambda: None
            beating.cancel()
            self.done.set()  # closing the loop may wait for a thread of its own that hangs

    async def _beat(self) -> None:
        while True:
            self.beats += 1
            await asyncio.sleep(self._pause / 2)
