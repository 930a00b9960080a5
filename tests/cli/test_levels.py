"""The column that tells rows apart by difficulty: looked for, asked for, refused."""

from __future__ import annotations

from typing import Any

import pytest

from ramet.cli.levels import column_of, in_order, level_of
from ramet.errors import ConfigError


def nested(*difficulties: Any) -> list[dict[str, Any]]:
    return [{"prompt": "?", "entry": {"metadata": {"difficulty": each}}} for each in difficulties]


def test_the_first_column_that_differs_is_found() -> None:
    rows = [{"prompt": "?", "difficulty": 1, "level": level} for level in (1, 2)]
    assert column_of(rows, None) == "level"
    assert column_of(nested({"terms": 2}, {"terms": 3}), None) == "entry.metadata.difficulty"


def test_nothing_is_found_where_no_column_tells_rows_apart() -> None:
    assert column_of([{"prompt": "?"}, {"prompt": "!"}], None) is None
    assert column_of(nested({"terms": 2}, {"terms": 2}), None) is None
    assert column_of([{"prompt": "?", "level": 1}, {"prompt": "?"}], None) is None


def test_a_column_that_was_asked_for_may_lie_deep_or_have_a_dot_in_its_name() -> None:
    assert column_of(nested(1), "entry.metadata.difficulty") == "entry.metadata.difficulty"
    assert level_of({"a.b": 3, "a": {"b": 4}}, "a.b") == "3"
    assert level_of({"a": {"b": {"c.d": "x"}}}, "a.b.c.d") == "x"


def test_a_column_that_is_not_there_is_refused_with_the_nearest() -> None:
    rows = [{"prompt": "?", "level": 1}, {"prompt": "?", "levels": 1, "entry": {"size": 2}}]
    with pytest.raises(ConfigError, match=r'row 1 has no column "level"\n.*did you mean "levels"\?') as refused:
        column_of(rows, "level")
    assert "entry.size" in str(refused.value)
    with pytest.raises(ConfigError, match=r'row 0 has no column "level\.x"'):
        column_of(rows, "level.x")


@pytest.mark.parametrize(
    ("value", "text"),
    [("hard", "hard"), (3, "3"), (0.5, "0.5"), (True, "true"), ((1, 2), "[1, 2]"), (None, "null"), ({3}, '"{3}"')],
)
def test_a_level_is_text(value: Any, text: str) -> None:
    assert level_of({"level": value}, "level") == text


def test_levels_are_in_the_order_of_numbers_where_they_are_numbers() -> None:
    assert in_order(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert in_order(["10", "9", "easy"]) == ["10", "9", "easy"]
    assert in_order([]) == []
