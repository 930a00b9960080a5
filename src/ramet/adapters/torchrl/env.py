"""Environments of ramet as environments of TorchRL. B is the number of rows."""

from __future__ import annotations

from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor, lazy_stack
from torch import Tensor
from torchrl import envs as peer

from ramet import ragged
from ramet.adapters.torchrl.specs import to_torchrl_spec
from ramet.envs.env import EnvBase
from ramet.specs import Composite, KeyPath, describe
from ramet.transforms.entries import entry, row_mask
from ramet.transforms.env_specs import FLAGS


def as_torchrl_env(env: EnvBase, *, rows: bool = False) -> peer.EnvBase:
    """Return `env` as an environment of TorchRL: same keys, batch size and device; `.ramet_env` is `env` itself.

    The state of a ramet environment is in its TensorDict, so its observations are TorchRL's `state_spec` too: they may
    be given to `reset`. Per-token flags (`assign_done`) are observations in TorchRL, which would reset by them.
    Random actions come from TorchRL, hence from the global random state.

    TorchRL stacks, mixes and compares rows of different lengths only where each has a TensorDict of its own. So
    `rows=True` hands a batch [B] out as a lazy stack of its rows, without padding: it is what a `TransformedEnv` of
    TorchRL needs to reset some of the rows of a language environment in the middle of a rollout. Each row costs its
    container; without a `TransformedEnv` of TorchRL, ramet mixes rows itself, in any layout.

    >>> from tensordict import TensorDict
    >>> from ramet.envs.llm import LLMEnv
    >>> env = as_torchrl_env(LLMEnv(from_text=False, eos_token_id=9))
    >>> prompts = TensorDict({"tokens": torch.tensor([[1], [2]]), "attention_mask": torch.ones(2, 1).bool()}, [2])
    >>> state = env.reset(prompts)
    >>> state["tokens_response"] = torch.tensor([[5], [9]])
    >>> td = env.step(state)
    >>> td["next", "tokens"].tolist(), td["next", "terminated"].tolist()
    ([[1, 5], [2, 9]], [[False], [True]])
    >>> peer.TransformedEnv(env, peer.StepCounter(3)).rollout(9, tensordict=prompts).batch_size
    torch.Size([2, 3])
    """
    return _Env(env, rows)


class _Env(peer.EnvBase):
    def __init__(self, env: EnvBase, rows: bool) -> None:
        super().__init__(device=env.device, batch_size=env.batch_size)
        self._batch_locked = env.batch_locked
        self.ramet_env, self._rows = env, rows
        self._last: TensorDictBase | None = None
        self._make_specs()

    def _make_specs(self) -> None:
        env = self.ramet_env
        observation, done = env.full_observation_spec.clone(), Composite(shape=env.batch_size, device=env.device)
        for key in env.done_keys:
            (done if key in FLAGS else observation)[key] = env.full_done_spec[key]
        self.observation_spec, self.state_spec = to_torchrl_spec(observation), to_torchrl_spec(observation)
        self.action_spec = to_torchrl_spec(env.full_action_spec)
        self.reward_spec, self.done_spec = to_torchrl_spec(env.full_reward_spec), to_torchrl_spec(done)
        self._own_keys: list[KeyPath] = [*observation.leaves(), *done.leaves()]
        self._ragged_keys = [key for key in observation.leaves() if -1 in observation[key].shape]

    def to(self, device: torch.device | str) -> Self:
        """Move the environment inside, and say so in the specs."""
        self.ramet_env.to(device)
        super().to(device)
        self._make_specs()
        return self

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset the rows that are done. TorchRL hides the others from the reset; ramet keeps them by what they are."""
        return self.reset(tensordict) if self.any_done(tensordict) else tensordict

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        full = None if tensordict is None else with_state(tensordict, self._last)
        td = self.ramet_env.reset(full).select(*self._own_keys, strict=False)
        if full is not tensordict and not self._rows:
            self._check_widths(td)
        self._last = td = _as_rows(td, self._ragged_keys) if self._rows and td.batch_dims == 1 else td
        return td.copy()

    def _check_widths(self, td: TensorDictBase) -> None:
        """Raise where TorchRL is about to mix rows of which it can not know how to make them of one length."""
        if self._last is None or isinstance(td, LazyStackedTensorDict):
            return
        for key in self._ragged_keys:
            new, old = td.get(key, None), self._last.get(key, None)
            if isinstance(new, Tensor) and isinstance(old, Tensor) and (new.is_nested or new.shape != old.shape):
                raise RuntimeError(
                    f"{key!r}: some rows were reset, and TorchRL's TransformedEnv can not mix them ({describe(new)}) "
                    f"with the others ({describe(old)}): pass rows=True to as_torchrl_env"
                )

    def _reset_proc_data(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if self._rows or tensordict is None:
            return super()._reset_proc_data(tensordict, tensordict_reset)
        tensordict.pop("_reset", None)
        return tensordict.update(tensordict_reset)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        td = self.ramet_env.step(tensordict)
        for key in self.ramet_env.action_keys:  # one that was made of something else belongs to the rollout too
            if entry(tensordict, key) is None and entry(td, key) is not None:
                tensordict.set(key, td.get(key))
        self._last = td.get("next").select(*self._own_keys, strict=False)
        return td.get("next")

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        return tensordict, tensordict_.exclude(*self.ramet_env.consumed_keys)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.ramet_env.set_seed(seed)


def with_state(td: TensorDictBase, last: TensorDictBase | None) -> TensorDictBase:
    """Return `td` with what it lacks of `last`, where it asks for a reset of some rows.

    A `TransformedEnv` of TorchRL hides all but the mask from such a reset, and mixes the rows afterwards. So the others
    are read for their layout alone: whatever comes back in them is replaced by what they really are.
    """
    if last is None or td.batch_size != last.batch_size or row_mask(td, "_reset") is None:
        return td
    if len(leaves(td)) == 1:
        return last.copy().set("_reset", td.get("_reset"))
    absent = [key for key in leaves(last) if entry(td, key) is None]
    return td.copy().update(last.select(*absent)) if absent else td


def leaves(td: TensorDictBase) -> list[KeyPath]:
    """Return the keys of all entries that are no TensorDicts."""
    return list(td.keys(True, True, is_leaf=is_leaf_nontensor))


def _as_rows(td: TensorDictBase, ragged_keys: list[KeyPath]) -> TensorDictBase:
    """Return a batch [B] as a lazy stack of its rows, without padding."""
    if isinstance(td, LazyStackedTensorDict):
        return td
    present = [key for key in ragged_keys if entry(td, key) is not None]
    parts = [part.copy() for part in td.exclude(*present).unbind(0)]
    for key in present:
        for part, row in zip(parts, ragged.rows(td, key), strict=True):
            part.set(key, row)
    return lazy_stack(parts, 0)
