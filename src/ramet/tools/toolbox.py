"""The tools of a task, run: all calls at once, each with a time-out, every failure answered as data."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import pydantic_core

from ramet.concurrency import Threads
from ramet.errors import nearest
from ramet.tools.calls import BadCall, Call, call_of, read_message
from ramet.tools.tool import Tool, ToolError, is_async, tool
from ramet.types import Episode, Message, ToolCall

GRACE = 1.0
"""How long a tool that is out of time may take to end, in seconds, before it is left to itself."""

THREADS = 512
"""How many functions that are not async run at once, those that never end included."""


class Toolbox:
    """Tools that are offered together: typed functions and `Tool`s, each called by its name.

    `schemas` are what chat templates take. `read_turn` finds the calls in what a model wrote and `run` answers them,
    all at once. Async functions run in the event loop, others in threads of the toolbox's own; `timeout` is in seconds
    and counts from the call. A call that is late is answered, and its thread left to itself: it keeps neither others
    nor the end of Python waiting. An answer of more than `characters` is cut, and says so. `close` ends the threads.

    Raises `ValueError` for two tools of one name.

    >>> import asyncio, random
    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.'''
    ...     return a + b
    >>> async def play() -> None:
    ...     async with Toolbox([add]) as tools:
    ...         message = tools.read_turn('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>')
    ...         for answer in await tools.run(message["tool_calls"], Episode({}, [], random.Random(0))):
    ...             print(answer)
    >>> asyncio.run(play())
    {'role': 'tool', 'name': 'add', 'content': '5', 'tool_call_id': 'c00000000'}
    """

    def __init__(
        self, tools: Sequence[Tool | Callable[..., Any]], *, timeout: float = 30.0, characters: int = 10_000
    ) -> None:
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout must be a number of seconds above 0: found {timeout}")
        if characters < 1:
            raise ValueError(f"characters must be at least 1: found {characters}")
        made = [tool(one) for one in tools]
        self.tools: Mapping[str, Tool] = {one.name: one for one in made}
        if len(self.tools) < len(made):
            names = [one.name for one in made]
            raise ValueError(f"each tool must have a name of its own: found {sorted(names)}")
        self.timeout = timeout
        self.characters = characters
        self._threads = Threads(THREADS, "ramet tool")
        self._strays: set[asyncio.Future[Any]] = set()

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools as chat templates and servers take them."""
        return tuple(
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description, "parameters": one.schema},
            }
            for one in self.tools.values()
        )

    def read_turn(self, text: str, turn: int = 0) -> Message:
        """Return what a model wrote as an assistant message, with the calls in it under "tool_calls".

        Without tools there are no calls. `turn` is a number that makes the calls' ids differ from turn to turn.
        """
        if not self.tools:
            return {"role": "assistant", "content": text}
        return read_message(text, {one.name: one.schema for one in self.tools.values()}, turn)

    async def run(self, calls: Sequence[Call | Mapping[str, Any]], episode: Episode) -> list[Message]:
        """Return one tool message for each call, in order; `calls` may be the "tool_calls" of a message.

        What fails is answered with "error: " and the reason. Only a cancellation from outside is raised.
        """
        known = [call if isinstance(call, (ToolCall, BadCall)) else call_of(call) for call in calls]
        contents = await asyncio.gather(*(self._answer(call, episode) for call in known))
        return [
            {"role": "tool", "name": call.name or "unknown", "content": self._cut(content), "tool_call_id": call.id}
            for call, content in zip(known, contents, strict=True)
        ]

    def close(self) -> None:
        """End the threads; a second time does nothing."""
        self._threads.shutdown(cancel_futures=True)

    async def __aenter__(self) -> Toolbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _answer(self, call: Call, episode: Episode) -> str:
        if isinstance(call, BadCall):
            return f"error: the call can not be read: {call.reason}"
        if call.name not in self.tools:
            return f'error: there is no tool "{call.name}": {nearest(call.name, self.tools)}'
        one = self.tools[call.name]
        if is_async(one.call):
            return await self._within(_text_of(one.call(call.arguments, episode)))
        return await self._within(self._in_thread(one, call.arguments, episode))

    async def _in_thread(self, one: Tool, arguments: Mapping[str, Any], episode: Episode) -> str:
        context = contextvars.copy_context()
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, context.run, _called, one.call, arguments, episode
        )
        found = await work
        return found if isinstance(found, str) else await _text_of(found)

    async def _within(self, work: Coroutine[Any, Any, str]) -> str:
        """Return what `work` answers in time; what ignores that it is cancelled is left to itself."""
        task = asyncio.ensure_future(work)
        late = True
        try:
            await asyncio.wait({task}, timeout=self.timeout)
            late = not task.done()
        finally:  # late, or cancelled from outside
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE)
            if not task.done():
                self._strays.add(task)
                task.add_done_callback(self._strays.discard)
        if late:
            return f"error: timed out after {self.timeout:g} s"
        return "error: CancelledError" if task.cancelled() else task.result()

    def _cut(self, content: str) -> str:
        content = content.encode("utf-8", "replace").decode()  # no tokenizer takes half a character
        if len(content) <= self.characters:
            return content
        return f"{content[: self.characters]}\n[cut: the first {self.characters} of {len(content)} characters]"


def _called(call: Callable[..., Any], arguments: Mapping[str, Any], episode: Episode) -> str | Awaitable[Any]:
    """Call a function in its thread; return its answer as text, or what is to be awaited."""
    try:
        value = call(arguments, episode)
        return cast("Awaitable[Any]", value) if hasattr(value, "__await__") else _written(value)
    except BaseException as error:  # even an exit: it is the tool's alone
        return _reason(error)


async def _text_of(work: Awaitable[Any]) -> str:
    try:
        return _written(await work)
    except (Exception, SystemExit, GeneratorExit) as error:
        return _reason(error)


def _written(value: Any) -> str:
    """Write what a tool returned: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return str(value)
    return pydantic_core.to_json(value, fallback=str, inf_nan_mode="constants").decode()


def _reason(error: BaseException) -> str:
    kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
    try:
        return f"error: {kind}{error}".removesuffix(": ")
    except Exception:  # an error that can not say what it is
        return f"error: {type(error).__name__}"
