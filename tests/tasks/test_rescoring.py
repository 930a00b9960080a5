"""Stored rollouts: back to what the reward saw, and judged again."""

from __future__ import annotations

import datetime
import enum
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.cli import main as cli
from ramet.errors import DataError, RewardError
from ramet.evaluation import RolloutLog, record_of
from ramet.metrics import read
from ramet.tasks import Judge, rescore
from ramet.tasks.rescoring import NEEDED, sample_of
from ramet.types import Outcome, Sample, StopReason

RECORD: dict[str, Any] = {
    "when": "train",
    "step": 3,
    "group": 7,
    "member": 2,
    "prompt": "2+2=",
    "completion": "4",
    "prompt_tokens": [1, 5, 6],
    "completion_tokens": [9, 2],
    "messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}],
    "row": {"answer": "4", "level": 1},
    "score": 0.0,
    "rewards": {"old": 0.0},
    "advantage": -0.5,
    "outcome": "scored",
    "reason": "",
    "stop": "eos",
}


def right(sample: Sample) -> dict[str, float]:
    return {"right": float(sample.completion == sample.row["answer"]), "short": len(sample.completion_tokens) / 10}


def test_a_record_comes_back_as_the_reward_saw_it() -> None:
    assert sample_of(json.loads(json.dumps(RECORD))) == Sample(
        prompt="2+2=",
        completion="4",
        prompt_tokens=(1, 5, 6),
        completion_tokens=(9, 2),
        row={"prompt": "2+2=", "answer": "4", "level": 1},
        stop=StopReason.EOS,
        group=7,
        member=2,
        messages=({"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}),
        state=None,
    )


def test_what_the_reward_says_now_takes_the_place_of_what_it_said() -> None:
    (again,) = rescore([RECORD], Judge(right))
    changed = {"score": 1.2, "rewards": {"right": 1.0, "short": 0.2}, "advantage": None}
    assert again == {**RECORD, **changed}
    assert RECORD["score"] == 0.0


@pytest.mark.parametrize(
    ("verdict", "outcome", "reason"),
    [(None, "abstained", "returned None"), (LookupError("x"), "environment_error", "LookupError: x")],
)
def test_what_has_no_score_now_says_why(verdict: Any, outcome: str, reason: str) -> None:
    def reward(sample: Sample) -> Any:
        if verdict is not None:
            raise verdict

    (again,) = rescore([RECORD], Judge(reward))
    assert (again["score"], again["outcome"], again["rewards"]) == (None, outcome, {})
    assert reason in again["reason"]


@pytest.mark.parametrize("stop", ["error", "timeout"])
def test_a_rollout_that_was_never_judged_stays(stop: str) -> None:
    record = {**RECORD, "stop": stop, "outcome": "environment_error", "score": None, "reason": "the server died"}
    cut = {**RECORD, "stop": "turn_limit"}
    kept, judged = rescore([record, cut], Judge(right))
    assert kept == record
    assert judged["score"] == 1.2


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from(["4", "5", "four"]), max_size=6))
def test_each_record_has_its_own_verdict_in_its_place(completions: list[str]) -> None:
    again = rescore([{**RECORD, "completion": text} for text in completions], Judge(right))
    assert [record["rewards"]["right"] for record in again] == [float(text == "4") for text in completions]


def test_a_mistake_of_the_reward_stops_it() -> None:
    with pytest.raises(RewardError, match="group 7, member 2"):
        rescore([RECORD], Judge(lambda _: "high"))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("key", NEEDED)
def test_a_record_that_lacks_something_is_refused_by_name(key: str) -> None:
    record = {name: value for name, value in RECORD.items() if name != key}
    with pytest.raises(DataError, match=f"record 1 has no {key}"):
        rescore([RECORD, record], Judge(right))


@pytest.mark.parametrize(
    "wrong",
    [{"stop": "bored"}, {"row": 3}, {"completion_tokens": ["x"]}, {"completion_tokens": 3}, {"messages": [3]}],
)
def test_a_record_that_holds_something_else_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="record 0 is no rollout"):
        rescore([{**RECORD, **wrong}], Judge(right))
    with pytest.raises(DataError, match="must be an object: found a list"):
        rescore([[]], Judge(right))  # type: ignore[list-item]


@pytest.mark.parametrize("alias", ["messages", "prompt"])
def test_a_row_comes_back_with_columns_that_a_record_uses_itself_and_with_values_that_json_lacks(alias: str) -> None:
    prompt = [{"role": "user", "content": "2+2="}]
    row: dict[str, Any] = {
        "prompt": prompt, alias: prompt, "score": 7, "row": {"row": 1}, "row_kinds": "mine", "completion": None,
        "when": datetime.date(2024, 2, 29), "size": (2, {3: b"x"}), "weights": torch.tensor([[0.5], [math.inf]]),
        "count": np.int64(3), "messages": [{"role": "user", "content": "other"}] if alias == "prompt" else prompt,
    }  # fmt: skip
    sample = Sample(prompt, "4", (1,), (2,), row, StopReason.EOS, 0, 0)
    record = json.loads(json.dumps(record_of(sample, Outcome.scored(1.0), when="train", step=1), allow_nan=False))
    back = dict(sample_of(record).row)
    assert torch.equal(back.pop("weights"), row.pop("weights"))
    assert back == row
    assert "row_left_out" not in record


