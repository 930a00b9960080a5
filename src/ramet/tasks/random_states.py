"""The global random states of Python and numpy, kept from packages that draw from them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np

_ONE_AT_A_TIME = threading.RLock()


class RandomStates:
    """What the global random states are inside `lent`: they start from `seed`, and go on where they were left.

    Outside they are as they were. One thread at a time is inside; another that draws from them meanwhile, which nothing
    here can keep it from, sees what it should not.

    >>> own = RandomStates(3)
    >>> before = random.getstate()
    >>> with own.lent():
    ...     first = random.random()
    >>> with own.lent():
    ...     second = random.random()
    >>> generator = random.Random(3)
    >>> (first, second) == (generator.random(), generator.random()), random.getstate() == before
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Put these states in the place of the global ones, and the global ones back."""
        with _ONE_AT_A_TIME:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)
