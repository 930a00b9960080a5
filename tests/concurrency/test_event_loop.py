"""An event loop on a thread: what it returns, what it raises, and that it cleans up."""

from __future__ import annotations

import asyncio
import threading
from typing import NoReturn

import pytest

from ramet.concurrency import EventLoop, Exit, Here, event_loop, together


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


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_in_a_task_that_a_coroutine_has_started_goes_to_whoever_awaits_it(error: BaseException) -> None:
    """The loop itself hears of it as well, and goes on: others run there."""

    async def leave() -> None:
        raise error

    async def work(here: Here) -> None:
        other.append(asyncio.ensure_future(asyncio.sleep(0.01, "done")))
        await asyncio.gather(leave(), asyncio.sleep(0))

    other: list[asyncio.Future[str]] = []
    with EventLoop() as loop:
        with pytest.raises(type(error)):
            loop.run(work)
        assert loop.run(lambda here: asyncio.wait_for(other[0], 60)) == "done"


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


def test_who_does_not_wait_has_a_future() -> None:
    ended = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with EventLoop() as loop:
        assert loop.submit(asyncio.sleep(0, 3)).result(30) == 3
        with pytest.raises(KeyError, match="x"):
            loop.submit(_raise_later(KeyError("x"))).result(30)
        future = loop.submit(endless())
        future.cancel()
        assert ended.wait(30)
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(asyncio.sleep(0))


async def _raise_later(error: BaseException) -> None:
    raise error


def test_an_interrupt_does_not_wait_for_a_loop_that_something_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "GRACE", 0.05)
    begun, released, over = threading.Event(), threading.Event(), threading.Event()

    async def hold(here: Here) -> None:
        here.start(lambda: begun.wait(30) and _raise(KeyboardInterrupt()))
        begun.set()
        released.wait(30)  # no await: nothing else runs in this loop
        over.set()

    with EventLoop() as loop:
        with pytest.raises(KeyboardInterrupt):
            loop.run(hold)
        assert not over.is_set()
        released.set()
        assert loop.run(lambda here: asyncio.sleep(0, 4)) == 4


def test_an_exit_in_what_is_submitted_ends_no_loop() -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    with EventLoop() as loop:
        with pytest.raises(Exit) as raised:
            loop.submit(leaves()).result(60)
        assert isinstance(raised.value.error, SystemExit)
        assert loop.submit(asyncio.sleep(0, "still here")).result(60) == "still here"
