"""A policy in the process behind `await`: what goes in together, and that it changes no token."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.episodes import clock
from tests.episodes.stage import task

from ramet.chat import PlainTemplate
from ramet.episodes import Gathered, Rules, Start, play_episodes
from ramet.errors import ModelError
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.policy import Policy
from ramet.policies.transformers import TransformersPolicy
from ramet.types import Completion, Draw, Episode, Request, Sampling, StopReason


def _request(row: int) -> Request:
    return Request(row, torch.tensor([row]), Sampling(4), Draw(0, row, 0))


def _completion(request: Request) -> Completion:
    """Say the row's own token once more."""
    return Completion(request.row, request.tokens.clone(), torch.zeros(1), StopReason.STOP, 0)


class Batches(Policy):
    """Answer in the order asked, and keep which rows (as their tokens say) went in together."""

    def __init__(self, answers: Callable[[Sequence[Request]], Iterator[Completion]] | None = None) -> None:
        self.seen: list[list[int]] = []
        self._answers = answers or (lambda requests: map(_completion, requests))

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        assert [request.row for request in requests] == list(range(len(requests)))
        self.seen.append([int(request.tokens[0]) for request in requests])
        yield from self._answers(requests)


def _inline(job: Callable[[], None]) -> None:
    """Run a batch as the next thing that the loop does; what it raises is told to its rows."""

    def run() -> None:
        with contextlib.suppress(Exception):  # whoever waits has it
            job()

    asyncio.get_running_loop().call_soon(run)


def test_rows_that_start_together_go_in_together_in_the_order_of_rows() -> None:
    policy = Batches()

    async def ask() -> list[Completion]:
        gathered = Gathered(policy, start=_inline)
        gathered.expect(3)
        return await asyncio.gather(*(gathered.answer(_request(row)) for row in (8, 5, 6)))

    answers, seconds = clock.run(ask)
    assert policy.seen == [[5, 6, 8]]
    assert [(answer.row, answer.tokens.tolist()) for answer in answers] == [(8, [8]), (5, [5]), (6, [6])]
    assert seconds == 0  # nobody else may come: there is nothing to wait for


def test_a_row_that_is_elsewhere_is_waited_for_a_little_and_no_more() -> None:
    policy = Batches()

    async def ask() -> None:
        gathered = Gathered(policy, start=_inline, patience=0.5)
        gathered.expect(4)

        async def late(row: int, seconds: float) -> None:
            await asyncio.sleep(seconds)
            await gathered.answer(_request(row))
            gathered.leave()

        # 1 and 2 come within the patience of each other; 3 is a straggler; 4 leaves without a word.
        leaving = asyncio.get_running_loop().call_later(0.7, gathered.leave)
        await asyncio.gather(late(1, 0.0), late(2, 0.4), late(3, 9.0))
        assert not leaving.cancelled()

    _, seconds = clock.run(ask)
    assert policy.seen == [[1, 2], [3]]
    assert seconds == pytest.approx(9.0)  # the last one is alone, and goes in at once


@pytest.mark.parametrize("elsewhere", [0.001, 9.0, 1e5])
def test_with_endless_patience_only_who_leaves_is_not_waited_for(elsewhere: float) -> None:
    """Two turns of three rows; the third is away for a while before its second one, and the first leaves then."""
    policy = Batches()

    async def ask() -> None:
        gathered = Gathered(policy, start=_inline, patience=math.inf)
        gathered.expect(3)

        async def row(number: int) -> None:
            await gathered.answer(_request(number))
            await asyncio.sleep(elsewhere if number == 3 else 0.0)
            if number != 1:
                await gathered.answer(_request(number))
            gathered.leave()

        await asyncio.gather(row(1), row(2), row(3))

    _, seconds = clock.run(ask)
    assert policy.seen == [[1, 2, 3], [2, 3]]
    assert seconds == pytest.approx(elsewhere)


