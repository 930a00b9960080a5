"""Where a person plays: what the environment says is shown, and what they type is read."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ramet.errors import DataError
from ramet.types import Message, Request
from ramet.viewer.summary import number, prompt_text
from ramet.viewer.text import visible

HOW_TO = "an empty line ends your turn; a line that is \\ alone stands for an empty line in it; Ctrl-D leaves"
CALL = '<tool_call>{"name": "NAME", "arguments": {...}}</tool_call>'


class Left(Exception):
    """The person left: there is no more to read."""


class Stage:
    """Show an episode as it is played, with `show`, and read the person's turns, line by line, with `read_line`.

    `ask` is what a `PersonPolicy` calls for each turn. `read_line` raises `EOFError` at the end of what there is to
    read; then `ask` raises `Left`, unless a turn was begun: that one counts.
    """

    def __init__(self, read_line: Callable[[], str], show: Callable[[str], None]) -> None:
        self._read_line = read_line
        self._show = show
        self._shown = 0

    def ask(self, request: Request) -> str:
        """Show what was said since the last turn, and return what the person types."""
        messages = request.messages or ()
        if self._shown == 0 and request.tools:
            self._show_tools(request.tools)
        self.show_messages(messages)
        self._show("you:")
        self._shown = len(messages) + 1  # the turn itself is on the screen when it has been typed
        return self._read_turn()

    def show_messages(self, messages: Sequence[Message]) -> None:
        """Show those of a conversation's messages that have not been seen."""
        for message in messages[self._shown :]:
            for line in message_lines(message):
                self._show(line)
        self._shown = max(self._shown, len(messages))

    def _show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._show(f"tools, called by writing {CALL}:")
        for tool in tools:
            for line in tool_lines(tool):
                self._show(line)

    def _read_turn(self) -> str:
        lines: list[str] = []
        while True:
            try:
                line = self._read_line().rstrip("\r")
            except EOFError as error:
                if not lines:
                    raise Left("there is no more to read") from error
                break
            except UnicodeDecodeError as error:
                raise DataError(f"what was typed is no text: {error}", hint="write UTF-8") from error
            if line:
                lines.append("" if line == "\\" else line)
            elif lines:
                break
        # A terminal may hand over bytes that are no character: no tokenizer takes them.
        return "\n".join(lines).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def message_lines(message: Message) -> Iterator[str]:
    """Yield a message for reading: who speaks, and below, indented, what is said and called."""
    name = message.get("name")
    yield visible(f"{message.get('role')}{f' ({name})' if name else ''}:")
    content = message.get("content")
    said = [prompt_text(content)] if content else []
    calls = [json.dumps(call, ensure_ascii=False, default=str) for call in message.get("tool_calls") or ()]
    yield indented("\n".join([*said, *calls]) or "(empty)")


def tool_lines(tool: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a tool and what it is for, and below it the schema of its arguments."""
    function = tool.get("function", tool)
    about = str(function.get("description") or "").strip()
    yield indented(f"{function.get('name')}{f': {about}' if about else ''}")
    yield indented(indented(json.dumps(function.get("parameters", {}), ensure_ascii=False)))


def outcome_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the episode of a record ended and what it earned, part by part."""
    yield f"stop: {record['stop']}"
    if record["score"] is None:
        yield visible(f"no score: {record['outcome']}{': ' if record['reason'] else ''}{record['reason']}")
        return
    yield f"score: {number(float(record['score']))}"
    parts = record["rewards"]
    if len(parts) > 1 or list(parts.values()) != [record["score"]]:
        yield from (indented(f"{name}: {number(float(part))}") for name, part in parts.items())


def indented(text: str) -> str:
    """Return a text two columns further in, with characters that steer a terminal spelled out."""
    return textwrap.indent(visible(text), "  ", lambda line: True)
