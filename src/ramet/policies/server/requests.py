"""From a `Request` to the body that a server understands: every setting is written out, so that no default applies."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ramet.errors import ModelError
from ramet.types import Draw, Message, Request, Sampling

COLDEST = 0.01
"""The lowest temperature that vLLM samples with: it takes a lower one for this one, in silence."""
RAW = "restart the server with --logprobs-mode processed_logprobs"


def seed_of(draw: Draw) -> int:
    """Return the seed of a row: a function of its address alone, below 2^53, which JSON keeps exact.

    >>> seed_of(Draw(0, 3, 1)) == seed_of(Draw(0, 3, 1)), seed_of(Draw(0, 3, 1)) == seed_of(Draw(0, 3, 2))
    (True, False)
    """
    address = struct.pack("<4Q", *(number % 2**64 for number in (draw.seed, draw.prompt, draw.member, draw.turn)))
    return int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "little") >> 11


def tokens_body(model: str, tokens: Sequence[int], sampling: Sampling, seed: int, *, limit: int) -> dict[str, Any]:
    """Return what a completions endpoint is asked: token ids in, `limit` ids out at most, with their log-probs.

    Penalties and limits that a model's own generation config may bring are switched off; stop strings are looked for in
    a text that holds special tokens, as the policies in the process do.
    """
    return {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": limit,
        "n": 1,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": False,
    }


def text_body(model: str, request: Request) -> dict[str, Any]:
    """Return what a chat endpoint is asked, in words that any of them knows."""
    sampling = request.sampling
    assert request.messages is not None
    body: dict[str, Any] = {
        "model": model,
        "messages": [_plain(message) for message in request.messages],
        "max_tokens": sampling.max_new_tokens,
        "seed": seed_of(request.draw),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stream": False,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
    return body


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as the chat API takes it: the arguments of calls as JSON text, and nothing else in a call."""
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
    return plain


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": written},
    }


def refuse_tokens(request: Request) -> None:
    """Raise `ModelError` for a row that no server of tokens can answer as it is meant."""
    sampling = request.sampling
    if len(request.tokens) == 0:
        raise ModelError(
            f"row {request.row} has no tokens: a causal model needs at least one to start from",
            hint="start the prompt with a beginning-of-text token",
        )
    if 0 < sampling.temperature < COLDEST:
        raise ModelError(
            f"row {request.row}: a server takes a temperature of {sampling.temperature} for {COLDEST}, in silence",
            hint=f"set temperature to 0 (greedy) or to at least {COLDEST}",
        )
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise ModelError(
            f"row {request.row}: with both, a server cuts by min_p first and then by top_p, ramet the other way round, "
            f"so that the log-probs would be of another distribution: found {sampling.min_p} and {sampling.top_p}",
            hint="set one of them",
        )


def refuse_raw(request: Request) -> None:
    """Raise `ModelError` where raw log-probs are not those of the distribution that is sampled from."""
    sampling = request.sampling
    if sampling.temperature != 0 and not (sampling.temperature == 1 and sampling.support.whole):
        raise ModelError(
            f"row {request.row}: the server gives log-probs from before temperature, top_k, top_p and min_p, which are "
            "not those of the distribution that it samples from",
            hint=f'{RAW}, or sample at temperature 1 without cuts, or take its text alone with api="text"',
        )


def refuse_text(request: Request) -> None:
    """Raise `ModelError` for a row that a server of texts can not answer as it is meant."""
    sampling = request.sampling
    if request.messages is None:
        raise ModelError(
            f"row {request.row} has no messages, and the server takes no tokens",
            hint="play a task (ramet.tasks), whose prompts are messages, or use a server of tokens, such as vLLM",
        )
    found: Mapping[str, Any] = {"top_k": sampling.top_k, "min_p": sampling.min_p or None}
    asked = [name for name, value in found.items() if value is not None]
    if asked:
        raise ModelError(
            f"row {request.row} samples with {' and '.join(asked)}, for which a server of texts has no words",
            hint="use temperature and top_p, or a server of tokens, such as vLLM",
        )
