"""Blocks cover each pair of a token and an ancestor of it once, and no other, counted by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.trees import Segments, forests, laid_out, wanted

from ramet.attention.blocks import Blocks, Layout

CPU = torch.device("cpu")


def counted(blocks: Blocks, total: int) -> np.ndarray[Any, Any]:
    """Count how often each pair is computed: [T, T]."""
    found = np.zeros((total, total), dtype=np.int64)
    for square in blocks.squares:
        for index, real, hidden in zip(square.index, square.real, square.hidden, strict=True):
            for query, key in torch.nonzero(~hidden & real[:, None]).tolist():
                found[index[query], index[key]] += 1
    for part in blocks.rectangles:
        rows, columns = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
        assert rows > 0
        assert columns > 0
        if part.hidden is None:
            found[part.queries, part.keys] += 1
        else:
            assert part.hidden.shape == (rows, columns)
            found[part.queries, part.keys] += ~part.hidden.numpy()
    return found


@settings(deadline=None, max_examples=120)
@given(segments=forests(), size=st.integers(1, 20), window=st.none() | st.integers(1, 15))
def test_every_pair_is_computed_once_and_no_other(segments: Segments, size: int, window: int | None) -> None:
    layout, paths = laid_out(segments, size)
    found = counted(layout.blocks(window, CPU), len(layout))
    np.testing.assert_array_equal(found, wanted(paths, window))


@settings(deadline=None, max_examples=60)
@given(segments=forests(), window=st.none() | st.integers(1, 15))
def test_allowed_is_the_same_relation(segments: Segments, window: int | None) -> None:
    layout, paths = laid_out(segments)
    everything = np.arange(len(layout))
    found = layout.allowed(everything, everything, window)
    np.testing.assert_array_equal(found.astype(np.int64), wanted(paths, window))


@settings(deadline=None, max_examples=60)
@given(segments=forests(), size=st.integers(1, 20), window=st.none() | st.integers(1, 15))
def test_each_token_is_a_real_row_of_one_square_before_any_rectangle(
    segments: Segments, size: int, window: int | None
) -> None:
    """So that its normaliser is finite before rectangles are joined to it."""
    layout, _ = laid_out(segments, size)
    blocks = layout.blocks(window, CPU)
    rows = torch.cat([square.index[square.real] for square in blocks.squares])
    assert sorted(rows.tolist()) == list(range(len(layout)))
    for part in blocks.rectangles:
        assert part.keys.stop == part.queries.start


@settings(deadline=None, max_examples=60)
@given(segments=forests(), size=st.integers(1, 20), window=st.none() | st.integers(1, 15))
def test_padding_of_squares_attends_to_something_and_nothing_attends_to_it(
    segments: Segments, size: int, window: int | None
) -> None:
    layout, _ = laid_out(segments, size)
    for square in layout.blocks(window, CPU).squares:
        assert square.index.shape == square.real.shape == square.hidden.shape[:2]
        assert square.hidden.shape[1] == square.hidden.shape[2] <= size
        assert square.flat.tolist() == square.index.flatten().tolist()
        if square.filled is None:
            assert bool(square.real.all())
        else:
            assert square.filled.tolist() == torch.nonzero(square.real.flatten()).squeeze(1).tolist()
        assert bool(square.real[:, 0].all())
        padding = ~square.real
        assert not bool((~square.hidden & padding[:, None, :]).any())
        assert not bool(square.hidden.all(-1).any())  # a row of -inf alone would be NaN
        assert bool((square.index[padding] == square.index[:, :1].expand_as(square.index)[padding]).all())


def test_a_prompt_and_two_answers_by_hand() -> None:
    """With squares of 2: tokens 0-2 are the prompt, 3-4 and 5 its answers."""
    layout, _ = laid_out([(3, -1), (2, 0), (1, 0)], size=2)
    blocks = layout.blocks(None, CPU)
    squares = sorted(
        tuple(row[real].tolist())
        for square in blocks.squares
        for row, real in zip(square.index, square.real, strict=True)
    )
    assert squares == [(0, 1), (2,), (3, 4), (5,)]
    cuts = [(part.keys.start, part.keys.stop, part.queries.start, part.queries.stop) for part in blocks.rectangles]
    assert cuts == [(0, 2, 2, 6), (2, 3, 3, 6)]
    assert all(part.hidden is None for part in blocks.rectangles)


def test_rectangles_out_of_reach_are_not_computed() -> None:
    """A chain of 40 tokens in squares of 4: a window of 3 reaches one square back and no further."""
    layout, _ = laid_out([(40, -1)], size=4)
    reach = layout.blocks(3, CPU).rectangles
    assert len(reach) == 9
    assert all(part.hidden is not None and not bool(part.hidden.all()) for part in reach)


def test_small_trees_are_squares_alone() -> None:
    layout, _ = laid_out([(length, -1) for length in range(1, 40)], size=64)
    blocks = layout.blocks(None, CPU)
    assert blocks.rectangles == []
    assert sum(len(square.index) for square in blocks.squares) == 39
    widths = [square.index.shape[1] for square in blocks.squares]
    assert widths == sorted(widths, reverse=True)
    for square in blocks.squares:  # padding is at most a quarter of a side
        assert int(square.real.sum(-1).min()) >= 0.75 * square.index.shape[1]


@pytest.mark.parametrize("size", [0, -1])
def test_squares_without_a_token_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="size"):
        Layout(np.array([1]), np.array([0]), size).blocks(None, CPU)


def test_nothing_has_no_blocks() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    blocks = Layout(nothing, nothing).blocks(None, CPU)
    assert blocks.squares == []
    assert blocks.rectangles == []


@pytest.mark.parametrize("size", [1, 2, 7, 64, 128, 300])
def test_long_chain(size: int) -> None:
    layout, paths = laid_out([(260, -1)], size)
    np.testing.assert_array_equal(counted(layout.blocks(None, CPU), 260), wanted(paths, None))
