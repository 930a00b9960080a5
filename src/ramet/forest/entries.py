"""Which entries of a rollout hold what, its steps, and every entry as a column over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.nodes import Ints
from ramet.forest.rollout import Column, Form, Path
from ramet.ragged import Ragged
from ramet.ragged import rows as read_rows
from ramet.types import Key, Outcome

KeyPath: TypeAlias = str | tuple[str, ...]

# What environments call the prefix and what is written behind it; tokens before text, which is derived from them.
NAMES: tuple[tuple[Path, Path], ...] = (
    ((Key.TOKENS,), (Key.RESPONSE,)),
    (("observation",), ("action",)),
    ((Key.TEXT,), (Key.TEXT_RESPONSE,)),
)


def as_path(key: KeyPath | None) -> Path | None:
    """Return a key as a tuple."""
    return (key,) if isinstance(key, str) else None if key is None else tuple(key)


def detect(
    td: TensorDictBase, observation: Path | None, action: Path | None, mask: Path | None, reward: Path | None
) -> Form:
    """Find out which keys hold the prefix, its mask (if there is one) and the action, and in what dtype."""
    first = first_of(td)
    if not isinstance(first.get("next", None), TensorDictBase):
        raise ForestError(
            f'expected a rollout or a step, with its result under "next": found the entries {names_of(first)}'
        )
    if observation is None or action is None:
        pairs = [(observation or seen, action or wrote) for seen, wrote in NAMES]
        pairs = [pair for pair in pairs if all(first.get(path, None) is not None for path in pair)]
        if not pairs:
            raise ForestError(
                f"found no prefix with an action: there are {names_of(first)}",
                hint=f"they are looked for under {NAMES}; name others by observation_key and action_key",
            )
        observation, action = pairs[0]
    seen, wrote = (needed(first, path) for path in (observation, action))
    sibling = (*observation[:-1], Key.MASK)
    mask = sibling if mask is None and first.get(sibling, None) is not None else mask
    form = Form("tokens", observation, action, reward or (Key.REWARD,))
    if not isinstance(seen, Tensor):
        return replace(form, unit="text")
    if not isinstance(wrote, Tensor):
        raise ForestError(f"{observation} holds a tensor and {action} does not: expected both to be tokens, or text")
    form = replace(form, token_dtype=_name(seen), action_dtype=_name(wrote))
    if mask is not None:
        form = replace(form, mask=mask, mask_dtype=_name(needed(first, mask)))
    return form


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of all rows, [B] or without batch: `own` and `after` are its entries and those of its result.

    They are read once: a look into a TensorDict costs more than one into a dict. `lazy` says that it is a stack of
    rows, and then there are none.
    """

    td: TensorDictBase
    next: TensorDictBase
    own: Mapping[str, Any]
    after: Mapping[str, Any]
    lazy: bool

    @classmethod
    def of(cls, td: TensorDictBase) -> Step:
        """Read a TensorDict with its result under "next"."""
        if type(td) is not TensorDict and isinstance(td, LazyStackedTensorDict):
            stacked: Any = td.get("next")
            return cls(td, stacked, {}, {}, True)
        own: dict[str, Any] = dict(td.items())
        return cls(td, own["next"], own, dict(own["next"].items()), False)

    def get(self, path: Path) -> Any:
        """Return an entry, under "next" too; None if there is none, or if this is a stack of rows."""
        if len(path) == 1:
            return self.own.get(path[0])
        if len(path) == 2 and path[0] == "next":
            return self.after.get(path[1])
        return None if self.lazy else self.td.get(path, None)

    @property
    def rows(self) -> list[TensorDictBase]:
        """Its rows, each a TensorDict."""
        return list(self.td.unbind(0)) if self.td.batch_dims else [self.td]


