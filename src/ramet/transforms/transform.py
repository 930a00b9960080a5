"""A transform: what is done to the TensorDict on its way into an environment and out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from ramet.ragged import check_td
from ramet.specs import Composite, KeyPath
from ramet.transforms.env_specs import EnvSpecs


class Transform(nn.Module):
    """Do nothing: the start of every transform. Override the steps of the way that matter.

    The way of a reset: `_reset_env_preprocess(td)` sees the TensorDict before the environment (and `"_reset"`, the
    rows that are reset: it must leave the others alone), `_reset(td, td_reset)` sees what came of it. The way of a
    step: `_inv_call(td)` sees the action before the environment, `_step(td, next_td)` the result. `_call(td)` serves
    `_reset` and `_step` alike, where both do the same. Each may write into the TensorDict it is given, and returns it.
    Each changes the specs accordingly: `transform_observation_spec` and its likes get a copy of the specs of all keys.

    By default `_call` maps each of `in_keys` to its one of `out_keys` by `_apply_transform`; `in_keys_inv`,
    `out_keys_inv` and `_inv_apply_transform` do the same on the way in.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> class Double(Transform):
    ...     def _apply_transform(self, value):
    ...         return value * 2
    >>> Double(in_keys=["x"], out_keys=["y"])(TensorDict({"x": torch.tensor(2)}))["y"]
    tensor(4)

    In an environment it is on the way out of a reset and of a step, and so in a rollout:

    >>> from ramet.envs.llm import LLMEnv
    >>> env = LLMEnv(from_text=False, eos_token_id=9).append_transform(Double(["tokens"], ["twice"]))
    >>> td = env.reset(TensorDict({"tokens": torch.tensor([[1], [2]])}, [2]))
    >>> td["twice"].tolist()
    [[2], [4]]
    >>> answer = lambda td: td.set("tokens_response", torch.tensor([[3], [4]]))
    >>> env.step(answer(td))["next", "twice"].tolist(), env.rollout(2, answer, tensordict=td).batch_size
    ([[2, 6], [4, 8]], torch.Size([2, 2]))
    """

    def __init__(
        self,
        in_keys: Sequence[KeyPath] = (),
        out_keys: Sequence[KeyPath] | None = None,
        in_keys_inv: Sequence[KeyPath] = (),
        out_keys_inv: Sequence[KeyPath] | None = None,
    ) -> None:
        super().__init__()
        self.in_keys, self.out_keys = list(in_keys), list(in_keys if out_keys is None else out_keys)
        self.in_keys_inv = list(in_keys_inv)
        self.out_keys_inv = list(in_keys_inv if out_keys_inv is None else out_keys_inv)
        for ins, outs in ((self.in_keys, self.out_keys), (self.in_keys_inv, self.out_keys_inv)):
            if len(ins) != len(outs):
                raise ValueError(f"each in key needs one out key: found {ins} and {outs}")
        self._parent: EnvSpecs | None = None

    @property
    def parent(self) -> EnvSpecs | None:
        """The environment as this transform sees it: with the transforms before it. None outside an environment."""
        return self._parent

    def attach(self, env: EnvSpecs) -> None:
        """Take `env` as the parent; called when the transform becomes part of an environment."""
        if self._parent is not None:
            raise RuntimeError(f"this {type(self).__name__} is already part of an environment: make another one")
        self._parent = env

    def join(self, env: EnvSpecs) -> None:
        """Become part of `env`; where `attach` refuses it, stay as before, so that it may join another."""
        before = self._parent
        try:
            self.attach(env)
        except BaseException:
            self._parent = before
            raise

    def _leave(self) -> None:
        self._parent = None

    def set_seed(self, seed: int) -> None:
        """Fix what is random in this transform."""

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Apply `forward`; TypeError for what is no TensorDict."""
        check_td(td)
        found: TensorDictBase = super().__call__(td)
        return found

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Apply the way out to `td`, outside any environment."""
        return self._call(td)

    def inv(self, td: TensorDictBase) -> TensorDictBase:
        """Apply the way in to `td`, outside any environment."""
        check_td(td)
        return self._inv_call(td)

    def _apply_transform(self, value: Any) -> Any:
        return value

    def _inv_apply_transform(self, value: Any) -> Any:
        return value

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        for key, out in zip(self.in_keys, self.out_keys, strict=True):
            td.set(out, self._apply_transform(self._found(td, key)))
        return td

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        for key, out in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            td.set(out, self._inv_apply_transform(self._found(td, key)))
        return td

    def _found(self, td: TensorDictBase, key: KeyPath) -> Any:
        value = td.get(key, None)
        if value is None:
            raise KeyError(f"{type(self).__name__} needs {key!r}: there are {sorted(map(str, td.keys()))}")
        return value

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def _undo_reset(self) -> None:
        """Take back what `_reset_env_preprocess` dealt out: the reset failed."""

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._call(td_reset)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._call(next_td)

    def transform_consumed_keys(self, keys: list[KeyPath]) -> list[KeyPath]:
        """Return the keys that a step uses up: the actions, and what may come beside them or in their place.

        What `_inv_call` makes under one of them that was not given is in the result of the step, beside the state.
        """
        return keys

    def transform_derived_keys(self, keys: list[KeyPath]) -> list[KeyPath]:
        """Return those of the consumed keys that `_inv_call` derives from others, whatever was given under them."""
        return keys

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Return the specs of the observations after this transform."""
        return spec

    def transform_action_spec(self, spec: Composite) -> Composite:
        """Return the specs of the actions that this transform takes."""
        return spec

    def transform_reward_spec(self, spec: Composite) -> Composite:
        """Return the specs of the rewards after this transform."""
        return spec

    def transform_done_spec(self, spec: Composite) -> Composite:
        """Return the specs of the flags after this transform."""
        return spec


