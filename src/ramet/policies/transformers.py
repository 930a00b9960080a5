"""A `transformers` causal model as a policy: each distinct prefix is prefilled once, rows leave as they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ramet.errors import ModelError
from ramet.policies.decoding import CachedSteps, Row, SharedSteps, Steps, decode
from ramet.policies.packed import PackedLinears, pays
from ramet.policies.policy import Policy
from ramet.policies.stops import StopWatch, decoder_of
from ramet.scoring.check import engine_of
from ramet.scoring.lengths import text_config, turning_lengths
from ramet.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_TOKENS = torch.zeros(0, dtype=torch.int64)


class TransformersPolicy(Policy):
    """Sample from any Hugging Face causal model.

    `eos_ids` end a completion (None takes those of the model's generation config, then of its config); `rows_per_batch`
    bounds how many rows decode together; `autocast` runs the model under torch's autocast; `tokenizer` is needed for
    stop strings alone. The model is put into `eval` mode: with dropout the log-probs would be those of no model.

    Rows share the keys of their prompts where the model bears it, which its first use finds out; another model's rows
    run with the cache that comes with it, those with prompts of one length together. `tokens_computed` counts the
    tokens that the model ran, those of prompts included.

    A prefix as long as the model's context gets an empty completion that stops with `PROMPT_TOO_LONG`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Sequence[int] | None = None,
        rows_per_batch: int = 256,
        autocast: torch.dtype | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if rows_per_batch < 1:
            raise ValueError(f"rows_per_batch must be at least 1: found {rows_per_batch}")
        prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
        if prompt_learning:
            raise ModelError(
                "the model's adapter puts learned tokens before every prompt, which its cache counts as positions: "
                "what would be sampled has other log-probs than it is scored with",
                hint="use an adapter of the weights, such as LoRA",
            )
        self.model: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
        self.eos_ids = frozenset(eos_ids_of(model) if eos_ids is None else eos_ids)
        self.tokens_computed = 0
        self._rows_per_batch = rows_per_batch
        self._autocast = autocast
        self._decode_text = None if tokenizer is None else decoder_of(tokenizer)

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield a completion for each request as it ends.

        Raises `ModelError` for a row without tokens, for stop strings without a tokenizer, and for a row that would
        grow past a length at which the model's rotary positions turn in another way, its earlier tokens' included.
        """
        self.model.eval()  # type: ignore[no-untyped-call]  # whoever trains may have switched it
        context = context_length(self.model)
        rows = []
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
                rows.append(self._row(request, context))
        if not rows:
            return
        shares = self._shares(rows)
        batches = self._batches(rows, shares)
        for batch in batches:
            # Packed anew for each batch: whoever takes a completion may change the weights before the next.
            packed = self._packed(batch)
            yield from decode(self._steps(batch, shares, packed), batch, self.eos_ids, self.version, self._count)

    def _row(self, request: Request, context: int | None) -> Row:
        limit, reason = request.sampling.max_new_tokens, StopReason.NEW_TOKENS
        if context is not None and context - len(request.tokens) < limit:
            limit, reason = context - len(request.tokens), StopReason.CONTEXT
        for kind, turn in turning_lengths(text_config(self.model)).items():
            if len(request.tokens) + limit > turn and not (kind == "longrope" and len(request.tokens) > turn):
                raise ModelError(
                    f"row {request.row}: its prompt of {len(request.tokens)} and up to {limit} new tokens pass {turn}, "
                    f'where the "{kind}" rotary positions of {type(self.model).__name__} turn in another way, so that '
                    "the log-probs of what was sampled before would be those of no model",
                    hint=f"set max_new_tokens to at most {max(turn - len(request.tokens), 0)}",
                )
        stops = request.sampling.stop
        if not stops:
            return Row(request, limit, reason)
        if self._decode_text is None:
            raise ModelError(
                f"row {request.row} has stop strings, {list(stops)}, and this policy has no tokenizer to see them with",
                hint="TransformersPolicy(model, tokenizer=tokenizer)",
            )
        return Row(request, limit, reason, StopWatch(self._decode_text, stops))

    def _batches(self, rows: list[Row], shares: bool) -> list[list[Row]]:
        """Cut rows into batches that decode together; prompts that are the same or begin alike stand together."""
        ordered = sorted(rows, key=lambda row: row.request.tokens.tolist())
        groups = [ordered]
        if not shares:
            lengths = sorted({len(row.request.tokens) for row in rows})
            groups = [[row for row in ordered if len(row.request.tokens) == length] for length in lengths]
        size = self._rows_per_batch
        return [group[first : first + size] for group in groups for first in range(0, len(group), size)]

    def _shares(self, rows: list[Row]) -> bool:
        """Whether the model is right with shared keys for rows of these lengths in one pass."""
        if engine_of(self.model) != "flat":
            return False
        turns = turning_lengths(text_config(self.model)).values()
        return not any(len(row.request.tokens) > turn for row in rows for turn in turns)

    def _packed(self, batch: list[Row]) -> PackedLinears | None:
        steps = max(row.limit for row in batch) - 1
        if not pays(steps, len(batch), next(self.model.parameters()).dtype, self._autocast):
            return None
        packed = PackedLinears(self.model, rows=len(batch), autocast=self._autocast)
        return packed if len(packed) else None

    def _steps(self, rows: list[Row], shares: bool, packed: PackedLinears | None) -> Steps:
        numbers: dict[tuple[int, ...], int] = {}
        owner = [numbers.setdefault(tuple(row.request.tokens.tolist()), len(numbers)) for row in rows]
        prompts = [torch.tensor(prompt, dtype=torch.int64) for prompt in numbers]
        if shares:
            limit = max(row.limit for row in rows)
            return SharedSteps(self.model, prompts, owner, limit, autocast=self._autocast, packed=packed)
        return CachedSteps(self.model, torch.stack(prompts), owner, autocast=self._autocast, packed=packed)

    def _count(self, tokens: int) -> None:
        self.tokens_computed += tokens


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
