"""What a chat template looks for in messages: the texts and numbers that its source compares with."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

MANY = 16
"""How many parts a text may have between markers, before it is like no other."""
Signature = tuple[Any, ...]
"""What a template can tell of a text or of a message, as far as its source says."""


@dataclass(frozen=True, slots=True)
class Markers:
    """What a template's source compares with: `texts` and `numbers`.

    Two messages with the same signature hold the same markers in the same places, and what stands between them is
    empty or not and has white space at its ends likewise. `read` is False where the source could not be read: nothing
    is known then.

    >>> markers = markers_of("{% set parts = m.content.split('</think>') %}")
    >>> markers.text("<think>a</think> b") == markers.text("<think>c</think> d")
    True
    >>> markers.text("a") == markers.text("<think>c</think> d")
    False
    """

    texts: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    read: bool = True
    tags: tuple[str, ...] = ()
    """The texts that are no words: longest first."""
    clock: bool = False
    """Whether the source reads the clock: what such a template wrote is not remembered."""

    @property
    def _tags(self) -> str:
        return "|".join(map(re.escape, self.tags))

    def text(self, text: str) -> Signature:
        """Return the signature of a text."""
        bare = text.strip()
        held = tuple(
            (marker, min(text.count(marker), 3), bare.startswith(marker), bare.endswith(marker))
            for marker in self.texts
            if marker in text
        )
        size = bisect_right(self.numbers, len(text)) if self.numbers else 0
        if not self.plain(text):
            gaps = re.split(self._tags, text)
            return held, size, tuple(_edges(gap) for gap in gaps) if len(gaps) <= MANY else text
        return held, size, _edges(text)

    def plain(self, text: str) -> bool:
        """Return whether a text holds no marker but words and white space."""
        return not any(marker in text for marker in self.tags)

    def value(self, value: Any) -> Signature:
        """Return the signature of anything that a message holds."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return "list", len(value), tuple(self.value(item) for item in value)
        if isinstance(value, dict):
            return "dict", tuple((str(key), self.value(item)) for key, item in value.items())
        return type(value).__name__, self.text(str(value))

    def message(self, message: Any) -> Signature:
        """Return the signature of a message: its role, and that of each other value by its name."""
        return tuple((key, value if key == "role" else self.value(value)) for key, value in sorted(message.items()))

    def count(self, messages: int) -> Signature:
        """Return a class of numbers of messages: each to 64 is one; beyond, a power of two or a number opens one."""
        return (messages if messages <= 64 else messages.bit_length() + 64), bisect_right(self.numbers, messages)


@functools.lru_cache(maxsize=256)
def markers_of(source: str) -> Markers:
    """Read the source of a chat template for what it compares with.

    >>> markers_of("{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}").texts
    ('</think>',)
    """
    import jinja2
    from jinja2 import ext, nodes, parser

    class Generation(ext.Extension):
        """The tag with which templates mark what a model wrote."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: parser.Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", Generation])
    try:
        tree = environment.parse(source)
    except jinja2.TemplateError:
        return Markers(read=False)
    texts: set[str] = set()
    numbers: set[int] = set()
    kinds = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign, nodes.Slice, nodes.Mod)
    for node in tree.find_all(kinds):
        for constant in node.find_all(nodes.Const):
            value = constant.value
            if isinstance(value, str) and 0 < len(value) <= 80:
                texts.add(value)
            elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1:
                numbers.add(abs(value))
    tags = [text for text in texts if not all(letter.isalnum() or letter.isspace() or letter == "_" for letter in text)]
    longest_first = tuple(sorted(tags, key=lambda tag: (-len(tag), tag)))
    clock = "strftime_now" in source
    return Markers(tuple(sorted(texts)), tuple(sorted(numbers)), tags=longest_first, clock=clock)


def _edges(text: str) -> Signature:
    bare = text.strip()
    return not bare, bare != text and text[:1].isspace(), bare != text and text[-1:].isspace()
