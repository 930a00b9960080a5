"""The order of prompts as a function of the position: complete, seeded, and the same for everybody."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.prompts import row_at

SEEDS = st.integers(0, 2**63 - 1)
ROWS = st.integers(1, 40)


@settings(deadline=None, max_examples=60)
@given(SEEDS, ROWS, st.integers(0, 50))
def test_every_row_comes_exactly_once_an_epoch(seed: int, rows: int, epoch: int) -> None:
    places = range(epoch * rows, (epoch + 1) * rows)
    assert sorted(row_at(place, rows=rows, seed=seed) for place in places) == list(range(rows))


@settings(deadline=None, max_examples=40)
@given(SEEDS, ROWS, st.integers(0, 100), st.integers(1, 8))
def test_ranks_that_take_every_nth_position_see_one_order(seed: int, rows: int, start: int, ranks: int) -> None:
    stream = [row_at(place, rows=rows, seed=seed) for place in range(start, start + 6 * ranks)]
    seen = [[row_at(start + rank + i * ranks, rows=rows, seed=seed) for i in range(6)] for rank in range(ranks)]
    assert [row for turn in zip(*seen, strict=True) for row in turn] == stream


def test_epochs_and_seeds_differ() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return [row_at(100 * number + i, rows=100, seed=seed) for i in range(100)]

    orders = [epoch(number, seed) for number in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert list(range(100)) not in orders


def test_the_order_is_the_one_it_always_was() -> None:
    """A run that is resumed under a newer version goes on in the same order."""
    assert [row_at(place, rows=10, seed=7) for place in range(10)] == [6, 3, 9, 1, 2, 0, 5, 7, 8, 4]
    assert row_at(10**12, rows=10, seed=7) == 9
