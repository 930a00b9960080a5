"""A policy that says what it is told to: for tests, examples and puzzling over an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ramet.policies.policy import Policy
from ramet.types import Completion, Request, StopReason


class ScriptedPolicy(Policy):
    """Answer each request with `script(request)`: token ids, the last of which may be `eos_token_id`.

    Log-probs are 0: the script is certain of what it says. An answer that fills the request's limit without an end
    stops with `NEW_TOKENS`, and a longer one is cut there; a shorter one ended because the script wanted it to: `STOP`.

    >>> policy = ScriptedPolicy(lambda request: [7, 8, 2], eos_token_id=2)
    >>> from ramet.types import Draw, Sampling
    >>> [answer] = policy.complete([Request(0, torch.tensor([1]), Sampling(max_new_tokens=4), Draw(0, 0, 0))])
    >>> answer.tokens.tolist(), answer.stop.value
    ([7, 8, 2], 'eos')
    """

    def __init__(self, script: Callable[[Request], Sequence[int]], *, eos_token_id: int | None = None) -> None:
        self._script = script
        self._eos = eos_token_id

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield the script's answers, row by row; raise `ValueError` for a request with stop strings."""
        for request in requests:
            if request.sampling.stop:
                raise ValueError(
                    f"row {request.row}: a script knows no texts, so it can not stop at {request.sampling.stop}: "
                    "give stop_ids"
                )
            tokens = list(self._script(request))[: request.sampling.max_new_tokens]
            if tokens and tokens[-1] == self._eos:
                stop = StopReason.EOS
            elif len(tokens) == request.sampling.max_new_tokens and tokens[-1] not in request.sampling.stop_ids:
                stop = StopReason.NEW_TOKENS
            else:
                stop = StopReason.STOP
            yield Completion(
                request.row, torch.tensor(tokens, dtype=torch.int64), torch.zeros(len(tokens)), stop, self.version
            )
