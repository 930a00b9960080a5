"""The environment: reset, step, rollout, and transforms around it.

Every public method takes and returns TensorDicts of the environment's batch size. None changes the TensorDict it is
given, except that `rand_action` writes the action into it, as a policy does. Keys that the environment does not own
survive. Dimensions: *B is the batch size, T the steps of a rollout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from ramet import ragged
from ramet.envs.entries import (
    advanced,
    choose_padded,
    complete_flags,
    copied,
    leaves,
    merge,
    same,
    with_next,
    without,
)
from ramet.specs import Composite, KeyPath
from ramet.transforms.entries import entry, row_mask, whole
from ramet.transforms.env_specs import EnvSpecs
from ramet.transforms.transform import Compose, Transform, checked


class EnvBase(EnvSpecs, ABC):
    """An environment over TensorDicts. A subclass says what is in the keys (its specs) and writes `_reset` and `_step`.

    `_reset(td)` gets what `reset` was given (`"_reset"`, a mask of rows, included) and returns the keys that it owns;
    `_step(td)` gets the state and the action and returns what belongs under `"next"`. Both may leave out flags: `done`
    is `terminated | truncated`, and what is not said is false. Rows that a mask does not name are put back afterwards.
    Random numbers come from `self.generator`. Prove an environment by `check_env_specs`.

    `batch_locked=False` lets an environment of batch size () take any batch.

    >>> from ramet.envs.check import check_env_specs
    >>> from ramet.specs import Bounded, Unbounded
    >>> class Walk(EnvBase):
    ...     def __init__(self):
    ...         super().__init__(batch_size=(2,))
    ...         self.observation_spec = Composite({"at": Unbounded((2, 1), dtype=torch.int64)}, shape=(2,))
    ...         self.action_spec = Bounded(1, 2, (2, 1), dtype=torch.int64)
    ...     def _reset(self, td):
    ...         return TensorDict({"at": torch.zeros(2, 1, dtype=torch.int64)}, [2])
    ...     def _step(self, td):
    ...         at = td["at"] + td["action"]
    ...         return TensorDict({"at": at, "terminated": at >= 4}, [2])
    >>> check_env_specs(Walk())
    >>> env = Walk()
    >>> td = env.reset()
    >>> td["at"].tolist(), td["done"].tolist()
    ([[0], [0]], [[False], [False]])
    >>> act = lambda td: td.set("action", torch.tensor([[1], [2]]))
    >>> env.step(act(td))["next", "at"].tolist()
    [[1], [2]]
    >>> rollout = env.rollout(9, act)
    >>> rollout["next", "at"].squeeze(-1).tolist(), rollout["next", "done"][:, -1].tolist()
    ([[1, 2], [2, 4]], [[False], [True]])
    """

    def __init__(
        self, *, batch_size: Sequence[int] = (), device: torch.device | str | None = None, batch_locked: bool = True
    ) -> None:
        super().__init__(batch_size, device)
        self.batch_locked = batch_locked
        self.generator = torch.Generator()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if "generator" in state:  # a generator itself does not get through to a new process
            state["generator"] = self.generator.get_state().numpy().tobytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "generator" in state:
            self.generator = torch.Generator()
            self.generator.set_state(torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={tuple(self.batch_size)}, device={self.device})"

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
        keys = leaves(new)
        padded = choose_padded(td, new, mask, keys)
        for key in keys:
            value: Any = new.get(key)
            if key in padded:
                continue
            if settled is not None and same(settled.get(key, None), value):
                continue
            rewarded = key in self.reward_keys and isinstance(value, Tensor)
            old = torch.zeros_like(value) if rewarded else whole(td, key)
            if old is not None and old is not value:
                new.set(key, ragged.choose(mask, value, old))

    # The way of an episode.

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Begin an episode in every row, or in those that the boolean `"_reset"` (*B) or (*B, 1) of `td` names."""
        td = self._enter(td)
        return without("_reset", self._reset_rows(td, row_mask(td, "_reset")))

    def _reset_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        fresh = self._reset(td.copy())
        complete_flags(fresh)
        if mask is not None:
            self._put_back(td, fresh, mask)
        return merge(td, fresh)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Return `td` with the result of its action under `"next"`.

        A boolean `"_step"` (*B) or (*B, 1) names the rows to step: the others keep their state and get no reward.
        """
        td = self._enter(td)
        next_td = self._step_rows(td, row_mask(td, "_step"))
        return with_next(without("_step", td), next_td)

    def _step_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        next_td = self._step(td)
        complete_flags(next_td)
        if mask is not None:
            self._put_back(td, next_td, mask)
        return next_td

    def step_mdp(self, td: TensorDictBase) -> TensorDictBase:
        """Return the state after a step: what is under `"next"` without rewards, and the other keys without actions."""
        if entry(td, "next") is None:
            raise KeyError(f"step_mdp needs what step returned: there is no 'next' among {sorted(map(str, td.keys()))}")
        rewards, consumed = self.reward_keys, self.consumed_keys
        quick = advanced(td, td.get("next", None), consumed, rewards)
        if quick is not None:
            return quick
        state = td.copy()
        next_td: TensorDictBase = state.pop("next")  # type: ignore[assignment]
        gone = [key for key in (*rewards, *consumed) if entry(state, key) is not None]
        for key in gone:
            del state[key]
        return merge(state, next_td.exclude(*rewards) if rewards else next_td)

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
        ragged.check_td(td)
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
        if type(seed) is not int:
            raise TypeError(f"a seed is a whole number: found {seed!r}")
        self.generator.manual_seed(seed)
        self._set_seed(seed)

    def close(self) -> None:
        """End what the environment has opened; an environment that opens nothing has nothing to end."""

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
        if type(max_steps) is not int or max_steps < 1:
            raise ValueError(f"max_steps must be a whole number, at least 1: found {max_steps!r}")
        for name, function in (("policy", policy), ("callback", callback)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function of a TensorDict: found {function!r}")
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
        if set_truncated:
            _truncate(steps[-1].get("next"))
        return lazy_stack(steps, len(steps[0].batch_size))

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Return the environment with `transform` around it."""
        return TransformedEnv(self, checked(transform))

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
        ragged.check_td(td)
        self._check_batch(td)
        td = copied(td, but=("next",))
        return td if self.device is None or td.device == self.device else td.to(self.device)

    def _check_batch(self, td: TensorDictBase) -> None:
        if td.batch_size != self.batch_size and self.batch_locked:
            raise ValueError(
                f"expected a TensorDict of batch size {tuple(self.batch_size)}, as of the environment: "
                f"found {tuple(td.batch_size)}"
            )


