"""One exchange with a server over HTTP: what another try may cure is told apart from what it can not."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ramet.errors import ConfigError, ServerError

if TYPE_CHECKING:
    import httpx

CONNECT = 10.0
"""Seconds within which a server must take a connection."""
BRIEF = 60.0
"""Seconds within which a server must answer a question about itself."""
LARGEST = 64 * 2**20
"""Bytes of the largest answer that is read."""
SHOWN = 300
"""Characters of an answer that a message quotes."""
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses that another try may not meet."""
AWAY = frozenset({500, 502, 503, 504})
"""Statuses with which a proxy, or what is left of a server, says that nobody works behind it."""


class TransientError(ServerError):
    """A failure that another try may not meet.

    `status` is that of HTTP, None where no whole answer came; `detail` is what the server said, and `after` how many
    seconds it asks to wait, if it does. `sent` is False where the request can not have reached it.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        status: int | None = None,
        detail: str = "",
        after: str | None = None,
        sent: bool = True,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.detail, self.after, self.sent = status, detail, after, sent

    @property
    def away(self) -> bool:
        """True where the server may be away: what came is no answer of its own."""
        return self.status is None or self.status in AWAY


class LateError(TransientError):
    """No whole answer came in the time there was."""


class RefusedError(ServerError):
    """The server understood and said no: `status` is that of HTTP, `detail` what it said."""

    def __init__(self, message: str, *, status: int, detail: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is and how long it may take.

    `url` is in front of every path; `timeout` bounds one exchange in seconds, from the connection to the last byte.
    Each exchange has a connection of its own: what an earlier one left behind is never taken for an answer, and nothing
    stays open. Redirects are not followed, so that the key goes nowhere else; proxies of the environment are used where
    `proxies` says so.
    """

    url: str
    timeout: float
    api_key: str | None = field(default=None, repr=False)
    proxies: bool = False

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send one request and return the JSON of its answer, None where that is empty.

        Raises `TransientError`, `RefusedError`, or a plain `ServerError` for an answer that is not HTTP's or JSON's.
        """
        where = f"{method} {self.url}{path}"
        httpx, limit = _httpx(), min(self.timeout, BRIEF) if method == "GET" else self.timeout
        try:
            async with asyncio.timeout(limit):
                status, headers, data = await self._exchange(method, path, body, where)
        except TimeoutError as error:
            raise LateError(f"{where}: no whole answer within {limit:g} s") from error
        except httpx.RequestError as error:
            raise _failure(where, error) from error
        if not 200 <= status < 300:
            raise _refusal(where, status, headers, data)
        return _json(where, headers, data)

    async def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, where: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        httpx = _httpx()
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        verify = _certificates() if self.url.startswith("https:") else False
        limits = httpx.Timeout(self.timeout, connect=min(CONNECT, self.timeout))
        async with (
            httpx.AsyncClient(verify=verify, timeout=limits, trust_env=self.proxies, follow_redirects=False) as client,
            client.stream(method, self.url + path, content=content, headers=headers) as response,
        ):
            data = bytearray()
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > LARGEST:
                    raise ServerError(
                        f"{where}: the answer is larger than {LARGEST} bytes", hint="is this the right server?"
                    )
            return response.status_code, response.headers, bytes(data)


def clean_url(url: str) -> str:
    """Return `url` without a slash at its end; raise `ConfigError` where it is no address of a server.

    >>> clean_url("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000/v1'
    """
    httpx = _httpx()
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(f"the url of a server: expected http://HOST:PORT, found {url!r} ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment or parsed.userinfo:
        hint = "give a key as api_key" if parsed.userinfo else None
        shown = "a name and a password in it" if parsed.userinfo else repr(url)
        raise ConfigError(f"the url of a server: expected http://HOST:PORT or https://HOST, found {shown}", hint=hint)
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise ConfigError(f"the url of a server: expected a port from 1 to 65535, found {parsed.port} in {url!r}")
    return url.rstrip("/")


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError("to talk to a server takes the package httpx", hint="pip install 'ramet[server]'") from error
    return httpx


def _failure(where: str, error: httpx.RequestError) -> ServerError:
    """Say what broke the exchange: a certificate stays what it is, a connection may be better next time."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            hint = "name the authority that signed it in the environment variable SSL_CERT_FILE"
            return ServerError(f"{where}: the server's certificate is not trusted: {cause}", hint=hint)
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return ServerError(f"{where}: no secure connection: {cause}", hint="does the server speak http:// alone?")
    if isinstance(error, _httpx().LocalProtocolError):
        return ServerError(f"{where}: this can not be sent: {said}")
    httpx = _httpx()
    sort = LateError if isinstance(error, httpx.TimeoutException) else TransientError
    return sort(f"{where}: {said}", sent=not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _refusal(where: str, status: int, headers: Mapping[str, str], data: bytes) -> ServerError:
    detail = _said(data)
    message = f"{where}: status {status}" + (f": {detail}" if detail else "")
    if 300 <= status < 400:
        place = headers.get("location", "nowhere")
        return RefusedError(
            f"{where}: status {status}, a redirect to {place}",
            status=status,
            detail=detail,
            hint="give the place itself",
        )
    if status in AGAIN:
        return TransientError(message, status=status, detail=detail, after=headers.get("retry-after"))
    hints = {401: "give api_key", 403: "give another api_key", 404: "look at url and model"}
    return RefusedError(message, status=status, detail=detail, hint=hints.get(status))


def _json(where: str, headers: Mapping[str, str], data: bytes) -> Any:
    if not data:
        return None
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ServerError(f"{where}: expected application/json, found {kind}: {_said(data)}")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:  # an answer that was cut may be whole next time
        raise TransientError(f"{where}: the answer is no JSON ({error}): {_said(data)}", status=200) from error
    if isinstance(found, dict) and found.get("error") and "choices" not in found:
        code = found["error"].get("code") if isinstance(found["error"], dict) else None
        message = f"{where}: status 200 with an error in it: {_said(data)}"
        raise TransientError(message, status=code) if isinstance(code, int) and code in AGAIN else ServerError(message)
    return found


def _said(data: bytes) -> str:
    """Return what an answer says, in a line: the message in it where it is an error in JSON."""
    text = data[: 16 * SHOWN].decode("utf-8", "replace")
    try:
        found = json.loads(data) if len(data) <= 16 * SHOWN else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        inner = found.get("error", found)
        said = inner.get("message", inner.get("detail")) if isinstance(inner, dict) else inner
        text = said if isinstance(said, str) else text
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[:SHOWN] + " ..."
