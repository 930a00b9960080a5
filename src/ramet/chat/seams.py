"""What a template writes behind a model's turn: found by probing it, and used only where that was proved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ramet.chat.behind import BROKEN, Decode, ids_behind, text_behind
from ramet.chat.markers import Markers, Signature
from ramet.errors import DataError
from ramet.types import Message

Render = Callable[[Sequence[Message]], str]
"""Messages to the text in front of the model's next turn."""


class Encode(Protocol):
    """The `encode` of a template."""

    def __call__(self, text: str, *, opening: bool) -> list[int]:
        """Return the ids of `text`."""


RECENT = 4
"""How many rounds of a history are told apart by their order; of older ones only which there were."""
ROOM = 20_000
"""How many entries a memory holds before it is emptied."""
FEW = 512
"""How many prompts are held."""

SYSTEM: Message = {"role": "system", "content": "Keep to the rules."}
SENTINEL = "Seventeen, and a heron."
"""What no template does anything with."""
FIRST: Message = {"role": "user", "content": "Where to?"}
OTHER: Message = {"role": "user", "content": "What is the second one of them"}
CONTEXTS = ((FIRST,), (OTHER,), (SYSTEM, FIRST))
"""What may stand in front of a turn: a seam must not depend on it."""


Round = int
"""The number of a kind of round: of what a template can tell of a turn, its end token, and the reply to it."""


@dataclass(frozen=True, slots=True)
class History:
    """What a template can tell of the messages in front of a turn: the number of the prompt's kind, and the rounds."""

    prompt: int
    older: frozenset[Round] = frozenset()
    recent: tuple[Round, ...] = ()
    rewritten: bool = False

    def then(self, one: Round) -> History:
        """Return the history with one more round."""
        if len(self.recent) < RECENT:
            return History(self.prompt, self.older, (*self.recent, one), self.rewritten)
        return History(self.prompt, self.older | {self.recent[0]}, (*self.recent[1:], one), self.rewritten)

    def written_anew(self) -> History:
        """Return the same history where a template has rewritten it; the order of the last rounds still tells."""
        return History(self.prompt, self.older, self.recent, True)


@dataclass(slots=True)
class _Seam:
    text: str
    tried: bool = False
    confirmed: bool = False
    """Whether turns of other contents have this seam, which was tried when it came a second time."""


