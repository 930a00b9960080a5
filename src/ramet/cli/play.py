"""`ramet play`: a person is the policy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from ramet.cli.asked import Split, read_settings, rows_of, task_of
from ramet.cli.stage import HOW_TO, Left, Stage, outcome_lines
from ramet.errors import ConfigError
from ramet.types import Sampling

ROOM = 1_000_000
"""How many tokens a person may write in a turn: nobody types as many."""


def run(task_name: str, overrides: Sequence[str], *, seed: int, split: Split, number: int) -> int:
    """Let the person at the terminal play row `number` of a task; return the exit code.

    A person who leaves gets no score, and has done nothing wrong: 0. Raises `ConfigError` for a row that is not there.
    """
    config = read_settings(task_name, overrides, seed=seed)
    task = task_of(config)
    rows = rows_of(task, split)
    if not 0 <= number < len(rows):
        raise ConfigError(
            f"the task {task.name} has {len(rows)} {split} rows: found row {number}", hint=f"0 to {len(rows) - 1}"
        )
    from ramet.chat import ChatTemplate
    from ramet.episodes import Rules, Start, play_episodes
    from ramet.evaluation import record_of
    from ramet.policies.person import PersonPolicy, script_tokenizer
    from ramet.tasks import Judge

    click.echo(f"{task.name}: row {number} of {len(rows)} {split} rows, {turns(task.max_turns)}")
    click.echo(HOW_TO)
    tokenizer = script_tokenizer()
    stage = Stage(read_line, click.echo)
    with contextlib.closing(Judge(task.score)) as judge:
        try:
            [played] = play_episodes(
                task,
                PersonPolicy(stage.ask, tokenizer),
                [Start(rows[number], group=number, prompt_index=number)],
                template=ChatTemplate(tokenizer),
                rules=Rules(Sampling(ROOM), seed),
                judge=judge,
            )
        except Left:
            click.echo("\nyou left before the end: there is no score")
            return 0
    assert played.outcome is not None  # somebody judges
    stage.show_messages(played.sample.messages)
    click.echo()
    for line in outcome_lines(record_of(played.sample, played.outcome, when="play", step=0)):
        click.echo(line)
    return 0


def turns(most: int) -> str:
    """Return how many turns there are, in words.

    >>> turns(1), turns(6)
    ('one turn', 'at most 6 turns')
    """
    return "one turn" if most == 1 else f"at most {most} turns"


def read_line() -> str:
    """Return the next line that is typed; raise `EOFError` at the end."""
    if not sys.stdin.isatty():
        return input()
    with contextlib.suppress(ImportError):
        _readline()
    return input("> ")


def _readline() -> Any:
    """Load what lets a line be edited while it is typed, where there is such a thing."""
    import readline

    return readline
