"""A model as the judge, behind an endpoint that speaks the OpenAI protocol."""

from __future__ import annotations

import asyncio
import math
import re
import string
import weakref
from collections.abc import Callable
from typing import Any

from ramet.errors import ConfigError, ServerError
from ramet.http import Endpoint, LateError, Outage, RefusedError, Retries, TransientError, clean_url, with_retries
from ramet.types import Message, Outcome, Sample

_SCORE = re.compile(r"score\W{0,6}?(-?\d+(?:\.\d+)?)(?![\d.]*\d)", re.IGNORECASE)
FIELDS = ("prompt", "completion", "conversation", "row")
PATH = "/chat/completions"
LONGEST = 60.0  # seconds between two attempts
SHOWN = 500  # characters of a verdict that an outcome keeps


class JudgeModel:
    """A reward: ask a model how good a completion is, and read the number behind the last "Score:" that it writes.

    `url` is the endpoint's, up to "/v1"; `template` is the question, a format string of {prompt}, {completion} (what
    the model wrote last), {conversation} (all messages) and {row[...]}, the columns of the row. It should end in how to
    answer: "... Write your verdict as Score: N, from 0 to 10." `best` is the highest score, which counts as 1; the
    lowest is 0. `read` reads a verdict in another form: a number from 0 to `best`, or None.

    A verdict that can not be read, or lies outside, abstains. An endpoint that can not be reached, refuses or answers
    with something else is an environment error, and one that takes longer than `timeout` seconds a time-out, after
    `retries` more attempts with a growing pause between them; what is refused for good (such as 400, 401 and 404) is
    not tried again. An endpoint that was there once and is away is waited for, up to `outage` seconds (0: not at all),
    by all questions together: after that, what was asked is an environment error. At most `concurrency` questions are
    asked at once.

    Every question is a connection of its own, by the proxies of the environment, so there is nothing to close. Raises
    `ConfigError` for a template that can not be filled in, for settings that make no sense, and without the package
    httpx.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str,
        *,
        best: float = 1.0,
        read: Callable[[str], float | None] | None = None,
        key: str = "",
        temperature: float = 0.0,
        max_tokens: int = 512,
        concurrency: int = 16,
        timeout: float = 60.0,
        retries: int = 3,
        pause: float = 0.5,
        outage: float = 60.0,
    ) -> None:
        _check_fields(template)
        for name, value, low in (
            ("concurrency", concurrency, 1),
            ("max_tokens", max_tokens, 1),
            ("retries", retries, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"JudgeModel: {name} must be a whole number from {low} on: found {value!r}")
        for name, number in (("best", best), ("timeout", timeout)):
            if not 0 < number < float("inf"):
                raise ConfigError(f"JudgeModel: {name} must be a number above 0: found {number!r}")
        for name, number in (("pause", pause), ("outage", outage)):
            if not (math.isfinite(number) and number >= 0):
                raise ConfigError(f"JudgeModel: {name} must be a number from 0 on: found {number!r}")
        self._http = Endpoint(clean_url(url), float(timeout), key or None, proxies=True)
        self._outage = Outage(self._http.ask, f"the judge at {self._http.url}", ["/models"], float(outage))
        self._retries = Retries(retries, pause, max(pause, LONGEST))
        self.__qualname__ = f"JudgeModel({model})"
        self._template = template
        self._best = best
        self._read = _read_score if read is None else read
        self._body = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._concurrency = concurrency
        # A semaphore belongs to the loop in which somebody first waits for it.
        self._seats: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def __call__(self, sample: Sample) -> Outcome:
        """Return the outcome of one sample, with the end of the verdict as its reason."""
        question = self._template.format(
            prompt=_written(sample.prompt),
            completion=sample.completion,
            conversation=_written(sample.messages),
            row=sample.row,
        )
        seats = self._seats.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency))
        async with seats:
            verdict = await self._ask(question)
        score = self._read(verdict)
        end = verdict.strip()[-SHOWN:]
        if score is None or not 0 <= score <= self._best:
            found = "no score" if score is None else f"a score of {score:g}, which is not from 0 to {self._best:g}"
            return Outcome.abstained(f"the judge's verdict has {found}: {end!r}")
        value = score / self._best
        return Outcome(Outcome.scored(value).kind, value, {"reward": value}, reason=end)

    async def _ask(self, question: str) -> str:
        """Return the answer; raise `TimeoutError` or `ConnectionError` once all attempts have failed."""
        body = {**self._body, "messages": [{"role": "user", "content": question}]}

        async def ask() -> str:
            return _content(await self._http.ask("POST", PATH, body))

        try:
            return await with_retries(ask, self._retries, question, self._outage)
        except ServerError as error:
            raise self._told(error) from error

    def _told(self, error: ServerError) -> Exception:
        """Return what the judge's failure is for whoever asked it: one of time, or of the endpoint."""
        last = error.__cause__ if isinstance(error.__cause__, TransientError) else error
        where = f"the judge at {self._http.url}{PATH}"
        if isinstance(last, LateError):
            return TimeoutError(f"{where} took longer than {self._http.timeout:g} s")
        if isinstance(last, (TransientError, RefusedError)) and last.status not in (None, 200):
            return ConnectionError(f"{where} says {last.status}: {last.detail}")
        return ConnectionError(f"{where} failed: {error.message}")


def _read_score(verdict: str) -> float | None:
    found = _SCORE.findall(verdict)
    return float(found[-1]) if found else None


def _content(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise TransientError(f"it answered with no chat completion: {repr(answer)[:200]}", status=200)
    return content


def _written(messages: Any) -> str:
    if isinstance(messages, str):
        return messages
    return "\n\n".join(f"{_role(message)}: {message.get('content') or ''}" for message in messages)


def _role(message: Message) -> str:
    return str(message["role"])


def _check_fields(template: str) -> None:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(
            f"JudgeModel: the template can not be read: {error}", hint="a brace that is meant is written twice"
        ) from error
    for field in fields:
        if re.split(r"[.\[]", field)[0] not in FIELDS:
            raise ConfigError(
                f"JudgeModel: the template has no field {{{field}}}",
                hint=f"known: {', '.join(f'{{{name}}}' for name in FIELDS)}; a brace that is meant is written twice",
            )
    if not {"completion", "conversation"} & set(fields):
        raise ConfigError("JudgeModel: the template shows the judge neither {completion} nor {conversation}")
