"""head(body(x)) is what the stock model says, and the model is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tests.scoring import zoo
from torch import Tensor, nn
from transformers import PreTrainedModel

from ramet.errors import ModelError
from ramet.scoring.halves import Halves

IDS = torch.randint(3, zoo.VOCABULARY, (1, 13), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(13)[None]


def tied() -> Any:
    config = zoo.llama()
    config.tie_word_embeddings = True
    return config


def opt_projected() -> Any:
    """Embeddings narrower than the layers: OPT projects in its body, on the way in and on the way out."""
    config = zoo.opt()
    config.word_embed_proj_dim = 16
    return config


MODELS = [
    *(zoo.named(name) for name in ("Llama", "GPT-2", "GPT-NeoX", "OPT", "Phi", "Cohere", "Cohere2", "Granite")),
    *(zoo.named(name) for name in ("Gemma 2", "Gemma 3", "Mixtral", "GPT-OSS", "DeepSeek-V3", "SmolLM3", "StableLM")),
    zoo.Architecture("Llama tied", tied, "flat"),
    zoo.Architecture("OPT projected", opt_projected, "flat"),
]


def stock(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@pytest.fixture
def llama() -> PreTrainedModel:
    return zoo.named("Llama").build()


@pytest.mark.parametrize("architecture", MODELS, ids=zoo.names(MODELS))
def test_the_halves_make_the_whole(architecture: zoo.Architecture) -> None:
    """All rows of the head, some of them in another order, and one: within 1e-6 of the largest logit."""
    model = architecture.build()
    with torch.no_grad():
        expected = stock(model)
        halves = Halves(model)
        hidden = halves.body(IDS, POSITIONS)
        assert hidden.shape[:2] == IDS.shape
        tolerance = 1e-6 * float(expected.abs().max())
        for some in ([*range(13)], [7, 0, 12], [5]):
            found = halves.head(hidden[0, some])
            assert found.shape == (len(some), zoo.VOCABULARY)
            torch.testing.assert_close(found, expected[0, some], rtol=0, atol=tolerance)
        assert torch.equal(stock(model), expected)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Cohere", "Granite"])
def test_gradients_of_both_halves(name: str) -> None:
    """The head's and, through the hidden states, the body's; what is done to logits, a cap or a scale, is in them."""
    model = zoo.named(name).build().double()
    expected = torch.autograd.grad(stock(model)[0, 3:].square().sum(), list(model.parameters()))
    halves = Halves(model)
    hidden = halves.body(IDS, POSITIONS)[0]
    found = torch.autograd.grad(halves.head(hidden[3:]).square().sum(), list(model.parameters()))
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6 * float(true.abs().max()))


def test_positions_are_those_that_are_given(llama: PreTrainedModel) -> None:
    """Only distances count in a rotary model, so a row moved by 20 is the same and one torn apart is not."""
    halves = Halves(llama)
    with torch.no_grad():
        expected = halves.body(IDS, POSITIONS)
        torch.testing.assert_close(halves.body(IDS, POSITIONS + 20), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(halves.body(IDS, POSITIONS * 3), expected, atol=1e-2)


def test_a_model_that_is_called_around_it(llama: PreTrainedModel) -> None:
    """The whole model between body and head, and two pairs of halves, do not disturb each other."""
    one, two = Halves(llama), Halves(llama)
    with torch.no_grad():
        expected = stock(llama)
        hidden = one.body(IDS, POSITIONS)
        stock(llama, IDS[:, :4])
        two.body(IDS[:, :5], POSITIONS[:, :5])
        assert torch.equal(one.head(hidden[0]), expected[0])


class Breaking(nn.Linear):
    """A head that fails."""

    def forward(self, *_: Any) -> Tensor:
        raise ZeroDivisionError


def test_the_body_is_put_back_when_the_head_raises(llama: PreTrainedModel) -> None:
    expected = stock(llama)
    halves = Halves(llama)
    hidden = halves.body(IDS, POSITIONS)[0]
    head = llama.lm_head
    llama.lm_head = Breaking(1, 1)
    with pytest.raises(ZeroDivisionError):
        halves.head(hidden)
    llama.lm_head = head
    assert "forward" not in halves.backbone.__dict__
    assert torch.equal(stock(llama), expected)


def test_a_forward_that_somebody_else_put_there_is_kept(llama: PreTrainedModel) -> None:
    """As wrappers do that move weights between devices."""
    calls: list[int] = []
    own = llama.model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    llama.model.forward = counting
    halves = Halves(llama)
    hidden = halves.body(IDS, POSITIONS)[0]
    halves.head(hidden)
    assert llama.model.__dict__["forward"] is counting
    assert calls == [1]


def test_the_head_keeps_no_hidden_states(llama: PreTrainedModel) -> None:
    """What the body said is given to the caller and not kept beside it."""
    halves = Halves(llama)
    halves.body(IDS, POSITIONS)
    assert halves._outputs.last_hidden_state is None


class Bare(nn.Module):
    """A model that is all in one."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


class GoesRound(transformers.LlamaForCausalLM):
    """A model that calls the layers of its body itself."""

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        hidden = self.model.embed_tokens(input_ids)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden))


def test_models_that_can_not_be_halved() -> None:
    with pytest.raises(ModelError, match="Bare has no body"):
        Halves(Bare())
    model = GoesRound(zoo.llama()).eval()
    halves = Halves(model)
    hidden = halves.body(IDS, POSITIONS)[0]
    with pytest.raises(ModelError, match="GoesRound does not call its own body"):
        halves.head(hidden)
    assert "forward" not in halves.backbone.__dict__


def test_a_body_alone_is_no_causal_model(llama: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match="LlamaModel"):
        Halves(llama.model)


def test_a_head_without_a_body_says_so(llama: PreTrainedModel) -> None:
    with pytest.raises((ModelError, RuntimeError), match="body"):
        Halves(llama).head(torch.zeros(2, 32))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # from within peft
def test_adapters_of_peft_are_seen_through() -> None:
    """With the adapter on, off, and on the head as well."""
    peft = pytest.importorskip("peft")
    for targets in (["q_proj", "v_proj"], ["q_proj", "down_proj", "lm_head"]):
        plain = zoo.named("Llama").build()
        base = copy.deepcopy(plain)
        model = peft.get_peft_model(
            plain, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.0)
        ).eval()
        with torch.no_grad():
            expected = stock(model)
            halves = Halves(model)
            found = halves.head(halves.body(IDS, POSITIONS)[0])
            torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(expected, stock(base), atol=1e-2)
            with model.disable_adapter():
                halves = Halves(model)
                torch.testing.assert_close(halves.head(halves.body(IDS, POSITIONS)[0]), stock(base)[0])
            torch.testing.assert_close(stock(model), expected)
