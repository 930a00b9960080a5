"""A server that is away is waited for by one look at a time, under a clock of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from tests.episodes.clock import run

from ramet.errors import ServerError, ServerGone
from ramet.http import Outage, RefusedError, Retries, TransientError, with_retries

REFUSED = TransientError("nobody there", sent=False)
ONCE = Retries(count=0)


class Port:
    """What is asked: nobody answers from `dies` until `back`, and `looks` are the times at which it was looked for."""

    def __init__(self, dies: float, back: float, *, error: Exception = REFUSED, limit: float = 100.0) -> None:
        self.dies, self.back, self.error = dies, back, error
        self.looks: list[float] = []
        self.outage = Outage(self.look, "port", ["/health"], limit)

    def up(self) -> None:
        if self.dies <= asyncio.get_running_loop().time() < self.back:
            raise self.error

    async def look(self, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        assert (method, path, body) == ("GET", "/health", None)
        self.looks.append(asyncio.get_running_loop().time())
        self.up()

    async def ask(self) -> str:
        self.up()
        return "answer"

    async def asked(self, retries: Retries = ONCE) -> str:
        return await with_retries(self.ask, retries, "row", self.outage)


def test_all_who_wait_share_looks_that_come_later_and_later_and_it_is_said_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = Port(1.0, 40.0)

    async def work() -> list[str]:
        await port.asked()
        await asyncio.sleep(2.0)
        return await asyncio.gather(*(port.asked() for _ in range(50)))

    found, seconds = run(work)
    assert found == ["answer"] * 50
    assert port.looks == [2.0, 2.5, 3.5, 5.5, 9.5, 17.5, 32.5, 47.5]
    assert seconds == 47.5
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for port, up to 100 s: nobody there",
        "port is back, after 45.5 s",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert port.outage.count == 1


def test_where_it_stays_away_all_are_told_when_the_limit_is_over() -> None:
    port = Port(1.0, float("inf"), limit=60.0)

    async def work() -> list[tuple[str, float]]:
        await port.asked()

        async def one(number: int) -> tuple[str, float]:
            await asyncio.sleep(2.0 + number)
            with pytest.raises(ServerGone, match="port has been away for 60 s: nobody there") as raised:
                await port.asked()
            return str(raised.value.hint), asyncio.get_running_loop().time()

        return await asyncio.gather(*(one(number) for number in range(5)))

    found, _ = run(work)
    assert [when for _, when in found] == [62.0] * 5
    assert "resume" in found[0][0]


def test_what_was_never_there_is_not_waited_for_nor_is_anything_where_the_limit_is_0() -> None:
    never, at_once = Port(0.0, 50.0), Port(1.0, 50.0, limit=0.0)

    async def work() -> None:
        with pytest.raises(ServerError, match=r"nobody there \(1 try\)"):
            await never.asked()
        await at_once.asked()
        await asyncio.sleep(2.0)
        with pytest.raises(ServerError, match=r"nobody there \(1 try\)"):
            await at_once.asked()

    _, seconds = run(work)
    assert seconds == 2.0
    assert never.looks == at_once.looks == []


@pytest.mark.parametrize("status", [408, 409, 425, 429])
def test_a_server_that_answers_for_itself_is_there(status: int) -> None:
    port = Port(1.0, 50.0, error=TransientError("busy", status=status))

    async def work() -> None:
        await port.asked()
        await asyncio.sleep(2.0)
        with pytest.raises(ServerError, match="busy"):
            await port.asked()

    run(work)
    assert port.looks == []


@pytest.mark.parametrize(
    ("health", "waits"),
    [
        (RefusedError("no such page", status=404, detail=""), False),
        (ServerError("no JSON"), False),
        (TransientError("slowly", status=429), False),
        (TransientError("nobody behind me", status=502), True),
        (TransientError("engine dead", status=503), True),
        (TransientError("broken"), True),
    ],
)
def test_any_answer_of_its_own_shows_that_it_is_there(health: Exception, waits: bool) -> None:
    """Where it is there, what failed was the request's own trouble, and the tries count."""
    asked: list[str] = []
    outage = Outage(lambda *_: look(), "port", ["/one", "/two"], 100.0)

    async def look() -> None:
        asked.append("look")
        if len(asked) < 4:
            raise health

    async def broken() -> None:
        raise TransientError("it broke off")

    async def work() -> None:
        outage.heard()
        with pytest.raises(ServerError, match=r"it broke off \(1 try\)"):
            await with_retries(broken, ONCE, "row", outage)

    _, seconds = run(work)
    assert (seconds > 0, outage.count) == (waits, int(waits))


