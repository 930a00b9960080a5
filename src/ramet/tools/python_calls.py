"""Calls written as Python, read as a tree: literals only, and nothing is ever evaluated."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(.)", re.S)
_KNOWN = frozenset("\\'\"abfnrtvxNuU0123\n")


def parse_python_calls(text: str, parameters: Mapping[str, Sequence[str]]) -> list[tuple[str, dict[str, Any]]]:
    """Read `f(x=1)` or `[f(x=1), g(y="a")]`; return the name and the arguments of each call.

    `parameters` are the names of each function's parameters in order, for arguments without one. Raises `ValueError`
    for everything else: what is no call, and arguments that are no literals.

    >>> parse_python_calls('[add(a=1, b=-2.5), say("hi", loud=true)]', {"say": ["text", "loud"]})
    [('add', {'a': 1, 'b': -2.5}), ('say', {'text': 'hi', 'loud': True})]
    """
    # A backslash that escapes nothing stands for itself; ast.parse would warn of it.
    quiet = _ESCAPE.sub(lambda match: match[0] if match[1] in _KNOWN else "\\" + match[0], text.strip())
    try:
        node = ast.parse(quiet, mode="eval").body
        nodes = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
        if not nodes:
            raise ValueError("there is no call in it")
        return [_call(one, parameters) for one in nodes]
    except SyntaxError as error:
        raise ValueError(error.msg) from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None


def _call(node: ast.expr, parameters: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise ValueError(f"expected f(x=1), found {_shown(node)}")
    name = _dotted(node.func)
    known = parameters.get(name, ())
    if len(node.args) > len(known):
        raise ValueError(f"{name}: arguments must be given by name: found {_shown(node)}")
    arguments = {key: _literal(value) for key, value in zip(known, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError(f"{name}: each argument must be given once, by name: found {_shown(node)}")
        arguments[keyword.arg] = _literal(keyword.value)
    return name, arguments


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError(f"expected the name of a tool, found {_shown(node)}")


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, int, float))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _literal(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(f"arguments must be literals (nothing is evaluated): found {_shown(node)}")


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if not isinstance(key, str):
        raise ValueError(f"keys must be strings: found {key!r}")
    return key


def _shown(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 80 else text[:79] + "…"
