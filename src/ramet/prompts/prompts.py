"""Prompts as rows of data, tokenised once and dealt out in groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from tensordict import TensorDict
from torch import Tensor

from ramet.errors import ConfigError, DataError, PromptTooLong, half_character
from ramet.prompts.order import row_at
from ramet.ragged import Ragged
from ramet.types import Key, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TooLong: TypeAlias = Literal["refuse", "drop", "keep_end", "keep_start"]
"""What to do with a prompt over the limit: raise, leave the row out, or keep its last or first tokens."""

Row: TypeAlias = Mapping[str, Any]
"""One row of data: "prompt" (text or messages) and any other columns."""


def read_rows(source: str | Path | Iterable[Any]) -> list[Row]:
    """Read rows from a JSONL file, a list or a `datasets` dataset of strings, message lists or mappings with "prompt".

    A mapping without "prompt" but with "messages" uses those. Other columns travel along, untouched. Raises `DataError`
    for an empty source and for a row that is none of these, naming the row.

    >>> read_rows(["2+2=", {"prompt": "3+3=", "answer": "6"}])
    [{'prompt': '2+2='}, {'prompt': '3+3=', 'answer': '6'}]
    """
    path = isinstance(source, (str, Path))
    if isinstance(source, Mapping) or not (path or isinstance(source, Iterable)):
        keys = f" with the keys {sorted(map(str, source))[:8]}" if isinstance(source, Mapping) else ""
        raise DataError(
            f"expected the path of a JSONL file, a list or a dataset of prompts: found a {type(source).__name__}{keys}",
            hint="put a single prompt into a list; choose one split of a dataset that has several",
        )
    name = str(source) if path else f"the {type(source).__name__} of prompts"
    items = _read_jsonl(Path(source)) if isinstance(source, (str, Path)) else source
    rows = [_as_row(item, number, name) for number, item in enumerate(items)]
    for number, row in enumerate(rows):
        half = half_character(row["prompt"]) if isinstance(row["prompt"], str) else _half_of(row["prompt"])
        if half:
            raise DataError(
                f"row {number} of {name}: its prompt is no text: it holds {half}",
                hint="it comes of text that was cut inside a character: mend or leave out what wrote it",
            )
    if not rows:
        raise DataError(
            f"{name} is empty: expected at least one prompt", hint="check the path, the split or the filter"
        )
    return rows


def _read_jsonl(path: Path) -> Iterable[Any]:
    if not path.is_file():
        raise DataError(
            f"no prompts at {path}: expected a JSONL file", hint="give the path of a file with one JSON value a line"
        )
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except ValueError as error:
                    raise DataError(f"{path}, line {number} is not JSON in UTF-8: {error}") from error


def _as_row(item: Any, number: int, source: str) -> Row:
    if isinstance(item, str) or _are_messages(item):
        return {"prompt": item}
    if isinstance(item, Mapping):
        row = dict(item)
        if "prompt" not in row and "messages" in row:
            row["prompt"] = row["messages"]
        prompt = row.get("prompt")
        if isinstance(prompt, str) or _are_messages(prompt):
            return row
        found = (
            f'"prompt" of type {type(prompt).__name__}' if "prompt" in row else f"the columns {sorted(map(str, row))}"
        )
    else:
        found = type(item).__name__
    raise DataError(
        f'row {number} of {source}: expected a string, a list of messages or a mapping with "prompt": found {found}',
        hint='messages look like [{"role": "user", "content": "..."}]',
    )


def _are_messages(item: Any) -> bool:
    return isinstance(item, Sequence) and bool(item) and all(isinstance(m, Mapping) and "role" in m for m in item)


def _half_of(messages: Sequence[Mapping[str, Any]]) -> str:
    texts = (message.get("content") for message in messages)
    return next(filter(None, (half_character(text) for text in texts if isinstance(text, str))), "")


def refuse_shared(train: Sequence[Row], held_out: Sequence[Row]) -> None:
    """Raise `DataError` where a held-out prompt is trained on as well."""
    trained = {_key(row) for row in train}
    both = [number for number, row in enumerate(held_out) if _key(row) in trained]
    if both:
        raise DataError(
            f"{len(both)} of the {len(held_out)} held-out prompts are trained on as well: the first is row {both[0]}",
            hint="remove them from one of the two: a score on what was trained on says nothing of the rest",
        )


def _key(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True, default=str)


class Prompts:
    """Rows with their tokens, dealt out in a seeded order.

    `limit` is the largest number of tokens that a prompt may have; `too_long` says what becomes of a longer one, and
    there is no silent cut: the default refuses it. `rows[i]` are those that stayed, `dropped` counts the others.
    `called` names a row in errors. `tools` are the JSON schemas of the tools that are offered, part of every prompt.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int = 0,
        limit: int | None = None,
        too_long: TooLong = "refuse",
        called: str = "row",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.rows: list[Row] = []
        self.tokens: list[Tensor] = []
        self.dropped = 0
        self.seed = seed
        if too_long not in get_args(TooLong):
            raise ConfigError(f"too_long: expected one of {', '.join(get_args(TooLong))}, found {too_long!r}")
        for number, row in enumerate(read_rows(rows)):
            ids = tokenize_prompt(tokenizer, row["prompt"], f"{called} {number}", tools)
            if limit is not None and len(ids) > limit:
                ids = _cut(ids, limit, too_long, f"{called} {number}")
            if ids:
                self.rows.append(row)
                self.tokens.append(torch.tensor(ids, dtype=torch.int64))
            else:
                self.dropped += 1
        if not self.rows:
            raise DataError(
                f"all {self.dropped} prompts are longer than the limit of {limit} tokens",
                hint="raise rollout.prompt_limit",
            )

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, position: int, count: int, *, group_size: int = 1) -> TensorDict:
        """Return `count` prompts from `position` of the seeded stream on, each `group_size` times in a row.

        Keys, with batch size [count * group_size]: `tokens` (jagged int64), `group_id` (the position in the stream,
        unique in a run: equal prompts stay separate groups), `repeat_index` and `prompt_index` (int64).
        """
        indices = [row_at(position + i, rows=len(self.rows), seed=self.seed) for i in range(count)]
        return self._deal(indices, [position + i for i in range(count)], group_size)

    def first(self, count: int, *, group_size: int = 1) -> TensorDict:
        """Return the first `count` prompts in the order of the data, as `batch` does: for evaluation."""
        indices = list(range(min(count, len(self.rows))))
        return self._deal(indices, indices, group_size)

    def _deal(self, indices: list[int], groups: list[int], group_size: int) -> TensorDict:
        repeated = [index for index in indices for _ in range(group_size)]
        return TensorDict(
            {
                Key.TOKENS: Ragged.from_rows([self.tokens[index] for index in repeated]).jagged(),
                Key.GROUP: torch.tensor(groups).repeat_interleave(group_size),
                Key.MEMBER: torch.arange(group_size).repeat(len(indices)),
                Key.PROMPT_INDEX: torch.tensor(repeated),
            },
            batch_size=[len(repeated)],
        )


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, where: str, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the ids of a prompt: text with the tokenizer's own special tokens, messages through its chat template.

    `tools` are handed to the template; a text has no place for them.

    An empty text becomes the beginning-of-text token, for a causal model needs something to start from. Raises
    `DataError` where there is no such token, no chat template, or one that refuses the messages, naming `where`.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        if not tokenizer.chat_template:
            raise DataError(
                f"{where}: the prompt is a list of messages, and the tokenizer has no chat template",
                hint="give prompts as text, or set model.chat_template=FILE (in Python: tokenizer.chat_template)",
            )
        ids = _templated(tokenizer, prompt, where, tools)
    if not ids:
        if tokenizer.bos_token_id is None:
            raise DataError(
                f"{where}: the prompt is empty, and the tokenizer has no beginning-of-text token to start from",
                hint="remove the row, or set tokenizer.bos_token",
            )
        ids = [tokenizer.bos_token_id]
    return ids


def _templated(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Mapping[str, Any]],
    where: str,
    tools: Sequence[Mapping[str, Any]],
) -> list[int]:
    messages = [dict(message) for message in prompt]
    offered: list[Any] | None = [dict(tool) for tool in tools] or None
    try:
        found = tokenizer.apply_chat_template(messages, tools=offered, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template may raise anything, and says what it refuses
        roles = " ".join(str(message.get("role")) for message in messages)
        raise DataError(
            f"{where}: the chat template refuses the messages ({roles}): {type(error).__name__}: {error}",
            hint="a template may want a user's turn first, turns that alternate, no system message, or no tools",
        ) from error
    return list(found)


def _cut(ids: list[int], limit: int, too_long: TooLong, where: str) -> list[int]:
    if too_long == "refuse":
        raise PromptTooLong(
            f"{where}: the prompt has {len(ids)} tokens, over the limit of {limit} (rollout.prompt_limit, or what the "
            "model's context leaves beside rollout.max_new_tokens)",
            hint='shorten it, or set rollout.too_long to "drop", "keep_end" or "keep_start"',
        )
    return {"drop": [], "keep_end": ids[len(ids) - limit :], "keep_start": ids[:limit]}[too_long]
