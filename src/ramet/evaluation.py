"""Held-out scores: the same problems, the same settings and the same random numbers each time they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from ramet.episodes import EventLoop, Gathered, Here, Rules, Speech, Start, play
from ramet.episodes.collect import Answers
from ramet.episodes.loop import together
from ramet.episodes.play import Tools
from ramet.errors import TooManyFailures
from ramet.forest import Forest
from ramet.metrics import Interval, clustered_mean, finite, mean_interval, mean_pass_at_k, paired_difference
from ramet.policies.policy import Policy
from ramet.prompts import Prompts
from ramet.rollouts import Playing, failed_fraction, first_failure
from ramet.tasks.judge import Judge
from ramet.tasks.task import Task
from ramet.types import Completion, Message, Outcome, OutcomeKind, Request, Sample, Sampling, StopReason, ToolCall

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
    play: Playing,
    prompts: Prompts,
    *,
    problems: int,
    sampling: Sampling,
    seed: int,
    when: str,
    step: int,
    decodings: Iterable[Decoding] = tuple(TEMPERATURES),
    max_failed_fraction: float = 1.0,
) -> Evaluation:
    """Score the first `problems` rows of `prompts`, one episode each, with each decoding.

    `sampling` gives limits and stops; its temperature is replaced, and all tokens may be drawn. A rollout without a
    score (abstained, failed) is left out of the mean and counted, and its record says why. Raises `TooManyFailures`
    where a larger fraction than `max_failed_fraction` failed under one decoding; who abstains has not failed.
    """
    records = []
    for decoding in decodings:
        draw = Sampling(sampling.max_new_tokens, TEMPERATURES[decoding], sampling.stop_ids, stop=sampling.stop)
        forest, samples = play(prompts.first(problems), prompts, sampling=draw, seed=seed)
        failed = failed_fraction(forest)
        if failed > max_failed_fraction:
            raise TooManyFailures(
                f"evaluation ({when}, step {step}, {decoding}): {failed:.0%} of the rollouts failed, and "
                f"max_failed_fraction allows {max_failed_fraction:.0%}; the first says: {first_failure(forest)}",
                hint=f"mend what it names (the reward is {play.judge.name}), or allow more failures",
            )
        records += [{**r, "decoding": decoding} for r in rollout_records(forest, samples, when=when, step=step)]
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
    "row" the columns of the data row beside its prompt, those that JSON can hold.
    """
    prompt = sample.prompt
    return {
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
        "row": _columns(sample.row),
    }


def _plain(message: Message) -> dict[str, Any]:
    """Return a message with the calls in it as mappings."""
    plain = dict(message)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [asdict(call) if isinstance(call, ToolCall) else call for call in plain["tool_calls"]]
    return plain


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that JSON can hold, without the prompt, which a record has already."""
    kept = {}
    for name, value in row.items():
        if name not in ("prompt", "messages"):
            with contextlib.suppress(TypeError):
                kept[str(name)] = finite(value, name)
    return kept


class _Watched(Policy):
    """A policy that remembers that it raised: what rows are told then is the end of all, and no end of an episode."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.broken = False

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield what the policy yields."""
        try:
            yield from self._policy.complete(requests)
        except BaseException:
            self.broken = True
            raise


def play_each(
    task: Task,
    policy: Policy,
    starts: Sequence[Start],
    judge: Judge,
    *,
    template: Speech,
    rules: Rules,
    ended: Callable[[Sample, Outcome], object],
) -> None:
    """Play and judge an episode for each of `starts`, all at once, and call `ended` as soon as each one has ended.

    For any task and any policy; what `ended` was told of is not lost to what comes later, an error or Ctrl-C. It runs
    in the thread of the event loop, one call at a time. What is raised is as `play_episodes` says; `ended` is not told
    of episodes that were under way then.

    >>> from ramet.chat import PlainTemplate
    >>> from ramet.models.tiny import tiny_tokenizer
    >>> from ramet.policies.person import PersonPolicy
    >>> task = Task("sum", [{"prompt": "1+1="}], [], lambda sample: float(sample.completion == "2"))
    >>> play_each(
    ...     task, PersonPolicy(lambda request: "2"), [Start(task.train[0], group=0)], Judge(task.score),
    ...     template=PlainTemplate(tiny_tokenizer()), rules=Rules(Sampling(4), seed=0),
    ...     ended=lambda sample, outcome: print(sample.completion, outcome.score))
    2 1.0
    """
    with contextlib.ExitStack() as opened:
        toolbox: Tools | None = None
        if task.tools:
            from ramet.tools.toolbox import Toolbox

            toolbox = opened.enter_context(contextlib.closing(Toolbox(task.tools, timeout=rules.tool_seconds)))

        async def work(here: Here) -> None:
            watched = _Watched(policy)
            with Gathered(watched, start=here.start) as gathered:
                gathered.expect(len(starts))
                answer = policy.answer if isinstance(policy, Answers) else gathered.answer

                async def one(start: Start) -> None:
                    [episode] = await play(
                        task, [start], answer, template, rules, judge=judge, toolbox=toolbox, left=gathered.leave
                    )
                    assert episode.outcome is not None  # somebody judges
                    if not watched.broken:
                        ended(episode.sample, episode.outcome)

                await together([partial(one, start) for start in starts])

        opened.enter_context(EventLoop()).run(work)


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
