"""Turns that are dealt out: of several episodes one goes on at a time, round after round."""

from __future__ import annotations

import asyncio


class Turns:
    """Deal out turns to the episodes 0 to `count` - 1, in this order, and again.

    Nobody is given a turn before all that are still going wait for theirs: whoever has one plays it to its end first,
    with all that comes back. So what happens is the same each time, whatever takes how long.

    >>> async def play(number: int, turns: Turns, said: list[int]) -> None:
    ...     for _ in range(3 - number):
    ...         await turns.take(number)
    ...         said.append(number)
    ...     turns.leave()
    >>> async def game() -> list[int]:
    ...     said, turns = [], Turns(3)
    ...     await asyncio.gather(*(play(number, turns, said) for number in (2, 0, 1)))
    ...     return said
    >>> asyncio.run(game())
    [0, 1, 2, 0, 1, 0]
    """

    def __init__(self, count: int) -> None:
        self._going = count
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._last = -1

    async def take(self, number: int) -> None:
        """Wait for the turn of an episode."""
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._deal()
        try:
            await turn
        finally:
            if self._waiting.get(number) is turn:  # who gave up waits no more
                del self._waiting[number]

    def leave(self) -> None:
        """Say that an episode takes no more turns."""
        self._going -= 1
        self._deal()

    def _deal(self) -> None:
        if not self._waiting or len(self._waiting) < self._going:
            return
        later = [number for number in self._waiting if number > self._last]
        self._last = min(later or self._waiting)
        turn = self._waiting.pop(self._last)
        if not turn.done():
            turn.set_result(None)
