"""Ctrl-C as a question that a loop can ask, and what a scheduler sends in its place."""

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


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Take SIGTERM, with which a scheduler ends a process, for Ctrl-C; outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _as_interrupt(number: int, frame: Any) -> None:
    """Do what Ctrl-C does; where that is ignored, as behind `&` in a script, end at once."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
