"""Transforms of ramet as transforms of TorchRL. *B is the batch size."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl import data as peer_data
from torchrl import envs as peer

from ramet import ragged
from ramet.adapters.torchrl.env import leaves, with_state
from ramet.adapters.torchrl.specs import changed, composite_of
from ramet.specs import Composite, KeyPath
from ramet.transforms.entries import entry, row_mask, whole
from ramet.transforms.env_specs import EnvSpecs
from ramet.transforms.transform import Compose, Transform


def as_torchrl_transform(transform: Transform) -> peer.Transform:
    """Return `transform` as a transform of TorchRL; `.ramet_transform` is `transform` itself.

    Its `parent` is the TorchRL environment that it is part of, as a ramet transform sees one: specs, keys, batch size
    and device. TorchRL seeds no transforms: `set_seed(seed)` of what is returned does. What a step uses up (the
    actions, and what may come in their place) is out of the next state; an action made of something else stays inside.

    >>> from ramet.transforms.step_counter import StepCounter
    >>> env = peer.TransformedEnv(peer.PendulumEnv(), as_torchrl_transform(StepCounter(max_steps=3)))
    >>> td = env.rollout(10)
    >>> td["next", "step_count"].flatten().tolist(), td["next", "truncated"].flatten().tolist()
    ([1, 2, 3], [False, False, True])
    """
    return _Transform(transform)


class _Transform(peer.Transform):
    def __init__(self, transform: Transform) -> None:
        super().__init__(in_keys=[], out_keys=[], in_keys_inv=[], out_keys_inv=[])
        self.ramet_transform = transform
        self._behind: _Specs | None = None  # the environment with this transform
        self._last: TensorDictBase | None = None

    def _placed(self) -> Transform:
        """Return the transform inside, with the parent that TorchRL gives this one now."""
        inner, parent = self.ramet_transform, self.parent
        if getattr(inner.parent, "env", None) is not parent:
            for part in inner.modules():
                if isinstance(part, Transform):
                    part._parent = None
            if parent is not None:
                inner.attach(_Specs(parent))
        if parent is None:
            self._behind = None
        elif self._behind is None or self._behind.env is not parent:
            self._behind = _Specs(parent, (inner,))
        return inner

    def clone(self) -> Self:
        """Return another transform around a copy of the one inside, which has no parent yet."""
        other = super().clone()
        other.ramet_transform, other._behind, other._last = _copied(self.ramet_transform), None, None
        return other

    def set_seed(self, seed: int) -> None:
        """Fix what is random in the transform inside."""
        self.ramet_transform.set_seed(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply the way out."""
        return self._placed()(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._placed()._call(next_tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._placed()._inv_call(tensordict)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        inner = self._placed()
        if tensordict is None:
            td = inner._reset_env_preprocess(TensorDict({}, self.parent.batch_size, device=self.parent.device))
            return None if td.is_empty() else td
        full = with_state(tensordict, self._last)
        td = inner._reset_env_preprocess(full.copy())
        # The environment inside might take for its first state what TorchRL hid from it.
        shown = [key for key in leaves(full) if entry(tensordict, key) is None and _is_same(td, full, key)]
        return td.exclude(*shown)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        inner, behind = self._placed(), self._behind
        if behind is None:
            return inner._reset(tensordict, tensordict_reset)
        # In ramet the result has what was filled in before; in TorchRL the environment inside gives its own keys alone.
        filled = [key for key in behind.full_observation_spec.leaves() if entry(tensordict_reset, key) is None]
        td = inner._reset(tensordict, tensordict_reset.update(tensordict.select(*filled, strict=False)))
        flags = behind.full_done_spec
        for key in flags.leaves():
            if entry(td, key) is None:  # ramet has all flags from the start; TorchRL may have no "truncated"
                td.set(key, flags[key].zero(td.batch_size[: td.batch_dims - len(flags.shape)]))
        self._last = td
        return td.copy()

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_td = self._placed()._step(tensordict, next_tensordict.copy())
        mask = row_mask(tensordict, "_step")
        if mask is not None:
            rewards = [] if self._behind is None else self._behind.reward_keys
            _put_back(tensordict, next_td, mask, next_tensordict, rewards)
        self._last = next_td
        return next_td.copy()

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        consumed = [] if self._behind is None else self._behind.consumed_keys
        return tensordict, tensordict_.exclude(*consumed)

    def transform_output_spec(self, output_spec: peer_data.Composite) -> peer_data.Composite:
        """Change the specs of observations, rewards and flags as the transform inside does."""
        inner, result = self._placed(), output_spec.clone()
        changes = {
            "full_observation_spec": inner.transform_observation_spec,
            "full_reward_spec": inner.transform_reward_spec,
            "full_done_spec": inner.transform_done_spec,
        }
        empty = peer_data.Composite(shape=output_spec.shape, device=output_spec.device)
        for name, change in changes.items():
            result[name] = changed(output_spec.get(name, empty), change)
        return result

    def transform_action_spec(self, action_spec: peer_data.Composite) -> peer_data.Composite:
        """Change the specs of the actions as the transform inside does."""
        return changed(action_spec, self._placed().transform_action_spec)


class _Specs(EnvSpecs):
    """A TorchRL environment behind `transforms`, as ramet transforms see one."""

    def __init__(self, env: peer.EnvBase, transforms: tuple[Transform, ...] = ()) -> None:
        self.env, self._transforms = env, Compose(*transforms)
        self._found: dict[str, Composite] = {}
        super().__init__(env.batch_size, env.device)

    def _full_of(self, name: str, change: Callable[[Composite], Composite]) -> Composite:
        if name not in self._found:
            self._found[name] = change(composite_of(getattr(self.env, name)))
        return self._found[name].clone()

    @property
    def full_observation_spec(self) -> Composite:
        """Specs of all observations."""
        return self._full_of("full_observation_spec", self._transforms.transform_observation_spec)

    @property
    def full_action_spec(self) -> Composite:
        """Specs of all actions."""
        return self._full_of("full_action_spec", self._transforms.transform_action_spec)

    @property
    def full_reward_spec(self) -> Composite:
        """Specs of all rewards."""
        return self._full_of("full_reward_spec", self._transforms.transform_reward_spec)

    @property
    def full_done_spec(self) -> Composite:
        """Specs of all flags."""
        return self._full_of("full_done_spec", self._transforms.transform_done_spec)

    @property
    def consumed_keys(self) -> list[KeyPath]:
        """Keys that a step uses up."""
        inside: Any = self.env
        while isinstance(inside, peer.TransformedEnv):
            inside = inside.base_env
        own = getattr(inside, "ramet_env", None)
        keys = [*([] if own is None else own.consumed_keys), *self.action_keys]
        return list(dict.fromkeys(self._transforms.transform_consumed_keys(list(dict.fromkeys(keys)))))

    def _with(self, transforms: tuple[Transform, ...]) -> EnvSpecs:
        return _Specs(self.env, transforms)


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy that shares what `module` holds, except for transforms in it and where they belong."""
    other = copy(module)
    parts = {
        name: _copied(part) if isinstance(part, Transform | nn.ModuleList) else part
        for name, part in module._modules.items()
    }
    vars(other).update(_modules=parts, _parameters=copy(module._parameters), _buffers=copy(module._buffers))
    if isinstance(other, Transform):
        other._parent = None
    return other


def _is_same(td: TensorDictBase, other: TensorDictBase, key: KeyPath) -> bool:
    if isinstance(td, LazyStackedTensorDict) and isinstance(other, LazyStackedTensorDict):
        return all(_is_same(*pair, key) for pair in zip(td.unbind(0), other.unbind(0), strict=True))
    return entry(td, key) is entry(other, key)


def _put_back(
    td: TensorDictBase, new: TensorDictBase, mask: Tensor, settled: TensorDictBase, rewards: list[KeyPath]
) -> None:
    """Give the rows of `new` that `mask` (*B) does not name their entries of `td` again, and no reward.

    Entries that are those of `settled` are right already.
    """
    if isinstance(new, LazyStackedTensorDict):
        of_rows = (new.unbind(0), td.unbind(0), settled.unbind(0))
        for flag, row, before, right in zip(mask, *of_rows, strict=True):
            if not bool(flag):
                _put_back(before, row, flag, right, rewards)
        return
    for key in leaves(new):
        value: Any = new.get(key)
        if settled.get(key, None) is value:
            continue
        old = torch.zeros_like(value) if key in rewards and isinstance(value, Tensor) else whole(td, key)
        if old is not None and old is not value:
            new.set(key, ragged.choose(mask, value, old))
