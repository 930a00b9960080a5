"""What a conversation makes of each template, compared at each turn with the template's own rendering."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chat.conformance import ANSWER, CALLS, REPLY, TOOLS, Family, Turn, say, tokenizer_of

from ramet.chat import ChatTemplate, Conversation
from ramet.chat.behind import ids_behind
from ramet.chat.seams import SENTINEL
from ramet.errors import DataError
from ramet.types import Message

ROUNDS = 4
Scenario = tuple[str, list[Message], list[dict[str, Any]], list[Turn]]
"""Name, prompt, tools and turns of a conversation."""
EQUALITIES = ("text and ids", "text", "other", "calls left out", "refused")
"""How what is held may compare with what a template writes, from the best to the worst."""


def scenarios(family: Family) -> Iterator[Scenario]:
    """Yield each shape of conversation."""
    user: list[Message] = [{"role": "user", "content": "Where to?"}]
    system: list[Message] = [{"role": "system", "content": "Answer in one word."}, *user]
    thought = "Two and two."
    plain, thinking = say(family, ANSWER), say(family, ANSWER, thought=thought)
    call, both = say(family, "", calls=CALLS[:1]), say(family, "", calls=CALLS)
    all_of_it = say(family, "", thought=thought, calls=CALLS)
    yield "plain", user, [], [plain] * ROUNDS
    yield "system", system, [], [plain] * ROUNDS
    yield "edges", user, [], [say(family, f"\n {ANSWER} \n")] * ROUNDS
    yield "empty", user, [], [say(family, "")] * ROUNDS
    yield "cut", user, [], [say(family, "It is fo", ended=False)] * ROUNDS
    yield "thinking", user, [], [thinking] * ROUNDS
    yield "call", user, TOOLS, [call, plain] * (ROUNDS // 2)
    yield "parallel", user, TOOLS, [both, plain] * (ROUNDS // 2)
    yield "odd calls", user, TOOLS, [say(family, "", calls=CALLS, odd=True), plain] * (ROUNDS // 2)
    yield "all of it", system, TOOLS, [all_of_it, thinking] * (ROUNDS // 2)


@dataclass(frozen=True)
class Found:
    """What became of a conversation.

    `forks` counts the replies that rewrote the past. `equal` is how all that was held after each reply compares with
    the template's own rendering of the same turns, `structured` with its rendering of them as they were understood,
    calls as calls: the worst of all turns. `seam` is what stood behind the first answer, `unwritten` says whether there
    is an end token that the template does not write (and that is left out of the comparison).
    """

    forks: int
    equal: str
    structured: str
    seam: str
    unwritten: bool


def rendered(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any], *, tokenize: bool) -> Any:
    """Return what the tokenizer's `apply_chat_template` makes of messages, arguments as text where it must be so."""
    options: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True, **template.options}
    options |= {"tokenize": True, "return_dict": False} if tokenize else {"tokenize": False}
    try:
        return template.tokenizer.apply_chat_template([dict(message) for message in messages], **options)
    except Exception:
        if not any(message.get("tool_calls") for message in messages):
            raise
        return template.tokenizer.apply_chat_template([_with_text(message) for message in messages], **options)


def _with_text(message: Message) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def held(talk: Conversation) -> list[int]:
    """Return the tokens of the piece without end tokens that the template does not write."""
    extra = {segment.tokens - 1 for segment in talk._segments if not segment.faithful}
    return [token for at, token in enumerate(talk.piece.tokens) if at not in extra]


def compared(talk: Conversation, messages: Sequence[Message]) -> str:
    """Return which of `EQUALITIES` is that of a conversation and the template's own rendering of messages."""
    template = talk.template
    assert isinstance(template, ChatTemplate)
    try:
        text = rendered(template, messages, talk.tools, tokenize=False)
    except Exception:  # a template may raise anything
        return "refused"
    if talk.text != text:
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        same = bare != list(messages) and rendered(template, bare, talk.tools, tokenize=False) == text
        return "calls left out" if same else "other"
    return "text and ids" if held(talk) == rendered(template, messages, talk.tools, tokenize=True) else "text"


def play(template: ChatTemplate, family: Family, scenario: Scenario) -> tuple[Conversation, Found]:
    """Play the turns, each of its text's own tokens, and compare after each reply."""
    _, prompt, tools, turns = scenario
    talk = Conversation(template, prompt, tools)
    seam, unwritten = "", False
    equal, structured = compared(talk, prompt), EQUALITIES[0]
    for turn in turns:
        tokens = ids_behind(lambda text: template.encode(text, opening=False), turn.text, talk._front())
        if turn.ended:
            end = template.tokenizer.convert_tokens_to_ids(family.end_of(str(turn.reply[0]["role"])))
            assert isinstance(end, int)
            tokens = [*tokens, end]
        before = len(talk.text)
        talk.answer(tokens, [-1.0] * len(tokens), 0, ended=turn.ended, read=functools.partial(_meant, turn))
        talk.reply(turn.reply)
        unwritten = unwritten or any(not segment.faithful for segment in talk._segments)
        equal = max(equal, compared(talk, talk._settled), key=EQUALITIES.index)
        structured = max(structured, compared(talk, talk.messages), key=EQUALITIES.index)
        if not seam and not talk.forks:
            seam = talk.text[before + len(turn.text) :]
    return talk, Found(len(talk.forks), equal, structured, seam, unwritten)


def _meant(turn: Turn, text: str) -> Message:
    return turn.message


@functools.cache
def measure(family: Family, kind: str = "bytes") -> dict[str, Found | str]:
    """Play every scenario; what a template refuses is the text of its refusal."""
    found: dict[str, Found | str] = {}
    template = ChatTemplate(tokenizer_of(family, kind), family.options)
    for scenario in scenarios(family):
        try:
            found[scenario[0]] = play(template, family, scenario)[1]
        except DataError as error:
            found[scenario[0]] = str(error)
    return found


def seam_of(family: Family) -> tuple[str, str]:
    """Return what the template itself writes between an answer and a reply, and behind the reply."""
    template = ChatTemplate(tokenizer_of(family), family.options)
    turns = [
        {"role": "user", "content": "Where to?"},
        {"role": "assistant", "content": SENTINEL},
        {"role": "user", "content": REPLY},
    ]
    behind = rendered(template, turns, (), tokenize=False).split(SENTINEL)[-1]
    between, opening = behind.split(REPLY)
    return between, opening
