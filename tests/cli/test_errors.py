"""Whatever is wrong with a folder, a file, a name or the disk: what is wrong, what to do, and never a traceback."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ramet.cli import main as cli
from ramet.metrics import MetricsLog, read
from ramet.run_folder import RunFolder, write
from ramet.tasks import file as task_file

TASK = """
from ramet.tasks import Task

ROWS = [{"prompt": f"{number}+1="} for number in range(3)]
mine = Task("mine", ROWS, [], lambda sample: float("1" in sample.completion), answer=lambda row: "1")
nothing = 3


def stock(item):
    '''Say how much there is.'''


def typed(item: str) -> str:
    '''Say how much there is.'''


CHAT = [{"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]}]
untyped = Task("untyped", ROWS, [], mine.score, tools=[stock], max_turns=2)
twice = Task("twice", ROWS, [], mine.score, tools=[typed, typed], max_turns=2)
chat = Task("chat", CHAT, [], mine.score)
empty = Task("empty", [], ROWS, mine.score)
deaf = Task("deaf", ROWS, [], mine.score, begin=lambda: None)
"""
RECIPE = """
steps = 1
threads = 1
model = { name = "tiny-llama", device = "cpu", options = { hidden_size = 16, layers = 1, heads = 2, context = 16 } }
rollout = { prompts_per_step = 1, group_size = 2, max_new_tokens = 2 }
optimizer = { learning_rate = 0.01 }
task.name = "mine.py:mine"
"""
RECORD = {
    **{"when": "train", "step": 1, "group": 0, "member": 0, "prompt": "?", "completion": "1", "prompt_tokens": [1]},
    **{"completion_tokens": [5], "score": 1.0, "rewards": {}, "advantage": 0.0, "outcome": "scored", "reason": ""},
    **{"stop": "eos", "decoding": "sampled", "messages": [], "row": {}},
}


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the commands run: a task, a recipe, and the rollouts of something that has been played."""
    (tmp_path / "mine.py").write_text(TASK, encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "rows.py").write_text("from ramet import Task\nnone = Task('none', None, [], len)\n", encoding="utf-8")
    (tmp_path / "syntax.py").write_text("def score(:\n", encoding="utf-8")
    (tmp_path / "rewards.py").write_text("def good(sample):\n    return 1.0\n", encoding="utf-8")
    (tmp_path / "no_system.jinja").write_text("{{ raise_exception('no system here') }}", encoding="utf-8")
    (tmp_path / "old").mkdir()
    with MetricsLog(tmp_path / "old" / "rollouts.jsonl") as log:
        log.extend([RECORD, RECORD])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda handle: None)
    return tmp_path


def ramet(*words: str) -> Result:
    return CliRunner().invoke(cli.main, list(words), prog_name="ramet")


def assert_two_lines(done: Result, message: str, code: int = 2) -> None:
    """An error, a hint where there is one, and no exception but the exit."""
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert lines == done.stderr.splitlines()[-len(lines) :]
    assert [line.partition(":")[0] for line in lines] in (["error"], ["error", "hint"])
    assert message in lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "old"], "no recipe old"),
        (["train", "nowhere", "--resume"], "no recipe nowhere"),
        (["report", "mine.py"], "mine.py is no run"),
        (["report", "."], ". is no run"),
        (["rescore", ".", "--reward", "rewards.py:good"], ". has no rollouts"),
        (["rescore", "old", "--reward", "rewards.py:god"], 'has no function "god"'),
        (["rescore", "old", "--reward", "syntax.py:good"], "SyntaxError"),
        (["rescore", "old", "--reward", "nowhere.py:good"], "no file at"),
        (["rescore", "old", "--reward", "rewards"], "a reward is named"),
        (["eval", "aritmetic", "--policy", "reference"], "aritmetic"),
        (["play", "aritmetic"], "aritmetic"),
        (["train", "recipe.toml", "--set", "task.name=aritmetic"], "aritmetic"),
        (["eval", "syntax.py:mine", "--policy", "reference"], "SyntaxError"),
        (["play", "syntax.py:mine"], "SyntaxError"),
        (["train", "recipe.toml", "--set", "task.name=syntax.py:mine"], "SyntaxError"),
        (["eval", "mine.py:nothing", "--policy", "reference"], "mine.py:nothing"),
        (["eval", "mine.py:none", "--policy", "reference"], 'has no function "none"'),
        (["train", "recipe.toml", "--set", "model.chat_template=x"], "model.chat_template: x can not be read"),
        (["check", "rows.py:none"], "running rows.py: task none: train must be a list of rows: found NoneType"),
        (["train", "recipe.toml", "--set", "task.name=mine.py:untyped"], "parameter item has no type"),
        (["train", "recipe.toml", "--set", "task.name=mine.py:twice"], "each tool must have a name of its own"),
        (["eval", "mine.py:twice", "--policy", "reference"], "each tool must have a name of its own"),
        (["train", "recipe.toml", "--set", "task.name=mine.py:empty"], "the task empty has no training rows"),
    ],
)  # fmt: skip
def test_what_is_not_there_or_can_not_be_read(at: Path, words: list[str], message: str) -> None:
    assert_two_lines(ramet(*words), message)
    assert not (at / "runs").exists()


