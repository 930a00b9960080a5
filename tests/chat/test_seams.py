"""What a template writes behind a turn is found by probing it; templates that depend on more are found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.chat.conformance import FOLDER, TOOLS
from tests.chat.oracle import PlainConversation
from tests.chat.vocabularies import vocabulary

from ramet.chat import ChatTemplate, Conversation, PlainTemplate
from ramet.chat.markers import Markers, markers_of
from ramet.errors import DataError
from ramet.models.tiny import tiny_tokenizer
from ramet.types import Kind, Message

USER: list[Message] = [{"role": "user", "content": "Where to?"}]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role ~ '\n' }}{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)
END = "<|im_end|>"


class Counted(ChatTemplate):
    """A template that counts how many messages it was asked to write."""

    written = 0

    def render(self, messages: Sequence[Message], tools: Any = ()) -> str:
        self.written += len(messages)
        return super().render(messages, tools)


def template(source: str, **options: Any) -> Counted:
    tokenizer = vocabulary("bytes", ["<|im_start|>", END], "<s>", "</s>")
    tokenizer.chat_template = source
    return Counted(tokenizer, options)


def say(talk: Conversation, text: str, reply: Sequence[Message], plain: PlainConversation | None = None) -> None:
    tokens = talk.template.encode(text + END, opening=False)
    talk.answer(tokens, [-1.0] * len(tokens), 0, ended=True)
    talk.reply(reply)
    if plain is not None:
        plain.turn(tokens, True, None, reply)


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def test_a_turn_is_written_with_a_little_around_it_once_its_seam_is_known() -> None:
    chat = template(PLAIN)
    for _ in range(2):
        talk = Conversation(chat, USER)
        for turn in range(40):
            say(talk, f"answer {turn}", user(f"hint {turn}"))
    chat.written = 0
    talk = Conversation(chat, USER)
    for turn in range(40):
        say(talk, f"other {turn}", user(f"word {turn}"))
    assert chat.written == 40 * 3  # the prompt is known
    assert talk.verify() is None
    chat.written = 0
    talk = Conversation(chat, USER)
    for turn in range(40):  # what was replied before, behind another answer
        say(talk, f"third {turn}", user(f"hint {turn}"))
    assert chat.written == 0
    assert talk.verify() is None


def test_a_long_conversation_is_compared_as_a_whole_ever_more_rarely() -> None:
    chat = template(PLAIN)
    talk = Conversation(chat, USER)
    for turn in range(200):
        say(talk, f"answer {turn}", user(f"hint {turn}"))
    assert chat.written < 200 * 3 + 40 * 64 + 4 * 400 + 200
    assert talk.verify() is None
    assert talk.forks == []


WHOLE_HISTORY = {
    "counts the messages": "<all {{ messages | length }}>" + PLAIN,
    "says how many there are in front of the opening": PLAIN.replace(
        "assistant{{", "assistant {{ messages | length }}{{"
    ),
    "numbers the turns": PLAIN.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}"),
    "says the first question again": PLAIN + "(first: {{ messages[0].content }})",
    "says the first question behind each later one": PLAIN.replace(
        "<|im_end|>", "{{ messages[0].content if m.role == 'user' and not loop.first }}<|im_end|>"
    ),
    "says the last question first": "ns.q",
    "writes the last question alone in capitals": PLAIN.replace(
        "{{ m.content }}", "{{ m.content | upper if loop.last else m.content }}"
    ),
    "keeps the last five messages": PLAIN.replace("in messages", "in messages[-5:]"),
    "forgets all when there are more than 20": PLAIN.replace(
        "in messages", "in (messages if messages | length <= 20 else messages[-1:])"
    ),
    "has something to say at the 70th": PLAIN.replace(
        "{% for", "{% if messages | length > 70 %}long!{% endif %}{% for", 1
    ),
    "says every other turn another opening": PLAIN + "{{ '!' if messages | length % 4 == 1 else '?' }}",
    "trims all but the last": PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | trim }}"),
    "writes long answers short": PLAIN.replace(
        "{{ m.content }}", "{{ m.content[:9] if m.content | length > 9 and m.role == 'assistant' else m.content }}"
    ),
    "says how long the answer was": PLAIN.replace(
        "<|im_end|>", "{{ m.content | length if m.role == 'assistant' }}<|im_end|>"
    ),
    "looks for a word": PLAIN + "{% if 'lower' in messages[-1].content %}go down{% endif %}",
    "looks for a word in the prompt": PLAIN + "{% if 'Where' in messages[0].content %}go there{% endif %}",
    "says the answer before the last again": PLAIN + "{{ messages[-4].content if messages | length > 4 }}",
    "turns thinking out when a question follows": PLAIN.replace(
        "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    ),
}
SAYINGS = ["one", "two ", "a longer answer", "<think>no</think>four", "lower", "five", "</think>", "seven\n", "user"]


@pytest.mark.parametrize("name", WHOLE_HISTORY)
def test_a_template_that_looks_at_more_is_found_out(name: str) -> None:
    source = WHOLE_HISTORY[name]
    if source == "ns.q":
        asked = "{% for m in messages if m.role == 'user' %}{% set ns.q = m.content %}{% endfor %}"
        source = "{% set ns = namespace(q='') %}" + asked + "{{ ns.q }}" + PLAIN
    chat, other = template(source), template(source)
    for shift in range(4):  # what the first conversations taught must be right for the others
        prompt = [USER, USER, user("Who?"), [{"role": "system", "content": "Be brief."}, *USER]][shift]
        talk, plain = Conversation(chat, prompt), PlainConversation(other, prompt)
        for turn in range(40 if shift == 0 else 15):
            if shift == 0:  # always the same, of which all is soon believed
                say(talk, "one", user("no"), plain)
            else:
                text = SAYINGS[turn * shift % len(SAYINGS)] + str(turn) * (turn % 2)
                say(talk, text, user(["higher", "lower", f"no {turn}"][(turn + shift) % 3]), plain)
            assert talk.text == plain.text, (shift, turn)
        assert [list(zip(piece.tokens, piece.kinds, strict=True)) for piece in talk.pieces] == plain.pieces
        assert len(talk.forks) == len(plain.pieces) - 1


def test_a_template_that_reads_the_clock_begins_anew_when_it_says_something_else() -> None:
    source = "It is {{ strftime_now('%H:%M:%S.%f') }}." + PLAIN
    talk = Conversation(template(source), USER)
    for turn in range(3):
        say(talk, "one", user(f"no {turn}"))
    assert len(talk.forks) == len(talk.pieces) - 1 == 3
    assert talk.forks[0].written != talk.forks[0].seen
    chat = template(source)
    assert Conversation(chat, USER).text != Conversation(chat, USER).text  # a prompt is not remembered
    given = Conversation(template("It is {{ now or strftime_now('%f') }}." + PLAIN, now="noon"), USER)
    say(given, "one", user("no"))
    assert given.forks == []


def test_a_source_that_can_not_be_read_is_not_believed() -> None:
    class Opaque(Counted):
        def seams(self, tools: Any = ()) -> Any:
            seams = super().seams(tools)
            seams._markers = Markers(read=False)
            return seams

    tokenizer = vocabulary("bytes", ["<|im_start|>", END], "<s>", "</s>")
    tokenizer.chat_template = PLAIN
    chat = Opaque(tokenizer)
    talk = Conversation(chat, USER)
    for turn in range(5):
        say(talk, "one", user("no"))
        before = chat.written
        say(talk, "one", user("no"))
        assert chat.written == before + 1 + 4 * (turn + 1)
    assert markers_of("{% endfor %}") == Markers(read=False)


def test_a_template_is_probed_once_for_each_set_of_tools() -> None:
    chat = template("{{ tools | tojson if tools }}" + PLAIN)
    assert chat.seams() is chat.seams(())
    assert chat.seams(TOOLS) is chat.seams([dict(TOOLS[0])])
    assert chat.seams(TOOLS) is not chat.seams()
    assert chat.shows(TOOLS)
    assert not template(PLAIN).shows(TOOLS)


def test_what_a_template_leaves_out_is_an_error() -> None:
    chat = template("{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content | trim }}|{% endfor %}")
    with pytest.raises(DataError, match="leaves out messages of the role 'system' here: the model would not see 'e'"):
        Conversation(chat, [{"role": "system", "content": "e"}, *USER])
    talk = Conversation(chat, USER)
    talk.answer([5], [-1.0], 0)
    with pytest.raises(DataError, match="leaves out messages of the role 'tool' here: the model would not see 'W'"):
        talk.reply([{"role": "tool", "content": "W"}])  # which stands in the text, but not for this
    talk.reply([{"role": "user", "content": " seven "}])  # trimmed, not left out
    assert "seven" in talk.text
    first = template(
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role }}:{{ m.content }}|{% endif %}"
        "{% endfor %}"
    )
    talk = Conversation(first, [{"role": "system", "content": "Be brief."}, *USER])
    talk.answer([5], [-1.0], 0)
    with pytest.raises(DataError, match="leaves out messages of the role 'system' here: the model would not see 'And'"):
        talk.reply([{"role": "system", "content": "And"}])


def test_plain_text_goes_on_behind_the_answer() -> None:
    chat = PlainTemplate(
        tiny_tokenizer(), lambda message: f"[{message['content']}]" if message["role"] == "tool" else message["content"]
    )
    talk = Conversation(chat, [{"role": "user", "content": "1+1="}])
    for turn in range(4):
        talk.answer([6], [-0.1], turn)
        talk.reply([{"role": "tool", "content": "ok"}, {"role": "user", "content": "1+1="}])
    assert talk.text == "1+1=" + "2[ok]1+1=" * 4
    assert talk.piece.tokens == chat.encode(talk.text, opening=True)
    assert talk.piece.kinds.count(Kind.SAMPLED) == 4


def test_what_an_answer_says_is_read_with_a_few_tokens_in_front_of_it() -> None:
    chat = template(PLAIN)
    decoded: list[int] = []
    decode = chat._decode

    def counted(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return decode(tokens)

    chat._decode = counted
    talk = Conversation(chat, user("a very long question " * 50))
    for turn in range(20):
        say(talk, f"é {turn}", user("a very long hint " * 20))
    assert len(talk.piece.tokens) > 2000
    assert max(decoded) < 24
    assert len(decoded) < 20 * 3 + 10


def test_what_was_written_anew_long_ago_is_another_history_than_what_was_not() -> None:
    """A thought in front of a question is gone; one behind it is still there, and goes with the next question."""
    source = (FOLDER / "qwen3.jinja").read_text(encoding="utf-8")
    thought, word = "<think>\nhm\n</think>\n\nseven", "seven"
    result, question = [{"role": "tool", "content": "7"}], user("And?")
    first, second = [(thought, result), (word, question)], [(word, question), (thought, result)]
    rest = [(word, result)] * 5 + [(word, question)] * 2
    chat, other = template(source), template(source)
    for rounds, forks in ((first + rest, 1), (first + rest, 1), (second + rest, 1), (first + rest, 1)):
        talk, plain = Conversation(chat, USER), PlainConversation(other, USER)
        for text, reply in rounds:
            say(talk, text, reply, plain)
        assert talk.text == plain.text
        assert len(talk.forks) == len(plain.pieces) - 1 == forks
