"""Where the items of a loader come from, where in it the next one stands, and how to come back to that place.

Four kinds. What can be indexed is at an integer. What can be iterated again comes back by reading its epoch from the
start. A function that makes iterators is called for each epoch. An iterator can be read once.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from ramet.errors import DataError


@dataclass(slots=True)
class Epoch:
    """One run through a loader.

    `states` are those of the loader's random generators before it; `seed_after` seeds them for the next epoch.
    """

    number: int
    states: tuple[Tensor, ...] = ()
    seed_after: int | None = None


class Source(ABC):
    """The items of a loader, one after the other and epoch after epoch. `epoch` and `index`: where the next stands."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = Epoch(0)
        self.index = 0
        self.given = 0

    def next(self) -> Any:
        """Return the next item. DataError if there is none; an error of the loader leaves the place as it was."""
        item = self._next()
        self.index += 1
        self.given += 1
        return item

    @abstractmethod
    def _next(self) -> Any:
        """Return the item at the place, which may be the start of the next epoch."""

    @abstractmethod
    def seek(self, epoch: Epoch, index: int) -> None:
        """Make item `index` of `epoch` the next one."""

    def replay(self) -> None:  # noqa: B027 (nothing to do for most)
        """Do at once what `seek` may put off to the next item; warn where it takes reading items again."""

    def restart(self) -> None:
        """Begin the next epoch."""
        self.seek(self._following(), 0)

    def refuse_state(self) -> None:  # noqa: B027 (nothing to do for most)
        """Raise a DataError that says why, if there is no way back to a place."""

    def before(self) -> dict[str, Any]:
        """Return what is to be put back if a place that `seek` goes to turns out to be none."""
        return vars(self).copy()

    def seed(self, seed: int) -> bool:
        """Seed the generators that the loader owns, from the next epoch on; False if it owns none."""
        return False

    def _following(self) -> Epoch:
        return Epoch(self.epoch.number + 1)

    def _empty(self) -> DataError:
        return DataError(
            f"{self.name} is empty: it gave 0 rows in epoch {self.epoch.number}",
            hint="check its length, the split or the filter",
        )


class Indexed(Source):
    """What has a length and items by number: a list, a `datasets` dataset, a TensorDict."""

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(name)
        self._loader = loader
        self._next_epoch_if_over()

    def _next(self) -> Any:
        self._next_epoch_if_over()
        return self._loader[self.index]

    def _next_epoch_if_over(self) -> None:
        size = len(self._loader)
        if size == 0:
            raise self._empty()
        if self.index >= size:
            self.restart()

    def seek(self, epoch: Epoch, index: int) -> None:
        """Make item `index` the next one, of the epoch of that number."""
        self.epoch, self.index = epoch, index


