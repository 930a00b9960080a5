"""From samples to outcomes: call the reward, refuse what is no reward, keep what failed as data."""

from __future__ import annotations

import asyncio
import inspect
import math
import weakref
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

from ramet.concurrency import Clock, EventLoop, Threads, by_threads
from ramet.errors import RewardError
from ramet.tasks.copies import own_sample
from ramet.tasks.task import Reopening, Reward
from ramet.tasks.verdicts import FAILURES, Raised, Verdicts, name_of, settle
from ramet.types import Outcome, Sample

THREADS = 512
"""How many sync rewards run at once at the most, those that never end included."""


class Judge:
    """Call `reward` on each sample and turn what it says into an `Outcome`.

    A number is a score, None abstains, a mapping of names to numbers is added up, an `Outcome` keeps what it says. A
    reward that raises costs its own sample: an `Outcome.error` with the reason. A value that is no reward (not finite,
    of the wrong type, a list, or other names than before) is a mistake in the program, and so is a call of `sys.exit`:
    `RewardError`, at once, naming the function and the sample. Each call sees copies of the row and the messages.

    Called with samples, sync rewards run one after another, in the thread of the caller. Async ones run together, in
    one event loop for the life of the judge, on a thread of its own: a client or a semaphore may serve all calls.
    `close` ends that loop, and closes a reward that says it may be closed: a `Reopening`, as `in_processes` makes.

    `judged` judges one sample inside an event loop that is running, beside whatever else runs there: a sync reward in a
    thread of its own, at most `threads` at once (0: in the loop's thread, which suits one that takes no time). A reward
    that takes longer than `seconds` costs its own sample, which has then timed out; an async one is cancelled, a sync
    one is left to end by itself, for a thread can not be stopped. (One that computes holds up all others: see
    `in_processes`.) With `seconds` a call with samples judges each of
    them in this way.

    >>> from ramet.types import StopReason
    >>> judge = Judge(lambda sample: float(sample.completion == "4"))
    >>> sample = Sample("2+2=", "4", (1,), (2,), {}, StopReason.EOS, group=0, member=0)
    >>> judge([sample])[0].score
    1.0
    >>> asyncio.run(judge.judged(sample)).score
    1.0
    """

    def __init__(self, reward: Reward, *, seconds: float | None = None, threads: int = 8) -> None:
        if not callable(reward):
            raise RewardError(f"a reward must be a function of a sample: found {type(reward).__name__}")
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds must be above 0, or None for no limit: found {seconds}")
        if threads < 0:
            raise ValueError(f"threads must be at least 0: found {threads}")
        self._reward = reward
        self.name = name_of(reward)
        self.seconds = seconds
        self._at_once = threads
        self._threads = Threads(THREADS, "ramet reward")
        self._in_loop = threads == 0 or _is_async(reward)
        self._verdicts = Verdicts(self.name)
        self._left: set[asyncio.Future[Any]] = set()  # cancelled, and not yet ended
        self._loop: EventLoop | None = None
        # A semaphore belongs to the loop in which somebody first waits for it.
        self._seats: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome for each sample, in order."""
        if self.seconds is not None:
            values = self._await([self._timed(sample) for sample in samples])
            return [self._verdicts.outcome(value, sample) for value, sample in zip(values, samples, strict=True)]
        values = [_call(self._reward, sample) for sample in samples]
        pending = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
        for number, value in zip(pending, self._await([values[number] for number in pending]), strict=True):
            values[number] = value
        return [self._verdicts.outcome(value, sample) for value, sample in zip(values, samples, strict=True)]

    async def judged(self, sample: Sample) -> Outcome:
        """Return the outcome of one sample; other work of the running loop goes on meanwhile."""
        return self._verdicts.outcome(await self._timed(sample), sample)

    def close(self) -> None:
        """End what runs for it, and what a `Reopening` reward has open; a later call starts all of it again.

        Nothing is lost without it: the event loop and the threads end with the judge.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        threads, self._threads = self._threads, Threads(THREADS, "ramet reward")
        threads.shutdown()
        if isinstance(self._reward, Reopening):
            self._reward.close()

    def _await(self, pending: Sequence[Awaitable[Any]]) -> list[Any]:
        if not pending:
            return []
        if self._loop is None:
            self._loop = EventLoop("ramet judge")
        try:
            return self._loop.run(lambda here: _together(pending))
        except BaseException:  # Ctrl-C: that loop may be busy, and is left to itself
            self._loop = None
            raise

    async def _timed(self, sample: Sample) -> Any:
        """Return the verdict on a sample, or a `Raised`; the limit counts from when the reward is called."""
        if self._in_loop:
            return await self._limited(sample)
        async with self._seats.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._at_once)):
            return await self._limited(sample)

    async def _limited(self, sample: Sample) -> Any:
        clock = Clock(self.seconds)
        work = clock.start(self._settled(sample))
        try:
            if await clock.in_time(work):
                return work.result()
        finally:
            if not work.done():
                self._left.add(work)
                work.add_done_callback(self._left.discard)
                work.cancel()
        return Raised(TimeoutError(f"{self.name} took longer than {self.seconds:g} s"))

    async def _settled(self, sample: Sample) -> Any:
        call = partial(_call_to_the_end, self._reward, sample)
        value = call() if self._in_loop else await by_threads(self._threads)(call)
        return await settle(value) if inspect.isawaitable(value) else value


def _is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


def _call(reward: Reward, sample: Sample) -> Any:
    try:
        return reward(own_sample(sample))
    except FAILURES as error:  # for whoever reads the verdict
        return Raised(error)


def _call_to_the_end(reward: Reward, sample: Sample) -> Any:
    try:
        return _call(reward, sample)
    except BaseException as error:  # Ctrl-C is for whoever waits for the outcome
        return Raised(error)


async def _together(pending: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*map(settle, pending)))
