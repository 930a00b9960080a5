"""A server that is away is waited for: by one look at a time, whoever asks it, and not for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ramet.errors import ServerError, ServerGone
from ramet.http.exchange import TransientError

Ask: TypeAlias = Callable[[str, str, Mapping[str, Any] | None], Awaitable[Any]]
"""Sends method, path and body, and returns the answer."""

FIRST, LONGEST = 0.5, 15.0
"""Seconds between two looks: they double from the first to the longest."""
LOOK = 30.0
"""Seconds within which a server that is there says so."""
LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Here:
    """What belongs to one event loop: the looks under way, for how many, and how long it has waited for an answer."""

    look: asyncio.Task[bool] | None = None
    waiting: int = 0
    waited: float = 0.0


class Outage:
    """Wait for a server that is away, up to `limit` seconds; with 0 nothing is waited for.

    It is there when each of `paths`, asked by `ask`, has an answer of its own: any but those of a proxy with nobody
    behind it. Only a server that has been `heard` once is waited for: where there never was one, the address is wrong.
    Seconds count from the last answer to anything, so that a server which comes back and dies again and again, and
    answers nothing in between, is not waited for without end.

    Whoever waits in an event loop shares its looks. A warning is logged when the waiting begins, and a line when the
    server is back.
    """

    def __init__(self, ask: Ask, where: str, paths: Sequence[str], limit: float) -> None:
        self._ask, self._where, self._paths, self._limit = ask, where, tuple(paths), limit
        self._lock = threading.Lock()
        self._here: dict[asyncio.AbstractEventLoop, _Here] = {}
        self._away: set[asyncio.AbstractEventLoop] = set()
        self._known = False
        self.count = 0
        """How many outages there were."""

    def heard(self) -> None:
        """Take note of an answer."""
        self._known = True
        self._of_this_loop().waited = 0.0

    async def over(self, error: TransientError) -> bool:
        """Wait until the server is there; return whether it was away. `error` is what came of asking it.

        Raises `ServerGone` where it stays away for longer than the limit.
        """
        if not (self._known and self._limit):
            return False
        here = self._of_this_loop()
        if here.look is None or here.look.done():
            here.look = asyncio.create_task(self._wait(here, error))
            here.look.add_done_callback(_take_note)
        look = here.look
        here.waiting += 1
        try:
            return await asyncio.shield(look)
        finally:
            here.waiting -= 1
            if not here.waiting:  # nobody wants to know any more, and whoever comes next looks anew
                look.cancel()
                here.look = None

    def _of_this_loop(self) -> _Here:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._here:
                self._here = {known: here for known, here in self._here.items() if not known.is_closed()}
                self._away = {known for known in self._away if not known.is_closed()}
                self._here[loop] = _Here()
            return self._here[loop]

    async def _wait(self, here: _Here, error: TransientError) -> bool:
        if await self._there():
            return False
        loop = asyncio.get_running_loop()
        self._begin(loop, error)
        pause, back = FIRST, False
        try:
            while not back:
                if here.waited >= self._limit:
                    here.waited = 0.0  # whoever asks once more may wait once more
                    raise ServerGone(
                        f"{self._where} has been away for {self._limit:g} s: {error.message}",
                        hint="start it anew; a run goes on from its last checkpoint with resume",
                    )
                began = loop.time()
                await asyncio.sleep(min(pause, self._limit - here.waited))
                back = await self._there()
                here.waited += loop.time() - began
                pause = min(2 * pause, LONGEST)
        finally:
            self._end(loop, here.waited if back else None)
        return True

    async def _there(self) -> bool:
        """Ask each of the paths; any answer of the server's own will do."""
        for path in self._paths:
            try:
                async with asyncio.timeout(LOOK):
                    await self._ask("GET", path, None)
            except TimeoutError:
                return False
            except TransientError as error:
                if error.away:
                    return False
            except ServerError:
                pass
        return True

    def _begin(self, loop: asyncio.AbstractEventLoop, error: TransientError) -> None:
        with self._lock:
            first = not self._away
            self._away.add(loop)
            self.count += first
        if first:
            LOG.warning("waiting for %s, up to %g s: %s", self._where, self._limit, error.message)

    def _end(self, loop: asyncio.AbstractEventLoop, waited: float | None) -> None:
        with self._lock:
            self._away.discard(loop)
            last = not self._away
        if last and waited is not None:
            LOG.warning("%s is back, after %.3g s", self._where, waited)


def _take_note(task: asyncio.Task[bool]) -> None:
    """Take note of how looks ended, for whoever waited may be gone."""
    if not task.cancelled():
        task.exception()
