"""A tokenizer with chat templates for the tests of conversations, and what the templates write, in plain Python."""

from __future__ import annotations

from typing import Any

from ramet.models.tiny import tiny_tokenizer

MARKED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Appends only."""
FORGETS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('!')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "|\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Leaves out what the assistant said before a "!", once there are later messages."""


def tokenizer_with(template: str = MARKED) -> Any:
    """Make the tiny tokenizer speak by a template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def marked(messages: list[dict[str, Any]]) -> str:
    """Write messages as `MARKED` does, the opening of the next turn behind them."""
    return "".join(f"<{m['role']}>{m['content']}|\n" for m in messages) + "<assistant>"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
