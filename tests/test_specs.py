"""Specs: what they make is theirs, what is not theirs is told apart, and no global random state is touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from ramet.specs import Bounded, Categorical, Composite, NonTensor, Unbounded, describe

fast = settings(deadline=None, max_examples=40)
SPECS = [
    Unbounded((2, 3)),
    Unbounded((-1,), dtype=torch.int64),
    Unbounded((), dtype=torch.bool),
    Unbounded((2,), dtype=torch.complex64),
    Bounded(-1.5, 2, (4,)),
    Bounded(3, 5, (2, -1), dtype=torch.int64),
    Categorical(4, (3,)),
    Categorical(2, (1,), dtype=torch.bool),
    NonTensor((2,), example_data="a string"),
    NonTensor(example_data="a string"),
    Composite({"x": Unbounded((2, 1)), "in": {"y": Categorical(3, (2,))}}, shape=(2,)),
]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("prefix", [(), (3,)])
def test_what_a_spec_makes_is_in_it(spec, prefix):
    """Random values, zeros and projections, with and without a batch in front; a ragged size has length 1."""
    larger = spec.expand(*prefix, *spec.shape)
    for value in (spec.rand(prefix, generator=generator()), spec.zero(prefix), larger.rand(generator=generator())):
        assert larger.is_in(value)
        assert larger.is_in(larger.project(value))
        size = getattr(value, "batch_size", None) if not isinstance(value, torch.Tensor) else value.shape
        assert tuple(size) == (*prefix, *(1 if n == -1 else n for n in spec.shape))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_randomness_comes_from_the_generator_alone(spec):
    """Equal generators draw equal values, and the global state stays where it was."""
    before = torch.get_rng_state()
    one, two = spec.rand((5,), generator=generator(1)), spec.rand((5,), generator=generator(1))
    spec.rand()
    assert torch.equal(torch.get_rng_state(), before)
    if isinstance(one, NonTensorData | NonTensorStack):
        assert one.tolist() == two.tolist()
    else:
        assert bool((one == two).all())


@fast
@given(st.integers(-5, 5), st.integers(0, 5), st.lists(st.integers(-20, 20), min_size=1))
def test_a_projection_is_the_nearest_value_in_range(low, width, values):
    """It changes nothing that was in the range, and the ends are in it."""
    spec = Bounded(low, low + width, (-1,), dtype=torch.int64)
    projected = spec.project(torch.tensor(values))
    assert spec.is_in(projected)
    for value, got in zip(values, projected.tolist(), strict=True):
        nearest = min(range(low, low + width + 1), key=lambda n: abs(n - value))
        assert got == nearest
    assert spec.is_in(torch.tensor([low, low + width]))
    assert not spec.is_in(torch.tensor([low - 1]))
    assert not spec.is_in(torch.tensor([low + width + 1]))


def test_bounded_and_categorical_draw_all_of_their_range():
    """Both ends included; 200 draws of 3 values miss one with probability below 1e-34."""
    drawn = Bounded(3, 5, (200,), dtype=torch.int64).rand(generator=generator())
    assert sorted(set(drawn.tolist())) == [3, 4, 5]
    assert sorted(set(Categorical(3, (200,)).rand(generator=generator()).tolist())) == [0, 1, 2]
    spread = Bounded(-1, 1, (200,)).rand(generator=generator())
    assert spread.min() < -0.5
    assert spread.max() > 0.5


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (Unbounded((2,)), torch.zeros(3)),
        (Unbounded((2,)), torch.zeros(2, 1)),
        (Unbounded((2,)), torch.zeros(2, dtype=torch.float64)),
        (Unbounded((2,)), [0.0, 0.0]),
        (Categorical(3), torch.tensor(3)),
        (Categorical(3), torch.tensor(-1)),
        (NonTensor((2,), example_data="a"), NonTensorStack("a", "b", "c")),
        (NonTensor((2,), example_data="a"), ["a", 3]),
        (NonTensor(example_data="a"), NonTensorData(3)),
        (NonTensor((2,), example_data="a"), "aa"),
    ],
)
def test_what_is_not_in_a_spec(spec, value):
    """Another shape, dtype, range or type."""
    assert not spec.is_in(value)


def test_jagged_rows_fit_a_ragged_size_and_are_looked_into():
    """A ragged dimension fits -1 alone, and every row's range is checked, but not the room between rows."""
    values, offsets = torch.tensor([1, 2, 99, 3, 99]), torch.tensor([0, 3, 5])
    jagged = torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor([2, 1]))
    assert Bounded(0, 9, (2, -1), dtype=torch.int64).is_in(jagged)
    assert not Bounded(0, 2, (2, -1), dtype=torch.int64).is_in(jagged)
    assert not Unbounded((2, 2), dtype=torch.int64).is_in(jagged)
    assert not Unbounded((3, -1), dtype=torch.int64).is_in(jagged)


