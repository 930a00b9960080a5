"""Held-out scores: the same problems, the same settings and the same random numbers each time they are asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ramet.errors import TooManyFailures
from ramet.forest import Forest
from ramet.metrics import Interval, MetricsLog, clustered_mean, mean_interval, mean_pass_at_k, paired_difference
from ramet.prompts import Prompts
from ramet.rollouts import Playing, refuse_failures
from ramet.tasks.stored_rows import stored
from ramet.types import Message, Outcome, OutcomeKind, Sample, Sampling, StopReason, ToolCall

Decoding: TypeAlias = Literal["greedy", "sampled"]
TEMPERATURES: Mapping[Decoding, float] = {"greedy": 0.0, "sampled": 1.0}
"""Greedy shows what the model thinks best, sampled its own distribution, whatever temperature training samples at."""

EVALUATION_SEED = 2**62
"""Added to the seed for held-out draws: no training rollout shares its random numbers with an evaluation."""


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
    play: Playing,
    prompts: Prompts,
    *,
    problems: int,
    sampling: Sampling,
    seed: int,
    when: str,
    step: int,
    decodings: Iterable[Decoding] = tuple(TEMPERATURES),
    max_failed_fraction: Callable[[], float] = lambda: 1.0,
    refused: Callable[[list[dict[str, Any]]], object] = lambda records: None,
) -> Evaluation:
    """Score the first `problems` rows of `prompts`, one episode each, with each decoding.

    `sampling` gives limits and stops; its temperature is replaced, and all tokens may be drawn. A rollout without a
    score (abstained, failed) is left out of the mean and counted, and its record says why. Raises `TooManyFailures`
    where a larger fraction failed under one decoding than `max_failed_fraction`, which is asked when that has been
    played; who abstains has not failed. `refused` is handed the records first, so that they are not lost.
    """
    records: list[dict[str, Any]] = []
    for decoding in decodings:
        draw = Sampling(sampling.max_new_tokens, TEMPERATURES[decoding], sampling.stop_ids, stop=sampling.stop)
        forest, samples = play(prompts.first(problems), prompts, sampling=draw, seed=seed)
        records += [{**r, "decoding": decoding} for r in rollout_records(forest, samples, when=when, step=step)]
        where = f"evaluation ({when}, step {step}, {decoding})"
        try:
            refuse_failures(forest, max_failed_fraction(), play.judge, where=where)
        except TooManyFailures:
            refused(records)
            raise
    return Evaluation.from_records(records)


def rollout_records(forest: Forest, samples: Sequence[Sample], *, when: str, step: int) -> list[dict[str, Any]]:
    """Describe every episode of `forest` for `rollouts.jsonl`: what was asked, answered, and made of it."""
    records = []
    whole = [rollout for rollout in forest.rollouts if rollout.part == 0]
    for rollout, sample in zip(whole, samples, strict=True):
        if rollout.outcome is None:
            raise ValueError("a rollout is described once it has an outcome: call judge_rollouts first")
        records.append(record_of(sample, rollout.outcome, when=when, step=step, advantage=rollout.advantage))
    return records


def record_of(
    sample: Sample,
    outcome: Outcome,
    *,
    when: str,
    step: int,
    advantage: float = 0.0,
    decoding: Decoding = "sampled",
) -> dict[str, Any]:
    """Describe one judged episode for `rollouts.jsonl`.

    It holds what a reward sees, so that `ramet.tasks.rescoring` can judge it again: "completion" is what the model
    wrote last, "completion_tokens" are all that it sampled, "messages" the whole conversation where there was one, and
    "row" the columns of the data row beside its prompt. "row_kinds" says which of their values are written in other
    terms, for JSON does not know them, and "row_left_out" names the columns that can not be written (see
    `ramet.tasks.stored_rows`); both are there where they say something.
    """
    prompt = sample.prompt
    row = stored({name: value for name, value in sample.row.items() if name != "prompt"})
    record = {
        "when": when,
        "step": step,
        "group": sample.group,
        "member": sample.member,
        "prompt": prompt if isinstance(prompt, str) else [_plain(message) for message in prompt],
        "completion": sample.completion,
        "prompt_tokens": list(sample.prompt_tokens),
        "completion_tokens": list(sample.completion_tokens),
        "score": outcome.score,
        "rewards": dict(outcome.rewards),
        "advantage": advantage,
        "outcome": outcome.kind.value,
        "reason": outcome.reason,
        "stop": sample.stop.value,
        "decoding": decoding,
        "messages": [_plain(message) for message in sample.messages],
        "row": row.columns,
    }
    if row.kinds:
        record["row_kinds"] = row.kinds
    if row.left_out:
        record["row_left_out"] = row.left_out
    return record


def _plain(message: Message) -> dict[str, Any]:
    """Return a message with the calls in it as mappings."""
    plain = dict(message)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [asdict(call) if isinstance(call, ToolCall) else call for call in plain["tool_calls"]]
    return plain


class RolloutLog(MetricsLog):
    """`rollouts.jsonl`; says once, by name, which columns of the data rows its records have to leave out, and why."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._told: set[str] = set()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write the record of one episode."""
        super().append(entry)
        for name, why in entry.get("row_left_out", {}).items():
            if name not in self._told:
                self._told.add(name)
                logging.getLogger(__name__).warning(
                    "the column %r of the data rows is left out of %s: %s. A reward that reads it can not judge these "
                    "rollouts again",
                    name,
                    self.path,
                    why,
                )


