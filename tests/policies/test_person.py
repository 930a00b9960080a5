"""A person says what they type: as tokens, cut where a model would have been cut, and never to be trained on."""

from __future__ import annotations

import pytest
import torch

from ramet.chat import ChatTemplate, Conversation
from ramet.models.tiny import EOS, tiny_tokenizer
from ramet.policies.person import PersonPolicy, script_tokenizer
from ramet.types import Draw, Request, Sampling, StopReason

TOKENIZER = tiny_tokenizer()


def request(row: int = 0, *, limit: int = 8, stop: tuple[str, ...] = ()) -> Request:
    return Request(row, torch.tensor([1, 5]), Sampling(limit, stop=stop), Draw(0, row, 0))


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("typed", "said", "ended", "stop"),
    [
        ("85", "85", True, StopReason.EOS),
        ("", "", True, StopReason.EOS),
        ("two\nlines", "two\nlin", False, StopReason.NEW_TOKENS),
        ("1234567", "1234567", True, StopReason.EOS),
        ("12345678", "12345678", False, StopReason.NEW_TOKENS),
        ("a;b|c", "a;", False, StopReason.STOP),
    ],
)
def test_what_was_typed_is_said_up_to_the_limit_or_a_stop(typed: str, said: str, ended: bool, stop: StopReason) -> None:
    """The token that ends the text counts towards the limit, as it does for a model."""
    limit = 7 if typed == "two\nlines" else 8
    [answer] = PersonPolicy(lambda asked: typed).complete([request(limit=limit, stop=("|", ";"))])
    assert answer.tokens.tolist() == ids(said) + [TOKENIZER.eos_token_id] * ended
    assert answer.text == said
    assert answer.stop is stop
    assert answer.tokens.dtype == torch.int64


def test_no_log_prob_is_made_up() -> None:
    [answer] = PersonPolicy(lambda asked: "85").complete([request()])
    assert answer.log_probs.shape == (3,)
    assert bool(answer.log_probs.isnan().all())


def test_the_text_survives_a_tokenizer_that_does_not_know_its_characters() -> None:
    [answer] = PersonPolicy(lambda asked: "né").complete([request()])
    assert answer.tokens.tolist() == [*ids("n"), TOKENIZER.unk_token_id, TOKENIZER.eos_token_id]
    assert answer.text == "né"


def test_each_row_is_asked_in_turn_and_the_person_sees_the_request() -> None:
    seen: list[int] = []

    def ask(asked: Request) -> str:
        seen.append(asked.row)
        return str(asked.row)

    policy = PersonPolicy(ask)
    policy.version = 4
    answers = list(policy.complete([request(3), request(9)]))
    assert seen == [3, 9]
    assert [(answer.row, answer.text, answer.version) for answer in answers] == [(3, "3", 4), (9, "9", 4)]


@pytest.mark.parametrize("error", [EOFError, KeyboardInterrupt])
def test_who_leaves_is_not_held(error: type[BaseException]) -> None:
    def leave(asked: Request) -> str:
        raise error

    with pytest.raises(error):
        list(PersonPolicy(leave).complete([request()]))


SCHEMA = {"type": "function", "function": {"name": "add"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_a_script_has_each_message_below_its_role_and_the_tools_on_top() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "2"},
    ]
    assert ChatTemplate(script_tokenizer()).render(messages, [SCHEMA]) == (
        '[tools]\n[{"type": "function", "function": {"name": "add"}}]\n'
        "[system]\nBe brief.\n"
        "[user]\n1+1?\n"
        '[assistant]\n\n{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}\n'
        "[tool]\n2\n"
        "[assistant]\n"
    )


def test_a_script_grows_at_its_end_alone() -> None:
    """A conversation of several turns is one piece: what was typed is kept, and what is replied goes behind it."""
    template = ChatTemplate(script_tokenizer())
    talk = Conversation(template, [{"role": "user", "content": "guess"}], [SCHEMA])
    for word in ("crane", "slate"):
        [answer] = PersonPolicy(lambda asked, word=word: word).complete([request()])  # type: ignore[misc]
        talk.answer(answer.tokens.tolist(), answer.log_probs.tolist(), 0, ended=True)
        talk.reply([{"role": "user", "content": f"not {word}"}])
    assert len(talk.pieces) == 1
    assert template.decode(talk.piece.tokens).replace(EOS, "") == template.render(talk.messages, [SCHEMA])
