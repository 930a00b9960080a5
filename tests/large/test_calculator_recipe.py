"""The recipe of a task of several turns with a tool does what the README says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ramet.cli.main import main
from ramet.metrics import read


@pytest.mark.large
def test_a_model_gets_better_at_calling_a_tool_and_answering(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["train", "calculator", "--runs", str(tmp_path), "--traceback"])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "calculator" / "summary.json").read_text(encoding="utf-8"))
    assert summary["held_out"]["before"]["greedy"]["problems"] == 300
    assert summary["difference"]["greedy"]["value"] >= 0.2
    assert summary["difference"]["greedy"]["low"] > 0
    last = [one for one in read(tmp_path / "calculator" / "rollouts.jsonl") if one["when"] == "after"]
    roles = [[message["role"] for message in one["messages"]] for one in last if one["score"] == 1.0]
    assert roles
    assert sum("tool" in turns for turns in roles) >= 0.9 * len(roles)
