"""From messages to the text that a model reads, and from text to token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from ramet.chat.behind import decoder_of
from ramet.chat.markers import Markers, markers_of
from ramet.chat.seams import Seams
from ramet.errors import ConfigError, DataError
from ramet.types import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schemas = Sequence[Mapping[str, Any]]
"""JSON schemas of the tools that are offered, as chat templates take them."""

Rewrites = Literal["follow", "keep"]
"""What becomes of a conversation whose past a template writes in another way by now: see `ChatTemplate`."""


class Template(Protocol):
    """How messages become the text in front of a model's next turn, and text becomes ids.

    Both are functions of what they are given: what they returned once is remembered.
    """

    rewrites: Rewrites

    def render(self, messages: Sequence[Message], tools: Schemas = ()) -> str:
        """Return all that stands in front of the model's next turn, the opening of that turn included."""

    def encode(self, text: str, *, opening: bool) -> list[int]:
        """Return the ids of `text`, with no token that is not in it; `opening` where it begins the whole row."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""

    def seams(self, tools: Schemas = ()) -> Seams:
        """Return what is known by now of what this template writes behind a turn: the same object each time."""


class ChatTemplate:
    r"""The chat template of a tokenizer; `options` are variables of its own, such as `enable_thinking`.

    Some templates write what was said in another way later on: they leave thinking out, or trim. With `rewrites`
    "follow" (the default) a conversation then begins a new piece as the template now writes it; with "keep" it goes on
    with what the model saw and wrote. Either way `Conversation.forks` says where.

    Tool calls may be given as `ToolCall`s. Where the template refuses arguments as a mapping they are written as JSON.
    Raises `DataError` for a tokenizer without a template, and for messages that the template refuses.

    >>> from ramet.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    >>> ChatTemplate(tokenizer).render([{"role": "user", "content": "2+2?"}])
    'user:2+2?\nassistant:'
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | None = None,
        *,
        rewrites: Rewrites = "follow",
    ) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the prompt is a list of messages, and the tokenizer has no chat template",
                hint="give prompts as text, or set model.chat_template=FILE (in Python: tokenizer.chat_template)",
            )
        if rewrites not in get_args(Rewrites):
            raise ConfigError(f"rewrites: expected one of {', '.join(get_args(Rewrites))}, found {rewrites!r}")
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self.rewrites: Rewrites = rewrites
        self._decode = decoder_of(tokenizer)
        self._seams: dict[str, Seams] = {}

    def render(self, messages: Sequence[Message], tools: Schemas = ()) -> str:
        """Return the conversation as the template writes it, the opening of the model's next turn behind it."""
        plain = [_plain(message) for message in messages]
        try:
            return self._apply(plain, tools)
        except Exception as error:  # a template may raise anything, and says what it refuses
            refused = error
        if any(message.get("tool_calls") for message in plain):
            try:
                return self._apply([_with_text_arguments(message) for message in plain], tools)
            except Exception:  # what it said of the messages as they are says more
                pass
        roles = " ".join(str(message.get("role")) for message in plain)
        raise DataError(
            f"the chat template refuses the messages ({roles}): {type(refused).__name__}: {refused}",
            hint="a template may want a user's turn first, turns that alternate, no system message, or no tools",
        ) from refused

    def encode(self, text: str, *, opening: bool) -> list[int]:
        """Return the ids of `text`; the template has written what special tokens there are."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids or (_beginning(self.tokenizer) if opening else [])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._decode(ids)

    def seams(self, tools: Schemas = ()) -> Seams:
        """Return what is known by now of what this template writes behind a turn: the same object each time."""
        offered = [dict(tool) for tool in tools]
        key = json.dumps(offered, sort_keys=True, default=str) if offered else ""
        if key not in self._seams:
            markers = markers_of(str(self.tokenizer.get_chat_template(tools=offered or None)))
            self._seams[key] = Seams(lambda messages: self.render(messages, offered), markers)
        return self._seams[key]

    def shows(self, tools: Schemas) -> bool:
        """Return whether the template tells the model of the tools: some leave them out without a word."""
        prompt = [{"role": "user", "content": "Where to?"}]
        return self.render(prompt, tools) != self.render(prompt)

    def _apply(self, messages: list[dict[str, Any]], tools: Schemas) -> str:
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
            **self.options,
        )
        return str(text)


class PlainTemplate:
    """No template: contents one behind the other, as `write` writes each message.

    For models that know no chat: the prompt is text, and what an environment replies goes on behind the answer, as it
    is; what a tool answers stands on a line of its own. A text is taken as it is, so that nothing is added about tools:
    it says itself what may be called, or the model has learned it.

    >>> from ramet.models.tiny import tiny_tokenizer
    >>> template = PlainTemplate(tiny_tokenizer())
    >>> template.render([{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "5"}])
    '2+2=5'
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[Message], str] | None = None) -> None:
        self.tokenizer = tokenizer
        self.rewrites: Rewrites = "follow"
        self._write = write or _content
        self._decode = decoder_of(tokenizer)
        self._seams = Seams(self.render, Markers())

    def render(self, messages: Sequence[Message], tools: Schemas = ()) -> str:
        """Return the contents in a row."""
        return "".join(self._write(message) for message in messages)

    def encode(self, text: str, *, opening: bool) -> list[int]:
        """Return the ids of `text`; where it opens the row, with the special tokens that the tokenizer puts there."""
        ids = list(self.tokenizer(text, add_special_tokens=opening)["input_ids"])
        return ids or (_beginning(self.tokenizer) if opening else [])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._decode(ids)

    def seams(self, tools: Schemas = ()) -> Seams:
        """Return what is known by now of what is written behind a turn: the same object each time."""
        return self._seams


def _content(message: Message) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        raise DataError(f"a prompt of plain text takes content that is text: found {type(content).__name__}")
    return f"\n{content}\n" if message.get("role") == "tool" else content


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what an empty prompt is made of: a causal model needs something to start from."""
    if tokenizer.bos_token_id is None:
        raise DataError(
            "the prompt is empty, and the tokenizer has no beginning-of-text token",
            hint="give a prompt of at least one token",
        )
    return [int(tokenizer.bos_token_id)]


def _plain(message: Message) -> dict[str, Any]:
    """Return the message with its tool calls as templates take them."""
    plain = dict(message)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
    return plain


def _call(call: Any) -> Any:
    if not isinstance(call, ToolCall):
        return call
    named = {"name": call.name, "arguments": dict(call.arguments)}
    return {"type": "function", "function": named, **({"id": call.id} if call.id else {})}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}


def _with_text(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_text(call["function"])}
    if isinstance(call.get("arguments"), Mapping):
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return dict(call)
