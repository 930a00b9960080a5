"""Typed functions become tools: name, description, schema, and arguments that are checked before each call."""

from __future__ import annotations

import asyncio
import enum
import functools
import random
from typing import Annotated, Any, Literal

import pydantic
import pytest

from ramet.tools import Tool, ToolError, calculator, tool
from ramet.types import Episode

EPISODE = Episode({"word": "fir"}, [], random.Random(0))


class Side(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


class Place(pydantic.BaseModel):
    row: int
    side: Side = Side.LEFT


def many(  # noqa: D417
    text: str,
    count: int = 1,
    share: float | None = None,
    kinds: list[Literal["a", "b"]] | None = None,
    place: Place | None = None,
    flag: Annotated[bool, pydantic.Field(description="as it is")] = False,
) -> str:
    """Do much.

    And more of it.

    Args:
        text: what is said,
            over two lines
        count (int): how often

    Returns:
        nothing that matters
    """
    return repr((text, count, share, kinds, place, flag))


def test_the_schema_says_types_defaults_and_descriptions() -> None:
    made = tool(many)
    assert (made.name, made.description) == ("many", "Do much.\n\nAnd more of it.")
    properties = made.schema["properties"]
    assert properties["text"] == {"description": "what is said, over two lines", "type": "string"}
    assert properties["count"] == {"default": 1, "description": "how often", "type": "integer"}
    assert properties["share"] == {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None}
    assert properties["kinds"]["anyOf"][0] == {"items": {"enum": ["a", "b"], "type": "string"}, "type": "array"}
    assert properties["flag"] == {"default": False, "description": "as it is", "type": "boolean"}
    assert made.schema["required"] == ["text"]
    assert set(made.schema) == {"type", "properties", "required", "$defs"}


def test_arguments_are_converted_as_the_annotations_say() -> None:
    given = {"text": "x", "count": "3", "share": 1, "kinds": ["a"], "place": {"row": 2, "side": "right"}, "flag": True}
    place = Place(row=2, side=Side.RIGHT)
    assert tool(many).call(given, EPISODE) == repr(("x", 3, 1.0, ["a"], place, True))


def test_a_default_is_the_functions_own_and_is_not_shared() -> None:
    def collect(word: str, known: list[str] = []) -> list[str]:  # noqa: B006
        """Collect."""
        return [*known, word]

    made = tool(collect)
    assert made.call({"word": "a"}, EPISODE) == ["a"]
    assert "default" not in made.schema["properties"]["known"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "text: Field required"),
        ({"text": "x", "cuont": 1}, "cuont: Extra inputs"),
        ({"text": "x", "count": "many"}, "count: Input should be a valid integer"),
        ({"text": 5}, "text: Input should be a valid string"),
        ({"text": "x", "kinds": ["c"]}, "kinds.0: Input should be 'a' or 'b'"),
        ({"text": "x", "place": {"row": None}}, "place.row: "),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolError, match="many can not take these arguments: .*" + said):
        tool(many).call(arguments, EPISODE)


def test_names_that_pydantic_keeps_for_itself_are_names_like_others() -> None:
    def odd(json: str, copy: int, model_config: int, _hidden: int = 0) -> str:
        """Use odd names."""
        return f"{json}{copy}{model_config}{_hidden}"

    made = tool(odd)
    assert list(made.schema["properties"]) == ["json", "copy", "model_config", "_hidden"]
    assert made.call({"json": "a", "copy": 1, "model_config": 2, "_hidden": 3}, EPISODE) == "a123"


def test_a_parameter_called_title_stays() -> None:
    def book(title: str) -> str:
        """Find a book."""
        return title

    assert tool(book).schema["properties"] == {"title": {"type": "string"}}


def test_an_episode_is_handed_over_and_is_no_part_of_the_schema() -> None:
    def look(episode: Episode, key: str) -> str:
        """Look."""
        return str(episode.row[key])

    made = tool(look)
    assert list(made.schema["properties"]) == ["key"]
    assert made.call({"key": "word"}, EPISODE) == "fir"
    with pytest.raises(ToolError, match="episode: Extra"):
        made.call({"key": "word", "episode": 1}, EPISODE)


def test_async_functions_and_methods_are_tools() -> None:
    class Shop:
        def __init__(self) -> None:
            self.sold: list[str] = []

        async def sell(self, what: str) -> int:
            """Sell something."""
            self.sold.append(what)
            return len(self.sold)

    shop = Shop()
    made = tool(shop.sell)
    assert asyncio.run(made.call({"what": "tea"}, EPISODE)) == 1
    assert (made.name, list(made.schema["properties"]), shop.sold) == ("sell", ["what"], ["tea"])


def test_fields_of_sphinx_describe_parameters_too() -> None:
    def go(to: str, by: str = "foot") -> str:
        """Go there.

        :param to: the place
        :param str by: how,
            and with whom
        :returns: nothing
        """
        return to + by

    made = tool(go)
    assert made.description == "Go there."
    assert [one["description"] for one in made.schema["properties"].values()] == ["the place", "how, and with whom"]


def test_a_tool_is_left_as_it_is() -> None:
    made = tool(calculator)
    assert tool(made) is made


def untyped(x) -> str:  # type: ignore[no-untyped-def]
    """Say nothing of x."""
    return str(x)


def starred(*words: str) -> str:
    """Take any number."""
    return "".join(words)


def keywords(**options: str) -> str:
    """Take anything."""
    return str(options)


def by_place(x: int, /) -> int:
    """Take x by its place."""
    return x


def unknown(x: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Take what is nowhere."""
    return 0


def strange(x: random.Random) -> int:
    """Take what JSON can not say."""
    return 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (untyped, "parameter x has no type"),
        (starred, r"\*args and \*\*kwargs"),
        (keywords, r"\*args and \*\*kwargs"),
        (by_place, "x is positional only"),
        (unknown, "name 'Nowhere' is not defined"),
        (strange, "can not be read from JSON"),
        (functools.partial(many, count=2), "a named function"),
        ("many", "a named function"),
    ],
)
def test_what_can_be_no_tool_says_why(function: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        tool(function)


def test_a_lambda_has_no_name_for_a_model() -> None:
    with pytest.raises(ValueError, match="a tool's name"):
        tool(lambda: "")


@pytest.mark.parametrize("name", ["", "two words", "1st", "ä", "x" * 129])
def test_names_are_those_that_models_can_call(name: str) -> None:
    with pytest.raises(ValueError, match="a tool's name"):
        Tool(name, "", {"type": "object"}, lambda arguments, episode: "")


def test_a_schema_is_of_an_object_and_call_a_function() -> None:
    with pytest.raises(ValueError, match='"type": "object"'):
        Tool("x", "", {}, lambda arguments, episode: "")
    with pytest.raises(TypeError, match="call must be a function"):
        Tool("x", "", {"type": "object"}, 5)  # type: ignore[arg-type]
