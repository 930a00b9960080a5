"""Typed Python functions as tools: the schema that a model reads, and the check of what it calls them with."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from ramet.types import Episode

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):\s*$|^>>> ", re.M)
_ENTRY = re.compile(r"^(?P<indent>\s+)(?P<name>\w+)\s*(?:\([^)]*\))?:\s*(?P<text>.*)$")
_FIELD = re.compile(r"^:param\s+(?:[^:]*\s)?(?P<name>\w+):\s*(?P<text>.*(?:\n[ \t]+.*)*)$", re.M)


class ToolError(RuntimeError):
    """What a tool raises to answer the model with "error: " and this text; any other exception is named as well."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that a model may call: a name, what it does, the JSON schema of its arguments, and the function.

    `call(arguments, episode)`, sync or async, returns text, or anything that can be written as JSON; what it raises is
    answered to the model. `tool` makes one of a typed function.

    >>> echo = Tool("echo", "Say it again.", {"type": "object"}, lambda arguments, episode: str(dict(arguments)))
    >>> echo.call({"x": 1}, None)
    "{'x': 1}"
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    call: Callable[[Mapping[str, Any], Episode], Any]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                "a tool's name must be a letter or '_' and up to 127 more letters, digits, '_', '.' or '-': "
                f"found {self.name!r}"
            )
        if not callable(self.call):
            raise TypeError(f"tool {self.name}: call must be a function of arguments and episode: found {self.call!r}")
        if not isinstance(self.schema, Mapping) or self.schema.get("type") != "object":
            raise ValueError(f'tool {self.name}: the schema must have "type": "object": found {self.schema!r}')


def tool(function: Tool | Callable[..., Any]) -> Tool:
    """Make a `Tool` of a typed function, sync or async; a `Tool` is returned as it is.

    The name is the function's. The description is its docstring up to the first section ("Args:", "Returns:", ...); an
    argument's is what "Args:" or ":param x:" says of it, or `Annotated[int, pydantic.Field(description=...)]`. The
    arguments that a model gives are checked and converted as the annotations say, by pydantic, before each call. A
    parameter that is annotated `Episode` is handed the episode, and is no part of the schema.

    Raises `TypeError` for what has no name or signature, for a parameter without a type, for *args and **kwargs, and
    for a type that has no JSON schema.

    >>> def repeat(word: str, times: int = 2) -> str:
    ...     '''Write a word several times.
    ...
    ...     Args:
    ...         times: how often
    ...     '''
    ...     return word * times
    >>> made = tool(repeat)
    >>> made.name, made.description, made.schema["required"], made.schema["properties"]["times"]
    ('repeat', 'Write a word several times.', ['word'], {'default': 2, 'description': 'how often', 'type': 'integer'})
    >>> made.call({"word": "ab", "times": "3"}, None)
    'ababab'
    """
    if isinstance(function, Tool):
        return function
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        raise TypeError(f"a tool must be a named function or a ramet.tools.Tool: found {function!r}")
    description, said = _documented(inspect.getdoc(function) or "")
    parameters = _parameters(function, name)
    episodes = [parameter for parameter, (kind, _) in parameters.items() if kind is Episode]
    model, fields = _model(name, {key: value for key, value in parameters.items() if key not in episodes}, said)

    def given(arguments: Mapping[str, Any], episode: Episode) -> dict[str, Any]:
        values = _checked(model, name, arguments)
        own = {fields[field]: getattr(values, field) for field in sorted(values.model_fields_set)}
        return own | dict.fromkeys(episodes, episode)

    def call(arguments: Mapping[str, Any], episode: Episode) -> Any:
        return function(**given(arguments, episode))

    async def call_async(arguments: Mapping[str, Any], episode: Episode) -> Any:
        return await function(**given(arguments, episode))

    return Tool(name, description, _schema(model, name), call_async if is_async(function) else call)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _parameters(function: Callable[..., Any], name: str) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default (`Parameter.empty` without one) of each parameter, by name."""
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"tool {name}: a type is not known where the function is defined: {error}; import it at run time, "
            "at the top of the module"
        ) from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"tool {name}: its signature can not be read: {error}") from error
    found = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {name}: a model can not know what *args and **kwargs take: found {parameter}")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"tool {name}: arguments are given by name: {parameter.name} is positional only")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name} has no type: write {parameter.name}: str, say")
        found[parameter.name] = (hints[parameter.name], parameter.default)
    return found


def _model(
    name: str, parameters: Mapping[str, tuple[Any, Any]], said: Mapping[str, str]
) -> tuple[type[pydantic.BaseModel], dict[str, str]]:
    """Return a model of the arguments, and the parameter of each of its fields: pydantic reserves many names."""
    definitions: dict[str, Any] = {}
    fields = {}
    for number, (parameter, (kind, default)) in enumerate(parameters.items()):
        fields[f"p{number}"] = parameter
        typed = Annotated[kind, pydantic.Field(description=said[parameter])] if parameter in said else kind
        definitions[f"p{number}"] = (typed, _field(parameter, default))
    try:
        config = pydantic.ConfigDict(extra="forbid", validate_default=False)
        return pydantic.create_model(name, __config__=config, **definitions), fields
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise TypeError(f"tool {name}: a parameter's type can not be read from JSON: {error}") from error


def _field(parameter: str, default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return pydantic.Field(alias=parameter)
    if default is None or isinstance(default, (str, int, float, bool)):
        return pydantic.Field(default, alias=parameter)
    return pydantic.Field(default_factory=lambda: default, alias=parameter)  # of a kind that a schema need not show


class _Plain(GenerateJsonSchema):
    """JSON schemas without titles, which say the name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schema(model: type[pydantic.BaseModel], name: str) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(schema_generator=_Plain)
    except pydantic.errors.PydanticUserError as error:
        raise TypeError(f"tool {name}: a parameter's type has no JSON schema: {error}") from error
    return {key: value for key, value in schema.items() if key not in ("title", "additionalProperties")}


def _checked(model: type[pydantic.BaseModel], name: str, arguments: Mapping[str, Any]) -> pydantic.BaseModel:
    try:
        return model.model_validate(dict(arguments))
    except pydantic.ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False)[:5]
        ]
        raise ToolError(f"{name} can not take these arguments: {'; '.join(faults)}") from None


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into what the function does and what it says of each parameter."""
    said = {match["name"]: " ".join(match["text"].split()) for match in _FIELD.finditer(text)}
    ends = [match.start() for match in (_SECTION.search(text), re.search(r"^:\w+", text, re.M)) if match]
    section = re.search(r"^(?:Args|Arguments|Parameters):\s*$", text, re.M)
    if section:
        said |= _entries(text[section.end() :].splitlines()[1:])
    return text[: min(ends, default=len(text))].strip(), said


def _entries(lines: list[str]) -> dict[str, str]:
    """Read "name: text" or "name (type): text" lines, each with the deeper lines below it, up to one at the margin."""
    said: dict[str, str] = {}
    name, indent = "", None
    for line in lines:
        if line.strip() and not line[0].isspace():
            break
        entry = _ENTRY.match(line)
        if entry and (indent is None or len(entry["indent"]) <= indent):
            name, indent = entry["name"], len(entry["indent"])
            said[name] = entry["text"].strip()
        elif name and line.strip():
            said[name] = f"{said[name]} {line.strip()}".strip()
    return said
