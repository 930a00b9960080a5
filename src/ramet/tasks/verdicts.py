"""From what one reward says of one sample to an outcome: every kind of verdict, and every kind of mistake."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from ramet.errors import RewardError
from ramet.types import InvalidOutcome, Outcome, Sample

FAILURES = (Exception, asyncio.CancelledError, GeneratorExit, SystemExit)
"""What a function of a task may raise that is told to whoever reads its value; Ctrl-C ends all at once."""


class Raised:
    """What a reward raised, told apart from an exception that it returned."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def settle(awaitable: Awaitable[Any]) -> Any:
    """Return what `awaitable` gives, or what it raises as a `Raised`, an exit too: it is for who reads the verdict."""
    try:
        return await awaitable
    except BaseException as error:
        return Raised(error)


class Verdicts:
    """Read the verdicts of the reward `name`: a number, None, a mapping, an `Outcome`, or what it raised.

    >>> from ramet.types import StopReason
    >>> sample = Sample("2+2=", "4", (1,), (2,), {}, StopReason.EOS, group=0, member=0)
    >>> Verdicts("mine").outcome({"right": 1.0, "short": 0.5}, sample).score
    1.5
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._names: frozenset[str] | None = None

    def outcome(self, value: Any, sample: Sample) -> Outcome:
        """Return the outcome that `value` stands for.

        Raises `RewardError` for what is no reward and for a reward that called `sys.exit`; Ctrl-C is raised as it is.
        """
        if isinstance(value, Raised):
            return self._of_error(value.error, sample)
        if value is None:
            return Outcome.abstained(f"{self.name} returned None")
        if isinstance(value, Mapping):
            return self._named(value, sample)
        if isinstance(value, Outcome):
            score = None if value.score is None else self._number(value.score, sample, "a finite score")
            return Outcome(value.kind, score, self._parts(value.rewards, sample), str(value.reason))
        expected = "a finite number, None, a mapping of names to numbers or an Outcome"
        return Outcome.scored(self._number(value, sample, expected))

    def _of_error(self, error: BaseException, sample: Sample) -> Outcome:
        if isinstance(error, SystemExit):
            raise RewardError(
                f"reward {self.name} called {exit_call(error)}, group {sample.group}, member {sample.member}: "
                "expected a value",
                hint=NO_EXIT,
            ) from error
        if not isinstance(error, FAILURES) or isinstance(error, RewardError):
            raise error
        if isinstance(error, InvalidOutcome):
            raise self.mistake(f"a valid outcome: {error}", sample) from error
        reason = f"{type(error).__name__}: {error}"
        return Outcome.timed_out(reason) if isinstance(error, TimeoutError) else Outcome.error(reason)

    def _named(self, value: Mapping[Any, Any], sample: Sample) -> Outcome:
        if not value:
            raise self.mistake(f"names with numbers, at least one: found {dict(value)!r}", sample)
        rewards = self._parts(value, sample)
        if self._names is None:
            self._names = frozenset(rewards)
        if frozenset(rewards) != self._names:
            raise self.mistake(f"the same names each time, {sorted(self._names)}: found {sorted(rewards)}", sample)
        return Outcome.scored(self._number(sum(rewards.values()), sample, "numbers with a finite sum"), rewards)

    def _parts(self, rewards: Mapping[Any, Any], sample: Sample) -> dict[str, float]:
        if not all(isinstance(name, str) for name in rewards):
            raise self.mistake(f"names (strings) with numbers: found {dict(rewards)!r}", sample)
        return {name: self._number(part, sample, f"a finite number for {name!r}") for name, part in rewards.items()}

    def _number(self, value: Any, sample: Sample, expected: str) -> float:
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
            value = value.item()
        if isinstance(value, (Sequence, set)) and not isinstance(value, (str, bytes)):
            raise self.mistake(f"one value for one sample: found a {type(value).__name__} of {len(value)}", sample)
        if not isinstance(value, numbers.Real):
            raise self.mistake(f"{expected}: found {value!r} of type {type(value).__name__}", sample)
        try:
            number = float(value)
        except OverflowError:  # a whole number may be larger than any float
            number = math.inf
        if not math.isfinite(number):
            raise self.mistake(f"{expected}: found {number}", sample)
        return number

    def mistake(self, expected: str, sample: Sample) -> RewardError:
        """Return the error that names the reward, the sample, and what was expected and found."""
        prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1].get("content", "")
        return RewardError(
            f"reward {self.name}, group {sample.group}, member {sample.member}: expected {expected}\n"
            f"  prompt ends: {str(prompt)[-80:]!r}\n  completion: {sample.completion[:80]!r}",
            hint="return None to abstain; raise to have the rollout dropped with a reason",
        )


NO_EXIT = "a task can not end the run: return None, or raise an error, which costs this rollout alone"


def exit_call(error: SystemExit) -> str:
    """Return the call that raised `error`.

    >>> exit_call(SystemExit(3)), exit_call(SystemExit())
    ('sys.exit(3)', 'sys.exit()')
    """
    return f"sys.exit({'' if error.code is None else repr(error.code)[:80]})"


def name_of(reward: Any) -> str:
    """Return what to call a reward, or another function of a task, in messages."""
    return str(getattr(reward, "__qualname__", type(reward).__qualname__))
