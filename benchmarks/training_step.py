"""A training step beside TRL's GRPOTrainer: seconds, peak memory, and how far both are from the machine's limit.

    python benchmarks/training_step.py                                    # all, about 25 minutes
    python benchmarks/training_step.py --only R1 --setting plain --steps 5
    python benchmarks/training_step.py --curves curves.json               # against group size, lengths and depth
    python benchmarks/training_step.py --plot curves.json                 # into docs/performance

SmolLM2-135M-Instruct, float32, AdamW, a KL of 0.04 in the loss, the same prompts token for token, and as many new
tokens on each side, for the end of a text is ignored. R1: 2 prompts of 100 tokens, groups of 8, 32 new tokens. R2: one
prompt of 512, a group of 16. R4: 16 different prompts, nothing to share. R3 is no step: a tree (a prompt of 256, 4
branches, 4 more behind each, 32 tokens a segment) is scored and goes backward, beside its 16 rows padded through the
stock model.

"plain" recomputes nothing on either side; "saving" checkpoints gradients on both. Each side is a process of its own;
the two take turns, a step each, so that a machine that is slower for some minutes is slower for both (R2 plain: one
after the other, for memory). A figure is the median over the steps after a first one, with short prompts, that is not
counted.
Memory is the highest resident memory in a step, all of the process counted; "on top" is what a step takes above the
memory that rests between steps (weights, moments, libraries, and on the peer's side the reference; no gradients). A
ratio of times is theirs by ours, one of memory ours by theirs.

TRL runs in an interpreter of its own, in `benchmarks/.peers`, made on the first use; `--trl-python` names one that is
there already. The limit is in `limits.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "sides"))

from limits import Limits, Shape, least, measured, shown
from peers import Failed, ask_in_turns, ask_side, own_python, trl_python
from step_work import Work

from ramet.models.smollm2 import smollm2_folder

WORKS = {
    "R1": Work("R1", prompts=2, prompt=100, branches=(8,)),
    "R2": Work("R2", prompts=1, prompt=512, branches=(16,)),
    "R3": Work("R3", prompts=1, prompt=256, branches=(4, 4)),
    "R4": Work("R4", prompts=16, prompt=100, branches=(1,), together=True),
}
# At least so many times as fast, at most so much of the memory; what is not here is not run.
TARGETS: dict[tuple[str, str], tuple[float | None, float | None]] = {
    ("R1", "plain"): (4.0, 0.45),
    ("R1", "saving"): (3.0, 0.40),
    ("R2", "plain"): (8.0, 0.35),
    ("R2", "saving"): (8.0, 0.35),
    ("R3", "plain"): (3.0, None),
    ("R4", "plain"): (1.0, None),
}
ALONE = {("R2", "plain")}
"""What takes a machine of 24 GB nearly whole on the peer's side."""
AIMS = {"backward": 0.8, "decode": 0.5}
SETTINGS = ("plain", "saving")


@dataclass(frozen=True)
class Figures:
    """What one side did: medians over its steps, in seconds and bytes."""

    seconds: float
    peak: float
    resting: float
    parts: Mapping[str, float]
    facts: Mapping[str, float]
    about: Mapping[str, Any]
    spread: tuple[float, float]
    cores: float

    @property
    def on_top(self) -> float:
        """What a step takes above what rests."""
        return self.peak - self.resting


def figures(answer: Mapping[str, Any]) -> Figures:
    """Take the medians of a side's answer; its first step is a warm-up."""
    steps = answer["steps"][1:]
    middle = {name: statistics.median([step["parts"][name] for step in steps]) for name in steps[0]["parts"]}
    seconds = [step["seconds"] for step in steps]
    return Figures(
        statistics.median(seconds),
        statistics.median([step["peak"] for step in steps]),
        answer["facts"]["resting"],
        middle,
        steps[-1]["facts"],
        answer["facts"],
        (min(seconds), max(seconds)),
        statistics.median([step["cpu"] / step["seconds"] for step in steps]),
    )


