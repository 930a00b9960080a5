"""What both sides of the benchmark share: the prompts, the clock, the count of memory, and the talk with the driver.

This file and its neighbours run in two interpreters, that of this project and that of the peer, with other versions of
tensordict. Neither side sees the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from tensordict import NonTensorStack, TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

WIDTH = 32  # tokens of the longest prompt of every batch
VOCABULARY = 1000
STEPS = 4  # steps of an episode before the next reset, where single steps are timed


@dataclass(frozen=True)
class Loop:
    """Something that is timed again and again: `ready()` makes the input of one call outside the clock.

    Calls come in whole runs of `group`; `facts(result)` tells of the last result of a measurement, outside the clock.
    `warm`: a run before the first measurement is not counted, since first calls import and allocate.
    """

    ready: Callable[[], Any]
    run: Callable[[Any], Any]
    group: int = 1
    facts: Callable[[Any], Mapping[str, float]] | None = None
    warm: bool = True


Work: TypeAlias = Callable[..., Loop]
"""Sets up a loop from the options of a request."""


def measure(loop: Loop, seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """Call for about `seconds` on the clock, one group at least; the mean in milliseconds."""
    gc.collect()
    spent, calls, result = 0.0, 0, None
    end = time.perf_counter() + 5 * seconds  # what is outside the clock takes its time too
    while calls == 0 or (spent < seconds and time.perf_counter() < end):
        for _ in range(loop.group):
            given, result = loop.ready(), None  # the last result dies before the clock starts
            began = clock()
            result = loop.run(given)
            spent += clock() - began
            calls += 1
    facts = {} if loop.facts is None else dict(loop.facts(result))
    return {"ms": 1e3 * spent / calls, "calls": calls, "facts": facts}


# ---------------------------------------------------------------- the same prompts on both sides


def token_rows(batch: int, *, ragged: bool = True, seed: int = 0) -> list[Tensor]:
    """Make prompts of 16 to 32 tokens, the first of 32; of 32 tokens all, where they are not ragged."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(WIDTH // 2, WIDTH + 1, (batch,), generator=generator).tolist()
    lengths = [WIDTH, *lengths[1:]] if ragged else [WIDTH] * batch
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded_rows(batch: int) -> tuple[Tensor, Tensor]:
    """Make the same prompts left-padded: tokens int64 and mask bool, [B, 32]."""
    tokens = torch.zeros(batch, WIDTH, dtype=torch.int64)
    mask = torch.zeros(batch, WIDTH, dtype=torch.bool)
    for row, prompt in enumerate(token_rows(batch)):
        tokens[row, WIDTH - len(prompt) :] = prompt
        mask[row, WIDTH - len(prompt) :] = True
    return tokens, mask


def strings(batch: int) -> list[str]:
    """Make prompts of about 130 characters, all different."""
    return [f"Question {row}: " + "what is the sum of these numbers, and why? " * 3 for row in range(batch)]


class Repeated:
    """A loader that hands out the same batches for ever; batch size 0: single items."""

    def __init__(self, items: list[Any], batch_size: int) -> None:
        self.items, self.batch_size = items, batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def text_loader(prompts: int, batch_size: int) -> Repeated:
    """Load strings under "text", a list of `batch_size` at a time."""
    texts = strings(prompts)
    return Repeated([{"text": texts[i : i + batch_size]} for i in range(0, prompts, batch_size)], batch_size)


def ragged_loader(prompts: int) -> Repeated:
    """Load ragged token rows under "tokens", one at a time."""
    return Repeated([{"tokens": row} for row in token_rows(prompts)], 0)


def padded_loader(batch: int) -> Repeated:
    """Load one padded batch under "tokens" and "attention_mask" again and again."""
    tokens, mask = padded_rows(batch)
    return Repeated([{"tokens": tokens, "attention_mask": mask}], batch)


@dataclass
class Actions:
    """One token for each row, another one at each call."""

    batch: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def tokens(self) -> Tensor:
        """Draw the next tokens, int64 [B, 1]."""
        return torch.randint(1, VOCABULARY, (self.batch, 1), generator=self.generator)

    def texts(self) -> list[str]:
        """Draw the next words."""
        return [f" word{number}" for number in self.tokens()[:, 0].tolist()]


def byte_prompts(batch: int) -> Tensor:
    """Make prompts of 32 bytes, int64 [B, 32]."""
    return torch.randint(0, 256, (batch, WIDTH), generator=torch.Generator().manual_seed(2))


def byte_actions(batch: int, steps: int) -> list[Tensor]:
    """Make `steps` actions of one byte for each row, int64 [B, 1]."""
    return list(torch.randint(0, 256, (steps, batch, 1), generator=torch.Generator().manual_seed(3)))


