"""A person as a policy: somebody types what a model would have sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ramet.policies.policy import Policy
from ramet.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PersonPolicy(Policy):
    """Answer each request with the text that `ask(request)` returns, tokenised, and an end-of-text token behind it.

    `text` of a completion is what was typed, for a tokenizer may not know every character. A text that fills the
    request's limit is cut there (`NEW_TOKENS`); one in which a stop string stands is cut behind it (`STOP`). Log-probs
    are NaN: a person has none, so what was typed can not be trained on. `tokenizer` None takes the tiny one.

    >>> from ramet.types import Draw, Sampling
    >>> policy = PersonPolicy(lambda request: "85")
    >>> [answer] = policy.complete([Request(0, torch.tensor([1]), Sampling(max_new_tokens=8), Draw(0, 0, 0))])
    >>> answer.tokens.tolist(), answer.text, answer.stop.value
    ([12, 9, 2], '85', 'eos')
    """

    def __init__(self, ask: Callable[[Request], str], tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if tokenizer is None:
            from ramet.models.tiny import tiny_tokenizer

            tokenizer = tiny_tokenizer()
        self.tokenizer = tokenizer
        self._ask = ask

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield what the person answers, row by row; whatever `ask` raises goes through."""
        for request in requests:
            yield typed(request, self._ask(request), self.tokenizer, self.version)


def typed(request: Request, text: str, tokenizer: PreTrainedTokenizerBase, version: int = 0) -> Completion:
    """Return the completion of `request` by somebody who typed `text`: see `PersonPolicy`."""
    text, stop = _cut(text, request.sampling.stop)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if stop is StopReason.EOS and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    limit = request.sampling.max_new_tokens
    if len(ids) > limit:
        ids, stop = ids[:limit], StopReason.NEW_TOKENS
        text = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    tokens = torch.tensor(ids, dtype=torch.int64)
    return Completion(request.row, tokens, torch.full((len(ids),), torch.nan), stop, version, text=text)


def _cut(text: str, stops: Sequence[str]) -> tuple[str, StopReason]:
    """Return the text up to the end of the first stop string in it, and why it ends there."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return (text[: min(ends)], StopReason.STOP) if ends else (text, StopReason.EOS)


SCRIPT = """\
{%- if tools %}[tools]
{{ tools | tojson }}
{% endif -%}
{%- for message in messages %}[{{ message.role }}]
{{ message.content or "" }}
{% for call in message.tool_calls or [] %}{{ call | tojson }}
{% endfor %}{% endfor %}[assistant]
{{ "" }}"""
"""A chat template that writes messages as a play is printed, each below its role, the tools that are offered on top."""


def script_tokenizer() -> PreTrainedTokenizerBase:
    """Make the tiny tokenizer with the chat template `SCRIPT`.

    For policies that read messages and no tokens, such as a person: any conversation can be written with it.

    >>> tokenizer = script_tokenizer()
    >>> print(tokenizer.apply_chat_template([{"role": "user", "content": "2+2?"}], tokenize=False))
    [user]
    2+2?
    [assistant]
    <BLANKLINE>
    """
    from ramet.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SCRIPT
    return tokenizer
