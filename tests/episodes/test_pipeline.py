"""Collecting ahead: how old a token may be, how long it all takes, and that nothing is left running."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.episodes import clock
from tests.episodes.stage import PLAIN, RULES, saying, starts, task

from ramet.chat import PlainTemplate
from ramet.episodes import (
    EventLoop,
    Gathered,
    Here,
    Pipeline,
    Played,
    Rules,
    Start,
    into_forest,
    play,
    play_episodes,
)
from ramet.forest import Forest
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.transformers import TransformersPolicy
from ramet.types import Completion, Request, Sampling

SECONDS = st.integers(0, 9).map(float)


@dataclass
class Server:
    """A server whose weights are pushed to: it knows what is under way, and writes down what happened when."""

    version: int = 0
    running: set[int] = field(default_factory=set)
    log: list[tuple[str, int]] = field(default_factory=list)
    batches: dict[int, list[int]] = field(default_factory=dict)

    async def collect(self, step: int, version: int, seconds: list[float]) -> list[int]:
        """Sample a token after each pause, and return the versions of the weights that made them."""
        assert version == self.version
        self.log.append(("collect", step))
        self.running.add(step)
        try:
            made = [self.version]
            for pause in seconds:
                await asyncio.sleep(pause)
                made.append(self.version)
            return made
        finally:
            self.running.remove(step)

    async def train(self, step: int, batch: list[int], seconds: float) -> None:
        assert self.version == step
        self.log.append(("train", step))
        await asyncio.sleep(seconds)
        self.batches[step] = batch
        self.version += 1


Plan = st.lists(st.tuples(st.lists(SECONDS, max_size=3), SECONDS), min_size=1, max_size=6)


async def _play(server: Server, plan: list[tuple[list[float], float]], staleness: int, first: int = 0) -> int:
    server.version = first

    async def collect(step: int, version: int) -> list[int]:
        return await server.collect(step, version, plan[step - first][0])

    async def train(step: int, batch: list[int]) -> None:
        await server.train(step, batch, plan[step - first][1])

    return await Pipeline(collect, train, staleness=staleness).run(first, first + len(plan))


@settings(deadline=None, max_examples=60)
@given(plan=Plan, staleness=st.integers(0, 3), first=st.integers(0, 5))
def test_no_token_is_older_than_the_bound_and_no_second_is_lost(
    plan: list[tuple[list[float], float]], staleness: int, first: int
) -> None:
    server = Server()
    end, seconds = clock.run(lambda: _play(server, plan, staleness, first))

    assert end == first + len(plan)
    assert sorted(server.batches) == list(range(first, first + len(plan)))
    for step, versions in server.batches.items():
        assert step - staleness <= min(versions) <= max(versions) <= step
    # The same, worked out: a step begins when its batch is there and the step before is done.
    trained = [0.0]
    for number, (pauses, training) in enumerate(plan):
        begun = trained[max(0, number - staleness)]
        trained.append(max(trained[-1], begun + sum(pauses)) + training)
    assert seconds == pytest.approx(trained[-1])


@settings(deadline=None, max_examples=30)
@given(plan=Plan)
def test_a_bound_of_0_is_a_plain_loop(plan: list[tuple[list[float], float]]) -> None:
    server, plain = Server(), Server()
    clock.run(lambda: _play(server, plan, 0))

    async def loop() -> None:
        for step, (pauses, training) in enumerate(plan):
            await plain.train(step, await plain.collect(step, step, pauses), training)

    clock.run(loop)
    assert server.log == plain.log
    assert server.batches == plain.batches


@settings(deadline=None, max_examples=40)
@given(
    plan=Plan,
    staleness=st.integers(0, 3),
    at=st.integers(0, 5),
    where=st.sampled_from(["collect", "train"]),
    after=SECONDS,
)
def test_a_failure_reaches_the_caller_and_leaves_nothing_running(
    plan: list[tuple[list[float], float]], staleness: int, at: int, where: str, after: float
) -> None:
    at = min(at, len(plan) - 1)
    server = Server()

    async def collect(step: int, version: int) -> list[int]:
        if (where, step) == ("collect", at):
            await asyncio.sleep(after)
            raise OSError("the server is gone")
        return await server.collect(step, version, plan[step][0])

    async def train(step: int, batch: list[int]) -> None:
        if (where, step) == ("train", at):
            raise OSError("the disk is full")
        await server.train(step, batch, plan[step][1])

    with pytest.raises(OSError, match=r"is gone|is full"):
        clock.run(lambda: Pipeline(collect, train, staleness=staleness).run(0, len(plan)))
    assert server.running == set()
    assert sorted(server.batches) == list(range(at))  # what came before is trained on, as in a plain loop


def test_it_ends_between_two_steps_when_asked_to() -> None:
    server = Server()

    async def collect(step: int, version: int) -> list[int]:
        return await server.collect(step, version, [1.0])

    async def train(step: int, batch: list[int]) -> None:
        await server.train(step, batch, 0.0)

    pipeline = Pipeline(collect, train, staleness=2)
    end, _ = clock.run(lambda: pipeline.run(0, 9, ending=lambda: server.version == 3))
    assert end == 3
    assert sorted(server.batches) == [0, 1, 2]
    assert server.running == set()
    assert clock.run(lambda: pipeline.run(9, 9))[0] == 9


def test_cancelling_it_leaves_nothing_running() -> None:
    server = Server()

    async def collect(step: int, version: int) -> list[int]:
        return await server.collect(step, version, [10.0])

    async def train(step: int, batch: list[int]) -> None:
        raise AssertionError("no batch was there yet")

    async def cancel() -> None:
        running = asyncio.ensure_future(Pipeline(collect, train, staleness=3).run(0, 9))
        await asyncio.sleep(5)
        assert server.running == {0, 1, 2, 3}
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    clock.run(cancel)
    assert server.running == set()


# ---------------------------------------------------------------- with episodes


def _forests(staleness: int | None) -> list[Forest]:
    """Train three steps on episodes of a model in the process; None is a plain loop."""
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer, hidden_size=32, heads=2, intermediate_size=48, initializer_range=0.3)
    policy = TransformersPolicy(model, eos_ids=[2])
    of = task(reply=lambda episode: None if episode.turns == 2 else "?", max_turns=3)
    made: list[Forest] = []

    def starts(step: int) -> list[Start]:
        return [Start({"prompt": f"{step}+{member}="}, step, member) for member in range(3)]

    def learn(step: int, forest: Forest) -> None:
        """Move the weights, by what was sampled."""
        made.append(forest)
        generator = torch.Generator().manual_seed(int(forest.sampled(range(3)).index.sum()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        policy.version += 1

    rules, template = Rules(Sampling(5), 1), PlainTemplate(tokenizer)
    if staleness is None:
        for step in range(3):
            forest = Forest()
            into_forest(play_episodes(of, policy, starts(step), template=template, rules=rules), forest)
            learn(step, forest)
        return made

    async def work(here: Here) -> None:
        with Gathered(policy, start=here.start) as gathered:

            async def collect(step: int, version: int) -> Forest:
                gathered.expect(3)
                forest = Forest()
                into_forest(await play(of, starts(step), gathered.answer, template, rules, left=gathered.leave), forest)
                return forest

            async def train(step: int, forest: Forest) -> None:
                await here(lambda: learn(step, forest))

            await Pipeline(collect, train, staleness=staleness or 0).run(0, 3)

    with EventLoop() as loop:
        loop.run(work)
    return made


def test_a_bound_of_0_is_the_synchronous_run_token_for_token() -> None:
    plain, piped = _forests(None), _forests(0)
    assert [forest.same_as(other) for forest, other in zip(plain, piped, strict=True)] == [True] * 3
    assert [set(forest.sampled(range(3)).versions.tolist()) for forest in piped] == [{0}, {1}, {2}]


def test_tokens_that_are_older_say_so() -> None:
    forests = _forests(1)
    for step, forest in enumerate(forests):
        assert set(forest.sampled(range(3)).versions.tolist()) <= {step - 1, step} - {-1}
    assert not all(map(Forest.same_as, forests, _forests(0)))  # the bound matters


def test_a_step_is_trained_on_while_the_next_one_is_played() -> None:
    """The training of step 0 waits until step 1 has asked its server: were they one after the other, it never had."""
    asked, served = threading.Event(), 0

    async def answer(request: Request) -> Completion:
        nonlocal served
        served += 1
        if served > 2:
            asked.set()
        return saying(request, "x")

    async def work(here: Here) -> int:
        async def collect(step: int, version: int) -> list[Played]:
            if step:
                await trained.wait()  # begun, and then no sooner than the training
            return await play(task(), starts("a", "b"), answer, PLAIN, RULES)

        async def train(step: int, batch: list[Played]) -> None:
            trained.set()
            if step == 0:
                assert await here(lambda: asked.wait(60))

        trained = asyncio.Event()
        return await Pipeline(collect, train, staleness=1).run(0, 2)

    with EventLoop() as loop:
        assert loop.run(work) == 2
    assert served == 4


def test_an_exit_goes_through() -> None:
    async def collect(step: int, version: int) -> list[int]:
        raise SystemExit(3)

    async def train(step: int, batch: list[int]) -> None:
        raise AssertionError("there is no batch")

    with pytest.raises(SystemExit):
        clock.run(lambda: Pipeline(collect, train, staleness=0).run(0, 1))


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0 steps: found -1"):
        Pipeline(None, None, staleness=-1)  # type: ignore[arg-type]
