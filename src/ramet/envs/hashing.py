"""Text generation one token at a time, where every prefix has a hash by which it is known again.

Dimensions: B rows, L tokens of a row; *B is the batch, () or (B,).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ramet.envs.entries import with_entries
from ramet.envs.env import EnvBase
from ramet.envs.llm import LLMEnv
from ramet.forest.hashing import PrefixHash, SipHash, absorb, initial, prefix_hashes
from ramet.ragged import Ragged, Text, read_text
from ramet.specs import Categorical, Composite, KeyPath, NonTensor, Unbounded, describe
from ramet.transforms.entries import entry, row_mask
from ramet.transforms.env_specs import FLAGS
from ramet.transforms.token_rows import decode_rows
from ramet.types import Key

ACTION, HASHING = "action", "hashing"
_EXAMPLE = "a string"
_NO_EOS = -1  # no token has this id


class LLMHashingEnv(EnvBase):
    """An environment whose action is one token, and whose observation is the growing prefix and its hash.

    `"action"` int64 (*B, 1) is one token id; `observation_key` int64 (*B, L) the prefix; `"hashing"` int64 (*B, 1) its
    hash. A prompt comes with `reset(td)`, as tokens (dense, padded with the sibling mask `"attention_mask"`, jagged, or
    a lazy stack of rows; none at all is legal) or, with a tokenizer, as strings under `observation_key`; or by
    `make_tensordict`. Observations keep the layout of the prompt, and a step costs what is appended. Rows of a dense
    batch without a mask can not grow apart: to step some of them alone, pass the mask, or jagged tokens.

    The hash is a fold: it begins at a constant of `hashing_module` and takes in one token after the other, at reset as
    in steps. So a prefix has the same hash however it was reached, alone or in a batch, whatever its padding, integer
    type and process. `hashing_module` maps integers [N, 2] (hash, token) to integers [N], each row for itself; the
    default is `SipHash()`.

    With a tokenizer (called with a list of strings; `batch_decode` gives the strings back) there is text, unless
    `text_output=False`: `text_key` is always the decoding of all tokens of the prefix, special tokens included,
    decoded when it is read and only from where the text before it ended. Tokens are authoritative: of a prompt that
    came as a string, the text starts with that string if the tokenizer gives it back unchanged and adds no token.

    A batch of any size is taken, or none. A row is terminated by the action `eos_token_id`; without one none ends.
    The vocabulary is `vocab_size`, else all tokens of the tokenizer, those that were added to it included.

    Raises:
        TypeError: neither `vocab_size` nor a tokenizer; ids that are not integers.
        ValueError: `text_output=True` without a tokenizer; ids outside of the vocabulary; shapes that do not fit.
        RuntimeError: `reset` without a prompt.

    >>> from ramet.models.tiny import tiny_tokenizer
    >>> from ramet.ragged import rows
    >>> env = LLMHashingEnv(tokenizer=tiny_tokenizer(), eos_token_id=2)
    >>> td = env.make_tensordict("2+2=")
    >>> td["observation"], td["text"]
    (tensor([ 1,  6, 76,  6, 84]), '<bos>2+2=')
    >>> td["hashing"]
    tensor([-3634247206634476973])

    The same prefix, reached by a step, in a batch:

    >>> start = env.reset(TensorDict({"observation": torch.tensor([[1, 6, 76, 6], [1, 4, 4, 4]])}, [2]))
    >>> td = env.step(start.set("action", torch.tensor([[84], [2]])))
    >>> td["next", "hashing"][0] == env.make_tensordict("2+2=")["hashing"]
    tensor([True])
    >>> list(td["next", "text"]), td["next", "done"].tolist()
    (['<bos>2+2=', '<bos>000<eos>'], [[False], [True]])

    >>> def policy(td):
    ...     return td.set("action", torch.tensor([8]))
    >>> rollout = env.rollout(2, policy, tensordict=env.make_tensordict("2+2="))
    >>> rows(rollout, ("next", "text")), rollout["action"].tolist()
    (['<bos>2+2=4', '<bos>2+2=44'], [[8], [8]])
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        hashing_module: PrefixHash | None = None,
        observation_key: KeyPath = "observation",
        text_output: bool | None = None,
        tokenizer: Any = None,
        text_key: KeyPath = Key.TEXT,
        eos_token_id: int | None = None,
    ) -> None:
        super().__init__(batch_locked=False)
        self.vocab_size = _vocabulary(vocab_size, tokenizer)
        if text_output and tokenizer is None:
            raise ValueError("text_output=True needs a tokenizer: pass one, or leave text_output out")
        if eos_token_id is not None and not 0 <= eos_token_id < self.vocab_size:
            raise ValueError(
                f"eos_token_id must be in the vocabulary, 0 to {self.vocab_size - 1}: found {eos_token_id}"
            )
        if hashing_module is not None and not callable(hashing_module):
            raise TypeError(f"hashing_module must map integers [N, 2] to integers [N]: found {hashing_module!r}")
        self.hashing_module: PrefixHash = SipHash() if hashing_module is None else hashing_module
        self.observation_key, self.text_key, self.tokenizer = observation_key, text_key, tokenizer
        self.text_output = tokenizer is not None if text_output is None else text_output
        self.eos_token_id = eos_token_id
        # It appends the action to the tokens, in whatever layout, and says which rows end; ids are checked here.
        self._prefix = LLMEnv(
            from_text=False,
            token_key=observation_key,
            action_key=ACTION,
            eos_token_id=_NO_EOS if eos_token_id is None else eos_token_id,
        )
        self._texts = _Texts()
        self._offsets: Tensor | None = None
        self._make_specs()

    def _make_specs(self) -> None:
        keys = [
            self.observation_key,
            self._prefix.attention_key,
            HASHING,
            *([self.text_key] if self.text_output else []),
        ]
        if len({*keys, ACTION}) <= len(keys):
            raise ValueError(f"each entry needs a key of its own: found {keys} and {ACTION!r}")
        observation = Composite()
        observation[self.observation_key] = Categorical(self.vocab_size, (-1,))
        observation[HASHING] = Unbounded((1,), dtype=torch.int64)
        if self.text_output:
            observation[self.text_key] = NonTensor(example_data=_EXAMPLE)
        self.observation_spec = observation
        self.action_spec = Categorical(self.vocab_size, (1,))

    def make_tensordict(self, prompts: str | list[str]) -> TensorDictBase:
        """Tokenise a prompt, or a list of them, and reset with it; without batch, or of batch size [B].

        The tokens are what the tokenizer makes of the strings when it is called. Those of a list are jagged rows, or
        dense ones where all are of one length and no eos can end them at different steps.

        >>> from ramet.models.tiny import tiny_tokenizer
        >>> from ramet.ragged import rows
        >>> td = LLMHashingEnv(tokenizer=tiny_tokenizer()).make_tensordict(["1+1=", "10+1="])
        >>> [row.tolist() for row in rows(td, "observation")]
        [[1, 5, 76, 5, 84], [1, 5, 4, 76, 5, 84]]
        >>> list(td["text"])
        ['<bos>1+1=', '<bos>10+1=']
        """
        strings = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(strings, list | tuple) or not all(isinstance(prompt, str) for prompt in strings):
            raise TypeError(f"make_tensordict takes a string or a list of strings: found {prompts!r:.60}")
        if not strings:
            raise ValueError("make_tensordict needs at least one prompt: found an empty list")
        if isinstance(prompts, str):
            given = TensorDict({self.observation_key: NonTensorData(prompts)}, [])
        else:
            given = TensorDict({self.observation_key: NonTensorStack(*strings)}, [len(strings)])
        return self.reset(given)

    @property
    def prompt_key(self) -> KeyPath | None:
        """Key under which a reset takes strings: that of the observation, with a tokenizer."""
        return None if self.tokenizer is None else self.observation_key

    def mask_key(self, tokens: KeyPath) -> KeyPath | None:
        """Return the key of the mask of padded prompts, for the observation."""
        return self._prefix.attention_key if tokens == self.observation_key else None

    def _check_batch(self, td: TensorDictBase) -> None:
        self._prefix._check_batch(td)

    # The way of a reset. Both ways leave alone the rows that are not named; one that a subclass overrides may not.

    def _reset_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        if type(self)._reset is not LLMHashingEnv._reset:
            return super()._reset_rows(td, mask)
        return td.update(self._reset(td.copy()))

    def _reset(self, td: TensorDictBase) -> TensorDictBase:
        observation, prefixes = self._prompts(td)
        mask = row_mask(td, "_reset")
        fresh = TensorDict({HASHING: self._hashed(td, prefixes, mask)}, td.batch_size, device=td.device)
        for flag in FLAGS:
            before = td.get(flag, None)
            no = torch.zeros((*td.batch_size, 1), dtype=torch.bool, device=prefixes.values.device)
            fresh.set(flag, no if mask is None or before is None else before & ~mask[..., None])
        if isinstance(td, LazyStackedTensorDict):
            return self._with_rows(fresh, observation, prefixes)
        assert isinstance(observation, Tensor)
        fresh.set(self.observation_key, observation)
        if self.text_output:
            self._write_text(fresh, Text.decoded(prefixes, self._decode))
        return fresh

    def _prompts(self, td: TensorDictBase) -> tuple[Tensor | list[Tensor], Ragged]:
        """Return the observation as int64, of a lazy stack its rows, and the real tokens of it."""
        found = entry(td, self.observation_key)
        if found is None:
            raise RuntimeError(
                f"reset requires a prompt: put tokens under {self.observation_key!r}, use make_tensordict, or "
                "append a primer to the environment"
            )
        if not isinstance(found, Tensor):
            return self._tokenised(td)
        if isinstance(td, LazyStackedTensorDict):
            cells = [self._checked(entry(row, self.observation_key), ()) for row in td.unbind(0)]
            return cells, self._real_rows(td, cells)
        observation = self._checked(found, td.batch_size)
        prefixes = _ragged(observation, entry(td, self._prefix.attention_key), td.batch_dims)
        self._check_ids(prefixes.compact().values, self.observation_key)
        return observation, prefixes

    def _real_rows(self, td: LazyStackedTensorDict, cells: list[Tensor]) -> Ragged:
        """Return the real tokens of the rows of a lazy stack."""
        masks = [entry(row, self._prefix.attention_key) for row in td.unbind(0)]
        prefixes = Ragged.from_rows(
            [cell if mask is None else cell[mask.bool()] for cell, mask in zip(cells, masks, strict=True)]
        )
        self._check_ids(prefixes.values, self.observation_key)
        return prefixes

    def _checked(self, tokens: Tensor, size: torch.Size | tuple[()]) -> Tensor:
        """Return token ids (*B, L) as int64."""
        if not _holds_integers(tokens):
            raise TypeError(f"{self.observation_key!r} must hold token ids, integers: found {describe(tokens)}")
        if tokens.dim() != len(size) + 1:
            raise ValueError(
                f"{self.observation_key!r} must hold a row of token ids for each row, {(*size, 'L')}: found "
                f"{describe(tokens)}"
            )
        return tokens if tokens.dtype is torch.int64 else tokens.to(torch.int64)

    def _tokenised(self, td: TensorDictBase) -> tuple[Tensor | list[Tensor], Ragged]:
        """Return the tokens of strings, of a lazy stack its rows, and all of them."""
        strings = read_text(td, self.observation_key).tolist()
        if self.tokenizer is None:
            raise TypeError(
                f"{self.observation_key!r} holds strings, and there is no tokenizer: pass token ids, or construct the "
                "environment with a tokenizer"
            )
        encoded = self.tokenizer(strings)
        ids = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
        prefixes = Ragged.from_rows([torch.as_tensor(row, dtype=torch.int64, device=td.device) for row in ids])
        self._check_ids(prefixes.values, self.observation_key)
        if isinstance(td, LazyStackedTensorDict):
            return prefixes.rows(), prefixes
        if not td.batch_dims:
            return prefixes.values, prefixes
        lengths = set(prefixes.lengths.tolist())
        if self.eos_token_id is None and len(lengths) == 1:
            return prefixes.values.view(len(strings), lengths.pop()), prefixes
        return prefixes.jagged(), prefixes

    def _hashed(self, td: TensorDictBase, prefixes: Ragged, mask: Tensor | None) -> Tensor:
        """Return the hash of each prefix, int64 (*B, 1); rows that `mask` does not name keep theirs."""
        before = td.get(HASHING, None)
        named = None if mask is None or before is None else mask.reshape(-1)
        picked = prefixes.compact() if named is None else prefixes[named]
        hashes = torch.full((len(picked),), initial(self.hashing_module), device=picked.values.device)
        ends, some = picked.offsets[1:], picked.lengths > 0
        hashes[some] = prefix_hashes(picked.values, picked.offsets, self.hashing_module)[ends[some] - 1]
        if named is None:
            return hashes.view(*td.batch_size, 1)
        assert before is not None
        mixed: Tensor = before.reshape(-1).masked_scatter(named, hashes)
        return mixed.view(*td.batch_size, 1)

    # The way of a step.

    def _step_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        if type(self)._step is not LLMHashingEnv._step:
            return super()._step_rows(td, mask)
        return self._step(td)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        mask = row_mask(td, "_step")
        action, before = self._action(td, mask), td.get(HASHING, None)
        if before is None:
            raise KeyError(f"step needs {HASHING!r}: step what reset or step_mdp returned")
        next_td = self._prefix._step(td)
        hashes = absorb(before.reshape(-1), action.reshape(-1), self.hashing_module).view(before.shape)
        hashes = hashes if mask is None else hashes.where(mask[..., None], before)
        if not self.text_output:
            return next_td.set(HASHING, hashes)
        if isinstance(next_td, LazyStackedTensorDict):
            cells = [entry(row, self.observation_key) for row in next_td.unbind(0)]
            return self._with_rows(next_td.set(HASHING, hashes), cells, self._real_rows(next_td, cells))
        text = self._texts.of(td.get(self.observation_key))
        if text is None:  # an observation that was not made here: all of its tokens are decoded
            tokens, real = next_td.get(self.observation_key), entry(next_td, self._prefix.attention_key)
            text = Text.decoded(_ragged(tokens, real, td.batch_dims), self._decode)
        else:
            ids, sizes = action.reshape(-1), None if mask is None else mask.reshape(-1).to(torch.int64)
            text = text.append(Text.decoded(Ragged(ids, self._row_offsets(ids), sizes), self._decode))
        self._texts.keep(next_td.get(self.observation_key), text)
        return with_entries(next_td, {HASHING: hashes, self.text_key: text.entry(batch=bool(td.batch_dims))})

    def _row_offsets(self, ids: Tensor) -> Tensor:
        """Return the offsets of rows of one token each."""
        known = self._offsets
        if known is None or len(known) != len(ids) + 1 or known.device != ids.device or known.is_inference():
            known = self._offsets = torch.arange(len(ids) + 1, device=ids.device)
        return known

    def _action(self, td: TensorDictBase, mask: Tensor | None) -> Tensor:
        """Return the action; 0 in the rows that are not stepped, where anything may be."""
        action = entry(td, ACTION) if not isinstance(td, LazyStackedTensorDict) else td.get(ACTION, None)
        if action is None:
            raise KeyError(f"step needs an action {ACTION!r}: let the policy write it into the TensorDict")
        if not isinstance(action, Tensor) or not _holds_integers(action):
            raise TypeError(f"{ACTION!r} must hold token ids, integers: found {describe(action)}")
        if action.shape != (*td.batch_size, 1):
            raise ValueError(
                f"{ACTION!r} must hold one id for each row, {(*td.batch_size, 1)}: found {describe(action)}"
            )
        if mask is not None:
            action = action * mask[..., None]
        self._check_ids(action, ACTION)
        return action

    def _check_ids(self, ids: Tensor, key: KeyPath) -> None:
        if not ids.numel():
            return
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= self.vocab_size:
            found = int(low) if int(low) < 0 else int(high)
            raise ValueError(
                f"{key!r} must hold ids of the vocabulary, 0 to {self.vocab_size - 1}: found {found}; if the model "
                "knows more tokens, pass its vocab_size"
            )

    # Text.

    def _write_text(self, td: TensorDictBase, text: Text) -> None:
        td.set(self.text_key, text.entry(batch=bool(td.batch_dims)))
        self._texts.keep(td.get(self.observation_key), text)

    def _with_rows(
        self, td: TensorDictBase, observation: Tensor | list[Tensor], prefixes: Ragged
    ) -> LazyStackedTensorDict:
        """Return a lazy stack of the rows of `td`, each with its own tokens and text."""
        parts = list(td.unbind(0))
        for row, (part, tokens) in enumerate(zip(parts, observation, strict=True)):
            part.set(self.observation_key, tokens)
            if self.text_output:
                part.set(self.text_key, Text.decoded(prefixes[row : row + 1], self._decode).entry(batch=False))
        stacked: LazyStackedTensorDict = lazy_stack(parts, 0)
        return stacked

    def _decode(self, ids: list[list[int]]) -> list[str]:
        return decode_rows(self.tokenizer, ids)


