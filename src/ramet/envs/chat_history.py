"""The messages of a batch of conversations: rows that share what they have in common, and are read when asked for.

A row is a chain of turns, each of which knows the turns before it. So to append costs the same after any number of
turns, two continuations of one conversation do not know of each other, and what a model said stays tokens until
somebody reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol, TypeAlias

from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from ramet.ragged import Text
from ramet.ragged.text import text_in
from ramet.ragged.text_entry import column_of, entry_of
from ramet.specs import KeyPath, describe
from ramet.transforms.entries import entry
from ramet.types import Message


class Part(Protocol):
    """What all rows of a batch say in one step."""

    def __len__(self) -> int:
        """How many rows there are."""

    def messages(self, row: int) -> Sequence[Message]:
        """Return the messages of a row."""


class Given:
    """Messages that are there."""

    def __init__(self, rows: Sequence[Sequence[Message]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def messages(self, row: int) -> Sequence[Message]:
        """Return the messages of a row."""
        return self._rows[row]


class Said:
    """One message in each row, whose content is a text that may be tokens still."""

    def __init__(self, role: str, text: Text) -> None:
        self._role, self._text = role, text
        self._strings: list[str] | None = None

    def __len__(self) -> int:
        return len(self._text)

    def messages(self, row: int) -> Sequence[Message]:
        """Return the message of a row; the first that is asked for reads all rows."""
        if self._strings is None:
            self._strings = self._text.tolist()
        return [{"role": self._role, "content": self._strings[row]}]


Turn: TypeAlias = "tuple[Turn | None, Part, int] | None"
"""The turns before it, and which row of which part it is; None before the first."""


class History:
    """Conversations [B] that are never changed: to append makes a new one, at the cost of what is appended.

    >>> asked = History.of([[{"role": "user", "content": "2+2?"}]])
    >>> one, other = (asked.append(Said("assistant", Text.of([text]))) for text in "45")
    >>> [message["content"] for message in one.messages(0)], [message["content"] for message in other.messages(0)]
    (['2+2?', '4'], ['2+2?', '5'])
    """

    __slots__ = ("_before", "_part", "_turns")

    _turns: list[Turn] | None
    _before: History | None  # what `_part` stands behind in all rows, until somebody asks for the turns
    _part: Part | None

    def __init__(self, turns: list[Turn]) -> None:
        self._turns, self._before, self._part = turns, None, None

    @property
    def turns(self) -> list[Turn]:
        """The last turn of each row; what was appended to all rows is dealt out to them the first time."""
        path, node = [], self
        while node._turns is None:
            path.append(node)
            assert node._before is not None
            node = node._before
        turns = node._turns
        for node in reversed(path):
            assert node._part is not None
            turns = node._turns = list(zip(turns, repeat(node._part), range(len(turns)), strict=False))
            node._before = node._part = None
        return turns

    @classmethod
    def of(cls, rows: Sequence[Sequence[Message]]) -> History:
        """Take the messages of each row."""
        return cls([None] * len(rows)).append(Given(rows))

    def __len__(self) -> int:
        return len(self._part if self._turns is None and self._part is not None else self.turns)

    def __reduce__(self) -> tuple[Any, ...]:
        return (History.of, (self.tolist(),))

    def append(self, part: Part, mask: Sequence[bool] | None = None) -> History:
        """Return the conversations with a part behind those that `mask` [B] names (None: all)."""
        grown = History.__new__(History)
        grown._turns, grown._before, grown._part = None, self, part
        return grown if mask is None else History(_chosen(mask, grown.turns, self.turns))

    def where(self, mask: Tensor, other: History) -> History:
        """Return the conversations of this where `mask` [B] is true, those of `other` elsewhere."""
        return History(_chosen(mask.tolist(), self.turns, other.turns))

    def messages(self, row: int) -> list[Message]:
        """Return the messages of a row: copies, so that nobody changes them here."""
        turn, parts = self.turns[row], []
        while turn is not None:
            parts.append(turn[1].messages(turn[2]))
            turn = turn[0]
        return [dict(message) for part in reversed(parts) for message in part]

    def tolist(self) -> list[list[Message]]:
        """Return the messages of each row."""
        return [self.messages(row) for row in range(len(self.turns))]

    def entry(self, batch: bool = True) -> Any:
        """Return what a TensorDict holds: for a batch [B], or without one."""
        return entry_of(self, batch)


class Objects:
    """One object in each row."""

    __slots__ = ("_items",)

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def tolist(self) -> list[Any]:
        """Return the objects."""
        return list(self._items)

    def where(self, mask: Tensor, other: Objects) -> Objects:
        """Return the objects of this where `mask` [B] is true, those of `other` elsewhere."""
        return Objects(_chosen(mask.tolist(), self._items, other._items))


def messages_entry(rows: Sequence[str | Message | Sequence[Message]], role: str = "assistant") -> Any:
    """Make an entry of a TensorDict [B] that holds messages, a list of them in each row; text is a message of `role`.

    tensordict makes a container for each row of a plain list; this is one for all. TypeError, which names the row, for
    anything else.

    >>> from tensordict import TensorDict
    >>> from ramet.ragged import rows
    >>> td = TensorDict({"query": messages_entry([[{"role": "user", "content": "2+2?"}], "3?"], role="user")}, [2])
    >>> rows(td, "query")
    [[{'role': 'user', 'content': '2+2?'}], [{'role': 'user', 'content': '3?'}]]
    """
    if isinstance(rows, str | Mapping):
        raise TypeError(f"expected a sequence with an item for each row: found {describe(rows)}")
    return History.of([as_messages(item, role, "messages", row) for row, item in enumerate(rows)]).entry()


def read_history(td: TensorDictBase, key: KeyPath) -> History:
    """Find the conversations of an entry, unread if they can be."""
    column = column_of(_get(td, key))
    if isinstance(column, History):
        return column
    return History.of([as_messages(item, "user", key, row) for row, item in enumerate(items_of(td, key))])


def read_part(td: TensorDictBase, key: KeyPath, role: str) -> Part:
    """Find what is said under a key: text is a message of `role`, and is not read for it."""
    value = _get(td, key)
    column = column_of(value)
    text = column if isinstance(column, Text) else text_in(value)
    if text is not None:
        return Said(role, text)
    return Given([as_messages(item, role, key, row) for row, item in enumerate(items_of(td, key))])


def items_of(td: TensorDictBase, key: KeyPath) -> list[Any]:
    """Return what an entry that holds no tensors has for each row (one without batch); KeyError if there is none."""
    if isinstance(td, LazyStackedTensorDict):
        return [item for row in td.unbind(0) for item in items_of(row, key)]
    value = _get(td, key)
    if value is None:
        raise KeyError(f"there is no {key!r}: there are {names(td)}")
    if isinstance(value, Tensor):
        raise TypeError(f"{key!r} must hold text or messages: found {describe(value)}")
    column = column_of(value)
    if column is not None:
        return list(column.tolist())
    if type(value) is NonTensorStack and value.stack_dim == 0 and value.batch_dims == 1:
        try:  # the method takes five microseconds a row
            return [vars(row)["_non_tensordict"]["data"] for row in value.tensordicts]
        except KeyError:  # a stack of stacks
            pass
    if isinstance(value, TensorDictBase) and not hasattr(value, "tolist"):  # tensordict made it of mappings
        return [row.to_dict() for row in value.unbind(0)] if td.batch_dims else [value.to_dict()]
    items = value.tolist()
    return list(items) if td.batch_dims else [items]


def names(td: TensorDictBase) -> list[KeyPath]:
    """Return the keys of all entries, for messages."""
    return sorted(td.keys(True, True, is_leaf=is_leaf_nontensor), key=str)


def as_messages(item: Any, role: str, key: KeyPath, row: int) -> list[Message]:
    """Return text, a message or several as messages; TypeError, which names key and row, for anything else."""
    if isinstance(item, str):
        return [{"role": role, "content": item}]
    if isinstance(item, Mapping):
        item = [item]
    if not isinstance(item, Sequence):
        raise TypeError(f"{key!r}, row {row}: expected text, a message or a list of messages, found {describe(item)}")
    for message in item:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(
                f'{key!r}, row {row}: expected messages such as {{"role": "user", "content": "..."}}, '
                f"found {describe(message)}"
            )
    return [dict(message) for message in item]


def _get(td: TensorDictBase, key: KeyPath) -> Any:
    return None if isinstance(td, LazyStackedTensorDict) else entry(td, key)


def _chosen(flags: Sequence[bool], new: list[Any], old: list[Any]) -> list[Any]:
    return [a if flag else b for flag, a, b in zip(flags, new, old, strict=True)]
