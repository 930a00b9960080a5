"""Environment times policy: play episodes and let a forest grow by what was sampled and by what came back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from tensordict import TensorDictBase

from ramet import ragged
from ramet.concurrency import EventLoop
from ramet.envs.env import EnvBase
from ramet.episodes import Answers, Played, Rules, Speech, into_forest, play, play_episodes, starts_of
from ramet.errors import ForestError, TooManyFailures
from ramet.forest import Forest
from ramet.forest.entries import outcomes_in
from ramet.policies.policy import Policy, by_row, set_stop_reasons
from ramet.prompts import Prompts
from ramet.tasks.judge import Judge
from ramet.tasks.task import Task
from ramet.types import Completion, Draw, Key, Kind, Outcome, Request, Sample, Sampling, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Playing(Protocol):
    """How a run plays what it is asked: one judged episode for each row of a batch of prompts."""

    @property
    def judge(self) -> Judge:
        """Who judges."""

    def __call__(
        self, td: TensorDictBase, prompts: Prompts, *, sampling: Sampling, seed: int
    ) -> tuple[Forest, list[Sample]]:
        """Return the forest of the episodes, and a sample of each, in the order of `td` [B], which `prompts` dealt."""

    def close(self) -> None:
        """End what was started for playing; a later call starts it again."""


@dataclass(frozen=True, slots=True)
class OneTurn:
    """Play tasks of one turn: every row is asked once, in `env`, and judged."""

    env: EnvBase
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    judge: Judge

    def __call__(
        self, td: TensorDictBase, prompts: Prompts, *, sampling: Sampling, seed: int
    ) -> tuple[Forest, list[Sample]]:
        """Collect a rollout for each row and judge it."""
        forest = collect(self.env, self.policy, td, sampling=sampling, seed=seed)
        samples = samples_of(forest, range(len(forest.rollouts)), prompts, self.tokenizer)
        judge_rollouts(forest, samples, range(len(forest.rollouts)), self.judge)
        return forest, samples

    def close(self) -> None:
        """End the event loop of the judge, if there is one."""
        self.judge.close()


class Turns:
    """Play tasks of several turns: replies, tools, each row at its own pace.

    `rules` hold but for sampling and seed, which each call brings. One event loop serves all calls, so that clients and
    semaphores of async functions outlive a call; `close` ends it.
    """

    def __init__(self, task: Task, policy: Policy, template: Speech, rules: Rules, judge: Judge) -> None:
        self.task, self.policy, self.template, self.rules, self.judge = task, policy, template, rules, judge
        self._loop: EventLoop | None = None

    @property
    def loop(self) -> EventLoop:
        """The event loop in which episodes are played; started when it is first asked for."""
        if self._loop is None:
            self._loop = EventLoop("ramet episodes")
        return self._loop

    def __call__(
        self, td: TensorDictBase, prompts: Prompts, *, sampling: Sampling, seed: int
    ) -> tuple[Forest, list[Sample]]:
        """Play an episode for each row."""
        rules = dataclasses.replace(self.rules, sampling=sampling, seed=seed)
        starts = starts_of(td, prompts.rows)
        return planted(
            play_episodes(
                self.task, self.policy, starts, template=self.template, rules=rules, judge=self.judge, loop=self.loop
            )
        )

    async def in_loop(
        self, td: TensorDictBase, prompts: Prompts, *, sampling: Sampling, seed: int
    ) -> tuple[Forest, list[Sample]]:
        """Do the same in a running loop, of a policy that answers each row by itself, as one behind a server does."""
        if not isinstance(self.policy, Answers):
            raise TypeError(f"{type(self.policy).__name__} completes batches: call this object itself")
        rules = dataclasses.replace(self.rules, sampling=sampling, seed=seed)
        starts = starts_of(td, prompts.rows)
        return planted(await play(self.task, starts, self.policy.answer, self.template, rules, judge=self.judge))

    def close(self) -> None:
        """End the event loop, and what the judge has started."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        self.judge.close()


def planted(played: Sequence[Played]) -> tuple[Forest, list[Sample]]:
    """Return the forest of episodes that were played, and their samples."""
    forest = Forest()
    into_forest(played, forest)
    return forest, [episode.sample for episode in played]


