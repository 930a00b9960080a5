"""Which engine is right for a model: found out on one small tree, on the first use, values and gradients.

Models differ in what they make of a shared prefix, and the wrong ones are wrong in silence. Each engine that shares is
compared with each path run alone, and the first that is right is taken: flat, else nodes, else rows.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ramet.forest import Forest
from ramet.scoring.flat import score_flat
from ramet.scoring.lengths import forget_lengths, lengths_that_change, text_config, turning_lengths
from ramet.scoring.memory import memory_of
from ramet.scoring.nodes import score_nodes
from ramet.scoring.rows import Options, score_rows
from ramet.scoring.small_tree import small_forest

Engine = Literal["flat", "nodes", "rows"]
ScoreForest = Callable[[nn.Module, Forest, Sequence[int], Options], tuple[Tensor, Tensor | None]]

ENGINES: Mapping[Engine, ScoreForest] = {"flat": score_flat, "nodes": score_nodes, "rows": score_rows}

_SHARING: Mapping[Engine, ScoreForest] = {"flat": score_flat, "nodes": partial(score_nodes, worth=1)}
"""The engines that share, the fastest first, as they are tried: every inner node of a small tree is shared."""

TRIED = 64
"""Where a model changes within so many tokens, a tree beyond them is always tried."""
TREES = 3
"""An engine is right if it is right on one of so many trees.

A fault is one on every tree. What differs on one tree alone is a mixture of experts whose router was undecided between
two experts to the last digit.
"""
LONGEST = 4096
"""No tree with longer paths is tried: it would cost more than it is worth on the first use of a model."""
NUMBERS = 2**22
"""Gradients of so many trained numbers are compared at most: those of the smallest parameters, found in all layers."""


class PlainScoringWarning(UserWarning):
    """Every row of a model is run alone, because neither way of sharing prefixes is right for it."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an engine may be from each path alone: log-probs absolutely, a parameter's gradient relatively."""

    value: float = 1e-3
    gradient: float = 1e-2


WIDE = Tolerance(0.25, 0.25)
"""For weights of low precision that could not be checked in float32."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that is right for a model, and why those that would be faster are not.

    `gradients` says whether gradients were compared: nothing has one in a frozen model.
    """

    engine: Engine
    reasons: Mapping[str, str] = field(default_factory=dict)
    gradients: bool = True


def engine_of(model: nn.Module) -> Engine:
    """Return the fastest engine that is right for `model` on paths of any length at which it does the same."""
    return choice_of(model).engine


def engine_for(model: nn.Module, longest: int, *, gradient_checkpointing: bool = False) -> Engine:
    """Return the fastest engine that is right for `model` on paths of up to `longest` tokens."""
    return choice_of(model, longest, gradient_checkpointing=gradient_checkpointing).engine


def choice_of(model: nn.Module, longest: int = 0, *, gradient_checkpointing: bool = False) -> Choice:
    """Return the engine for paths of up to `longest` tokens, and the reasons; find both out where they are not known.

    They are known for as long as the model has these modules, this config, this attention, this device and as many
    trained parameters. They are found out again when `longest` first passes a length from which the model does
    something else, and for gradient checkpointing. The model is left as it was.
    """
    turn = min(turning_lengths(text_config(model)).values(), default=longest)
    if turn < longest:
        why = f"rotary positions beyond {turn} tokens depend on the longest row"
        return _known(model, turn, gradient_checkpointing, lambda: Choice("rows", {"flat": why, "nodes": why}))
    lengths = [length for length in lengths_that_change(model) if length < longest]
    cheap = max((length for length in lengths if length <= TRIED), default=0)
    choice = _checked(model, cheap, longest, gradient_checkpointing)
    far = {length for length in lengths if length > TRIED}
    if choice.engine == "flat":
        # Flat attention is told its window, or refuses: a window is as right on a long path as on a short one.
        far -= {getattr(text_config(model), "sliding_window", None)}
    return _checked(model, max(far), longest, gradient_checkpointing) if far else choice


