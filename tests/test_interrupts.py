"""Ctrl-C and what a scheduler sends in its place."""

from __future__ import annotations

import signal
import threading

import pytest

from ramet.interrupts import interrupts, termination_as_interrupt


def test_a_scheduler_is_heard_as_ctrl_c_is_and_the_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    heard: list[int] = []
    with termination_as_interrupt(), interrupts(lambda: heard.append(1)) as asked:
        assert not asked()
        signal.raise_signal(signal.SIGTERM)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert heard == [1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_without_a_loop_that_asks_it_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), termination_as_interrupt():
        signal.raise_signal(signal.SIGTERM)


def test_in_another_thread_nothing_changes() -> None:
    found: list[object] = []

    def work() -> None:
        with termination_as_interrupt():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


def test_where_ctrl_c_is_ignored_a_scheduler_is_heard() -> None:
    """A command that a script starts with & ignores Ctrl-C from its beginning."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), termination_as_interrupt():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
