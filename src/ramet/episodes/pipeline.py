"""Rollouts of the steps ahead while a step is trained on, under a bound on how old their weights may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from ramet.concurrency import EventLoop, Exit, Here, cancelled, without_exits

Batch = TypeVar("Batch")


class Pipeline(Generic[Batch]):
    """Collect and train, `staleness` steps apart at most.

    Steps count from 0, and the weights after n steps are version n. `collect(step, version)` begins once the weights
    are `version`, at least `step - staleness`, and returns the batch of the step; those of several steps may run at
    once. `train(step, batch)` makes a step, and returns when the weights of version `step + 1` are those that are
    sampled from. So no token of a step was sampled by weights older than version `step - staleness`, and with 0 the
    order is that of a loop which collects, trains, collects, trains.

    >>> async def collect(step: int, version: int) -> str:
    ...     return f"step {step} from version {version}"
    >>> async def train(step: int, batch: str) -> None:
    ...     seen.append(batch)
    >>> seen: list[str] = []
    >>> asyncio.run(Pipeline(collect, train, staleness=1).run(0, 3))
    3
    >>> seen
    ['step 0 from version 0', 'step 1 from version 0', 'step 2 from version 1']
    """

    def __init__(
        self,
        collect: Callable[[int, int], Coroutine[Any, Any, Batch]],
        train: Callable[[int, Batch], Coroutine[Any, Any, object]],
        *,
        staleness: int,
    ) -> None:
        if staleness < 0:
            raise ValueError(f"staleness must be at least 0 steps: found {staleness}")
        self._collect, self._train, self._staleness = collect, train, staleness

    async def run(self, first: int, steps: int, *, ending: Callable[[], bool] = lambda: False) -> int:
        """Make the steps `first` to `steps - 1`, or until `ending()` says so between two; return the next step.

        What `collect` of a step raises is raised when the steps before it are trained on, as in a loop; what `train`
        raises, at once. Either way what else is under way is cancelled, and has ended when this does.
        """
        ahead: dict[int, asyncio.Task[Batch]] = {}
        try:
            for step in range(first, steps):
                if ending():
                    return step
                for later in range(step, min(step + self._staleness + 1, steps)):
                    if later not in ahead:
                        ahead[later] = asyncio.ensure_future(without_exits(partial(self._collect, later, step)))
                await self._train(step, await ahead.pop(step))
            return max(first, steps)
        except Exit as exit_:
            raise exit_.error from None
        finally:
            await cancelled(list(ahead.values()))


def in_steps(
    loop: EventLoop,
    collect: Callable[[int], Coroutine[Any, Any, Batch]],
    train: Callable[[int, Batch], object],
    first: int,
    steps: int,
    *,
    staleness: int,
    ending: Callable[[], bool] = lambda: False,
) -> None:
    """Make the steps `first` to `steps - 1` for a caller who waits: `collect` runs in `loop`, `train` in this thread.

    See `Pipeline` for what `staleness` means and when an error is raised.

    >>> async def collect(step: int) -> int:
    ...     return step * step
    >>> seen: list[int] = []
    >>> with EventLoop() as loop:
    ...     in_steps(loop, collect, lambda step, batch: seen.append(batch), 1, 4, staleness=1)
    >>> seen
    [1, 4, 9]
    """

    async def run(here: Here) -> int:
        pipeline = Pipeline(
            lambda step, _: collect(step), lambda step, batch: here(partial(train, step, batch)), staleness=staleness
        )
        return await pipeline.run(first, steps, ending=ending)

    loop.run(run)
