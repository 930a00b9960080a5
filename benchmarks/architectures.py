"""Compare every engine of `score` with the oracle on every architecture of the zoo; print a table in Markdown.

The oracle runs each trajectory alone, with all logits, in float64. An error is the largest of any token's log-prob or
entropy, and the largest of any parameter's gradient, relative. Run it from the root of the repository:

    python -m benchmarks.architectures                 # all architectures, all engines
    python -m benchmarks.architectures Llama "Gemma 2"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tests.scoring.zoo import ZOO, Architecture, Engine, Errors, measure, names, right_answers, two_level_forest

from ramet.forest import Forest
from ramet.scoring.flat import score_flat
from ramet.scoring.nodes import score_nodes
from ramet.scoring.rows import score_rows

ENGINES: dict[str, Engine] = {"flat": score_flat, "nodes": score_nodes, "rows": score_rows}
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Line:
    """What one engine made of one architecture: its errors, or the name of the exception that it raised."""

    architecture: str
    engine: str
    found: Errors | str

    @property
    def right(self) -> bool:
        """Whether all errors are within the tolerance."""
        return isinstance(self.found, Errors) and self.found.worst < TOLERANCE


def table(architectures: Sequence[Architecture] = ZOO, forest: Forest | None = None) -> Iterator[Line]:
    """Yield a line for each architecture and engine, on `two_level_forest()` unless told otherwise."""
    tree = two_level_forest() if forest is None else forest
    for architecture in architectures:
        right = right_answers(architecture, tree)
        for name, engine in ENGINES.items():
            try:
                found: Errors | str = measure(architecture, engine, tree, right)
            except Exception as error:  # a stock model that is called in a way that it was not made for raises anything
                found = type(error).__name__
            yield Line(architecture.name, name, found)


def cell(line: Line) -> str:
    """Write the errors of values and gradients, bold where they are wrong."""
    if isinstance(line.found, str):
        return line.found
    errors = f"{max(line.found.log_probs, line.found.entropy):.0e} / {line.found.gradients:.0e}"
    return errors if line.right else f"**{errors}**"


def markdown(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the table of values / gradients, an architecture a line."""
    yield "| architecture | " + " | ".join(ENGINES) + " |"
    yield "|---" * (1 + len(ENGINES)) + "|"
    for first in range(0, len(lines), len(ENGINES)):
        row = lines[first : first + len(ENGINES)]
        yield f"| {row[0].architecture} | " + " | ".join(map(cell, row)) + " |"


def main() -> None:
    """Print the table, and how many of the architectures each engine is right for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("architectures", nargs="*", metavar="NAME", help=f"of: {', '.join(names())}")
    wanted = parser.parse_args().architectures
    if unknown := set(wanted) - set(names()):
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    torch.set_num_threads(1)
    lines = list(table([architecture for architecture in ZOO if not wanted or architecture.name in wanted]))
    print("\n".join(markdown(lines)))
    counts = {engine: sum(line.right for line in lines if line.engine == engine) for engine in ENGINES}
    print(f"\nwithin {TOLERANCE:g}, of {len(lines) // len(ENGINES)}: {counts}")


if __name__ == "__main__":
    main()
