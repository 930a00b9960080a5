"""What a task may be made of."""

from __future__ import annotations

from typing import Any

import pytest

from ramet.errors import ConfigError, RewardError
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


@pytest.mark.parametrize("half", ["train", "held_out"])
@pytest.mark.parametrize(
    ("rows", "found"),
    [(None, "NoneType"), ("rows.jsonl", "str"), ({"prompt": "1"}, "dict"), (iter([{"prompt": "1"}]), "list_iterator")],
)
def test_rows_are_a_list(half: str, rows: Any, found: str) -> None:
    parts: dict[str, Any] = {"train": [{"prompt": "1"}], "held_out": [], half: rows}
    with pytest.raises(ConfigError, match=f"^task sums: {half} must be a list of rows: found {found}"):
        Task("sums", score=lambda sample: 1.0, **parts)


def test_a_task_has_a_name_and_a_score() -> None:
    with pytest.raises(ConfigError, match=r"^a task's name must be text: found None"):
        Task(None, [], [], lambda sample: 1.0)  # type: ignore[arg-type]
    with pytest.raises(RewardError, match=r"^task sums: score, the reward, must be a function of a sample: found int"):
        Task("sums", [], [], 1)  # type: ignore[arg-type]
