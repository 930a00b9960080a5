"""Progress is one live line on a terminal and a line now and then elsewhere; what a model says cannot steer either."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ramet.cli.progress import Progress, duration
from ramet.events import (
    CheckpointWritten,
    Evaluated,
    RunEnded,
    RunStarted,
    StepDone,
    Stopping,
    WarmStarted,
    WarmStartStep,
)
from ramet.metrics import MetricsLog

SCORES = {"greedy": {"score": 0.5, "low": 0.4, "high": 0.6, "problems": 50}}
SAMPLED = {"score": 0.25, "low": 0.2, "high": 0.3, "problems": 40}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """A `Progress` whose output and clock are in the test's hands."""

    def __init__(self, terminal: bool = False, every: float = 5.0) -> None:
        self.clock = Clock()
        self.out, self.err = io.StringIO(), io.StringIO()
        out = Console(file=self.out, width=80, force_terminal=terminal, highlight=False)
        err = Console(file=self.err, width=80, force_terminal=terminal, highlight=False)
        self.progress = Progress(out=out, err=err, clock=self.clock, every=every)

    def start(self, folder: Path = Path("runs/a"), steps: int = 10, first_step: int = 1) -> None:
        self.progress(RunStarted(folder, "a", "arithmetic", "tiny", "cpu", first_step, steps))

    def step(self, step: int, seconds: float, **metrics: float | None) -> None:
        self.clock.now += seconds
        self.progress(StepDone(step, metrics))

    def lines(self) -> list[str]:
        return self.err.getvalue().splitlines()


def test_elsewhere_than_on_a_terminal_a_line_comes_every_few_seconds_and_at_the_end() -> None:
    screen = Screen(every=5.0)
    screen.start(steps=10)
    with screen.progress:
        for step in range(1, 11):
            screen.step(step, 2.0, reward=step / 10, kl=0.0123, tokens_per_second=1234.5)
    steps = [line.split()[1] for line in screen.lines() if line.startswith("step")]
    assert steps == ["1/10", "4/10", "7/10", "10/10"]
    assert screen.lines()[:2] == ["a: arithmetic with tiny on cpu, 10 steps", "writing to runs/a"]
    # The pace after the first step is 2 seconds a step, and 6 steps are left.
    assert screen.lines()[3] == "step 4/10  reward 0.400  KL 0.012  1234 tokens/s  12 s left"
    assert screen.lines()[-1] == "step 10/10  reward 1.000  KL 0.012  1234 tokens/s"
    assert screen.out.getvalue() == ""


@pytest.mark.parametrize(
    ("computed", "trained", "shown"),
    [
        (250, 1000, "250 of 1000 tokens computed (4.0x saved)"),
        (1000, 1040, "1000 of 1040 tokens computed (1.0x saved)"),
        (1000, 1000, "1000 of 1000 tokens computed (1.0x saved)"),
        (0, 0, None),  # a step that trained on nothing
        (None, 1000, None),
        (250, None, None),
    ],
)
def test_the_line_shows_how_many_tokens_were_computed_of_those_trained_on(
    computed: int | None, trained: int | None, shown: str | None
) -> None:
    screen = Screen(every=0.0)
    screen.start(steps=2)
    screen.step(1, 1.0, reward=0.5, kl=0.25, tokens_per_second=99.5, tokens_computed=computed, tokens_trained=trained)
    plain = "step 1/2  reward 0.500  KL 0.250  100 tokens/s"
    assert screen.lines()[-1] == (plain if shown is None else f"{plain}  {shown}")


def test_a_narrow_terminal_shows_the_time_that_is_left_and_cuts_the_tokens_off() -> None:
    screen = Screen(terminal=True)
    screen.start(steps=10)
    with screen.progress:
        screen.progress(Evaluated(0, "before", SCORES))
        for step in (1, 2):
            screen.step(step, 2.0, reward=0.5, kl=0.25, tokens_per_second=1234, tokens_computed=25, tokens_trained=100)
    expected = "step 2/10  reward 0.500  KL 0.250  held-out 0.500  1234 tokens/s  16 s left"
    assert f"{expected}  25\u2026" in screen.err.getvalue()


def test_evaluations_and_checkpoints_do_not_count_as_pace() -> None:
    screen = Screen(every=0.0)
    screen.start(steps=10)
    screen.step(1, 50.0)
    screen.step(2, 2.0)
    screen.clock.now += 300.0
    screen.progress(Evaluated(2, "during", SCORES))
    screen.step(3, 2.0, reward=None)
    assert screen.lines()[-2] == "held-out during: greedy 0.500 (0.400 to 0.600)"
    assert screen.lines()[-1] == "step 3/10  reward -  KL -  held-out 0.500  14 s left"


def test_a_resumed_run_says_where_it_goes_on() -> None:
    screen = Screen(every=0.0)
    screen.start(steps=10, first_step=6)
    screen.step(6, 2.0)
    screen.step(7, 2.0)
    assert screen.lines()[0].endswith("10 steps, from step 6")
    assert screen.lines()[-1].endswith("6 s left")


def test_on_a_terminal_one_line_is_kept_up_to_date_and_the_last_one_stays() -> None:
    screen = Screen(terminal=True)
    screen.start(steps=3)
    with screen.progress:
        for step in range(1, 4):
            screen.step(step, 2.0, reward=0.5)
    printed = screen.err.getvalue()
    assert all(f"step {step}/3" in printed for step in (1, 2, 3))
    kept = [line.rpartition("\r\x1b[2K")[2] for line in printed.split("\n")]  # what is wiped before a line ends is gone
    assert not [line for line in kept if "step 1/3" in line or "step 2/3" in line]
    assert [line for line in kept if line.startswith("step 3/3  reward 0.500")]


