"""An event loop on a thread of its own, for callers who wait."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Self, TypeVar

from ramet.concurrency.calls import Job
from ramet.concurrency.together import Exit, without_exits

T = TypeVar("T")

GRACE = 5.0
"""How many seconds a loop may take to hear that it is to end something, or itself, before it is left behind."""


class Here:
    """The thread that waits for an `EventLoop`, as what runs in the loop sees it: it runs what it is handed.

    So whatever belongs to that thread, such as a model, stays there, and Ctrl-C ends it.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def start(self, job: Callable[[], object]) -> None:
        """Have `job` run when those before it are done; what it raises ends the waiting."""
        self._jobs.put(job)

    async def __call__(self, function: Callable[[], T], /) -> T:
        """Return what `function` returns when it has run there, or raise what it raises."""
        job = Job(function)
        self._jobs.put(lambda: _raise_exits(job.run()))
        return await job.result()

    def serve(self) -> None:
        """Run jobs until `close` is called."""
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Let `serve` return when the jobs before are done."""
        self._jobs.put(None)


def _raise_exits(raised: BaseException | None) -> None:
    if raised is not None and not isinstance(raised, Exception):
        raise raised


class EventLoop:
    """An event loop on a thread of its own, for as long as what belongs to it (clients, semaphores) is to be used.

    Close it, or use it as a context; at the latest it ends with its object, or with Python. An error or Ctrl-C while
    `run` waits cancels what runs, and is raised when that has cleaned up; a second Ctrl-C does not wait, nor does the
    first where something holds the loop. `name` is the thread's.

    >>> with EventLoop() as loop:
    ...     loop.run(lambda here: asyncio.sleep(0, "done"))
    'done'
    """

    def __init__(self, name: str = "ramet loop") -> None:
        self._loop = asyncio.new_event_loop()
        ending = asyncio.Event()
        self._thread = Thread(target=_serve, args=(self._loop, ending), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, ending.set)
        self._end.atexit = False  # so late there is nobody to wait for the thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Callable[[Here], Coroutine[Any, Any, T]]) -> T:
        """Return what the coroutine `work(here)` returns; `here` is the thread that calls and waits.

        Raises `RuntimeError` on the loop's own thread, which would wait for itself, and when the loop is closed.
        """
        if current_thread() is self._thread:
            raise RuntimeError("EventLoop.run waits for the loop: in a coroutine that runs there, use await")
        here, done = Here(), Future[T]()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(without_exits(partial(work, here))))
            tasks[0].add_done_callback(partial(_hand_over, done, here))

        self._loop.call_soon_threadsafe(begin)
        try:
            here.serve()
        except BaseException:
            self._cancel(tasks, done)
            raise
        try:
            return done.result()
        except Exit as exit_:
            raise exit_.error from None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the loop, for a caller who does not wait; cancelling the future cancels it.

        An exit in it is the future's error, an `Exit`. Raises `RuntimeError` when the loop is closed.
        """
        apart = without_exits(lambda: work)
        try:
            return asyncio.run_coroutine_threadsafe(apart, self._loop)
        except RuntimeError:
            apart.close()
            work.close()
            raise

    def _cancel(self, tasks: list[asyncio.Task[T]], done: Future[T]) -> None:
        """End a task and wait until it has cleaned up, if the loop hears of it."""
        heard: Future[None] = Future()

        def cancel() -> None:
            tasks[0].cancel()
            heard.set_result(None)

        self._loop.call_soon_threadsafe(cancel)
        if wait([heard], GRACE).done:
            wait([done])

    def close(self) -> None:
        """End the loop and wait for its thread; what hangs in it is left behind after a while."""
        if self._end.alive:
            self._end()
            self._thread.join(GRACE)


def _hand_over(done: Future[T], here: Here, task: asyncio.Task[T]) -> None:
    if task.cancelled():
        done.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
    here.close()


def _serve(loop: asyncio.AbstractEventLoop, ending: asyncio.Event) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        while not ending.is_set():
            # An exit in a task that something in the loop has started comes out here too: whoever awaits it is told.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                runner.run(_wait_for(ending))


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()
