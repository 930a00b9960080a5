"""Several coroutines at once: the first error ends the others."""

from __future__ import annotations

import asyncio

import pytest
from tests.episodes import clock

from ramet.concurrency import together


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
