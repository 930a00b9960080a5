"""How tokens and their texts are read from TensorDicts and written into them, in any layout.

Dimensions: B rows, L tokens of a row; *B is the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import accumulate, chain
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ramet.ragged import Ragged, Text, read_text, rows
from ramet.specs import Composite, KeyPath, describe
from ramet.transforms.entries import entry, mask_of, row_mask


class Decode:
    """From rows of ids to strings."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens

    def __call__(self, ids: list[list[int]]) -> list[str]:
        options = {"skip_special_tokens": self.skip_special_tokens, "clean_up_tokenization_spaces": False}
        return decode_rows(self.tokenizer, ids, options)


def decode_rows(tokenizer: Any, ids: list[list[int]], options: Mapping[str, bool] | None = None) -> list[str]:
    """Return what `tokenizer.batch_decode` makes of rows of ids, quicker where it is a plain one of transformers'.

    `options` may be `skip_special_tokens` and `clean_up_tokenization_spaces`.
    """
    given = {} if options is None else dict(options)
    backend = _backend(tokenizer)
    if backend is None or given.get("clean_up_tokenization_spaces", tokenizer.clean_up_tokenization_spaces):
        return list(tokenizer.batch_decode(ids, **given))
    skip = given.get("skip_special_tokens", False)
    # Row by row, as transformers does, which then looks at each single id; the batch of the backend starts threads.
    return [backend.decode(row, skip_special_tokens=skip) for row in ids]


def check_vocabulary(ids: Tensor | Ragged, size: int, key: KeyPath) -> None:
    """Raise a ValueError that names key and row for ids [*B, n] outside of 0 to `size` - 1."""
    values = ids.compact().values if isinstance(ids, Ragged) else ids
    outside = (values < 0) | (values >= size)
    if not bool(outside.any()):
        return
    number = int(outside.reshape(-1).nonzero()[0])
    if isinstance(ids, Ragged):
        row = int(torch.searchsorted(ids.lengths.cumsum(0), number, right=True))
    else:
        row = number // ids.shape[-1]
    raise ValueError(
        f"{key!r}, row {row}: expected token ids from 0 to {size - 1}, found {int(values.reshape(-1)[number])}"
    )


def _backend(tokenizer: Any) -> Any:
    """Return what a fast tokenizer of transformers decodes by; None for any other, and where it decodes in its way."""
    transformers = sys.modules.get("transformers")
    fast = None if transformers is None else getattr(transformers, "PreTrainedTokenizerFast", None)
    if fast is None or not isinstance(tokenizer, fast):
        return None
    ways = ("batch_decode", "decode", "_decode")
    own = any(getattr(type(tokenizer), way) is not getattr(fast, way) or way in vars(tokenizer) for way in ways)
    return None if own else tokenizer.backend_tokenizer


class Marked:
    """Tensors, remembered as long as they live."""

    def __init__(self) -> None:
        self._tensors: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[Marked], tuple[()]]:
        return (Marked, ())

    def add(self, tensor: Tensor) -> None:
        self._tensors[tensor] = True

    def __contains__(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self._tensors


def loaded(tokenizer: Any) -> Any:
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer)
    if not callable(tokenizer) or not hasattr(tokenizer, "batch_decode"):
        raise TypeError(
            "tokenizer must be one of transformers', or the name of one (there is no default): "
            f"found {describe(tokenizer)}"
        )
    return tokenizer


def named_rows(td: TensorDictBase, key: str) -> Tensor | None:
    """Return the rows that a mask names, flat [B]; None if there is no mask or it names all of them."""
    mask = row_mask(td, key)
    return None if mask is None else mask.reshape(-1)


def real_rows(td: TensorDictBase, key: KeyPath, mask: KeyPath | None) -> Ragged:
    """Read the real entries of all rows of `td`."""
    if isinstance(td, LazyStackedTensorDict):
        return Ragged.from_rows(rows(td, key, mask=mask))
    tokens, real = td.get(key), None if mask is None else td.get(mask)
    if tokens.is_nested:
        return Ragged.from_any(tokens, real)
    real = None if real is None else _two_dims(real)
    return Ragged.from_padded(_two_dims(tokens), real)


def _two_dims(tokens: Tensor) -> Tensor:
    return tokens[None] if tokens.dim() == 1 else tokens.flatten(0, -2)


