"""A peft model's own base as the reference: it equals a frozen copy bit for bit, and the adapter is on again after."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.scoring import zoo
from torch import nn

from ramet.errors import ModelError
from ramet.scoring import score
from ramet.scoring.adapter import without_adapter

peft = pytest.importorskip("peft")

# What peft asks of transformers is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TARGETS = {"Llama": ["q_proj", "v_proj", "down_proj"], "LFM2": ["q_proj", "in_proj"], "GPT-2": ["c_attn"]}


def adapted(name: str, **options: Any) -> tuple[nn.Module, Any]:
    """Return the base model, a copy, and a model with an adapter that does something."""
    base = zoo.named(name).build()
    config = peft.LoraConfig(
        r=2, target_modules=TARGETS[name], lora_dropout=0.5, fan_in_fan_out=name == "GPT-2", **options
    )
    with torch.random.fork_rng(devices=[]):  # peft draws from the global state
        model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return base, model


@pytest.mark.parametrize("name", list(TARGETS))
def test_it_equals_a_frozen_copy_bit_for_bit(name: str) -> None:
    forest = zoo.two_level_forest()
    base, model = adapted(name)
    base.requires_grad_(False)
    alone = score(model, forest)
    beside = score(model, forest, reference=without_adapter(model))
    copied = score(model, forest, reference=base)
    assert beside.engine == zoo.named(name).shares
    assert beside.reference_log_probs is not None
    assert copied.reference_log_probs is not None
    kept = ~alone.log_probs.isnan()
    assert torch.equal(beside.reference_log_probs[kept], copied.reference_log_probs[kept])
    assert torch.equal(beside.log_probs[kept], alone.log_probs[kept])
    assert not beside.reference_log_probs.requires_grad
    assert float((beside.reference_log_probs - beside.log_probs.detach())[kept].abs().max()) > 0.1


def test_the_gradient_is_that_of_the_adapter_alone() -> None:
    """And the same with the reference beside it; value 1e-5, gradient 1e-5 relative, float32 against float64."""
    forest = zoo.two_level_forest()
    _, model = adapted("Llama")
    everything: Any = copy.deepcopy(model)
    expected = zoo.oracle(everything.requires_grad_(True), forest)
    found = score(model, forest, reference=without_adapter(model))
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    gradients = torch.autograd.grad(zoo.weighted(found.log_probs), list(trained.values()))
    right = {name: expected.gradients[name] for name in trained}
    assert zoo.gradient_error(dict(zip(trained, gradients, strict=True)), right) < 1e-5


def state(model: Any) -> list[Any]:
    layers = [module for module in model.modules() if hasattr(module, "disable_adapters")]
    assert layers
    return [
        [module.disable_adapters for module in layers],
        [module.active_adapters for module in layers],
        {name: one.requires_grad for name, one in model.named_parameters()},
        [module.training for module in model.modules()],
    ]


def test_the_adapter_is_on_again_even_when_the_forward_raises() -> None:
    forest = zoo.two_level_forest()
    _, model = adapted("Llama")
    score(model, forest)  # the check has been made
    before = state(model)
    handle = model.get_base_model().model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(without_adapter(model), forest)
    handle.remove()
    assert state(model) == before


@pytest.mark.parametrize("frozen", ["all", "one"])
def test_what_was_frozen_of_the_adapter_stays_frozen(frozen: str) -> None:
    _, model = adapted("Llama")
    lora = [one for name, one in model.named_parameters() if "lora" in name]
    for parameter in lora if frozen == "all" else lora[:1]:
        parameter.requires_grad_(False)
    before = state(model)
    score(model, zoo.two_level_forest(), reference=without_adapter(model))
    assert state(model) == before


def test_a_reference_in_training_mode_is_refused_as_dropout_is_random() -> None:
    _, model = adapted("Llama")
    model.train()
    with pytest.raises(ModelError, match="reference is in training mode"):
        score(zoo.named("Llama").build(), zoo.two_level_forest(), reference=without_adapter(model))
    assert model.training


def test_it_is_scored_alone_without_gradient() -> None:
    """As a learner does it that is given a reference; it would be the wrong model by the time of the backward pass."""
    forest = zoo.two_level_forest()
    base, model = adapted("Llama")
    found = score(without_adapter(model), forest).log_probs
    assert not found.requires_grad
    with torch.no_grad():
        assert torch.equal(found.nan_to_num(), score(base, forest).log_probs.nan_to_num())


def test_what_has_no_adapter_or_has_merged_it_is_refused() -> None:
    base, model = adapted("Llama")
    with pytest.raises(ModelError, match="no adapter that can be switched off"):
        without_adapter(base)
    model.merge_adapter()
    with pytest.raises(ModelError, match="merged"):
        without_adapter(model)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_an_adapter_that_puts_tokens_before_the_prompt_is_scored_by_rows() -> None:
    """Its tokens are not those of the forest: no way of sharing knows of them; value 1e-5, float32."""
    forest = zoo.two_level_forest()
    base = zoo.named("Llama").build()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    with pytest.warns(UserWarning, match="scored row by row"):
        found = score(model, forest, reference=without_adapter(model))
    assert found.engine == "rows"
    assert found.reference_log_probs is not None
    expected = zoo.oracle(base, forest).log_probs
    kept = ~expected.isnan()
    assert float((found.reference_log_probs - expected)[kept].abs().max()) < 1e-5
