"""Cost curves of `training_step.py`: a step's seconds and peak memory as one thing grows, for both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers import Failed
from step_work import Work

if TYPE_CHECKING:
    from training_step import Run

BASE = Work("curve", prompts=1, prompt=128, branches=(8,), segment=32)
AXES: dict[str, tuple[str, dict[int, Work]]] = {
    "group": ("completions of a prompt", {n: replace(BASE, branches=(n,)) for n in (2, 4, 8, 16)}),
    "prompt": ("tokens of the prompt", {n: replace(BASE, prompt=n) for n in (32, 128, 512)}),
    "response": ("tokens of a completion", {n: replace(BASE, segment=n) for n in (8, 32, 128)}),
    # Two branches at each level, scored and backward: as many leaves as 2 to the depth.
    "depth": ("levels of two branches below the prompt", {n: replace(BASE, branches=(2,) * n) for n in (2, 3, 4, 5)}),
}


def measure(run: Run, path: Path, axes: list[str] | None) -> None:
    """Measure the points of some axes, print them, and write them; those of other axes stay in the file."""
    unknown = set(axes or ()) - set(AXES)
    if unknown:
        raise SystemExit(f"--axis: no curve is called {sorted(unknown)}: there are {list(AXES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    print(f"{'':<10} {'':>5} {'ours s':>9} {'peer s':>9} {'ours GB':>9} {'peer GB':>9}")
    for axis in axes or AXES:
        label, works = AXES[axis]
        points = []
        for value, work in works.items():
            sides = run.both(work, "plain")
            point: dict[str, Any] = {"value": value, "work": asdict(work)}
            for side, one in sides.items():
                if isinstance(one, Failed):
                    print(f"{axis:<10} {value:>5} {side} gave no figure: {one.reason}", flush=True)
                else:
                    point[side] = {"seconds": one.seconds, "peak": one.peak, "resting": one.resting}
            print(f"{axis:<10} {value:>5} {_row(point)}", flush=True)
            points.append(point)
        found[axis] = {"label": label, "threads": run.threads, "points": points}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _row(point: Mapping[str, Any]) -> str:
    cells = [(name, side, scale) for name, scale in (("seconds", 1.0), ("peak", 1e9)) for side in ("ours", "peer")]
    return " ".join(f"{point[s][name] / scale:>9.2f}" if s in point else f"{'-':>9}" for name, s, scale in cells)


def plot(path: Path, folder: Path) -> None:
    """Draw each curve as an SVG of two panels, the same bytes for the same figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ramet", "font.size": 9})
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for axis, curve in json.loads(path.read_text(encoding="utf-8")).items():
        figure, panels = pyplot.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
        for panel, (name, scale, title) in zip(
            panels, (("seconds", 1.0, "seconds a step"), ("peak", 1e9, "peak memory, GB")), strict=True
        ):
            for side, words, mark in (("ours", "ramet", "o-"), ("peer", _peer(axis), "s--")):
                points = [(p["value"], p[side][name] / scale) for p in curve["points"] if side in p]
                panel.plot(*zip(*points, strict=True), mark, label=words, markersize=4) if points else None
            values = [p["value"] for p in curve["points"]]
            panel.set_xscale("log" if axis != "depth" else "linear", **({"base": 2} if axis != "depth" else {}))
            panel.set_xticks(values, [str(value) for value in values])
            panel.minorticks_off()
            panel.set_ylim(bottom=0)
            panel.set_xlabel(curve["label"])
            panel.set_title(title, fontsize=9)
            panel.grid(alpha=0.3)
        panels[0].legend(frameon=False)
        figure.savefig(folder / f"{axis}.svg", metadata={"Date": None})
        pyplot.close(figure)
        print(folder / f"{axis}.svg")


def _peer(axis: str) -> str:
    return "transformers, padded rows" if axis == "depth" else "TRL"