def test_a_column_that_can_not_be_stored_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "?", "answer": "4", "ask": print}
    sample = Sample("?", "4", (1,), (2,), row, StopReason.EOS, 0, 0)
    record = record_of(sample, Outcome.scored(1.0), when="train", step=1)
    with RolloutLog(tmp_path / "rollouts.jsonl") as log:
        log.extend([record, record])
    [line, _] = read(tmp_path / "rollouts.jsonl")
    assert line["row"] == {"answer": "4"}
    assert line["row_left_out"] == {"ask": "JSON can not hold a value of type builtin_function_or_method"}
    [told] = caplog.records
    assert told.getMessage().startswith("the column 'ask' of the data rows is left out of ")
    assert sample_of(line).row == {"prompt": "?", "answer": "4"}


@pytest.mark.parametrize(
    "kinds", [[[["answer"], "colour"]], [[["no"], "date"]], [3], [[[], "date"]], [[["level", 0], "set"]]]
)
def test_kinds_that_do_not_fit_are_refused(kinds: Any) -> None:
    with pytest.raises(DataError, match="record 0 is no rollout"):
        rescore([{**RECORD, "row_kinds": kinds}], Judge(right))


def test_the_command_writes_a_row_with_values_that_json_lacks_as_it_was(tmp_path: Path) -> None:
    """And again from what it wrote; a reward that changes its row changes nothing that is stored."""
    day, size = datetime.date(2024, 2, 29), (2, {3: b"x"})
    row = {"meta": {"day": day, "deep": [{"size": size}]}, "long": 10**5000, "scores": np.array([[0.5, math.nan]])}
    sample = Sample("?", "4", (1,), (2,), {"prompt": "?", **row}, StopReason.EOS, 0, 0)
    record = record_of(sample, Outcome.scored(0.0), when="train", step=1)
    (tmp_path / "rewards.py").write_text(
        "import datetime\n\n\ndef late(sample):\n    meta = sample.row['meta']\n"
        "    right = meta.pop('day') == datetime.date(2024, 2, 29) and meta['deep'][0].pop('size')[1] == {3: b'x'}\n"
        "    return float(right and sample.row['long'] == 10**5000)\n",
        encoding="utf-8",
    )
    for name in ("first", "second"):
        run = tmp_path / name
        run.mkdir()
        with RolloutLog(run / "rollouts.jsonl") as log:
            log.extend([record, record])
        done = CliRunner().invoke(cli.main, ["rescore", str(run), "--reward", f"{tmp_path / 'rewards.py'}:late"])
        assert done.exit_code == 0, done.output
        old, new = read(run / "rollouts.jsonl"), read(run / "rollouts-rescored.jsonl")
        assert [(line["row"], line["row_kinds"]) for line in new] == [(line["row"], line["row_kinds"]) for line in old]
        assert [line["score"] for line in new] == [1.0, 1.0]
        record = new[0]
    back = dict(sample_of(record).row)
    scores = back.pop("scores")
    assert (scores.dtype, scores.tolist()[0][0], math.isnan(scores[0, 1])) == (np.float64, 0.5, True)
    assert back == {"prompt": "?", "meta": {"day": day, "deep": [{"size": size}]}, "long": 10**5000}


def test_a_value_that_would_come_back_as_another_is_named_and_the_file_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    level = enum.IntEnum("Level", ["LOW"])
    row = {"prompt": "?", "answer": "4", "level": [level.LOW], "table": np.zeros(2, "i4,f4")}  # type: ignore[attr-defined]
    sample = Sample("?", "4", (1,), (2,), row, StopReason.EOS, 0, 0)
    with RolloutLog(tmp_path / "rollouts.jsonl") as log:
        log.append(record_of(sample, Outcome.scored(1.0), when="train", step=1))
    assert [told.args[0] for told in caplog.records if isinstance(told.args, tuple)] == ["level", "table"]
    [line] = read(tmp_path / "rollouts.jsonl")
    assert line["row_left_out"] == {
        "level": "JSON can not hold a value of type Level at ['level', 0]",
        "table": "JSON can not hold a value of type ndarray of [('f0', '<i4'), ('f1', '<f4')]",
    }
    (again,) = rescore([line], Judge(right))
    assert again["rewards"] == {"right": 1.0, "short": 0.1}


def test_a_row_that_was_stored_before_its_kinds_were_is_read_as_it_is() -> None:
    row = {"answer": "4", "day": "2024-02-29", "sizes": [[1, 2], None]}
    assert "row_kinds" not in RECORD
    assert sample_of({**RECORD, "row": row}).row == {"prompt": "2+2=", **row}