def collect(
    env: EnvBase,
    policy: Policy,
    td: TensorDictBase,
    *,
    sampling: Sampling,
    seed: int,
    max_turns: int = 1,
    forest: Forest | None = None,
) -> Forest:
    """Play one episode for each row of `td` [B] and return the forest that holds them (a new one by default).

    `td` holds what `env.reset` needs and `group_id`, `repeat_index` and, where there are data rows, `prompt_index`,
    int64 [B]. A row ends when the environment is done with it, when its completion is cut by a limit, or after
    `max_turns` turns; the forest says which. Rows that have ended are neither asked nor stepped. Where the environment
    judges (a `ChatEnv` with a task), its outcomes are the rollouts'.

    Raises `ForestError` where the environment gives back other tokens than those that the policy saw and sampled.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1: found {max_turns}")
    forest = Forest() if forest is None else forest
    state = env.reset(td)
    _check_keys(env, state)
    groups, members = state[Key.GROUP].tolist(), state[Key.MEMBER].tolist()
    indices = state[Key.PROMPT_INDEX].tolist() if Key.PROMPT_INDEX in state.keys() else [-1] * len(groups)  # noqa: SIM118
    numbers = forest.plant(ragged.rows(state, Key.TOKENS), groups=groups, members=members, prompt_indices=indices)
    live = list(range(len(numbers)))
    for turn in range(max_turns):
        rows = ragged.rows(state, Key.TOKENS)
        requests = [
            Request(i, rows[row], sampling, Draw(seed, groups[row], members[row], turn)) for i, row in enumerate(live)
        ]
        answers = dict(zip(live, by_row(policy.complete(requests), len(live)), strict=True))
        forest.grow(
            [numbers[row] for row in live],
            [answers[row].tokens for row in live],
            Kind.SAMPLED,
            log_probs=[answers[row].log_probs for row in live],
            versions=[answers[row].version for row in live],
        )
        state = _step(env, state, answers, len(numbers))
        terminated, truncated = (state[flag].reshape(-1).tolist() for flag in ("terminated", "truncated"))
        _add_what_came_back(forest, state, answers, rows, numbers)
        outcomes = outcomes_in(state)
        for row in live:
            forest.rollouts[numbers[row]].outcome = outcomes[row]
            forest.rollouts[numbers[row]].stop = _stop(
                answers[row].stop,
                terminated=terminated[row],
                truncated=truncated[row] or (turn == max_turns - 1 and max_turns > 1),
                only_turn=max_turns == 1,
            )
        live = [row for row in live if forest.rollouts[numbers[row]].stop is None]
        if not live:
            break
    return forest


def _check_keys(env: EnvBase, state: TensorDictBase) -> None:
    if Key.TOKENS not in state.keys() or env.action_keys != [Key.RESPONSE]:  # noqa: SIM118
        raise KeyError(
            f"collect reads {Key.TOKENS!r} and writes {Key.RESPONSE!r}: the environment takes {env.action_keys} and "
            f"shows {sorted(map(str, state.keys()))}; name its keys so (ChatEnv: observation_key, action_key; LLMEnv: "
            "from_text=False)"
        )


def _step(env: EnvBase, state: TensorDictBase, answers: dict[int, Completion], count: int) -> TensorDictBase:
    nothing = torch.zeros(0, dtype=torch.int64)
    tokens = [answers[row].tokens if row in answers else nothing for row in range(count)]
    log_probs = [answers[row].log_probs if row in answers else torch.zeros(0) for row in range(count)]
    state.set(Key.RESPONSE, ragged.Ragged.from_rows(tokens).jagged())
    state.set(Key.LOG_PROBS, ragged.Ragged.from_rows(log_probs).jagged())
    set_stop_reasons(state, answers)
    if len(answers) < count:
        state.set("_step", torch.tensor([row in answers for row in range(count)]))
    return env.step_mdp(env.step(state))


def _add_what_came_back(
    forest: Forest,
    state: TensorDictBase,
    answers: dict[int, Completion],
    before: list[torch.Tensor],
    numbers: list[int],
) -> None:
    """Add the tokens that the environment put behind a response: they are the environment's, not the policy's."""
    after = ragged.rows(state, Key.TOKENS)
    added = {}
    for row, answer in answers.items():
        known = torch.cat([before[row], answer.tokens.to(before[row])])
        if not torch.equal(after[row][: len(known)], known):
            raise ForestError(
                f"row {row}: the environment gave back {after[row].tolist()}, which does not begin with what the "
                f"policy saw and sampled, {known.tolist()}",
                hint="an environment may add tokens behind a response and change none before",
            )
        added[row] = after[row][len(known) :]
    grown = [row for row, tokens in added.items() if len(tokens)]
    if grown:
        forest.grow([numbers[row] for row in grown], [added[row] for row in grown], Kind.ENVIRONMENT)


def _stop(answer: StopReason, *, terminated: bool, truncated: bool, only_turn: bool) -> StopReason | None:
    """Say why a row ended with this turn, or None where it goes on; an episode of one turn ends as its completion."""
    if answer.truncated or answer is StopReason.ERROR or terminated:
        return answer
    if truncated:
        return StopReason.TURNS
    return answer if only_turn else None


def samples_of(
    forest: Forest, rollouts: Sequence[int], prompts: Prompts, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Show `rollouts` as a reward sees them; text is derived from tokens here, for eyes and rewards alone."""
    cut = [forest.prompt_and_completion(number) for number in rollouts]
    texts = tokenizer.batch_decode([completion.tolist() for _, completion in cut], skip_special_tokens=True)
    samples = []
    for number, (prompt, completion), text in zip(rollouts, cut, texts, strict=True):
        rollout = forest.rollouts[number]
        if rollout.stop is None:
            raise ValueError(f"rollout {number} has not ended: it can not be judged")
        if not 0 <= rollout.prompt_index < len(prompts):
            raise ValueError(
                f"rollout {number} has prompt_index {rollout.prompt_index}: expected the number of one of "
                f"{len(prompts)} rows"
            )
        row = prompts.rows[rollout.prompt_index]
        samples.append(
            Sample(
                prompt=row["prompt"],
                completion=text,
                prompt_tokens=tuple(prompt.tolist()),
                completion_tokens=tuple(completion.tolist()),
                row=row,
                stop=rollout.stop,
                group=rollout.group,
                member=rollout.member,
            )
        )
    return samples


