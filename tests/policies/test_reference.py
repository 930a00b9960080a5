"""The reference as a policy: it sees its own episode, of each member, and says what the task says."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import random
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ramet.chat import PlainTemplate
from ramet.episodes import Played, Rules, Start, play_episodes
from ramet.errors import ConfigError, ModelError
from ramet.policies.person import script_tokenizer
from ramet.policies.reference import ReferencePolicy
from ramet.tasks import Judge
from ramet.tasks.task import Task
from ramet.types import Draw, Episode, Message, Request, Sample, Sampling

ROWS = [{"prompt": f"{number}?", "answer": str(number)} for number in range(3)]


def nothing(sample: Sample) -> float:
    return 0.0


def request(group: int, member: int, turn: int = 0, messages: tuple[Message, ...] = ()) -> Request:
    return Request(0, torch.tensor([1]), Sampling(99), Draw(0, group, member, turn), messages=messages)


def says(policy: ReferencePolicy, asked: Request) -> str | None:
    [answer] = policy.complete([asked])
    assert bool(answer.log_probs.isnan().all())
    return answer.text


def begin_with(policy: ReferencePolicy, row: Mapping[str, Any], rng: random.Random) -> Any:
    """Begin an episode as whoever plays `policy.task` does."""
    begin: Any = policy.task.begin
    state = begin(row, rng)
    return asyncio.run(state) if inspect.iscoroutine(state) else state


def test_one_turn_is_the_answer_of_the_row() -> None:
    rows = [{"prompt": f"{number}?", "answer": str(number)} for number in range(2)]
    policy = ReferencePolicy(Task("t", rows, [], nothing, answer=lambda row: str(row["answer"])))
    for group, row in enumerate(rows):
        assert policy.row_of(row, group=group, member=0) == row
    assert [says(policy, request(group, 0)) for group in (1, 0)] == ["1", "0"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_player_sees_the_messages_the_turn_and_the_state_of_its_own_episode(is_async: bool) -> None:
    seen: list[tuple[Any, ...]] = []

    def begin(row: Mapping[str, Any], rng: random.Random) -> list[int]:
        return [rng.randrange(1000)]

    async def begin_async(row: Mapping[str, Any], rng: random.Random) -> list[int]:
        return begin(row, rng)

    def player(episode: Episode) -> str:
        seen.append((episode.state, episode.turns, list(episode.messages), episode.rng))
        return f"{episode.row['prompt']}{episode.state[0]}"

    row = {"prompt": "?"}
    task = Task("t", [row], [], nothing, begin=begin_async if is_async else begin, player=player, max_turns=3)
    policy = ReferencePolicy(task)
    own = [policy.row_of(row, group=4, member=member) for member in range(2)]
    rngs = [random.Random(member) for member in range(2)]
    states = [begin_with(policy, own[member], rngs[member]) for member in (1, 0)][::-1]
    assert states == [[random.Random(0).randrange(1000)], [random.Random(1).randrange(1000)]]
    message: Message = {"role": "user", "content": "?"}
    assert says(policy, request(4, 1, turn=2, messages=(message,))) == f"?{states[1][0]}"
    [(state, turns, messages, rng)] = seen
    assert state is states[1]  # not a copy: a reply may change it, and the player is to see that
    assert (turns, messages, rng) == (2, [message], rngs[1])


def test_without_a_begin_the_player_has_the_random_numbers_of_the_episode() -> None:
    task = Task("t", [{"prompt": "?"}], [], nothing, player=lambda episode: str(episode.rng.randrange(1000)))
    policy = ReferencePolicy(task)
    row = policy.row_of(task.train[0], group=0, member=0)
    assert begin_with(policy, row, random.Random(7)) is None
    assert says(policy, request(0, 0)) == str(random.Random(7).randrange(1000))


def test_the_task_to_play_is_the_same_but_for_its_beginning() -> None:
    task = Task("t", [{"prompt": "?"}], [], nothing, answer=lambda row: "x", chance=0.5)
    assert dataclasses.replace(ReferencePolicy(task).task, begin=None) == task


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Task("t", [], [], nothing), "it has no answer"),
        (Task("t", [], [], nothing, answer=str, reply=lambda episode: None), "no player, and it takes several turns"),
    ],
)
def test_a_task_without_a_reference_is_refused(task: Task, why: str) -> None:
    with pytest.raises(ConfigError, match=f"the task t has no reference to play: .*{why}"):
        ReferencePolicy(task)


def test_a_reference_that_raises_names_the_task_the_row_and_the_turn() -> None:
    def player(episode: Episode) -> str:
        raise LookupError("no such word")

    task = Task("t", [{"prompt": "?"}], [], nothing, player=player)
    policy = ReferencePolicy(task)
    policy.row_of(task.train[0], group=3, member=0)
    with pytest.raises(ModelError, match="of the task t failed at turn 2 of row 3: LookupError: no such word"):
        says(policy, request(3, 0, turn=1))


async def later(text: Any) -> Any:
    await asyncio.sleep(0)
    return text


async def answer_later(row: Mapping[str, Any]) -> Any:
    return await later(row["answer"])


async def play_later(episode: Episode) -> Any:
    return await later(episode.row["answer"])


class Called:
    """What is called like a function, and is async."""

    async def __call__(self, episode: Episode) -> Any:
        return await play_later(episode)


ASYNC: list[dict[str, Any]] = [
    {"answer": answer_later},
    {"player": play_later},
    {"player": Called()},
    {"player": lambda episode: later(episode.row["answer"])},
]


@pytest.mark.parametrize("parts", ASYNC)
def test_what_is_async_is_awaited(parts: dict[str, Any]) -> None:
    policy = ReferencePolicy(Task("t", ROWS, [], nothing, **parts))
    for group, row in enumerate(ROWS):
        policy.row_of(row, group=group, member=0)
    assert [answer.text for answer in policy.complete([request(2, 0), request(0, 0)])] == ["2", "0"]


def play(task: Task, **limits: Any) -> list[Played]:
    """Play an episode for each row, as an evaluation of the reference does."""
    policy = ReferencePolicy(task, script_tokenizer())
    starts = [Start(policy.row_of(row, group=group, member=0), group) for group, row in enumerate(task.train)]
    rules = Rules(Sampling(99), seed=0, **limits)
    return play_episodes(
        policy.task, policy, starts, template=PlainTemplate(policy.tokenizer), rules=rules, judge=Judge(task.score)
    )


def test_an_async_player_runs_in_the_loop_of_its_episode() -> None:
    """So what `begin` opened there, such as a client, may be used by the player too."""
    loops: list[Any] = []

    async def begin(row: Mapping[str, Any], rng: random.Random) -> None:
        loops.append(asyncio.get_running_loop())

    async def player(episode: Episode) -> str:
        loops.append(asyncio.get_running_loop())
        return await play_later(episode)

    task = Task("t", ROWS, [], lambda s: float(s.completion == s.row["answer"]), begin=begin, player=player)
    outcomes = [played.outcome for played in play(task)]
    assert [outcome and outcome.score for outcome in outcomes] == [1.0] * 3
    assert len(loops) == 6
    assert len(set(map(id, loops))) == 1


@pytest.mark.parametrize("part", ["begin", "player"])
def test_what_hangs_holds_up_its_own_episode_alone(part: str) -> None:
    """The others are over before it is let go on; a sync function hangs in a thread."""
    door = threading.Event()

    def waits(row: Mapping[str, Any]) -> str:
        if row is not None and row["answer"] == "1":
            assert door.wait(60)
        return str(row["answer"])

    def begin(row: Mapping[str, Any], rng: random.Random) -> None:
        if part == "begin":
            waits(row)

    def player(episode: Episode) -> str:
        return waits(episode.row) if part == "player" else str(episode.row["answer"])

    scored: list[str] = []

    def score(sample: Sample) -> float:
        scored.append(sample.completion)
        if len(scored) == 2:
            door.set()
        return 1.0

    played = play(Task("t", ROWS, [], score, begin=begin, player=player))
    assert sorted(scored[:2]) == ["0", "2"]
    assert [one.sample.completion for one in played] == ["0", "1", "2"]


def test_a_reference_that_calls_exit_fails_as_any_other() -> None:
    def player(episode: Episode) -> str:
        raise SystemExit(3)

    policy = ReferencePolicy(Task("t", ROWS, [], nothing, player=player))
    policy.row_of(ROWS[0], group=0, member=0)
    with pytest.raises(ModelError, match="failed at turn 1 of row 0: SystemExit: 3"):
        says(policy, request(0, 0))


@pytest.mark.parametrize("value", [None, 7, b"7"])
@pytest.mark.parametrize("made", [lambda value: value, later])
def test_what_is_no_text_is_an_error(value: Any, made: Any) -> None:
    policy = ReferencePolicy(Task("t", ROWS, [], nothing, answer=lambda row: made(value)))
    policy.row_of(ROWS[0], group=0, member=0)
    with pytest.raises(
        ModelError, match=f"failed at turn 1 of row 0: TypeError: expected text: found {type(value).__name__}"
    ):
        says(policy, request(0, 0))


def test_a_reference_that_fails_costs_its_own_episode() -> None:
    task = Task("t", ROWS, [], lambda sample: 1.0, player=lambda episode: str(1 // int(episode.row["answer"])))
    failed, *others = [played.outcome for played in play(task)]
    assert failed is not None
    assert (
        failed.score,
        "the reference of the task t failed at turn 1 of row 0: ZeroDivisionError" in failed.reason,
    ) == (
        None,
        True,
    )
    assert [outcome and outcome.score for outcome in others] == [1.0, 1.0]
