"""Ctrl-C as a question that a loop can ask."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interrupts(heard: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C ask for an end after the step that is running; the second one interrupts at once.

    `heard` is called on the first one.
    """
    asked = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        heard()

    previous = signal.signal(signal.SIGINT, ask) or signal.SIG_DFL
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
