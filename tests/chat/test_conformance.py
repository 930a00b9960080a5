"""The table of docs/templates.md is what the command prints, and says of each template what is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.templates import HEAD, row
from tests.chat.conformance import FAMILIES, REPLY, Family
from tests.chat.measured import EQUALITIES, Found, measure, seam_of

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
        found = row(family)
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


def each_kind() -> list[Any]:
    """Each family with each kind of tokenizer; SmolLM2 has its own, which is tried once."""
    kinds = ("bytes", "pieces", "characters")
    return [
        pytest.param(family, kind, id=f"{family.name}-{family.package}-{kind}")
        for family in FAMILIES
        for kind in (kinds[:1] if family.name == "SmolLM2" else kinds)
    ]


@pytest.mark.parametrize(("family", "kind"), each_kind())
def test_each_turn_is_the_templates_own_and_ids_are_where_it_writes_the_answers_so(family: Family, kind: str) -> None:
    """Whatever a template does: the text is its own after each reply, or the conversation has forked there."""
    try:
        found = measure(family, kind)
    except LookupError as error:
        pytest.skip(str(error))
    played = {name: one for name, one in found.items() if isinstance(one, Found)}
    assert {"plain", "cut", "empty"} <= set(played)
    assert all(one.equal in EQUALITIES[:2] for one in played.values())
    if kind == "characters" and family.name != "SmolLM2":
        assert {one.equal for one in played.values()} == {"text and ids"}
    elif not family.package:
        assert all(one.equal == "text and ids" for name, one in played.items() if name not in ("edges", "empty"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}-{family.package}")
def test_calls_that_the_template_would_spell_otherwise_are_kept_as_written_or_fork(family: Family) -> None:
    """Never in silence: an odd spelling is not the template's, so either the text went in, or a piece began."""
    try:
        found, (between, opening) = measure(family)["odd calls"], seam_of(family)
    except LookupError as error:
        pytest.skip(str(error))
    if isinstance(found, str):
        return
    assert found.forks or found.structured != "text and ids"
    plain = measure(family)["plain"]
    assert isinstance(plain, Found)
    if not plain.forks:  # what the conversation appended is what the template writes
        assert plain.seam == (between + REPLY + opening).removeprefix(family.trail)


def test_the_table_says_no_where_it_is_so() -> None:
    """By hand: of these templates it is known what they do with calls that are given as calls."""
    known = ("qwen25", "llama3", "chatml", "mistral")
    measured = {family.name: measure(family) for family in FAMILIES if family.name in known and not family.package}
    structured = {
        name: [one.structured if isinstance(one, Found) else "" for one in (found["call"], found["parallel"])]
        for name, found in measured.items()
    }
    assert structured["qwen25"] == ["text and ids", "text and ids"]
    assert structured["llama3"] == ["text and ids", "refused"]  # one call a turn
    assert structured["chatml"] == ["calls left out", "calls left out"]
    odd = {name: found["odd calls"] for name, found in measured.items()}
    assert [one.forks for name in ("qwen25", "mistral") if isinstance(one := odd[name], Found)] == [0, 4]
