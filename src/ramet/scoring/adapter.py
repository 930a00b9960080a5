"""A `peft` model with its adapter switched off: the reference of a policy that trains an adapter, without a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ramet.errors import ModelError


@dataclass(frozen=True, slots=True)
class WithoutAdapter:
    """What `without_adapter` returns: `score` takes it where it takes a reference."""

    model: nn.Module

    @contextlib.contextmanager
    def off(self) -> Iterator[nn.Module]:
        """Give the model, with its adapter off for as long as the context lasts.

        Whatever happens within, the adapter is on again afterwards, and the same weights are trained as before.
        """
        model: Any = self.model
        trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
        try:
            with model.disable_adapter():
                yield model
        finally:
            for parameter, requires_grad in trained.items():  # switching an adapter on makes all of it trained
                parameter.requires_grad_(requires_grad)


def without_adapter(model: nn.Module) -> WithoutAdapter:
    """Stand for the model under the adapter of `model`, a `peft` model: `score(model, forest, reference=...)` takes it.

    It is the same object, so it costs no memory; its log-probs equal those of a frozen copy of the base model bit for
    bit. Raises `ModelError` for a model without an adapter, and for one whose adapter is merged into its weights, where
    switching it off would leave rounding errors in them.
    """
    if not hasattr(model, "disable_adapter"):
        raise ModelError(
            f"{type(model).__name__} has no adapter that can be switched off",
            hint="wrap it with peft.get_peft_model, or give a second model as the reference",
        )
    if any(getattr(module, "merged", False) is True for module in model.modules()):
        raise ModelError(
            "the adapter is merged into the weights, and switching it off would round them",
            hint="call model.unmerge_adapter()",
        )
    return WithoutAdapter(model)
