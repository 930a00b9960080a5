"""Specs of single entries: tensors and what is no tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Self, TypeAlias

import torch
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor

KeyPath: TypeAlias = str | tuple[str, ...]
Number: TypeAlias = float | int


class Spec(ABC):
    """What one key may hold: `shape` (-1 is ragged), `dtype`, `device`."""

    shape: torch.Size
    dtype: torch.dtype | None
    device: torch.device | None

    @abstractmethod
    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw a value of size `shape` followed by the spec's own shape."""

    @abstractmethod
    def zero(self, shape: Sequence[int] = ()) -> Any:
        """Make the plainest value of size `shape` followed by the spec's own shape."""

    @abstractmethod
    def is_in(self, value: Any) -> bool:
        """Say whether `value` has the shape, dtype and range of the spec."""

    @abstractmethod
    def project(self, value: Any) -> Any:
        """Return the value of the spec that is nearest to `value`."""

    def to(self, dest: torch.device | str | torch.dtype) -> Self:
        """Return the spec on another device or, for tensors, of another dtype."""
        if not isinstance(dest, torch.dtype):
            return self._but(device=torch.device(dest))
        return self if self.dtype is None else self._but(dtype=dest)

    def expand(self, *shape: int | Sequence[int]) -> Self:
        """Return the spec with a larger shape that ends in the present one."""
        return self._but(shape=larger_shape(self.shape, shape))

    def _but(self, **changed: Any) -> Self:
        other = copy(self)
        vars(other).update(changed)
        return other

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class TensorSpec(Spec):
    """A spec whose values are tensors."""

    dtype: torch.dtype

    def __init__(self, shape: Sequence[int] | int, device: torch.device | str | None, dtype: torch.dtype) -> None:
        self.shape, self.device = as_shape(shape), as_device(device)
        self.dtype = dtype

    @abstractmethod
    def _draw(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor: ...

    def _ends(self) -> tuple[Number, Number] | None:
        """Return the least and the largest value that the spec and its dtype allow; None where there is no end."""
        return None if self.dtype.is_floating_point or self.dtype.is_complex else _limits(self.dtype)

    def _in_range(self, values: Tensor) -> bool:
        return True

    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw a tensor of size `shape` followed by the spec's own shape."""
        drawn = self._draw(_size(shape, self.shape), generator_or_new(generator))
        return drawn.to(device=self.device, dtype=self.dtype)

    def zero(self, shape: Sequence[int] = ()) -> Tensor:
        """Make zeros, or the nearest to zero that the spec allows."""
        return self.project(torch.zeros(_size(shape, self.shape), dtype=self.dtype, device=self.device))

    def is_in(self, value: Any) -> bool:
        """Say whether `value` is a tensor of the shape (any length where it is -1), dtype and range of the spec."""
        if not isinstance(value, Tensor) or value.dtype != self.dtype or value.dim() != len(self.shape):
            return False
        for size, own in zip(value.shape, self.shape, strict=True):
            if own != -1 and (not isinstance(size, int) or size != own):
                return False
        return self._in_range(torch.cat(value.unbind()) if value.is_nested and len(value) else value)

    def project(self, value: Tensor) -> Tensor:
        """Return the tensor of the spec that is nearest to `value`, which must have its shape."""
        ends = self._ends()
        if not value.is_nested:
            return _nearest(value, self.dtype, ends)
        jagged: Any = value
        values = _nearest(jagged.values(), self.dtype, ends)
        return torch.nested.nested_tensor_from_jagged(values, jagged.offsets(), jagged.lengths())

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        device = "" if self.device is None else f", device={str(self.device)!r}"
        return f"{type(self).__name__}({self._range_text()}shape={tuple(self.shape)}, dtype={dtype}{device})"

    def _range_text(self) -> str:
        return ""


class Unbounded(TensorSpec):
    """Any tensor of a shape and dtype.

    >>> Unbounded((-1,), dtype=torch.int64).is_in(torch.tensor([3, 1, 2]))
    True
    >>> Unbounded((-1,), dtype=torch.int64).rand((2,)).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        shape: Sequence[int] | int = (1,),
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(shape, device, dtype)

    def _draw(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(size, generator=generator, dtype=self.dtype)
        if self.dtype is torch.bool:
            return torch.randint(2, size, generator=generator)
        return torch.empty(size, dtype=self.dtype).random_(generator=generator)


class Bounded(TensorSpec):
    """A tensor whose entries lie between `low` and `high`, both included.

    Floating ends are rounded to the dtype; integers are those between the ends. ValueError if the dtype has none there.

    >>> tokens = Bounded(0, 9, (-1,), dtype=torch.int64)
    >>> tokens.is_in(torch.tensor([0, 9])), tokens.is_in(torch.tensor([10]))
    (True, False)
    >>> tokens.project(torch.tensor([-3, 12]))
    tensor([0, 9])
    """

    def __init__(
        self,
        low: Number,
        high: Number,
        shape: Sequence[int] | int = (1,),
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(shape, device, dtype)
        if not low <= high:
            raise ValueError(f"low must be at most high: found low={low}, high={high}")
        self.low, self.high = low, high
        self._ends()

    def _but(self, **changed: Any) -> Self:
        other = super()._but(**changed)
        other._ends()
        return other

    def _ends(self) -> tuple[Number, Number]:
        if self.dtype.is_complex:
            raise ValueError(f"complex numbers have no order: {self.dtype} can not be bounded")
        least, most = _limits(self.dtype)
        if self.dtype.is_floating_point:
            low, high = (_rounded(end, self.dtype, least, most) for end in (self.low, self.high))
        else:
            low = math.ceil(max(self.low, least)) if self.low <= most else most + 1
            high = math.floor(min(self.high, most)) if self.high >= least else least - 1
        if low > high:
            raise ValueError(f"there is no {str(self.dtype).removeprefix('torch.')} from {self.low} to {self.high}")
        return low, high

    def _draw(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        low, high = self._ends()
        if self.dtype.is_floating_point:
            return _drawn(float(low), float(high), size, generator, self.dtype)
        if high == torch.iinfo(torch.int64).max:  # it can not be said as the first that is not drawn
            return torch.empty(size, dtype=torch.int64).random_(int(low), None, generator=generator)
        return torch.randint(int(low), int(high) + 1, size, generator=generator)

    def _in_range(self, values: Tensor) -> bool:
        low, high = self._ends()
        values = values if values.dtype.is_floating_point else values.long()
        return bool(((values >= low) & (values <= high)).all())

    def _range_text(self) -> str:
        return f"{self.low}, {self.high}, "


class Categorical(Bounded):
    """A tensor of class numbers 0 to n-1; bool flags are `Categorical(2, dtype=torch.bool)`.

    >>> Categorical(3).is_in(torch.tensor(3))
    False
    >>> Categorical(2, (1,), dtype=torch.bool).zero()
    tensor([False])
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1: found {n}")
        super().__init__(0, n - 1, shape, device, dtype)
        self.n = n

    def _range_text(self) -> str:
        return f"{self.n}, "


class NonTensor(Spec):
    """Something that is no tensor, such as text; random values are the example.

    >>> NonTensor(example_data="a string").rand((2,)).tolist()
    ['a string', 'a string']
    >>> NonTensor(example_data="a string").is_in("another"), NonTensor(example_data="a string").is_in(3)
    (True, False)
    """

    dtype = None

    def __init__(
        self,
        shape: Sequence[int] | int = (),
        device: torch.device | str | None = None,
        *,
        example_data: Any = None,
    ) -> None:
        self.shape, self.device = as_shape(shape), as_device(device)
        self.example_data = example_data

    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """Return the example, as non-tensor data of size `shape` followed by the spec's own."""
        return _filled(_size(shape, self.shape), self.example_data)

    zero = rand

    def is_in(self, value: Any) -> bool:
        """Say whether each item of `value` has the type of the example, and there are as many as the shape says."""
        if isinstance(value, NonTensorData | NonTensorStack):
            size, items = value.batch_size, value.tolist()
        else:
            size, items = _list_size(value, len(self.shape)), value
        if len(size) != len(self.shape) or any(own not in (-1, n) for n, own in zip(size, self.shape, strict=True)):
            return False
        kind = type(self.example_data)
        return self.example_data is None or all(isinstance(item, kind) for item in _flat(items, len(size)))

    def project(self, value: Any) -> Any:
        """Return `value` as it is."""
        return value

    def __repr__(self) -> str:
        return f"NonTensor(shape={tuple(self.shape)}, example_data={self.example_data!r})"


def describe(value: Any) -> str:
    """Say in a few words what `value` is, for error messages.

    >>> describe(torch.zeros(2, 3)), describe("text")
    ('float32 tensor of shape (2, 3)', "str 'text'")
    """
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        sizes = ", ".join(str(size) if isinstance(size, int) else "ragged" for size in value.shape)
        return f"{dtype} tensor of shape ({sizes})"
    if isinstance(value, NonTensorData | NonTensorStack):
        return f"non-tensor data of batch size {tuple(value.batch_size)}: {str(value.tolist())[:60]}"
    return f"{type(value).__name__} {str(value)[:60]!r}"


def as_shape(shape: Sequence[int] | int) -> torch.Size:
    return torch.Size((shape,) if isinstance(shape, int) else shape)


def as_device(device: torch.device | str | None) -> torch.device | None:
    return None if device is None else torch.device(device)


def generator_or_new(generator: torch.Generator | None) -> torch.Generator:
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return generator


def _limits(dtype: torch.dtype) -> tuple[Number, Number]:
    """Return the least and the largest finite number of a dtype."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


def _rounded(end: Number, dtype: torch.dtype, least: Number, most: Number) -> float:
    """Round an end to what the dtype can say; one that is finite stays so."""
    if math.isinf(end) or least <= end <= most:
        return float(torch.tensor(float(end), dtype=torch.float64).to(dtype))
    return float(least if end < least else most)


def _drawn(low: float, high: float, size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw evenly between the ends, in float64, where their distance is finite; where an end is not, normally."""
    if math.isinf(low) or math.isinf(high):
        normal = torch.randn(size, generator=generator, dtype=torch.float64)
        if math.isinf(low) and math.isinf(high):
            return normal.clamp(low, high)
        return (low + normal.abs() if math.isinf(high) else high - normal.abs()).clamp(low, high)
    part = torch.rand(size, generator=generator, dtype=dtype if dtype is torch.float64 else torch.float32).double()
    return (low * (1 - part) + high * part).clamp(low, high)


def _nearest(value: Tensor, dtype: torch.dtype, ends: tuple[Number, Number] | None) -> Tensor:
    """Return the values of a dtype between the ends that are nearest; what is no number counts as zero."""
    if ends is None:
        return value if value.dtype == dtype else value.to(dtype)
    low, high = ends
    if not value.dtype.is_floating_point:
        value = value.long() if not dtype.is_floating_point else value.double()
        return value.clamp(low, high).to(dtype)
    value = torch.where(value.isnan(), torch.zeros_like(value), value)
    if dtype.is_floating_point:
        value = value if value.dtype == dtype else value.double()
        return value.clamp(low, high).to(dtype)
    # The ends are compared before a cast: a float beyond the integers has none.
    inside = value.double().clamp(-(2.0**62), 2.0**62).round().long().clamp(low, high)
    value = value.double()
    return torch.where(value >= high, high, torch.where(value <= low, low, inside)).to(dtype)


def _size(prefix: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    return (*prefix, *(1 if size == -1 else size for size in shape))


def larger_shape(own: torch.Size, shape: tuple[int | Sequence[int], ...]) -> torch.Size:
    sizes: list[int] = []
    for part in shape:
        sizes += [part] if isinstance(part, int) else list(part)
    tail = sizes[len(sizes) - len(own) :]
    if len(sizes) < len(own) or any(old not in (new, 1) for old, new in zip(own, tail, strict=True)):
        raise ValueError(f"{tuple(own)} does not expand to {tuple(sizes)}: the larger shape must end in the smaller")
    return torch.Size(sizes)


def _filled(size: Sequence[int], item: Any) -> Any:
    if not size:
        return NonTensorData(item)
    return NonTensorStack(*[_filled(size[1:], item) for _ in range(size[0])])


def _list_size(value: Any, depth: int) -> torch.Size:
    sizes: list[int] = []
    while len(sizes) < depth and isinstance(value, list) and value:
        sizes.append(len(value))
        value = value[0]
    return torch.Size(sizes)


def _flat(items: Any, depth: int) -> Iterator[Any]:
    if depth == 0:
        yield items
        return
    for item in items:
        yield from _flat(item, depth - 1)
