"""A conversation's tokens: what was sampled, what a template writes between, and where it begins anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from tests.chat.conformance import CALLS, FAMILIES, TOOLS, Family, tokenizer_of, written_calls
from tests.chat.vocabularies import vocabulary

from ramet.chat import ChatTemplate, Conversation, PlainTemplate
from ramet.chat.seams import SENTINEL
from ramet.errors import ConfigError, DataError, ForestError
from ramet.models.tiny import tiny_tokenizer
from ramet.types import Kind, Message, ToolCall

USER: list[Message] = [{"role": "user", "content": "2+2?"}]
FAMILY = {family.name: family for family in FAMILIES if not family.package}
S, E, P = Kind.SAMPLED, Kind.ENVIRONMENT, Kind.PROMPT


def chat(name: str, kind: str = "bytes", **more: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer_of(FAMILY[name], kind), **more)


def ids(template: ChatTemplate, text: str) -> list[int]:
    return template.encode(text, opening=False)


def say(talk: Conversation, text: str, end: str = "", **more: Any) -> Message:
    template = talk.template
    tokens = template.encode(text, opening=False) + (template.encode(end, opening=False) if end else [])
    return talk.answer(tokens, [-0.5] * len(tokens), 7, ended=bool(end), **more)


def of_kind(talk: Conversation, kind: Kind) -> str:
    piece = talk.piece
    return talk.template.decode([token for token, own in zip(piece.tokens, piece.kinds, strict=True) if own is kind])


def test_what_the_template_writes_behind_the_end_is_in_the_next_prompt_and_was_not_sampled() -> None:
    template = chat("chatml")
    talk = Conversation(template, USER)
    assert say(talk, "4", "<|im_end|>") == {"role": "assistant", "content": "4"}
    talk.reply([{"role": "user", "content": "sure?"}])
    assert of_kind(talk, P) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert of_kind(talk, S) == "4<|im_end|>"
    assert of_kind(talk, E) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert talk.piece.tokens == ids(template, template.render(talk.messages))
    assert len(talk.pieces) == 1
    assert talk.verify() is None


def test_each_token_has_its_log_prob_and_version_or_none() -> None:
    talk = Conversation(chat("chatml"), USER)
    say(talk, "4", "<|im_end|>")
    talk.reply([{"role": "user", "content": "sure?"}])
    piece = talk.piece
    for kind, log_prob, version in zip(piece.kinds, piece.log_probs, piece.versions, strict=True):
        assert (log_prob, version) == (-0.5, 7) if kind is S else math.isnan(log_prob) and version == -1
    assert len(piece.tokens) == len(piece.kinds)


def test_the_template_ends_a_turn_that_a_limit_cut() -> None:
    talk = Conversation(chat("chatml"), USER)
    say(talk, "4 because")
    talk.reply([{"role": "user", "content": "go on"}])
    assert of_kind(talk, S) == "4 because"
    assert of_kind(talk, E).startswith("<|im_end|>\n<|im_start|>user\ngo on")
    assert talk.verify() is None


def test_an_end_that_the_template_does_not_write_stays_where_it_was_sampled() -> None:
    template = chat("alpaca")
    end = ids(template, "</s>")
    talk = Conversation(template, USER)
    for _ in range(3):
        say(talk, "4", "</s>")
        talk.reply([{"role": "user", "content": "sure?"}])
    assert talk.piece.tokens.count(end[0]) == 3
    assert [kind for token, kind in zip(talk.piece.tokens, talk.piece.kinds, strict=True) if token == end[0]] == [S] * 3
    assert [token for token in talk.piece.tokens if token != end[0]] == ids(template, template.render(talk.messages))
    assert len(talk.pieces) == 1
    assert talk.verify() is None


def test_another_end_than_the_templates_own_is_followed_by_that_one() -> None:
    talk = Conversation(chat("chatml"), USER)
    say(talk, "4", "</s>")
    talk.reply([{"role": "user", "content": "sure?"}])
    assert of_kind(talk, S) == "4</s>"
    assert of_kind(talk, E).startswith("<|im_end|>\n")


def test_an_end_may_be_the_beginning_of_the_next_turn() -> None:
    talk = Conversation(chat("glm4"), USER)
    say(talk, "4", "<|user|>")
    talk.reply([{"role": "user", "content": "sure?"}])
    assert talk.text == "[gMASK]<sop><|user|>\n2+2?<|assistant|>\n4<|user|>\nsure?<|assistant|>\n"
    assert talk.verify() is None


def test_empty_completions_and_empty_replies_are_legal() -> None:
    template = chat("chatml")
    talk = Conversation(template, USER)
    assert talk.answer([], [], 0)["content"] == ""
    talk.reply([])
    say(talk, "", "<|im_end|>")
    talk.reply([{"role": "user", "content": ""}])
    assert talk.piece.kinds.count(S) == 1
    assert talk.piece.tokens == ids(template, template.render(talk.messages))
    assert talk.text.endswith("<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")


def test_an_empty_prompt_is_the_beginning_of_text() -> None:
    talk = Conversation(PlainTemplate(tiny_tokenizer()), [{"role": "user", "content": ""}])
    assert talk.piece.tokens == [1]
    assert Conversation(PlainTemplate(tiny_tokenizer()), []).piece.tokens == [1]
    tokenizer = vocabulary("bytes", [], "<s>", "</s>")
    bare = Conversation(PlainTemplate(tokenizer), [{"role": "user"}])
    assert bare.piece.tokens == [tokenizer.bos_token_id]
    tokenizer.bos_token = None
    with pytest.raises(DataError, match="the prompt is empty, and the tokenizer has no beginning-of-text token"):
        Conversation(PlainTemplate(tokenizer), [{"role": "user", "content": ""}])
    with pytest.raises(DataError, match="refuses the messages"):
        Conversation(chat("chatml"), [])


def test_thinking_that_is_taken_out_begins_a_new_piece_and_says_so() -> None:
    template = chat("qwen3")
    talk = Conversation(template, USER)
    say(talk, "<think>\nhm\n</think>\n\n4", "<|im_end|>")
    before = list(talk.piece.tokens)
    prompt = talk.piece.kinds.count(P)
    talk.reply([{"role": "user", "content": "sure?"}])
    first, second = talk.pieces
    assert first.tokens == before
    assert second.tokens == ids(template, template.render(talk.messages))
    assert second.tokens[:prompt] == first.tokens[:prompt]
    assert set(second.kinds) == {P}
    (fork,) = talk.forks
    assert (fork.messages, fork.character, fork.kept) == (
        2,
        len("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"),
        False,
    )
    assert fork.seen == "<think>\nhm\n</think>\n\n4<|im_end|>"
    assert fork.written.startswith("4<|im_end|>\n<|im_start|>user\nsure?")
    assert talk.verify() is None


def test_a_piece_keeps_all_that_stands_in_front_of_what_changed() -> None:
    template = chat("qwen3")
    talk = Conversation(template, USER)
    say(talk, "4", "<|im_end|>")
    talk.reply([{"role": "user", "content": "sure?"}])
    same = len(talk.piece.tokens)
    say(talk, "<think>\nhm\n</think>\n\nyes", "<|im_end|>")
    talk.reply([{"role": "user", "content": "why?"}])
    assert talk.pieces[1].tokens[:same] == talk.pieces[0].tokens[:same]
    assert talk.pieces[0].kinds.count(S) == len(ids(template, "4<|im_end|>" + "<think>\nhm\n</think>\n\nyes<|im_end|>"))
    assert talk.pieces[1].kinds.count(S) == 0


def test_with_keep_the_model_goes_on_with_what_it_saw() -> None:
    template = chat("qwen3", rewrites="keep")
    talk = Conversation(template, USER)
    for turn in range(3):
        say(talk, f"<think>\nhm\n</think>\n\n{turn}", "<|im_end|>")
        talk.reply([{"role": "user", "content": "sure?"}])
    assert len(talk.pieces) == 1
    seam = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert of_kind(talk, E) == seam * 3
    assert of_kind(talk, S) == "".join(f"<think>\nhm\n</think>\n\n{turn}<|im_end|>" for turn in range(3))
    assert [(fork.messages, fork.kept) for fork in talk.forks] == [(2, True)]
    parting = talk.verify()
    assert parting is not None
    assert parting.character == talk.forks[0].character
    with pytest.raises(ConfigError, match="rewrites: expected one of follow, keep, found 'drop'"):
        chat("qwen3", rewrites="drop")


@pytest.mark.parametrize("cut", [True, False])
def test_with_keep_a_trimmed_answer_stays(cut: bool) -> None:
    talk = Conversation(chat("llama3", rewrites="keep"), USER)
    say(talk, "4 \n", "" if cut else "<|eot_id|>")
    talk.reply([{"role": "user", "content": SENTINEL}])  # which is also what the template is tried with
    assert talk.text.endswith(
        "4 \n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        + SENTINEL
        + "<|eot_id|>"
        + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert of_kind(talk, E).startswith("<|eot_id|>") is cut
    assert talk.forks[0].kept


def test_a_copy_goes_its_own_way() -> None:
    template = chat("chatml")
    talk = Conversation(template, USER)
    say(talk, "4", "<|im_end|>")
    one, other = talk.copy(), talk.copy()
    one.reply([{"role": "user", "content": "sure?"}])
    say(one, "yes", "<|im_end|>")
    one.reply([])
    other.reply([{"role": "user", "content": "really?"}])
    assert len(talk.messages) == 2
    assert talk.text.endswith("4<|im_end|>")
    assert [message["content"] for message in one.messages] == ["2+2?", "4", "sure?", "yes"]
    assert other.text == template.render(other.messages)
    assert one.text == template.render(one.messages)
    assert talk.piece.tokens == other.piece.tokens[: len(talk.piece.tokens)]
    talk.reply([{"role": "user", "content": "really?"}])
    assert talk.piece.tokens == other.piece.tokens
    assert [each.verify() for each in (talk, one, other)] == [None] * 3
    assert talk.pieces[0] is not other.pieces[0]


def test_a_refusal_says_what_and_changes_nothing() -> None:
    with pytest.raises(DataError, match=r"refuses the messages \(system user\): .*the role system is not known here"):
        Conversation(chat("gemma"), [{"role": "system", "content": "Be brief."}, *USER])
    talk = Conversation(chat("gemma"), USER)
    say(talk, "4", "<end_of_turn>")
    before = talk.copy()
    with pytest.raises(DataError, match=r"\(user assistant user user\): .*user and assistant must alternate"):
        talk.reply([{"role": "user", "content": "sure?"}, {"role": "user", "content": "really?"}])
    assert (talk.messages, talk.text, talk.pieces[0].tokens) == (before.messages, before.text, before.pieces[0].tokens)
    talk.reply([{"role": "user", "content": "sure?"}])
    assert talk.verify() is None


def test_turns_are_taken_in_turn_and_fit() -> None:
    talk = Conversation(chat("chatml"), USER)
    with pytest.raises(DataError, match="a turn that ended has a token that ended it"):
        talk.answer([], [], 0, ended=True)
    with pytest.raises(ForestError, match="each token has one log-prob: found 2 tokens, 1 log-probs"):
        talk.answer([5, 6], [-1.0], 0)
    assert talk.messages == USER
    say(talk, "4")
    with pytest.raises(DataError, match="the last turn is the model's already"):
        say(talk, "5")


def test_messages_before_the_first_answer_prolong_the_prompt() -> None:
    template = chat("chatml")
    talk = Conversation(template, USER)
    talk.reply([{"role": "user", "content": "be quick"}])
    assert len(talk.pieces) == 1
    assert talk.forks == []
    assert talk.piece.tokens == ids(template, template.render(talk.messages))
    say(talk, "4", "<|im_end|>")
    talk.reply([{"role": "user", "content": "sure?"}])
    talk.reply([{"role": "user", "content": "really?"}])  # the opening that the model saw has moved
    assert [len(talk.pieces), len(talk.forks)] == [2, 1]
    assert talk.verify() is None


@pytest.mark.parametrize("character", ["é", "☃", "🌲"])
def test_a_turn_that_is_cut_inside_a_character_keeps_its_tokens(character: str) -> None:
    for kind in ("bytes", "pieces"):
        template = chat("chatml", kind)
        tokens = ids(template, "e" + character)
        assert len(tokens) > 2
        talk = Conversation(template, USER)
        message = talk.answer(tokens[:-1], [-0.5] * (len(tokens) - 1), 0)
        assert set(message["content"].strip()) == {"e", "\ufffd"}
        talk.reply([{"role": "user", "content": "go on"}])
        assert [t for t, kind in zip(talk.piece.tokens, talk.piece.kinds, strict=True) if kind is S] == tokens[:-1]
        assert talk.text == template.render(talk.messages)
        assert len(talk.pieces) == 1


def test_the_space_that_a_decoder_leaves_out_is_there_behind_other_tokens() -> None:
    template = chat("vicuna", "pieces")
    talk = Conversation(template, USER)
    word = ids(template, "Falcon")
    assert template.decode(word) == "Falcon"
    assert talk.answer([*word, *ids(template, "</s>")], [-0.5] * (len(word) + 1), 0, ended=True)["content"] == " Falcon"
    talk.reply([{"role": "user", "content": "sure?"}])
    assert talk.text == "<s>USER: 2+2?\nASSISTANT: Falcon</s>\nUSER: sure?\nASSISTANT:"
    assert talk.verify() is None


def understood(template: ChatTemplate, calls: Sequence[Any]) -> Message:
    made = [
        {"type": "function", "id": id_, "function": {"name": name, "arguments": given}} for name, given, id_ in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


RESULTS = [
    {"role": "tool", "name": "add", "content": text, "tool_call_id": id_}
    for text, (_, _, id_) in zip("37", CALLS, strict=True)
]


def test_calls_and_results_go_the_way_in_which_the_template_takes_them() -> None:
    for name in ("mistral", "deepseek_v3", "qwen25", "pythonic", "command_r"):
        family: Family = FAMILY[name]
        template = chat(name)
        talk = Conversation(template, USER, TOOLS)
        message = say(
            talk,
            written_calls(family.calls, CALLS),
            family.end_of("tool"),
            read=lambda _, t=template: understood(t, CALLS),
        )
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "add"]
        talk.reply(RESULTS)
        assert len(talk.pieces) == 1, name
        assert talk.verify() is None
        assert talk.piece.tokens == ids(template, template.render(talk.messages, TOOLS)), name


def test_calls_that_are_written_in_another_way_than_the_templates_are_kept_where_it_takes_text() -> None:
    odd = '<tool_call>\n{"arguments":{"a":1,"b":2},"name":"add"}\n</tool_call>'
    talk = Conversation(chat("qwen25"), USER, TOOLS)
    say(talk, odd, "<|im_end|>", read=lambda text: understood(chat("qwen25"), CALLS[:1]))
    talk.reply(RESULTS[:1])
    assert len(talk.pieces) == 1
    assert odd + "<|im_end|>\n<|im_start|>user\n<tool_response>\n3" in talk.text
    talk = Conversation(chat("mistral"), USER, TOOLS)  # which takes calls as such alone
    say(talk, "[TOOL_CALLS] add(1, 2)", "</s>", read=lambda text: understood(chat("mistral"), CALLS[:1]))
    talk.reply(RESULTS[:1])
    assert len(talk.pieces) == 2
    assert talk.forks[0].seen.startswith("add(1, 2)")
    assert talk.forks[0].written.startswith('[{"name": "add"')


def test_how_a_turn_ended_tells_in_which_form_it_goes_in() -> None:
    """Where a template ends a turn of calls in another way, a turn that was cut goes in as it was understood."""
    template = chat("pythonic")
    for end, pieces in (("<|eot|>", 1), ("<|eot|>", 1), ("", 2), ("<|eot|>", 1)):
        talk = Conversation(template, USER, TOOLS)
        say(talk, "add, please", end, read=lambda _: understood(template, CALLS[:1]))
        talk.reply(RESULTS[:1])
        assert len(talk.pieces) == pieces
        assert ("<|eom|>" in talk.text) is (pieces == 2)


def test_calls_may_be_tool_calls_and_arguments_become_text_where_a_mapping_is_refused() -> None:
    call = ToolCall("add", {"a": 1, "b": 2}, "call00001")
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    written = chat("mistral").render([*USER, turn, RESULTS[0]])
    assert '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "call00001"}]' in written
    assert 'add\n```json\n{"a": 1, "b": 2}\n```' in chat("deepseek_v3").render([*USER, turn, RESULTS[0]])
    with pytest.raises(DataError, match="a call has an id of nine characters"):
        chat("mistral").render([*USER, {**turn, "tool_calls": [ToolCall("add", {})]}, RESULTS[0]])
    assert turn["tool_calls"] == [call]


def test_the_tools_are_part_of_the_prompt() -> None:
    with_tools, without = Conversation(chat("qwen25"), USER, TOOLS), Conversation(chat("qwen25"), USER)
    assert with_tools.piece.tokens != without.piece.tokens
    assert '"name": "add"' in with_tools.text
    plain = Conversation(PlainTemplate(tiny_tokenizer()), USER, TOOLS)
    assert plain.text == USER[0]["content"]  # a text is taken as it is
    plain.answer([5], [-0.5], 0)
    plain.reply([{"role": "tool", "content": "3"}])
    assert plain.text == USER[0]["content"] + "1\n3\n"
    with pytest.raises(DataError, match="takes content that is text: found list"):
        Conversation(PlainTemplate(tiny_tokenizer()), [{"role": "user", "content": []}])
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        ChatTemplate(tiny_tokenizer())


def test_verify_says_where_ids_part_though_the_text_does_not() -> None:
    template = chat("chatml")
    talk = Conversation(template, USER)
    tokens = [*ids(template, "hel"), *ids(template, "lo")]
    assert tokens != ids(template, "hello")
    talk.answer(tokens, [-0.5] * len(tokens), 0)
    assert talk.verify() is None  # nothing to compare it with yet
    start = talk.piece.kinds.index(S)
    talk.reply([{"role": "user", "content": "what?"}])
    parting = talk.verify()
    assert parting is not None
    assert (parting.token, parting.seen[:5], parting.written[:5]) == (start, "hello", "hello")
    assert [t for t, kind in zip(talk.piece.tokens, talk.piece.kinds, strict=True) if kind is S] == tokens


def test_what_looks_like_a_template_in_a_message_is_tokenised_as_the_template_would() -> None:
    template = chat("chatml")
    talk = Conversation(template, [{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\n4"}])
    say(talk, "<|im_end|>\n<|im_start|>user\nfoo", "<|im_end|>")
    talk.reply([{"role": "user", "content": "<|im_start|>"}])
    assert talk.piece.tokens == ids(template, template.render(talk.messages))
    assert talk.verify() is None
