"""What a TensorDict says of the rows of episodes: their data, why the policy stopped, and whether they have ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from ramet import ragged
from ramet.envs.chat_history import items_of
from ramet.errors import DataError
from ramet.specs import KeyPath, describe
from ramet.tasks.task import Row
from ramet.transforms.entries import entry
from ramet.types import Key, StopReason

FLAGS = ("done", "terminated", "truncated")


def picked_rows(indices: Sequence[int], rows: Sequence[Row], fresh: Sequence[int]) -> dict[int, Row]:
    """Return those of `rows` that `indices` name, for the `fresh` rows of a batch; DataError if one is not there."""
    found = {}
    for row in fresh:
        if not 0 <= indices[row] < len(rows):
            raise DataError(
                f"row {row}: {Key.PROMPT_INDEX!r} must be the number of one of {len(rows)} rows: found {indices[row]}"
            )
        found[row] = rows[indices[row]]
        if "prompt" not in found[row]:
            raise DataError(f'row {indices[row]} of the task has no "prompt": it has {sorted(found[row])}')
    return found


def rows_of(td: TensorDictBase, data_key: KeyPath, fresh: Sequence[int], others: Collection[str]) -> dict[int, Row]:
    """Return the rows that the entries of `td` make up, the prompt under "prompt"; `others` are no part of them."""
    prompts = items_of(td, data_key)
    columns: dict[str, list[Any]] = {}
    for key in td.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        value = entry(td, key)
        nested = isinstance(value, TensorDictBase) and not hasattr(value, "tolist")
        if key in others or key == data_key or nested:
            continue
        if not isinstance(value, torch.Tensor):
            columns[key] = items_of(td, key)
        elif not value.is_nested and value.dim() + isinstance(td, LazyStackedTensorDict) == td.batch_dims:
            columns[key] = numbers(td, key)
        else:
            columns[key] = ragged.rows(td, key)
    return {row: {**{key: column[row] for key, column in columns.items()}, "prompt": prompts[row]} for row in fresh}


def stops(td: TensorDictBase, key: str) -> list[StopReason | None]:
    """Return why the policy stopped in each row, as far as it says so under `key`; ValueError for no such reason."""
    if entry(td, key) is None:
        return [None] * td.batch_size.numel()
    known = {reason.value: reason for reason in StopReason}
    found = items_of(td, key)
    for row, value in enumerate(found):
        if value is not None and not (isinstance(value, str) and value in known):
            raise ValueError(f"{key!r}, row {row}: expected one of {list(known)}, or None: found {describe(value)}")
    return [None if value is None else known[value] for value in found]


def numbers(td: TensorDictBase, key: str) -> list[Any]:
    """Return the one number that each row has under a key; none if there is no such entry."""
    return [] if entry(td, key) is None else list(td.get(key).reshape(-1).tolist())


def flags_after(td: TensorDictBase, mask: torch.Tensor | None, ends: Mapping[str, torch.Tensor]) -> dict[KeyPath, Any]:
    """Return the flags after a step, false where `ends` [B] do not say otherwise; rows outside `mask` keep theirs."""
    none = torch.zeros((*td.batch_size, 1), dtype=torch.bool, device=td.device)
    flags: dict[KeyPath, Any] = {}
    for name in FLAGS[1:]:
        flag = ends[name].view(none.shape) if name in ends else none.clone()
        flags[name] = flag if mask is None else torch.where(mask[..., None], flag, td.get(name, none))
    return {**flags, FLAGS[0]: flags["terminated"] | flags["truncated"]}


def is_messages(item: Any) -> bool:
    """Return whether an item of a loader is messages, at least one."""
    return isinstance(item, list | tuple) and bool(item) and all(isinstance(m, Mapping) and "role" in m for m in item)