def test_the_warm_start_shows_its_loss_and_its_score() -> None:
    screen = Screen(every=5.0)
    screen.progress(WarmStartStep(1, 100, 2.5))
    screen.progress(WarmStartStep(2, 100, 2.4))
    screen.clock.now += 6
    screen.progress(WarmStartStep(3, 100, 2.25, 0.125))
    screen.progress(WarmStarted(3, 0.125))
    assert screen.lines() == [
        "supervised warm start 1/100  loss 2.500",
        "supervised warm start 3/100  loss 2.250  greedy score 0.125",
        "supervised warm start ended after 3 steps, at a greedy validation score of 0.125",
    ]


def test_a_ctrl_c_is_answered() -> None:
    screen = Screen()
    screen.progress(Stopping())
    assert screen.lines() == ["stopping after this step, with a checkpoint; Ctrl-C again stops at once"]


def test_the_last_checkpoint_is_remembered() -> None:
    screen = Screen()
    screen.progress(CheckpointWritten(1, Path("c1")))
    screen.progress(CheckpointWritten(2, Path("c2")))
    assert screen.progress.checkpoint == CheckpointWritten(2, Path("c2"))


def write_rollouts(folder: Path, prompts: list[str], completion: str) -> None:
    with MetricsLog(folder / "rollouts.jsonl") as log:
        for when, score in (("before", 0.0), ("after", 1.0)):
            for group, prompt in enumerate(prompts):
                for decoding in ("sampled", "greedy"):
                    log.append(
                        {
                            **{"when": when, "step": 0, "group": group, "prompt": prompt, "decoding": decoding},
                            **{"completion": f"{decoding} {when} {completion}", "score": score},
                        }
                    )


def test_results_are_a_table_and_three_prompts_before_and_after(tmp_path: Path) -> None:
    write_rollouts(tmp_path, ["p0", "p1", "p2", "p3"], "answer")
    screen = Screen()
    summary = {
        "held_out": {"before": {**SCORES, "sampled": SAMPLED}, "after": SCORES},
        "difference": {"greedy": {"value": 0.0, "low": -0.1, "high": 0.1}},
        "chance": 0.01,
    }
    screen.progress(RunEnded(tmp_path, summary))
    screen.progress.show_results()
    lines = [line.rstrip() for line in screen.out.getvalue().splitlines()]
    assert lines[1:6] == [
        "held-out    greedy                     temperature 1",
        "before      0.500 (0.400 to 0.600)     0.250 (0.200 to 0.300)",
        "after       0.500 (0.400 to 0.600)     -",
        "difference  +0.000 (-0.100 to +0.100)  -",
        "problems    50                         40",
    ]
    assert lines[6:14] == [
        "in brackets: 95% intervals; chance is 0.010",
        "",
        "prompt:",
        "  p0",
        "before, greedy, score 0.000:",
        "  greedy before answer",
        "after, greedy, score 1.000:",
        "  greedy after answer",
    ]
    assert [line for line in lines if line in ("  p0", "  p1", "  p2", "  p3")] == ["  p0", "  p1", "  p2"]
    assert screen.err.getvalue() == ""


def test_results_of_a_run_that_did_not_end_are_nothing() -> None:
    screen = Screen()
    screen.start()
    screen.progress.show_results()
    assert screen.out.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_model_says_neither_steers_the_terminal_nor_is_read_as_markup(terminal: bool, tmp_path: Path) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07[bold red]x[/bold red] [/nope] \ud800 \u202e:smile:\r\x9b31m"
    write_rollouts(tmp_path, [hostile], hostile)
    screen = Screen(terminal=terminal, every=0.0)
    with screen.progress:
        screen.progress(RunStarted(tmp_path, hostile, hostile, hostile, "cpu", 1, 1))
        screen.progress(Evaluated(0, "before", {hostile: {"score": 0.5}}))
        screen.step(1, 1.0)
    screen.progress(RunEnded(tmp_path, {"held_out": {"before": {hostile: {"score": 0.5}}}, "chance": hostile}))
    screen.progress.show_results()
    printed = screen.out.getvalue() + screen.err.getvalue()
    assert not [char for char in ("\x07", "\x9b", "\ud800", "\u202e") if char in printed]
    assert "\x1b[2J" not in printed
    assert "\x1b]0" not in printed
    assert "\\x1b[2J\\x1b]0;title\\x07[bold red]x[/bold red] [/nope] \\ud800 \\u202e:smile:\\x0d\\x9b31m" in printed


def test_long_text_is_cut_with_its_length_said_and_lines_are_indented(tmp_path: Path) -> None:
    write_rollouts(tmp_path, ["one\ntwo\n\nthree" + "x" * 1000], "")
    screen = Screen()
    screen.progress(RunEnded(tmp_path, {}))
    screen.progress.show_results()
    printed = screen.out.getvalue()
    assert "  one\n  two\n  \n  threexxx" in printed
    assert f"... ({len('one two  three') + 1000 - 600} more characters)" in printed


def test_durations_are_short() -> None:
    assert [duration(seconds) for seconds in (0, 89, 95, 3600, 5400, 100_000)] == [
        "0 s",
        "89 s",
        "2 min",
        "60 min",
        "1 h 30 min",
        "27 h 47 min",
    ]


def test_problems_without_a_score_are_counted_in_the_line() -> None:
    screen = Screen()
    scores = {"greedy": {"score": 0.5, "low": 0.2, "high": 0.8, "problems": 6, "failed": 3, "abstained": 0}}
    screen.progress(Evaluated(0, "before", scores))
    assert screen.lines() == ["held-out before: greedy 0.500 (0.200 to 0.800), 3 failed"]