class TransformedEnv(EnvBase):
    """An environment with transforms around it: `base_env` and `transform` (a `Compose` where there are several).

    >>> from ramet.envs.llm import LLMEnv
    >>> from ramet.transforms import DataLoadingPrimer, StepCounter
    >>> env = LLMEnv(eos_token_id=9, batch_size=2).append_transform(StepCounter(2))
    >>> env = env.append_transform(DataLoadingPrimer(["1+1=", "2+2=", "3+3="]))
    >>> env
    TransformedEnv(LLMEnv(batch_size=(2,), device=None), StepCounter, DataLoadingPrimer)
    >>> td = env.reset()
    >>> ragged.rows(td, "text"), td["step_count"].tolist()
    (['1+1=', '2+2='], [[0], [0]])
    >>> def policy(td):
    ...     td["text_response"], td["tokens_response"] = ["2", "?"], torch.tensor([[9], [5]])
    >>> policy(td)
    >>> td = env.step(td)
    >>> ragged.rows(td["next"], "text"), td["next", "done"].tolist(), td["next", "step_count"].tolist()
    (['1+1=2', '2+2=?'], [[True], [False]], [[1], [1]])
    >>> ragged.rows(env.rollout(2, policy, break_when_any_done=False), ("next", "text"))
    ['3+3=2', '2+2=2', '1+1=?', '1+1=??']
    """

    def __init__(self, base_env: EnvBase, transform: Transform | None = None) -> None:
        self.base_env = base_env
        if not isinstance(base_env, EnvBase):
            raise TypeError(f"expected an environment, found a {type(base_env).__name__}")
        self.transform = Compose() if transform is None else checked(transform)
        self.transform.join(base_env)

    def close(self) -> None:
        """End what the environment inside has opened."""
        self.base_env.close()

    def _keys(self, name: str, base_keys: list[KeyPath], spec: Callable[[], Composite]) -> list[KeyPath]:
        """Return the keys of a spec, which is only made anew where the keys inside or the transforms are others."""
        known: dict[str, tuple[Any, list[KeyPath]]] = vars(self).setdefault("_known_keys", {})
        made_of = (base_keys, [(part, _keys_of(part)) for part in _each(self.transform)])
        if name not in known or known[name][0] != made_of:
            as_now = (base_keys, [(part, [list(keys) for keys in lists]) for part, lists in made_of[1]])
            known[name] = (as_now, spec().leaves())
        return list(known[name][1])

    @property
    def action_keys(self) -> list[KeyPath]:
        """Keys of the actions, before the transforms."""
        return self._keys("action", self.base_env.action_keys, lambda: self.full_action_spec)

    @property
    def reward_keys(self) -> list[KeyPath]:
        """Keys of the rewards, after the transforms."""
        return self._keys("reward", self.base_env.reward_keys, lambda: self.full_reward_spec)

    def __repr__(self) -> str:
        around = self.transform if isinstance(self.transform, Compose) else [self.transform]
        return f"{type(self).__name__}({self.base_env}, {', '.join(type(transform).__name__ for transform in around)})"

    @property
    def generator(self) -> torch.Generator:  # type: ignore[override]
        """The random numbers of the environment inside."""
        return self.base_env.generator

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
    def consumed_keys(self) -> list[KeyPath]:
        """Keys that a step uses up, those of the transforms included."""
        keys = [*self.base_env.consumed_keys, *self.action_keys]
        return self.transform.transform_consumed_keys(list(dict.fromkeys(keys)))

    @property
    def full_reward_spec(self) -> Composite:
        """Specs of all rewards, after the transforms."""
        return self.transform.transform_reward_spec(self.base_env.full_reward_spec.clone())

    @property
    def full_done_spec(self) -> Composite:
        """Specs of all flags, after the transforms."""
        return self.transform.transform_done_spec(self.base_env.full_done_spec.clone())

    @property
    def prompt_key(self) -> KeyPath | None:
        """Key under which the environment inside takes strings at a reset."""
        return self.base_env.prompt_key

    def mask_key(self, tokens: KeyPath) -> KeyPath | None:
        """Return the key of the mask that the environment inside takes beside `tokens`."""
        return self.base_env.mask_key(tokens)

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Add `transform` at the outer end of this environment, and return it."""
        checked(transform)
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
        try:
            td = self.transform._reset_env_preprocess(td)
            inner = self.base_env._reset_rows(copied(td), mask)
            fresh = self.transform._reset(td, inner.copy())
            if mask is not None:
                self._put_back(td, fresh, mask, settled=inner)
        except BaseException:
            self.transform._undo_reset()
            raise
        return fresh

    def _step_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        taken = self.transform._inv_call(copied(td))
        inner = self.base_env._step_rows(taken, mask)
        next_td = self.transform._step(taken, inner.copy())
        if mask is not None:
            self._put_back(taken, next_td, mask, settled=inner)
        derived = self.transform.transform_derived_keys([])
        for key in self.consumed_keys:
            if entry(taken, key) is not None and (key in derived or entry(td, key) is None):
                td.set(key, whole(taken, key))
        return next_td


class _Seen(TransformedEnv):
    """The environment as a transform in the middle sees it: the transforms before it have a parent already."""

    def __init__(self, base_env: EnvBase, transforms: tuple[Transform, ...]) -> None:
        self.base_env = base_env
        self.transform = Compose(*transforms)


def _each(transform: Transform) -> Iterator[Transform]:
    """Yield the transforms that others are composed of."""
    if not isinstance(transform, Compose):
        yield transform
        return
    for part in transform:
        yield from _each(part)


def _keys_of(transform: Transform) -> list[list[KeyPath]]:
    return [transform.in_keys, transform.out_keys, transform.in_keys_inv, transform.out_keys_inv]


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
