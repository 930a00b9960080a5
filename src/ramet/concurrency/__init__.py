"""Threads, event loops and processes: how things run at once, and how they end."""

from ramet.concurrency.calls import Calling, Calls, by_threads
from ramet.concurrency.clock import Clock, standing
from ramet.concurrency.event_loop import EventLoop, Here
from ramet.concurrency.processes import NotLoaded, Processes
from ramet.concurrency.threads import Threads
from ramet.concurrency.together import Exit, cancelled, together, without_exits

__all__ = [
    "Calling",
    "Calls",
    "Clock",
    "EventLoop",
    "Exit",
    "Here",
    "NotLoaded",
    "Processes",
    "Threads",
    "by_threads",
    "cancelled",
    "standing",
    "together",
    "without_exits",
]
