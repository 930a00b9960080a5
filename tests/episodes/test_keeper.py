"""What an episode has of its own is closed once, however late it was made."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from typing import Any

import pytest
from tests.episodes import clock
from tests.episodes.stage import PLAIN, saying, task

from ramet.concurrency import Calls, Threads, by_threads
from ramet.episodes import Rules, Start, play
from ramet.episodes.keeper import Keeper
from ramet.types import Completion, Request, Sampling, StopReason


class World:
    """Counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0
        self.gone = threading.Event()

    def close(self) -> None:
        self.closed += 1
        self.gone.set()


def test_what_is_kept_is_closed_once() -> None:
    async def close_twice() -> None:
        await keeper.close(Calls(clock.inline))
        await keeper.close(Calls(clock.inline))

    keeper, world = Keeper(), World()
    assert keeper.keep(world) is world
    clock.run(close_twice)
    assert world.closed == 1
    assert keeper.keep(world) is world  # too late: closed at once
    assert world.closed == 2


def test_what_can_not_be_closed_is_left_alone() -> None:
    keeper = Keeper()
    keeper.keep([1, 2])
    clock.run(lambda: keeper.close(Calls(clock.inline)))
    assert keeper.keep((3,)) == (3,)


@pytest.mark.parametrize("kind", ["stuck", "async"])
def test_what_can_not_be_closed_any_more_is_logged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(World):
        def close(self) -> None:
            raise OSError("stuck")

    class Async(World):
        async def close(self) -> None:  # type: ignore[override]
            raise AssertionError

    keeper = Keeper()
    keeper.take()
    with caplog.at_level(logging.WARNING):
        keeper.keep(Stuck() if kind == "stuck" else Async())
    assert "could not be closed" in caplog.text


@pytest.mark.parametrize("error", [OSError("stuck"), SystemExit(0), GeneratorExit(), asyncio.CancelledError()])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_close_that_raises_is_logged_and_ends_nothing(
    error: BaseException, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(World):
        def close(self) -> None:
            raise error

    class StuckLater(World):
        async def close(self) -> None:  # type: ignore[override]
            raise error

    keeper = Keeper()
    keeper.keep(StuckLater() if asynchronous else Stuck())
    with caplog.at_level(logging.WARNING), Threads(1) as threads:
        asyncio.run(keeper.close(Calls(by_threads(threads))))
    assert type(error).__name__ in caplog.text


def test_a_close_that_hangs_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Hanging(World):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(10**6)

    keeper = Keeper()
    keeper.keep(Hanging())
    with caplog.at_level(logging.WARNING):
        _, seconds = clock.run(lambda: keeper.close(Calls(clock.inline)))
    assert seconds == pytest.approx(30.0)
    assert "TimeoutError" in caplog.text


def test_a_world_that_is_made_after_its_time_is_closed_in_its_thread() -> None:
    world, told = World(), threading.Event()

    def begin(row: Any, rng: random.Random) -> World:
        told.wait(60)  # for as long as the episode may take, and longer
        return world

    async def answer(request: Request) -> Completion:
        return saying(request, "x")

    rules = Rules(Sampling(4), 0, time_limit=0.01)
    [episode] = asyncio.run(play(task(begin=begin), [Start({"prompt": "a"}, 0)], answer, PLAIN, rules))
    assert episode.stop is StopReason.TIMEOUT
    assert episode.sample.state is None
    told.set()
    assert world.gone.wait(60)
    assert world.closed == 1
