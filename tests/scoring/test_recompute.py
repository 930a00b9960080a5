"""`recomputed`: the same numbers, less kept, and a model left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.scoring import zoo
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ramet.errors import ModelError
from ramet.scoring.recompute import recomputed

IDS = torch.randint(3, zoo.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
NAMES = ["Llama", "GPT-2", "GPT-NeoX", "OPT", "Gemma 3", "Mixtral", "GPT-OSS"]


@pytest.fixture
def llama() -> PreTrainedModel:
    return zoo.named("Llama").build()


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def loss(model: nn.Module) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits.square().mean()


def slopes(model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss(model), list(model.parameters())))


@contextlib.contextmanager
def counted() -> Iterator[dict[int, int]]:
    """Count the numbers that the graph keeps, each storage once."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_the_same_bit_for_bit(name: str) -> None:
    model = zoo.named(name).build()
    expected, true_slopes = loss(model).detach(), slopes(model)
    with recomputed(model, contextlib.nullcontext):
        assert torch.equal(loss(model).detach(), expected)
        found = slopes(model)
    assert all(torch.equal(mine, true) for mine, true in zip(found, true_slopes, strict=True))


def test_the_backward_pass_may_come_after_it(llama: PreTrainedModel) -> None:
    """A loss is made inside and backward runs outside, as `score` does it."""
    expected = slopes(llama)
    with recomputed(llama, contextlib.nullcontext):
        value = loss(llama)
    found = torch.autograd.grad(value, list(llama.parameters()))
    assert all(torch.equal(mine, true) for mine, true in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_less_is_kept(name: str) -> None:
    """Of each layer its input alone: at most a third of what is kept otherwise, weights left out."""
    model = zoo.named(name).build()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with counted() as plain:
        whole = loss(model)
    with counted() as kept, recomputed(model, contextlib.nullcontext):
        lean = loss(model)
    sizes = [sum(size for place, size in each.items() if place not in weights) for each in (plain, kept)]
    assert torch.equal(whole.detach(), lean.detach())
    assert sizes[1] < sizes[0] / 3


def test_each_layer_is_computed_again_in_its_context(llama: PreTrainedModel) -> None:
    """Once per layer going forward, once more per layer going back, and never left open."""
    trace: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        trace.append("in")
        try:
            yield
        finally:
            trace.append("out")

    with recomputed(llama, around):
        value = loss(llama)
        forward = len(trace)
    value.backward()
    assert forward == 2 * len(layers(llama))
    assert trace == ["in", "out"] * (2 * len(layers(llama)))


def test_the_model_is_left_as_it_was(llama: PreTrainedModel) -> None:
    before = [dict(vars(layer)) for layer in layers(llama)]
    with recomputed(llama, contextlib.nullcontext):
        assert all("forward" in vars(layer) for layer in layers(llama))
    assert [dict(vars(layer)) for layer in layers(llama)] == before
    with pytest.raises(KeyError), recomputed(llama, contextlib.nullcontext):
        raise KeyError
    assert [dict(vars(layer)) for layer in layers(llama)] == before


def test_a_forward_that_somebody_else_put_there_is_kept_and_called(llama: PreTrainedModel) -> None:
    calls: list[int] = []
    layer: Any = layers(llama)[0]
    own: Callable[..., Any] = layer.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    layer.forward = counting
    with recomputed(llama, contextlib.nullcontext):
        loss(llama).backward()
    assert vars(layer)["forward"] is counting
    assert calls == [1, 1]


def test_one_inside_another(llama: PreTrainedModel) -> None:
    expected = slopes(llama)
    with recomputed(llama, contextlib.nullcontext), recomputed(llama, contextlib.nullcontext):
        found = slopes(llama)
    assert all(torch.equal(mine, true) for mine, true in zip(found, expected, strict=True))
    assert not any("forward" in vars(layer) for layer in layers(llama))


def test_the_global_random_state_is_left_alone(llama: PreTrainedModel) -> None:
    before = torch.get_rng_state()
    with recomputed(llama, contextlib.nullcontext):
        loss(llama).backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_under_autocast_layers_are_computed_again_in_its_dtype(llama: PreTrainedModel) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss(llama)
        with recomputed(llama, contextlib.nullcontext):
            found = loss(llama)
    assert torch.equal(found.detach(), expected.detach())
    true_slopes = torch.autograd.grad(expected, list(llama.parameters()))
    for mine, true in zip(torch.autograd.grad(found, list(llama.parameters())), true_slopes, strict=True):
        assert torch.equal(mine, true)


def test_a_model_without_such_layers_is_refused() -> None:
    with (
        pytest.raises(ModelError, match=r"Linear has no layers[\s\S]*leave gradient checkpointing off"),
        recomputed(nn.Linear(2, 2), contextlib.nullcontext),
    ):
        pass