class Iterated(Source):
    """What can be iterated again, from the start of the epoch.

    Its random generators may be shared: others that draw from them do not change the order in which it is read here.
    After an error it is iterated again, up to the item that was not had: iterators often go on with the one after it.
    """

    def __init__(self, loader: Any, name: str, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__(name)
        self._make = make
        self._generators, self._unrepeatable = _generators(loader)
        self._iterator: Iterator[Any] | None = None
        self._begun = False  # whether the states of the epoch are known
        self._lost = False  # whether an item of the epoch was lost
        self._left: tuple[Tensor, ...] | None = None  # the states that reading has left the generators in

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the iterator: a copy is iterated again, up to the place, when it is next read."""
        if self._iterator is not None and self.index:
            self.refuse_state()
        return {**vars(self), "_iterator": None}

    def _next(self) -> Any:
        while True:
            iterator = self._open() if self._iterator is None else self._iterator
            if self._generators:
                self._set(self._left)
            try:
                return next(iterator)
            except StopIteration:
                self._left = self._states()
                if self.index == 0 and not self._lost:
                    raise self._empty() from None
                self.restart()
            except BaseException as error:
                if self._unrepeatable and self.index:
                    self._lost = True
                    error.add_note(
                        f"{self.name} may have lost item {self.index} of epoch {self.epoch.number}: "
                        f"{self._unrepeatable}, so there is no way back to it"
                    )
                else:
                    self._iterator = None
                raise
            finally:
                if self._generators:
                    self._left = self._states()

    def _states(self) -> tuple[Tensor, ...]:
        return tuple(generator.get_state() for generator in self._generators)

    def _set(self, states: tuple[Tensor, ...] | None) -> None:
        for generator, state in zip(self._generators, states or (), strict=states is not None):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            if self._begun and self.index:
                self.refuse_state()
            self._set(self.epoch.states if self._begun else self._left)
            self.epoch.states = self._states()
            self._begun = True
            try:
                iterator = iter(self._make())
                for passed in range(self.index):
                    if next(iterator, self) is self:
                        raise DataError(
                            f"{self.name} can not go back to item {self.index} of its epoch: it gave only {passed}",
                            hint="it must give the same items each time that it is iterated",
                        )
            finally:
                self._left = self._states()
            self._iterator = iterator
        return self._iterator

    def seek(self, epoch: Epoch, index: int) -> None:
        """Make item `index` of `epoch` the next one: by reading the `index` before it again."""
        known = len(epoch.states) == len(self._generators)
        if index and not known:
            raise DataError(
                f"{self.name} has {len(self._generators)} random generators, and the state is of {len(epoch.states)}",
                hint="load a state into a primer over the same loader that it was saved with",
            )
        self.epoch, self.index, self._iterator, self._lost = epoch, index, None, False
        self._begun = known and (index > 0 or bool(epoch.states))

    def before(self) -> dict[str, Any]:
        """Return what is to be put back, the states of the generators included."""
        self._left = self._states() if self._left is None else self._left
        return super().before()

    def replay(self) -> None:
        """Read again, up to the place, with a warning."""
        if self.index:
            warnings.warn(
                f"{self.name} has no numbered items: it is iterated again, past {self.index} items, to resume",
                UserWarning,
                stacklevel=2,
            )
        self._open()

    def refuse_state(self) -> None:
        """Raise a DataError if the order of the loader can not be had again."""
        if self._unrepeatable:
            raise DataError(
                f"{self.name} can not be resumed: {self._unrepeatable}",
                hint="give it a generator of its own: DataLoader(..., shuffle=True, generator=torch.Generator())",
            )

    def seed(self, seed: int) -> bool:
        """Seed the generators of the loader and of its sampler, from the next epoch on."""
        self.epoch.seed_after = seed
        return bool(self._generators)

    def _following(self) -> Epoch:
        if self.epoch.seed_after is not None:
            for generator in self._generators:
                generator.manual_seed(self.epoch.seed_after)
            self._left = self._states()
        return super()._following()


class OneShot(Source):
    """What can be read once: an iterator or a generator."""

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        super().__init__(name)
        self._iterator = iterator
        self._failed = ""

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: a copy would take items from this one."""
        raise self._refusal("it can not be copied or pickled")

    def _next(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise DataError(
                f"{self.name} is exhausted: it gave {self.given} items{self._failed} and can be read once",
                hint="pass something that can be iterated again, or a function that makes the iterator",
            ) from None
        except BaseException as error:
            self._failed = self._failed or f", raised {type(error).__name__} at item {self.index}"
            error.add_note(
                f"{self.name} may have lost item {self.index}: it can be read once, so there is no way back to it; "
                "pass something that can be iterated again, or a function that makes the iterator"
            )
            raise

    def seek(self, epoch: Epoch, index: int) -> None:
        """Refuse."""
        raise self._refusal("there is no way back to a place in it")

    def restart(self) -> None:
        """Refuse, once something was read."""
        raise self._refusal("it can not start over")

    def refuse_state(self) -> None:
        """Refuse."""
        raise self._refusal("it has no state to be saved or loaded")

    def _refusal(self, why: str) -> DataError:
        return DataError(
            f"{self.name} can be read once: {why}",
            hint="pass something that can be iterated again, or a function that makes the iterator",
        )


def source_of(loader: Any) -> tuple[Source, Any]:
    """Return the source for a loader, or for what a function without arguments makes; and the loader itself.

    A function that makes something that can be indexed or iterated again is called once, one that makes iterators for
    each epoch. TypeError for what is none of it.
    """
    name = called(loader)
    if isinstance(loader, str | bytes) or (isinstance(loader, Mapping) and not isinstance(loader, TensorDictBase)):
        raise TypeError(
            f"expected a loader of rows, found a single {type(loader).__name__}: put it into a list, or choose one of "
            "its splits"
        )
    if _iterable(loader):
        return _of_iterable(loader, name), loader
    if not callable(loader):
        raise TypeError(f"expected an iterable of rows or a function that makes one, found {name}")
    made = loader()
    if isinstance(made, str | bytes | Mapping) or not _iterable(made):
        raise TypeError(f"{name} must make an iterable of rows: it made {called(made)}")
    if not hasattr(made, "__next__"):
        return _of_iterable(made, f"{called(made)} that {name} made"), made
    return Iterated(made, name, _Made(loader, made)), made


def called(loader: Any) -> str:
    """Name a loader in errors.

    >>> called(range(3))
    'the loader range(0, 3)'
    """
    text = getattr(loader, "__qualname__", None) or (f"of {len(loader)} items" if _large(loader) else repr(loader))
    text = " ".join(text.split())
    text = text if len(text) <= 60 else text[:57] + "..."
    kind = type(loader).__name__
    return f"the loader {text}" if kind in text else f"the loader {kind} {text}"


def _large(loader: Any) -> bool:
    return isinstance(loader, Sequence | Tensor | TensorDictBase) and not isinstance(loader, range) and len(loader) > 3


def _iterable(loader: Any) -> bool:
    return not isinstance(loader, type) and (
        hasattr(loader, "__iter__") or (hasattr(loader, "__getitem__") and hasattr(loader, "__len__"))
    )


def _of_iterable(loader: Any, name: str) -> Source:
    if isinstance(loader, Tensor | TensorDictBase) and not loader.ndim:
        raise TypeError(f"expected a loader of rows, found a single {type(loader).__name__} without a batch dimension")
    if hasattr(loader, "__next__"):
        return OneShot(loader, name)
    numbered = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    if (numbered and not isinstance(loader, Mapping)) or isinstance(loader, Tensor | TensorDictBase):
        return Indexed(loader, name)
    return Iterated(loader, name, _Again(loader))


class _Again:
    """Iterates a loader from its start."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __call__(self) -> Iterator[Any]:
        return iter(self._loader)


class _Made:
    """Calls a function that makes iterators, the first of which is there already; a copy makes its own."""

    def __init__(self, make: Callable[[], Any], first: Any) -> None:
        self._make, self._first = make, first

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_first": None}

    def __call__(self) -> Iterator[Any]:
        made, self._first = self._first, None
        return iter(self._make() if made is None else made)


def _generators(loader: Any) -> tuple[list[torch.Generator], str]:
    """Return the generators that the order of a loader comes from, and why it can not be had again, if so."""
    found, reason = [getattr(loader, "generator", None)], ""
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        sampler: Any = loader.batch_sampler
        sampler = loader.sampler if sampler is None else sampler
        sampler = sampler.sampler if type(sampler) is BatchSampler else sampler
        found.append(getattr(sampler, "generator", None))
        fixed = isinstance(sampler, SequentialSampler | DistributedSampler | Sequence)
        if not fixed and not isinstance(found[-1], torch.Generator):
            reason = f"its {type(sampler).__name__} draws an order that can not be had again"
    generators = [generator for generator in found if isinstance(generator, torch.Generator)]
    return list(dict.fromkeys(generators)), reason
