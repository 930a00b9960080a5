"""The self-check: which engine a model is given, that the fallback is right, and that looking changes nothing."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from tests.scoring import zoo
from torch import Tensor, nn

from ramet.forest import Forest
from ramet.scoring import check, score
from ramet.scoring.check import PlainScoringWarning, choice_of, engine_for, engine_of
from ramet.scoring.lengths import company, lengths_that_change
from ramet.scoring.memory import Memory
from ramet.scoring.rows import Options, score_rows
from ramet.scoring.small_tree import small_forest
from ramet.types import Kind

LONG = 60
"""Beyond every length at which a model of the zoo changes."""


def quiet(architecture: zoo.Architecture, longest: int) -> check.Choice:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlainScoringWarning)
        return choice_of(architecture.build(), longest)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 3", "GPT-OSS", "BLOOM", "LFM2", "Mamba", "Phi-3 long-rope"])
def test_the_fastest_engine_that_is_right_is_taken(name: str) -> None:
    architecture = zoo.named(name)
    choice = quiet(architecture, LONG)
    assert choice.engine == architecture.shares
    assert list(choice.reasons) == {"flat": [], "nodes": ["flat"], "rows": ["flat", "nodes"]}[choice.engine]


def test_falling_back_is_said_once_and_loudly() -> None:
    model, forest = zoo.named("Mamba").build(), zoo.two_level_forest()
    with pytest.warns(PlainScoringWarning, match=r"MambaForCausalLM is scored row by row.*nodes: log-probs are off by"):
        assert score(model, forest).engine == "rows"
    assert score(model, forest).engine == "rows"  # a second warning would be an error


def test_going_node_by_node_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ramet.scoring.check"):
        assert engine_of(zoo.named("BLOOM").build()) == "nodes"
    assert "engine nodes (flat: log-probs are off by" in caplog.text


# ---------------------------------------------------------------- faults that are planted


def wrong(values: float = 0.0, gradient: float = 0.0, tokens: slice = slice(None)) -> check.ScoreForest:
    """Return an engine that is `score_rows` but for an error in log-probs, or in gradients alone."""

    def engine(
        model: nn.Module, forest: Forest, rollouts: Any, options: Options, worth: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        found, entropy = score_rows(model, forest, rollouts, options)
        places = torch.nonzero(~found.isnan()).squeeze(1)[tokens]
        off = torch.zeros_like(found).index_fill(0, places, values)
        return found + off + gradient * (found - found.detach()), entropy

    return engine


@pytest.mark.parametrize(
    ("engine", "right"),
    [
        (wrong(values=1e-4), True),
        (wrong(values=3e-3), False),
        (wrong(values=3e-3, tokens=slice(5, 6)), False),
        (wrong(values=float("nan")), False),
        (wrong(gradient=1e-3), True),
        (wrong(gradient=2e-2), False),
    ],
)
def test_an_engine_is_right_up_to_a_thousandth_in_value_and_a_hundredth_in_gradient(
    monkeypatch: pytest.MonkeyPatch, engine: check.ScoreForest, right: bool
) -> None:
    monkeypatch.setattr(check, "_SHARING", {"flat": engine, "nodes": score_rows})
    assert engine_of(zoo.named("Llama").build()) == ("flat" if right else "nodes")


def test_an_engine_that_is_wrong_on_one_tree_alone_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a router's choice between two experts hangs on rounding."""
    trees: list[Tensor] = []

    def once(model: nn.Module, forest: Forest, rollouts: Any, options: Options) -> tuple[Tensor, Tensor | None]:
        trees.append(forest.tokens.clone())
        return (wrong(1.0, tokens=slice(3)) if len(trees) == 1 else wrong())(model, forest, rollouts, options)

    monkeypatch.setattr(check, "_SHARING", {"flat": once})
    assert engine_of(zoo.named("Llama").build()) == "flat"
    assert len(trees) == 2
    assert not torch.equal(*trees)


