"""Every combination of the settings that shape an update: refused, or equal to each rollout alone, written out.

The axes are the loss, its reduction, the advantage, the KL's place, estimator, unbiasedness and coefficient, truncated
rollouts, the cap of importance weights, the temperature and the updates of a step. The oracle runs the model on one
rollout at a time, takes the log-softmax of all its logits, and knows nothing of batches, trees, micro-batches or layers
that are run again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ramet.config import TrainConfig, checked
from ramet.errors import ConfigError
from ramet.forest import Forest
from ramet.learner import micro_batches, prepare, update
from ramet.types import Kind, Outcome, StopReason

LIMIT, RATE, CLIP_LOW, CLIP_HIGH = 6, 0.02, 0.2, 0.2
AXES: dict[str, tuple[Any, ...]] = {
    "loss.kind": ("policy_gradient", "clipped"),
    "loss.reduction": ("grpo", "dr_grpo", "dapo"),
    "loss.importance_cap": (None, 1.3),
    "advantage.kind": ("group_mean", "group_mean_std", "leave_one_out"),
    "kl.coefficient": (0.0, 0.3),
    "kl.place": ("loss", "reward", "both"),
    "kl.estimator": ("k1", "k2", "k3"),
    "kl.unbiased": (False, True),
    "rollout.truncated": ("score", "drop"),
    "rollout.temperature": (1.0, 0.7),
    "optimizer.updates_per_step": (1, 2),
}
Combination = dict[str, Any]
COMBINATIONS: list[Combination] = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def config_of(combination: Combination) -> TrainConfig:
    data: dict[str, Any] = {
        "steps": 1,
        "rollout": {"max_new_tokens": LIMIT},
        "loss": {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
        "optimizer": {"learning_rate": RATE, "gradient_clip": 1e9, "micro_batch_tokens": 8},
    }
    # Whether layers are kept or run again is no mathematics: half of the combinations, mixed over all axes.
    data["optimizer"]["gradient_checkpointing"] = sum(AXES[k].index(v) for k, v in combination.items()) % 2 == 1
    for name, value in combination.items():
        section, key = name.split(".")
        if value is not None:
            data.setdefault(section, {})[key] = value
    return checked(data, "the test")


def void(c: Combination) -> bool:
    """Whether some setting could do nothing, or only harm."""
    place, estimator, unbiased = c["kl.place"], c["kl.estimator"], c["kl.unbiased"]
    stale = c["loss.kind"] == "policy_gradient" and c["optimizer.updates_per_step"] > 1
    if c["kl.coefficient"] == 0:
        return stale or (place, estimator, unbiased) != ("loss", "k3", False)
    if place == "reward":  # k1, always: another estimator is not used, unless it is the default and was not asked for
        return stale or unbiased or estimator == "k2"
    return stale or (estimator, unbiased) in (("k1", False), ("k2", True))


@dataclass(frozen=True)
class Row:
    """A rollout; its segments after the prompt are sampled and the environment's, in turn."""

    group: int
    prompt: list[int]
    segments: list[list[int]]
    score: float | None
    cut: bool = False

    def sampler(self, segment: Sequence[int]) -> Tensor:
        """Log-probs, float32, that are no model's, and are the row's own."""
        return -1.5 - 0.31 * (self.score or 0.0) - 0.07 * torch.arange(len(segment)).float()


ROWS = [
    Row(3, [1, 5], [[7, 8, 2]], 1.0),
    Row(3, [1, 5], [[7, 8, 2]], 0.25),
    Row(3, [1, 5], [[7]], 0.0, cut=True),
    Row(9, [1, 5], [[4, 2], [20, 21], [6, 2]], -1.0),
    Row(9, [1, 5], [[], [22], []], 2.0),
    Row(9, [1, 5], [[11, 12]], None),
    Row(9, [1, 5], [[5, 9, 9]], 0.75),
]
"""Duplicates, a prefix that a limit ended, turns of an environment, nothing said, no verdict."""


def planted() -> Forest:
    forest = Forest()
    for member, row in enumerate(ROWS):
        [number] = forest.plant([torch.tensor(row.prompt)], groups=[row.group], members=[member])
        for turn, segment in enumerate(row.segments):
            tokens = torch.tensor(segment, dtype=torch.int64)
            if turn % 2 == 0:
                forest.grow([number], [tokens], Kind.SAMPLED, log_probs=[row.sampler(segment)], versions=[0])
            else:
                forest.grow([number], [tokens], Kind.ENVIRONMENT)
        forest.rollouts[number].outcome = Outcome.abstained() if row.score is None else Outcome.scored(row.score)
        forest.rollouts[number].stop = StopReason.NEW_TOKENS if row.cut else StopReason.EOS
    return forest


