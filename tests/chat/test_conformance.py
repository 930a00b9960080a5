"""The table of docs/templates.md is what the command prints, and says of each template what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.templates import HEAD, row
from tests.chat.conformance import FAMILIES, REPLY, ROUNDS, Family, Found, measure

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
LINES = PAGE.read_text(encoding="utf-8").splitlines()
ROWS = LINES[LINES.index(HEAD) + 2 :]


def named(family: Family) -> str:
    """The row of a family in the page."""
    start = re.compile(
        rf"\| {re.escape(family.name)} \({re.escape(family.package)} [\w.]+\) \|"
        if family.package
        else rf"\| {re.escape(family.name)} \|"
    )
    (found,) = [line for line in ROWS if start.match(line)]
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}-{family.package}")
def test_a_row_says_what_the_command_prints(family: Family) -> None:
    wanted = named(family)
    try:
        found = row(family, ROUNDS, REPLY)
    except LookupError as error:
        pytest.skip(str(error))
    if family.package and f"({family.package} {family.version})" not in wanted:
        pytest.skip(f"the page is of another version of {family.package}: here is {family.version}")
    assert found == wanted


def test_there_are_rows_enough_and_one_for_each_template() -> None:
    assert len(ROWS) == len(FAMILIES)
    assert sum(not family.package for family in FAMILIES) >= 15
    assert sum(bool(family.package) for family in FAMILIES) >= 5
    assert len({family.package for family in FAMILIES if family.package}) >= 2
    assert len({family.source for family in FAMILIES if not family.package}) >= 20


@pytest.mark.parametrize("kind", ["bytes", "pieces", "characters"])
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.package], ids=lambda family: family.name
)
def test_text_is_always_the_templates_own_and_ids_are_where_it_writes_the_answers_so(family: Family, kind: str) -> None:
    found = measure(family, kind)
    played = {name: one for name, one in found.items() if isinstance(one, Found)}
    assert {"plain", "cut", "empty"} <= set(played)
    assert all(one.same_text for one in played.values())
    assert all(one.same_ids for name, one in played.items() if name not in ("edges", "empty"))
    if kind == "characters":
        assert all(one.same_ids for one in played.values())
