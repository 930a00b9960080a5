"""The tiny tokenizer loses nothing, and the tiny model is a function of its seed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ramet.errors import ConfigError
from ramet.models.tiny import CHARACTERS, tiny_llama, tiny_tokenizer


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


TEXT = st.one_of(st.text(CHARACTERS), st.sampled_from(["a<eos>b", "<pad>", " <bos>", "a , b .", "don 't", "\n\n "]))


@settings(deadline=None, max_examples=60)
@given(TEXT)
def test_text_comes_back_exactly_one_token_a_character(text: str) -> None:
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert min(ids, default=4) > 3, "a special token came out of plain text"
    assert tokenizer().decode(ids) == text
    assert tokenizer().decode([*ids, tokenizer().eos_token_id], skip_special_tokens=True) == text


def test_special_tokens_are_distinct_and_a_text_begins_with_bos() -> None:
    t = tokenizer()
    assert (t.pad_token_id, t.bos_token_id, t.eos_token_id, t.unk_token_id) == (0, 1, 2, 3)
    assert t("")["input_ids"] == [1]
    assert len(t) == len(CHARACTERS) + 4 == 100


def test_an_unknown_character_is_one_unknown_token() -> None:
    assert tokenizer()("aüb", add_special_tokens=False)["input_ids"][1] == tokenizer().unk_token_id


@settings(deadline=None, max_examples=30)
@given(st.lists(TEXT, min_size=1, max_size=3))
def test_batches_pad_on_the_left(texts: list[str]) -> None:
    batch = tokenizer()(texts, padding=True)
    for ids, mask, text in zip(batch["input_ids"], batch["attention_mask"], texts, strict=True):
        assert sum(mask) == len(text) + 1
        assert mask == sorted(mask)
        assert tokenizer().decode(ids[-len(text) :] if text else []) == text


def test_saving_and_loading_changes_nothing(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ["27+58=", "a , b\n", "x<eos>y", "", "ü"]:
        assert loaded(text)["input_ids"] == tokenizer()(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == tokenizer().decode(tokenizer()(text)["input_ids"])
    assert loaded.get_vocab() == tokenizer().get_vocab()
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)


def test_the_weights_are_a_function_of_the_seed_and_the_global_random_state_stays() -> None:
    state = torch.get_rng_state()
    one = tiny_llama(tokenizer(), seed=3, layers=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    again, other = tiny_llama(tokenizer(), seed=3, layers=1), tiny_llama(tokenizer(), seed=4, layers=1)
    for name, weight in one.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert not torch.equal(other.model.embed_tokens.weight, one.model.embed_tokens.weight)


def test_the_model_knows_the_tokenizers_special_tokens() -> None:
    model = tiny_llama(tokenizer())
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert model.config.vocab_size == len(tokenizer())
    assert not model.training


def test_the_default_is_small_and_the_shape_is_what_was_asked_for() -> None:
    assert sum(parameter.numel() for parameter in tiny_llama(tokenizer()).parameters()) < 2_000_000
    model = tiny_llama(tokenizer(), hidden_size=32, layers=3, heads=2, intermediate_size=40, context=17)
    assert model.config.max_position_embeddings == 17
    assert len(model.model.layers) == 3
    assert tuple(model.model.layers[0].mlp.up_proj.weight.shape) == (40, 32)
    assert model.model.layers[0].self_attn.head_dim == 16
    assert model(torch.tensor([[1, 5, 6]])).logits.shape == (1, 3, 100)


def test_the_initial_scale_is_what_was_asked_for() -> None:
    for scale in (0.02, 0.2):
        weight = tiny_llama(tokenizer(), layers=1, initializer_range=scale).model.layers[0].mlp.up_proj.weight
        # 128 * 256 draws: the standard deviation of their standard deviation is 0.4%; six of those.
        assert weight.std().item() == pytest.approx(scale, rel=0.024)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers: expected a whole number from 1 on, found 0"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"heads": True}, "heads"),
        ({"context": 2.5}, "context"),
        ({"hidden_size": 100, "heads": 3}, "hidden_size = 100 does not divide(.|\n)*multiple of 6"),
        ({"hidden_size": 4, "heads": 4}, "multiple of 8"),
        ({"initializer_range": 0}, "initializer_range"),
        ({"initializer_range": "x"}, "initializer_range"),
    ],
)
def test_a_shape_that_can_not_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_llama(tokenizer(), **options)
