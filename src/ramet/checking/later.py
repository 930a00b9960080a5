"""A clock that is put forward, so that what depends on the time of day or the date comes out otherwise."""

from __future__ import annotations

import datetime
import time
from typing import Any

DAYS = 400
SHIFT = datetime.timedelta(days=DAYS, hours=5, minutes=7, seconds=11)
"""By how much: no part of a date or a time stays as it is."""
_DATE, _MOMENT = datetime.date, datetime.datetime


class _SameInstances(type):
    """A class of which whatever is an instance of the class above it is one."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[1])


class _LaterDate(datetime.date, metaclass=_SameInstances):
    def __new__(cls, *given: Any, **named: Any) -> Any:
        return _DATE(*given, **named)

    @classmethod
    def today(cls) -> Any:
        return (_MOMENT.now() + SHIFT).date()


class _LaterMoment(datetime.datetime, metaclass=_SameInstances):
    def __new__(cls, *given: Any, **named: Any) -> Any:
        return _MOMENT(*given, **named)

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _MOMENT.now(tz) + SHIFT

    @classmethod
    def today(cls) -> Any:
        return _MOMENT.now() + SHIFT

    @classmethod
    def utcnow(cls) -> Any:
        return _MOMENT.now(datetime.UTC).replace(tzinfo=None) + SHIFT


def put_forward() -> None:
    """Put the clocks of `time` and `datetime` forward by `SHIFT`, in the whole process and for good.

    Not those that only measure how long something takes. Who imported a function of theirs by name before still has
    the one that was.
    """
    seconds = SHIFT.total_seconds()
    real = {name: getattr(time, name) for name in ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime")}
    now: dict[str, Any] = {
        "time": lambda: real["time"]() + seconds,
        "time_ns": lambda: real["time_ns"]() + int(seconds * 1e9),
        "strftime": lambda form, *given: real["strftime"](form, *(given or (time.localtime(),))),
    }
    for name in ("localtime", "gmtime", "ctime"):
        now[name] = lambda given=None, name=name: real[name](time.time() if given is None else given)
    for name, function in now.items():
        setattr(time, name, function)
    for name, later in (("date", _LaterDate), ("datetime", _LaterMoment)):
        setattr(datetime, name, later)
