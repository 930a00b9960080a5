"""Attention while text is generated: the layout of prompts, and each row against its own keys alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ramet.attention import store as store_module
from ramet.attention.store import Prefixes, PrefixStore, in_passes
from ramet.attention.tree import Rule
from ramet.errors import ModelError

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8, unique_by=tuple)


def test_a_layout_by_hand() -> None:
    """[1], [1 2 3], [1 2 4], [5]: 1, then 2 under it, then 3 and 4 under that, then 5 by itself."""
    laid = Prefixes.of([torch.tensor(prompt) for prompt in ([5], [1, 2, 4], [1], [1, 2, 3])])
    assert laid.tokens.tolist() == [1, 2, 3, 4, 5]
    assert [path.tolist() for path in laid.paths] == [[4], [0, 1, 3], [0], [0, 1, 2]]
    assert laid.layout.last.tolist() == [4, 4, 3, 4, 5]
    assert laid.layout.positions.tolist() == [0, 1, 2, 2, 0]


@settings(deadline=None, max_examples=60)
@given(PROMPTS)
def test_what_prompts_begin_with_stands_once_and_paths_are_what_attends(prompts: list[list[int]]) -> None:
    laid = Prefixes.of([torch.tensor(prompt) for prompt in prompts])
    assert [laid.tokens[torch.from_numpy(path)].tolist() for path in laid.paths] == prompts
    beginnings = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert len(laid.tokens) == len(beginnings)
    for path in laid.paths:
        seen = [at for at in range(len(laid.tokens)) if at <= path[-1] < laid.layout.last[at]]
        assert seen == path.tolist()
        assert laid.layout.positions[path].tolist() == list(range(len(path)))


@settings(deadline=None, max_examples=60)
@given(PROMPTS, st.integers(1, 9))
def test_a_pass_holds_no_more_distinct_tokens_than_it_may_and_as_many_prompts_as_fit(
    prompts: list[list[int]], most: int
) -> None:
    rows = [torch.tensor(prompt) for prompt in sorted(prompts)]
    passes = in_passes(rows, most)
    assert [number for part in passes for number in range(part.start, part.stop)] == list(range(len(rows)))
    for part in passes:
        assert part.stop == part.start + 1 or len(Prefixes.of(rows[part]).tokens) <= most
        if part.stop < len(rows):
            assert len(Prefixes.of(rows[part.start : part.stop + 1]).tokens) > most


# ---------------------------------------------------------------- one layer, row by row

HEADS, SHARED, WIDTH, OUT = 2, 3, 4, 5


class OneLayer:
    """A layer's queries, keys and values as a function of the tokens of a row so far, in float64."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = ((HEADS * SHARED, WIDTH), (HEADS, WIDTH), (HEADS, OUT))
        self.tables = [torch.randn(50, *size, generator=generator, dtype=torch.float64) for size in sizes]
        self.sinks = torch.randn(HEADS * SHARED, generator=generator, dtype=torch.float64)
        self.layer = nn.Identity()

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (table[tokens].transpose(0, 1) for table in self.tables)
        return query, key, value

    def alone(self, row: list[int], window: int | None, softcap: float | None, sinks: bool) -> Tensor:
        """What the last token of `row` gets, [Hq, OUT], computed head by head."""
        query, key, value = self.of(torch.tensor(row))
        found = []
        for head in range(HEADS * SHARED):
            keys, values = key[head // SHARED], value[head // SHARED]
            scores = keys @ query[head, -1] * 0.7
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if window is not None:
                keys, values, scores = keys[-window:], values[-window:], scores[-window:]
            if sinks:
                scores = torch.cat([scores, self.sinks[head : head + 1]])
            found.append(scores.softmax(0)[: len(values)] @ values)
        return torch.stack(found)


@settings(deadline=None, max_examples=40)
@given(
    prompts=PROMPTS,
    owner=st.lists(st.integers(0, 7), min_size=1, max_size=7),
    window=st.sampled_from([None, 1, 2, 4, 9]),
    softcap=st.sampled_from([None, 0.8]),
    sinks=st.booleans(),
    block=st.integers(1, 4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_each_row_gets_what_it_gets_alone(
    prompts: list[list[int]],
    owner: list[int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    block: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Any prompts in one or two passes, any rows of them, blocks of any size, rows that leave and change places."""
    model = OneLayer(seed)
    owner = [number % len(prompts) for number in owner]
    rows = [list(prompts[number]) for number in owner]
    steps = 7
    rule = Rule(0.7, softcap, window, model.sinks if sinks else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "BLOCK", block)
        store = PrefixStore([len(prompt) for prompt in prompts], steps, torch.device("cpu"))
        half = data.draw(st.integers(0, len(prompts) - 1))
        for first, part in ((0, prompts[:half]), (half, prompts[half:])):
            if part:
                laid = Prefixes.of([torch.tensor(prompt) for prompt in part])
                store.prefill(laid, first)
                output = store.attend(model.layer, *model.of(laid.tokens), rule)
                for prompt, path in zip(part, laid.paths, strict=True):
                    torch.testing.assert_close(output[path[-1]], model.alone(prompt, window, softcap, sinks))
        store.seat(owner)
        for _ in range(steps):
            tokens = torch.tensor(data.draw(st.lists(st.integers(0, 49), min_size=len(rows), max_size=len(rows))))
            rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
            store.step()
            output = store.attend(model.layer, *model.of(tokens), rule)
            for row, found in zip(rows, output, strict=True):
                torch.testing.assert_close(found, model.alone(row, window, softcap, sinks))
            order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
            if len(order) < len(rows):
                store.keep(order)
                rows = [rows[place] for place in order]


def begun(prompts: list[list[int]], owner: list[int], steps: int = 4) -> tuple[PrefixStore, OneLayer]:
    model = OneLayer(0)
    store = PrefixStore([len(prompt) for prompt in prompts], steps, torch.device("cpu"))
    laid = Prefixes.of([torch.tensor(prompt) for prompt in prompts])
    store.prefill(laid, 0)
    attend(store, model, laid.tokens)
    store.seat(owner)
    return store, model


def attend(store: PrefixStore, model: OneLayer, tokens: Tensor) -> Tensor:
    return store.attend(model.layer, *model.of(tokens), Rule(0.7))


def test_a_layer_that_runs_twice_in_a_pass_is_refused() -> None:
    store, model = begun([[1, 2]], [0, 0])
    store.step()
    attend(store, model, torch.tensor([3, 4]))
    with pytest.raises(ModelError, match="run once in each pass"):
        attend(store, model, torch.tensor([3, 4]))
    store = PrefixStore([1], 4, torch.device("cpu"))
    store.prefill(Prefixes.of([torch.tensor([1])]), 0)
    attend(store, model, torch.tensor([1]))
    with pytest.raises(ModelError, match="run once in each pass"):
        attend(store, model, torch.tensor([1]))


def test_nothing_is_copied_as_rows_grow_and_rows_that_left_are_forgotten() -> None:
    """Blocks hold no more steps than rows may take; prompts go once half of them have no row left."""
    store, model = begun([[1, 2], [3], [4, 5, 6, 7]], [0, 1, 2, 2], steps=3)
    [kept] = store._layers.values()
    prompts = kept.keys.data_ptr()
    store.step()
    attend(store, model, torch.tensor([3, 4, 5, 6]))
    own = kept.blocks[0][0]
    assert own.shape == (4, HEADS, 3, WIDTH)
    store.step()
    attend(store, model, torch.tensor([3, 4, 5, 6]))
    assert (kept.keys.data_ptr(), kept.blocks[0][0].data_ptr(), len(kept.blocks)) == (prompts, own.data_ptr(), 1)
    store.keep([0, 3, 2])
    assert kept.keys.data_ptr() == prompts  # two of three prompts are left
    assert kept.blocks[0][0].data_ptr() == own.data_ptr()
    store.keep([0])
    assert kept.keys.shape == (1, HEADS, 2, WIDTH)  # the short one, without the padding that the long one asked for
    assert kept.blocks[0][0].untyped_storage().nbytes() == own[:1].numel() * 8


def test_low_precision_and_autocast_keep_their_type() -> None:
    store, model = begun([[1, 2]], [0, 0])
    double = [table.float() for table in model.tables]
    model.tables = double
    store = PrefixStore([2], 4, torch.device("cpu"))
    laid = Prefixes.of([torch.tensor([1, 2])])
    with torch.autocast("cpu", torch.bfloat16):
        store.prefill(laid, 0)
        first = attend(store, model, laid.tokens)
        store.seat([0, 0])
        store.step()
        second = attend(store, model, torch.tensor([3, 4]))
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.bfloat16)
    model.tables = [table.double() for table in double]
    expected = torch.stack([model.alone([1, 2, token], None, None, False) for token in (3, 4)])
    torch.testing.assert_close(second.double(), expected, rtol=0.05, atol=0.05)