def test_a_row_that_leaves_lets_the_others_begin() -> None:
    policy = Batches()

    async def ask() -> None:
        gathered = Gathered(policy, start=_inline, patience=60.0)
        gathered.expect(2)
        asyncio.get_running_loop().call_later(1.0, gathered.leave)
        await gathered.answer(_request(1))

    assert clock.run(ask)[1] == pytest.approx(1.0)


def test_what_comes_while_a_batch_is_decoded_is_the_next_batch() -> None:
    policy = Batches()
    jobs: list[Callable[[], None]] = []

    async def ask() -> None:
        gathered = Gathered(policy, start=jobs.append)
        gathered.expect(3)
        asking = [asyncio.ensure_future(gathered.answer(_request(row))) for row in (1, 2)]
        await asyncio.sleep(1)
        assert len(jobs) == 1  # begun, for the third took too long
        asking.append(asyncio.ensure_future(gathered.answer(_request(3))))
        await asyncio.sleep(9)
        assert len(jobs) == 1
        jobs[0]()
        await asyncio.gather(*asking[:2])
        await asyncio.sleep(1)
        jobs[1]()
        await asking[2]

    clock.run(ask)
    assert policy.seen == [[1, 2], [3]]


def test_a_batch_that_everybody_gave_up_is_still_the_only_one() -> None:
    """A model does one thing at a time, though nobody waits for what it does."""
    policy = Batches()
    jobs: list[Callable[[], None]] = []

    async def ask() -> None:
        gathered = Gathered(policy, start=jobs.append)
        gathered.expect(2)
        first = asyncio.ensure_future(gathered.answer(_request(1)))
        await asyncio.sleep(1)
        first.cancel()
        second = asyncio.ensure_future(gathered.answer(_request(2)))
        await asyncio.sleep(1)
        gathered.leave()
        await asyncio.sleep(1)
        assert len(jobs) == 1
        jobs[0]()
        await asyncio.sleep(0)
        jobs[1]()
        assert (await second).tokens.tolist() == [2]

    clock.run(ask)
    assert policy.seen == [[1], [2]]


def test_a_row_that_gave_up_is_left_out() -> None:
    policy = Batches()

    async def ask() -> None:
        gathered = Gathered(policy, start=_inline, patience=5.0)
        gathered.expect(3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await gathered.answer(_request(1))
        await asyncio.gather(*(gathered.answer(_request(row)) for row in (2, 3)))

    clock.run(ask)
    assert policy.seen == [[2, 3]]


def _nobody(requests: Sequence[Request]) -> Iterator[Completion]:
    yield _completion(requests[0])


def _twice(requests: Sequence[Request]) -> Iterator[Completion]:
    yield _completion(requests[0])
    yield _completion(requests[0])


def _stranger(requests: Sequence[Request]) -> Iterator[Completion]:
    yield _completion(requests[0])
    yield Completion(7, torch.tensor([1]), torch.zeros(1), StopReason.STOP, 0)


def _broken(requests: Sequence[Request]) -> Iterator[Completion]:
    yield _completion(requests[0])
    raise ModelError("the logits are no distribution")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (_nobody, "each of 3 rows: found no answer to this one"),
        (_twice, "found a second answer to row 0"),
        (_stranger, "found an answer to row 7"),
        (_broken, "the logits are no distribution"),
    ],
)
def test_an_error_of_the_policy_is_that_of_every_row_that_waits(answers: Any, message: str) -> None:
    async def ask() -> list[Completion | BaseException]:
        gathered = Gathered(Batches(answers), start=_inline)
        gathered.expect(3)
        return await asyncio.gather(*(gathered.answer(_request(row)) for row in (4, 5, 6)), return_exceptions=True)

    first, *others = clock.run(ask)[0]
    assert isinstance(first, Completion)
    assert first.row == 4
    assert [type(other) for other in others] == [ModelError, ModelError]
    assert all(message in str(other) for other in others)


