"""The columns of rows: what each holds, and how rows are checked, many at once or one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ramet.errors import DataError
from ramet.ragged import Ragged
from ramet.specs import Composite, KeyPath, NonTensor, Spec, Unbounded, describe
from ramet.transforms.env_specs import EnvSpecs
from ramet.transforms.loading.items import Values, as_tensor, rows_of, split
from ramet.transforms.transform import Compose, Transform

Part: TypeAlias = Tensor | Ragged | list[Any]
"""The values of n rows in one column: a tensor [n, ...], rows of tensors that differ in length, or a list."""
Parts: TypeAlias = dict[KeyPath, Part]


class Column:
    """One key of the rows: the `spec` of one value, and whether it was `declared` or read off the first row.

    `dtype` is that of tensors, None for others; `ragged` columns differ in length from row to row; `text` is strings.
    """

    __slots__ = ("declared", "dtype", "key", "ragged", "spec", "text")

    def __init__(self, key: KeyPath, spec: Spec, declared: bool) -> None:
        self.key, self.spec, self.declared, self.dtype = key, spec, declared, spec.dtype
        self.ragged = spec.dtype is not None and -1 in spec.shape
        self.text = isinstance(spec, NonTensor) and isinstance(spec.example_data, str)

    def fitted(self, value: Any) -> Any:
        """Return `value` as the column holds it; DataError if it does not fit, without the name of the row."""
        if self.text:
            if isinstance(value, str):
                return value
            raise DataError(
                f"{self.key!r}: expected str, found {describe(value)}",
                hint=f"values of several types need primers={{{self.key!r}: NonTensor(example_data=None)}}",
            )
        if self.dtype is None:
            return value
        if isinstance(value, list) and not value:
            value = torch.zeros(0, dtype=self.dtype)
        if not isinstance(value, Tensor) or not _fits(value.shape, self.spec.shape):
            raise DataError(f"{self.key!r}: expected {self._expected()}, found {describe(value)}")
        return value if value.dtype is self.dtype else self._cast(value, self.dtype)

    def together(self, values: Any) -> Part | None:
        """Return the values of n rows as the column holds them; None where they must be looked at one by one.

        `values` are a tensor, jagged or not, or any other column.
        """
        if self.dtype is None:
            if not isinstance(values, list) or not self.text:
                values = split(values)
            return values if not self.text or set(map(type, values)) <= {str} else None
        if not isinstance(values, Tensor):
            kinds = set(map(type, values))
            values = as_tensor(values, kinds) if kinds in ({int}, {float}, {bool}) else values
        if not isinstance(values, Tensor):
            return self._stacked(values if kinds == {Tensor} else split(values))
        if not values.is_nested:
            return self._all_cast(values) if _fits(values.shape[1:], self.spec.shape) else None
        rows = Ragged.from_jagged(values).compact()
        inside = self._all_cast(rows.values) if _fits(rows.values.shape, (-1, *self.spec.shape[1:])) else None
        return None if inside is None or self.spec.shape[:1] != (-1,) else Ragged(inside, rows.offsets)

    def _stacked(self, rows: list[Any]) -> Part | None:
        """Return tensors of rows as one; None if there are others, or if they do not fit together."""
        if set(map(type, rows)) != {Tensor} or len({row.dtype for row in rows}) > 1:
            return None
        shapes, dims = [row.shape for row in rows], len(self.spec.shape)
        if {len(shape) for shape in shapes} != {dims}:
            return None
        if dims > 1 or not self.ragged:
            different = set(shapes)
            if not all(_fits(shape, self.spec.shape) for shape in different) or len({s[1:] for s in different}) > 1:
                return None
        joined = self._all_cast(torch.cat(rows) if self.ragged else torch.stack(rows))
        if joined is None or not self.ragged:
            return joined
        offsets = torch.tensor([*accumulate([shape[0] for shape in shapes], initial=0)], device=joined.device)
        return Ragged(joined, offsets)

    def _all_cast(self, values: Tensor) -> Tensor | None:
        assert self.dtype is not None
        try:
            return values if values.dtype is self.dtype else self._cast(values, self.dtype)
        except DataError:  # the row that does not fit is found by looking at each
            return None

    def _cast(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        floating = value.dtype.is_floating_point
        if self.declared and (dtype.is_floating_point or not floating):
            cast = value.to(dtype)
            if floating or torch.equal(cast.to(value.dtype), value):
                return cast
        raise DataError(
            f"{self.key!r}: expected {self._expected()}, found {describe(value)}",
            hint="rows must be of one dtype: convert them in the loader, or declare it by data_specs or primers",
        )

    def _expected(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = ", ".join("any" if size == -1 else str(size) for size in self.spec.shape)
        return f"{dtype} tensor of shape ({sizes})"


class Columns:
    """The columns of all rows: those of the first row, and no others.

    `masks` pairs the key of a mask with the key of the tokens that it masks; `made` is the mask that a batch is given,
    ones on all tokens of the rows, because the environment has one and the rows do not; or because `mask_key` says that
    it takes one. Under `prompt` the environment takes strings, whatever it observes there.
    """

    def __init__(
        self,
        first: Values,
        declared: Mapping[KeyPath, Spec],
        env: Composite | None,
        example: Any,
        *,
        mask_key: Callable[[KeyPath], KeyPath | None] | None = None,
        prompt: KeyPath | None = None,
    ) -> None:
        self.made: KeyPath | None = None
        self._all: dict[KeyPath, Column] = {}
        unknown = [key for key in declared if key not in first]
        if unknown:
            raise DataError(
                f"there are specs for {unknown}, which the rows do not have: they have {sorted(map(str, first))}"
            )
        for key, value in first.items():
            inside = None if key == prompt and isinstance(value, str) else env
            self._all[key] = _column(key, value, declared.get(key), inside, example)
        self._given = dict.fromkeys(self._all)
        self.masks = self._pair(env, mask_key)
        for mask in self.masks:
            if mask not in self._all and env is not None:
                self.made = mask
                dtype = env[mask].dtype if mask in env else None
                self._all[mask] = Column(mask, Unbounded((-1,), dtype=dtype or torch.bool), True)

    def __iter__(self) -> Any:
        return iter(self._all.values())

    def __getitem__(self, key: KeyPath) -> Column:
        return self._all[key]

    def keys(self) -> list[KeyPath]:
        """Return the keys, that of a mask that is made included."""
        return list(self._all)

    @property
    def plain(self) -> bool:
        """Whether no row has a tensor of one dimension or more."""
        return all(column.dtype is None or not column.spec.shape for column in self)

    def fitted(self, given: Values | list[Values], number: int, name: str) -> Parts:
        """Return rows, of which the first has that `number`, as the columns hold them: a batch, or one after the other.

        DataError, naming row and key, if they do not fit.
        """
        columns: Values | None = None
        if isinstance(given, dict):
            columns = given
        elif all(row.keys() == self._given.keys() for row in given):
            columns = {key: [row[key] for row in given] for key in self._given}
        if columns is not None and columns.keys() == self._given.keys():
            parts = {key: self._all[key].together(column) for key, column in columns.items()}
            if not any(part is None for part in parts.values()):
                return parts  # type: ignore[return-value]
        rows = [self._row(row, number + i, name) for i, row in enumerate(rows_of(given))]
        lists = {key: [row[key] for row in rows] for key in self._given}
        together = {key: self._all[key].together(values) for key, values in lists.items()}
        return {key: lists[key] if part is None else part for key, part in together.items()}

    def _row(self, values: Values, number: int, name: str) -> Values:
        """Return the values of row `number` as the columns hold them; DataError, naming row and key, if they do not."""
        if values.keys() != self._given.keys():
            missing = sorted(map(str, self._given.keys() - values.keys()))
            more = sorted(map(str, values.keys() - self._given.keys()))
            raise DataError(
                f"row {number} of {name} has other keys than row 0: missing {missing}, more {more}",
                hint="each row must have the same keys: choose them by data_keys",
            )
        try:
            return {key: self._all[key].fitted(value) for key, value in values.items()}
        except DataError as error:
            raise DataError(f"row {number} of {name}, {error.message}", hint=error.hint) from None

    def made_for(self, key: KeyPath) -> KeyPath | None:
        """Return the key of the mask that is made for the tokens under `key`, if one is."""
        return self.made if self.made is not None and self.masks[self.made] == key else None

    def mask_of(self, tokens: Tensor) -> Tensor:
        """Return the mask that `made` names, for tokens all of which are real."""
        assert self.made is not None
        return torch.ones(tokens.shape, dtype=self._all[self.made].dtype, device=tokens.device)

    def _pair(
        self, env: Composite | None, mask_key: Callable[[KeyPath], KeyPath | None] | None
    ) -> dict[KeyPath, KeyPath]:
        """Find which mask goes with which tokens: the sibling "attention_mask", or the one mask of the environment."""
        pairs: dict[KeyPath, KeyPath] = {}
        ragged = [column.key for column in self if column.ragged]
        of_env = _masks(env)
        masks = {key for key in ragged if _named_mask(key)} | set(of_env)
        for key in ragged:
            observed = env is not None and key in env
            mask: KeyPath | None = "attention_mask" if isinstance(key, str) else (*key[:-1], "attention_mask")
            if mask not in masks:
                mask = of_env[0] if observed and len(of_env) == 1 else None
            if mask is None and observed and mask_key is not None:
                mask = mask_key(key)
            if key in masks or mask is None or not (observed or mask in self._all):
                continue
            if observed or mask not in pairs:
                pairs[mask] = key
        return pairs


def cut(parts: Parts, start: int, end: int) -> Parts:
    """Return the rows from `start` to `end`, as views."""
    return {key: _cut(part, start, end) for key, part in parts.items()}


def _cut(part: Part, start: int, end: int) -> Part:
    if not isinstance(part, Ragged):
        return part[start:end]
    if start == 0 and end == len(part):
        return part
    first, last = int(part.offsets[start]), int(part.offsets[end])
    return Ragged(part.values[first:last], part.offsets[start : end + 1] - first)


def declared(
    primers: Composite | None,
    data_specs: Sequence[Spec] | Mapping[KeyPath, Spec] | None,
    keys: Sequence[KeyPath] | None,
    batch: torch.Size,
) -> dict[KeyPath, Spec]:
    """Return the specs that were given, by key, each of one row: without the batch that it may start with."""
    found: dict[KeyPath, Spec] = {}
    if data_specs is not None and not isinstance(data_specs, Mapping):
        if keys is None or len(keys) != len(data_specs):
            raise ValueError(f"data_specs needs one spec for each of data_keys: found {len(data_specs)} for {keys}")
        data_specs = dict(zip(keys, data_specs, strict=True))
    found.update(data_specs or {})
    if primers is not None:
        found.update({key: _but_first(primers[key], len(primers.shape)) for key in primers.leaves()})
    for key, spec in found.items():
        if isinstance(spec, NonTensor):
            found[key] = _but_first(spec, len(spec.shape))
        elif batch and spec.shape[:1] == batch and -1 in spec.shape[1:]:
            found[key] = _but_first(spec, 1)
    return found


def _but_first(spec: Spec, dims: int) -> Spec:
    return spec._but(shape=spec.shape[dims:])


def bare_key(env: EnvSpecs, text: bool) -> KeyPath:
    """Name the column of bare strings, or tensors: what `env` observes of that kind, and is no mask.

    Text may also be what the environment takes as a prompt, or what a transform reads before the reset. DataError if
    that is not one key.
    """
    if text and env.prompt_key is not None and not any(transform.in_keys for transform in _before_reset(env)):
        return env.prompt_key
    spec = env.full_observation_spec
    masks = _masks(spec)
    found = [
        key
        for key in spec.leaves()
        if (isinstance(spec[key], NonTensor) if text else spec[key].dtype is not None and -1 in spec[key].shape)
        and key not in masks
    ]
    if text and not found:
        found = [key for transform in _before_reset(env) for key in transform.in_keys]
    if len(found) == 1:
        return found[0]
    kind = "text" if text else "tokens"
    raise DataError(
        f"it gives {kind} without a name, and of {kind} the environment observes {found or 'nothing'}: its "
        f"observations are {spec.leaves()}",
        hint="name it by data_keys; text for an environment of tokens needs a Tokenizer(call_before_reset=True)",
    )


def _before_reset(env: EnvSpecs) -> list[Transform]:
    """Return the transforms of `env` that read something before the reset: what they read, a primer may give."""
    found = getattr(env, "transform", None)
    transforms = list(found) if isinstance(found, Compose) else [found] if isinstance(found, Transform) else []
    return [one for one in transforms if type(one)._reset_env_preprocess is not Transform._reset_env_preprocess]


def _masks(env: Composite | None) -> list[KeyPath]:
    if env is None:
        return []
    ragged = [key for key in env.leaves() if env[key].dtype is not None and -1 in env[key].shape]
    return [key for key in ragged if env[key].dtype is torch.bool or _named_mask(key)]


def _named_mask(key: KeyPath) -> bool:
    return (key if isinstance(key, str) else key[-1]) == "attention_mask"


def _column(key: KeyPath, value: Any, declared: Spec | None, env: Composite | None, example: Any) -> Column:
    """Describe a column by what was declared, else by what the environment holds there, else by the first value."""
    if declared is not None:
        return Column(key, declared, True)
    if env is not None and key in env and not isinstance(env[key], Composite):
        spec = env[key]
        if isinstance(spec, NonTensor) and example is not None:
            spec = NonTensor(spec.shape, example_data=example)
        return Column(key, _but_first(spec, len(env.shape)), True)
    if isinstance(value, Tensor):
        shape = (-1, *value.shape[1:]) if value.dim() else ()
        return Column(key, Unbounded(shape, dtype=value.dtype), False)
    return Column(
        key, NonTensor(example_data=example if isinstance(value, str) and example is not None else value), False
    )


def _fits(shape: Sequence[int], spec: Sequence[int]) -> bool:
    return len(shape) == len(spec) and all(own in (-1, size) for size, own in zip(shape, spec, strict=True))