class Compose(Transform):
    """Several transforms as one: the way out goes through them in order, the way in (of a reset too) in reverse.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from ramet.envs.llm import LLMEnv
    >>> from ramet.transforms import RewardSum, StepCounter
    >>> env = LLMEnv(from_text=False, eos_token_id=9, assign_reward=True)
    >>> env = env.append_transform(Compose(StepCounter(3), RewardSum()))
    >>> td = env.reset(TensorDict({"tokens": torch.tensor([[1], [2]])}, [2]))
    >>> td["step_count"].tolist(), td["episode_reward"].tolist()
    ([[0], [0]], [[0.0], [0.0]])
    >>> td = env.step(td.set("tokens_response", torch.tensor([[5], [6]])))
    >>> td["next", "step_count"].tolist(), td["next", "episode_reward"].tolist()
    ([[1], [1]], [[0.0], [0.0]])
    >>> rollout = env.rollout(9, lambda td: td.set("tokens_response", torch.tensor([[5], [6]])), tensordict=td)
    >>> rollout.batch_size, [type(transform).__name__ for transform in env.transform]
    (torch.Size([2, 3]), ['StepCounter', 'RewardSum'])
    """

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        self.transforms = nn.ModuleList([checked(transform) for transform in transforms])

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.transforms)

    def __getitem__(self, index: int) -> Transform:
        found = self.transforms[index]
        assert isinstance(found, Transform)
        return found

    def append(self, transform: Transform) -> None:
        """Add a transform at the outer end."""
        checked(transform)
        if self.parent is not None:
            transform.join(self.parent._with(tuple(self)))
        self.transforms.append(transform)

    def attach(self, env: EnvSpecs) -> None:
        """Take `env` as the parent, and give each transform the environment as it stands before it."""
        super().attach(env)
        joined: list[Transform] = []
        try:
            for i, transform in enumerate(self):
                transform.join(env._with(tuple(self)[:i]))
                joined.append(transform)
        except BaseException:
            for transform in joined:
                transform._leave()
            raise

    def _leave(self) -> None:
        super()._leave()
        for transform in self:
            transform._leave()

    def set_seed(self, seed: int) -> None:
        """Fix what is random in each transform."""
        for transform in self:
            transform.set_seed(seed)

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        for transform in self:
            td = transform._call(td)
        return td

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Apply each transform to `td`, outside any environment."""
        for transform in self:
            td = transform(td)
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase:
        """Apply each transform's way in to `td`, the last first, outside any environment."""
        for transform in reversed(tuple(self)):
            td = transform.inv(td)
        return td

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        for transform in reversed(tuple(self)):
            td = transform._inv_call(td)
        return td

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        for transform in reversed(tuple(self)):
            td = transform._reset_env_preprocess(td)
        return td

    def _undo_reset(self) -> None:
        for transform in self:
            transform._undo_reset()

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        for transform in self:
            td_reset = transform._reset(td, td_reset)
        return td_reset

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for transform in self:
            next_td = transform._step(td, next_td)
        return next_td

    def transform_consumed_keys(self, keys: list[KeyPath]) -> list[KeyPath]:
        """Return the keys that a step uses up, of all transforms."""
        for transform in self:
            keys = transform.transform_consumed_keys(keys)
        return keys

    def transform_derived_keys(self, keys: list[KeyPath]) -> list[KeyPath]:
        """Return the keys that are derived, of all transforms."""
        for transform in self:
            keys = transform.transform_derived_keys(keys)
        return keys

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Return the specs of the observations after all transforms."""
        for transform in self:
            spec = transform.transform_observation_spec(spec)
        return spec

    def transform_action_spec(self, spec: Composite) -> Composite:
        """Return the specs of the actions that the outermost transform takes."""
        for transform in self:
            spec = transform.transform_action_spec(spec)
        return spec

    def transform_reward_spec(self, spec: Composite) -> Composite:
        """Return the specs of the rewards after all transforms."""
        for transform in self:
            spec = transform.transform_reward_spec(spec)
        return spec

    def transform_done_spec(self, spec: Composite) -> Composite:
        """Return the specs of the flags after all transforms."""
        for transform in self:
            spec = transform.transform_done_spec(spec)
        return spec


def checked(transform: Any) -> Transform:
    """Return `transform`, which must be one: a TypeError for a class, a function or nothing."""
    if not isinstance(transform, Transform):
        found = f"the class {transform.__name__}" if isinstance(transform, type) else f"a {type(transform).__name__}"
        raise TypeError(f"expected a Transform, such as StepCounter(10): found {found}")
    return transform