def steps_of(td: TensorDictBase, form: Form, time: bool | None) -> list[Step]:
    """Return the T steps of a rollout."""
    if 0 in td.batch_size:
        return []
    if td.batch_dims > 1:
        if time is False:
            raise ForestError(f"expected a step [B], as time=False says: found a batch of {tuple(td.batch_size)}")
        parts = td.unbind(td.batch_dims - 1)
        return [Step.of(part if part.batch_dims == 1 else part.flatten(0, part.batch_dims - 1)) for part in parts]
    if td.batch_dims == 1 and (_goes_on(td, form) if time is None else time):
        return [Step.of(part) for part in td.unbind(0)]
    return [Step.of(td)]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One entry over all steps of all rows: `stacked` [B, T, ...] where its shape is always the same, else `cells`."""

    stacked: Tensor | None = None
    cells: Sequence[Sequence[Tensor]] = ()  # of each step, of each row

    def of(self, row: int, at: Ints) -> Column:
        """Return what the steps `at` of one row hold, in a form that depends on no other row."""
        if self.stacked is not None:
            first, last = int(at[0]), int(at[-1]) + 1
            whole = last - first == len(at)
            return Column(self.stacked[row, first:last] if whole else self.stacked[row, torch.from_numpy(at)])
        parts = [self.cells[number][row] for number in at.tolist()]
        if len({part.shape for part in parts}) == 1:
            return Column(torch.stack(parts))
        return Column(torch.cat(parts), torch.tensor([len(part) for part in parts]))

    def flags(self) -> NDArray[np.bool_]:
        """Say of each step of each row whether any of its entries is true: bool [T, B]."""
        if self.stacked is None:
            return np.array([[bool(cell.any()) for cell in row] for row in self.cells])
        found: NDArray[np.bool_] = (
            self.stacked.flatten(2).any(2).t().numpy() if self.stacked.dim() > 2 else (self.stacked.bool().t().numpy())
        )
        return found


def read_series(steps: list[Step], form: Form) -> dict[Path, Series]:
    """Read every tensor that all steps have, but the prefix and its mask. Text is no tensor."""
    prefix = {form.observation, form.mask}
    series = {}
    for name in first_of(steps[0].td).keys(True, True):
        path = (name,) if isinstance(name, str) else tuple(name)
        if path in prefix or (path[0] == "next" and path[1:] in prefix):
            continue
        found = _series(steps, path)
        if found is not None:
            series[path] = found
    return series


def _series(steps: list[Step], path: Path) -> Series | None:
    if any(step.lazy for step in steps):
        cells = [[row.get(path, None) for row in step.rows] for step in steps]
        return _of_cells(cells) if all(isinstance(cell, Tensor) for row in cells for cell in row) else None
    values = [step.get(path) for step in steps]
    if not all(isinstance(value, Tensor) for value in values):
        return None
    batched = steps[0].td.batch_dims
    if not any(value.is_nested for value in values):
        if len({value.shape for value in values}) == 1:
            stacked = torch.stack(values, batched).detach().cpu()
            return Series(stacked if batched else stacked[None])
        return _of_cells([list(value) if batched else [value] for value in values])
    return _of_cells([Ragged.from_any(value).rows() for value in values])


def _of_cells(cells: list[list[Tensor]]) -> Series:
    """Take an entry of each step, of each row."""
    values = [cell for row in cells for cell in row]
    if len({value.shape for value in values}) == 1:
        stacked = torch.stack(values).detach().cpu()
        return Series(stacked.view(len(cells), len(cells[0]), *values[0].shape).transpose(0, 1))
    return Series(cells=[[cell.detach().cpu() for cell in row] for row in cells])


def outcomes_in(td: TensorDictBase) -> list[Outcome | None]:
    """Return the outcome that an environment has given each row of `td` [B] or [], as far as it has."""
    if isinstance(td, LazyStackedTensorDict):
        return [outcome for row in td.unbind(0) for outcome in outcomes_in(row)]
    value = td.get(Key.OUTCOME, None)
    if value is None or isinstance(value, Tensor):
        return [None] * td.batch_size.numel()
    found = value.tolist() if hasattr(value, "tolist") else value
    found = list(found) if td.batch_dims else [found]
    return [item if isinstance(item, Outcome) else None for item in found]


def _goes_on(td: TensorDictBase, form: Form) -> bool:
    """Say whether some element of `td` [n] observes what the one before it came back with: then they are steps."""
    if td.batch_size[0] < 2:
        return False
    text = form.unit == "text"
    after_mask = None if form.mask is None else ("next", *form.mask)
    seen = read_rows(td, form.observation, mask=form.mask)
    after = read_rows(td, ("next", *form.observation), mask=after_mask)
    pairs = zip(after[:-1], seen[1:], strict=True)
    return any(a == b if text else torch.equal(a, b) for a, b in pairs)


def first_of(td: TensorDictBase) -> TensorDictBase:
    """Return a TensorDict that is no lazy stack: its first one, in all dimensions that are stacked."""
    while isinstance(td, LazyStackedTensorDict) and 0 not in td.batch_size:
        td = td.unbind(td.stack_dim)[0]
    return td


def needed(td: TensorDictBase, path: Path) -> Any:
    value = td.get(path[0] if len(path) == 1 else path, None)
    if value is None:
        raise ForestError(f"no entry {path}: there are {names_of(td)}")
    return value


def names_of(td: TensorDictBase) -> list[str]:
    return sorted(str(key) for key in td.keys(True))


def _name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
