"""Sampling from real (tiny, random) models: each row is what its request says, whatever runs beside it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ramet.errors import ModelError
from ramet.forest import Forest
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.draws import uniforms
from ramet.policies.policy import by_row
from ramet.policies.transformers import TransformersPolicy, context_length, eos_ids_of
from ramet.scoring import score
from ramet.types import Completion, Draw, Kind, Request, Sampling, StopReason

EOS = 2
CONTEXT = 64
Tiny = Callable[..., PreTrainedModel]
PROMPTS = [[1, 5, 6], [1, 5, 6], [1, 5, 6], [7], [EOS, EOS, 0, 0], [3] * 11, [1, 5, 6, 7], [1, 5, 6]]
"""Repeats that are not neighbours, a prefix of another, the pad id and 0 inside, far lengths."""


def requests_of(
    prompts: Sequence[list[int]], *, n: int = 8, temperature: float = 1.0, stop_ids: tuple[int, ...] = (), seed: int = 0
) -> list[Request]:
    return [
        Request(row, torch.tensor(prompt), Sampling(n, temperature, stop_ids), Draw(seed, 100, row))
        for row, prompt in enumerate(prompts)
    ]


def answers_to(policy: TransformersPolicy, requests: Sequence[Request]) -> list[Completion]:
    return by_row(policy.complete(requests), len(requests))


def words(completions: Sequence[Completion]) -> list[tuple[list[int], StopReason]]:
    return [(completion.tokens.tolist(), completion.stop) for completion in completions]


def slow_answer(model: PreTrainedModel, request: Request, eos: int = EOS) -> tuple[list[int], list[float]]:
    """Run the whole row again for each token, alone and unpadded, and walk along the cumulative distribution."""
    path, log_probs = request.tokens.tolist(), []
    for point in uniforms(request.draw, request.sampling.max_new_tokens).tolist():
        with torch.no_grad():
            logits = model(torch.tensor([path])).logits[0, -1].double() / request.sampling.temperature
        cumulative = logits.softmax(-1).cumsum(-1)
        token = min(int((cumulative <= point).sum()), len(cumulative) - 1)
        path.append(token)
        log_probs.append(torch.log_softmax(logits, -1)[token].item())
        if token == eos:
            break
    return path[len(request.tokens) :], log_probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_log_probs_are_the_slow_oracles(model: PreTrainedModel, temperature: float) -> None:
    """Log-probs within 1e-5, float32; far lengths in one batch."""
    requests = requests_of(PROMPTS, temperature=temperature)
    for request, found in zip(requests, answers_to(TransformersPolicy(model), requests), strict=True):
        tokens, log_probs = slow_answer(model, request)
        assert found.tokens.tolist() == tokens
        assert found.tokens.dtype == torch.int64
        assert found.log_probs.dtype == torch.float32
        torch.testing.assert_close(found.log_probs.double(), torch.tensor(log_probs).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_samplers_log_probs_are_the_scorers(model: PreTrainedModel, temperature: float) -> None:
    """Within 1e-5, float32: one token at a time against all in one pass."""
    requests = requests_of(PROMPTS, temperature=temperature, n=20)
    answers = answers_to(TransformersPolicy(model), requests)
    forest = Forest()
    numbers = forest.plant([r.tokens for r in requests], groups=[0] * 8, members=range(8))
    forest.grow(
        numbers,
        [a.tokens for a in answers],
        Kind.SAMPLED,
        log_probs=[a.log_probs for a in answers],
        versions=[a.version for a in answers],
    )
    sampled = forest.sampled(numbers)
    with torch.no_grad():
        found = score(model, forest, temperature=temperature).log_probs[sampled.index]
    torch.testing.assert_close(found, sampled.log_probs, rtol=1e-5, atol=1e-5)


def test_a_row_is_the_same_alone_in_any_batch_and_in_any_order(model: PreTrainedModel) -> None:
    """The same ids; log-probs within 1e-5, float32. Rows that leave early disturb none that stay."""
    requests = requests_of(PROMPTS, n=12)
    policy = TransformersPolicy(model)
    together = answers_to(policy, requests)
    assert len({len(answer.tokens) for answer in together}) > 1  # some do leave early
    alone = [next(policy.complete([request])) for request in requests]
    mixed = sorted(policy.complete(requests[::-1]), key=lambda completion: completion.row)
    in_threes = answers_to(TransformersPolicy(model, rows_per_batch=3), requests)
    for others in (alone, mixed, in_threes):
        assert words(others) == words(together)
        for a, b in zip(others, together, strict=True):
            torch.testing.assert_close(a.log_probs, b.log_probs, rtol=1e-5, atol=1e-5)


def test_members_of_a_group_differ_and_repeats_of_a_member_do_not(tiny: Tiny) -> None:
    policy = TransformersPolicy(tiny("rotary", torch.float32), eos_ids=[])
    sampling = Sampling(6)
    requests = [Request(i, torch.tensor([1, 5]), sampling, Draw(0, 3, i // 2)) for i in range(16)]
    said = [tuple(answer.tokens.tolist()) for answer in answers_to(policy, requests)]
    assert said[::2] == said[1::2]
    assert len(set(said)) == 8


def test_seed_prompt_member_and_turn_each_change_the_draw(tiny: Tiny) -> None:
    policy = TransformersPolicy(tiny("rotary", torch.float32), eos_ids=[])
    draws = [Draw(0, 0, 0, 0), Draw(1, 0, 0, 0), Draw(0, 1, 0, 0), Draw(0, 0, 1, 0), Draw(0, 0, 0, 1)]
    requests = [Request(i, torch.tensor([1]), Sampling(8), draw) for i, draw in enumerate(draws)]
    assert len({tuple(answer.tokens.tolist()) for answer in answers_to(policy, requests)}) == 5


def test_the_first_token_follows_the_models_distribution(tiny: Tiny) -> None:
    """4,000 members: chi-square with at most 29 degrees of freedom stays below 58.3 (p = 0.001); the seed is fixed."""
    model = tiny("absolute", torch.float32)
    prompt = torch.tensor([1, 5, 6])
    requests = [Request(i, prompt, Sampling(1, 1.3), Draw(5, 0, i)) for i in range(4000)]
    counts = Counter(int(a.tokens[0]) for a in TransformersPolicy(model, rows_per_batch=4000).complete(requests))
    with torch.no_grad():
        expected = 4000 * (model(prompt[None]).logits[0, -1].double() / 1.3).softmax(-1)
    large = expected >= 5
    found = torch.tensor([counts[token] for token in range(30)]).double()
    rest = (
        float(((found[~large].sum() - expected[~large].sum()) ** 2) / expected[~large].sum()) if (~large).any() else 0.0
    )
    assert float(((found - expected)[large] ** 2 / expected[large]).sum()) + rest < 58.3


def test_greedy_is_the_largest_logit_and_has_no_density(model: PreTrainedModel) -> None:
    requests = requests_of(PROMPTS, temperature=0.0, n=5)
    for request, answer in zip(requests, answers_to(TransformersPolicy(model, eos_ids=[]), requests), strict=True):
        path = request.tokens.tolist()
        for token in answer.tokens.tolist():
            with torch.no_grad():
                assert token == int(model(torch.tensor([path])).logits[0, -1].argmax())
            path.append(token)
        assert len(answer.tokens) == 5
        assert answer.log_probs.isnan().all()


def test_one_batch_may_mix_temperatures_limits_and_stops(tiny: Tiny) -> None:
    policy = TransformersPolicy(tiny("rotary", torch.float32), eos_ids=[])
    samplings = [
        Sampling(3, 0.0),
        Sampling(9, 1.0),
        Sampling(1, 0.5),
        Sampling(9, 2.0, tuple(range(15))),
        Sampling(9, 2.0),
    ]
    requests = [Request(i, torch.tensor([1, 5]), sampling, Draw(0, 0, 0)) for i, sampling in enumerate(samplings)]
    together = answers_to(policy, requests)
    assert words(together) == words([next(policy.complete([request])) for request in requests])
    assert [len(together[i].tokens) for i in (0, 1, 2, 4)] == [3, 9, 1, 9]
    assert [bool(answer.log_probs.isnan().any()) for answer in together] == [True, False, False, False, False]
    stopped, free = together[3], together[4]
    assert stopped.stop is StopReason.STOP
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()


def forced(tiny: Tiny, nexts: dict[int, int]) -> PreTrainedModel:
    """A model that says `nexts[t]` after token t, for sure: its layers add nothing, its head reads the token."""
    model: Any = tiny("rotary", torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(32)[:30])
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        for token, said in nexts.items():
            model.lm_head.weight[said, token] = 100.0
    found: PreTrainedModel = model
    return found


@pytest.mark.parametrize(
    ("eos", "stop_ids", "limit", "said", "stop"),
    [
        ([6], (), 9, [5, 6], StopReason.EOS),
        ([8, 7, 6], (), 9, [5, 6], StopReason.EOS),
        ([8], (7,), 9, [5, 6, 7], StopReason.STOP),
        ([7], (7,), 9, [5, 6, 7], StopReason.EOS),
        ([8], (), 3, [5, 6, 7], StopReason.NEW_TOKENS),
        ([7], (), 3, [5, 6, 7], StopReason.EOS),
        ([8], (7,), 3, [5, 6, 7], StopReason.STOP),
        ([], (), 1, [5], StopReason.NEW_TOKENS),
    ],
)
def test_a_row_ends_with_its_first_cause(
    tiny: Tiny, eos: list[int], stop_ids: tuple[int, ...], limit: int, said: list[int], stop: StopReason
) -> None:
    """The token that ends a completion is part of it; an end at the limit is an end; a sure token has log-prob 0."""
    policy = TransformersPolicy(forced(tiny, {1: 5, 5: 6, 6: 7, 7: 8, 8: 5}), eos_ids=eos)
    [answer] = policy.complete(requests_of([[1]], n=limit, stop_ids=stop_ids))
    assert (answer.tokens.tolist(), answer.stop) == (said, stop)
    assert answer.log_probs.tolist() == [0.0] * len(said)


@pytest.mark.parametrize("family", ["rotary", "absolute"])
def test_the_context_limits_and_says_so(tiny: Tiny, family: str) -> None:
    policy = TransformersPolicy(tiny(family, torch.float32), eos_ids=[])
    lengths = [CONTEXT - 5, CONTEXT - 4, CONTEXT - 3, CONTEXT - 1, CONTEXT, CONTEXT + 7, 2]
    answers = answers_to(policy, requests_of([[4] * n for n in lengths], n=4))
    assert [(len(answer.tokens), answer.stop) for answer in answers] == [
        (4, StopReason.NEW_TOKENS),
        (4, StopReason.NEW_TOKENS),
        (3, StopReason.CONTEXT),
        (1, StopReason.CONTEXT),
        (0, StopReason.PROMPT_TOO_LONG),
        (0, StopReason.PROMPT_TOO_LONG),
        (4, StopReason.NEW_TOKENS),
    ]
    assert [len(answer.log_probs) for answer in answers] == [4, 4, 3, 1, 0, 0, 4]


def test_a_row_without_tokens_is_refused_by_name(tiny: Tiny) -> None:
    policy = TransformersPolicy(tiny("rotary", torch.float32))
    with pytest.raises(ModelError, match="row 1 has no tokens"):
        list(policy.complete(requests_of([[1], []])))


def test_no_requests_no_answers(tiny: Tiny) -> None:
    assert list(TransformersPolicy(tiny("rotary", torch.float32)).complete([])) == []


def test_weights_that_are_nan_are_refused(tiny: Tiny) -> None:
    policy = TransformersPolicy(tiny("rotary", torch.float32))
    list(policy.complete(requests_of([[1]])))
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[3] = torch.nan
    with pytest.raises(ModelError, match="no distribution"):
        list(policy.complete(requests_of([[1]])))


def test_tokens_carry_the_version_of_the_weights(tiny: Tiny) -> None:
    policy = TransformersPolicy(tiny("rotary", torch.float32))
    policy.version = 7
    assert {answer.version for answer in policy.complete(requests_of(PROMPTS))} == {7}


def test_dropout_is_off_though_somebody_trained_in_between(tiny: Tiny) -> None:
    model = tiny("absolute", torch.float32)  # a GPT-2 has dropout 0.1
    policy = TransformersPolicy(model)
    first = words(answers_to(policy, requests_of(PROMPTS)))
    model.train()
    assert words(answers_to(policy, requests_of(PROMPTS))) == first


def test_sampling_touches_no_global_random_state_and_builds_no_graph(tiny: Tiny) -> None:
    model, inside = tiny("rotary", torch.float32), set[bool]()
    policy = TransformersPolicy(model)
    list(policy.complete(requests_of([[1]], n=1)))  # finds out what the model bears, gradients included
    handle = model.register_forward_pre_hook(lambda module, args: inside.add(torch.is_grad_enabled()))
    before = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    stream = policy.complete(requests_of(PROMPTS))
    next(stream)
    assert torch.is_grad_enabled()  # between two completions the caller's own mode holds
    list(stream)
    handle.remove()
    assert inside == {False}
    assert (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())) == before


def test_each_distinct_token_of_the_prompts_runs_once(tiny: Tiny) -> None:
    """PROMPTS hold 5 distinct ones, and [1, 5, 6, 7] goes on from [1, 5, 6]: 3 + 1 + 1 + 4 + 11 tokens."""
    model = tiny("rotary", torch.float32)
    policy, shapes = TransformersPolicy(model, eos_ids=[]), []
    list(policy.complete(requests_of([[1]], n=1)))  # finds out what the model bears
    assert policy.tokens_computed == 1
    layer = model.get_decoder().layers[0]
    handle = layer.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape[:2])))
    list(policy.complete(requests_of(PROMPTS, n=3)))
    handle.remove()
    assert shapes == [(1, 20), (1, 8), (1, 8)]
    assert policy.tokens_computed == 1 + 20 + 8 + 8


def test_only_rows_that_go_on_are_run(tiny: Tiny) -> None:
    """Four rows of 1, 2, 4 and 4 tokens after one prompt of three: the last token of a row is never run."""
    policy = TransformersPolicy(tiny("rotary", torch.float32), eos_ids=[])
    limits = [1, 2, 4, 4]
    requests = [Request(i, torch.tensor([1, 5, 6]), Sampling(n), Draw(0, 0, i)) for i, n in enumerate(limits)]
    assert [answer.row for answer in policy.complete(requests)][:2] == [0, 1]  # as they end
    assert policy.tokens_computed == 3 + sum(n - 1 for n in limits)


def test_prompts_of_one_length_share_a_pass_where_keys_are_not_shared(tiny: Tiny) -> None:
    """A BLOOM: lengths 1, 3, 4, 4 and 11, each with its distinct prompts once."""
    model = tiny("alibi", torch.float32)
    policy, shapes = TransformersPolicy(model, eos_ids=[]), []
    list(policy.complete(requests_of([[1]], n=1)))
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    answers = answers_to(policy, requests_of(PROMPTS, n=2))
    handle.remove()
    assert shapes == [(1, 1), (1, 1), (1, 3), (4, 1), (2, 4), (2, 1), (1, 11), (1, 1)]
    assert [len(answer.tokens) for answer in answers] == [2] * 8


def test_a_stop_string_ends_a_row_with_the_token_that_completes_it() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer, layers=1)
    prompt = torch.tensor(tokenizer("2+2=")["input_ids"])
    free, *_ = TransformersPolicy(model, eos_ids=[]).complete([Request(0, prompt, Sampling(12), Draw(0, 0, 0))])
    text = tokenizer.decode(free.tokens)
    stop = text[3:5]
    end = text.index(stop) + 2
    requests = [
        Request(0, prompt, Sampling(12, stop=(stop,)), Draw(0, 0, 0)),
        Request(1, prompt, Sampling(12, stop=("not there",)), Draw(0, 0, 0)),
        Request(2, prompt, Sampling(12), Draw(0, 0, 0)),
    ]
    stopped, *others = answers_to(TransformersPolicy(model, eos_ids=[], tokenizer=tokenizer), requests)
    assert (stopped.tokens.tolist(), stopped.stop) == (free.tokens[:end].tolist(), StopReason.STOP)
    assert words(others) == words([free, free])
    with pytest.raises(ModelError, match=r"row 0 has stop strings.*no tokenizer"):
        list(TransformersPolicy(model).complete(requests))


def test_a_support_cuts_the_row_that_asks_for_it_alone(tiny: Tiny) -> None:
    """With top_k=1 the likeliest token comes each time, at log-prob 0; its neighbour draws as it would alone."""
    policy = TransformersPolicy(tiny("rotary", torch.float32), eos_ids=[])
    samplings = [Sampling(6, top_k=1), Sampling(3, top_p=0.5), Sampling(6), Sampling(6, 0.0)]
    requests = [Request(i, torch.tensor([1, 5]), sampling, Draw(0, 0, 1)) for i, sampling in enumerate(samplings)]
    together = answers_to(policy, requests)
    assert words(together) == words([next(policy.complete([request])) for request in requests])
    assert together[0].log_probs.tolist() == [0.0] * 6
    assert together[0].tokens.tolist() == together[3].tokens.tolist()


def test_autocast_samples_from_what_it_runs(tiny: Tiny) -> None:
    """Under autocast to bfloat16 log-probs are those of a row alone under autocast, to its rounding; none leaks out."""
    model = tiny("rotary", torch.float32)
    policy = TransformersPolicy(model, eos_ids=[], autocast=torch.bfloat16)
    requests = requests_of(PROMPTS, n=6)
    stream = policy.complete(requests)
    first = next(stream)
    assert not torch.is_autocast_enabled("cpu")
    for answer in [first, *stream]:
        path = torch.cat([requests[answer.row].tokens, answer.tokens])[None]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(path, use_cache=False).logits[0].float()
        table = torch.log_softmax(logits[len(requests[answer.row].tokens) - 1 : -1], -1)
        expected = table.gather(1, answer.tokens[:, None])[:, 0]
        torch.testing.assert_close(answer.log_probs, expected, rtol=0.05, atol=0.1)


def turning(kind: str, **options: Any) -> PreTrainedModel:
    """A Llama of 64 positions whose rotary positions turn in another way from 16 (longrope) or 64 (dynamic) tokens."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **options}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=30, max_position_embeddings=CONTEXT, rope_parameters=rope, eos_token_id=None, **sizes
            )
        )


