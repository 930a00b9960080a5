"""Conversations beside TorchRL's `ChatEnv`: the same work on both sides in one run, in milliseconds, with the targets.

    python benchmarks/chat_env.py                      # some minutes
    python benchmarks/chat_env.py --quick              # under one
    python benchmarks/chat_env.py --peer PYTHON --json figures.json

As in `benchmarks/environments.py`, whose machinery this is: two processes that are asked in turn. The targets are for
messages ("history"), which is the default on both sides. Answers are made outside the clock; the peer's environment
takes whole conversations, and putting those together is its policy's work, which is not counted either: its step of
tokens hands on the tensor that its policy has made, where ours appends. Prompts are of one length, for its tokens take
no others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from environments import FULL, HEADER, QUICK, Ask, Line, Plan, Sides, compared, failure, middle, shown
from peers import torchrl_python

MODES = ("history", "text", "tokens")
CALLS = ("reset", "step", "step_and_reset")
TURNS = (2, 8, 32, 128)
PEER_TURNS = (2, 8, 32)  # 128 of its turns take minutes


def calls(sides: Sides, quick: bool) -> Iterator[Line]:
    """Reset, step, step and reset, in each mode."""
    for batch in (256,) if quick else (1, 8, 64, 256):
        for mode in MODES:
            for call in CALLS:
                options = {"call": call, "mode": mode, "batch": batch}
                asks: dict[str, Ask] = {
                    "ours": ("chat_ours", "chat", options),
                    "peer": ("chat_peer", "chat", options),
                }
                target = 100.0 if batch == 256 and mode == "history" and call != "reset" else None
                answers = sides.ask(asks, sides.plan.long_rounds if batch == 256 else None)
                yield compared("chat", f"{call}, {mode}", batch, answers, target)


def growth(sides: Sides, quick: bool) -> Iterator[Line]:
    """Mean cost of a turn in episodes of more and more turns, against that in one of 2; with a task as well."""
    batch = 32
    for mode in MODES[:1] if quick else MODES:
        yield _flat(sides, "chat_ours", TURNS, ("chat", {"call": "step", "mode": mode, "batch": batch}))
        yield _flat(sides, "chat_ours", TURNS, ("task", {"mode": mode, "batch": batch}))
        numbers = PEER_TURNS[:2] if quick else PEER_TURNS
        yield _flat(sides, "chat_peer", numbers, ("chat", {"call": "step", "mode": mode, "batch": batch}))


def _flat(sides: Sides, side: str, numbers: tuple[int, ...], work: tuple[str, dict[str, Any]]) -> Line:
    name, options = work
    own = side == "chat_ours"
    asks: dict[str, Ask] = {str(count): (side, name, {**options, "count": count}) for count in numbers}
    answers = sides.ask(asks, sides.plan.rounds if own else 1)
    what = f"step, {options['mode']}, {'ours' if own else 'TorchRL'}{' with a task' if name == 'task' else ''}"
    line = Line("growth", what, options["batch"], note=failure(answers))
    if line.note:
        return line
    means = {count: middle(found) for count, found in answers.items()}
    first, *_, last = means.values()
    note = ", ".join(f"{ms:.3f} ms in {count} turns" for count, ms in means.items())
    line = replace(line, value=last / first, note=note, ours=last if own else None, peer=None if own else last)
    return replace(line, target="<= 1.5x", met=last <= 1.5 * first) if own else line


PARTS = {"calls": calls, "growth": growth}


def main() -> None:
    """Measure, and print a table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, B = 256 alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: where others run")
    parser.add_argument("--peer", type=Path, help="a Python that has the peer")
    parser.add_argument("--json", type=Path, help="write the lines there too")
    arguments = parser.parse_args()
    plan: Plan = QUICK if arguments.quick else FULL
    pythons: dict[str, Path | str] = {"chat_ours": sys.executable, "chat_peer": torchrl_python(arguments.peer)}
    began, load = time.monotonic(), os.getloadavg()
    sides = Sides(pythons, arguments.threads, arguments.clock, plan)
    print(f"{os.cpu_count()} cores, load {load[0]:.2f}, {arguments.threads} thread(s) a side, {arguments.clock} time")
    for side, versions in sides.versions.items():
        print(f"{side}: " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    print(f"\n{HEADER}", flush=True)
    lines: list[Line] = []
    for part in arguments.only:
        for line in PARTS[part](sides, arguments.quick):
            print(shown(line), flush=True)
            lines.append(line)
    sides.close()
    judged = [line for line in lines if line.met is not None]
    met = sum(line.met is True for line in judged)
    print(f"\n{met} of {len(judged)} targets met, {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.2f}")
    if arguments.json is not None:
        facts = {"load": load, "cores": os.cpu_count(), "threads": arguments.threads, "clock": arguments.clock}
        facts |= {"versions": sides.versions, "lines": [asdict(line) for line in lines]}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
