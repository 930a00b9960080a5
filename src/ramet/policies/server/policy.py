"""A policy behind an OpenAI-compatible server: token ids and log-probs where it gives them, text where it does not."""

from __future__ import annotations

import asyncio
import math
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ramet.errors import ConfigError, ServerError, ServerGone
from ramet.http import Endpoint, Outage, RefusedError, Retries, TransientError, clean_url, with_retries
from ramet.policies.policy import Policy
from ramet.policies.server import weights
from ramet.policies.server.answers import Asked, read_text, read_tokens, too_long
from ramet.policies.server.facts import Api, ServerFacts, find_out, refuse_another_tokenizer
from ramet.policies.server.gate import Gate
from ramet.policies.server.loops import as_they_come, run
from ramet.policies.server.requests import refuse_raw, refuse_text, refuse_tokens, seed_of, text_body, tokens_body
from ramet.types import Completion, Draw, Request, Sampling, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_TOKENS = torch.zeros(0, dtype=torch.int64)
HEALTH = ("/health", "/v1/models")
"""What a server that is there has an answer to, were it that it does not know the first of them."""
PROBE = 32
"""How many tokens are sampled, behind as many of a prompt, to compare a server with the model after an update."""


@dataclass(slots=True)
class _Here:
    """What belongs to one event loop: how many rows are under way in it, and the questions that they share.

    `check` is the health check that they all wait for. `looks` counts the looks at the server's weights that have
    begun, of which `found` holds the last one's number and what the server called them, or why it did not say.
    """

    rows: asyncio.Semaphore
    check: asyncio.Task[ServerFacts] | None = None
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    looks: int = 0
    found: tuple[int, str | TransientError | None] = (0, None)