def test_an_engine_that_raises_is_not_right_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> tuple[Tensor, Tensor | None]:
        raise RuntimeError("no such kernel\nwith a second line")

    monkeypatch.setattr(check, "_SHARING", {"flat": refuses, "nodes": score_rows})
    choice = choice_of(zoo.named("Llama").build())
    assert (choice.engine, choice.reasons) == ("nodes", {"flat": "RuntimeError: no such kernel"})


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_nothing_is_known_of_a_model_whose_own_log_probs_are_not_finite(broken: float) -> None:
    model = zoo.named("Llama").build()
    weight = model.get_input_embeddings().weight
    right = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(broken)
    choice = choice_of(model)
    assert choice.engine == "rows"
    assert "not finite" in choice.reasons["flat"]
    with torch.no_grad():
        weight.copy_(right)
    assert engine_of(model) == "flat"


# ---------------------------------------------------------------- looking changes nothing


def state(model: nn.Module) -> list[Any]:
    return [
        [module.training for module in model.modules()],
        [(len(module._forward_hooks), len(module._forward_pre_hooks), set(vars(module))) for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()],
        {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())},
        {name: str(value) for name, value in vars(model.config).items()},
    ]


@pytest.mark.parametrize("name", ["Gemma 2", "LFM2", "Llama dynamic NTK"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_leaves_the_model_and_random_numbers_as_they_were(name: str, dtype: torch.dtype) -> None:
    model = zoo.named(name).build().to(dtype)
    model.get_input_embeddings().weight.grad = torch.ones_like(model.get_input_embeddings().weight)
    list(model.parameters())[-1].requires_grad_(False)
    list(model.modules())[3].train()
    before, random = state(model), torch.get_rng_state()
    engine_of(model)
    assert torch.equal(torch.get_rng_state(), random)
    for was, now in zip(before, state(model), strict=True):
        if isinstance(was, dict) and all(isinstance(value, Tensor) for value in was.values()):
            torch.testing.assert_close(now, was, rtol=0, atol=0)
        else:
            assert str(now) == str(was)


@pytest.mark.parametrize("api", ["old", "new"])
def test_coarse_products_are_switched_off_for_the_check(monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    """Torch has two ways of allowing them, and reading one after the other was used is an error."""
    found: list[str] = []
    products: Any = torch.backends.mkldnn
    products = products.matmul

    def engine(*given: Any) -> tuple[Tensor, Tensor | None]:
        found.append(products.fp32_precision)
        return score_rows(*given)

    monkeypatch.setattr(check, "_SHARING", {"flat": engine})
    before = products.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    try:
        if api == "old":
            torch.set_float32_matmul_precision("medium")
        else:
            products.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "tf32"
        allowed = products.fp32_precision, torch.backends.cuda.matmul.fp32_precision
        engine_of(zoo.named("Llama").build())
        assert (products.fp32_precision, torch.backends.cuda.matmul.fp32_precision) == allowed
    finally:
        products.fp32_precision, torch.backends.cuda.matmul.fp32_precision = before
    assert found == ["ieee"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_looks_at_gradients_wherever_it_is_asked(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    monkeypatch.setattr(check, "_SHARING", {"flat": wrong(gradient=0.5), "nodes": score_rows})
    model = zoo.named("Llama").build()
    with context(), torch.autocast("cpu", torch.bfloat16):
        assert engine_of(model) == "nodes"


def test_a_frozen_model_is_checked_by_its_values_and_again_when_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_SHARING", {"flat": wrong(gradient=0.5), "nodes": score_rows})
    model = zoo.named("Llama").build()
    model.requires_grad_(False)
    assert choice_of(model) == check.Choice("flat", {}, gradients=False)
    next(model.parameters()).requires_grad_(True)
    assert choice_of(model).engine == "nodes"
    model.requires_grad_(False)
    assert choice_of(model).engine == "flat"  # it has no gradients that could be wrong


# ---------------------------------------------------------------- when it looks


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of tokens of each tree that is tried."""
    tried: list[int] = []

    def engine(model: nn.Module, forest: Forest, rollouts: Any, options: Options) -> tuple[Tensor, Tensor | None]:
        tried.append(max(len(forest.path(number)) for number in rollouts))
        return score_rows(model, forest, rollouts, options)

    monkeypatch.setattr(check, "_SHARING", {"flat": engine})
    return tried


def test_a_model_is_checked_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, model = counted(monkeypatch), zoo.named("Llama").build()
    for _ in range(2):
        engine_of(model), engine_for(model, 1000)
    assert len(tried) == 1
    model.set_attn_implementation("eager")
    engine_of(model)
    assert len(tried) == 2
    model.config.rms_norm_eps = 0.5
    engine_of(model)
    assert len(tried) == 3
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    engine_of(model)
    assert len(tried) == 4
    engine_for(model, 10, gradient_checkpointing=True)
    assert len(tried) == 5
    assert engine_of(copy.deepcopy(model)) == "flat"
    assert len(tried) == 6


def test_a_model_is_not_kept_alive() -> None:
    model = zoo.named("Llama").build()
    engine_of(model)
    held = len(check._CHOICES)
    del model
    assert len(check._CHOICES) == held - 1


def test_it_is_checked_again_beyond_the_length_at_which_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, model = counted(monkeypatch), zoo.named("Mistral").build()
    assert lengths_that_change(model) == (zoo.WINDOW,)
    for longest in (0, 5, zoo.WINDOW, zoo.WINDOW + 1, 50):
        engine_for(model, longest)
    below, beyond = tried
    assert below <= zoo.WINDOW < beyond


def test_a_long_window_that_attention_is_told_needs_no_long_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    config = zoo.gemma3()
    config.sliding_window = 100
    model = type(zoo.named("Gemma 3").build())(config).eval()
    tried = counted(monkeypatch)
    assert engine_for(model, 120) == "flat"
    assert max(tried) < 100


def test_without_such_attention_a_long_window_needs_a_long_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    config = zoo.gemma3()
    config.sliding_window = 100
    model = type(zoo.named("Gemma 3").build())(config).eval()

    def wrong_when_long(*given: Any, **others: Any) -> tuple[Tensor, Tensor | None]:
        return wrong(1.0 if len(given[1].tokens) > 100 else 0.0)(*given, **others)

    monkeypatch.setattr(check, "_SHARING", {"nodes": wrong_when_long})
    assert engine_for(model, 100) == "nodes"
    with pytest.warns(PlainScoringWarning, match="beyond 100 tokens"):
        assert engine_for(model, 101) == "rows"


def test_what_would_need_too_long_a_tree_is_scored_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, model = counted(monkeypatch), zoo.named("Llama").build()
    model.config.attention_chunk_size = check.LONGEST + 1
    assert engine_for(model, check.LONGEST + 1) == "flat"
    with pytest.warns(PlainScoringWarning, match="beyond 4097 tokens.*not tried on paths longer than 4096"):
        assert engine_for(model, check.LONGEST + 2) == "rows"
    assert len(tried) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_weights_are_checked_in_float32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """An error of 0.003 is far below the rounding of these weights."""
    monkeypatch.setattr(check, "_SHARING", {"flat": wrong(3e-3), "nodes": score_rows})
    assert engine_of(zoo.named("Llama").build().to(dtype)) == "nodes"


def test_without_memory_for_a_copy_coarse_weights_are_checked_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(check, "memory_of", lambda device: Memory(2**30, 1000))
    with caplog.at_level(logging.INFO, "ramet.scoring.check"):
        assert engine_of(zoo.named("Qwen3").build().to(torch.bfloat16)) == "flat"
        assert engine_of(zoo.named("BLOOM").build().to(torch.bfloat16)) == "nodes"
    assert "more than half of what is free" in caplog.text


# ---------------------------------------------------------------- positions that depend on the longest row


def prompts_and_answers(prompt: int, *answers: int) -> Forest:
    """One prompt, and answers that share nothing with one another."""
    generator, forest = torch.Generator().manual_seed(1), Forest()
    start = zoo.random_tokens(prompt, generator)
    for member, length in enumerate(answers):
        zoo.add_rollout(forest, 0, member, start, (Kind.SAMPLED, [3 + member, *zoo.random_tokens(length, generator)]))
    return forest


@pytest.mark.parametrize("name", ["Phi-3 long-rope", "Llama dynamic NTK"])
@pytest.mark.parametrize("forest", [prompts_and_answers(24, 2, 4, 7, 8, 8, 20, 25), zoo.two_level_forest()])
def test_rows_run_beside_their_like_alone_where_positions_turn(name: str, forest: Forest) -> None:
    """On both sides of the length from which they turn; value 3e-5, gradient 3e-5 relative, float32."""
    architecture = zoo.named(name)
    first = list(range(len(forest.rollouts)))[::-1]  # of what rows share, the oracle keeps the last: here the first row
    expected = zoo.oracle(architecture.build(), forest, rollouts=first, fresh=True)
    model = architecture.build()
    with pytest.warns(PlainScoringWarning, match="depend on the longest row"):
        found = score(model, forest)
    for scores in (found, score(model, forest), score(model, forest, max_tokens=100)):  # whatever it saw before
        assert scores.engine == "rows"
        kept = ~expected.log_probs.isnan()
        assert float((scores.log_probs.detach() - expected.log_probs)[kept].abs().max()) < 3e-5
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(zoo.weighted(scores.log_probs), parameters)
        assert zoo.gradient_error(dict(zip(names, gradients, strict=True)), expected.gradients) < 3e-5


@pytest.mark.parametrize("name", ["Phi-3 long-rope", "Llama dynamic NTK"])
def test_short_paths_share_whatever_the_model_saw_before(name: str) -> None:
    """Up to the length from which positions turn, and after rows beyond it; value 3e-5, float32."""
    architecture = zoo.named(name)
    model, short = architecture.build(), prompts_and_answers(20, 2, 7, zoo.ORIGINAL - 21)
    assert max(len(short.path(number)) for number in range(3)) == zoo.ORIGINAL
    expected = zoo.oracle(architecture.build(), short, fresh=True)
    with torch.no_grad():
        model(input_ids=torch.arange(50)[None])
    found = score(model, short)
    assert found.engine == "flat"
    kept = ~expected.log_probs.isnan()
    assert float((found.log_probs.detach() - expected.log_probs)[kept].abs().max()) < 3e-5


def test_company_is_of_one_side_or_of_one_length() -> None:
    longrope, dynamic, plain = zoo.phi3_longrope(), zoo.llama_dynamic(), zoo.llama()
    assert [company(longrope, length) for length in (1, 32, 33, 40)] == [(0,), (0,), (1,), (1,)]
    assert [company(dynamic, length) for length in (1, 32, 33, 40)] == [(0,), (0,), (33,), (40,)]
    assert company(plain, 40) == company(None, 3) == ()


# ---------------------------------------------------------------- the tree


@pytest.mark.parametrize("reach", [0, 3, 10, 32, 100])
@pytest.mark.parametrize("limit", [None, 4, 12, 40])
def test_the_tree_lies_on_both_sides_of_a_length(reach: int, limit: int | None) -> None:
    if limit is not None and limit <= reach:
        return
    forest = small_forest(64, reach=reach, limit=limit)
    lengths = [len(forest.path(number)) for number in range(len(forest.rollouts))]
    assert limit is None or max(lengths) <= limit
    if limit is None:
        assert min(lengths) <= max(reach, 17)
        assert max(lengths) > reach
    assert len(set(lengths)) > 1 or limit == 4
    assert torch.equal(forest.tokens, small_forest(64, reach=reach, limit=limit).tokens)
