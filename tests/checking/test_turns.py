"""Episodes in turns: who is next, and tasks whose episodes disturb each other, each found by one check."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.checking import StandIn, check_task
from ramet.checking.turns import Turns
from ramet.tasks import Task
from ramet.types import Episode, Sample, StopReason

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "seen": []} for a in range(5, 9) for b in range(5, 30, 6)]


def right(sample: Sample) -> float:
    return float(sample.completion.strip() == sample.row["answer"])


def rows() -> list[dict[str, Any]]:
    return [{**row, "seen": []} for row in ROWS]


def sums(**parts: Any) -> Task:
    own = rows()
    return replace(Task("sums", own[:14], own[14:], right, answer=lambda row: str(row["answer"]), max_turns=4), **parts)


def failed(task: Task) -> list[str]:
    return [f.name for f in check_task(task, episodes=6).findings if f.passed is False]


def ended(episode: Episode) -> bool:
    return episode.text == episode.row["answer"] or episode.turns >= 4


# ---------------------------------------------------------------- turns


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_turns_go_round_whatever_takes_how_long(lengths: list[int], rng: random.Random) -> None:
    """An episode of n turns has one in each of the first n rounds."""
    waits = {number: [rng.randrange(4) for _ in range(length + 1)] for number, length in enumerate(lengths)}
    took: list[tuple[int, int]] = []
    busy: list[int] = []

    async def play(number: int, turns: Turns) -> None:
        for turn in range(lengths[number]):
            await turns.take(number)
            assert busy == []
            busy.append(number)
            for _ in range(waits[number][turn]):
                await asyncio.sleep(0)
            took.append((turn, number))
            busy.remove(number)
        turns.leave()

    async def game() -> None:
        turns, order = Turns(len(lengths)), list(range(len(lengths)))
        rng.shuffle(order)
        await asyncio.gather(*(play(number, turns) for number in order))

    asyncio.run(game())
    assert took == sorted((turn, number) for number, length in enumerate(lengths) for turn in range(length))


def test_who_gives_up_waiting_holds_up_nobody() -> None:
    async def game() -> list[int]:
        turns, said = Turns(2), list[int]()
        impatient = asyncio.ensure_future(turns.take(0))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        turns.leave()
        await turns.take(1)
        said.append(1)
        return said

    assert asyncio.run(game()) == [1]


def test_the_engine_plays_a_turn_of_each_with_what_comes_back() -> None:
    heard: list[tuple[str, int]] = []

    def reply(episode: Episode) -> str | None:
        heard.append((episode.row["prompt"], episode.turns))
        return None if episode.turns >= int(episode.row["answer"]) else "on"

    def score(sample: Sample) -> float:
        heard.append((str(sample.prompt), 0))
        return 1.0

    own = [{"prompt": name, "answer": str(turns)} for name, turns in (("a", 3), ("b", 1), ("c", 2))]
    with StandIn(Task("t", own, [], score, reply=reply, max_turns=5)) as stand_in:
        shown = asyncio.run(stand_in.in_turns(own, [lambda episode: "go"] * 3, range(3)))
    assert heard[:3] == [("a", 1), ("b", 1), ("b", 0)]
    assert heard[3:] == [("b", 0), ("c", 1), ("a", 2), ("c", 2), ("c", 0), ("c", 0), ("a", 3), ("a", 0), ("a", 0)]
    assert [len(one.written) for one in shown] == [3, 1, 2]
    assert [one.played.stop for one in shown if one.played] == [StopReason.EOS] * 3


# ---------------------------------------------------------------- tasks that are disturbed

WORLD: dict[str, int] = {}


def begins_the_world(row: Any, rng: random.Random) -> None:
    WORLD.clear()


def counts_in_the_world(episode: Episode) -> str | None:
    if ended(episode):
        return None
    WORLD["turns"] = WORLD.get("turns", 0) + 1
    return f"it was turn {WORLD['turns']}"


class SharedRandom:
    """Random numbers that all episodes draw from, begun anew with each."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def begin(self, row: Any, rng: random.Random) -> None:
        self.rng.seed(7)

    def reply(self, episode: Episode) -> str | None:
        return None if ended(episode) else f"no: {self.rng.random()}"


