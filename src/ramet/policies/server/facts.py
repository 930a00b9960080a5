"""What a server can do, found out by asking it: the health check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ramet.errors import ConfigError, ServerError
from ramet.http import Ask, RefusedError, TransientError
from ramet.policies.server.answers import has_tokens, is_processed
from ramet.policies.server.requests import tokens_body
from ramet.policies.server.weights import PLAIN, label_of, settings_of
from ramet.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Api: TypeAlias = Literal["auto", "tokens", "text"]
PROBED = 8
"""How many tokens a health check lets the server sample."""
WRITTEN = "The 12 quick foxes (say, in May) jumped:\n\n\t- 2+2=4; naïve 你好 <|x|> don't"
"""A text that few tokenizers take apart in one way."""
UNKNOWN = (400, 404, 405, 415, 422, 501)
"""Statuses with which a server says that it does not know such a request; others are about this caller."""
NO_CHAT = (401, 403, 404, 405, 501)
"""Statuses of who takes no messages, or not from this caller, whatever is in them."""
ADDRESS = "is a server of models there, and is its address right?"


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


async def find_out(ask: Ask, model: str, api: Api, vocabulary: int | None = None) -> ServerFacts:
    """Ask a server what it serves, and let it sample some tokens; `ServerError` where it can not do what it must."""
    context, known = await _served(ask, model)
    if api == "text":
        await _refuse_no_chat(ask, model, listed=bool(known))
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
        await _refuse_no_chat(ask, model, listed=bool(known))
        return ServerFacts(False, f"it completes no token ids ({error.message})", context=context)
    missing = has_tokens(answer)
    if missing and api == "tokens":
        raise ServerError(f"the server gives no token ids with log-probs: {missing}", hint="use vLLM")
    if missing:
        return ServerFacts(False, missing, context=context)
    _refuse_another(answer, model, vocabulary)
    label = await label_of(ask)
    precision, method = (None, PLAIN) if label is None else await settings_of(ask)
    return ServerFacts(True, "", is_processed(answer), context, label, precision, method)


async def _refuse_no_chat(ask: Ask, model: str, *, listed: bool) -> None:
    """Raise `ServerError` where messages are not answered, or not to this caller; who lists models may refuse them too.

    What is said of this one message, that it is too short or asks for too little, is left to the rows themselves; so is
    what may be better at another time, of a server that has `listed` its models.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": False}
    try:
        answer = await ask("POST", "/v1/chat/completions", body)
    except RefusedError as error:
        if error.status in NO_CHAT or 300 <= error.status < 400:
            said = error.message.partition(": <")[0]  # a page says nothing that the status does not
            hint = error.hint or ADDRESS
            raise ServerError(f"this is no server of models for this caller: {said}", hint=hint) from error
        return
    except TransientError:
        if listed:
            return
        raise
    if not (isinstance(answer, dict) and isinstance(answer.get("choices"), list)):
        raise ServerError("this is no server of models: its answer to a message has no choices", hint=ADDRESS)


async def refuse_another_tokenizer(ask: Ask, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` where a server that says how it tokenises does it otherwise than `tokenizer`."""
    text = WRITTEN + (tokenizer.eos_token or "")
    try:
        found = await ask("POST", "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    except TransientError:
        raise
    except ServerError:
        return  # it has no such page
    ids = found.get("tokens") if isinstance(found, dict) else None
    own = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if isinstance(ids, list) and ids != own:
        place = next((place for place, pair in enumerate(zip(ids, own, strict=False)) if pair[0] != pair[1]), None)
        where = min(len(ids), len(own)) if place is None else place
        raise ConfigError(
            f"the server of {model!r} has another tokenizer than this run: it makes {len(ids)} tokens of a text, "
            f"{ids[where : where + 4]} at {where}, and this run {len(own)}, {own[where : where + 4]} there",
            hint="give the tokenizer of the model that the server serves",
        )


def _refuse_another(answer: Any, model: str, vocabulary: int | None) -> None:
    """Raise `ServerError` where what was sampled is another model's."""
    named = answer.get("model")
    if named is not None and named != model:
        raise ServerError(f"the server was asked for {model!r} and answers as {named!r}", hint="look at url and model")
    ids = answer["choices"][0]["token_ids"]
    unknown = [token for token in ids if vocabulary is not None and isinstance(token, int) and token >= vocabulary]
    if unknown:
        raise ServerError(
            f"the server samples token {unknown[0]}, and this run knows {vocabulary} tokens, from 0 on",
            hint="does it serve the model that this run trains?",
        )


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
