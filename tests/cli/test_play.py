"""A person plays a task, here with typed lines from a pipe: what is shown, what is scored, and how one leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ramet.cli import main as cli
from ramet.cli import play as play_module

TASKS = '''
from ramet.tasks import Task

ROWS = [{"prompt": [{"role": "system", "content": "Guess."}, {"role": "user", "content": "A letter?"}], "letter": x}
        for x in "abc"]


def reply(episode):
    return None if episode.text == episode.row["letter"] else f"no, not {episode.text}"


def score(sample):
    return {"right": float(sample.completion == sample.row["letter"]), "short": 0.25}


def shout(word: str) -> str:
    """Say it loudly."""
    return word.upper()


def broken(sample):
    raise RuntimeError("the scorer is out")


guess = Task("guess", ROWS, ROWS[:2], score, reply=reply, max_turns=3)
tools = Task("tools", ROWS, ROWS, score, tools=[shout], max_turns=3)
unscored = Task("unscored", ROWS, ROWS, broken)
train_only = Task("train_only", ROWS, [], score)
'''


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.py"
    path.write_text(TASKS, encoding="utf-8")
    return str(path)


def play(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(cli.main, ["play", *words], input=typed, prog_name="ramet")


def test_a_task_of_one_turn_is_asked_answered_and_scored() -> None:
    done = play("arithmetic", "--set", "task.options.digits=1", "--set", "task.options.held_out_size=3", typed="x\n")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "arithmetic: row 0 of 3 held-out rows, one turn"
    assert "an empty line ends your turn" in lines[1]
    assert lines[2] == "user:"
    assert lines[3].endswith("=")
    assert lines[-2:] == ["stop: eos", "score: 0.000"]


def test_an_episode_of_several_turns_shows_each_reply_and_the_named_parts_of_the_score(tasks: str) -> None:
    done = play(f"{tasks}:guess", "--row", "1", typed="a\n\nb\n\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.split("Ctrl-D leaves\n")[1] == (
        "system:\n  Guess.\nuser:\n  A letter?\nyou:\nuser:\n  no, not a\nyou:\n"
        "\nstop: eos\nscore: 1.250\n  right: 1.000\n  short: 0.250\n"
    )


def test_the_last_reply_is_shown_before_the_score(tasks: str) -> None:
    done = play(f"{tasks}:guess", typed="x\n\ny\n\nz\n\n")
    assert done.stdout.endswith(
        "user:\n  no, not z\n\nstop: turn_limit\nscore: 0.250\n  right: 0.000\n  short: 0.250\n"
    )


def test_a_tool_is_called_by_writing_the_call(tasks: str) -> None:
    call = '<tool_call>{"name": "shout", "arguments": {"word": "ab"}}</tool_call>'
    done = play(f"{tasks}:tools", typed=f"{call}\n\na\n\n")
    assert done.exit_code == 0, done.output
    assert "  shout: Say it loudly.\n" in done.stdout
    assert '"word"' in done.stdout
    assert "tool (shout):\n  AB\nyou:\n" in done.stdout
    assert "  right: 1.000\n" in done.stdout


def test_a_call_that_can_not_be_read_is_answered(tasks: str) -> None:
    done = play(f"{tasks}:tools", typed='<tool_call>{"name": "shout"</tool_call>\n\na\n\n')
    assert "tool" in done.stdout.split("you:\n")[1]
    assert "  right: 1.000\n" in done.stdout


def test_who_leaves_gets_no_score_and_no_reproach(tasks: str) -> None:
    done = play(f"{tasks}:guess", typed="x\n\n")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith("user:\n  no, not x\nyou:\n\nyou left before the end: there is no score\n")


def test_ctrl_c_ends_the_game(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(play_module, "read_line", interrupt)
    done = play(f"{tasks}:guess")
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")
    assert "score" not in done.stdout


def test_a_scorer_that_fails_is_no_score_with_its_reason(tasks: str) -> None:
    done = play(f"{tasks}:unscored", typed="a\n")
    assert done.exit_code == 0
    assert done.stdout.endswith("no score: environment_error: RuntimeError: the scorer is out\n")


def test_a_row_that_is_not_there_is_refused(tasks: str) -> None:
    done = play(f"{tasks}:guess", "--row", "2")
    assert done.exit_code == 2
    assert done.stderr == "error: the task guess has 2 held-out rows: found row 2\nhint: 0 to 1\n"
    assert play(f"{tasks}:guess", "--row", "2", "--split", "train", typed="c\n").exit_code == 0


def test_a_task_without_held_out_rows_says_what_to_do(tasks: str) -> None:
    done = play(f"{tasks}:train_only")
    assert done.stderr == "error: the task train_only has no held-out rows\nhint: give --split train\n"


def test_an_unknown_task_or_option_names_the_nearest() -> None:
    done = play("arithmetc")
    assert done.exit_code == 2
    assert done.stderr.startswith('error: no task is called "arithmetc"\nhint: did you mean "arithmetic"?')
    done = play("arithmetic", "--set", "task.options.digit=1")
    assert done.exit_code == 2
    assert done.stderr.startswith('error: the task arithmetic has no option "digit"\nhint: did you mean "digits"?')
