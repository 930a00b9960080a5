"""The proof of a task: a sound one passes, and one that breaks a single rule fails that check alone."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ramet.checking import Report, check_task
from ramet.tasks import Task, build_task
from ramet.types import Episode, Outcome, Sample

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 6) for b in range(2, 6)]


def right(sample: Sample) -> float:
    return float(sample.completion.strip() == sample.row["answer"])


def sound(seed: int = 0) -> Task:
    train = random.Random(seed).sample(ROWS[:12], 12)
    return Task("sums", train, ROWS[12:], right, answer=lambda row: str(row["answer"]))


def guess(episode: Episode) -> str | None:
    """Say how many turns it has been, and something random of the episode's own."""
    if episode.text == episode.row["answer"] or episode.turns >= 4:
        return None
    episode.state["guesses"] += 1
    return f"{episode.state['guesses']} {episode.state['number']} {episode.rng.random()}"


def begun(row: Any, rng: random.Random) -> dict[str, int]:
    return {"guesses": 0, "number": rng.randrange(1000)}


def several(seed: int = 0) -> Task:
    return replace(sound(seed), begin=begun, reply=guess, max_turns=4)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def undocumented(a: int) -> int:
    return a


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Return it."""
    return int(a)


def check(task: Task, **options: Any) -> dict[str, bool | None]:
    report = check_task(task, **{"episodes": 6, **options})
    return {finding.name: finding.passed for finding in report.findings}


def failed(task: Task, **options: Any) -> list[str]:
    return [name for name, passed in check(task, **options).items() if passed is False]


NAMES = [
    "rows",
    "apart",
    "tools",
    "episodes",
    "scores",
    "reference",
    "wrong",
    "same score",
    "repeatable",
    "interleaved",
    "random",
    "seed",
]


def test_a_sound_task_passes_every_check() -> None:
    found = check(replace(several(), tools=(add,)), build=lambda seed: several(seed))
    assert list(found) == NAMES
    assert found == dict.fromkeys(NAMES, True)


SHIPPED: list[tuple[str, dict[str, Any]]] = [
    ("arithmetic", {"digits": [1, 2], "operations": "+-", "held_out_size": 50}),
    ("sorting", {"lengths": 3, "held_out_size": 50}),
    ("reasoning-gym:chain_sum", {"train_size": 20, "held_out_size": 10}),
    ("reasoning-gym:spell_backward", {"train_size": 20, "held_out_size": 10, "form": "chat"}),
]


@pytest.mark.parametrize(("name", "options"), SHIPPED)
def test_the_tasks_of_one_turn_that_are_shipped_are_proved(name: str, options: dict[str, Any]) -> None:
    """The others are proved beside their own tests."""
    if name.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym")
    report = check_task(build_task(name, options), build=lambda seed: build_task(name, options, seed=seed))
    assert report.passed, str(report)
    assert not any(f.passed is None for f in report.findings if f.name != "tools")


def test_what_a_task_does_not_have_is_skipped() -> None:
    found = check(replace(sound(), held_out=[], answer=None))
    assert [name for name, passed in found.items() if passed is None] == ["apart", "tools", "reference", "seed"]
    assert not failed(replace(sound(), held_out=[], answer=None))


def test_async_functions_and_a_player_are_played_too() -> None:
    async def reply(episode: Episode) -> Any:
        await asyncio.sleep(0)
        answer = guess(episode)
        return None if answer is None else [{"role": "user", "content": answer}, {"role": "system", "content": "go"}]

    async def score(sample: Sample) -> float:
        await asyncio.sleep(0)
        return right(sample)

    def player(episode: Episode) -> str:
        return str(episode.row["answer"]) if episode.turns else "0"

    task = replace(several(), reply=reply, score=score, player=player, answer=None)
    assert check(task)["reference"] is True
    assert not failed(task)

    async def inside() -> Report:
        return check_task(task)

    assert asyncio.run(inside()).passed


async def answer_later(row: Any) -> str:
    await asyncio.sleep(0)
    return str(row["answer"])


async def wrong_later(row: Any) -> str:
    return f"={await answer_later(row)}"


async def play_later(episode: Episode) -> str:
    return await answer_later(episode.row)


def test_an_async_answer_and_an_async_player_are_awaited() -> None:
    assert check(replace(sound(), answer=answer_later))["reference"] is True
    assert failed(replace(sound(), answer=answer_later)) == []
    assert failed(replace(sound(), answer=None, player=play_later)) == []
    assert failed(replace(several(), answer=None, player=lambda episode: answer_later(episode.row))) == []
    assert failed(replace(sound(), answer=wrong_later)) == ["reference"]


def test_without_a_reference_nothing_is_proved() -> None:
    report = check_task(replace(sound(), answer=None), episodes=6)
    assert (report.passed, report.proved) == (True, False)
    head = "task sums: passed, but nothing shows that a right answer earns full reward (no reference)\n"
    assert str(report).startswith(head)
    assert "\n  skipped  reference: there are no reference answers\n" in str(report)
    assert check_task(sound(), episodes=6).proved
    broken = check_task(replace(sound(), answer=None, score=lambda s: 1.0), episodes=6)
    assert (broken.passed, broken.proved) == (False, False)
    assert str(broken).startswith("task sums: 1 of 12 checks failed\n")


UNREAD = "for its only turn is over: set max_turns, which is 1, to 2 or more"


@pytest.mark.parametrize(
    ("parts", "by"),
    [({"reply": guess, "begin": begun}, "reply"), ({"reply": lambda e: "no"}, "reply")],
)
def test_what_comes_back_after_the_only_turn_is_never_read(parts: dict[str, Any], by: str) -> None:
    report = check_task(replace(sound(), **parts), episodes=6)
    assert [(f.name, f.detail) for f in report.findings if f.passed is False] == [
        ("episodes", f"the model never reads what {by} says, {UNREAD}")
    ]
    assert failed(replace(sound(), **{**parts, "max_turns": 2})) == []


def test_a_call_may_be_all_that_is_asked_for() -> None:
    """A task that judges the call itself takes one turn, and what the tool answers is for nobody."""
    call = "[add(a=1, b=2)]"

    def called(sample: Sample) -> float:
        return float(any(message.get("tool_calls") for message in sample.messages))

    rows = [{"prompt": f"add {number} and 2"} for number in range(4)]
    task = Task("calls", rows[:3], rows[3:], called, tools=(add,), player=lambda episode: call)
    found = {finding.name: finding for finding in check_task(task, episodes=3).findings}
    assert found["episodes"].passed
    assert found["reference"].passed, found["reference"].detail


def test_a_reply_that_ends_each_episode_after_its_only_turn_is_fine() -> None:
    assert failed(replace(sound(), reply=lambda episode: None)) == []


class Counts:
    """A function that gives another answer each time."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def score(self, sample: Sample) -> float:
        return right(sample) or next(self.numbers) % 2 / 4

    def begin(self, row: Any, rng: random.Random) -> dict[str, int]:
        return {"guesses": 0, "number": next(self.numbers)}


