"""Whether two forests hold the same, however their nodes and rollouts are numbered."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ramet.forest.about import outcome_to_json
from ramet.forest.nodes import ROOT, Nodes
from ramet.forest.rollout import Rollout, Steps

if TYPE_CHECKING:
    from ramet.forest.forest import Forest


def same(one: Forest, other: Forest) -> bool:
    """Say whether both hold the same prefixes with the same hashes, and the same rollouts equally often."""
    names = _paired(one.nodes, other.nodes)
    if names is None:
        return False
    mine = Counter(_content(rollout, names[rollout.end]) for rollout in one.rollouts)
    return mine == Counter(_content(rollout, rollout.end) for rollout in other.rollouts)


def _paired(one: Nodes, other: Nodes) -> dict[int, int] | None:
    """Return the node of `other` for each node of `one`; None where the two trees differ."""
    if len(one) != len(other) or one.initial != other.initial:
        return None
    names = {ROOT: ROOT}
    for node in one.top_down()[1:]:
        above = names[one.table[node].parent]
        twin = other.child(above, int(one.segment(node)[0]), one.hash(node, 1))
        if twin is None or one.hash(node) != other.hash(twin):
            return None
        if not np.array_equal(one.segment(node), other.segment(twin)):
            return None
        names[node] = twin
    return names


def _content(rollout: Rollout, end: int) -> object:
    of_tokens = (rollout.kinds.tobytes(), rollout.log_probs.tobytes(), rollout.versions.tobytes())
    told = (rollout.group, rollout.member, rollout.prompt_index, rollout.part, rollout.stop, rollout.advantage)
    outcome = json.dumps(outcome_to_json(rollout.outcome), sort_keys=True)
    return end, told, outcome, of_tokens, _steps_content(rollout.steps)


def _steps_content(steps: Steps | None) -> object:
    if steps is None:
        return None
    numbers = tuple(tuple(part.tolist()) for part in (steps.starts, steps.actions, steps.ends))
    entries = frozenset(
        (path, _described(column.values), None if column.lengths is None else _described(column.lengths))
        for path, column in steps.columns.items()
    )
    return steps.form, numbers, entries


def _described(values: Tensor) -> object:
    return str(values.dtype), tuple(values.shape), tensor_bytes(values)


def tensor_bytes(values: Tensor) -> bytes:
    """Return the bytes of a tensor, in row-major order, whatever its strides."""
    # Written into one that is new: a dimension of one entry may have any stride, and is contiguous all the same.
    flat = torch.empty(values.numel(), dtype=values.dtype)
    flat.copy_(values.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()
