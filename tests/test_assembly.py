"""A model that is handed over is described so that the run's configuration loads again, or refused."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ramet.assembly import model_of, sampling_of
from ramet.config import ModelConfig, TrainConfig, dump, parse
from ramet.errors import ConfigError, ModelError
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.types import Sampling

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


# ---------------------------------------------------------------- how samples are drawn


def words() -> PreTrainedTokenizerFast:
    """Lower-case words that carry the space before them, and a special token; `stop` always takes several tokens."""
    vocabulary = ["<unk>", "▁st", "op", "▁end", "end", "▁", "=", "s", "t", "o", "p", "e", "n", "d"]
    merges = [("▁", "s"), ("▁s", "t"), ("o", "p"), ("e", "n"), ("en", "d"), ("▁", "end")]
    ids = {piece: n for n, piece in enumerate([*vocabulary, "▁s", "en"])}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<|done|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")  # type: ignore[no-untyped-call]


def test_the_settings_of_a_rollout_are_those_of_its_sampling() -> None:
    settings = config("rollout.temperature=0.7", "rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.1").rollout
    assert sampling_of(TOKENIZER, settings) == Sampling(2, 0.7, (), 5, 0.9, 0.1, ())


def test_a_stop_of_one_token_is_a_token_and_any_other_a_text() -> None:
    found = sampling_of(TOKENIZER, config("rollout.stop=['=', 'ab', '0', '\\n\\n']".replace("'", '"')).rollout)
    assert found.stop_ids == tuple(TOKENIZER.convert_tokens_to_ids(["=", "0"]))
    assert found.stop == ("ab", "\n\n")
    other = words()
    found = sampling_of(other, config("rollout.stop=['end', 'stop', '<|done|>']").rollout)
    assert found.stop_ids == (other.convert_tokens_to_ids("▁end"), other.convert_tokens_to_ids("<|done|>"))
    assert found.stop == ("stop",)


@pytest.mark.parametrize("stop", ["", "é", "aé"])
def test_a_stop_that_no_text_can_hold_is_refused(stop: str) -> None:
    """A character without a token would be found as `<unk>`, or never."""
    with pytest.raises(ConfigError, match=rf"rollout\.stop: '{stop}' is {len(stop)} tokens .* no text holds it"):
        sampling_of(TOKENIZER, config(f"rollout.stop=['{stop}']").rollout)


def test_a_stop_that_the_tokenizer_would_write_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'STOP' is 3 tokens .* no text holds it"):
        sampling_of(words(), config("rollout.stop=['STOP']").rollout)


def test_a_chat_template_is_for_a_tokenizer_that_is_loaded_by_name() -> None:
    settings = config("model={name='tiny-llama', chat_template='x.jinja'}")
    with pytest.raises(ConfigError, match=r"model\.chat_template is for a tokenizer that is loaded by name"):
        model_of("tiny-llama", TOKENIZER, settings)
    with pytest.raises(ConfigError, match=r"model\.chat_template is for loading a model by name"):
        model_of(model(), TOKENIZER, settings)
