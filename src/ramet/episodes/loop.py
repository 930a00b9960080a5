"""Where async things run: an event loop on a thread of its own, and how sync functions are called from it."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Generic, Protocol, Self, TypeVar

T = TypeVar("T")

GRACE = 5.0
"""How many seconds `EventLoop.close` waits for what does not end when it is told to."""


DEAF = 1.0
"""How many seconds a coroutine may take to end when it is cancelled."""


class Calling(Protocol):
    """A way to call a sync function from a coroutine."""

    def __call__(self, function: Callable[[], T], /) -> Coroutine[Any, Any, T]:
        """Return what `function` returns, or raise what it raises."""


# ---------------------------------------------------------------- functions that take their time


def by_threads(threads: Executor) -> Calling:
    """Return a way to call sync functions in `threads`, so that they hold up nobody.

    A function can not be stopped: where its caller gives up, it is left to end by itself.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor() as threads:
    ...     asyncio.run(by_threads(threads)(lambda: 6 * 7))
    42
    """

    async def call(function: Callable[[], T], /) -> T:
        job = _Job(function)
        threads.submit(contextvars.copy_context().run, job.run)
        return await job.result()

    return call


class _Job(Generic[T]):
    """A function for another thread to run, and the future of the loop that waits for what comes of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()

    def run(self) -> BaseException | None:
        """Run the function, hand over what it returns or raises, and return what it raised."""
        value, raised = None, None
        try:
            value = self._function()
        except BaseException as error:  # for whoever waits, an exit included
            raised = error
        try:
            self._loop.call_soon_threadsafe(self._settle, value, raised)
        except RuntimeError:  # the loop is closed
            _drop(value)
        return raised

    def _settle(self, value: Any, raised: BaseException | None) -> None:
        if not self._future.done():
            self._future.set_result((value, raised))  # as a result: a future takes no StopIteration as its error
        else:
            _drop(value)

    async def result(self) -> T:
        """Wait for the function's end; return what it returned or raise what it raised."""
        value, raised = await self._future
        if raised is not None:
            raise raised
        found: T = value
        return found


def _drop(value: Any) -> None:
    """Let go of what nobody waits for any more: a coroutine that was never awaited would complain."""
    if inspect.iscoroutine(value):
        value.close()


class Calls:
    """Call what a task is made of, sync or async: a coroutine function in the loop itself, any other by `call`.

    A coroutine that goes on when it is cancelled is left to itself after `DEAF` seconds: it holds up nobody.
    """

    def __init__(self, call: Calling) -> None:
        self._call = call
        self._left: set[asyncio.Task[Any]] = set()

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `function` returns, awaited where it is awaitable, or raise what it raises."""
        if inspect.iscoroutinefunction(function):
            return await self._attend(partial(function, *arguments))
        value = await self._call(partial(function, *arguments))
        return await self._attend(partial(_awaited, value)) if inspect.isawaitable(value) else value

    async def _attend(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        task = asyncio.ensure_future(without_exits(work))
        try:
            await asyncio.wait({task})
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=DEAF)
            if not task.done():
                self._left.add(task)
                task.add_done_callback(self._left.discard)
        try:
            return task.result()
        except Exit as exit_:
            raise exit_.error from None


async def _awaited(value: Awaitable[T]) -> T:
    return await value


# ---------------------------------------------------------------- several at once


async def together(works: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Return what the coroutines of `works` return, in order; the first error ends the others, and is raised then."""
    tasks = [asyncio.ensure_future(without_exits(work)) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except Exit as exit_:
        raise exit_.error from None
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what is not done and wait for its end; what it raises by then is of no interest."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Exit(Exception):
    """An exit on its way through tasks: one that raised it as it is would end the loop under all others."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def without_exits(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what the coroutine `work()` returns; raise an exit as an `Exit`."""
    try:
        return await work()
    except (KeyboardInterrupt, SystemExit) as error:
        raise Exit(error) from error


# ---------------------------------------------------------------- a loop on a thread


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
        job = _Job(function)
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

    Close it, or use it as a context. An error or Ctrl-C while `run` waits cancels what runs, and is raised when that
    has cleaned up; a second Ctrl-C does not wait.

    >>> with EventLoop() as loop:
    ...     loop.run(lambda here: asyncio.sleep(0, "done"))
    'done'
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        ending = asyncio.Event()
        self._thread = Thread(target=_serve, args=(self._loop, ending), name="ramet episodes", daemon=True)
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
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            wait([done])
            raise
        try:
            return done.result()
        except Exit as exit_:
            raise exit_.error from None

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
        runner.run(_wait_for(ending))


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()
