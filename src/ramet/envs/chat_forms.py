"""The three forms of a conversation, messages, text and tokens: how a prompt, an answer and what is appended are held.

Dimensions: B rows, L tokens of a row, n tokens of an answer; *B is the batch, () or (B,).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ramet.envs.chat_history import Given, History, Part, Said, as_messages, items_of, names, read_part
from ramet.ragged import Appender, Ragged, Text, read_text
from ramet.ragged.storage import is_jagged
from ramet.specs import Bounded, KeyPath, NonTensor, Spec, Unbounded, describe
from ramet.transforms.entries import whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ramet.envs.chat_task import Turn

EXAMPLE = "a string"


@dataclass(frozen=True, slots=True)
class Answer:
    """What all rows say: as messages, and as it is appended to the prompt (None: as messages alone)."""

    part: Part
    added: Any = None


@dataclass(frozen=True, slots=True)
class Keys:
    """Under which keys the prompt and the answer are."""

    prompt: KeyPath
    answer: KeyPath

    @property
    def full(self) -> KeyPath | None:
        """Where the whole conversation may be in place of an answer."""
        return (*self.answer[:-1], "full") if isinstance(self.answer, tuple) else None


def form_of(mode: str, keys: Keys, role: str, tokenizer: PreTrainedTokenizerBase | None) -> Form:
    """Return the form of a mode of `ChatEnv`: "history", "text" or "tokens"."""
    if mode == "tokens":
        assert tokenizer is not None
        return Ids(keys, role, tokenizer)
    return Messages(keys, role) if mode == "history" else Strings(keys, role)


class Form(ABC):
    """How the conversations of a batch are held beside their messages."""

    def __init__(self, keys: Keys, role: str) -> None:
        self.keys, self.role = keys, role

    @abstractmethod
    def specs(self, size: torch.Size, device: torch.device | None) -> tuple[Spec | None, Spec]:
        """Return the specs of the prompt (None: messages alone) and of the answer."""

    @abstractmethod
    def begun(self, opened: Sequence[Any], td: TensorDictBase) -> Any:
        """Return the entry of prompts, text or ids of each row ("" or none for rows that are not begun)."""

    @abstractmethod
    def answer(self, td: TensorDictBase, history: History) -> Answer:
        """Read what the policy said."""

    @abstractmethod
    def words(self, answer: Answer) -> list[Any]:
        """Return the answers row by row, as a `Talk` takes them."""

    @abstractmethod
    def appended(self, td: TensorDictBase, answer: Answer, mask: Tensor | None) -> Any:
        """Return the entry of the prompts with the answer behind those that `mask` names."""

    @abstractmethod
    def written(self, td: TensorDictBase, turns: Mapping[int, Turn]) -> Any:
        """Return the entry of the prompts after some rows took a turn of a task."""

    def _has_answer(self, td: TensorDictBase) -> bool:
        """Say whether there is an answer, and not a whole conversation; KeyError if there is neither."""
        if whole(td, self.keys.answer) is not None:
            return True
        if self.keys.full is not None and whole(td, self.keys.full) is not None:
            return False
        raise KeyError(
            f"step needs an action {self.keys.answer!r}: let the policy write it into the TensorDict; there are "
            f"{names(td)}"
        )

    def _begins(self, fits: bool, row: int) -> None:
        if not fits:
            raise ValueError(
                f"{self.keys.full!r}, row {row}, does not begin with its prompt {self.keys.prompt!r}: it is the prompt "
                "with the answer behind it; to go on from another prompt, write that in place of the prompt"
            )


class Messages(Form):
    """Messages alone."""

    def specs(self, size: torch.Size, device: torch.device | None) -> tuple[Spec | None, Spec]:
        """Return no spec of the prompt, and that of text."""
        return None, NonTensor(size, device, example_data=EXAMPLE)

    def begun(self, opened: Sequence[Any], td: TensorDictBase) -> Any:
        """Return nothing."""

    def answer(self, td: TensorDictBase, history: History) -> Answer:
        """Read text, messages, or whole conversations."""
        if self._has_answer(td):
            return Answer(read_part(td, self.keys.answer, self.role))
        added, key = [], self.keys.full
        assert key is not None
        for row, item in enumerate(items_of(td, key)):
            before, after = history.messages(row), as_messages(item, self.role, key, row)
            self._begins(after[: len(before)] == before, row)
            added.append(after[len(before) :])
        return Answer(Given(added))

    def words(self, answer: Answer) -> list[Any]:
        """Return the messages of each row."""
        return [answer.part.messages(row) for row in range(len(answer.part))]

    def appended(self, td: TensorDictBase, answer: Answer, mask: Tensor | None) -> Any:
        """Return nothing."""

    def written(self, td: TensorDictBase, turns: Mapping[int, Turn]) -> Any:
        """Return nothing."""


class Strings(Form):
    """Text, kept in segments."""

    def specs(self, size: torch.Size, device: torch.device | None) -> tuple[Spec | None, Spec]:
        """Return the specs of text."""
        return NonTensor(size, device, example_data=EXAMPLE), NonTensor(size, device, example_data=EXAMPLE)

    def begun(self, opened: Sequence[Any], td: TensorDictBase) -> Any:
        """Return the entry of prompts."""
        return Text.of([text or "" for text in opened]).entry(bool(td.batch_dims))

    def answer(self, td: TensorDictBase, history: History) -> Answer:
        """Read text, of the answer or of whole conversations."""
        if self._has_answer(td):
            added = read_text(td, self.keys.answer)
        else:
            assert self.keys.full is not None
            texts = zip(self._prompt(td).tolist(), read_text(td, self.keys.full).tolist(), strict=True)
            strings = []
            for row, (before, after) in enumerate(texts):
                self._begins(after.startswith(before), row)
                strings.append(after[len(before) :])
            added = Text.of(strings)
        return Answer(Said(self.role, added), added)

    def words(self, answer: Answer) -> list[Any]:
        """Return the code points of each row."""
        return [[*map(ord, text)] for text in answer.added.tolist()]

    def appended(self, td: TensorDictBase, answer: Answer, mask: Tensor | None) -> Any:
        """Return the entry of the longer text."""
        added = answer.added if mask is None else answer.added.only(mask.reshape(-1))
        return self._prompt(td).append(added).entry(bool(td.batch_dims))

    def written(self, td: TensorDictBase, turns: Mapping[int, Turn]) -> Any:
        """Return the entry of the longer text, or of other text where a template wrote it anew."""
        prompt, added, anew = self._prompt(td), [], []
        for row in range(len(prompt)):
            turn = turns.get(row)
            added.append("" if turn is None else "".join(map(chr, turn.added or ())))
            anew.append(None if turn is None or turn.whole is None else "".join(map(chr, turn.whole)))
        text = prompt.append(Text.of(added))
        if any(string is not None for string in anew):
            mask = torch.tensor([string is not None for string in anew])
            text = Text.of([string or "" for string in anew]).where(mask, text)
        return text.entry(bool(td.batch_dims))

    def _prompt(self, td: TensorDictBase) -> Text:
        if whole(td, self.keys.prompt) is None:
            raise KeyError(f"step needs {self.keys.prompt!r}: step what reset or step_mdp returned")
        return read_text(td, self.keys.prompt)


class Ids(Form):
    """Tokens, in buffers with room to grow: jagged, or one dense row where there is no batch."""

    def __init__(self, keys: Keys, role: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(keys, role)
        self._tokenizer, self._appender = tokenizer, Appender()

    def specs(self, size: torch.Size, device: torch.device | None) -> tuple[Spec | None, Spec]:
        """Return the specs of ids; a random answer is one of the vocabulary."""
        most = len(self._tokenizer) - 1
        return Unbounded((*size, -1), device, torch.int64), Bounded(0, most, (*size, -1), device, torch.int64)

    def begun(self, opened: Sequence[Any], td: TensorDictBase) -> Any:
        """Return the entry of prompts."""
        rows = [torch.tensor(ids or [], dtype=torch.int64, device=td.device) for ids in opened]
        return self._entry(rows, td)

    def answer(self, td: TensorDictBase, history: History) -> Answer:
        """Read ids, of the answer or of whole conversations; they are text when somebody reads it."""
        if self._has_answer(td):
            tokens = _rows_of(td, self.keys.answer)
        else:
            assert self.keys.full is not None
            full, added = _rows_of(td, self.keys.full).rows(), []
            for row, (before, after) in enumerate(zip(self._prompt_rows(td), full, strict=True)):
                self._begins(torch.equal(after[: len(before)].to(before), before), row)
                added.append(after[len(before) :])
            tokens = Ragged.from_rows(added)
        return Answer(Said(self.role, Text.decoded(tokens, self._decode)), tokens)

    def words(self, answer: Answer) -> list[Any]:
        """Return the ids of each row."""
        rows = answer.added.compact()
        values, ends = rows.values.tolist(), rows.offsets.tolist()
        return [values[start:end] for start, end in pairwise(ends)]

    def appended(self, td: TensorDictBase, answer: Answer, mask: Tensor | None) -> Any:
        """Return the longer rows."""
        added: Ragged = answer.added
        if mask is not None:
            added = Ragged(added.values, added.offsets, added.lengths * mask.reshape(-1))
        return self._append(td, added)

    def written(self, td: TensorDictBase, turns: Mapping[int, Turn]) -> Any:
        """Return the longer rows, or other ones where a template wrote them anew."""
        if any(turn.whole is not None for turn in turns.values()):
            return self._entry(
                [self._after(row, turns.get(number)) for number, row in enumerate(self._prompt_rows(td))], td
            )
        added = [list(turns[row].added or ()) if row in turns else [] for row in range(td.batch_size.numel())]
        device = _rows_of(td, self.keys.prompt).values.device
        ends = torch.tensor([0, *map(len, added)], device=device).cumsum(0)
        values = torch.tensor([token for ids in added for token in ids], dtype=torch.int64, device=device)
        return self._append(td, Ragged(values, ends))

    def _after(self, row: Tensor, turn: Turn | None) -> Tensor:
        if turn is None:
            return row
        if turn.whole is not None:
            return row.new_tensor(turn.whole)
        return torch.cat([row, row.new_tensor(turn.added or [])])

    def _append(self, td: TensorDictBase, added: Ragged) -> Tensor:
        prompt = whole(td, self.keys.prompt)
        if prompt is None:
            raise KeyError(f"step needs {self.keys.prompt!r}: step what reset or step_mdp returned")
        if not td.batch_dims:
            return self._appender.append(prompt, None, added.compact().values.to(prompt.dtype))[0]
        if not is_jagged(prompt):  # rows of one length, out of a lazy stack
            prompt = Ragged.from_padded(prompt).jagged()
        return self._appender.append(prompt, None, added)[0]

    def _entry(self, rows: Sequence[Tensor], td: TensorDictBase) -> Tensor:
        return Ragged.from_rows(rows).jagged() if td.batch_dims else rows[0]

    def _prompt_rows(self, td: TensorDictBase) -> list[Tensor]:
        return _rows_of(td, self.keys.prompt).rows()

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return list(self._tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _rows_of(td: TensorDictBase, key: KeyPath) -> Ragged:
    """Return the rows of token ids under `key`, jagged, dense or in a lazy stack; one row where `td` has no batch."""
    value = whole(td, key)
    dtype = value.dtype if isinstance(value, Tensor) else torch.bool
    if value is None or len(value.shape) != td.batch_dims + 1 or dtype is torch.bool or dtype.is_floating_point:
        raise TypeError(
            f"{key!r} must hold token ids, an integer tensor {(*td.batch_size, 'n')} or a jagged one: "
            f"found {describe(value)}"
        )
    if not td.batch_dims:
        value = value[None]
    return Ragged.from_jagged(value) if is_jagged(value) else Ragged.from_padded(value)
