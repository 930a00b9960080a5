"""A server on 127.0.0.1 that says what it is told to, down to the byte: well-behaved unless a script says otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "served"
CONTEXT = 64
PROBES = ({"logprobs": 2}, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})
"""What a health check asks for, and nothing else does."""


@dataclass(frozen=True)
class Seen:
    """A request that came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def probe(self) -> bool:
        body = self.body if isinstance(self.body, dict) else {}
        return any(all(key in body and body[key] == value for key, value in probe.items()) for probe in PROBES)


Script = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


def head(
    status: int = 200, *, length: int | None = None, kind: str | None = "application/json", more: str = ""
) -> bytes:
    """Return the first lines of an answer."""
    lines = [f"HTTP/1.1 {status} Whatever"]
    lines += [f"Content-Type: {kind}"] if kind else []
    lines += [f"Content-Length: {length}"] if length is not None else []
    return ("\r\n".join([*lines, *([more] if more else [])]) + "\r\n\r\n").encode()


def says(value: Any, status: int = 200, *, kind: str | None = "application/json", more: str = "") -> Script:
    """Answer with a whole, well-formed answer."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head(status, length=len(data), kind=kind, more=more) + data)

    return script


def sends(*parts: bytes) -> Script:
    """Answer with these bytes, and close."""

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return script


async def silence(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def drip(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Begin well, and send one byte at a time, each of which comes before a read would time out."""
    writer.write(head(length=10**6))
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def reset(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Break the connection in the middle of an answer."""
    writer.write(head(length=1000) + b'{"choices": [')
    await writer.drain()
    writer.transport.abort()


def completion(seen: Seen, **changed: Any) -> dict[str, Any]:
    """Return a right answer to a request for a completion; `changed` replaces parts of its choice."""
    if seen.probe:
        top = {"a": 0.0, "b": -9999.0}
        probed = {"token_logprobs": [0.0], "top_logprobs": [top]}
        choice = {"index": 0, "text": "a", "token_ids": [3], "logprobs": probed, "finish_reason": "length"}
        return {"model": seen.body["model"], "choices": [choice]}
    tokens = [5, 6, 2]
    choice = {
        "index": 0,
        "text": "",
        "token_ids": tokens,
        "prompt_token_ids": seen.body["prompt"],
        "logprobs": {"token_logprobs": [-0.5, -1.5, -0.25], "top_logprobs": [{}, {}, {}]},
        "finish_reason": "stop",
        "stop_reason": None,
        **changed,
    }
    return {"id": "cmpl-1", "model": seen.body["model"], "choices": [choice], "usage": {"completion_tokens": 3}}


def chat(seen: Seen, content: str | None = "four", **changed: Any) -> dict[str, Any]:
    """Return a right answer to a request for a chat completion."""
    message = {"role": "assistant", "content": content, **changed.pop("message", {})}
    choice = {"index": 0, "message": message, "finish_reason": "stop", **changed}
    return {"id": "chat-1", "model": seen.body["model"], "choices": [choice], "usage": {"completion_tokens": 3}}


async def good(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Answer as a server of tokens does."""
    await says(completion(seen) if seen.path == "/v1/completions" else chat(seen))(seen, writer)


async def models(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Say what is served."""
    await says({"data": [{"id": MODEL, "max_model_len": CONTEXT}]})(seen, writer)


def changed(**parts: Any) -> Script:
    """Answer with a completion of which some parts are others."""

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await says(json.dumps(completion(seen, **parts)).encode())(seen, writer)

    return script


@dataclass
class ScriptedServer:
    """Runs in a thread of its own while it is entered.

    `scripts` holds, for a path, what is done with the next requests to it, one each; the one in `always` is for those
    that come after. Requests of a health check are answered from `checks` alone. `seen` are all that came.
    """

    tls: ssl.SSLContext | None = None
    scripts: dict[str, deque[Script]] = field(default_factory=dict)
    always: dict[str, Script] = field(default_factory=lambda: dict(_USUAL))
    checks: dict[str, Script] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    port: int = 0
    most: int = 0
    """The most requests that were under way at once."""

    def __enter__(self) -> ScriptedServer:
        self._loop = asyncio.new_event_loop()
        self._now = 0
        self._tasks: set[asyncio.Task[None]] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    def next(self, *scripts: Script, path: str = "/v1/completions") -> None:
        """Let the next requests to `path` meet these scripts."""
        self.scripts.setdefault(path, deque()).extend(scripts)

    def asked(self, path: str = "/v1/completions") -> list[Seen]:
        """Return the requests to `path`, health checks left out."""
        return [seen for seen in self.seen if seen.path.partition("?")[0] == path and not seen.probe]

    def _work(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._connect, "127.0.0.1", self.port, ssl=self.tls)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._end.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            try:
                seen = await _read(reader)
            except _NoHTTPError:
                writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                return
            self.seen.append(seen)
            await self._script(seen)(seen, writer)
            await writer.drain()
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._now -= 1
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    def _script(self, seen: Seen) -> Script:
        path = seen.path.partition("?")[0]
        if seen.probe:
            return self.checks.get(path, good)
        waiting = self.scripts.get(path)
        return waiting.popleft() if waiting else self.always.get(path, says({"detail": "Not Found"}, 404))


_USUAL: dict[str, Script] = {"/v1/completions": good, "/v1/chat/completions": good, "/v1/models": models}


class _NoHTTPError(Exception):
    """What came is no request."""


async def _read(reader: asyncio.StreamReader) -> Seen:
    start = await reader.readexactly(1)
    if start == b"\x16":  # the hello of a secure connection
        raise _NoHTTPError
    first, *lines = (start + await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, json.loads(data) if data else None)


@contextlib.contextmanager
def served(tls: ssl.SSLContext | None = None) -> Iterator[ScriptedServer]:
    """Give a server that runs for the block."""
    with ScriptedServer(tls) as server:
        yield server
