"""How functions are called from a coroutine, sync or async, so that they hold up nobody."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ramet.concurrency.together import Exit, without_exits

T = TypeVar("T")

DEAF = 1.0
"""How many seconds a coroutine may take to end when it is cancelled."""


class Calling(Protocol):
    """A way to call a sync function from a coroutine."""

    def __call__(self, function: Callable[[], T], /) -> Coroutine[Any, Any, T]:
        """Return what `function` returns, or raise what it raises."""


def by_threads(threads: Executor) -> Calling:
    """Return a way to call sync functions in `threads`, so that they hold up nobody.

    A function can not be stopped: where its caller gives up, it is left to end by itself.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor() as threads:
    ...     asyncio.run(by_threads(threads)(lambda: 6 * 7))
    42
    """

    async def call(function: Callable[[], T], /) -> T:
        job = Job(function)
        threads.submit(contextvars.copy_context().run, job.outcome).add_done_callback(job.ran)
        return await job.result()

    return call


class Job(Generic[T]):
    """A function for another thread to run, and the future of the loop that waits for what comes of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()

    def run(self) -> BaseException | None:
        """Run the function, hand over what it returns or raises, and return what it raised."""
        value, raised = self.outcome()
        self._hand_over(value, raised)
        return raised

    def outcome(self) -> tuple[Any, BaseException | None]:
        """Run the function; return what it returned and what it raised, for `ran` to hand over."""
        try:
            return self._function(), None
        except BaseException as error:  # for whoever waits, an exit included
            return None, error

    def ran(self, done: Future[tuple[Any, BaseException | None]]) -> None:
        """Hand over what came of `outcome` in a thread, or tell whoever waits that no thread has run it."""
        if done.cancelled():
            self._hand_over(None, RuntimeError("the threads are closed"))
        elif (error := done.exception()) is not None:
            self._hand_over(None, error)
        else:
            self._hand_over(*done.result())

    def _hand_over(self, value: Any, raised: BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._settle, value, raised)
        except RuntimeError:  # the loop is closed
            _drop(value)

    def _settle(self, value: Any, raised: BaseException | None) -> None:
        if not self._future.done():
            self._future.set_result((value, raised))  # as a result: a future takes no StopIteration as its error
        else:
            _drop(value)

    async def result(self) -> T:
        """Wait for the function's end; return what it returned or raise what it raised."""
        value, raised = await self._future
        if isinstance(raised, GeneratorExit):
            raise _failed(raised) from raised
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

    async def __call__(
        self, function: Callable[..., Any], *arguments: Any, made: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Return what `function` returns, awaited where it is awaitable, or raise what it raises.

        `made` is handed the value where and as soon as it is there, and returns what is returned: so nothing is lost
        that comes when its caller is cancelled, or has given up.
        """

        def called() -> Any:
            value = function(*arguments)
            return value if inspect.isawaitable(value) else made(value)

        async def awaited(value: Awaitable[Any]) -> Any:
            return made(await value)

        if inspect.iscoroutinefunction(function):
            return await self._attend(lambda: awaited(function(*arguments)))
        value = await self._call(called)
        return await self._attend(partial(awaited, value)) if inspect.isawaitable(value) else value

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
            elif not task.cancelled():
                task.exception()  # what it raises when it is cancelled is of no interest
        try:
            return task.result()
        except Exit as exit_:
            raise exit_.error from None
        except GeneratorExit as error:
            raise _failed(error) from error


def _failed(error: GeneratorExit) -> RuntimeError:
    """Return what to raise in its place: in a coroutine it would say that the coroutine is being closed."""
    return RuntimeError(f"it raised {type(error).__name__}")
