"""Tasks by name: what is known is built, what is not is refused with the nearest known one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramet.errors import ConfigError
from ramet.tasks import build_task


def test_options_and_seed_reach_the_builder() -> None:
    task = build_task("arithmetic", {"digits": 1, "held_out_size": 10, "train_size": 20}, seed=4)
    assert (len(task.train), len(task.held_out)) == (20, 10)
    other = build_task("arithmetic", {"digits": 1, "held_out_size": 10, "train_size": 20}, seed=5)
    assert task.held_out == other.held_out
    assert task.train != other.train


def test_a_list_from_a_file_of_settings_is_an_option() -> None:
    task = build_task("arithmetic", {"operations": ["+", "-"], "digits": [1, 2], "held_out_size": 10})
    assert {row["prompt"].strip("0123456789=") for row in task.train} == {"+", "-"}


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("arithmetics", {}, ['"arithmetics"', 'did you mean "arithmetic"?', "file", "reasoning-gym:DATASET"]),
        ("sort", {}, ['did you mean "sorting"?']),
        ("sorting", {"length": 3}, ['did you mean "lengths"?']),
        ("reasoning-gym", {}, ["reasoning-gym:DATASET"]),
        ("reasoning-gyn:chain_sum", {}, ["reasoning-gyn:chain_sum", "reasoning-gym:DATASET"]),
        ("reasoning_gym:chain_sum", {}, ["reasoning_gym:chain_sum", 'did you mean "reasoning-gym:chain_sum"?']),
        ("TextArena:Chess-v0", {}, ['did you mean "textarena:Chess-v0"?']),
        ("textarena", {}, ["textarena:GAME"]),
        ("calculater", {}, ['did you mean "calculator"?']),
        ("file:x", {}, ['"file:x"']),
        ("arithmetic", {"digit": 2}, ['"digit"', 'did you mean "digits"?', "modulus"]),
        ("arithmetic", {"seed": 2}, ['"seed"']),
        ("file", {"digits": 2}, ['"digits"', "known: none"]),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_known(name: str, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_task(name, options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"prompts": "p.jsonl"}, {"reward": "m:f"}])
def test_the_file_task_needs_prompts_and_a_reward(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs prompts"):
        build_task("file", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["prompts", "held_out", "reward"])
def test_other_tasks_read_no_files(key: str) -> None:
    with pytest.raises(ConfigError, match=f"task.{key} is read by the task file only"):
        build_task("arithmetic", **{key: "x"})  # type: ignore[arg-type]


def test_the_file_task_is_built_from_its_three_settings(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('"a"\n"b"\n', encoding="utf-8")
    (tmp_path / "test.jsonl").write_text('"c"\n', encoding="utf-8")
    (tmp_path / "mine.py").write_text("def reward(sample):\n    return 1.0\n", encoding="utf-8")
    task = build_task(
        "file",
        prompts=str(tmp_path / "train.jsonl"),
        held_out=str(tmp_path / "test.jsonl"),
        reward=f"{tmp_path / 'mine.py'}:reward",
    )
    assert [row["prompt"] for row in task.train] == ["a", "b"]
    assert [row["prompt"] for row in task.held_out] == ["c"]


MINE = """
from ramet.tasks import Task

ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]

def score(sample):
    return float(sample.completion == sample.row["answer"])

fixed = Task("fixed", ROWS, [], score)

def made(*, size=1, seed=0, label):
    return Task(f"{label} {seed}", ROWS[:size], [], score)

def plain(size):
    return Task("plain", ROWS[:size], [], score)

def open_to_all(**options):
    return Task(repr(options), ROWS, [], score)

def wrong():
    return ROWS

def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "script.py").write_text("import sys\n\nsys.exit(0)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("where", ["my_tasks.py", "my_tasks"])
def test_a_task_of_ones_own_is_named_by_its_file_or_module(where: str) -> None:
    assert build_task(f"{where}:fixed").name == "fixed"
    made = build_task(f"{where}:made", {"label": "mine", "size": 2}, seed=5)
    assert (made.name, len(made.train)) == ("mine 5", 2)
    assert len(build_task(f"{where}:plain", {"size": 1}, seed=5).train) == 1
    assert build_task(f"{where}:open_to_all", {"x": 1}).name == "{'x': 1}"


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("my_tasks.py:fixed", {"size": 1}, ['no option "size"', "known: none"]),
        ("my_tasks.py:made", {"label": "x", "sise": 1}, ['no option "sise"', 'did you mean "size"?']),
        ("my_tasks.py:made", {}, ['needs the option "label"', "task.options.label"]),
        ("my_tasks.py:made", {"label": "x", "seed": 1}, ['no option "seed"']),
        ("my_tasks.py:wrong", {}, ["must return a Task: found list"]),
        ("my_tasks.py:leaves", {}, ["calling leaves failed with SystemExit: 0"]),
        ("script.py:fixed", {}, ["script.py failed with SystemExit: 0"]),
        ("script:fixed", {}, ["importing script failed with SystemExit: 0"]),
        ("my_tasks.py:ROWS", {}, ["must be a Task, or a function", "found list"]),
        ("my_tasks.py:fixd", {}, ['the task "my_tasks.py:fixd"', 'no function "fixd"']),
        ("your_tasks.py:fixed", {}, ["no file at", "your_tasks.py"]),
        ("no_such_module:fixed", {}, ["ModuleNotFoundError", "no_such_module"]),
    ],
)
def test_a_task_of_ones_own_that_is_not_there_is_a_clear_error(
    name: str, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_task(name, options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["countdown", "word_guessing", "calculator"])
def test_the_tasks_that_are_shipped_are_built_by_name(name: str) -> None:
    task = build_task(name, {"held_out_size": 3, "train_size": 5, "form": "chat"}, seed=1)
    assert (task.name, len(task.train), len(task.held_out)) == (name, 5, 3)
