"""Entries of TensorDicts in any layout: found, copied, merged, and given back to rows that a mask does not name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
from ramet.ragged.text_entry import column_of
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
    if plain(value):
        return copied(value)
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


def nested(entries: Mapping[KeyPath, Any], like: TensorDictBase) -> TensorDict:
    """Make a TensorDict as `made` does, of entries under nested keys too; those that are None are left out."""
    tree: dict[str, Any] = {}
    for key, value in entries.items():
        if value is None:
            continue
        path = (key,) if isinstance(key, str) else key
        inside = tree
        for name in path[:-1]:
            inside = inside.setdefault(name, {})
        inside[path[-1]] = value
    return _of_tree(tree, like)


def _of_tree(tree: dict[str, Any], like: TensorDictBase) -> TensorDict:
    return made({key: _of_tree(value, like) if isinstance(value, dict) else value for key, value in tree.items()}, like)


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

    None where one of them is more than a TensorDict of entries and of others like it.
    """
    paid = {(key,) if isinstance(key, str) else key for key in rewards}
    gone = {(key,) if isinstance(key, str) else key for key in consumed} | paid | {("next",)}
    return _over(td, next_td, gone, paid, ())


def _over(
    td: TensorDictBase, new: Any, gone: Collection[KeyPath], paid: Collection[KeyPath], path: tuple[str, ...]
) -> TensorDict | None:
    """Return the entries of `td` that are not `gone`, and over them those of `new` that are not `paid`."""
    if not (plain(td) and plain(new) and _fits(new, td)):
        return None
    before: dict[str, Any] = {key: value for key, value in td.items() if (*path, key) not in gone}
    after: dict[str, Any] = {key: value for key, value in new.items() if (*path, key) not in paid}
    entries: dict[str, Any] = {}
    for key in before | after:
        old: Any = before.get(key)
        value = after.get(key)
        if not _is_nested(old if key not in after else value):
            entries[key] = value if key in after else _again(old)
            continue
        empty = made({}, td)
        inner = _over(old if _is_nested(old) else empty, empty if key not in after else value, gone, paid, (*path, key))
        if inner is None:
            return None
        entries[key] = inner
    return made(entries, td)


def _is_nested(value: Any) -> bool:
    return is_tensor_collection(value) and not is_leaf_nontensor(type(value))


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
    column = column_of(a)
    return a is b or (column is not None and column is column_of(b))
