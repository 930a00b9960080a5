"""The environments run with the older tensordict that `pyproject.toml` admits, in a place of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.large
def test_environments_and_rollouts_pass_with_tensordict_014(tmp_path: Path) -> None:
    place = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), "tensordict==0.14.3"]
    subprocess.run(pip, check=True, capture_output=True)
    paths = os.pathsep.join([str(place), str(ROOT / "src")])
    files = [
        "test_ragged.py",
        "test_text.py",
        "test_compact.py",
        "test_stacking.py",
        "test_specs.py",
        "test_rollouts.py",
    ]
    folders = ["envs", "transforms", "forest", "policies"]
    documented = ["ragged", "specs", "forest", "transforms", "envs", "policies"]
    suites = [f"tests/{name}" for name in [*folders, *files]] + [f"src/ramet/{name}" for name in documented]
    show = "import tensordict; print(tensordict.__version__)"
    environment = {**os.environ, "PYTHONPATH": paths}
    version = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True)
    assert version.stdout.startswith("0.14.3")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "not large", "-p", "no:cacheprovider", *suites],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
