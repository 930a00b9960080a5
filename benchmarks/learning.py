"""Does it learn, and does it not learn when it should not? One line for each run of a recipe and of its control.

    python benchmarks/learning.py       # the default recipe, seeds 0, 1, 2, and the control
    python benchmarks/learning.py recipes/smollm2.toml --seeds 0

Each run is `ramet train` in a process of its own, timed from its start to its end. The control deals the rewards of
each step out again at random among its rollouts, so that nothing can be learned. It is run for the first seed, or for
all with `--control all`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HEADER = f"{'run':<22} {'seconds':>7}  {'greedy before':<22} {'greedy after':<22} {'difference':<24} {'sampled':<16}"


def main() -> None:
    """Run what the command line asks for, and print a table as the runs end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="sorting")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control", choices=["first", "all", "none"], default="first")
    arguments = parser.parse_args()
    print(f"recipe {arguments.recipe}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    print(HEADER, flush=True)
    controls = {"first": arguments.seeds[:1], "all": arguments.seeds, "none": []}[arguments.control]
    for shuffled, seeds in ((False, arguments.seeds), (True, controls)):
        for seed in seeds:
            print(_line(arguments.recipe, seed, shuffled=shuffled), flush=True)


def _line(recipe: str, seed: int, *, shuffled: bool) -> str:
    summary, seconds = _run(recipe, seed, shuffled=shuffled)
    before, after = summary["held_out"]["before"], summary["held_out"]["after"]
    change = summary["difference"]["greedy"]
    name = f"seed {seed}{', shuffled rewards' if shuffled else ''}"
    moved = f"{change['value']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})"
    sampled = f"{before['sampled']['score']:.3f} -> {after['sampled']['score']:.3f}"
    return f"{name:<22} {seconds:7.1f}  {_score(before):<22} {_score(after):<22} {moved:<24} {sampled:<16}"


def _score(scores: dict[str, Any]) -> str:
    greedy = scores["greedy"]
    return f"{greedy['score']:.3f} ({greedy['low']:.3f} to {greedy['high']:.3f})"


def _run(recipe: str, seed: int, *, shuffled: bool) -> tuple[dict[str, Any], float]:
    with tempfile.TemporaryDirectory() as runs:
        settings = [f"seed={seed}", f"control.shuffle_rewards={str(shuffled).lower()}"]
        command = [str(Path(sys.executable).with_name("ramet")), "train", recipe, "--runs", runs, "--name", "bench"]
        began = time.monotonic()
        done = subprocess.run(
            [*command, *(part for setting in settings for part in ("--set", setting))], capture_output=True, text=True
        )
        seconds = time.monotonic() - began
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return json.loads((Path(runs) / "bench" / "summary.json").read_text(encoding="utf-8")), seconds


if __name__ == "__main__":
    main()
