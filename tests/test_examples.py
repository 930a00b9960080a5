"""The examples run, and print what they say they print."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def promised(module: ModuleType) -> list[str]:
    """The indented lines of the docstring, behind "Expected output"."""
    text = str(module.__doc__).partition("Expected output")[2].partition("::\n")[2]
    return [line.rstrip() for line in textwrap.dedent(text.strip("\n")).splitlines()]


@pytest.mark.parametrize(
    "name", ["01_reset_and_step", "02_rollouts_with_a_reward", "05_prompts_from_a_loader", "06_several_turns"]
)
def test_an_example_without_learning_prints_its_docstring(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = example(name)
    module.main()
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(printed) > 3
    assert printed == promised(module)


def test_the_flat_example_learns_and_prints_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("03_grpo_flat")
    module.main()
    lines = capsys.readouterr().out.splitlines()
    steps = [re.fullmatch(r"step ( \d|\d\d): reward (\d\.\d)", line) for line in lines[:-2]]
    assert [int(step[1]) for step in steps if step] == list(range(1, module.STEPS + 1))
    rewards = [float(step[2]) for step in steps if step]
    assert rewards[0] <= 0.2
    assert rewards[-1] >= 0.7
    expected = promised(module)
    assert [expected[1], len(expected)] == ["...", 5]
    for line, said in zip((lines[0], lines[-3]), (expected[0], expected[2]), strict=True):
        assert line.partition("reward")[0] == said.partition("reward")[0]
        assert abs(float(line[-3:]) - float(said[-3:])) < 0.25
    before, after = (re.fullmatch(r"(before:|after: ) '0=' -> '(.{1,4})'", line) for line in lines[-2:])
    assert before
    assert after
    assert sum(character in "02468" for character in after[2]) >= 3


def test_the_flat_example_stays_flat() -> None:
    text = (EXAMPLES / "03_grpo_flat.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert {"collect", "score", "clipped"} <= names
    assert not names & {"Trainer", "TrainConfig", "prepare", "update", "judge_rollouts"}


def test_the_trainer_example_learns_and_says_where_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("04_trainer")
    module.main(str(tmp_path))
    reward, held_out, where = capsys.readouterr().out.splitlines()
    first, last = map(float, re.findall(r"\d\.\d", reward))
    before, after = map(float, re.findall(r"\d\.\d", held_out))
    assert first <= 0.2
    assert last >= 0.7
    assert after - before >= 0.5
    folder = tmp_path / "even-digits" / "checkpoints" / "step-000030"
    assert where == f"the model is in {folder}"
    assert (folder / "model.safetensors").is_file()
    number = re.compile(r"\d\.\d")
    said = promised(module)
    assert [number.sub("#", line) for line in (reward, held_out)] == [number.sub("#", line) for line in said[:2]]
    assert said[2].endswith("runs/even-digits/checkpoints/step-000030")
