"""What a person sees of a run: one live line while it lasts, a table and some rollouts when it is done."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ramet import metrics
from ramet.events import (
    CheckpointWritten,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    Scores,
    StepDone,
    Stopping,
    WarmStarted,
    WarmStartStep,
)
from ramet.viewer.summary import DECODINGS, Record, groups, number, prompt_text, score_rows
from ramet.viewer.text import visible

MOST_CHARACTERS = 600
SHOWN_PROMPTS = 3


class Progress:
    """A watcher of a run: give it to the trainer, and use it as a context while the trainer works.

    On a terminal it keeps one line up to date; elsewhere it prints a line every `every` seconds. Progress goes to
    `err`, results go to `out`. After the run it knows `folder`, the last `checkpoint` and the `summary`.
    """

    def __init__(
        self,
        out: Console | None = None,
        err: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        every: float = 5.0,
    ) -> None:
        self.folder: Path | None = None
        self.checkpoint: CheckpointWritten | None = None
        self.summary: Mapping[str, Any] | None = None
        self._out = out or Console(highlight=False)
        self._err = err or Console(stderr=True, highlight=False)
        self._clock = clock
        self._every = every
        self._printed_at: float | None = None
        self._live: Live | None = None
        self._held_out: str = ""
        self._started: RunStarted | None = None
        self._steps_began_at: float | None = None
        self._first_counted = 0
        self._seconds_elsewhere = 0.0
        self._last_event_at = clock()

    def __enter__(self) -> Progress:
        if self._err.is_terminal:
            self._live = Live(console=self._err, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        """Show one event."""
        now = self._clock()
        match event:
            case RunStarted():
                self._start(event)
            case WarmStartStep():
                self._line(_warm_start_line(event), last=event.step == event.steps)
            case WarmStarted():
                reached = "" if event.score is None else f", at a greedy validation score of {number(event.score)}"
                self._print(f"supervised warm start ended after {event.steps} steps{reached}")
            case Evaluated():
                self._held_out = _greedy(event.held_out)
                self._print(f"held-out {event.when}: {_scores(event.held_out)}")
            case StepDone():
                self._step(event, now)
            case Stopping():
                self._print("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
            case CheckpointWritten():
                self.checkpoint = event
            case RunEnded():
                self.folder, self.summary = event.folder, event.summary
        if isinstance(event, (Evaluated, CheckpointWritten)) and self._steps_began_at is not None:
            self._seconds_elsewhere += now - self._last_event_at
        self._last_event_at = now

    def show_results(self) -> None:
        """Print the scores and some prompts' rollouts, before and after; nothing where the run has not ended."""
        if self.summary is None or self.folder is None:
            return
        _show_scores(self._out, self.summary)
        rollouts = self.folder / "rollouts.jsonl"
        if rollouts.is_file():
            _show_rollouts(self._out, metrics.read(rollouts))

    def _start(self, event: RunStarted) -> None:
        self._started, self.folder = event, event.folder
        ended = ", which are done" if event.first_step > event.steps > 0 else ""
        resumed = f", from step {event.first_step}" if 1 < event.first_step <= event.steps else ""
        self._print(
            f"{event.name}: {event.task} with {event.model} on {event.device}, {event.steps} steps{resumed}{ended}\n"
            f"writing to {event.folder}"
        )

    def _step(self, event: StepDone, now: float) -> None:
        started = self._started
        steps = started.steps if started else event.step
        parts = [f"step {event.step}/{steps}", f"reward {number(event.metrics.get('reward'))}"]
        parts.append(f"KL {number(event.metrics.get('kl'))}")
        if self._held_out:
            parts.append(f"held-out {self._held_out}")
        speed = event.metrics.get("tokens_per_second")
        if isinstance(speed, (int, float)):
            parts.append(f"{speed:.0f} tokens/s")
        left = self._seconds_left(event.step, steps, now)
        if left is not None and event.step < steps:
            parts.append(f"{duration(left)} left")
        # Last, for a narrow terminal cuts the end off.
        computed, trained = (event.metrics.get(key) for key in ("tokens_computed", "tokens_trained"))
        if isinstance(computed, int) and isinstance(trained, int) and computed > 0:
            parts.append(f"{computed} of {trained} tokens computed ({trained / computed:.1f}x saved)")
        self._line("  ".join(parts), last=event.step == steps)

    def _seconds_left(self, step: int, steps: int, now: float) -> float | None:
        """Return the time that the remaining steps take at the pace so far, evaluations apart."""
        if self._steps_began_at is None:
            # The first step is not counted: what it warms up is not paid again.
            self._steps_began_at, self._seconds_elsewhere, self._first_counted = now, 0.0, step
            return None
        counted = step - self._first_counted
        return (now - self._steps_began_at - self._seconds_elsewhere) / counted * (steps - step) if counted else None

    def _line(self, text: str, last: bool) -> None:
        """Show a line that the next one replaces: at once on a terminal, now and then elsewhere."""
        now = self._clock()
        if self._live is not None:
            shown = "" if last else visible(text)  # the last one is printed below, to stay
            self._live.update(Text(shown, no_wrap=True, overflow="ellipsis"), refresh=True)
        due = self._printed_at is None or now - self._printed_at >= self._every
        if last or (self._live is None and due):
            self._print(text)
            self._printed_at = now

    def _print(self, text: str) -> None:
        """Print a line that stays. Text, not markup: rich would read brackets in a name as a style."""
        self._err.print(Text(visible(text)), soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a time to read at a glance.

    >>> duration(8), duration(200), duration(7260)
    ('8 s', '3 min', '2 h 1 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _warm_start_line(event: WarmStartStep) -> str:
    score = "" if event.score is None else f"  greedy score {number(event.score)}"
    return f"supervised warm start {event.step}/{event.steps}  loss {number(float(event.loss))}{score}"


def _greedy(held_out: Scores) -> str:
    chosen = held_out.get("greedy") or next(iter(held_out.values()), {})
    return number(chosen.get("score"))


def _scores(held_out: Scores) -> str:
    return ", ".join(
        f"{DECODINGS.get(name, name)} {number(scores.get('score'))} "
        f"({number(scores.get('low'))} to {number(scores.get('high'))})"
        + "".join(f", {scores[why]} {why}" for why in ("failed", "abstained") if scores.get(why))
        for name, scores in held_out.items()
    )


def _show_scores(console: Console, summary: Mapping[str, Any]) -> None:
    rows = score_rows(summary)
    if not rows:
        return
    # One column a decoding, so that the intervals fit in 80 characters.
    table = Table("held-out", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_column(Text(visible(row.decoding)))
    for name, cells in zip(rows[0]._fields[1:], list(zip(*rows, strict=True))[1:], strict=True):
        table.add_row(name, *(Text(visible(cell)) for cell in cells))
    console.print()
    console.print(table)
    chance = f"; chance is {number(summary['chance'])}" if summary.get("chance") is not None else ""
    console.print(Text(visible(f"in brackets: 95% intervals{chance}")), soft_wrap=True)


def _show_rollouts(console: Console, rollouts: Sequence[Record]) -> None:
    both = [group for group in groups(rollouts) if group.before and group.after]
    for group in both[:SHOWN_PROMPTS]:
        console.print()
        _show_text(console, "prompt", group.prompt)
        for when, records in (("before", group.before), ("after", group.after)):
            record = next((record for record in records if record.get("decoding") == "greedy"), records[0])
            decoding = str(record.get("decoding") or "")
            facts = [when, DECODINGS.get(decoding, decoding), f"score {number(record.get('score'))}"]
            _show_text(console, ", ".join(fact for fact in facts if fact), prompt_text(record.get("completion", "")))


def _show_text(console: Console, title: str, text: str) -> None:
    """Print a title and, indented, what a prompt or a model says; control characters are spelled out."""
    cut = len(text) - MOST_CHARACTERS
    shown = visible(text[:MOST_CHARACTERS]) + (f"... ({cut} more characters)" if cut > 0 else "")
    console.print(Text(f"{visible(title)}:"), soft_wrap=True)
    console.print(Text(textwrap.indent(shown, "  ", lambda line: True) or "  (empty)"), soft_wrap=True)
