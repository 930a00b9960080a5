"""Copies that own their live tokens only."""

from __future__ import annotations

import io

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from ramet.envs.llm import LLMEnv
from ramet.ragged import Ragged, Text, compact, read_text, rows

LAYOUTS = ["dense", "padded", "jagged", "lazy"]


def written(td: TensorDictBase) -> int:
    buffer = io.BytesIO()
    torch.save(td, buffer)
    return buffer.tell()


def bare(layout: str) -> int:
    """Bytes of three rows that never were part of anything: their tokens, and what any file of them begins with."""
    return written(compact(first_three(grown(layout, 3, 0))))


def first_three(state: TensorDictBase) -> TensorDictBase:
    jagged = state["tokens"].is_nested  # which tensordict 0.14 does not slice
    return lazy_stack(list(state.unbind(0))[:3]) if jagged else state[:3]


def started(layout: str, count: int) -> TensorDictBase:
    ids = torch.arange(1, 2 * count + 1).view(count, 2)
    mask = torch.ones(count, 2, dtype=torch.bool)
    if layout == "lazy":
        return lazy_stack([TensorDict({"tokens": a, "attention_mask": b}, []) for a, b in zip(ids, mask, strict=True)])
    if layout == "jagged":
        ids, mask = (Ragged.from_padded(x).jagged() for x in (ids, mask))
    return TensorDict({"tokens": ids} if layout == "dense" else {"tokens": ids, "attention_mask": mask}, [count])


def grown(layout: str, count: int, steps: int) -> TensorDictBase:
    env = LLMEnv(from_text=False, eos_token_id=0)
    state = env.reset(started(layout, count))
    for step in range(steps):
        state["tokens_response"] = torch.full((count, 1), step + 5)
        state = env.step_mdp(env.step(state))
    return state


@pytest.mark.parametrize("layout", ["dense", "padded", "jagged"])
def test_three_rows_of_many_are_saved_as_three_rows(layout):
    """Of 512 rows after 200 steps: their tokens (and masks) and no more than a small constant are written."""
    state = first_three(grown(layout, 512, 200))
    kept = compact(state)
    live = 3 * 202 * (8 if layout == "dense" else 9)
    assert written(kept) < bare(layout) + live + 500
    assert written(state) > 512 * 202 * 8
    expected = [[2 * b + 1, 2 * b + 2, *range(5, 205)] for b in range(3)]
    assert [row.tolist() for row in rows(kept, "tokens")] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_equal_in_layout_and_content_and_shares_nothing(layout):
    """Flags, nested keys and text included; writing into it does not reach the original."""
    state = grown(layout, 3, 5).update(TensorDict({"in": {"label": torch.arange(3)}}, [3]))
    kept = compact(state)
    assert type(kept) is type(state)
    assert kept.batch_size == state.batch_size
    before = [row.tolist() for row in rows(state, "tokens")]
    assert [row.tolist() for row in rows(kept, "tokens")] == before
    assert kept["in", "label"].tolist() == [0, 1, 2]
    assert kept["done"].shape == (3, 1)
    if layout != "lazy":
        assert kept["tokens"].is_nested == (layout == "jagged")
    for row in rows(kept, "tokens"):
        row.zero_()
    assert [row.tolist() for row in rows(state, "tokens")] == before


@pytest.mark.parametrize("layout", ["dense", "padded", "jagged"])
def test_a_rollout_still_shares_what_its_steps_have_in_common(layout):
    """A long one is saved at the cost of its tokens, not of all its observations."""

    def policy(td):
        td["tokens_response"] = torch.full((2, 10), 7)

    env = LLMEnv(from_text=False, eos_token_id=0)
    td = env.rollout(40, policy, tensordict=started(layout, 2))
    kept = compact(td)
    assert isinstance(kept, LazyStackedTensorDict)
    assert kept.batch_size == (2, 40)
    for key in ("tokens", ("next", "tokens"), "tokens_response"):
        assert [row.tolist() for row in rows(kept, key)] == [row.tolist() for row in rows(td, key)]
    storages = {}
    for t in range(40):
        for key in ("tokens", ("next", "tokens")):
            tokens = kept[:, t].get(key)
            storage = (tokens.values() if tokens.is_nested else tokens).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    assert sum(storages.values()) < 8 * 2 * 402 * 3


def test_text_is_kept():
    """Grown, plain, and without a batch."""
    text = Text.of(["a", "b"]).append(Text.of(["c", "d"]))
    td = TensorDict({"text": text.entry(), "plain": NonTensorStack("x", "y"), "in": {"text": text.entry()}}, [2])
    kept = compact(td)
    assert read_text(kept, "text").tolist() == read_text(kept, ("in", "text")).tolist() == ["ac", "bd"]
    assert kept["plain"] == ["x", "y"]
    single = compact(TensorDict({"text": "a", "tokens": torch.arange(9)[:2]}, []))
    assert single["text"] == "a"
    assert single["tokens"].untyped_storage().nbytes() == 16
    lazy = compact(lazy_stack([TensorDict({"text": x}, []) for x in "ab"]))
    assert read_text(lazy, "text").tolist() == ["a", "b"]


def test_scalars_and_empty_entries_are_copied():
    td = TensorDict({"one": torch.tensor(3), "none": torch.zeros(0), "also": torch.zeros(0)}, [])
    kept = compact(td)
    assert kept["one"].item() == 3
    assert kept["none"].shape == kept["also"].shape == (0,)
    assert kept["one"].data_ptr() != td["one"].data_ptr()
