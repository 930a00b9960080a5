"""Linear layers that were made ready once for many small steps: weights packed for oneDNN, or cast for autocast.

A decoding step multiplies a few rows with every weight of the model. On a CPU, oneDNN does so up to twice as fast with
weights in its own layout. Under autocast, weights that take no gradient are cast anew in each step, and all of them
once more whenever autocast is left; here they are cast once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

WORTH = 2**16
"""How many weights a layer must have to be made ready: a smaller one gains nothing that can be measured."""

Forward = Callable[[Tensor], Tensor]


class PackedLinears:
    """A context in which the linear layers of `model` run from copies of their weights that suit steps of `rows` rows.

    It may be entered again and again; the copies are made when it is made, and are as large as the weights, so make it
    anew when the weights have changed and drop it when the steps are done. Layers of other classes than `nn.Linear`
    itself, small ones, and those for which the machine has nothing better run as they are. Under `autocast` outputs
    have that type, as they would.

    The copies pass no gradient on: it raises `RuntimeError` where gradients are enabled.

    >>> model = nn.Sequential(nn.Linear(256, 512, bias=False))
    >>> packed = PackedLinears(model, rows=4)
    >>> with torch.no_grad(), packed:
    ...     model(torch.ones(4, 256)).shape
    torch.Size([4, 512])
    """

    def __init__(self, model: nn.Module, *, rows: int, autocast: torch.dtype | None = None) -> None:
        self._forwards: list[tuple[nn.Module, Forward]] = []
        with torch.no_grad():
            for module in model.modules():
                if type(module) is nn.Linear and module.weight.numel() >= WORTH:
                    forward = _ready(module, rows, autocast)
                    if forward is not None:
                        self._forwards.append((module, forward))
        self._entered = False

    def __len__(self) -> int:
        """Return how many layers run from copies."""
        return len(self._forwards)

    def __enter__(self) -> None:
        _refuse_gradients()
        if self._entered:
            raise RuntimeError("PackedLinears: expected one step at a time, found it entered while it is entered")
        self._entered = True
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward

    def __exit__(self, *_: object) -> None:
        self._entered = False
        for module, _forward in self._forwards:
            module.__dict__.pop("forward", None)


def _refuse_gradients() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("packed linear layers pass no gradient on, and gradients are enabled: use torch.no_grad()")


def _ready(module: nn.Linear, rows: int, autocast: torch.dtype | None) -> Forward | None:
    """Return what `module` computes, from a copy of its weights; None where its own way is as good."""
    dtype = module.weight.dtype if autocast is None else autocast
    if "forward" in module.__dict__:  # somebody else has changed what it does
        return None
    weight = module.weight.detach().to(dtype)
    bias = None if module.bias is None else module.bias.detach().to(dtype)
    if module.weight.device.type == "cpu" and packs(dtype):
        operators: Any = torch.ops.mkldnn
        packed = operators._reorder_linear_weight(weight.contiguous(), rows)
        return partial(_packed, operators._linear_pointwise.default, packed, bias, dtype)
    return None if module.weight.dtype == dtype else partial(_cast, weight, bias, dtype)


def _packed(multiply: Any, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name for it
    _refuse_gradients()
    output: Tensor = multiply(input if input.dtype == dtype else input.to(dtype), weight, bias, "none", [], "")
    return output


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name for it
    _refuse_gradients()
    return nn.functional.linear(input.to(dtype), weight, bias)


def pays(steps: int, rows: int, dtype: torch.dtype, autocast: torch.dtype | None) -> bool:
    """Return whether `steps` steps of up to `rows` rows repay the time that making layers of `dtype` ready takes.

    Packing takes as long as it saves in about ten steps, and less than that where weights are cast in each. One row at
    a time, float32 is faster as it is.

    >>> pays(32, 16, torch.float32, None), pays(32, 1, torch.float32, None), pays(8, 16, torch.float32, None)
    (True, False, False)
    """
    if autocast is not None and autocast != dtype:
        return steps >= 4
    return steps >= 16 and (rows >= 4 or dtype != torch.float32)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether torch can multiply with packed weights of `dtype` here, and gives what F.linear gives.

    The operators are private to torch: where they are missing, refuse, or are wrong on a small case, they are not used.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((3, 40), (24, 40), (24,)))
    operators: Any = torch.ops.mkldnn
    try:
        packed = operators._reorder_linear_weight(weight, len(rows))
        found = operators._linear_pointwise(rows, packed, bias, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    expected = nn.functional.linear(rows.double(), weight.double(), bias.double())
    noise = 1e-5 if dtype == torch.float32 else 0.1
    return found.dtype == dtype and bool(((found.double() - expected).abs() < noise).all())
