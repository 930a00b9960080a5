"""Text generation as an environment: what is observed grows by what the policy writes.

Dimensions: B rows, L tokens of a row; *B is the batch, () or (B,).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from ramet.envs.env import EnvBase, complete_flags, entry, row_mask, whole
from ramet.ragged import Appender, Ragged
from ramet.specs import Bounded, Categorical, Composite, KeyPath, NonTensor, Spec, Unbounded, describe
from ramet.types import Key

_TOKENS_DATA = "tokens_data"
_EXAMPLE = "a string"


class LLMEnv(EnvBase):
    """An environment whose observation is a prompt, followed by all that the policy has answered so far.

    With tokens (`from_text=False`): `token_key` int64 (*B, L), its mask `attention_key` (*B, L), action `action_key`
    (*B, n), any number of tokens in each row, none included. Rows may be dense, left-padded with a mask, jagged or a
    lazy stack; the result has the layout of the input and its cost is that of the action (dense and jagged). A mask
    that is not there is not made up.

    With text: `str_key` and `action_key` hold strings.

    A row is terminated by an action that holds `eos_token_id` (in text, `"tokens_response"` is looked at).
    `assign_reward` gives zeros, float32, one for each token of the action; `assign_done` flags under `"tokens_data"`,
    one for each.

    `batch_size` n is (n,), and no other batch is taken; None or 0 is (), and takes a TensorDict without batch or with
    any number of rows. Prompts come with `reset(td)`, or from a primer that is appended.

    >>> env = LLMEnv(from_text=False, eos_token_id=9)
    >>> td = env.reset(TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2]))
    >>> td["tokens_response"] = torch.tensor([[5, 6], [7, 9]])
    >>> env.step(td)["next", "tokens"].tolist(), env.step(td)["next", "done"].tolist()
    ([[1, 2, 5, 6], [3, 4, 7, 9]], [[False], [True]])
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
        if eos_token_id is None:
            warnings.warn("eos_token_id is None: no action ends a row", UserWarning, stacklevel=2)
        size = _batch_size(batch_size)
        super().__init__(batch_size=size, device=device, batch_locked=bool(size))
        self.token_key: KeyPath = Key.TOKENS if token_key is None else token_key
        self.str_key: KeyPath = Key.TEXT if str_key is None else str_key
        self.attention_key: KeyPath = _sibling(self.token_key, Key.MASK) if attention_key is None else attention_key
        default_action = Key.TEXT_RESPONSE if from_text else Key.RESPONSE
        self.action_key: KeyPath = default_action if action_key is None else action_key
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
                f"reset needs {key!r}: pass it in the TensorDict, or append to the environment a primer "
                "(one is missing)"
            )
        flags = TensorDict({}, batch_size=td.batch_size, device=td.device)
        if self.assign_done:
            flags.set(_TOKENS_DATA, self._no_token_flags(td))
        return flags

    def _no_token_flags(self, td: TensorDictBase) -> TensorDict:
        """Return flags that are all false, as many as there were; none at the first reset."""
        before = whole(td, (_TOKENS_DATA, "done"))
        none = torch.zeros((*td.batch_size, 0), dtype=torch.bool, device=td.device)
        if before is not None:
            action = Ragged.from_jagged(before) if before.is_nested else before
            none = _outside(_with(action, torch.zeros_like(_values(action))))
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
        attention = td.get(self.attention_key, None) if self.has_attention else None
        tokens, attention = self._appender.append(tokens, attention, _stepped(action, mask))
        next_td = self._judge(td, action, mask)
        next_td.set(self.token_key, tokens)
        if attention is not None:
            next_td.set(self.attention_key, attention)
        return next_td

    def _step_lazy(self, td: LazyStackedTensorDict, mask: Tensor | None) -> TensorDictBase:
        """Step a lazy stack of rows, into one: as many containers as rows, so dense and jagged batches are faster."""
        action = self._lazy_action(td, self.action_key)
        judged = lazy_stack(list(self._judge(td, action, mask).unbind(0)), 0)
        new = _stepped(action, mask)
        parts = new.rows() if isinstance(new, Ragged) else list(new)
        for row, next_row, part in zip(td.unbind(0), judged.unbind(0), parts, strict=True):
            next_row.set(self.token_key, torch.cat([row.get(self.token_key), part]))
            attention = row.get(self.attention_key, None) if self.has_attention else None
            if attention is not None:
                next_row.set(self.attention_key, torch.cat([attention, attention.new_ones(len(part))]))
        return judged

    def _step_text(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        texts, actions = _strings_of(td, self.str_key), _strings_of(td, self.action_key)
        if mask is not None:
            actions = [text if flag else "" for text, flag in zip(actions, mask.reshape(-1).tolist(), strict=True)]
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
        joined = [text + added for text, added in zip(texts, actions, strict=True)]
        text: Any = NonTensorStack(*joined) if td.batch_dims else NonTensorData(joined[0])
        next_td.set(self.str_key, text)
        return next_td

    def _judge(self, td: TensorDictBase, action: Tensor | Ragged | None, mask: Tensor | None) -> TensorDict:
        """Return flags and rewards for an action; rows that `mask` does not name keep their flags."""
        size = td.batch_size
        if action is None or self.eos_token_id is None:
            device = td.device if action is None else _values(action).device
            terminated = torch.zeros((*size, 1), dtype=torch.bool, device=device)
        else:
            hit = _with(action, _values(action) == self.eos_token_id)
            terminated = hit.any()[:, None] if isinstance(hit, Ragged) else hit.any(-1, keepdim=True)
        truncated = torch.zeros_like(terminated)
        if mask is not None:
            terminated = torch.where(mask[..., None], terminated, td.get("terminated", truncated))
            truncated = torch.where(mask[..., None], truncated, td.get("truncated", truncated))
        flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
        out = TensorDict(flags, size, device=td.device)
        if action is not None and self.assign_reward:
            out.set(self.reward_key, _outside(_with(action, torch.zeros_like(_values(action), dtype=torch.float32))))
        if action is not None and self.assign_done:
            done = _outside(self._token_flags(action, mask))
            out.set(_TOKENS_DATA, TensorDict({"done": done, "terminated": done.clone()}, size, device=td.device))
        return out

    def _token_flags(self, action: Tensor | Ragged, mask: Tensor | None) -> Tensor | Ragged:
        """Say of each token of the action whether it is the eos of a row that is stepped."""
        if mask is not None and isinstance(action, Ragged):
            action = action.compact()
        values = _values(action)
        hit = torch.zeros_like(values, dtype=torch.bool) if self.eos_token_id is None else values == self.eos_token_id
        if mask is not None:
            of_row = mask[..., None]
            hit = hit & (mask.repeat_interleave(action.lengths) if isinstance(action, Ragged) else of_row)
        return _with(action, hit)

    def _action(self, td: TensorDictBase, key: KeyPath) -> Tensor | Ragged:
        action = td.get(key, None)
        if action is None:
            raise KeyError(f"step needs an action {key!r}: let the policy write it into the TensorDict")
        if not isinstance(action, Tensor) or action.dim() != td.batch_dims + 1 or action.dtype.is_floating_point:
            raise TypeError(
                f"{key!r} must hold token ids, an integer tensor {(*td.batch_size, 'n')} or a jagged one: "
                f"found {describe(action)}"
            )
        return Ragged.from_jagged(action) if action.is_nested else action

    def _lazy_action(self, td: TensorDictBase, key: KeyPath) -> Ragged:
        rows = [self._action(row, key) for row in td.unbind(0)]
        return Ragged.from_rows([row for row in rows if isinstance(row, Tensor)])


def _strings_of(td: TensorDictBase, key: KeyPath) -> list[str]:
    value = entry(td, key)
    if value is None:
        raise KeyError(f"step needs {key!r}: there are {sorted(map(str, td.keys()))}")
    if isinstance(value, Tensor):
        raise TypeError(f"{key!r}, row 0: expected str, found a tensor")
    items = td.get(key).tolist()
    items = items if td.batch_dims else [items]
    for row, item in enumerate(items):
        if not isinstance(item, str):
            raise TypeError(f"{key!r}, row {row}: expected str, found {type(item).__name__}")
    return list(items)


def _values(action: Tensor | Ragged) -> Tensor:
    return action.values if isinstance(action, Ragged) else action


def _with(action: Tensor | Ragged, values: Tensor) -> Tensor | Ragged:
    return Ragged(values, action.offsets, action.sizes) if isinstance(action, Ragged) else values


def _outside(action: Tensor | Ragged) -> Tensor:
    return action.jagged() if isinstance(action, Ragged) else action


def _stepped(action: Tensor | Ragged, mask: Tensor | None) -> Tensor | Ragged:
    """Return what is appended: the action, of no tokens in the rows that `mask` does not name."""
    if mask is None:
        return action
    if not mask.dim():
        return _values(action)[:0]
    rows = action if isinstance(action, Ragged) else Ragged.from_padded(action)
    return Ragged(rows.values, rows.offsets, rows.lengths * mask)


def _batch_size(batch_size: int | Sequence[int] | None) -> tuple[int, ...]:
    size = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size or ())
    if len(size) > 1:
        raise TypeError(f"batch_size must be 0 or 1d: found {size}")
    if any(n < 0 for n in size):
        raise ValueError(f"batch_size must not be negative: found {size}")
    return () if size == (0,) else size


def _sibling(key: KeyPath, name: str) -> KeyPath:
    return name if isinstance(key, str) else (*key[:-1], name)
