"""The reference as a policy: it sees its own episode, of each member, and says what the task says."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ramet.errors import ConfigError, ModelError
from ramet.policies.reference import ReferencePolicy
from ramet.tasks.task import Task
from ramet.types import Draw, Episode, Message, Request, Sample, Sampling


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
    return asyncio.run(begin(row, rng))


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
