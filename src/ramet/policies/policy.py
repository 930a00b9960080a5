"""What a policy is: requests go in by row, completions come back as they finish."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from ramet import ragged
from ramet.errors import ModelError
from ramet.types import Completion, Draw, Key, Request, Sampling


class Policy(abc.ABC):
    """Something that continues rows of tokens: a model in the process, a server, a script or a person.

    Write `complete`; everything else is made of it. `version` counts the updates of the weights: whoever changes them
    adds one, and every sampled token carries the version that made it.
    """

    version: int = 0

    @abc.abstractmethod
    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield one `Completion` for each request, in the order in which they finish.

        A row's completion depends on its request and on the weights, and on no other row.
        """


@dataclass(frozen=True, slots=True)
class Actor:
    """A policy as a function of TensorDicts, for `env.rollout(..., policy=Actor(...))`.

    Reads `tokens` (any ragged layout), and `group_id` and `repeat_index` [B] where they are there (else the row number
    and 0) as the address of the row's randomness. Writes `tokens_response` and `log_probs`, jagged [B, n],
    `stop_reason` (the value of a `StopReason` for each row, None where it was not asked), and `turn` int64 [B], which
    counts the calls so that no two turns share their draws. Raises `KeyError` without `tokens`.
    """

    policy: Policy
    sampling: Sampling
    seed: int = 0

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Return `td` with the policy's response in it. Rows that are already `done` get an empty response."""
        if Key.TOKENS not in td.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
            raise KeyError(
                f"an Actor reads {Key.TOKENS!r} and writes {Key.RESPONSE!r}: there are {sorted(map(str, td.keys()))}; "
                "name the environment's keys so (ChatEnv: observation_key, action_key; LLMEnv: from_text=False)"
            )
        rows = ragged.rows(td, Key.TOKENS)
        count = len(rows)
        prompts = _column(td, Key.GROUP, range(count))
        members = _column(td, Key.MEMBER, [0] * count)
        turns = _column(td, "turn", [0] * count)
        live = [row for row, done in enumerate(_column(td, "done", [0] * count)) if not done]
        requests = [
            Request(i, rows[row], self.sampling, Draw(self.seed, prompts[row], members[row], turns[row]))
            for i, row in enumerate(live)
        ]
        answers = dict(zip(live, by_row(self.policy.complete(requests), len(live)), strict=True))
        no_tokens, no_log_probs = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        tokens = [answers[row].tokens if row in answers else no_tokens for row in range(count)]
        log_probs = [answers[row].log_probs if row in answers else no_log_probs for row in range(count)]
        shape = td.batch_size
        unbatched = len(shape) == 0
        td.set(Key.RESPONSE, tokens[0] if unbatched else ragged.Ragged.from_rows(tokens).jagged())
        td.set(Key.LOG_PROBS, log_probs[0] if unbatched else ragged.Ragged.from_rows(log_probs).jagged())
        set_stop_reasons(td, answers)
        td.set("turn", torch.tensor(turns, dtype=torch.int64).reshape(shape) + 1)
        return td


def set_stop_reasons(td: TensorDictBase, answers: Mapping[int, Completion]) -> None:
    """Write why the policy stopped in each row of `td` that has an answer; None in the others."""
    count = td.numel() if td.batch_size else 1
    reasons = [NonTensorData(answers[row].stop.value if row in answers else None) for row in range(count)]
    td[Key.STOP] = NonTensorStack(*reasons) if td.batch_size else reasons[0]


def _column(td: TensorDictBase, key: str, default: Sequence[int]) -> list[int]:
    value = td.get(key, None)
    return list(default) if value is None else [int(item) for item in value.reshape(-1)]


def by_row(completions: Iterator[Completion], count: int) -> list[Completion]:
    """Put completions in the order of their rows; raise `ModelError` if a row has none or two."""
    expected = f"a policy must answer each of {count} rows (counted from 0) once"
    found: dict[int, Completion] = {}
    for completion in completions:
        if not 0 <= completion.row < count:
            raise ModelError(f"{expected}: found an answer to row {completion.row}")
        if completion.row in found:
            raise ModelError(f"{expected}: found a second answer to row {completion.row}")
        found[completion.row] = completion
    missing = [row for row in range(count) if row not in found]
    if missing:
        raise ModelError(f"{expected}: found no answer to rows {missing[:8]}")
    return [found[row] for row in range(count)]
