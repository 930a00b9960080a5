"""`ramet check`: what a task must be, looked at without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import click

from ramet.checking import Limits, check_task
from ramet.cli.asked import read_settings, task_with
from ramet.cli.streams import prints_aside
from ramet.viewer.text import visible


def run(
    task_name: str,
    overrides: Sequence[str],
    *,
    seed: int,
    episodes: int,
    full: float,
    limits: Limits,
    as_json: bool,
) -> int:
    """Check a task and print what was found; return 0 where no check failed, else 1."""
    config = read_settings(task_name, overrides, seed=seed)
    assert config.task is not None
    build = partial(task_with, config.task)
    with prints_aside():
        report = check_task(
            build(seed),
            episodes=episodes,
            seed=seed,
            full=full,
            build=build,
            episode_seconds=limits.episode_seconds,
            tool_seconds=limits.tool_seconds,
            score_seconds=limits.score_seconds,
        )
    if as_json:
        findings = [{"check": f.name, "passed": f.passed, "found": f.detail} for f in report.findings]
        verdict = {"task": report.task, "passed": report.passed, "proved": report.proved}
        click.echo(json.dumps({**verdict, "findings": findings}))
    else:
        click.echo(visible(str(report)))
    return 0 if report.passed else 1
