"""A server that dies and comes back as it likes: no row is lost, and each token is of the weights of its version.

The server is one in the process, and time is that of a clock of its own: an outage of an hour takes no time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.episodes.clock import run

from ramet.errors import ServerError, ServerGone
from ramet.http import Endpoint, Retries, TransientError
from ramet.policies.server import ServerPolicy, weights
from ramet.policies.server import policy as server_policy
from ramet.policies.server.weights import BETWEEN
from ramet.types import Completion, Draw, Request, Sampling, StopReason

MODEL = "served"
BASE = 3
"""The token that the weights of a server that was started anew sample; those of version n sample BASE + 1 + n."""
LIMIT = 600.0

Outages = Sequence[tuple[float, float]]


class Server:
    """A vLLM in the process that is away from each first to each second of `outages`, and begins anew after it."""

    def __init__(self, outages: Outages) -> None:
        self.outages = list(outages)
        self.deaths = 0
        self._begin()

    def _begin(self) -> None:
        self.token, self.label = BASE, "default"

    def _now(self) -> float:
        now = asyncio.get_running_loop().time()
        gone = [until for since, until in self.outages if since <= now]
        if len(gone) > self.deaths:
            self.deaths = len(gone)
            self._begin()
        if gone and now < gone[-1]:
            raise TransientError("ConnectError", sent=False)
        return now

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Answer as a vLLM does, some time later, unless it dies by then."""
        begun = self._now()
        until = begun + _seconds(path, body)
        death = next((since for since, _ in self.outages if begun < since <= until), None)
        if death is not None:
            await asyncio.sleep(death - begun)
            self._now_or_never()
            raise TransientError("ReadError: it broke off")
        await asyncio.sleep(until - begun)
        return self._answer(path.partition("?")[0], body or {})

    def _now_or_never(self) -> None:
        with contextlib.suppress(TransientError):
            self._now()

    def _answer(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": MODEL, "max_model_len": 64}]}
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/server_info":
            return {"vllm_config": {"model_config": {"dtype": "float32"}, "parallel_config": {}}}
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/collective_rpc":
            assert self.label == BETWEEN
            self.token = BASE + 1 + int(Path(body["kwargs"]["weights_path"]).name.partition("-")[0])
        if path == "/v1/completions":
            return self._completion(body)
        return {"success": True}

    def _completion(self, body: Mapping[str, Any]) -> Any:
        count = body["max_tokens"]
        told = {"token_logprobs": [-1.0] * count, "top_logprobs": [{"a": 0.0, "b": -9999.0}] * count}
        choice = {"token_ids": [self.token] * count, "logprobs": told, "finish_reason": "length"}
        return {"model": MODEL, "choices": [choice]}


def _seconds(path: str, body: Mapping[str, Any] | None) -> float:
    if path == "/v1/completions":
        assert body is not None
        return 0.5 + float(body["seed"] % 16) / 8
    return {"/collective_rpc": 1.0, "/pause?mode=wait": 0.25}.get(path, 0.015625)


class Served(ServerPolicy):
    """A policy whose updates are compared with nothing: the tokens say of which weights they are."""

    async def _compare(self, *_: object) -> None:
        await self._ask("GET", "/health", None)


@pytest.fixture(autouse=True)
def _no_threads_and_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(server_policy.asyncio, "to_thread", inline)
    monkeypatch.setattr(weights, "save_weights", lambda model, folder: folder.mkdir())
    monkeypatch.setattr(weights, "tolerance_for", lambda *_: 1.0)


def policy_of(server: Server, *, retries: Retries | None = None, outage: float = LIMIT) -> Served:
    class There(Endpoint):
        """An endpoint of a server in the process."""

        async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
            return await server.ask(method, path, body)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_policy, "Endpoint", There)
        return Served("http://127.0.0.1:1", model=MODEL, retries=retries, outage=outage)


def request(row: int, step: int) -> Request:
    return Request(row, torch.tensor([1, 5]), Sampling(3), Draw(step, row, 0))


def assert_of_its_version(found: Completion) -> None:
    assert found.tokens.tolist() == [BASE + 1 + found.version] * 3
    assert found.stop is StopReason.NEW_TOKENS


NO_MODEL: Any = None
LENGTHS = st.one_of(st.just(0.0), st.floats(0.0, 3.0), st.floats(0.0, 80.0))
GAPS = st.floats(0.0, 8.0)


@st.composite
def outages(draw: st.DrawFn) -> Outages:
    """Outages that are shorter than the limit all together, with any time between two: too little to be of use, too."""
    found, now = [], draw(st.floats(0.6, 6.0))
    for length in draw(st.lists(LENGTHS, max_size=6)):
        found.append((now, now + length))
        now += length + draw(GAPS) + 0.125
    return found


