"""Where the episodes of a conversation's rows stand, and the one conversation that they go on with.

An episode's conversation is one object, which its last state goes on with at the cost of what is new. An earlier state
that is gone on with a second time gets another: what was said until then is said to it again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from ramet.chat import ChatTemplate, Conversation, PlainTemplate, Template
from ramet.chat.markers import Markers
from ramet.chat.seams import Seams
from ramet.chat.template import Rewrites, Schemas
from ramet.tasks.copies import own
from ramet.types import Episode, Message

Moves: TypeAlias = "tuple[Moves, Any, tuple[Message, ...]] | None"
"""What was said before, what the model said, and what came back; None before the first turn."""


class Reading(Protocol):
    """The `read_turn` of a toolbox."""

    def __call__(self, text: str, turn: int = 0) -> Message:
        """Return what a model wrote in a turn as a message, with the calls in it."""


@dataclass(slots=True, eq=False)
class Standing:
    """Where an episode stands between two turns: what a row has under "episode".

    `row` is its data row, `prompt` its first messages and `opening` their tokens; `state` is what the task's `begin`
    made, as it is now; `turns` counts the model's. Two are equal if the same was said in them.
    """

    row: Mapping[str, Any]
    prompt: Sequence[Message]
    rng: random.Random
    group: int
    member: int
    state: Any = None
    turns: int = 0
    moves: Moves = None
    trouble: Any = None
    opening: Sequence[int] = ()
    talk: Talk | None = None

    @property
    def bare(self) -> bool:
        """Whether the prompt is text with nothing around it: no chat template has a place for it."""
        return isinstance(self.row.get("prompt"), str) and len(self.prompt) == 1

    def then(self, said: Any, replies: Sequence[Message], episode: Episode, talk: Talk | None) -> Standing:
        """Return where the episode stands after a turn."""
        moves = (self.moves, said, tuple(replies))
        parts = (self.row, self.prompt, episode.rng, self.group, self.member, episode.state, episode.turns, moves)
        return Standing(*parts, None, self.opening, talk)

    def history(self) -> list[tuple[Any, tuple[Message, ...]]]:
        """Return what was said and what came back, turn by turn."""
        found, moves = [], self.moves
        while moves is not None:
            found.append(moves[1:])
            moves = moves[0]
        return found[::-1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Standing):
            return NotImplemented
        same = self.row == other.row and self.turns == other.turns and self.trouble == other.trouble
        return same and list(self.prompt) == list(other.prompt) and self.history() == other.history()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.row, list(self.prompt), self.rng, self.group, self.member, self.state, self.turns)
        return (_standing, (*parts, self.trouble, self.opening, self.history()))


def _standing(*parts: Any) -> Standing:
    """Make what was saved: without a conversation, which the next step begins again."""
    made = Standing(*parts[:7])
    made.trouble, made.opening, history = parts[7:]
    for said, replies in history:
        made.moves = (made.moves, said, tuple(replies))
    return made


class Talk:
    """What was said in one episode: messages, and a `Conversation` where a template writes them."""

    def __init__(self, talks: Talks, prompt: Sequence[Message], template: Template | None) -> None:
        self._talks, self.turns = talks, 0
        self._messages = list(prompt)
        self._lent: list[Message] = []
        self._talk = None if template is None else Conversation(template, prompt, talks.schemas)
        self._seen = (0, 0)

    @property
    def messages(self) -> list[Message]:
        """All messages so far."""
        return self._messages if self._talk is None else self._talk.messages

    def lent(self) -> list[Message]:
        """Return copies of all messages so far, each made once: what a task's functions do to them changes no other."""
        self._lent.extend(map(_copied, self.messages[len(self._lent) :]))
        return list(self._lent)

    @property
    def opening(self) -> list[int]:
        """What the first piece begins with."""
        return [] if self._talk is None else list(self._talk.piece.tokens)

    def take(self, said: Any, cut: bool = False) -> None:
        """Take what the model said: ids, or messages; `cut` says that a limit ended it."""
        talks, turn = self._talks, self.turns
        self.turns += 1
        if self._talk is None:
            self._messages.extend(said)
            last = said[-1] if said else {}
            if talks.read is not None and "tool_calls" not in last and isinstance(last.get("content"), str):
                self._messages[-1] = {**last, **talks.read(last["content"], turn)}
            return
        self._seen = (len(self._talk.pieces), len(self._talk.piece.tokens))
        ended = not cut and talks.ended(said)
        read = None if talks.read is None else partial(talks.read, turn=turn)
        self._talk.answer(said, [math.nan] * len(said), -1, ended=ended, read=read)

    def reply(self, messages: Sequence[Message]) -> None:
        """Take what came back."""
        if self._talk is None:
            self._messages.extend(messages)
        else:
            self._talk.reply(messages)

    def news(self) -> tuple[list[int] | None, list[int] | None]:
        """Return what was added to the row since the last turn was taken, or the whole row if it is written anew."""
        if self._talk is None:
            return None, None
        pieces, count = self._seen
        tokens = self._talk.piece.tokens
        return (tokens[count:], None) if len(self._talk.pieces) == pieces else (None, list(tokens))


