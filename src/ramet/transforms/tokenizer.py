"""Text to tokens on the way out of an environment, the tokens of an action to text on the way in.

Dimensions: B rows, L tokens of a row, n tokens of an action; *B is the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from ramet.ragged import Appender, Ragged, Text, read_text, rows
from ramet.specs import Bounded, Categorical, Composite, KeyPath, Spec, Unbounded, describe
from ramet.transforms.entries import entry, mask_of
from ramet.transforms.token_rows import (
    Decode,
    Marked,
    all_rows,
    check_strings,
    check_vocabulary,
    device_of,
    keys_of,
    last_name,
    loaded,
    named_rows,
    pad_id,
    put,
    real_rows,
    remove,
    rows_of_ids,
    set_text,
    spread,
    texts_of_step,
)
from ramet.transforms.transform import Transform
from ramet.types import Key


class Tokenizer(Transform):
    """Keep the tokens of a text beside it, and take actions as tokens. Tokens are authoritative.

    In both directions the "in" keys hold text, which is what the environment inside knows, and the "out" keys hold
    tokens: `in_keys` are observations and `in_keys_inv` actions. On the way out, the text under each of `in_keys` is
    written as tokens under its one of `out_keys`: int64 (*B, L), with a mask, bool (*B, L), under the sibling
    "attention_mask" (in the same nest). On the way in, the action tokens under each of `out_keys_inv` are decoded into
    text under its one of `in_keys_inv`, when that is read. Nothing but real tokens is decoded, whatever id padding has.

    In an environment a prompt is tokenised once, at its reset; a partial reset tokenises only the rows that it names.
    After a step the tokens are those before, followed by the action's as they were written, at the cost of the action:
    each of `in_keys` grows by its one of `in_keys_inv`, as the text of an `LLMEnv` does, and is not tokenised again.
    What the environment adds behind the action is tokenised alone, at the seam; a text that does not begin with the one
    before, or that has no action, is tokenised anew. A policy may answer in tokens, dense, jagged or in a lazy stack,
    or in text: text alone is tokenised alone, once, without special tokens, and stays what it is. Text that comes
    beside tokens is not looked at: in the result it is that of the tokens. The result of the step has both.

    `padding=True` pads on the left, by the tokenizer's pad token (0 where it has none, and where rows are realigned
    later); False gives jagged rows. `max_length` declares that longer prompts are cut, on the tokenizer's own
    `truncation_side` (by default the end is lost); their text stays whole. Actions are never cut. `add_special_tokens`
    is for prompts, `skip_special_tokens` for what is decoded. `additional_tokens` are added to `tokenizer` itself.
    `call_before_reset` tokenises before the environment's own reset, and only then: for an environment of tokens
    whose prompts come as text. `use_raw_nontensor` hands the entry to the tokenizer as the TensorDict holds it.
    With `missing_tolerance=False` a text that is not there is a KeyError, otherwise it is left out.

    `tokenizer` is one of transformers', or the name of one. `vocab_size`, by default its number of tokens, bounds the
    specs; set it for a model that knows more of them. Also of use outside of environments: `tokenizer(td)`
    writes tokens, `tokenizer.inv(td)` text.

    >>> from tensordict import NonTensorStack, TensorDict
    >>> from ramet.models.tiny import tiny_tokenizer
    >>> tokenizer = Tokenizer(["text"], ["tokens"], ["text"], ["tokens"], tokenizer=tiny_tokenizer())
    >>> td = tokenizer(TensorDict({"text": NonTensorStack("2+2=", "7")}, [2]))
    >>> td["tokens"].tolist()
    [[6, 76, 6, 84], [0, 0, 0, 11]]
    >>> td["attention_mask"].int().tolist()
    [[1, 1, 1, 1], [0, 0, 0, 1]]
    >>> rows(tokenizer.inv(td.exclude("text")), "text")
    ['2+2=', '7']

    In an environment:

    >>> from ramet.envs.llm import LLMEnv
    >>> tokenizer = Tokenizer(
    ...     ["text"], ["tokens"], ["text_response"], ["tokens_response"], tokenizer=tiny_tokenizer()
    ... )
    >>> env = LLMEnv(eos_token_id=2).append_transform(tokenizer)
    >>> td = env.reset(TensorDict({"text": NonTensorStack("2+2=", "7")}, [2]))
    >>> td["tokens_response"] = torch.tensor([[8, 2], [9, 10]])
    >>> td = env.step(td)
    >>> rows(td, "text_response"), rows(td, ("next", "text"))
    (['4', '56'], ['2+2=4', '756'])
    >>> td["next", "tokens"].tolist(), td["next", "done"].tolist()
    ([[6, 76, 6, 84, 8, 2], [0, 0, 0, 11, 9, 10]], [[True], [False]])
    >>> env.action_spec
    Bounded(0, 99, shape=(-1,), dtype=int64)
    >>> def answers(td):
    ...     return td.set("text_response", NonTensorStack("4", "56"))
    >>> rollout = env.rollout(2, answers, tensordict=TensorDict({"text": NonTensorStack("2+2=", "7")}, [2]))
    >>> rollout.batch_size, [row.tolist() for row in rows(rollout, "tokens_response")]
    (torch.Size([2, 2]), [[8], [8], [9, 10], [9, 10]])
    """

    def __init__(
        self,
        in_keys: Sequence[KeyPath],
        out_keys: Sequence[KeyPath],
        in_keys_inv: Sequence[KeyPath] | None = None,
        out_keys_inv: Sequence[KeyPath] | None = None,
        *,
        tokenizer: Any,
        use_raw_nontensor: bool = False,
        additional_tokens: Sequence[str] | None = None,
        skip_special_tokens: bool = True,
        add_special_tokens: bool = False,
        padding: bool = True,
        max_length: int | None = None,
        return_attention_mask: bool = True,
        missing_tolerance: bool = True,
        call_before_reset: bool = False,
    ) -> None:
        names = {"in_keys": in_keys, "out_keys": out_keys, "in_keys_inv": in_keys_inv, "out_keys_inv": out_keys_inv}
        for name, keys in names.items():
            if not isinstance(keys, list | tuple) and (keys is not None or not name.endswith("_inv")):
                raise TypeError(f"{name} must be a list of keys: found {keys!r}")
        super().__init__(in_keys, out_keys, in_keys_inv or (), out_keys_inv or ())
        _check_keys(self, return_attention_mask)
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ValueError(f"max_length must be at least 1, or None: found {max_length!r}")
        self.tokenizer = loaded(tokenizer)
        if additional_tokens:
            if isinstance(additional_tokens, str):
                raise TypeError(f"additional_tokens must be a list of tokens: found {additional_tokens!r}")
            self.tokenizer.add_tokens(list(additional_tokens))
        self.use_raw_nontensor, self.skip_special_tokens = use_raw_nontensor, skip_special_tokens
        self.add_special_tokens, self.padding, self.max_length = add_special_tokens, padding, max_length
        self.return_attention_mask, self.missing_tolerance = return_attention_mask, missing_tolerance
        self.call_before_reset = call_before_reset
        self.vocab_size: int | None = len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else None
        self._decode = Decode(self.tokenizer, skip_special_tokens)
        self._appender = Appender()
        self._grown, self._retold = Marked(), Marked()  # tokens that end in an action's; actions that came as text

    # The way out.

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return self._tokenised(td, None, td)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        return self._tokenised(td, named_rows(td, "_reset"), td) if self.call_before_reset else td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset if self.call_before_reset else self._tokenised(td_reset, named_rows(td, "_reset"), td)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        if self.call_before_reset:
            return next_td
        named = named_rows(td, "_step")
        for key, out, said, action in zip(
            self.in_keys, self.out_keys, self.in_keys_inv, self.out_keys_inv, strict=False
        ):
            if entry(td, out) is None:
                raise KeyError(f"step needs the tokens {out!r}: step what reset or step_mdp returned")
            texts = texts_of_step(td, next_td, key, said, named)
            if texts is None:
                self._append(td, next_td, out, action, named)
            else:
                self._follow(td, next_td, key, out, self._only(td, action, named), *texts)
        return self._tokenised(next_td, named, td, start=len(self.in_keys_inv))

    def _append(
        self, td: TensorDictBase, next_td: TensorDictBase, out: KeyPath, action: KeyPath, named: Tensor | None
    ) -> None:
        """Write the tokens before, followed by the action's."""
        mask = all_rows(td, mask_of(out)) if self.return_attention_mask else None
        new = self._only(td, action, named)
        tokens, mask = self._appender.append(all_rows(td, out), mask, new if td.batch_dims else new.compact().values)
        next_td.set(out, tokens)
        if mask is not None:
            next_td.set(mask_of(out), mask)
        if not isinstance(td, LazyStackedTensorDict) and td.get(action) not in self._retold:
            self._grown.add(tokens)

    def _follow(
        self, td: TensorDictBase, next_td: TensorDictBase, key: KeyPath, out: KeyPath, new: Ragged,
        expected: list[str], found: list[str],
    ) -> None:  # fmt: skip
        """Write the tokens of texts to which the environment added something, or which it wrote anew."""
        device = new.values.device
        grew = torch.tensor([b.startswith(a) for a, b in zip(expected, found, strict=True)], device=device)
        added = [b[len(a) :] if b.startswith(a) else "" for a, b in zip(expected, found, strict=True)]
        other = ["" if b.startswith(a) else b for a, b in zip(expected, found, strict=True)]
        tokens = self._observed(td, out).append(new).append(self._encode(added, device, key, prompt=False))
        if not bool(grew.all()):
            tokens = tokens.where(grew, self._encode(other, device, key))
        self._write(next_td, out, tokens)

    def _tokenised(
        self, td: TensorDictBase, named: Tensor | None, before: TensorDictBase, *, start: int = 0
    ) -> TensorDictBase:
        """Write the tokens of the texts of `td`; rows that `named` [B] does not name keep those that `before` has."""
        for key, out in list(zip(self.in_keys, self.out_keys, strict=True))[start:]:
            if entry(td, key) is None:
                if not self.missing_tolerance:
                    raise KeyError(f"{key!r}, the text to tokenise, is missing: there are {keys_of(td)}")
                continue
            device, texts = device_of(before, out), self._texts(td, key)
            if named is None or entry(before, out) is None:
                tokens = self._encode(texts, device, key)
            elif self.use_raw_nontensor:
                tokens = self._encode(texts, device, key).where(named, self._observed(before, out))
            else:
                check_strings(texts, key)
                picked = [text for text, flag in zip(texts, named.tolist(), strict=True) if flag]
                new = spread(self._encode(picked, device, key), named)
                tokens = new.where(named, self._observed(before, out))
            self._write(td, out, tokens)
        return td

    def _texts(self, td: TensorDictBase, key: KeyPath) -> Any:
        if self.use_raw_nontensor:
            return td.get(key)
        if td.batch_dims < 2:
            return read_text(td, key).tolist()
        texts = rows(td, key)
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"{key!r}, row {row}: expected str, found {type(text).__name__}")
        return texts

    def _encode(self, texts: Any, device: torch.device | None, where: KeyPath, *, prompt: bool = True) -> Ragged:
        """Tokenise strings that come from under the key `where`, all of them in one call."""
        if isinstance(texts, list) and not any(texts) and not (prompt and self.add_special_tokens):
            return rows_of_ids([[] for _ in texts], device)
        check_strings(texts, where)
        cut = prompt and self.max_length is not None
        encoded = self.tokenizer(
            texts,
            add_special_tokens=prompt and self.add_special_tokens,
            padding=False,
            truncation=cut,
            max_length=self.max_length if cut else None,
            return_attention_mask=False,
        )
        return rows_of_ids(encoded["input_ids"], device)

    def _write(self, td: TensorDictBase, key: KeyPath, tokens: Ragged) -> None:
        """Put tokens and mask of the rows of `td` into it, in the layout that was asked for."""
        size = td.batch_size
        if self.padding or not size:
            values, mask = tokens.padded("left", pad_id(self.tokenizer))
            if not self.return_attention_mask and not bool(mask.all()):
                raise ValueError(
                    f"the rows of {key!r} have {tokens.lengths.tolist()} tokens, and without a mask nothing says what "
                    "is padding: set return_attention_mask=True, or padding=False for jagged rows"
                )
            values, mask = values.view(*size, values.shape[-1]), mask.view(*size, mask.shape[-1])
        elif len(size) > 1:
            raise ValueError(f"jagged rows take a batch of one dimension: found {tuple(size)}; set padding=True")
        else:
            tokens = tokens.compact()
            values, ones = tokens.jagged(), torch.ones_like(tokens.values, dtype=torch.bool)
            mask = Ragged(ones, tokens.offsets).jagged()
        td.set(key, values)
        if self.return_attention_mask:
            td.set(mask_of(key), mask)

    def _observed(self, td: TensorDictBase, key: KeyPath) -> Ragged:
        """Read the real tokens of an observation."""
        mask = mask_of(key)
        return real_rows(td, key, mask if self.return_attention_mask and entry(td, mask) is not None else None)

    # The way in.

    def inv(self, td: TensorDictBase) -> TensorDictBase:
        """Write the text of the tokens under `out_keys_inv` of `td` under `in_keys_inv`, outside any environment."""
        for key, out in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            if entry(td, out) is not None:
                set_text(td, key, Text.decoded(self._action(td, out), self._decode))
            elif not self.missing_tolerance:
                raise KeyError(f"{out!r}, the tokens to decode, is missing: there are {keys_of(td)}")
        return td

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        before = dict(zip(self.out_keys_inv, self.out_keys, strict=False))
        for key, out in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            observed = before.get(out)
            if entry(td, out) is not None:
                tokens, mask = self._action(td, out), self._mask_beside(td, out)
                if self.vocab_size is not None:
                    check_vocabulary(tokens, self.vocab_size, out)
                set_text(td, key, Text.decoded(tokens, self._decode, self._context(td, observed, key)))
                if mask is not None:
                    put(td, out, tokens)  # without padding: the environment inside does not know that mask
                    put(td, mask, Ragged(torch.ones_like(tokens.values, dtype=torch.bool), tokens.offsets))
            elif entry(td, key) is not None:
                device = td.device if observed is None else device_of(td, observed)
                put(td, out, self._encode(read_text(td, key).tolist(), device, key, prompt=False))
                if not isinstance(td, LazyStackedTensorDict):
                    self._retold.add(td.get(out))
            else:
                raise KeyError(
                    f"step needs an action, tokens under {out!r} or text under {key!r}: there are {keys_of(td)}"
                )
        return td

    def _context(self, td: TensorDictBase, key: KeyPath | None, said: KeyPath) -> Ragged | None:
        """Return the tokens before an action, unless the text ends in those of the last one and so knows them."""
        if key is None or entry(td, key) is None:
            return None
        grown = not isinstance(td, LazyStackedTensorDict) and td.get(key) in self._grown
        text = dict(zip(self.in_keys_inv, self.in_keys, strict=False))[said]
        if grown and entry(td, text) is not None and not read_text(td, text).bare:
            return None
        return self._observed(td, key)

    def _only(self, td: TensorDictBase, key: KeyPath, named: Tensor | None) -> Ragged:
        """Read the real tokens of an action, none in the rows that `named` [B] does not name."""
        tokens = self._action(td, key)
        return tokens if named is None else Ragged(tokens.values, tokens.offsets, tokens.lengths * named)

    def _action(self, td: TensorDictBase, key: KeyPath) -> Ragged:
        value = entry(td, key)
        dims = 1 if isinstance(td, LazyStackedTensorDict) else td.batch_dims + 1
        if (
            not isinstance(value, Tensor)
            or (value.dim() != dims and dims > 1)
            or value.dtype is torch.bool
            or value.dtype.is_floating_point
        ):
            raise TypeError(
                f"{key!r} must hold token ids, an integer tensor {(*td.batch_size, 'n')} or a jagged one: "
                f"found {describe(value)}"
            )
        return real_rows(td, key, self._mask_beside(td, key))

    def _mask_beside(self, td: TensorDictBase, key: KeyPath) -> KeyPath | None:
        """Return the key of the mask of an action, if it has one that is not that of an observation."""
        mask = mask_of(key)
        own = key in self.out_keys or mask not in map(mask_of, self.out_keys)
        return mask if own and last_name(key) == Key.TOKENS and entry(td, mask) is not None else None

    # What the environment says of itself.

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Add tokens and mask, where the environment has none of its own."""
        for key in self.out_keys:
            if key not in spec:
                spec[key] = self._spec(spec)
            if self.return_attention_mask and mask_of(key) not in spec:
                spec[mask_of(key)] = Categorical(2, (*spec.shape, -1), spec.device, torch.bool)
        return spec

    def transform_action_spec(self, spec: Composite) -> Composite:
        """Put tokens in the place of text."""
        for key, out in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            remove(spec, key)
            spec[out] = self._spec(spec)
        return spec

    def transform_consumed_keys(self, keys: list[KeyPath]) -> list[KeyPath]:
        """Add the actions in both forms."""
        return list(dict.fromkeys([*keys, *self.in_keys_inv, *self.out_keys_inv]))

    def transform_derived_keys(self, keys: list[KeyPath]) -> list[KeyPath]:
        """Add the text of the actions, which is that of their tokens whatever text comes beside them."""
        return list(dict.fromkeys([*keys, *self.in_keys_inv]))

    def _spec(self, spec: Composite) -> Spec:
        shape = (*spec.shape, -1)
        if self.vocab_size is None:
            return Unbounded(shape, spec.device, torch.int64)
        return Bounded(0, self.vocab_size - 1, shape, spec.device, torch.int64)


def _check_keys(transform: Tokenizer, masked: bool) -> None:
    outs = transform.out_keys
    both = [key for key in transform.in_keys if key in outs]
    both += [key for key in transform.in_keys_inv if key in transform.out_keys_inv]
    if both:
        raise ValueError(f"text and its tokens need a key each: found {both[0]!r} for both")
    masks = [mask_of(key) for key in outs]
    for i, mask in enumerate(masks):
        if outs[i] in outs[:i]:
            raise ValueError(f"each text needs an out key of its own: found {outs[i]!r} twice")
        if masked and (mask in masks[:i] or mask in outs):
            other = outs[masks.index(mask)] if mask in masks[:i] else mask
            raise ValueError(
                f"{outs[i]!r} and {other!r} would share the key {mask!r}, the mask beside the tokens: "
                "put each into a nest of its own, or set return_attention_mask=False"
            )
