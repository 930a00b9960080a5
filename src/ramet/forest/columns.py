"""A forest as arrays: it saves, loads and ships without pickles.

`nodes.*` and `rollouts.*` are the two tables, `steps.*` and `columns.*` what environments told, and "about" is JSON
(about.py) with what is not a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.about import About, Described, decode, encode
from ramet.forest.checked import Arrays, check_rows, check_text, check_tokens_of_rollouts, read_nodes, refuse
from ramet.forest.nodes import Ints, Nodes
from ramet.forest.rollout import Column, Path, Rollout, Steps, joined
from ramet.types import Kind

if TYPE_CHECKING:
    from ramet.forest.forest import Forest

_NUMBERS = ("group", "member", "prompt_index", "end", "part")
_OF_TOKENS: dict[str, tuple[type[np.generic], torch.dtype]] = {
    "kinds": (np.int8, torch.int8),
    "log_probs": (np.float32, torch.float32),
    "versions": (np.int32, torch.int32),
}
_OF_STEPS = ("starts", "actions", "ends")


def to_arrays(forest: Forest) -> dict[str, Tensor]:
    """Return all that a forest holds, by name."""
    rollouts = forest.rollouts
    arrays = {f"nodes.{name}": torch.from_numpy(column) for name, column in forest.nodes.columns().items()}
    for name in _NUMBERS:
        arrays[f"rollouts.{name}"] = torch.tensor([getattr(r, name) for r in rollouts], dtype=torch.int64)
    arrays["rollouts.advantage"] = torch.tensor([r.advantage for r in rollouts], dtype=torch.float64)
    for name, (kind, _) in _OF_TOKENS.items():
        arrays[f"rollouts.{name}"] = torch.from_numpy(joined([getattr(r, name) for r in rollouts], kind))
    arrays |= _ragged("rollouts.segments", [np.array(r.segments, dtype=np.int64) for r in rollouts])
    played = {number: r.steps for number, r in enumerate(rollouts) if r.steps is not None}
    for name in _OF_STEPS:
        arrays |= _ragged(f"steps.{name}", [getattr(steps, name) for steps in played.values()])
    forms = list(dict.fromkeys(steps.form for steps in played.values()))
    numbers = {form: number for number, form in enumerate(forms)}
    step_columns, described = _step_columns(played)
    about = About(
        unit=forest.unit,
        stops=[r.stop for r in rollouts],
        outcomes=[r.outcome for r in rollouts],
        forms=forms,
        played=[(number, numbers[steps.form]) for number, steps in played.items()],
        columns=described,
    )
    return {**arrays, "about": encode(about), **step_columns}


def fill(forest: Forest, arrays: Mapping[str, Tensor]) -> None:
    """Put into an empty forest what `to_arrays` made; raise `ForestError` for what it can not have made."""
    found = Arrays(arrays)
    about = decode(found.numbers("about", dtype=torch.uint8).tobytes())
    table = read_nodes(found)
    if about.unit == "text":
        check_text(table["tokens"])
    nodes = Nodes.from_columns(forest.nodes.hashing, table)
    if nodes is None:
        raise ForestError(
            "the hashes in these arrays are not those of their tokens under the hashing of this forest",
            hint="pass the hashing that the forest was made with",
        )
    rollouts = _rollouts(found, about, nodes)
    for number, steps in _steps(found, about, rollouts).items():
        rollouts[number].steps = steps
    found.finish()
    _check_leaves(nodes, rollouts)
    if (about.unit is None) != (not rollouts):
        raise ForestError(f'"about", unit: found {about.unit!r} in a forest of {len(rollouts)} rollouts')
    forest.nodes = nodes
    if about.unit is not None:
        forest._add(rollouts, about.unit)


def _rollouts(found: Arrays, about: About, nodes: Nodes) -> list[Rollout]:
    count = len(about.stops)
    if len(about.outcomes) != count:
        raise ForestError(f'"about", outcomes: expected {count} rows, as stops has: found {len(about.outcomes)}')
    numbers = {name: found.numbers(f"rollouts.{name}", count).tolist() for name in _NUMBERS}
    ends = np.array(numbers["end"], dtype=np.int64)
    refuse("rollouts.end", (ends < 0) | (ends >= len(nodes)), f"a node, 0 to {len(nodes) - 1}", ends)
    parts = np.array(numbers["part"], dtype=np.int64)
    refuse("rollouts.part", parts < 0, "the number of a part, from 0", parts)
    advantages = found.numbers("rollouts.advantage", count, torch.float64).tolist()
    lengths = np.array([nodes.table[end].depth for end in ends.tolist()], dtype=np.int64)
    total = int(lengths.sum())
    flat = {name: found.numbers(f"rollouts.{name}", total, dtype) for name, (_, dtype) in _OF_TOKENS.items()}
    check_tokens_of_rollouts(flat["kinds"], flat["log_probs"], flat["versions"])
    segments = found.ragged("rollouts.segments", count)
    made, last = [], 0
    for number in range(count):
        sizes, length = segments[number], int(lengths[number])
        wrong = bool((sizes < 0).any()) or int(sizes.sum()) != length
        check_rows("rollouts.segments", number, wrong, f"sizes that sum to the {length} tokens of its path", sizes)
        rollout = Rollout(
            group=numbers["group"][number],
            member=numbers["member"][number],
            prompt_index=numbers["prompt_index"][number],
            end=numbers["end"][number],
            part=numbers["part"][number],
            stop=about.stops[number],
            outcome=about.outcomes[number],
            advantage=advantages[number],
        )
        for size in sizes.tolist():
            part = slice(last, last + size)
            rollout.append(rollout.end, *(flat[name][part] for name in _OF_TOKENS))
            last += size
        made.append(rollout)
    return made


def _check_leaves(nodes: Nodes, rollouts: Sequence[Rollout]) -> None:
    """Nothing is in a forest but what a rollout passed."""
    ended = np.array([not children for children in nodes.children])
    ended[0] = False
    ended[[rollout.end for rollout in rollouts]] = False
    refuse("nodes.parent", ended, "that a rollout ends at each node without children", np.arange(len(nodes)))


def _ragged(name: str, rows: list[Any]) -> dict[str, Tensor]:
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return {name: torch.from_numpy(joined(rows, np.int64)), f"{name}.counts": counts}


def _step_columns(played: Mapping[int, Steps]) -> tuple[dict[str, Tensor], list[Described]]:
    """Join the columns of all rollouts that have one key, dtype and shape."""
    alike: dict[tuple[Path, torch.dtype, torch.Size, bool], list[int]] = {}
    for number, steps in played.items():
        for path, column in steps.columns.items():
            kind = (path, column.values.dtype, column.values.shape[1:], column.lengths is not None)
            alike.setdefault(kind, []).append(number)
    arrays, described = {}, []
    for i, ((path, _, _, is_ragged), numbers) in enumerate(alike.items()):
        found = [played[number].columns[path] for number in numbers]
        arrays[f"columns.{i}"] = torch.cat([column.values for column in found])
        if is_ragged:
            arrays[f"columns.{i}.lengths"] = torch.cat([c.lengths for c in found if c.lengths is not None])
        described.append(Described(path, numbers, is_ragged))
    return arrays, described


def _steps(found: Arrays, about: About, rollouts: Sequence[Rollout]) -> dict[int, Steps]:
    """Return the steps of each rollout that has some."""
    parts = [found.ragged(f"steps.{name}", len(about.played)) for name in _OF_STEPS]
    steps: dict[int, Steps] = {}
    for i, (number, form) in enumerate(about.played):
        wrong = not 0 <= number < len(rollouts) or number in steps or not 0 <= form < len(about.forms)
        check_rows('"about", played', i, wrong, "a rollout that was not named before, and a form", (number, form))
        wrong = about.forms[form].unit != about.unit
        check_rows('"about", forms', form, wrong, f"the unit {about.unit!r}", about.forms[form].unit)
        starts, actions, ends = (part[i] for part in parts)
        wrong = not len(starts) == len(actions) == len(ends) > 0
        check_rows("steps.starts.counts", i, wrong, "as many as in actions and ends, and one at least", len(starts))
        _check_steps(i, starts, actions, ends, rollouts[number].kinds)
        steps[number] = Steps(about.forms[form], starts, actions, ends, {})
    for i, described in enumerate(about.columns):
        unknown = [number for number in described.rollouts if number not in steps]
        check_rows('"about", columns', i, bool(unknown), "rollouts with steps", described.rollouts)
        for number, column in zip(described.rollouts, _split(found, i, described, steps), strict=True):
            twice = described.key in steps[number].columns
            check_rows('"about", columns', i, twice, f"each key once in rollout {number}", described.key)
            steps[number].columns[described.key] = column
    return steps


def _check_steps(row: int, starts: Ints, actions: Ints, ends: Ints, kinds: NDArray[np.int8]) -> None:
    """The steps lie one behind the other up to the end of the path, and their actions are what was sampled."""
    bounds = np.stack([starts, starts + actions, ends], axis=1).ravel()
    sizes = np.diff(bounds, prepend=0, append=len(kinds))
    told = [Kind.PROMPT, *[Kind.SAMPLED, Kind.ENVIRONMENT, Kind.ENVIRONMENT] * len(starts)]
    joins = sizes[3::3]  # between the end of a step and the start of the next, and behind the last
    if (sizes < 0).any() or joins.any() or (np.repeat(np.array(told), sizes) != kinds).any():
        raise ForestError(
            f"steps.starts, row {row}: expected steps that lie one behind the other in a path of {len(kinds)} tokens, "
            f"with the actions where rollouts.kinds says {int(Kind.SAMPLED)}: found starts {starts}, {actions} tokens "
            f"of action, ends {ends}"
        )


def _split(found: Arrays, i: int, described: Described, steps: Mapping[int, Steps]) -> list[Column]:
    """Cut a joined column into those of its rollouts."""
    sizes = [len(steps[number].starts) for number in described.rollouts]
    if not described.ragged:
        return [Column(part) for part in torch.split(found.tensor(f"columns.{i}", sum(sizes)), sizes)]
    lengths = found.numbers(f"columns.{i}.lengths", sum(sizes))
    values = found.tensor(f"columns.{i}")
    refuse(f"columns.{i}.lengths", (lengths < 0) | (lengths > len(values)), f"0 to {len(values)}", lengths)
    if int(lengths.sum()) != len(values):
        raise ForestError(f"columns.{i}: expected {int(lengths.sum())} rows, as its lengths say: found {len(values)}")
    of_steps = torch.split(torch.from_numpy(lengths), sizes)
    parts = torch.split(values, [int(part.sum()) for part in of_steps])
    return [Column(part, of_step) for part, of_step in zip(parts, of_steps, strict=True)]