class ServerPolicy(Policy):
    """Let an OpenAI-compatible server complete the rows.

    `url` is where the server is, `model` what it calls the model. With `api` "tokens" the server must take token ids
    and give back ids and log-probs, as vLLM does: such completions can be trained on. With "text" it is given messages
    and gives back text, which `tokenizer` turns into tokens anew: their log-probs are NaN, so that they serve for
    evaluation alone. "auto" takes the first where the server can do it, and else says once, by a warning, that it can
    not. `trains` says which it is.

    Up to `concurrency` rows are under way at once, for each event loop. Each exchange may take `timeout` seconds; what
    fails in passing is sent again as `retries` say. A row that failed for good raises `ServerError` from `answer`, and
    is a completion without tokens that stopped with `ERROR` from `complete`: no other row is lost. A server that was
    there once and is away is waited for, up to `outage` seconds, by all rows and updates together; rows that were under
    way are asked again with the same draws. Where it stays away longer, `ServerGone` is raised, by `complete` too; with
    0 it is not waited for. Ids from `vocabulary` on are refused; None takes the length of the tokenizer, if given.

    `update` puts new weights into a running vLLM, by way of `weights_folder`, which the server must see under the same
    name (None: a temporary folder of this machine). Each completion carries the version that it was sampled with.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        api: Api = "auto",
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: Retries | None = None,
        outage: float = 600.0,
        api_key: str | None = None,
        vocabulary: int | None = None,
        weights_folder: Path | None = None,
    ) -> None:
        if api not in ("auto", "tokens", "text"):
            raise ConfigError(f'api: expected "auto", "tokens" or "text", found {api!r}')
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ConfigError(f"concurrency: expected a whole number from 1 on, found {concurrency!r}")
        if not (math.isfinite(timeout) and timeout > 0):
            raise ConfigError(f"timeout: expected seconds above 0, found {timeout!r}")
        if not (math.isfinite(outage) and outage >= 0):
            raise ConfigError(f"outage: expected seconds from 0 on, found {outage!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key: expected printable ASCII characters", hint="is there a line end behind it?")
        if api == "text" and tokenizer is None:
            raise ConfigError('api="text" needs a tokenizer to turn text into tokens', hint="give tokenizer")
        self.model, self.retries = model, retries or Retries()
        self._http = Endpoint(clean_url(url).removesuffix("/v1").rstrip("/"), float(timeout), api_key)
        self._outage = Outage(self._http.ask, self._http.url, HEALTH, float(outage))
        self._tokenizer, self._api, self._concurrency = tokenizer, api, concurrency
        self._vocabulary = vocabulary if vocabulary is not None or tokenizer is None else len(tokenizer)
        self._gate, self._updates, self._lock = Gate(), Gate(), threading.Lock()
        self._here: dict[asyncio.AbstractEventLoop, _Here] = {}
        self._facts: ServerFacts | None = None
        self._warned: set[str] = set()
        self._weights = weights.WeightFiles(weights_folder)
        self._doubted = False
        """Whether the server may have been another one, or started anew, since its weights were last looked at."""
        self._prompt: tuple[int, ...] = (0,)

    @property
    def trains(self) -> bool:
        """True where the server gives token ids with log-probs; asks the server if nobody has yet."""
        return (self._facts or self.check()).tokens

    @property
    def outages(self) -> int:
        """How often rows or updates had to wait for a server that was away."""
        return self._outage.count

    def check(self) -> ServerFacts:
        """Find out whether the server is there now, and what it can do; raise `ServerError` if it is not."""
        return run(self.check_async(), "check_async()")

    async def check_async(self) -> ServerFacts:
        """Do what `check` does, in an event loop."""
        self._facts = None
        facts = await with_retries(self._ready, self.retries, "check")
        self._outage.heard()
        return facts

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield a completion for each request as the server answers, in an event loop on a thread of its own.

        Rows that failed have no tokens and stop with `ERROR`; a warning says how many they are, and why the first did.
        Raises `ModelError` for a row that the server can not answer as it is meant.
        """
        failed: list[str] = []

        async def one(request: Request, put: Callable[[Completion], None]) -> None:
            try:
                put(await self.answer(request))
            except ServerGone:
                raise
            except ServerError as error:
                failed.append(str(error))
                put(_empty(request, StopReason.ERROR, self.version))

        async def all_of_them(put: Callable[[Completion], None]) -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for request in requests:
                        group.create_task(one(request, put))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

        yield from as_they_come(all_of_them)
        if failed:
            warnings.warn(f"{len(failed)} of {len(requests)} rows have no answer: {failed[0]}", stacklevel=2)

    async def answer(self, request: Request) -> Completion:
        """Return the completion of one request.

        Raises `ServerError` where the server gave none, after the last try, `ServerGone` where it stays away, and
        `ModelError` for a row that it can not answer as it is meant.
        """
        draw = request.draw
        async with self._of_this_loop().rows:
            address = f"{draw.seed}/{draw.prompt}/{draw.member}/{draw.turn}"
            return await with_retries(lambda: self._try(request), self.retries, address, self._outage)

    def update(self, model: PreTrainedModel, *, version: int | None = None, tolerance: float | None = None) -> None:
        """Put the weights of `model` into the running vLLM and count `version` one on, or set it.

        New requests wait, those under way end first: no completion is of two versions. Afterwards the server samples
        some tokens, whose log-probs must lie within `tolerance` nats of the model's, on average (None: 0.001 where both
        compute in float32, else 0.1). Raises `ServerError` where they do not, or where the server takes no weights; the
        rows that follow are then answered with the weights of the version before, or not at all.
        """
        run(self.update_async(model, version=version, tolerance=tolerance), "update_async(model)")

    async def update_async(
        self, model: PreTrainedModel, *, version: int | None = None, tolerance: float | None = None
    ) -> None:
        """Do what `update` does, in an event loop."""
        async with self._updates.closed():  # one at a time, from whatever loop
            await self._update(model, self.version + 1 if version is None else version, tolerance)

    async def _update(self, model: PreTrainedModel, number: int, tolerance: float | None) -> None:
        facts = self._facts
        if facts is None:
            facts = await with_retries(self._ready, self.retries, "update", self._outage)
        if not facts.tokens or facts.label is None:
            reason = facts.reason or "it has no names for its weights"
            raise ServerError(f"the server takes no weights: {reason}", hint=weights.DEVELOPMENT)
        folder, label = self._weights.next(number)
        limit = weights.tolerance_for(model, facts.precision) if tolerance is None else tolerance

        async def put() -> None:
            if self._weights.label is not None:
                self._refuse_others(await weights.label_of(self._ask))
            await weights.load_weights(self._ask, folder, label, facts.method)
            await self._compare(model, facts, limit)

        try:
            await asyncio.to_thread(weights.save_weights, model, folder)
            async with self._gate.closed():
                self._doubted = True
                await with_retries(put, self.retries, "update", self._outage)
                self._weights.keep(folder, label)
                self._doubted = False
                self.version = number
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def close(self) -> None:
        """Remove the weights that were written for the server. Nothing else stays open between two calls."""
        self._weights.remove()

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        return await self._http.ask(method, path, body)

    def _of_this_loop(self) -> _Here:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._here:
                self._here = {known: here for known, here in self._here.items() if not known.is_closed()}
                self._here[loop] = _Here(asyncio.Semaphore(self._concurrency))
            return self._here[loop]

    async def _ready(self) -> ServerFacts:
        """Return what the server can do, once it is known and has the weights that it should have; ask once for all."""
        facts = self._facts
        if facts is not None and not self._doubted:
            return facts
        here = self._of_this_loop()
        if here.check is None or here.check.done():
            here.check = asyncio.create_task(self._make_ready())
            here.check.add_done_callback(_look_at)
        return await asyncio.shield(here.check)

    async def _make_ready(self) -> ServerFacts:
        facts = self._facts
        if facts is None:
            facts = await find_out(self._ask, self.model, self._api, self._vocabulary)
            if not facts.tokens and self._tokenizer is None:
                raise ConfigError(
                    f"the server gives text alone, and there is no tokenizer to turn it into tokens: {facts.reason}",
                    hint="give tokenizer, or use a server of tokens, such as vLLM",
                )
            if facts.tokens and self._tokenizer is not None:
                await refuse_another_tokenizer(self._ask, self.model, self._tokenizer)
            self._facts = facts
            self._say(facts)
        if self._doubted:
            await self._look_at_weights(facts)
        return facts

    def _say(self, facts: ServerFacts) -> None:
        if not facts.tokens:
            self._warn(
                f"{self._http.url} gives text and neither token ids nor log-probs: {facts.reason}. Its completions "
                "serve for evaluation and can not be trained on"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    async def _look_at_weights(self, facts: ServerFacts) -> None:
        """See that the server has the weights of this version; one that was started anew gets them again."""
        async with self._gate.closed():  # an update that is under way ends first
            kept = self._weights
            label = await weights.label_of(self._ask) if self._doubted else kept.label
            self._refuse_others(label)
            if kept.label is None and self._doubted and label != facts.label:
                raise ServerError(
                    f"an update failed half-way: the server calls its weights {label!r}, which nobody knows",
                    hint="update once more, or restart the server",
                )
            if kept.label not in (None, label):
                if kept.folder is None:
                    raise ServerError("the weights of this version were removed", hint="update once more")
                await weights.load_weights(self._ask, kept.folder, str(kept.label), facts.method)
            self._doubted = False

    async def _try(self, request: Request) -> Completion:
        """Ask once, with the version that the server has for as long as that takes."""
        while True:
            facts = await self._ready()
            async with self._gate.inside():
                if self._doubted:
                    continue
                if self._weights.label is None and facts.label not in (None, "default"):
                    self._warn(f"{self._http.url} has weights that another run put there, called {facts.label!r}")
                try:
                    found = await self._exchange(facts, request)
                    if self._weights.label is not None:
                        await self._confirm(self._weights.label)
                    return found
                except TransientError:
                    self._doubted = self._weights.label is not None
                    raise

    async def _confirm(self, label: str) -> None:
        """See that the server still has these weights: whoever starts it anew brings the old ones back.

        No weights are loaded while a row is inside the gate, so that they are those that answered it. A look that began
        after an answer came is good for it: rows which end together share one.
        """
        here = self._of_this_loop()
        came = here.looks
        async with here.looking:
            if here.found[0] <= came:
                here.looks += 1
                try:
                    here.found = (here.looks, await weights.label_of(self._ask))
                except TransientError as error:
                    here.found = (here.looks, error)
            found = here.found[1]
        if isinstance(found, TransientError):
            raise TransientError(found.message, hint=found.hint, status=found.status)
        if found != label:
            raise TransientError(
                f"{self._http.url} was started anew: it calls its weights {found!r}, not {label!r}", status=200
            )

    def _refuse_others(self, label: str | None) -> None:
        """Raise `ServerError` where another run puts weights where this one does: each would undo the other's."""
        if self._weights.label is not None and self._weights.of_others(label):
            raise ServerError(
                f"{self._http.url} has weights that another run put there since, called {label!r}: this one's are gone",
                hint="give each run a server of its own",
            )

    async def _exchange(self, facts: ServerFacts, request: Request) -> Completion:
        limit, version = request.sampling.max_new_tokens, self.version
        if facts.tokens:
            refuse_tokens(request)
            if not facts.processed:
                refuse_raw(request)
            limit = min(limit, limit if facts.context is None else facts.context - len(request.tokens))
            if limit < 1:
                return _empty(request, StopReason.PROMPT_TOO_LONG, version)
            tokens = request.tokens.tolist()
            path, body = (
                "/v1/completions",
                tokens_body(self.model, tokens, request.sampling, seed_of(request.draw), limit=limit),
            )
            self._prompt = tuple(tokens[:PROBE])
        else:
            refuse_text(request)
            path, body = "/v1/chat/completions", text_body(self.model, request)
        asked = Asked(self._http.url + path, self.model, request, limit, version, self._vocabulary)
        try:
            answer = await self._ask("POST", path, body)
        except RefusedError as error:
            if too_long(error):
                return _empty(request, StopReason.PROMPT_TOO_LONG, version)
            raise
        return read_tokens(asked, answer) if facts.tokens else read_text(asked, answer, self._encode)

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    async def _compare(self, model: PreTrainedModel, facts: ServerFacts, tolerance: float) -> None:
        """Let the server sample, and hold its log-probs against the model's."""
        room = 2 * PROBE if facts.context is None else facts.context
        prompt = self._prompt[: max(1, room // 2)]
        start, limit = len(prompt), min(PROBE, room - len(prompt))
        sampling = Sampling(limit)
        body = {**tokens_body(self.model, prompt, sampling, 0, limit=limit), "ignore_eos": True}
        request = Request(0, torch.tensor(prompt), sampling, Draw(0, 0, 0))
        asked = Asked(f"{self._http.url}/v1/completions", self.model, request, limit, self.version, self._vocabulary)
        sampled = read_tokens(asked, await self._ask("POST", "/v1/completions", body))
        tokens = [*prompt, *sampled.tokens.tolist()]
        expected = await asyncio.to_thread(weights.log_probs_of, model, tokens, start)
        weights.compare(sampled.log_probs.tolist(), expected, tolerance)


def _empty(request: Request, stop: StopReason, version: int) -> Completion:
    return Completion(request.row, NO_TOKENS, torch.zeros(0), stop, version)


def _look_at(task: asyncio.Task[ServerFacts]) -> None:
    """Take note of how a check ended, for whoever waited for it may be gone."""
    if not task.cancelled():
        task.exception()
