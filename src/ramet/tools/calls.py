"""The calls in what a model wrote: found by the text alone, in the forms that models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ramet.tools.python_calls import parse_python_calls
from ramet.types import Message, ToolCall

Offered: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool that is offered, by name."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that a model meant and that can not be read: the text, and what is wrong with it, to tell the model."""

    text: str
    reason: str
    name: str = ""
    id: str = ""


Call: TypeAlias = ToolCall | BadCall

# What opens a call and what closes it; where the second is empty, the call goes on to the end of the text.
TAGS: tuple[tuple[str, str], ...] = (
    ("<tool_call>", "</tool_call>"),  # Hermes, Qwen
    ("<function_call>", "</function_call>"),
    ("<|tool_call|>", "<|/tool_call|>"),  # Phi, Granite
    ("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2
    ("<function=", "</function>"),  # Llama 3.1, Qwen3-coder
    ("```tool_code\n", "```"),  # Gemma
    ("[TOOL_CALLS]", ""),  # Mistral
    ("<|python_tag|>", ""),  # Llama 3
)
_THOUGHT = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.S)
_OPENING = re.compile("|".join(re.escape(opening) for opening, _ in TAGS))
_BARE = re.compile(r'\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]+)"')
_CODE = re.compile(r"\[\s*(?P<name>[A-Za-z_][\w.-]*)\s*\(")
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>|\Z)\s*", re.S)
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.S)
_KEYS = {"name", "arguments", "parameters", "id", "type", "function"}


def read_calls(text: str, offered: Offered) -> tuple[str, list[Call]]:
    """Return what a turn says beside its calls, and the calls in it, in order.

    Calls stand in tags (`TAGS`), as JSON (`{"name": ..., "arguments": {...}}`, one or several), as Python
    (`[f(x=1), g(y="a")]`, literals only: nothing is evaluated) or as `<function=f><parameter=x>1</parameter>`. Without
    a tag, a turn is a call only where it is nothing else, in one of the first two forms, and names a tool of `offered`:
    JSON alone is no call. What a model thinks (`<think>`) is no call either. A call that can not be read is a
    `BadCall`.

    >>> read_calls('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {"add": {}})
    ('So:', [ToolCall(name='add', arguments={'a': 1}, id='')])
    >>> read_calls('{"name": "Ann", "age": 7}', {"add": {}})
    ('{"name": "Ann", "age": 7}', [])
    """
    thoughts = list(_THOUGHT.finditer(text))
    # Thoughts become spaces, so that places in both texts are the same.
    said = _THOUGHT.sub(lambda match: " " * len(match[0]), text) if thoughts else text
    bare = _untagged(said.strip(), offered)
    calls: list[Call] = []
    outside, at = "", 0
    # A tag within a string of a call without one is text.
    while not (bare and all(isinstance(call, ToolCall) for call in bare)) and (found := _OPENING.search(said, at)):
        outside += text[at : found.start()]
        inside, at = _tagged(said, found)
        calls += _read(inside, offered)
    if calls:
        return (outside + text[at:]).strip(), calls
    return ("".join(match[0] for match in thoughts).strip() if bare else text), bare


def read_message(text: str, offered: Offered, turn: int = 0) -> Message:
    """Return a turn as an assistant message, its calls in "tool_calls" as chat templates take them.

    Each has an id of nine letters and digits, of the number of the `turn` and its own, unless the model wrote one. One
    that can not be read has no arguments, and its "error" and "text" say why and what it was.

    >>> read_message('{"name": "add", "parameters": {"a": 1}}', {"add": {}})["tool_calls"]
    [{'type': 'function', 'id': 'c00000000', 'function': {'name': 'add', 'arguments': {'a': 1}}}]
    >>> read_message("<tool_call>add</tool_call>", {"add": {}}, turn=2)["tool_calls"][0]["error"]
    'expected {"name": ..., "arguments": {...}}: the call can not be read as Python either: ...'
    """
    content, calls = read_calls(text, offered)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            _entry(replace(call, id=call.id or f"c{turn % 10000:04d}{number % 10000:04d}"))
            for number, call in enumerate(calls)
        ]
    return message


def call_of(entry: Mapping[str, Any]) -> Call:
    """Return the call of an entry of "tool_calls", as `read_message` and servers write it.

    >>> call_of({"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}})
    ToolCall(name='add', arguments={'a': 1}, id='1')
    """
    function = entry.get("function", entry)
    name, id_ = str(function.get("name", "")), str(entry.get("id") or "")
    if "error" in entry:
        return BadCall(str(entry.get("text", "")), str(entry["error"]), name, id_)
    return replace(_call({"name": name, "arguments": function.get("arguments")}, str(function)), id=id_)


def _entry(call: Call) -> dict[str, Any]:
    arguments = dict(call.arguments) if isinstance(call, ToolCall) else {}
    entry = {"type": "function", "id": call.id, "function": {"name": call.name or "unknown", "arguments": arguments}}
    return entry if isinstance(call, ToolCall) else entry | {"error": call.reason, "text": call.text}


def _tagged(text: str, opening: re.Match[str]) -> tuple[str, int]:
    """Return what stands in a tag, and where the tag ends: where it is closed, or opened again, or with the text.

    A closing tag within a string of the JSON that stands there does not close it.
    """
    begin, end = next(tag for tag in TAGS if tag[0] == opening[0])
    whole = begin == "<function="  # whose name is in its tag
    start = opening.start() if whole else opening.end()
    search = max([opening.end(), *(stop for _, stop in _values(text, start))])
    close = text.find(end, search) if end else -1
    again = text.find(begin, search)
    if close >= 0 and not 0 <= again < close:
        return text[start : close + len(end) * whole], close + len(end)
    stop = again if again >= 0 else len(text)
    return text[start:stop], stop


