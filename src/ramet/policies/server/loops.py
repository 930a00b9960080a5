"""Coroutines for callers that have no event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], instead: str) -> T:
    """Run a coroutine to its end; raise `RuntimeError` in a thread whose loop would wait for itself.

    `instead` says what to await there.
    """
    try:
        asyncio.get_running_loop()
        free = False
    except RuntimeError:
        free = True
    if free:
        return asyncio.run(coroutine)
    coroutine.close()
    raise RuntimeError(f"this would hold up the event loop that runs in this thread: await {instead} in its place")


def as_they_come(produce: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]) -> Iterator[T]:
    """Yield what `produce(put)` puts, while it runs in an event loop on a thread of its own.

    What it raises is raised here. An iterator that is closed before the end cancels it, and waits until it has ended.

    >>> async def count(put):
    ...     for number in range(3):
    ...         put(number)
    >>> list(as_they_come(count))
    [0, 1, 2]
    """
    outbox: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()
    task = loop.create_task(produce(lambda item: outbox.put((item,))))

    def work() -> None:
        end: BaseException | None = None
        try:
            loop.run_until_complete(task)
        except BaseException as error:  # it is raised where the items are taken
            end = error
        finally:
            runner.close()
            outbox.put(end)

    thread = threading.Thread(target=work, name="ramet-server", daemon=True)
    thread.start()
    try:
        while isinstance(found := outbox.get(), tuple):
            yield found[0]
        if found is not None:
            raise found
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
