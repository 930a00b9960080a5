"""The plain way to keep a conversation: write everything anew at each reply, and compare it with what there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ramet.chat import Template
from ramet.chat.behind import ids_behind, text_behind
from ramet.errors import DataError
from ramet.types import Kind, Message

Token = tuple[int, Kind]


class PlainConversation:
    """Pieces as lists of tokens and who wrote them, texts as one string; each reply costs the whole conversation."""

    def __init__(
        self, template: Template, messages: Sequence[Message], tools: Sequence[dict[str, object]] = ()
    ) -> None:
        self.template = template
        self.tools = tools
        self.settled: list[Message] = list(messages)
        self.text = template.render(messages, tools)
        self.pieces: list[list[Token]] = [[(token, Kind.PROMPT) for token in self.encode(self.text, None)]]
        self.ends = [(len(self.text), len(self.pieces[0]), True)]
        """After each part of the piece: characters, tokens, and whether the tokens say no more than the characters."""

    def encode(self, text: str, front: str | None) -> list[int]:
        if front is None:
            return self.template.encode(text, opening=True)
        return ids_behind(lambda some: self.template.encode(some, opening=False), text, front)

    def turn(
        self,
        tokens: Sequence[int],
        ended: bool,
        read: Callable[[str], Message] | None,
        reply: Sequence[Message],
    ) -> None:
        decode = self.template.decode
        before = [token for token, _ in self.pieces[-1]]
        content = text_behind(decode, before, tokens[:-1] if ended else tokens)
        end = text_behind(decode, before, tokens)[len(content) :] if ended else ""
        raw: Message = {"role": "assistant", "content": content}
        understood = raw if read is None else read(content)
        wholes = self.wholes([raw] if understood == raw else [raw, understood], reply)
        seen = self.text + content
        if len(wholes) == 2 and wholes[0][1].startswith(seen):
            rest = wholes[0][1][len(seen) :].removeprefix(end)
            if not wholes[1][1].endswith(rest):  # it writes what was returned in another way if it knows of the call
                wholes = wholes[1:]
        self.pieces[-1] += [(token, Kind.SAMPLED) for token in tokens]
        for form, whole in wholes:
            if whole.startswith(seen):
                written = whole.startswith(seen + end)
                self.text = seen + end if written else seen
                self.ends.append((len(self.text), len(self.pieces[-1]), written))
                front = end if written and end else self.text[-48:]
                rest = whole[len(self.text) :]
                self.pieces[-1] += [(token, Kind.ENVIRONMENT) for token in self.encode(rest, front)]
                self.settled += [form, *reply]
                self.text = whole
                self.ends.append((len(self.text), len(self.pieces[-1]), True))
                return
        self.ends.append((len(seen + end), len(self.pieces[-1]), True))
        form, whole = max(wholes, key=lambda pair: len(os.path.commonprefix([seen + end, pair[1]])))  # noqa: RUF071
        self.fork(seen + end, whole)
        self.settled += [form, *reply]

    def wholes(self, forms: Sequence[Message], reply: Sequence[Message]) -> list[tuple[Message, str]]:
        found, refused = [], None
        for form in forms:
            try:
                found.append((form, self.template.render([*self.settled, form, *reply], self.tools)))
            except DataError as error:
                refused = error
        if not found:
            assert refused is not None
            raise refused
        return found

    def fork(self, seen: str, whole: str) -> None:
        common = len(os.path.commonprefix([seen, whole]))  # noqa: RUF071
        kept: list[tuple[int, int, bool]] = []
        for end in self.ends:
            if end[0] > common or not end[2]:
                break
            kept.append(end)
        characters, tokens, _ = kept[-1] if kept else (0, 0, True)
        piece = [(token, Kind.PROMPT) for token, _ in self.pieces[-1][:tokens]]
        front = whole[:characters][-48:] if kept else None
        piece += [(token, Kind.PROMPT) for token in self.encode(whole[characters:], front)]
        self.pieces.append(piece)
        self.text = whole
        self.ends = [*kept, (len(whole), len(piece), True)]
