"""What is asked, what the environment replies, what may be used, and how an answer is judged."""

from __future__ import annotations

import hashlib
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ramet.errors import ConfigError, RewardError
from ramet.types import Episode, Message, Outcome, Sample

Row: TypeAlias = Mapping[str, Any]
"""One row of data: "prompt" (text or messages) and any other columns."""

Verdict: TypeAlias = float | Mapping[str, float] | Outcome | None
"""A score, named rewards that are added up, a whole outcome, or None (abstain)."""

Reward: TypeAlias = Callable[[Sample], Verdict | Awaitable[Verdict]]
"""A function, sync or async, that scores a finished rollout."""


class Reopening(ABC):
    """A reward that holds something open, which `close` ends and the next call opens again.

    A `Judge` closes it with itself. So one reward may be judged by several judges, one after another.
    """

    @abstractmethod
    def close(self) -> None:
        """End what is open, if anything is."""


Answer: TypeAlias = str | Message | Sequence[Message] | None
"""What an environment says after a turn: text (of the user's), a message, several, or None: the end."""

Reply: TypeAlias = Callable[[Episode], Answer | Awaitable[Answer]]
"""A function, sync or async, that answers the model's last turn."""

Begin: TypeAlias = Callable[[Row, random.Random], Any]
"""A function that makes the state of one episode from its row and random numbers of its own."""


@dataclass(frozen=True, slots=True)
class Task:
    """Rows to train on, rows that are held out, and `score`, the reward.

    Each row is a mapping with "prompt" (text or messages) and any other columns, which the reward finds in
    `sample.row`. `answer` gives the reference answer of a row where there is one: it is what a supervised warm start
    imitates and what must earn the full reward. `chance` is the mean reward of guessing among well-formed answers.

    A task of one turn is these. In one of several, `reply` answers each turn of the model's, up to `max_turns` of them;
    `tools` are typed functions (or `ramet.tools.Tool`s) that the model may call in a turn, each call answered by a
    message before it goes on; `begin` makes what an episode has of its own, which is closed once at the end where it
    has a `close` method. `player` plays the reference: it returns what the model should write next.

    A turn that a limit cuts (its new tokens, the context) ends the episode, and there is no reply to it. Raises
    `ConfigError` for a number of turns below 1, for rows that are no list and for what is no function,
    `RewardError` for a score that is none.
    """

    name: str
    train: Sequence[Row]
    held_out: Sequence[Row]
    score: Reward
    answer: Callable[[Row], str | Awaitable[str]] | None = None
    chance: float | None = None
    begin: Begin | None = None
    reply: Reply | None = None
    tools: Sequence[Any] = ()
    max_turns: int = 1
    player: Callable[[Episode], str | Awaitable[str]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a task's name must be text: found {self.name!r}", hint='Task("sums", ...)')
        for half in ("train", "held_out"):
            _refuse_no_rows(self.name, half, getattr(self, half))
        if not callable(self.score):
            found = type(self.score).__name__
            raise RewardError(f"task {self.name}: score, the reward, must be a function of a sample: found {found}")
        if isinstance(self.max_turns, bool) or not isinstance(self.max_turns, int) or self.max_turns < 1:
            raise ConfigError(
                f"task {self.name}: max_turns must be a whole number from 1 on: found {self.max_turns!r}",
                hint="a task of one turn has 1",
            )
        if isinstance(self.tools, str) or not isinstance(self.tools, Sequence):
            raise ConfigError(
                f"task {self.name}: tools must be a list of functions: found {type(self.tools).__name__}",
                hint="put a single one into a list",
            )
        for field in ("reply", "begin", "player", "answer"):
            value = getattr(self, field)
            if not callable(value) and value is not None:
                raise ConfigError(f"task {self.name}: {field} must be a function: found {type(value).__name__}")


def _refuse_no_rows(task: str, half: str, rows: object) -> None:
    """Raise `ConfigError` for what is no list of rows: it is gone through more often than once."""
    plain = isinstance(rows, (str, bytes, Mapping))
    if plain or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ConfigError(
            f"task {task}: {half} must be a list of rows: found {type(rows).__name__}",
            hint="where there are none, give []" if rows is None else "list(...) makes one of what yields rows",
        )


def rng_of(seed: int, prompt: int) -> random.Random:
    """Return random numbers that are a function of the run's seed and the prompt's number: the same for all members.

    >>> rng_of(0, 3).random() == rng_of(0, 3).random() != rng_of(0, 4).random()
    True
    """
    address = struct.pack("<2Q", seed % 2**64, prompt % 2**64)
    return random.Random(int.from_bytes(hashlib.blake2b(address, digest_size=16).digest(), "little"))
