"""The rows of the table of rollouts: what belongs to one occurrence of a path and is never merged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramet.forest.nodes import ROOT, Ints
from ramet.types import Outcome, StopReason

Path: TypeAlias = tuple[str, ...]
"""A key of a TensorDict, nested or not."""

Unit: TypeAlias = Literal["tokens", "text"]
"""What the integers of a forest are: token ids, or the code points of a text."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the steps of a rollout were written in its TensorDict: names and dtypes, so that it can be given back.

    `observation` and `action` hold tokens (or strings, where `unit` is "text"); `mask` and `mask_dtype` are there
    where the observation had a mask. `reward` is the key of the rewards under "next".
    """

    unit: Unit
    observation: Path
    action: Path
    reward: Path
    token_dtype: str = "int64"
    action_dtype: str = "int64"
    mask: Path | None = None
    mask_dtype: str = "bool"


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """An entry of every step of one rollout: `values` [T, ...], or [total, ...] with `lengths` int64 [T]."""

    values: Tensor
    lengths: Tensor | None = None

    def steps(self) -> list[Tensor]:
        """Return the entry of each step, as views."""
        if self.lengths is None:
            return list(self.values.unbind(0))
        return list(torch.split(self.values, self.lengths.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The T steps of a rollout that an environment played, over its path.

    Step t observed the first `starts[t]` tokens, wrote `actions[t]` more, and saw the first `ends[t]` afterwards (the
    environment may add tokens of its own). `columns` hold all other entries, those under "next" included.
    """

    form: Form
    starts: Ints
    actions: Ints
    ends: Ints
    columns: dict[Path, Column]

    @property
    def reward(self) -> float | None:
        """The sum of the rewards of all steps; None where there are none."""
        column = self.columns.get(("next", *self.form.reward))
        return None if column is None else float(column.values.sum(dtype=torch.float64))


@dataclass(slots=True)
class Rollout:
    """One episode, or one part of it: a path through the forest and what belongs to this occurrence of it alone.

    An episode has several parts where what the model saw was rewritten on the way: `part` counts them from 0. They
    stand one behind the other, share their outcome, and count as one in a group.

    `end` is the node where its path ends; `group` and `member` say which completion of which prompt it is (-1 where
    nobody said). `kinds` int8, `log_probs` float32 (NaN where the token was not sampled, or nobody knows) and
    `versions` int32 (-1 likewise) have one entry for each token of the path, prompt included. `steps` are there for a
    rollout that came from an environment by `Forest.extend`.
    """

    group: int
    member: int
    prompt_index: int
    end: int = ROOT
    part: int = 0
    stop: StopReason | None = None
    outcome: Outcome | None = None
    advantage: float = 0.0
    steps: Steps | None = None
    _kinds: list[NDArray[np.int8]] = field(default_factory=list)
    _log_probs: list[NDArray[np.float32]] = field(default_factory=list)
    _versions: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def kinds(self) -> NDArray[np.int8]:
        """Who wrote each token of the path, as `Kind`."""
        return joined(self._kinds, np.int8)

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """The sampler's log-prob of each token of the path."""
        return joined(self._log_probs, np.float32)

    @property
    def versions(self) -> NDArray[np.int32]:
        """The version of the weights that sampled each token of the path."""
        return joined(self._versions, np.int32)

    @property
    def segments(self) -> list[int]:
        """How many tokens each part of the path has: the prompt, then each turn."""
        return [len(part) for part in self._kinds]

    @property
    def total(self) -> float | None:
        """Its return: the score of its outcome where it was judged, else the sum of its steps' rewards, else None."""
        if self.outcome is not None:
            return self.outcome.score
        return None if self.steps is None else self.steps.reward

    def planted_again(self) -> Rollout:
        """Return a rollout with the same things said of it, at the root of another forest."""
        return replace(self, end=ROOT, _kinds=[], _log_probs=[], _versions=[])

    def append(
        self, end: int, kinds: NDArray[np.int8], log_probs: NDArray[np.float32], versions: NDArray[np.int32]
    ) -> None:
        """Go on to `end` by a segment, with what is known of each of its tokens."""
        self.end = end
        self._kinds.append(kinds)
        self._log_probs.append(log_probs)
        self._versions.append(versions)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of some rollouts, flat: every field is [M].

    `index` points into `Forest.tokens`, so `scores.log_probs[sampled.index]` are their current log-probs; `row` is the
    position of the token's rollout in the list that was asked for; `log_probs` are the sampler's.
    """

    index: Tensor
    row: Tensor
    log_probs: Tensor
    versions: Tensor

    @property
    def lengths(self) -> Tensor:
        """How many sampled tokens the whole rollout of each token has: int64 [M]."""
        return torch.bincount(self.row)[self.row] if self.row.numel() else self.row


def joined(pieces: list[NDArray[np.generic]] | list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Concatenate arrays; an empty one of `dtype` where there are none."""
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.zeros(0, dtype=dtype)
