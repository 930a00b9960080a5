"""`score` against the obvious oracle: each rollout alone, all logits, a float64 log_softmax."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scoring import zoo
from torch import Tensor, nn
from transformers import PreTrainedModel

from ramet.errors import ForestError, ModelError
from ramet.forest import Forest
from ramet.scoring import Scores, score
from ramet.scoring.check import Engine, PlainScoringWarning
from ramet.scoring.counting import counted_saved, own_storages
from ramet.scoring.head import token_log_probs
from ramet.scoring.running import forward_logits
from ramet.types import Kind, Support

EOS = 2
Tiny = Callable[..., PreTrainedModel]


class Bare(nn.Module):
    """A model whose forward knows neither `logits_to_keep` nor any other option: it returns all logits."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner
        self.eval()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool
    ) -> SimpleNamespace:
        kept = self.inner(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
        )
        return SimpleNamespace(logits=kept.logits)


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def forest_of(*rollouts: tuple[list[int], list[tuple[Kind, list[int]]]]) -> Forest:
    forest = Forest()
    for group, (prompt, segments) in enumerate(rollouts):
        [number] = forest.plant([ids(*prompt)], groups=[group], members=[0])
        for kind, tokens in segments:
            if kind is Kind.SAMPLED:
                forest.grow([number], [ids(*tokens)], kind, log_probs=[torch.zeros(len(tokens))], versions=[0])
            else:
                forest.grow([number], [ids(*tokens)], kind)
    return forest


def varied() -> Forest:
    """Shared prompts, duplicates, a prefix of another, turns, eos (which is also the pad id) anywhere, 0 as a token."""
    say, env = Kind.SAMPLED, Kind.ENVIRONMENT
    return forest_of(
        ([1, 5, 6], [(say, [7, 8, EOS])]),
        ([1, 5, 6], [(say, [7, 8, EOS])]),
        ([1, 5, 6], [(say, [7])]),
        ([1, 5, 6], [(say, [7, 9, 0, 0, 11, 3, 4])]),
        ([1, 5, 6, 7], [(say, [8])]),
        ([EOS, EOS, 0], [(say, [EOS, 4, EOS]), (env, [12, 13]), (say, [0, EOS])]),
        ([1], [(say, [29])]),
        ([1, 5], [(env, [6]), (say, [])]),
        ([3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3], [(say, [4, EOS])]),
    )


