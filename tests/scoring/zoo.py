"""A zoo of causal architectures as tiny random models, the trees to score them on, and the slow obvious oracle.

Every model has two or three layers of width 32 over 64 tokens, windows of 10 tokens, and weights large enough that
attention is far from uniform, so that a wrong mask, position or state shows.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ramet.forest import Forest
from ramet.scoring.rows import Options
from ramet.types import Kind

VOCABULARY = 64
WINDOW = 10
CONTEXT = 128
SPREAD = 0.15
"""The standard deviation of matrices: attention is far from uniform, and rounding is not blown up."""
ORIGINAL = 32
"""The length from which models of `Architecture.crosses` turn their rotary positions in another way."""

Shares = Literal["flat", "nodes", "rows"]


@dataclass(frozen=True)
class Architecture:
    """One kind of model. `shares` is the best engine that is right for it.

    `mixture`: a mixture of experts, whose float64 oracle needs eager experts. `crosses`: what a position means depends
    on the length of the whole row, from `ORIGINAL` tokens on, and a row alone needs a model that saw no other.
    """

    name: str
    config: Callable[[], Any] = field(repr=False)
    shares: Shares
    mixture: bool = False
    crosses: bool = False

    def build(self, seed: int = 0) -> PreTrainedModel:
        """Make the model: float32, on the CPU, in eval mode; weights are a function of `seed`."""
        with torch.random.fork_rng(devices=[]):  # transformers draws initial weights from the global state
            torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
            auto: Any = transformers.AutoModelForCausalLM
            model: PreTrainedModel = auto.from_config(self.config(), dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                # Norms, biases and the rates of decay stay near where they start; matrices become large.
                parameter.copy_(SPREAD * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
        model.train(False)
        return model


# ---------------------------------------------------------------- the configs

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def sizes(**changes: Any) -> dict[str, Any]:
    """The names that most configs use, with `changes`."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        **NO_IDS,
        **changes,
    }


def rope(kind: str = "default", **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **options}


SLIDING_THEN_FULL = ["sliding_attention", "full_attention", "sliding_attention"]


def llama() -> Any:
    return transformers.LlamaConfig(**sizes())


def llama_yarn() -> Any:
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)
    return transformers.LlamaConfig(**sizes(rope_parameters=yarn))


def llama_dynamic() -> Any:
    return transformers.LlamaConfig(
        **sizes(rope_parameters=rope("dynamic", factor=4.0), max_position_embeddings=ORIGINAL)
    )


def mistral() -> Any:
    return transformers.MistralConfig(**sizes(sliding_window=WINDOW, head_dim=8))


def qwen2() -> Any:
    return transformers.Qwen2Config(**sizes())


def qwen2_sliding() -> Any:
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return transformers.Qwen2Config(**sizes(num_hidden_layers=3, **window))


def qwen3() -> Any:
    return transformers.Qwen3Config(**sizes(head_dim=8))


def gpt2() -> Any:
    return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **NO_IDS)


def gpt_neox() -> Any:
    config = sizes()
    config.pop("num_key_value_heads")
    return transformers.GPTNeoXConfig(**config)


def opt() -> Any:
    return transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        **NO_IDS,
    )


def phi() -> Any:
    return transformers.PhiConfig(**sizes(num_key_value_heads=4))


def phi3() -> Any:
    return transformers.Phi3Config(**sizes(original_max_position_embeddings=CONTEXT))


def phi3_longrope() -> Any:
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.5, 4.0]}
    turned = rope("longrope", original_max_position_embeddings=ORIGINAL, **factors)
    return transformers.Phi3Config(**sizes(original_max_position_embeddings=ORIGINAL, rope_parameters=turned))


def falcon() -> Any:
    return transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        **NO_IDS,
    )


def falcon_alibi() -> Any:
    config = falcon()
    config.alibi, config.multi_query, config.parallel_attn = True, False, False
    return config


def bloom() -> Any:
    return transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **NO_IDS)


def mpt() -> Any:
    return transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT, **NO_IDS
    )


def cohere() -> Any:
    return transformers.CohereConfig(**sizes(logit_scale=0.5, use_qk_norm=True))


def cohere2() -> Any:
    return transformers.Cohere2Config(
        **sizes(logit_scale=0.5, sliding_window=WINDOW, num_hidden_layers=3, layer_types=SLIDING_THEN_FULL)
    )


