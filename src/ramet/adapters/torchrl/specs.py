"""Specs of ramet as specs of TorchRL, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torchrl import data as peer

from ramet.specs import Bounded, Categorical, Composite, NonTensor, Spec, Unbounded


def to_torchrl_spec(spec: Spec) -> peer.TensorSpec:
    """Return the TorchRL spec of the same shape, dtype, device and range; TypeError for a kind that it does not know.

    >>> to_torchrl_spec(Categorical(5, (2,))) == peer.Categorical(5, (2,))
    True
    """
    if isinstance(spec, _Foreign):
        return spec.spec
    if isinstance(spec, Composite):
        inner = {name: to_torchrl_spec(value) for name, value in spec.items()}
        return peer.Composite(inner, shape=spec.shape, device=spec.device)
    if isinstance(spec, Categorical):
        return peer.Categorical(spec.n, spec.shape, spec.device, spec.dtype)
    if isinstance(spec, Bounded):
        return peer.Bounded(spec.low, spec.high, spec.shape, spec.device, spec.dtype)
    if isinstance(spec, Unbounded):
        return peer.Unbounded(spec.shape, spec.device, spec.dtype)
    if isinstance(spec, NonTensor):
        return peer.NonTensor(spec.shape, spec.device, example_data=spec.example_data)
    raise TypeError(f"TorchRL has no spec like {spec}: expected one of ramet.specs")


def from_torchrl_spec(spec: peer.TensorSpec) -> Spec:
    """Return the ramet spec of the same shape, dtype, device and range.

    A spec that has no like here (one-hot, a range for each entry, ...) is wrapped, and unwrapped on the way back.

    >>> from_torchrl_spec(peer.Bounded(-1, 1, (2,)))
    Bounded(-1.0, 1.0, shape=(2,), dtype=float32, device='cpu')
    """
    kind = type(spec)
    if kind is peer.Composite:
        inner = {name: from_torchrl_spec(value) for name, value in spec.items()}
        return Composite(inner, shape=spec.shape, device=spec.device)
    if kind is peer.NonTensor:
        return NonTensor(spec.shape, spec.device, example_data=spec.example_data)
    if kind is peer.Categorical and spec.mask is None:
        return Categorical(spec.n, spec.shape, spec.device, spec.dtype)
    # Unbounded and Bounded make instances of subclasses, for whole numbers and for others.
    if isinstance(spec, peer.Unbounded):
        return Unbounded(spec.shape, spec.device, spec.dtype)
    if isinstance(spec, peer.Bounded):
        low, high = spec.space.low.unique(), spec.space.high.unique()
        if len(low) == len(high) == 1:
            return Bounded(low.item(), high.item(), spec.shape, spec.device, spec.dtype)
    return _Foreign(spec)


class _Foreign(Spec):
    """A spec of TorchRL that has no like in ramet."""

    def __init__(self, spec: peer.TensorSpec) -> None:
        self.spec, self.shape, self.dtype, self.device = spec, spec.shape, spec.dtype, spec.device

    def rand(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw a value. TorchRL draws from the global random state."""
        return self.spec.rand(shape)

    def zero(self, shape: Sequence[int] = ()) -> Any:
        """Make the plainest value."""
        return self.spec.zero(shape)

    def is_in(self, value: Any) -> bool:
        """Say whether `value` has the shape, dtype and range of the spec."""
        return bool(self.spec.is_in(value))

    def project(self, value: Any) -> Any:
        """Return the value of the spec that is nearest to `value`."""
        return self.spec.project(value)

    def to(self, dest: torch.device | str | torch.dtype) -> Self:
        """Return the spec on another device or of another dtype."""
        return type(self)(self.spec.to(dest))

    def expand(self, *shape: int | Sequence[int]) -> Self:
        """Return the spec with a larger shape."""
        return type(self)(self.spec.expand(*shape))


def composite_of(spec: peer.Composite) -> Composite:
    """Return the ramet specs of a whole TensorDict."""
    found = from_torchrl_spec(spec)
    if not isinstance(found, Composite):
        raise TypeError(
            f"expected a Composite of TorchRL, found {type(spec).__name__}: stacked specs have no like here"
        )
    return found


def changed(spec: peer.Composite, change: Callable[[Composite], Composite]) -> peer.Composite:
    """Return `spec` after `change`; entries that it leaves alone stay the very ones that they were."""
    before = composite_of(spec)
    after, result = change(before.clone()), spec.clone()
    for key in before.leaves():
        if key not in after:
            del result[key]
    for key in after.leaves():
        if key not in before or after[key] != before[key]:
            result[key] = to_torchrl_spec(after[key])
    return result