def _checked(model: nn.Module, reach: int, longest: int, gradient_checkpointing: bool) -> Choice:
    beyond = [length for length in (*lengths_that_change(model), _context(model)) if length >= max(longest, reach + 1)]
    limit = min(beyond, default=None)
    return _known(model, reach, gradient_checkpointing, lambda: _find_out(model, reach, limit, gradient_checkpointing))


def _known(model: nn.Module, reach: int, gradient_checkpointing: bool, find_out: Callable[[], Choice]) -> Choice:
    key = (state_of(model), reach, gradient_checkpointing)
    known = _CHOICES.setdefault(model, {})
    choice = known.get(key)
    if choice is None:
        choice = find_out()
        if _NOT_FINITE not in choice.reasons.values():  # else nothing is known yet
            known[key] = choice
            _say(model, choice, reach)
    return choice


_CHOICES: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Choice]] = weakref.WeakKeyDictionary()


def _context(model: nn.Module) -> int:
    """Return how many positions a model has; 0 where it does not say."""
    context = getattr(text_config(model), "max_position_embeddings", None)
    return context if isinstance(context, int) else 0


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """Return what decides which engine is right, as far as it may change within one model."""
    configs = (getattr(model, "config", None), text_config(model))
    described = tuple(repr(vars(config)) for config in configs if config is not None)  # attention included
    parameters = list(model.parameters())
    trained = sum(parameter.requires_grad for parameter in parameters)
    kinds = frozenset((parameter.dtype, parameter.device.type) for parameter in parameters)
    return described, sum(1 for _ in model.modules()), len(parameters), trained, kinds


def _say(model: nn.Module, choice: Choice, reach: int) -> None:
    name = type(model).__name__ + (f" beyond {reach} tokens" if reach else "")
    reasons = "; ".join(f"{engine}: {reason}" for engine, reason in choice.reasons.items())
    if choice.engine == "rows":
        warnings.warn(
            f"{name} is scored row by row, without sharing prefixes, for no way of sharing them is right ({reasons})",
            PlainScoringWarning,
            stacklevel=2,
        )
    elif choice.reasons:
        logging.getLogger(__name__).info("%s: engine %s (%s)", name, choice.engine, reasons)


# ---------------------------------------------------------------- one tree, and what is compared on it


@dataclass(frozen=True, slots=True)
class _Found:
    """What an engine made of a tree: the log-probs of its sampled tokens, and gradients of a weighted sum of them."""

    values: Tensor
    gradients: tuple[Tensor | None, ...]


def _run(engine: ScoreForest, model: nn.Module, forest: Forest, options: Options) -> _Found:
    forget_lengths(model)
    rollouts = range(len(forest.rollouts))
    values = engine(model, forest, rollouts, options)[0][torch.unique(forest.sampled(rollouts).index)]
    parameters = _compared(model)
    if not parameters:
        return _Found(values.detach(), ())
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(0)).to(values)
    loss = (values * weights).sum()
    return _Found(values.detach(), torch.autograd.grad(loss, parameters, allow_unused=True))


_NOT_FINITE = "each path alone has log-probs or gradients that are not finite"


def _finite(found: _Found) -> bool:
    gradients = [gradient for gradient in found.gradients if gradient is not None]
    return all(bool(one.isfinite().all()) for one in (found.values, *gradients))


