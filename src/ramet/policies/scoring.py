"""A `transformers` causal model as a judge of what was already said: the log-prob of each token of a response."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor, nn

from ramet import ragged
from ramet.errors import ModelError
from ramet.ragged import Ragged
from ramet.scoring.head import token_log_probs
from ramet.scoring.running import forward_logits
from ramet.specs import KeyPath
from ramet.transforms.entries import mask_of
from ramet.types import Key

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersScorer(nn.Module):
    """Say how probable a causal model finds the responses in a TensorDict: an actor that never samples.

    `log_prob(td)` returns, for each token of `action_key` int64 (*B, n) that follows the tokens of `token_key`
    (*B, L), its log-prob under softmax(logits / temperature), float32 (float64 for a float64 model), in the layout of
    the action: jagged, dense, or of one row. The tokens may be in any layout; padded ones need their mask under
    `attention_key`, by default "attention_mask" beside them. A padded action needs its mask under `mask_key`: the
    result has the action's lengths and is 0 where that is false. A row's log-probs are the same in any layout.
    `forward` writes them under `log_prob_key`. `max_tokens` bounds the padded tokens of one forward pass.

    Put the model into `eval` mode before. Raises `ModelError` for a model in training mode, for a response to no
    tokens at all and for an id outside the model's vocabulary, ValueError for a temperature that is not positive and a
    mask that does not fit, KeyError where tokens or action are missing.

    >>> from tensordict import TensorDict
    >>> from ramet.models.tiny import tiny_llama, tiny_tokenizer
    >>> scorer = TransformersScorer(tiny_llama(tiny_tokenizer(), layers=1))
    >>> answers = Ragged.from_rows([torch.tensor([10]), torch.tensor([6, 2])])
    >>> td = TensorDict({"tokens": torch.tensor([[1, 6, 76], [1, 7, 84]]), "tokens_response": answers.jagged()}, [2])
    >>> [tuple(row.shape) for row in ragged.rows(scorer(td), "log_probs")]
    [(1,), (2,)]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        token_key: KeyPath = Key.TOKENS,
        attention_key: KeyPath | None = None,
        action_key: KeyPath = Key.RESPONSE,
        mask_key: KeyPath | None = None,
        log_prob_key: KeyPath = Key.LOG_PROBS,
        max_tokens: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive to score: found {temperature}")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1: found {max_tokens}")
        self.model, self.temperature, self.max_tokens, self.autocast = model, temperature, max_tokens, autocast
        self.token_key, self.action_key, self.mask_key, self.log_prob_key = (
            token_key,
            action_key,
            mask_key,
            log_prob_key,
        )
        beside = mask_of(token_key)
        self.attention_key: KeyPath = beside if attention_key is None else attention_key
        self.in_keys: list[KeyPath] = [token_key, action_key]
        self.out_keys: list[KeyPath] = [log_prob_key]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the log-probs of the responses into `td`."""
        return td.set(self.log_prob_key, self.log_prob(td))

    def log_prob(self, td: TensorDictBase) -> Tensor:
        """Return the log-probs of the responses, in their layout; of a lazy stack, jagged where rows differ."""
        if self.model.training:
            raise ModelError("the model is in training mode, where dropout makes noise", hint="call model.eval()")
        prompts, answers = self._prompts(td), self._answers(td)
        scored = self._score([prompt.long() for prompt in prompts], [answer.long() for answer in answers])
        lengths = [len(answer) for answer in answers]
        if self.mask_key is not None and answers:
            real = torch.cat([row.bool() for row in ragged.rows(td, self.mask_key)]).to(scored.device)
            lengths = [len(row) for row in ragged.rows(td, self.mask_key)]
            scored = scored.new_zeros(real.shape).masked_scatter(real, scored)
        return self._as_the_action(td, scored, lengths)

    def _prompts(self, td: TensorDictBase) -> list[Tensor]:
        """Return the tokens of each row; of a lazy stack, each part says itself whether it has a mask."""
        if not isinstance(td, LazyStackedTensorDict):
            masked = td.get(self.attention_key, None) is not None
            return ragged.rows(td, self.token_key, mask=self.attention_key if masked else None)
        dim = td.stack_dim
        parts = [self._prompts(part) for part in td.unbind(dim)]
        inner = td.batch_size[dim + 1 :].numel()
        starts = range(0, td.batch_size[:dim].numel() * inner, inner or 1)
        return [row for start in starts for part in parts for row in part[start : start + inner]]

    def _answers(self, td: TensorDictBase) -> list[Tensor]:
        try:
            return ragged.rows(td, self.action_key, mask=self.mask_key)
        except (IndexError, ValueError) as error:
            if self.mask_key is None:
                raise
            raise ValueError(f"the mask {self.mask_key!r} does not fit {self.action_key!r}: {error}") from error

    def _as_the_action(self, td: TensorDictBase, scored: Tensor, lengths: list[int]) -> Tensor:
        """Lay out the log-probs of all rows, one after the other, as the action is."""
        size, layouts = td.batch_size, _parts(td, self.action_key)
        if not any(part.is_nested for part in layouts) and len(set(lengths)) <= 1:
            return scored.view(*size, lengths[0] if lengths else layouts[0].shape[-1])
        if len(size) > 1:
            raise ValueError(
                f"responses of different lengths in a batch of size {tuple(size)} have no layout: score its steps one "
                "by one"
            )
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device=scored.device)
        return Ragged(scored, ends).jagged()

    def _score(self, prompts: list[Tensor], answers: list[Tensor]) -> Tensor:
        """Return the log-probs of all answers, one after the other: float [total]."""
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if len(answer) and not len(prompt):
                raise ModelError(
                    f"row {row} has no tokens before its response: a causal model gives its first token no "
                    "distribution",
                    hint="start the prompt with a beginning-of-text token",
                )
        self._check_ids(prompts, answers)
        found: dict[int, Tensor] = {}
        for batch in self._batches(prompts, answers):
            found.update(zip(batch, self._score_batch(prompts, answers, batch), strict=True))
        if not found:
            double = next(self.model.parameters()).dtype is torch.float64
            return torch.zeros(0, dtype=torch.float64 if double else torch.float32, device=self._device())
        return torch.cat([found[row] for row in range(len(answers)) if row in found])

    def _check_ids(self, prompts: list[Tensor], answers: list[Tensor]) -> None:
        """Raise for an id that the model has no embedding of, which it would look up in vain."""
        known = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        if known is None:
            return
        for key, rows in ((self.token_key, prompts), (self.action_key, answers)):
            if not rows or not bool(_unknown(torch.cat(rows), known).any()):
                continue
            for row, ids in enumerate(rows):
                strange = ids[_unknown(ids, known)]
                if len(strange):
                    raise ModelError(
                        f"{key!r}, row {row}: the id {int(strange[0])} is not in the model's vocabulary of {known}",
                        hint="use the model's own tokenizer; where it is padding, give its mask",
                    )

    def _batches(self, prompts: list[Tensor], answers: list[Tensor]) -> list[list[int]]:
        """Put rows with something to score into batches: one, or such that none is padded past `max_tokens`."""
        width = {row: len(prompts[row]) + len(answer) for row, answer in enumerate(answers) if len(answer)}
        if self.max_tokens is None:
            return [list(width)] if width else []
        batches: list[list[int]] = []
        for row in sorted(width, key=lambda row: width[row]):
            if batches and width[row] * (len(batches[-1]) + 1) <= self.max_tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _score_batch(self, prompts: list[Tensor], answers: list[Tensor], batch: list[int]) -> tuple[Tensor, ...]:
        device = self._device()
        whole = Ragged.from_rows([torch.cat([prompts[row], answers[row]]).to(device) for row in batch])
        ids, mask = whole.padded("right")
        before = torch.tensor([len(prompts[row]) for row in batch], device=device)
        counts = whole.lengths - before
        first = int(before.min()) - 1
        logits = forward_logits(self.model, ids, mask, keep=ids.shape[1] - first, autocast=self.autocast)
        column = ragged.positions(before, counts)
        line = torch.repeat_interleave(torch.arange(len(batch), device=device), counts)
        values, _ = token_log_probs(logits[line, column - 1 - first], ids[line, column], temperature=self.temperature)
        return torch.split(values, counts.tolist())

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _parts(td: TensorDictBase, key: KeyPath) -> list[Tensor]:
    """Return what is under `key`, of each part where `td` is a lazy stack."""
    if isinstance(td, LazyStackedTensorDict):
        return [found for part in td.unbind(td.stack_dim) for found in _parts(part, key)]
    return [td.get(key)]


def _unknown(ids: Tensor, known: int) -> Tensor:
    return (ids < 0) | (ids >= known)
