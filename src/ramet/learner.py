"""From a judged forest to an update of the weights: scores, advantages, loss, step."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ramet import advantages, losses
from ramet.config import TrainConfig
from ramet.errors import ForestError, ModelError
from ramet.forest import Forest, Sampled
from ramet.kl import kl, kl_in_loss, kl_penalty
from ramet.scoring import Scores, score
from ramet.scoring.budget import tokens_that_fit
from ramet.scoring.check import engine_for
from ramet.scoring.layout import batches as distinct_batches
from ramet.scoring.score import Scorer
from ramet.types import Support


@dataclass(slots=True)
class Batch:
    """What the loss needs, flat over the M sampled tokens of the rollouts that are trained on.

    `lengths` int64 counts the sampled tokens of a token's episode, all parts of it; `episodes` says, for each rollout,
    which episode of the batch it is a part of, counted from 0. `start` are the trainer's log-probs at the start of
    the batch; where a batch gets a single update they are the current ones, and are filled in as they come. `entropy`
    likewise.
    """

    rollouts: list[int]
    episodes: list[int]
    sampled: Sampled
    lengths: Tensor
    advantages: Tensor
    start: Tensor
    entropy: Tensor
    reference: Tensor | None
    start_known: bool


def outcomes_of(forest: Forest, *, truncated: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores float64 [R], groups int64 [R] and which rollouts count, bool [R].

    A rollout counts if it was scored and, with `truncated="drop"`, was not ended by a limit; the others leave their
    group's baseline alone. Of an episode of several parts the first one counts, for all of them.
    """
    counts, scores = [], []
    for rollout in forest.rollouts:
        outcome = rollout.outcome
        scored = outcome is not None and outcome.score is not None
        cut = rollout.stop is not None and rollout.stop.truncated
        counts.append(scored and not (cut and truncated == "drop") and rollout.part == 0)
        scores.append(outcome.score if outcome is not None and outcome.score is not None else 0.0)
    groups = torch.tensor([rollout.group for rollout in forest.rollouts], dtype=torch.int64)
    return torch.tensor(scores, dtype=torch.float64), groups, torch.tensor(counts, dtype=torch.bool)


def shuffled(scores: Tensor, valid: Tensor, *, seed: int, step: int) -> Tensor:
    """Deal the valid scores out again at random: a control in which nothing can be learned."""
    key = np.array([seed, step], dtype=np.uint64)
    where = torch.nonzero(valid).squeeze(1)
    order = torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).permutation(len(where)))
    return scores.index_put((where,), scores[where[order]])


def prepare(model: nn.Module, reference: Scorer, forest: Forest, config: TrainConfig, *, step: int) -> Batch:
    """Score the forest under the weights of now and of the reference, and give each rollout its advantage.

    Raises `ForestError` where a sampled token that would be trained on has no finite log-prob of its sampler.
    """
    scores, groups, valid = outcomes_of(forest, truncated=config.rollout.truncated)
    first = torch.tensor(forest.episodes, dtype=torch.int64)
    whole = torch.nonzero(valid[first]).squeeze(1) if len(first) else first
    rollouts = [n for n in whole.tolist() if len(forest.sampled([n]).index)]
    episodes = torch.unique(first[rollouts], return_inverse=True)[1] if rollouts else first[:0]
    sampled = forest.sampled(rollouts)
    unknown = ~sampled.log_probs.isfinite()
    if bool(unknown.any()):
        first = rollouts[int(sampled.row[unknown][0])]
        raise ForestError(
            f"every token that is trained on needs the finite log-prob of its sampler: {int(unknown.sum())} of "
            f"{len(unknown)} have none, the first in rollout {first}",
            hint="greedy decoding has no density: sample at a temperature above 0",
        )
    in_reward = config.kl.coefficient > 0 and config.kl.place in ("reward", "both")
    start_known = config.optimizer.updates_per_step * config.optimizer.epochs_per_step > 1 or in_reward
    with torch.no_grad():
        reference_log_probs = _score(reference, forest, rollouts, config).log_probs[sampled.index].cpu()
        start = torch.full_like(reference_log_probs, torch.nan)
        if start_known:
            start = _score(model, forest, rollouts, config).log_probs[sampled.index].cpu()
    if config.control.shuffle_rewards:
        scores = shuffled(scores, valid, seed=config.seed, step=step)
    if in_reward:
        # k1, whatever the loss uses: the only estimator whose gradient is right in a reward (see kl.py).
        penalty = kl_penalty(start, reference_log_probs, coef=config.kl.coefficient, estimator="k1")
        owner = first[rollouts][sampled.row]
        scores = scores.index_add(0, owner, -penalty.double())
    gains = _advantages(scores, groups, valid, config)[first]
    for rollout, gain in zip(forest.rollouts, gains.tolist(), strict=True):
        rollout.advantage = gain
    return Batch(
        rollouts=rollouts,
        episodes=episodes.tolist(),
        sampled=sampled,
        lengths=losses.sequence_lengths(episodes[sampled.row]),
        advantages=gains[torch.tensor(rollouts, dtype=torch.int64)][sampled.row].to(start),
        start=start,
        entropy=torch.full_like(start, torch.nan),
        reference=reference_log_probs,
        start_known=start_known,
    )


