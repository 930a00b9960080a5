"""What an environment may reply: text, messages, or the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramet.errors import DataError, RametError, half_character
from ramet.tasks.verdicts import NO_EXIT, exit_call, name_of
from ramet.types import Message

CHARACTERS = 1_000_000
"""How many characters a reply may have: more fit no context, and tokenising them takes a minute and more."""


class WrongReply(RametError, TypeError):
    """A `reply` returned what is no reply, or it or `begin` called `sys.exit`: this ends the run, not one rollout."""


def left(what: str, function: Any, error: SystemExit) -> WrongReply:
    """Return the error that names the function of a task (`what` it is) that called `sys.exit`."""
    return WrongReply(
        f"{what} {name_of(function)} called {exit_call(error)}: it raised SystemExit: {error}", hint=NO_EXIT
    )


def as_messages(value: Any, name: str) -> list[Message] | None:
    """Return what `reply` (called `name`) said as messages: text is the user's; None stays None.

    Raises `WrongReply` for what is no reply, and `DataError` for one of more than `CHARACTERS` or with half of one.

    >>> as_messages("no: higher", "reply")
    [{'role': 'user', 'content': 'no: higher'}]
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _bounded([{"role": "user", "content": value}], name)
    if _is_message(value):
        return _bounded([value], name)
    if isinstance(value, Sequence) and not isinstance(value, bytes) and value and all(map(_is_message, value)):
        return _bounded(list(value), name)
    found = repr(value)
    raise WrongReply(
        f"reply {name}: expected text, a message ({{'role': ..., 'content': ...}}), a list of at least one, or None: "
        f"found {found[:80]} of type {type(value).__name__}",
        hint="return text for a message of the user's, and None to end the episode",
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _bounded(messages: list[Message], name: str) -> list[Message]:
    texts = [text for message in messages for text in _texts(message.get("content"))]
    count = sum(map(len, texts))
    if count > CHARACTERS:
        raise DataError(f"reply {name}: expected at most {CHARACTERS} characters: found {count}")
    half = next(filter(None, map(half_character, texts)), "")
    if half:
        raise DataError(f"reply {name}: expected text: found {half}, half of a character that was cut")
    return messages


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, Sequence) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]
