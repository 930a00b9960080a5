"""The data rows of episodes: those that a TensorDict numbers, or those that its entries make up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from ramet import ragged
from ramet.envs.chat_history import items_of
from ramet.errors import DataError
from ramet.specs import KeyPath
from ramet.tasks.task import Row
from ramet.transforms.entries import entry
from ramet.types import Key


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


def numbers(td: TensorDictBase, key: str) -> list[Any]:
    """Return the one number that each row has under a key; none if there is no such entry."""
    return [] if entry(td, key) is None else list(td.get(key).reshape(-1).tolist())
