"""The check finds environments that break the contract, and says how."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase
from ramet.envs.hashing import LLMHashingEnv
from ramet.envs.llm import LLMEnv
from ramet.ragged import Ragged
from ramet.specs import Categorical, Composite, Unbounded
from ramet.transforms.step_counter import StepCounter
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


def test_an_environment_that_needs_a_prompt_is_given_one():
    """Whether it says so by a KeyError or, as the one that hashes, by a RuntimeError; what is wrong still comes out."""
    check_env_specs(LLMHashingEnv(10))
    check_env_specs(LLMEnv(from_text=False, eos_token_id=0, vocab_size=5))

    class Broken(Good):
        def _reset(self, td):
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        check_env_specs(Broken())


class Grows(EnvBase):
    """Begins at random and adds one to what is observed; the reward is the action."""

    def __init__(self):
        super().__init__(batch_size=(3,))
        self.count = 0
        self.observation_spec = Composite({"obs": Unbounded((3, 2))}, shape=(3,))
        self.action_spec = Categorical(4, (3, 1))
        self.reward_spec = Unbounded((3, 1))

    def _reset(self, td):
        return TensorDict({"obs": torch.rand(3, 2, generator=self.generator)}, [3])

    def _step(self, td):
        return TensorDict({"obs": td["obs"] + 1, "reward": td["action"].float()}, [3])


class Wanders(Grows):
    """Adds random numbers."""

    def _step(self, td):
        return super()._step(td).set("obs", td["obs"] + torch.rand(3, 2, generator=self.generator))


def grows(base=Grows, **methods):
    return type("Mutant", (base,), methods)


def stepping(change, base=Grows):
    return grows(base, _step=lambda self, td: change(self, td, base._step(self, td)))


def in_part(change, base=Grows):
    """Change what a partial step gives."""

    def step_rows(self, td, mask):
        next_td = base._step_rows(self, td, mask)
        return next_td if mask is None else change(td, next_td)

    return grows(base, _step_rows=step_rows)


def count(self, td, next_td):
    self.count += 1
    return next_td.set("obs", next_td["obs"] + self.count)


def refuse(td, next_td):
    raise ValueError("rows without a mask")


def next_into_input(self, td):
    stepped = Grows.step(self, td)
    td.set("next", stepped["next"])
    return stepped


def reset_into_input(self, td=None):
    state = Grows.reset(self, td)
    if td is not None:
        td.update(state)
    return state


def in_one_buffer(self, td):
    if not hasattr(self, "buffer"):
        self.buffer = torch.zeros(3, 2)
    return TensorDict({"obs": self.buffer.copy_(torch.rand(3, 2, generator=self.generator))}, [3])


def pay_from_one_buffer(self, td, next_td):
    if not hasattr(self, "buffer"):
        self.buffer = torch.zeros(3, 1)
    return next_td.set("reward", self.buffer.copy_(next_td["reward"]))


def reset_nobody(base):
    return lambda self, td, mask: base._reset_rows(self, td, mask) if mask is None else td.copy()


def reset_flags_alone(self, td, mask):
    before = td["obs"] if mask is not None else None
    state = Grows._reset_rows(self, td, mask)
    return state if before is None else state.set("obs", before)


def ended(self, td):
    return Grows._reset(self, td).set("terminated", torch.ones(3, 1, dtype=torch.bool))


SEED_FIXES_NOTHING = "set_seed does not fix what reset draws, which must come from self.generator: 'obs', row 0"
MUTANTS = {
    "global random state": (grows(_reset=lambda self, td: TensorDict({"obs": torch.rand(3, 2)}, [3])),
                            SEED_FIXES_NOTHING),
    "no seed": (grows(set_seed=lambda self, seed: None), SEED_FIXES_NOTHING),
    "global random state in a step": (
        stepping(lambda self, td, out: out.set("obs", torch.rand(3, 2))),
        "stepping one TensorDict twice, after set_seed each time, gave two different results: 'obs', row 0"),
    "hidden state": (stepping(count), "stepping one TensorDict twice, after set_seed each time, gave two different"),
    "reward of rows not stepped": (in_part(lambda td, out: out.set("reward", torch.ones(3, 1) * td["action"][0])),
                                   "a partial step rewarded a row not to be stepped: 'reward', row 1"),
    "nobody is stepped": (in_part(lambda td, out: out.set("obs", td["obs"])),
                          "a partial step did not step the row that it was to step as a whole step does: 'obs', row 0"),
    "nobody is stepped at random": (
        in_part(lambda td, out: out.update(td.select("obs")).set("reward", torch.zeros(3, 1)), Wanders),
        "a partial step did not step the row that it was to step: 'obs', row 0 is as it was"),
    "refusal": (in_part(refuse), "a partial step was refused: rows without a mask"),
    "nobody is reset": (grows(_reset_rows=reset_nobody(Grows)), "row 0 is still done"),
    "only flags are reset": (grows(_reset_rows=reset_flags_alone),
                             "a partial reset did not reset the row that it was to reset: 'obs', row 0 is as it was"),
    "key in no spec": (stepping(lambda self, td, out: out.set("secret", torch.zeros(3, 1))),
                       "step, under 'next': 'secret' is in no spec"),
    "key in no spec at reset": (
        grows(_reset=lambda self, td: Grows._reset(self, td).set("secret", torch.zeros(3, 1))),
        "reset: 'secret' is in no spec"),
    "done at once": (grows(_reset=ended), "reset: a new episode must not be done"),
    "step writes next": (grows(step=next_into_input),
                         r"step changed the TensorDict that it was given: \('next', 'obs'\) is new in it"),
    "reset writes": (grows(reset=reset_into_input), "reset changed the TensorDict that it was given: 'obs' was"),
    "rows mix": (stepping(lambda self, td, out: out.set("obs", out["obs"] + out["obs"][:1])),
                 "rows mix: a row came out otherwise when only the first row was another: 'obs', row 1"),
    "short rollout": (grows(rollout=lambda self, steps, **options: Grows.rollout(self, 1, **options)),
                      "a rollout must go on until a row is done, at most 3 steps: expected 3, has 1"),
    "one buffer": (grows(_reset=in_one_buffer), "reset changed the TensorDict that it was given: 'obs' was"),
    "one buffer of rewards": (stepping(pay_from_one_buffer),
                              "a later reset or step changed the result of an earlier one: .*'reward'"),
    "reward is no number": (stepping(lambda self, td, out: out.set("reward", out["reward"] * float("nan"))),
                            "step, under 'next': 'reward', row 0: a reward must be finite: found"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_out(name):
    """Each keeps its specs, and breaks another line of the contract."""
    mutant, message = MUTANTS[name]
    with pytest.raises(AssertionError, match=message):
        check_env_specs(mutant())


@pytest.mark.parametrize("base", [Grows, Wanders])
def test_what_the_mutants_come_from_is_right(base):
    """With a step that draws numbers too, and beside global random state that is left as it was."""
    before = torch.get_rng_state()
    check_env_specs(base())
    check_env_specs(base().append_transform(StepCounter(3)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("layout", ["dense", "masked", "jagged"])
def test_only_dense_rows_without_a_mask_may_refuse_a_partial_step(layout):
    """As `LLMEnv` does, which steps a part of rows that can grow by different numbers of tokens."""
    tokens = torch.tensor([[1, 2], [3, 4]])
    td = TensorDict({"tokens": tokens}, [2])
    if layout == "masked":
        td["attention_mask"] = torch.ones(2, 2, dtype=torch.bool)
    if layout == "jagged":
        td["tokens"] = Ragged.from_rows([*tokens]).jagged()
    has_mask = layout == "masked"

    class Refuses(LLMEnv):
        def _step_rows(self, td, mask):
            if mask is not None:
                raise ValueError("rows without a mask")
            return super()._step_rows(td, mask)

    check_env_specs(LLMEnv(from_text=False, eos_token_id=9, batch_size=2, has_attention=has_mask), tensordict=td)
    env = Refuses(from_text=False, eos_token_id=9, batch_size=2, has_attention=has_mask)
    if layout == "dense":
        check_env_specs(env, tensordict=td)
    else:
        with pytest.raises(AssertionError, match="a partial step was refused: rows without a mask"):
            check_env_specs(env, tensordict=td)
