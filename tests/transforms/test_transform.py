"""Transforms outside an environment, and several as one."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from ramet.transforms.transform import Compose, Transform


class Add(Transform):
    """Adds n on the way out, takes n away on the way in."""

    def __init__(self, n, **keys):
        super().__init__(**keys)
        self.n = n

    def _apply_transform(self, value):
        return value + self.n

    def _inv_apply_transform(self, value):
        return value - self.n


class Log(Transform):
    """Writes down when it was called."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log = name, log

    def _note(self, what, td):
        self.log.append(f"{what} {self.name}")
        return td

    def _reset_env_preprocess(self, td):
        return self._note("before", td)

    def _inv_call(self, td):
        return self._note("in", td)

    def _call(self, td):
        return self._note("out", td)


def test_keys_are_mapped():
    """In keys to out keys, one to one; in place where no out key is given."""
    td = TensorDict({"x": torch.tensor(1), "y": torch.tensor(2)})
    assert Add(3, in_keys=["x"], out_keys=["z"])(td)["z"] == 4
    assert Add(3, in_keys=["x", "y"])(td)["y"] == 5
    assert Add(3, in_keys_inv=["y"], out_keys_inv=["w"])._inv_call(td)["w"] == 2
    with pytest.raises(ValueError, match="each in key needs one out key"):
        Add(3, in_keys=["x"], out_keys=["y", "z"])


def test_composed_transforms_go_out_in_order_and_in_in_reverse():
    """The last one appended is the outermost, at reset too."""
    log = []
    both, td = Compose(Log("a", log), Log("b", log)), TensorDict({})
    both._reset_env_preprocess(td)
    both._reset(td, td)
    both._inv_call(td)
    both._step(td, td)
    both(td)
    assert log == [
        "before b", "before a", "out a", "out b", "in b", "in a", "out a", "out b", "out a", "out b",
    ]  # fmt: skip
    assert (len(both), both[1].name, [t.name for t in both]) == (2, "b", ["a", "b"])
    both.append(Log("c", log))
    assert both[2].name == "c"
    assert both[2].parent is None
