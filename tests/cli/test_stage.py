"""What a person is shown, and how what they type becomes a turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ramet.cli.stage import Left, Stage, message_lines, outcome_lines, tool_lines
from ramet.errors import DataError
from ramet.types import Draw, Message, Request, Sampling, ToolCall


def typing(*lines: str) -> Callable[[], str]:
    """Return a function that gives one line after the other, and then the end."""
    left = list(lines)

    def read_line() -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return read_line


def request(*messages: Message, tools: tuple[Any, ...] = ()) -> Request:
    return Request(0, torch.tensor([1]), Sampling(8), Draw(0, 0, 0), messages=messages, tools=tools)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("lines", "turn"),
    [
        (["85", ""], "85"),
        (["", "", "85", ""], "85"),
        (["two", "lines", "", "more"], "two\nlines"),
        (["a", "\\", "b", ""], "a\n\nb"),
        (["\\", ""], ""),
        (["\\\\", ""], "\\\\"),
        (["  kept  ", ""], "  kept  "),
        (["85\r", "\r"], "85"),
        (["85"], "85"),
        (["a\udce9b", ""], "a\ufffdb"),
    ],
)
def test_a_turn_is_the_lines_up_to_an_empty_one_or_the_end(lines: list[str], turn: str) -> None:
    stage = Stage(typing(*lines), lambda line: None)
    assert stage.ask(request(user("?"))) == turn


def test_who_types_no_more_has_left() -> None:
    stage = Stage(typing("85", "", "", ""), lambda line: None)
    assert stage.ask(request(user("?"))) == "85"
    with pytest.raises(Left):
        stage.ask(request(user("?"), user("85"), user("again?")))


def test_what_is_no_text_is_refused() -> None:
    def broken() -> str:
        return b"\xff".decode()

    with pytest.raises(DataError, match="what was typed is no text"):
        Stage(broken, lambda line: None).ask(request(user("?")))


def test_each_message_is_shown_once_and_ones_own_turn_not_again() -> None:
    shown: list[str] = []
    stage = Stage(typing("crane", "", "slate", ""), shown.append)
    mine: Message = {"role": "assistant", "content": "crane"}
    stage.ask(request({"role": "system", "content": "Be brief."}, user("guess")))
    assert shown == ["system:", "  Be brief.", "user:", "  guess", "you:"]
    shown.clear()
    talk = [{"role": "system", "content": "Be brief."}, user("guess"), mine, user("no")]
    stage.ask(request(*talk))
    assert shown == ["user:", "  no", "you:"]
    shown.clear()
    stage.show_messages([*talk, {"role": "assistant", "content": "slate"}, user("right")])
    assert shown == ["user:", "  right"]


def test_tools_are_shown_with_their_schemas_before_the_first_turn_alone() -> None:
    shown: list[str] = []
    function = {"name": "add", "description": "Add two numbers.\n", "parameters": {"type": "object"}}
    tools = ({"type": "function", "function": function},)
    stage = Stage(typing("1", "", "2", ""), shown.append)
    stage.ask(request(user("?"), tools=tools))
    assert shown[0].startswith("tools, called by writing <tool_call>")
    assert shown[1:3] == ["  add: Add two numbers.", '    {"type": "object"}']
    shown.clear()
    stage.ask(request(user("?"), user("1"), user("and?"), tools=tools))
    assert shown == ["user:", "  and?", "you:"]


def test_a_tool_without_a_description_is_its_name() -> None:
    assert list(tool_lines({"name": "add"})) == ["  add", "    {}"]


def test_a_message_shows_who_called_what() -> None:
    call = ToolCall("add", {"a": 1})
    assert list(message_lines({"role": "assistant", "content": "Let me see.", "tool_calls": [call]})) == [
        "assistant:",
        "  Let me see.\n  \"ToolCall(name='add', arguments={'a': 1}, id='')\"",
    ]
    assert list(message_lines({"role": "tool", "name": "add", "content": ""})) == ["tool (add):", "  (empty)"]


def test_nothing_that_is_said_steers_the_terminal() -> None:
    lines = list(message_lines({"role": "user\x1b[0m", "content": "\x1b[31mred"}))
    assert lines == ["user\\x1b[0m:", "  \\x1b[31mred"]


@pytest.mark.parametrize(
    ("record", "lines"),
    [
        ({"stop": "eos", "score": 1, "rewards": {"reward": 1.0}}, ["stop: eos", "score: 1.000"]),
        (
            {"stop": "turn_limit", "score": 1.5, "rewards": {"right": 1.0, "short": 0.5}},
            ["stop: turn_limit", "score: 1.500", "  right: 1.000", "  short: 0.500"],
        ),
        (
            {"stop": "eos", "score": None, "rewards": {}, "outcome": "abstained", "reason": ""},
            ["stop: eos", "no score: abstained"],
        ),
        (
            {"stop": "error", "score": None, "rewards": {}, "outcome": "environment_error", "reason": "it \x1b broke"},
            ["stop: error", "no score: environment_error: it \\x1b broke"],
        ),
    ],
)
def test_the_end_says_why_and_what_was_earned(record: dict[str, Any], lines: list[str]) -> None:
    assert list(outcome_lines(record)) == lines
