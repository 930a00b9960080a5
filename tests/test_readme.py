"""The README says what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tree_names_every_module_and_nothing_else() -> None:
    tree = README.split("## The tree")[1]
    listed = set(re.findall(r"(?<![\w/.])([a-z_]+(?:\.py|/))", tree.split("    examples/")[0])) - {"src/"}
    source = ROOT / "src" / "ramet"
    inside = {path.name + ("/" if path.is_dir() else "") for folder in source.iterdir() for path in folder.glob("*")}
    there = {path.name + ("/" if path.is_dir() else "") for path in source.iterdir() if not path.name.startswith("_")}
    top = {name for name in there if name.endswith((".py", "/"))}
    assert top <= listed <= top | inside | {"ramet/"}


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


def test_bringing_your_own_takes_at_most_15_lines_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = README.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    monkeypatch.chdir(tmp_path)
    assert code.count('"smollm2"') == 1
    assert code.count("steps=50") == 1
    small = code.replace('"smollm2"', '"tiny-llama"').replace("steps=50", "steps=1")
    exec(compile(small, "README.md", "exec"), {"__name__": "readme"})
    assert (tmp_path / "runs" / "sums" / "summary.json").is_file()


def test_nothing_is_left_to_be_filled_in() -> None:
    assert "@@" not in README
