"""Text generation as an environment: what is observed grows by what the policy writes.

Dimensions: B rows, L tokens of a row; *B is the batch, () or (B,).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from ramet.envs.actions import check_ids, outside, stepped, values_of, with_values
from ramet.envs.entries import complete_flags, made, plain
from ramet.envs.env import EnvBase, TransformedEnv
from ramet.envs.loading import Keys, load
from ramet.ragged import Appender, Ragged, Text, read_text
from ramet.ragged.storage import is_jagged
from ramet.specs import Bounded, Categorical, Composite, KeyPath, NonTensor, Spec, Unbounded, describe
from ramet.transforms.entries import as_batch_size, entry, mask_of, row_mask, whole
from ramet.transforms.loading import DataLoadingPrimer
from ramet.transforms.token_rows import check_vocabulary
from ramet.types import Key

_TOKENS_DATA = "tokens_data"
_EXAMPLE = "a string"


class LLMEnv(EnvBase):
    """An environment whose observation is a prompt, followed by all that the policy has answered so far.

    With tokens (`from_text=False`): `token_key` int64 (*B, L), its mask `attention_key` (*B, L), action `action_key`
    (*B, n), any number of tokens in each row, none included. Rows may be dense, left-padded with a mask, jagged or a
    lazy stack; the result has the layout of the input and its cost is that of the action (dense and jagged). A mask
    that is not there is not made up.

    With text: `str_key` and `action_key` hold strings, which are kept in segments and joined when they are read.

    A row is terminated by an action that holds `eos_token_id` (in text, `"tokens_response"` is looked at).
    `assign_reward` gives zeros, float32, one for each token of the action; `assign_done` flags under `"tokens_data"`,
    one for each.

    `batch_size` n is (n,), and no other batch is taken; None or 0 is (), and takes a TensorDict without batch or with
    any number of rows. Prompts come with `reset(td)`, or from a primer that is appended.

    >>> env = LLMEnv(from_text=False, eos_token_id=9)
    >>> prompts = TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2])
    >>> td = env.reset(prompts)
    >>> sorted(td.keys()), td["tokens"].tolist()
    (['done', 'terminated', 'tokens', 'truncated'], [[1, 2], [3, 4]])
    >>> td["tokens_response"] = torch.tensor([[5, 6], [7, 9]])
    >>> td = env.step(td)
    >>> td["next", "tokens"].tolist(), td["next", "done"].tolist()
    ([[1, 2, 5, 6], [3, 4, 7, 9]], [[False], [True]])

    A rollout [B, T] asks a policy for each action; what is ragged in it is read by `ramet.rows`.

    >>> from ramet.ragged import rows
    >>> td = env.rollout(2, lambda td: td.set("tokens_response", torch.tensor([[5], [7]])), tensordict=prompts)
    >>> td.batch_size, rows(td, ("next", "tokens"))
    (torch.Size([2, 2]), [tensor([1, 2, 5]), tensor([1, 2, 5, 5]), tensor([3, 4, 7]), tensor([3, 4, 7, 7])])

    The same with text; its end is looked for in the tokens that a policy writes beside it.

    >>> env = LLMEnv(eos_token_id=9)
    >>> td = env.reset(TensorDict({"text": ["1+1=", "2+3="]}, [2]))
    >>> td["text_response"], td["tokens_response"] = ["2", "5"], torch.tensor([[2, 9], [5, 0]])
    >>> td = env.step(td)
    >>> rows(td, "text"), rows(td["next"], "text"), td["next", "done"].tolist()
    (['1+1=', '2+3='], ['1+1=2', '2+3=5'], [[True], [False]])

    >>> def policy(td):
    ...     td["text_response"], td["tokens_response"] = ["!", "!!"], torch.tensor([[1], [1]])
    >>> rows(env.rollout(2, policy, tensordict=env.step_mdp(td)), ("next", "text"))
    ['1+1=2!', '1+1=2!!', '2+3=5!!', '2+3=5!!!!']
    """

    def __init__(
        self,
        *,
        token_key: KeyPath | None = None,
        str_key: KeyPath | None = None,
        attention_key: KeyPath | None = None,
        action_key: KeyPath | None = None,
        reward_key: KeyPath = Key.REWARD,
        from_text: bool = True,
        device: torch.device | str | None = None,
        vocab_size: int | None = None,
        assign_reward: bool = False,
        assign_done: bool = False,
        batch_size: int | Sequence[int] | None = None,
        has_attention: bool = True,
        as_llm_data: bool = False,
        eos_token_id: int | None = None,
    ) -> None:
        if as_llm_data:
            raise NotImplementedError("as_llm_data=True is not there: observations are plain TensorDict entries")
        if from_text and (assign_reward or assign_done):
            raise ValueError("assign_reward and assign_done count tokens: they need from_text=False")
        if eos_token_id is not None and type(eos_token_id) is not int:
            raise TypeError(f"eos_token_id must be one token id, an int: found {eos_token_id!r}")
        if eos_token_id is None:
            warnings.warn("eos_token_id is None: no action ends a row", UserWarning, stacklevel=2)
        if vocab_size is not None and (type(vocab_size) is not int or vocab_size < 1):
            raise ValueError(f"vocab_size must be a whole number, at least 1: found {vocab_size!r}")
        if vocab_size is not None and eos_token_id is not None and eos_token_id >= vocab_size:
            raise ValueError(
                f"eos_token_id={eos_token_id} is outside a vocabulary of {vocab_size}: no action can hold it"
            )
        size = as_batch_size(batch_size)
        super().__init__(batch_size=size, device=device, batch_locked=bool(size))
        self.token_key: KeyPath = Key.TOKENS if token_key is None else token_key
        self.str_key: KeyPath = Key.TEXT if str_key is None else str_key
        _check_keys(self.token_key, self.str_key, attention_key, action_key, reward_key)
        self.attention_key: KeyPath = mask_of(self.token_key) if attention_key is None else attention_key
        default_action = Key.TEXT_RESPONSE if from_text else Key.RESPONSE
        self.action_key: KeyPath = default_action if action_key is None else action_key
        observed = (self.str_key,) if from_text else (self.token_key, *((self.attention_key,) if has_attention else ()))
        _check_apart(*observed, self.action_key, reward_key)
        self.reward_key, self.from_text, self.has_attention = reward_key, from_text, has_attention
        self.vocab_size, self.eos_token_id = vocab_size, eos_token_id
        self.assign_reward, self.assign_done = assign_reward, assign_done
        self._appender = Appender()
        self._make_specs()

    def _make_specs(self) -> None:
        size, device = self.batch_size, self.device
        observation, action = Composite(shape=size, device=device), Composite(shape=size, device=device)
        if self.from_text:
            observation[self.str_key] = action[self.action_key] = NonTensor(size, device, example_data=_EXAMPLE)
            if self.eos_token_id is not None:  # the tokens in which the end of an answer is looked for
                action[Key.RESPONSE] = self._token_spec()
        else:
            observation[self.token_key] = action[self.action_key] = self._token_spec()
            if self.has_attention:
                observation[self.attention_key] = Categorical(2, (*size, -1), device, torch.bool)
        self.observation_spec, self.action_spec = observation, action
        if self.assign_reward:
            reward = Composite(shape=size, device=device)
            reward[self.reward_key] = Unbounded((*size, -1), device, torch.float32)
            self.reward_spec = reward
        if self.assign_done:
            flag = Categorical(2, (*size, -1), device, torch.bool)
            flags = Composite({"done": flag, "terminated": flag}, shape=size, device=device)
            self.done_spec = Composite({_TOKENS_DATA: flags}, shape=size, device=device)

    def _token_spec(self) -> Spec:
        shape = (*self.batch_size, -1)
        if self.vocab_size is None:
            return Unbounded(shape, self.device, torch.int64)
        return Bounded(0, self.vocab_size - 1, shape, self.device, torch.int64)

    def _check_batch(self, td: TensorDictBase) -> None:
        super()._check_batch(td)
        if td.batch_dims > 1:
            raise ValueError(f"expected a TensorDict without batch or of batch size (B,): found {tuple(td.batch_size)}")

    def _reset(self, td: TensorDictBase) -> TensorDictBase:
        key = self.str_key if self.from_text else self.token_key
        if entry(td, key) is None:
            raise KeyError(
                f"reset needs {key!r}: pass it in the TensorDict, or append to the environment a primer that fills it "
                f"(one is missing); there are {sorted(map(str, td.keys()))}"
            )
        fresh = TensorDict({}, batch_size=td.batch_size, device=td.device)
        if not self.from_text:
            found = entry(td, key)
            if not isinstance(found, Tensor) or found.dtype is not torch.int64:
                fresh.set(key, self._as_ids(td))
            self._check_mask(td)
        if self.assign_done:
            fresh.set(_TOKENS_DATA, self._no_token_flags(td))
        return fresh

    def _as_ids(self, td: TensorDictBase) -> Tensor:
        """Return prompts of another integer type as int64."""
        found = entry(td, self.token_key)
        lazy, dtype = isinstance(td, LazyStackedTensorDict), found.dtype if isinstance(found, Tensor) else torch.bool
        if lazy or dtype is torch.bool or dtype.is_floating_point:
            raise TypeError(
                f"{self.token_key!r} must hold token ids, int64{' in each row of a lazy stack' if lazy else ''}: "
                f"found {describe(found)}"
            )
        tokens: Tensor = td.get(self.token_key)
        return tokens.to(torch.int64)

    def _check_mask(self, td: TensorDictBase) -> None:
        mask = entry(td, self.attention_key) if self.has_attention else None
        if mask is not None and (not isinstance(mask, Tensor) or mask.dtype.is_floating_point):
            raise TypeError(
                f"{self.attention_key!r} must be a mask of {self.token_key!r}, bool or 0 and 1: found {describe(mask)}"
            )

    def _no_token_flags(self, td: TensorDictBase) -> TensorDict:
        """Return flags that are all false, as many as there were; none at the first reset."""
        before = whole(td, (_TOKENS_DATA, "done"))
        none = torch.zeros((*td.batch_size, 0), dtype=torch.bool, device=td.device)
        if before is not None:
            action = Ragged.from_jagged(before) if before.is_nested else before
            none = outside(with_values(action, torch.zeros_like(values_of(action))))
        return TensorDict({"done": none, "terminated": none.clone()}, td.batch_size)

    def _step_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        next_td = self._step(td)
        # This class leaves rows out as it steps; one that overrides its `_step` may not.
        if type(self)._step is not LLMEnv._step:
            complete_flags(next_td)
            if mask is not None:
                self._put_back(td, next_td, mask)
        return next_td

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        mask = row_mask(td, "_step")
        if self.from_text:
            return self._step_text(td, mask)
        if isinstance(td, LazyStackedTensorDict):
            return self._step_lazy(td, mask)
        return self._step_tokens(td, mask)

    def _step_tokens(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        tokens, action = td.get(self.token_key, None), self._action(td, self.action_key)
        if tokens is None:
            raise KeyError(f"step needs the observation {self.token_key!r}: step what reset or step_mdp returned")
        check_ids(tokens, self.token_key)
        attention = td.get(self.attention_key, None) if self.has_attention else None
        tokens, attention = self._appender.append(tokens, attention, stepped(action, mask))
        next_td = self._judge(td, action, mask)
        next_td.set(self.token_key, tokens)
        if attention is not None:
            next_td.set(self.attention_key, attention)
        return next_td

    def _step_lazy(self, td: LazyStackedTensorDict, mask: Tensor | None) -> TensorDictBase:
        """Step a lazy stack of rows, into one: as many containers as rows, so dense and jagged batches are faster."""
        action = self._lazy_action(td, self.action_key)
        judged = lazy_stack(list(self._judge(td, action, mask).unbind(0)), 0)
        new = stepped(action, mask)
        parts = new.rows() if isinstance(new, Ragged) else list(new)
        for row, next_row, part in zip(td.unbind(0), judged.unbind(0), parts, strict=True):
            tokens = row.get(self.token_key)
            check_ids(tokens, self.token_key)
            next_row.set(self.token_key, torch.cat([tokens, part]))
            attention = row.get(self.attention_key, None) if self.has_attention else None
            if attention is not None:
                next_row.set(self.attention_key, torch.cat([attention, attention.new_ones(len(part))]))
        return judged

    def _step_text(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        text, added = (self._text(td, key) for key in (self.str_key, self.action_key))
        if mask is not None:
            added = added.only(mask.reshape(-1))
        action = None
        if self.eos_token_id is not None:
            if entry(td, Key.RESPONSE) is None:
                raise RuntimeError(
                    f"{Key.RESPONSE!r} is missing: the end of a row is looked for in the tokens of its action; "
                    "let the policy write them, or set eos_token_id=None"
                )
            lazy = isinstance(td, LazyStackedTensorDict)
            action = self._lazy_action(td, Key.RESPONSE) if lazy else self._action(td, Key.RESPONSE)
        next_td = self._judge(td, action, mask)
        next_td.set(self.str_key, text.append(added).entry(batch=bool(td.batch_dims)))
        return next_td

    def _text(self, td: TensorDictBase, key: KeyPath) -> Text:
        if entry(td, key) is None:
            raise KeyError(f"step needs {key!r}: there are {sorted(map(str, td.keys()))}")
        return read_text(td, key)

    def _judge(self, td: TensorDictBase, action: Tensor | Ragged | None, mask: Tensor | None) -> TensorDict:
        """Return flags and rewards for an action; rows that `mask` does not name keep their flags."""
        size = td.batch_size
        if action is None or self.eos_token_id is None:
            device = td.device if action is None else values_of(action).device
            terminated = torch.zeros((*size, 1), dtype=torch.bool, device=device)
        else:
            hit = with_values(action, values_of(action) == self.eos_token_id)
            terminated = hit.any()[:, None] if isinstance(hit, Ragged) else hit.any(-1, keepdim=True)
        truncated = torch.zeros_like(terminated)
        if mask is not None:
            terminated = torch.where(mask[..., None], terminated, td.get("terminated", truncated))
            truncated = torch.where(mask[..., None], truncated, td.get("truncated", truncated))
        flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
        fits = plain(td) and td.device in (None, terminated.device)
        out = made(flags, td) if fits else TensorDict(flags, size, device=td.device)
        if action is not None and self.assign_reward:
            out.set(
                self.reward_key, outside(with_values(action, torch.zeros_like(values_of(action), dtype=torch.float32)))
            )
        if action is not None and self.assign_done:
            done = outside(self._token_flags(action, mask))
            out.set(_TOKENS_DATA, TensorDict({"done": done, "terminated": done.clone()}, size, device=td.device))
        return out

    def _token_flags(self, action: Tensor | Ragged, mask: Tensor | None) -> Tensor | Ragged:
        """Say of each token of the action whether it is the eos of a row that is stepped."""
        if mask is not None and isinstance(action, Ragged):
            action = action.compact()
        values = values_of(action)
        hit = torch.zeros_like(values, dtype=torch.bool) if self.eos_token_id is None else values == self.eos_token_id
        if mask is not None:
            of_row = mask[..., None]
            hit = hit & (mask.repeat_interleave(action.lengths) if isinstance(action, Ragged) else of_row)
        return with_values(action, hit)

    def _action(self, td: TensorDictBase, key: KeyPath) -> Tensor | Ragged:
        action = td.get(key, None)
        if action is None:
            raise KeyError(f"step needs an action {key!r}: let the policy write it into the TensorDict")
        dtype = action.dtype if isinstance(action, Tensor) else torch.bool
        if len(action.shape) != td.batch_dims + 1 or dtype is torch.bool or dtype.is_floating_point:
            raise TypeError(
                f"{key!r} must hold token ids, an integer tensor {(*td.batch_size, 'n')} or a jagged one: "
                f"found {describe(action)}"
            )
        real = self._action_mask(td, key)
        ids: Tensor | Ragged = Ragged.from_jagged(action) if is_jagged(action) else action
        if real is not None:
            ids = Ragged.from_any(action, real) if td.batch_dims else action[real.bool()]
        if self.vocab_size is not None:
            check_vocabulary(ids, self.vocab_size, key)
        return ids

    def _action_mask(self, td: TensorDictBase, key: KeyPath) -> Tensor | None:
        """Return the mask of a padded action: an entry called "tokens" has it beside it, as everywhere."""
        if isinstance(key, str) or key[-1] != Key.TOKENS or key == self.token_key:
            return None
        mask = mask_of(key)
        return None if mask == self.attention_key else td.get(mask, None)

    def _lazy_action(self, td: TensorDictBase, key: KeyPath) -> Ragged:
        rows = [self._action(row, key) for row in td.unbind(0)]
        return Ragged.from_rows([row for row in rows if isinstance(row, Tensor)])

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Any,
        *,
        tokenizer: Any = None,
        token_key: KeyPath | None = None,
        str_key: KeyPath | None = None,
        attention_key: KeyPath | None = None,
        action_key: KeyPath | None = None,
        reward_key: KeyPath = Key.REWARD,
        from_text: bool = True,
        device: torch.device | str | None = None,
        vocab_size: int | None = None,
        batch_size: int | Sequence[int] | None = None,
        has_attention: bool = True,
        assign_reward: bool = False,
        assign_done: bool = False,
        primers: Any = None,
        example_data: Any = None,
        stack_method: Any = None,
        repeats: int | None = None,
        group_repeats: bool = True,
        eos_token_id: int | None = None,
    ) -> TransformedEnv:
        """Make an environment of this class whose prompts come from a loader, by a `DataLoadingPrimer`.

        Its batch size is the primer's: `batch_size`, or that of the loader, times `repeats` with `group_repeats`. A
        loader of bare strings or tensors fills what the environment observes. `env.base_env` is of the class that this
        is called on, in transforms.

        With a `tokenizer`, one of transformers' or the name of one, and `from_text`, a `Tokenizer` keeps the tokens
        beside the text, and the action is `"tokens_response"`, from which the text under `action_key` is derived.
        Without `from_text`, prompts are text, under `str_key`, and tokenised at reset only. Rows are padded, or jagged
        where `stack_method` is "as_nested_tensor" or `has_attention` is False. A tokenizer writes the mask beside the
        tokens: ValueError for another `attention_key`.

        >>> from ramet.models.tiny import tiny_tokenizer
        >>> from ramet.ragged import rows
        >>> env = LLMEnv.from_dataloader(["2+2=", "7"], tokenizer=tiny_tokenizer(), batch_size=2, eos_token_id=2)
        >>> td = env.reset()
        >>> td["tokens"].tolist(), rows(td, "text")
        ([[6, 76, 6, 84], [0, 0, 0, 11]], ['2+2=', '7'])
        >>> td["tokens_response"] = torch.tensor([[8, 2], [9, 10]])
        >>> td = env.step(td)
        >>> rows(td["next"], "text"), td["next", "done"].tolist()
        (['2+2=4', '756'], [[True], [False]])
        >>> env.rollout(3).batch_size
        torch.Size([2, 3])
        """
        primer = DataLoadingPrimer(
            dataloader,
            primers=primers,
            example_data=example_data,
            stack_method=stack_method,
            batch_size=batch_size,
            repeats=repeats,
            group_repeats=group_repeats and repeats is not None,
            device=device,
        )
        keys = Keys(token_key, str_key, attention_key, action_key, reward_key)
        if tokenizer is not None:
            keys.check()
        return load(
            cls,
            primer,
            keys,
            tokenizer=tokenizer,
            from_text=from_text,
            device=device,
            vocab_size=vocab_size,
            has_attention=has_attention,
            assign_reward=assign_reward,
            assign_done=assign_done,
            eos_token_id=eos_token_id,
        )


def _check_keys(*keys: KeyPath | None) -> None:
    for key in keys:
        names = (key,) if isinstance(key, str) else () if key is None else key
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"a key is a string or a tuple of strings: found {key!r}")


def _check_apart(*keys: KeyPath) -> None:
    paths = [(key,) if isinstance(key, str) else key for key in keys]
    twice = next((path for number, path in enumerate(paths) if path in paths[:number]), None)
    if twice is not None:
        raise ValueError(f"each entry needs a key of its own: found {twice} twice among {paths}")