class Talks:
    """How the conversations of an environment are held: in tokens, in text (a character is a token), or in messages.

    A turn ends with eos or one of `stop_ids`, which is no part of it; one that is text, such as a line break, is.
    """

    def __init__(self, mode: str, template: Template | None, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self.mode, self.tokenizer = mode, tokenizer
        self.template: Template | None = None if mode == "history" else template
        self.bare = self.template
        if isinstance(self.template, ChatTemplate):
            self.bare = PlainTemplate(self.template.tokenizer)
        if mode == "text":
            self.template, self.bare = (one and Characters(one) for one in (self.template, self.bare))
        self.ends: frozenset[int] = frozenset()
        if mode == "tokens":
            unseen = (token for token in stop_ids if not tokenizer.decode([token], skip_special_tokens=True))
            self.ends = frozenset((tokenizer.eos_token_id, *unseen))
        self.schemas: Schemas = ()
        self.read: Reading | None = None

    def shown(self, tokens: Sequence[int]) -> Any:
        """Return tokens as the environment holds them: as ids, or as text."""
        return "".join(map(chr, tokens)) if self.mode == "text" else list(tokens)

    @property
    def nothing(self) -> list[int] | None:
        """What a turn adds that adds nothing."""
        return None if self.mode == "history" else []

    def offer(self, schemas: Schemas, read: Reading) -> None:
        """Offer tools, calls of which `read` finds in what the model wrote in a turn."""
        self.schemas, self.read = schemas, read

    def begin(self, prompt: Sequence[Message], *, bare: bool = False) -> Talk:
        """Begin a conversation; `bare` says that its prompt is text that goes on as it is."""
        return Talk(self, prompt, self.bare if bare else self.template)

    def again(self, standing: Standing) -> Talk:
        """Begin a conversation and say all that was said in an episode."""
        talk = self.begin(standing.prompt, bare=standing.bare)
        for said, replies in standing.history():
            talk.take(said)
            if replies:
                talk.reply(replies)
        return talk

    def ended(self, said: Any) -> bool:
        """Say whether the last token of an answer ends the turn and is no part of what it says."""
        return self.mode == "tokens" and bool(said) and said[-1] in self.ends

    def completion(self, said: Any, episode: Episode) -> str:
        """Return the text of the last answer, without special tokens."""
        if self.mode == "tokens":
            return str(self.tokenizer.decode(said, skip_special_tokens=True))
        return "".join(map(chr, said)) if self.mode == "text" else episode.text

    def sampled(self, answers: Sequence[Any]) -> tuple[int, ...]:
        """Return all tokens of the answers; none where there are no tokens."""
        return tuple(token for one in answers for token in one) if self.mode == "tokens" else ()


def _copied(message: Message) -> Message:
    flat = all(type(value) is str for value in message.values())
    return {**message} if flat else own(message)


class Characters:
    """A template whose tokens are the characters of its text."""

    def __init__(self, template: Template) -> None:
        self.rewrites: Rewrites = template.rewrites
        if isinstance(template, ChatTemplate):  # with a memory of its own: what it knows of seams holds tokens
            template = ChatTemplate(template.tokenizer, template.options, rewrites=template.rewrites)
        self._template = template
        self._seams: dict[str, Seams] = {}

    def render(self, messages: Sequence[Message], tools: Schemas = ()) -> str:
        """Return what the template writes."""
        return self._template.render(messages, tools)

    def encode(self, text: str, *, opening: bool) -> list[int]:
        """Return the code points of `text`."""
        return [*map(ord, text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of code points."""
        return "".join(map(chr, ids))

    def seams(self, tools: Schemas = ()) -> Seams:
        """Return what is known by now of what the template writes behind a turn: the same object each time."""
        if isinstance(self._template, ChatTemplate):
            return self._template.seams(tools)
        key = repr(tools)
        if key not in self._seams:
            # What another template looks for in a text nobody knows here, so each reply is rendered with all before.
            markers = Markers(read=isinstance(self._template, PlainTemplate))
            self._seams[key] = Seams(lambda messages: self._template.render(messages, tools), markers)
        return self._seams[key]
