"""A limit that does not count the waiting for one's turn, under a clock of its own."""

from __future__ import annotations

import asyncio

import pytest
from tests.episodes import clock

from ramet.concurrency import Clock, standing


async def limited(*steps: tuple[str, float], seconds: float | None = 5.0) -> tuple[bool, float]:
    """Take steps ("stand" or "run") of so many seconds; return whether that was in time, and when it was known."""

    async def work() -> None:
        for kind, length in steps:
            if kind == "stand":
                with standing():
                    await asyncio.sleep(length)
            else:
                await asyncio.sleep(length)

    loop, timer = asyncio.get_running_loop(), Clock(seconds)
    began, task = loop.time(), timer.start(work())
    in_time = await timer.in_time(task)
    assert in_time is task.done()
    task.cancel()
    return in_time, loop.time() - began


@pytest.mark.parametrize(
    ("steps", "in_time", "at"),
    [
        ([("run", 4.0)], True, 4.0),
        ([("run", 6.0)], False, 5.0),
        ([("stand", 100.0), ("run", 4.0)], True, 104.0),
        ([("stand", 100.0), ("run", 6.0)], False, 105.0),
        ([("run", 2.0), ("stand", 50.0), ("run", 2.0), ("stand", 50.0), ("run", 2.0)], False, 105.0),
        ([("run", 2.0), ("stand", 50.0), ("run", 2.5)], True, 54.5),
    ],
)
def test_the_clock_stands_still_while_one_waits(steps: list[tuple[str, float]], in_time: bool, at: float) -> None:
    found, when = clock.run(lambda: limited(*steps))[0]
    assert (found, when) == (in_time, pytest.approx(at))


def test_without_a_limit_there_is_all_the_time() -> None:
    assert clock.run(lambda: limited(("run", 1e6), ("stand", 1e6), seconds=None))[0] == (True, pytest.approx(2e6))


def test_it_stands_while_any_of_several_waits() -> None:
    async def main() -> tuple[bool, float]:
        async def part(wait: float) -> None:
            with standing():
                await asyncio.sleep(wait)

        async def both() -> None:
            await asyncio.gather(part(10), part(20))
            await asyncio.sleep(60)

        loop, timer = asyncio.get_running_loop(), Clock(5.0)
        task = timer.start(both())
        in_time = await timer.in_time(task)
        task.cancel()
        return in_time, loop.time()

    assert clock.run(main)[0] == (False, pytest.approx(25.0))


def test_a_clock_is_that_of_its_task_alone() -> None:
    async def main() -> float:
        loop, timer = asyncio.get_running_loop(), Clock(5.0)
        task = timer.start(asyncio.sleep(60))
        with standing():  # of the task that waits here, which has none
            assert not await timer.in_time(task)
        task.cancel()
        return loop.time()

    assert clock.run(main)[0] == pytest.approx(5.0)


def test_standing_without_a_clock_is_nothing() -> None:
    async def main() -> int:
        with standing():
            return 3

    assert asyncio.run(main()) == 3


def test_a_clock_inside_another_stands_still_together_with_it() -> None:
    async def main() -> tuple[bool, float]:
        async def inner() -> bool:
            async def waits() -> None:
                with standing():
                    await asyncio.sleep(100)
                await asyncio.sleep(2)

            own = Clock(3.0)
            return await own.in_time(own.start(waits()))

        loop, timer = asyncio.get_running_loop(), Clock(5.0)
        task = timer.start(inner())
        assert await timer.in_time(task)
        return task.result(), loop.time()

    assert clock.run(main)[0] == (True, pytest.approx(102.0))


def test_a_limit_that_comes_in_the_same_round_as_an_answer_is_a_limit() -> None:
    """Where something has held the loop, both are there at once; whoever then waits for a turn is too late."""

    async def main() -> tuple[bool, int]:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        async def work() -> int:
            await answer
            with standing():
                await asyncio.sleep(0)
            return 7

        timer = Clock(0.05)
        task = timer.start(work())
        timer_ends = loop.time() + 0.05

        def hold() -> None:
            while loop.time() < timer_ends + 0.05:
                pass
            loop.call_soon_threadsafe(answer.set_result, None)

        loop.call_later(0.02, hold)
        return await timer.in_time(task), await task

    assert asyncio.run(main())[1] == 7
