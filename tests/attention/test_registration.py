"""What `Attending` does to a model and its configuration, and that nothing of it stays."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Gemma3Config, PhimoeConfig, PhimoeForCausalLM, PreTrainedModel

from ramet.attention.registration import NAME, Attending
from ramet.attention.tree import Rule
from ramet.errors import ModelError

Tiny = Callable[..., PreTrainedModel]
IDS = torch.tensor([[1, 5, 6, 7, 8, 9]])


class Recording:
    """An attention that answers with what `say` makes of the values, and keeps what it was told."""

    def __init__(self, say: float = 0.0) -> None:
        self.say = say
        self.calls: list[dict[str, Any]] = []

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        self.calls.append({"layer": layer, "shapes": shapes, "rule": rule})
        return query.new_full((query.shape[1], query.shape[0], value.shape[2]), self.say)


def state(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Every configuration that a module of the model has, all its attributes included."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [(config._attn_implementation, dict(vars(config))) for config in configs.values()]


def run(model: nn.Module, ids: Tensor = IDS, **options: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return logits


@pytest.fixture
def llama(tiny: Tiny) -> PreTrainedModel:
    return tiny("rotary", torch.float32)


def test_each_layer_hands_over_its_queries_keys_and_values(llama: PreTrainedModel) -> None:
    attention = Recording()
    with Attending(llama, attention):
        run(llama)
    assert [call["layer"].layer_idx for call in attention.calls] == [0, 1]
    for call in attention.calls:
        assert call["shapes"] == ((4, 6, 8), (2, 6, 8), (2, 6, 8))
        assert call["rule"] == Rule(pytest.approx(8**-0.5))


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_a_model_is_what_it_was_bit_for_bit(llama: PreTrainedModel, before: str) -> None:
    llama.set_attn_implementation(before)
    configs, expected = state(llama), run(llama)
    with Attending(llama, Recording()):
        assert not torch.equal(run(llama), expected)
        assert llama.config._attn_implementation == NAME
    assert state(llama) == configs
    assert torch.equal(run(llama), expected)


def test_put_back_when_the_body_raises(llama: PreTrainedModel) -> None:
    configs, expected = state(llama), run(llama)
    with pytest.raises(KeyError), Attending(llama, Recording()):
        raise KeyError("anything")
    assert state(llama) == configs
    assert torch.equal(run(llama), expected)


class Failing(Recording):
    """Raises in the middle of a forward pass."""

    def attend(self, *_: Any, **__: Any) -> Tensor:
        raise ZeroDivisionError


def test_put_back_when_the_attention_raises(llama: PreTrainedModel) -> None:
    configs, expected = state(llama), run(llama)
    with pytest.raises(ZeroDivisionError), Attending(llama, Failing()):
        run(llama)
    assert state(llama) == configs
    assert torch.equal(run(llama), expected)


def test_one_inside_another(llama: PreTrainedModel) -> None:
    """The inner one is used inside, the outer one again after it, also where the inner body raised."""
    configs = state(llama)
    outer, inner = Recording(1.0), Recording(2.0)
    with Attending(llama, outer):
        run(llama)
        with Attending(llama, inner):
            run(llama)
        with pytest.raises(KeyError), Attending(llama, inner):
            raise KeyError
        assert (len(outer.calls), len(inner.calls)) == (2, 2)
        run(llama)
        assert (len(outer.calls), len(inner.calls)) == (4, 2)
    assert state(llama) == configs


def test_the_same_one_entered_in_itself_and_again(llama: PreTrainedModel) -> None:
    configs, attention = state(llama), Recording()
    attending = Attending(llama, attention)
    for _ in range(2):
        with attending, attending, attending:
            run(llama)
        assert state(llama) == configs
    assert len(attention.calls) == 4


def test_entered_anew_after_an_outer_one_has_gone(llama: PreTrainedModel) -> None:
    """As recomputation does: the forward pass is over, another attention is in use, and the first comes back."""
    first, second = Recording(1.0), Recording(2.0)
    attending, other = Attending(llama, first), Attending(llama, second)
    with attending:
        run(llama)
    with other:
        with attending:
            run(llama)
        run(llama)
    assert (len(first.calls), len(second.calls)) == (4, 2)
    assert llama.config._attn_implementation != NAME


def test_two_models_of_one_configuration(tiny: Tiny) -> None:
    """Each is answered by its own attention inside its own context, and neither afterwards."""
    first = tiny("rotary", torch.float32)
    second = type(first)(first.config).eval()
    assert second.config is first.config
    configs, expected = state(first), (run(first), run(second))
    one, two = Recording(1.0), Recording(2.0)
    with Attending(first, one):
        with Attending(second, two):
            run(second)
        run(first)
    assert (len(one.calls), len(two.calls)) == (2, 2)
    assert state(first) == configs
    assert torch.equal(run(first), expected[0])
    assert torch.equal(run(second), expected[1])


def test_a_copy_made_inside_is_free_of_the_original(llama: PreTrainedModel) -> None:
    attention = Recording()
    with Attending(llama, attention):
        double = copy.deepcopy(llama)
    assert double.config is not llama.config
    llama.set_attn_implementation("eager")
    assert llama.config._attn_implementation == "eager"
    run(llama)
    assert attention.calls == []


def test_two_threads_with_a_model_each(tiny: Tiny) -> None:
    """Each is answered by its own attention, however their passes fall between each other."""
    models = [tiny("rotary", torch.float32, seed) for seed in (1, 2)]
    expected = []
    for number, model in enumerate(models):
        with Attending(model, Recording(1.0 + number)):
            expected.append(run(model))
    barrier = threading.Barrier(2)
    faults: list[object] = []

    def work(number: int) -> None:
        attention = Recording(1.0 + number)
        try:
            for _ in range(10):
                barrier.wait(timeout=20)
                with Attending(models[number], attention):
                    barrier.wait(timeout=20)
                    found = run(models[number])
                if not torch.equal(found, expected[number]):
                    faults.append(number)
            if len(attention.calls) != 20:
                faults.append(len(attention.calls))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert all(model.config._attn_implementation != NAME for model in models)


def attend(module: nn.Module, rows: int = 1, **options: Any) -> Any:
    """Call what is registered as a layer does."""
    q, k, v = torch.zeros(rows, 4, 6, 8), torch.zeros(rows, 2, 6, 8), torch.zeros(rows, 2, 6, 8)
    return AttentionInterface()[NAME](module, q, k, v, options.pop("attention_mask", None), **options)


def test_what_is_refused(llama: PreTrainedModel) -> None:
    """A mask, several rows, dropout and what nobody knows: each by name."""
    layer = llama.model.layers[0].self_attn
    attention = Recording()
    with Attending(llama, attention):
        with pytest.raises(ModelError, match="LlamaAttention: expected one row without a mask, found 2 rows without"):
            run(llama, IDS.expand(2, -1))
        with pytest.raises(ModelError, match="found 1 rows with a mask"):
            attend(layer, attention_mask=torch.zeros(1, 1, 6, 6))
        with pytest.raises(ModelError, match=r"dropout of 0.1[\s\S]*model.eval"):
            attend(layer, dropout=0.1)
        with pytest.raises(ModelError, match=r"position_bias.*which tree attention does not know"):
            attend(layer, position_bias=torch.zeros(1))
        with pytest.raises(ModelError, match="both sides"):
            attend(layer, is_causal=False)
    assert attention.calls == []


def test_what_is_let_by(llama: PreTrainedModel) -> None:
    """Arguments that are None, and those that say nothing about who attends to whom."""
    layer = llama.model.layers[0].self_attn
    attention = Recording()
    with Attending(llama, attention):
        attend(layer, position_bias=None, position_ids=torch.arange(6)[None], use_cache=False, is_causal=True)
    assert len(attention.calls) == 1


def test_what_a_layer_says_is_handed_on(llama: PreTrainedModel) -> None:
    attention, sinks = Recording(), torch.zeros(4)
    with Attending(llama, attention):
        output, weights = attend(
            llama.model.layers[0].self_attn, scaling=0.25, sliding_window=7, softcap=2.0, s_aux=sinks
        )
    assert output.shape == (1, 6, 4, 8)
    assert weights is None
    [call] = attention.calls
    rule = call["rule"]
    assert (rule.scale, rule.window, rule.softcap) == (0.25, 7, 2.0)
    assert rule.sinks is sinks


def test_training_with_dropout_in_the_attention_is_refused(tiny: Tiny) -> None:
    model = tiny("rotary", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with Attending(model, Recording()):
        with pytest.raises(ModelError, match="dropout"):
            run(model.train())
        run(model.eval())


def test_a_configuration_inside_can_still_be_shown(llama: PreTrainedModel) -> None:
    """Printed, compared and written down, as a logger or a checkpoint in a callback may do."""
    with Attending(llama, Recording()):
        assert "LlamaConfig" in repr(llama.config)
        assert "_ramet_attention" not in llama.config.to_json_string()
        assert "_ramet_attention" not in llama.config.to_dict()


def test_a_model_without_configuration_is_left_as_it_is() -> None:
    model = nn.Linear(2, 2)
    with Attending(model, Recording()):
        assert model(torch.ones(1, 2)).shape == (1, 2)


def test_parts_of_a_configuration_come_back_each_as_it_was() -> None:
    """Setting a whole sets its parts too, those that no module carries included."""
    config = Gemma3Config()
    config._attn_implementation = "sdpa"
    config.vision_config._attn_implementation = "eager"
    model, inner = nn.Module(), nn.Linear(1, 1)
    model.config, inner.config = config, config.text_config
    model.inner = inner
    with Attending(model, Recording()):
        assert config.text_config._attn_implementation == NAME
    found = (config, config.text_config, config.vision_config)
    assert [part._attn_implementation for part in found] == ["sdpa", "sdpa", "eager"]


@pytest.mark.parametrize("window", [4, None])
def test_a_window_that_is_in_the_mask_alone_is_refused(window: int | None) -> None:
    """Else the layer would silently see further than it may."""
    sizes = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    ids = {"bos_token_id": None, "eos_token_id": None}
    model = PhimoeForCausalLM(PhimoeConfig(**sizes, **heads, **ids, sliding_window=window)).eval()
    attention = Recording()
    with Attending(model, attention):
        if window is None:
            model.model(input_ids=IDS, use_cache=False)
        else:
            with pytest.raises(ModelError, match="window"):
                model.model(input_ids=IDS, use_cache=False)
    assert len(attention.calls) == (window is None)
