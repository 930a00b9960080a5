"""Threads for functions that wait: as many as there are calls at once, and none that holds up the end of Python."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

_T = TypeVar("_T")
_Settle: TypeAlias = "Callable[[], object]"
_Job: TypeAlias = "tuple[Future[Any], Callable[[], _Settle]]"


class Threads(Executor):
    """Run each call in a thread of its own, up to `limit` at once; a thread that is free takes the next.

    The threads are daemons: a call that never ends keeps one of them, and does not keep Python from ending. (Those of
    `ThreadPoolExecutor` are waited for.) `submit` does not wait for a thread to begin, which takes a while beside one
    that computes. `shutdown` ends them, and waits for those that are free.

    >>> with Threads(4) as threads:
    ...     threads.submit(lambda: 1 + 1).result()
    2
    """

    def __init__(self, limit: int, name: str = "ramet thread") -> None:
        if limit < 1:
            raise ValueError(f"there must be at least 1 thread: found {limit}")
        self._room = _Room(limit, name)
        self._closed = False
        self._stop = weakref.finalize(self, self._room.end)
        self._stop.atexit = False

    def submit(self, fn: Callable[..., _T], /, *args: Any) -> Future[_T]:  # type: ignore[override]  # none by name
        """Return a future of `fn(*args)`; raise `RuntimeError` after `shutdown`."""
        future: Future[_T] = Future()

        def job() -> _Settle:
            if not future.set_running_or_notify_cancel():
                return future.cancelled
            try:
                return partial(future.set_result, fn(*args))
            except BaseException as error:  # whoever waits is told, even of an exit
                return partial(future.set_exception, error)

        with self._room.lock:
            if self._closed:
                raise RuntimeError("the threads are closed")
            self._room.take((future, job))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they are free; what has not begun is dropped with `cancel_futures`, else done first."""
        room = self._room
        with room.lock:
            if self._closed:
                return
            self._closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while (waiting := room.jobs.get_nowait()) is not None:
                    waiting[0].cancel()
        self._stop()
        if wait and room.beginner.is_alive():
            room.beginner.join()
        for thread in room.threads:
            while wait and thread.is_alive() and thread not in room.busy:
                thread.join(0.01)


class _Room:
    """What the threads share; it outlives the `Threads`, with whose object they end.

    A thread that begins has to wait for its turn to run, and so has whoever begins it. So one thread does nothing but
    begin others, each of which begins two more where they are missing: so many are there soon, beside a thread that
    computes too.
    """

    def __init__(self, limit: int, name: str) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.busy: set[threading.Thread] = set()
        self._free = threading.Semaphore(0)
        self._limit, self._name = limit, name
        self._promised = 0
        self._missing: SimpleQueue[bool] = SimpleQueue()
        self.beginner = threading.Thread(target=self._begin_all, name=name, daemon=True)

    def take(self, job: _Job) -> None:
        """Put a job where a thread will find it; have one begin where none is free. The caller holds the lock."""
        self.jobs.put(job)
        if not self._free.acquire(blocking=False) and self._promised < self._limit:
            if not self._promised:
                self.beginner.start()
            self._promised += 1
            self._missing.put(True)

    def end(self) -> None:
        """Let the threads end that are free."""
        self.jobs.put(None)
        self._missing.put(False)

    def _begin_all(self) -> None:
        while self._missing.get():
            self._begin()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self.threads.append(thread)  # before it begins: it is listed whenever a call of its has ended
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no more of them: those that are there do it, if there are any
            self.threads.remove(thread)
            if not self.threads and (job := self.jobs.get()) is not None:
                job[0].set_exception(error)

    def _serve(self) -> None:
        for _ in range(2):
            with contextlib.suppress(Empty):
                if self._missing.get_nowait():
                    self._begin()
                else:
                    self._missing.put(False)
        me = threading.current_thread()
        while (job := self.jobs.get()) is not None:
            self.busy.add(me)
            settle = job[1]()
            self.busy.discard(me)
            self._free.release()  # whoever sees the result finds this thread free
            settle()
            del job, settle  # what they hold is not kept until the next
        self.jobs.put(None)  # for the next thread