def test_a_server_that_hangs_is_away() -> None:
    outage = Outage(lambda *_: asyncio.sleep(1000.0), "port", ["/health"], 100.0)

    async def broken() -> None:
        raise TransientError("late")

    async def work() -> None:
        outage.heard()
        with pytest.raises(ServerGone):
            await with_retries(broken, ONCE, "row", outage)

    _, seconds = run(work)
    assert 100.0 < seconds < 200.0


def dying(deaths: int) -> tuple[Callable[[], Awaitable[str]], Outage, list[int]]:
    """Return what dies of being asked so many times, and is there again two looks later, and how many are left."""
    left, away = [deaths], [0]

    async def ask() -> str:
        if left[0]:
            left[0] -= 1
            away[0] = 2
            raise TransientError("it broke off")
        return "answer"

    async def look(*_: object) -> None:
        if away[0]:
            away[0] -= 1
            raise REFUSED

    return ask, Outage(look, "port", ["/health"], 100.0), left


@pytest.mark.parametrize(("deaths", "answered"), [(3, True), (4, False)])
def test_what_may_have_killed_it_is_asked_again_as_often_as_retries_say(deaths: int, answered: bool) -> None:
    ask, outage, left = dying(deaths)

    async def work() -> None:
        outage.heard()
        if answered:
            assert await with_retries(ask, Retries(count=3), "row", outage) == "answer"
        else:
            with pytest.raises(ServerError, match=r"it broke off \(4 tries\)") as raised:
                await with_retries(ask, Retries(count=3), "row", outage)
            assert not isinstance(raised.value, ServerGone)

    run(work)
    assert left == [0]


def test_a_server_that_dies_again_and_again_and_answers_nothing_is_gone() -> None:
    """Each outage is short, and there is an answer to nothing between two: they count as one."""
    ask, outage, _ = dying(10**6)

    async def work() -> None:
        outage.heard()
        with pytest.raises(ServerGone):
            await with_retries(ask, Retries(count=10**6), "row", outage)

    _, seconds = run(work)
    assert seconds == pytest.approx(100.0)


def test_seconds_count_from_the_last_answer() -> None:
    port = Port(1.0, 2.5, limit=2.0)

    async def again() -> None:
        for _ in range(20):
            await port.asked()
            now = asyncio.get_running_loop().time()
            port.dies, port.back = now, now + 1.4
            await port.asked()

    run(again)
    assert port.outage.count == 20


def test_a_refusal_is_an_answer_too() -> None:
    port = Port(1.0, 2.5, limit=2.0)

    async def refuse() -> None:
        port.up()
        raise RefusedError("no", status=400, detail="")

    async def again() -> None:
        port.outage.heard()
        for _ in range(20):
            with pytest.raises(RefusedError):
                await with_retries(refuse, ONCE, "row", port.outage)
            now = asyncio.get_running_loop().time()
            port.dies, port.back = now, now + 1.4

    run(again)
    assert port.outage.count == 19


def test_nothing_looks_for_whom_nobody_waits_any_more() -> None:
    port = Port(1.0, 80.0)

    async def work() -> None:
        await port.asked()
        await asyncio.sleep(2.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.gather(*(port.asked() for _ in range(3)))
        await asyncio.sleep(0)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        assert await port.asked() == "answer"

    run(work)
    assert port.outage.count == 2


def test_who_comes_as_the_last_one_goes_looks_anew() -> None:
    port = Port(1.0, 80.0)

    async def work() -> str:
        await port.asked()
        await asyncio.sleep(2.0)
        first = asyncio.create_task(port.asked())
        await asyncio.sleep(1.0)
        first.cancel()
        second = asyncio.create_task(port.asked())
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    found, _ = run(work)
    assert found == "answer"
