"""What a TensorDict holds of a column such as a text: non-tensor data that is unread until more of it is wanted.

A column is B values that need not be there yet: what has `tolist`, `where` and a length.

Both classes are as good as a plain `NonTensorStack` or `NonTensorData`: whatever is asked of an object beyond the few
things that it can do unread turns it into one. So nothing here knows how tensordict works on its data.
"""

from __future__ import annotations

import copyreg
from typing import Any, Protocol

import torch
from tensordict import NonTensorData, NonTensorStack
from tensordict.utils import LinkedList
from torch import Tensor

# Special methods that Python looks for in the class, past `__getattribute__`; these are not about an object's data.
_OTHER = {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__torch_function__"}
_OTHER |= {"__class__", "__getattribute__", "__getattr__", "__hash__", "__dir__", "__sizeof__"}


class Column(Protocol):
    """B values that are made when they are read, and never changed."""

    def __len__(self) -> int:
        """How many values there are."""

    def tolist(self) -> list[Any]:
        """Return the values."""

    def where(self, mask: Tensor, other: Any) -> Any:
        """Return a column of these values where `mask` [B] is true, of those of `other`, of this kind, elsewhere."""


class Strings(NonTensorStack):
    """The strings, or other values, of a batch [B], as a TensorDict holds them."""


class String(NonTensorData):
    """One string, or another value, as a TensorDict without a batch holds it."""


def entry_of(column: Column, batch: bool, device: torch.device | None = None) -> Any:
    """Make the entry of a column."""
    made: Any = object.__new__(Strings if batch else String)
    vars(made).update(column=column, device=device)
    return made


def column_of(value: Any) -> Any:
    """Return the column of an entry that is unread still; None for any other value."""
    return vars(value)["column"] if type(value) in (Strings, String) else None


class _Unread:
    """What an entry of either kind can do unread. No base class: an entry must be laid out as what it turns into."""

    _is_non_tensor = True

    @property
    def device(self) -> torch.device | None:
        """The device that a plain entry would name."""
        device: torch.device | None = vars(self)["device"]
        return device

    @property
    def batch_size(self) -> torch.Size:
        """(B,), or () without a batch."""
        return torch.Size([len(vars(self)["column"])] if type(self) is Strings else [])

    shape = batch_size

    def _has_names(self) -> bool:
        return False

    def _clone(self, recurse: bool = True) -> Any:
        return entry_of(vars(self)["column"], type(self) is Strings, self.device)

    def clone(self, recurse: bool = True, **options: Any) -> Any:
        """Return another entry of the text."""
        return _read(self).clone(recurse, **options) if options else self._clone(recurse)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move to a device; anything else is for a plain entry."""
        given = (*args, kwargs.get("device"))[0]
        if len(args) > 1 or not isinstance(given, str | torch.device) or kwargs.keys() - {"device", "non_blocking"}:
            return _read(self).to(*args, **kwargs)
        return entry_of(vars(self)["column"], type(self) is Strings, torch.device(given))

    def tolist(self, *, as_linked_list: bool = False, **options: Any) -> Any:
        """Return the strings; the other options of tensordict are for tensors. Without a batch, the one string."""
        entry: Any = self
        strings = vars(entry)["column"].tolist()
        if type(entry) is String:
            return strings[0]
        return LinkedList(strings, td=entry) if as_linked_list else strings

    data = property(tolist)

    def __repr__(self) -> str:
        return repr(_plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = _plain(self)  # what is saved is plain: it loads without this library
        return copyreg._reconstructor, (type(plain), object, None), plain.__reduce_ex__(2)[2]  # type: ignore[attr-defined]


def _plain(value: Any) -> Any:
    """Make the plain entry that `value` stands for."""
    device, items = value.device, vars(value)["column"].tolist()
    if type(value) is String:
        return NonTensorData(items[0], device=device)
    # A list would become a stack of what is in it.
    stack = NonTensorStack(*[item if type(item) is str else NonTensorData(item) for item in items])
    return stack if device is None else stack.to(device)


def _read(value: Any) -> Any:
    """Turn an entry into the plain one that it stands for."""
    plain, fields = _plain(value), vars(value)
    object.__setattr__(value, "__class__", type(plain))
    fields.clear()
    fields.update(vars(plain))
    return value


def _finish(cls: Any, plain: Any, without: set[str]) -> None:
    """Give `cls` what it can do unread; let its objects become a `plain` when they are asked for anything else."""
    kept = {"__class__", "__dict__"}
    for name, value in vars(_Unread).items():
        if name not in without and name not in ("__module__", "__doc__", "__dict__", "__weakref__"):
            setattr(cls, name, value)
            kept.add(name)

    def look_up(value: Any, name: str) -> Any:
        return object.__getattribute__(value, name) if name in kept else getattr(_read(value), name)

    def torch_function(
        cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        types = tuple(plain if kind is cls else kind for kind in types)
        return plain.__torch_function__(func, types, args, kwargs)

    def special(name: str) -> Any:
        return lambda value, *args, **kwargs: getattr(_read(value), name)(*args, **kwargs)

    for name in dir(plain):
        if name.startswith("__") and name not in _OTHER | kept and callable(getattr(plain, name)):
            setattr(cls, name, special(name))
    cls.__getattribute__ = look_up
    cls.__torch_function__ = classmethod(torch_function)
    # What tensordict makes of the type of an entry is plain from the start.
    cls.__new__ = lambda cls, *args, **kwargs: plain(*args, **kwargs) if args or kwargs else plain.__new__(plain)


_finish(Strings, NonTensorStack, {"data"})
_finish(String, NonTensorData, set())
