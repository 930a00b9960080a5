"""Several coroutines at once: the first error ends the others, and an exit ends no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(works: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Return what the coroutines of `works` return, in order; the first error ends the others, and is raised then."""
    tasks = [asyncio.ensure_future(without_exits(work)) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except Exit as exit_:
        raise exit_.error from None
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what is not done and wait for its end; what it raises by then is of no interest.

    What has been told to end already is not told again: that would break off its cleaning up.
    """
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Exit(Exception):
    """An exit on its way through tasks: one that raised it as it is would end the loop under all others."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def without_exits(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what the coroutine `work()` returns; raise an exit as an `Exit`."""
    try:
        return await work()
    except (KeyboardInterrupt, SystemExit) as error:
        raise Exit(error) from error
