"""A gate that many pass at once and that closes until all who passed are out again, over any number of event loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable


class Gate:
    """Let requests in; hold new ones back and wait for those inside while the weights change.

    Requests may come from event loops of several threads.

    >>> gate = Gate()
    >>> async def look() -> tuple[bool, bool]:
    ...     async with gate.inside():
    ...         inside = gate.empty
    ...     async with gate.closed():
    ...         return inside, gate.empty
    >>> asyncio.run(look())
    (False, True)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._inside = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def empty(self) -> bool:
        """True while nobody is inside."""
        return self._inside == 0

    @contextlib.asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Pass the gate, once it is open, and be inside for the block."""
        await self._until(self._enter)
        try:
            yield
        finally:
            self._change(inside=-1)

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Close the gate, wait until nobody is inside, and keep it closed for the block; one closes it at a time."""
        await self._until(self._close)
        try:
            await self._until(lambda: self._inside == 0)
            yield
        finally:
            self._change(reopen=True)

    def _enter(self) -> bool:
        if not self._closed:
            self._inside += 1
            return True
        return False

    def _close(self) -> bool:
        if not self._closed:
            self._closed = True
            return True
        return False

    def _change(self, *, inside: int = 0, reopen: bool = False) -> None:
        with self._lock:
            self._inside += inside
            self._closed = self._closed and not reopen
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # that loop has ended, and whoever waited in it
                loop.call_soon_threadsafe(_wake, future)

    async def _until(self, attempt: Callable[[], bool]) -> None:
        """Wait until `attempt`, which is called under the lock, returns True."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if attempt():
                    return
                entry = (loop, loop.create_future())
                self._waiting.append(entry)
            try:
                await entry[1]
            finally:
                with self._lock:
                    if entry in self._waiting:
                        self._waiting.remove(entry)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
