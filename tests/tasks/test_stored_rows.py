"""Rows in files of JSON come back as they were, whatever they hold; what can not is named."""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import tempfile
import uuid
import zoneinfo
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.evaluation import RolloutLog
from ramet.metrics import read
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


class Colour(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


class Pair(NamedTuple):
    left: Any
    right: Any


class Stamp(datetime.datetime):
    """As the times of pandas are."""


class Number(float):
    """As a number of another package is."""


class Mine(list[Any]):
    """A list of a user's."""


ZONED = datetime.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("UTC"))
NAMED = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET"))
NEITHER: list[Any] = [
    Colour.RED, Word.YES, Pair(1, 2), Stamp(2024, 1, 1), Number(1.5), Mine([1]), collections.Counter("ab"),
    collections.defaultdict(list, a=[1]), collections.OrderedDict(a=1), pathlib.PureWindowsPath("a/b"),
    pathlib.PurePosixPath("a/b"), bytearray(b"ab"), range(3), ZONED, NAMED, np.longlong(3), np.longdouble(1),
    np.str_("a\0"), np.bytes_(b"a\0"), np.zeros(2, "i4,f4"), np.zeros(2, "i4,f4")[0], np.zeros(2, "longdouble"),
    np.zeros(2, "V8"), np.ma.masked_array([1, 2], [True, False]), torch.nn.Parameter(torch.zeros(2)),
    torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.float8_e5m2), torch.empty(2, device="meta"),
    fractions.Fraction(10**700, 3),
]  # fmt: skip
EXACT: list[Any] = [
    10**5000, -(10**700), 10**640 - 1, -0.0, math.nan, -math.inf, complex(-0.0, math.nan), decimal.Decimal("sNaN12"),
    decimal.Decimal("-0E+5"), "\ud800\udc00", "\udc00\ud800 \\u", "\U00010000", datetime.time(1, 2, fold=1),
    datetime.datetime(2024, 10, 27, 2, 30, fold=1), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-1, microseconds=1))),
    datetime.timedelta(999_999, microseconds=1), datetime.timedelta.min, datetime.timedelta.max,
    np.float64(0.1), np.float16(math.nan), np.bool_(True), np.str_("ab"), np.str_(""), np.bytes_(b"ab"),
    np.uint64(2**64 - 1), np.datetime64("2024-01-01T00:00:00.000000001"), np.datetime64("NaT"),
    np.datetime64(9_999_999, "Y"), np.timedelta64(5),
    np.array(["2024-02-29", "NaT"], "M8[ns]"), np.array([5], ">m8[25s]"), np.array([1 + 2j, math.nan]),
    np.array([[1, 2], None, {"a": (1,)}], dtype=object), np.array([[[1], [2]], [[3], [4]]], dtype=object),
    np.array([b"a", b""]), np.zeros((0, 3), ">u2"), np.array(["\ud800\udc00"]),
    torch.tensor([2**64 - 1], dtype=torch.uint64), torch.zeros(2, 0, 3), torch.tensor([1 + 2j]).conj(),
    torch.tensor([[1.5, math.nan]], dtype=torch.bfloat16),
    {"\ud800\udc00": 1}, {"a": {1: {2: set()}}, True: {frozenset({(1, b"")})}},
]  # fmt: skip


