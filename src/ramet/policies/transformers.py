"""A `transformers` causal model as a policy: each distinct prefix is prefilled once, rows leave as they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ramet.errors import ModelError
from ramet.policies.draws import draw_tokens, uniforms
from ramet.policies.policy import Policy
from ramet.scoring.running import autocast_context, forward_parameters
from ramet.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_TOKENS = torch.zeros(0, dtype=torch.int64)


class TransformersPolicy(Policy):
    """Sample from any Hugging Face causal model.

    `eos_ids` end a completion (None takes those of the model's generation config, then of its config); `rows_per_batch`
    bounds how many rows decode together; `autocast` runs the model under torch's autocast. The model is put into `eval`
    mode: with dropout the log-probs would be those of no model.

    A prefix as long as the model's context gets an empty completion that stops with `PROMPT_TOO_LONG`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Sequence[int] | None = None,
        rows_per_batch: int = 256,
        autocast: torch.dtype | None = None,
    ) -> None:
        if rows_per_batch < 1:
            raise ValueError(f"rows_per_batch must be at least 1: found {rows_per_batch}")
        self.model: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
        self.eos_ids = frozenset(eos_ids_of(model) if eos_ids is None else eos_ids)
        self._rows_per_batch = rows_per_batch
        self._autocast = autocast
        self._known = forward_parameters(model)

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield a completion for each request as it ends; raise `ModelError` for a row without tokens."""
        self.model.eval()  # type: ignore[no-untyped-call]  # whoever trains may have switched it
        context = context_length(self.model)
        ready = []
        for request in requests:
            length = len(request.tokens)
            if length == 0:
                raise ModelError(
                    f"row {request.row} has no tokens: a causal model needs at least one to start from",
                    hint="start the prompt with a beginning-of-text token",
                )
            if context is not None and length >= context:
                yield Completion(request.row, NO_TOKENS, torch.zeros(0), StopReason.PROMPT_TOO_LONG, self.version)
            else:
                ready.append(request)
        for first in range(0, len(ready), self._rows_per_batch):
            yield from self._complete_batch(ready[first : first + self._rows_per_batch], context)

    def _complete_batch(self, requests: list[Request], context: int | None) -> Iterator[Completion]:
        if self._autocast is None:
            yield from self._decode(requests, context)
            return
        # One context for all steps, for leaving it throws away the weights that it has cast. Nothing is yielded inside:
        # whoever takes a completion would go on under autocast.
        with autocast_context(self.model.device, self._autocast):
            done = list(self._decode(requests, context))
        yield from done

    @torch.no_grad()
    def _decode(self, requests: list[Request], context: int | None) -> Iterator[Completion]:
        rows = [_Decoding.start(request, context) for request in requests]
        logits, cache, mask = self._prefill([request.tokens for request in requests])
        step = 0
        while rows:
            points = torch.tensor([row.points[step] for row in rows], dtype=torch.float64, device=logits.device)
            temperatures = torch.tensor([row.request.sampling.temperature for row in rows], device=logits.device)
            tokens, log_probs = draw_tokens(logits, points, temperatures)
            keep = []
            for number, (row, token, log_prob) in enumerate(
                zip(rows, tokens.tolist(), log_probs.tolist(), strict=True)
            ):
                stop = row.add(token, log_prob, self.eos_ids)
                if stop is None:
                    keep.append(number)
                else:
                    yield row.completion(stop, self.version)
            if not keep:
                return
            if len(keep) < len(rows):
                rows = [rows[number] for number in keep]
                chosen = torch.tensor(keep, device=logits.device)
                cache.reorder_cache(chosen)
                mask, tokens = mask[chosen], tokens[chosen]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits = self._forward(tokens[:, None], mask, cache)
            step += 1

    def _prefill(self, prefixes: list[Tensor]) -> tuple[Tensor, Any, Tensor]:
        """Run each distinct prefix once, left-padded, and hand its logits, cache and mask to all its rows."""
        numbers: dict[tuple[int, ...], int] = {}
        owner = [numbers.setdefault(tuple(prefix.tolist()), len(numbers)) for prefix in prefixes]
        longest = max(len(prefix) for prefix in numbers)
        ids = torch.zeros(len(numbers), longest, dtype=torch.int64)
        mask = torch.zeros(len(numbers), longest, dtype=torch.int64)
        for prefix, number in numbers.items():
            ids[number, longest - len(prefix) :] = torch.tensor(prefix)
            mask[number, longest - len(prefix) :] = 1
        device = self.model.device
        cache: Any = DynamicCache(config=self.model.config)
        mask = mask.to(device)
        logits = self._forward(ids.to(device), mask, cache)
        chosen = torch.tensor(owner, device=device)
        if len(owner) != len(numbers) or owner != sorted(owner):
            cache.reorder_cache(chosen)
        return logits[chosen], cache, mask[chosen]

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        options: dict[str, Any] = {"cache" if "cache" in self._known else "past_key_values": cache}
        if "position_ids" in self._known:
            options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        if "logits_to_keep" in self._known:
            options["logits_to_keep"] = 1
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
        logits: Tensor = output.logits[:, -1]
        return logits


@dataclass(slots=True)
class _Decoding:
    """One row while it decodes: what it has said, and how much more it may say."""

    request: Request
    limit: int
    limit_reason: StopReason
    points: Any
    tokens: list[int]
    log_probs: list[float]

    @classmethod
    def start(cls, request: Request, context: int | None) -> _Decoding:
        limit, reason = request.sampling.max_new_tokens, StopReason.NEW_TOKENS
        if context is not None and context - len(request.tokens) < limit:
            limit, reason = context - len(request.tokens), StopReason.CONTEXT
        return cls(request, limit, reason, uniforms(request.draw, limit), [], [])

    def add(self, token: int, log_prob: float, eos_ids: frozenset[int]) -> StopReason | None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in eos_ids:
            return StopReason.EOS
        if token in self.request.sampling.stop_ids:
            return StopReason.STOP
        return self.limit_reason if len(self.tokens) >= self.limit else None

    def completion(self, stop: StopReason, version: int) -> Completion:
        return Completion(
            self.request.row,
            torch.tensor(self.tokens, dtype=torch.int64),
            torch.tensor(self.log_probs, dtype=torch.float32),
            stop,
            version,
        )


def eos_ids_of(model: PreTrainedModel) -> list[int]:
    """Return the ids that end a text for `model`: its generation config's, else its config's, else none."""
    for config in (model.generation_config, model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return list(found) if isinstance(found, (list, tuple)) else [int(found)]
    return []


def context_length(model: PreTrainedModel) -> int | None:
    """Return how many positions `model` has, or None where its config states no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None
