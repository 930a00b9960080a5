"""Rewards of an episode are added up, row by row, and start over with it."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase
from ramet.envs.llm import LLMEnv
from ramet.ragged import Ragged
from ramet.specs import Composite, Unbounded
from ramet.transforms import Compose, RewardSum, StepCounter


class Pays(EnvBase):
    """The reward is the action; an action of 9 ends the row."""

    def __init__(self, batch_size=(), nested=False):
        super().__init__(batch_size=batch_size)
        self.nested = nested
        number = Unbounded((*batch_size, 1))
        self.observation_spec = Composite({"x": number}, shape=batch_size)
        self.action_spec = number
        rewards = {"reward": number, ("agent", "reward"): Unbounded((*batch_size, 2))} if nested else {"reward": number}
        self.reward_spec = Composite(rewards, shape=batch_size)
        self.done_spec = Composite(shape=batch_size)

    def _reset(self, td):
        return TensorDict({"x": torch.zeros(*td.batch_size, 1)}, td.batch_size)

    def _step(self, td):
        action = td["action"]
        next_td = TensorDict({"x": action, "reward": action, "terminated": action == 9}, td.batch_size)
        if self.nested:
            next_td["agent", "reward"] = torch.cat([action, -action], -1)
        return next_td


def script(*columns):
    steps = iter(zip(*columns, strict=True))
    return lambda td: td.set("action", torch.tensor(next(steps)).float()[:, None])


@pytest.mark.parametrize("reward_spec", [False, True])
def test_the_sum_goes_on_in_a_row_and_starts_over_in_one_that_is_reset(reward_spec):
    """A row that ended is reset in mid-rollout; the other goes on. As a reward, the sum goes on just the same."""
    env = Pays((2,)).append_transform(RewardSum(reward_spec=reward_spec))
    td = env.rollout(4, script([1, 9, 2, 3], [1, 1, 1, 1]), break_when_any_done=False)
    assert td["next", "episode_reward"].squeeze(-1).tolist() == [[1, 10, 2, 5], [1, 2, 3, 4]]
    before = td["episode_reward_so_far" if reward_spec else "episode_reward"]
    assert before.squeeze(-1).tolist() == [[0, 1, 0, 2], [0, 1, 2, 3]]


def test_specs_say_where_the_sum_is():
    """Among the observations, or among the rewards."""
    env = Pays((2,), nested=True).append_transform(RewardSum())
    assert env.transform.in_keys == ["reward", ("agent", "reward")]
    assert env.transform.out_keys == ["episode_reward", ("agent", "episode_reward")]
    assert env.observation_spec["agent", "episode_reward"] == Unbounded((2, 2))
    check_env_specs(env)
    env = Pays((2,)).append_transform(Compose(StepCounter(5), RewardSum(reward_spec=True)))
    assert env.reward_keys == ["reward", "episode_reward"]
    check_env_specs(env)
    check_env_specs(Pays().append_transform(RewardSum(["reward"], ["total"])))


def test_rows_that_are_not_stepped_or_reset_keep_their_sum():
    """A partial step and a partial reset name the rows."""
    env = Pays((2,)).append_transform(RewardSum())
    state = env.step_mdp(env.step(script([3], [4])(env.reset())))
    state = env.step_mdp(env.step(script([1], [1])(state).set("_step", torch.tensor([True, False]))))
    assert state["episode_reward"].tolist() == [[4.0], [4.0]]
    assert env.reset(state.set("_reset", torch.tensor([[False], [True]])))["episode_reward"].tolist() == [[4.0], [0.0]]


def test_stepping_one_state_twice_gives_two_independent_sums():
    """The sum is in the TensorDict, not in the transform."""
    env = Pays((1,)).append_transform(RewardSum())
    state = env.step_mdp(env.step(script([1])(env.reset())))
    found = [env.step(script([n])(state.copy()))["next", "episode_reward"].item() for n in (5, 7)]
    assert found == [6.0, 8.0]
    assert state["episode_reward"].item() == 1.0


def test_a_reset_key_of_ones_own_names_the_rows():
    """For an environment that resets parts of a row by a mask of another name."""
    transform = RewardSum(reset_keys=["mine"])
    td = TensorDict({"episode_reward": torch.tensor([[3.0], [4.0]]), "mine": torch.tensor([True, False])}, [2])
    assert transform._reset(td, TensorDict({}, [2]))["episode_reward"].tolist() == [[0.0], [4.0]]
    assert RewardSum().reset_keys == ["_reset"]


@pytest.mark.parametrize("layout", ["dense", "jagged"])
def test_rewards_for_each_token_are_summed_over_the_tokens(layout):
    """Rows of any length, none included: the sum is one number for each row."""

    class PaysTokens(LLMEnv):
        def _step(self, td):
            next_td = super()._step(td)
            reward = next_td["reward"]
            if not reward.is_nested:
                return next_td.set("reward", reward + 1)
            rows = Ragged.from_jagged(reward)
            return next_td.set("reward", Ragged(rows.values + 1, rows.offsets).jagged())

    lengths = [3, 3] if layout == "dense" else [2, 0]
    rows = [torch.full((n,), 5) for n in lengths]
    action = torch.stack(rows) if layout == "dense" else Ragged.from_rows(rows).jagged()
    prompt = torch.tensor([[1], [2]])
    prompt = prompt if layout == "dense" else Ragged.from_padded(prompt).jagged()
    env = PaysTokens(from_text=False, eos_token_id=9, assign_reward=True).append_transform(RewardSum())
    assert env.observation_spec["episode_reward"] == Unbounded((1,))
    td = env.rollout(2, lambda td: td.set("tokens_response", action), tensordict=TensorDict({"tokens": prompt}, [2]))
    assert td["next", "episode_reward"].squeeze(-1).tolist() == [[n, 2 * n] for n in lengths]


def test_on_replayed_data_it_sums_along_time():
    """Named, else the last dimension; after a step that is done it starts over; flat or under "next"."""
    reward = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[..., None]
    done = torch.tensor([[False, True, False], [False, False, False]])[..., None]
    td = TensorDict({"next": {"reward": reward, "done": done}}, [2, 3])
    assert RewardSum()(td)["next", "episode_reward"].squeeze(-1).tolist() == [[1, 3, 3], [4, 9, 15]]
    flat = TensorDict({"reward": reward}, [2, 3], names=["time", None])
    assert RewardSum()(flat)["episode_reward"].squeeze(-1).tolist() == [[1, 2, 3], [5, 7, 9]]
    env = Pays((2,))
    rollout = env.rollout(4, script([1, 9, 2, 3], [1, 1, 1, 1]), break_when_any_done=False)
    assert RewardSum()(rollout)["next", "episode_reward"].squeeze(-1).tolist() == [[1, 10, 2, 5], [1, 2, 3, 4]]
    jagged = Ragged.from_rows([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]).jagged()
    steps = lazy_stack([TensorDict({"reward": jagged}, [2]) for _ in range(2)], 1)
    assert RewardSum()(steps)["episode_reward"].tolist() == [[[3.0], [6.0]], [[3.0], [6.0]]]


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: RewardSum(["a", "b"], ["c"]), ValueError, "each in key needs one out key"),
        (lambda: RewardSum(["a"], reset_keys=["b", "c"]), ValueError, "one reset key.*'b', 'c'"),
        (lambda: Pays().append_transform(RewardSum(["gain"])), KeyError, r"no 'gain' to add up.*\['reward'\]"),
        (lambda: LLMEnv(from_text=False, eos_token_id=1).append_transform(RewardSum()), KeyError, "no 'reward'"),
        (lambda: RewardSum()(TensorDict({"reward": torch.ones(1)}, [])), ValueError, "needs a dimension of time"),
        (lambda: RewardSum()(TensorDict({}, [2])), KeyError, "no reward 'reward'"),
    ],
)
def test_errors_say_what_is_wrong(act, error, message):
    """Which key, and what there is."""
    with pytest.raises(error, match=message):
        act()


def test_the_sum_of_a_penalised_reward_can_be_taken():
    """Under a key that is an observation of the environment."""

    class Halved(StepCounter):
        def _step(self, td, next_td):
            return next_td.set("half", next_td["reward"] / 2)

        def _reset(self, td, td_reset):
            return td_reset.set("half", torch.zeros(1, 1))

        def transform_observation_spec(self, spec):
            spec["half"] = Unbounded((1, 1))
            return spec

    env = Pays((1,)).append_transform(Halved()).append_transform(RewardSum(["half"]))
    assert env.rollout(2, script([2, 4]))["next", "episode_half"].flatten().tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("dtype", "rewards", "total", "expected"),
    [
        (torch.uint8, [100, 100, 100], 300, torch.int64),
        (torch.int32, [2**31 - 1, 1, 0], 2**31, torch.int64),
        (torch.bool, [True, False, True], 2, torch.int64),
        (torch.bfloat16, [256.0, 1.0, 1.0], 258.0, torch.float32),
        (torch.float16, [60000.0, 60000.0, 0.0], 120000.0, torch.float32),
        (torch.float32, [0.5, 0.25, 1.0], 1.75, torch.float32),
        (torch.float64, [2.0**53, 2.0, 2.0], 2.0**53 + 4, torch.float64),
    ],
)
@pytest.mark.parametrize("reward_spec", [False, True])
def test_a_sum_has_a_dtype_that_holds_it_and_the_spec_says_so(dtype, rewards, total, expected, reward_spec):
    """Integers and flags are counted; short floats are added up in longer ones; on replayed data as well."""

    class Of(Pays):
        def __init__(self):
            super().__init__((1,))
            self.reward_spec = Unbounded((1, 1), dtype=dtype)
            self.steps = iter(rewards * 20)

        def _step(self, td):
            return super()._step(td).set("reward", torch.tensor([[next(self.steps)]], dtype=dtype))

    env = Of().append_transform(RewardSum(reward_spec=reward_spec))
    assert (env.full_reward_spec if reward_spec else env.observation_spec)["episode_reward"].dtype is expected
    td = env.rollout(3)
    found = td["next", "episode_reward"]
    assert (found.dtype, found[0, -1].item()) == (expected, total)
    replayed = RewardSum()(TensorDict({"reward": torch.tensor(rewards, dtype=dtype)[:, None]}, [3]))["episode_reward"]
    assert (replayed.dtype, replayed[-1].item()) == (expected, total)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_rewards_of_tokens_are_added_up_in_a_dtype_that_holds_the_sum(dtype):
    """Jagged ones."""
    rows = [torch.ones(300, dtype=dtype), torch.ones(2, dtype=dtype)]
    td = lazy_stack([TensorDict({"reward": Ragged.from_rows(rows).jagged()}, [2]) for _ in range(2)], 1)
    assert RewardSum()(td)["episode_reward"][..., 0].tolist() == [[300, 600], [2, 4]]
