"""What a task may be made of."""

from __future__ import annotations

from typing import Any

import pytest

from ramet.errors import ConfigError
from ramet.tasks import Task


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"max_turns": 0}, "max_turns must be a whole number from 1 on: found 0"),
        ({"max_turns": "3"}, "max_turns must be a whole number from 1 on: found '3'"),
        ({"max_turns": True}, "max_turns must be a whole number"),
        ({"tools": len}, "tools must be a list of functions: found builtin_function_or_method"),
        ({"tools": "len"}, "tools must be a list of functions: found str"),
        ({"reply": "no"}, "reply must be a function: found str"),
        ({"begin": {}}, "begin must be a function: found dict"),
        ({"player": 1}, "player must be a function: found int"),
        ({"answer": "4"}, "answer must be a function: found str"),
    ],
)
def test_what_can_be_no_part_of_a_task_is_refused_by_name(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^task sums: {message}"):
        Task("sums", [{"prompt": "1"}], [], lambda sample: 1.0, **parts)
