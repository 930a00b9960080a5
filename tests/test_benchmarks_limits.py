"""The least that a work needs, by hand and by counting tokens one by one; and what the tables judge."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def _load(name: str) -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


limits = _load("limits")
SMALL = limits.Shape(layers=1, width=2, heads=1, kv_heads=1, head_width=2, inner=3, vocabulary=5)


def test_shape_counts_the_weights_of_smollm2() -> None:
    shape = limits.Shape()
    # q and o 576 x 576, k and v 576 x 192, three of 576 x 1536; the embedding is the head.
    assert shape.body == 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert shape.body + shape.head == 134_479_872
    assert shape.kept * 4 == 46_080


def test_least_by_hand() -> None:
    # body 2*2*(2+2) + 3*2*3 = 34, head 10, 8 FLOP a pair, 4 numbers a token kept
    found = limits.least(SMALL, prompts=1, prompt=2, branches=[2], segment=2)
    # 4 tokens run (2 of the prompt, the first of each segment), 4 are predicted, pairs: 1 + 2 in the prompt, 3 + 3
    scoring = 2 * 34 * 4 + 2 * 10 * 4 + 8 * 9
    assert found["scoring"] == limits.Amount(scoring, 4 * 44)
    assert found["backward"] == limits.Amount(3 * scoring, 3 * 4 * 44)
    assert found["optimiser"] == limits.Amount(0, 7 * 4 * 44)
    assert found["prefill"] == limits.Amount(2 * 34 * 2 + 2 * 10 + 8 * 3, 4 * 44)
    # one step of two rows, each looking at 3 tokens; read: weights, the prompt once, a token of each row
    assert found["decode"] == limits.Amount(2 * 44 * 2 + 8 * 6, 4 * (44 + 4 * (2 + 2)))


@settings(deadline=None, max_examples=20)
@given(
    prompts=st.integers(1, 2),
    prompt=st.integers(1, 4),
    branches=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    segment=st.integers(1, 3),
)
def test_scoring_counts_each_distinct_token_once(prompts: int, prompt: int, branches: list[int], segment: int) -> None:
    # Every row as the names of its tokens: equal names are one token of the tree.
    rows = []
    for chosen in itertools.product(range(prompts), *(range(branch) for branch in branches)):
        names = [(chosen[:1], at) for at in range(prompt)]
        names += [(chosen[: level + 2], at) for level in range(len(branches)) for at in range(segment)]
        rows.append(names)
    run = {name: at + 1 for row in rows for at, name in enumerate(row[:-1])}
    sampled = {name for row in rows for name in row[prompt:]}
    flops = 2 * SMALL.body * len(run) + 2 * SMALL.head * len(sampled) + SMALL.pair * sum(run.values())
    found = limits.least(SMALL, prompts=prompts, prompt=prompt, branches=branches, segment=segment)
    assert found["scoring"].flops == flops
    assert ("decode" in found) == (len(branches) == 1)


def test_time_is_the_longer_of_arithmetic_and_memory() -> None:
    wall = limits.Limits(1, {"float32": {"a": 10.0, "b": 20.0}}, read=4.0, copy=4.0)
    assert limits.Amount(100.0, 4.0).seconds(wall, "float32") == pytest.approx(5.0)
    assert limits.Amount(100.0, 80.0).seconds(wall, "float32") == pytest.approx(20.0)
