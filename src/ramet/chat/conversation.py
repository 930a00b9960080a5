"""One conversation as tokens: a buffer that is only ever appended to, or a new piece where a template rewrites it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramet.chat.behind import same_beginning, splits_an_added_token
from ramet.chat.pieces import Fork, Parting, Piece
from ramet.chat.seams import SENTINEL, History, Round
from ramet.chat.template import Schemas, Template
from ramet.errors import DataError
from ramet.types import Kind, Message

TAIL = 48
"""How many characters in front of a text it is encoded behind."""
SHOWN = 80
"""How many characters of a difference are shown."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a piece that was appended at once: where it ends, in tokens and in characters of the piece.

    `faithful` is False where its tokens hold an end that the template does not write.
    """

    tokens: int
    text: int
    faithful: bool = True


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of the model's that was not replied to yet: as it was written, as it was understood, and its end token."""

    raw: Message
    message: Message
    end: str


class Conversation:
    """Messages, and the tokens of what a model saw and wrote of them.

    Made of a prompt; then `answer` and `reply` take turns. What was sampled is kept as it is. A reply adds what the
    template writes behind it: the end of the turn where the model did not write it, the messages, and the opening of
    the next turn. Where the template writes what came before in another way by then, the piece ends, and another
    begins: its prompt is the conversation as the template writes it now, of which whatever did not change keeps its
    tokens (`ChatTemplate` has another way). `pieces` are all of them, `piece` the last, `forks` where they parted.

    An end token that the template does not write stays where it was sampled. `tools` are the schemas that are offered;
    they are part of the prompt.

    >>> from ramet.chat.template import PlainTemplate
    >>> from ramet.models.tiny import tiny_tokenizer
    >>> talk = Conversation(PlainTemplate(tiny_tokenizer()), [{"role": "user", "content": "1+1="}])
    >>> talk.piece.tokens
    [1, 5, 76, 5, 84]
    >>> talk.answer([6], [-0.5], version=0)["content"]
    '2'
    >>> talk.reply([{"role": "user", "content": "!"}])
    >>> talk.piece.tokens, [kind.name for kind in talk.piece.kinds[-2:]]
    ([1, 5, 76, 5, 84, 6, 66], ['SAMPLED', 'ENVIRONMENT'])
    """

    def __init__(self, template: Template, messages: Sequence[Message], tools: Schemas = ()) -> None:
        self.template = template
        self.tools = tuple(tools)
        self.messages: list[Message] = list(messages)
        self.pieces: list[Piece] = []
        self.forks: list[Fork] = []
        self._seams = template.seams(self.tools)
        whole, ids, self._history = self._seams.opening(self.messages, template.encode)
        self._settled: list[Message] = list(messages)
        """The messages in front of the last turn, in the form in which the piece holds them."""
        self._turn: _Turn | None = None
        self._segments: list[_Segment] = []
        self._texts: list[str] = []
        self._begin(whole, Piece(), ids)

    @property
    def piece(self) -> Piece:
        """The tokens so far, as the model sees them."""
        return self.pieces[-1]

    @property
    def text(self) -> str:
        """The text of the piece as the template writes it: without ends that the template does not write."""
        return "".join(self._texts)

    def copy(self) -> Conversation:
        """Return a conversation that goes on from here, independent of this one."""
        other = copy.copy(self)
        other.messages = list(self.messages)
        other.pieces = [piece.copy() for piece in self.pieces]
        other.forks = list(self.forks)
        other._settled = list(self._settled)
        other._segments = list(self._segments)
        other._texts = list(self._texts)
        return other

    def answer(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        version: int,
        *,
        ended: bool = False,
        read: Callable[[str], Message] | None = None,
    ) -> Message:
        """Append what the model sampled, as it is, and return it as a message.

        `ended` says that the last token ends the turn, and is no part of what the message says. `read` turns the text
        into a message that says more than its content, such as the calls in it. Raises `ForestError` for another number
        of log-probs than of tokens, and `DataError` where the last turn was the model's already.
        """
        if self._turn is not None:
            raise DataError("the last turn is the model's already", hint="reply to it first: reply([]) adds no message")
        if ended and not tokens:
            raise DataError("a turn that ended has a token that ended it: found no tokens")
        content, end = self._read(tokens, ended)
        raw: Message = {"role": "assistant", "content": content}
        message = raw if read is None else read(content)
        self.piece.extend(tokens, Kind.SAMPLED, log_probs, version)
        self._close_segment(content + end)
        self._turn = _Turn(raw, raw if message == raw else message, end)
        self.messages.append(message)
        return message

    def reply(self, messages: Sequence[Message]) -> None:
        """Append messages of the environment, and what the template writes around them and in front of the next turn.

        Raises `DataError` for messages that the template refuses; the conversation is as before then.
        """
        turn = self._turn
        if turn is None:
            self._prolong(messages)
            return
        one = self._seams.round(turn.raw, turn.message, turn.end, messages)
        raw = self._seams.form(self._history, one, len(self.messages) + len(messages))
        if raw is not None:
            form = turn.raw if raw else turn.message
            seam = self._seams.behind(one, form, turn.raw["content"], messages)
            if seam is not None:
                self._append_seam(turn, seam)
                self._settle(form, messages, self._history.then(one))
                return
        self._reply_whole(turn, messages, one)

    def verify(self) -> Parting | None:
        """Compare the piece with the template's own rendering of the messages; return where they part, or None.

        A turn that was not replied to yet is left out, and so are end tokens that the template does not write. Ids may
        part where texts do not: a model need not write a text in the tokens that a tokenizer would.
        """
        segments = self._segments if self._turn is None else self._segments[:-1]
        held = self.text[: segments[-1].text]
        whole = self.template.render(self._settled, self.tools)
        if held != whole:
            return _parting(held, whole)
        extra = {segment.tokens - 1 for segment in segments if not segment.faithful}
        ours = [token for i, token in enumerate(self.piece.tokens[: segments[-1].tokens]) if i not in extra]
        theirs = self.template.encode(whole, opening=True)
        if ours == theirs:
            return None
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        decode = self.template.decode
        front = len(decode(ours[:same]))
        return Parting(front, decode(ours[same:])[:SHOWN], decode(theirs[same:])[:SHOWN], same)

    def _reply_whole(self, turn: _Turn, messages: Sequence[Message], one: Round) -> None:
        """Append a reply by rendering everything, and remember whether rendering a little would have told the same."""
        written = self._written(turn, messages)
        for form, whole in written:
            seam = self._seam_of(turn, whole)
            if seam is None:
                continue
            raw: bool | None = form is turn.raw
            content = turn.raw["content"]
            if not (
                self._seams.proved(one, form, content, messages, form is turn.raw)
                and self._seams.behind(one, form, content, messages) == seam
            ):
                raw = None
            self._seams.note(self._history, one, len(self.messages) + len(messages), raw)
            self._append_seam(turn, seam)
            self._settle(form, messages, self._history.then(one))
            return
        self._seams.note(self._history, one, len(self.messages) + len(messages), None)
        known = self.text
        form, whole = max(written, key=lambda pair: same_beginning(known, pair[1]))
        kept = self._seam_behind_sentinel(turn, messages) if self.template.rewrites == "keep" else None
        parting = _parting(known, whole)
        fork = Fork(len(self.messages), parting.character, parting.seen, parting.written, kept is not None)
        if kept is None:
            self.forks.append(fork)
            self._fork(whole, self.piece)
        else:
            if not any(other.kept and other.character == fork.character for other in self.forks):
                self.forks.append(fork)
            self._append_seam(turn, kept)
        self._settle(form, messages, self._history.then(one).written_anew())

    def _written(self, turn: _Turn, messages: Sequence[Message]) -> list[tuple[Message, str]]:
        """Return how the template writes everything with the turn as raw, and as understood: what it does not refuse.

        A template that knows of no calls may write what they returned in another way: then the raw form is left out.
        """
        found: list[tuple[Message, str]] = []
        refused: DataError | None = None
        for form in (turn.raw,) if turn.message is turn.raw else (turn.raw, turn.message):
            try:
                view = [*self._settled, form, *messages]
                whole = self.template.render(view, self.tools)
                self._seams.check(view, len(view) - len(messages))
            except DataError as error:
                refused = error
            else:
                found.append((form, whole))
        if not found:
            assert refused is not None
            raise refused
        if len(found) == 2:
            seam = self._seam_of(turn, found[0][1])
            if seam is not None and not found[1][1].endswith(seam.removeprefix(turn.end)):
                return found[1:]
        return found

    def _seam_of(self, turn: _Turn, whole: str) -> str | None:
        """Return what stands in `whole` behind the content of the turn; None where it does not begin with the piece.

        Nor does it where the two are alike up to a place inside a token such as `<think>`, by accident.
        """
        known = self.text
        known = known[: len(known) - len(turn.end)]
        if not whole.startswith(known) or splits_an_added_token(self.template, known, whole[len(known) :]):
            return None
        return whole[len(known) :]

    def _seam_behind_sentinel(self, turn: _Turn, messages: Sequence[Message]) -> str | None:
        """Return what the template writes behind the turn if it does nothing with it; None where that is refused."""
        sentinel, told = SENTINEL, repr([self._settled, messages])
        while sentinel in told:
            sentinel += " " + SENTINEL
        turns = [*self._settled, {"role": "assistant", "content": sentinel}, *messages]
        try:
            _, found, seam = self.template.render(turns, self.tools).rpartition(sentinel)
        except DataError:
            return None
        return seam if found else None

    def _settle(self, form: Message, messages: Sequence[Message], history: History) -> None:
        self._settled += [form, *messages]
        self.messages.extend(messages)
        self._history = history
        self._turn = None

    def _prolong(self, messages: Sequence[Message]) -> None:
        """Take more messages into the prompt, before the model said anything to it."""
        view = [*self._settled, *messages]
        whole = self.template.render(view, self.tools)
        self._seams.check(view, len(view) - len(messages))
        old = self.piece
        if Kind.SAMPLED in old.kinds:
            parting = _parting(self.text, whole)
            self.forks.append(Fork(len(self.messages), parting.character, parting.seen, parting.written))
        else:
            self.pieces.pop()
        self._fork(whole, old)
        self._settled = view
        self.messages.extend(messages)
        self._history = self._seams.history(self._settled).written_anew()

    def _append_seam(self, turn: _Turn, seam: str) -> None:
        """Append what stands behind the content of the turn; the model may have written the beginning of it."""
        if not seam.startswith(turn.end):  # the end stays where it is, and what follows is encoded as if it did not
            last = self._segments[-1]
            self._segments[-1] = _Segment(last.tokens, last.text - len(turn.end), faithful=False)
            self._texts[-1] = self._texts[-1][: len(self._texts[-1]) - len(turn.end)]
            front = self._front()
        else:
            front = turn.end or self._front()
            seam = seam[len(turn.end) :]
        self.piece.extend(self._seams.ids(self.template.encode, seam, front), Kind.ENVIRONMENT)
        self._close_segment(seam)

    def _front(self) -> str:
        """Return the end of the text, enough of it to encode something behind it."""
        front = ""
        for text in reversed(self._texts):
            front = text[-TAIL:] + front
            if len(front) >= TAIL:
                break
        return front[-TAIL:]

    def _fork(self, whole: str, old: Piece) -> None:
        """Begin a piece that says `whole`; the segments in front of the first difference keep their tokens."""
        common = same_beginning(self.text, whole)
        same = 0
        for segment in self._segments:
            if segment.text > common or not segment.faithful:
                break
            same += 1
        while same and splits_an_added_token(
            self.template, whole[: self._segments[same - 1].text], whole[self._segments[same - 1].text :]
        ):
            same -= 1
        piece = Piece()
        if same:
            piece.extend(old.tokens[: self._segments[same - 1].tokens], Kind.PROMPT)
        del self._segments[same:], self._texts[same:]
        self._begin(whole, piece)

    def _begin(self, whole: str, piece: Piece, ids: list[int] | None = None) -> None:
        """Begin a piece that says `whole`, of which `piece` and the segments that there are hold the beginning."""
        start = self._segments[-1].text if self._segments else 0
        rest = whole[start:]
        encode = self.template.encode
        if ids is None:
            ids = self._seams.ids(encode, rest, self._front()) if start else encode(rest, opening=True)
        piece.extend(ids, Kind.PROMPT)
        self.pieces.append(piece)
        self._close_segment(rest)

    def _close_segment(self, text: str) -> None:
        start = self._segments[-1].text if self._segments else 0
        self._texts.append(text)
        self._segments.append(_Segment(len(self.piece.tokens), start + len(text)))

    def _read(self, tokens: Sequence[int], ended: bool) -> tuple[str, str]:
        """Return what tokens of the model's say, and the text of the one that ended the turn, or ""."""
        seams, decode, before = self._seams, self.template.decode, self.piece.tokens
        whole = seams.text(decode, before, tokens)
        if not ended:
            return whole, ""
        end = seams.end(decode, tokens[-1])
        if end and whole.endswith(end):
            return whole[: len(whole) - len(end)], end
        content = seams.text(decode, before, tokens[:-1])
        return content, whole[len(content) :] if whole.startswith(content) else decode(tokens[-1:])


def _parting(seen: str, written: str) -> Parting:
    same = same_beginning(seen, written)
    return Parting(same, seen[same:][:SHOWN], written[same:][:SHOWN])