def exactly(value: Any) -> Any:
    """Return what two values share only if they are of the same types, throughout, and equal; NaN is NaN."""
    own = type(value)
    if isinstance(value, dict):
        return own, [(exactly(key), exactly(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return own, [exactly(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return own, sorted((exactly(inner) for inner in value), key=repr)
    if isinstance(value, np.ndarray):
        return own, value.dtype.str, value.shape, [exactly(inner) for inner in value.ravel().tolist()]
    if isinstance(value, torch.Tensor):
        return own, value.dtype, tuple(value.shape), exactly(value.tolist())
    return own, hex(value) if isinstance(value, int) else repr(value)


def one_of(values: list[Any]) -> st.SearchStrategy[Any]:
    """By number: Hypothesis would write the long integers in decimals, which Python refuses."""
    return st.sampled_from(range(len(values))).map(lambda number: values[number])


HARD = st.recursive(
    st.one_of(
        SCALARS, one_of([*NEITHER, *EXACT]), st.integers(-(2**2100), 2**2100), st.floats(), st.timedeltas(),
        st.text(st.characters(codec=None)), st.datetimes(timezones=st.timezones()), st.decimals(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.builds(Pair, inner, inner), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(KEYS, st.sampled_from([Word.YES, Colour.RED, Number(1)])), inner, max_size=3),
        st.lists(inner, max_size=2).map(Mine),
    ),
    max_leaves=6,
)  # fmt: skip
NAMES = st.one_of(st.text(st.characters(codec=None)), one_of([5, Word.YES, None, "\ud800\udc00", 10**5000]))


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(NAMES, HARD, max_size=4))
def test_a_column_comes_back_exactly_or_is_named_and_the_log_takes_the_record(row: dict[Any, Any]) -> None:
    found = stored(row)
    record = {"step": 0, "row": found.columns, "row_kinds": found.kinds, "row_left_out": found.left_out}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rollouts.jsonl"
        with RolloutLog(path) as log:
            log.append(record)
        [line] = read(path)
    as_read = copy.deepcopy(line)
    back = read_back(line["row"], line["row_kinds"])
    kept = {name: value for name, value in row.items() if type(name) is str and name in back}
    assert exactly(back) == exactly(kept)
    for name in row.keys() - kept.keys():
        assert (
            name if type(name) is str else "a name of type int" if name == 10**5000 else str(name)
        ) in found.left_out
    assert line == as_read


@pytest.mark.parametrize("value", EXACT, ids=lambda value: type(value).__name__)
def test_what_is_hard_to_write_comes_back_exactly(value: Any) -> None:
    assert exactly(through_json({"x": [value]})["x"]) == exactly([value])


@pytest.mark.parametrize("value", NEITHER, ids=lambda value: type(value).__name__)
def test_what_would_come_back_as_something_else_is_left_out(value: Any) -> None:
    found = stored({"x": [value], "y": value, "z": 1})
    assert (found.columns, found.kinds, found.left_out.keys()) == ({"z": 1}, [], {"x", "y"})


def test_a_record_is_read_as_often_as_one_likes_and_stays_as_it_is() -> None:
    row = {"meta": {"day": datetime.date(2024, 2, 29), "sizes": [{1, 2}, (3, {4: b"x"})]}, "plain": [1]}
    found = stored(row)
    line = json.loads(json.dumps([found.columns, found.kinds]))
    as_read = copy.deepcopy(line)
    first, second = read_back(*line), read_back(*line)
    first["plain"].append(2)
    assert line == as_read
    assert exactly(second) == exactly(row)


def test_a_row_without_kinds_is_read_as_it_was_written() -> None:
    columns = {"day": "2024-02-29", "size": [2, 3], "meta": {"x": None}}
    assert read_back(columns) == columns


@pytest.mark.parametrize(
    "kind",
    ["int", "fold", "timedelta", "tensor int64 3x3", "tensor nothing -", "tensor nn -", "array |V8 2",
     "array <M8[ns] 9", "array |O 5", "scalar x -", "escaped", "uuid", "date", "fraction"],
)  # fmt: skip
@pytest.mark.parametrize("written", [["a", None], list(range(8)), "\\x", {"b": 1}])
def test_a_kind_that_is_not_what_is_written_is_refused(kind: str, written: Any) -> None:
    with pytest.raises(ValueError):
        read_back({"x": written}, [[["x"], kind]])


def test_what_json_knows_is_written_as_it_is() -> None:
    row = {"a": [1, 2.5, None, True, {"b": "c"}], "prompt": "x", "messages": []}
    found = stored(row)
    assert (found.columns, found.kinds, found.left_out) == (row, [], {})


@pytest.mark.parametrize(
    ("value", "written", "kind"),
    [
        (datetime.date(2024, 2, 29), "2024-02-29", "date"),
        (datetime.datetime(2024, 2, 29, 1, 2, 3), "2024-02-29T01:02:03", "datetime"),
        (datetime.timedelta(minutes=1), [0, 60, 0], "timedelta"),
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
    long = 10**5000  # Python refuses to write it in decimals
    found = stored({"a": 1, "f": print, "deep": {"x": [object()]}, 5: "five", "loop": loop, long: 1})
    assert (found.columns, found.kinds) == ({"a": 1}, [])
    assert found.left_out.keys() == {"f", "deep", "5", "loop", "a name of type int"}
    assert found.left_out["f"] == "JSON can not hold a value of type builtin_function_or_method"
    assert found.left_out["deep"] == "JSON can not hold a value of type object at ['deep', 'x', 0]"
    assert found.left_out["5"] == "its name is no text: 5"
    assert found.left_out["loop"] == "it is nested deeper than 100 levels"
