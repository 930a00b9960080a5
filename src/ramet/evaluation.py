"""Held-out scores: the same problems, the same settings and the same random numbers each time they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ramet.envs.env import EnvBase
from ramet.errors import TooManyFailures
from ramet.forest import Forest
from ramet.metrics import Interval, mean_interval, paired_difference
from ramet.policies.policy import Policy
from ramet.prompts import Prompts
from ramet.rollouts import collect, first_failure, judge_rollouts, samples_of
from ramet.tasks.judge import Judge
from ramet.types import OutcomeKind, Sample, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decoding: TypeAlias = Literal["greedy", "sampled"]
TEMPERATURES: Mapping[Decoding, float] = {"greedy": 0.0, "sampled": 1.0}
"""Greedy shows what the model thinks best, sampled its own distribution, whatever temperature training samples at."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores by decoding and problem (the number of the held-out row), and a record of each rollout.

    `failed` and `abstained` count, by decoding, the problems that have no score: those of an error or a time-out, and
    those that the reward gave none.
    """

    scores: Mapping[Decoding, Mapping[int, float]]
    records: Sequence[Mapping[str, Any]]
    failed: Mapping[Decoding, int] = field(default_factory=dict)
    abstained: Mapping[Decoding, int] = field(default_factory=dict)

    def held_out(self) -> dict[str, dict[str, Any]]:
        """Return score, 95% interval and number of problems for each decoding, and how many have no score, and why.

        Where no problem has a score, `score`, `low` and `high` are None and `problems` is 0. A decoding that nobody
        asked for is left out.
        """
        found: dict[str, dict[str, Any]] = {}
        for name, by in self.scores.items():
            failed, abstained = self.failed.get(name, 0), self.abstained.get(name, 0)
            if by or failed or abstained:
                score, low, high = mean_interval(list(by.values())) if by else (None, None, None)
                counts = {"problems": len(by), "failed": failed, "abstained": abstained}
                found[name] = {"score": score, "low": low, "high": high, **counts}
        return found

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> Evaluation:
        """Rebuild an evaluation from what `rollouts.jsonl` holds of it."""
        kept = list(records)
        scores, failed, abstained = {}, {}, {}
        for name in TEMPERATURES:
            own = [record for record in kept if record["decoding"] == name]
            kinds = [OutcomeKind(record["outcome"]) for record in own]
            scores[name] = {record["group"]: record["score"] for record in own if record["score"] is not None}
            failed[name] = sum(kind.failed for kind in kinds)
            abstained[name] = kinds.count(OutcomeKind.ABSTAINED)
        return cls(scores, kept, failed, abstained)


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
    max_failed_fraction: float = 1.0,
) -> Evaluation:
    """Score the first `problems` rows of `prompts`, one completion each, with each decoding.

    `sampling` gives limits and stops; its temperature is replaced, and all tokens may be drawn. A rollout without a
    score (abstained, failed) is left out of the mean and counted, and its record says why. Raises `TooManyFailures`
    where a larger fraction than `max_failed_fraction` failed under one decoding; who abstains has not failed.
    """
    records = []
    for decoding in decodings:
        draw = Sampling(sampling.max_new_tokens, TEMPERATURES[decoding], sampling.stop_ids, stop=sampling.stop)
        forest = collect(env, policy, prompts.first(problems), sampling=draw, seed=seed)
        numbers = range(len(forest.rollouts))
        samples = samples_of(forest, numbers, prompts, tokenizer)
        failed = judge_rollouts(forest, samples, numbers, judge)
        if failed > max_failed_fraction:
            raise TooManyFailures(
                f"evaluation ({when}, step {step}, {decoding}): {failed:.0%} of the rollouts failed, and "
                f"max_failed_fraction allows {max_failed_fraction:.0%}; the first says: {first_failure(forest)}",
                hint=f"mend the reward {judge.name}, or allow more failures",
            )
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
