"""Threads for tools that wait: as many as there are calls at once, and none that holds up the end of Python."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

_T = TypeVar("_T")
_Job: TypeAlias = "tuple[Future[Any], Callable[[], None]]"


class Threads(Executor):
    """Run each call in a thread of its own, up to `limit` at once; a thread that is free takes the next.

    The threads are daemons: a call that never ends keeps one of them, and does not keep Python from ending. (Those of
    `ThreadPoolExecutor` are waited for.) `shutdown` ends them, and waits for those that are free.

    >>> with Threads(4) as threads:
    ...     threads.submit(lambda: 1 + 1).result()
    2
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"there must be at least 1 thread: found {limit}")
        self._limit = limit
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._busy: set[threading.Thread] = set()
        self._closed = False
        self._stop = weakref.finalize(self, self._jobs.put, None)
        self._stop.atexit = False

    def submit(self, fn: Callable[..., _T], /, *args: Any) -> Future[_T]:  # type: ignore[override]  # none by name
        """Return a future of `fn(*args)`; raise `RuntimeError` after `shutdown`."""
        future: Future[_T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args))
            except BaseException as error:  # whoever waits is told, even of an exit
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError("the tools are closed")
            self._jobs.put((future, job))
            if not self._free.acquire(blocking=False) and len(self._threads) < self._limit:
                thread = threading.Thread(
                    target=_serve, args=(self._jobs, self._free, self._busy), name="ramet tool", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they are free; what has not begun is dropped with `cancel_futures`, else done first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while (waiting := self._jobs.get_nowait()) is not None:
                    waiting[0].cancel()
        self._stop()
        for thread in self._threads:
            if wait and thread not in self._busy:
                thread.join()


def _serve(jobs: SimpleQueue[_Job | None], free: threading.Semaphore, busy: set[threading.Thread]) -> None:
    me = threading.current_thread()
    while (job := jobs.get()) is not None:
        busy.add(me)
        job[1]()
        del job  # what it holds is not kept until the next
        busy.discard(me)
        free.release()
    jobs.put(None)  # for the next thread
