"""Prefix sharing, packing, chunks, entropy, temperature, support, checkpointing, autocast, adapters and micro-batches.

Every pair of settings appears, on a model with windows and soft caps, a mixture of experts, and one that shares node by
node, and equals each trajectory alone in float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.scoring import pairs

from ramet.scoring.layout import batches

pytest.importorskip("peft")

TOLERANCE = 1e-5
"""Of values, and of gradients relatively, in float32."""


def name_of(mode: Any) -> str:
    if not isinstance(mode, dict):
        return str(mode)
    return " ".join(pairs.said(setting).replace(" ", "=") for setting in mode.items())


@pytest.mark.parametrize("mode", pairs.modes(), ids=name_of)
@pytest.mark.parametrize("name", pairs.ARCHITECTURES)
def test_each_pair_of_settings_equals_each_trajectory_alone(name: str, mode: pairs.Mode) -> None:
    """Under autocast: the median value 0.03, and the gradient 0.2 relative, as bfloat16 keeps 3 digits.

    Its largest error is not bounded closer than 1, since a router, or a cut at the edge of the support, may decide
    otherwise there.
    """
    found = pairs.errors(name, mode)
    if mode["autocast"] is None:
        assert found.value < TOLERANCE
        assert found.gradient < TOLERANCE
    else:
        assert TOLERANCE < found.median < 0.03  # and it was on
        assert found.value < 1
        assert found.gradient < 0.2


def test_every_pair_is_there() -> None:
    found = set().union(*map(pairs.settings_of, pairs.modes()))
    axes = pairs.AXES
    for a, b in itertools.combinations(axes, 2):
        assert {((a, x), (b, y)) for x in axes[a] for y in axes[b]} <= found


def test_the_settings_matter() -> None:
    """Each of those that change what is right does so: an error in one would show."""
    plain = {axis: values[0] for axis, values in pairs.AXES.items()}
    base = pairs.expected_of("Gemma 2", plain)
    for axis in ("temperature", "support", "adapter"):
        other = pairs.expected_of("Gemma 2", plain | {axis: pairs.AXES[axis][1]})
        assert float((other.log_probs - base.log_probs).abs().max()) > 0.01
    both = pairs.expected_of("Gemma 2", plain | {"entropy": True})
    assert max(float((both.gradients[key] - base.gradients[key]).norm()) for key in base.gradients) > 0.1
    parts = list(batches(pairs.forest_of(2), range(12), 60))
    assert len(parts) > 2
    assert max(map(len, parts)) > 1


def test_the_table_has_a_line_for_each_pair() -> None:
    lines = pairs.pair_table(["Mixtral"]).splitlines()
    named = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines[2:]}
    values = [(axis, value) for axis, values in pairs.AXES.items() for value in values]
    expected = {(pairs.said(a), pairs.said(b)) for a, b in itertools.combinations(values, 2) if a[0] != b[0]}
    assert named == expected
