"""A policy in the process for rows that ask one by one: requests that wait go in together."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self

from ramet.errors import ModelError
from ramet.policies.policy import Policy
from ramet.types import Completion, Request

PATIENCE = 0.02
"""How many seconds pass after a request before its batch goes in, where other rows may still ask."""


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A request and whoever waits for its answer."""

    request: Request
    future: asyncio.Future[Completion]


class Gathered:
    """Let `policy` answer rows that ask one by one, in an event loop.

    Requests that wait go in together: at once when all rows wait that there are (`expect` and `leave` count them), else
    when none came for `patience` seconds; while a batch is decoded the next one gathers. A completion is handed out as
    soon as its row ends, so that the row may go on while others are decoded. An error of the policy is that of every
    row in the batch.

    Which rows go in together is then a matter of time, and numbers of a model depend on it in their last digits. With a
    `patience` of infinity they go in when all wait, whatever each of them does in between.

    `policy.complete` runs by `start`, one batch at a time: in a thread of its own by default, which `close` ends. A
    row that gives up waiting is left out of the next batch.

    >>> from ramet.policies.scripted import ScriptedPolicy
    >>> from ramet.types import Draw, Sampling
    >>> import torch
    >>> async def ask() -> Completion:
    ...     with Gathered(ScriptedPolicy(lambda request: [7])) as gathered:
    ...         return await gathered.answer(Request(5, torch.tensor([1]), Sampling(1), Draw(0, 0, 0)))
    >>> asyncio.run(ask()).row
    5
    """

    def __init__(
        self,
        policy: Policy,
        *,
        start: Callable[[Callable[[], None]], object] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._policy = policy
        self._thread = ThreadPoolExecutor(1, "ramet policy") if start is None else None
        self._start = start
        self._patience = patience
        self._rows = 0
        self._waiting: list[_Waiting] = []
        self._busy = False
        self._closed = False
        self.broken = False
        """Whether the policy has raised: what its rows are told since then is the end of all."""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, rows: int) -> None:
        """Say that `rows` more rows may ask."""
        self._rows += rows

    def leave(self) -> None:
        """Say that a row asks no more."""
        self._rows -= 1
        self._look()

    async def answer(self, request: Request) -> Completion:
        """Return the policy's completion of `request`."""
        if self._closed:
            raise RuntimeError("the policy is closed: no row can ask it any more")
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._look()
        self._set_timer()
        return await waiting.future

    def close(self) -> None:
        """End the thread, after the row that is being decoded; whoever still waits is told."""
        self._closed = True
        self._stop_timer()
        for waiting in self._waiting:
            waiting.future.cancel()
        self._waiting.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _set_timer(self) -> None:
        self._stop_timer()
        if self._waiting and not self._busy and self._patience < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._go)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Begin if everybody waits who may."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.future.done()]
        if self._waiting and len(self._waiting) == self._rows:
            self._go()

    def _go(self) -> None:
        """Begin a batch of all that wait, in the order of their rows, unless one is being decoded."""
        self._stop_timer()
        batch = [waiting for waiting in self._waiting if not waiting.future.done()]
        if self._busy or not batch:
            return
        self._waiting = []
        self._busy = True
        batch.sort(key=lambda waiting: waiting.request.row)
        job = partial(self._decode, asyncio.get_running_loop(), batch)
        if self._start is not None:
            self._start(job)
        elif self._thread is not None:
            self._thread.submit(job)  # its error is told to every row of the batch

    def _decode(self, loop: asyncio.AbstractEventLoop, batch: list[_Waiting]) -> None:
        """Complete a batch, on the thread that the policy runs in; raise what the policy raised."""
        requests = [dataclasses.replace(waiting.request, row=row) for row, waiting in enumerate(batch)]
        told: BaseException = ModelError(f"a policy must answer each of {len(batch)} rows: found no answer to this one")
        try:
            answered: set[int] = set()
            for completion in self._policy.complete(requests):
                if completion.row in answered or not 0 <= completion.row < len(batch):
                    raise ModelError(
                        f"a policy must answer each of {len(batch)} rows (counted from 0) once: found "
                        f"{'a second' if completion.row in answered else 'an'} answer to row {completion.row}"
                    )
                answered.add(completion.row)
                loop.call_soon_threadsafe(_give, batch[completion.row], completion)
                if self._closed:
                    break
        except BaseException as error:
            told, self.broken = error, True
            raise
        finally:
            loop.call_soon_threadsafe(self._done, batch, told)

    def _done(self, batch: list[_Waiting], told: BaseException) -> None:
        self._busy = False
        for waiting in batch:
            if not waiting.future.done():
                waiting.future.set_exception(_passed_on(told))
        self._look()
        self._set_timer()


def _give(waiting: _Waiting, completion: Completion) -> None:
    if not waiting.future.done():
        waiting.future.set_result(dataclasses.replace(completion, row=waiting.request.row))


def _passed_on(error: BaseException) -> Exception:
    """Return what the rows of a batch are told: an exit is for the thread that the policy runs in."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"the policy was ended: {type(error).__name__}: {error}")