def all_rows(td: TensorDictBase, key: KeyPath) -> Any:
    """Return what is under `key` for all rows, jagged where rows of a lazy stack differ or have no mask beside them.

    None if nothing is there.
    """
    if entry(td, key) is None:
        return None
    if not isinstance(td, LazyStackedTensorDict):
        return td.get(key)
    of_row = [row.get(key) for row in td.unbind(td.stack_dim)]
    same = len({row.shape for row in of_row}) == 1 and entry(td, mask_of(key)) is not None
    return torch.stack(of_row, td.stack_dim) if same else Ragged.from_rows(of_row).jagged()


def device_of(td: TensorDictBase, key: KeyPath) -> torch.device | None:
    value = entry(td, key)
    return value.device if isinstance(value, Tensor) else td.device


def spread(tokens: Ragged, named: Tensor) -> Ragged:
    """Return rows for all: the next one of `tokens` where `named` [B] is true, empty ones elsewhere."""
    lengths = torch.zeros(len(named), dtype=torch.int64, device=tokens.offsets.device)
    lengths[named] = tokens.lengths
    ends = lengths.cumsum(0)
    return Ragged(tokens.values, torch.cat([ends.new_zeros(1), ends]))


def rows_of_ids(ids: Any, device: torch.device | None) -> Ragged:
    ids = [ids] if len(ids) and isinstance(ids[0], int) else ids  # one text without a batch
    offsets = torch.tensor([0, *accumulate(map(len, ids))], device=device)
    return Ragged(torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int64, device=device), offsets)


def pad_id(tokenizer: Any) -> int:
    pad = getattr(tokenizer, "pad_token_id", None)
    return 0 if pad is None else int(pad)


def set_text(td: TensorDictBase, key: KeyPath, text: Text) -> None:
    if td.batch_dims < 2:
        td.set(key, text.entry(batch=bool(td.batch_dims)))
        return
    items: list[Any] = text.tolist()
    for size in reversed(td.batch_size):
        items = [NonTensorStack(*items[i : i + size]) for i in range(0, len(items), size)]
    td.set(key, items[0])


def put(td: TensorDictBase, key: KeyPath, tokens: Ragged) -> None:
    """Write rows as they are, jagged; the only row there is where there is no batch."""
    td.set(key, tokens.compact().jagged() if td.batch_dims else tokens.compact().values)


def remove(spec: Composite, key: KeyPath) -> None:
    """Take a key out of a spec, and with it the nests that it leaves empty."""
    if key not in spec:
        return
    del spec[key]
    nest = () if isinstance(key, str) else key[:-1]
    while nest and not len(spec[nest]):  # type: ignore[arg-type]
        del spec[nest]
        nest = nest[:-1]


def last_name(key: KeyPath) -> str:
    return key if isinstance(key, str) else key[-1]


def keys_of(td: TensorDictBase) -> list[str]:
    return sorted(map(str, td.keys()))


def check_strings(texts: Any, key: KeyPath) -> None:
    """Refuse what no tokenizer takes: half of a pair of surrogates, which is no character."""
    for row, text in enumerate(texts if isinstance(texts, list) else ()):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{key!r}, row {row}: expected text that can be encoded as UTF-8, found {text[error.start]!r} at "
                f"character {error.start}, half of a surrogate pair: repair the text or leave it out"
            ) from None


def texts_of_step(
    td: TensorDictBase, next_td: TensorDictBase, key: KeyPath, said: KeyPath, named: Tensor | None
) -> tuple[list[str], list[str]] | None:
    """Return each text followed by its action, and the text that came of it; None where these are the same.

    The text before is not read where the action, and nothing else, was appended to it.
    """
    before, after, action = read_text(td, key), read_text(next_td, key), read_text(td, said)
    if after.grew_by(before, action, named):
        return None
    flags = [True] * len(before) if named is None else named.tolist()
    rows_of_step = zip(before.tolist(), action.tolist(), flags, strict=True)
    expected, found = [old + new if flag else old for old, new, flag in rows_of_step], after.tolist()
    grown = before.append(action if named is None else action.only(named)).tolist()  # by tokens: no character is cut
    expected = [b if text.startswith(b) else a for a, b, text in zip(expected, grown, found, strict=True)]
    return None if expected == found else (expected, found)
