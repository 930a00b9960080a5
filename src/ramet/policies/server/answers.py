"""From a server's answer to a `Completion`: whatever does not fit what was asked is refused, with what was found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ramet.errors import ServerError
from ramet.http import RefusedError, TransientError
from ramet.types import Completion, Request, Sampling, StopReason

IMPOSSIBLE = -9000.0
"""A log-prob below this stands for a probability of 0: JSON has no infinity, and servers write -9999 for it."""
ROUNDING = 1e-3
"""How far above 0 a log-prob may come to lie."""
TOO_LONG = ("context length", "context_length", "maximum model length", "max_model_len", "too long")
"""What servers say of a prompt that does not fit."""
CONTRACT = "the answer must hold what was sampled, and how probable it was"


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer is held against: where it comes from, the row, the most tokens it may have, known ids."""

    where: str
    model: str
    request: Request
    limit: int
    version: int
    vocabulary: int | None = None

    def error(self, text: str) -> ServerError:
        """Return the error that says what was expected of this row's answer and what was found."""
        return ServerError(f"row {self.request.row}, answer of {self.where}: expected {text}", hint=CONTRACT)


def read_tokens(asked: Asked, answer: Any) -> Completion:
    """Return the completion in an answer of a completions endpoint; `ServerError` for one that breaks its word."""
    choice = _choice(asked, answer, prefix=False)
    request, sampling = asked.request, asked.request.sampling
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != request.tokens.tolist():
        raise asked.error(f"the prompt that was sent, found another: {_short(echoed)}")
    tokens = _ids(asked, choice.get("token_ids"))
    if sampling.temperature == 0:  # what greedy decoding reports is no density
        log_probs = [math.nan] * len(tokens)
    else:
        log_probs = _log_probs(asked, choice.get("logprobs"), len(tokens))
    return Completion(
        request.row,
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(log_probs, dtype=torch.float32),
        _stop(asked, choice, len(tokens)),
        asked.version,
    )


def read_text(asked: Asked, answer: Any, encode: Callable[[str], Sequence[int]]) -> Completion:
    """Return the completion in an answer of a chat endpoint: its text, tokenised anew, with log-probs of NaN.

    Calls that the server took out of the text are written back into it, as JSON in <tool_call> tags.
    """
    choice = _choice(asked, answer, prefix=True)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise asked.error(f"a message, found {_short(message)}")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise asked.error(f"a message whose content is text, found {_short(content)}")
    text = "\n".join([*([content] if content else []), *_calls(asked, message.get("tool_calls"))])
    tokens = torch.tensor(list(encode(text)), dtype=torch.int64)
    usage = answer.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    stop = _stop(asked, choice, count if isinstance(count, int) and not isinstance(count, bool) else asked.limit)
    return Completion(asked.request.row, tokens, torch.full((len(tokens),), math.nan), stop, asked.version, text)


def has_tokens(answer: Any) -> str | None:
    """Return why an answer holds no token ids with log-probs, None if it does."""
    try:
        choice = answer["choices"][0]
    except (TypeError, KeyError, IndexError):
        return "its completions have no choices"
    if not isinstance(choice, dict) or not isinstance(choice.get("token_ids"), list):
        return "its completions have no token_ids"
    found = choice.get("logprobs")
    if not isinstance(found, dict) or not isinstance(found.get("token_logprobs"), list):
        return "its completions have no log-probs"
    ids, values = choice["token_ids"], found["token_logprobs"]
    return None if len(ids) == len(values) else f"its completions have {len(values)} log-probs for {len(ids)} tokens"


def is_processed(answer: Any) -> bool:
    """Say of an answer to a probe with top_k = 1 whether tokens that were cut away have no probability.

    Tokens of exactly one probability are not told apart by a server, so that nothing is cut where the first two are.
    """
    try:
        found = [sorted(map(float, top.values())) for top in answer["choices"][0]["logprobs"]["top_logprobs"]]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return False
    told = [values for values in found if len(values) > 1 and values[0] < values[-1]]
    return bool(told) and all(values[-2] < IMPOSSIBLE for values in told)


