"""Calls are found in the forms that models write, and nothing else is a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ramet.tools.calls import BadCall, call_of, read_calls, read_message
from ramet.types import ToolCall

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SAY = {"type": "object", "properties": {"text": {"type": "string"}}}
OFFERED = {"add": ADD, "say": SAY}
ONE = [ToolCall("add", {"a": 1})]
TWO = [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", ONE),
        ('Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n', "Well.", ONE),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 2, "", ONE * 2),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}}{"name": "add", "arguments": {"a": 2}}</tool_call>',
            "",
            TWO,
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", ONE),  # the end of the turn closes it
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}}'
            '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>',
            "",
            TWO,
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}}\n<tool_call>{"name": "add", "arguments": {"a": 2}}',
            "",
            TWO,
        ),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ONE),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', "", ONE),
        ('<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>', "", ONE),
        ('<tool_call>{"name": "add"}</tool_call>', "", [ToolCall("add", {})]),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "", [ToolCall("nobody", {})]),
        (
            '<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>!',
            "!",
            [ToolCall("say", {"text": "</tool_call>"})],
        ),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "", ONE),
        ("<function=add><parameter=a>1</parameter></function>", "", ONE),
        (
            "<function=say>\n<parameter=text>\n1\n\n2\n</parameter>\n</function>",
            "",
            [ToolCall("say", {"text": "1\n\n2"})],
        ),
        ('<function=add>{"a": 1}</function>', "", ONE),
        ('{"name": "add", "parameters": {"a": 1}}', "", ONE),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', "", ONE),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}', "", TWO),
        ('[{"name": "add", "arguments": {"a": 1}}]', "", ONE),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", ONE),
        ("<|python_tag|>add(a=1)", "", ONE),
        ("[add(a=1), add(a=2)]", "", TWO),
        ("[add(1)]", "", ONE),
        ('[say(text="a, b) ]")]', "", [ToolCall("say", {"text": "a, b) ]"})]),
        ('[say(text="\\d")]', "", [ToolCall("say", {"text": "\\d"})]),
        ("<|tool_call_start|>[add(a=1)]<|tool_call_end|>So.", "So.", ONE),
        ("```tool_code\nadd(a=1)\n```", "", ONE),
        ('<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', "", ONE),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "", ONE),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}', "", TWO),
        ('<think>add?</think>{"name": "add", "parameters": {"a": 1}}', "<think>add?</think>", ONE),
        ('hm </think> <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hm </think>", ONE),
    ],
)
def test_a_call_is_read(text: str, content: str, calls: list[ToolCall]) -> None:
    assert read_calls(text, OFFERED) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The sum is 3.",
        '{"name": "Ann", "arguments": {}}',
        '{"name": "add", "age": 7}',
        '[{"name": "add", "arguments": {}}, {"name": "Bob"}]',
        'Look: {"name": "add", "arguments": {"a": 1}}',
        "[nobody(a=1)]",
        "see [add(a=1)]",
        "[1, 2]",
        "add(a=1)",
        '<think>Should I <tool_call>{"name": "add"}</tool_call>? No.</think>No.',
        '<think>It never ends. <tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "[" * 5000,
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    assert read_calls(text, OFFERED) == (text, [])


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "add", "no JSON: Expecting ','"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', "add", "behind the JSON stands '}'"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "must be an object, by name: found [1]"),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "add", "the arguments are no JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "add", "NaN is no number"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "add", "can not be written as JSON"),
        ('<tool_call>{"name": "say", "arguments": {"text": "\\ud800"}}</tool_call>', "say", "half a character"),
        ('<tool_call>{"tool": "add"}</tool_call>', "", 'expected {"name": ...'),
        ('<tool_call>["add"]</tool_call>', "", 'found "add"'),
        ("<tool_call>[]</tool_call>", "", "there is no call in it"),
        ("<tool_call></tool_call>", "", "invalid syntax"),
        ("<tool_call>add a and b</tool_call>", "", "can not be read as Python either"),
        ("<tool_call><function=add><parameter=a>1</function></tool_call>", "add", "expected <parameter=...>"),
        ("<function=add", "", "expected <function=...>"),
        ('{"name": "add", "parameters": {"a": 1}', "add", "no JSON"),
        ("[add(a=b)]", "", "literals (nothing is evaluated): found b"),
        ("[add(a=__import__('os').getpid())]", "", "literals"),
        ("[add(a=1, a=2)]", "", "once"),
        ("[add(**{})]", "", "once"),
        ("[add(1, 2, 3)]", "", "by name"),
        ("[add(a={1: 2})]", "", "keys must be strings"),
        ("[add(a=1), 5]", "", "expected f(x=1), found 5"),
        ("<tool_call>[" + "(" * 5000 + "</tool_call>", "", "Python"),
        ('<tool_call>{"name": ' + "[" * 100_000 + "</tool_call>", "", "nested too deeply"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "add", "no JSON"),
    ],
)
def test_a_call_that_can_not_be_read_says_why(text: str, name: str, reason: str) -> None:
    _, calls = read_calls(text, OFFERED)
    (call,) = calls
    assert isinstance(call, BadCall)
    assert call.name == name
    assert reason in call.reason


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}1", fullmatch=True), VALUES, max_size=4)


@settings(deadline=None, max_examples=80)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.booleans())
@example([{"a1": "</tool_call><tool_call>{"}], True)
@example([{"a1": "<think>"}], True)
def test_what_is_written_is_read_in_every_form(given_arguments: list[dict[str, Any]], ascii_only: bool) -> None:
    calls = [ToolCall("add", arguments) for arguments in given_arguments]
    if "think>" in json.dumps(given_arguments):
        return  # what a model thinks can not be told from a text that says so
    bodies = [json.dumps({"name": "add", "arguments": one}, ensure_ascii=ascii_only) for one in given_arguments]
    code = [f"add({', '.join(f'{name}={value!r}' for name, value in one.items())})" for one in given_arguments]
    for text in (
        "".join(f"<tool_call>\n{body}\n</tool_call>\n" for body in bodies),
        "; ".join(bodies),
        f"[{', '.join(bodies)}]",
        f"[TOOL_CALLS][{', '.join(bodies)}]",
        f"[{', '.join(code)}]",
    ):
        assert read_calls(text, OFFERED) == ("", calls)


TAGGED = [
    "<tool_call>",
    "</tool_call>",
    "<function=add>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "[TOOL_CALLS]",
]
OTHERS = [
    "<|python_tag|>",
    "```tool_code\n",
    "```",
    "<think>",
    "</think>",
    '{"name": "add", "arguments": {}}',
    "add(a=1)",
]
BITS = ["[add(", "lambda: ", "f'{a}'", "'''", "1e", "0x", "é", "*", *'{}[]" \n\0\\']
PIECES = st.sampled_from([*TAGGED, *OTHERS, *BITS])


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=40))
def test_no_text_is_an_error(text: str) -> None:
    message = read_message(text, OFFERED)
    content, calls = read_calls(text, OFFERED)
    assert message["content"] == content
    assert len(message.get("tool_calls", ())) == len(calls)
    if not calls:
        assert content == text


def test_a_message_is_what_templates_take() -> None:
    text = 'So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "add"</tool_call>'
    message = read_message(text, OFFERED, turn=3)
    good, bad = message["tool_calls"]
    assert (message["role"], message["content"]) == ("assistant", "So")
    assert good == {"type": "function", "id": "c00030000", "function": {"name": "add", "arguments": {"a": 1}}}
    assert (bad["id"], bad["function"]) == ("c00030001", {"name": "add", "arguments": {}})
    assert bad["text"] == '{"name": "add"'
    assert "tool_calls" not in read_message("So.", OFFERED)


def test_entries_become_calls_again() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>?</tool_call>'
    good, bad = read_message(text, OFFERED)["tool_calls"]
    assert call_of(good) == ToolCall("add", {"a": 1}, "c00000000")
    again = call_of(bad)
    assert isinstance(again, BadCall)
    assert (again.text, again.name, again.id) == ("?", "unknown", "c00000001")
    assert call_of({"function": {"name": "add", "arguments": '{"a": 1}'}}) == ToolCall("add", {"a": 1})
    assert isinstance(call_of({"id": "1", "function": {"name": "add", "arguments": "{"}}), BadCall)
    assert isinstance(call_of({}), BadCall)


def test_an_id_that_the_model_wrote_is_kept() -> None:
    message = read_message('[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "abcdefghi"}]', OFFERED)
    assert message["tool_calls"][0]["id"] == "abcdefghi"
