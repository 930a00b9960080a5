"""Specs of a whole TensorDict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

from ramet.specs.leaf import KeyPath, Spec, as_device, as_shape, describe, generator_or_new, larger_shape


class Composite(Spec):
    """A TensorDict of specs; `shape` is its batch size, with which the shape of each entry starts.

    >>> from ramet.specs import Categorical, Unbounded
    >>> spec = Composite({"x": Unbounded((2, -1)), "info": {"id": Categorical(9, (2,))}}, shape=(2,))
    >>> spec["info", "id"]
    Categorical(9, shape=(2,), dtype=int64)
    >>> spec.leaves()
    ['x', ('info', 'id')]
    >>> spec.rand().batch_size, spec.is_in(spec.zero())
    (torch.Size([2]), True)
    """

    dtype = None

    def __init__(
        self,
        specs: Mapping[Any, Any] | None = None,
        *,
        shape: Sequence[int] | int = (),
        device: torch.device | str | None = None,
    ) -> None:
        self.shape, self.device = as_shape(shape), as_device(device)
        self._specs: dict[str, Spec] = {}
        for key, spec in (specs or {}).items():
            self[key] = spec

    def __setitem__(self, key: KeyPath, spec: Spec | Mapping[Any, Any]) -> None:
        name, rest = _split(key)
        if rest:
            self._specs.setdefault(name, Composite(shape=self.shape, device=self.device))
            inner = self._specs[name]
            if not isinstance(inner, Composite):
                raise KeyError(f"{name!r} holds {inner}, so nothing can be put under {key!r}")
            inner[rest] = spec
            return
        if not isinstance(spec, Spec | Mapping):
            raise TypeError(f"{name!r} needs a spec, or a mapping of specs: found {describe(spec)}")
        spec = spec if isinstance(spec, Spec) else Composite(spec, shape=self.shape, device=self.device)
        if spec.shape[: len(self.shape)] != self.shape:
            raise ValueError(
                f"the shape of {name!r} must start with the batch size {tuple(self.shape)}: found {tuple(spec.shape)}"
            )
        self._specs[name] = spec if self.device is None else spec.to(self.device)

    def __getitem__(self, key: KeyPath) -> Spec:
        name, rest = _split(key)
        if name not in self._specs:
            raise KeyError(f"no spec for {key!r}; there are {sorted(self._specs)}")
        inner = self._specs[name]
        if not rest:
            return inner
        if not isinstance(inner, Composite):
            raise KeyError(f"no spec for {key!r}: {name!r} holds {inner}")
        return inner[rest]

    def __delitem__(self, key: KeyPath) -> None:
        name, rest = _split(key)
        inner = self[name]
        if rest and isinstance(inner, Composite):
            del inner[rest]
        else:
            del self._specs[name]

    def __contains__(self, key: KeyPath) -> bool:
        try:
            self[key]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def keys(self) -> list[str]:
        """Names of the entries, nested ones as one."""
        return list(self._specs)

    def items(self) -> list[tuple[str, Spec]]:
        """Names and specs of the entries, nested ones as one."""
        return list(self._specs.items())

    def leaves(self) -> list[KeyPath]:
        """Keys of all entries that are no `Composite`; nested ones as tuples."""
        found: list[KeyPath] = []
        for name, spec in self._specs.items():
            if isinstance(spec, Composite):
                found += [(name, *((key,) if isinstance(key, str) else key)) for key in spec.leaves()]
            else:
                found.append(name)
        return found

    def update(self, other: Composite) -> Self:
        """Take over the entries of `other`, nested ones key by key."""
        for key in other.leaves():
            self[key] = other[key]
        return self

    def clone(self) -> Self:
        """Return a copy whose entries can be set without changing this one."""
        return self._map(lambda spec: spec, self.shape, self.device)

    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> TensorDict:
        """Draw a TensorDict of batch size `shape` followed by the spec's own."""
        generator = generator_or_new(generator)
        drawn = {name: spec.rand(shape, generator=generator) for name, spec in self._specs.items()}
        return TensorDict(drawn, batch_size=(*shape, *self.shape), device=self.device)

    def zero(self, shape: Sequence[int] = ()) -> TensorDict:
        """Make a TensorDict of the plainest values."""
        zeros = {name: spec.zero(shape) for name, spec in self._specs.items()}
        return TensorDict(zeros, batch_size=(*shape, *self.shape), device=self.device)

    def is_in(self, value: Any) -> bool:
        """Say whether `value` is a TensorDict that has every key, each as its spec says; more keys may be there."""
        return self.first_misfit(value) is None

    def first_misfit(self, value: Any) -> str | None:
        """Say in words which entry of `value` does not fit and why; None if all do."""
        if not isinstance(value, TensorDictBase):
            return f"expected a TensorDict, found {type(value).__name__}"
        if value.batch_size[: len(self.shape)] != self.shape:
            return f"expected batch size {tuple(self.shape)}, found {tuple(value.batch_size)}"
        if isinstance(value, LazyStackedTensorDict) and len(self.shape):
            misfits = map(self._of_a_row().first_misfit, value.unbind(0))
            return next((f"row {row}: {misfit}" for row, misfit in enumerate(misfits) if misfit), None)
        for name, spec in self._specs.items():
            entry = value.get(name, None)
            if entry is None:
                return f"{name!r} is missing: expected {spec}"
            if isinstance(spec, Composite):
                misfit = spec.first_misfit(entry)
                if misfit:
                    return f"in {name!r}: {misfit}"
            elif not spec.is_in(entry):
                return f"{name!r}: expected {spec}, found {describe(entry)}"
        return None

    def project(self, value: TensorDictBase) -> TensorDictBase:
        """Return a copy of `value`, each entry the nearest that its spec allows; KeyError if one is missing."""
        if isinstance(value, LazyStackedTensorDict) and len(self.shape):
            of_row = self._of_a_row()
            return lazy_stack([of_row.project(row) for row in value.unbind(0)], 0)
        projected = value.copy()
        for key in self.leaves():
            entry = value.get(key, None)
            if entry is None:
                raise KeyError(f"{key!r} is missing, so it can not be projected: expected {self[key]}")
            projected.set(key, self[key].project(entry))
        return projected

    def to(self, dest: torch.device | str | torch.dtype) -> Self:
        """Return the specs on another device or, for floating tensors, of another dtype."""
        device = self.device if isinstance(dest, torch.dtype) else torch.device(dest)

        def move(spec: Spec) -> Spec:
            floating = spec.dtype is not None and spec.dtype.is_floating_point
            return spec if isinstance(dest, torch.dtype) and not floating else spec.to(dest)

        return self._map(move, self.shape, device)

    def expand(self, *shape: int | Sequence[int]) -> Self:
        """Return the specs with a larger batch size that ends in the present one."""
        larger = larger_shape(self.shape, shape)
        return self._map(lambda spec: spec.expand(*larger, *spec.shape[len(self.shape) :]), larger, self.device)

    def _of_a_row(self) -> Self:
        """Return the specs of one row, of a batch size without its first dimension."""
        return self._map(lambda spec: spec._but(shape=spec.shape[1:]), self.shape[1:], self.device)

    def _map(self, change: Any, shape: torch.Size, device: torch.device | None) -> Self:
        changed = type(self)(shape=shape, device=device)
        for name, spec in self._specs.items():
            if isinstance(spec, Composite):
                inner_shape = torch.Size((*shape, *spec.shape[len(self.shape) :]))
                changed._specs[name] = spec._map(change, inner_shape, device)
            else:
                changed._specs[name] = change(spec)
        return changed

    def __repr__(self) -> str:
        inner = ", ".join(f"{name!r}: {spec}" for name, spec in self._specs.items())
        return f"Composite({{{inner}}}, shape={tuple(self.shape)})"


def _split(key: KeyPath) -> tuple[str, tuple[str, ...]]:
    return (key, ()) if isinstance(key, str) else (key[0], tuple(key[1:]))