@dataclass(frozen=True)
class Run:
    """Where the sides are, and how they are run."""

    trl: Path
    folder: str
    threads: int
    steps: int

    def both(self, work: Work, setting: str) -> dict[str, Figures | Failed]:
        """Run both sides, step by step in turns, or one after the other where both do not fit into memory."""
        asked = {side: self._asked(side, work, setting) for side in ("ours", "peer")}
        if (work.name, setting) in ALONE:
            found = {side: ask_side(*one) for side, one in asked.items()}
        else:
            found = ask_in_turns(asked)
        return {side: one if isinstance(one, Failed) else figures(one) for side, one in found.items()}

    def _asked(self, side: str, work: Work, setting: str) -> tuple[str, Path | str, dict[str, Any]]:
        request = {
            "work": asdict(work),
            "folder": self.folder,
            "threads": self.threads,
            "steps": self.steps,
            "saving": setting == "saving",
        }
        name = {"ours": "step_ours", "peer": "step_stock" if work.scored_only else "step_trl"}[side]
        return name, own_python() if side == "ours" else self.trl, request


# ---------------------------------------------------------------- the table


def verdict(ratio: float, target: float | None, *, least_wanted: bool) -> str:
    """Say whether a ratio meets its target, if it has one.

    >>> verdict(4.2, 4.0, least_wanted=True), verdict(0.5, 0.45, least_wanted=False)
    ('>= 4x met', '<= 0.45x MISSED')
    """
    if target is None:
        return ""
    met = ratio >= target if least_wanted else ratio <= target
    return f"{'>=' if least_wanted else '<='} {target:g}x {'met' if met else 'MISSED'}"


def lines(work: Work, setting: str, found: Mapping[str, Figures | Failed], wall: Limits) -> Iterator[str]:
    """Write what was found for one work in one setting."""
    name = f"{work.name} {setting}"
    good = {side: one for side, one in found.items() if isinstance(one, Figures)}
    for side, one in found.items():
        if isinstance(one, Failed):
            yield f"{name:<10} {side} gave no figure: {one.reason.strip()}"
    floor = stages(work, wall)
    for line in (*_whole(work, setting, good, floor), *_by_part(good, floor)):
        yield f"{name:<10} {line}".rstrip()
    yield f"{name:<10} least: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in floor.items())
    for side, one in good.items():
        spread = f"steps {one.spread[0]:.2f}-{one.spread[1]:.2f} s, {one.cores:.2f} cores busy"
        facts = ", ".join(f"{key} {value:.4g}" for key, value in one.facts.items())
        yield f"{name:<10} {side}: {spread}; {facts}"


def _whole(work: Work, setting: str, good: Mapping[str, Figures], floor: Mapping[str, float]) -> Iterator[str]:
    """Write the lines of a whole step: time against its target and the limit, memory against its target."""
    ours, peer = good.get("ours"), good.get("peer")
    fast, small = TARGETS.get((work.name, setting), (None, None))
    pair = ours.seconds if ours else None, peer.seconds if peer else None
    judged = verdict(peer.seconds / ours.seconds, fast, least_wanted=True) if ours and peer else ""
    yield _row("step, s", pair, theirs_by_ours=True, least_here=sum(floor.values()), note=judged)
    judged = verdict(ours.peak / peer.peak, small, least_wanted=False) if ours and peer else ""
    for words, field, note in (
        ("peak memory, GB", "peak", judged),
        ("  rests, GB", "resting", ""),
        ("  on top, GB", "on_top", ""),
    ):
        memory = [getattr(one, field) / 1e9 if one else None for one in (ours, peer)]
        yield _row(words, (memory[0], memory[1]), theirs_by_ours=False, note=note)


def _by_part(good: Mapping[str, Figures], floor: Mapping[str, float]) -> Iterator[str]:
    """Write the lines of the parts of a step; "backward" is the trained model's forward and backward together."""
    split = {side: _split(one) for side, one in good.items()}
    for part in ("generation", "prefill", "decode", "reference", "backward", "forward and backward", "optimiser"):
        ours, peer = (split.get(side, {}).get(part) for side in ("ours", "peer"))
        if ours is None and peer is None:
            continue
        least_here, aim = floor.get(part), AIMS.get(part)
        judged = ""
        if aim is not None and ours is not None and least_here is not None:
            judged = f"aim {aim:g} of the limit {'met' if least_here / ours >= aim else 'MISSED'}"
        yield _row(f"  {part}", (ours, peer), theirs_by_ours=True, least_here=least_here, note=judged)


