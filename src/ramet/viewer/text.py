"""Text that a model or a file wrote, made safe to look at: what cannot be seen is spelled out."""

from __future__ import annotations

import html
import unicodedata

# Drawn as nothing though they are no control or format characters: fillers and variation selectors.
_BLANK = frozenset({0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0xFE00, 0xFE10)})


def visible(text: str) -> str:
    r"""Replace every character that steers or hides, but for line breaks and tabs, by its escape.

    Control characters (a terminal obeys them), format characters (they turn or hide text), lone surrogates (no encoding
    holds them), private and unassigned ones.

    >>> visible("red \x1b[31m, bell \a, turned \u202e, nothing \x00")
    'red \\x1b[31m, bell \\x07, turned \\u202e, nothing \\x00'
    """
    return "".join(_spelled(char) if _hidden(char) else char for char in text)


def html_text(text: str) -> str:
    """Escape for HTML, element or attribute, with hidden characters spelled out.

    >>> html_text("<script>alert('&amp;')</script>")
    '&lt;script&gt;alert(&#x27;&amp;amp;&#x27;)&lt;/script&gt;'
    """
    return html.escape(visible(text), quote=True)


def _hidden(char: str) -> bool:
    if char in "\n\t":
        return False
    category = unicodedata.category(char)
    return category[0] == "C" or category in ("Zl", "Zp") or ord(char) in _BLANK or 0xE0100 <= ord(char) <= 0xE01EF


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
