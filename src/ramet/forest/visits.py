"""What the rollouts say of each node: how many pass it, how well they end, how probable its segment was.

Letters: N nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ramet.forest.nodes import ROOT, Ints, Nodes
from ramet.forest.rollout import Rollout
from ramet.types import Kind, Outcome

Floats = NDArray[np.float64]

_VISITS, _RETURNS, _RETURNED, _PRIORS, _SAMPLED = range(5)


class Counts:
    """Sums over the rollouts that pass each node: a rollout that is new, or went on, costs its own path and no more.

    They are brought up to date when they are read. A segment that was cut hands its sums to both parts, but the
    probabilities of its parts are told apart only by the rollouts that pass it: those are looked at again.
    """

    def __init__(self, nodes: Nodes, rollouts: Sequence[Rollout]) -> None:
        self._nodes, self._rollouts = nodes, rollouts
        self._sums: Floats = np.zeros((5, 64))
        self._cuts = 0  # how many of the cuts of segments are taken in
        self._ends: list[int] = []  # of each rollout that is counted, the node up to which it is
        self._ended: dict[int, set[int]] = {}  # and the rollouts by that node
        self._outcomes: list[Outcome | None] = []  # of each rollout whose return is counted
        self._returns: list[float | None] = []

    # ---------------------------------------------------------------- reading

    @property
    def visits(self) -> Ints:
        """How many rollouts pass each node or end there: [N]."""
        return self._sums[_VISITS, : len(self._nodes)].astype(np.int64)

    @property
    def values(self) -> Floats:
        """The mean return of the rollouts that pass each node: [N], NaN where none has one."""
        self._take_returns()
        return self._means(_RETURNS, slice(len(self._nodes)))

    @property
    def priors(self) -> Floats:
        """The mean probability of each node's segment after its parent: [N], NaN where no rollout counts.

        It is that of the segment's sampled tokens: those of the environment have none. A rollout counts where the
        segment lies behind its prompt, has a sampled token, and each of those has a log-prob.
        """
        return self._means(_PRIORS, slice(len(self._nodes)))

    def visits_of(self, node: int) -> int:
        """Return how many rollouts pass a node or end there."""
        return int(self._sums[_VISITS, node])

    def value_of(self, node: int) -> float:
        """Return the mean return of the rollouts that pass a node."""
        self._take_returns()
        return float(self._means(_RETURNS, slice(node, node + 1))[0])

    def prior_of(self, node: int) -> float:
        """Return the mean probability of the segment of a node."""
        return float(self._means(_PRIORS, slice(node, node + 1))[0])

    def ending(self, node: int) -> list[int]:
        """Return the numbers of the rollouts that end at a node."""
        return sorted(self._ended.get(node, ()))

    def through(self, node: int) -> list[int]:
        """Return the numbers of the rollouts that pass a node or end there."""
        return sorted(number for below in self._nodes.top_down(node) for number in self._ended.get(below, ()))

    def _means(self, of: int, at: slice) -> Floats:
        totals, counts = self._sums[of : of + 2, at]
        means: Floats = np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)
        return means

    # ---------------------------------------------------------------- keeping

    def update(self, went_on: Iterable[int]) -> None:
        """Take in what came since: cuts, the rollouts `went_on` that were counted and grew, and new rollouts."""
        self._reserve(len(self._nodes))
        self._take_cuts()
        counted = len(self._ends)
        for number in went_on:
            if number < counted and self._ends[number] != self._rollouts[number].end:
                self._ended[self._ends[number]].remove(number)
                self._take(number, above=self._ends[number])
        for number in range(counted, len(self._rollouts)):
            self._ends.append(-1)
            self._take(number, above=-1)

    def _take(self, number: int, above: int) -> None:
        """Count a rollout at the nodes of its path below `above`, or at all."""
        rollout = self._rollouts[number]
        path = self._path(rollout.end, above)
        self._sums[_VISITS, path] += 1
        self._add_return(number, path)
        self._add_priors(rollout, path)
        self._ends[number] = rollout.end
        self._ended.setdefault(rollout.end, set()).add(number)

    def _path(self, node: int, above: int = -1) -> list[int]:
        path = []
        while node != above:
            path.append(node)
            node = self._nodes.table[node].parent
        return path

    def _take_cuts(self) -> None:
        passed: dict[int, None] = {}
        for upper, lower in self._nodes.cuts[self._cuts :]:
            self._sums[:, upper] = self._sums[:, lower]
            if self._sums[_VISITS, lower]:
                passed |= {upper: None, lower: None}
        self._cuts = len(self._nodes.cuts)
        self._sums[_PRIORS : _SAMPLED + 1, list(passed)] = 0.0
        again: dict[int, list[int]] = {}
        for node in passed:
            for number in self.through(node):
                again.setdefault(number, []).append(node)
        for number, cut in again.items():
            self._add_priors(self._rollouts[number], cut)

    def _add_priors(self, rollout: Rollout, passed: Sequence[int]) -> None:
        """Add the probability of a rollout's tokens in each of some nodes that it passes, where it is known."""
        table = self._nodes.table
        spans = [(table[table[node].parent].depth, table[node].depth) for node in passed if node != ROOT]
        if not spans:
            return
        bounds = np.array(spans, dtype=np.int64).ravel()
        first = int(bounds.min())
        # One more at the end: every bound is a place in what is summed. Every other sum lies between two spans.
        kinds = np.append(rollout.kinds[first:], np.int8(Kind.ENVIRONMENT))
        log_probs = np.append(rollout.log_probs[first:].astype(np.float64), 0.0)
        sampled = kinds == Kind.SAMPLED
        told = np.stack([np.where(sampled, log_probs, 0.0), sampled, kinds == Kind.PROMPT])
        amounts, count, prompt = np.add.reduceat(told, bounds - first, axis=1)[:, ::2]
        known = (count > 0) & (prompt == 0) & ~np.isnan(amounts)
        where = np.array([node for node in passed if node != ROOT])[known]
        self._sums[_PRIORS, where] += np.exp(amounts[known])
        self._sums[_SAMPLED, where] += 1

    # ---------------------------------------------------------------- returns

    def _take_returns(self) -> None:
        """Count new returns; where a rollout was judged after it was counted, sum all of them again.

        (Taking the old return out of a sum would leave what rounding made of it.)
        """
        outcomes = [rollout.outcome for rollout in self._rollouts]
        counted, known = len(self._outcomes), self._outcomes
        changed = outcomes[:counted] != known
        if changed:
            for number in range(counted):
                if outcomes[number] is not known[number]:
                    self._returns[number] = self._rollouts[number].total
        self._returns += [rollout.total for rollout in self._rollouts[counted:]]
        self._outcomes = outcomes
        if changed or not counted:
            self._sum_returns()
        else:
            for number in range(counted, len(outcomes)):
                self._add_return(number, self._path(self._ends[number]))

    def _add_return(self, number: int, path: Sequence[int]) -> None:
        amount = self._returns[number] if number < len(self._returns) else None
        if amount is not None:
            self._sums[_RETURNS, path] += amount
            self._sums[_RETURNED, path] += 1

    def _sum_returns(self) -> None:
        sums = self._sums[_RETURNS : _RETURNED + 1]
        sums[:] = 0.0
        for end, amount in zip(self._ends, self._returns, strict=True):
            if amount is not None:
                sums[:, end] += (amount, 1.0)
        for node in reversed(self._nodes.top_down()[1:]):
            sums[:, self._nodes.table[node].parent] += sums[:, node]

    def _reserve(self, count: int) -> None:
        if count > self._sums.shape[1]:
            more: Floats = np.zeros((5, max(count, 2 * self._sums.shape[1])))
            more[:, : self._sums.shape[1]] = self._sums
            self._sums = more
