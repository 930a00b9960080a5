"""Rollouts that were stored, judged again by another reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ramet.errors import DataError
from ramet.tasks.judge import Judge
from ramet.tasks.stored_rows import read_back
from ramet.types import Outcome, Sample, StopReason

NEEDED = ("prompt", "completion", "prompt_tokens", "completion_tokens", "row", "stop", "group", "member", "messages")
NEVER_JUDGED = (StopReason.ERROR, StopReason.TIMEOUT)
Record = Mapping[str, Any]
"""One line of `rollouts.jsonl`."""


def sample_of(record: Record, where: str = "the record") -> Sample:
    """Return the sample that a line of `rollouts.jsonl` was made of, as a reward saw it.

    The columns of its row have the values that they had, but for those that "row_left_out" names. The state of an
    episode is not kept: `sample.state` is None. Raises `DataError`, naming `where`, for a record that lacks something
    or holds something else.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} must be an object: found a {type(record).__name__}")
    missing = [key for key in NEEDED if key not in record]
    if missing:
        raise DataError(
            f"{where} has no {', '.join(missing)}: it can not be judged again",
            hint="rollouts are stored with all that a reward sees by the runs of this version",
        )
    try:
        return Sample(
            prompt=record["prompt"],
            completion=str(record["completion"]),
            prompt_tokens=tuple(int(token) for token in record["prompt_tokens"]),
            completion_tokens=tuple(int(token) for token in record["completion_tokens"]),
            row={"prompt": record["prompt"], **read_back(record["row"], record.get("row_kinds", ()))},
            stop=StopReason(record["stop"]),
            group=int(record["group"]),
            member=int(record["member"]),
            messages=tuple(dict(message) for message in record["messages"]),
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is no rollout: {error}") from error


def rescore(records: Iterable[Record], judge: Judge) -> list[dict[str, Any]]:
    """Return the records with what `judge` says of them now: score, rewards, outcome and reason.

    A rollout that was never judged, because it failed or ran out of time before its end, stays as it is. The advantages
    are of the old scores, and become None. Raises what `sample_of` and the judge raise.

    >>> record = {
    ...     "prompt": "2+2=", "completion": "4", "prompt_tokens": [1, 2], "completion_tokens": [3], "row": {},
    ...     "stop": "eos", "group": 0, "member": 0, "messages": [], "score": 0.0, "advantage": -1.0,
    ... }
    >>> (again,) = rescore([record], Judge(lambda sample: float(sample.completion == "4")))
    >>> again["score"], again["outcome"], again["advantage"]
    (1.0, 'scored', None)
    """
    kept = list(records)
    samples = [sample_of(record, f"record {number}") for number, record in enumerate(kept)]
    judged = [number for number, sample in enumerate(samples) if sample.stop not in NEVER_JUDGED]
    outcomes = dict(zip(judged, judge([samples[number] for number in judged]), strict=True))
    return [
        {**record, **_said(outcomes[number])} if number in outcomes else dict(record)
        for number, record in enumerate(kept)
    ]


def _said(outcome: Outcome) -> dict[str, Any]:
    return {
        "score": outcome.score,
        "rewards": dict(outcome.rewards),
        "outcome": outcome.kind.value,
        "reason": outcome.reason,
        "advantage": None,
    }
