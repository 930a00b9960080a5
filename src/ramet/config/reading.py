"""From TOML text to a checked configuration and back, with errors that name the key."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ramet import toml
from ramet.config.sections import Section, TrainConfig
from ramet.errors import ConfigError


def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file, with `key=value` overrides on top.

    Raises `ConfigError`: no such file, no TOML, an unknown key, a wrong type or range, or settings that contradict.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="give the path of a TOML file") from error
    return parse(text, overrides, where=str(path))


def parse(text: str, overrides: Sequence[str] = (), where: str = "the text") -> TrainConfig:
    """Read TOML text, with `key=value` overrides on top; `where` names the text in errors.

    A value is written as in TOML, and may be a bare string. The bare word `none` empties a key that may be absent; a
    whole section is replaced by an inline table: `task={name="arithmetic"}`.

    >>> parse("steps = 3", ["rollout.max_new_tokens=8", "optimizer.learning_rate=1e-4"]).optimizer.learning_rate
    0.0001
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is no valid TOML: {error}") from error
    sources: dict[str, str] = {}
    for override in overrides:
        sources[toml.override(data, override)] = f'the override "{override}"'
    return checked(data, where, sources)


def checked(data: Mapping[str, Any], where: str, sources: Mapping[str, str] | None = None) -> TrainConfig:
    """Make the tree from nested mappings; `where` names them in errors, `sources` where single keys come from."""
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        raise _explain(error.errors(), data, where, sources or {}) from error


def explained_section(section: type[BaseModel], error: ValidationError, data: Mapping[str, Any]) -> ConfigError:
    """Return as a `ConfigError` what is wrong with the keys that a section was called with."""
    place = next((key for key, field in TrainConfig.model_fields.items() if _section(field) is section), None)
    faults = error.errors()
    if place is not None:
        faults = [{**fault, "loc": (place, *fault["loc"])} for fault in faults]
        data = {place: dict(data)}
    return _explain(faults, data, f"{section.__name__}(...)", {})


def settings(section: type[Section] = TrainConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Return every key by its dotted name, in order, with pydantic's description, default and type.

    >>> settings()["kl.coefficient"].default
    0.0
    """
    found: dict[str, FieldInfo] = {}
    for key, field in section.model_fields.items():
        inner = _section(field)
        found.update({prefix + key: field} if inner is None else settings(inner, f"{prefix}{key}."))
    return found


def dump(config: TrainConfig) -> str:
    """Write TOML text that loads back to an equal config, defaults included."""
    return toml.dumps(config.model_dump(exclude_none=True))


def _section(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds, or None where it holds a value."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _explain(
    found: Sequence[ErrorDetails], data: Mapping[str, Any], where: str, sources: Mapping[str, str]
) -> ConfigError:
    """Turn pydantic's report into one message: what was expected, what was found, where, and what to do."""
    # Unknown keys come first: a misspelt key also shows up as a missing one.
    faults = sorted(found, key=lambda fault: fault["type"] != "extra_forbidden")
    first = faults[0]
    key, value = _locate(first["loc"], data)
    found_in = next((s for k, s in sources.items() if k == key or f"{k}.".startswith(f"{key}.")), None)
    found_in = found_in or next((s for k, s in sources.items() if key.startswith(f"{k}.")), where)
    others = list(dict.fromkeys(_locate(fault["loc"], data)[0] for fault in faults[1:]))
    more = f" (also wrong: {', '.join(other for other in others if other != key)})" if set(others) - {key} else ""
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, ConfigError):
        return ConfigError(f"{reason.message}, in {where}", hint=reason.hint)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown key {key} in {found_in}{more}", hint=_nearest(key))
    field = settings().get(key)
    about = None if field is None or not field.description else f"{key}: {field.description}"
    if first["type"] == "missing" and not isinstance(value, list):
        return ConfigError(f"{key} is missing in {where}{more}", hint=about or f"add a section [{key}]")
    same = [fault for fault in faults if _locate(fault["loc"], data)[0] == key]
    expected = " or ".join(dict.fromkeys(_expectation(fault) for fault in same))
    return ConfigError(f"{key}: expected {expected}, found {_show(value)} in {found_in}{more}", hint=about)


def _expectation(fault: ErrorDetails) -> str:
    """Return what pydantic expected, as words that follow "expected"."""
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "a section (a TOML table)"
    if fault["type"] == "missing":
        return "more items"
    text = str(fault.get("ctx", {}).get("error", fault["msg"]))
    text = re.sub(r"^(expected|\w+ should (be|have|match)) ", "", text)
    text = re.sub(r"^(greater|less) than", r"a number \g<0>", text)
    return text.replace("a valid integer", "an integer").replace("a valid ", "a ")


def _locate(loc: tuple[int | str, ...], data: Any) -> tuple[str, Any]:
    """Return the dotted key and the value that an error is about.

    pydantic ends some locations with the name of a type that it tried: what is not in the data is no key.
    """
    known = {*settings(), *TrainConfig.model_fields}
    keys: list[str] = []
    for part in loc:
        inside = isinstance(data, dict) and part in data
        if inside or (isinstance(data, list) and part in range(len(data))):
            data = typing.cast(Any, data)[part]
        elif ".".join([*keys, str(part)]) not in known:
            break
        keys.append(str(part))
    return ".".join(keys), data


def _show(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({names.get(type(value), type(value).__name__)})"


def _nearest(key: str) -> str:
    """Say which known key was probably meant, and which ones there are beside it."""
    known = list(settings())
    parent, _, leaf = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    beside = list(dict.fromkeys(name.removeprefix(prefix).split(".")[0] for name in known if name.startswith(prefix)))
    near = [prefix + name for name in difflib.get_close_matches(leaf, beside, n=1)]
    near = near or [name for name in known if difflib.get_close_matches(leaf, [name.rpartition(".")[2]], cutoff=0.8)]
    guess = f"did you mean {near[0]}? " if near else ""
    return f"{guess}known {f'in [{parent}]' if parent else 'at the top'}: {', '.join(beside)}"