def too_long(error: RefusedError) -> bool:
    """Say whether a server refused a prompt because of its length."""
    return error.status in (400, 413, 422) and any(words in error.detail.lower() for words in TOO_LONG)


def _choice(asked: Asked, answer: Any, *, prefix: bool) -> dict[str, Any]:
    """Return the one choice of an answer; `prefix` lets the model's name go on, as with a date behind it."""
    if not isinstance(answer, dict):
        raise asked.error(f"an object, found {_short(answer)}")
    model = answer.get("model")
    same = model == asked.model or (prefix and isinstance(model, str) and model.startswith(asked.model))
    if model is not None and not same:
        raise asked.error(f"an answer of the model {asked.model!r}, found one of {_short(model)}")
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        found = f"{len(choices)} of them" if isinstance(choices, list) else _short(choices)
        raise asked.error(f"one choice, found {found}")
    return choices[0]


def _ids(asked: Asked, found: Any) -> list[int]:
    if not isinstance(found, list):
        raise asked.error(f"token_ids, found {_short(found)}")
    if len(found) > asked.limit:
        raise asked.error(f"at most {asked.limit} tokens, found {len(found)}")
    for place, token in enumerate(found):
        if isinstance(token, bool) or not isinstance(token, int):
            raise asked.error(f"whole numbers as token ids, found {_short(token)} at {place}")
        if token < 0 or token >= (2**63 if asked.vocabulary is None else asked.vocabulary):
            known = "0 on" if asked.vocabulary is None else f"0 to {asked.vocabulary - 1}"
            raise asked.error(f"token ids from {known}, found {token} at {place}")
    return found


def _log_probs(asked: Asked, found: Any, count: int) -> list[float]:
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list):
        raise asked.error(f"log-probs of the tokens, found {_short(found)}")
    if len(values) != count:
        raise asked.error(f"one log-prob for each of {count} tokens, found {len(values)}")
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise asked.error(f"numbers as log-probs, found {_short(value)} at {place}")
        if not IMPOSSIBLE < value <= ROUNDING:  # which NaN is not either
            raise asked.error(f"finite log-probs that are not above 0, found {_short(value)} at {place}")
    return [min(float(value), 0.0) for value in values]


def _stop(asked: Asked, choice: dict[str, Any], count: int) -> StopReason:
    """Say why a completion of `count` tokens ended."""
    sampling, reason, by = asked.request.sampling, choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "length":
        return StopReason.NEW_TOKENS if count >= sampling.max_new_tokens else StopReason.CONTEXT
    if reason in ("stop", "tool_calls", "function_call"):
        return StopReason.STOP if _asked_for(by, sampling) else StopReason.EOS
    if reason in ("abort", "error"):  # the server gave the row up, as it does when it is stopped or paused
        raise TransientError(f"row {asked.request.row}, answer of {asked.where}: the server ended it: {reason}")
    raise asked.error(f'an end by "stop" or "length", found {_short(reason)}')


def _asked_for(by: Any, sampling: Sampling) -> bool:
    """Say whether one of the row's own stops ended it; other ids that end it are the model's, like its eos."""
    return by is not None and by in (*sampling.stop_ids, *sampling.stop)


def _calls(asked: Asked, calls: Any) -> list[str]:
    if calls is not None and not isinstance(calls, list):
        raise asked.error(f"calls in a list, found {_short(calls)}")
    lines = []
    for call in calls or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise asked.error(f"calls with the name of a function, found {_short(call)}")
        arguments = function.get("arguments") or "{}"
        # Text goes in as it is: where a model wrote no JSON, whoever reads the call can say so to the model.
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        lines.append(f'<tool_call>\n{{"name": {name}, "arguments": {written}}}\n</tool_call>')
    return lines


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + " ..."
