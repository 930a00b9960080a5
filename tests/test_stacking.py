"""Items of different lengths as one TensorDict: jagged, or padded on the left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from ramet.ragged import as_nested_tensor, as_padded_tensor, rows


def item(*ids, **more):
    return TensorDict({"tokens": torch.tensor(ids, dtype=torch.int64), **more})


def unbound(value):
    return [row.tolist() for row in value.unbind()]


def test_ragged_leaves_become_jagged_and_the_others_are_stacked():
    """The batch is [n]; nested keys too."""
    td = as_nested_tensor([item(1, 2, n=torch.tensor(5), deep={"x": torch.ones(2)}),
                           item(3, n=torch.tensor(6), deep={"x": torch.zeros(2)})])  # fmt: skip
    assert td.batch_size == (2,)
    assert td["tokens"].layout is torch.jagged
    assert unbound(td["tokens"]) == [[1, 2], [3]]
    assert td["n"].tolist() == [5, 6]
    assert td["deep", "x"].tolist() == [[1, 1], [0, 0]]
    assert [row.tolist() for row in rows(td, "tokens")] == [[1, 2], [3]]


def test_items_with_a_batch_give_n_by_item():
    """Ragged along any one dimension."""
    items = [TensorDict({"x": torch.full((2, n), float(n)), "y": torch.ones(2)}, [2]) for n in (1, 3)]
    td = as_nested_tensor(items)
    assert td.batch_size == (2, 2)
    assert unbound(td["x"]) == [[[1], [1]], [[3, 3, 3], [3, 3, 3]]]
    assert td["y"].shape == (2, 2)


def test_equal_lengths_are_stacked():
    """There is nothing ragged in them."""
    td = as_nested_tensor([item(1, 2), item(3, 4)])
    assert td["tokens"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("stack", [as_nested_tensor, as_padded_tensor])
def test_every_row_keeps_its_own_strings_and_non_tensors(stack):
    """Nested and in items with a batch, too."""
    td = stack([
        item(1, 2, text="b", deep={"of": "y"}, any=NonTensorData(None)),
        item(1, text="a", deep={"of": "x"}, any=NonTensorData({1: 2})),
    ])  # fmt: skip
    assert td.get("text").tolist() == ["b", "a"]
    assert td.get(("deep", "of")).tolist() == ["y", "x"]
    assert td.get("any").tolist() == [None, {1: 2}]
    batched = [TensorDict({"text": NonTensorStack(*pair), "n": torch.zeros(2)}, [2]) for pair in ("ab", "cd")]
    assert stack(batched).get("text").tolist() == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("stack", [as_nested_tensor, as_padded_tensor])
def test_rows_with_different_keys_are_refused_by_name(stack):
    """Which are missing, and which are more."""
    with pytest.raises(ValueError, match=r"row 1 has other keys than row 0: missing \['a'\], more \['b'\]"):
        stack([item(1, a=torch.ones(1)), item(1, b=torch.ones(1))])


@pytest.mark.parametrize("stack", [as_nested_tensor, as_padded_tensor])
def test_an_empty_list_is_a_clear_value_error(stack):
    """It has no keys and no dtypes."""
    with pytest.raises(ValueError, match="an empty list can not be stacked"):
        stack([])


@pytest.mark.parametrize("stack", [as_nested_tensor, as_padded_tensor])
def test_mixed_dtypes_are_refused_by_name(stack):
    """Also a tensor in one row and none in another."""
    with pytest.raises(ValueError, match="'x' must be of one dtype: row 0 holds float32, row 1 holds int64"):
        stack([item(1, x=torch.ones(1)), item(1, x=torch.ones(1).long())])
    with pytest.raises(ValueError, match="'x' must be of one dtype: row 0 holds float32, row 1 holds no tensor"):
        stack([item(1, x=torch.ones(1)), item(1, x="text")])


def test_padding_is_zeros_on_the_left():
    """To the longest."""
    td = as_padded_tensor([item(1), item(2, 3, 4), item()])
    assert td.batch_size == (3,)
    assert td["tokens"].tolist() == [[0, 0, 1], [2, 3, 4], [0, 0, 0]]


def test_a_negative_dim_is_refused():
    """By these words."""
    with pytest.raises(ValueError, match="dim must be >= 0"):
        as_padded_tensor([item(1)], dim=-1)
    with pytest.raises(ValueError, match="stack_dim must be >= 0"):
        as_padded_tensor([item(1)], stack_dim=-1)


def test_a_dim_that_is_not_the_stack_dim_works():
    """Pad along the first, stack along the second, and the other way round; the batch has n where it was stacked."""
    td = as_padded_tensor([item(1), item(2, 3)], dim=0, stack_dim=1)
    assert td["tokens"].tolist() == [[0, 2], [1, 3]]
    assert td.batch_size == ()
    items = [TensorDict({"x": torch.full((2, n), n), "text": NonTensorStack("a", f"b{n}")}, [2]) for n in (1, 2)]
    td = as_padded_tensor(items, dim=1, stack_dim=0)
    assert (td.batch_size, td["x"].tolist()) == ((2, 2), [[[0, 1], [0, 1]], [[2, 2], [2, 2]]])
    td = as_padded_tensor(items, dim=1, stack_dim=1)
    assert (td.batch_size, td["x"].tolist()) == ((2, 2), [[[0, 1], [2, 2]], [[0, 1], [2, 2]]])
    assert td.get("text").tolist() == [["a", "a"], ["b1", "b2"]]


def test_leaves_that_do_not_vary_along_dim_are_stacked_not_padded():
    """Numbers, and vectors of one length."""
    items = [item(1, n=torch.tensor(7), v=torch.tensor([1, 2])), item(1, 2, n=torch.tensor(8), v=torch.tensor([3, 4]))]
    td = as_padded_tensor(items)
    assert (td["n"].tolist(), td["v"].tolist()) == ([7, 8], [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: as_padded_tensor([item(x=torch.ones(1, 2)), item(x=torch.ones(1, 3))]), r"'x' differs along .*\[1\]"),
        (lambda: as_nested_tensor([item(x=torch.ones(1, 2)), item(x=torch.ones(2, 3))]), r"'x' differs .*\[0, 1\]"),
        (
            lambda: as_padded_tensor([item(x=torch.ones(1)), item(x=torch.ones(1, 1))]),
            "'x' must have as many dim.*row 1",
        ),
        (lambda: as_padded_tensor([item(n=torch.tensor(1))], stack_dim=1), "'n' has the shape .* along 1"),
        (lambda: as_nested_tensor([TensorDict({}, [1]), TensorDict({}, [2])]), r"one batch size: row 0 has \(1,\)"),
        (lambda: as_nested_tensor([as_nested_tensor([item(1), item(1, 2)])]), "'tokens', row 0, is a nested tensor"),
        (lambda: as_padded_tensor([TensorDict({"t": NonTensorStack(*"ab"[:n])}, [n]) for n in (1, 2)]), "'t' holds no"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(call, words):
    """Nothing is guessed."""
    with pytest.raises(ValueError, match=words):
        call()


def test_items_that_are_no_tensordicts_are_refused():
    """With their place."""
    with pytest.raises(TypeError, match="row 1: expected a TensorDict, found dict"):
        as_nested_tensor([item(1), {}])


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4), st.integers(0, 2))
def test_rows_come_out_as_they_went_in(lists, depth):
    """Whatever their lengths; in lazy stacks of items, too."""
    items = [item(*ids, n=torch.tensor(len(ids))) for ids in lists]
    assert [row.tolist() for row in rows(as_nested_tensor(items), "tokens")] == lists
    padded = as_padded_tensor(items)
    assert [row.tolist()[len(row) - n :] for row, n in zip(padded["tokens"], padded["n"], strict=True)] == lists
    assert padded["tokens"].sum() == sum(map(sum, lists))
    whole = as_nested_tensor(list(lazy_stack(items).unbind(0)))
    assert [row.tolist() for row in rows(whole, "tokens")] == lists


def test_gradients_reach_the_rows_that_were_padded():
    leaf = torch.ones(1, requires_grad=True)
    as_padded_tensor([TensorDict({"a": leaf}), TensorDict({"a": torch.ones(2)})])["a"].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0]
