"""Generation over the zoo: each row against itself alone, whatever runs beside it and whichever way the model runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tests.scoring.zoo import Architecture, named, random_tokens
from transformers import PreTrainedModel

from ramet.attention import store
from ramet.errors import ModelError
from ramet.forest import Forest
from ramet.policies import decoding, packed, transformers
from ramet.policies.decoding import CachedSteps, SharedSteps, filled
from ramet.policies.draws import uniforms
from ramet.policies.policy import by_row
from ramet.policies.transformers import TransformersPolicy
from ramet.scoring.check import engine_of
from ramet.scoring.rows import Options, score_rows
from ramet.types import Completion, Draw, Kind, Request, Sampling

STEPS = 14
FAMILIES = {
    "Llama": "flat",  # grouped queries, rotary
    "GPT-2": "flat",  # absolute positions
    "Mistral": "flat",  # a window of 10
    "Gemma 2": "flat",  # soft caps, windows in some layers
    "GPT-OSS": "flat",  # sinks, experts
    "DeepSeek-V3": "flat",  # values narrower than keys
    "BLOOM": "nodes",  # ALiBi
    "Bamba": "nodes",  # recurrent and attention
    "Mamba": "rows",  # recurrent
}
WARNS = pytest.mark.filterwarnings("ignore::ramet.scoring.check.PlainScoringWarning")


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 5 steps and passes of 30 tokens of prompts, so that both end in the middle of things."""
    monkeypatch.setattr(store, "BLOCK", 5)
    monkeypatch.setattr(decoding, "PREFILL", 30)


def requests_of(steps: int = STEPS) -> list[Request]:
    """Eight rows: three of one prompt, two and one of others with the same beginning, which is one more, and a short.

    Limits and what ends a row differ, so that rows leave at different steps.
    """
    generator = torch.Generator().manual_seed(3)
    start = random_tokens(11, generator)
    prompts = [start + random_tokens(4, generator) for _ in range(3)]
    rows = [prompts[0], prompts[1], prompts[0], start, prompts[0], random_tokens(3, generator), prompts[1], prompts[2]]
    return [
        Request(
            number,
            torch.tensor(row),
            Sampling(steps - 3 * (number % 3), 0.8 if number % 2 else 1.0, stop_ids=(3, 4, 5)),
            Draw(1, 7, number),
        )
        for number, row in enumerate(rows)
    ]


def alone(model: PreTrainedModel, request: Request) -> list[int]:
    """Run the whole row again for each token, alone, without a cache, and walk along the cumulative distribution."""
    path, sampling = request.tokens.tolist(), request.sampling
    for point in uniforms(request.draw, sampling.max_new_tokens).tolist():
        with torch.no_grad():
            logits = model(torch.tensor([path]), use_cache=False).logits[0, -1].double() / sampling.temperature
        cumulative = logits.softmax(-1).cumsum(-1)
        path.append(min(int((cumulative <= point).sum()), len(cumulative) - 1))
        if path[-1] in sampling.stop_ids:
            break
    return path[len(request.tokens) :]


def scored(model: torch.nn.Module, request: Request, answer: Completion) -> torch.Tensor:
    """The log-probs of an answer as the plain scorer has them, its row alone."""
    forest = Forest()
    numbers = forest.plant([request.tokens], groups=[0], members=[0])
    forest.grow(numbers, [answer.tokens], Kind.SAMPLED, log_probs=[answer.log_probs], versions=[0])
    with torch.no_grad():
        values, _ = score_rows(model, forest, numbers, Options(temperature=request.sampling.temperature))
    return values[forest.sampled(numbers).index]


@WARNS
@pytest.mark.parametrize(("name", "engine"), FAMILIES.items())
def test_every_family_says_what_its_rows_say_alone(name: str, engine: str) -> None:
    """The same ids as the row alone, and log-probs within 1e-5 of the plain scorer's, in one batch and in three."""
    architecture: Architecture = named(name)
    model = architecture.build()
    assert engine_of(model) == engine
    requests = requests_of()
    policy = TransformersPolicy(model, eos_ids=[])
    answers = by_row(policy.complete(requests), len(requests))
    assert len({len(answer.tokens) for answer in answers}) > 3  # rows leave at different steps
    assert max(len(answer.tokens) for answer in answers) > 5  # and go past a block
    for request, answer in zip(requests, answers, strict=True):
        assert answer.tokens.tolist() == alone(model, request)
        torch.testing.assert_close(answer.log_probs, scored(model, request, answer), rtol=1e-5, atol=1e-5)
    in_threes = by_row(TransformersPolicy(model, eos_ids=[], rows_per_batch=3).complete(requests), len(requests))
    for one, other in zip(answers, in_threes, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-5, atol=1e-5)


