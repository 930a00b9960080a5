"""One update against the obvious oracle: each rollout alone, the formulas written out, no batching."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, PreTrainedModel
from transformers.models.gpt2 import GPT2LMHeadModel

from ramet.config import (
    AdvantageConfig,
    ControlConfig,
    KLConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from ramet.errors import ForestError, ModelError
from ramet.forest import Forest
from ramet.learner import (
    Batch,
    _minibatches,
    checked_step,
    flat_groups,
    nothing_learned,
    outcomes_of,
    prepare,
    reward_metrics,
    shuffled,
    update,
)
from ramet.scoring import score
from ramet.types import Kind, Outcome, StopReason

Tiny = Callable[..., PreTrainedModel]
TEMPERATURE = 0.7
LIMIT = 6


@dataclass(frozen=True)
class Row:
    """One rollout: segments after the prompt are sampled and the environment's, in turn."""

    group: int
    member: int
    prompt: list[int]
    segments: list[list[int]]
    outcome: Outcome
    stop: StopReason = StopReason.EOS


def scored(value: float) -> Outcome:
    return Outcome.scored(value)


ROWS = [
    Row(3, 0, [1, 5], [[7, 8, 2]], scored(1.0)),
    Row(3, 1, [1, 5], [[7, 8, 2]], scored(0.25)),
    Row(3, 2, [1, 5], [[7]], scored(0.0), StopReason.NEW_TOKENS),
    Row(3, 3, [1, 5], [[7, 9, 9, 9, 9, 9]], scored(2.0), StopReason.NEW_TOKENS),
    Row(9, 0, [1, 5], [[4, 2], [20, 21], [6, 2]], scored(-1.0)),
    Row(9, 1, [1, 5], [[], [22], []], scored(3.0)),
    Row(9, 2, [1, 5], [[11, 12, 13]], Outcome.abstained("no verdict")),
    Row(9, 3, [1, 5], [[4, 2]], Outcome.error("broke")),
    Row(9, 4, [1, 5], [[5, 5, 2]], scored(0.5)),
    Row(4, 0, [2, 2, 0], [[0, 2]], scored(1.0)),
    Row(4, 1, [2, 2, 0], [[3]], scored(1.0)),
    Row(5, 0, [6], [[8, 2]], scored(7.0)),
]
"""Two groups over one prompt, duplicates, a prefix, turns, nothing said, no verdict, no variance, a group of one."""


def sampler_log_probs(row: Row, tokens: Sequence[int]) -> Tensor:
    """Something that is no model's, and differs between duplicates."""
    return -1.5 - 0.11 * row.member - 0.07 * torch.arange(len(tokens)).float()


def forest_of(rows: Sequence[Row]) -> Forest:
    forest = Forest()
    for row in rows:
        [number] = forest.plant([torch.tensor(row.prompt)], groups=[row.group], members=[row.member])
        for turn, segment in enumerate(row.segments):
            tokens = torch.tensor(segment, dtype=torch.int64)
            if turn % 2 == 0:
                forest.grow([number], [tokens], Kind.SAMPLED, log_probs=[sampler_log_probs(row, segment)], versions=[0])
            else:
                forest.grow([number], [tokens], Kind.ENVIRONMENT)
        forest.rollouts[number].outcome, forest.rollouts[number].stop = row.outcome, row.stop
    return forest


def config_of(
    *,
    kind: str = "policy_gradient",
    reduction: str = "dapo",
    cap: float | None = None,
    clip: float = 0.2,
    advantage: str = "group_mean",
    kl: dict[str, Any] | None = None,
    micro: int = 10**6,
    updates: int = 1,
    epochs: int = 1,
    truncated: str = "score",
    shuffle: bool = False,
    gradient_clip: float = 1e9,
) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "steps": 1,
            "rollout": RolloutConfig.model_validate(
                {"max_new_tokens": LIMIT, "temperature": TEMPERATURE, "truncated": truncated}
            ),
            "advantage": AdvantageConfig.model_validate({"kind": advantage}),
            "loss": LossConfig.model_validate(
                {"kind": kind, "reduction": reduction, "importance_cap": cap, "clip_low": clip, "clip_high": clip}
            ),
            "kl": KLConfig.model_validate(kl or {}),
            "optimizer": OptimizerConfig(
                learning_rate=0.1,
                updates_per_step=updates,
                epochs_per_step=epochs,
                micro_batch_tokens=micro,
                gradient_clip=gradient_clip,
            ),
            "control": ControlConfig(shuffle_rewards=shuffle),
        }
    )


def step(
    model: PreTrainedModel, reference: PreTrainedModel, rows: Sequence[Row], config: TrainConfig, *, rate: float = 0.1
) -> tuple[PreTrainedModel, dict[str, float], Batch, Forest]:
    """Update a copy of `model` by SGD; its last gradient stays in `.grad`."""
    model, forest = copy.deepcopy(model), forest_of(rows)
    batch = prepare(model, reference, forest, config, step=1)
    logged = update(model, torch.optim.SGD(model.parameters(), lr=rate), forest, batch, config)
    return model, logged, batch, forest


