"""Tools of an MCP server: a program that is spoken to over its standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ramet.concurrency import EventLoop, Here
from ramet.errors import ConfigError
from ramet.tools.tool import Tool, ToolError
from ramet.types import Episode

if TYPE_CHECKING:
    import mcp

_T = TypeVar("_T")
_PAGES = 100
CLOSED = "Connection closed"
"""What the package says of a connection that has ended."""


class MCPServer:
    """A program that offers tools by the Model Context Protocol: https://modelcontextprotocol.io

    A context manager, `with` or `async with`: it starts `command` with `args`, with `env` over the few variables that
    the protocol's package passes on, and ends it. `tools()` are what it offers, each a `Tool` whose call goes to the
    program; they may be called from any event loop, for the program is spoken to in a thread of its own. A program
    that ends costs the calls that it was at, and is started anew by the next; one that does not answer costs
    each call its toolbox's time-out. To start, it has `timeout` seconds.

    Raises `RuntimeError` for a program that does not start or speaks no MCP, with what it last wrote to its standard
    error, and `ConfigError` without the package mcp.
    """

    def __init__(
        self, command: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None, *, timeout: float = 30.0
    ) -> None:
        if isinstance(args, str):
            raise TypeError(f"args must be a list of strings: found {args!r}")
        self._command, self._args = command, list(args)
        self._env = None if env is None else dict(env)
        self._timeout = timeout
        self._line: _Line | None = None
        self._tools: list[Tool] = []
        self._opening: Future[Any] = Future()
        self._lock = threading.Lock()

    def tools(self) -> list[Tool]:
        """Return the tools that the program offers."""
        if self._line is None:
            raise RuntimeError(f"the MCP server {self._command} is not open: use it with `with` or `async with`")
        return list(self._tools)

    def open(self) -> None:
        """Start the program and ask for its tools; nothing where it is open."""
        _imported()
        with self._lock:
            if self._line is not None:
                return
            line = _Line(self)
            try:
                self._opening = line.run(line.list_tools())
                offered = self._opening.result()
            except BaseException:
                line.close()
                raise
            self._line = line
            self._tools = [self._tool(one) for one in offered]

    def close(self) -> None:
        """End the program and the thread; a second time does nothing."""
        with self._lock:
            line, self._line = self._line, None
            if line is not None:
                line.close()

    def __enter__(self) -> MCPServer:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> MCPServer:
        try:
            await asyncio.to_thread(self.open)
        except BaseException:  # cancelled: it may still be opening
            self._opening.cancel()
            await asyncio.to_thread(self.close)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _tool(self, offered: mcp.Tool) -> Tool:
        async def call(arguments: Mapping[str, Any], episode: Episode) -> str:
            line = self._line
            if line is None:
                raise ToolError(f"the MCP server {self._command} is closed")
            return await asyncio.wrap_future(line.run(line.call_tool(offered.name, arguments)))

        return Tool(offered.name, offered.description or "", {"type": "object", **offered.input_schema}, call)

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[mcp.Client]:
        """Start the program; yield what speaks to it."""
        mcp = _imported()
        parameters = mcp.StdioServerParameters(command=self._command, args=self._args, env=self._env)
        with _Said() as said:
            try:
                async with asyncio.timeout(self._timeout) as limit:
                    async with mcp.Client(mcp.stdio_client(parameters, errlog=said.file)) as client:
                        limit.reschedule(None)
                        yield client
            except Exception as error:
                reason = f"no answer in {self._timeout:g} s" if isinstance(error, TimeoutError) else _reason(error)
                raise RuntimeError(
                    f"the MCP server {' '.join([self._command, *self._args])} does not start: {reason}{said.ending}"
                ) from error


class _Line:
    """A thread with an event loop, in which one program after another is spoken to."""

    def __init__(self, server: MCPServer) -> None:
        self._server = server
        self._loop = EventLoop("ramet mcp")
        self._visit: _Visit | None = None
        self._visits: set[asyncio.Task[None]] = set()  # the one that lasts, and those that are ending

    def run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run `work` in the thread; cancelling the future cancels it."""
        return self._loop.submit(work)

    def close(self) -> None:
        """End the program and the thread."""
        with self._loop:
            self._loop.run(self._leave)

    async def _leave(self, here: Here) -> None:
        if self._visit is not None:
            self._visit.end()
        await asyncio.gather(*self._visits, return_exceptions=True)

    async def list_tools(self) -> list[mcp.Tool]:
        """Return all that the program offers."""
        client = await asyncio.shield(self._now().client)
        tools: list[mcp.Tool] = []
        cursor = None
        try:
            async with asyncio.timeout(self._server._timeout):
                for _ in range(_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
        except Exception as error:
            reason = "no answer" if isinstance(error, TimeoutError) else _reason(error)
            raise RuntimeError(f"the MCP server {self._server._command} does not list its tools: {reason}") from error
        return tools

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what the program answers, as text; raise `ToolError` for an error."""
        from mcp_types import CONNECTION_CLOSED

        visit = self._now()
        client = await asyncio.shield(visit.client)
        try:
            result = await client.call_tool(name, dict(arguments))
        except _imported().MCPError as error:
            # A program may use this number for errors of its own; the words are the package's.
            if error.code != CONNECTION_CLOSED or str(error) != CLOSED:
                raise ToolError(str(error)) from error
            visit.leave.set()
            raise ToolError(f"the server of {name} has ended") from error
        texts = [getattr(block, "text", None) or f"[{block.type}]" for block in result.content]
        text = "\n".join(texts)
        if result.is_error:
            raise ToolError(text)
        return text

    def _now(self) -> _Visit:
        """Return the life of the program that lasts; begin another where it has ended."""
        if self._visit is None or self._visit.leave.is_set():
            self._visit = _Visit(self._server)
            self._visits.add(self._visit.task)
            self._visit.task.add_done_callback(self._visits.discard)
        return self._visit


class _Visit:
    """One life of the program: it is entered and left in one task, as its package wants."""

    def __init__(self, server: MCPServer) -> None:
        self.client: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._stay(server))

    def end(self) -> None:
        """End the program, or its start."""
        if self.client.done():
            self.leave.set()
        else:
            self.task.cancel()

    async def _stay(self, server: MCPServer) -> None:
        try:
            async with server._client() as client:
                self.client.set_result(client)
                await self.leave.wait()
        except BaseException as error:
            self.leave.set()
            if not self.client.done():
                self.client.set_exception(error)
                self.client.exception()  # nobody may be waiting for it
            if not isinstance(error, Exception):
                raise


class _Said:
    """The last that a program writes to its standard error."""

    def __init__(self) -> None:
        self._end, write = os.pipe()
        self.file = os.fdopen(write, "w")
        self._last = b""

    def __enter__(self) -> _Said:
        os.set_blocking(self._end, False)
        asyncio.get_running_loop().add_reader(self._end, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        self.file.close()
        os.close(self._end)

    def _read(self) -> None:
        self._last = (self._last + os.read(self._end, 65536))[-2000:]

    @property
    def ending(self) -> str:
        """The last lines, to be added to a message."""
        with contextlib.suppress(BlockingIOError):
            self._read()
        text = self._last.decode("utf-8", "replace").strip()
        return f"\n  it wrote: {text}" if text else ""


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _imported() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise ConfigError("an MCP server needs the package mcp", hint="pip install 'ramet[mcp]'") from error
    return mcp
