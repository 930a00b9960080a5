"""`import ramet` and the command line start without the heavy libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
HEAVY = ("torch", "tensordict", "transformers", "pydantic", "plotly", "numpy", "reasoning_gym", "datasets")


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", ["ramet", "ramet.types", "ramet.errors", "ramet.cli.main"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert "ramet" in loaded
    assert loaded.isdisjoint(HEAVY), sorted(loaded.intersection(HEAVY))


def test_the_check_sees_what_is_loaded() -> None:
    assert "numpy" in loaded_by("import numpy")
