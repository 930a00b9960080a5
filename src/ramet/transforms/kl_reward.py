"""Take from a reward what it costs to move away from a reference policy."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor, nn

from ramet.specs import Composite, KeyPath, Unbounded, describe
from ramet.transforms.env_specs import EnvSpecs
from ramet.transforms.placement import (
    Placement,
    check_finite,
    is_ragged,
    log_ratio,
    read,
    subtract,
    write,
)
from ramet.transforms.transform import Transform
from ramet.types import Key


class KLRewardTransform(Transform):
    """Write `reward - coef * (log_prob_current - log_prob_reference)`: the k1 penalty of `ramet.kl`, in the reward.

    The reference is `actor` as it is now: a TensorDict module with a distribution, of any domain, or anything with
    `log_prob(td)`. By default (`functional=True`) it is copied, with dropout off; the copy, `functional_actor`, moves
    with `.to()` and is in the `state_dict`. `functional=False` uses the module as given, whose owner moves and saves
    it: its `log_prob(td)` if it has one, else `actor(td)[log_prob_key]`. No gradient passes unless `requires_grad`:
    then the copy's parameters are leaves that want one. `device` is where the reference runs; the result comes back.

    The current log-probs are under `log_prob_key`, by default where the actor writes its own, else
    "sample_log_prob". The action is under `action_key`, by default the one of the environment.

    Shapes: log-probs (*B,) or, for each token, (*B, T), dense or ragged; a padded one needs an actor that names a mask
    of the real tokens as its `mask_key`. Log-probs that are one for each number of a floating action are summed to
    (*B,) where the reward is one for each row. Rewards (*B, T), (*B, T, 1) or (*B, 1), none counts as zero. The result
    has the reward's shape, or (*B, T, 1) where it is one for each token: then `placement` "last" gives the reward of
    a row to its last token, "spread" an equal share to each. A row without tokens has no place for a reward.

    At reset nothing was done yet: an out key of its own gets zeros (none in a row of tokens). On replayed data
    `transform(td)` reads the reward under "next" if there is one, else beside the action.

    Raises ValueError for more than one in or out key, for an action key that is missing or not unique, for an actor
    with several log-probs of which none is named, for shapes that do not fit and for an actor tensor that requires
    gradients and is no Parameter, RuntimeError for a missing action, KeyError for missing log-probs, and `RewardError`
    for log-probs whose difference is not finite, unless `coef` is 0. http://joschu.net/blog/kl-approx.html

    >>> from ramet.envs.llm import LLMEnv
    >>> class Halves(nn.Module):                       # a reference that gives each token a probability of 1/2
    ...     in_keys, log_prob_key = ["tokens_response"], "log_probs"
    ...     def log_prob(self, td):
    ...         return torch.full(td["tokens_response"].shape, 0.5).log()
    >>> env = LLMEnv(from_text=False, eos_token_id=9)
    >>> env = env.append_transform(KLRewardTransform(Halves(), coef=0.1, out_keys=["reward_kl"]))
    >>> env.reward_keys, env.observation_spec["reward_kl"]
    ([], Unbounded(shape=(-1, 1), dtype=float32))
    >>> td = env.reset(TensorDict({"tokens": torch.tensor([[1, 2]])}, [1]))
    >>> td["reward_kl"].shape
    torch.Size([1, 0, 1])
    >>> td["tokens_response"], td["log_probs"] = torch.tensor([[5, 9]]), torch.tensor([[0.5, 0.25]]).log()
    >>> env.step(td)["next", "reward_kl"].squeeze(-1)  # 0, and 0.1 * log 2
    tensor([[0.0000, 0.0693]])
    >>> def policy(td):
    ...     return td.update({"tokens_response": torch.tensor([[5]]), "log_probs": torch.zeros(1, 1)})
    >>> rollout = env.rollout(3, policy, tensordict=TensorDict({"tokens": torch.tensor([[1, 2]])}, [1]))
    >>> rollout["next", "reward_kl"].flatten()
    tensor([-0.0693, -0.0693, -0.0693])
    """

    coef: Tensor
    functional_actor: Any

    def __init__(
        self,
        actor: Any,
        coef: float | Tensor = 1.0,
        in_keys: Sequence[KeyPath] | str | None = None,
        out_keys: Sequence[KeyPath] | str | None = None,
        requires_grad: bool = False,
        log_prob_key: KeyPath | None = None,
        action_key: KeyPath | None = None,
        functional: bool | None = None,
        device: torch.device | str | None = None,
        *,
        placement: Placement = "last",
    ) -> None:
        reward_key = _only_key("in_keys", in_keys, Key.REWARD)
        out_key = _only_key("out_keys", out_keys, reward_key)
        super().__init__([reward_key], [out_key])
        if placement not in ("last", "spread"):
            raise ValueError(f'placement must be "last" or "spread": found {placement!r}')
        if not isinstance(actor, nn.Module) and not callable(getattr(actor, "log_prob", None)):
            raise TypeError(f"actor must be a module, or have log_prob(td): found {describe(actor)}")
        if callable(getattr(actor, "generate", None)) and not callable(getattr(actor, "log_prob", None)):
            raise TypeError(
                f"actor must take a TensorDict: found the language model {type(actor).__name__}, which takes ids; "
                "wrap it in ramet.TransformersScorer"
            )
        self.reward_key, self.out_key, self.placement = reward_key, out_key, placement
        self.in_keys += [key for key in getattr(actor, "in_keys", ()) if key not in self.in_keys]
        self.sample_log_prob_key = _log_prob_key_of(actor) if log_prob_key is None else log_prob_key
        self.functional = functional is None or functional
        self.requires_grad = requires_grad
        self._action_key, self._action_keys = action_key, [] if action_key is None else [action_key]
        self._device = None if device is None else torch.device(device)
        self._of_tokens = self._sequence = False
        self.register_buffer("coef", _number(coef))
        if self.functional:
            self.functional_actor = _frozen_copy(actor, requires_grad)
        else:
            self.__dict__["functional_actor"] = actor  # past nn.Module: it is the owner's to move and to save
        if self._device is not None and isinstance(actor, nn.Module):
            self.functional_actor.to(self._device)

    @property
    def frozen_params(self) -> TensorDictBase | None:
        """The parameters and buffers of the frozen copy; None with `functional=False`."""
        copied = self.functional and isinstance(self.functional_actor, nn.Module)
        return TensorDict.from_module(self.functional_actor) if copied else None

    @property
    def action_key(self) -> KeyPath:
        """Where the action is: as given, or the only action key of the environment."""
        if len(self._action_keys) > 1:
            raise ValueError(f"More than one action_key found: {self._action_keys}; say which by action_key=")
        if not self._action_keys:
            raise ValueError("action_key is required: there is no environment to take it from; pass action_key=")
        return self._action_keys[0]

    def attach(self, env: EnvSpecs) -> None:
        """Take `env` as the parent, and from it what the action is."""
        super().attach(env)
        if self._action_key is None:
            self._action_keys = env.action_keys
        actions = env.full_action_spec
        named = [key for key in self._action_keys if key in actions] or env.action_keys
        # Text is written in tokens; rows of any length are rows of tokens.
        self._of_tokens = any(actions[key].dtype is None or actions[key].shape[-1:] == (-1,) for key in named)
        rewards = env.full_reward_spec
        self._sequence = self._of_tokens and _of_rows(rewards, self.reward_key)

    def train(self, mode: bool = True) -> Self:
        """Switch to training or back; the frozen copy never trains, so that its dropout stays off."""
        super().train(mode)
        if self.functional and isinstance(self.functional_actor, nn.Module):
            self.functional_actor.train(False)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move; `coef` is never rounded to a shorter dtype, in which it would be another number."""
        before = self.coef
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.coef.dtype.itemsize < before.dtype.itemsize:
            self.coef = before.to(self.coef.device)
        return self

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the penalised reward into `td`, under "next" where there is one: replayed data, of any batch."""
        keys = [self.action_key, self.sample_log_prob_key, *self.in_keys[1:]]
        if isinstance(td, LazyStackedTensorDict) and td.batch_dims > 1 and any(is_ragged(td, key) for key in keys):
            for part in td.unbind(td.stack_dim):
                self.forward(part)
            return td
        next_td = read(td, "next")
        self._penalise(td, td if next_td is None else next_td)
        return td

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return self.forward(td)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        self._penalise(td, next_td)
        return next_td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        # Asking for the key finds out an environment without one now, not at the first step.
        if self.action_key and self.out_key != self.reward_key:
            before, spec = read(td, self.out_key), self._spec(td_reset.batch_size)
            shape = [0 if n == -1 else n for n in spec.shape]
            zeros = torch.zeros(shape, dtype=spec.dtype, device=td_reset.device or spec.device)
            write(td_reset, self.out_key, zeros if before is None else torch.zeros_like(before))
        return td_reset

    def _penalise(self, td: TensorDictBase, next_td: TensorDictBase) -> None:
        action, current = read(td, self.action_key), read(td, self.sample_log_prob_key)
        if action is None:
            raise RuntimeError(
                f"the action {self.action_key!r} is missing: there are {sorted(map(str, td.keys()))}; "
                "let the policy write it, or name another by action_key="
            )
        if not isinstance(current, Tensor):
            raise KeyError(
                f"the log-probs of the action, {self.sample_log_prob_key!r}, are missing: let the policy write them "
                "(return_log_prob=True), or name others by log_prob_key="
            )
        reward, size, real = read(next_td, self.reward_key), td.batch_size, self._real(td, current)
        with contextlib.nullcontext() if self.requires_grad else torch.no_grad():
            reference = self._reference(td, action, current.device)
            ratio = log_ratio(current, reference, real=real, name=repr(self.sample_log_prob_key))
            if not bool(self.coef):
                ratio = torch.zeros_like(ratio)  # 0 times what is not finite would be no number
            check_finite(ratio, current, reference, name=repr(self.sample_log_prob_key))
            if _is_joint(action, current, size) and (reward is None or reward.shape in (size, (*size, 1))):
                ratio = ratio.sum(-1)
            penalty = ratio * self.coef.to(current.device)
        out = subtract(
            penalty,
            reward,
            size,
            placement=self.placement,
            real=real,
            sequence=self._sequence,
            key=self.reward_key,
        )
        write(next_td, self.out_key, out)

    def _real(self, td: TensorDictBase, current: Tensor) -> Tensor | None:
        """Return which of the padded log-probs are of real tokens, bool in their shape; None if all are."""
        key = getattr(self.functional_actor, "mask_key", None)
        mask = None if key is None or current.is_nested else read(td, key)
        if mask is not None and (mask.is_nested or mask.shape not in (current.shape, current.shape[:-1])):
            raise ValueError(
                f"the mask {key!r} and {self.sample_log_prob_key!r} do not fit: found a {describe(mask)} and a "
                f"{describe(current)}"
            )
        return None if mask is None else mask.bool().reshape(current.shape)

    def _reference(self, td: TensorDictBase, action: Any, device: torch.device) -> Tensor:
        """Return the reference's log-probs of the action, on `device`; `td` stays as it is."""
        actor, state = self.functional_actor, td.exclude("next", self.sample_log_prob_key)
        home = self._home()
        if home is not None and home != device:
            state = state.to(home)
            action = read(state, self.action_key)
        if self.functional and hasattr(actor, "get_dist") and isinstance(action, Tensor) and not action.is_nested:
            dist = actor.get_dist(state)
            composite = isinstance(dist, CompositeDistribution)
            found = actor.log_prob(state) if composite else dist.log_prob(action)
        elif hasattr(actor, "log_prob"):
            found = actor.log_prob(state)
        else:
            found = actor(state)
        if isinstance(found, TensorDictBase):
            found = read(found, self.sample_log_prob_key)
        if not isinstance(found, Tensor):
            raise TypeError(
                f"the reference must give its log-probs, a tensor, by log_prob(td) or under "
                f"{self.sample_log_prob_key!r}: found {describe(found)}"
            )
        return found.to(device)

    def _home(self) -> torch.device | None:
        """Return where the reference is."""
        actor = self.functional_actor
        if not isinstance(actor, nn.Module):
            return self._device
        tensor = next(itertools.chain(actor.parameters(), actor.buffers()), None)
        return self._device if tensor is None else tensor.device

    def _spec(self, size: torch.Size) -> Unbounded:
        """Return the spec of the result, for a batch of `size`."""
        shape = torch.Size((-1, 1) if self._of_tokens else (1,))
        if self.parent is None:
            return Unbounded((*size, *shape))
        rewards, dtype = self.parent.full_reward_spec, torch.float32
        if self.reward_key in rewards:
            reward = rewards[self.reward_key]
            dtype = reward.dtype if reward.dtype is not None and reward.dtype.is_floating_point else dtype
            shape = shape if self._sequence else reward.shape[len(rewards.shape) :]
        return Unbounded((*size, *shape), self.parent.device, dtype)

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Add the result, where it has a key of its own."""
        if not self._is_reward():
            spec[self.out_key] = self._spec(spec.shape)
        return spec

    def transform_reward_spec(self, spec: Composite) -> Composite:
        """Put the result in place of the reward, where it has the same key."""
        if self._is_reward():
            spec[self.out_key] = self._spec(spec.shape)
        return spec

    def _is_reward(self) -> bool:
        return self.out_key == self.reward_key or (self.parent is not None and self.out_key in self.parent.reward_keys)


def _only_key(name: str, keys: Sequence[KeyPath] | str | None, default: KeyPath) -> KeyPath:
    found = [default] if keys is None else [keys] if isinstance(keys, str) else list(keys)
    if len(found) != 1:
        raise ValueError(f"{name} must hold one key, of the reward: found {found}")
    return found[0] if isinstance(found[0], str) or len(found[0]) > 1 else found[0][0]


def _number(coef: float | Tensor) -> Tensor:
    if not isinstance(coef, Tensor | float | int):
        raise TypeError(f"coef must be one number: found {describe(coef)}")
    number = torch.as_tensor(coef)
    if number.numel() != 1:
        raise ValueError(f"coef must be one number: found a {describe(number)}")
    wide = torch.promote_types(number.dtype, torch.float32)
    return number.detach().reshape(()).to(wide, copy=True)


def _log_prob_key_of(actor: Any) -> KeyPath:
    parts = [actor, *(reversed(list(actor.modules())) if isinstance(actor, nn.Module) else ())]
    for part in parts:
        try:
            key = getattr(part, "log_prob_key", None)
        except RuntimeError as error:  # it has several
            keys = list(getattr(part, "log_prob_keys", ()))
            raise ValueError(
                f"the actor writes several log-probs, {keys}: say by log_prob_key= which of them to compare"
            ) from error
        if key is not None:
            found: KeyPath = key
            return found
    return "sample_log_prob"


def _frozen_copy(actor: Any, requires_grad: bool) -> Any:
    for name, tensor in _tensors(actor):
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            raise ValueError(
                f"the actor's tensor {name!r} requires gradients and is no Parameter: it can not be copied; "
                "make it a Parameter, detach it, or pass functional=False"
            )
    try:
        copied = deepcopy(actor)
    except RuntimeError as error:
        raise ValueError(f"the actor can not be copied: {error}; pass functional=False") from error
    if isinstance(copied, nn.Module):
        copied.train(False)
        for parameter in copied.parameters():
            parameter.requires_grad_(requires_grad and parameter.dtype.is_floating_point)
    return copied


def _tensors(actor: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an actor holds, those that it never registered included, and those in containers."""
    seen: set[int] = set()
    waiting = [("", actor, True)]
    while waiting:
        name, value, whole = waiting.pop()
        if isinstance(value, Tensor):
            yield name, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        dot = f"{name}." if name else ""
        waiting += [(f"{dot}{key}", held, False) for key, held in _held(value, whole)]


def _held(value: Any, whole: bool) -> list[tuple[Any, Any]]:
    """Return what is in a module, in the actor itself (`whole`), or in a container, by name."""
    if isinstance(value, TensorDictBase) and not isinstance(value, nn.Module):
        return list(value.items(True, True))
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value))
    if not (whole or isinstance(value, nn.Module)):
        return []
    registered = ("_parameters", "_buffers", "_modules")
    found = {name: held for name, held in getattr(value, "__dict__", {}).items() if name not in registered}
    for name in registered:
        found.update(getattr(value, name, None) or {})
    return list(found.items())


def _of_rows(rewards: Composite, key: KeyPath) -> bool:
    """Say whether the reward is one for each row, or is not there."""
    return key not in rewards or rewards[key].shape in (rewards.shape, (*rewards.shape, 1))


def _is_joint(action: Any, log_probs: Tensor, size: torch.Size) -> bool:
    """Say whether the log-probs are those of the numbers of a vector, which happen together: tokens are no floats."""
    return (
        isinstance(action, Tensor)
        and action.dtype.is_floating_point
        and not (action.is_nested or log_probs.is_nested)
        and log_probs.shape == action.shape
        and action.dim() == len(size) + 1
    )