def _compared(model: nn.Module) -> list[nn.Parameter]:
    trained = sorted((one for one in model.parameters() if one.requires_grad), key=lambda one: one.numel())
    held = list(itertools.accumulate(parameter.numel() for parameter in trained))
    return trained[: max(1, sum(numbers <= NUMBERS for numbers in held))]


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong, and whether it is everywhere, so that no second tree needs to be tried."""

    text: str
    everywhere: bool = True


def _fault(found: _Found, expected: _Found, tolerance: Tolerance) -> _Fault | None:
    """Say what is wrong with what was found; None where nothing is."""
    if not _finite(found):
        return _Fault("some log-probs or gradients are missing or not finite")
    errors = (found.values - expected.values).abs()
    if not float(errors.max()) <= tolerance.value:
        broad = float((errors > tolerance.value).float().mean()) > 0.5
        return _Fault(f"log-probs are off by {float(errors.max()):.2g}", broad)
    norms = [0.0 if gradient is None else float(gradient.norm()) for gradient in expected.gradients]
    whole = sum(norm**2 for norm in norms) ** 0.5
    worst = 0.0
    for mine, theirs, norm in zip(found.gradients, expected.gradients, norms, strict=True):
        if mine is None and theirs is None:
            continue
        difference = mine - theirs if mine is not None and theirs is not None else mine if theirs is None else theirs
        assert difference is not None
        # A gradient that is zero but for rounding is compared with the whole.
        distance = float(difference.norm()) / max(norm, 1e-3 * whole, torch.finfo(torch.float32).tiny)
        worst = distance if not distance <= worst else worst
    return _Fault(f"gradients are off by {worst:.2g}", False) if not worst <= tolerance.gradient else None


# ---------------------------------------------------------------- finding out


def _find_out(model: nn.Module, reach: int, limit: int | None, gradient_checkpointing: bool) -> Choice:
    vocabulary = getattr(text_config(model), "vocab_size", None)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if vocabulary is None:
        return Choice("rows", {"flat": "the model has no config", "nodes": "the model has no config"}, trained)
    if reach > LONGEST:
        reason = f"not tried on paths longer than {LONGEST} tokens"
        return Choice("rows", {"flat": reason, "nodes": reason}, trained)
    reasons: dict[str, str] = {}
    options = Options(gradient_checkpointing=gradient_checkpointing)
    with at_rest(model), _in_full_precision(model) as (exact, tolerance):
        for engine, run in _SHARING.items():
            for seed in range(TREES):
                forest = small_forest(vocabulary, reach=reach, limit=limit, seed=seed)
                alone = _run(score_rows, exact, forest, Options(max_tokens=1))
                if not _finite(alone):
                    return Choice("rows", {engine: _NOT_FINITE}, trained)
                try:
                    fault = _fault(_run(run, exact, forest, options), alone, tolerance)
                except Exception as error:  # whatever a model does not bear, it is scored without
                    fault = _Fault(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                if fault is None:
                    return Choice(engine, reasons, trained)
                reasons[engine] = fault.text
                if fault.everywhere:
                    break
    return Choice("rows", reasons, trained)


@contextlib.contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Switch dropout, autocast, no_grad and products of less than float32 off; put everything back as it was."""
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    for module in training:
        module.training = False
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            _exact_products(),
            _exact_convolutions(device),
        ):
            yield
    finally:
        for module in training:
            module.training = True
        forget_lengths(model)


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Let products of float32 matrices be of float32, whatever a user allowed; put each permission back."""
    there: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    backends = [backend for backend in there if hasattr(backend, "fp32_precision")]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _exact_convolutions(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    now = torch.backends.cudnn
    return now.flags(now.enabled, now.benchmark, now.benchmark_limit, now.deterministic, allow_tf32=False)


@contextlib.contextmanager
def _in_full_precision(model: nn.Module) -> Iterator[tuple[nn.Module, Tolerance]]:
    """Give the model, or a copy in float32 of one whose weights are coarser, and how right an engine must be."""
    coarse = [one for one in model.parameters() if one.dtype in (torch.bfloat16, torch.float16)]
    if not coarse:
        yield model, Tolerance()
        return
    needed = 4 * sum(one.numel() for one in model.parameters())
    try:
        if needed > memory_of(coarse[0].device).free // 2:
            raise MemoryError(f"a copy in float32 needs {needed / 2**30:.1f} GiB, more than half of what is free")
        exact = copy.deepcopy(model).float()
    except Exception as error:
        logging.getLogger(__name__).info("%s: checked as it is, without float32: %s", type(model).__name__, error)
        yield model, WIDE
        return
    yield exact, Tolerance()
