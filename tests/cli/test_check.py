"""`ramet check` shows what was found and ends with the exit code that says it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ramet.cli import check as check_module
from ramet.cli import main as cli
from ramet.tasks import Task
from ramet.tasks.check import Report
from ramet.tasks.repeating import Finding

TASKS = """
from ramet.tasks import Task

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(12)]


def right(sample):
    return float(sample.completion == sample.row["answer"])


def answer(row):
    return row["answer"]


def kind(row):
    return "0"


good = Task("good", ROWS[:8], ROWS[8:], right, answer=answer)
wrong = Task("wrong", ROWS[:8], ROWS[8:], right, answer=kind)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "checked.py"
    path.write_text(TASKS, encoding="utf-8")
    return str(path)


def check(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["check", *words], prog_name="ramet")


def test_a_task_that_is_right_passes(tasks: str) -> None:
    done = check(f"{tasks}:good", "--episodes", "4")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("task good: proved\n")
    assert "\n  passed   reference: " in done.stdout


def test_a_reference_that_earns_nothing_fails(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Finding("seed", None, "not looked at, for it takes long")
    monkeypatch.setattr("ramet.tasks.repeating.seeds", lambda build, seed: elsewhere)
    done = check(f"{tasks}:wrong", "--episodes", "4", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["task"], found["passed"]) == ("wrong", False)
    failed = [finding["check"] for finding in found["findings"] if finding["passed"] is False]
    assert failed == ["reference"]


def test_what_is_asked_reaches_the_check(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def check_task(task: Task, **named: Any) -> Report:
        asked.update(named)
        return Report(task.name, (Finding("rows", None, "\x1b"),))

    monkeypatch.setattr(check_module, "check_task", check_task)
    done = check(f"{tasks}:good", "--episodes", "4", "--full", "2", "--seed", "3")
    assert (done.exit_code, done.stdout) == (0, "task good: proved\n  skipped  rows: \\x1b\n")
    build = asked.pop("build")
    assert asked == {"episodes": 4, "full": 2.0, "seed": 3}
    assert build(7).held_out[0]["prompt"] == "8+1="
    assert pickle.loads(pickle.dumps(build))(7).name == "good"  # so that another process can build it


def test_a_task_that_is_not_there_is_no_failed_check() -> None:
    done = check("sortin")
    assert done.exit_code == 2
    assert 'did you mean "sorting"?' in done.stderr