def _row(
    words: str,
    pair: tuple[float | None, float | None],
    *,
    theirs_by_ours: bool,
    least_here: float | None = None,
    note: str = "",
) -> str:
    ours, peer = pair
    ratio = ""
    if ours is not None and peer is not None:
        ratio = f"{peer / ours if theirs_by_ours else ours / peer:.2f}x"
    cells = ["-" if value is None else f"{value:.2f}" for value in pair]
    shares = ["" if least_here is None or not value else f"{least_here / value:.2f}" for value in pair]
    return f"{words:<24} {cells[0]:>8} {cells[1]:>8} {ratio:>8} {shares[0]:>6} {shares[1]:>6}  {note}"


HEADER = f"{'':<10} {'':<24} {'ours':>8} {'peer':>8} {'ratio':>8} {'limit by ours, peer':>13}  target"


def stages(work: Work, wall: Limits) -> dict[str, float]:
    """Return the least seconds of the parts of a work, under the names of the table."""
    amounts = least(Shape(), prompts=work.prompts, prompt=work.prompt, branches=work.branches, segment=work.segment)
    seconds = {name: amount.seconds(wall, "float32") for name, amount in amounts.items()}
    if work.scored_only:
        return {"forward and backward": seconds["backward"]}
    return {
        "prefill": seconds["prefill"],
        "decode": seconds["decode"],
        "reference": seconds["scoring"],
        "backward": seconds["backward"],
        "optimiser": seconds["optimiser"],
    }


def _split(one: Figures) -> dict[str, float]:
    parts = dict(one.parts)
    if "generation" not in parts:
        return {"forward and backward": parts["forward"] + parts["backward"]}
    found: dict[str, float] = {name: parts[name] for name in ("generation", "reference", "optimiser") if name in parts}
    found["backward"] = parts["forward and backward"]
    if "prefill" in one.about:
        found["prefill"] = one.about["prefill"]
        found["decode"] = found["generation"] - found["prefill"]
    return found


def table(run: Run, names: list[str], settings: list[str], wall: Limits) -> list[dict[str, Any]]:
    """Run works in settings, print lines as they come, and return them for a file."""
    records = []
    print(f"\n{HEADER}", flush=True)
    for name in names:
        for setting in settings:
            if (name, setting) not in TARGETS:
                continue
            began = time.monotonic()
            found = run.both(WORKS[name], setting)
            print("\n".join(lines(WORKS[name], setting, found, wall)))
            print(f"{name + ' ' + setting:<10} took {time.monotonic() - began:.0f} s\n", flush=True)
            records.append({"work": name, "setting": setting, **{side: asdict(one) for side, one in found.items()}})
    return records


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WORKS), default=list(WORKS), metavar="WORK")
    parser.add_argument("--setting", choices=[*SETTINGS, "both"], default="both")
    parser.add_argument("--steps", type=int, default=3, help="steps that count, after one that does not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--curves", type=Path, help="measure the curves instead, and write them there")
    parser.add_argument("--axis", nargs="+", help="with --curves: some of them")
    parser.add_argument("--plot", type=Path, help="draw curves that were written, and measure nothing")
    arguments = parser.parse_args()
    import curves

    if arguments.plot is not None:
        curves.plot(arguments.plot, Path(__file__).resolve().parent.parent / "docs" / "performance")
        return
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    load, began = os.getloadavg(), time.monotonic()
    run = Run(trl_python(arguments.trl_python), str(smollm2_folder()), arguments.threads, arguments.steps)
    print(f"{os.cpu_count()} cores, load {load[0]:.2f} {load[1]:.2f} {load[2]:.2f}, {arguments.threads} threads a side")
    if arguments.curves is not None:
        curves.measure(run, arguments.curves, arguments.axis)
        return
    wall = measured(arguments.threads)
    print(shown(wall))
    settings = list(SETTINGS) if arguments.setting == "both" else [arguments.setting]
    records = table(run, arguments.only, settings, wall)
    print(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.2f} at the end")
    if arguments.json is not None:
        found = {"load": load, "threads": arguments.threads, "limits": asdict(wall), "lines": records}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
