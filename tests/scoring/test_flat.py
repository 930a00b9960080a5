"""The flat engine: whatever the cutting, the chunks and the context, the numbers are those of each rollout alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.scoring import zoo
from torch import Tensor, nn
from transformers import PreTrainedModel

from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.scoring import halves
from ramet.scoring.flat import score_flat
from ramet.scoring.layout import batches, flatten
from ramet.scoring.rows import Options
from ramet.types import Kind

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def forest() -> Forest:
    return zoo.two_level_forest()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return zoo.named("Llama").build()


@pytest.fixture(scope="module")
def answers(llama: PreTrainedModel, forest: Forest) -> zoo.Answers:
    return zoo.oracle(llama, forest)


def whole(model: nn.Module, forest: Forest, **options: Any) -> tuple[Tensor, Tensor | None]:
    return score_flat(model, forest, range(len(forest.rollouts)), Options(**options))


def slopes(model: nn.Module, values: Tensor) -> dict[str, Tensor]:
    """The gradients of `zoo.weighted`, by name."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(zoo.weighted(values), list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if slope is None else slope
        for (name, parameter), slope in zip(parameters.items(), found, strict=True)
    }


def close(found: Tensor | None, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Compare values, NaN for NaN."""
    assert found is not None
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("max_tokens", [None, 0, 1, 30, 47, 61, 80, 1000])
def test_any_budget_gives_the_same_numbers(
    llama: PreTrainedModel, forest: Forest, answers: zoo.Answers, max_tokens: int | None
) -> None:
    """Values, entropies and the gradient, which gathers over all batches."""
    values, entropy = whole(llama, forest, max_tokens=max_tokens, entropy=True)
    close(values, answers.log_probs)
    close(entropy, answers.entropy)
    assert zoo.gradient_error(slopes(llama, values), answers.gradients) < 1e-5


def test_the_budget_bounds_each_forward_pass(
    llama: PreTrainedModel, forest: Forest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass sees more tokens than it may, and a small budget makes many."""
    seen: list[int] = []
    own = halves.Halves.body

    def body(self: Any, ids: Tensor, positions: Tensor) -> Tensor:
        seen.append(ids.numel())
        return own(self, ids, positions)

    monkeypatch.setattr(halves.Halves, "body", body)
    whole(llama, forest, max_tokens=60)
    assert len(seen) > 3
    assert max(seen) <= 60
    seen.clear()
    whole(llama, forest)
    assert seen == [len(flatten(forest, range(len(forest.rollouts))).index)]


def test_a_token_of_two_batches_is_scored_once(forest: Forest, llama: PreTrainedModel) -> None:
    """Else its weight in a loss would depend on the budget: the gradient of a sum over all tokens does not."""
    parts = list(batches(forest, range(len(forest.rollouts)), 50))
    places = torch.cat([flatten(forest, part).places for part in parts])
    assert len(places) > len(places.unique())  # so there are such tokens
    expected = slopes(llama, whole(llama, forest)[0])
    assert zoo.gradient_error(slopes(llama, whole(llama, forest, max_tokens=50)[0]), expected) < 1e-5


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
@pytest.mark.parametrize("logits", [1, 200, 2**24])
def test_any_chunk_gives_the_same_numbers(
    llama: PreTrainedModel,
    forest: Forest,
    answers: zoo.Answers,
    chunk: int,
    logits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(halves, "LOGITS", logits)
    values, entropy = whole(llama, forest, chunk=chunk, entropy=True)
    close(values, answers.log_probs)
    close(entropy, answers.entropy)
    assert zoo.gradient_error(slopes(llama, values), answers.gradients) < 1e-5


def test_no_more_logits_than_a_chunk_exist_at_once(
    llama: PreTrainedModel, forest: Forest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    own = halves.Halves.head

    def head(self: Any, hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return own(self, hidden)

    monkeypatch.setattr(halves.Halves, "head", head)
    values, _ = whole(llama, forest, chunk=10)
    wanted = len(flatten(forest, range(len(forest.rollouts))).places)
    assert max(rows) <= 10
    assert sum(rows) == wanted  # nothing but what was sampled
    wanted_chunks = len(rows)
    zoo.weighted(values).backward()
    assert sum(rows) == 2 * wanted - rows[wanted_chunks - 1]  # and once more going back, but for the last chunk


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature(llama: PreTrainedModel, forest: Forest, temperature: float) -> None:
    expected = zoo.oracle(llama, forest, temperature=temperature)
    values, entropy = whole(llama, forest, temperature=temperature, entropy=True, max_tokens=70)
    close(values, expected.log_probs)
    close(entropy, expected.entropy)
    assert zoo.gradient_error(slopes(llama, values), expected.gradients) < 1e-5


@pytest.mark.parametrize("rollouts", [[0], [4], [5, 0], [11, 3, 3, 2], [6, 4, 0, 8]])
@pytest.mark.parametrize("max_tokens", [None, 50])
def test_some_rollouts_in_any_order(
    llama: PreTrainedModel, forest: Forest, rollouts: list[int], max_tokens: int | None
) -> None:
    """What is asked for is scored, and the rest is NaN."""
    expected = zoo.oracle(llama, forest, rollouts=rollouts)
    values, entropy = score_flat(llama, forest, rollouts, Options(max_tokens=max_tokens))
    close(values, expected.log_probs)
    assert entropy is None
    assert zoo.gradient_error(slopes(llama, values), expected.gradients) < 1e-5


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Qwen2 sliding", "GPT-OSS"])
def test_layers_that_are_computed_again(name: str, forest: Forest) -> None:
    """Gradient checkpointing changes no bit, in pieces as well."""
    model = zoo.named(name).build()
    for max_tokens in (None, 60):
        kept, _ = whole(model, forest, max_tokens=max_tokens)
        again, _ = whole(model, forest, max_tokens=max_tokens, gradient_checkpointing=True)
        close(again.detach(), kept.detach(), 0.0)
        expected, found = slopes(model, kept), slopes(model, again)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_two_forests_before_one_backward_pass(llama: PreTrainedModel) -> None:
    """Under checkpointing each forward pass is made again with its own tree, whichever came last."""
    forests = [zoo.two_level_forest(seed, prompt=prompt) for seed, prompt in ((1, 24), (2, 9))]
    expected = [slopes(llama, whole(llama, each)[0]) for each in forests]
    together = [whole(llama, each, gradient_checkpointing=True)[0] for each in forests]
    loss = zoo.weighted(together[0]) + 2 * zoo.weighted(together[1])
    found = torch.autograd.grad(loss, list(llama.parameters()))
    wanted = {name: expected[0][name] + 2 * expected[1][name] for name in expected[0]}
    assert zoo.gradient_error(dict(zip(wanted, found, strict=True)), wanted) < 1e-5


def test_the_model_is_used_between_forward_and_backward(llama: PreTrainedModel, forest: Forest) -> None:
    """A plain forward pass in between, as of a reference that is the same model, disturbs nothing."""
    expected = slopes(llama, whole(llama, forest)[0])
    values, _ = whole(llama, forest, gradient_checkpointing=True)
    with torch.no_grad():
        llama(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
        whole(llama, zoo.two_level_forest(7))
    assert zoo.gradient_error(slopes(llama, values), expected) < 1e-5


def test_without_gradient(llama: PreTrainedModel, forest: Forest, answers: zoo.Answers) -> None:
    with torch.no_grad():
        values, _ = whole(llama, forest, gradient_checkpointing=True)
    assert not values.requires_grad
    close(values, answers.log_probs)


@pytest.mark.parametrize("frozen", ["body", "head"])
def test_one_half_frozen(forest: Forest, frozen: str, answers: zoo.Answers) -> None:
    model = zoo.named("Llama").build()
    half: nn.Module = model.model if frozen == "body" else model.lm_head
    half.requires_grad_(False)
    values, _ = whole(model, forest, gradient_checkpointing=True)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(zoo.weighted(values), list(trained.values()))
    assert trained
    expected = {name: answers.gradients[name] for name in trained}
    assert zoo.gradient_error(dict(zip(trained, found, strict=True)), expected) < 1e-5


def test_float64_models_are_scored_in_float64(tiny: Tiny) -> None:
    model = tiny("rotary64", torch.float64)
    forest = Forest()
    for member, tokens in enumerate(([4, 5, 6], [4, 5, 7, 8], [9])):
        zoo.add_rollout(forest, 0, member, [1, 2, 3], (Kind.SAMPLED, tokens))
    expected = zoo.oracle(model, forest)
    values, _ = whole(model, forest)
    assert values.dtype == torch.float64
    close(values, expected.log_probs, 1e-12)
    assert zoo.gradient_error(slopes(model, values), expected.gradients) < 1e-11


@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_under_autocast(name: str, forest: Forest) -> None:
    """A bfloat16 forward pass is as far from the truth as one of each row alone is, within a factor of 2."""
    model = zoo.named(name).build()
    expected = zoo.oracle(model, forest).log_probs
    with torch.no_grad():
        values, _ = whole(model, forest, autocast=torch.bfloat16)
        alone = torch.full_like(values, torch.nan)
        for number, rollout in enumerate(forest.rollouts):
            index, path = forest.node_index(rollout.end), forest.path(number)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=path[None], use_cache=False).logits[0].float()
            at = torch.nonzero(torch.from_numpy(rollout.kinds == Kind.SAMPLED)).squeeze(1)
            alone[index[at]] = logits.log_softmax(-1)[at - 1, path[at]]
    assert values.dtype == torch.float32
    errors = [(each.double() - expected)[~expected.isnan()].square().mean().sqrt() for each in (values, alone)]
    assert 0 < errors[0] < 2 * errors[1]
    trained, _ = whole(model, forest, autocast=torch.bfloat16, gradient_checkpointing=True)
    for slope in slopes(model, trained).values():
        assert slope.dtype == torch.float32
        assert bool(slope.isfinite().all())


def test_the_model_is_left_as_it_was(llama: PreTrainedModel, forest: Forest) -> None:
    """Bit for bit, also where scoring fails half way."""
    ids = torch.tensor([[5, 6, 7, 8]])
    before, expected = llama.config.to_dict(), llama(input_ids=ids).logits.detach()
    whole(llama, forest, gradient_checkpointing=True)
    broken = zoo.named("Llama").build()
    clean = broken(input_ids=ids).logits.detach()
    norm, broken.model.norm = broken.model.norm, nn.Linear(1, 1)
    with pytest.raises(RuntimeError):
        whole(broken, forest, gradient_checkpointing=True)
    broken.model.norm = norm
    for model, true in ((llama, expected), (broken, clean)):
        assert torch.equal(model(input_ids=ids).logits.detach(), true)
        assert model.config.to_dict() == before
        assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_to_score(llama: PreTrainedModel, forest: Forest) -> None:
    """No rollouts, or none that said anything: NaN, and no forward pass."""
    silent = Forest()
    zoo.add_rollout(silent, 0, 0, [4, 5, 6], (Kind.ENVIRONMENT, [7]))
    for trees, rollouts in ((forest, []), (silent, [0]), (Forest(), [])):
        for max_tokens in (None, 10):
            values, _ = score_flat(llama, trees, rollouts, Options(max_tokens=max_tokens))
            assert values.shape == trees.tokens.shape
            assert bool(values.isnan().all())


@pytest.mark.parametrize("max_tokens", [None, 4])
def test_a_sampled_first_token_is_refused(llama: PreTrainedModel, max_tokens: int | None) -> None:
    forest = Forest()
    zoo.add_rollout(forest, 0, 0, [4, 5], (Kind.SAMPLED, [6]))
    zoo.add_rollout(forest, 0, 1, [], (Kind.SAMPLED, [6, 7]))
    with pytest.raises(ForestError, match="no token before it"):
        whole(llama, forest, max_tokens=max_tokens)


def test_no_gradient_leaks_between_answers(llama: PreTrainedModel) -> None:
    """The log-prob of one answer does not depend on another: embeddings of the other's tokens get no gradient."""
    forest = Forest()
    zoo.add_rollout(forest, 0, 0, [3, 4], (Kind.SAMPLED, [10, 11, 12]))
    zoo.add_rollout(forest, 0, 1, [3, 4], (Kind.SAMPLED, [20, 21, 22]))
    values, _ = whole(llama, forest)
    mine = forest.node_index(forest.rollouts[0].end)[2:]
    [slope] = torch.autograd.grad(values[mine].sum(), [llama.model.embed_tokens.weight])
    touched = set(torch.nonzero(slope.abs().sum(-1)).squeeze(1).tolist())
    assert touched == {3, 4, 10, 11}


def test_options_do_not_change_each_other(llama: PreTrainedModel, forest: Forest, answers: zoo.Answers) -> None:
    """All at once: pieces, chunks, entropy, recomputation."""
    options = Options(entropy=True, max_tokens=55, chunk=4, gradient_checkpointing=True)
    values, entropy = score_flat(llama, forest, range(len(forest.rollouts)), options)
    close(values, answers.log_probs)
    close(entropy, answers.entropy)
    assert zoo.gradient_error(slopes(llama, values), answers.gradients) < 1e-5
    plain, nothing = score_flat(llama, forest, range(len(forest.rollouts)), replace(options, entropy=False))
    assert nothing is None
    close(plain.detach(), values.detach(), 1e-6)