def test_text_is_in_as_data_and_as_list():
    """What a TensorDict gives for text, by get and by brackets."""
    td = TensorDict({"text": NonTensorStack("a", "b")}, [2])
    spec = NonTensor((2,), example_data="x")
    assert spec.is_in(td.get("text"))
    assert spec.is_in(td["text"])
    assert NonTensor(example_data="x").is_in("word")


def test_a_composite_says_which_entry_does_not_fit():
    """Missing keys, wrong entries, wrong batch, nested ones too."""
    spec = Composite({"a": {"x": Unbounded((2, 1))}, "y": Categorical(3, (2,))}, shape=(2,))
    good = spec.zero()
    assert spec.first_misfit(good) is None
    assert "'x' is missing" in spec.first_misfit(good.exclude(("a", "x")))
    assert "in 'a': 'x': expected Unbounded" in spec.first_misfit(good.copy().set(("a", "x"), torch.zeros(2, 2)))
    assert "'y': expected Categorical(3" in spec.first_misfit(good.copy().set("y", torch.tensor([0, 3])))
    assert "batch size (2,), found (1,)" in spec.first_misfit(good[:1])
    assert "found int" in spec.first_misfit(3)
    assert spec.is_in(good.copy().set("more", torch.zeros(2)))
    fixed = spec.project(good.copy().set("y", torch.tensor([0, 3])))
    assert fixed["y"].tolist() == [0, 2]


def test_a_composite_is_a_mapping_with_nested_keys():
    """Setting, reading, deleting by tuples; copies are independent; a wrong batch is refused."""
    spec = Composite(shape=(2,))
    spec["a", "x"] = Unbounded((2, 1))
    spec["y"] = Categorical(3, (2,))
    assert spec.leaves() == [("a", "x"), "y"]
    assert list(spec) == spec.keys() == ["a", "y"]
    assert (len(spec), ("a", "x") in spec, ("y", "x") in spec) == (2, True, False)
    other = spec.clone()
    assert other == spec
    del other["a", "x"]
    assert ("a", "x") in spec
    assert other != spec
    assert other.update(spec) == spec
    with pytest.raises(KeyError, match="no spec for 'z'"):
        spec["z"]
    with pytest.raises(KeyError, match="'y' holds"):
        spec["y", "deeper"] = Unbounded((2,))
    with pytest.raises(ValueError, match=r"'z' must start with the batch size \(2,\): found \(3,\)"):
        spec["z"] = Unbounded((3,))


def test_devices_and_dtypes():
    """`to` moves every leaf; a dtype changes floating leaves of a composite alone."""
    spec = Composite({"x": Unbounded((1,)), "y": Categorical(3)})
    moved = spec.to("meta")
    assert moved["x"].device.type == moved["y"].device.type == moved.device.type == "meta"
    assert spec["x"].device is None
    double = spec.to(torch.float64)
    assert (double["x"].dtype, double["y"].dtype) == (torch.float64, torch.int64)
    assert Bounded(0, 1, (2,)).to(torch.float64).rand().dtype is torch.float64
    assert NonTensor(example_data="a").to("meta").device.type == "meta"


def test_impossible_specs_are_refused():
    """An empty range, no classes, a shape that does not expand."""
    with pytest.raises(ValueError, match="low=2, high=1"):
        Bounded(2, 1)
    with pytest.raises(ValueError, match="at least 1: found 0"):
        Categorical(0)
    with pytest.raises(ValueError, match=r"\(2,\) does not expand to \(2, 3\)"):
        Unbounded((2,)).expand(2, 3)


def test_values_are_described_in_few_words():
    """For error messages."""
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 1, 3]))
    assert describe(jagged) == "int64 tensor of shape (2, ragged)"
    assert describe(NonTensorStack("a", "b")) == "non-tensor data of batch size (2,): ['a', 'b']"


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        (Bounded(0, 200, (3,), dtype=torch.uint8), [300, -5, 256], [200, 0, 200]),
        (Bounded(-5, 5, (2,), dtype=torch.int8), [300, -300], [5, -5]),
        (Bounded(0, 9, (5,), dtype=torch.int64), [INF, 1e20, -INF, NAN, 4.4], [9, 9, 0, 0, 4]),
        (Bounded(3, 9, (1,), dtype=torch.int64), [NAN], [3]),
        (Bounded(-(2**63), 2**63 - 1, (2,), dtype=torch.int64), [INF, -INF], [2**63 - 1, -(2**63)]),
        (Categorical(5, (2,)), [1.7, 1.2], [2, 1]),
        (Categorical(2, (3,), dtype=torch.bool), [0.2, 0.7, -3.0], [False, True, False]),
        (Categorical(1, (2,), dtype=torch.bool), [True, False], [False, False]),
        (Unbounded((3,), dtype=torch.uint8), [300, -5, 7], [255, 0, 7]),
        (Unbounded((2,), dtype=torch.int32), [1e20, 1.7], [2**31 - 1, 2]),
        (Bounded(0.5, 2.5, (3,), dtype=torch.int64), [0, 2, 9], [1, 2, 2]),
        (Bounded(-1, 1, (4,)), [NAN, INF, -INF, 0.25], [0.0, 1.0, -1.0, 0.25]),
        (Bounded(-1e6, 1e6, (1,), dtype=torch.float16), [1e6], [65504.0]),
    ],
    ids=str,
)
def test_a_projection_casts_after_it_has_cut(spec, value, expected):
    """So nothing wraps round, and fractions go to the nearest integer, not to zero; the result is in the spec."""
    found = spec.project(torch.tensor(value))
    assert found.dtype == spec.dtype
    assert found.tolist() == expected
    assert spec.is_in(found)


