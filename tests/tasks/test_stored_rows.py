"""Rows in files of JSON come back as they were, whatever they hold; what can not is named."""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
import math
import pathlib
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.tasks.stored_rows import read_back, stored

SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False), st.binary(), st.dates(),
    st.datetimes(), st.times(), st.uuids(), st.decimals(allow_nan=False), st.fractions(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()), st.dates())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(st.one_of(st.integers(), st.dates(), st.tuples(st.text())), max_size=3),
    ),
    max_leaves=8,
)


def through_json(row: dict[str, Any]) -> dict[str, Any]:
    found = stored(row)
    assert found.left_out == {}
    written = json.dumps([found.columns, found.kinds], allow_nan=False)
    return read_back(*json.loads(written))


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_a_row_comes_back_equal_and_of_the_same_types(row: dict[str, Any]) -> None:
    back = through_json(row)
    assert back == row
    assert {name: type(value) for name, value in back.items()} == {name: type(value) for name, value in row.items()}


def test_what_json_knows_is_written_as_it_is() -> None:
    row = {"a": [1, 2.5, None, True, {"b": "c"}], "prompt": "x", "messages": []}
    found = stored(row)
    assert (found.columns, found.kinds, found.left_out) == (row, [], {})


@pytest.mark.parametrize(
    ("value", "written", "kind"),
    [
        (datetime.date(2024, 2, 29), "2024-02-29", "date"),
        (datetime.datetime(2024, 2, 29, 1, 2, 3), "2024-02-29T01:02:03", "datetime"),
        (datetime.timedelta(minutes=1), 60.0, "seconds"),
        (b"ab", "YWI=", "base64"),
        (math.inf, "inf", "float"),
        (decimal.Decimal("1.10"), "1.10", "decimal"),
        (fractions.Fraction(1, 3), "1/3", "fraction"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001", "uuid"),
        (pathlib.Path("a/b"), "a/b", "path"),
        ((1, 2), [1, 2], "tuple"),
        (frozenset({1}), [1], "frozenset"),
        ({1: "a"}, [[1, "a"]], "pairs"),
        (np.float32(0.5), 0.5, "scalar <f4 -"),
        (torch.tensor(3), 3, "tensor int64 -"),
    ],
)
def test_other_values_are_written_so_that_people_can_read_them(value: Any, written: Any, kind: str) -> None:
    found = stored({"x": value})
    assert (found.columns, found.kinds) == ({"x": written}, [(("x",), kind)])
    back = through_json({"x": value})["x"]
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(0, 3),
        torch.tensor([[1.5, math.nan]], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1.0], requires_grad=True),
        torch.tensor([1 + 2j]),
    ],
)
def test_a_tensor_comes_back_bit_for_bit(value: torch.Tensor) -> None:
    back = through_json({"x": [value]})["x"][0]
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(torch.view_as_real(back) if back.is_complex() else back.nan_to_num(7),
                       torch.view_as_real(value) if value.is_complex() else value.detach().nan_to_num(7))  # fmt: skip


@pytest.mark.parametrize(
    "value", [np.arange(6).reshape(2, 3), np.zeros((2, 0), "float32"), np.array(["ab", "c"]), np.array(None)]
)
def test_an_array_comes_back_bit_for_bit(value: Any) -> None:
    back = through_json({"x": value})["x"]
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert (back == value).all()


def test_what_can_not_be_written_is_left_out_by_name_and_the_rest_is_there() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = stored({"a": 1, "f": print, "deep": {"x": [object()]}, 5: "five", "loop": loop})
    assert (found.columns, found.kinds) == ({"a": 1}, [])
    assert found.left_out.keys() == {"f", "deep", "5", "loop"}
    assert found.left_out["f"] == "JSON can not hold a value of type builtin_function_or_method"
    assert found.left_out["deep"] == "JSON can not hold a value of type object at ['deep', 'x', 0]"
    assert found.left_out["5"] == "its name is no text: 5"
