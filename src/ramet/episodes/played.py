"""What goes into an episode and what comes out of it: where it starts, by which rules it is played, how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tensordict import TensorDictBase

from ramet.chat import Piece, Template
from ramet.types import Key, Outcome, Sample, Sampling, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Speech(Template, Protocol):
    """A template that has its tokenizer at hand, as those of `ramet.chat` have."""

    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Start:
    """Where an episode starts: a data row, and which member of which group it is; `prompt_index` numbers the row."""

    row: Mapping[str, Any]
    group: int
    member: int = 0
    prompt_index: int = -1


def starts_of(td: TensorDictBase, rows: Sequence[Mapping[str, Any]]) -> list[Start]:
    """Return the starts that `Prompts.batch` dealt out: `group_id`, `repeat_index` and `prompt_index` [B] of `rows`.

    >>> from ramet.models.tiny import tiny_tokenizer
    >>> from ramet.prompts import Prompts
    >>> prompts = Prompts(["1+1="], tiny_tokenizer())
    >>> starts_of(prompts.batch(0, 1, group_size=2), prompts.rows)[1]
    Start(row={'prompt': '1+1='}, group=0, member=1, prompt_index=0)
    """
    columns = [td[key].reshape(-1).tolist() for key in (Key.GROUP, Key.MEMBER, Key.PROMPT_INDEX)]
    return [Start(rows[index], group, member, index) for group, member, index in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class Rules:
    """By which rules episodes are played.

    `max_turns` bounds the model's turns (None: as many as the task says). An episode may take `time_limit` seconds
    before it is judged, its waiting for the model included; a call of a tool may take `tool_seconds`. `context` bounds
    the tokens that the model sees and writes, and `prompt_limit` those of the first prompt: nothing is ever cut to fit,
    the episode ends and says why. `seed` is that of all draws.

    Each row goes on as soon as it can, so which rows a model in the process completes together depends on how long
    tools and replies take, and the last digits of its numbers depend on that. With `lockstep` it completes a turn when
    all rows that are still played wait for it: on one machine the same seed gives the same bits, unless a time limit
    ends something, and the slowest tool holds up all.
    """

    sampling: Sampling
    seed: int
    max_turns: int | None = None
    time_limit: float | None = None
    tool_seconds: float = 30.0
    context: int | None = None
    prompt_limit: int | None = None
    lockstep: bool = False

    def __post_init__(self) -> None:
        for name in ("max_turns", "context", "prompt_limit"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, or None: found {number}")
        for name in ("time_limit", "tool_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be a finite number of seconds above 0: found {seconds}")


@dataclass(frozen=True, slots=True)
class Played:
    """One episode that has ended: all that a forest, a log and a reward want to know of it.

    `pieces` are what the model saw and wrote (one, where nothing was rewritten on the way; one that is empty, where it
    came to no prompt). `outcome` is None where nobody judged.
    """

    start: Start
    pieces: tuple[Piece, ...]
    stop: StopReason
    outcome: Outcome | None
    sample: Sample
