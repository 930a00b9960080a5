"""Threads that are daemons: how many there are, how they end, and that nobody waits for one to begin."""

from __future__ import annotations

import threading

import pytest

from ramet.concurrency import Threads


def test_a_thread_that_is_free_takes_the_next_call() -> None:
    threads = Threads(2)
    for number in range(5):
        assert threads.submit(lambda n: n, number).result() == number
        threads.submit(threading.Event().is_set).result()
    assert len(threads._room.threads) == 1
    threads.shutdown()
    assert not threads._room.threads[0].is_alive()


def test_what_waits_for_a_thread_is_dropped_once_it_is_late() -> None:
    begun, never, ran = threading.Event(), threading.Event(), []

    def block() -> None:
        begun.set()
        never.wait(30)

    threads = Threads(1)
    first = threads.submit(block)
    assert begun.wait(30)
    second = threads.submit(ran.append, 1)
    assert second.cancel()
    third = threads.submit(ran.append, 2)
    threads.shutdown(wait=False, cancel_futures=True)
    assert third.cancelled()
    never.set()
    assert first.result() is None
    assert ran == []


def test_whoever_submits_waits_for_no_thread_to_begin() -> None:
    """All calls run at once, beside a thread that computes: the lock is Python's, and no thread gives it up."""
    together = threading.Barrier(33)
    end = threading.Event()

    def compute() -> None:
        while not end.is_set():
            sum(range(1000))

    busy = threading.Thread(target=compute)
    busy.start()
    threads = Threads(32)
    try:
        futures = [threads.submit(together.wait, 60) for _ in range(32)]
        together.wait(60)
        assert len({future.result() for future in futures}) == 32
    finally:
        end.set()
        busy.join()
        threads.shutdown()
    assert len(threads._room.threads) == 32
    assert not any(thread.is_alive() for thread in (threads._room.beginner, *threads._room.threads))


def test_no_more_threads_than_allowed() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def count() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.002)
        with lock:
            running -= 1

    with Threads(3) as threads:
        for future in [threads.submit(count) for _ in range(30)]:
            future.result()
    assert 1 <= most <= 3
    assert len(threads._room.threads) <= 3


def test_a_machine_without_more_threads_is_said_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread is not threads._room.beginner:
            raise RuntimeError("can't start new thread")
        start(thread)

    threads = Threads(2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(int).result(30)
    assert threads.submit(int, 3).result(30) == 3
    threads.shutdown()


def test_threads_that_are_closed_take_no_more() -> None:
    threads = Threads(1)
    threads.shutdown()
    threads.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(int)
    with pytest.raises(ValueError, match="at least 1 thread: found 0"):
        Threads(0)
