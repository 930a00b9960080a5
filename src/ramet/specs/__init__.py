"""What a key of a TensorDict may hold: shape, dtype, range, and how to make up such a value.

A size of -1 in a shape is ragged: any length fits, and a made-up value has length 1. Random values come from the
generator that is passed in; without one, from a fresh generator. Global random state is never touched.
"""

from __future__ import annotations

from ramet.specs.composite import Composite
from ramet.specs.leaf import Bounded, Categorical, KeyPath, NonTensor, Spec, TensorSpec, Unbounded, describe

__all__ = [
    "Bounded",
    "Categorical",
    "Composite",
    "KeyPath",
    "NonTensor",
    "Spec",
    "TensorSpec",
    "Unbounded",
    "describe",
]
