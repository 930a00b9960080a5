"""The contract of an environment, as code: what every environment's author runs."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from ramet.envs.env import EnvBase, entry
from ramet.ragged import rows
from ramet.specs import Composite, KeyPath

_FOREIGN = "ramet_foreign"


def check_env_specs(env: EnvBase, *, tensordict: TensorDictBase | None = None, max_steps: int = 3) -> None:
    """Prove that an environment does what its specs say; raise an AssertionError that says what it does instead.

    `tensordict` is what `reset` is given, for an environment that needs something; without, an environment that raises
    a KeyError at `reset()` is given random observations of its spec. Looked at: the specs themselves,
    `fake_tensordict`, reset, random steps, the flags, that inputs are left alone and foreign keys survive, partial
    reset and partial steps, the rollout.

    >>> from ramet.envs.llm import LLMEnv
    >>> check_env_specs(LLMEnv(from_text=False, eos_token_id=0, vocab_size=5, batch_size=2))
    """
    _check_specs(env)
    given = _first(env) if tensordict is None else tensordict
    state = env.reset(None if given is None else given.copy())
    size = state.batch_size
    _fits(env.full_observation_spec, state, size, "reset")
    _check_flags(env, state, "reset")
    _check_foreign(env, state)
    for _ in range(max_steps):
        state = env.rand_action(state)
        _fits(env.full_action_spec, state, size, "rand_action")
        td = _checked_step(env, state)
        state = _checked_mdp(env, td)
    if size:
        _check_partial_reset(env, state)
        _check_partial_step(env, state)
    _check_rollout(env, given, max_steps)


def _fail(message: str) -> None:
    raise AssertionError(message)


def _first(env: EnvBase) -> TensorDictBase | None:
    try:
        env.reset()
    except KeyError:
        return env.full_observation_spec.rand(generator=torch.Generator().manual_seed(0))
    return None


def _check_specs(env: EnvBase) -> None:
    specs = {"observation": env.full_observation_spec, "action": env.full_action_spec,
             "reward": env.full_reward_spec, "done": env.full_done_spec}  # fmt: skip
    owners: dict[KeyPath, str] = {}
    for name, spec in specs.items():
        if spec.shape != env.batch_size:
            _fail(f"full_{name}_spec must have the batch size {tuple(env.batch_size)}: found {tuple(spec.shape)}")
        if not spec.is_in(spec.zero()) or not spec.is_in(spec.rand(generator=torch.Generator())):
            _fail(f"full_{name}_spec does not hold its own zero() and rand(): {spec}")
        for key in spec.leaves():
            if key in owners:
                _fail(f"{key!r} is in the {owners[key]} spec and in the {name} spec: each key needs one owner")
            owners[key] = name
    if not env.action_keys:
        _fail("action_spec is empty: set it in __init__")
    for flag in ("done", "terminated", "truncated"):
        spec_of = env.full_done_spec[flag]
        if spec_of.dtype is not torch.bool or spec_of.shape != (*env.batch_size, 1):
            _fail(f"the spec of {flag!r} must be bool of shape {(*env.batch_size, 1)}: found {spec_of}")
    fake = env.fake_tensordict()
    _fits(env.full_observation_spec, fake, env.batch_size, "fake_tensordict")
    _fits(env.full_reward_spec, fake["next"], env.batch_size, "fake_tensordict, next")


def _fits(spec: Composite, td: TensorDictBase, size: torch.Size, where: str) -> None:
    if td.batch_size != size:
        _fail(f"{where}: expected batch size {tuple(size)}, found {tuple(td.batch_size)}")
    misfit = spec.expand(size).first_misfit(td)
    if misfit:
        _fail(f"{where}: {misfit}")


def _check_flags(env: EnvBase, td: TensorDictBase, where: str) -> None:
    _fits(env.full_done_spec, td, td.batch_size, where)
    done, terminated, truncated = td["done"], td["terminated"], td["truncated"]
    if not torch.equal(done, terminated | truncated):
        _fail(
            f"{where}: done must be terminated | truncated: found done={done.tolist()}, "
            f"terminated={terminated.tolist()}, truncated={truncated.tolist()}"
        )


def _checked_step(env: EnvBase, state: TensorDictBase) -> TensorDictBase:
    before = _snapshot(state)
    td = env.step(state)
    _unchanged(before, state, "step changed the TensorDict that it was given")
    _unchanged(before, td, "step changed an entry of the state, which must be kept beside its result")
    next_td = td["next"]
    for name, spec in (("observation", env.full_observation_spec), ("reward", env.full_reward_spec)):
        _fits(spec, next_td, state.batch_size, f"step, {name} under 'next'")
    _check_flags(env, next_td, "step, under 'next'")
    return td


def _checked_mdp(env: EnvBase, td: TensorDictBase) -> TensorDictBase:
    state = env.step_mdp(td)
    _fits(env.full_observation_spec, state, td.batch_size, "step_mdp")
    left = [key for key in (*env.action_keys, *env.reward_keys, "next") if entry(state, key) is not None]
    if left:
        _fail(f"step_mdp must leave actions and rewards behind: found {left}")
    return state


def _check_foreign(env: EnvBase, state: TensorDictBase) -> None:
    label = torch.arange(max(state.batch_size.numel(), 1)).view(state.batch_size)
    state = env.reset(state.copy().set(_FOREIGN, label))
    stepped = env.step_mdp(env.step(env.rand_action(state.copy())))
    for name, td in (("reset", state), ("step", stepped)):
        found = td.get(_FOREIGN, None)
        if found is None or not torch.equal(found, label):
            _fail(f"{name} lost or changed a key that the environment does not own")


def _check_partial_reset(env: EnvBase, state: TensorDictBase) -> None:
    mask = torch.zeros((*state.batch_size, 1), dtype=torch.bool)
    mask.view(-1)[0] = True
    reset = env.reset(state.copy().set("_reset", mask))
    if entry(reset, "_reset") is not None:
        _fail("reset must take '_reset' out of its result")
    _same_rows(env, state, reset, "a partial reset changed a row that it was not to reset")


def _check_partial_step(env: EnvBase, state: TensorDictBase) -> None:
    mask = torch.zeros((*state.batch_size, 1), dtype=torch.bool)
    mask.view(-1)[0] = True
    acted = env.rand_action(state.copy()).set("_step", mask)
    try:
        td = env.step(acted)
    except ValueError:
        return  # a refusal: dense rows without a mask can not become rows of different lengths
    _same_rows(env, state, td["next"], "a partial step changed a row not to be stepped")


def _same_rows(env: EnvBase, old: TensorDictBase, new: TensorDictBase, complaint: str) -> None:
    """Compare the observations and flags `done`, `terminated`, `truncated` of all rows but the first."""
    for key in (*env.full_observation_spec.leaves(), "done", "terminated", "truncated"):
        before, after = _rows(old, key), _rows(new, key)
        for row in range(1, len(before)):
            if not _same_row(before[row], after[row]):
                _fail(f"{complaint}: {key!r}, row {row}: {before[row]} became {after[row]}")


def _same_row(old: Any, new: Any) -> bool:
    """Say whether two rows are equal but for padding: where another row grew, zeros may be on the left of this one."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)) or old.shape == new.shape:
        return _equal(old, new)
    kept = min(len(old), len(new))
    return _equal(old[len(old) - kept :], new[len(new) - kept :]) and not bool(new[: len(new) - kept].any())


