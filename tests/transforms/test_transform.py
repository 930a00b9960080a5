"""Transforms outside an environment, and several as one."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from ramet.envs.llm import LLMEnv
from ramet.transforms import RewardSum, StepCounter
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


@pytest.mark.parametrize("around", [[], [StepCounter(3)], [StepCounter(3), StepCounter(3, step_count_key="n")]])
def test_a_transform_that_was_refused_may_join_another_environment(around):
    """In an environment without rewards there is nothing to add up; in another one there is."""
    env, refused = LLMEnv(from_text=False, eos_token_id=9), RewardSum()
    for transform in around:
        env = env.append_transform(transform)
    with pytest.raises(KeyError, match="no 'reward' to add up"):
        env.append_transform(refused)
    other = LLMEnv(from_text=False, eos_token_id=9, assign_reward=True).append_transform(refused)
    assert "episode_reward" in other.observation_spec
    with pytest.raises(RuntimeError, match="already part of an environment"):
        env.append_transform(refused)
    assert refused.parent is other.base_env


def test_the_parts_of_a_refused_compose_are_free_again():
    counter, adder = StepCounter(3), RewardSum()
    both = Compose(Compose(counter), adder)
    with pytest.raises(KeyError, match="no 'reward' to add up"):
        LLMEnv(from_text=False, eos_token_id=9).append_transform(both)
    assert (both.parent, counter.parent, adder.parent) == (None, None, None)
    env = LLMEnv(from_text=False, eos_token_id=9, assign_reward=True).append_transform(both)
    assert {"step_count", "episode_reward"} <= set(env.observation_spec.leaves())
