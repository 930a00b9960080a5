"""What the machine can do, and the least that a work needs of it: how far a figure is from the wall.

    python benchmarks/limits.py --threads 2

The table gives the rate of matrix products (square, and of the shapes of SmolLM2-135M) and the bandwidth of memory. The
limit of a precision is the best rate of all shapes: a shape below it is no excuse, but something to be won.

The last lines are what the libraries make of it: all linear layers of the model one after the other, for the 16 rows of
a decoding step and the 696 tokens of R1, with weights that come from memory as they do in a model. What a stage takes
above that is its own.

`least` counts the arithmetic and the memory traffic that a work can not do without, each distinct token once. The time
of a stage is at least the longer of arithmetic by rate and bytes by bandwidth.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
SQUARE = (2048, 2048, 2048)
# Rows, columns in, columns out: a packed forward pass of R1, one of R2, a decoding step of 16 rows, and the head.
SHAPES = (
    SQUARE,
    (712, 576, 1536),
    (712, 1536, 576),
    (1024, 576, 1536),
    (512, 576, 49152),
    (16, 576, 1536),
    (16, 576, 49152),
)


@dataclass(frozen=True)
class Limits:
    """Measured: FLOP a second of each shape by precision, bytes a second that are read, and read and written.

    `layers` are the seconds of all linear layers of the model in turn.
    """

    threads: int
    matmul: Mapping[str, Mapping[str, float]]
    read: float
    copy: float
    layers: Mapping[str, float] = field(default_factory=dict)

    def rate(self, dtype: str) -> float:
        """Return the best rate of a precision, in FLOP a second."""
        return max(self.matmul[dtype].values())


@dataclass(frozen=True)
class Shape:
    """What of a decoder's shape decides its cost; the default is SmolLM2-135M."""

    layers: int = 30
    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_width: int = 64
    inner: int = 1536
    vocabulary: int = 49152

    @property
    def body(self) -> int:
        """Weights of all layers that are multiplied with each token."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def head(self) -> int:
        """Weights of the head, which are those of the embedding too."""
        return self.width * self.vocabulary

    @property
    def pair(self) -> int:
        """FLOP of one token that attends to one token: scores and weighted sum, in all heads and layers."""
        return 4 * self.heads * self.head_width * self.layers

    @property
    def kept(self) -> int:
        """Numbers in the cache of one token."""
        return 2 * self.layers * self.kv_heads * self.head_width


@dataclass(frozen=True)
class Amount:
    """Arithmetic in FLOP, and memory traffic in bytes."""

    flops: float
    bytes: float

    def seconds(self, limits: Limits, dtype: str) -> float:
        """Return the least time: the longer of the two."""
        return max(self.flops / limits.rate(dtype), self.bytes / limits.read)


def least(
    shape: Shape, *, prompts: int, prompt: int, branches: Sequence[int], segment: int, width: int = 4
) -> dict[str, Amount]:
    """Return the least that each stage needs for `prompts` trees, with `width` bytes a number.

    A tree is a prompt of `prompt` tokens, `branches[0]` sampled segments of `segment` tokens behind it, `branches[1]`
    behind each of those, and so on. "prefill" runs each prompt once, "decode" draws all segments at once (given one
    level), "scoring" is a forward pass for the log-prob of each distinct sampled token, "backward" the same with the
    gradient (three times the arithmetic; recomputation is not counted), "optimiser" a step of AdamW.

    Prefixes are computed once and read once a step; the last token of a path predicts nothing, and is not run.
    """
    rows = [prompts * math.prod(branches[: level + 1]) for level in range(len(branches))]
    ends = [length if level < len(rows) - 1 else length - 1 for level, length in enumerate([segment] * len(rows))]
    run = prompts * prompt + sum(count * length for count, length in zip(rows, ends, strict=True))
    sampled = sum(rows) * segment
    pairs = prompts * _pairs(0, prompt)
    pairs += sum(n * _pairs(prompt + level * segment, ends[level]) for level, n in enumerate(rows))
    scoring = 2 * shape.body * run + 2 * shape.head * sampled + shape.pair * pairs
    weights = (shape.body + shape.head) * width
    amounts = {
        "scoring": Amount(scoring, weights),
        # Weights are read forward and backward, and the gradient is written.
        "backward": Amount(3 * scoring, 3 * weights),
        # Weights, gradient and two moments are read; weights and moments are written.
        "optimiser": Amount(0, 7 * weights),
    }
    if len(rows) == 1:
        through = (
            2 * shape.body * prompts * prompt + 2 * shape.head * prompts + shape.pair * prompts * _pairs(0, prompt)
        )
        amounts["prefill"] = Amount(through, weights)
        amounts["decode"] = _decode(shape, prompts, prompt, rows[0], segment, width)
    return amounts


def _decode(shape: Shape, prompts: int, prompt: int, rows: int, segment: int, width: int) -> Amount:
    """Count the steps after the first token, which is drawn from the logits of the prefill."""
    steps = segment - 1
    flops = 2 * (shape.body + shape.head) * rows * steps + shape.pair * rows * _pairs(prompt, steps)
    read = steps * prompts * prompt + rows * _pairs(0, steps)  # the cache: each prompt once a step, all own tokens
    return Amount(flops, width * (steps * (shape.body + shape.head) + shape.kept * read))


def _pairs(before: int, length: int) -> int:
    """Count the pairs (token, token that it sees, itself too) of `length` tokens behind `before` others."""
    return length * before + length * (length + 1) // 2


# ---------------------------------------------------------------- measuring


def limits(threads: int) -> Limits:
    """Measure in this process, in a few seconds; sets torch's threads."""
    import torch

    torch.set_num_threads(threads)
    matmul: dict[str, dict[str, float]] = {}
    for dtype in DTYPES:
        matmul[dtype] = {}
        for rows, columns, out in SHAPES:
            kind = getattr(torch, dtype)
            left, right = torch.randn(rows, columns).to(kind), torch.randn(out, columns).to(kind)
            seconds = _best(_product(left, right))
            matmul[dtype][_name(rows, columns, out)] = 2 * rows * columns * out / seconds
    source = torch.ones(2**26)  # 256 MiB, more than any cache holds
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    read, copied = _best(source.sum), _best(lambda: target.copy_(source))
    return Limits(threads, matmul, size / read, 2 * size / copied, _all_layers(Shape()))


