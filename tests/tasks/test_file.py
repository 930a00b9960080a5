"""Prompts and a reward of the user's own: found where they are named, and a clear word where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ramet.checking import check_task
from ramet.errors import ConfigError, DataError
from ramet.tasks import Judge
from ramet.tasks.file import file, load_reward
from ramet.types import Sample, StopReason

REWARD = """
from __future__ import annotations
from dataclasses import dataclass

LIMIT = 3

@dataclass
class Words:
    count: int

def right(sample):
    return float(sample.completion == sample.row["answer"])

def short(sample):
    return float(Words(len(sample.completion.split())).count < LIMIT)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    write(tmp_path / "train.jsonl", [{"prompt": "2+2=", "answer": "4", "level": 1}, {"prompt": "3+3=", "answer": "6"}])
    write(tmp_path / "test.jsonl", [{"prompt": "4+4=", "answer": "8"}])
    return tmp_path


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def judged(reward: Any, row: Any, completion: str) -> float | None:
    (outcome,) = Judge(reward)([Sample(row["prompt"], completion, (1,), (2,), row, StopReason.EOS, 0, 0)])
    return outcome.score


def test_reference_answers_earn_the_full_reward_and_others_do_not(folder: Path) -> None:
    task = file(folder / "train.jsonl", f"{folder / 'mine.py'}:right", held_out=folder / "test.jsonl")
    assert task.answer is not None
    for row in [*task.train, *task.held_out]:
        assert judged(task.score, row, task.answer(row)) == 1.0
        assert judged(task.score, row, task.answer(row) + "1") == 0.0
    assert task.train[0]["level"] == 1


def test_the_task_is_proved(folder: Path) -> None:
    report = check_task(file(folder / "train.jsonl", f"{folder / 'mine.py'}:right", held_out=folder / "test.jsonl"))
    assert report.passed, str(report)
    lenient = check_task(file(folder / "train.jsonl", f"{folder / 'mine.py'}:short"))
    assert [finding.name for finding in lenient.findings if finding.passed is False] == ["wrong"]


def test_without_an_answer_in_every_row_there_are_no_reference_answers(folder: Path) -> None:
    write(folder / "train.jsonl", [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3="}])
    task = file(folder / "train.jsonl", f"{folder / 'mine.py'}:short")
    assert task.answer is None
    assert task.held_out == []
    assert task.chance is None


@pytest.mark.parametrize("prompt", ["3+3=", [{"role": "user", "content": "hi"}]])
def test_a_held_out_prompt_must_not_be_trained_on(folder: Path, prompt: Any) -> None:
    write(folder / "train.jsonl", [{"prompt": "x"}, {"prompt": prompt}])
    write(folder / "test.jsonl", [{"prompt": "new"}, {"prompt": prompt}])
    with pytest.raises(DataError, match=r"1 of the 2 held-out prompts.*the first is row 1"):
        file(folder / "train.jsonl", f"{folder / 'mine.py'}:short", held_out=folder / "test.jsonl")


def test_a_reward_is_found_in_a_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "package_of_rewards").mkdir()
    (folder / "package_of_rewards" / "__init__.py").touch()
    (folder / "package_of_rewards" / "mine.py").write_text(REWARD, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    reward = load_reward("package_of_rewards.mine:short")
    assert judged(reward, {"prompt": "x"}, "one two three") == 0.0


def test_a_relative_path_starts_at_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert judged(load_reward("mine.py:short"), {"prompt": "x"}, "one two") == 1.0


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mine.py", ["package.module:function", "add a colon"]),
        (":f", ["package.module:function"]),
        ("mine.py:", ["package.module:function"]),
        ("mine.py:rigth", ['no function "rigth"', 'did you mean "right"?', "short"]),
        ("mine.py:LIMIT", ["must be a function", "int"]),
        ("other.py:f", ["no file at", "working folder"]),
        ("no_such_package.rewards:f", ["ModuleNotFoundError", "no_such_package", ".py file"]),
        ("broken.py:f", ["NameError", "undefined_name"]),
        ("torn.py:f", ["SyntaxError"]),
        (".mine:right", ["TypeError"]),
    ],
)
def test_a_reward_that_is_not_there_is_a_clear_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: list[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("undefined_name\n", encoding="utf-8")
    (folder / "torn.py").write_text("def f(:\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_reward(name)
    for part in [name, *parts]:
        assert part in str(caught.value)