def deepseek_v3() -> Any:
    return transformers.DeepseekV3Config(
        **sizes(
            num_key_value_heads=4,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=12,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    )


def mixtral() -> Any:
    return transformers.MixtralConfig(**sizes(num_local_experts=4, num_experts_per_tok=2))


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **sizes(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )


def gemma2() -> Any:
    return transformers.Gemma2Config(
        **sizes(
            num_hidden_layers=3,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            layer_types=SLIDING_THEN_FULL,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=3.0,
        )
    )


def gemma3() -> Any:
    return transformers.Gemma3TextConfig(
        **sizes(
            num_hidden_layers=3,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            layer_types=SLIDING_THEN_FULL,
        )
    )


def gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **sizes(
            num_hidden_layers=3,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=SLIDING_THEN_FULL,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=rope(),
        )
    )


def granite() -> Any:
    multipliers = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.6}
    return transformers.GraniteConfig(**sizes(attention_multiplier=0.4, **multipliers))


def olmo2() -> Any:
    return transformers.Olmo2Config(**sizes())


def smollm3() -> Any:
    return transformers.SmolLM3Config(**sizes(num_hidden_layers=3, no_rope_layers=[1, 0, 1]))


def starcoder2() -> Any:
    return transformers.Starcoder2Config(**sizes(sliding_window=WINDOW))


def stablelm() -> Any:
    return transformers.StableLmConfig(**sizes(partial_rotary_factor=0.5, use_qkv_bias=True, qk_layernorm=True))


def gptj() -> Any:
    return transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, rotary_dim=4, **NO_IDS
    )


def mamba() -> Any:
    return transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=4, **NO_IDS
    )


def mamba2() -> Any:
    return transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        num_hidden_layers=2,
        chunk_size=8,
        **NO_IDS,
    )


