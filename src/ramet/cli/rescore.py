"""`ramet rescore`: the rollouts of a run, judged again by another reward."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ramet import metrics
from ramet.cli.reasons import reasons_of, tell
from ramet.cli.streams import prints_aside
from ramet.cli.tables import print_table, shown
from ramet.errors import DataError
from ramet.metrics import Interval, MetricsLog, clustered_mean, finite
from ramet.tasks.file import load_reward
from ramet.tasks.judge import Judge
from ramet.tasks.rescoring import rescore
from ramet.viewer.text import visible

Record = Mapping[str, Any]


def run(folder: Path, reward: str, out: Path | None, as_json: bool) -> int:
    """Judge the rollouts of a run again, write them to a new file beside the old one, and show what changed.

    Returns the exit code: 0, or 1 where nothing has a score now. Raises `DataError` for a folder without rollouts and
    for an output that is there already.
    """
    path = folder / "rollouts.jsonl"
    if not path.is_file():
        raise DataError(f"{folder} has no rollouts: expected rollouts.jsonl in it", hint="give the folder of a run")
    old = metrics.read(path)
    if not old:
        raise DataError(f"{path} holds no rollouts", hint="they are written when a run has sampled")
    for number, record in enumerate(old):
        score = record.get("score")
        if score is not None and (isinstance(score, bool) or not isinstance(score, (int, float))):
            raise DataError(f"{path}, rollout {number}: expected a number or null as its score, found {score!r}")
    for note in _what_is_missing(path, old):
        click.echo(visible(f"note: {note}"), err=True)
    with prints_aside(), contextlib.closing(Judge(load_reward(reward))) as judge:
        new = rescore(old, judge)
    written = _new_file(folder, out)
    with MetricsLog(written) as log:
        log.extend(new)
    changes = compare(old, new)
    code = tell(reasons_of(new), new)
    if as_json:
        found = {"reward": reward, "rollouts": [_as_table(change) for change in changes], "written": str(written)}
        click.echo(json.dumps(finite(found, "result")))
        return code
    rows = [
        (name, shown(before), shown(after), f"{changed} of {count}") for name, before, after, changed, count in changes
    ]
    print_table(("rollouts", "old", "new", "verdicts changed"), rows)
    click.echo("in brackets: 95% intervals, with the problems as the sample")
    click.echo(f"rescored: {written}")
    return code


Change = tuple[str, Interval | None, Interval | None, int, int]
"""Which rollouts, their old and new mean score, how many verdicts changed, and of how many."""


def compare(old: Sequence[Record], new: Sequence[Record]) -> list[Change]:
    """Return what changed, for each time and way in which rollouts were sampled."""
    steps: dict[str, set[Any]] = {}
    for record in old:
        steps.setdefault(str(record.get("when")), set()).add(record.get("step"))
    parts: dict[str, list[tuple[Record, Record]]] = {}
    for before, after in zip(old, new, strict=True):
        several = len(steps[str(before.get("when"))]) > 1
        parts.setdefault(_part(before, several=several), []).append((before, after))
    return [
        (
            name,
            _mean(before for before, _ in pairs),
            _mean(after for _, after in pairs),
            sum(_verdict(before) != _verdict(after) for before, after in pairs),
            len(pairs),
        )
        for name, pairs in parts.items()
    ]


def _part(record: Record, *, several: bool) -> str:
    """Return when and how a rollout was sampled; `several` steps of a run may be called "after": one made longer."""
    when, decoding = str(record.get("when")), record.get("decoding")
    if when == "train":
        return when
    when = f"{when} {record.get('step')} steps" if several else when
    return when if decoding is None else f"{when}, {decoding}"


def _what_is_missing(path: Path, records: Sequence[Record]) -> Iterator[str]:
    """Yield what of the rollouts in a file is not there to be judged."""
    if metrics.is_torn(path):
        yield f"the last line of {path} was cut short, and is left out"
    left_out: dict[str, Any] = {}
    for record in records:
        found = record.get("row_left_out")
        left_out.update(found if isinstance(found, Mapping) else {})
    for name, why in left_out.items():
        yield f"the column {name!r} of the data rows was not stored ({why}): a reward that reads it fails"


def _verdict(record: Record) -> tuple[Any, Any]:
    return record.get("outcome"), record.get("score")


def _mean(records: Iterable[Record]) -> Interval | None:
    scores: dict[Any, list[float]] = {}
    for record in records:
        if record.get("score") is not None:
            scores.setdefault(record.get("group"), []).append(record["score"])
    if not scores:
        return None
    mean = clustered_mean(scores.values())
    if all(score in (0, 1) for own in scores.values() for score in own):  # several of a problem: Student's t, no bounds
        return Interval(mean.value, max(mean.low, 0.0), min(mean.high, 1.0))
    return mean


def _as_table(change: Change) -> dict[str, Any]:
    name, before, after, changed, count = change
    ends = [None if interval is None else interval._asdict() for interval in (before, after)]
    return {"rollouts": name, "old": ends[0], "new": ends[1], "changed": changed, "count": count}


def _new_file(folder: Path, out: Path | None) -> Path:
    """Make and return an empty file that was not there."""
    if out is not None:
        try:
            out.touch(exist_ok=False)
        except OSError as error:
            raise DataError(f"{out} can not be made: {error}", hint="name a file that is not there") from error
        return out
    for number in itertools.count(1):
        path = folder / f"rollouts-rescored{'' if number == 1 else f'-{number}'}.jsonl"
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("unreachable")
