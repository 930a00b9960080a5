"""The task of a conversation: what comes back after each turn of the model, and how an episode is judged at its end."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDictBase

from ramet.envs.chat_calls import Caller, Work
from ramet.envs.chat_history import items_of
from ramet.envs.chat_rows import numbers, picked_rows, rows_of, stops
from ramet.envs.chat_talk import Standing, Talk, Talks
from ramet.errors import DataError
from ramet.specs import KeyPath, describe
from ramet.tasks import Judge, Task
from ramet.tasks.copies import own
from ramet.tasks.replies import as_messages, left
from ramet.tasks.task import Row, rng_of
from ramet.tasks.verdicts import FAILURES, Raised, name_of
from ramet.transforms.entries import entry
from ramet.types import Episode, Key, Message, Outcome, Sample, StopReason

EPISODE, OUTCOME = "episode", Key.OUTCOME
_NOT_OF_THE_ROW = {"_reset", "done", "terminated", "truncated", EPISODE, OUTCOME, Key.STOP, "next"}
_NOT_OF_THE_ROW |= {"history", "text", "tokens"}


@dataclass(frozen=True, slots=True)
class Limits:
    """How many seconds a call of a tool, a score and a function of the task may take; None: as long as it takes."""

    tool: float = 30.0
    score: float | None = 600.0
    reply: float | None = None

    def __post_init__(self) -> None:
        for name in ("tool", "score", "reply"):
            seconds = getattr(self, name)
            if seconds is None and name != "tool":
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ValueError(f"{name}_seconds must be a finite number of seconds above 0: found {seconds!r}")


@dataclass(slots=True)
class Turn:
    """A turn of the model while it is taken, and what came of it.

    `stop` is why the policy says that it stopped, None where it does not say. `spoken` are all messages up to the
    model's, whatever the task's functions do to those of `episode`. `added` is what stands behind the prompt by now,
    `whole` the new row where a template wrote it anew.
    """

    before: Standing
    said: Any
    stop: StopReason | None = None
    talk: Talk | None = None
    episode: Episode | None = None
    spoken: list[Message] = field(default_factory=list)
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
    def cut(self) -> bool:
        """Whether a limit ended what the model said."""
        return self.stop is not None and self.stop.truncated

    @property
    def untaken(self) -> bool:
        """Whether the limit left no words, which is no turn."""
        return self.cut and _is_empty(self.said)

    @property
    def messages(self) -> list[Message]:
        """What the model said and what came back."""
        said = self.spoken[self.known :]
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

    def __init__(self, task: Task, talks: Talks, rows: Sequence[Row] | None, limits: Limits) -> None:
        self.task, self.seed, self.talks = task, 0, talks
        self._rows = task.train if rows is None else rows
        self._judge = Judge(task.score, seconds=limits.score)
        self._call = Caller(limits.reply)
        self._toolbox: Any = None
        self._open: dict[int, Any] = {}  # states that want to be closed
        if task.tools:
            from ramet.tools import Toolbox

            self._toolbox = Toolbox(task.tools, timeout=limits.tool)
            talks.offer(self._toolbox.schemas, self._toolbox.read_turn)

    def close(self) -> None:
        """Close what runs for the task, and the states of episodes that did not end."""
        self._close_states(list(self._open.values()))
        if self._toolbox is not None:
            self._toolbox.close()
        self._judge.close()
        self._call.close()

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
            before = [old for row, old in enumerate(items_of(td, EPISODE)) if row in rows]
            self._close_states([old.state for old in before if isinstance(old, Standing)])
        columns = {key: numbers(td, key) for key in (Key.PROMPT_INDEX, Key.GROUP, Key.MEMBER)}
        made, opened = {}, {}
        for row, data in rows.items():
            index, group, member = (column[row] if column else None for column in columns.values())
            group = row if group is None else group
            rng = rng_of(self.seed, group if index is None else index)
            made[row] = one = Standing(data, own(prompts[row]), rng, group, member or 0)
            one.talk = self.talks.begin(one.prompt, bare=one.bare)
            opened[row] = self.talks.shown(one.talk.opening)
            one.opening = opened[row] if self.talks.mode == "tokens" else ()
        if self.task.begin is None:
            return made, opened
        begin = self.task.begin
        values = self._call(Work(begin, (own(one.row), one.rng), made=self._kept) for one in made.values())
        for one, value in zip(made.values(), values, strict=True):
            if isinstance(value, Raised):
                one.trouble = _failure("begin", value.error, begin)
            else:
                one.state = value
        return made, opened

    def _kept(self, state: Any) -> Any:
        """Note what `begin` returned: it is closed even where nobody waits for it any more."""
        if _closes(state):
            self._open[id(state)] = state
        return state

    # A turn.

    def step(self, td: TensorDictBase, mask: torch.Tensor | None, words: Sequence[Any]) -> Step:
        """Take what the model said in the rows that `mask` names and that have not ended."""
        stands, outcomes, reasons = self._stands(td), items_of(td, OUTCOME), stops(td, Key.STOP)
        flags = [True] * len(stands) if mask is None else mask.reshape(-1).tolist()
        taken = [flag and outcome is None for flag, outcome in zip(flags, outcomes, strict=True)]
        said = {row: Turn(stands[row], words[row], reasons[row]) for row, flag in enumerate(taken) if flag}
        turns = self._turns(said)
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

    def _turns(self, turns: dict[int, Turn]) -> dict[int, Turn]:
        """Take what the model said in some rows; return what came of it, by row."""
        for row, turn in turns.items():
            self._take(row, turn)
        asked = [turn for turn in turns.values() if not turn.truncated]
        for turn, value in zip(asked, self._call(map(self._asked, asked)), strict=True):
            turn.value = value
            self._answer(turn)
        ended = [turn for turn in turns.values() if turn.outcome is None and (turn.terminated or turn.truncated)]
        for turn, outcome in zip(ended, self._judge([self._sample(turn) for turn in ended]), strict=True):
            turn.outcome = outcome
        for turn in turns.values():
            turn.after = turn.before if turn.episode is None or turn.untaken else self._after(turn)
        self._close_states(
            [turn.after.state for turn in turns.values() if turn.after and (turn.terminated or turn.truncated)]
        )
        return turns

    def _take(self, row: int, turn: Turn) -> None:
        """Take the words of one row; the episode before them stays as it was, as far as its state can be copied."""
        before, trouble = turn.before, turn.before.trouble
        if trouble is None and turn.stop is StopReason.ERROR:
            trouble = Outcome.error("the policy gave no completion")
        if trouble is not None:
            turn.outcome, turn.truncated, turn.added = trouble, True, self.talks.nothing
            return
        first = before.talk is not None and before.talk.turns == before.turns
        state, rng = _copied(before, row, first)
        turn.talk = talk = before.talk if first and before.talk is not None else self.talks.again(before)
        turn.known, turn.truncated = len(talk.messages), turn.cut
        turn.added = self.talks.nothing
        if not turn.untaken:
            talk.take(turn.said, turn.cut)
            turn.added, turn.whole = talk.news()
        turn.spoken = list(talk.messages)
        turn.episode = Episode(own(before.row), talk.lent(), rng, state, before.turns + (not turn.untaken))

    def _asked(self, turn: Turn) -> Work | None:
        """Return what answers a turn: the tools, or else the reply."""
        assert turn.episode is not None
        calls = self._calls(turn)
        if calls:
            return Work(self._toolbox.run, (calls, turn.episode), timed=False)
        return None if self.task.reply is None else Work(self.task.reply, (turn.episode,))

    def _calls(self, turn: Turn) -> Any:
        """Return the calls of tools in a turn."""
        said = turn.spoken[-1] if turn.spoken else None
        return said.get("tool_calls") if said and self._toolbox is not None else None

    def _answer(self, turn: Turn) -> None:
        assert turn.episode is not None
        assert turn.talk is not None
        if isinstance(turn.value, Raised):
            where = "the tools" if self._calls(turn) else "reply"
            turn.outcome, turn.truncated = _failure(where, turn.value.error, self.task.reply), True
            return
        try:
            turn.replies = self._replies(turn.value)
        except DataError as error:  # it is too long
            turn.outcome, turn.truncated = _failure("reply", error, self.task.reply), True
            return
        turn.terminated = turn.replies is None
        turn.truncated = not turn.terminated and turn.episode.turns >= self.task.max_turns
        if turn.replies and not turn.truncated:  # the model sees none after its last turn
            try:
                turn.talk.reply(turn.replies)
            except DataError as error:  # the template refuses them
                turn.outcome, turn.truncated, turn.replies = _failure("reply", error, self.task.reply), True, None
        turn.added, turn.whole = turn.talk.news()

    def _replies(self, value: Any) -> list[Message] | None:
        reply = self.task.reply
        name = f"{name_of(reply)} of the task {self.task.name!r}"
        messages = as_messages(value, name)
        return None if messages is None else [dict(message) for message in messages]

    def _sample(self, turn: Turn) -> Sample:
        before, episode = turn.before, turn.episode
        assert episode is not None
        words = [said for said, _ in before.history()]
        words = words if turn.untaken else [*words, turn.said]
        ended = StopReason.EOS if self.talks.ended(turn.said) else StopReason.STOP
        return Sample(
            prompt=before.row["prompt"],
            completion=self.talks.completion(words[-1], replace(episode, messages=turn.spoken)) if words else "",
            prompt_tokens=tuple(before.opening),
            completion_tokens=self.talks.sampled(words),
            row=before.row,
            stop=StopReason.TURNS if turn.truncated and not turn.cut else turn.stop or ended,
            group=before.group,
            member=before.member,
            messages=(*turn.spoken, *(turn.replies or ())),
            state=episode.state,
        )

    def _after(self, turn: Turn) -> Standing:
        assert turn.episode is not None
        return turn.before.then(turn.said, turn.replies or (), turn.episode, turn.talk)

    def _close_states(self, states: Sequence[Any]) -> None:
        """Close states that want it, once; what they raise then is of no interest to the episodes that have ended."""
        self._call([Work(state.close, ()) for state in states if self._open.pop(id(state), None) is not None])


def _failure(where: str, error: BaseException, function: Any) -> Outcome:
    if isinstance(error, SystemExit):
        raise left(where, function, error) from error
    if not isinstance(error, FAILURES):
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


def _is_empty(said: Sequence[Any]) -> bool:
    """Return whether a model said nothing: no tokens, no text, or messages without any."""
    return not any(one.get("content") or one.get("tool_calls") if isinstance(one, Mapping) else True for one in said)
