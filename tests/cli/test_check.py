"""`ramet check` shows what was found and ends with the exit code that says it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ramet.checking import Finding, Report
from ramet.cli import check as check_module
from ramet.cli import main as cli
from ramet.tasks import Task

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
async def later(row):
    return row["answer"]


wrong = Task("wrong", ROWS[:8], ROWS[8:], right, answer=kind)
late = Task("late", ROWS[:8], ROWS[8:], right, answer=later)
mute = Task("mute", ROWS[:8], ROWS[8:], right)


def says(sample):
    print("judging")
    return right(sample)


loud = Task("loud", ROWS[:8], ROWS[8:], says, answer=answer)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "checked.py"
    path.write_text(TASKS, encoding="utf-8")
    return str(path)


def check(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["check", *words], prog_name="ramet")


def test_what_a_task_prints_is_no_part_of_what_was_asked_for(tasks: str) -> None:
    done = check(f"{tasks}:loud", "--episodes", "4", "--json")
    assert json.loads(done.stdout)["proved"]
    assert set(done.stderr.split()) == {"judging"}


def test_a_task_that_is_right_passes(tasks: str) -> None:
    done = check(f"{tasks}:good", "--episodes", "4")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("task good: proved\n")
    assert "\n  passed   reference: " in done.stdout


def test_an_async_answer_is_awaited(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Finding("seed", None, "not looked at, for it takes long")
    monkeypatch.setattr("ramet.checking.repeating.seeds", lambda build, seed: elsewhere)
    done = check(f"{tasks}:late", "--episodes", "4", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["passed"], found["proved"]) == (True, True)


def test_without_a_reference_it_passes_and_is_not_proved(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Finding("seed", None, "not looked at, for it takes long")
    monkeypatch.setattr("ramet.checking.repeating.seeds", lambda build, seed: elsewhere)
    done = check(f"{tasks}:mute", "--episodes", "4")
    assert (done.exit_code, done.stderr) == (0, "")
    head = "task mute: passed, but nothing shows that a right answer earns full reward (no reference)\n"
    assert done.stdout.startswith(head)
    found = json.loads(check(f"{tasks}:mute", "--episodes", "4", "--json").stdout)
    assert (found["passed"], found["proved"]) == (True, False)


def test_a_reference_that_earns_nothing_fails(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Finding("seed", None, "not looked at, for it takes long")
    monkeypatch.setattr("ramet.checking.repeating.seeds", lambda build, seed: elsewhere)
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
    done = check(f"{tasks}:good", "--episodes", "4", "--full", "2", "--seed", "3", "--tool-seconds", "0.5")
    assert (done.exit_code, done.stdout) == (0, "task good: proved\n  skipped  rows: \\x1b\n")
    build = asked.pop("build")
    limits = {"episode_seconds": 60.0, "tool_seconds": 0.5, "score_seconds": 60.0}
    assert asked == {"episodes": 4, "full": 2.0, "seed": 3, **limits}
    assert build(7).held_out[0]["prompt"] == "8+1="
    assert pickle.loads(pickle.dumps(build))(7).name == "good"  # so that another process can build it


def test_a_task_that_is_not_there_is_no_failed_check() -> None:
    done = check("sortin")
    assert done.exit_code == 2
    assert 'did you mean "sorting"?' in done.stderr


def test_a_task_that_hangs_fails_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Finding("seed", None, "not looked at, for it takes long")
    monkeypatch.setattr("ramet.checking.repeating.seeds", lambda build, seed: elsewhere)
    path = tmp_path / "waits.py"
    waits = "async def waits(episode):\n    import asyncio\n    await asyncio.get_running_loop().create_future()\n\n\n"
    path.write_text(f'{TASKS}\n\n{waits}waiting = Task("waiting", ROWS, [], right, answer=answer, reply=waits)\n')
    done = check(f"{path}:waiting", "--episodes", "2", "--episode-seconds", "0.2")
    assert done.exit_code == 1
    assert "\n  FAILED   episodes: reply hung: the row " in done.stdout
    assert "\n  skipped  interleaved: not looked at: reply hung\n" in done.stdout


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_limit_is_above_nothing(tasks: str, seconds: str) -> None:
    done = check(f"{tasks}:good", "--score-seconds", seconds)
    assert done.exit_code == 2
    assert "score_seconds must be a finite number of seconds above 0: found" in done.stderr
    assert "--score-seconds" in done.stderr