def _all_layers(shape: Shape) -> dict[str, float]:
    """Return the seconds of all linear layers in turn, float32: for 16 rows, as they are and packed, and for 696."""
    import torch
    from torch import nn

    from ramet.policies.packed import PackedLinears

    keys = shape.kv_heads * shape.head_width
    one = [(shape.width, shape.width)] * 2 + [(shape.width, keys)] * 2
    one += [(shape.width, shape.inner)] * 2 + [(shape.inner, shape.width)]
    body = [nn.Linear(*size, bias=False) for size in one * shape.layers]
    layers = nn.ModuleList([*body, nn.Linear(shape.width, shape.vocabulary, bias=False)])

    def through(rows: int, some: Sequence[Any]) -> float:
        given = {width: torch.randn(rows, width) for width in (shape.width, shape.inner)}
        return _best(lambda: [layer(given[layer.in_features]) for layer in some], 1.0)

    with torch.inference_mode():
        # The head runs over other rows than the 696.
        found = {"16 rows": through(16, list(layers)), "696 rows without the head": through(696, body)}
        with PackedLinears(layers, rows=16):
            found["16 rows, packed"] = through(16, list(layers))
    return found


def measured(threads: int) -> Limits:
    """Measure in a process of its own, so that this one stays small."""
    command = [sys.executable, str(Path(__file__).resolve()), "--threads", str(threads), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Limits(**json.loads(done.stdout))


def _product(left: object, right: object) -> Callable[[], object]:
    from torch.nn.functional import linear

    return lambda: linear(left, right)  # type: ignore[arg-type]


def _best(work: Callable[[], object], seconds: float = 0.25) -> float:
    """Return the shortest of the runs that fit in `seconds`, at least 3, after one that is not counted."""
    work()
    began = time.perf_counter()
    found: list[float] = []
    while len(found) < 3 or time.perf_counter() - began < seconds:
        at = time.perf_counter()
        work()
        found.append(time.perf_counter() - at)
    return min(found)


def _name(rows: int, columns: int, out: int) -> str:
    return f"{rows} x {columns} x {out}"


def shown(found: Limits) -> str:
    """Write the table."""
    lines = [f"{'matrix product, GFLOP/s':<26}" + "".join(f"{dtype:>10}" for dtype in DTYPES)]
    for size in SHAPES:
        name = _name(*size)
        lines.append(f"{name:<26}" + "".join(f"{found.matmul[dtype][name] / 1e9:>10.0f}" for dtype in DTYPES))
    middle = {dtype: statistics.median(found.matmul[dtype].values()) for dtype in DTYPES}
    lines.append(f"{'median':<26}" + "".join(f"{middle[dtype] / 1e9:>10.0f}" for dtype in DTYPES))
    lines.append(f"{'best: the limit':<26}" + "".join(f"{found.rate(dtype) / 1e9:>10.0f}" for dtype in DTYPES))
    lines.append(f"memory, GB/s: read {found.read / 1e9:.1f}, copy {found.copy / 1e9:.1f} (both ways counted)")
    layers = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in found.layers.items())
    lines.append(f"all linear layers, weights from memory, float32: {layers}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", choices=["-"], help="write JSON and no table")
    arguments = parser.parse_args()
    found = limits(arguments.threads)
    print(json.dumps(asdict(found)) if arguments.json else shown(found))


if __name__ == "__main__":
    main()
