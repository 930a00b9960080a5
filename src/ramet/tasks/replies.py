"""What an environment may reply: text, messages, or the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramet.errors import RametError
from ramet.types import Message


class WrongReply(RametError, TypeError):
    """A `reply` returned what is no reply: a mistake in the program, which ends the run and not one rollout."""


def as_messages(value: Any, name: str) -> list[Message] | None:
    """Return what `reply` (called `name`) said as messages: text is the user's; None stays None.

    >>> as_messages("no: higher", "reply")
    [{'role': 'user', 'content': 'no: higher'}]
    """
    if value is None:
        return None
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if _is_message(value):
        return [value]
    if isinstance(value, Sequence) and not isinstance(value, bytes) and value and all(map(_is_message, value)):
        return list(value)
    found = repr(value)
    raise WrongReply(
        f"reply {name}: expected text, a message ({{'role': ..., 'content': ...}}), a list of at least one, or None: "
        f"found {found[:80]} of type {type(value).__name__}",
        hint="return text for a message of the user's, and None to end the episode",
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)
