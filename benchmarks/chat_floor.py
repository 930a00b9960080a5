"""The least that a step of `ChatEnv` has to do, each part alone: what no implementation of its contract can go below.

    python benchmarks/chat_floor.py [--batch 256] [--rounds 300]

`benchmarks/environments.py --only chat` compares whole steps with TorchRL's; this says what there is to be had. In
"tokens" a step appends an answer to rows of different lengths, shows them as a jagged tensor, and makes three flags. In
"text" it reads the strings of the answers out of tensordict's stack. Medians in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tensordict import NonTensorStack, TensorDict

from ramet.ragged.text import text_in

IDS = 21
"""How many tokens an answer has."""


def parts(batch: int) -> dict[str, Callable[[], object]]:
    """Return the parts of a step over `batch` rows, by what they do."""
    room, lengths = torch.zeros(batch * 256, dtype=torch.int64), torch.full((batch,), 60)
    starts, offsets = torch.arange(batch) * 256, torch.arange(batch + 1) * 256
    answers = torch.arange(batch * IDS)
    strings = NonTensorStack(*["It is the third one."] * batch)

    def append() -> object:
        return room.index_copy_(0, ((starts + lengths)[:, None] + torch.arange(IDS)).view(-1), answers)

    def jagged() -> object:
        return torch.nested.nested_tensor_from_jagged(room, offsets, lengths)

    def flags() -> object:
        return [torch.zeros(batch, 1, dtype=torch.bool) for _ in range(3)]

    def loop() -> object:
        return list(range(batch))

    return {
        f"one write of {batch} answers of {IDS} ids": append,
        "a jagged tensor over the rows": jagged,
        "three flags": flags,
        f"reading {batch} strings out of a stack": lambda: text_in(strings),
        "a TensorDict of one entry": lambda: TensorDict({"done": lengths}, [batch]),
        f"a Python loop over {batch} rows": loop,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, part in parts(options.batch).items():
        taken = []
        for _ in range(options.rounds):
            began = time.perf_counter()
            part()
            taken.append(time.perf_counter() - began)
        print(f"{1e6 * statistics.median(taken):7.1f} us  {name}")


if __name__ == "__main__":
    main()
