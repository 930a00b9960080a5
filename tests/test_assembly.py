"""A model that is handed over is described so that the run's configuration loads again, or refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from ramet.assembly import model_of
from ramet.config import ModelConfig, TrainConfig, dump, parse
from ramet.errors import ConfigError, ModelError
from ramet.models.tiny import tiny_llama, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def config(*overrides: str) -> TrainConfig:
    return parse("steps = 1", ["rollout.max_new_tokens=2", "optimizer.learning_rate=1e-3", *overrides])


def model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return tiny_llama(TOKENIZER, hidden_size=8, layers=1, heads=2, intermediate_size=8).to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("section", [[], ["model={name='mine', device='cpu'}"]], ids=["no section", "a section"])
def test_a_model_that_is_handed_over_is_described_and_loads_back(section: list[str], dtype: str) -> None:
    settings = config(*section)
    _, _, described = model_of(model(getattr(torch, dtype)), TOKENIZER, settings)
    name = "mine" if section else "LlamaForCausalLM"
    assert described == ModelConfig.model_validate({"name": name, "dtype": dtype, "device": "cpu"})
    whole = settings.model_copy(update={"model": described})
    assert parse(dump(whole)) == whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_in_another_precision_are_refused_even_if_it_is_one_of_them(dtype: torch.dtype) -> None:
    mixed = model()
    mixed.lm_head.to(dtype)
    name = str(dtype).removeprefix("torch.")
    for handed in (model(dtype), mixed):
        with pytest.raises(ModelError, match=f"float32 or bfloat16: found .* in {name}") as caught:
            model_of(handed, TOKENIZER, config())
        assert "model.float()" in str(caught.value.hint)
    assert model_of(model(dtype).to(torch.float32), TOKENIZER, config())[2].dtype == "float32"


def test_autocast_over_weights_that_turn_out_to_be_bfloat16_is_refused() -> None:
    """The section alone does not contradict itself: what the weights are in is the model's to say."""
    settings = config("model={name='mine', autocast='bfloat16'}")
    assert model_of(model(), TOKENIZER, settings)[2].autocast == "bfloat16"
    with pytest.raises(ConfigError, match=r'over float32 weights: found model\.dtype = "bfloat16", in the settings of'):
        model_of(model(torch.bfloat16), TOKENIZER, settings)


def test_a_device_that_no_configuration_can_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'model\.device: expected pattern .* found "meta"'):
        model_of(model().to("meta"), TOKENIZER, config())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dtype='bfloat16'", "model.dtype is 'bfloat16', and the model that was given has 'float32'"),
        ("device='cuda'", "model.device is 'cuda', and the model that was given has 'cpu'"),
        ("attention='eager'", "model.attention is for loading a model by name"),
    ],
)
def test_a_section_that_speaks_of_another_model_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_of(model(), TOKENIZER, config(f"model={{name='mine', {setting}}}"))
    assert message in caught.value.message