def log_probs_of(model: PreTrainedModel, row: Row) -> Tensor:
    path, wanted = list(row.prompt), []
    for turn, segment in enumerate(row.segments):
        wanted += range(len(path), len(path) + len(segment)) if turn % 2 == 0 else []
        path += segment
    table = torch.log_softmax(model(torch.tensor([path])).logits[0] / TEMPERATURE, -1)
    return torch.stack([table[at - 1, path[at]] for at in wanted]) if wanted else table.new_zeros(0)


def oracle(model: PreTrainedModel, reference: PreTrainedModel, rows: Sequence[Row], config: TrainConfig) -> Tensor:
    """The loss of the first update of a batch: the ratio is 1 in value, and k3 is written out."""
    counted = [row for row in rows if row.outcome.score is not None]
    if config.rollout.truncated == "drop":
        counted = [row for row in counted if not row.stop.truncated]
    now = [log_probs_of(model, row) for row in counted]
    old = [values.detach() for values in now]
    ref = [log_probs_of(reference, row).detach() for row in counted]
    scores = [float(row.outcome.score or 0.0) for row in counted]
    coefficient, place = config.kl.coefficient, config.kl.place
    if place in ("reward", "both"):
        scores = [s - coefficient * float((o - r).sum()) for s, o, r in zip(scores, old, ref, strict=True)]
    gains = []
    for row, mine in zip(counted, scores, strict=True):
        group = [s for other, s in zip(counted, scores, strict=True) if other.group == row.group]
        gain = mine - sum(group) / len(group)
        if config.advantage.kind == "leave_one_out":
            gain *= len(group) / max(1, len(group) - 1)
        if config.advantage.kind == "group_mean_std" and len(set(group)) > 1:
            gain /= torch.tensor(group, dtype=torch.float64).std().item() + 1e-6
        gains.append(gain)
    said = [i for i, row in enumerate(counted) if len(now[i])]
    total = torch.zeros((), dtype=torch.float64)
    for i in said:
        given = torch.cat([sampler_log_probs(counted[i], segment) for segment in counted[i].segments[::2]]).double()
        cap = config.loss.importance_cap
        weight = torch.ones_like(old[i]) if cap is None else (old[i] - given).exp().clamp(max=cap)
        value = now[i] if config.loss.kind == "policy_gradient" else (now[i] - old[i]).exp()
        loss = -gains[i] * value * weight
        if coefficient and place in ("loss", "both"):
            ratio = now[i] - ref[i]
            pull = weight * ((-ratio).exp() - 1 + ratio if config.kl.estimator == "k3" else ratio**2 / 2)
            if config.kl.unbiased:
                later = torch.tensor([pull[at + 1 :].sum().item() for at in range(len(pull))], dtype=torch.float64)
                pull = pull.detach() + ((weight * ratio).detach() + later) * (now[i] - old[i])
            loss = loss + coefficient * pull
        tokens = sum(len(now[j]) for j in said)
        denominator = {"grpo": len(now[i]) * len(said), "dr_grpo": LIMIT * len(said), "dapo": tokens}
        total = total + loss.sum() / denominator[config.loss.reduction]
    return total


def assert_gradient(model: PreTrainedModel, loss: Tensor, of: PreTrainedModel, tolerance: float = 1e-9) -> None:
    expected = torch.autograd.grad(loss, list(of.parameters()))
    scale = max(float(gradient.abs().max()) for gradient in expected)
    assert scale > 1e-3
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert float((parameter.grad - gradient).abs().max()) <= tolerance * scale


