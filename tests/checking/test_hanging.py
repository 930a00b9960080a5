"""What hangs does not hang the check: the finding says what it was, and what would come after it is skipped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ramet.checking import Report, check_task
from ramet.tasks import Task
from ramet.types import Episode, Sample

ROWS = [{"prompt": f"{n}+1=", "n": n, "answer": str(n + 1)} for n in range(10, 22)]
LIMITS = {"episodes": "episode_seconds", "tools": "tool_seconds", "scores": "score_seconds"}
"""By which limit a check finds what hangs. The others are as long as they are by default: they find nothing here."""


def right(sample: Sample) -> float:
    return float(sample.completion.strip() == sample.row["answer"])


def say(episode: Episode) -> str:
    return str(episode.row["answer"])


def call_and_say(episode: Episode) -> str:
    return say(episode) if episode.turns else "[look(number=1)]"


SOUND = Task("sums", ROWS[:8], ROWS[8:], right, player=say)


class Door:
    """Functions that wait for a door to open, each in a way of its own."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def waits(self, *_: Any) -> Any:
        self._open.wait()

    async def waits_async(self, *_: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    async def holds_up(self, *_: Any) -> Any:
        self._open.wait()

    def look(self, number: int) -> str:
        """Look behind a door."""
        self._open.wait()
        return str(number)

    async def look_async(self, number: int) -> str:
        """Look behind a door."""
        await self.waits_async()
        return str(number)

    def only_for(self, wait: Callable[..., Any], number: int, otherwise: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return a function that waits at one row, and is another at the rest."""
        return lambda given: wait() if given.row["n"] == number else otherwise(given)

    def open(self) -> None:
        self._open.set()


@contextmanager
def a_door() -> Iterator[Door]:
    """Open the door at the end, and wait for all who went through it: no thread is left behind."""
    before, door = set(threading.enumerate()), Door()
    try:
        yield door
    finally:
        door.open()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)


def found(report: Report) -> dict[str, tuple[bool | None, str]]:
    return {finding.name: (finding.passed, finding.detail) for finding in report.findings}


HANGING: list[tuple[str, Callable[[Door], Task], str, str]] = [
    ("reply", lambda door: replace(SOUND, reply=door.waits, max_turns=2), "episodes", "reply hung: "),
    ("async reply", lambda door: replace(SOUND, reply=door.waits_async, max_turns=2), "episodes", "reply hung: "),
    ("begin", lambda door: replace(SOUND, begin=door.waits), "episodes", "begin hung: "),
    ("async begin", lambda door: replace(SOUND, begin=door.waits_async), "episodes", "begin hung: "),
    ("player", lambda door: replace(SOUND, player=door.waits), "episodes", "the player hung: "),
    ("async player", lambda door: replace(SOUND, player=door.waits_async), "episodes", "the player hung: "),
    (
        "async answer",
        lambda door: replace(SOUND, player=None, answer=door.waits_async),
        "episodes",
        "the player hung: ",
    ),
    ("answer", lambda door: replace(SOUND, player=None, answer=door.waits), "episodes", "the player hung: "),
    ("score", lambda door: replace(SOUND, score=door.waits), "scores", "score hung: "),
    ("async score", lambda door: replace(SOUND, score=door.waits_async), "scores", "score hung: "),
    (
        "tool",
        lambda door: replace(SOUND, tools=(door.look,), player=call_and_say, max_turns=2),
        "tools",
        "the tool look hung: ",
    ),
    (
        "async tool",
        lambda door: replace(SOUND, tools=(door.look_async,), player=call_and_say, max_turns=2),
        "tools",
        "the tool look_async hung: ",
    ),
]


@pytest.mark.parametrize(("make", "name", "said"), [case[1:] for case in HANGING], ids=[case[0] for case in HANGING])
def test_what_hangs_fails_one_check_and_ends_the_playing(make: Callable[[Door], Task], name: str, said: str) -> None:
    with a_door() as door:
        task = make(door)
        if said.startswith("the tool look_async"):
            task = replace(task, player=lambda e: say(e) if e.turns else "[look_async(number=1)]")
        report = check_task(task, episodes=4, **{LIMITS[name]: 0.3})
    findings = found(report)
    assert [check for check, (passed, _) in findings.items() if passed is False] == [name]
    assert findings[name][1].startswith(said)
    assert "took over 0.3 s" in findings[name][1]
    assert findings["interleaved"] == (None, f"not looked at: {said.removesuffix(': ')}")
    assert findings["rows"][0] is True
    assert findings["random"][0] is True


def test_a_reply_that_hangs_at_a_later_turn_and_row_is_found_with_what_was_written() -> None:
    def goes_on(episode: Episode) -> str | None:
        return None if episode.text == episode.row["answer"] or episode.turns > 2 else "no"

    with a_door() as door:
        reply = door.only_for(door.waits, ROWS[0]["n"], goes_on)
        report = check_task(replace(SOUND, reply=reply, max_turns=3), episodes=12, episode_seconds=2.0)
    passed, said = found(report)["episodes"]
    assert passed is False
    assert said == "reply hung: the row '10+1=': the episode took over 2 s, after ['11']"


def test_what_was_found_before_stays() -> None:
    """The score is none at all for the first rows, and hangs at a later one."""

    def score(door: Door, sample: Sample) -> float:
        return door.waits() if sample.row["n"] == 11 else float("nan")

    with a_door() as door:
        task = replace(SOUND, score=partial(score, door), held_out=[])
        report = found(check_task(task, episodes=12, score_seconds=2.0))
    assert report["scores"][0] is False
    assert report["scores"][1].startswith("score hung: the row '11+1=': it took over 2 s")
    assert "; before that, reward " in report["scores"][1]
    assert report["reference"][0] is False


def test_a_score_that_hangs_the_second_time_is_found_at_once() -> None:
    calls: list[Sample] = []

    async def score(sample: Sample) -> float:
        calls.append(sample)
        if len(calls) % 2 == 0:
            await asyncio.get_running_loop().create_future()
        return 1.0

    report = found(check_task(replace(SOUND, score=score), episodes=4, score_seconds=0.3))
    assert len(calls) == 2
    assert report["scores"] == (False, "score hung: the row '18+1=': it took over 0.3 s, after ['19']")
    assert report["same score"] == (None, "not looked at: score hung")


def test_a_coroutine_that_holds_up_the_event_loop_is_found_and_left_behind() -> None:
    with a_door() as door:
        limits = dict.fromkeys(LIMITS.values(), 0.5)
        report = check_task(replace(SOUND, reply=door.holds_up, max_turns=2), episodes=4, **limits)
    findings = found(report)
    assert [check for check, (passed, _) in findings.items() if passed is False] == ["episodes"]
    assert findings["episodes"][1] == "reply or a tool hung: it held up the event loop for over 0.5 s"


def test_an_error_of_the_check_itself_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("ramet.checking.check.wrong_answers", broken)
    with pytest.raises(ZeroDivisionError):
        check_task(SOUND, episodes=4)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_number_of_seconds(seconds: float) -> None:
    for name in LIMITS.values():
        with pytest.raises(ValueError, match=f"{name} must be a finite number of seconds above 0"):
            check_task(SOUND, **{name: seconds})


def test_who_ends_the_program_is_found() -> None:
    def reply(episode: Episode) -> str | None:
        raise SystemExit(3)

    report = found(check_task(replace(SOUND, reply=reply, max_turns=2), episodes=4))
    assert report["episodes"][0] is False
    assert "raised SystemExit: 3" in report["episodes"][1]
