"""docs/invariants.md has a line for each thing that always holds, and each names tests that are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "invariants.md"
COUNT = 36


def rows(text: str) -> dict[int, tuple[str, list[tuple[str, str]]]]:
    """Return, for each number, what holds and the tests that it names: path and function."""
    found: dict[int, tuple[str, list[tuple[str, str]]]] = {}
    for number, what, tests in re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", text, flags=re.M):
        assert int(number) not in found, f"line {number} is there twice"
        found[int(number)] = what, re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
    return found


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    """Return the names of the test functions of a file, without running it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def faults(text: str) -> list[str]:
    """Return what is wrong with a page, a line each."""
    found = rows(text)
    wrong = [f"line {number} is missing" for number in range(1, COUNT + 1) if number not in found]
    wrong += [f"line {number} is one too many" for number in found if not 1 <= number <= COUNT]
    for number, (_, tests) in found.items():
        wrong += [f"line {number} names no test"] * (not tests)
        for path, name in tests:
            file = ROOT / path
            if not file.is_file() or name not in names_of_tests(file):
                wrong.append(f"line {number}: there is no {path}::{name}")
    return wrong


def test_each_line_is_there_and_names_tests_that_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert faults(text) == []
    assert list(rows(text)) == list(range(1, COUNT + 1))
    assert len(re.findall(r"`tests/", text)) == 1 + sum(len(tests) for _, tests in rows(text).values())


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (r"^\| 7 \|.*\n", "", "line 7 is missing"),
        (r"^\| 7 \|", "| 70 |", "line 70 is one too many"),
        (r"^(\| 7 \| .+ \|) .+ \|$", r"\1 nothing |", "line 7 names no test"),
        ("test_no_log_prob_is_made_up", "test_no_log_prob_is_made_upp", "line 7: there is no tests/policies"),
        ("tests/policies/test_person.py", "tests/policies/test_persons.py", "line 7: there is no tests/policies"),
    ],
)
def test_a_page_that_lacks_something_is_found_out(old: str, new: str, fault: str) -> None:
    text = re.sub(old, new, PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert any(line.startswith(fault) for line in faults(text))
