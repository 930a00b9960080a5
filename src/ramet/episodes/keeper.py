"""What an episode has of its own, closed once, whatever becomes of the episode."""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeVar, runtime_checkable

from ramet.concurrency import Calls, Exit, without_exits

SECONDS = 30.0
"""How long closing may take before it is given up: it holds up no run."""
GRACE = 5.0
"""How long whoever is cancelled waits for it."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@runtime_checkable
class Closing(Protocol):
    """A state that wants to be closed when its episode has been judged."""

    def close(self) -> Any:
        """Give back what it holds; it may be async."""


class Keeper:
    """Holds what a task's `begin` made, and closes it once if it has a `close` method.

    `begin` may run in a thread and come to its end when nobody waits for it any more: what it made then is
    closed there.

    >>> import io
    >>> keeper, late = Keeper(), io.StringIO()
    >>> keeper.take() is None, keeper.keep(late) is late, late.closed
    (True, True, True)
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: Any = None
        self._over = False

    def keep(self, made: _T) -> _T:
        """Hold `made` until `take`, or close it where that was called already."""
        with self._lock:
            over = self._over
            if not over:
                self._kept = made
        if over and isinstance(made, Closing):
            self._close_late(made)
        return made

    def take(self) -> Any:
        """Hand out what is held, to be closed, and hold nothing from now on."""
        with self._lock:
            self._over = True
            kept, self._kept = self._kept, None
        return kept

    async def close(self, call: Calls) -> None:
        """Close what is held; where that fails nothing is lost but what it held, and a warning is logged.

        Whoever is cancelled meanwhile, as all are where one of them ends the run, waits for the end of it first.
        """
        kept = self.take()
        if not isinstance(kept, Closing):
            return
        closing = asyncio.ensure_future(without_exits(partial(_close, kept, call)))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing}, timeout=GRACE)
            raise
        except Exit as exit_:
            raise exit_.error from None

    def _close_late(self, made: Closing) -> None:
        try:
            if inspect.iscoroutinefunction(made.close):
                raise RuntimeError("it came too late for the event loop that would await its close")
            made.close()
        except Exception as error:
            _log.warning("the state of an episode could not be closed: %s: %s", type(error).__name__, error)


async def _close(kept: Closing, call: Calls) -> None:
    try:
        async with asyncio.timeout(SECONDS):
            await call(kept.close)
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        _log.warning("the state of an episode could not be closed: %s: %s", type(error).__name__, error)
