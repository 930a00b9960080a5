"""A forest as a file of safetensors, with a digest of all that is in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path as File

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.content import tensor_bytes

DIGEST = "digest"


def save_file(arrays: Mapping[str, Tensor], path: File) -> None:
    """Write a file, whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    whole = {name: array.contiguous() for name, array in arrays.items()}
    safetensors_torch.save_file({**whole, DIGEST: _digest(whole)}, unfinished)
    os.replace(unfinished, path)


def load_file(path: File) -> dict[str, Tensor]:
    """Read the arrays of a file; raise `ForestError` where they are not those that were written."""
    try:
        arrays: dict[str, Tensor] = safetensors_torch.load_file(path)
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError, MemoryError) as error:
        raise ForestError(f"{path} is not a whole safetensors file: {error}") from error
    found = arrays.pop(DIGEST, None)
    if found is None or "about" not in arrays:
        raise ForestError(f"{path} is not the file of a forest, with its digest: found {sorted(arrays)[:8]}")
    if not torch.equal(found, _digest(arrays)):
        raise ForestError(f"{path} is damaged: its digest is not that of the arrays in it", hint="write it again")
    return arrays


def _digest(arrays: Mapping[str, Tensor]) -> Tensor:
    """Return SHA-256 over the name, dtype, shape and bytes of every array, in the order of names: uint8 [32]."""
    running = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        running.update(f"{name!r} {array.dtype} {list(array.shape)}\n".encode("utf-8", "surrogatepass"))
        running.update(tensor_bytes(array))
    return torch.from_numpy(np.frombuffer(running.digest(), dtype=np.uint8).copy())
