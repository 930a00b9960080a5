"""Try again, later and later."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from ramet.errors import ServerError
from ramet.http.exchange import RefusedError, TransientError
from ramet.http.outage import Outage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request that failed in passing is sent again, and how long to wait before it is.

    `count` tries follow the first. Before the n-th of them come `first` × 2^(n-1) seconds, at most `longest`, of which
    up to half is left out, so that rows which failed together do not come back together; which part is a function of
    the row's draws. Where the server says how long to wait, that is waited, if it is longer and at most `longest`.

    >>> Retries(first=1.0).wait(3, spread=0.0), Retries(first=1.0).wait(3, spread=1.0)
    (4.0, 2.0)
    """

    count: int = 5
    first: float = 0.5
    longest: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ValueError(f"count must be a whole number from 0 on: found {self.count!r}")
        if not (math.isfinite(self.first) and math.isfinite(self.longest) and 0 <= self.first <= self.longest):
            raise ValueError(f"waits must be finite, 0 <= first <= longest: found {self.first}, {self.longest}")

    def wait(self, number: int, *, spread: float, after: str | None = None) -> float:
        """Return the seconds before the `number`-th try again (from 1); `after` is a server's Retry-After."""
        planned = min(self.first * 2.0 ** min(number - 1, 60), self.longest) * (1 - spread / 2)
        return max(planned, min(seconds_of(after), self.longest))


async def sleep(seconds: float) -> None:
    """Wait in the time of the running event loop."""
    await asyncio.sleep(seconds)


async def with_retries(
    ask: Callable[[], Awaitable[T]], retries: Retries, address: str, outage: Outage | None = None
) -> T:
    """Return what `ask` returns, once it does; `address` decides how waits are spread.

    Where the server is away, as `outage` finds out, it is waited for. A try that came to nothing because nobody took
    it is none; one that broke off in the middle counts, for it may be what ends the server.

    Raises what is no `TransientError` at once, a `ServerError` after the last try, and `ServerGone` where the server
    stays away.
    """
    number = 1
    while True:
        try:
            found = await ask()
        except TransientError as error:
            failed = error
        except RefusedError:
            if outage is not None:
                outage.heard()
            raise
        else:
            if outage is not None:
                outage.heard()
            return found
        waited = outage is not None and failed.away and await outage.over(failed)
        if waited and not failed.sent:
            continue
        if number > retries.count:
            tries = "1 try" if number == 1 else f"{number} tries"
            raise ServerError(f"{failed.message} ({tries})", hint=failed.hint) from failed
        if not waited:
            await sleep(retries.wait(number, spread=_spread(address, number), after=failed.after))
        number += 1


def seconds_of(after: str | None) -> float:
    """Return what a Retry-After header asks for, in seconds: a number or a date; 0 where it says neither.

    >>> seconds_of("7"), seconds_of("soon"), seconds_of("Wed, 21 Oct 2015 07:28:00 GMT"), seconds_of(None)
    (7.0, 0.0, 0.0, 0.0)
    """
    if after is None:
        return 0.0
    try:
        number = float(after)
        return max(number, 0.0) if math.isfinite(number) else 0.0
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(after)
    except (ValueError, TypeError):
        return 0.0
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max((date - datetime.now(UTC)).total_seconds(), 0.0)


def _spread(address: str, number: int) -> float:
    digest = hashlib.blake2b(f"{address}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32