def judge_rollouts(forest: Forest, samples: Sequence[Sample], rollouts: Sequence[int], judge: Judge) -> float:
    """Write each rollout's outcome into the forest; return the fraction that failed (errors and time-outs).

    A rollout that its policy failed to complete is an error, and nobody judges it.
    """
    ended = [sample for sample in samples if sample.stop is not StopReason.ERROR]
    judged = iter(judge(ended))
    failed_policy = Outcome.error("the policy gave no completion")
    outcomes = [failed_policy if sample.stop is StopReason.ERROR else next(judged) for sample in samples]
    for number, outcome in zip(rollouts, outcomes, strict=True):
        forest.rollouts[number].outcome = outcome
    failed = sum(outcome.kind.failed for outcome in outcomes)
    return failed / max(1, len(outcomes))


def failed_fraction(forest: Forest) -> float:
    """Return the fraction of the episodes that failed: errors and time-outs."""
    outcomes = [rollout.outcome for rollout in forest.rollouts if rollout.part == 0]
    return sum(outcome is not None and outcome.kind.failed for outcome in outcomes) / max(1, len(outcomes))


def refuse_failures(forest: Forest, allowed: float, judge: Judge, *, where: str) -> None:
    """Raise `TooManyFailures` if a larger fraction of the episodes failed than is `allowed`; `where` says of what."""
    failed = failed_fraction(forest)
    if failed > allowed:
        raise TooManyFailures(
            f"{where}: {failed:.0%} of the rollouts failed, and rollout.max_failed_fraction allows {allowed:.0%}; "
            f"the first says: {first_failure(forest)}",
            hint=f"mend what it names (if the reward, {judge.name}) and go on with --resume (in Python "
            "resume=True), or raise rollout.max_failed_fraction",
        )


def first_failure(forest: Forest) -> str:
    """Return the reason of the first rollout that failed (an error or a time-out), for a message to quote."""
    outcomes = [rollout.outcome for rollout in forest.rollouts if rollout.outcome is not None]
    reasons = [outcome.reason for outcome in outcomes if outcome.kind.failed]
    return reasons[0] if reasons and reasons[0] else "no reason given"