def _advantages(scores: Tensor, groups: Tensor, valid: Tensor, config: TrainConfig) -> Tensor:
    match config.advantage.kind:
        case "group_mean":
            return advantages.group_mean(scores, groups, valid=valid)
        case "group_mean_std":
            return advantages.group_mean(scores, groups, valid=valid, scale_by_std=True)
        case "leave_one_out":
            return advantages.leave_one_out(scores, groups, valid=valid)


def _score(
    model: Scorer, forest: Forest, rollouts: Sequence[int], config: TrainConfig, *, entropy: bool = False
) -> Scores:
    return score(
        model,
        forest,
        rollouts=rollouts,
        temperature=config.rollout.temperature,
        entropy=entropy,
        support=support_of(config),
        max_tokens=config.optimizer.micro_batch_tokens,
        autocast=config.autocast_dtype,
        gradient_checkpointing=config.optimizer.gradient_checkpointing,
    )


def support_of(config: TrainConfig) -> Support:
    """Return what the sampler may draw from, which is what a log-prob is a log-prob under."""
    return Support(top_k=config.rollout.top_k, top_p=config.rollout.top_p, min_p=config.rollout.min_p)


def token_budget(model: nn.Module, config: TrainConfig) -> int:
    """Return how many tokens a forward pass may run: `optimizer.micro_batch_tokens`, or what fits into memory."""
    return config.optimizer.micro_batch_tokens or tokens_that_fit(
        model, gradient_checkpointing=config.optimizer.gradient_checkpointing, autocast=config.autocast_dtype
    )


def optimizer_of(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimiser of a run."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.optimizer.learning_rate,
        betas=config.optimizer.betas,
        weight_decay=config.optimizer.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> float:
    """Set and return the learning rate of a step, a function of its number: resuming needs no memory of it."""
    warmup, steps = config.optimizer.warmup_steps, config.steps
    share = min(1.0, step / warmup) if warmup else 1.0
    if config.optimizer.schedule == "linear" and step > warmup:
        share = (steps - step + 1) / (steps - warmup)
    rate = config.optimizer.learning_rate * share
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def micro_batches(
    model: nn.Module, forest: Forest, rollouts: Sequence[int], config: TrainConfig
) -> Iterator[list[int]]:
    """Cut rollouts into runs that fit the budget, counted as the model runs them: padded rows, or distinct tokens."""
    longest = max((forest.depth(forest.rollouts[number].end) for number in rollouts), default=0)
    engine = engine_for(model, longest, gradient_checkpointing=config.optimizer.gradient_checkpointing)
    cut = forest.batches if engine == "rows" else partial(distinct_batches, forest)
    return cut(rollouts, token_budget(model, config))


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, forest: Forest, batch: Batch, config: TrainConfig
) -> dict[str, float]:
    """Take the optimiser steps of one batch; return what is worth logging.

    `trained_on` counts the episodes that entered; where none did, nothing else is said. `tokens_trained` are the tokens
    of their rows, prompts included, and `tokens_computed` those that the model ran over, shared ones once. Raises
    `ModelError` as `checked_step` does.
    """
    totals: dict[str, float] = {"loss": 0.0, "clip_fraction": 0.0, "grad_norm": 0.0}
    counts = {"tokens_computed": 0, "tokens_trained": 0}
    updates = 0
    for epoch in range(config.optimizer.epochs_per_step):
        for rows in _minibatches(batch.episodes, config.optimizer.updates_per_step):
            logged = _one_update(model, optimizer, forest, batch, rows, config, first=epoch == 0)
            updates += 1
            for name in totals:
                totals[name] += logged[name]
            for name in counts:
                counts[name] += int(logged[name])
    if updates == 0:
        return {"trained_on": 0}
    logged = {"trained_on": len(set(batch.episodes)), **counts}
    logged |= {name: value / updates for name, value in totals.items()}
    gap = losses.mismatch(batch.start, batch.sampled.log_probs)
    logged |= {"mismatch_kl": gap.kl, "mismatch_max": gap.largest, "entropy": float(batch.entropy.mean())}
    if batch.reference is not None:
        logged["kl"] = float(kl(batch.start, batch.reference, "k3").mean())
    return logged


