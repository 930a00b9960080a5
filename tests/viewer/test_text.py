"""What cannot be seen is spelled out; what can be is left as it is."""

from __future__ import annotations

import html
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.viewer.text import html_text, visible

ANY = st.text(st.characters())  # lone surrogates included


@settings(deadline=None, max_examples=200)
@given(ANY)
def test_no_control_format_or_surrogate_character_is_left_and_the_text_can_be_encoded(text: str) -> None:
    shown = visible(text)
    assert all(char in "\n\t" or unicodedata.category(char)[0] != "C" for char in shown)
    assert visible(shown) == shown
    shown.encode("utf-8")


@settings(deadline=None, max_examples=100)
@given(ANY)
def test_html_text_has_no_markup_and_unescapes_to_what_is_visible(text: str) -> None:
    escaped = html_text(text)
    assert not set(escaped) & set("<>\"'")
    assert html.unescape(escaped) == visible(text)


def test_ordinary_text_of_any_script_is_untouched() -> None:
    text = "2 + 2 = 4\n\tשלום, مرحبا, 你好, é, \U0001f600 [bold] \\x00"
    assert visible(text) == text


def test_each_kind_of_hidden_character_by_its_escape() -> None:
    hidden = "\x00\x1b\x7f\x9b\r\xad\u200b\u200f\u202e\u2028\ufe0f\ufeff\ud800\U000e0041\U000e0100"
    assert visible(hidden) == (
        "\\x00\\x1b\\x7f\\x9b\\x0d\\xad\\u200b\\u200f\\u202e\\u2028\\ufe0f\\ufeff\\ud800\\U000e0041\\U000e0100"
    )