@dataclass(frozen=True, slots=True)
class Passed:
    """pass@k: the chance that one of `k` samples passes, over the `problems` that have as many scores."""

    k: int
    chance: Interval | None
    problems: int


@dataclass(frozen=True, slots=True)
class Tally:
    """What some rollouts came to.

    `mean` is the mean score over problems, each of which weighs the same, with an interval that takes the problems as
    the sample (None without any score); `problems` have at least one score. Rollouts that `abstained` or `failed` have
    none and are left out of both; one that was `truncated` counts with the score that it has.
    """

    rollouts: int
    problems: int
    mean: Interval | None
    passed: tuple[Passed, ...]
    abstained: int
    failed: int
    truncated: int

    def as_table(self) -> dict[str, Any]:
        """Return the same as mappings and numbers, for `summary.json`."""
        passed = {str(each.k): {**_ends(each.chance), "problems": each.problems} for each in self.passed}
        counts = {name: getattr(self, name) for name in ("problems", "rollouts", "abstained", "failed", "truncated")}
        return {"score": _ends(self.mean), "pass_at_k": passed, **counts}


def _ends(interval: Interval | None) -> dict[str, float | None]:
    return dict.fromkeys(Interval._fields) if interval is None else interval._asdict()


def tally(records: Iterable[Mapping[str, Any]], ks: Sequence[int] = (1,), *, pass_at: float = 1.0) -> Tally:
    """Sum up the records of rollouts: the mean score, and pass@k for each of `ks`.

    A rollout passes with a score of `pass_at` or more. pass@k is the unbiased estimate over the problems that have at
    least k scores. https://arxiv.org/abs/2107.03374

    >>> records = [{"group": 0, "score": score, "outcome": "scored", "stop": "eos"} for score in (1.0, 0.0)]
    >>> found = tally(records, (1, 2))
    >>> found.mean.value, [each.chance.value for each in found.passed]
    (0.5, [0.5, 1.0])
    """
    kept = list(records)
    scores: dict[int, list[float]] = {}
    for record in kept:
        if record["score"] is not None:
            scores.setdefault(record["group"], []).append(record["score"])
    kinds = [OutcomeKind(record["outcome"]) for record in kept]
    counts = [(len(own), sum(score >= pass_at for score in own)) for own in scores.values()]
    passed = []
    for k in ks:
        enough = [count for count in counts if count[0] >= k]
        passed.append(Passed(k, mean_pass_at_k(enough, k) if enough else None, len(enough)))
    return Tally(
        rollouts=len(kept),
        problems=len(scores),
        mean=clustered_mean(scores.values()) if scores else None,
        passed=tuple(passed),
        abstained=kinds.count(OutcomeKind.ABSTAINED),
        failed=sum(kind.failed for kind in kinds),
        truncated=sum(StopReason(record["stop"]).truncated for record in kept),
    )