class Shared:
    """A world that all episodes have in common, put in order at the beginning of each."""

    state: dict[str, int]

    def begin(self, row: Any, rng: random.Random) -> None:
        self.state = {"guesses": 0}

    def reply(self, episode: Episode) -> str | None:
        if episode.text == episode.row["answer"] or episode.turns >= 4:
            return None
        self.state["guesses"] += 1
        return str(self.state["guesses"])


def raises_on_rubbish(episode: Episode) -> str | None:
    return (
        None
        if episode.text == episode.row["answer"] or episode.turns > 2
        else f"{len(episode.text) / ('?' not in episode.text)}"
    )


def scores_with_error(sample: Sample) -> float:
    if "\x00" in sample.completion:
        raise ValueError("embedded null")
    return right(sample)


def draws(kind: str) -> Callable[[Sample], float]:
    def score(sample: Sample) -> float:
        {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1)}[kind]()
        return right(sample)

    return score


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (replace(sound(), train=[]), "rows"),
        (replace(sound(), train=[*ROWS[:3], {"question": "x"}]), "rows"),
        (replace(sound(), train=["2+2="]), "rows"),  # type: ignore[list-item]
        (replace(sound(), held_out=[{"prompt": []}]), "rows"),
        (replace(sound(), held_out=[{"prompt": [{"content": "no role"}]}]), "rows"),
        (replace(sound(), held_out=[{"prompt": None}]), "rows"),
        (replace(sound(), held_out=[{**ROWS[0], "more": 1}, *ROWS[12:]]), "apart"),
        (replace(several(), held_out=[ROWS[0], *ROWS[12:]]), "apart"),
        (replace(sound(), tools=(undocumented,)), "tools"),
        (replace(sound(), tools=(untyped,)), "tools"),
        (replace(sound(), tools=(add, add)), "tools"),
        (replace(several(), reply=raises_on_rubbish), "episodes"),
        (replace(sound(), score=scores_with_error), "scores"),
        (replace(sound(), score=lambda s: right(s) if s.completion else math.nan), "scores"),
        (replace(sound(), score=lambda s: right(s) if s.completion else "none"), "scores"),  # type: ignore[arg-type, return-value]
        (replace(sound(), score=lambda s: right(s) if s.completion else Outcome.error("no judge")), "scores"),
        (replace(sound(), answer=lambda row: f"={row['answer']}"), "reference"),
        (replace(sound(), score=lambda s: 0.9 * right(s)), "reference"),
        (replace(sound(), score=lambda s: None), "reference"),
        (replace(sound(), score=lambda s: float(s.row["answer"] in s.completion or not s.completion)), "wrong"),
        (replace(sound(), score=lambda s: float(s.completion.strip().isdigit() and len(s.completion) < 9)), "wrong"),
        (replace(sound(), score=Counts().score), "same score"),
        (replace(several(), begin=Counts().begin), "repeatable"),
        (replace(several(), begin=lambda row, rng: {"guesses": 0, "number": os.urandom(8)}), "repeatable"),
        (replace(sound(), begin=(shared := Shared()).begin, reply=shared.reply, max_turns=4), "interleaved"),
        (replace(sound(), score=draws("python")), "random"),
        (replace(sound(), score=draws("numpy")), "random"),
        (replace(sound(), score=draws("torch")), "random"),
    ],
)
def test_a_task_that_breaks_one_rule_fails_that_check_alone(broken: Task, name: str) -> None:
    assert failed(broken) == [name]


