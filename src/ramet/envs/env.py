"""The environment: reset, step, rollout, and transforms around it.

Every public method takes and returns TensorDicts of the environment's batch size. None changes the TensorDict it is
given, except that `rand_action` writes the action into it, as a policy does. Keys that the environment does not own
survive. Dimensions: *B is the batch size, T the steps of a rollout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_leaf_nontensor, lazy_stack
from torch import Tensor

from ramet import ragged
from ramet.specs import Composite, KeyPath, describe
from ramet.transforms.env_specs import FLAGS, EnvSpecs
from ramet.transforms.transform import Compose, Transform


class EnvBase(EnvSpecs, ABC):
    """An environment over TensorDicts. A subclass says what is in the keys (its specs) and writes `_reset` and `_step`.

    `_reset(td)` gets what `reset` was given (`"_reset"`, a mask of rows, included) and returns the keys that it owns;
    `_step(td)` gets the state and the action and returns what belongs under `"next"`. Both may leave out flags: `done`
    is `terminated | truncated`, and what is not said is false. Rows that a mask does not name are put back afterwards.
    Random numbers come from `self.generator`. Prove an environment by `check_env_specs`.

    `batch_locked=False` lets an environment of batch size () take any batch.
    """

    def __init__(
        self, *, batch_size: Sequence[int] = (), device: torch.device | str | None = None, batch_locked: bool = True
    ) -> None:
        super().__init__(batch_size, device)
        self.batch_locked = batch_locked
        self.generator = torch.Generator()

    # What an author writes.

    @abstractmethod
    def _reset(self, td: TensorDictBase) -> TensorDictBase:
        """Return the observations and flags of a new episode, in all rows."""

    @abstractmethod
    def _step(self, td: TensorDictBase) -> TensorDictBase:
        """Return the observations, rewards and flags after the action."""

    def _set_seed(self, seed: int) -> None:
        """Fix what is random beside `self.generator`."""

    def _put_back(
        self, td: TensorDictBase, new: TensorDictBase, mask: Tensor, settled: TensorDictBase | None = None
    ) -> None:
        """Give the rows of `new` that `mask` (*B) does not name their entries of `td` again, and no reward.

        Entries that are those of `settled` are right already.
        """
        if isinstance(new, LazyStackedTensorDict):
            for flag, row, before in zip(mask.tolist(), new.unbind(0), td.unbind(0), strict=True):
                if not flag:
                    self._put_back(before, row, torch.zeros((), dtype=torch.bool))
            return
        for key in _leaves(new):
            value: Any = new.get(key)
            if settled is not None and settled.get(key, None) is value:
                continue
            rewarded = key in self.reward_keys and isinstance(value, Tensor)
            old = torch.zeros_like(value) if rewarded else whole(td, key)
            if old is not None and old is not value:
                new.set(key, ragged.choose(mask, value, old))

    # The way of an episode.

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Begin an episode in every row, or in those that the boolean `"_reset"` (*B) or (*B, 1) of `td` names."""
        td = self._enter(td)
        return _without("_reset", self._reset_rows(td, row_mask(td, "_reset")))

    def _reset_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        fresh = self._reset(td.copy())
        complete_flags(fresh)
        if mask is not None:
            self._put_back(td, fresh, mask)
        return td.update(fresh)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Return `td` with the result of its action under `"next"`.

        A boolean `"_step"` (*B) or (*B, 1) names the rows to step: the others keep their state and get no reward.
        """
        td = self._enter(td)
        next_td = self._step_rows(td, row_mask(td, "_step"))
        return _without("_step", td).set("next", next_td)

    def _step_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        next_td = self._step(td)
        complete_flags(next_td)
        if mask is not None:
            self._put_back(td, next_td, mask)
        return next_td

    def step_mdp(self, td: TensorDictBase) -> TensorDictBase:
        """Return the state after a step: what is under `"next"` without rewards, and the other keys without actions."""
        state, rewards = td.copy(), self.reward_keys
        next_td: TensorDictBase = state.pop("next")  # type: ignore[assignment]
        gone = [key for key in (*rewards, *self.action_keys) if entry(state, key) is not None]
        for key in gone:
            del state[key]
        return state.update(next_td.exclude(*rewards) if rewards else next_td)

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, and return the result and the next state, in which the rows that ended have been reset."""
        td = self.step(td)
        state = self.step_mdp(td)
        done = state.get("done")
        if bool(done.any()):
            state = self.reset(state.set("_reset", done))
        return td, state

    def rand_action(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Write a random action into `td` and return it."""
        if td is None:
            td = TensorDict({}, batch_size=self.batch_size, device=self.device)
        self._check_batch(td)
        prefix = td.batch_size[: td.batch_dims - len(self.batch_size)]
        for key in self.action_keys:
            td.set(key, self.full_action_spec[key].rand(prefix, generator=self.generator))
        return td

    def rand_step(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Take a random action in `td`, or in a new episode, and step."""
        return self.step(self.rand_action(self.reset() if td is None else td.copy()))

    def set_seed(self, seed: int) -> None:
        """Fix everything random that the environment owns."""
        self.generator.manual_seed(seed)
        self._set_seed(seed)

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], Any] | None = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        break_when_all_done: bool = False,
        set_truncated: bool = False,
        tensordict: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Play up to `max_steps` steps and return them as a lazy stack [*B, T] of the TensorDicts of its steps.

        `policy` writes the action into the state it is given (and may return another TensorDict); random actions
        without. `callback(env, td)` sees each step. With `auto_reset` the episode begins by `reset(tensordict)`;
        without, in `tensordict` itself. By default the first row that is done ends it. `break_when_any_done=False`
        resets rows that are done and goes on; `break_when_all_done=True` leaves them alone until all are.
        `set_truncated` marks the rows still going after the last step as truncated.

        Ragged entries stay as they are in each step: read them by `ramet.rows` and `ramet.pad`.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1: found {max_steps}")
        if auto_reset:
            state = self.reset(tensordict)
        elif tensordict is None:
            raise ValueError("auto_reset=False needs the first state: pass it as tensordict")
        else:
            state = tensordict.copy()
        steps: list[TensorDictBase] = []
        while True:
            state = _act(policy or self.rand_action, state)
            if break_when_all_done:
                _leave_alone_what_is_done(state)
            td = self.step(state)
            steps.append(td)
            if callback is not None:
                callback(self, td)
            done = td.get(("next", "done"))
            ended = bool(done.all()) if break_when_all_done else break_when_any_done and bool(done.any())
            if ended or len(steps) == max_steps:
                break
            state = self.step_mdp(td)
            if not (break_when_all_done or break_when_any_done) and bool(done.any()):
                state = self.reset(state.set("_reset", done))
        if set_truncated and not ended:
            _truncate(steps[-1].get("next"))
        return lazy_stack(steps, len(steps[0].batch_size))

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Return the environment with `transform` around it."""
        return TransformedEnv(self, transform)

    def to(self, device: torch.device | str) -> Self:
        """Move to a device: what goes in is moved there, and the specs say so."""
        self._move_specs(torch.device(device))
        return self

    def _with(self, transforms: tuple[Transform, ...]) -> EnvBase:
        """Return this environment as it is behind `transforms`, which belong to it already."""
        return _Seen(self, transforms) if transforms else self

    def _enter(self, td: TensorDictBase | None) -> TensorDictBase:
        """Return a shallow copy of `td` of the right batch and device, without what is left of an earlier step."""
        if td is None:
            return TensorDict({}, batch_size=self.batch_size, device=self.device)
        self._check_batch(td)
        td = td.copy()
        if self.device is not None and td.device != self.device:
            td = td.to(self.device)
        return _without("next", td)

    def _check_batch(self, td: TensorDictBase) -> None:
        if td.batch_size != self.batch_size and self.batch_locked:
            raise ValueError(
                f"expected a TensorDict of batch size {tuple(self.batch_size)}, as of the environment: "
                f"found {tuple(td.batch_size)}"
            )


class TransformedEnv(EnvBase):
    """An environment with transforms around it: `base_env` and `transform` (a `Compose` where there are several)."""

    def __init__(self, base_env: EnvBase, transform: Transform | None = None) -> None:
        self.base_env = base_env
        self.transform = Compose() if transform is None else transform
        self.generator = base_env.generator
        self.transform.attach(base_env)

    @property
    def batch_size(self) -> torch.Size:  # type: ignore[override]
        """The batch size of the environment inside."""
        return self.base_env.batch_size

    @property
    def batch_locked(self) -> bool:  # type: ignore[override]
        """Whether the batch size is the only one that is taken."""
        return self.base_env.batch_locked

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """The device of the environment inside."""
        return self.base_env.device

    @property
    def full_observation_spec(self) -> Composite:
        """Specs of all observations, after the transforms."""
        return self.transform.transform_observation_spec(self.base_env.full_observation_spec.clone())

    @property
    def full_action_spec(self) -> Composite:
        """Specs of all actions, before the transforms."""
        return self.transform.transform_action_spec(self.base_env.full_action_spec.clone())

    @property
    def full_reward_spec(self) -> Composite:
        """Specs of all rewards, after the transforms."""
        return self.transform.transform_reward_spec(self.base_env.full_reward_spec.clone())

    @property
    def full_done_spec(self) -> Composite:
        """Specs of all flags, after the transforms."""
        return self.transform.transform_done_spec(self.base_env.full_done_spec.clone())

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Add `transform` at the outer end of this environment, and return it."""
        if not isinstance(self.transform, Compose):
            first, self.transform = self.transform, Compose()
            self.transform.attach(self.base_env)
            self.transform.transforms.append(first)
        self.transform.append(transform)
        return self

    def to(self, device: torch.device | str) -> Self:
        """Move the environment and the transforms."""
        self.base_env.to(device)
        self.transform.to(device)
        return self

    def _set_seed(self, seed: int) -> None:
        self.base_env.set_seed(seed)
        self.transform.set_seed(seed)

    def _reset(self, td: TensorDictBase) -> TensorDictBase:
        return self._reset_rows(td, row_mask(td, "_reset"))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return self._step_rows(td, row_mask(td, "_step"))

    def _reset_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        td = self.transform._reset_env_preprocess(td)
        inner = self.base_env._reset_rows(td.copy(), mask)
        fresh = self.transform._reset(td, inner.copy())
        if mask is not None:
            self._put_back(td, fresh, mask, settled=inner)
        return fresh

    def _step_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        td = self.transform._inv_call(td.copy())
        inner = self.base_env._step_rows(td, mask)
        next_td = self.transform._step(td, inner.copy())
        if mask is not None:
            self._put_back(td, next_td, mask, settled=inner)
        return next_td


