"""The check finds environments that break the contract, and says how."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase
from ramet.specs import Composite, Unbounded
from ramet.transforms.transform import Transform


class Good(EnvBase):
    """Adds the action to what is observed."""

    def __init__(self):
        super().__init__(batch_size=(2,))
        self.observation_spec = Composite({"x": Unbounded((2, 1))}, shape=(2,))
        self.action_spec = Unbounded((2, 1))
        self.reward_spec = Unbounded((2, 1))

    def _reset(self, td):
        return TensorDict({"x": torch.zeros(2, 1)}, [2])

    def _step(self, td):
        return TensorDict({"x": td["x"] + td["action"], "reward": torch.ones(2, 1)}, [2])


class NoObservation(Good):
    def _reset(self, td):
        return TensorDict({}, [2])


class WrongDtype(Good):
    def _step(self, td):
        return super()._step(td).set("x", torch.zeros(2, 1, dtype=torch.float64))


class NoReward(Good):
    def _step(self, td):
        return super()._step(td).exclude("reward")


class DoneAlone(Good):
    def _step(self, td):
        flags = {"done": torch.ones(2, 1), "terminated": torch.zeros(2, 1), "truncated": torch.zeros(2, 1)}
        return super()._step(td).update({key: flag.bool() for key, flag in flags.items()})


class ChangesItsInput(Good):
    def _step(self, td):
        td["x"].add_(1)
        return super()._step(td)


class LosesForeignKeys(Good):
    def reset(self, td=None):
        td = super().reset(td)
        return td.select("x", "done", "terminated", "truncated")


class ResetsEveryRow(Good):
    def _put_back(self, *args, **kwargs):
        pass

    def _reset(self, td):
        return TensorDict({"x": torch.full((2, 1), 7.0)}, [2])


class WrongBatch(Good):
    def __init__(self):
        super().__init__()
        self.observation_spec = Composite({"x": Unbounded((1,))})


class NoAction(Good):
    def __init__(self):
        super().__init__()
        self.action_spec = Composite(shape=(2,))


class TwoOwners(Good):
    def __init__(self):
        super().__init__()
        self.reward_spec = Composite({"x": Unbounded((2, 1))}, shape=(2,))


class FlatFlag(Good):
    def __init__(self):
        super().__init__()
        self.done_spec["done"] = Unbounded((2,), dtype=torch.bool)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NoObservation, "reset: 'x' is missing"),
        (WrongDtype, "step, observation under 'next': 'x': expected .*float32.*, found float64"),
        (NoReward, "step, reward under 'next': 'reward' is missing"),
        (DoneAlone, r"step, under 'next': done must be terminated \| truncated"),
        (ChangesItsInput, "step changed the TensorDict that it was given: 'x' was"),
        (LosesForeignKeys, "reset lost or changed a key that the environment does not own"),
        (ResetsEveryRow, "a partial reset changed a row that it was not to reset: 'x', row 1"),
        (WrongBatch, r"full_observation_spec must have the batch size \(2,\): found \(\)"),
        (NoAction, "action_spec is empty"),
        (TwoOwners, "'x' is in the observation spec and in the reward spec"),
        (FlatFlag, r"the spec of 'done' must be bool of shape \(2, 1\)"),
    ],
)
def test_a_broken_environment_is_found_out(broken, message):
    """With the key and what was wrong."""
    check_env_specs(Good())
    with pytest.raises(AssertionError, match=message):
        check_env_specs(broken())


def test_a_transform_that_lies_about_its_keys_is_found_out():
    """It promises an observation that it does not write."""

    class Lies(Transform):
        def transform_observation_spec(self, spec):
            spec["more"] = Unbounded((2, 1))
            return spec

    with pytest.raises(AssertionError, match="reset: 'more' is missing"):
        check_env_specs(Good().append_transform(Lies()))
