"""Rollouts of environments as TensorDicts, read into episodes: columns at a time, never a container per row.

The last observation of an episode holds all its tokens. So the steps need only be compared with their neighbours, all
rows at once: what is observed is what came back before, and what comes back begins with what was observed and written.

Letters: B rows, T steps, L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from ramet.errors import ForestError, RewardError
from ramet.forest.entries import KeyPath, Series, Step, as_path, detect, outcomes_in, read_series, steps_of
from ramet.forest.nodes import Ints
from ramet.forest.prefixes import Prefixes, check_tokens, read_prefixes, read_texts
from ramet.forest.rollout import Column, Form, Path, Steps
from ramet.types import Key, Kind, Outcome, StopReason

HASHING = "hashing"
_OF_ROWS: tuple[Path, ...] = (("_step",), ("_reset",))
_LOG_PROBS: tuple[Path, ...] = ((Key.LOG_PROBS,), ("sample_log_prob",))


_VERSION = "policy_version"


@dataclass(frozen=True, slots=True)
class Keys:
    """Which entries to read; None is found out."""

    observation: KeyPath | None = None
    action: KeyPath | None = None
    mask: KeyPath | None = None
    reward: KeyPath = Key.REWARD
    log_probs: KeyPath | None = None
    version: KeyPath = _VERSION


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One rollout, read and found right: its path of tokens, and what is known of each of them.

    `segments` are the lengths of the prompt and of what follows; `claims` the environment's own hashes of the prefixes
    from the prompt on, one more than there are steps, where every step is one token.
    """

    tokens: Ints
    segments: list[int]
    kinds: NDArray[np.int8]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    group: int
    member: int
    prompt_index: int
    stop: StopReason | None
    outcome: Outcome | None
    steps: Steps
    claims: Ints | None


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The steps `at` of one row that make an episode, and the tokens that it ends with."""

    row: int
    at: Ints
    tokens: Ints


def read_episodes(td: TensorDictBase, keys: Keys, time: bool | None) -> list[Episode]:
    """Read a rollout [*B, T] or [T], or a step [*B]; raise `ForestError` or `RewardError` where something is wrong."""
    if not isinstance(td, TensorDictBase):
        raise TypeError(f"expected a TensorDict, a rollout [*B, T] of an environment: found a {type(td).__name__}")
    form = detect(td, as_path(keys.observation), as_path(keys.action), as_path(keys.mask), as_path(keys.reward))
    steps = steps_of(td, form, time)
    if not steps:
        return []
    series = read_series(steps, form)
    wrote = Series(cells=read_texts(steps, form.action)) if form.unit == "text" else series.pop(form.action, None)
    if wrote is None:
        raise ForestError(f"expected tokens under {form.action} in every step")
    walk = _Walk(form, steps, series)
    outcomes = [outcomes_in(step.next) for step in steps]
    return [_episode(run, form, walk, wrote, series, keys, outcomes[run.at[-1]][run.row]) for run in walk.runs()]


class _Walk:
    """Goes through the steps, checks that each goes on from the one before, and says where episodes begin and end."""

    def __init__(self, form: Form, steps: Sequence[Step], series: dict[Path, Series]) -> None:
        before = read_prefixes(steps[0], form, 0, False, None)
        shape = (len(steps), len(before.lengths))
        nothing = np.zeros(shape, dtype=bool)
        named, was_done, done = (
            None if path not in series else series[path].flags() for path in (("_step",), ("done",), ("next", "done"))
        )
        self.done = nothing if done is None else done
        self.named, self.was_done = named, was_done
        self.live, self.begins = nothing.copy(), nothing.copy()
        self.starts, self.ends = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        self.open = np.zeros(shape[1], dtype=bool)  # rows whose episode is under way
        self.ended = np.zeros(shape[1], dtype=bool)  # rows that had one before
        self.finished: list[dict[int, Ints]] = [{} for _ in range(shape[1])]  # of a row: last step -> all tokens
        for number, step in enumerate(steps):
            before = self._take(number, step, form, before)

    def _take(self, number: int, step: Step, form: Form, before: Prefixes) -> Prefixes:
        """Read one step of all rows, and return what came back."""
        seen = read_prefixes(step, form, number, False, before)
        after = read_prefixes(step, form, number, True, seen)
        live = self._live(number, seen, before)
        goes_on, active = live & self.open, live | self.open
        if seen is not before:
            self._check(number, goes_on & ~seen.same(before), f"what step {number - 1} came back with", before, seen)
        self._check(number, active & ~after.begins_with(seen), "the beginning of what came back", after, seen)
        self.live[number], self.begins[number] = live, live & ~self.open
        self.starts[number], self.ends[number] = seen.lengths, after.lengths
        now_done = live & self.done[number]
        for row in np.flatnonzero(now_done if number < len(self.live) - 1 else active).tolist():
            self.finished[row][number] = after.row(row)
        self.open = active & ~now_done
        self.ended |= now_done
        return after

    def _live(self, number: int, seen: Prefixes, before: Prefixes) -> NDArray[np.bool_]:
        """Say which rows this step is a step of: not those that a mask leaves out, nor those that had ended."""
        live = np.ones(len(seen.lengths), dtype=bool) if self.named is None else self.named[number]
        if self.was_done is not None:
            going: NDArray[np.bool_] = live & ~self.was_done[number]
            return going
        if self.ended.any():  # nothing says that a row had ended before: an observation that stays does
            live = live & ~(self.ended & ~self.open & seen.same(before))
        return live

    def _check(self, number: int, wrong: NDArray[np.bool_], what: str, found: Prefixes, seen: Prefixes) -> None:
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ForestError(
                f"row {row}, step {number}: the observation {seen.show(row)} is not {what}, {found.show(row)}",
                hint='an episode that ends says so by "done", and the next one begins after it',
            )

    def runs(self) -> Iterator[_Run]:
        """Yield every episode, in the order of rows, and of steps in a row."""
        for row, finished in enumerate(self.finished):
            at = np.flatnonzero(self.live[:, row])
            if not at.size:
                continue
            cuts = np.flatnonzero(self.begins[at, row])[1:].tolist()
            bounds = zip([0, *cuts], [*cuts, len(at)], finished.values(), strict=True)
            for first, last, tokens in bounds:
                yield _Run(row, at[first:last], tokens)


def _episode(
    run: _Run,
    form: Form,
    walk: _Walk,
    wrote: Series,
    series: dict[Path, Series],
    keys: Keys,
    outcome: Outcome | None,
) -> Episode:
    starts, ends = walk.starts[run.at, run.row], walk.ends[run.at, run.row]
    action = wrote.of(run.row, run.at)
    actions = _sizes(action)
    _check_actions(run, starts, ends, action, actions)
    columns = {path: entries.of(run.row, run.at) for path, entries in series.items() if path not in _OF_ROWS}
    steps = Steps(form, starts, actions, ends, columns)
    _check_rewards(run, steps)
    lengths = np.empty(1 + 2 * len(starts), dtype=np.int64)
    lengths[0], lengths[1::2], lengths[2::2] = starts[0], actions, ends - starts - actions
    kinds = np.empty(len(lengths), dtype=np.int8)
    kinds[0], kinds[1::2], kinds[2::2] = Kind.PROMPT, Kind.SAMPLED, Kind.ENVIRONMENT
    of_token = np.repeat(kinds, lengths)
    sampled = of_token == Kind.SAMPLED
    log_probs = np.full(len(of_token), np.nan, dtype=np.float32)
    versions = np.full(len(of_token), -1, dtype=np.int32)
    log_probs[sampled], versions[sampled] = _log_probs(run, steps, keys), _versions(run, steps, keys)
    one_by_one = bool((actions == 1).all() and not lengths[2::2].any())
    return Episode(
        tokens=run.tokens,
        segments=[int(starts[0]), len(actions)] if one_by_one else _turns(lengths.tolist()),
        kinds=of_token,
        log_probs=log_probs,
        versions=versions,
        group=_number(columns, Key.GROUP),
        member=_number(columns, Key.MEMBER),
        prompt_index=_number(columns, Key.PROMPT_INDEX),
        stop=_stop(columns),
        outcome=outcome,
        steps=steps,
        claims=_claims(columns) if one_by_one else None,
    )


def _turns(lengths: list[int]) -> list[int]:
    """Return the lengths of the segments: the prompt, each action, and what the environment added, if it did."""
    return [n for i, n in enumerate(lengths) if n or i % 2 == 1 or i == 0]


def _sizes(column: Column) -> Ints:
    """Return how many entries each step has."""
    count = len(column.values)
    if column.lengths is None:
        return np.full(count, column.values[0].numel(), dtype=np.int64)
    sizes: Ints = column.lengths.numpy()
    return sizes


def _check_actions(run: _Run, starts: Ints, ends: Ints, action: Column, actions: Ints) -> None:
    """Find each action behind what was observed."""
    check_tokens(action.values.reshape(-1), 1, f"row {run.row}, the action")
    written = action.values.reshape(-1).numpy()
    where = np.repeat(starts - np.cumsum(actions) + actions, actions) + np.arange(len(written))
    wrong = np.repeat(ends < starts + actions, actions)
    wrong |= run.tokens[np.minimum(where, len(run.tokens) - 1)] != written if len(run.tokens) else True
    if wrong.any():
        t = int(np.repeat(np.arange(len(actions)), actions)[np.flatnonzero(wrong)[0]])
        first = int(actions[:t].sum())
        raise ForestError(
            f"row {run.row}, step {int(run.at[t])}: expected the action {written[first : first + actions[t]].tolist()} "
            f"behind what was observed: what came back goes on with {run.tokens[starts[t] : ends[t]].tolist()}",
            hint="an environment may add tokens behind an action and change none before",
        )


def _check_rewards(run: _Run, steps: Steps) -> None:
    key = ("next", *steps.form.reward)
    column = steps.columns.get(key)
    if column is None:
        if steps.form.reward != (Key.REWARD,):
            raise ForestError(f"no rewards under {key}, in all steps: there are {sorted(steps.columns)}")
        return
    for number, values in zip(run.at.tolist(), column.steps(), strict=True) if not _finite(column) else ():
        if not bool(values.isfinite().all()):
            raise RewardError(
                f"row {run.row}, step {number}: the reward {key} must be finite: found {values.tolist()}",
                hint="a rollout without a judgement has an outcome that says so, not a reward",
            )


def _finite(column: Column) -> bool:
    return bool(column.values.isfinite().all())


def _log_probs(run: _Run, steps: Steps, keys: Keys) -> NDArray[np.float32]:
    """One for each sampled token: NaN where nobody wrote them, for a log-prob that is missing is not a certainty."""
    named = as_path(keys.log_probs)
    for path in _LOG_PROBS if named is None else (named,):
        column = steps.columns.get(path)
        if column is None:
            continue
        found = _sizes(column)
        for t in np.flatnonzero(found != steps.actions).tolist():
            raise ForestError(
                f"row {run.row}, step {int(run.at[t])}: expected a log-prob in {path} for each of "
                f"{int(steps.actions[t])} tokens of the action: found {int(found[t])}"
            )
        values: NDArray[np.float32] = column.values.reshape(-1).float().numpy()
        return values
    if named is not None:
        raise ForestError(f"no log-probs under {named}, in all steps: there are {sorted(steps.columns)}")
    return np.full(int(steps.actions.sum()), np.nan, dtype=np.float32)


def _versions(run: _Run, steps: Steps, keys: Keys) -> NDArray[np.int32]:
    path = as_path(keys.version)
    column = None if path is None else steps.columns.get(path)
    if column is None:
        if path is not None and path != (_VERSION,):
            raise ForestError(f"no versions under {path}, in all steps: there are {sorted(steps.columns)}")
        return np.full(int(steps.actions.sum()), -1, dtype=np.int32)
    if column.lengths is not None or column.values[0].numel() != 1:
        raise ForestError(f"row {run.row}: expected one version for each step under {path}")
    numbers: NDArray[np.int32] = column.values.reshape(-1).int().numpy()
    return np.repeat(numbers, steps.actions)


def _number(columns: dict[Path, Column], key: str) -> int:
    column = columns.get((key,))
    return -1 if column is None else int(column.values.reshape(-1)[0])


def _stop(columns: dict[Path, Column]) -> StopReason | None:
    """Say how the last step ended it: an end (which token ended it is not said), a limit, or not at all."""
    ended = {flag: columns.get(("next", flag)) for flag in ("terminated", "truncated")}
    hit = {flag: column is not None and bool(_last(column).any()) for flag, column in ended.items()}
    if hit["terminated"]:
        return StopReason.STOP
    return StopReason.TURNS if hit["truncated"] else None


def _last(column: Column) -> Tensor:
    if column.lengths is None:
        return column.values[-1]
    return column.values[len(column.values) - int(column.lengths[-1]) :]


def _claims(columns: dict[Path, Column]) -> Ints | None:
    seen, after = columns.get((HASHING,)), columns.get(("next", HASHING))
    if seen is None or after is None or seen.lengths is not None or after.lengths is not None:
        return None
    hashes = [seen.values[:1].reshape(-1), after.values.reshape(-1)]
    claims: Ints = np.concatenate([part.long().numpy() for part in hashes])
    return claims if len(claims) == len(after.values) + 1 else None