@settings(deadline=None, max_examples=60)
@given(outages(), st.integers(1, 3))
def test_whatever_dies_and_when_every_row_is_answered_by_the_weights_of_its_version(
    times: Outages, together: int
) -> None:
    """`together` steps are sampled at once, while the weights change under them."""
    # As many tries as there are deaths that a row may meet, with the short waits between them.
    policy = policy_of(Server(times), retries=Retries(count=20, first=0.25, longest=1.0))

    async def step(number: int) -> list[Completion]:
        rows = [asyncio.create_task(policy.answer(request(row, number))) for row in range(5)]
        return list(await asyncio.gather(*rows))

    async def work() -> list[list[Completion]]:
        await policy.check_async()
        await policy.update_async(NO_MODEL, version=0)
        ahead: list[asyncio.Task[list[Completion]]] = []
        done = []
        for number in range(5):
            while len(ahead) < together:
                ahead.append(asyncio.create_task(step(number + len(ahead))))
            done.append(await ahead.pop(0))
            await policy.update_async(NO_MODEL, version=number + 1)
        return [*done, *await asyncio.gather(*ahead)]

    done, _ = run(work)
    policy.close()
    assert policy.version == 5
    for number, found in enumerate(done):
        assert [one.row for one in found] == list(range(5))
        for one in found:
            assert_of_its_version(one)
            assert number - together < one.version <= number or number >= 5
    assert [min(one.version for one in found) for found in done[:5]] == sorted(
        min(one.version for one in found) for found in done[:5]
    )


def test_rows_and_updates_wait_for_an_outage_that_is_longer_than_all_retries(caplog: pytest.LogCaptureFixture) -> None:
    """By default: 5 tries, and an outage of five minutes in the middle of the rows."""
    server = Server([(4.0, 304.0)])
    policy = policy_of(server)

    async def work() -> list[Completion]:
        await policy.check_async()
        await policy.update_async(NO_MODEL)
        rows = [asyncio.create_task(policy.answer(request(row, 0))) for row in range(30)]
        await asyncio.sleep(4.0)
        update = asyncio.create_task(policy.update_async(NO_MODEL))
        found = list(await asyncio.gather(*rows))
        await update
        return found

    found, seconds = run(work)
    policy.close()
    for one in found:
        assert_of_its_version(one)
    assert (policy.version, server.deaths) == (2, 1)
    assert 304.0 < seconds < 304.0 + 15.0 + 10.0
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["waiting for http", "http"]
    assert "is back, after" in caplog.records[1].getMessage()


@pytest.mark.parametrize("what", ["rows", "update"])
def test_what_lasts_longer_than_the_limit_is_the_end(what: str) -> None:
    policy = policy_of(Server([(4.0, 10_000.0)]), outage=100.0)

    async def work() -> float:
        await policy.check_async()
        await policy.update_async(NO_MODEL)
        await asyncio.sleep(4.0)
        begun = asyncio.get_running_loop().time()
        doings = [policy.answer(request(row, 0)) for row in range(5)] if what == "rows" else []
        tasks = [asyncio.ensure_future(one) for one in doings or [policy.update_async(NO_MODEL)]]
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, ServerGone)
            assert "has been away for 100 s: ConnectError" in str(ended)
        return asyncio.get_running_loop().time() - begun

    waited, _ = run(work)
    policy.close()
    assert 100.0 <= waited < 110.0
    assert policy._gate.empty


def test_an_episode_that_gives_up_in_an_outage_costs_itself_alone() -> None:
    policy = policy_of(Server([(4.0, 104.0)]))

    async def work() -> tuple[list[object], Completion]:
        await policy.check_async()
        await policy.update_async(NO_MODEL)
        await asyncio.sleep(4.0)
        late = asyncio.create_task(policy.answer(request(9, 0)))
        ended = await asyncio.gather(
            *(asyncio.wait_for(policy.answer(request(row, 0)), 10.0) for row in range(3)), return_exceptions=True
        )
        return list(ended), await late

    (ended, found), _ = run(work)
    policy.close()
    assert [type(one) for one in ended] == [TimeoutError] * 3
    assert_of_its_version(found)


def test_a_row_that_may_be_what_kills_the_server_is_given_up() -> None:
    """It was under way whenever the server died: as often as `retries` say, and no more."""
    server = Server([])
    policy = policy_of(server, retries=Retries(count=2))
    plain = server.ask

    async def ask(method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if path == "/v1/completions" and body is not None and body["prompt"] == [9]:
            now = asyncio.get_running_loop().time()
            server.outages.append((now + 0.125, now + 20.0))
        return await plain(method, path, body)

    server.ask = ask  # type: ignore[method-assign]

    async def work() -> Completion:
        await policy.check_async()
        poison = Request(0, torch.tensor([9]), Sampling(3), Draw(0, 0, 0))
        with pytest.raises(ServerError, match=r"it broke off \(3 tries\)"):
            await policy.answer(poison)
        return await policy.answer(request(1, 0))

    found, _ = run(work)
    assert found.tokens.tolist() == [BASE] * 3
    assert server.deaths == 3


def test_a_server_that_is_gone_ends_complete_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(Server([]))

    async def answer(request: Request) -> Completion:
        raise ServerGone("it has been away")

    monkeypatch.setattr(policy, "answer", answer)
    with pytest.raises(ServerGone, match="it has been away"):
        list(policy.complete([request(0, 0)]))
