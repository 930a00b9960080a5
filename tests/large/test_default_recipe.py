"""The default recipe does what the README says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ramet.cli.main import main


@pytest.mark.large
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_gets_better_by_reinforcement_learning(seed: int, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["train", "--runs", str(tmp_path), "--set", f"seed={seed}", "--traceback"])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "sorting" / "summary.json").read_text(encoding="utf-8"))
    assert summary["held_out"]["before"]["greedy"]["score"] <= 0.5
    assert summary["held_out"]["after"]["greedy"]["score"] >= 0.9
    assert summary["difference"]["greedy"]["low"] > 0
    text = (tmp_path / "sorting" / "report.html").read_text(encoding="utf-8")
    assert "<html" in text