class Memory:
    """A tool that remembers, and a task that has one; `anew` begins it anew with each episode."""

    def __init__(self) -> None:
        self.last = ""

    def anew(self, row: Any, rng: random.Random) -> None:
        self.last = ""

    def remember(self, text: str) -> str:
        """Keep a text, and return the one that was kept before."""
        before, self.last = self.last, text
        return before

    @staticmethod
    def play(episode: Episode) -> str:
        if episode.turns < 2:
            return f'[remember(text="{episode.row["answer"]}")]'
        return str(episode.row["answer"])


def counts_in_the_row(episode: Episode) -> str | None:
    episode.row["seen"].append(episode.text)
    return None if ended(episode) else "no"


def says_what_the_row_saw(episode: Episode) -> str | None:
    episode.row["seen"].append(episode.text)
    return None if ended(episode) else f"no, as {len(episode.row['seen'])} times before"


def takes_out_of_the_row(sample: Sample) -> float:
    sample.row["seen"].append(1)
    return right(sample)


def disturbed() -> dict[str, tuple[Task, str]]:
    shared, memory, kept, numbers = SharedRandom(), Memory(), Memory(), itertools.count()
    tools = {"max_turns": 3, "player": Memory.play}
    drawn = SharedRandom()
    return {
        "module-level state": (sums(begin=begins_the_world, reply=counts_in_the_world), "interleaved"),
        "a shared rng": (sums(begin=shared.begin, reply=shared.reply), "interleaved"),
        "a tool with a memory": (sums(begin=memory.anew, tools=(memory.remember,), **tools), "interleaved"),
        "a shared rng that goes on": (sums(reply=drawn.reply), "repeatable"),
        "a counter that goes on": (
            sums(reply=lambda episode: None if ended(episode) else f"{next(numbers)}"),
            "repeatable",
        ),
        "a tool that never forgets": (sums(tools=(kept.remember,), **tools), "repeatable"),
        "a list in the row": (sums(reply=counts_in_the_row), "repeatable"),
        "a list in the row that is heard": (sums(reply=says_what_the_row_saw), "repeatable"),
        "a score that changes the row": (sums(score=takes_out_of_the_row), "repeatable"),
    }


@pytest.mark.parametrize("name", disturbed())
def test_episodes_that_disturb_each_other_fail_one_check_alone(name: str) -> None:
    task, check = disturbed()[name]
    assert failed(task) == [check]


def test_a_row_that_an_episode_changes_is_named() -> None:
    report = check_task(sums(reply=counts_in_the_row), episodes=4)
    (finding,) = [finding for finding in report.findings if finding.passed is False]
    assert "a function changed its copy of the row: what it writes there is lost after the call" in finding.detail


def test_a_task_that_keeps_all_to_itself_passes() -> None:
    def begin(row: Any, rng: random.Random) -> dict[str, Any]:
        return {"turns": 0, "number": rng.random()}

    async def reply(episode: Episode) -> str | None:
        await asyncio.sleep(0)
        episode.state["turns"] += 1
        return None if ended(episode) else f"{episode.state} {episode.rng.random()}"

    assert failed(sums(begin=begin, reply=reply)) == []


def test_a_player_sees_its_own_episode_in_turns_too() -> None:
    """State, messages and random numbers are those of its own episode, also where two are of one row."""

    def begin(row: Any, rng: random.Random) -> dict[str, Any]:
        return {"prompt": row["prompt"], "number": rng.random()}

    def reply(episode: Episode) -> str | None:
        return None if episode.turns >= 3 else f"{episode.state['prompt']} {episode.turns} {episode.state['number']}"

    def player(episode: Episode) -> str:
        heard = episode.messages[-1]["content"]
        expected = f"{episode.state['prompt']} {episode.turns} {episode.state['number']}"
        assert heard == (expected if episode.turns else episode.row["prompt"])
        return f"{episode.turns} {episode.rng.random()}"

    task = sums(begin=begin, reply=reply, player=player, max_turns=3, score=lambda sample: 1.0)
    chosen: Sequence[Any] = [task.train[0], task.train[1], task.train[0]]
    numbers = (0, 1, 0)

    async def both(stand_in: StandIn) -> tuple[list[Any], list[Any]]:
        alone = [await stand_in.alone(row, player, number) for row, number in zip(chosen, numbers, strict=True)]
        turns = await stand_in.in_turns(chosen, [player] * 3, numbers)
        return [one.transcript() for one in alone], [one.transcript() for one in turns]

    with StandIn(task) as stand_in:
        alone, turns = asyncio.run(both(stand_in))
    assert alone == turns
    assert alone[0] == alone[2] != alone[1]
    assert [len(said) for said in turns] == [7, 7, 7]
