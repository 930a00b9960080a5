"""The command line starts fast, finds recipes, and shows errors in two lines with the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import ramet
from ramet.cli import main as cli
from ramet.cli import train as train_module
from ramet.config import TrainConfig, load
from ramet.errors import ConfigError, ModelError

SMALL = """# Three steps of nothing.
steps = 3
model.name = "tiny-llama"
task.name = "arithmetic"
rollout.max_new_tokens = 8
optimizer.learning_rate = 1e-4
"""


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.main, list(words), prog_name="ramet")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainConfig, bool]]:
    """Record what would be trained in place of training it."""
    calls: list[tuple[TrainConfig, bool]] = []

    def run(config: TrainConfig, resume: bool = False) -> int:
        calls.append((config, resume))
        return 0

    monkeypatch.setattr(train_module, "run", run)
    return calls


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["eval", "--help"], ["rescore", "--help"], ["--version"], ["recipes"]]
)
def test_nothing_heavy_is_imported_for_help_and_lists(words: list[str]) -> None:
    code = (
        "import sys; from ramet.cli.main import main\n"
        "try: main(sys.argv[1:], prog_name='ramet')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tensordict', 'pydantic', 'plotly', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_every_command() -> None:
    output = invoke("--help").output
    assert all(f"\n  {name} " in output for name in ("check", "eval", "play", "recipes", "report", "rescore", "train"))


def test_version_is_that_of_the_package() -> None:
    assert invoke("--version").output == f"ramet {ramet.__version__}\n"


def test_a_recipe_is_a_file_with_overrides_in_order(small: Path, seen: list[tuple[TrainConfig, bool]]) -> None:
    sets = ("--set", "steps=5", "--set", "kl.place=reward", "--set", "kl.coefficient=0.1")
    done = invoke("train", str(small), *sets, "--name", "7", "--runs", "else")
    assert done.exit_code == 0, done.output
    config, resume = seen[0]
    assert (config.steps, config.kl.place, config.name, config.runs, resume) == (5, "reward", "7", "else", False)


def test_the_folder_of_a_run_goes_on_where_it_lies_now(
    tmp_path: Path, small: Path, seen: list[tuple[TrainConfig, bool]]
) -> None:
    moved = tmp_path / "moved" / "mine"
    moved.mkdir(parents=True)
    small.rename(moved / "config.toml")
    done = invoke("train", str(moved), "--resume")
    assert done.exit_code == 0, done.output
    config, resume = seen[0]
    assert config.folder == moved.resolve()
    assert resume is True


def test_a_shipped_recipe_goes_by_its_name_alone(
    tmp_path: Path, small: Path, seen: list[tuple[TrainConfig, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "shipped_recipes", lambda: {"numbers": small, "words": tmp_path / "words.toml"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbers").mkdir()  # a folder of that name does not stand in the way
    assert cli.find_recipe("numbers") == small
    assert invoke("train", "numbers").exit_code == 0
    assert seen[0][0].steps == 3


def test_every_shipped_recipe_loads_and_is_listed_with_what_it_is_about(seen: list[tuple[TrainConfig, bool]]) -> None:
    shipped = cli.shipped_recipes()
    listed = invoke("recipes").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(shipped)
    assert all(len(line.split()) > 2 for line in listed)
    for path in shipped.values():
        load(path)
    assert invoke("train").exit_code == 0  # the default is one of them
    assert seen[0][0].name in shipped


def test_an_unknown_recipe_is_refused_with_the_nearest_one(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "shipped_recipes", lambda: {"numbers": small, "words": small})
    done = invoke("train", "number")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: no recipe number: expected a shipped recipe, a TOML file, or the folder of a run\n"
        'hint: did you mean "numbers"? known: numbers, words\n'
    )


def test_a_misspelt_setting_is_shown_in_two_lines_with_exit_code_2(small: Path) -> None:
    done = invoke("train", str(small), "--set", "kl.palce=\x1b[31mred")
    assert done.exit_code == 2
    error, hint = done.stderr.splitlines()
    assert error == 'error: unknown key kl.palce in the override "kl.palce=\\x1b[31mred"'
    assert hint.startswith("hint: did you mean kl.place?")


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_traceback_is_there_when_asked_for(small: Path, place: str) -> None:
    words = ["train", str(small), "--set", "kl.palce=1"]
    done = invoke("--traceback", *words) if place == "before" else invoke(*words, "--traceback")
    assert isinstance(done.exception, ConfigError)


def test_errors_of_a_run_exit_with_1_and_an_interrupt_with_130(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: TrainConfig, resume: bool = False) -> int:
        raise ModelError("no such model", hint="name another")

    def interrupt(config: TrainConfig, resume: bool = False) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "run", fail)
    done = invoke("train", str(small))
    assert (done.exit_code, done.stderr) == (1, "error: no such model\nhint: name another\n")
    monkeypatch.setattr(train_module, "run", interrupt)
    assert invoke("train", str(small)).exit_code == 130


def test_the_exit_code_of_a_run_is_that_of_the_command(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "run", lambda config, resume: 130)
    assert invoke("train", str(small)).exit_code == 130


def test_report_prints_the_path_of_the_page(tmp_path: Path, small: Path) -> None:
    small.rename(tmp_path / "config.toml")
    done = invoke("report", str(tmp_path))
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").is_file()
    missing = invoke("report", str(tmp_path / "nowhere"))
    assert missing.exit_code == 2
    assert "is no run" in missing.stderr


def test_settings_lists_every_key_with_its_default() -> None:
    from ramet.config import settings

    shown = CliRunner().invoke(cli.main, ["settings"])
    assert shown.exit_code == 0
    listed = [line.split(" ")[0] for line in shown.stdout.splitlines() if not line.startswith(" ")]
    assert listed == list(settings())
    assert "kl.coefficient (0.0)\n" in shown.stdout
    assert "steps (required)\n" in shown.stdout
