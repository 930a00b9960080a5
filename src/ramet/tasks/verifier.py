"""math-verify in processes of its own, for it can take for ever, and only a process can be stopped."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable
from typing import Any

from ramet.concurrency import Clock, Processes
from ramet.errors import ConfigError

LONGEST = 1000
"""Characters of an answer that is still compared: a longer one is wrong."""

PROCESSES = 2
"""How many compare at once: while one is at an answer that takes for ever, the others are compared."""


class Verifier:
    """Compare mathematical answers with math-verify; a comparison may take `seconds`, once a process is free for it.

    Up to `PROCESSES` processes are started when they are needed, and anew after a comparison that took too long, which
    ends its own. They end with this object, with `close`, or with Python. Any event loop may compare.

    Raises `ConfigError` without the package math-verify.

    >>> import asyncio
    >>> verifier = Verifier()
    >>> asyncio.run(verifier.same("1/2", "0.5")), asyncio.run(verifier.same("1/2", "2"))
    (True, False)
    >>> verifier.close()
    """

    def __init__(self, seconds: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the task maths needs the package math-verify", hint="pip install 'ramet[tasks]'")
        self.seconds = seconds
        self._lock = threading.Lock()
        self._running: Processes | None = None

    async def same(self, right: str, found: str) -> bool:
        """Return whether `found` says the same as `right`, both LaTeX or plain.

        What can not be read is not the same, nor is what has more than `LONGEST` characters. Raises `TimeoutError`
        where the comparison took too long.
        """
        if len(found) > LONGEST:
            return False
        running = self._opened()
        clock = Clock(self.seconds)
        work = clock.start(running.call(running.pickled((right, found))))
        try:
            if await clock.in_time(work):
                return bool(work.result())
        finally:
            work.cancel()
        raise TimeoutError(f"math-verify took longer than {self.seconds:g} s for {found[:80]!r}")

    def close(self) -> None:
        """End the processes; a later comparison starts others."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def _opened(self) -> Processes:
        with self._lock:
            if self._running is None:
                self._running = Processes(_comparing(), PROCESSES, "math-verify", ("math_verify",))
            return self._running


def _comparing() -> Callable[[tuple[str, str]], bool]:
    """Return a function that is copied to a process, which so loads neither torch nor anything else of ramet."""

    def same(pair: tuple[str, str]) -> bool:
        library = importlib.import_module("math_verify")
        logging.disable(logging.CRITICAL)
        kinds = [library.LatexExtractionConfig(), library.ExprExtractionConfig()]

        def read(text: str) -> Any:
            found = library.parse("$" + text + "$", kinds, parsing_timeout=None)
            return found or library.parse(text, kinds, parsing_timeout=None)

        try:
            return bool(library.verify(read(pair[0]), read(pair[1]), timeout_seconds=None))
        except Exception:  # it raises whatever sympy does
            return False

    return same