def largest_difference(a: PreTrainedModel, b: PreTrainedModel) -> float:
    return max((x - y).detach().abs().max().item() for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.fixture(scope="module")
def pair(tiny: Tiny) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model and another as its reference, float64."""
    return tiny("absolute", torch.float64), tiny("absolute", torch.float64, seed=1)


Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.mark.parametrize("cap", [None, 1.1])
@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("kind", ["policy_gradient", "clipped"])
def test_the_gradient_is_the_oracles(pair: Pair, kind: str, reduction: str, cap: float | None) -> None:
    """With KL in the loss; tolerance 1e-9 of the largest gradient, float64. The logged loss is the loss: 1e-9."""
    config = config_of(kind=kind, reduction=reduction, cap=cap, kl={"coefficient": 0.3})
    trained, logged, _, _ = step(*pair, ROWS, config)
    loss = oracle(*pair, ROWS, config)
    assert_gradient(trained, loss, pair[0])
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-9)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained.parameters() if p.grad is not None))
    assert logged["grad_norm"] == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("micro", [1, 9, 24])
@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("kind", ["policy_gradient", "clipped"])
def test_neither_micro_batches_nor_order_change_the_update(pair: Pair, kind: str, reduction: str, micro: int) -> None:
    """Weights, loss and every logged number; tolerance 1e-9, float64."""
    kl = {"coefficient": 0.3, "unbiased": True}
    whole, logged, batch, _ = step(*pair, ROWS, config_of(kind=kind, reduction=reduction, kl=kl))
    assert largest_difference(whole, pair[0]) > 1e-3
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(micro)).tolist()
    cut, again, pieces, _ = step(
        *pair, [ROWS[i] for i in order], config_of(kind=kind, reduction=reduction, kl=kl, micro=micro)
    )
    assert largest_difference(cut, whole) <= 1e-9
    assert again.pop("tokens_computed") >= logged.pop("tokens_computed")  # a prefix is shared within a micro-batch
    assert again == pytest.approx(logged, rel=1e-9, abs=1e-12)
    assert sorted(pieces.advantages.tolist()) == pytest.approx(sorted(batch.advantages.tolist()), abs=1e-12)


@pytest.mark.parametrize(("updates", "epochs"), [(3, 1), (1, 2), (2, 2)])
def test_several_updates_are_the_same_for_any_micro_batch(pair: Pair, updates: int, epochs: int) -> None:
    """Weights after all of them and every logged number; tolerance 1e-9, float64."""
    found = [
        step(*pair, ROWS, config_of(kind="clipped", clip=0.05, updates=updates, epochs=epochs, micro=micro))
        for micro in (1, 10**6)
    ]
    assert largest_difference(found[0][0], found[1][0]) <= 1e-9
    fractions = [logged.pop("clip_fraction") for _, logged, _, _ in found]  # counted in float32
    counted = [logged.pop("tokens_computed") for _, logged, _, _ in found]
    assert counted[0] > counted[1]  # of micro-batches of one row nothing is shared
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9, abs=1e-12)
    assert fractions[0] == pytest.approx(fractions[1], rel=1e-6)
    assert fractions[0] > 0  # later updates are really off the start


def test_a_second_epoch_weighs_by_the_ratio_to_the_start_of_the_batch(pair: Pair) -> None:
    """The second update written out: -ratio * A over the tokens, nothing near its cut. Within 1e-9, float64."""
    config = config_of(kind="clipped", clip=0.9, epochs=2)
    twice, logged, _, forest = step(*pair, ROWS, config, rate=0.01)
    assert logged["clip_fraction"] == 0.0
    once, _, batch, _ = step(*pair, ROWS, config_of(kind="clipped", clip=0.9), rate=0.01)
    loss = torch.zeros((), dtype=torch.float64)
    for number in batch.rollouts:
        start = log_probs_of(pair[0], ROWS[number]).detach()
        ratios = (log_probs_of(once, ROWS[number]) - start).exp()
        assert float((ratios - 1).detach().abs().max()) > 1e-4
        gain = forest.rollouts[number].advantage
        assert gain is not None
        loss = loss - gain * ratios.sum() / len(batch.advantages)
    gradients = torch.autograd.grad(loss, list(once.parameters()))
    for now, before, gradient in zip(twice.parameters(), once.parameters(), gradients, strict=True):
        torch.testing.assert_close(now, before - 0.01 * gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["group_mean", "group_mean_std", "leave_one_out"])
def test_each_advantage_reaches_its_own_rollout(pair: Pair, kind: str) -> None:
    """Gradient within 1e-9; the rollouts without a score, or alone in their group, have advantage 0.

    The first rollout's by hand, within 1e-12: scores 1, 0.25, 0, 2 have mean 0.8125 and squares around it of 2.421875.
    """
    config = config_of(advantage=kind)
    trained, _, _, forest = step(*pair, ROWS, config)
    assert_gradient(trained, oracle(*pair, ROWS, config), pair[0])
    assert [forest.rollouts[n].advantage for n in (6, 7, 9, 10, 11)] == [0.0] * 5
    divided = 0.1875 / (math.sqrt(2.421875 / 3) + 1e-6)
    expected = {"group_mean": 0.1875, "group_mean_std": divided, "leave_one_out": 0.25}[kind]
    assert forest.rollouts[0].advantage == pytest.approx(expected, abs=1e-12)


def test_dropping_truncated_rollouts_is_never_having_had_them(pair: Pair) -> None:
    """Out of numerator, denominators and baseline: the same weights as without those rows, within 1e-12."""
    for reduction in ("grpo", "dr_grpo", "dapo"):
        dropped, logged, _, forest = step(*pair, ROWS, config_of(reduction=reduction, truncated="drop"))
        rest = [row for row in ROWS if not row.stop.truncated]
        never, expected, _, _ = step(*pair, rest, config_of(reduction=reduction))
        kept, _, _, _ = step(*pair, ROWS, config_of(reduction=reduction))
        assert largest_difference(dropped, never) <= 1e-12
        assert largest_difference(dropped, kept) > 1e-4
        assert logged == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert [forest.rollouts[n].advantage for n in (2, 3)] == [0.0, 0.0]


def test_rollouts_without_a_score_are_never_there(pair: Pair) -> None:
    """Abstained and failed ones move neither baseline nor denominator: the weights are those without, within 1e-12."""
    for reduction in ("grpo", "dr_grpo", "dapo"):
        with_them, _, _, _ = step(*pair, ROWS, config_of(reduction=reduction))
        without, _, _, _ = step(
            *pair, [row for row in ROWS if row.outcome.score is not None], config_of(reduction=reduction)
        )
        assert largest_difference(with_them, without) <= 1e-12


def test_an_empty_completion_counts_in_the_baseline_and_in_no_denominator(pair: Pair) -> None:
    """Row 5 said nothing and scored 3: the others of its group are compared with it. Tolerance 1e-12, float64."""
    batch = step(*pair, ROWS, config_of())[2]
    assert batch.rollouts == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    gains = dict(zip(batch.sampled.row.tolist(), batch.advantages.tolist(), strict=True))
    assert gains[4] == pytest.approx(-1.0 - 2.5 / 3, abs=1e-12)
    assert gains[5] == pytest.approx(0.5 - 2.5 / 3, abs=1e-12)


@pytest.mark.parametrize("kind", ["policy_gradient", "clipped"])
def test_groups_without_variance_teach_nothing(pair: Pair, kind: str) -> None:
    """Equal scores, and groups of one: the gradient is exactly 0 with no KL, and is not with one."""
    rows = [row for row in ROWS if row.group in (4, 5)]
    still, logged, batch, _ = step(*pair, rows, config_of(kind=kind, advantage="group_mean_std"))
    assert largest_difference(still, pair[0]) == 0.0
    assert (logged["grad_norm"], logged["loss"]) == (0.0, 0.0)
    assert batch.advantages.tolist() == [0.0] * 5
    assert largest_difference(step(*pair, rows, config_of(kind=kind, kl={"coefficient": 0.1}))[0], pair[0]) > 1e-4


def test_with_equal_weights_the_ratio_is_1_and_the_kl_is_0(pair: Pair) -> None:
    """At temperature 0.7, within 1e-12, float64; two epochs at rate 0 with a clip of 1e-9 hold nothing."""
    model = pair[0]
    config = config_of(kind="clipped", clip=1e-9, epochs=2, kl={"coefficient": 0.5})
    _, logged, batch, _ = step(model, model, ROWS, config, rate=0.0)
    assert batch.start_known
    assert logged["clip_fraction"] == 0.0
    assert abs(logged["kl"]) <= 1e-12
    plain, _, _, _ = step(model, model, ROWS, config_of(kind="policy_gradient"))
    pulled, _, _, _ = step(model, model, ROWS, config_of(kind="clipped", kl={"coefficient": 0.5}))
    assert largest_difference(plain, pulled) <= 1e-9  # at ratio 1 both losses have one gradient, and k3 has none


def test_the_kl_is_measured_even_where_it_is_not_charged(pair: Pair) -> None:
    """The mean of k3 over sampled tokens, written out; tolerance 1e-9, float64."""
    _, logged, _, _ = step(*pair, ROWS, config_of(), rate=0.0)
    ratios = torch.cat(
        [log_probs_of(pair[0], row) - log_probs_of(pair[1], row) for row in ROWS if row.outcome.score is not None]
    ).detach()
    assert logged["kl"] == pytest.approx(float(((-ratios).exp() - 1 + ratios).mean()), rel=1e-9)


@pytest.mark.parametrize(
    ("place", "estimator"), [("loss", "k2"), ("loss", "k3"), ("reward", "k1"), ("both", "k2"), ("both", "k3")]
)
def test_the_kl_is_charged_where_it_is_asked_for_and_nowhere_else(pair: Pair, place: str, estimator: str) -> None:
    """Tolerance 1e-9, float64; in the reward it is always k1."""
    config = config_of(kl={"coefficient": 0.3, "place": place, "estimator": estimator}, cap=2.0)
    trained, _, batch, _ = step(*pair, ROWS, config)
    assert_gradient(trained, oracle(*pair, ROWS, config), pair[0])
    uncharged = step(*pair, ROWS, config_of(cap=2.0))[2].advantages
    assert torch.equal(batch.advantages, uncharged) == (place == "loss")


@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
def test_an_unbiased_kl_counts_what_follows_in_the_rollout(pair: Pair, reduction: str) -> None:
    """Over two turns as well; tolerance 1e-9, float64, one micro-batch for each rollout."""
    config = config_of(reduction=reduction, kl={"coefficient": 0.3, "unbiased": True}, cap=1.3, micro=1)
    assert_gradient(step(*pair, ROWS, config)[0], oracle(*pair, ROWS, config), pair[0])


def test_no_coefficient_no_kl(pair: Pair) -> None:
    """Whatever the reference is: the same weights, bit for bit."""
    model, reference = pair
    plain, far, _, _ = step(model, reference, ROWS, config_of())
    same, near, _, _ = step(model, model, ROWS, config_of())
    assert largest_difference(plain, same) == 0.0
    assert far["kl"] > 1e-3 > abs(near["kl"])


def test_importance_weights_are_capped(pair: Pair) -> None:
    """A cap below every ratio scales the loss by it, within 1e-9; one above them all is the plain ratio."""
    plain = step(*pair, ROWS, config_of())[0]
    capped = step(*pair, ROWS, config_of(cap=1e-9))[0]
    for a, b in zip(capped.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad * 1e9, b.grad, rtol=1e-9, atol=1e-9)
    config = config_of(cap=1e30)
    assert_gradient(step(*pair, ROWS, config)[0], oracle(*pair, ROWS, config), pair[0])


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_token_without_its_samplers_log_prob_is_refused(pair: Pair, cap: float | None) -> None:
    """Before anything is trained, naming the rollout; it matters not if the rollout is left out anyway."""
    forest = forest_of(ROWS)
    for number in (6, 10):  # 6 abstained
        forest.grow([number], [torch.tensor([3])], Kind.SAMPLED, log_probs=[torch.tensor([torch.nan])], versions=[0])
    with pytest.raises(ForestError, match="1 of 26 have none, the first in rollout 10"):
        prepare(*pair, forest, config_of(cap=cap), step=1)
    forest.rollouts[10].outcome = None
    assert len(prepare(*pair, forest, config_of(cap=cap), step=1).rollouts) == 8


def test_the_mismatch_with_the_sampler_is_logged(pair: Pair) -> None:
    """The sampler said 0.5 nats less for every token: k3(-0.5) = e^0.5 - 1.5. Tolerance 1e-6, as it stored float32."""
    model = pair[0]
    forest = Forest()
    numbers = forest.plant([torch.tensor([1, 5])] * 2, groups=[0, 0], members=[0, 1])
    answers = [torch.tensor([7, 8]), torch.tensor([9, 2])]
    unknown = [torch.zeros(2)] * 2
    rehearsal = Forest()
    rehearsal.plant([torch.tensor([1, 5])] * 2, groups=[0, 0], members=[0, 1])
    rehearsal.grow(numbers, answers, Kind.SAMPLED, log_probs=unknown, versions=[0, 0])
    with torch.no_grad():
        known = score(model, rehearsal, temperature=TEMPERATURE, entropy=True)
    at = [rehearsal.sampled([n]).index for n in numbers]
    forest.grow(numbers, answers, Kind.SAMPLED, log_probs=[known.log_probs[i] - 0.5 for i in at], versions=[0, 0])
    for number in numbers:
        forest.rollouts[number].outcome = scored(float(number))
    config = config_of()
    batch = prepare(model, pair[1], forest, config, step=1)
    logged = update(model, torch.optim.SGD(model.parameters(), lr=0.0), forest, batch, config)
    assert logged["mismatch_kl"] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-6)
    assert logged["mismatch_max"] == pytest.approx(0.5, abs=1e-6)
    assert known.entropy is not None
    assert logged["entropy"] == pytest.approx(float(known.entropy[torch.cat(at)].mean()), rel=1e-9)


def test_the_gradient_is_clipped_to_its_norm_and_the_log_has_the_norm_before(pair: Pair) -> None:
    """Tolerance 1e-6 (torch adds 1e-6 to the norm)."""
    free, before, _, _ = step(*pair, ROWS, config_of())
    clipped, after, _, _ = step(*pair, ROWS, config_of(gradient_clip=0.01))
    assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-12)
    scale = 0.01 / before["grad_norm"]
    for a, b in zip(clipped.parameters(), free.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad * scale, rtol=1e-5, atol=1e-9)


def test_a_gradient_that_is_not_finite_is_refused_with_the_weights_untouched(pair: Pair) -> None:
    model = copy.deepcopy(pair[0])
    before = copy.deepcopy(model.state_dict())
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * torch.inf)
    forest = forest_of(ROWS)
    batch = prepare(model, pair[1], forest, config_of(), step=1)
    with pytest.raises(ModelError, match=r"gradient is (nan|inf).*was not taken"):
        update(model, torch.optim.SGD(model.parameters(), lr=0.1), forest, batch, config_of())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def one_layer(weights: list[float], gradient: list[float], dtype: torch.dtype) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1, bias=False, dtype=dtype)
    model.weight.data = torch.tensor([weights], dtype=dtype)
    model.weight.grad = torch.tensor([gradient], dtype=dtype)
    return model


def test_an_update_that_leaves_weights_not_finite_is_refused() -> None:
    """Each from a gradient of norm 1: AdamW's eps is 0 in float16 and 0/0 is NaN; -3e38 - 1e38 is beyond float32."""
    half = one_layer([1.0, 1.0], [1.0, 0.0], torch.float16)
    far = one_layer([-3e38, 1.0], [1.0, 0.0], torch.float32)
    for model, optimizer in (
        (half, torch.optim.AdamW(half.parameters(), lr=1e-3)),
        (far, torch.optim.SGD(far.parameters(), lr=1e38)),
    ):
        with pytest.raises(ModelError, match=r"made weights .* not finite, in 1 of 1 parameters.* weight") as caught:
            checked_step(model, optimizer, 1.0)
        assert "learning rate" in str(caught.value.hint)


def test_a_checked_step_is_the_optimisers_and_returns_the_norm_before_clipping() -> None:
    """Gradient (3, 4) cut to norm 1 at rate 0.5: the weights fall by (0.3, 0.4); torch adds 1e-6."""
    model = one_layer([1.0, 1.0], [3.0, 4.0], torch.float64)
    assert checked_step(model, torch.optim.SGD(model.parameters(), lr=0.5), 1.0) == 5.0
    assert model.weight.tolist()[0] == pytest.approx([0.7, 0.6], abs=1e-6)


def test_the_log_counts_the_rollouts_that_entered_the_update(pair: Pair) -> None:
    """Nine of twelve: two have no score, one said nothing; seven when those that a limit ended are dropped as well."""
    assert step(*pair, ROWS, config_of())[1]["trained_on"] == 9
    assert step(*pair, ROWS, config_of(truncated="drop"))[1]["trained_on"] == 7


@pytest.mark.parametrize("rows", [[], [ROWS[6], ROWS[7]], [ROWS[5]]], ids=["none", "no score", "nothing said"])
def test_a_batch_in_which_nothing_counts_changes_nothing(pair: Pair, rows: list[Row]) -> None:
    same, logged, batch, _ = step(*pair, rows, config_of(kl={"coefficient": 1.0, "place": "both"}))
    assert logged == {"trained_on": 0}
    assert batch.rollouts == []
    assert largest_difference(same, pair[0]) == 0.0


def test_shuffling_deals_out_the_valid_scores_again() -> None:
    """The same scores, in the valid places; a function of seed and step."""
    scores = torch.arange(40).double()
    valid = torch.arange(40) % 3 != 0
    dealt = shuffled(scores, valid, seed=1, step=2)
    assert dealt[~valid].tolist() == scores[~valid].tolist()
    assert sorted(dealt[valid].tolist()) == scores[valid].tolist()
    assert dealt.tolist() != scores.tolist()
    assert dealt.tolist() == shuffled(scores, valid, seed=1, step=2).tolist()
    assert dealt.tolist() != shuffled(scores, valid, seed=1, step=3).tolist()
    assert dealt.tolist() != shuffled(scores, valid, seed=2, step=2).tolist()


def test_the_shuffled_control_changes_advantages_and_nothing_that_is_reported(pair: Pair) -> None:
    plain, control = (step(*pair, ROWS, config_of(shuffle=shuffle)) for shuffle in (False, True))
    assert plain[2].advantages.tolist() != control[2].advantages.tolist()
    assert reward_metrics(plain[3]) == reward_metrics(control[3])
    assert [r.outcome for r in control[3].rollouts] == [row.outcome for row in ROWS]
    assert plain[2].rollouts == control[2].rollouts
    assert torch.equal(plain[2].sampled.index, control[2].sampled.index)


def test_what_counts_is_scored_and_with_drop_not_cut() -> None:
    """Ten of twelve have a score, two of which a limit ended."""
    scores, groups, valid = outcomes_of(forest_of(ROWS), truncated="score")
    assert groups.tolist() == [row.group for row in ROWS]
    assert valid.tolist() == [row.outcome.score is not None for row in ROWS]
    assert scores[valid].tolist() == [row.outcome.score for row in ROWS if row.outcome.score is not None]
    assert int(outcomes_of(forest_of(ROWS), truncated="drop")[2].sum()) == 8


def test_metrics_are_means_over_what_has_a_score() -> None:
    """Rewards 1 and 0, parts where they are named; one of four abstained, one failed, one was cut."""
    rows = [
        Row(0, 0, [1], [[7]], Outcome.scored(1.0, {"right": 0.75, "short": 0.25})),
        Row(0, 1, [1], [[8]], Outcome.scored(0.0, {"right": 0.25, "short": -0.25}), StopReason.NEW_TOKENS),
        Row(0, 2, [1], [[9]], Outcome.abstained()),
        Row(0, 3, [1], [[4]], Outcome.timed_out("slow")),
    ]
    assert reward_metrics(forest_of(rows)) == {
        "reward": 0.5,
        "reward_std": 0.5,
        "rewards": {"right": 0.5, "short": 0.0},
        "truncated": 0.25,
        "abstained": 0.25,
        "failed": 0.25,
    }
    nothing = reward_metrics(forest_of(rows[2:]))
    assert (nothing["reward"], nothing["reward_std"], nothing["rewards"]) == (None, None, {})
    assert reward_metrics(Forest())["failed"] == 0.0


def cut_at_turns(rows: Sequence[Row]) -> Forest:
    """The forest of `rows`, in which each turn is a part of its own, and all that stood before it is its prompt."""
    forest = Forest()
    for row in rows:
        path = list(row.prompt)
        for turn, segment in enumerate(row.segments):
            if turn % 2 == 0:
                group, member, part = [row.group], [row.member], [turn // 2]
                [number] = forest.plant([torch.tensor(path)], groups=group, members=member, parts=part)
                tokens = [torch.tensor(segment, dtype=torch.int64)]
                known = [sampler_log_probs(row, segment)]
                forest.grow([number], tokens, Kind.SAMPLED, log_probs=known, versions=[0])
                forest.rollouts[number].outcome, forest.rollouts[number].stop = row.outcome, row.stop
            path += segment
    return forest


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_an_episode_in_parts_weighs_as_one(pair: Pair, reduction: str, place: str, updates: int) -> None:
    """Cut at its turns, it gives the same weights, advantages and counts: within 1e-9, float64."""
    kl = {"coefficient": 0.3, "place": place}
    config = config_of(kind="clipped", reduction=reduction, kl=kl, advantage="group_mean_std", updates=updates)
    whole, logged, batch, forest = step(*pair, ROWS, config)
    cut, parts = copy.deepcopy(pair[0]), cut_at_turns(ROWS)
    pieces = prepare(cut, pair[1], parts, config, step=1)
    again = update(cut, torch.optim.SGD(cut.parameters(), lr=0.1), parts, pieces, config)
    assert len(parts.rollouts) == len(forest.rollouts) + 2
    assert len(pieces.rollouts) == len(batch.rollouts) + 1  # of row 5, which said nothing, no part is trained on
    assert largest_difference(cut, whole) <= 1e-9
    assert again["trained_on"] == logged["trained_on"] == 9
    assert again["loss"] == pytest.approx(logged["loss"], rel=1e-9)
    assert pieces.advantages.tolist() == pytest.approx(batch.advantages.tolist(), abs=1e-12)
    assert reward_metrics(parts) == reward_metrics(forest)


@pytest.mark.parametrize("micro", [1, 24])
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
def test_what_follows_a_token_may_be_in_another_part_and_micro_batch(
    pair: Pair, reduction: str, updates: int, micro: int
) -> None:
    """With the unbiased KL; cut at its turns, an episode gives the same weights, loss and oracle: 1e-9, float64.

    At a rate at which three updates do not run away.
    """
    pull = {"coefficient": 0.3, "unbiased": True}
    whole, logged, _, _ = step(
        *pair, ROWS, config_of(kind="clipped", reduction=reduction, kl=pull, updates=updates), rate=1e-4
    )
    config = config_of(kind="clipped", reduction=reduction, kl=pull, updates=updates, micro=micro)
    cut, parts = copy.deepcopy(pair[0]), cut_at_turns(ROWS)
    batch = prepare(cut, pair[1], parts, config, step=1)
    again = update(cut, torch.optim.SGD(cut.parameters(), lr=1e-4), parts, batch, config)
    assert 1e-5 < largest_difference(whole, pair[0]) < 1
    assert largest_difference(cut, whole) <= 1e-9
    assert again["loss"] == pytest.approx(logged["loss"], rel=1e-9)
    if updates == 1:
        assert_gradient(cut, oracle(*pair, ROWS, config), pair[0])


Parts = list[tuple[list[int], list[list[int]]]]
"""The parts of an episode: the prompt, and segments that are sampled and the environment's, in turn."""


def episodes_of_three_tokens() -> list[Parts]:
    """Every episode over the tokens 0, 1 and 2 of a game that goes on as the first answer says.

    After a 0 it goes on in the same part; after a 1 the past is rewritten once, after a 2 twice, and what was sampled
    stands in the later prompts in another form.
    """
    all_of = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    going_on: list[Parts] = [[([0], [[0], [2], [b]])] for a, b, c in all_of if a == c == 0]
    once: list[Parts] = [[([0], [[1]]), ([1, 1], [[b, c]])] for a, b, c in all_of if a == 1]
    twice: list[Parts] = [[([0], [[2]]), ([2, 0], [[b]]), ([0, 2 - b, 1], [[c]])] for a, b, c in all_of if a == 2]
    return going_on + once + twice


def planted(parts: Parts) -> Forest:
    forest = Forest()
    for part, (prompt, segments) in enumerate(parts):
        [number] = forest.plant([torch.tensor(prompt)], groups=[0], members=[0], parts=[part])
        for turn, segment in enumerate(segments):
            tokens = [torch.tensor(segment)]
            if turn % 2 == 0:
                forest.grow([number], tokens, Kind.SAMPLED, log_probs=[-torch.ones(len(segment))], versions=[0])
            else:
                forest.grow([number], tokens, Kind.ENVIRONMENT)
        forest.rollouts[number].outcome, forest.rollouts[number].stop = scored(0.0), StopReason.EOS
    return forest


def log_probs_of_parts(model: PreTrainedModel, parts: Parts) -> Tensor:
    rows = [Row(0, 0, prompt, segments, scored(0.0)) for prompt, segments in parts]
    return torch.cat([log_probs_of(model, row) for row in rows])


@pytest.mark.parametrize("micro", [1, 10**6])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_kl_of_episodes_in_parts_has_the_exact_gradient(estimator: str, micro: int) -> None:
    """Expected over all 21 episodes, against autograd on the KL between them: within 1e-12, float64.

    Counting what follows in the token's own part alone is off by 26%, |found - exact| / |exact|.
    """
    config = GPT2Config(vocab_size=3, n_embd=8, n_layer=1, n_head=2, n_positions=8, eos_token_id=2, bos_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(3)  # of which transformers draws initial weights
        policy, reference = (GPT2LMHeadModel(config).double().eval() for _ in range(2))
        for parameter in (*policy.parameters(), *reference.parameters()):
            parameter.data += 0.5 * torch.randn(parameter.shape, dtype=torch.float64)
    episodes = episodes_of_three_tokens()
    chances = torch.stack([log_probs_of_parts(policy, parts).sum() for parts in episodes])
    others = torch.stack([log_probs_of_parts(reference, parts).sum() for parts in episodes])
    assert float(chances.detach().exp().sum()) == pytest.approx(1.0, abs=1e-12)  # they are all
    exact = (chances.exp() * (chances - others.detach())).sum()
    names, parameters = zip(*policy.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(exact, parameters, allow_unused=True), strict=True))
    found = {name: torch.zeros_like(parameter) for name, parameter in policy.named_parameters()}
    pull = {"coefficient": LIMIT, "unbiased": True, "estimator": estimator}  # LIMIT is the denominator
    value = 0.0
    for parts, chance in zip(episodes, chances.detach().exp().tolist(), strict=True):
        forest, settings_ = planted(parts), config_of(reduction="dr_grpo", kl=pull, micro=micro)
        batch = prepare(policy, reference, forest, settings_, step=1)
        value += chance * update(policy, torch.optim.SGD(policy.parameters(), lr=0.0), forest, batch, settings_)["loss"]
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None
            found[name] += chance * parameter.grad
    assert value == pytest.approx(float(exact.detach()), abs=1e-12)
    scale = max(float(gradient.abs().max()) for gradient in found.values())
    assert scale > 0.01
    for name, gradient in found.items():
        assert wanted[name] is not None
        assert float((gradient - wanted[name]).abs().max()) <= 1e-12 * max(1.0, scale), name


def test_the_parts_of_an_episode_stand_together(pair: Pair) -> None:
    forest = cut_at_turns(ROWS)
    assert forest.episodes == [0, 1, 2, 3, 4, 4, 6, 6, 8, 9, 10, 11, 12, 13]
    assert Forest.from_arrays(forest.to_arrays()).episodes == forest.episodes
    lost = forest.subset([5])
    with pytest.raises(ForestError, match="rollout 0 is part 1 of group 9, member 0: expected part 0"):
        prepare(*pair, lost, config_of(), step=1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 3), max_size=20), st.integers(1, 12))