def oracle(
    model: nn.Module, forest: Forest, *, temperature: float = 1.0, rollouts: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies by place in the forest, NaN where nothing was sampled."""
    log_probs = [torch.tensor(torch.nan, dtype=torch.float64)] * len(forest.tokens)
    entropies = list(log_probs)
    for number in range(len(forest.rollouts)) if rollouts is None else rollouts:
        path, rollout = forest.path(number), forest.rollouts[number]
        if len(path) == 0:
            continue
        logits = model(path[None]).logits[0].double() / temperature
        table = torch.log_softmax(logits, -1)
        for at, place in enumerate(forest.node_index(rollout.end).tolist()):
            if rollout.kinds[at] == Kind.SAMPLED:
                log_probs[place] = table[at - 1, path[at]]
                entropies[place] = -(table[at - 1].exp() * table[at - 1]).sum()
    return torch.stack(log_probs), torch.stack(entropies)


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def weighted(values: Tensor) -> Tensor:
    """A sum in which every sampled token has a weight of its own."""
    kept = torch.nonzero(~values.isnan()).squeeze(1)
    return (values[kept] * torch.linspace(-1.0, 2.0, len(kept), dtype=values.dtype)).sum()


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_values_and_gradients_are_the_oracles(exact_model: PreTrainedModel, temperature: float) -> None:
    """Tolerance 1e-10, float64."""
    forest = varied()
    found = score(exact_model, forest, temperature=temperature, entropy=True)
    log_probs, entropies = oracle(exact_model, forest, temperature=temperature)
    assert found.entropy is not None
    assert found.log_probs.dtype == torch.float64
    assert_close(found.log_probs, log_probs, 1e-10)
    assert_close(found.entropy, entropies, 1e-10)
    for mine, theirs in ((found.log_probs, log_probs), (found.entropy, entropies)):
        for a, b in zip(
            torch.autograd.grad(weighted(mine), list(exact_model.parameters()), retain_graph=True),
            torch.autograd.grad(weighted(theirs), list(exact_model.parameters()), retain_graph=True),
            strict=True,
        ):
            assert_close(a, b, 1e-10)


def test_values_and_gradients_are_the_oracles_in_float32(model: PreTrainedModel) -> None:
    """Tolerance 1e-5 on values, 1e-4 on the norm of a parameter's gradient."""
    found, expected = score(model, varied(), temperature=0.7).log_probs, oracle(model, varied(), temperature=0.7)[0]
    assert found.dtype == torch.float32
    assert_close(found, expected, 1e-5)
    for a, b in zip(gradients(weighted(found), model), gradients(weighted(expected), model), strict=True):
        assert float((a - b).norm()) <= 1e-4 * max(1.0, float(b.norm()))


@pytest.mark.parametrize("max_tokens", [1, 8, 13, 30, 10**6])
@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_neither_budget_nor_chunk_changes_value_or_gradient(tiny: Tiny, max_tokens: int, chunk: int) -> None:
    """Tolerance 1e-10, float64."""
    model, forest = tiny("absolute", torch.float64), varied()
    whole, cut = score(model, forest), score(model, forest, max_tokens=max_tokens, chunk=chunk)
    assert_close(cut.log_probs, whole.log_probs, 1e-10)
    for a, b in zip(
        gradients(weighted(cut.log_probs), model), gradients(weighted(whole.log_probs), model), strict=True
    ):
        assert_close(a, b, 1e-10)


@pytest.mark.parametrize("family", ["rotary", "absolute"])
def test_a_model_without_logits_to_keep_scores_the_same(tiny: Tiny, family: str) -> None:
    """Tolerance 1e-10, float64, value and gradient; and the two kinds of model really differ."""
    model, forest = tiny(family, torch.float64), varied()
    assert forward_logits(model, ids(1, 5, 6)[None], torch.ones(1, 3, dtype=torch.bool), keep=2).shape == (1, 2, 30)
    assert forward_logits(Bare(model), ids(1, 5, 6)[None], torch.ones(1, 3, dtype=torch.bool), keep=2).shape == (
        1,
        2,
        30,
    )
    kept, bare = (score(one, forest, max_tokens=40, engine="rows") for one in (model, Bare(model)))
    assert_close(bare.log_probs, kept.log_probs, 1e-10)
    for a, b in zip(
        gradients(weighted(bare.log_probs), model), gradients(weighted(kept.log_probs), model), strict=True
    ):
        assert_close(a, b, 1e-10)


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.lists(
                st.tuples(st.sampled_from([Kind.SAMPLED, Kind.ENVIRONMENT]), st.lists(st.integers(0, 3), max_size=4)),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_any_forest_scores_as_its_rows_alone(
    rows: list[tuple[list[int], list[tuple[Kind, list[int]]]]], max_tokens: int, chunk: int
) -> None:
    """Tolerance 1e-10, float64."""
    with torch.no_grad():
        found = score(MODEL, forest_of(*rows), max_tokens=max_tokens, chunk=chunk, temperature=0.7, engine="rows")
        assert_close(found.log_probs, oracle(MODEL, forest_of(*rows), temperature=0.7)[0], 1e-10)


class Bigram(nn.Module):
    """The logits of a token are a function of the token before it: fast enough for many examples."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))
        self.eval()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


MODEL = Bigram()


def test_a_row_is_the_same_alone_padded_and_in_a_batch(model: PreTrainedModel) -> None:
    """Tolerance 1e-5, float32: right-padded by longer rows, left-padded by hand, alone."""
    row = [5, 6, 7, EOS, 8]
    alone = score(model, forest_of(([1], [(Kind.SAMPLED, row)]))).log_probs[1:]
    longer = [([3], [(Kind.SAMPLED, list(range(4, 20)))]), ([4], [(Kind.SAMPLED, [0] * 30)])]
    forest = forest_of(*longer, ([1], [(Kind.SAMPLED, row)]))
    beside = score(model, forest).log_probs[forest.sampled([2]).index]
    assert_close(beside, alone, 1e-5)
    padded = torch.zeros(1, 9, dtype=torch.int64)
    padded[0, 3:] = ids(1, *row)
    mask = torch.arange(9)[None] >= 3
    logits = forward_logits(model, padded, mask, keep=6)
    assert_close(token_log_probs(logits[0, :-1], ids(*row))[0], alone, 1e-5)


def test_padding_is_told_by_lengths_and_not_by_ids(model: PreTrainedModel) -> None:
    """Rows of nothing but the pad id, which is eos, or of 0, score as the oracle says; tolerance 1e-5, float32."""
    forest = forest_of(
        ([EOS] * 3, [(Kind.SAMPLED, [EOS] * 3)]),
        ([0] * 2, [(Kind.SAMPLED, [0] * 6)]),
        ([1], [(Kind.SAMPLED, [EOS, 0])]),
    )
    assert_close(score(model, forest).log_probs, oracle(model, forest)[0], 1e-5)


@pytest.mark.parametrize("family", ["rotary", "absolute"])
@pytest.mark.parametrize("engine", ["flat", "nodes", "rows"])
def test_each_engine_tells_padding_by_lengths(tiny: Tiny, engine: Engine, family: str) -> None:
    """Rows of unlike lengths with eos, which pads, and 0 in their middle, alone and together: within 1e-5, float32."""
    model = tiny(family, torch.float32)
    rows = [
        ([1, EOS, 0], [(Kind.SAMPLED, [7, EOS, 0, 9])]),
        ([0], [(Kind.SAMPLED, [0, 5, EOS])]),
        ([EOS, 4], [(Kind.SAMPLED, [3, 0, 8, 8, EOS, 6, 5, 4, 3, 2])]),
    ]
    together = forest_of(*rows)
    found = score(model, together, engine=engine).log_probs
    assert_close(found, oracle(model, together)[0], 1e-5)
    for number, row in enumerate(rows):
        alone = forest_of(row)
        assert_close(
            score(model, alone, engine=engine).log_probs[alone.sampled([0]).index],
            found[together.sampled([number]).index],
            1e-5,
        )


@pytest.mark.parametrize("ends", [True, False])
def test_every_sampled_token_and_no_other_is_scored(tiny: Tiny, ends: bool) -> None:
    """With a sampled eos it is scored, once; a full-length answer without eos has exactly its own tokens."""
    answer = [7, 8, EOS] if ends else [7, 8, 9]
    forest = forest_of(
        ([1, EOS], [(Kind.SAMPLED, answer)]),
        ([1, EOS], [(Kind.SAMPLED, answer)]),
        ([1, EOS, 5], [(Kind.SAMPLED, [4] * 9)]),
    )
    found = score(tiny("rotary", torch.float32), forest).log_probs
    assert (~found.isnan()).tolist() == [False, False, True, True, True, False] + [True] * 9
    assert forest.tokens.tolist() == [1, EOS, *answer, 5, *[4] * 9]
    assert len(forest.sampled([0]).index) == len(answer)


def test_what_was_not_asked_for_is_nan(tiny: Tiny) -> None:
    """And what was has the oracle's value; tolerance 1e-10, float64."""
    model, forest = tiny("rotary", torch.float64), varied()
    found = score(model, forest, rollouts=[2, 5], entropy=True)
    expected = oracle(model, forest, rollouts=[2, 5])[0]
    assert int((~expected.isnan()).sum()) == 6
    assert_close(found.log_probs, expected, 1e-10)
    assert found.entropy is not None
    assert torch.equal(found.entropy.isnan(), expected.isnan())


@pytest.mark.parametrize("entropy", [True, False])
def test_a_forest_in_which_nothing_was_sampled(tiny: Tiny, entropy: bool) -> None:
    found = score(tiny("rotary", torch.float32), forest_of(([1, 2], []), ([], [])), entropy=entropy)
    assert found.log_probs.isnan().tolist() == [True, True]
    assert (found.entropy is not None) == entropy
    assert score(tiny("rotary", torch.float32), Forest()).log_probs.numel() == 0


def test_a_sampled_token_without_a_token_before_it_is_refused(tiny: Tiny) -> None:
    forest = forest_of(([1], [(Kind.SAMPLED, [5])]), ([], [(Kind.SAMPLED, [1, 5])]))
    with pytest.raises(ForestError, match="no token before it"):
        score(tiny("rotary", torch.float32), forest)
    assert score(tiny("rotary", torch.float32), forest, rollouts=[0]).log_probs.isnan().tolist() == [True, False]


def test_the_reference_is_scored_beside_and_without_gradient(tiny: Tiny) -> None:
    """Tolerance 1e-10, float64."""
    model, reference, forest = tiny("rotary", torch.float64), tiny("rotary", torch.float64, seed=1), varied()
    found: Scores = score(model, forest, reference=reference, temperature=0.7)
    assert found.reference_log_probs is not None
    assert not found.reference_log_probs.requires_grad
    assert found.log_probs.requires_grad
    assert_close(found.reference_log_probs, oracle(reference, forest, temperature=0.7)[0], 1e-10)
    assert_close(found.log_probs, oracle(model, forest, temperature=0.7)[0], 1e-10)
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize("which", ["model", "reference"])
def test_a_model_in_training_mode_is_refused(tiny: Tiny, which: str) -> None:
    """Dropout would make the log-probs those of no model."""
    models = {"model": tiny("absolute", torch.float32), "reference": tiny("absolute", torch.float32)}
    models[which].train()
    with pytest.raises(ModelError, match=which):
        score(models["model"], varied(), reference=models["reference"])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_has_no_density_is_refused(tiny: Tiny, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        score(tiny("rotary", torch.float32), varied(), temperature=temperature)


def test_a_row_may_fill_the_context_and_the_environment_may_overrun_it(tiny: Tiny) -> None:
    """What comes after the last sampled token is not run: 64 positions are enough here. Tolerance 1e-5, float32."""
    model = tiny("absolute", torch.float32)
    forest = forest_of(([1], [(Kind.SAMPLED, [7] * 63), (Kind.ENVIRONMENT, [8] * 20)]))
    path = forest_of(([1], [(Kind.SAMPLED, [7] * 63)]))
    assert_close(score(model, forest).log_probs[:64], oracle(model, path)[0], 1e-5)
    assert score(model, forest).log_probs[64:].isnan().all()


def test_what_is_shared_is_run_once(tiny: Tiny) -> None:
    """Eight equal completions and one that is a prefix of them are one row; a row's last wanted token ends it."""
    model, shapes = tiny("rotary", torch.float32), []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    same = [([1, 5], [(Kind.SAMPLED, [7, 8, 9])])] * 8
    score(
        model,
        forest_of(
            *same, ([1, 5], [(Kind.SAMPLED, [7]), (Kind.ENVIRONMENT, [20] * 6)]), ([1, 5], [(Kind.SAMPLED, [7])])
        ),
        engine="rows",
    )
    score(model, forest_of(([1, 5], [(Kind.SAMPLED, [7])]), *same), engine="rows")
    handle.remove()
    assert shapes == [(1, 5), (1, 5)]


# ---------------------------------------------------------------- engines

SHARED = ([1, *[5] * 19], [[7, 8, 9], [6, 8], [4]])
"""A prompt of 20 tokens and three answers; the last token of an answer is not run when prefixes are shared."""
COMPUTED = {"flat": 20 + 2 + 1, "nodes": 20 + 2 * 2, "rows": 3 * 23}
"""The distinct tokens; the same and one of padding; three rows, padded to the longest."""


@pytest.mark.parametrize("engine", ["flat", "nodes", "rows"])
def test_each_engine_gives_the_same_and_says_what_it_ran(tiny: Tiny, engine: Engine) -> None:
    """Value and gradient, tolerance 1e-10, float64; tokens counted by hand, those of the reference not among them."""
    model, (prompt, answers) = tiny("rotary64", torch.float64), SHARED
    forest = forest_of(*((prompt, [(Kind.SAMPLED, answer)]) for answer in answers))
    found = score(model, forest, engine=engine, reference=model, entropy=True)
    expected = oracle(model, forest)
    assert (found.engine, found.tokens_computed) == (engine, COMPUTED[engine])
    assert found.entropy is not None
    assert found.reference_log_probs is not None
    assert_close(found.log_probs, expected[0], 1e-10)
    assert_close(found.entropy, expected[1], 1e-10)
    assert_close(found.reference_log_probs, expected[0], 1e-10)
    for a, b in zip(gradients(weighted(found.log_probs), model), gradients(weighted(expected[0]), model), strict=True):
        assert_close(a, b, 1e-10)


@pytest.mark.parametrize(("family", "engine"), [("rotary", "flat"), ("absolute", "flat"), ("alibi", "nodes")])
def test_the_engine_is_chosen_for_model_and_reference_each_for_itself(tiny: Tiny, family: str, engine: Engine) -> None:
    """Tolerance 1e-5, float32."""
    model, reference, forest = tiny("rotary", torch.float32), tiny(family, torch.float32), varied()
    assert score(reference, forest).engine == engine
    found = score(model, forest, reference=reference)
    assert found.engine == "flat"
    assert found.reference_log_probs is not None
    assert_close(found.reference_log_probs, oracle(reference, forest)[0], 1e-5)


def test_a_model_that_shares_nothing_is_scored_by_rows_and_says_so(tiny: Tiny) -> None:
    """Tolerance 1e-10, float64."""
    bare, forest = Bare(tiny("rotary", torch.float64)), varied()
    with pytest.warns(PlainScoringWarning, match="Bare is scored row by row.*no config"):
        found = score(bare, forest)
    assert found.engine == "rows"
    assert_close(found.log_probs, score(bare.inner, forest, engine="rows").log_probs, 1e-10)


@pytest.mark.parametrize("engine", ["flat", "nodes", "rows"])
def test_a_support_cuts_the_distribution(tiny: Tiny, engine: Engine) -> None:
    """Greedy tokens have log-prob 0 under top-k 1, others that of two tokens; tolerance 1e-10, float64."""
    model = tiny("absolute", torch.float64)
    with torch.no_grad():
        logits = model(ids(1, 5, 6)[None]).logits[0, -1].double()
    best, other = logits.topk(2).indices.tolist()
    forest = forest_of(([1, 5, 6], [(Kind.SAMPLED, [best])]), ([1, 5, 6], [(Kind.SAMPLED, [other])]))
    found = score(model, forest, support=Support(top_k=1), engine=engine, entropy=True)
    two = torch.log_softmax(logits[[best, other]], -1)
    index = [int(forest.sampled([number]).index) for number in range(2)]
    assert_close(found.log_probs[index].detach(), torch.stack([torch.zeros_like(two[1]), two[1]]), 1e-10)


@pytest.mark.parametrize("engine", ["flat", "nodes", "rows"])
def test_layers_that_are_computed_again_give_the_same(tiny: Tiny, engine: Engine) -> None:
    """Value and gradient, tolerance 1e-10, float64; and less is kept."""
    model, forest, kept = tiny("rotary64", torch.float64), varied(), []
    found = []
    for again in (False, True):
        with counted_saved(own_storages(model)) as saved:
            scores = score(model, forest, gradient_checkpointing=again, engine=engine)
            kept.append(sum(saved.values()))
        found.append((scores.log_probs.detach(), gradients(weighted(scores.log_probs), model)))
    assert kept[1] < 0.6 * kept[0]
    assert_close(found[1][0], found[0][0], 1e-10)
    for a, b in zip(found[1][1], found[0][1], strict=True):
        assert_close(a, b, 1e-10)


def test_scoring_touches_no_global_random_state(tiny: Tiny) -> None:
    model, before = tiny("rotary", torch.float64), torch.get_rng_state()
    weighted(score(model, varied(), chunk=2).log_probs).backward()
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- token_log_probs


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 12), st.integers(1, 15), st.floats(0.1, 3.0), st.booleans())
def test_chunks_give_the_full_softmax(rows: int, chunk: int, temperature: float, entropy: bool) -> None:
    """Value and gradient of log-probs and entropy; tolerance 1e-12, float64."""
    generator = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, 7, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 7, (rows,), generator=generator)
    table = torch.log_softmax(logits / temperature, -1)
    values, entropies = token_log_probs(logits, targets, temperature=temperature, entropy=entropy, chunk=chunk)
    pairs = [(values, table.gather(1, targets[:, None])[:, 0])]
    assert (entropies is not None) == entropy
    if entropies is not None:
        pairs.append((entropies, -(table.exp() * table).sum(1)))
    for found, expected in pairs:
        assert_close(found, expected, 1e-12)
        if rows:
            [a], [b] = (torch.autograd.grad(x.square().sum(), logits, retain_graph=True) for x in (found, expected))
            assert_close(a, b, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_normalised_in_float32(dtype: torch.dtype) -> None:
    """Tolerance 1e-6 against float64 of the same rounded logits."""
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values, _ = token_log_probs(logits, torch.arange(5))
    assert values.dtype == torch.float32
    assert_close(values, torch.log_softmax(logits.double(), -1)[torch.arange(5), torch.arange(5)], 1e-6)


def test_a_token_that_is_ruled_out_adds_nothing_to_the_entropy() -> None:
    """A logit of -inf has p = 0; two equal tokens are left: log 2. Tolerance 1e-12; the gradient is finite."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    values, entropy = token_log_probs(logits, ids(0), entropy=True)
    assert entropy is not None
    assert_close(values, torch.tensor([-0.6931471805599453]), 1e-7)
    assert_close(entropy, torch.tensor([0.6931471805599453]), 1e-7)
    [gradient] = torch.autograd.grad((values + entropy).sum(), logits)
    assert_close(gradient, torch.tensor([[0.5, -0.5, 0.0]]), 1e-12)


def test_shapes_and_chunks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one row of logits"):
        token_log_probs(torch.zeros(2, 4), ids(1))
    with pytest.raises(ValueError, match="chunk"):
        token_log_probs(torch.zeros(1, 4), ids(1), chunk=0)


def test_a_model_is_for_one_thread_at_a_time() -> None:
    """The second is told, and the first is none the worse; a copy of the model is another model."""
    model, forest = zoo.named("Llama").build(), zoo.two_level_forest()
    right = score(model, forest).log_probs.detach()
    copied = copy.deepcopy(model)
    beside: list[Tensor] = []

    def other() -> None:
        beside.append(score(copied, forest).log_probs.detach())
        score(model, forest)

    told = zoo.while_it_runs(model.get_input_embeddings(), other)
    found = score(model, forest).log_probs.detach()
    assert [type(error) for error in told] == [ModelError]
    assert "another thread" in str(told[0])
    assert torch.equal(found.nan_to_num(1.0), right.nan_to_num(1.0))
    assert torch.equal(beside[0].nan_to_num(1.0), right.nan_to_num(1.0))
    assert torch.equal(score(model, forest).log_probs.detach().nan_to_num(1.0), right.nan_to_num(1.0))