def log_probs_of(model: PreTrainedModel, row: Row, temperature: float) -> Tensor:
    """Log-probs of the sampled tokens of one rollout, from one forward pass of its own."""
    path, wanted = list(row.prompt), []
    for turn, segment in enumerate(row.segments):
        wanted += range(len(path), len(path) + len(segment)) if turn % 2 == 0 else []
        path += segment
    table = torch.log_softmax(model(torch.tensor([path])).logits[0] / temperature, -1)
    return torch.stack([table[at - 1, path[at]] for at in wanted]) if wanted else table.new_zeros(0)


@dataclass
class Oracle:
    """A model and its reference; `model` ends with the weights that a step of `combination` should give."""

    model: PreTrainedModel
    reference: PreTrainedModel
    weights: list[Tensor]
    starts: dict[float, tuple[list[Tensor], list[Tensor]]]

    def start(self, temperature: float) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs of all rows under the first weights, with their graph, and under the reference."""
        if temperature not in self.starts:
            self.load()
            now = [log_probs_of(self.model, row, temperature) for row in ROWS]
            with torch.no_grad():
                self.starts[temperature] = now, [log_probs_of(self.reference, row, temperature) for row in ROWS]
        return self.starts[temperature]

    def load(self) -> None:
        for parameter, weight in zip(self.model.parameters(), self.weights, strict=True):
            parameter.data = weight.clone()

    def step(self, c: Combination) -> tuple[list[Tensor], bool]:
        """Return how far each parameter moves, and whether the clip cut a token off."""
        temperature, pieces = c["rollout.temperature"], c["optimizer.updates_per_step"]
        first, reference = self.start(temperature)
        old = [values.detach() for values in first]
        counted = [n for n, row in enumerate(ROWS) if row.score is not None]
        counted = [n for n in counted if not (ROWS[n].cut and c["rollout.truncated"] == "drop")]
        gains = gains_of(c, counted, old, reference)
        said = [n for n in counted if len(old[n])]
        self.load()
        parameters, cut = list(self.model.parameters()), False
        for piece in range(pieces):
            mine = said[len(said) * piece // pieces : len(said) * (piece + 1) // pieces]
            now = {n: first[n] if piece == 0 else log_probs_of(self.model, ROWS[n], temperature) for n in mine}
            loss = torch.zeros((), dtype=torch.float64)
            for n in mine:
                per_token, held = loss_of(c, ROWS[n], now[n], old[n], reference[n], gains[n])
                tokens = sum(len(values) for values in now.values())
                denominators = {"grpo": len(now[n]) * len(mine), "dr_grpo": LIMIT * len(mine), "dapo": tokens}
                loss, cut = loss + per_token.sum() / denominators[c["loss.reduction"]], cut or held
            gradients = torch.autograd.grad(loss, parameters, retain_graph=piece == 0)
            for parameter, slope in zip(parameters, gradients, strict=True):
                parameter.data = parameter.data - RATE * slope  # a new tensor: the kept graph reads the first weights
        return [p.data - w for p, w in zip(parameters, self.weights, strict=True)], cut


def gains_of(c: Combination, counted: list[int], old: list[Tensor], reference: list[Tensor]) -> dict[int, float]:
    """The advantage of each rollout that counts."""
    scores = {n: float(ROWS[n].score or 0.0) for n in counted}
    if c["kl.place"] != "loss":
        scores = {n: s - c["kl.coefficient"] * float((old[n] - reference[n]).sum()) for n, s in scores.items()}
    gains = {}
    for n in counted:
        group = [scores[other] for other in counted if ROWS[other].group == ROWS[n].group]
        mean = sum(group) / len(group)
        gains[n] = scores[n] - mean
        if c["advantage.kind"] == "leave_one_out":
            gains[n] = scores[n] - (sum(group) - scores[n]) / (len(group) - 1)
        if c["advantage.kind"] == "group_mean_std":
            gains[n] /= math.sqrt(sum((s - mean) ** 2 for s in group) / (len(group) - 1)) + 1e-6
    return gains


def loss_of(c: Combination, row: Row, now: Tensor, old: Tensor, reference: Tensor, gain: float) -> tuple[Tensor, bool]:
    """The loss of each token of a rollout, and whether the clip leaves one without a gradient."""
    held = False
    if c["loss.kind"] == "policy_gradient":
        loss = -gain * now
    else:
        ratio = (now - old).exp()
        off = (ratio > 1 + CLIP_HIGH) if gain > 0 else (ratio < 1 - CLIP_LOW)
        held = bool(off.any())
        loss = torch.where(off, -gain * (1 + CLIP_HIGH if gain > 0 else 1 - CLIP_LOW), -gain * ratio)
    weight = torch.ones_like(old)
    if c["loss.importance_cap"] is not None:
        given = torch.cat([row.sampler(segment) for segment in row.segments[::2]]).double()
        weight = torch.minimum((old - given).exp(), torch.tensor(c["loss.importance_cap"], dtype=torch.float64))
    if c["kl.place"] != "reward":
        far = now - reference
        pull = {"k1": far, "k2": far**2 / 2, "k3": (-far).exp() - 1 + far}[c["kl.estimator"]]
        if c["kl.unbiased"]:
            value = (weight * pull).tolist()
            later = torch.tensor([sum(value[at + 1 :]) for at in range(len(value))], dtype=torch.float64)
            pull = ((weight * far).detach() + later) * now / weight
        loss = loss + c["kl.coefficient"] * pull
    return weight * loss, held


@dataclass
class Found:
    """A combination, the error of its update relative to the largest move, one number of it, and the clip's doing."""

    combination: Combination
    error: float
    fingerprint: float
    cut: tuple[bool, bool]