def test_minibatches_keep_the_parts_of_an_episode_together(parts: list[int], pieces: int) -> None:
    episodes = [number for number, count in enumerate(parts) for _ in range(count)]
    found = _minibatches(episodes, pieces)
    assert [row for piece in found for row in piece] == list(range(len(episodes)))
    counts = [len({episodes[row] for row in piece}) for piece in found]
    assert sum(counts) == len(parts)
    assert max(counts, default=0) - min(counts, default=0) <= 1


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 50), st.integers(1, 12))
def test_minibatches_partition_evenly(count: int, pieces: int) -> None:
    found = _minibatches(list(range(count)), pieces)
    assert [row for piece in found for row in piece] == list(range(count))
    assert len(found) == min(count, pieces)
    assert all(found)
    assert max(map(len, found), default=0) - min(map(len, found), default=0) <= 1


def test_a_group_is_flat_where_no_member_has_an_advantage() -> None:
    """Of four groups: one differs, one earns the same, one has no score, one has a single score."""
    rows = [
        Row(0, 0, [1], [[7]], Outcome.scored(1.0)),
        Row(0, 1, [1], [[8]], Outcome.scored(0.0)),
        Row(1, 0, [1], [[7]], Outcome.scored(0.1)),
        Row(1, 1, [1], [[8]], Outcome.scored(0.1)),
        Row(2, 0, [1], [[7]], Outcome.abstained()),
        Row(2, 1, [1], [[8]], Outcome.timed_out("slow")),
        Row(3, 0, [1], [[7]], Outcome.scored(0.5)),
        Row(3, 1, [1], [[8]], Outcome.abstained()),
    ]
    forest = forest_of(rows)
    for rollout, advantage in zip(forest.rollouts, [0.5, -0.5, *[0.0] * 6], strict=True):
        rollout.advantage = advantage
    assert flat_groups(forest) == 0.75
    assert flat_groups(Forest()) == 0.0
    said = nothing_learned(forest, 3)
    assert said.startswith("step 3 teaches nothing: ")
    assert "(mean reward 0.340, 25% abstained, 12% failed)" in said
    assert "(no rollout has a score, 50% abstained, 50% failed)" in nothing_learned(forest_of(rows[4:6]), 1)
