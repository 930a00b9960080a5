"""Where prompts come from: rows of data, a seeded order, groups."""

from ramet.prompts.order import row_at
from ramet.prompts.prompts import Prompts, read_rows, refuse_shared, tokenize_prompt

__all__ = ["Prompts", "read_rows", "refuse_shared", "row_at", "tokenize_prompt"]
