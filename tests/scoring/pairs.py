"""Everything that scoring composes of, each pair of settings at least once, against each trajectory alone."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tests.scoring import zoo
from torch import Tensor, nn

from ramet.forest import Forest
from ramet.scoring import score
from ramet.scoring.adapter import without_adapter
from ramet.scoring.layout import batches
from ramet.types import Kind, Support

AXES: dict[str, tuple[Any, ...]] = {
    "prefixes": ("shared", "rows"),
    "trees": (1, 2),
    "chunk": (1024, 3),
    "entropy": (False, True),
    "temperature": (1.0, 0.7),
    "support": (None, Support(top_k=20, top_p=0.95, min_p=0.001)),
    "checkpointing": (False, True),
    "autocast": (None, torch.bfloat16),
    "adapter": (False, True),
    "micro_batch": (None, 60),
}
ARCHITECTURES = ("Gemma 2", "Mixtral", "LFM2")
"""Windows and soft caps; a mixture of experts; and one that shares node by node."""
ENTROPY = 0.3
"""The weight of the entropy in the loss."""
TARGETS = {"Gemma 2": ["q_proj", "v_proj"], "Mixtral": ["q_proj", "v_proj"], "LFM2": ["q_proj", "in_proj"]}

Mode = dict[str, Any]
Setting = tuple[str, Any]


def settings_of(mode: Mode) -> set[tuple[Setting, Setting]]:
    """Return the pairs of settings that a mode holds."""
    return set(itertools.combinations(((name, mode[name]) for name in AXES), 2))


@functools.cache
def modes() -> tuple[Mode, ...]:
    """Return modes that hold each pair of settings at least once."""
    everything = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    missing: set[tuple[Setting, Setting]] = set().union(*map(settings_of, everything))
    dice, found = random.Random(0), []
    while missing:
        best = max(dice.sample(everything, 200), key=lambda mode: len(settings_of(mode) & missing))
        missing -= settings_of(best)
        found.append(best)
    return tuple(found)


# ---------------------------------------------------------------- what is scored


@functools.cache
def forest_of(trees: int) -> Forest:
    """Two trees that are packed into one pass, or the first of them alone."""
    whole = zoo.two_level_forest()
    if trees == 2:
        return whole
    forest = Forest()
    for rollout in (one for one in whole.rollouts if one.group == 0):
        number = whole.rollouts.index(rollout)
        kinds, path = rollout.kinds.tolist(), whole.path(number).tolist()
        pairs = itertools.groupby(zip(kinds, path, strict=True), key=lambda pair: pair[0])
        runs = [(kind, [token for _, token in run]) for kind, run in pairs]
        [(_, prompt), *rest] = runs
        zoo.add_rollout(forest, 0, rollout.member, prompt, *((Kind(kind), tokens) for kind, tokens in rest))
    return forest


@functools.cache
def models_of(name: str) -> tuple[Any, Any]:
    """Return a model of the zoo, and a copy under an adapter that does something."""
    import peft

    plain = zoo.named(name).build()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", FutureWarning)  # what peft asks of transformers is on its way out
        config = peft.LoraConfig(r=2, target_modules=TARGETS[name], lora_dropout=0.5)
        adapted = peft.get_peft_model(copy.deepcopy(plain), config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (one for one in adapted.parameters() if one.requires_grad):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return plain, adapted


def weights_of(forest: Forest, number: int) -> Tensor:
    """The weight of each sampled token of a rollout in the loss: a function of the rollout's number."""
    count = len(forest.sampled([number]).index)
    return torch.randn(count, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


@dataclass(frozen=True)
class Result:
    """Log-probs, entropies and reference log-probs of each rollout's sampled tokens, one after another, and gradients.

    The loss is a weighted sum over rollouts, so that a token that several share counts for each of them.
    """

    log_probs: Tensor
    entropy: Tensor | None
    reference: Tensor | None
    gradients: dict[str, Tensor]


def found_of(name: str, mode: Mode) -> Result:
    """Score with `score`, in micro-batches if asked, each with a backward pass of its own."""
    plain, adapted = models_of(name)
    model, forest = adapted if mode["adapter"] else plain, forest_of(mode["trees"])
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    total = {key: torch.zeros_like(one) for key, one in trained.items()}
    numbers, limit = range(len(forest.rollouts)), mode["micro_batch"]
    log_probs, entropies, beside = [], [], []
    for part in [list(numbers)] if limit is None else batches(forest, numbers, limit):
        scores = score(
            model,
            forest,
            rollouts=part,
            temperature=mode["temperature"],
            entropy=mode["entropy"],
            reference=without_adapter(model) if mode["adapter"] else None,
            support=mode["support"],
            max_tokens=limit,
            chunk=mode["chunk"],
            autocast=mode["autocast"],
            gradient_checkpointing=mode["checkpointing"],
            engine="rows" if mode["prefixes"] == "rows" else zoo.named(name).shares,
        )
        loss = torch.zeros(())
        for number in part:
            index, weights = forest.sampled([number]).index, weights_of(forest, number)
            loss = loss + (weights.to(scores.log_probs) * scores.log_probs[index]).sum()
            log_probs.append(scores.log_probs[index].detach())
            if scores.entropy is not None:
                loss = loss + ENTROPY * (weights.to(scores.entropy) * scores.entropy[index]).sum()
                entropies.append(scores.entropy[index].detach())
            if scores.reference_log_probs is not None:
                beside.append(scores.reference_log_probs[index])
        for key, gradient in zip(
            trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True
        ):
            total[key] += 0 if gradient is None else gradient
    return Result(
        torch.cat(log_probs), torch.cat(entropies) if entropies else None, torch.cat(beside) if beside else None, total
    )


# ---------------------------------------------------------------- the oracle


def cut(logits: Tensor, targets: Tensor, support: Support) -> Tensor:
    """Rule out what is not in the support, row by row and token by token; the target itself stays."""
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, (p, target) in enumerate(zip(torch.softmax(logits, -1).tolist(), targets.tolist(), strict=True)):
        order = sorted(range(len(p)), key=lambda token: (-p[token], token))[: support.top_k]
        whole, sum_before = sum(p[token] for token in order), 0.0
        for token in order:
            if sum_before < support.top_p * whole and p[token] >= support.min_p * p[order[0]]:
                kept[row, token] = True
            sum_before += p[token]
        kept[row, target] = True
    return logits.masked_fill(~kept, -torch.inf)


def in_double(model: Any, mixture: bool) -> nn.Module:
    """Return a copy in float64, under its adapter if it has one; mixtures of experts need eager experts there."""
    double: Any = copy.deepcopy(model).double()
    if mixture:
        (double.get_base_model() if hasattr(double, "get_base_model") else double).set_experts_implementation("eager")
    return double  # type: ignore[no-any-return]


def alone(model: nn.Module, forest: Forest, mode: Mode) -> tuple[list[Tensor], list[Tensor]]:
    """Return log-probs and entropies of each rollout's sampled tokens: unpadded, all logits, in the model's float64."""
    values, entropies = [], []
    for number, rollout in enumerate(forest.rollouts):
        path = forest.path(number)
        at = torch.nonzero(torch.tensor(rollout.kinds) == Kind.SAMPLED).squeeze(1)
        logits = model(input_ids=path[None], use_cache=False).logits[0, at - 1].double() / mode["temperature"]
        if mode["support"] is not None:
            logits = cut(logits, path[at], mode["support"])
        table = torch.log_softmax(logits, -1)
        values.append(table.gather(1, path[at, None]).squeeze(1))
        entropies.append(-(table.exp() * table.masked_fill(table.isneginf(), 0.0)).sum(1))
    return values, entropies


def expected_of(name: str, mode: Mode) -> Result:
    """Return what is right; it depends on what is asked, and not on how it is computed."""
    return _expected(name, **{axis: mode[axis] for axis in ("trees", "entropy", "temperature", "support", "adapter")})


@functools.cache
def _expected(name: str, **mode: Any) -> Result:
    plain, adapted = models_of(name)
    mixture, forest = zoo.named(name).mixture, forest_of(mode["trees"])
    double = in_double(adapted if mode["adapter"] else plain, mixture)
    values, entropies = alone(double, forest, mode)
    trained = {key: one for key, one in double.named_parameters() if one.requires_grad}
    loss = torch.zeros((), dtype=torch.float64)
    for number, (value, entropy) in enumerate(zip(values, entropies, strict=True)):
        loss = loss + (weights_of(forest, number) * (value + (ENTROPY * entropy if mode["entropy"] else 0.0))).sum()
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    beside = None
    if mode["adapter"]:
        with torch.no_grad():
            beside = torch.cat(alone(in_double(plain, mixture), forest, mode)[0])
    return Result(
        torch.cat(values).detach(),
        torch.cat(entropies).detach() if mode["entropy"] else None,
        beside,
        {
            key: torch.zeros_like(one) if gradient is None else gradient
            for (key, one), gradient in zip(trained.items(), gradients, strict=True)
        },
    )


# ---------------------------------------------------------------- the errors


@dataclass(frozen=True)
class Errors:
    """How far off a result is: the largest error of a value, the median one, and the gradient's, relative."""

    value: float
    median: float
    gradient: float


def errors(name: str, mode: Mode) -> Errors:
    found, expected = found_of(name, mode), expected_of(name, mode)
    differences = []
    for mine, right in (
        (found.log_probs, expected.log_probs),
        (found.entropy, expected.entropy),
        (found.reference, expected.reference),
    ):
        if (mine is None) != (right is None):
            raise AssertionError(f"one has what the other has not: {mode}")
        if mine is not None and right is not None:
            differences.append((mine - right).abs())
    both = torch.cat(differences)
    if mode["autocast"] is None:
        gradient = zoo.gradient_error(found.gradients, expected.gradients)
    else:  # a router that decides otherwise in bfloat16 leaves an expert without gradient: all of it together
        mine, right = (
            torch.cat([one.flatten().double() for one in side.gradients.values()]) for side in (found, expected)
        )
        gradient = float((mine - right).norm() / right.norm())
    return Errors(float(both.max()), float(both.median()), gradient)


def said(setting: Setting) -> str:
    """Return a setting as it is printed."""
    name, value = setting
    if isinstance(value, Support):
        value = "top-k, top-p, min-p"
    return f"{name} {str(value).removeprefix('torch.')}"


def pair_table(architectures: Iterable[str] = ARCHITECTURES) -> str:
    """Run all modes and return, for each pair of settings, the worst errors, in float32 and under autocast."""
    worst: dict[tuple[Setting, Setting, bool], tuple[float, float]] = {}
    for name, mode in itertools.product(architectures, modes()):
        error = errors(name, mode)
        low = mode["autocast"] is not None
        for first, second in settings_of(mode):
            value, gradient = worst.get((first, second, low), (0.0, 0.0))
            worst[first, second, low] = (
                max(value, error.median if low else error.value),
                max(gradient, error.gradient),
            )
    lines = ["| setting | setting | value | gradient |", "|---|---|---|---|"]
    order = [(axis, value) for axis, values in AXES.items() for value in values]
    for first, second, low in sorted(worst, key=lambda key: (order.index(key[0]), order.index(key[1]), key[2])):
        value, gradient = worst[first, second, low]
        note = " (bfloat16: median)" if low else ""
        lines.append(f"| {said(first)} | {said(second)} | {value:.0e}{note} | {gradient:.0e} |")
    return "\n".join(lines)