def test_a_run_that_has_not_begun_can_not_go_on(at: Path) -> None:
    assert_two_lines(ramet("train", "recipe.toml", "--resume"), "no checkpoint in runs/run/checkpoints", code=1)
    assert not (at / "runs").exists()


def test_a_folder_that_no_model_lies_in_is_one_line_whatever_the_library_says(at: Path) -> None:
    done = ramet("eval", "mine.py:mine", "--split", "train", "--model", "old")
    assert_two_lines(done, "transformers can not load the folder 'old'", code=1)


def test_a_template_that_refuses_the_messages_says_so_with_the_row(at: Path) -> None:
    sets = ["--set", "task.name=mine.py:chat", "--set", "model.chat_template=no_system.jinja"]
    done = ramet("train", "recipe.toml", *sets)
    message = "training row 0: the chat template refuses the messages (system user): TemplateError: no system here"
    assert_two_lines(done, message)
    assert not (at / "runs").exists()


def test_a_begin_that_can_not_be_called_is_not_said_to_be_the_reward(at: Path) -> None:
    done = ramet("train", "recipe.toml", "--set", "task.name=mine.py:deaf")
    assert_two_lines(done, "the first says: begin: TypeError", code=1)
    told = "hint: mend what it names (if the reward, <lambda>) and go on with --resume (in Python resume=True), or"
    assert done.stderr.splitlines()[-1].startswith(told)


def test_weights_that_were_cut_short_are_two_lines(at: Path) -> None:
    assert ramet("train", "recipe.toml").exit_code == 0
    weights = at / "runs" / "run" / "checkpoints" / "step-000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = ramet("eval", "mine.py:mine", "--split", "train", "--model", "runs/run")
    assert_two_lines(done, "transformers can not load the folder 'runs/run/checkpoints/step-000001'", code=1)


