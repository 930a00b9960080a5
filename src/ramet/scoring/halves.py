"""A causal model in two halves: the body, from tokens to hidden states, and the head, from hidden states to logits.

The head is the model's own forward pass over a body that returns what it is told to. Whatever a model does to its
logits (a scale, a soft cap) is done as the model does it, and to as few rows at a time as one likes. While the head
runs, another thread that scores or samples with the model is told, for its body is another.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ramet.errors import ModelError
from ramet.scoring.head import token_log_probs
from ramet.scoring.rows import Options
from ramet.scoring.running import autocast_context, one_thread

LOGITS = 2**24
"""How many logits exist at once where no smaller chunk is asked for."""


class Halves:
    """The two halves of a `transformers` causal model, peft's wrapper around one included.

    Raises `ModelError` for a model that has no body of its own. The head is for one thread at a time: see the module.
    """

    def __init__(self, model: nn.Module) -> None:
        outer: Any = model
        self.model: Any = outer.get_base_model() if hasattr(outer, "get_base_model") else outer
        # Some models call a part of what they name their base: that part is their body.
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else None
        self.backbone: Any = getattr(self.model, "base_model", None) if decoder in (None, self.model) else decoder
        if self.backbone is self.model or not isinstance(self.backbone, nn.Module):
            raise ModelError(f"{type(self.model).__name__} has no body that is a module of its own")
        self._takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters
        self._outputs: Any = None

    def body(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states [B, T, d] of `ids` int64 [B, T], which stand at `positions` int64 [B, T]."""
        options = {"position_ids": positions} if self._takes_positions else {}
        outputs = self.backbone(input_ids=ids, use_cache=False, **options)
        hidden: Tensor = outputs.last_hidden_state
        self._outputs = copy.copy(outputs)
        self._outputs.last_hidden_state = None
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V] of hidden states [n, d]; raise `ModelError` where the model goes round its body."""
        if self._outputs is None:
            raise ModelError("head: no hidden states yet", hint="call body first")
        called = False

        def forward(*_: Any, **__: Any) -> Any:
            nonlocal called
            called = True
            outputs = copy.copy(self._outputs)
            outputs.last_hidden_state = hidden[None]
            return outputs

        with one_thread(self.model):
            before = self.backbone.__dict__.get("forward")
            self.backbone.forward = forward
            try:
                ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
                logits: Tensor = self.model(input_ids=ids, use_cache=False).logits.squeeze(0)
            finally:
                if before is None:
                    del self.backbone.forward
                else:
                    self.backbone.forward = before
        if not called:
            raise ModelError(f"{type(self.model).__name__} does not call its own body as a whole")
        return logits

    def log_probs(
        self, hidden: Tensor, targets: Tensor, options: Options, *, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs [M] of `targets` int64 [M] after hidden states [M, d], and their entropies if wanted.

        A chunk of logits exists at a time; with gradient it is computed again in the backward pass. With `keep` the
        last one is not: the backward pass asks for it first, and if that comes next, dropping it would save nothing.
        """
        most = min(options.chunk, max(1, LOGITS // self.model.config.get_text_config().vocab_size))
        chunk = -(-len(targets) // max(1, -(-len(targets) // most))) or 1  # so that all are of one size

        def piece(part: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
            with autocast_context(part.device, options.autocast):
                logits = self.head(part)
            return token_log_probs(
                logits,
                ids,
                temperature=options.temperature,
                entropy=options.entropy,
                chunk=chunk,
                support=options.support,
            )

        pairs = list(zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True))
        again = len(pairs) - keep if torch.is_grad_enabled() and hidden.requires_grad else 0
        found = [checkpoint(piece, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs[:again]]
        found += [piece(*pair) for pair in pairs[again:]]
        values = torch.cat([value for value, _ in found])
        return values, torch.cat([e for _, e in found if e is not None]) if options.entropy else None
