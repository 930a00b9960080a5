"""`ramet eval`: any policy on any task, with intervals, and every rollout kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ramet import toml
from ramet.cli.asked import Split, read_settings, rows_of, task_of
from ramet.cli.levels import column_of, in_order, level_of
from ramet.cli.players import Player, Who, player_of
from ramet.cli.reasons import reasons_of, tell
from ramet.cli.stage import Left
from ramet.cli.streams import prints_aside
from ramet.cli.tables import print_table, shown
from ramet.config import TrainConfig
from ramet.errors import CheckpointError, ConfigError, DataError, RunExists, ServerGone
from ramet.interrupts import termination_as_interrupt
from ramet.metrics import finite
from ramet.viewer.summary import number
from ramet.viewer.text import visible

if TYPE_CHECKING:
    from ramet.evaluation import Decoding, Tally
    from ramet.tasks import Task

TEMPERATURE = 1.0
MAX_NEW_TOKENS = 512
ROWS_AT_ONCE = 64
"""How many episodes a model in the process goes on with at once, unless rollout.rows_per_batch says otherwise."""
OPTIONS = {
    **{"rollout.max_new_tokens": "--max-new-tokens", "rollout.temperature": "--temperature"},
    **{"name": "--name", "runs": "--runs", "model.name": "--model", "server.url": "--server"},
    **{"server.model": "--model, beside --server", "server.key_variable": "--api-key-from"},
}
"""Keys of a recipe that are options here."""
OTHER = "give another --name, or remove the folder"
EVERY = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What is measured: so many `samples` of each of the first `problems` of a half of the task's rows."""

    problems: int
    samples: int
    temperature: float | None
    max_new_tokens: int | None
    ks: tuple[int, ...]
    pass_at: float
    by: str | None
    split: Split
    seed: int

    def check(self, who: Who) -> None:
        """Raise `ConfigError` for what can not be measured, and for what `who` plays takes no notice of."""
        for k in self.ks:
            if not 1 <= k <= self.samples:
                raise ConfigError(
                    f"--k {k}: pass@k takes from 1 to as many as there are samples of a problem, {self.samples}",
                    hint=f"--samples {max(self.ks)}",
                )
        for name in ("temperature", "max_new_tokens"):
            if who.stand is not None and getattr(self, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is for models: --policy {who.stand} has none", hint=f"leave {option} out")
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"at temperature 0 all {self.samples} samples of a problem are the same",
                hint="give --samples 1, or a --temperature above 0",
            )


def run(
    task_name: str,
    who: Who,
    measure: Measure,
    overrides: Sequence[str],
    *,
    name: str | None,
    runs: str,
    as_json: bool,
) -> int:
    """Play, write down and sum up; return the exit code: 0, 1 where nothing has a score, or 130."""
    from ramet.assembly import score_limit
    from ramet.run_folder import write

    who.check()
    measure.check(who)
    given: dict[str, Any] = {"rollout": {"max_new_tokens": measure.max_new_tokens or MAX_NEW_TOKENS}}
    if who.stand is None:
        given["model"] = {"name": who.model}
    if who.server is not None:
        given["server"] = {"url": who.server, "model": who.model}
    if who.stand is None and who.server is None:
        given["rollout"]["rows_per_batch"] = ROWS_AT_ONCE
    config = read_settings(task_name, overrides, seed=measure.seed, keys=who.keys, given=given, options=OPTIONS)
    with prints_aside():
        task = task_of(config)
        rows = rows_of(task, measure.split)[: measure.problems]
    column = column_of(rows, measure.by)
    player = player_of(who, task, config, _temperature(measure))
    with contextlib.closing(player), termination_as_interrupt():
        folder = _new_folder(Path(runs), name, task.name)
        _write_settings(folder, _config_text(config, who, measure))
        began = time.monotonic()
        # A person is asked on stdout, among whatever the functions of the task print.
        with contextlib.nullcontext() if who.stand == "person" else prints_aside():
            records = _play(player, rows, measure, folder, score_limit(task, config.rollout))
    if records is None:
        return 130
    levels = {} if column is None else {group: level_of(row, column) for group, row in enumerate(rows)}
    summary = _summary(task, who, measure, records, column, levels)
    summary["seconds"] = time.monotonic() - began
    text = json.dumps(finite(summary, "summary"), indent=2)
    write(folder / "summary.json", text + "\n")
    if measure.split == "held-out" and _shared(task):
        click.echo("warning: held-out rows are training rows as well, and a model trained on them knows them", err=True)
    answered = [record for record in records if record["score"] is not None]
    if who.stand is None and answered and not any(record["completion"] for record in answered):
        click.echo("warning: every answer was empty: rollouts.jsonl shows how each turn ended", err=True)
    code = tell(summary["reasons"], records)
    if as_json:
        click.echo(json.dumps(finite({**summary, "folder": str(folder)}, "summary")))
        return code
    _show(task, who, measure, records, column, levels)
    click.echo(f"rollouts: {folder / 'rollouts.jsonl'}")
    return code


