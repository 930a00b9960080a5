"""An event loop for callers who wait: async functions of a task run in it, call after call."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias

_Job: TypeAlias = tuple[Coroutine[Any, Any, list[Any]], "Future[list[Any]]"]


class EventLoop:
    """An event loop on a daemon thread of its own; the thread ends with this object, and at the latest with Python."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=_serve, args=(self._jobs,), name="ramet judge", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._jobs.put, None)
        self._stop.atexit = False  # so late there is nobody to wait for the thread

    def run(self, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """Return what `work` returns; an interrupt of the waiting cancels it."""
        future: Future[list[Any]] = Future()
        begun: list[asyncio.Task[list[Any]]] = []

        async def cancellable() -> list[Any]:
            begun.append(asyncio.ensure_future(work))
            return await begun[0]

        self._jobs.put((cancellable(), future))
        try:
            return future.result()
        except BaseException:
            for task in begun:
                task.get_loop().call_soon_threadsafe(task.cancel)
            self._stop()
            raise

    def close(self) -> None:
        """End the thread and wait for it."""
        self._stop()
        self._thread.join()


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    with asyncio.Runner() as runner:
        while (job := jobs.get()) is not None:
            work, future = job
            try:
                future.set_result(runner.run(work))
            except BaseException as error:  # the caller is told, even of an exit
                future.set_exception(error)
            del job, work, future  # what a reward holds is not kept until the next call
