"""The gate that holds rows back while weights change, over one event loop and over several."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.policies.server.gate import Gate


class World:
    """A version that changes while the gate is closed, and rows that read it twice."""

    def __init__(self) -> None:
        self.gate, self.version, self.inside, self.lock = Gate(), 0, 0, threading.Lock()

    async def row(self, before: float, within: float) -> tuple[int, int]:
        await asyncio.sleep(before)
        async with self.gate.inside():
            with self.lock:
                self.inside += 1
            first = self.version
            await asyncio.sleep(within)
            second = self.version
            with self.lock:
                self.inside -= 1
        return first, second

    async def update(self, before: float, within: float) -> None:
        await asyncio.sleep(before)
        async with self.gate.closed():
            assert self.inside == 0
            await asyncio.sleep(within)
            assert self.inside == 0
            self.version += 1


TIMES = st.integers(0, 5).map(lambda number: number / 2000)
PAIRS = st.tuples(TIMES, TIMES)


@settings(deadline=None, max_examples=25)
@given(st.lists(PAIRS, max_size=8), st.lists(PAIRS, max_size=4))
def test_no_row_sees_two_versions(rows: list[tuple[float, float]], updates: list[tuple[float, float]]) -> None:
    async def play(world: World) -> list[tuple[int, int]]:
        found, _ = await asyncio.gather(
            asyncio.gather(*(world.row(*row) for row in rows)),
            asyncio.gather(*(world.update(*update) for update in updates)),
        )
        return list(found)

    world = World()
    assert all(first == second for first, second in asyncio.run(play(world)))
    assert world.version == len(updates)
    assert world.gate.empty


def test_rows_of_several_loops_and_an_update_of_another_keep_apart() -> None:
    world = World()

    async def many() -> list[tuple[int, int]]:
        return list(await asyncio.gather(*(world.row(number / 2000, 0.001) for number in range(20))))

    async def some() -> None:
        for _ in range(5):
            await world.update(0.002, 0.001)

    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(asyncio.run, many()) for _ in range(3)]
        pool.submit(asyncio.run, some()).result(20)
        found = [pair for loop in loops for pair in loop.result(20)]
    assert len(found) == 60
    assert all(first == second for first, second in found)
    assert world.version == 5


def test_whoever_gives_up_waiting_leaves_nothing_behind() -> None:
    async def play() -> list[str]:
        gate, seen = Gate(), []

        async def row(name: str) -> None:
            async with gate.inside():
                seen.append(name)

        async with gate.closed():
            first, second = asyncio.create_task(row("first")), asyncio.create_task(row("second"))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            assert len(gate._waiting) == 1
        await second
        assert not gate._waiting
        return seen

    assert asyncio.run(play()) == ["second"]


def test_an_update_that_is_cancelled_while_it_waits_opens_the_gate() -> None:
    async def play() -> None:
        gate = Gate()

        async def close() -> None:
            async with gate.closed():
                raise AssertionError("somebody is inside")

        async with gate.inside():
            closing = asyncio.create_task(close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            async with gate.inside():
                assert not gate.empty
        assert gate.empty

    asyncio.run(play())


def test_a_loop_that_ended_while_it_waited_is_passed_over() -> None:
    gate = Gate()
    ended = asyncio.new_event_loop()

    async def wait() -> None:
        async with gate.inside():
            raise AssertionError("the gate is closed")

    async def play() -> None:
        async with gate.closed():
            task = ended.create_task(wait())
            thread = threading.Thread(target=lambda: ended.run_until_complete(asyncio.sleep(0.01)))
            thread.start()
            thread.join()
            assert len(gate._waiting) == 1
            waiting = list(gate._waiting)
            task.cancel()
            thread = threading.Thread(target=lambda: ended.run_until_complete(asyncio.wait([task])))
            thread.start()
            thread.join()
            ended.close()
            gate._waiting += waiting  # as if it had ended without notice
        async with gate.inside():
            assert not gate.empty

    asyncio.run(play())
