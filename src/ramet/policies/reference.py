"""A task's own reference as a policy: what a perfect player would write."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ramet.concurrency import Calls, EventLoop, Threads, by_threads
from ramet.errors import ConfigError, ModelError
from ramet.policies.person import typed
from ramet.policies.policy import Policy
from ramet.tasks.copies import Marked, own
from ramet.tasks.task import Begin, Row, Task
from ramet.tasks.verdicts import FAILURES
from ramet.types import Completion, Episode, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THREADS = 512
"""How many calls of sync references may be under way at once."""


class ReferencePolicy(Policy):
    """Play the reference of `task`: its `player`, or its `answer` where it has no player and takes one turn.

    A player wants to see the episode, its state included, and a policy is asked with tokens and messages alone. So
    play `policy.task`, which is the same task and notes each episode that begins, with rows from `row_of`: each is the
    data row of one episode, `draw.prompt` and `draw.member` of whose requests are `group` and `member`.

    An async player is awaited in the event loop in which the episode is played, another runs in a thread.

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
        if tokenizer is None:
            from ramet.models.tiny import tiny_tokenizer

            tokenizer = tiny_tokenizer()
        self.task = dataclasses.replace(task, begin=noting(task.begin, self._note))
        self.tokenizer = tokenizer
        self._original = task
        self._calls = Calls(by_threads(Threads(THREADS, "ramet reference")))
        self._episodes: dict[tuple[int, int], Episode] = {}

    def row_of(self, row: Mapping[str, Any], *, group: int, member: int) -> Mapping[str, Any]:
        """Return a copy of a data row that stands for one episode."""
        self._episodes[group, member] = Episode(own(row), [], random.Random(0))
        return Marked(row, (group, member))

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield what the reference writes, one after another, as `answer` returns it."""
        with EventLoop("ramet reference") as loop:
            for request in requests:
                answer = partial(self.answer, request)
                yield loop.run(lambda here, answer=answer: answer())  # type: ignore[misc]

    async def answer(self, request: Request) -> Completion:
        """Return what the reference writes; raise `ModelError` where it fails, or writes no text."""
        return typed(request, await self._said(request), self.tokenizer, self.version)

    def _note(self, row: Row, rng: random.Random, state: Any) -> None:
        assert isinstance(row, Marked)
        episode = self._episodes[row.key]
        episode.state, episode.rng = state, rng

    async def _said(self, request: Request) -> str:
        episode, task = self._episodes[request.draw.prompt, request.draw.member], self._original
        episode.messages = list(request.messages or ())
        episode.turns = request.draw.turn
        try:
            if task.player is not None:
                return as_text(await self._calls(task.player, episode))
            assert task.answer is not None
            return as_text(await self._calls(task.answer, episode.row))
        except FAILURES as error:  # a task may be anybody's
            raise ModelError(
                f"the reference of the task {task.name} failed at turn {episode.turns + 1} of row "
                f"{request.draw.prompt}: {type(error).__name__}: {error}",
                hint="ramet check shows what is wrong with a task",
            ) from error


def as_text(value: Any) -> str:
    """Return what a reference wrote; raise `TypeError` for what is no text.

    >>> as_text("85")
    '85'
    """
    if not isinstance(value, str):
        raise TypeError(f"expected text: found {type(value).__name__}")
    return value


def noting(
    begin: Begin | None,
    note: Callable[[Row, random.Random, Any], object],
    begins: Callable[[], object] = lambda: None,
) -> Begin:
    """Return `begin`, sync or async as it is, which calls `begins` before and hands `note` what an episode has then."""

    def noted(row: Row, rng: random.Random, state: Any) -> Any:
        note(row, rng, state)
        return state

    async def later(row: Row, rng: random.Random, state: Any) -> Any:
        return noted(row, rng, await state)

    if begin is None or inspect.iscoroutinefunction(begin):

        async def begun(row: Row, rng: random.Random) -> Any:
            begins()
            return noted(row, rng, None if begin is None else await begin(row, rng))

        return begun if begin is None else functools.update_wrapper(begun, begin)

    def begun_in_thread(row: Row, rng: random.Random) -> Any:
        begins()
        state = begin(row, rng)
        return later(row, rng, state) if inspect.isawaitable(state) else noted(row, rng, state)

    return functools.update_wrapper(begun_in_thread, begin)
