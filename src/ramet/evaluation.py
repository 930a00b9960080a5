"""Held-out scores: the same problems, the same settings and the same random numbers each time they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ramet.envs.env import EnvBase
from ramet.forest import Forest
from ramet.metrics import Interval, mean_interval, paired_difference
from ramet.policies.policy import Policy
from ramet.prompts import Prompts
from ramet.rollouts import collect, judge_rollouts, samples_of
from ramet.tasks.judge import Judge
from ramet.types import Sample, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decoding: TypeAlias = Literal["greedy", "sampled"]
TEMPERATURES: Mapping[Decoding, float] = {"greedy": 0.0, "sampled": 1.0}
"""Both are always scored: greedy shows what the model thinks best, sampled what it does in training."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores by decoding and problem (the number of the held-out row), and a record of each rollout."""

    scores: Mapping[Decoding, Mapping[int, float]]
    records: Sequence[Mapping[str, Any]]

    def held_out(self) -> dict[str, dict[str, float]]:
        """Return score, 95% interval and number of problems for each decoding that has a score."""
        intervals = {name: mean_interval(list(by.values())) for name, by in self.scores.items() if by}
        return {
            name: {"score": mean.value, "low": mean.low, "high": mean.high, "problems": len(self.scores[name])}
            for name, mean in intervals.items()
        }

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> Evaluation:
        """Rebuild an evaluation from what `rollouts.jsonl` holds of it."""
        kept = list(records)
        scores: dict[Decoding, dict[int, float]] = {
            name: {r["group"]: r["score"] for r in kept if r["decoding"] == name and r["score"] is not None}
            for name in TEMPERATURES
        }
        return cls(scores, kept)


def difference(before: Evaluation, after: Evaluation, decoding: Decoding) -> Interval | None:
    """Return the mean change over the problems that both have a score for, with its 95% interval; None without any."""
    old, new = before.scores[decoding], after.scores[decoding]
    both = sorted(old.keys() & new.keys())
    return paired_difference([old[p] for p in both], [new[p] for p in both]) if both else None


def evaluate(
    env: EnvBase,
    policy: Policy,
    prompts: Prompts,
    tokenizer: PreTrainedTokenizerBase,
    judge: Judge,
    *,
    problems: int,
    sampling: Sampling,
    seed: int,
    when: str,
    step: int,
    decodings: Iterable[Decoding] = tuple(TEMPERATURES),
) -> Evaluation:
    """Score the first `problems` rows of `prompts`, one completion each, with each decoding.

    `sampling` gives limits and stops; its temperature is replaced. A rollout without a score (abstained, failed) is
    left out of the mean, and its record says why.
    """
    records = []
    for decoding in decodings:
        draw = Sampling(sampling.max_new_tokens, TEMPERATURES[decoding], sampling.stop_ids)
        forest = collect(env, policy, prompts.first(problems), sampling=draw, seed=seed)
        numbers = range(len(forest.rollouts))
        samples = samples_of(forest, numbers, prompts, tokenizer)
        judge_rollouts(forest, samples, numbers, judge)
        records += [{**r, "decoding": decoding} for r in rollout_records(forest, samples, when=when, step=step)]
    return Evaluation.from_records(records)


def rollout_records(forest: Forest, samples: Sequence[Sample], *, when: str, step: int) -> list[dict[str, Any]]:
    """Describe every rollout of `forest` for `rollouts.jsonl`: what was asked, answered, and made of it."""
    records = []
    for rollout, sample in zip(forest.rollouts, samples, strict=True):
        outcome = rollout.outcome
        if outcome is None:
            raise ValueError("a rollout is described once it has an outcome: call judge_rollouts first")
        messages = sample.prompt
        records.append(
            {
                "when": when,
                "step": step,
                "group": rollout.group,
                "member": rollout.member,
                "prompt": messages if isinstance(messages, str) else [dict(message) for message in messages],
                "completion": sample.completion,
                "completion_tokens": list(sample.completion_tokens),
                "score": outcome.score,
                "rewards": dict(outcome.rewards),
                "advantage": rollout.advantage,
                "outcome": outcome.kind.value,
                "reason": outcome.reason,
                "stop": sample.stop.value,
                "decoding": "sampled",
            }
        )
    return records