class _Texts:
    """The text of each observation, for as long as that lives: what is appended to it need not be decoded again."""

    def __init__(self) -> None:
        self._of: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[_Texts], tuple[()]]:
        return (_Texts, ())  # a copy of an environment decodes the first text of each row whole

    def of(self, observation: Tensor) -> Text | None:
        found: Text | None = self._of.get(observation)
        return found

    def keep(self, observation: Tensor, text: Text) -> None:
        self._of[observation] = text


def _vocabulary(vocab_size: int | None, tokenizer: Any) -> int:
    if vocab_size is None:
        if tokenizer is None:
            raise TypeError("vocab_size is needed where there is no tokenizer: pass one of them")
        vocab_size = max(tokenizer.vocab_size, len(tokenizer) if hasattr(tokenizer, "__len__") else 0)
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
        raise TypeError(f"vocab_size must be a whole number: found {describe(vocab_size)}")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1: found {vocab_size}")
    return vocab_size


def _holds_integers(tokens: Tensor) -> bool:
    return not (tokens.dtype is torch.bool or tokens.is_floating_point() or tokens.is_complex())


def _ragged(tokens: Tensor, mask: Tensor | None, batch_dims: int) -> Ragged:
    """Return the real tokens of a batch in any layout, or of a single row."""
    if batch_dims:
        return Ragged.from_any(tokens, mask)
    return Ragged.from_any(tokens[None], None if mask is None else mask[None])