def byte_tokenizer() -> Any:
    """Make a tokenizer of the 256 bytes: nothing is downloaded."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(tokenizer_object=tokenizer)


# ---------------------------------------------------------------- loops that look alike on both sides


def episode(env: Any, start: Callable[[], Any], act: Callable[[Any], Any], read: Callable[[Any], Any]) -> Loop:
    """Time `env.step`: the first `STEPS` steps after a reset, each with a new action. `read` is on the clock."""
    stepped: list[Any] = []

    def ready() -> Any:
        state = env.step_mdp(stepped.pop()) if stepped and len(seen) % STEPS else start()
        seen.append(None)
        act(state)
        return state

    def run(state: Any) -> Any:
        td = env.step(state)
        read(td.get("next"))
        stepped[:] = [td]
        return td

    seen: list[None] = []
    return Loop(ready, run, STEPS)


def resets(env: Any, given: Callable[[], Any], read: Callable[[Any], Any]) -> Loop:
    """Time `env.reset`. `read` is on the clock."""

    def run(td: Any) -> Any:
        state = env.reset(td)
        read(state)
        return state

    return Loop(given, run)


def rollouts(env: Any, start: Callable[[], Any], act: Callable[[Any], Any], steps: int) -> Loop:
    """Time `env.rollout` from a state that is there; tell what it holds beyond that state."""
    state: list[Any] = []

    def ready() -> Any:
        state[:] = [start()]
        return state[0]

    def run(first: Any) -> Any:
        return env.rollout(steps, act, auto_reset=False, tensordict=first)

    def facts(result: Any) -> dict[str, float]:
        data, everything = held(result)
        data_before, before = held(state[0])
        return {"data": data - data_before, "all": everything - before}

    return Loop(ready, run, 1, facts, warm=steps < 64)


def nothing(_: Any = None) -> None:
    """Read nothing, or pass nothing to `reset`."""


def writer(key: str, make: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a policy that writes what `make` makes under `key`."""

    def act(td: Any) -> Any:
        return td.set(key, make())

    return act


def token_state(rows: list[Tensor]) -> TensorDict:
    """Stack rows of equal length: TensorDict [B] of dense tokens."""
    return TensorDict({"tokens": torch.stack(rows)}, [len(rows)])


def padded_state(batch: int) -> TensorDict:
    """Make a TensorDict [B] of left-padded prompts and their mask."""
    tokens, mask = padded_rows(batch)
    return TensorDict({"tokens": tokens, "attention_mask": mask}, [batch])


def text_state(batch: int) -> TensorDict:
    """Make a TensorDict [B] of strings."""
    return TensorDict({"text": NonTensorStack(*strings(batch))}, [batch])


# ---------------------------------------------------------------- memory


_NOT_DATA: tuple[type, ...] = (type, type(sys), type(lambda: 0), type([].append), torch.nn.Module, torch.Generator)


def held(root: Any) -> tuple[int, int]:
    """Count the bytes that can be reached from `root`: distinct tensor storages and strings; all objects with them."""
    data: dict[int, int] = {}
    objects = 0
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _NOT_DATA) or type(item).__module__.startswith(("tokenizers", "trans")):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            waiting.extend(vars(item).values())
            if not item.is_nested:
                storage = item.untyped_storage()
                data[storage.data_ptr()] = storage.nbytes()
            objects += sys.getsizeof(item)
        elif isinstance(item, str):
            data[id(item)] = sys.getsizeof(item)
        else:
            objects += sys.getsizeof(item)
            waiting.extend(gc.get_referents(item))
    total = sum(data.values())
    return total, total + objects


# ---------------------------------------------------------------- the talk with the driver


def serve(works: Mapping[str, Work], versions: Mapping[str, str]) -> None:
    """Answer requests, one JSON object a line, until the input ends. What libraries print goes to stderr."""
    parser = argparse.ArgumentParser(description="one side of benchmarks/environments.py, which starts it")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--clock", choices=["wall", "cpu"], required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        print(json.dumps(dict(versions)), file=answers, flush=True)
        loops: dict[str, Loop] = {}  # those that are asked in turn
        for line in sys.stdin:
            asked = json.loads(line)
            wanted = json.dumps([asked["work"], asked["options"]])
            try:
                if wanted not in loops:
                    if len(loops) == 2:
                        del loops[next(iter(loops))]
                    loops[wanted] = works[asked["work"]](**asked["options"])
                    if loops[wanted].warm:
                        measure(loops[wanted], 0.0, clock)
                answer = measure(loops[wanted], asked["seconds"], clock)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            print(json.dumps(answer), file=answers, flush=True)