def lfm2() -> Any:
    return transformers.Lfm2Config(
        **sizes(num_hidden_layers=3, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention", "conv"])
    )


def bamba() -> Any:
    return transformers.BambaConfig(
        **sizes(
            num_hidden_layers=3,
            attn_layer_indices=[1],
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_chunk_size=8,
        )
    )


def jamba() -> Any:
    return transformers.JambaConfig(
        **sizes(
            num_hidden_layers=3,
            attn_layer_period=3,
            attn_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        )
    )


def qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        **sizes(
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    )


ZOO: tuple[Architecture, ...] = (
    Architecture("Llama", llama, "flat"),
    Architecture("Llama YaRN", llama_yarn, "flat"),
    Architecture("Mistral", mistral, "flat"),
    Architecture("Qwen2", qwen2, "flat"),
    Architecture("Qwen2 sliding", qwen2_sliding, "flat"),
    Architecture("Qwen3", qwen3, "flat"),
    Architecture("GPT-2", gpt2, "flat"),
    Architecture("GPT-NeoX", gpt_neox, "flat"),
    Architecture("GPT-J", gptj, "flat"),
    Architecture("OPT", opt, "flat"),
    Architecture("Phi", phi, "flat"),
    Architecture("Phi-3", phi3, "flat"),
    Architecture("Falcon rotary", falcon, "nodes"),
    Architecture("Falcon ALiBi", falcon_alibi, "nodes"),
    Architecture("BLOOM", bloom, "nodes"),
    Architecture("MPT", mpt, "nodes"),
    Architecture("Cohere", cohere, "flat"),
    Architecture("Cohere2", cohere2, "flat"),
    Architecture("DeepSeek-V3", deepseek_v3, "flat", mixture=True),
    Architecture("Mixtral", mixtral, "flat", mixture=True),
    Architecture("Qwen3-MoE", qwen3_moe, "flat", mixture=True),
    Architecture("GPT-OSS", gpt_oss, "flat", mixture=True),
    Architecture("Gemma 2", gemma2, "flat"),
    Architecture("Gemma 3", gemma3, "flat"),
    Architecture("Granite", granite, "flat"),
    Architecture("OLMo2", olmo2, "flat"),
    Architecture("SmolLM3", smollm3, "flat"),
    Architecture("Starcoder2", starcoder2, "flat"),
    Architecture("StableLM", stablelm, "flat"),
    Architecture("Mamba-2", mamba2, "nodes"),
    Architecture("LFM2", lfm2, "nodes"),
    Architecture("Bamba", bamba, "nodes"),
    Architecture("Qwen3-Next", qwen3_next, "nodes", mixture=True),
    Architecture("Mamba", mamba, "rows"),
    Architecture("Jamba", jamba, "rows", mixture=True),
    Architecture("Phi-3 long-rope", phi3_longrope, "rows", crosses=True),
    Architecture("Llama dynamic NTK", llama_dynamic, "rows", crosses=True),
)


def names(architectures: Sequence[Architecture] = ZOO) -> list[str]:
    """Ids for `pytest.mark.parametrize`."""
    return [architecture.name for architecture in architectures]


def named(name: str) -> Architecture:
    """Return the architecture of this name."""
    return next(architecture for architecture in ZOO if architecture.name == name)


# ---------------------------------------------------------------- the trees


def random_tokens(count: int, generator: torch.Generator) -> list[int]:
    """Draw ids, none of which is one that a config may treat as padding."""
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def ids(tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def add_rollout(forest: Forest, group: int, member: int, prompt: list[int], *segments: tuple[Kind, list[int]]) -> int:
    """Plant a prompt and grow it by segments; sampled ones get made-up log-probs."""
    [number] = forest.plant([ids(prompt)], groups=[group], members=[member])
    for kind, tokens in segments:
        if kind is Kind.SAMPLED:
            made_up = torch.linspace(-1.0, -2.0, len(tokens))
            forest.grow([number], [ids(tokens)], kind, log_probs=[made_up], versions=[0])
        else:
            forest.grow([number], [ids(tokens)], kind)
    return number


def two_level_forest(seed: int = 0, *, prompt: int = 24) -> Forest:
    """Build two trees: prompts of `prompt` tokens, branches with leaves of different lengths, paths past the window.

    The first has two branches of 12 and 9 sampled tokens with three leaves each, an answer that ends at a branch, so
    that it is the prefix of others, two equal answers, and one with a tool's words in its middle. The second has three
    answers straight from its prompt and one branch that the environment spoke.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(random_tokens, generator=generator)
    forest, say, env = Forest(), Kind.SAMPLED, Kind.ENVIRONMENT
    first, second = draw(prompt), draw(prompt)
    left, right = draw(12), draw(9)
    long, short, middle = draw(14), draw(3), draw(7)
    answers = [
        [(say, left + long)],
        [(say, left + short)],
        [(say, left + middle)],
        [(say, left + middle)],
        [(say, left)],
        [(say, right), (say, draw(5))],
        [(say, right), (env, draw(4)), (say, draw(6))],
        [(say, right + draw(1))],
    ]
    for member, segments in enumerate(answers):
        add_rollout(forest, 0, member, first, *segments)
    spoken = draw(8)
    others = [
        [(say, draw(11))],
        [(say, draw(2))],
        [(env, spoken), (say, draw(6))],
        [(env, spoken), (say, draw(10))],
    ]
    for member, segments in enumerate(others):
        add_rollout(forest, 1, member, second, *segments)
    return forest


# ---------------------------------------------------------------- the oracle


@dataclass(frozen=True)
class Answers:
    """What is right, in float64: by place in `Forest.tokens` (NaN where nothing was sampled), and by parameter name.

    `gradients` are those of `weighted(log_probs)`.
    """

    log_probs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]
    reference_log_probs: Tensor | None = None


def weighted(values: Tensor, seed: int = 0) -> Tensor:
    """Sum what is not NaN with fixed random weights of mean 0: what gradients are compared of."""
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = torch.nonzero(~values.detach().isnan()).squeeze(1)
    return (values[kept] * weights.to(values)[kept]).sum()


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient for each parameter by name, zeros for those that `loss` does not depend on."""
    parameters = dict(model.named_parameters())
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def in_double(model: nn.Module, *, mixture: bool = False) -> nn.Module:
    """Return a copy in float64; the fast paths of mixtures of experts do not know it."""
    double = copy.deepcopy(model).double()
    double.train(False)
    if mixture:
        assert isinstance(double, PreTrainedModel)
        double.set_experts_implementation("eager")
    return double


def oracle(
    model: nn.Module,
    forest: Forest,
    *,
    temperature: float = 1.0,
    rollouts: Sequence[int] | None = None,
    reference: nn.Module | None = None,
    mixture: bool = False,
    fresh: bool = False,
    entropy_weight: float = 0.0,
) -> Answers:
    """Run each trajectory alone, unpadded, with all logits, in float64.

    `mixture` is that of the architecture. `fresh` puts the model back as it came before each row, for models that
    remember how long the rows were that they saw: give it one that saw none. The gradients are those of
    weighted(log_probs) + entropy_weight · weighted(entropy).
    """
    double = in_double(model, mixture=mixture)
    log_probs, entropy = _by_place(double, forest, temperature, rollouts, fresh)
    loss = weighted(log_probs) + entropy_weight * weighted(entropy)
    gradients = gradients_of(loss, double)
    beside = None
    if reference is not None:
        with torch.no_grad():
            beside, _ = _by_place(in_double(reference, mixture=mixture), forest, temperature, rollouts, fresh)
    return Answers(log_probs.detach(), entropy.detach(), gradients, beside)


def _by_place(
    model: nn.Module, forest: Forest, temperature: float, rollouts: Sequence[int] | None, fresh: bool
) -> tuple[Tensor, Tensor]:
    nothing = torch.tensor(torch.nan, dtype=torch.float64)
    log_probs, entropy = [nothing] * len(forest.tokens), [nothing] * len(forest.tokens)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for number in range(len(forest.rollouts)) if rollouts is None else rollouts:
        rollout, path = forest.rollouts[number], forest.path(number)
        sampled = [at for at, kind in enumerate(rollout.kinds.tolist()) if kind == Kind.SAMPLED]
        if not sampled:
            continue
        if fresh:
            _forget(model, buffers)
        table = torch.log_softmax(model(input_ids=path[None], use_cache=False).logits[0].double() / temperature, -1)
        index = forest.node_index(rollout.end).tolist()
        for at in sampled:
            log_probs[index[at]] = table[at - 1, path[at]]
            entropy[index[at]] = -(table[at - 1].exp() * table[at - 1]).sum()
    return torch.stack(log_probs), torch.stack(entropy)


def _forget(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Put a model back as it was made: rotary positions that grew with the longest row seen."""
    for name, buffer in buffers.items():
        *path, last = name.split(".")
        module = model.get_submodule(".".join(path))
        setattr(module, last, buffer.clone())
        if hasattr(module, "max_seq_len_cached") and hasattr(module, "original_max_seq_len"):
            module.max_seq_len_cached = module.original_max_seq_len


@dataclass(frozen=True)
class Errors:
    """How far an engine is from the oracle: the largest of any token, and `gradient_error`."""

    log_probs: float
    entropy: float
    gradients: float

    @property
    def worst(self) -> float:
        return max(self.log_probs, self.entropy, self.gradients)


Engine = Callable[[nn.Module, Forest, Sequence[int], Options], tuple[Tensor, "Tensor | None"]]
TEMPERATURE, ENTROPY_WEIGHT = 0.7, 0.5


def right_answers(architecture: Architecture, forest: Forest) -> Answers:
    """Ask the oracle at `TEMPERATURE`, with entropies in the gradients at `ENTROPY_WEIGHT`."""
    return oracle(
        architecture.build(),
        forest,
        temperature=TEMPERATURE,
        mixture=architecture.mixture,
        fresh=architecture.crosses,
        entropy_weight=ENTROPY_WEIGHT,
    )


@functools.cache
def _built(architecture: Architecture) -> PreTrainedModel:
    return architecture.build()


def measure(architecture: Architecture, engine: Engine, forest: Forest, right: Answers, **options: Any) -> Errors:
    """Score `forest` by `engine` in float32 and compare with what `right_answers` gave.

    A model that remembers lengths is a new one, and others are built once.
    """
    model = architecture.build() if architecture.crosses else _built(architecture)
    everything = Options(temperature=TEMPERATURE, entropy=True, **options)
    log_probs, entropy = engine(model, forest, range(len(forest.rollouts)), everything)
    assert entropy is not None
    assert torch.equal(log_probs.isnan(), right.log_probs.isnan()), "other tokens were scored than were sampled"
    assert torch.equal(entropy.isnan(), right.entropy.isnan())
    gradients = gradients_of(weighted(log_probs) + ENTROPY_WEIGHT * weighted(entropy), model)
    return Errors(
        _largest(log_probs, right.log_probs),
        _largest(entropy, right.entropy),
        gradient_error(gradients, right.gradients),
    )


def _largest(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected)[~expected.isnan()].abs().max())


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the worst parameter's |found - expected| / |expected|, both Euclidean norms: 0 where all is right.

    No gradient counts as smaller than a hundredth of the whole: some are zero but for rounding (that of a bias of
    keys, which shifts all scores of a query alike), and their own norm says nothing.
    """
    whole = float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
    errors = [
        float((found[name].double() - gradient).norm()) / max(float(gradient.norm()), 1e-2 * whole)
        for name, gradient in expected.items()
    ]
    return max(errors)


def while_it_runs(module: nn.Module, work: Callable[[], object]) -> list[Exception]:
    """Let another thread do `work` when `module` is next called, before it runs; return the errors that will be met."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # for the test to look at
            errors.append(error)

    def beside(*_: object) -> None:
        handle.remove()
        thread = Thread(target=run)
        thread.start()
        thread.join()

    handle = module.register_forward_pre_hook(beside)
    return errors
