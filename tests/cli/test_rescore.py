"""Stored rollouts judged again: a new file beside the old one, and what changed, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ramet.cli import main as cli
from ramet.metrics import read, wilson

REWARDS = """
def lenient(sample):
    return float(sample.row["answer"] in sample.completion)


def named(sample):
    return {"right": float(sample.completion == sample.row["answer"]), "prompted": 0.5 * (sample.row["prompt"] == "?")}


def abstains(sample):
    return None


def nonsense(sample):
    return "good"


def says(sample):
    print("judging")
    return 1.0


def fails(sample):
    raise KeyError("gone")
"""


def record(when: str, group: int, completion: str, score: float | None, **more: Any) -> dict[str, Any]:
    kind = "scored" if score is not None else "environment_error"
    common = {"member": 0, "prompt": "?", "prompt_tokens": [1], "completion_tokens": [5, 2], "messages": []}
    named = {"step": 0, "decoding": "greedy", "stop": "eos", "row": {"answer": "4"}, "advantage": 0.5}
    rewards = {} if score is None else {"reward": score}
    own = {"when": when, "group": group, "completion": completion, "score": score, "rewards": rewards}
    return {**common, **named, **own, "outcome": kind, "reason": "", **more}


RECORDS = [
    record("before", 0, "5", 0.0),
    record("before", 1, "4", 1.0),
    record("after", 0, "it is 4", 0.0),
    record("after", 1, "4", 1.0),
    record("after", 2, "", None, stop="error"),
    record("train", 7, "4.", 0.0, decoding="sampled"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in RECORDS), encoding="utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return run


def rescore(folder: Path, function: str, *words: str) -> Result:
    reward = f"{folder.parent / 'rewards.py'}:{function}"
    return CliRunner().invoke(cli.main, ["rescore", str(folder), "--reward", reward, *words], prog_name="ramet")


def test_what_changed_is_shown_for_each_time_and_decoding(folder: Path) -> None:
    """By hand: before, nothing changes; after, one of three verdicts does, and the failed one stays without a score."""
    before = (folder / "rollouts.jsonl").read_bytes()
    done = rescore(folder, "lenient", "--json")
    assert done.exit_code == 0, done.output
    found = {change.pop("rollouts"): change for change in json.loads(done.stdout)["rollouts"]}
    half, all_of_two, none_of_one, all_of_one = wilson(1, 2), wilson(2, 2), wilson(0, 1), wilson(1, 1)
    assert found == {
        "before, greedy": {"old": ends(0.5, half), "new": ends(0.5, half), "changed": 0, "count": 2},
        "after, greedy": {"old": ends(0.5, half), "new": ends(1.0, all_of_two), "changed": 1, "count": 3},
        "train": {"old": ends(0.0, none_of_one), "new": ends(1.0, all_of_one), "changed": 1, "count": 1},
    }
    assert (folder / "rollouts.jsonl").read_bytes() == before


def ends(value: float, interval: tuple[float, float]) -> dict[str, float]:
    return {"value": value, "low": interval[0], "high": interval[1]}


def test_the_new_file_has_the_same_rollouts_with_new_verdicts(folder: Path) -> None:
    """The reward sees the row with its prompt, which is stored once."""
    done = rescore(folder, "named")
    assert done.exit_code == 0, done.output
    new = read(folder / "rollouts-rescored.jsonl")
    verdict = ("score", "rewards", "outcome", "reason", "advantage")
    kept = [{key: value for key, value in line.items() if key not in verdict} for line in RECORDS]
    assert [{key: value for key, value in line.items() if key not in verdict} for line in new] == kept
    assert [line["score"] for line in new] == [0.5, 1.5, 0.5, 1.5, None, 0.5]
    assert new[1]["rewards"] == {"right": 1.0, "prompted": 0.5}
    assert new[1]["advantage"] is None


def test_the_table_is_readable_and_names_the_file(folder: Path) -> None:
    lines = rescore(folder, "lenient").stdout.splitlines()
    assert lines[0].split("  ")[0] == "rollouts"
    assert " ".join(lines[2].split()) == "after, greedy 0.500 (0.095 to 0.905) 1.000 (0.342 to 1.000) 1 of 3"
    assert lines[-1] == f"rescored: {folder / 'rollouts-rescored.jsonl'}"


def test_what_a_reward_prints_is_no_part_of_what_was_asked_for(folder: Path) -> None:
    done = rescore(folder, "says", "--json")
    assert json.loads(done.stdout)["reward"].endswith(":says")
    assert done.stderr.count("judging") == sum(one["outcome"] == "scored" for one in RECORDS)


def test_what_has_no_score_any_more_is_no_mean(folder: Path) -> None:
    done = rescore(folder, "abstains")
    line = " ".join(done.stdout.splitlines()[1].split())
    assert line == "before, greedy 0.500 (0.095 to 0.905) - 2 of 2"


def test_where_nothing_has_a_score_it_says_why_and_fails(folder: Path) -> None:
    for words in ([], ["--json"]):
        done = rescore(folder, "fails", *words)
        assert done.exit_code == 1
        first = done.stderr.splitlines()[0]
        assert first.startswith("5 without a score: ")
        assert "KeyError: 'gone'" in first
    assert len(read(folder / "rollouts-rescored-2.jsonl")) == len(RECORDS)


def test_an_older_rescoring_is_not_written_over(folder: Path) -> None:
    for number in ("", "-2", "-3"):
        assert rescore(folder, "lenient").stdout.endswith(f"rollouts-rescored{number}.jsonl\n")
    assert rescore(folder, "lenient", "--out", str(folder / "mine.jsonl")).exit_code == 0
    there = (folder / "mine.jsonl").read_bytes()
    done = rescore(folder, "abstains", "--out", str(folder / "mine.jsonl"))
    assert done.exit_code == 2
    assert done.stderr.endswith("hint: name a file that is not there\n")
    assert (folder / "mine.jsonl").read_bytes() == there
    done = rescore(folder, "abstains", "--out", str(folder / "rollouts.jsonl"))
    assert done.exit_code == 2
    assert len(read(folder / "rollouts.jsonl")) == len(RECORDS)


def test_a_reward_that_is_none_leaves_no_file(folder: Path) -> None:
    done = rescore(folder, "nonsense")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: reward nonsense, group 0, member 0: expected a finite number")
    done = rescore(folder, "leniant")
    assert done.exit_code == 2
    assert 'did you mean "lenient"?' in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["rollouts.jsonl"]


def test_a_folder_without_rollouts_is_refused(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.main, ["rescore", str(tmp_path), "--reward", f"{tmp_path / 'rewards.py'}:lenient"])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {tmp_path} has no rollouts")
    (folder / "rollouts.jsonl").write_text("", encoding="utf-8")
    assert "holds no rollouts" in rescore(folder, "lenient").stderr


def test_rollouts_of_an_older_version_say_what_they_lack(folder: Path) -> None:
    line = {key: value for key, value in RECORDS[0].items() if key != "row"}
    (folder / "rollouts.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    done = rescore(folder, "lenient")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: record 0 has no row: it can not be judged again\nhint: ")


def test_the_interval_of_scores_that_are_0_or_1_stays_between_them(folder: Path) -> None:
    """By hand: the problems' means are 1, 1, 1 and 1/2, so 7/8, and Student's t would end at 1.27."""
    right = [record("after", group, "4", 1.0) for group in (0, 0, 1, 1, 2, 2, 3)]
    lines = [*right, record("after", 3, "5", 0.0)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    [change] = json.loads(rescore(folder, "lenient", "--json").stdout)["rollouts"]
    assert change["old"]["value"] == change["new"]["value"] == 7 / 8
    assert change["old"]["high"] == change["new"]["high"] == 1.0
    assert 0.0 < change["old"]["low"] < 7 / 8


def test_the_ends_of_a_run_that_was_made_longer_are_told_apart(folder: Path) -> None:
    lines = [record("before", 0, "5", 0.0), record("after", 0, "5", 0.0, step=2), record("after", 0, "4", 1.0, step=4)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = json.loads(rescore(folder, "lenient", "--json").stdout)["rollouts"]
    assert [(change["rollouts"], change["new"]["value"]) for change in found] == [
        ("before, greedy", 0.0),
        ("after 2 steps, greedy", 0.0),
        ("after 4 steps, greedy", 1.0),
    ]
