"""Ragged rows: the only folder that knows how rows of different lengths are stored.

`Ragged` is the one form inside the library: flat values plus where each row starts. Outside, the same rows may be a
padded tensor with a mask, a dense tensor, a jagged nested tensor (with or without room between its rows) or a lazy
stack of rows. Which entries are real is said by a mask or by lengths, never by the value of a token.

Letters: B rows, L tokens of a row.
"""

from __future__ import annotations

from ramet.ragged.compacting import compact
from ramet.ragged.growth import Appender
from ramet.ragged.reading import check_td, pad, read_text, rows
from ramet.ragged.stacking import as_nested_tensor, as_padded_tensor
from ramet.ragged.storage import Ragged, Side, choose, choose_padded, positions
from ramet.ragged.text import Text

__all__ = [
    "Appender",
    "Ragged",
    "Side",
    "Text",
    "as_nested_tensor",
    "as_padded_tensor",
    "check_td",
    "choose",
    "choose_padded",
    "compact",
    "pad",
    "positions",
    "read_text",
    "rows",
]