# ---------------------------------------------------------------- playing


def _play(
    player: Player, rows: Sequence[Mapping[str, Any]], measure: Measure, folder: Path, score_seconds: float | None
) -> list[dict[str, Any]] | None:
    """Play all episodes and write each one down as it ends; None where the person, or Ctrl-C, ended it before.

    Whatever else ends it is raised once it has been said where the rollouts are.
    """
    from ramet.episodes import Played, Start, play_episodes
    from ramet.evaluation import RolloutLog, record_of
    from ramet.tasks import Judge

    starts = [
        Start(player.row_of(row, group, member), group, member, group)
        for group, row in enumerate(rows)
        for member in range(measure.samples)
    ]
    at_once = player.at_once or len(starts)
    records: list[dict[str, Any]] = []
    progress = _Progress(len(starts))
    decoding: Decoding = "greedy" if measure.temperature == 0 else "sampled"
    judging = contextlib.closing(Judge(player.task.score, seconds=score_seconds))
    with RolloutLog(folder / "rollouts.jsonl") as log, judging as judge:

        def ended(played: Played) -> None:
            assert played.outcome is not None  # somebody judges
            record = record_of(played.sample, played.outcome, when="eval", step=0, decoding=decoding)
            log.append(record)
            records.append(record)
            progress(record)

        try:
            for first in range(0, len(starts), at_once):
                batch = starts[first : first + at_once]
                rules, template = player.rules, player.template
                play_episodes(
                    player.task, player.policy, batch, template=template, rules=rules, judge=judge, ended=ended
                )
        except BaseException as error:
            click.echo(_where_it_stopped(folder, len(records), len(starts)), err=True)
            if isinstance(error, (KeyboardInterrupt, Left)):
                return None
            if isinstance(error, (CheckpointError, ServerGone)):  # whose hints are for runs, which can go on
                error.hint = "mend that, and evaluate anew: what was played is kept"
            raise
    return records


class _Progress:
    """Say on stderr, now and then, how many episodes have ended."""

    def __init__(self, count: int) -> None:
        self._count, self._ended, self._sum, self._scored = count, 0, 0.0, 0
        self._said_at = time.monotonic()

    def __call__(self, record: Mapping[str, Any]) -> None:
        self._ended += 1
        if record["score"] is not None:
            self._sum, self._scored = self._sum + record["score"], self._scored + 1
        if self._ended == self._count or time.monotonic() - self._said_at >= EVERY:
            mean = f", mean score {number(self._sum / self._scored)}" if self._scored else ""
            without = self._ended - self._scored
            mean += f", {without} without a score" if without else ""
            click.echo(f"{self._ended} of {self._count} episodes{mean}", err=True)
            self._said_at = time.monotonic()


def _where_it_stopped(folder: Path, played: int, count: int) -> str:
    """Return what to say of an evaluation that ended early; a folder without a rollout goes."""
    if not played:
        shutil.rmtree(folder, ignore_errors=True)
        return "stopped before an episode had ended"
    return f"stopped after {played} of {count} episodes: {folder / 'rollouts.jsonl'}"


def _new_folder(runs: Path, name: str | None, task: str) -> Path:
    """Make the folder of the evaluation; raise `RunExists` where there is one of that name.

    Where no name was given, and another evaluation was begun in this second, it gets a number.
    """
    own = name or f"eval-{re.sub(r'[^A-Za-z0-9_.]+', '-', task).strip('-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not re.fullmatch(r"\w[\w.-]*", own):
        raise ConfigError(
            f"--name {own}: expected letters, digits, '_', '-' and '.', not starting with '-' or '.'",
            hint="--runs says in which folder it is made",
        )
    for count in itertools.count(1):
        folder = runs / (own if count == 1 else f"{own}-{count}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if not os.path.lexists(folder):  # one above it is no folder, such as a link to a disk that is away
                raise ConfigError(
                    f"the folder {folder} can not be made: {error}", hint="give --runs and --name"
                ) from error
            if name is not None:
                raise RunExists(f"the folder {folder} is there already", hint=OTHER) from error
        except OSError as error:
            raise ConfigError(f"the folder {folder} can not be made: {error}", hint="give --runs and --name") from error
    raise AssertionError("unreachable")


def _write_settings(folder: Path, text: str) -> None:
    from ramet.run_folder import write

    try:
        write(folder / "config.toml", text)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)  # nothing has been played
        raise


