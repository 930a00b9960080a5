"""The nouns of ramet and the names of things: read this file first.

Every dimension has a letter, used in all docstrings::

    B  rows of a batch          G  members of a group (completions of one prompt)
    T  steps of an episode      L  tokens of a row          M  sampled tokens, flat
    V  vocabulary               N  nodes of a forest        R  rollouts of a forest

Keys of the TensorDict at the border between environments and policies: `Key`.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


class Key:
    """Names of TensorDict entries; all ragged rows are int64 or float32.

    `TOKENS` [B, L], `MASK` [B, L] (True on real tokens), `RESPONSE` [B, L] (what the policy sampled), `LOG_PROBS`
    [B, L] (of `RESPONSE`, under the distribution it was sampled from), `GROUP`, `MEMBER` and `PROMPT_INDEX` [B].
    `STOP` and `OUTCOME` [B] hold no tensors: why the policy stopped, the value of a `StopReason` or None; and the
    `Outcome` of a row that was judged at its end, else None.
    """

    TOKENS = "tokens"
    MASK = "attention_mask"
    RESPONSE = "tokens_response"
    LOG_PROBS = "log_probs"
    TEXT = "text"
    TEXT_RESPONSE = "text_response"
    GROUP = "group_id"
    MEMBER = "repeat_index"
    PROMPT_INDEX = "prompt_index"
    REWARD = "reward"
    STOP = "stop_reason"
    OUTCOME = "outcome"


class Kind(enum.IntEnum):
    """Who wrote a token of a rollout. Only `SAMPLED` tokens are ever trained on."""

    PROMPT = 0
    SAMPLED = 1
    ENVIRONMENT = 2


class StopReason(enum.StrEnum):
    """Why a rollout (or one completion) ended. `EOS` and `STOP` are ends; the others are truncations or failures."""

    EOS = "eos"
    STOP = "stop"
    NEW_TOKENS = "new_token_limit"
    CONTEXT = "context_limit"
    PROMPT_TOO_LONG = "prompt_too_long"
    TURNS = "turn_limit"
    TIMEOUT = "timeout"
    ERROR = "error"

    @property
    def truncated(self) -> bool:
        """True where a limit, not the policy, ended it.

        >>> [reason.value for reason in StopReason if reason.truncated]
        ['new_token_limit', 'context_limit', 'prompt_too_long', 'turn_limit', 'timeout']
        """
        return self not in (StopReason.EOS, StopReason.STOP, StopReason.ERROR)


Message: TypeAlias = Mapping[str, Any]
"""One chat message, `{"role": ..., "content": ...}`, as chat templates take it."""

Prompt: TypeAlias = str | Sequence[Message]
"""Plain text, or messages that go through the tokenizer's chat template."""


class OutcomeKind(enum.StrEnum):
    """What came of judging a rollout. Only `SCORED` enters group statistics and the loss."""

    SCORED = "scored"
    ABSTAINED = "abstained"
    ERROR = "environment_error"
    TIMED_OUT = "timed_out"

    @property
    def failed(self) -> bool:
        """True where judging or acting broke down: an error or a time-out.

        >>> [kind.value for kind in OutcomeKind if kind.failed]
        ['environment_error', 'timed_out']
        """
        return self in (OutcomeKind.ERROR, OutcomeKind.TIMED_OUT)


class InvalidOutcome(ValueError):
    """An `Outcome` that can not be: a number that is not finite, or a score where there can be none.

    It is a mistake in the program: a `Judge` turns it into a `RewardError`, where any other error costs one rollout.
    """


@dataclass(frozen=True, slots=True)
class Outcome:
    """The judgement of one rollout: a finite score, or a reason why there is none.

    `rewards` are the named parts of the score, for the logs; the score is what is trained on. Raises `InvalidOutcome`
    (a `ValueError`) for a number that is not finite, a score that is missing, or one that has no business here.

    >>> Outcome.scored(1.0)
    Outcome(kind=<OutcomeKind.SCORED: 'scored'>, score=1.0, rewards={'reward': 1.0}, reason='')
    >>> Outcome.abstained("the judge gave no verdict").score is None
    True
    """

    kind: OutcomeKind
    score: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def __post_init__(self) -> None:
        scored = self.kind is OutcomeKind.SCORED
        if scored != (self.score is not None):
            raise InvalidOutcome(f"an outcome has a score exactly if it is scored: found {self.kind}, {self.score}")
        numbers = dict(self.rewards) if self.score is None else {"score": self.score, **self.rewards}
        for name, value in numbers.items():
            if not _is_finite(value):
                raise InvalidOutcome(f"{name} must be a finite number: found {value!r}")

    @classmethod
    def scored(cls, score: float, rewards: Mapping[str, float] | None = None) -> Outcome:
        """The rollout has a score."""
        return cls(OutcomeKind.SCORED, score, {"reward": score} if rewards is None else dict(rewards))

    @classmethod
    def abstained(cls, reason: str = "") -> Outcome:
        """Nobody can say how good it is: it leaves its group's baseline alone and is not trained on."""
        return cls(OutcomeKind.ABSTAINED, reason=reason)

    @classmethod
    def error(cls, reason: str) -> Outcome:
        """The environment or the reward failed: dropped, with the reason kept."""
        return cls(OutcomeKind.ERROR, reason=reason)

    @classmethod
    def timed_out(cls, reason: str) -> Outcome:
        """Judging or acting took too long: dropped, with the reason kept."""
        return cls(OutcomeKind.TIMED_OUT, reason=reason)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # text, an array, too large a whole number, a tensor
        return False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote: the name of a tool, the arguments it gave, and an id where the template wants one."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(slots=True)
