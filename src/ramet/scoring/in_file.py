"""A frozen copy of a model whose weights lie in a file, and in memory only while it scores."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ramet.errors import ModelError


@dataclass(frozen=True, eq=False)
class InFile:
    """What `in_file` returns: `score` takes it where it takes a reference."""

    model: nn.Module
    folder: Path
    names: dict[str, list[tuple[nn.Module, str]]]
    stamp: list[tuple[str, int, int]]

    @contextlib.contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """Give the model, with its weights in place for as long as the context lasts.

        They are mapped from the file, not read: the system loads what is used, and may drop it where memory is scarce.
        Raises `ModelError` where the files are not those that there were.
        """
        if not any(parameter.is_meta for parameter in self.model.parameters()):  # lent already
            yield self.model
            return
        if _stamp(self.folder) != self.stamp:
            raise ModelError(
                f"the weights in {self.folder} were moved, removed or written again since the reference was made",
                hint="put them back and resume, or begin again",
            )
        with contextlib.ExitStack() as stack:
            try:
                for name, tensor in _tensors(self.folder, stack):
                    self._put(name, nn.Parameter(tensor, requires_grad=False))
                yield self.model
            finally:
                for name, parameter in [*self.model.named_parameters()]:
                    self._put(name, _absent(parameter))

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        """Put a weight where it belongs, a tied one in each of its places."""
        for module, key in self.names.get(name, ()):
            module._parameters[key] = parameter


def in_file(model: nn.Module, folder: Path) -> InFile:
    """Stand for `model` as it is now, whose weights `folder` holds: `score(model, forest, reference=...)` takes it.

    It needs none of the memory of a copy between two uses. `folder` is what `model.save_pretrained` wrote: one or more
    `.safetensors` files, which must stay as they are. `model` itself may be trained on. Raises `ModelError` where the
    files do not hold each weight of `model` under its own name, bit for bit, and where it is not on the CPU.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     reference = in_file(model, Path(folder))
    ...     with reference.lent() as lent:
    ...         torch.equal(lent.lm_head.weight, model.lm_head.weight)
    True
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise ModelError("weights can be mapped from a file on the CPU alone", hint="use a copy of the model")
    folder = Path(folder).resolve()
    there = dict(model.named_parameters())
    named = {id(parameter): name for name, parameter in there.items()}
    frozen = copy.deepcopy(model, {id(parameter): _absent(parameter) for parameter in there.values()})
    names: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in there}
    for old, new in zip(model.modules(), frozen.modules(), strict=True):
        for key, parameter in old._parameters.items():
            if parameter is not None:
                names[named[id(parameter)]].append((new, key))
    found = set()
    stamp = _stamp(folder)
    with contextlib.ExitStack() as stack:
        buffers = dict(model.named_buffers())  # small, and copied
        for name, tensor in _tensors(folder, stack):
            if name in buffers:
                continue
            here = there.get(name)
            if here is None or not _same_bits(here.detach(), tensor):
                raise ModelError(f"{folder} holds a weight {name!r} that is not one of {type(model).__name__}")
            found.add(name)
    if found != set(there):
        raise ModelError(f"{folder} does not hold {sorted(set(there) - found)[0]!r} of {type(model).__name__}")
    return InFile(frozen.eval(), folder, names, stamp)


def _stamp(folder: Path) -> list[tuple[str, int, int]]:
    """Return the name, the size and the time of each file."""
    files = [(path, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return [(path.name, found.st_size, found.st_mtime_ns) for path, found in files]


def _tensors(folder: Path, stack: contextlib.ExitStack) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of all files in `folder`, which stay open as long as `stack`."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except Exception as error:  # the library's own class is not a public one
            raise ModelError(f"{path} can not be read as safetensors: {error}") from error
        for name in opened.keys():  # noqa: SIM118  # it is no dictionary
            yield name, opened.get_tensor(name)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))  # NaN is equal to itself


def _absent(parameter: Tensor) -> nn.Parameter:
    """Return a parameter like this one that has no memory."""
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
