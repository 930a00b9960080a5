"""Entries of TensorDicts in any layout: found, copied, merged, and given back to rows that a mask does not name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_tensor_collection,
)
from torch import Tensor

from ramet import ragged
from ramet.ragged.text import text_in
from ramet.ragged.text_entry import text_of
from ramet.specs import KeyPath
from ramet.transforms.entries import mask_of, whole
from ramet.transforms.env_specs import FLAGS


def complete_flags(td: TensorDictBase) -> None:
    """Add the flags that an environment left out: `done` is `terminated | truncated`, and a bare `done` is an end."""
    found: dict[str, Any] = dict(td.items()) if plain(td) else {flag: td.get(flag, None) for flag in FLAGS}
    done, terminated, truncated = (found.get(flag) for flag in FLAGS)
    if done is not None and terminated is not None and truncated is not None:
        return
    if done is None:
        done = torch.zeros((*td.batch_size, 1), dtype=torch.bool, device=td.device)
    if truncated is None:
        truncated = torch.zeros_like(done) if terminated is None else done & ~terminated
    if terminated is None:
        terminated = done & ~truncated
    td.set("done", terminated | truncated)
    for flag, value in (("terminated", terminated), ("truncated", truncated)):
        if found.get(flag) is None:
            td.set(flag, value)


def without(key: str, td: TensorDictBase) -> TensorDictBase:
    """Take `key` out of `td`."""
    if key in td.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        del td[key]
    return td


def leaves(td: TensorDictBase) -> list[KeyPath]:
    return list(td.keys(True, True, is_leaf=is_leaf_nontensor))


def choose_padded(td: TensorDictBase, new: TensorDictBase, mask: Tensor, keys: list[KeyPath]) -> set[KeyPath]:
    """Give rows their entries of `td` again where those are padded to another width; return the keys, with masks."""
    done: set[KeyPath] = set()
    for key in keys:
        beside = mask_of(key)
        pairs = [(whole(part, key), whole(part, beside)) for part in (new, td)] if beside in keys else []
        dense = all(isinstance(x, Tensor) and not x.is_nested and x.dim() == 2 for pair in pairs for x in pair)
        if not pairs or not dense or any(tokens.shape != real.shape for tokens, real in pairs):
            continue
        if key != beside and pairs[0][0].shape != pairs[1][0].shape:
            tokens, real = ragged.choose_padded(mask, *pairs)
            new.set(key, tokens).set(beside, real)
            done |= {key, beside}
    return done


def copied(td: TensorDictBase, *, but: Collection[str] = ()) -> TensorDictBase:
    """Return a shallow copy of `td`, in which strings can be copied again at no cost for each row.

    Top-level keys in `but` are left out.
    """
    if plain(td):
        return made({key: _again(value) for key, value in td.items() if key not in but}, td)
    td = td.copy()
    for key in but:
        without(key, td)
    return td


def _again(value: Any) -> Any:
    """Return what the copy of a TensorDict has of an entry."""
    if isinstance(value, Tensor) or not is_tensor_collection(value):
        return value
    text = text_in(value) if type(value) is NonTensorStack else None
    return value.clone(recurse=False) if text is None else text.entry()


def plain(td: Any) -> bool:
    """Say whether `td` is a TensorDict and nothing more: no stack, no subclass, no names of dimensions."""
    return type(td) is TensorDict and not td._has_names()  # type: ignore[no-untyped-call]


def made(entries: dict[str, Any], like: TensorDictBase) -> TensorDict:
    """Make a TensorDict of entries that are right already, of the batch size and on the device of a `plain` one.

    To set an entry costs five microseconds, most of which go into checks of what is known to be right here.
    """
    source: Any = entries
    return TensorDict._new_unsafe(source, batch_size=like.batch_size, device=like.device, nested=False)


def with_entries(td: TensorDictBase, entries: dict[KeyPath, Any]) -> TensorDictBase:
    """Return `td` with more entries, which fit its batch size and device; it may be changed itself."""
    if plain(td) and all(type(key) is str for key in entries):
        return made({**dict(td.items()), **entries}, td)  # type: ignore[dict-item]
    for key, value in entries.items():
        td.set(key, value)
    return td


def with_next(td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
    """Return `td` with `next_td` under "next"; it may be changed itself."""
    if plain(td) and plain(next_td) and _fits(next_td, td):
        return made({**dict(td.items()), "next": next_td}, td)
    return td.set("next", next_td)


def _fits(new: TensorDictBase, td: TensorDictBase) -> bool:
    return new.batch_size == td.batch_size and (td.device is None or td.device == new.device)


def advanced(
    td: TensorDictBase, next_td: Any, consumed: Collection[KeyPath], rewards: Collection[KeyPath]
) -> TensorDict | None:
    """Return the state after a step: `td` without `consumed` keys and rewards, and over it `next_td` without rewards.

    None where that is not a matter of top-level keys alone.
    """
    if not (plain(td) and plain(next_td) and _fits(next_td, td)):
        return None
    state = {key: value for key, value in td.items() if key not in consumed and key not in rewards and key != "next"}
    after = {key: value for key, value in next_td.items() if key not in rewards}
    nested = any(type(key) is not str for key in (*consumed, *rewards))
    if nested or not all(isinstance(value, Tensor) or is_leaf_nontensor(type(value)) for value in after.values()):
        return None
    replaced = {key: value if key in after else _again(value) for key, value in state.items()}
    return made({**replaced, **after}, td)


def merge(td: TensorDictBase, new: TensorDictBase) -> TensorDictBase:
    """Write the entries of `new` into `td`, nested ones too, as `update` does, which would read unread text."""
    if isinstance(td, LazyStackedTensorDict) or isinstance(new, LazyStackedTensorDict):
        return td.update(new)
    value: Any
    for key, value in new.items():
        inside: Any = None if is_leaf_nontensor(type(value)) else td.get(key, None)
        if inside is None or is_leaf_nontensor(type(inside)):
            td.set(key, value)
        else:
            merge(inside, value)
    return td


def same(a: Any, b: Any) -> bool:
    """Say whether two entries are one; two entries of text also are if they hold one text."""
    text = text_of(a)
    return a is b or (text is not None and text is text_of(b))