def _minibatches(episodes: Sequence[int], pieces: int) -> list[range]:
    """Cut rollouts, whose `episodes` rise from 0, into at most `pieces` runs of nearly as many episodes, none empty."""
    count = episodes[-1] + 1 if episodes else 0
    edges = [bisect_left(episodes, count * piece // pieces) for piece in range(pieces + 1)]
    return [range(low, high) for low, high in itertools.pairwise(edges) if high > low]


def _one_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forest: Forest,
    batch: Batch,
    rows: range,
    config: TrainConfig,
    *,
    first: bool,
) -> dict[str, float]:
    ends = torch.bincount(batch.sampled.row, minlength=len(batch.rollouts)).cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    tokens = ends[rows[-1]] - begins[rows[0]]
    sequences = len({batch.episodes[row] for row in rows})
    optimizer.zero_grad(set_to_none=True)
    logged = {"loss": 0.0, "clip_fraction": 0.0, "tokens_computed": 0, "tokens_trained": 0}
    at, pieces = rows[0], []
    for part in micro_batches(model, forest, [batch.rollouts[row] for row in rows], config):
        pieces.append((part, slice(begins[at], ends[at + len(part) - 1])))
        at += len(part)
    if config.kl.unbiased:  # the pull of a token counts what follows in its episode, which must be known by then
        pieces.reverse()
    later = batch.start.new_zeros(max(batch.episodes, default=-1) + 1)
    for part, span in pieces:
        scores = _score(model, forest, part, config, entropy=first)
        logged["tokens_computed"] += scores.tokens_computed
        logged["tokens_trained"] += sum(forest.depth(forest.rollouts[number].end) for number in part)
        current = scores.log_probs[batch.sampled.index[span]].cpu()
        if scores.entropy is not None:
            batch.entropy[span] = scores.entropy[batch.sampled.index[span]].detach().cpu()
        if not batch.start_known:
            batch.start[span] = current.detach()
        loss, held = _loss(current, batch, span, config, later, sequences=sequences, tokens=tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        logged["loss"] += float(loss.detach())
        logged["clip_fraction"] += held
    return {**logged, "grad_norm": checked_step(model, optimizer, config.optimizer.gradient_clip)}


def checked_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> float:
    """Clip the gradient to the norm `clip`, step, and return the norm before clipping.

    Raises `ModelError` for a norm that is not finite, with the weights as they were, and for weights that the step made
    infinite or NaN.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if not bool(norm.isfinite()):
        raise ModelError(
            f"the norm of the gradient is {float(norm)}: the update would turn all weights into NaN, and was not taken",
            hint="lower optimizer.learning_rate, raise kl.coefficient, or use float32 weights",
        )
    optimizer.step()
    moved = [(name, p.detach()) for name, p in model.named_parameters() if p.grad is not None]
    # A sum is finite over finite numbers alone, and ten times as quick to find; where it is not, they are looked at.
    doubtful = [(name, p) for name, p in moved if not bool(p.sum().isfinite())]
    broken = [name for name, p in doubtful if not bool(p.isfinite().all())]
    if broken:
        raise ModelError(
            f"the update made weights that are not finite, in {len(broken)} of {len(moved)} parameters, "
            f"the first in {broken[0]}",
            hint="go back to the last checkpoint with a lower learning rate or float32 weights",
        )
    return float(norm)


def _loss(
    current: Tensor, batch: Batch, span: slice, config: TrainConfig, later: Tensor, *, sequences: int, tokens: int
) -> tuple[Tensor, float]:
    """Return the loss of a micro-batch under the denominators of its whole update, and its share of clipped tokens.

    `later`, one for each episode, is the KL of what followed in micro-batches that were taken before; that of this one
    is added to it.
    """
    start, gains = batch.start[span], batch.advantages[span]
    weights, held = None, 0.0
    if config.loss.importance_cap is not None:
        weights = losses.importance_weights(start, batch.sampled.log_probs[span], cap=config.loss.importance_cap)
    if config.loss.kind == "policy_gradient":
        per_token = losses.policy_gradient(current, gains, weights=weights)
    else:
        low, high = config.loss.clip_low, config.loss.clip_high
        per_token = losses.clipped(current, start, gains, weights=weights, clip_low=low, clip_high=high)
        held = float(losses.clip_fraction(current, start, gains, tokens=tokens, clip_low=low, clip_high=high))
    if batch.reference is not None and config.kl.coefficient > 0 and config.kl.place in ("loss", "both"):
        owner = torch.tensor(batch.episodes)[batch.sampled.row[span]]
        pull = kl_in_loss(
            current,
            batch.reference[span],
            config.kl.estimator,
            unbiased=config.kl.unbiased,
            sequences=owner,
            later=later[owner],
            weights=weights,
        )
        later.index_add_(0, owner, pull.detach())
        per_token = per_token + config.kl.coefficient * pull
    match config.loss.reduction:
        case "grpo":
            total = losses.sequence_mean(per_token, batch.lengths[span], sequences=sequences)
        case "dr_grpo":
            total = losses.constant_mean(per_token, sequences=sequences, max_tokens=_episode_limit(config))
        case "dapo":
            total = losses.token_mean(per_token, tokens=tokens)
    return total, held


def _episode_limit(config: TrainConfig) -> int:
    """Return the most tokens that an episode may sample."""
    return config.rollout.max_new_tokens * (config.rollout.max_turns or 1)


def reward_metrics(forest: Forest) -> Mapping[str, float | dict[str, float] | None]:
    """Describe what a step's rollouts earned and how they ended, means over the rollouts that have a score."""
    episodes = [rollout for rollout in forest.rollouts if rollout.part == 0]
    outcomes = [rollout.outcome for rollout in episodes if rollout.outcome is not None]
    scored = [outcome for outcome in outcomes if outcome.score is not None]
    values = torch.tensor([outcome.score for outcome in scored], dtype=torch.float64)
    names = sorted({name for outcome in scored for name in outcome.rewards})
    stops = [rollout.stop is not None and rollout.stop.truncated for rollout in episodes]
    return {
        "reward": float(values.mean()) if scored else None,
        "reward_std": float(values.std(correction=0)) if scored else None,
        "rewards": {n: float(np.mean([o.rewards[n] for o in scored if n in o.rewards])) for n in names},
        "truncated": sum(stops) / max(1, len(stops)),
        "abstained": sum(outcome.kind.value == "abstained" for outcome in outcomes) / max(1, len(outcomes)),
        "failed": sum(outcome.kind.failed for outcome in outcomes) / max(1, len(outcomes)),
    }


def flat_groups(forest: Forest) -> float:
    """Return the fraction of the groups that teach nothing: no member of them has an advantage other than 0."""
    taught: dict[int, bool] = {}
    for rollout in forest.rollouts:
        taught[rollout.group] = taught.get(rollout.group, False) or rollout.advantage != 0
    return sum(not differs for differs in taught.values()) / max(1, len(taught))


def nothing_learned(forest: Forest, step: int) -> str:
    """Return what to say of a step whose groups are all flat."""
    earned = reward_metrics(forest)
    without = ", ".join(f"{earned[why]:.0%} {why}" for why in ("abstained", "failed"))
    mean = "no rollout has a score" if earned["reward"] is None else f"mean reward {earned['reward']:.3f}"
    return (
        f"step {step} teaches nothing: in none of its groups did a rollout earn more than another ({mean}, {without}). "
        "What is learned is learned from differences: give prompts that are neither too hard nor too easy, a larger "
        "rollout.group_size, or a reward with steps between nothing and all; rollouts.jsonl says why there is no score"
    )