def _rows(td: TensorDictBase, key: KeyPath) -> list[Any]:
    """Return the rows of any entry; of one with a number for each row, the numbers."""
    if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0:
        return [cell for row in td.unbind(0) for cell in _rows(row, key)]
    value = entry(td, key)
    if isinstance(value, Tensor) and not value.is_nested and value.dim() == td.batch_dims:
        return list(value.flatten()) if td.batch_dims else [value]
    return rows(td, key)


def _check_rollout(env: EnvBase, given: TensorDictBase | None, max_steps: int) -> None:
    td = env.rollout(max_steps, tensordict=None if given is None else given.copy())
    steps = td.unbind(-1)
    if not 1 <= len(steps) <= max_steps:
        _fail(f"a rollout of at most {max_steps} steps has {len(steps)}")
    for t, step in enumerate(steps):
        _fits(env.full_action_spec, step, step.batch_size, f"rollout, step {t}")
        _check_flags(env, step["next"], f"rollout, step {t}, under 'next'")


def _snapshot(td: TensorDictBase) -> dict[KeyPath, Any]:
    return {key: _frozen(value) for key, value in _items(td)}


def _items(td: TensorDictBase) -> list[tuple[KeyPath, Any]]:
    keys: list[KeyPath] = list(td.keys(True, True, is_leaf=is_leaf_nontensor))
    return [(key, _rows(td, key)) for key in keys]


def _frozen(values: list[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _unchanged(before: dict[KeyPath, Any], td: TensorDictBase, complaint: str) -> None:
    after = dict(_items(td))
    for key, values in before.items():
        if key not in after:
            _fail(f"{complaint}: {key!r} is gone")
        if len(values) != len(after[key]) or not all(map(_equal, values, after[key])):
            _fail(f"{complaint}: {key!r} was {values}, is {after[key]}")


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
