"""A rollout given back as the TensorDict that it came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from ramet.errors import ForestError
from ramet.forest.nodes import Ints
from ramet.forest.prefixes import text_of
from ramet.forest.rollout import Column, Form, Path, Rollout, Steps
from ramet.types import Key, Kind, StopReason


def replay(tokens: Ints, steps: Steps, first: int, last: int) -> TensorDictBase:
    """Return the steps `first` to `last` (not included) over a path of `tokens` [L]: a lazy stack [T].

    It has the keys and dtypes of what was read. Ragged entries are the rows [L] of each step, without padding.
    """
    columns = {path: column.steps() for path, column in steps.columns.items()}
    write = _Writer(tokens, steps.form)
    made = []
    for t in range(first, last):
        start, end = int(steps.starts[t]), int(steps.ends[t])
        td = TensorDict({}, batch_size=[])
        write.prefix(td, (), start)
        td.set(steps.form.action, write.action(start, start + int(steps.actions[t])))
        write.prefix(td, ("next",), end)
        for path, column in columns.items():
            td.set(path, column[t].clone())
        made.append(td)
    return lazy_stack(made, 0)


class _Writer:
    """Writes prefixes of one path under the names and in the dtypes of a form; all are views of one tensor."""

    def __init__(self, tokens: Ints, form: Form) -> None:
        self.form, self.text = form, text_of(tokens) if form.unit == "text" else ""
        whole = torch.from_numpy(tokens)
        self.tokens = whole.to(_dtype(form.token_dtype))
        self.actions = whole.to(_dtype(form.action_dtype))
        self.mask = torch.ones(len(tokens), dtype=_dtype(form.mask_dtype))

    def prefix(self, td: TensorDict, under: Path, length: int) -> None:
        text = self.form.unit == "text"
        value: Any = NonTensorData(self.text[:length]) if text else self.tokens[:length]
        td.set((*under, *self.form.observation), value)
        if self.form.mask is not None:
            td.set((*under, *self.form.mask), self.mask[:length])

    def action(self, start: int, end: int) -> Any:
        return NonTensorData(self.text[start:end]) if self.form.unit == "text" else self.actions[start:end]


def steps_from_segments(number: int, rollout: Rollout) -> Steps:
    """Make the steps of a rollout that was planted and grown: each run of sampled tokens, and what followed it.

    Its log-probs, versions, group and member go with it; the last step has the flags that its stop reason says, and
    the score of its outcome, if it has one, for a reward (the steps before it have 0).
    """
    kinds = rollout.kinds
    sampled = np.concatenate([[False], kinds == Kind.SAMPLED, [False]]).astype(np.int8)
    starts, stops = np.flatnonzero(np.diff(sampled) == 1), np.flatnonzero(np.diff(sampled) == -1)
    if not len(starts):
        raise ForestError(f"rollout {number} has no sampled token, so it has no step to give back")
    ends = np.concatenate([starts[1:], [len(kinds)]])
    count = len(starts)
    last = torch.arange(count)[:, None] == count - 1
    terminated = last & (rollout.stop in (StopReason.EOS, StopReason.STOP))
    truncated = last & (rollout.stop is not None and rollout.stop.truncated)
    none = torch.zeros(count, 1, dtype=torch.bool)
    columns: dict[Path, Column] = {}
    for flag, values in (
        ("done", last & (rollout.stop is not None)),
        ("terminated", terminated),
        ("truncated", truncated),
    ):
        columns[flag,], columns["next", flag] = Column(none), Column(values)
    columns[Key.LOG_PROBS,] = Column(
        torch.from_numpy(rollout.log_probs[kinds == Kind.SAMPLED]), torch.from_numpy(stops - starts)
    )
    columns["policy_version",] = Column(torch.from_numpy(rollout.versions[starts].astype(np.int64)))
    for key, value in (
        (Key.GROUP, rollout.group),
        (Key.MEMBER, rollout.member),
        (Key.PROMPT_INDEX, rollout.prompt_index),
    ):
        columns[key,] = Column(torch.full((count,), value))
    if rollout.total is not None:
        reward = torch.where(last, torch.tensor(rollout.total, dtype=torch.float32), torch.tensor(0.0))
        columns["next", Key.REWARD] = Column(reward)
    form = Form("tokens", (Key.TOKENS,), (Key.RESPONSE,), (Key.REWARD,))
    return Steps(form, starts, stops - starts, ends, columns)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