_GAP = re.compile(r"[\s;,]*(?=[{\[])")


def _values(text: str, at: int) -> Iterator[tuple[Any, int]]:
    """Yield the JSON objects and lists that stand one behind the other from `at` on, and where each ends."""
    decoder = json.JSONDecoder(parse_constant=_no_number)
    while match := _GAP.match(text, at):
        try:
            value, at = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return
        yield value, at


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _read(inside: str, offered: Offered) -> list[Call]:
    """Read what stands in a tag; whatever it is, it is at least one call."""
    text = inside.strip()
    if text.startswith("<function="):
        return _functions(text, offered)
    named = re.fullmatch(r"(?P<name>[\w.-]+)\s*(?:\[ARGS\])?\s*(?P<arguments>\{.*\})", text, re.S)
    if named:  # Mistral's newer form
        return [_call({"name": named["name"], "arguments": named["arguments"]}, text)]
    if text.startswith(("{", "[{", '["')):
        return _json(text)
    expected = 'expected {"name": ..., "arguments": {...}}: '
    try:
        written = parse_python_calls(text.removeprefix("functools"), {name: _names(offered[name]) for name in offered})
    except ValueError as error:
        return [BadCall(text, f"{expected}the call can not be read as Python either: {error}")]
    return [_storable(ToolCall(name, arguments), text) for name, arguments in written]


def _json(text: str) -> list[Call]:
    calls: list[Call] = []
    at = 0
    for value, end in _values(text, 0):
        at = end
        calls += [_call(one, text) for one in (value if isinstance(value, list) else [value])]
    if rest := text[at:].strip(" \t\r\n;,"):  # then nothing of it is called
        reason = f"behind the JSON stands {rest[:80]!r}" if at else _fault(rest)
        match = _BARE.match(text)
        return [BadCall(text, reason, match["name"] if match else "")]
    return calls or [BadCall(text, "the list of calls is empty")]


def _fault(text: str) -> str:
    """Say why a text is no JSON."""
    try:
        json.loads(text, parse_constant=_no_number)
        return f"expected a call, found {text[:80]!r}"
    except RecursionError:
        return "the JSON is nested too deeply"
    except ValueError as error:
        return f"this is no JSON: {error}"


def _call(value: Any, text: str) -> Call:
    """Make a call of what a model wrote as JSON."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = {"id": value.get("id"), **value["function"]}
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not name:
        return BadCall(text, f'expected {{"name": ..., "arguments": {{...}}}}: found {json.dumps(value)[:80]}')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            return BadCall(text, f"the arguments are no JSON: {error}", name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return BadCall(text, f"the arguments must be an object, by name: found {json.dumps(arguments)[:80]}", name)
    return _storable(ToolCall(name, dict(arguments), str(value.get("id") or "")), text)


def _storable(call: ToolCall, text: str) -> Call:
    """Refuse what no template writes and no tokenizer takes: infinity, and half characters, which JSON may hold."""
    name = call.name.encode("utf-8", "replace").decode()
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return BadCall(text, "the arguments hold half a character (a surrogate alone)", name)
    except (ValueError, RecursionError) as error:
        return BadCall(text, f"the arguments can not be written as JSON: {error}", name)
    return call


def _functions(text: str, offered: Offered) -> list[Call]:
    """Read `<function=f>` with JSON or with `<parameter=x>` in it."""
    calls: list[Call] = []
    at = 0
    while match := _FUNCTION.match(text, at):
        at = match.end()
        name, body = match["name"].strip(), match["body"].strip()
        if body.startswith("{"):
            calls.append(_call({"name": name, "arguments": body}, text))
            continue
        arguments, rest = {}, 0
        while parameter := _PARAMETER.match(body, rest):
            rest = parameter.end()
            arguments[parameter["name"].strip()] = _typed(parameter["value"], offered.get(name, {}), parameter["name"])
        if body[rest:]:
            calls.append(BadCall(text, f"expected <parameter=...>...</parameter>: found {body[rest:][:80]!r}", name))
        else:
            calls.append(_storable(ToolCall(name, arguments), text))
    if text[at:].strip():
        calls.append(BadCall(text, f"expected <function=...>...</function>: found {text[at:][:80]!r}"))
    return calls


def _typed(value: str, schema: Mapping[str, Any], name: str) -> Any:
    """Return text where the tool wants text, else what it says as JSON."""
    wanted = schema.get("properties", {}).get(name.strip(), {})
    if wanted.get("type") == "string":
        return value
    try:
        return json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return value


def _names(schema: Mapping[str, Any]) -> Sequence[str]:
    return list(schema.get("properties", {}))


def _untagged(text: str, offered: Offered) -> list[Call]:
    """Read a turn that is nothing but calls of tools that are offered."""
    if (match := _BARE.match(text)) and match["name"] in offered:
        calls = _json(text)
        # A list of people, of whom one is called like a tool, is no call.
        known = all(call.name in offered for call in calls if isinstance(call, ToolCall))
        return calls if known and not _foreign(text) else []
    if (match := _CODE.match(text)) and match["name"] in offered and text.endswith("]"):
        return _read(text, offered)
    return []


def _foreign(text: str) -> bool:
    """Return whether there are keys that no call has."""
    values = [one for value, _ in _values(text, 0) for one in (value if isinstance(value, list) else [value])]
    return any(isinstance(value, Mapping) and not _KEYS.issuperset(value) for value in values)
