"""Does sharing change what is learned? Each seed of a recipe twice: with prefixes shared, and with every row run alone.

    python benchmarks/same_learning.py                # the default recipe, seeds 0, 1, 2
    python benchmarks/same_learning.py --set steps=10 --seeds 0

Nothing else differs: the same prompts, the same uniforms, the same warm start. The two runs of a seed are equal up to
rounding until a rounding turns one sampled token into another; from there on they are two samples of one process. The
table says in which step that is, how far the log-probs and the gradient of the first step are apart, and how far the
curves of rewards are, beside how far those of two seeds are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = ("shared", "plain")
LAST = 10
"""The reward at the end is the mean over so many steps."""


@dataclass(frozen=True)
class Learned:
    """The lines of a run's training steps, its summary, and its seconds."""

    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    seconds: float

    @property
    def rewards(self) -> list[float]:
        """Each step's mean reward."""
        return [step["reward"] for step in self.steps]

    @property
    def greedy(self) -> str:
        """The held-out score after training, with its interval."""
        found = self.summary["held_out"]["after"]["greedy"]
        return f"{found['score']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def main() -> None:
    """Run what the command line asks for, or, as a process of its own, one run without sharing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="sorting")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="settings", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--runs", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        _train(arguments.recipe, arguments.settings, arguments.runs, way=arguments.only)
        return
    print(f"recipe {arguments.recipe}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    found: dict[int, dict[str, Learned]] = {}
    for seed in arguments.seeds:
        found[seed] = {way: _run(arguments.recipe, [*arguments.settings, f"seed={seed}"], way) for way in WAYS}
        print("\n".join(_lines(seed, found[seed])), flush=True)
    apart = [_distance(one["shared"].rewards, one["plain"].rewards) for one in found.values()]
    seeds = [
        _distance(a[way].rewards, b[way].rewards) for a, b in itertools.combinations(found.values(), 2) for way in WAYS
    ]
    print(f"curves of rewards, mean distance of a step: shared and plain {statistics.mean(apart):.3f}", end="")
    print(f", two seeds {statistics.mean(seeds):.3f}" if seeds else "")


def _lines(seed: int, ways: dict[str, Learned]) -> list[str]:
    shared, plain = ways["shared"], ways["plain"]
    first, beside = shared.steps[0], plain.steps[0]
    differs = [
        a["step"] for a, b in zip(shared.steps, plain.steps, strict=True) if a["tokens_trained"] != b["tokens_trained"]
    ]
    lines = [
        f"seed {seed}: the first step's loss {first['loss']:.9f} and {beside['loss']:.9f}, gradient "
        f"{first['grad_norm']:.7f} and {beside['grad_norm']:.7f}; "
        + (
            f"rollouts differ in length from step {differs[0]} on"
            if differs
            else "all rollouts are of the same lengths"
        )
    ]
    for way, one in ways.items():
        end = statistics.mean(one.rewards[-LAST:])
        lines.append(
            f"  {way:<7} reward at the end {end:.3f}, loss {one.steps[-1]['loss']:+.5f}, "
            f"held out {one.greedy}, {one.seconds:.0f} s"
        )
    return lines


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.mean(abs(a - b) for a, b in zip(one, other, strict=False))


def _run(recipe: str, settings: list[str], way: str) -> Learned:
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, str(Path(__file__).resolve()), recipe, "--only", way, "--runs", runs]
        began = time.monotonic()
        done = subprocess.run([*command, "--set", *settings], capture_output=True, text=True)
        seconds = time.monotonic() - began
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        folder = Path(runs) / "bench"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return Learned([line for line in lines if "loss" in line], summary, seconds)


def _train(recipe: str, settings: list[str], runs: str, *, way: str) -> None:
    from ramet.cli.main import main as ramet
    from ramet.scoring import check

    if way == "plain":
        check._find_out = lambda *_: check.Choice("rows")  # as if no way of sharing were right for any model
    given = [part for setting in settings for part in ("--set", setting)]
    ramet(["train", recipe, "--runs", runs, "--name", "bench", *given])


if __name__ == "__main__":
    main()
