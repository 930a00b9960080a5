"""What an environment says of itself, and a transform may ask: batch size, device, specs and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from ramet.specs import Categorical, Composite, KeyPath, Spec

if TYPE_CHECKING:
    from ramet.transforms.transform import Transform

FLAGS = ("done", "terminated", "truncated")


class EnvSpecs:
    """Specs of what an environment takes and gives.

    A `full_*_spec` is a `Composite` of all keys; `action_spec` and `reward_spec` are the leaf where there is only one,
    and may be set as one: its key is then "action" or "reward".
    """

    def __init__(self, batch_size: Sequence[int], device: torch.device | str | None) -> None:
        self.batch_size = torch.Size(batch_size)
        self.device = None if device is None else torch.device(device)
        empty = Composite(shape=self.batch_size, device=self.device)
        self._observation_spec, self._action_spec, self._reward_spec = empty, empty.clone(), empty.clone()
        self.done_spec = empty.clone()

    @property
    def full_observation_spec(self) -> Composite:
        """Specs of all observations."""
        return self._observation_spec

    @property
    def full_action_spec(self) -> Composite:
        """Specs of all actions."""
        return self._action_spec

    @property
    def full_reward_spec(self) -> Composite:
        """Specs of all rewards; empty where the environment gives none."""
        return self._reward_spec

    @property
    def full_done_spec(self) -> Composite:
        """Specs of all flags: `done`, `terminated`, `truncated`, bool (*B, 1), and any others."""
        return self._done_spec

    @property
    def observation_spec(self) -> Composite:
        """Specs of all observations."""
        return self.full_observation_spec

    @observation_spec.setter
    def observation_spec(self, spec: Composite) -> None:
        self._observation_spec = spec

    @property
    def action_spec(self) -> Spec:
        """Spec of the action; of all of them where there are several."""
        return _only(self.full_action_spec)

    @action_spec.setter
    def action_spec(self, spec: Spec) -> None:
        self._action_spec = self._full("action", spec)

    @property
    def reward_spec(self) -> Spec:
        """Spec of the reward; of all of them where there are several or none."""
        return _only(self.full_reward_spec)

    @reward_spec.setter
    def reward_spec(self, spec: Spec) -> None:
        self._reward_spec = self._full("reward", spec)

    @property
    def done_spec(self) -> Composite:
        """Specs of all flags."""
        return self.full_done_spec

    @done_spec.setter
    def done_spec(self, spec: Spec) -> None:
        full = self._full("done", spec).clone()
        for flag in FLAGS:
            if flag not in full:
                full[flag] = Categorical(2, (*self.batch_size, 1), self.device, torch.bool)
        self._done_spec = full

    def _full(self, name: str, spec: Spec) -> Composite:
        if isinstance(spec, Composite):
            return spec
        return Composite({name: spec}, shape=self.batch_size, device=self.device)

    @property
    def action_keys(self) -> list[KeyPath]:
        """Keys of the actions."""
        return self.full_action_spec.leaves()

    @property
    def consumed_keys(self) -> list[KeyPath]:
        """Keys that a step uses up: the actions, and what may come beside them or in their place."""
        return self.action_keys

    @property
    def reward_keys(self) -> list[KeyPath]:
        """Keys of the rewards."""
        return self.full_reward_spec.leaves()

    @property
    def done_keys(self) -> list[KeyPath]:
        """Keys of the flags."""
        return self.full_done_spec.leaves()

    @property
    def prompt_key(self) -> KeyPath | None:
        """Key under which a reset takes strings, where that is not an observation of text; None if there is none."""
        return None

    def mask_key(self, tokens: KeyPath) -> KeyPath | None:
        """Return the key of the mask that a reset takes beside `tokens`, though no spec has it; None for none."""
        return None

    def fake_tensordict(self) -> TensorDict:
        """Make a TensorDict of zeros with every key that a step of this environment has."""
        td, next_td = self.full_observation_spec.zero(), self.full_observation_spec.zero()
        td.update(self.full_action_spec.zero()).update(self.full_done_spec.zero())
        next_td.update(self.full_reward_spec.zero()).update(self.full_done_spec.zero())
        return td.set("next", next_td)

    def _with(self, transforms: tuple[Transform, ...]) -> EnvSpecs:
        """Return this environment as it is behind `transforms`, which belong to it already."""
        raise NotImplementedError

    def _move_specs(self, device: torch.device) -> None:
        self.device = device
        self._observation_spec, self._action_spec = self._observation_spec.to(device), self._action_spec.to(device)
        self._reward_spec, self._done_spec = self._reward_spec.to(device), self._done_spec.to(device)


def _only(spec: Composite) -> Spec:
    keys = spec.leaves()
    return spec[keys[0]] if len(keys) == 1 else spec
