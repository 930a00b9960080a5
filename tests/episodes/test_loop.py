"""An event loop on a thread: what it returns, what it raises, and that it cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
from tests.episodes import clock

from ramet.episodes import EventLoop, Here
from ramet.episodes.loop import Calls, by_threads, together


def _raise(error: BaseException) -> NoReturn:
    raise error


def test_what_a_coroutine_returns_or_raises_comes_back() -> None:
    async def fail(here: Here) -> None:
        raise KeyError("x")

    with EventLoop() as loop:
        assert loop.run(lambda here: asyncio.sleep(0, 5)) == 5
        with pytest.raises(KeyError, match="x"):
            loop.run(fail)
        assert loop.run(lambda here: asyncio.sleep(0, 6)) == 6


def test_what_belongs_to_the_loop_outlives_a_call() -> None:
    async def here_is(here: Here) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with EventLoop() as loop:
        assert loop.run(here_is) is loop.run(here_is)


def test_the_thread_that_waits_runs_what_it_is_handed() -> None:
    async def ask(here: Here) -> tuple[int, int]:
        return await here(threading.get_ident), threading.get_ident()

    with EventLoop() as loop:
        handed, own = loop.run(ask)
    assert handed == threading.get_ident() != own


def test_what_a_handed_function_raises_is_raised_in_the_coroutine() -> None:
    async def ask(here: Here) -> str:
        try:
            await here(lambda: _raise(OSError("full")))
        except OSError as error:
            return str(error)
        return "nothing"

    with EventLoop() as loop:
        assert loop.run(ask) == "full"


@pytest.mark.parametrize("by", ["call", "start"])
def test_an_interrupt_of_the_waiting_thread_ends_the_coroutine_first(by: str) -> None:
    cleaned: list[str] = []

    async def work(here: Here) -> None:
        try:
            if by == "call":
                await here(lambda: _raise(KeyboardInterrupt()))
            here.start(lambda: _raise(KeyboardInterrupt()))
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")

    with EventLoop() as loop:
        with pytest.raises(KeyboardInterrupt):
            loop.run(work)
        assert cleaned == ["up"]
        assert loop.run(lambda here: asyncio.sleep(0, "alive")) == "alive"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_in_a_coroutine_goes_to_the_caller_and_ends_no_loop(error: BaseException) -> None:
    async def work(here: Here) -> None:
        await together([lambda: asyncio.sleep(0), lambda: _fail(error)])

    async def _fail(error: BaseException) -> None:
        raise error

    with EventLoop() as loop:
        with pytest.raises(type(error)):
            loop.run(work)
        assert loop.run(lambda here: asyncio.sleep(0, 1)) == 1


def test_a_loop_that_waits_for_itself_is_refused() -> None:
    with EventLoop() as loop:

        async def work(here: Here) -> None:
            loop.run(lambda here: asyncio.sleep(0))

        with pytest.raises(RuntimeError, match="use await"):
            loop.run(work)


def test_a_handed_function_may_wait_for_the_loop_itself() -> None:
    with EventLoop() as loop:

        async def work(here: Here) -> int:
            return await here(lambda: loop.run(lambda inner: asyncio.sleep(0, 7)))

        assert loop.run(work) == 7


def test_closing_ends_the_thread_and_what_still_runs() -> None:
    ended: list[str] = []

    async def leave_behind(here: Here) -> asyncio.Task[None]:
        async def forever() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("forever")

        task = asyncio.ensure_future(forever())
        await asyncio.sleep(0)
        return task

    loop = EventLoop()
    task = loop.run(leave_behind)
    loop.close()
    loop.close()
    assert ended == ["forever"]
    assert task.cancelled()
    assert not loop._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(lambda here: asyncio.sleep(0))


def test_a_loop_that_nobody_closes_ends_with_its_object() -> None:
    loop = EventLoop()
    thread = loop._thread
    del loop
    thread.join(10)
    assert not thread.is_alive()


# ---------------------------------------------------------------- sync functions


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("x"), ValueError), (SystemExit(2), SystemExit), (StopIteration("no more"), RuntimeError)],
)
def test_what_a_function_in_a_thread_raises_is_raised(error: BaseException, raised: type[BaseException]) -> None:
    """A StopIteration too, which no future takes: a coroutine turns it into a RuntimeError."""

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


def test_together_ends_the_others_at_the_first_error() -> None:
    ended: list[float] = []

    async def wait(seconds: float) -> float:
        try:
            await asyncio.sleep(seconds)
            return seconds
        finally:
            ended.append(asyncio.get_running_loop().time())

    async def fail() -> float:
        await asyncio.sleep(2)
        raise OSError("broken")

    assert clock.run(lambda: together([lambda: wait(3), lambda: wait(1)]))[0] == [3, 1]
    ended.clear()
    with pytest.raises(OSError, match="broken"):
        clock.run(lambda: together([lambda: wait(9), fail, lambda: wait(1)]))
    assert ended == [pytest.approx(1), pytest.approx(2)]
