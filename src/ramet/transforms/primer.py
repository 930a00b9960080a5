"""Fill keys at reset: with constants, with what functions return, or with draws from specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from ramet.ragged import Text
from ramet.specs import Composite, KeyPath, NonTensor, Spec, describe
from ramet.specs.leaf import TensorSpec
from ramet.transforms.env_specs import EnvSpecs
from ramet.transforms.loading.batches import carry, missing, mixed_rows, named_rows
from ramet.transforms.transform import Transform

Default: TypeAlias = float | int | bool | str | Tensor | Callable[..., Any]
"""What a key is filled with: a constant, or a function that is called at each reset."""


class TensorDictPrimer(Transform):
    """Fill the keys of `primers` at each reset, in the rows that are reset, and keep them through the steps.

    `primers` maps keys to specs of one row; with `expand_specs=False` they are of the whole batch of the environment,
    with whose batch size their shapes start. A `Composite` of a batch size of its own says the same.

    `default_value` is a constant (0.0 if None; a spec of no tensors is then filled with its example), or a function
    without arguments, called once for each key and reset, that returns a value of one row or of each row reset; or a
    mapping of either by key, where keys that are not in it get 0.0. With `single_default_value` it is one function for
    all keys: `default_value(reset=mask)` is given the mask of the rows that are reset, bool (*B), or None for all of
    them, and returns a TensorDict with one row for each. `random` draws from the specs in its place, seeded by
    `set_seed`. `call_before_env_reset` fills before the environment's own reset, as prompts need. `reset_key` names the
    mask of rows, "_reset" if None.

    ValueError where a value does not fit its spec. A primer outside of an environment fills the td it is called with.

    >>> from ramet.envs.llm import LLMEnv
    >>> from ramet.specs import Unbounded
    >>> primers = {"tokens": Unbounded((3,), dtype=torch.int64), "level": Unbounded((), dtype=torch.int64)}
    >>> defaults = {"tokens": lambda: torch.tensor([1, 2, 3]), "level": 7}
    >>> primer = TensorDictPrimer(primers, default_value=defaults, call_before_env_reset=True)
    >>> env = LLMEnv(from_text=False, eos_token_id=9, batch_size=2).append_transform(primer)
    >>> td = env.reset()
    >>> td["tokens"].tolist(), td["level"].tolist()
    ([[1, 2, 3], [1, 2, 3]], [7, 7])
    >>> td["tokens_response"] = torch.tensor([[4], [9]])
    >>> td = env.step(td)
    >>> td["next", "tokens"].tolist(), td["next", "level"].tolist()
    ([[1, 2, 3, 4], [1, 2, 3, 9]], [7, 7])
    >>> env.rollout(2)["level"].tolist()
    [[7, 7], [7, 7]]
    """

    def __init__(
        self,
        primers: Composite | Mapping[KeyPath, Spec] | None = None,
        *,
        random: bool = False,
        default_value: Default | Mapping[KeyPath, Default] | None = None,
        reset_key: KeyPath | None = None,
        expand_specs: bool | None = None,
        single_default_value: bool = False,
        call_before_env_reset: bool = False,
    ) -> None:
        super().__init__()
        if not primers:
            raise ValueError("primers must map at least one key to its spec: found none")
        self.primers = primers if isinstance(primers, Composite) else Composite(primers)
        keys = self.primers.leaves()
        if random and default_value is not None:
            raise ValueError("random=True draws the values: it takes no default_value")
        if single_default_value and not callable(default_value):
            raise ValueError(f"single_default_value=True needs a function as default_value: found {default_value!r}")
        if isinstance(default_value, Mapping):
            unknown = [key for key in default_value if key not in keys]
            if unknown:
                raise ValueError(f"default_value has {unknown}, for which there is no spec: there are specs for {keys}")
        self.random, self.default_value, self.single_default_value = random, default_value, single_default_value
        self.reset_key: KeyPath = "_reset" if reset_key is None else reset_key
        self.expand_specs, self.call_before_env_reset = expand_specs, call_before_env_reset
        self.generator = torch.Generator()
        if random:
            self.generator.seed()

    def set_seed(self, seed: int) -> None:
        """Seed the draws of `random`."""
        self.generator.manual_seed(seed)

    def attach(self, env: EnvSpecs) -> None:
        """Take `env` as the parent; ValueError where the specs do not fit its batch size."""
        self._row_specs(env.batch_size)
        super().attach(env)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Fill `td`, outside of any environment."""
        return self._fill(td, td)

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        return self._fill(td, td) if self.call_before_env_reset else td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset if self.call_before_env_reset else self._fill(td, td_reset)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return carry(td, next_td, self.primers.leaves())

    def _fill(self, before: TensorDictBase, td: TensorDictBase) -> TensorDictBase:
        """Fill the rows of `td` that `before` says are reset; the others keep what they had, if they had anything."""
        named = before.get(self.reset_key, None)
        if isinstance(named, Tensor) and named.dtype is torch.bool and not bool(named.any()):
            return carry(before, td, self.primers.leaves())
        mask = named_rows(before, self.reset_key)
        if mask is not None and missing(before, self.primers.leaves()) is not None:
            mask = None  # there is nothing to keep
        size = td.batch_size if mask is None else torch.Size([int(mask.sum())])
        specs = self._row_specs(td.batch_size if self.parent is None else self.parent.batch_size)
        values = self._values(specs, size, mask)
        for key, spec in specs.items():
            value = _checked(key, spec, values[key], size)
            value = value.to(td.device) if td.device is not None else value
            if mask is not None:
                value = mixed_rows(key, value, before.get(key), mask)
            td.set(key, value)
        return td

    def _values(self, specs: Mapping[KeyPath, Spec], size: torch.Size, mask: Tensor | None) -> dict[KeyPath, Any]:
        if self.random:
            return {key: spec.rand(size, generator=self.generator) for key, spec in specs.items()}
        default = self.default_value
        if self.single_default_value:
            made = default(reset=mask)  # type: ignore[operator,misc]
            if not isinstance(made, TensorDictBase) or made.batch_size != size:
                found = tuple(made.batch_size) if isinstance(made, TensorDictBase) else describe(made)
                raise ValueError(f"default_value must return a TensorDict of batch size {tuple(size)}: found {found}")
            absent = missing(made, list(specs))
            if absent is not None:
                raise ValueError(f"default_value must return all keys of the specs: {absent!r} is missing")
            return {key: made.get(key) for key in specs}
        given = default if isinstance(default, Mapping) else dict.fromkeys(specs, default)
        return {key: _value(spec, given.get(key), size) for key, spec in specs.items()}

    def _row_specs(self, batch: torch.Size) -> dict[KeyPath, Spec]:
        """Return the specs of one row, by key."""
        own, specs = self.primers.shape, {}
        for key in self.primers.leaves():
            spec = self.primers[key]
            dims = len(own)
            if not dims and self.expand_specs is False:
                if spec.shape[: len(batch)] != batch:
                    raise ValueError(
                        f"expand_specs=False takes specs of the whole batch {tuple(batch)}: the spec of {key!r} has "
                        f"shape {tuple(spec.shape)}"
                    )
                dims = len(batch)
            if own and batch and own != batch:
                raise ValueError(f"the primers have batch size {tuple(own)} and the environment has {tuple(batch)}")
            specs[key] = spec._but(shape=spec.shape[dims:])
        return specs

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Add the keys that the environment does not have."""
        for key, own in self._row_specs(spec.shape).items():
            if key not in spec:
                spec[key] = own.expand(*spec.shape, *own.shape)
        return spec


def _value(spec: Spec, default: Any, size: torch.Size) -> Any:
    """Return a value for rows of `size`, of a constant, of what a function returns, or of nothing (None)."""
    value = default() if callable(default) else default
    if isinstance(spec, TensorSpec):
        value = 0.0 if value is None else value
        if isinstance(value, Tensor):
            of_row = value.dim() == len(spec.shape) and bool(size)
            return (value.expand(*size, *value.shape) if of_row else value).clone()
        return torch.full(spec.zero(size).shape, value, dtype=spec.dtype, device=spec.device)
    if not isinstance(spec, NonTensor) or isinstance(value, NonTensorData | NonTensorStack):
        return value
    value = spec.example_data if value is None else value
    count = size.numel()
    values = list(value) if isinstance(value, list) and len(value) == count else [value] * count
    if all(isinstance(one, str) for one in values):
        return Text.of(values).entry(bool(size))
    return NonTensorStack(*map(NonTensorData, values)) if size else NonTensorData(values[0])


def _checked(key: KeyPath, spec: Spec, value: Any, size: torch.Size) -> Any:
    if not spec.expand(*size, *spec.shape).is_in(value):
        raise ValueError(f"the value of {key!r} does not fit: expected {spec} for each of {tuple(size)} rows, found "
                         f"{describe(value)}")  # fmt: skip
    return value
