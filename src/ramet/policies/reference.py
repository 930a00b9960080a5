"""A task's own reference as a policy: what a perfect player would write."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ramet.errors import ConfigError, ModelError
from ramet.policies.person import PersonPolicy
from ramet.policies.policy import Policy
from ramet.tasks.task import Task
from ramet.types import Completion, Episode, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReferencePolicy(Policy):
    """Play the reference of `task`: its `player`, or its `answer` where it has no player and takes one turn.

    A player wants to see the episode, its state included, and a policy is asked with tokens and messages alone. So
    play `policy.task`, which is the same task and notes each episode that begins, with rows from `row_of`: each is the
    data row of one episode, `draw.prompt` and `draw.member` of whose requests are `group` and `member`.

    Raises `ConfigError` for a task without a reference.

    >>> import torch
    >>> from ramet.tasks import build_task
    >>> from ramet.types import Draw, Sampling
    >>> task = build_task("arithmetic")
    >>> policy = ReferencePolicy(task)
    >>> _ = policy.row_of({"prompt": "27+58=", "answer": "85"}, group=0, member=0)
    >>> [answer] = policy.complete([Request(0, torch.tensor([1]), Sampling(8), Draw(0, 0, 0))])
    >>> answer.text
    '85'
    """

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if task.player is None and (task.answer is None or task.reply is not None):
            turns = "answer" if task.reply is None else "player, and it takes several turns"
            raise ConfigError(
                f"the task {task.name} has no reference to play: it has no {turns}",
                hint="give the task a player, a function from an episode to what should be written next",
            )
        self.task = dataclasses.replace(task, begin=self._begin)
        self._original = task
        self._person = PersonPolicy(self._say, tokenizer)
        self._episodes: dict[tuple[int, int], Episode] = {}
        self._by_row: dict[int, Episode] = {}

    def row_of(self, row: Mapping[str, Any], *, group: int, member: int) -> Mapping[str, Any]:
        """Return a copy of a data row that stands for one episode."""
        own = dict(row)
        episode = Episode(own, [], random.Random(0))
        self._episodes[group, member] = self._by_row[id(own)] = episode
        return own

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield what the reference writes; raise `ModelError` where it fails, which is a mistake in the task."""
        yield from self._person.complete(requests)

    async def _begin(self, row: Mapping[str, Any], rng: random.Random) -> Any:
        episode = self._by_row[id(row)]
        state = None if self._original.begin is None else self._original.begin(row, rng)
        episode.state = await state if inspect.isawaitable(state) else state
        episode.rng = rng
        return episode.state

    def _say(self, request: Request) -> str:
        episode = self._episodes[request.draw.prompt, request.draw.member]
        episode.messages = list(request.messages or ())
        episode.turns = request.draw.turn
        try:
            if self._original.player is not None:
                return str(self._original.player(episode))
            assert self._original.answer is not None
            return str(self._original.answer(episode.row))
        except Exception as error:  # a task may be anybody's
            raise ModelError(
                f"the reference of the task {self._original.name} failed at turn {episode.turns + 1} of row "
                f"{request.draw.prompt}: {type(error).__name__}: {error}",
                hint="ramet check shows what is wrong with a task",
            ) from error