@pytest.fixture(scope="module")
def found(tiny: Callable[..., PreTrainedModel]) -> list[Found]:
    """All combinations that are not void."""
    model, reference = tiny("absolute", torch.float64), tiny("absolute", torch.float64, seed=1)
    weights = [p.detach().clone() for p in model.parameters()]
    for far, weight in zip(reference.parameters(), weights, strict=True):
        far.data.mul_(0.1).add_(0.9 * weight)  # two random models are so far apart that one step of k3 overflows
    oracle = Oracle(tiny("absolute", torch.float64), reference, weights, {})
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights]
    results = []
    for combination in COMBINATIONS:
        if void(combination):
            continue
        config, forest = config_of(combination), planted()
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        batch = prepare(model, reference, forest, config, step=1)
        assert len(list(micro_batches(model, forest, batch.rollouts, config))) > 1
        logged = update(model, torch.optim.SGD(model.parameters(), lr=RATE), forest, batch, config)
        expected, cut = oracle.step(combination)
        moved = [p.detach() - w for p, w in zip(model.parameters(), weights, strict=True)]
        largest = max(float(e.abs().max()) for e in expected)
        assert largest > 1e-5, combination
        error = max(float((m - e).abs().max()) for m, e in zip(moved, expected, strict=True)) / largest
        number = sum(float((m * d).sum()) for m, d in zip(moved, directions, strict=True))
        results.append(Found(combination, error, number, (logged["clip_fraction"] > 0, cut)))
    return results


@pytest.mark.large
def test_what_can_do_nothing_is_refused_and_the_rest_is_not() -> None:
    """Of 36 settings of the KL 11 are valid, of 4 of loss and updates 3; times 72 of the other axes."""
    refused = 0
    for combination in COMBINATIONS:
        if void(combination):
            refused += 1
            with pytest.raises(ConfigError):
                config_of(combination)
        else:
            config_of(combination)
    assert (len(COMBINATIONS), refused, len(COMBINATIONS) - refused) == (10368, 7992, 2376)


@pytest.mark.large
def test_every_valid_combination_updates_as_each_rollout_alone(found: list[Found]) -> None:
    """Within 1e-9 of the largest move of a weight, float64; the clip cuts in some, and where the oracle says so."""
    assert len(found) == 2376
    worst = max(found, key=lambda one: one.error)
    assert worst.error <= 1e-9, worst
    assert [one.combination for one in found if one.cut[0] != one.cut[1]] == []
    assert (
        0 < sum(one.cut[0] for one in found) < sum(one.combination["optimizer.updates_per_step"] > 1 for one in found)
    )


@pytest.mark.large
def test_every_setting_that_is_not_refused_changes_the_update(found: list[Found]) -> None:
    """Two pairs agree by design: k1 and k3 in the reward, and both losses where each token is trained on once."""
    numbers = sorted(one.fingerprint for one in found)
    distinct = 1 + sum(b - a > 1e-10 * max(abs(a), abs(b)) for a, b in itertools.pairwise(numbers))
    assert distinct == 2376 * 2 // 3 * 10 // 11