def test_jagged_rows_are_projected_where_they_are():
    """With their offsets."""
    jagged = torch.nested.nested_tensor_from_jagged(torch.tensor([300, -5, 7]), torch.tensor([0, 1, 3]))
    found = Bounded(0, 200, (2, -1), dtype=torch.uint8).project(jagged)
    assert [row.tolist() for row in found.unbind()] == [[200], [0, 7]]


@pytest.mark.parametrize(
    "spec",
    [
        Bounded(0.33, 0.53, (5000,), dtype=torch.float16),
        Bounded(0.92, 1.12, (5000,), dtype=torch.bfloat16),
        Bounded(0.1, 0.7, (5000,)),
        Bounded(0.7, 0.7, (10,)),
        Bounded(-3e38, 3e38, (4,)),
        Bounded(-1.7e308, 1.7e308, (4,), dtype=torch.float64),
        Bounded(-INF, INF, (50,)),
        Bounded(2, INF, (50,)),
        Bounded(-INF, 2, (50,), dtype=torch.float16),
        Bounded(-1e6, 1e6, (50,), dtype=torch.float16),
        Bounded(0.5, 2.5, (100,), dtype=torch.int64),
        Bounded(-(2**63), 2**63 - 1, (9,), dtype=torch.int64),
        Bounded(-INF, INF, (9,), dtype=torch.int64),
        Bounded(-5, 300, (100,), dtype=torch.uint8),
        Categorical(1, (20,), dtype=torch.bool),
        Bounded(1, 3, (20,), dtype=torch.bool),
    ],
    ids=str,
)
def test_a_spec_holds_what_it_draws_at_the_ends_of_its_dtype(spec):
    """Where the ends are rounded by the dtype, are as far apart as it reaches, or are no numbers of it."""
    drawn = spec.rand(generator=generator())
    assert spec.is_in(drawn)
    assert spec.is_in(spec.zero())
    assert torch.equal(spec.project(drawn), drawn)
    if drawn.dtype.is_floating_point:
        assert drawn.isfinite().all()


def test_the_ends_of_a_range_are_in_it_as_the_dtype_says_them():
    """0.7 is rounded down in float32; bool has a range too."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        spec = Bounded(0.7, 0.9, (2,), dtype=dtype)
        ends = torch.tensor([0.7, 0.9], dtype=dtype)
        assert spec.is_in(ends)
        assert not spec.is_in(torch.nextafter(ends.double(), torch.tensor([0.0, 1.0]).double()).to(dtype) - 0.1)
    assert not Categorical(1, dtype=torch.bool).is_in(torch.tensor(True))
    assert not Bounded(1, 1, (), dtype=torch.bool).is_in(torch.tensor(False))
    assert not Bounded(0, 1).is_in(torch.tensor([NAN]))


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(0.2, 0.8, torch.int64), (2, 3, torch.bool), (300, 400, torch.uint8), (-9, -1, torch.uint8)],
)
def test_a_range_without_a_value_of_the_dtype_is_refused(low, high, dtype):
    """At construction, and at a change of the dtype."""
    with pytest.raises(ValueError, match=f"there is no {str(dtype)[6:]} from {low} to {high}"):
        Bounded(low, high, dtype=dtype)
    with pytest.raises(ValueError, match=f"there is no {str(dtype)[6:]}"):
        Bounded(low, high).to(dtype)
    with pytest.raises(ValueError, match="no order"):
        Bounded(low, high, dtype=torch.complex64)


def test_a_projection_of_a_composite_names_what_is_missing_and_keeps_a_stack():
    """Nested keys too; rows of other lengths stay as they are."""
    spec = Composite({"a": Categorical(9, (2, -1)), "in": {"b": Unbounded((2,))}}, shape=(2,))
    rows = [TensorDict({"a": torch.tensor(ids), "in": {"b": torch.tensor(0.0)}}) for ids in ([10, 1], [-1])]
    found = spec.project(lazy_stack(rows))
    assert [row["a"].tolist() for row in found.unbind(0)] == [[8, 1], [0]]
    assert spec.is_in(found)
    with pytest.raises(KeyError, match=r"\('in', 'b'\) is missing.*Unbounded"):
        spec.project(TensorDict({"a": torch.ones(2, 1)}, [2]))
    with pytest.raises(KeyError, match="'a' is missing"):
        Composite({"a": Unbounded()}).project(TensorDict())