def test_a_folder_that_is_there_is_found_before_a_model_is_loaded(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (at / "runs" / "run").mkdir(parents=True)
    monkeypatch.setattr("ramet.trainer.model_of", None)
    done = ramet("train", "recipe.toml")
    assert_two_lines(done, "the run folder runs/run is there already")
    assert "--resume" in done.stderr.splitlines()[-1]


def test_a_run_whose_logs_lost_lines_says_of_which_steps(at: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two steps of two rollouts each, half of the last step's rollouts are gone, and its metrics."""
    assert ramet("train", "recipe.toml", "--set", "steps=2").exit_code == 0
    run = at / "runs" / "run"
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join(lines[:-1]) + lines[-1][:-5])
    shown = ramet("report", "runs/run")
    notes = [line for line in shown.stderr.splitlines() if line.startswith("note: ")]
    assert notes == [
        f"note: the last line of runs/run/{name} was cut short, and is left out"
        for name in ("metrics.jsonl", "rollouts.jsonl")
    ]
    done = ramet("train", "runs/run", "--resume")
    assert done.exit_code == 0, done.output
    assert [record.getMessage() for record in caplog.records if "has lost" in record.getMessage()] == [
        f"{run.resolve() / name} has lost its lines of step 2: the run goes on without them"
        for name in ("metrics.jsonl", "rollouts.jsonl")
    ]


def test_a_finished_run_that_goes_on_has_nothing_to_begin_from(at: Path) -> None:
    assert ramet("train", "recipe.toml").exit_code == 0
    done = ramet("train", "runs/run", "--resume")
    assert done.exit_code == 0
    assert "1 steps, which are done\n" in done.stderr
    assert "from step" not in done.stderr


def test_a_line_that_was_cut_short_is_left_out_and_said_so(at: Path) -> None:
    path = at / "old" / "rollouts.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    done = ramet("rescore", "old", "--reward", "rewards.py:good")
    assert done.exit_code == 0
    assert done.stderr == "note: the last line of old/rollouts.jsonl was cut short, and is left out\n"
    assert len(read(at / "old" / "rollouts-rescored.jsonl")) == 1
    assert ramet("report", "old").exit_code == 0


@pytest.mark.parametrize(
    "content", [b'{"when": "tr\n', b"\xff\n", b"[1]\n", b'{"when": "train"}\n', b'{"score": "x"}\n']
)
def test_a_line_in_the_middle_that_is_none_is_named(content: bytes, at: Path) -> None:
    path = at / "old" / "rollouts.jsonl"
    path.write_bytes(content + path.read_bytes())
    assert_two_lines(ramet("rescore", "old", "--reward", "rewards.py:good"), "")
    assert [path.name for path in (at / "old").iterdir()] == ["rollouts.jsonl"]


def test_a_column_that_was_not_stored_is_told_of(at: Path) -> None:
    line = {**RECORD, "row_left_out": {"picture": "it is \x1b[31m red"}}
    (at / "old" / "rollouts.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    done = ramet("rescore", "old", "--reward", "rewards.py:good")
    assert done.exit_code == 0
    told = (
        "note: the column 'picture' of the data rows was not stored (it is \\x1b[31m red): a reward that reads it fails"
    )
    assert done.stderr == told + "\n"


# ---------------------------------------------------------------- what the system refuses


def refusing(number: int) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), "there")

    return refuse


COMMANDS = {
    "train": (["train", "recipe.toml"], (RunFolder, "write_settings")),
    "eval": (["eval", "mine.py:mine", "--policy", "reference", "--split", "train"], (Path, "write_text")),
    "rescore": (["rescore", "old", "--reward", "rewards.py:good"], (Path, "touch")),
    "report": (["report", "old"], (Path, "write_text")),
    "play": (["play", "file", "--set", "task.prompts=x", "--set", "task.reward=y"], (task_file, "load_reward")),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("number", "hint"), [(errno.ENOSPC, "make room"), (errno.EACCES, "permissions")])
def test_a_full_disk_and_a_folder_that_may_not_be_written_to(
    command: str, number: int, hint: str, at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, (owner, name) = COMMANDS[command]
    monkeypatch.setattr(owner, name, refusing(number))
    done = ramet(*words)
    assert_two_lines(done, f"there: {os.strerror(number)}", code=1)
    assert hint in done.stderr.splitlines()[-1]
    assert ("--resume" in done.stderr) == (command == "train" and number == errno.ENOSPC)
    shown = ramet(*words, "--traceback")
    assert isinstance(shown.exception, OSError)


def test_a_disk_that_is_full_in_the_middle_of_a_file_names_it(tmp_path: Path) -> None:
    """The device says what a full disk says, when it is written to and not when it is opened."""
    with pytest.raises(OSError, match="No space left") as raised:
        write(Path("/dev/full"), "x")
    assert raised.value.filename == "/dev/full"


def test_a_disk_that_is_full_in_the_middle_keeps_what_was_written(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, calls = MetricsLog.append, 0

    def full(self: MetricsLog, entry: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            self._file.close()
            self._file = open("/dev/full", "a", encoding="ascii")  # noqa: SIM115
        append(self, entry)

    monkeypatch.setattr(MetricsLog, "append", full)
    done = ramet("eval", "mine.py:mine", "--policy", "reference", "--split", "train", "--name", "e")
    assert "stopped after 2 of 3 episodes: runs/e/rollouts.jsonl" in done.stderr
    assert_two_lines(done, "runs/e/rollouts.jsonl can not be written", code=1)
    assert len(read(at / "runs" / "e" / "rollouts.jsonl")) == 2


def test_a_run_whose_files_were_changed_says_which(at: Path) -> None:
    assert ramet("train", "recipe.toml").exit_code == 0
    with (at / "runs" / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"no": "step"}\n')
    done = ramet("train", "runs/run", "--resume")
    assert_two_lines(done, "metrics.jsonl or")
    assert "remove that line" in done.stderr.splitlines()[-1]
