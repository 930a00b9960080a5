"""A run that is watched ends as the coroutine does, or when it is interrupted, or when nothing moves any more."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from ramet.checking.watch import Hung, watched


def test_what_the_coroutine_raises_is_raised_and_it_has_ended() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            raise LookupError("lost")
        finally:
            ended.append("work")

    with pytest.raises(LookupError, match="lost"):
        watched(work, 60.0, lambda: "nothing")
    assert ended == ["work"]
    assert "ramet check" not in [thread.name for thread in threading.enumerate()]


def test_ctrl_c_cancels_what_runs_and_waits_for_its_end() -> None:
    ended: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("work")

    with pytest.raises(KeyboardInterrupt):
        watched(work, 60.0, lambda: "nothing")
    assert ended == ["work"]


def test_a_loop_that_stands_still_is_left_behind_and_one_that_waits_is_not() -> None:
    door = threading.Event()
    before = set(threading.enumerate())

    async def waits() -> None:
        await asyncio.sleep(1.5)  # three times as long as the loop may stand still

    async def stands() -> None:
        door.wait()

    watched(waits, 0.5, lambda: "nothing")
    with pytest.raises(Hung, match=r"^reply hung: it held up the event loop for over 0.5 s$") as hung:
        watched(stands, 0.5, lambda: "reply")
    assert hung.value.check == "episodes"
    door.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
