"""From samples to outcomes: call the reward, refuse what is no reward, keep what failed as data."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ramet.errors import RewardError
from ramet.tasks.task import Reward
from ramet.types import Outcome, Sample


class Judge:
    """Call `reward` on each sample and turn what it says into an `Outcome`.

    A number is a score, None abstains, a mapping of names to numbers is added up, an `Outcome` stays as it is. A reward
    that raises costs its own sample: an `Outcome.error` with the reason. A value that is no reward (not finite, of the
    wrong type, a list, or other names than before) is a mistake in the program: `RewardError`, at once, naming the
    function and the sample. Sync rewards run one after another, async ones together.

    >>> from ramet.types import StopReason
    >>> judge = Judge(lambda sample: float(sample.completion == "4"))
    >>> sample = Sample("2+2=", "4", (1,), (2,), {}, StopReason.EOS, group=0, member=0)
    >>> judge([sample])[0].score
    1.0
    """

    def __init__(self, reward: Reward) -> None:
        if not callable(reward):
            raise RewardError(f"a reward must be a function of a sample: found {type(reward).__name__}")
        self._reward = reward
        self.name = getattr(reward, "__qualname__", type(reward).__qualname__)
        self._names: frozenset[str] | None = None

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome for each sample, in order."""
        values = [self._call(sample) for sample in samples]
        pending = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
        for number, value in zip(pending, _await_all([values[number] for number in pending]), strict=True):
            values[number] = value
        return [self._outcome(value, sample) for value, sample in zip(values, samples, strict=True)]

    def _call(self, sample: Sample) -> Any:
        try:
            return self._reward(sample)
        except Exception as error:  # whatever the user's function raises costs this sample and no other
            return _failure(error)

    def _outcome(self, value: Any, sample: Sample) -> Outcome:
        if isinstance(value, (Exception, asyncio.CancelledError)):
            return _failure(value)
        if isinstance(value, Outcome):
            return value
        if value is None:
            return Outcome.abstained(f"{self.name} returned None")
        if isinstance(value, Mapping):
            return self._named(value, sample)
        expected = "a finite number, None, a mapping of names to numbers or an Outcome"
        return Outcome.scored(self._number(value, sample, expected))

    def _named(self, value: Mapping[Any, Any], sample: Sample) -> Outcome:
        if not value or not all(isinstance(name, str) for name in value):
            raise self._error(f"names (strings) with numbers, at least one: found {dict(value)!r}", sample)
        rewards = {name: self._number(part, sample, f"a finite number for {name!r}") for name, part in value.items()}
        if self._names is None:
            self._names = frozenset(rewards)
        if frozenset(rewards) != self._names:
            raise self._error(f"the same names each time, {sorted(self._names)}: found {sorted(rewards)}", sample)
        return Outcome.scored(self._number(sum(rewards.values()), sample, "numbers with a finite sum"), rewards)

    def _number(self, value: Any, sample: Sample, expected: str) -> float:
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
            value = value.item()
        if isinstance(value, (Sequence, set)) and not isinstance(value, (str, bytes)):
            raise self._error(f"one value for one sample: found a {type(value).__name__} of {len(value)}", sample)
        if not isinstance(value, numbers.Real):
            raise self._error(f"{expected}: found {value!r} of type {type(value).__name__}", sample)
        try:
            number = float(value)
        except OverflowError:  # a whole number may be larger than any float
            number = math.inf
        if not math.isfinite(number):
            raise self._error(f"{expected}: found {number}", sample)
        return number

    def _error(self, text: str, sample: Sample) -> RewardError:
        prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1].get("content", "")
        return RewardError(
            f"reward {self.name}, group {sample.group}, member {sample.member}: expected {text}\n"
            f"  prompt ends: {str(prompt)[-80:]!r}\n  completion: {sample.completion[:80]!r}",
            hint="return None to abstain; raise to have the rollout dropped with a reason",
        )


def _failure(error: BaseException) -> Outcome:
    reason = f"{type(error).__name__}: {error}"
    return Outcome.timed_out(reason) if isinstance(error, TimeoutError) else Outcome.error(reason)


def _await_all(pending: Sequence[Awaitable[Any]]) -> list[Any]:
    """Wait for all together; an exception becomes the result of its own. Works inside a running event loop as well."""
    if not pending:
        return []

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*pending, return_exceptions=True))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(gather())
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: asyncio.run(gather())).result()
