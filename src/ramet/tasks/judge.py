"""From samples to outcomes: call the reward, refuse what is no reward, keep what failed as data."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import weakref
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias

from ramet.errors import RewardError
from ramet.tasks.task import Reward
from ramet.types import InvalidOutcome, Outcome, Sample


class Judge:
    """Call `reward` on each sample and turn what it says into an `Outcome`.

    A number is a score, None abstains, a mapping of names to numbers is added up, an `Outcome` keeps what it says. A
    reward that raises costs its own sample: an `Outcome.error` with the reason. A value that is no reward (not finite,
    of the wrong type, a list, or other names than before) is a mistake in the program: `RewardError`, at once, naming
    the function and the sample.

    Sync rewards run one after another, in the thread of the caller. Async ones run together, in one event loop for the
    life of the judge, on a thread of its own: a client or a semaphore may serve all calls. `close` ends that loop.

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
        self._loop: _EventLoop | None = None

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome for each sample, in order."""
        values = [self._call(sample) for sample in samples]
        pending = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
        for number, value in zip(pending, self._await([values[number] for number in pending]), strict=True):
            values[number] = value
        return [self._outcome(value, sample) for value, sample in zip(values, samples, strict=True)]

    def close(self) -> None:
        """End the event loop of the async rewards, if there is one; a later call starts another.

        Nothing is lost without it: the loop ends with the judge.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def _call(self, sample: Sample) -> Any:
        try:
            return self._reward(sample)
        except (Exception, asyncio.CancelledError) as error:  # what the user's function raises costs its own sample
            return _Raised(error)

    def _await(self, pending: Sequence[Awaitable[Any]]) -> list[Any]:
        if not pending:
            return []
        if self._loop is None:
            self._loop = _EventLoop()
        try:
            return self._loop.run(_together(pending))
        except BaseException:  # Ctrl-C: that loop may be busy, and is left to itself
            self._loop = None
            raise

    def _outcome(self, value: Any, sample: Sample) -> Outcome:
        if isinstance(value, _Raised):
            if not isinstance(value.error, (Exception, asyncio.CancelledError)):
                raise value.error
            if isinstance(value.error, InvalidOutcome):
                raise self._error(f"a valid outcome: {value.error}", sample) from value.error
            return _failure(value.error)
        if value is None:
            return Outcome.abstained(f"{self.name} returned None")
        if isinstance(value, Mapping):
            return self._named(value, sample)
        if isinstance(value, Outcome):
            score = None if value.score is None else self._number(value.score, sample, "a finite score")
            return Outcome(value.kind, score, self._parts(value.rewards, sample), str(value.reason))
        expected = "a finite number, None, a mapping of names to numbers or an Outcome"
        return Outcome.scored(self._number(value, sample, expected))

    def _named(self, value: Mapping[Any, Any], sample: Sample) -> Outcome:
        if not value:
            raise self._error(f"names with numbers, at least one: found {dict(value)!r}", sample)
        rewards = self._parts(value, sample)
        if self._names is None:
            self._names = frozenset(rewards)
        if frozenset(rewards) != self._names:
            raise self._error(f"the same names each time, {sorted(self._names)}: found {sorted(rewards)}", sample)
        return Outcome.scored(self._number(sum(rewards.values()), sample, "numbers with a finite sum"), rewards)

    def _parts(self, rewards: Mapping[Any, Any], sample: Sample) -> dict[str, float]:
        if not all(isinstance(name, str) for name in rewards):
            raise self._error(f"names (strings) with numbers: found {dict(rewards)!r}", sample)
        return {name: self._number(part, sample, f"a finite number for {name!r}") for name, part in rewards.items()}

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


class _Raised:
    """What a reward raised, told apart from an exception that it returned."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _failure(error: BaseException) -> Outcome:
    reason = f"{type(error).__name__}: {error}"
    return Outcome.timed_out(reason) if isinstance(error, TimeoutError) else Outcome.error(reason)


async def _settle(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except BaseException as error:  # an exit as well: it is for the caller's thread, once the others are done
        return _Raised(error)


async def _together(pending: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*map(_settle, pending)))


_Job: TypeAlias = tuple[Coroutine[Any, Any, list[Any]], "Future[list[Any]]"]


class _EventLoop:
    """An event loop on a daemon thread of its own; the thread ends with this object, and at the latest with Python."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=_serve, args=(self._jobs,), name="ramet judge", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._jobs.put, None)
        self._stop.atexit = False  # so late there is nobody to wait for the thread

    def run(self, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """Return what `work` returns; an interrupt of the waiting cancels it."""
        future: Future[list[Any]] = Future()
        begun: list[asyncio.Task[list[Any]]] = []

        async def cancellable() -> list[Any]:
            begun.append(asyncio.ensure_future(work))
            return await begun[0]

        self._jobs.put((cancellable(), future))
        try:
            return future.result()
        except BaseException:
            for task in begun:
                task.get_loop().call_soon_threadsafe(task.cancel)
            self._stop()
            raise

    def close(self) -> None:
        """End the thread and wait for it."""
        self._stop()
        self._thread.join()


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    with asyncio.Runner() as runner:
        while (job := jobs.get()) is not None:
            work, future = job
            try:
                future.set_result(runner.run(work))
            except BaseException as error:  # the caller is told, even of an exit
                future.set_exception(error)
            del job, work, future  # what a reward holds is not kept until the next call