def test_a_prompt_that_is_alike_is_no_leak_where_the_problem_is_hidden() -> None:
    rows = [{"prompt": "guess", "answer": str(n)} for n in range(20)]
    hidden = replace(several(), train=rows[:15], held_out=rows[15:])
    assert check(hidden)["apart"] is True
    assert check(replace(hidden, reply=None, begin=None))["apart"] is False


def build_anew(seed: int) -> Task:
    return replace(sound(), train=random.SystemRandom().sample(ROWS[:12], 12))


def build_moving(seed: int) -> Task:
    return replace(sound(), held_out=random.Random(seed).sample(ROWS[12:], 4))


@pytest.mark.parametrize(
    ("build", "detail"),
    [
        (build_anew, "differ when the task is built again"),
        (build_moving, "the held-out rows of seed 0 and seed 1 differ"),
    ],
)
def test_rows_that_do_not_follow_from_the_seed_fail(build: Callable[[int], Task], detail: str) -> None:
    report = check_task(sound(), build=build)
    assert [finding.name for finding in report.findings if finding.passed is False] == ["seed"]
    assert detail in str(report)


def test_the_report_is_lines_for_a_terminal() -> None:
    task = replace(sound(), score=lambda s: 0.5 * right(s), name="halves")
    text = str(check_task(task))
    assert text.startswith("task halves: 1 of 12 checks failed\n  passed   rows: 12 training and 4 held-out rows")
    assert "\n  FAILED   reference: the row '5+2=': ['7'] earns 0.5\n" in text
    assert check_task(task, full=0.5).passed
    assert not check_task(task).passed


def test_few_rows_and_few_episodes_are_enough() -> None:
    one: Sequence[Any] = ROWS[:1]
    assert check_task(replace(sound(), train=one, held_out=[]), episodes=1).passed
    with pytest.raises(ValueError, match="episodes must be at least 1"):
        check_task(sound(), episodes=0)
