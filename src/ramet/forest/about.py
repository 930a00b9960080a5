"""What a forest holds that is not a number, as JSON: outcomes, stop reasons, the names of keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.rollout import Form, Path, Unit
from ramet.types import Outcome, OutcomeKind, StopReason

FORMAT = "ramet forest 2"
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Described:
    """One of the joined columns of steps: its key, the rollouts that it belongs to, whether it has lengths."""

    key: Path
    rollouts: list[int]
    ragged: bool


@dataclass(frozen=True, slots=True)
class About:
    """All of it. `played` are (rollout, number of its form) for each rollout that has steps."""

    unit: Unit | None
    stops: Sequence[StopReason | None]
    outcomes: Sequence[Outcome | None]
    forms: Sequence[Form]
    played: Sequence[tuple[int, int]]
    columns: Sequence[Described]


def encode(about: About) -> Tensor:
    """Return it as UTF-8, uint8 [n]."""
    found = {
        "format": FORMAT,
        "unit": about.unit,
        "stops": about.stops,
        "outcomes": [outcome_to_json(outcome) for outcome in about.outcomes],
        "forms": [asdict(form) for form in about.forms],
        "played": about.played,
        "columns": [asdict(column) for column in about.columns],
    }
    written = json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return torch.from_numpy(np.frombuffer(written, dtype=np.uint8).copy())


def decode(written: bytes) -> About:
    """Read what `encode` wrote; raise `ForestError`, with the table and the row, for anything else."""
    try:
        found: Any = json.loads(written.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ForestError(f'"about": expected JSON in UTF-8: {error}') from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        what = found.get("format") if isinstance(found, dict) else found
        raise ForestError(f"expected arrays of the format {FORMAT!r}: found {what!r:.80}")
    unit = found.get("unit")
    if unit not in (None, *get_args(Unit)):
        raise ForestError(f'"about", unit: expected null or one of {get_args(Unit)}: found {unit!r:.80}')
    return About(
        unit=unit,
        stops=_rows(found, "stops", lambda stop: None if stop is None else StopReason(stop)),
        outcomes=_rows(found, "outcomes", _outcome_from_json),
        forms=_rows(found, "forms", _form),
        played=_rows(found, "played", _pair),
        columns=_rows(found, "columns", _described),
    )


def outcome_to_json(outcome: Outcome | None) -> dict[str, Any] | None:
    """Return an outcome as JSON holds it."""
    if outcome is None:
        return None
    rewards = {name: float(value) for name, value in outcome.rewards.items()}
    score = None if outcome.score is None else float(outcome.score)
    return {"kind": str(outcome.kind), "score": score, "rewards": rewards, "reason": outcome.reason}


def _rows(found: Mapping[str, Any], table: str, read: Callable[[Any], _Row]) -> list[_Row]:
    rows = found.get(table)
    if not isinstance(rows, list):
        raise ForestError(f'"about", {table}: expected a list: found {rows!r:.80}')
    made = []
    for number, row in enumerate(rows):
        try:
            made.append(read(row))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ForestError(f'"about", {table}, row {number}: found {row!r:.200}: {error!r}') from error
    return made


def _outcome_from_json(found: Any) -> Outcome | None:
    if found is None:
        return None
    score = None if found["score"] is None else _of_type(found["score"], float)
    rewards = {name: _of_type(value, float) for name, value in _of_type(found["rewards"], dict).items()}
    return Outcome(OutcomeKind(found["kind"]), score, rewards, _of_type(found["reason"], str))


def _form(found: Any) -> Form:
    names = {field.name for field in fields(Form)}
    if set(_of_type(found, dict)) != names:
        raise ValueError(f"expected the entries {sorted(names)}")
    if found["unit"] not in get_args(Unit):
        raise ValueError(f"expected a unit, one of {get_args(Unit)}")
    for name in ("token_dtype", "action_dtype", "mask_dtype"):
        _of_type(getattr(torch, found[name]), torch.dtype)
    return Form(
        unit=found["unit"],
        observation=_key(found["observation"]),
        action=_key(found["action"]),
        reward=_key(found["reward"]),
        token_dtype=found["token_dtype"],
        action_dtype=found["action_dtype"],
        mask=None if found["mask"] is None else _key(found["mask"]),
        mask_dtype=found["mask_dtype"],
    )


def _pair(found: Any) -> tuple[int, int]:
    number, form = _of_type(found, list)
    return _of_type(number, int), _of_type(form, int)


def _described(found: Any) -> Described:
    numbers = [_of_type(number, int) for number in _of_type(found["rollouts"], list)]
    return Described(_key(found["key"]), numbers, _of_type(found["ragged"], bool))


def _key(found: Any) -> Path:
    if not _of_type(found, list):
        raise ValueError("expected a key, of at least one name")
    return tuple(_of_type(name, str) for name in found)


def _of_type(value: Any, kind: type) -> Any:
    """Return a value that is of this type and of no other: true is no number."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}: found {value!r:.80}")
    return value
