"""The node-by-node engine: its tree by hand, what it runs and how often, and any forest against each row alone."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scoring import zoo
from tests.scoring.zoo import add_rollout, named, oracle, two_level_forest, weighted
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ramet.errors import ForestError, ModelError
from ramet.forest import Forest
from ramet.scoring.nodes import Segment, asked_of, fold_short, fork, leaf_batches, score_nodes, tree_of
from ramet.scoring.rows import Options, Row, rows_to_score, score_rows
from ramet.types import Kind

Tiny = Callable[..., PreTrainedModel]
SAY, ENV = Kind.SAMPLED, Kind.ENVIRONMENT
NEVER = 10**6
"""More tokens than any sharing here spares."""


def forest_of(*rollouts: tuple[list[int], list[tuple[Kind, list[int]]]]) -> Forest:
    forest = Forest()
    for group, (prompt, segments) in enumerate(rollouts):
        add_rollout(forest, group, 0, prompt, *segments)
    return forest


def everything(forest: Forest) -> range:
    return range(len(forest.rollouts))


def row(*index: int, wanted: list[int]) -> Row:
    return Row(torch.tensor(index), torch.tensor(wanted))


Shape = tuple[int, list[int], list[bool], list["Shape"]]


def shape(segment: Segment) -> Shape:
    """A segment as plain lists: depth, places, which are wanted, children."""
    return segment.depth, segment.index.tolist(), segment.wanted.tolist(), [shape(child) for child in segment.children]


def leaf(length: int) -> Segment:
    return Segment(0, torch.zeros(length, dtype=torch.int64), torch.ones(length, dtype=torch.bool))


# ---------------------------------------------------------------- the tree

YES, NO = True, False


def test_rows_become_a_tree() -> None:
    """A prompt 0 1 2 with an answer 3 4, one 5, and one 3 6; and a row of another prompt."""
    rows = [
        row(0, 1, 2, 3, 4, wanted=[3, 4]),
        row(0, 1, 2, 5, wanted=[3]),
        row(0, 1, 2, 3, 6, wanted=[4]),
        row(7, 8, wanted=[1]),
    ]
    assert shape(tree_of(rows)) == (
        0,
        [],
        [],
        [
            (
                0,
                [0, 1, 2],
                [NO, NO, NO],
                [
                    (3, [3], [YES], [(4, [4], [YES], []), (4, [6], [YES], [])]),
                    (3, [5], [YES], []),
                ],
            ),
            (0, [7, 8], [NO, YES], []),
        ],
    )


def test_a_row_that_is_the_prefix_of_another_is_a_node_above_it() -> None:
    [only] = tree_of([row(0, 1, 2, wanted=[1]), row(0, 1, 2, 3, wanted=[3])]).children
    assert shape(only) == (0, [0, 1, 2], [NO, YES, NO], [(3, [3], [YES], [])])


def test_no_rows_are_a_tree_without_tokens() -> None:
    assert shape(tree_of([])) == (0, [], [], [])


@pytest.mark.parametrize(("worth", "shared"), [(6, True), (7, False)])
def test_what_spares_too_little_is_joined_to_its_children(worth: int, shared: bool) -> None:
    """Three tokens above three children spare 3 · (3 - 1) = 6; what they wanted is asked once."""
    rows = [row(0, 1, 2, *tail, wanted=[2, 3]) for tail in ([3], [4, 5], [6])]
    root = fold_short(tree_of(rows), worth)
    children = [(3, [3], [YES], []), (3, [4, 5], [YES, NO], []), (3, [6], [YES], [])]
    if shared:
        assert shape(root) == (0, [], [], [(0, [0, 1, 2], [NO, NO, YES], children)])
    else:
        assert shape(root)[3] == [
            (0, [0, 1, 2, 3], [NO, NO, YES, YES], []),
            (0, [0, 1, 2, 4, 5], [NO, NO, NO, YES, NO], []),
            (0, [0, 1, 2, 6], [NO, NO, NO, YES], []),
        ]


def test_what_is_joined_counts_for_its_parent() -> None:
    """A branch of two tokens with two leaves spares 2 and is joined; its parent then has three children, not two."""
    rows = [
        row(0, 1, 2, 3, 4, 5, wanted=[5]),
        row(0, 1, 2, 3, 4, 6, wanted=[5]),
        row(0, 1, 2, 7, wanted=[3]),
    ]
    [prompt] = fold_short(tree_of(rows), 6).children
    assert [child.index.tolist() for child in prompt.children] == [[3, 4, 5], [3, 4, 6], [7]]
    joined = fold_short(tree_of(rows), 7)
    assert [child.index.tolist() for child in joined.children] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6], [0, 1, 2, 7]]


def test_a_single_token_is_never_shared_and_a_single_child_never_apart() -> None:
    many = fold_short(tree_of([row(0, place, wanted=[1]) for place in range(1, 40)]), 0)
    assert [child.index.tolist() for child in many.children] == [[0, place] for place in range(1, 40)]
    [only] = fold_short(tree_of([row(0, 1, 2, wanted=[1]), row(0, 1, 2, 3, wanted=[3])]), 1).children
    assert shape(only) == (0, [0, 1, 2, 3], [NO, YES, NO, YES], [])


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=4),
        st.lists(st.tuples(st.sampled_from([SAY, ENV]), st.lists(st.integers(0, 2), max_size=4)), max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(ROWS, st.integers(0, 30))
def test_however_it_is_folded_each_wanted_token_is_asked_once(
    rollouts: list[tuple[list[int], list[tuple[Kind, list[int]]]]], worth: int
) -> None:
    """And every segment lies where it says, runs fewer tokens before it is folded, and shares nothing short after."""
    forest = forest_of(*rollouts)
    rows = rows_to_score(forest, everything(forest))
    wanted = sorted(place for one in rows for place in one.index[one.wanted].tolist())
    root = tree_of(rows)
    places = [place for segment in root.top_down() for place in segment.index.tolist()]
    assert len(places) == len(set(places))
    for tree in (root, fold_short(root, worth)):
        assert sorted(place for segment in tree.top_down() for place in asked_of(0, segment).place.tolist()) == wanted
        for segment in tree.top_down():
            assert all(child.depth == segment.depth + len(segment.index) for child in segment.children)
    inner = [segment for segment in root.top_down()[1:] if segment.children]
    assert all(len(segment.index) * (len(segment.children) - 1) >= worth for segment in inner)
    assert sum(len(segment.index) for segment in root.top_down()) >= len(places)


def test_a_tree_may_be_deeper_than_python_recurs() -> None:
    """A chain of 1,200 branches of two tokens, each with a leaf of one."""
    chain = torch.arange(2400)
    rows = [Row(torch.cat([chain[: 2 * n], torch.tensor([2400 + n])]), torch.tensor([2 * n])) for n in range(1, 1201)]
    root = tree_of(rows)
    assert len(root.top_down()) == 1 + 1199 + 1200
    assert max(segment.depth for segment in root.top_down()) == 2398
    assert len(fold_short(root, 16).top_down()) < 1 + 1199 + 1200


def test_what_is_asked_of_a_pass() -> None:
    """Its own wanted tokens but the first, which its parent predicts, and the first of each child, from its last."""
    child = Segment(3, torch.tensor([8, 9]), torch.tensor([YES, YES]))
    silent = Segment(3, torch.tensor([5]), torch.tensor([NO]))
    segment = Segment(0, torch.tensor([2, 3, 4]), torch.tensor([YES, NO, YES]), [child, silent])
    found = asked_of(7, segment)
    assert (found.line.tolist(), found.column.tolist(), found.place.tolist()) == ([7, 7], [1, 2], [4, 8])
    assert asked_of(0, silent).place.tolist() == []


def test_leaves_are_cut_to_the_budget() -> None:
    """Leaves of 2, 4, 4 and 6 tokens run 1, 3, 3 and 5; a leaf of one token runs nothing."""
    leaves = [leaf(6), leaf(4), leaf(1), leaf(2), leaf(4)]

    def lengths(max_tokens: int | None) -> list[list[int]]:
        return [[len(one.index) - 1 for one in batch] for batch in leaf_batches(leaves, max_tokens)]

    assert lengths(None) == [[1, 3, 3, 5]]
    assert lengths(9) == [[1, 3, 3], [5]]
    assert lengths(6) == [[1, 3], [3], [5]]
    assert lengths(1) == [[1], [3], [3], [5]]
    assert leaf_batches([leaf(1)], None) == []


# ---------------------------------------------------------------- what is run


@contextmanager
def passes(model: PreTrainedModel) -> Iterator[list[list[list[int]]]]:
    """Collect the ids of every forward pass of the body."""
    seen: list[list[list[int]]] = []
    embeddings: nn.Module = model.get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(lambda module, args: seen.append(args[0].tolist()))
    try:
        yield seen
    finally:
        handle.remove()


def branching() -> Forest:
    """A prompt 1 5 6, a branch 7 8 below it with three answers, and one answer straight from the prompt."""
    return forest_of(
        ([1, 5, 6], [(SAY, [7, 8, 9, 10])]),
        ([1, 5, 6], [(SAY, [7, 8, 11])]),
        ([1, 5, 6], [(SAY, [7, 8, 12, 13, 14])]),
        ([1, 5, 6], [(SAY, [15, 16, 17]), (ENV, [3] * 9)]),
        ([1, 5, 6], [(SAY, [7, 8])]),
    )


def test_every_distinct_token_is_run_once(model: PreTrainedModel) -> None:
    """The last token of a leaf predicts nothing, so 9 and 12 13 are run, and nothing of the answer 11."""
    with passes(model) as seen:
        score_nodes(model, branching(), everything(branching()), Options(), worth=1)
    assert seen == [[[1, 5, 6]], [[15, 16]], [[7, 8]], [[9, 0], [12, 13]]]


def test_a_budget_cuts_leaves_and_nothing_else(model: PreTrainedModel) -> None:
    with passes(model) as seen:
        score_nodes(model, branching(), everything(branching()), Options(max_tokens=2), worth=1)
    assert seen == [[[1, 5, 6]], [[15, 16]], [[7, 8]], [[9]], [[12, 13]]]


def test_without_sharing_rows_run_together(model: PreTrainedModel) -> None:
    """Different prompts, and prompts too short to be worth a pass: one batch."""
    forest = forest_of(([1, 5], [(SAY, [7, 8])]), ([1, 5], [(SAY, [9])]), ([2, 3, 4], [(SAY, [6])]))
    with passes(model) as seen:
        score_nodes(model, forest, everything(forest), Options(), worth=NEVER)
    assert [sorted(batch) for batch in seen] == [[[1, 5, 0], [1, 5, 7], [2, 3, 4]]]


# ---------------------------------------------------------------- against each row alone


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@functools.cache
def exact() -> PreTrainedModel:
    """A GPT-NeoX in float64, whose norms do not round to float32."""
    model: PreTrainedModel = named("GPT-NeoX").build().double()
    return model


@settings(deadline=None, max_examples=25)
@given(ROWS, st.sampled_from([0, 1, 4, NEVER]), st.sampled_from([None, 1, 7]), st.integers(1, 9), st.booleans())
def test_any_forest_scores_as_its_rows_alone(
    rollouts: list[tuple[list[int], list[tuple[Kind, list[int]]]]],
    worth: int,
    max_tokens: int | None,
    chunk: int,
    again: bool,
) -> None:
    """Values, entropies and gradients, trees of any depth; tolerance 1e-9, float64."""
    forest, model = forest_of(*rollouts), exact()
    right = oracle(model, forest, temperature=0.7, entropy_weight=0.5)
    options = Options(0.7, entropy=True, max_tokens=max_tokens, chunk=chunk, gradient_checkpointing=again)
    log_probs, entropy = score_nodes(model, forest, everything(forest), options, worth=worth)
    assert_close(log_probs, right.log_probs, 1e-9)
    if bool(right.log_probs.isnan().all()):
        return
    assert entropy is not None
    assert_close(entropy, right.entropy, 1e-9)
    found = zoo.gradients_of(weighted(log_probs) + 0.5 * weighted(entropy), model)
    for name, expected in right.gradients.items():
        assert_close(found[name], expected, 1e-9)


@pytest.mark.parametrize("name", ["Bamba", "Qwen3-Next", "Falcon ALiBi"])
def test_a_branch_of_one_token_is_no_step_of_decoding(name: str) -> None:
    """Prompts and branches of one token, leaves of two and more: value and gradient, 1e-5, float32."""
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(zoo.random_tokens, generator=generator)
    prompt, branch = draw(20), draw(1)
    answers = [branch + draw(length) for length in (2, 2, 3, 6)] + [draw(2), draw(1), draw(8)]
    forest = forest_of(*((prompt, [(SAY, answer)]) for answer in answers), (branch, [(SAY, draw(2))]))
    right = zoo.right_answers(named(name), forest)
    for options in (Options(), Options(max_tokens=1), Options(max_tokens=1, gradient_checkpointing=True)):
        found = zoo.measure(
            named(name),
            functools.partial(score_nodes, worth=1),
            forest,
            right,
            max_tokens=options.max_tokens,
            gradient_checkpointing=options.gradient_checkpointing,
        )
        assert found.worst < 1e-5


def test_only_the_rollouts_asked_for_are_scored(model: PreTrainedModel) -> None:
    """Tolerance 1e-5, float32: rows and nodes, NaN in the same places."""
    forest = branching()
    for some in ([1], [3, 4], [4], [0, 2]):
        found, _ = score_nodes(model, forest, some, Options(), worth=1)
        assert_close(found, score_rows(model, forest, some, Options())[0], 1e-5)
        assert torch.equal(torch.nonzero(~found.isnan())[:, 0], forest.sampled(some).index.unique())


def test_a_path_may_fill_the_context(tiny: Tiny) -> None:
    """There are 64 positions, and the environment may overrun them; tolerance 1e-5, float32."""
    model = tiny("absolute", torch.float32)
    forest = forest_of(
        ([1] * 20, [(SAY, [7] * 44), (ENV, [8] * 20)]),
        ([1] * 20, [(SAY, [7] * 42 + [9, 4])]),
        ([1] * 20, [(SAY, [7] * 42 + [3])]),
    )
    found, _ = score_nodes(model, forest, everything(forest), Options(), worth=1)
    assert_close(found, score_rows(model, forest, everything(forest), Options())[0], 1e-5)


def test_autocast_is_in_effect(tiny: Tiny) -> None:
    """bfloat16 keeps three digits: within 0.1 of float32, and not equal to it."""
    model, forest = tiny("absolute", torch.float32), two_forest()
    plain, _ = score_nodes(model, forest, everything(forest), Options(), worth=1)
    cast, _ = score_nodes(model, forest, everything(forest), Options(autocast=torch.bfloat16), worth=1)
    assert cast.dtype == torch.float32
    differs = (cast - plain).detach()[~plain.isnan()].abs()
    assert 1e-5 < float(differs.max()) < 0.1


def two_forest() -> Forest:
    return forest_of(([1, 5, 6, 4, 3], [(SAY, [7, 8, 9])]), ([1, 5, 6, 4, 3], [(SAY, [7, 8, 2, 4])]))


def test_without_gradient_nothing_is_kept(model: PreTrainedModel) -> None:
    with torch.no_grad():
        found, _ = score_nodes(model, branching(), everything(branching()), Options(gradient_checkpointing=True))
    assert not found.requires_grad
    assert score_nodes(model, branching(), everything(branching()), Options())[0].requires_grad


def test_passes_computed_again_hold_less() -> None:
    """What autograd holds after the forward pass, and that each pass is run a second time in the backward one."""
    model, forest = named("Llama").build(), two_level_forest()

    def held(again: bool) -> tuple[int, int]:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with passes(model) as seen:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                options = Options(gradient_checkpointing=again, max_tokens=20)
                found, _ = score_nodes(model, forest, everything(forest), options, worth=1)
            ran = len(seen)
            total = sum(sizes.values())
            torch.autograd.grad(weighted(found), list(model.parameters()))
            assert len(seen) == (2 * ran if again else ran)
        return ran, total

    (ran, kept), (as_many, less) = held(False), held(True)
    assert ran == as_many
    assert less < kept / 2


def test_a_fork_leaves_the_cache_as_it_is() -> None:
    """Attention, windows, convolutions, recurrences: growing one fork moves neither the cache nor another fork."""
    for name in ("Llama", "Gemma 3", "LFM2", "Bamba", "Qwen3-Next"):
        model = named(name).build()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=torch.arange(3, 27)[None], cache=cache, use_cache=True)
            before = [tensor.clone() for tensor in tensors_of(cache)]
            one, other = fork(cache, 3, model.device), fork(cache, 3, model.device)
            grown = model(input_ids=torch.arange(30, 45).reshape(3, 5), cache=one, use_cache=True)
            again = model(input_ids=torch.arange(30, 45).reshape(3, 5), cache=other, use_cache=True)
        assert torch.equal(grown.logits, again.logits)
        assert before
        assert all(map(torch.equal, before, tensors_of(cache)))
        assert cache.get_seq_length() == 24
        assert one.get_seq_length() == 29


def tensors_of(cache: DynamicCache) -> list[Tensor]:
    """Return every state in a cache, in order."""
    found: list[Tensor] = []
    for layer in cache.layers:
        states = vars(layer)
        for held in (states.get("keys"), states.get("values"), *states.get("conv_states", {}).values()):
            found += [held] if isinstance(held, Tensor) else []
        found += [state for state in states.get("recurrent_states", {}).values() if isinstance(state, Tensor)]
    return found


@pytest.mark.parametrize("entropy", [True, False])
def test_a_forest_in_which_nothing_was_sampled(tiny: Tiny, entropy: bool) -> None:
    model = tiny("rotary", torch.float32)
    found, _ = score_nodes(model, forest_of(([1, 2], []), ([], [])), [0, 1], Options(entropy=entropy))
    assert found.isnan().tolist() == [True, True]
    assert score_nodes(model, Forest(), [], Options())[0].numel() == 0


def test_a_sampled_token_without_a_token_before_it_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ForestError, match="no token before it"):
        score_nodes(tiny("rotary", torch.float32), forest_of(([], [(SAY, [1, 5])])), [0], Options())


class NoCache(nn.Module):
    """A causal model in two halves, whose body takes no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Body()

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.base_model(input_ids).last_hidden_state)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.table[input_ids])


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ModelError, match="takes no cache"):
        score_nodes(NoCache(), forest_of(([1], [(SAY, [2])])), [0], Options())


def test_scoring_touches_no_global_random_state(tiny: Tiny) -> None:
    model, before = tiny("rotary", torch.float32), torch.get_rng_state()
    found, _ = score_nodes(model, branching(), everything(branching()), Options(gradient_checkpointing=True), worth=1)
    weighted(found).backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_is_left_as_it_was(tiny: Tiny) -> None:
    """No hook, no attribute and no forward of its own stays behind."""
    model = tiny("rotary", torch.float32)
    before = Counter((name, key) for name, module in model.named_modules() for key in vars(module))
    score_nodes(model, branching(), everything(branching()), Options(), worth=1)
    assert Counter((name, key) for name, module in model.named_modules() for key in vars(module)) == before
