"""Tiny random models, one of each way of telling positions apart."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch
from transformers import BloomConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, PreTrainedModel
from transformers.models.bloom import BloomForCausalLM
from transformers.models.gpt2 import GPT2LMHeadModel
from transformers.models.gpt_neox import GPTNeoXForCausalLM
from transformers.models.llama import LlamaForCausalLM

# A run that was started in the background by a script has Ctrl-C ignored: what tests of it would wait for, for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

VOCABULARY = 30
CONTEXT = 64
EOS = 2


def tiny_model(family: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Build 2 layers of width 32 over 30 tokens, far from uniform, with weights that are a function of `seed`.

    "rotary" is a Llama, whose norms round to float32 whatever its dtype; "rotary64" is a GPT-NeoX, which does not.
    """
    with torch.random.fork_rng():  # transformers draws initial weights from the global state
        model: PreTrainedModel
        if family == "rotary":
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=CONTEXT,
                    eos_token_id=EOS,
                    pad_token_id=EOS,
                )
            )
        elif family == "rotary64":
            model = GPTNeoXForCausalLM(
                GPTNeoXConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    max_position_embeddings=CONTEXT,
                    eos_token_id=EOS,
                    bos_token_id=1,
                )
            )
        elif family == "absolute":
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=VOCABULARY,
                    n_embd=32,
                    n_layer=2,
                    n_head=4,
                    n_positions=CONTEXT,
                    eos_token_id=EOS,
                    bos_token_id=1,
                )
            )
        else:
            assert family == "alibi"
            model = BloomForCausalLM(
                BloomConfig(
                    vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, eos_token_id=EOS, bos_token_id=1
                )
            )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter.double() + 0.1 * noise)
    return model.to(dtype).eval()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models lose more to threads than they win."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., PreTrainedModel]:
    """Return `tiny(family, dtype, seed)`: a model of its own for whoever changes the weights."""
    return tiny_model


@pytest.fixture(scope="session", params=["rotary", "absolute", "alibi"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A float32 model of each family; leave its weights alone."""
    return tiny_model(request.param, torch.float32)


@pytest.fixture(scope="session", params=["rotary64", "absolute"])
def exact_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model that is float64 all through; leave its weights alone."""
    return tiny_model(request.param, torch.float64)
