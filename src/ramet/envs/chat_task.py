"""The task of a conversation: what comes back after each turn of the model, and how an episode is judged at its end."""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from ramet.envs.chat_history import items_of
from ramet.envs.chat_rows import numbers, picked_rows, rows_of
from ramet.envs.chat_talk import Standing, Talk, Talks
from ramet.errors import DataError
from ramet.specs import KeyPath, describe
from ramet.tasks import Judge, Task
from ramet.tasks.loop import EventLoop
from ramet.tasks.task import Row, rng_of
from ramet.tasks.verdicts import Raised
from ramet.transforms.entries import entry
from ramet.types import Episode, Key, Message, Outcome, Sample, StopReason

EPISODE, OUTCOME = "episode", "outcome"
_NOT_OF_THE_ROW = {"_reset", "done", "terminated", "truncated", EPISODE, OUTCOME, "next", "history", "text", "tokens"}


@dataclass(slots=True)
class Turn:
    """A turn of the model while it is taken, and what came of it.

    `added` is what stands behind the prompt by now, `whole` the new row where a template wrote it anew.
    """

    before: Standing
    said: Any
    talk: Talk | None = None
    episode: Episode | None = None
    known: int = 0
    value: Any = None
    replies: Sequence[Message] | None = None
    added: Any = None
    whole: Any = None
    terminated: bool = False
    truncated: bool = False
    outcome: Outcome | None = None
    after: Standing | None = None

    @property
    def messages(self) -> list[Message]:
        """What the model said and what came back."""
        said = [] if self.episode is None else self.episode.messages[self.known :]
        return [*said, *(self.replies or ())]


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a step, row by row: `turns` of the rows that were `taken`, and where all rows stand then."""

    turns: Mapping[int, Turn]
    taken: list[bool]
    stands: list[Standing]
    outcomes: list[Outcome | None]
    messages: list[list[Message]]
    flags: Mapping[str, list[bool]]
    rewards: list[float]


class Players:
    """Plays the rows of a batch: what the model says goes in, what the task says comes back."""

    def __init__(self, task: Task, talks: Talks, rows: Sequence[Row] | None = None) -> None:
        self.task, self.seed, self.talks = task, 0, talks
        self._rows = task.train if rows is None else rows
        self._judge = Judge(task.score)
        self._toolbox: Any = None
        self._loop: EventLoop | None = None
        self._open: dict[int, Any] = {}  # states that want to be closed
        if task.tools:
            from ramet.tools import Toolbox

            self._toolbox = Toolbox(task.tools)
            talks.offer(self._toolbox.schemas, self._toolbox.read_turn)

    def close(self) -> None:
        """Close what runs for the task, and the states of episodes that did not end."""
        for state in list(self._open.values()):
            self._close_state(state)
        if self._toolbox is not None:
            self._toolbox.close()
        self._judge.close()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    # The beginning.

    def data_rows(self, td: TensorDictBase, data_key: KeyPath, fresh: Sequence[int]) -> dict[int, Row]:
        """Return the data row of each of the `fresh` rows of `td`."""
        if entry(td, Key.PROMPT_INDEX) is None:
            return rows_of(td, data_key, fresh, _NOT_OF_THE_ROW)
        return picked_rows(numbers(td, Key.PROMPT_INDEX), self._rows, fresh)

    def begin(
        self, td: TensorDictBase, rows: Mapping[int, Row], prompts: Mapping[int, list[Message]]
    ) -> tuple[dict[int, Standing], dict[int, Any]]:
        """Begin an episode in each of `rows`; return where they stand, and the text or ids of their prompts."""
        if entry(td, EPISODE) is not None:
            for row, old in enumerate(items_of(td, EPISODE)):
                if row in rows and isinstance(old, Standing):
                    self._close_state(old.state)
        columns = {key: numbers(td, key) for key in (Key.PROMPT_INDEX, Key.GROUP, Key.MEMBER)}
        made, values, opened = {}, [], {}
        for row, data in rows.items():
            index, group, member = (column[row] if column else None for column in columns.values())
            group = row if group is None else group
            rng = rng_of(self.seed, group if index is None else index)
            talk = self.talks.begin(prompts[row])
            made[row] = Standing(data, prompts[row], rng, group, member or 0, talk=talk)
            opened[row] = self.talks.shown(talk.opening)
            made[row].opening = opened[row] if self.talks.mode == "tokens" else ()
            values.append(_called(self.task.begin, data, rng) if self.task.begin is not None else None)
        for one, value in zip(made.values(), self._awaited(values), strict=True):
            if isinstance(value, Raised):
                one.trouble = _failure("begin", value.error)
            else:
                one.state = value
                if _closes(value):
                    self._open[id(value)] = value
        return made, opened

    # A turn.

    def step(self, td: TensorDictBase, mask: torch.Tensor | None, words: Sequence[Any]) -> Step:
        """Take what the model said in the rows that `mask` names and that have not ended."""
        stands, outcomes = self._stands(td), items_of(td, OUTCOME)
        flags = [True] * len(stands) if mask is None else mask.reshape(-1).tolist()
        taken = [flag and outcome is None for flag, outcome in zip(flags, outcomes, strict=True)]
        turns = self._turns({row: (stands[row], words[row]) for row, flag in enumerate(taken) if flag})
        rewards = [0.0] * len(stands)
        for row, turn in turns.items():
            assert turn.after is not None
            stands[row], outcomes[row] = turn.after, turn.outcome
            if turn.outcome is not None and turn.outcome.score is not None:
                rewards[row] = turn.outcome.score
        numbers = range(len(stands))
        ends = {
            "terminated": [row in turns and turns[row].terminated for row in numbers],
            "truncated": [row in turns and turns[row].truncated for row in numbers],
        }
        messages = [turns[row].messages if row in turns else [] for row in numbers]
        return Step(turns, taken, stands, outcomes, messages, ends, rewards)

    def _stands(self, td: TensorDictBase) -> list[Standing]:
        stands = items_of(td, EPISODE)
        for row, one in enumerate(stands):
            if not isinstance(one, Standing):
                raise TypeError(
                    f"{EPISODE!r}, row {row}: expected where its episode stands, as reset and step give it: "
                    f"found {describe(one)}"
                )
        return stands

    def _turns(self, said: Mapping[int, tuple[Standing, Any]]) -> dict[int, Turn]:
        """Take what the model said in some rows, each with where it stands; return what came of it, by row."""
        turns = {row: self._taken(row, standing, words) for row, (standing, words) in said.items()}
        playing = [turn for turn in turns.values() if turn.outcome is None]
        for turn, value in zip(playing, self._awaited(map(self._asked, playing)), strict=True):
            turn.value = value
        for turn in playing:
            self._answer(turn)
        ended = [turn for turn in playing if turn.outcome is None and (turn.terminated or turn.truncated)]
        for turn, outcome in zip(ended, self._judge([self._sample(turn) for turn in ended]), strict=True):
            turn.outcome = outcome
        for turn in turns.values():
            turn.after = turn.before if turn.episode is None else self._after(turn)
            if turn.terminated or turn.truncated:
                self._close_state(turn.after.state)
        return turns

    def _taken(self, row: int, standing: Standing, said: Any) -> Turn:
        """Take the words of one row; the episode before them stays as it was, as far as its state can be copied."""
        turn = Turn(standing, said)
        if standing.trouble is not None:
            turn.outcome, turn.truncated, turn.added = standing.trouble, True, self.talks.nothing
            return turn
        first = standing.talk is not None and standing.talk.turns == standing.turns
        state, rng = _copied(standing, row, first)
        turn.talk = talk = standing.talk if first and standing.talk is not None else self.talks.again(standing)
        turn.known = len(talk.messages)
        talk.take(said)
        turn.episode = Episode(standing.row, list(talk.messages), rng, state, standing.turns + 1)
        return turn

    def _asked(self, turn: Turn) -> Any:
        """Call the tools, or else the reply; an awaitable where they are async."""
        assert turn.episode is not None
        calls = self._calls(turn)
        if calls:
            return _called(self._toolbox.run, calls, turn.episode)
        return None if self.task.reply is None else _called(self.task.reply, turn.episode)

    def _calls(self, turn: Turn) -> Any:
        """Return the calls of tools in a turn."""
        said = None if turn.episode is None or not turn.episode.messages else turn.episode.messages[-1]
        return said.get("tool_calls") if said and self._toolbox is not None else None

    def _answer(self, turn: Turn) -> None:
        assert turn.episode is not None
        assert turn.talk is not None
        if isinstance(turn.value, Raised):
            turn.outcome, turn.truncated = (
                _failure("the tools" if self._calls(turn) else "reply", turn.value.error),
                True,
            )
        else:
            turn.replies = self._replies(turn.value)
            turn.terminated = turn.replies is None
            turn.truncated = not turn.terminated and turn.episode.turns >= self.task.max_turns
        if turn.replies:
            try:
                turn.talk.reply(turn.replies)
            except DataError as error:  # the template refuses them
                turn.outcome, turn.truncated, turn.replies = _failure("reply", error), True, None
        turn.added, turn.whole = turn.talk.news()

    def _replies(self, value: Any) -> list[Message] | None:
        if value is None:
            return None
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        messages = [value] if isinstance(value, Mapping) else value
        if isinstance(messages, Sequence) and messages and all(map(_is_message, messages)):
            return [dict(message) for message in messages]
        name = getattr(self.task.reply, "__qualname__", type(self.task.reply).__qualname__)
        raise TypeError(
            f"{name} of the task {self.task.name!r} must return text, a message, messages (at least one) or None: "
            f"found {str(value)[:80]!r} of type {type(value).__name__}"
        )

    def _sample(self, turn: Turn) -> Sample:
        before, episode = turn.before, turn.episode
        assert episode is not None
        sampled = self.talks.sampled(before, turn.said)
        ended = StopReason.EOS if self.talks.ended(turn.said) else StopReason.STOP
        return Sample(
            prompt=before.row["prompt"],
            completion=self.talks.completion(turn.said, episode),
            prompt_tokens=tuple(before.opening),
            completion_tokens=sampled,
            row=before.row,
            stop=StopReason.TURNS if turn.truncated else ended,
            group=before.group,
            member=before.member,
            messages=(*episode.messages, *(turn.replies or ())),
            state=episode.state,
        )

    def _after(self, turn: Turn) -> Standing:
        assert turn.episode is not None
        return turn.before.then(turn.said, turn.replies or (), turn.episode, turn.talk)

    # What the functions of the task are run with.

    def _awaited(self, called: Iterable[Any]) -> list[Any]:
        """Return what was called, in turn; what is awaitable is awaited together. Errors are there as `Raised`."""
        values: list[Any] = []
        try:
            values.extend(called)
        except BaseException:  # Ctrl-C: nobody will wait for the coroutines that are there
            for value in filter(inspect.iscoroutine, values):
                value.close()
            raise
        pending = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
        if not pending:
            return values
        if self._loop is None:
            self._loop = EventLoop()
        try:
            found = self._loop.run(_together([values[number] for number in pending]))
        except BaseException:  # Ctrl-C: that loop may be busy, and is left to itself
            self._loop = None
            raise
        for number, value in zip(pending, found, strict=True):
            values[number] = value
        return values

    def _close_state(self, state: Any) -> None:
        """Close a state that wants it, once; what it raises then is of no interest to the episode that has ended."""
        if self._open.pop(id(state), None) is not None:
            self._awaited([_called(state.close)])


def _called(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (Exception, asyncio.CancelledError) as error:  # what the user's function raises costs its own row
        return Raised(error)


async def _settled(awaitable: Any) -> Any:
    try:
        return await awaitable
    except BaseException as error:  # an exit as well: the others go on to their ends
        return Raised(error)


async def _together(pending: Iterable[Any]) -> list[Any]:
    return list(await asyncio.gather(*map(_settled, pending)))


def _failure(where: str, error: BaseException) -> Outcome:
    if not isinstance(error, (Exception, asyncio.CancelledError)):
        raise error
    reason = f"{where}: {type(error).__name__}: {error}"
    return Outcome.timed_out(reason) if isinstance(error, TimeoutError) else Outcome.error(reason)


def _closes(state: Any) -> bool:
    return callable(getattr(state, "close", None))


def _copied(standing: Standing, row: int, first: bool) -> tuple[Any, random.Random]:
    """Return copies of an episode's state and random numbers, so that it can be gone on with twice.

    A state that can not be copied, or that holds something open, is handed on as it is, to one step alone.
    """
    rng = random.Random.__new__(random.Random)
    rng.setstate(standing.rng.getstate())
    state = standing.state
    if state is None:
        return None, rng
    if not _closes(state):
        try:
            return copy.deepcopy(state, {id(standing.rng): rng}), rng
        except Exception:  # it may be anything
            pass
    if not first:
        raise RuntimeError(
            f"row {row}: the state of its episode, a {type(state).__name__}, can not be copied, and a step has gone on "
            "with it: step what the last step returned, or let `begin` return a state that copy.deepcopy copies"
        )
    return state, standing.rng


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)
