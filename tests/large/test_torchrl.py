"""The adapter runs inside the real TorchRL, which needs an older tensordict, in a place of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# TorchRL, and what it needs beside what ramet needs itself.
PACKAGES = ["torchrl==0.14.1", "tensordict==0.14.3", "hoptorch>=0.1.4", "pyvers>=0.2.3,<0.3", "cloudpickle", "orjson"]
# The plain run leaves the checks out, which need TorchRL, and takes warnings for errors, those of TorchRL itself too.
OPTIONS = [
    "addopts=-q --strict-markers --doctest-modules --import-mode=importlib -p no:cacheprovider",
    "filterwarnings=default\n error:::ramet",
]


@pytest.mark.large
def test_the_adapter_passes_inside_torchrl(tmp_path: Path) -> None:
    place = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), *PACKAGES]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT / "src")])}
    show = "import torchrl, tensordict; print(torchrl.__version__, tensordict.__version__)"
    version = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=False)
    assert version.stdout.split() == ["0.14.1", "0.14.3"], version.stderr
    options = [part for option in OPTIONS for part in ("-o", option)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/large/torchrl_checks.py", "src/ramet/adapters"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "passed" in done.stdout, done.stdout[-1000:]
    assert "skipped" not in done.stdout, done.stdout[-1000:]