def with_packing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pack whatever the size and the number of steps; return where the packed layers of each call are counted."""
    made: list[int] = []

    class Counted(packed.PackedLinears):
        def __enter__(self) -> None:
            super().__enter__()
            made.append(len(self))

    monkeypatch.setattr(packed, "WORTH", 0)
    monkeypatch.setattr(transformers, "pays", lambda *_: True)
    monkeypatch.setattr(transformers, "PackedLinears", Counted)
    return made


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "BLOOM"])
def test_packed_layers_say_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, requests = named(name).build(), requests_of()
    plain = by_row(TransformersPolicy(model, eos_ids=[]).complete(requests), len(requests))
    made = with_packing(monkeypatch)
    policy = TransformersPolicy(model, eos_ids=[])
    found = by_row(policy.complete(requests), len(requests))
    linears = sum(type(module) is torch.nn.Linear for module in model.modules())
    assert set(made) == {linears}
    for one, other in zip(plain, found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-5, atol=1e-5)


def test_between_two_completions_the_model_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a completion may train: no packed layer, no attention of ours, no autocast is left switched on."""
    with_packing(monkeypatch)
    model = named("Llama").build()
    attention = model.config._attn_implementation
    stream = TransformersPolicy(model, eos_ids=[], autocast=torch.bfloat16).complete(requests_of())
    next(stream)
    assert model.config._attn_implementation == attention
    assert not torch.is_autocast_enabled("cpu")
    model(torch.tensor([[5, 6]]), use_cache=False).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert len(list(stream)) == 7


def test_an_updated_model_is_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with_packing(monkeypatch)
    model, [request, *_] = named("Llama").build(), requests_of()
    policy = TransformersPolicy(model, eos_ids=[])
    [before] = policy.complete([request])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    [after] = policy.complete([request])
    assert before.tokens.tolist() != after.tokens.tolist()
    assert after.tokens.tolist() == alone(model, request)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks by the old name
def test_an_adapter_of_peft_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_packing(monkeypatch)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        model = get_peft_model(named("Llama").build(), config).eval()
    requests = requests_of()
    policy = TransformersPolicy(model, eos_ids=[])  # type: ignore[arg-type]
    answers = by_row(policy.complete(requests), len(requests))
    assert set(made) == {2 * 7 + 1 + 2 * 3 * 2}  # the base model's, the head, and two a place of the adapter
    for request, answer in zip(requests, answers, strict=True):
        torch.testing.assert_close(answer.log_probs, scored(model, request, answer), rtol=1e-5, atol=1e-5)
        assert answer.tokens.tolist() == alone(model, request)  # type: ignore[arg-type]


def test_the_two_ways_of_running_a_model_agree_step_by_step() -> None:
    """The logits of the same tokens, with shared keys and with the model's own cache, when rows leave and move."""
    model = named("Qwen3").build()
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([5, 6, 8])]
    owner = [0, 1, 1, 0]
    shared = SharedSteps(model, prompts, owner, 6)
    cached = CachedSteps(model, torch.stack(prompts), owner)
    with torch.no_grad():
        torch.testing.assert_close(shared.first(), cached.first(), rtol=1e-5, atol=1e-5)
        for tokens, order in (([9, 10, 11, 12], [0, 1, 2, 3]), ([4, 5, 6, 7], [0, 3]), ([8, 9], [1]), ([7], [0])):
            ids = torch.tensor(tokens)
            torch.testing.assert_close(shared.next(ids), cached.next(ids), rtol=1e-5, atol=1e-5)
            if len(order) < len(tokens):
                shared.keep(order)
                cached.keep(order)
    assert shared.computed == 4 + 4 + 4 + 2 + 1  # what the prompts begin with runs once
    assert cached.computed == 6 + 4 + 4 + 2 + 1


def test_a_model_without_a_cache_is_refused() -> None:
    class NoCache(torch.nn.Linear):
        config = None

    with pytest.raises(ModelError, match="takes no cache"):
        CachedSteps(NoCache(2, 2), torch.zeros(1, 1, dtype=torch.int64), [0])


@given(st.integers(1, 12).flatmap(lambda rows: st.tuples(st.just(rows), st.sets(st.integers(0, rows - 1)))))
def test_holes_are_filled_from_the_end(case: tuple[int, set[int]]) -> None:
    """Everybody who stays is there once; nobody moves but into the place of a row that ended."""
    rows, gone = case
    order = filled(rows, sorted(gone))
    assert sorted(order) == sorted(set(range(rows)) - gone)
    assert all(row == place or (place in gone and row >= len(order)) for place, row in enumerate(order))
