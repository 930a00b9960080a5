"""Every engine against the oracle on every architecture of the zoo: values and gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from tests.scoring import zoo
from tests.scoring.zoo import ZOO, Answers, Architecture, Engine, Errors, measure, named, two_level_forest

from ramet.errors import ModelError
from ramet.forest import Forest
from ramet.scoring.flat import score_flat
from ramet.scoring.nodes import score_nodes
from ramet.scoring.rows import score_rows
from ramet.types import Kind

ENGINES: dict[str, Engine] = {"rows": score_rows, "nodes": score_nodes, "flat": score_flat}
RIGHT = {"rows": ["rows"], "nodes": ["rows", "nodes"], "flat": ["rows", "nodes", "flat"]}
"""Which engines are right for an architecture, by the best one that is."""

TOLERANCE = 1e-5
WRONG = 1e-2
"""What rounding never reaches: a thousand times the tolerance."""

PLAIN = [architecture for architecture in ZOO if not architecture.crosses]
CROSSING = [architecture for architecture in ZOO if architecture.crosses]


def pairs(architectures: list[Architecture], *, right: bool) -> list[Any]:
    return [
        pytest.param(architecture, engine, id=f"{architecture.name}, {engine}")
        for architecture in architectures
        for engine in ENGINES
        if (engine in RIGHT[architecture.shares]) == right
    ]


@functools.cache
def tree(prompt: int) -> Forest:
    return two_level_forest(prompt=prompt)


@functools.cache
def right_answers(name: str, prompt: int) -> Answers:
    return zoo.right_answers(named(name), tree(prompt))


def errors(architecture: Architecture, engine: str, prompt: int = 24, **options: Any) -> Errors:
    right = right_answers(architecture.name, prompt)
    return measure(architecture, ENGINES[engine], tree(prompt), right, **options)


@pytest.mark.parametrize(("architecture", "engine"), pairs(PLAIN, right=True))
def test_values_and_gradients_are_the_oracles(architecture: Architecture, engine: str) -> None:
    """Log-probs and entropies within 1e-5, each parameter's gradient within 1e-5 relative, float32."""
    found = errors(architecture, engine)
    assert found.log_probs < TOLERANCE
    assert found.entropy < TOLERANCE
    assert found.gradients < TOLERANCE


@pytest.mark.parametrize("architecture", [a for a in PLAIN if a.shares == "nodes"], ids=lambda a: a.name)
def test_passes_that_are_computed_again_give_the_same(architecture: Architecture) -> None:
    """Gradient checkpointing over recurrent states and biases by distance, down to a leaf a pass; 1e-5, float32."""
    assert errors(architecture, "nodes", gradient_checkpointing=True, max_tokens=12).worst < TOLERANCE


@pytest.mark.parametrize("architecture", [a for a in PLAIN if a.shares == "nodes"], ids=lambda a: a.name)
def test_leaves_one_by_one_give_the_same(architecture: Architecture) -> None:
    """Some run a single token, which a recurrent model takes for a step of decoding; 1e-5, float32."""
    assert errors(architecture, "nodes", max_tokens=1).worst < TOLERANCE


@pytest.mark.parametrize(("architecture", "engine"), pairs(PLAIN, right=False))
def test_where_sharing_is_wrong_it_is_far_off_or_refused(architecture: Architecture, engine: str) -> None:
    """Mamba and Jamba drop their state when several tokens follow a cache; no recurrence knows a flat tree.

    Values and gradients are both far off, so that comparing either with plain scoring on one tree finds it out.
    """
    try:
        found = errors(architecture, engine)
    except (TypeError, AttributeError, ModelError):  # called in a way that a stock model was not made for
        return
    assert found.log_probs > WRONG
    assert found.gradients > WRONG


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("architecture", CROSSING, ids=lambda a: a.name)
def test_within_the_original_length_all_engines_are_right(architecture: Architecture, engine: str) -> None:
    """Paths of at most 31 tokens, where positions are turned anew from 32 on: 1e-5, float32."""
    assert max(map(len, map(tree(5).path, range(len(tree(5).rollouts))))) < zoo.ORIGINAL
    assert errors(architecture, engine, prompt=5).worst < TOLERANCE


@pytest.mark.parametrize("engine", ["nodes", "flat"])
@pytest.mark.parametrize("architecture", CROSSING, ids=lambda a: a.name)
def test_across_the_original_length_sharing_is_far_off(architecture: Architecture, engine: str) -> None:
    """A shared prefix has one set of keys, and a short row and a long one need two."""
    found = errors(architecture, engine)
    assert found.log_probs > WRONG
    assert found.gradients > WRONG


@pytest.mark.parametrize("architecture", CROSSING, ids=lambda a: a.name)
def test_across_the_original_length_rows_are_right(architecture: Architecture) -> None:
    """Rows that share nothing, on either side of it, the long ones first: 1e-5, float32."""
    generator = torch.Generator().manual_seed(1)
    forest = Forest()
    for group, length in enumerate((40, 4, 30, 33, 17)):
        prompt, answer = zoo.random_tokens(length, generator), zoo.random_tokens(6, generator)
        zoo.add_rollout(forest, group, 0, prompt, (Kind.SAMPLED, answer))
    assert measure(architecture, score_rows, forest, zoo.right_answers(architecture, forest)).worst < TOLERANCE


# ---------------------------------------------------------------- the zoo itself


def test_there_are_enough_that_share() -> None:
    assert sum(architecture.shares != "rows" for architecture in ZOO) >= 26
    assert len({architecture.name for architecture in ZOO}) == len(ZOO)


def test_the_tree_has_what_is_hard() -> None:
    forest = tree(24)
    paths = [tuple(forest.path(number).tolist()) for number in range(len(forest.rollouts))]
    assert len(forest.children(0)) == 2
    assert any(paths.count(path) > 1 for path in paths)
    assert any(a != b and b[: len(a)] == a for a in paths for b in paths)
    assert max(map(len, paths)) == 24 + 12 + 14
    shared = [node for node in range(1, forest.node_count) if len(forest.children(node)) > 1]
    assert {len(forest.node_tokens(node)) for node in shared} == {24, 12, 9, 8}
    assert min(len(forest.node_tokens(node)) for node in shared) < zoo.WINDOW < 24


@pytest.mark.parametrize("name", ["Mistral", "Qwen2 sliding", "Cohere2", "GPT-OSS", "Gemma 2", "Gemma 3", "Starcoder2"])
def test_the_window_decides(name: str) -> None:
    """Without it the answers are others: an engine that ignores it is found out."""

    def wide() -> Any:
        config = named(name).config()
        config.sliding_window = 1000
        return config

    widened = dataclasses.replace(named(name), config=wide)
    differs = zoo.right_answers(widened, tree(24)).log_probs - right_answers(name, 24).log_probs
    assert float(differs.nan_to_num().abs().max()) > WRONG


def test_the_soft_cap_decides() -> None:
    def uncapped() -> Any:
        config = zoo.gemma2()
        config.attn_logit_softcapping = None
        return config

    free = dataclasses.replace(named("Gemma 2"), config=uncapped)
    differs = zoo.right_answers(free, tree(24)).log_probs - right_answers("Gemma 2", 24).log_probs
    assert float(differs.nan_to_num().abs().max()) > WRONG


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (named("Llama").build(seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not any(map(torch.equal, first.parameters(), other.parameters()))
