"""TOML beyond reading: `key=value` overrides, and a writer for tables of scalars and arrays."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from ramet.errors import ConfigError


def override(data: dict[str, Any], text: str) -> str:
    """Set one `dotted.key=value` in nested tables, and return the dotted key.

    The value is written as in TOML, and may be a bare string; the bare word `none` sets None. Raises `ConfigError`
    where there is no key or no `=`, or where the key leads through a value.

    >>> data = {"kl": {"place": "loss"}}
    >>> override(data, "kl.coefficient=1e-3"), override(data, "kl.place=reward"), data
    ('kl.coefficient', 'kl.place', {'kl': {'place': 'reward', 'coefficient': 0.001}})
    """
    dotted, equals, value = text.partition("=")
    parts = [part.strip() for part in dotted.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f'an override is written key=value: found "{text}"', hint="e.g. optimizer.learning_rate=1e-4")
    table = data
    for depth, part in enumerate(parts[:-1], start=1):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            key = ".".join(parts[:depth])
            raise ConfigError(f'{key} is a value and has no keys: found the override "{text}"', hint=f"set {key}=...")
        table = inner
    table[parts[-1]] = _parse(value.strip())
    return ".".join(parts)


def dumps(data: Mapping[str, Any]) -> str:
    """Write nested tables of booleans, numbers, strings and arrays of them; empty tables are left out.

    >>> print(dumps({"steps": 3, "kl": {"coefficient": 1e-05}, "task": {"options": {"digits": [1, 2]}}}))
    steps = 3
    <BLANKLINE>
    [kl]
    coefficient = 1e-05
    <BLANKLINE>
    [task.options]
    digits = [1, 2]
    <BLANKLINE>
    """
    return "\n\n".join(_tables(data, ())) + "\n"


def _parse(text: str) -> Any:
    if text == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text  # a line break inside the text makes no second key


def _tables(data: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the text of one table, then those of the tables inside it."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in data.items() if not isinstance(value, Mapping)]
    if lines:
        yield "\n".join(([f"[{'.'.join(map(_key, path))}]"] if path else []) + lines)
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _tables(value, (*path, key))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are valid in TOML too; DEL alone needs one in TOML and has none in JSON.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"TOML holds booleans, numbers, strings and arrays here: found {type(value).__name__}")
