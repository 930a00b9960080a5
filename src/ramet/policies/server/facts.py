"""What a server can do, found out by asking it: the health check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ramet.errors import ServerError
from ramet.policies.server.answers import has_tokens, is_processed
from ramet.policies.server.http import RefusedError
from ramet.policies.server.requests import tokens_body
from ramet.policies.server.weights import PLAIN, Ask, label_of, settings_of
from ramet.types import Sampling

Api: TypeAlias = Literal["auto", "tokens", "text"]
PROBED = 8
"""How many tokens a health check lets the server sample."""
UNKNOWN = (400, 404, 405, 415, 422, 501)
"""Statuses with which a server says that it does not know such a request; others are about this caller."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server can do.

    `tokens`: ids go in, ids and log-probs come out; if not, `reason` says what is missing. `processed`: its log-probs
    are those of the distribution that it samples from, at any temperature and with any cut. `context` is how many
    tokens a row may have, prompt included, `label` what the server calls its weights, `precision` the dtype that it
    computes in: None where it does not say. Where it has names for its weights, it takes new ones, by `method`.
    """

    tokens: bool
    reason: str = ""
    processed: bool = False
    context: int | None = None
    label: str | None = None
    precision: str | None = None
    method: str = PLAIN


async def find_out(ask: Ask, model: str, api: Api) -> ServerFacts:
    """Ask a server what it serves, and let it sample one token; `ServerError` where it can not do what it must."""
    context, known = await _served(ask, model)
    if api == "text":
        return ServerFacts(False, "its text alone was asked for", context=context)
    sampling = Sampling(PROBED, top_k=1)
    body = {**tokens_body(model, [0, 1, 2, 3], sampling, 0, limit=PROBED), "logprobs": 2}
    try:
        answer = await ask("POST", "/v1/completions", body)
    except RefusedError as error:
        served = f"; it serves {', '.join(known[:8])}" if known and model not in known else ""
        if api == "tokens" or error.status not in UNKNOWN or served:
            hint = error.hint or 'use vLLM, or take the text alone with api="text"'
            raise ServerError(f"the server completes no token ids: {error.message}{served}", hint=hint) from error
        return ServerFacts(False, f"it completes no token ids ({error.message})", context=context)
    missing = has_tokens(answer)
    if missing and api == "tokens":
        raise ServerError(f"the server gives no token ids with log-probs: {missing}", hint="use vLLM")
    if missing:
        return ServerFacts(False, missing, context=context)
    label = await label_of(ask)
    precision, method = (None, PLAIN) if label is None else await settings_of(ask)
    return ServerFacts(True, "", is_processed(answer), context, label, precision, method)


async def _served(ask: Ask, model: str) -> tuple[int | None, list[str]]:
    """Return the context of the model, and the names that the server serves, as far as it says."""
    try:
        found = await ask("GET", "/v1/models", None)
    except RefusedError as error:
        if error.status not in UNKNOWN:
            raise
        return None, []
    cards = found.get("data") if isinstance(found, dict) else None
    named: dict[str, Mapping[str, Any]] = {
        str(card["id"]): card for card in cards or [] if isinstance(card, dict) and "id" in card
    }
    context = named.get(model, {}).get("max_model_len")
    return (context if isinstance(context, int) and context > 0 else None), list(named)