def test_a_row_that_would_turn_its_own_past_is_refused() -> None:
    """Up to the length where positions turn, and beyond it from the start, it is right; across it, it is not."""
    model = turning("longrope", original_max_position_embeddings=16, short_factor=[1.0] * 4, long_factor=[1.0, 2, 3, 4])
    policy = TransformersPolicy(model)
    requests = requests_of([[4] * 10, [5] * 17, [6] * 20], n=6)
    for answer in policy.complete(requests):
        path = torch.cat([requests[answer.row].tokens, answer.tokens])[None]
        with torch.no_grad():
            table = torch.log_softmax(model(path, use_cache=False).logits[0], -1)
        expected = table[len(path[0]) - 7 : -1].gather(1, answer.tokens[:, None])[:, 0]
        torch.testing.assert_close(answer.log_probs, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match=r'row 1: .* pass 16, where the "longrope"(.|\n)*at most 4'):
        list(policy.complete(requests_of([[4] * 10, [4] * 12], n=5)))


def test_positions_that_turn_with_every_length_end_at_the_context() -> None:
    policy = TransformersPolicy(turning("dynamic"))
    [answer] = policy.complete(requests_of([[4] * 60], n=9))
    assert (len(answer.tokens), answer.stop) == (4, StopReason.CONTEXT)


