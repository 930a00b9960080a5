"""Rewards made of others, and rewards of length and form."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Mapping
from typing import Any

from ramet.errors import ConfigError
from ramet.tasks.task import Reopening, Reward
from ramet.tasks.verdicts import FAILURES, Raised, Verdicts, name_of, settle
from ramet.types import Outcome, OutcomeKind, Sample


def weighted(parts: Mapping[str, tuple[Reward, float]]) -> Reward:
    """Make one reward of several, each with a name and a weight: the score is the weighted sum.

    The logs show each part by its name as it is, without its weight; the names of a part that has several come behind
    its own, "part.name". Parts may be sync or async; the async ones of a sample run together.

    A sample has a score if every part has one. A part that fails (it raises, or says that it did) makes the sample an
    environment error, one that times out a time-out, one that abstains an abstention, in this order where they differ;
    the reason names the part. Those parts that have a score are logged all the same. Raises `ConfigError` for no part,
    a name that is none, and a weight that is not finite.

    >>> from ramet.types import StopReason
    >>> reward = weighted({"right": (lambda s: float(s.completion == "4"), 1.0), "long": (lambda s: 9.0, -0.1)})
    >>> outcome = reward(Sample("2+2=", "4", (1,), (2,), {}, StopReason.EOS, group=0, member=0))
    >>> round(outcome.score, 6), outcome.rewards
    (0.1, {'right': 1.0, 'long': 9.0})
    """
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(f"weighted: expected names with rewards and weights, at least one: found {parts!r}")
    for name, part in parts.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"weighted: expected names, found {name!r}")
        if not isinstance(part, tuple) or len(part) != 2 or not callable(part[0]):
            raise ConfigError(f"weighted: expected (reward, weight) for {name!r}, found {part!r}")
        weight = part[1]
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ConfigError(f"weighted: expected a finite weight for {name!r}, found {weight!r}")
    return _Weighted(parts)


class _Weighted(Reopening):
    def __init__(self, parts: Mapping[str, tuple[Reward, float]]) -> None:
        self._rewards = {name: reward for name, (reward, _) in parts.items()}
        self._weights = {name: float(weight) for name, (_, weight) in parts.items()}
        self._verdicts = {name: Verdicts(f"{name} ({name_of(reward)})") for name, reward in self._rewards.items()}
        self.__qualname__ = f"weighted({', '.join(parts)})"

    def __call__(self, sample: Sample) -> Outcome | Awaitable[Outcome]:
        values: dict[str, Any] = {}
        for name, reward in self._rewards.items():
            try:
                values[name] = reward(sample)
            except FAILURES as error:  # it says which part it was
                values[name] = Raised(error)
        if any(inspect.isawaitable(value) for value in values.values()):
            return self._awaited(values, sample)
        return self._joined(values, sample)

    def close(self) -> None:
        """Close the parts that say they may be closed."""
        for reward in self._rewards.values():
            if isinstance(reward, Reopening):
                reward.close()

    async def _awaited(self, values: dict[str, Any], sample: Sample) -> Outcome:
        pending = {name: value for name, value in values.items() if inspect.isawaitable(value)}
        found = await asyncio.gather(*map(settle, pending.values()))
        values |= dict(zip(pending, found, strict=True))
        return self._joined(values, sample)

    def _joined(self, values: Mapping[str, Any], sample: Sample) -> Outcome:
        outcomes = {name: self._verdicts[name].outcome(value, sample) for name, value in values.items()}
        rewards: dict[str, float] = {}
        for name, outcome in outcomes.items():
            if outcome.score is not None:
                rewards[name] = outcome.score
            if len(outcome.rewards) > 1:
                rewards |= {f"{name}.{own}": value for own, value in outcome.rewards.items()}
        for kind in (OutcomeKind.ERROR, OutcomeKind.TIMED_OUT, OutcomeKind.ABSTAINED):
            for name, outcome in outcomes.items():
                if outcome.kind is kind:
                    return Outcome(kind, rewards=rewards, reason=f"{name}: {outcome.reason}")
        return Outcome.scored(sum(weight * rewards[name] for name, weight in self._weights.items()), rewards)


def length_reward(longest: int, soft: int) -> Reward:
    """Make a reward of the number of sampled tokens: 0 while short, then falling in a line, -1 from `longest` on.

    It begins to fall `soft` tokens before `longest`; with `soft` 0 it is a step. It is the soft overlong punishment of
    DAPO, https://arxiv.org/abs/2503.14476 (equation 13), and counts the tokens of all turns. Raises `ConfigError` for
    lengths that make no sense.

    >>> from ramet.types import StopReason
    >>> reward = length_reward(longest=10, soft=4)
    >>> [reward(Sample("", "", (), (7,) * n, {}, StopReason.EOS, group=0, member=0)) for n in (6, 7, 10, 30)]
    [0.0, -0.25, -1.0, -1.0]
    """
    for name, value, low in (("longest", longest, 1), ("soft", soft, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"length_reward: {name} must be a whole number from {low} on: found {value!r}")
    if soft > longest:
        raise ConfigError(f"length_reward: soft must be at most longest: found {soft} and {longest}")

    def length(sample: Sample) -> float:
        over = len(sample.completion_tokens) - (longest - soft)
        if over <= 0 < soft:
            return 0.0
        return -min(1.0, over / soft) if soft else -float(over >= 0)

    return length


def format_reward(pattern: str | re.Pattern[str]) -> Reward:
    r"""Make a reward of form: 1.0 for a completion that the regular expression matches as a whole, else 0.0.

    The completion is what the model wrote last, without white space around it; a point matches a line break as well. It
    is the format reward of DeepSeek-R1, https://arxiv.org/abs/2501.12948 (section 2.2.2), with a form of your own. An
    expression that can match in very many ways may take very long on a long completion, and hold up all others:
    `in_processes(format_reward(...))` puts an end to it. Raises `ConfigError` for one
    that is none.

    >>> from ramet.types import StopReason
    >>> reward = format_reward(r"<think>.*</think>\s*<answer>.*</answer>")
    >>> said = "<think>two and two</think>\n<answer>4</answer>\n"
    >>> [reward(Sample("", text, (), (), {}, StopReason.EOS, group=0, member=0)) for text in (said, "4")]
    [1.0, 0.0]
    """
    try:
        compiled = re.compile(pattern, re.DOTALL) if isinstance(pattern, str) else re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"format_reward: {pattern!r} is no regular expression: {error}") from error

    def form(sample: Sample) -> float:
        return float(compiled.fullmatch(sample.completion.strip()) is not None)

    return form
