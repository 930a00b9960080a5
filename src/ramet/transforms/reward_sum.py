"""Add up the rewards of an episode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ramet.ragged import Ragged, choose
from ramet.specs import Composite, KeyPath, Spec, Unbounded
from ramet.transforms.env_specs import EnvSpecs
from ramet.transforms.placement import read
from ramet.transforms.transform import Transform
from ramet.types import Key


class RewardSum(Transform):
    """Write the sum of an episode's rewards so far, under "episode_reward" for "reward"; it starts over at reset.

    `in_keys` are rewards: by default all of the environment, outside one "reward". `out_keys` are by default those
    with "episode_" before the last name. The sum has the shape of the reward; of a reward for each token (jagged, or
    ragged by the environment's spec) it is (*B, 1), over the tokens too. It is an observation, which the next step
    reads; with `reward_spec` it is among the rewards, and what the next step reads is an observation named like it,
    with "_so_far" at the end.

    Sums are made in a dtype that holds them: int64 of integers and of bool, which are counted, float32 of shorter
    floats, else that of the reward; the spec says so.

    `reset_keys`, one for all in keys or one for each, name the masks of the rows that start over: "_reset", as it is in
    a partial reset, by default. Where there is no mask, all rows do.

    On replayed data, `transform(td)` sums along the dimension named "time", else the last of the batch, from 0 on;
    after a step that is done the sum starts over. Rewards under "next" are looked for first.

    Raises KeyError for a reward that neither the environment nor the data has, ValueError where keys do not pair.

    >>> from tensordict import TensorDict
    >>> from ramet.envs.llm import LLMEnv
    >>> env = LLMEnv(from_text=False, eos_token_id=9, assign_reward=True).append_transform(RewardSum())
    >>> env.observation_spec["episode_reward"]
    Unbounded(shape=(1,), dtype=float32)
    >>> td = env.reset(TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2]))
    >>> td["episode_reward"].tolist()
    [[0.0], [0.0]]
    >>> env.step(td.set("tokens_response", torch.tensor([[5], [6]])))["next", "episode_reward"].tolist()
    [[0.0], [0.0]]
    >>> env.rollout(3, tensordict=td)["next", "episode_reward"].shape
    torch.Size([2, 3, 1])
    >>> RewardSum()(TensorDict({"reward": torch.ones(4, 1)}, [4]))["episode_reward"].flatten()
    tensor([1., 2., 3., 4.])
    """

    def __init__(
        self,
        in_keys: Sequence[KeyPath] | None = None,
        out_keys: Sequence[KeyPath] | None = None,
        reset_keys: Sequence[KeyPath] | None = None,
        *,
        reward_spec: bool = False,
    ) -> None:
        given = [Key.REWARD] if in_keys is None else list(in_keys)
        super().__init__(given, [_episode(key) for key in given] if out_keys is None else out_keys)
        if reset_keys is not None and len(reset_keys) not in (1, len(given)):
            raise ValueError(f"one reset key is needed, or one for each of {given}: found {list(reset_keys)}")
        self.reset_keys: list[KeyPath] = ["_reset"] if reset_keys is None else list(reset_keys)
        self.reward_spec = reward_spec
        self._all_rewards, self._named = in_keys is None, out_keys is not None
        self._ragged: set[KeyPath] = set()

    def attach(self, env: EnvSpecs) -> None:
        """Take `env` as the parent, and its rewards as the in keys if none were given."""
        super().attach(env)
        rewards, observations = env.full_reward_spec, env.full_observation_spec
        if self._all_rewards and not self._named:
            self.in_keys = rewards.leaves()
            self.out_keys = [_episode(key) for key in self.in_keys]
        there = [*rewards.leaves(), *observations.leaves()]
        for key in self.in_keys or [Key.REWARD]:
            if key not in there:
                raise KeyError(
                    f"there is no {key!r} to add up: the environment's rewards are {rewards.leaves()}; "
                    "append what makes the reward first"
                )
            if -1 in self._source(key).shape:
                self._ragged.add(key)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the running sums into `td`, replayed data with a dimension of time, beside the rewards."""
        if not td.batch_dims:
            raise ValueError("to add up rewards along time, the TensorDict needs a dimension of time: found batch ()")
        names = list(td.names) if td.names else []
        dim = names.index("time") if "time" in names else td.batch_dims - 1
        steps = td.unbind(dim)
        for key, out in zip(self.in_keys, self.out_keys, strict=True):
            prefix: tuple[str, ...] = () if read(steps[0], ("next", *_path(key))) is None else ("next",)
            total: Tensor | None = None
            sums = []
            for step in steps:
                reward = self._summed(key, read(step, (*prefix, *_path(key))), step.batch_size)
                total = reward if total is None else total + reward
                sums.append(total)
                done = read(step, (*prefix, "done"))
                if done is not None:
                    of_row = done.reshape(*step.batch_size, *([1] * (total.dim() - step.batch_dims)))
                    total = torch.where(of_row, torch.zeros_like(total), total)
            td.set((*prefix, *_path(out)), torch.stack(sums, dim))
        return td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        for number, (key, out) in enumerate(zip(self.in_keys, self._carried(), strict=True)):
            zeros = self._spec(key, td_reset.batch_size).zero()
            zeros = zeros if td_reset.device is None else zeros.to(td_reset.device)
            mask = read(td, self.reset_keys[number % len(self.reset_keys)])
            before = read(td, out)
            if mask is not None and before is not None:
                zeros = choose(mask.reshape(td_reset.batch_size), zeros, before)
            td_reset.set(out, zeros)
        return td_reset

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for key, out, carried in zip(self.in_keys, self.out_keys, self._carried(), strict=True):
            total, before = self._summed(key, read(next_td, key), next_td.batch_size), read(td, carried)
            total = total if before is None else before + total
            next_td.set(carried, total)
            if carried != out:
                next_td.set(out, total.clone())
        return next_td

    def _summed(self, key: KeyPath, reward: Tensor | None, size: torch.Size) -> Tensor:
        """Return the reward of a step, (*B, 1) where it is ragged."""
        if reward is None:
            raise KeyError(f"there is no reward {key!r} to add up")
        reward = reward.to(_sum_dtype(reward.dtype))
        if reward.is_nested:
            rows = Ragged.from_jagged(reward).compact()
            row = torch.repeat_interleave(torch.arange(len(rows), device=reward.device), rows.lengths)
            return rows.values.new_zeros(len(rows)).index_add(0, row, rows.values.reshape(-1))[:, None]
        if key in self._ragged:
            return reward.flatten(len(size)).sum(-1, keepdim=True)
        return reward

    def _carried(self) -> list[KeyPath]:
        """Return where the next step finds the sums: rewards are left behind by a step."""
        return [_so_far(key) for key in self.out_keys] if self.reward_spec else self.out_keys

    def _source(self, key: KeyPath) -> Spec:
        assert self.parent is not None
        rewards = self.parent.full_reward_spec
        return rewards[key] if key in rewards else self.parent.full_observation_spec[key]

    def _spec(self, key: KeyPath, size: torch.Size) -> Unbounded:
        """Return the spec of the sum of a reward, for a batch of `size`."""
        if self.parent is None:
            return Unbounded((*size, 1))
        source = self._source(key)
        shape = (1,) if key in self._ragged else source.shape[len(self.parent.batch_size) :]
        return Unbounded((*size, *shape), self.parent.device, _sum_dtype(source.dtype or torch.float32))

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Add the sums; those that the next step reads, if the sums are rewards."""
        for key, carried in zip(self.in_keys, self._carried(), strict=True):
            spec[carried] = self._spec(key, spec.shape)
        return spec

    def transform_reward_spec(self, spec: Composite) -> Composite:
        """Add the sums, if they are rewards."""
        if self.reward_spec:
            for key, out in zip(self.in_keys, self.out_keys, strict=True):
                spec[out] = self._spec(key, spec.shape)
        return spec


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rewards are added up."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.promote_types(dtype, torch.float32)
    return torch.int64


def _path(key: KeyPath) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _episode(key: KeyPath) -> KeyPath:
    return f"episode_{key}" if isinstance(key, str) else (*key[:-1], f"episode_{key[-1]}")


def _so_far(key: KeyPath) -> KeyPath:
    return f"{key}_so_far" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_so_far")
