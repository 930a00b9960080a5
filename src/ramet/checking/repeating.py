"""Whether rows come back the same, here and in another process, and whether a task leaves the global states alone."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ramet.checking.report import Finding
from ramet.tasks.task import Row, Task


class GlobalStates:
    """The global random states of Python, numpy and torch at one moment."""

    def __init__(self) -> None:
        numpy: Any = np.random.get_state()
        self._states = {
            "random": random.getstate(),
            "numpy.random": (numpy[0], numpy[1].tobytes(), *numpy[2:]),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }

    def finding(self) -> Finding:
        """Say whether they are still the same."""
        now = GlobalStates()
        moved = [name for name, state in self._states.items() if state != now._states[name]]
        if moved:
            found = (
                f"the global state of {' and '.join(moved)} moved: draw from episode.rng, or a generator of your own"
            )
            return Finding("random", False, found)
        return Finding("random", True, "the global random states stay as they are")


def seeds(build: Callable[[int], Task] | None, seed: int) -> Finding:
    """Say whether `build` gives the same rows for the same seed, here and elsewhere."""
    if build is None:
        return Finding("seed", None, "how the task is built is not known")
    first = build(seed)
    here = digest(first)
    if digest(build(seed)) != here:
        return Finding("seed", False, f"the rows of seed {seed} differ when the task is built again")
    other = build(seed + 1)
    if _digest(other.held_out) != _digest(first.held_out):
        return Finding("seed", False, f"the held-out rows of seed {seed} and seed {seed + 1} differ")
    moved = "another seed gives others" if _digest(other.train) != _digest(first.train) else "the seed chooses nothing"
    try:
        elsewhere = _in_another_process(build, seed)
    except _NotElsewhere as error:
        return Finding("seed", True, f"the same rows twice, {moved}; not tried in another process: {error}")
    if elsewhere != here:
        found = f"the rows of seed {seed} differ in another process, at another date and with other hashes of strings"
        return Finding("seed", False, found)
    return Finding("seed", True, f"the same rows twice and in another process, {moved}")


class _NotElsewhere(RuntimeError):
    """The task can not be built in another process."""


_PROGRAM = """
import pickle, sys
from ramet.checking.later import put_forward
from ramet.checking.repeating import digest
put_forward()
build, seed = pickle.load(sys.stdin.buffer)
print("digest", digest(build(seed)))
"""


def _in_another_process(build: Callable[[int], Task], seed: int) -> str:
    """Return the digest of the rows that a fresh Python makes, in which strings hash otherwise, at another date."""
    try:
        given = pickle.dumps((build, seed))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _NotElsewhere(str(error)) from error
    hashing = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hashing}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], input=given, capture_output=True, env=environment, timeout=600
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotElsewhere(str(error)) from error
    last = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("digest "):
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _NotElsewhere(said or f"exit status {done.returncode}")
    return last.removeprefix("digest ")


def digest(task: Task) -> str:
    """Return a number that tells the rows of a task from others."""
    return _digest(task.train) + _digest(task.held_out)


def _digest(rows: Sequence[Row]) -> str:
    made = hashlib.sha256()
    for row in rows:
        made.update(key_of(row).encode("utf-8", "surrogatepass"))
    return made.hexdigest()


def key_of(row: Mapping[str, Any]) -> str:
    """Return a row as text; of what JSON can not hold, its type."""
    return json.dumps(_with_text_keys(row), sort_keys=True, default=lambda value: type(value).__name__)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, (list, tuple)) else value


def fault_of(row: Any) -> str:
    """Return what is wrong with a row; "" for nothing."""
    if not isinstance(row, Mapping):
        return f"must be a mapping: found a {type(row).__name__}"
    if "prompt" not in row:
        return f'has no "prompt": found the columns {sorted(map(str, row))}'
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return ""
    if not isinstance(prompt, Sequence) or not prompt:
        return f'must have text or messages as its "prompt": found {prompt!r:.80}'
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f'has a message without a role in its "prompt": found {message!r:.80}'
    return ""