class _Seen(TransformedEnv):
    """The environment as a transform in the middle sees it: the transforms before it have a parent already."""

    def __init__(self, base_env: EnvBase, transforms: tuple[Transform, ...]) -> None:
        self.base_env = base_env
        self.transform = Compose(*transforms)
        self.generator = base_env.generator


def _act(policy: Callable[[TensorDictBase], Any], state: TensorDictBase) -> TensorDictBase:
    acted = policy(state)
    return acted if isinstance(acted, TensorDictBase) else state


def _leave_alone_what_is_done(state: TensorDictBase) -> None:
    done = state.get("done", None)
    if done is not None and bool(done.any()):
        state.set("_step", ~done)


def _truncate(next_td: TensorDictBase) -> None:
    done = next_td.get("done")
    next_td.set("truncated", next_td.get("truncated") | ~done)
    next_td.set("done", torch.ones_like(done))


def row_mask(td: TensorDictBase, key: str) -> Tensor | None:
    """Return the mask of rows (*B) under `key`; None if there is none or if it names all rows."""
    mask = td.get(key, None)
    if mask is None:
        return None
    size = td.batch_size
    if mask.dtype is not torch.bool or mask.shape not in (size, torch.Size((*size, 1))):
        raise ValueError(f"{key!r} must be bool of shape {tuple(size)} or {(*size, 1)}: found {describe(mask)}")
    return None if bool(mask.all()) else mask.reshape(size)