def _config_text(config: TrainConfig, who: Who, measure: Measure) -> str:
    own = {key: getattr(measure, key) for key in Measure.__slots__}
    asked = {"policy": who.name, "server": who.server, "tokenizer": who.tokenizer, **own}
    data: dict[str, Any] = {"eval": {key: value for key, value in asked.items() if value is not None}}
    tree = config.model_dump(exclude_none=True, exclude_defaults=True)
    data.update({section: tree[section] for section in ("task", "model", "server", "rollout") if section in tree})
    return toml.dumps(data)


# ---------------------------------------------------------------- summing up


def _tallies(
    records: Sequence[Mapping[str, Any]], measure: Measure, levels: Mapping[int, str]
) -> tuple[Tally, dict[str, Tally]]:
    """Return what all records come to, and those of each level."""
    from ramet.evaluation import tally

    parts: dict[str, list[Mapping[str, Any]]] = {level: [] for level in in_order(list(levels.values()))}
    for record in records:
        if levels:
            parts[levels[record["group"]]].append(record)
    whole = tally(records, measure.ks, pass_at=measure.pass_at)
    return whole, {level: tally(own, measure.ks, pass_at=measure.pass_at) for level, own in parts.items()}


def _summary(
    task: Task,
    who: Who,
    measure: Measure,
    records: Sequence[Mapping[str, Any]],
    column: str | None,
    levels: Mapping[int, str],
) -> dict[str, Any]:
    whole, parts = _tallies(records, measure, levels)
    asked = ("split", "samples", "pass_at", "seed")
    summary = {"task": task.name, "policy": who.name, **{key: getattr(measure, key) for key in asked}}
    if who.stand is None:
        summary["temperature"] = _temperature(measure)
    summary.update(chance=task.chance, **whole.as_table())
    # In the order of the problems: that in which episodes end is nobody's to say.
    summary["reasons"] = reasons_of(sorted(records, key=lambda record: (record["group"], record["member"])))
    if column is not None:
        tables = {level: part.as_table() for level, part in parts.items()}
        summary["by"] = {"column": column, "levels": tables}
    return summary


def _show(
    task: Task,
    who: Who,
    measure: Measure,
    records: Sequence[Mapping[str, Any]],
    column: str | None,
    levels: Mapping[int, str],
) -> None:
    whole, parts = _tallies(records, measure, levels)
    asked = len({record["group"] for record in records})
    click.echo(
        visible(
            f"{task.name}, {who.name}: {asked} {measure.split} problems, {_samples(measure.samples)} of each"
            + ("" if who.stand else f", temperature {_temperature(measure):g}")
        )
    )
    rows = [("score", shown(whole.mean), _of(whole.problems, asked))]
    rows += [(f"pass@{each.k}", shown(each.chance), _of(each.problems, asked)) for each in whole.passed]
    print_table(("", "", "problems"), rows)
    without = ", ".join(f"{getattr(whole, why)} {why}" for why in ("truncated", "abstained", "failed"))
    click.echo(f"of {whole.rollouts} rollouts: {without}")
    if column is not None:
        click.echo()
        left_out = ("without a score",) if whole.abstained + whole.failed else ()
        heads = (column, "problems", "score", *(f"pass@{k}" for k in measure.ks), *left_out)
        print_table(heads, [_level_row(level, part)[: len(heads)] for level, part in parts.items()])
    click.echo()
    chance = "" if task.chance is None else f"; chance is {number(task.chance)}"
    click.echo(f"in brackets: 95% intervals, with the problems as the sample{chance}")
    click.echo(f"a rollout passes with a score of {measure.pass_at:g} or more; abstained and failed ones have no score")


def _shared(task: Task) -> bool:
    """Return whether rows of the task are in both halves."""
    from ramet.prompts import refuse_shared

    try:
        refuse_shared(task.train, task.held_out)
    except DataError:
        return True
    return False


def _temperature(measure: Measure) -> float:
    return TEMPERATURE if measure.temperature is None else measure.temperature


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _of(problems: int, asked: int) -> str:
    return str(problems) if problems == asked else f"{problems} of {asked}"


def _level_row(level: str, part: Tally) -> tuple[str, ...]:
    chances = (shown(each.chance) for each in part.passed)
    without = f"{part.abstained + part.failed} of {part.rollouts}"
    return (level, str(part.problems), shown(part.mean), *chances, without)
