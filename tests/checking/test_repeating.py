"""Rows that follow from the seed alone, and rows that follow from chance, from hashes or from the clock."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

import pytest

from ramet.checking import check_task, repeating
from ramet.cli.asked import task_with
from ramet.config import TaskConfig
from ramet.tasks import Task

MINE = """
from ramet.tasks import Task
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(12)]
def steady(seed):
    return Task("mine", ROWS, [], lambda s: 0.0)
def by_hash(seed):
    return Task("mine", sorted(ROWS, key=lambda row: hash(row["prompt"])), [], lambda s: 0.0)
"""


def test_rows_are_compared_with_those_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_of_hash.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine_of_hash")
    steady, by_hash = repeating.seeds(mine.steady, 0), repeating.seeds(mine.by_hash, 0)
    assert steady.passed
    assert steady.detail == "the same rows twice and in another process, the seed chooses nothing"
    assert by_hash.passed is False
    assert "differ in another process" in by_hash.detail
    unknown = repeating.seeds(lambda seed: mine.steady(seed), 0)
    assert unknown.passed
    assert "not tried in another process" in unknown.detail


YOURS = """
import datetime, random, time
from ramet.tasks import Task

def right(sample):
    return float(sample.completion == sample.row["answer"])

def answer(row):
    return row["answer"]

def task(numbers, note=""):
    rows = [{"prompt": f"{note}{number}+1=", "answer": str(number + 1)} for number in numbers]
    return Task("yours", rows[:6], rows[6:], right, answer=answer)

def seeded(seed):
    noted = repr(datetime.datetime(2020, 1, 1))
    assert isinstance(datetime.datetime.now(), datetime.datetime) and isinstance(datetime.date.today(), datetime.date)
    held_out = random.Random("held out").sample(range(100, 200), 4)
    return task([*random.Random(seed).sample(range(100), 6), *held_out], noted)

def unseeded():
    return task(random.sample(range(10_000_000), 10))

def of_a_set():
    return task([len(word) for word in {"a" * n for n in range(1, 11)}])

def of_the_clock():
    return task([time.time_ns() + number for number in range(10)])

def of_today():
    return task(range(10), f"It is {datetime.date.today():%d %B}. ")
"""


def yours(folder: Path, name: str) -> partial[Task]:
    (folder / "yours.py").write_text(YOURS, encoding="utf-8")
    return partial(task_with, TaskConfig(name=f"{folder / 'yours.py'}:{name}"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("unseeded", "the rows of seed 0 differ when the task is built again"),
        ("of_the_clock", "the rows of seed 0 differ when the task is built again"),
        ("of_a_set", "the rows of seed 0 differ in another process, at another date and with other hashes of strings"),
        ("of_today", "the rows of seed 0 differ in another process, at another date and with other hashes of strings"),
    ],
)
def test_rows_of_a_file_that_do_not_follow_from_the_seed_fail_that_check_alone(
    tmp_path: Path, name: str, found: str
) -> None:
    build = yours(tmp_path, name)
    report = check_task(build(0), build=build, episodes=2)
    failed = [finding for finding in report.findings if finding.passed is False]
    assert [finding.name for finding in failed] == ["seed"]
    assert failed[0].detail == found


def test_rows_of_a_file_that_follow_from_the_seed_pass(tmp_path: Path) -> None:
    finding = repeating.seeds(yours(tmp_path, "seeded"), 0)
    assert (finding.passed, finding.detail) == (
        True,
        "the same rows twice and in another process, another seed gives others",
    )