def complete_flags(td: TensorDictBase) -> None:
    """Add the flags that an environment left out: `done` is `terminated | truncated`, and a bare `done` is an end."""
    done, terminated, truncated = (td.get(flag, None) for flag in FLAGS)
    if done is not None and terminated is not None and truncated is not None:
        return
    if done is None:
        done = torch.zeros((*td.batch_size, 1), dtype=torch.bool, device=td.device)
    if truncated is None:
        truncated = torch.zeros_like(done) if terminated is None else done & ~terminated
    if terminated is None:
        terminated = done & ~truncated
    td.set("done", terminated | truncated)
    td.set("terminated", terminated)
    td.set("truncated", truncated)


def _without(key: str, td: TensorDictBase) -> TensorDictBase:
    """Take `key` out of `td`."""
    if key in td.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        del td[key]
    return td


def _leaves(td: TensorDictBase) -> list[KeyPath]:
    return list(td.keys(True, True, is_leaf=is_leaf_nontensor))


def entry(td: TensorDictBase, key: KeyPath) -> Any:
    """Return what is under `key`, of the first row where `td` is a lazy stack; None if nothing is."""
    path = (key,) if isinstance(key, str) else key
    if isinstance(td, LazyStackedTensorDict):
        td = td.unbind(td.stack_dim)[0]  # rows may be ragged; whether they have the key, one tells
    found: Any = td
    for name in path:
        found = found.get(name, None) if isinstance(found, TensorDictBase) else None
    return found


def whole(td: TensorDictBase, key: KeyPath) -> Any:
    """Return what is under `key` for all rows, jagged where the rows of a lazy stack differ; None if nothing is."""
    first = entry(td, key)
    if isinstance(td, LazyStackedTensorDict) and isinstance(first, Tensor):
        rows = [entry(row, key) for row in td.unbind(td.stack_dim)]
        if len({row.shape for row in rows}) > 1:
            return ragged.Ragged.from_rows(rows).jagged()
    return None if first is None else td.get(key)
