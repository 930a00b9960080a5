"""The work of `benchmarks/training_step.py` and `benchmarks/generation.py`, the same in each side's interpreter.

Nothing here needs more than torch and transformers, and nothing is known of either side.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

SEED = 11
LATE = 300.0
"""Seconds that a side waits for the other to start up; then it has failed, and there are no turns."""
PAUSE = 0.3
"""Seconds that a side leaves the machine to the other before its next step."""


@dataclass(frozen=True)
class Work:
    """Some prompts, each the root of a tree: `branches[0]` sampled segments behind it, `branches[1]` behind each, ...

    A work of one level is a training step (R1, R2, R4), or generation; one of several levels is scored and goes
    backward (R3), with tokens that are made up. `together` makes one group of all prompts: see `step_trl.py`.
    """

    name: str
    prompts: int
    prompt: int
    branches: tuple[int, ...]
    segment: int = 32
    together: bool = False

    @property
    def rows(self) -> int:
        """Count the rollouts of a step."""
        rows = self.prompts
        for branch in self.branches:
            rows *= branch
        return rows

    def length_at(self, step: int) -> int:
        """Return the length of the prompts of a step; the first, which warms up, is short to save time."""
        return self.prompt if step else max(16, self.prompt // 8)

    @property
    def scored_only(self) -> bool:
        """True for a tree of more than one level."""
        return len(self.branches) > 1


@dataclass
class Step:
    """One step: wall time, CPU time, where the time went, the highest resident memory, and what came out."""

    seconds: float
    cpu: float
    peak: int
    parts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """What a side is asked for, as the parent writes it to standard input."""

    work: Work
    folder: str
    threads: int
    steps: int
    dtype: str = "float32"
    saving: bool = False
    engine: str = ""


def read_ask() -> Ask:
    """Read the request, and set torch's threads."""
    import torch

    found = json.loads(sys.stdin.read())
    work = found.pop("work")
    work["branches"] = tuple(work["branches"])
    ask = Ask(work=Work(**work), **found)
    torch.set_num_threads(ask.threads)
    return ask


def answer(steps: list[Step], facts: Mapping[str, Any], *, packages: tuple[str, ...]) -> None:
    """Write the answer to the file that the command line names: libraries write to standard output as they like."""
    found = {
        "steps": [asdict(step) for step in steps],
        "versions": {name: version(name) for name in packages},
        "facts": dict(facts),
    }
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


def texts(tokenizer: Any, count: int, length: int, *, seed: int) -> list[str]:
    """Return `count` different prompts of exactly `length` tokens: words that are one token each."""
    words = sorted(token[1:] for token in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{3,9}", token))
    draw = random.Random(seed)
    made = ["".join(" " + draw.choice(words) for _ in range(length)) for _ in range(count)]
    for text in made:
        found = len(tokenizer(text)["input_ids"])
        if found != length:
            raise SystemExit(f"a prompt of {length} words has {found} tokens: the tokenizer is another than expected")
    return made


def tree_tokens(work: Work, vocabulary: int) -> list[list[int]]:
    """Return the rows of a tree, whole paths of made-up tokens, in the order of its leaves."""
    draw = random.Random(SEED)
    paths = [[draw.randrange(100, vocabulary) for _ in range(work.prompt)] for _ in range(work.prompts)]
    for branch in work.branches:
        paths = [
            [*path, *(draw.randrange(100, vocabulary) for _ in range(work.segment))]
            for path in paths
            for _ in range(branch)
        ]
    return paths


def reward(tokens: list[int]) -> float:
    """Judge a completion by its tokens: cheap, the same on each side, and different from row to row."""
    return sum(token % 7 for token in tokens) / (6 * max(1, len(tokens)))


# ---------------------------------------------------------------- time and memory


class Clock:
    """Adds up the time of named parts; a part inside another is counted in both."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def hook(self, optimizer: Any) -> None:
        """Time the steps of an optimiser as the part "optimiser"."""
        began = [0.0]

        def before(*_: object) -> None:
            began[0] = time.perf_counter()

        def after(*_: object) -> None:
            self.parts["optimiser"] = self.parts.get("optimiser", 0.0) + time.perf_counter() - began[0]

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


class Meter:
    """Measures one step: `start`, then `stop`.

    The kernel keeps the highest resident memory, and forgets it when 5 is written to `clear_refs`: exact, and free.

    Where the environment names a file in `STEP_TURNS`, two sides take turns, step by step, each sleeping while the
    other runs: a machine that is slower for some minutes is slower for both.
    """

    def __init__(self) -> None:
        self.began = self.cpu = 0.0
        turns = os.environ.get("STEP_TURNS")
        self.turns = None if turns is None else Path(turns).open("a")  # noqa: SIM115  # held for good

    def start(self) -> None:
        """Wait for this side's turn, forget the highest memory so far, and start the clocks."""
        if self.turns is not None:
            _met(self.turns)
            time.sleep(PAUSE)  # so that the other side, which waits, comes first
            fcntl.flock(self.turns, fcntl.LOCK_EX)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.cpu = cpu_seconds()
        self.began = time.perf_counter()

    def stop(self, clock: Clock | None = None) -> Step:
        """Return what was measured; the parts of `clock` move into it."""
        seconds, cpu = time.perf_counter() - self.began, cpu_seconds() - self.cpu
        peak = memory("VmHWM")
        if self.turns is not None:
            fcntl.flock(self.turns, fcntl.LOCK_UN)
        parts = {} if clock is None else clock.parts
        if clock is not None:
            clock.parts = {}
        return Step(seconds, cpu, peak, parts)


def _met(turns: TextIO) -> None:
    """Wait until both sides have come so far: one that starts up would disturb the other's steps."""
    turns.write("x")
    turns.flush()
    until = time.monotonic() + LATE
    while os.fstat(turns.fileno()).st_size < 2 and time.monotonic() < until:
        time.sleep(0.1)


def memory(field_name: str) -> int:
    """Return a field of this process's status in bytes: VmRSS now, VmHWM at its highest."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field_name}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def resting() -> int:
    """Return the resident memory between steps, after what the allocator holds for nothing is given back."""
    import ctypes

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return memory("VmRSS")


def tensor_bytes(tensors: Any) -> int:
    """Add up tensors that are in memory, shared storages once."""
    storages = [t.untyped_storage() for t in tensors if not t.is_meta]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def held(model: Any, reference: Any, optimizer: Any) -> dict[str, int]:
    """Return what a trainer holds for good, in bytes, and its gradients, which come and go."""
    weights = tensor_bytes(model.parameters())
    moments = [v for state in optimizer.state.values() for v in state.values() if hasattr(v, "untyped_storage")]
    return {
        "weights": weights,
        "reference": tensor_bytes(reference.parameters()),
        "optimiser": tensor_bytes(moments),
        "gradients": tensor_bytes(p for p in model.parameters() if p.requires_grad),
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started and that still run."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
        spent[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / ticks
    own, fresh = {os.getpid()}, {os.getpid()}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - own
        own |= fresh
    return sum(spent.get(number, 0.0) for number in own)


def repeat(times: int, prepare: Callable[[int], Any], run: Callable[[Any], Any], clock: Clock | None = None) -> Any:
    """Run `times` times and once before, each on inputs made outside the clock; return steps and the last result."""
    steps, meter, result = [], Meter(), None
    for number in range(times + 1):
        given = prepare(number)
        meter.start()
        result = run(given)
        steps.append(meter.stop(clock))
    return steps, result
