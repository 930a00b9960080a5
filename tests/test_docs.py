"""What docs/ says is so: its examples run, the tests that it cites are there, and its table is complete."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ramet.envs
import ramet.forest
import ramet.specs
import ramet.transforms

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "environments.md"
PLACES = ["ramet.envs", "ramet.transforms", "ramet.specs", "ramet.forest", "ramet.ragged"]
NAMES = sorted({*ramet.envs.__all__, *ramet.transforms.__all__, *ramet.specs.__all__, *ramet.forest.__all__} - {"ROOT"})
KINDS = {"argument", "behaviour", "error", "key", "name"}


@functools.cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def cited() -> list[tuple[str, str, str]]:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    found = [
        (page, *hit) for page in pages for hit in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text("utf-8"))
    ]
    return [(page.name, path, name) for page, path, name in found]


def sections() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the name of each table of the page, and its rows of cells."""
    table = PAGE.read_text(encoding="utf-8").split("## The table", 1)[1]
    for part in re.split(r"^#{3,4} ", table, flags=re.M)[1:]:
        name, *lines = part.splitlines()
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")][2:]
        yield name.strip("`"), [[cell.strip() for cell in row] for row in rows]


def named(dotted: str) -> Any:
    head, *rest = dotted.split(".")
    place = next(place for place in map(importlib.import_module, PLACES) if hasattr(place, head))
    return functools.reduce(getattr, rest, getattr(place, head))


SECTIONS = dict(sections())


def test_every_test_that_is_cited_is_there() -> None:
    assert len(cited()) > 200
    missing = [
        f"{page}: {path}::{name}"
        for page, path, name in cited()
        if not (ROOT / path).exists() or name not in names_in(ROOT / path)
    ]
    assert missing == []


@pytest.mark.parametrize("name", SECTIONS)
def test_each_row_says_what_it_is_of_and_cites_a_test(name: str) -> None:
    assert SECTIONS[name]
    for row in SECTIONS[name]:
        assert len(row) == 4, row
        assert row[1] in KINDS, row
        assert row[0], row
        assert row[2], row
        assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", row[3]), row


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_in_the_table(name: str) -> None:
    words = {word for rows in SECTIONS.values() for row in rows for word in re.findall(r"\w+", row[0])}
    assert name in SECTIONS or name in words


@pytest.mark.parametrize("name", SECTIONS)
def test_arguments_and_defaults_are_those_of_the_signature(name: str) -> None:
    said = [row[0].strip("`") for row in SECTIONS[name] if row[1] == "argument"]
    parameters = [p for p in inspect.signature(named(name)).parameters.values() if p.name != "self"]
    shown = []
    for parameter in parameters:
        default = parameter.default
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        value = "bytes(range(16))" if default == bytes(range(16)) else repr(default)
        shown.append(star + parameter.name + ("" if default is parameter.empty else f"={value}"))
    assert said == shown


def test_the_examples_of_the_page_run() -> None:
    failed, attempted = doctest.testfile(
        str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    assert attempted > 40
    assert failed == 0