class Seams:
    """The memory of one template with one set of tools: where it only appends, and what.

    A seam is what stands behind the content of a turn: the end of the turn, the reply, and the opening of the next
    turn. Rendering a short conversation tells it, if it does not depend on what stands further in front. That is
    believed of a round (a turn and the reply to it, as far as the template can tell them from others) once

    - it held behind each of `CONTEXTS` and behind one and two such rounds, with and without a system prompt;
    - it held in a real conversation with this history, compared as a whole with what the template writes.

    The second is asked anew for each number of messages. Where either fails once, such rounds are rendered whole ever
    after. What a template can tell is what its source compares with (`Markers`): no source, no belief.
    """

    def __init__(self, render: Render, markers: Markers) -> None:
        self._render = render
        self._markers = markers
        self._base: tuple[Message, ...] | None = None
        self._opened = ""
        self._count = itertools.count()
        self._numbers: dict[Signature, int] = {}
        self._kinds: dict[Any, int] = {}
        self._probed: dict[tuple[Round, bool], bool] = {}
        self._held: dict[tuple[History, Round], bool | None] = {}
        """Whether the round appends behind this history: as raw (True), as understood (False), or not (None)."""
        self._counts: set[tuple[History, Round, Signature]] = set()
        self._seams: dict[Any, _Seam] = {}
        self._shown: set[Any] = set()
        self._fronts: dict[str, list[int]] = {}
        self._windows: dict[tuple[int, ...], str] = {}
        self._ends: dict[int, str] = {}
        self._openings: dict[Any, tuple[str, list[int], History]] = {}
        self._ids: dict[tuple[str, str], list[int]] = {}

    def history(self, prompt: Sequence[Message]) -> History:
        """Return the history that is a prompt."""
        return History(self._number(tuple(self._kind(message) for message in prompt)))

    def round(self, raw: Message, turn: Message, end: str, reply: Sequence[Message]) -> Round:
        """Return what can be told of a round: `raw` is the turn as written, `turn` as it was understood."""
        written = self._kind(raw)
        understood = written if turn is raw else self._kind(turn)
        return self._number((written, understood, end, *(self._kind(message) for message in reply)))

    def _kind(self, message: Message) -> int:
        """Return the number of what can be told of a message."""
        try:
            key = tuple(message.items())
            known = self._kinds.get(key)
        except TypeError:  # something in it has no hash
            return self._number(self._markers.message(message))
        if known is None:
            if len(self._kinds) >= ROOM:
                self._kinds.clear()
            known = self._kinds[key] = self._number(self._markers.message(message))
        return known

    def _number(self, thing: Signature) -> int:
        known = self._numbers.get(thing)
        if known is None:
            if len(self._numbers) >= ROOM:
                self._numbers.clear()  # no number is ever given twice
            known = self._numbers[thing] = next(self._count)
        return known

    def form(self, history: History, one: Round, messages: int) -> bool | None:
        """Return whether the round is known to append as raw (True) or as understood (False); None: not known."""
        key = (history, one)
        if self._held.get(key) is None or (*key, self._markers.count(messages)) not in self._counts:
            return None
        return self._held[key]

    def behind(self, one: Round, turn: Message, content: str, reply: Sequence[Message]) -> str | None:
        """Return what stands behind `content`, which is how `turn` begins; None where this can not be told."""
        key = None
        if _is_flat(turn, reply) and self._markers.plain(content) and not self._markers.clock:
            key = (one, tuple(turn), tuple(tuple(message.items()) for message in reply))
        seam = self._seams.get(key)
        if seam is not None and seam.confirmed:
            return seam.text
        text = self._short(turn, content, reply)
        if key is not None and text is not None:
            self._remember(key, seam, text, turn, content, reply)
        return text

    def ids(self, encode: Encode, text: str, front: str) -> list[int]:
        """Return the ids of `text` behind `front`, which are worked out once."""
        known = self._ids.get((text, front))
        if known is None:

            def once(some: str) -> list[int]:
                if some != front:
                    return encode(some, opening=False)
                if front not in self._fronts:
                    if len(self._fronts) >= FEW:
                        self._fronts.clear()
                    self._fronts[front] = encode(front, opening=False)
                return self._fronts[front]

            known = ids_behind(once, text, front)
            if len(self._ids) > ROOM:
                self._ids.clear()
            self._ids[text, front] = known
        return known

    def text(self, decode: Decode, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that `tokens` add behind `before`."""
        return text_behind(decode, before, tokens, self._windows)

    def end(self, decode: Decode, token: int) -> str:
        """Return the text of a token that means the same behind any other; "" if it is no such token."""
        if token not in self._ends:
            text = decode([token])
            self._ends[token] = text if decode([token, token]) == 2 * text and BROKEN not in text else ""
        return self._ends[token]

    def opening(self, prompt: Sequence[Message], encode: Encode) -> tuple[str, list[int], History]:
        """Return the text of a prompt, its ids and the history that it is, which are made once for a group."""
        if self._markers.clock:
            return self._open_prompt(prompt, encode)
        try:
            key = tuple(tuple(message.items()) for message in prompt)
            known = self._openings.get(key)
        except TypeError:  # something in a message has no hash
            return self._open_prompt(prompt, encode)
        if known is None:
            if len(self._openings) >= FEW:
                self._openings.clear()
            known = self._openings[key] = self._open_prompt(prompt, encode)
        return known

    def _open_prompt(self, prompt: Sequence[Message], encode: Encode) -> tuple[str, list[int], History]:
        whole = self._render(prompt)
        self.check(prompt)
        return whole, encode(whole, opening=True), self.history(prompt)

    def note(self, history: History, one: Round, messages: int, raw: bool | None) -> None:
        """Take to heart how a round was written in a whole conversation: as raw, as understood, or not appended.

        The caller has compared the seam as well; where it was another than `behind` says, `raw` is None.
        """
        if len(self._held) > ROOM or len(self._counts) > ROOM:
            self._held.clear()
            self._counts.clear()
        key = (history, one)
        if key in self._held and self._held[key] != raw:
            raw = None
        self._held[key] = raw
        if raw is not None:
            self._counts.add((*key, self._markers.count(messages)))

    def proved(self, one: Round, turn: Message, content: str, reply: Sequence[Message], raw: bool) -> bool:
        """Return whether the round appends the same text behind other histories, rendering them the first time."""
        key = (one, raw)
        if key not in self._probed:
            if len(self._probed) > ROOM:
                self._probed.clear()
            self._probed[key] = self._markers.read and self._probe(turn, content, reply)
        return self._probed[key]

    def check(self, messages: Sequence[Message], first: int = 0) -> None:
        """Raise `DataError` where the template says nothing of one of the messages from `first` on.

        A plain content is put in the place of the message's own, once for each role and what stands in front of it.
        """
        for index in range(first, len(messages)):
            message, before = messages[index], messages[index - 1] if index else {}
            place = (message["role"], before.get("role"), bool(before.get("tool_calls")))
            if message["role"] == "assistant" or not message.get("content") or place in self._shown:
                continue
            try:
                whole = self._render([*messages[:index], {**message, "content": SENTINEL}, *messages[index + 1 :]])
            except DataError:  # of such contents nothing can be told
                continue
            if SENTINEL.casefold() not in whole.casefold():
                raise DataError(
                    f"the chat template leaves out messages of the role {message['role']!r} here: "
                    f"the model would not see {message['content']!r:.80}",
                    hint="say it in a message of another role, or take a model whose template knows of it",
                )
            self._shown.add(place)

    def _probe(self, turn: Message, content: str, reply: Sequence[Message]) -> bool:
        seam = self._short(turn, content, reply)
        if seam is None:
            return False
        tried = 0
        for context in CONTEXTS:
            history: list[Message] = list(context)
            for _ in range(3):
                try:
                    front = self._render(history)
                except DataError:
                    break  # no history that this template can have
                tried += 1
                history += [turn, *reply]
                try:
                    if self._render(history) != front + content + seam:
                        return False
                except DataError:
                    return False
        return tried > 0

    def _short(self, turn: Message, content: str, reply: Sequence[Message]) -> str | None:
        if self._base is None:
            self._base, self._opened = self._open()
        try:
            whole = self._render([*self._base, turn, *reply])
        except DataError:
            return None
        start = self._opened + content
        return whole[len(start) :] if whole.startswith(start) else None

    def _open(self) -> tuple[tuple[Message, ...], str]:
        for context in CONTEXTS:
            try:
                return context, self._render(context)
            except DataError:
                continue
        return (), ""

    def _remember(
        self, key: Any, seam: _Seam | None, text: str, turn: Message, content: str, reply: Sequence[Message]
    ) -> None:
        """Keep a seam; believe in it when it comes a second time, and turns of other contents have it as well."""
        if seam is not None and not seam.tried:
            seam.tried = True
            like = self._markers.text(content)
            others = [other for other in (content + "x", "x" + content, SENTINEL) if self._markers.text(other) == like]
            seams = [self._short({**turn, "content": other}, other, reply) for other in others]
            seam.confirmed = len(others) > 1 and turn.get("content") == content and {*seams} == {text} == {seam.text}
        elif seam is None:
            if len(self._seams) > ROOM:
                self._seams.clear()
            self._seams[key] = _Seam(text)


def _is_flat(turn: Message, reply: Sequence[Message]) -> bool:
    """Return whether all is text: a seam behind structured calls may hold what is in them."""
    return all(isinstance(value, str) for message in (turn, *reply) for value in message.values())