class Episode:
    """One episode while it is played, as the functions of a task see it.

    `row` is the data row of its prompt; `messages` are all so far, the model's last turn included; `state` is what the
    task's `begin` returned, the episode's own; `rng` is seeded by the task's row alone, so that all members of a group
    meet the same world; `turns` counts the turns that the model has taken.
    """

    row: Mapping[str, Any]
    messages: list[Message]
    rng: random.Random
    state: Any = None
    turns: int = 0

    @property
    def text(self) -> str:
        """What the model wrote last; "" before its first turn.

        >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> Episode({}, said, random.Random(0)).text
        '4'
        """
        last = next((message for message in reversed(self.messages) if message["role"] == "assistant"), None)
        return "" if last is None else str(last.get("content") or "")


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished rollout as a reward function sees it.

    `row` is the data row that the prompt came from, other columns included; `completion` is the text of
    `completion_tokens` without special tokens; token ids are exactly those that the model saw and sampled. Of an
    episode of several turns, `completion` is what the model wrote last, `completion_tokens` are all that it sampled,
    `messages` the whole conversation and `state` the episode's own.
    """

    prompt: Prompt
    completion: str
    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    row: Mapping[str, Any]
    stop: StopReason
    group: int
    member: int
    messages: tuple[Message, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class Support:
    """Which tokens of a distribution may be drawn; what is kept is renormalised.

    Applied to the logits after the temperature, in this order: `top_k` keeps the k most probable tokens; `top_p`
    keeps of those the fewest, most probable first, that together have this share of their probability; `min_p` keeps
    what is at least this many times as probable as the most probable token. Of equally probable tokens the lower id
    comes first, except under `min_p`, which keeps all of them or none. At least one token is always kept.
    https://arxiv.org/abs/1904.09751 (top-p), https://arxiv.org/abs/2407.01082 (min-p)

    >>> Support().whole, Support(top_k=50).whole
    (True, False)
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None to keep every token: found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (1 keeps every token): found {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 (which keeps every token) to 1: found {self.min_p}")

    @property
    def whole(self) -> bool:
        """True where nothing is cut away."""
        return self.top_k is None and self.top_p == 1 and self.min_p == 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a policy draws tokens.

    `temperature` 0 is greedy (the largest logit, the lower id on a tie); `max_new_tokens` counts the token that ends
    the completion; `stop_ids` end it like eos and are part of it. `top_k`, `top_p` and `min_p` are those of `Support`.
    `stop` are strings: the token with which one of them first stands in the completion's text ends it, and is part of
    it, whatever more it holds.

    >>> Sampling(8, top_p=0.9).support
    Support(top_k=None, top_p=0.9, min_p=0.0)
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1: found {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0: found {self.temperature}")
        if isinstance(self.stop, str) or not all(isinstance(stop, str) for stop in self.stop):
            raise ValueError(f"stop must be a tuple of strings: found {self.stop!r}")
        if "" in self.stop:
            raise ValueError(f"a stop string must not be empty, for every text holds it: found {self.stop!r}")
        _ = self.support  # which checks its own numbers

    @property
    def support(self) -> Support:
        """Which tokens may be drawn."""
        return Support(self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True, slots=True)
class Draw:
    """The address of a rollout's random numbers: its uniforms are a pure function of these four integers."""

    seed: int
    prompt: int
    member: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One row that wants a completion: a prefix `tokens` (int64 [L]), how to sample, and the address of its draws.

    `messages` and `tools` (JSON schemas) say the same as `tokens` in words, where the prefix is a conversation: a
    server that takes no tokens reads them.
    """

    row: int
    tokens: Tensor
    sampling: Sampling
    draw: Draw
    messages: tuple[Message, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What a policy answered to a `Request` of the same `row`.

    `tokens` int64 [n] exactly as sampled, `log_probs` float32 [n] under the distribution that was sampled from (NaN
    where there is none, as in greedy decoding: such tokens can not be trained on), `version` of the weights that made
    them. `text` is there where a server gave text and no tokens: `tokens` are then that text's, tokenised anew, and
    their log-probs NaN.
    """

    row: int
    tokens: Tensor
    log_probs: Tensor
    stop: StopReason
    version: int
    text: str | None = None