def test_a_thread_of_its_own_ends_with_it() -> None:
    threads: set[str] = set()

    def answers(requests: Sequence[Request]) -> Iterator[Completion]:
        threads.add(threading.current_thread().name)
        return map(_completion, requests)

    async def ask() -> None:
        with Gathered(Batches(answers)) as gathered:
            for _ in range(2):
                await asyncio.gather(*(gathered.answer(_request(row)) for row in range(3)))
        with pytest.raises(RuntimeError, match="closed"):
            await gathered.answer(_request(1))

    asyncio.run(ask())
    assert len(threads) == 1
    assert not threads & {thread.name for thread in threading.enumerate()}


def test_closing_ends_a_batch_after_the_row_that_is_decoded() -> None:
    ended: list[int] = []
    decoding, may_go_on = threading.Event(), threading.Event()

    def answers(requests: Sequence[Request]) -> Iterator[Completion]:
        for request in requests:
            yield _completion(request)
            ended.append(request.row)
            decoding.set()
            may_go_on.wait(30)

    async def ask() -> None:
        gathered = Gathered(Batches(answers))
        gathered.expect(3)
        asking = [asyncio.ensure_future(gathered.answer(_request(row))) for row in range(3)]
        await asking[0]
        assert await asyncio.to_thread(decoding.wait, 30)  # of the next row
        closing = asyncio.get_running_loop().run_in_executor(None, gathered.close)
        while not gathered._closed:
            await asyncio.sleep(0)
        may_go_on.set()
        await closing
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(one) for one in found[1:]] == [Completion, ModelError]

    asyncio.run(ask())
    assert ended == [0]


def test_a_row_that_ended_goes_on_while_others_are_decoded() -> None:
    """The policy does not go on before row 0 has been replied to; were its answer kept back, it never would."""
    replied = threading.Event()

    def answers(requests: Sequence[Request]) -> Iterator[Completion]:
        for place, request in enumerate(requests):
            yield Completion(request.row, torch.tensor([5]), torch.zeros(1), StopReason.STOP, 0)
            if place == 0 and len(requests) == 3:
                assert replied.wait(30)

    def reply(episode: Episode) -> str | None:
        replied.set()
        return None if episode.turns == 2 else "?"

    begun = [Start({"prompt": "go"}, group) for group in range(3)]
    found = play_episodes(
        task(reply=reply),
        Batches(answers),
        begun,
        template=PlainTemplate(tiny_tokenizer()),
        rules=Rules(Sampling(4), 0),
    )
    assert [episode.stop for episode in found] == [StopReason.STOP] * 3


# ---------------------------------------------------------------- a real model

TOKENIZER = tiny_tokenizer()
MODEL = tiny_llama(TOKENIZER, hidden_size=32, heads=2, intermediate_size=48, initializer_range=0.3)


@settings(deadline=None, max_examples=8)
@given(
    prompts=st.lists(st.text("0123456789+", min_size=1, max_size=5), min_size=2, max_size=5),
    turns=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_rows_are_the_same_alone_and_in_a_batch(prompts: list[str], turns: list[int], seed: int) -> None:
    policy = TransformersPolicy(MODEL, eos_ids=[2])

    def reply(episode: Episode) -> str | None:
        return None if episode.turns == turns[episode.row["number"]] else f"<{episode.turns}>"

    rules = Rules(Sampling(6), seed, max_turns=3, context=60)
    of, template = task(reply=reply), PlainTemplate(TOKENIZER)
    begun = [
        Start({"prompt": prompt, "number": number}, number // 2, number % 2) for number, prompt in enumerate(prompts)
    ]
    together = play_episodes(of, policy, begun, template=template, rules=rules)
    for start, episode in zip(begun, together, strict=True):
        [alone] = play_episodes(of, policy, [start], template=template, rules=rules)
        [mine], [its] = alone.pieces, episode.pieces
        # A uniform may fall within 1e-5 of the edge between two tokens: then, and only then, they may part.
        assert mine.tokens == its.tokens
        assert mine.kinds == its.kinds
        assert alone.stop is episode.stop
        assert mine.log_probs == pytest.approx(its.log_probs, abs=1e-4, nan_ok=True)
