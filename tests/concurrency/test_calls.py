"""Functions that are called from a coroutine: what they return, what they raise, and that they are given up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
from tests.episodes import clock

from ramet.concurrency import Calls, by_threads


def _raise(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("x"), ValueError),
        (SystemExit(2), SystemExit),
        (StopIteration("no more"), RuntimeError),
        (GeneratorExit(), RuntimeError),
    ],
)
def test_what_a_function_in_a_thread_raises_is_raised(error: BaseException, raised: type[BaseException]) -> None:
    """A StopIteration too, which no future takes, and a GeneratorExit, which would end the coroutine: RuntimeErrors."""

    async def call() -> None:
        with pytest.raises(raised) as found:
            await by_threads(threads)(lambda: _raise(error))
        assert error in (found.value, found.value.__cause__)

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(call())


def test_a_function_that_is_given_up_ends_by_itself() -> None:
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        released.wait(60)
        ended.set()

    async def give_up(threads: ThreadPoolExecutor) -> None:
        task = asyncio.ensure_future(by_threads(threads)(hang))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(give_up(threads))
        released.set()  # only now, when its loop is closed
        assert ended.wait(60)


@pytest.mark.parametrize("loop_is_closed", [False, True])
def test_a_coroutine_that_comes_too_late_is_dropped(loop_is_closed: bool) -> None:
    begun, released = threading.Event(), threading.Event()
    made: list[Coroutine[Any, Any, int]] = []

    def late() -> Coroutine[Any, Any, int]:
        begun.set()
        released.wait(60)
        made.append(asyncio.sleep(0, 1))
        return made[0]

    async def give_up(threads: ThreadPoolExecutor) -> None:
        task = asyncio.ensure_future(by_threads(threads)(late))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if not loop_is_closed:
            released.set()
            while not made or inspect.getcoroutinestate(made[0]) != inspect.CORO_CLOSED:
                await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(give_up(threads))
        released.set()
    assert inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED


def test_functions_of_every_kind_are_called() -> None:
    async def twice(x: int) -> int:
        return 2 * x

    class Doubling:
        async def __call__(self, x: int) -> int:
            return 2 * x

    kinds: list[Callable[[int], object]] = [twice, lambda x: 2 * x, lambda x: twice(x), Doubling()]

    async def call() -> list[object]:
        return [await Calls(clock.inline)(function, 4) for function in kinds]

    assert clock.run(call)[0] == [8, 8, 8, 8]


def test_a_coroutine_that_is_deaf_to_its_end_is_left_to_itself() -> None:
    async def deaf() -> None:
        while asyncio.get_running_loop().time() < 100:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(50)

    async def give_up() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await Calls(clock.inline)(deaf)
        given_up = asyncio.get_running_loop().time()
        await asyncio.sleep(200)  # it has ended by then
        return given_up

    assert clock.run(give_up)[0] == pytest.approx(6.0)


def test_whoever_waits_for_a_job_that_no_thread_will_run_is_told() -> None:
    class Refusing(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            done: Future[Any] = Future()
            if error is None:
                done.cancel()
            else:
                done.set_exception(error)
            return done

    for error, said in (  # noqa: B007 (`Refusing` reads it)
        (RuntimeError("can't start new thread"), "can't start"),
        (None, "the threads are closed"),
    ):
        with pytest.raises(RuntimeError, match=said):
            asyncio.run(asyncio.wait_for(by_threads(Refusing())(lambda: 1), 60))


def test_what_a_coroutine_raises_when_it_is_cancelled_is_of_no_interest() -> None:
    said: list[Any] = []

    async def stubborn() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise LookupError("while it is cancelled")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        task = asyncio.ensure_future(Calls(by_threads(threads))(stubborn))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(main())
    assert said == []
