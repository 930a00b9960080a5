"""What a conversation is made of: pieces of tokens, and where a template parts from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ramet.errors import ForestError
from ramet.types import Kind


@dataclass(slots=True)
class Piece:
    """A run of tokens that a model saw and wrote in this order: what one rollout of a forest holds.

    `kinds`, `log_probs` (NaN where nothing was sampled) and `versions` (-1 likewise) have one entry for each token.
    """

    tokens: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def extend(
        self, tokens: Sequence[int], kind: Kind, log_probs: Sequence[float] | None = None, version: int = -1
    ) -> None:
        """Append tokens, all of one kind; raise `ForestError` for another number of log-probs than of tokens."""
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ForestError(f"each token has one log-prob: found {len(tokens)} tokens, {len(log_probs)} log-probs")
        self.tokens.extend(tokens)
        self.kinds.extend([kind] * len(tokens))
        self.log_probs.extend([math.nan] * len(tokens) if log_probs is None else log_probs)
        self.versions.extend([version] * len(tokens))

    def copy(self) -> Piece:
        """Return an independent piece that says the same."""
        return Piece(list(self.tokens), list(self.kinds), list(self.log_probs), list(self.versions))


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a template wrote what came before in another way: `messages` were said, the texts part at `character`.

    `seen` is how what the model saw and wrote goes on from there, `written` what the template writes there by now (the
    first 80 characters of both). `kept` says that the conversation went on with what the model saw all the same.
    """

    messages: int
    character: int
    seen: str
    written: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a conversation and its template's own rendering part: in the text, or in its ids alone.

    `seen` is what the conversation holds there, `written` what the template does; `token` is the first token that
    differs, in ids alone, else None.
    """

    character: int
    seen: str
    written: str
    token: int | None = None