@pytest.mark.parametrize(("ids", "expected"), [(None, []), (4, [4]), ([4, 5], [4, 5]), (0, [0])])
def test_eos_ids_come_from_the_generation_config_first(tiny: Tiny, ids: object, expected: list[int]) -> None:
    model = tiny("rotary", torch.float32)
    model.generation_config.eos_token_id = ids
    model.config.eos_token_id = None
    assert eos_ids_of(model) == expected
    assert TransformersPolicy(model).eos_ids == frozenset(expected)


def test_the_context_is_the_number_of_positions(tiny: Tiny) -> None:
    assert [context_length(tiny(family, torch.float32)) for family in ("rotary", "absolute", "alibi")] == [
        CONTEXT,
        CONTEXT,
        None,
    ]


def test_rows_per_batch_is_at_least_one(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="rows_per_batch"):
        TransformersPolicy(tiny("rotary", torch.float32), rows_per_batch=0)


def test_weights_that_change_between_two_batches_are_those_that_are_sampled_from(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are packed anew for each batch: the second completion is scored the same by the weights of its version."""
    monkeypatch.setattr("ramet.policies.packed.WORTH", 1)
    monkeypatch.setattr("ramet.policies.transformers.pays", lambda *_: True)
    model = tiny("rotary", torch.float32)
    policy = TransformersPolicy(model, eos_ids=[], rows_per_batch=1)
    requests = requests_of([[1, 5, 9], [1, 6, 7]], n=5)
    completions = policy.complete(requests)
    next(completions)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    policy.version = 1
    second = next(completions)
    assert second.version == 1
    forest = Forest()
    numbers = forest.plant([requests[second.row].tokens], groups=[0], members=[0])
    forest.grow(numbers, [second.tokens], Kind.SAMPLED, log_probs=[second.log_probs], versions=[1])
    index = forest.sampled(numbers).index
    torch.testing.assert_close(score(model, forest).log_probs[index].detach(), second.log_probs, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_an_adapter_of_learned_tokens_is_refused(tiny: Tiny) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ModelError, match="learned tokens before every prompt"):
        TransformersPolicy(peft.get_peft_model(tiny("rotary", torch.float32), config))
