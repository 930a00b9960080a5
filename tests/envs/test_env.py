"""The contract of every environment: reset, step, masks, rollout, specs and transforms."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase, TransformedEnv
from ramet.ragged import rows
from ramet.specs import Bounded, Categorical, Composite, Unbounded
from ramet.transforms.step_counter import StepCounter
from ramet.transforms.transform import Compose, Transform


class Walk(EnvBase):
    """A row walks on by 1 or 2 and ends at `goal`; the reward is how far it went."""

    def __init__(self, goal=5, batch_size=(3,), device=None):
        super().__init__(batch_size=batch_size, device=device)
        self.goal = goal
        self.observation_spec = Composite(
            {"at": Unbounded((*batch_size, 1), device, torch.int64)}, shape=batch_size, device=device
        )
        self.action_spec = Bounded(1, 2, (*batch_size, 1), device, torch.int64)
        self.reward_spec = Unbounded((*batch_size, 1), device)

    def _reset(self, td):
        return TensorDict({"at": torch.zeros((*td.batch_size, 1), dtype=torch.int64)}, td.batch_size)

    def _step(self, td):
        at = td["at"] + td["action"]
        return TensorDict({"at": at, "reward": td["action"].float(), "terminated": at >= self.goal}, td.batch_size)


def walk_by(*steps):
    """A policy under which row b goes `steps[b]`."""

    def policy(td):
        td["action"] = torch.tensor(steps)[:, None]

    return policy


def state_of(at, **more):
    flags = {flag: torch.zeros(len(at), 1, dtype=torch.bool) for flag in ("done", "terminated", "truncated")}
    return TensorDict({"at": torch.tensor(at)[:, None], **flags, **more}, [len(at)])


def test_the_contract_holds():
    """As the check that every author runs sees it, with a batch, without, with two dimensions, on a named device."""
    check_env_specs(Walk())
    check_env_specs(Walk(batch_size=()))
    check_env_specs(Walk(batch_size=(2, 2)))
    check_env_specs(Walk(device="cpu"))
    check_env_specs(Walk().append_transform(StepCounter(2)))


def test_specs_in_every_form():
    """The full forms are composites of all keys, the short ones the leaf where there is one."""
    env = Walk()
    assert env.full_action_spec["action"] == env.action_spec == Bounded(1, 2, (3, 1), dtype=torch.int64)
    assert env.full_reward_spec["reward"] == env.reward_spec == Unbounded((3, 1))
    assert env.observation_spec == env.full_observation_spec
    assert env.done_spec == env.full_done_spec
    flag = Categorical(2, (3, 1), dtype=torch.bool)
    assert [env.done_spec[key] for key in ("done", "terminated", "truncated")] == [flag] * 3
    assert (env.action_keys, env.reward_keys) == (["action"], ["reward"])
    assert sorted(env.done_keys) == ["done", "terminated", "truncated"]
    assert (env.batch_size, env.device) == (torch.Size([3]), None)
    fake = env.fake_tensordict()
    assert set(fake.keys()) == {"at", "action", "done", "terminated", "truncated", "next"}
    assert set(fake["next"].keys()) == {"at", "reward", "done", "terminated", "truncated"}


def test_flags_are_completed():
    """Bool of shape (*B, 1), `done` is `terminated | truncated`; a bare `done` is an end, not a cut."""
    env = Walk()
    state = env.reset()
    next_td = env.step(walk_by(2, 2, 2)(state_ := state_of([4, 0, 4])) or state_)["next"]
    for td, ended in ((state, [False] * 3), (next_td, [True, False, True])):
        for flag, expected in (("done", ended), ("terminated", ended), ("truncated", [False] * 3)):
            assert td[flag].dtype is torch.bool
            assert td[flag].tolist() == [[value] for value in expected]

    class OnlyDone(Walk):
        def _step(self, td):
            return super()._step(td).rename_key_("terminated", "done")

    next_td = OnlyDone().rand_step(state_of([4, 0, 4]))["next"]
    assert next_td["terminated"].tolist() == next_td["done"].tolist() == [[True], [False], [True]]
    assert not next_td["truncated"].any()


def test_inputs_are_left_alone_and_foreign_keys_survive():
    """Reset and step give back labels, and put nothing into what they were given."""
    env = Walk()
    given = TensorDict({"label": torch.arange(3), "deep": {"id": torch.arange(3)}}, [3]).lock_()
    state = env.reset(given)
    assert set(given.keys()) == {"label", "deep"}
    acted = env.rand_action(state.copy()).lock_()
    td = env.step(acted)
    assert "next" not in acted.keys()  # noqa: SIM118
    after = env.step_mdp(td)
    for found in (state, td, after):
        assert found["label"].tolist() == found["deep", "id"].tolist() == [0, 1, 2]
    assert set(after.keys()) == {"label", "deep", "at", "done", "terminated", "truncated"}


def test_stepping_twice_gives_two_results():
    """The second step of one state neither sees nor changes the first."""
    env = Walk()
    state = env.reset()
    walk_by(1, 1, 1)(state)
    one = env.step(state)
    walk_by(2, 2, 2)(state)
    two = env.step(state)
    assert one["next", "at"].tolist() == [[1]] * 3
    assert two["next", "at"].tolist() == [[2]] * 3


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_reset_mask_touches_only_its_rows(shape):
    """Whatever the author's reset returns for the others."""
    env = Walk()
    state = state_of([4, 5, 6], label=torch.arange(3))
    state["done"] = state["terminated"] = torch.tensor([[True], [True], [False]])
    state["_reset"] = torch.tensor([True, False, False]).view(shape)
    out = env.reset(state)
    assert out["at"].tolist() == [[0], [5], [6]]
    assert out["done"].tolist() == out["terminated"].tolist() == [[False], [True], [False]]
    assert out["label"].tolist() == [0, 1, 2]
    assert "_reset" not in out.keys()  # noqa: SIM118


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_step_mask_steps_only_its_rows(shape):
    """The others keep state and flags and get no reward."""
    env = Walk().append_transform(StepCounter(4))
    state = state_of([4, 4, 4], step_count=torch.tensor([[1], [2], [3]]))
    state["done"] = state["terminated"] = torch.tensor([[False], [True], [False]])
    walk_by(1, 1, 1)(state)
    state["_step"] = torch.tensor([True, False, False]).view(shape)
    out = env.step(state)
    assert "_step" not in out.keys()  # noqa: SIM118
    assert out["next", "at"].tolist() == [[5], [4], [4]]
    assert out["next", "reward"].tolist() == [[1], [0], [0]]
    assert out["next", "done"].tolist() == out["next", "terminated"].tolist() == [[True], [True], [False]]
    assert out["next", "step_count"].tolist() == [[2], [2], [3]]
    assert not out["next", "truncated"].any()


def test_masks_that_are_no_masks_are_refused():
    """Shape and dtype are named."""
    env = Walk()
    with pytest.raises(ValueError, match=r"'_reset' must be bool of shape \(3,\) or \(3, 1\): found int64 tensor"):
        env.reset(state_of([1, 2, 3], _reset=torch.ones(3, dtype=torch.int64)))
    with pytest.raises(ValueError, match="'_step' must be bool"):
        env.rand_step(state_of([1, 2, 3], _step=torch.ones(3, 2, dtype=torch.bool)))


def test_a_locked_batch_takes_no_other():
    """Reset, step and rand_action name both sizes."""
    env = Walk()
    for call in (env.reset, env.step, env.rand_action):
        with pytest.raises(ValueError, match=r"batch size \(3,\), as of the environment: found \(2,\)"):
            call(state_of([1, 2]))


def test_a_seed_fixes_the_actions():
    """Equal seeds, equal rollouts; the global state of torch stays where it is."""
    before = torch.get_rng_state()
    env = Walk(goal=50).append_transform(StepCounter())
    played = []
    for seed in (1, 1, 2):
        env.set_seed(seed)
        played.append(env.rollout(20)["action"])
    assert torch.equal(played[0], played[1])
    assert not torch.equal(played[0], played[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_set_seed_reaches_author_and_transforms():
    """Each is told the seed once."""
    told = []

    class Seeded(Walk):
        def _set_seed(self, seed):
            told.append(("env", seed))

    class Told(Transform):
        def set_seed(self, seed):
            told.append(("transform", seed))

    Seeded().append_transform(Told()).append_transform(Told()).set_seed(3)
    assert told == [("env", 3), ("transform", 3), ("transform", 3)]


# Rollouts.


def test_a_rollout_ends_with_the_first_row_that_is_done():
    """[B, T], the state of each step followed by its result, each seen by the callback."""
    seen = []
    td = Walk().rollout(9, walk_by(1, 2, 1), lambda env, step: seen.append((env.goal, step["at"].flatten().tolist())))
    assert td.batch_size == (3, 3)
    assert td["at"].squeeze(-1).tolist() == [[0, 1, 2], [0, 2, 4], [0, 1, 2]]
    assert td["next", "at"].squeeze(-1).tolist() == [[1, 2, 3], [2, 4, 6], [1, 2, 3]]
    assert td["next", "done"].squeeze(-1).tolist() == [[False] * 3, [False, False, True], [False] * 3]
    assert seen == [(5, [0, 0, 0]), (5, [1, 2, 1]), (5, [2, 4, 2])]


def test_a_rollout_goes_on_with_rows_reset():
    """`break_when_any_done=False` resets the rows that ended and no others."""
    td = Walk().rollout(5, walk_by(1, 2, 2), break_when_any_done=False)
    assert td["at"].squeeze(-1).tolist() == [[0, 1, 2, 3, 4], [0, 2, 4, 0, 2], [0, 2, 4, 0, 2]]
    assert td["next", "at"].squeeze(-1).tolist() == [[1, 2, 3, 4, 5], [2, 4, 6, 2, 4], [2, 4, 6, 2, 4]]


def test_a_rollout_leaves_ended_rows_alone_until_all_have_ended():
    """`break_when_all_done=True`: an ended row keeps its state, gets no reward, and stays done."""
    td = Walk(goal=4).rollout(9, walk_by(1, 2, 2), break_when_all_done=True)
    assert td.batch_size == (3, 4)
    assert td["next", "at"].squeeze(-1).tolist() == [[1, 2, 3, 4], [2, 4, 4, 4], [2, 4, 4, 4]]
    assert td["next", "reward"].squeeze(-1).tolist() == [[1, 1, 1, 1], [2, 2, 0, 0], [2, 2, 0, 0]]
    assert td["done"].squeeze(-1).tolist() == [[False] * 4, [False, False, True, True], [False, False, True, True]]


def test_set_truncated_marks_the_rows_still_going():
    """A row that ended is not cut, and a row that is cut did not end."""
    td = Walk(goal=4).rollout(3, walk_by(1, 2, 1), break_when_all_done=True, set_truncated=True)
    last = td[:, -1]["next"]
    assert last["terminated"].tolist() == [[False], [True], [False]]
    assert last["truncated"].tolist() == [[True], [False], [True]]
    assert last["done"].all()
    assert not td[:, :-1]["next", "truncated"].any()
    assert not Walk(goal=2).rollout(2, walk_by(1, 1, 1), set_truncated=True)["next", "truncated"].any()


def test_a_rollout_can_begin_in_a_given_state():
    """Without auto_reset, and leaves that state alone; a policy may return another TensorDict."""
    env, state = Walk(), state_of([3, 0, 0])
    td = env.rollout(2, lambda td: walk_by(1, 1, 1)(other := td.copy()) or other, auto_reset=False, tensordict=state)
    assert td["next", "at"].squeeze(-1).tolist() == [[4, 5], [1, 2], [1, 2]]
    assert "action" not in state.keys()  # noqa: SIM118
    with pytest.raises(ValueError, match="needs the first state"):
        env.rollout(2, auto_reset=False)
    with pytest.raises(ValueError, match="at least 1: found 0"):
        env.rollout(0)


def test_step_and_maybe_reset_keeps_the_result_and_starts_over():
    """The result says how the episode ended; the state is that of the next one."""
    env, state = Walk(), state_of([4, 0, 4])
    walk_by(1, 1, 1)(state)
    td, following = env.step_and_maybe_reset(state)
    assert td["next", "at"].tolist() == [[5], [1], [5]]
    assert following["at"].tolist() == [[0], [1], [0]]
    assert not following["done"].any()


# Transforms around an environment.


class Shift(Transform):
    """Observations 10 higher, actions one lower on the way in."""

    def __init__(self):
        super().__init__(in_keys=["at"], in_keys_inv=["action"])

    def _apply_transform(self, value):
        return value + 10

    def _inv_apply_transform(self, value):
        return value - 1

    def transform_action_spec(self, spec):
        spec["action"] = Bounded(2, 3, spec["action"].shape, spec.device, torch.int64)
        return spec


class Stateless(Walk):
    """A walk that does not look at what it is shown, so that may be changed on the way out."""

    def _step(self, td):
        return super()._step(td.copy().set("at", torch.zeros_like(td["at"])))


def test_a_transform_changes_what_goes_in_and_comes_out():
    """Actions reach the environment changed, and stay in the result as they were given."""
    env = Stateless().append_transform(Shift())
    assert isinstance(env, TransformedEnv)
    assert env.action_spec == Bounded(2, 3, (3, 1), dtype=torch.int64)
    assert env.base_env.action_spec == Bounded(1, 2, (3, 1), dtype=torch.int64)
    state = env.reset()
    assert state["at"].tolist() == [[10]] * 3
    walk_by(3, 3, 2)(state)
    td = env.step(state)
    assert td["next", "at"].tolist() == [[12], [12], [11]]
    assert td["action"].tolist() == [[3], [3], [2]]
    check_env_specs(env)


def test_transforms_are_appended_at_the_outer_end():
    """In order, on the environment itself; each sees the environment as it is before it, and belongs to one."""
    base, first, second, third = Walk(), StepCounter(3), Shift(), StepCounter(step_count_key="more")
    env = base.append_transform(first)
    assert env.transform is first
    assert env.append_transform(second) is env
    env.append_transform(third)
    assert list(env.transform) == [first, second, third]
    assert env.base_env is base
    assert first.parent is base
    assert set(second.parent.observation_spec.leaves()) == {"at", "step_count"}
    assert third.parent.action_spec == Bounded(2, 3, (3, 1), dtype=torch.int64)
    assert set(env.observation_spec.leaves()) == {"at", "step_count", "more"}
    with pytest.raises(RuntimeError, match="already part of an environment"):
        Walk().append_transform(first)


def test_moving_to_a_device_moves_specs_and_inputs():
    """The result is on the environment's device."""
    env = Walk().append_transform(StepCounter()).to("cpu")
    assert env.device == torch.device("cpu")
    assert env.observation_spec["at"].device == torch.device("cpu")
    assert env.reset(TensorDict({"label": torch.arange(3)}, [3])).device == torch.device("cpu")


class Renamed(Transform):
    """The reward under another key, and one action more."""

    def __init__(self):
        super().__init__(in_keys=["reward"], out_keys=["gain"])

    def _step(self, td, next_td):
        return next_td.set(self.out_keys[0], next_td.pop(self.in_keys[0]))

    def transform_action_spec(self, spec):
        spec["other"] = spec["action"]
        return spec

    def transform_reward_spec(self, spec):
        spec[self.out_keys[0]] = spec[self.in_keys[0]]
        del spec[self.in_keys[0]]
        return spec


def test_keys_follow_what_is_appended_and_set():
    """Whoever asked before: after a transform is appended, inside another too, or its keys change, or a spec is set."""
    env = Walk().append_transform(StepCounter())
    assert (env.action_keys, env.consumed_keys, env.reward_keys) == (["action"], ["action"], ["reward"])
    renamed = Renamed()
    env.append_transform(renamed)
    assert (env.action_keys, env.consumed_keys, env.reward_keys) == (["action", "other"], ["action", "other"], ["gain"])
    renamed.out_keys[0] = "won"
    assert env.reward_keys == ["won"]
    more = Composite({key: Unbounded((3, 1)) for key in ("reward", "bonus")}, shape=[3])
    env.base_env.reward_spec = more
    assert sorted(env.reward_keys) == ["bonus", "won"]
    more["third"] = Unbounded((3, 1))
    assert sorted(env.reward_keys) == ["bonus", "third", "won"]
    env.reward_keys.clear()
    assert sorted(env.reward_keys) == ["bonus", "third", "won"]

    inner = Compose(StepCounter())
    nested = Walk().append_transform(Compose(inner))
    assert nested.reward_keys == ["reward"]
    inner.append(Renamed())
    assert nested.reward_keys == ["gain"]


def test_keys_are_not_made_anew_at_each_step():
    """However many steps are played, the specs are transformed a few times."""
    asked = []

    class Asked(StepCounter):
        def transform_reward_spec(self, spec):
            asked.append("reward")
            return super().transform_reward_spec(spec)

        def transform_action_spec(self, spec):
            asked.append("action")
            return super().transform_action_spec(spec)

    env = Walk(goal=1000).append_transform(Asked())
    env.rollout(5, walk_by(1, 1, 1))
    before = len(asked)
    env.rollout(50, walk_by(1, 1, 1), break_when_all_done=True)
    assert before <= 4
    assert len(asked) == before


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("form", ["plain", "named", "nested", "stack"])
def test_the_next_state_is_what_came_back_and_what_nobody_owns(device, form):
    """In every form of TensorDict: without action, reward and "next"; what was stepped is left as it was."""
    env = Walk(device=device)
    state = env.reset(TensorDict({"label": torch.arange(3), "at": torch.zeros(3, 1), "words": ["a", "b", "c"]}, [3]))
    if form == "named":
        state.names = ["row"]
    if form == "nested":
        state["more", "inner"] = torch.ones(3)
    if form == "stack":
        state = lazy_stack(list(state.unbind(0)), 0)
    walk_by(1, 2, 1)(state)
    td = env.step(state)
    if form == "nested":
        td["next", "more"] = TensorDict({"added": torch.zeros(3)}, [3])
    keys = set(td.keys(True))
    after = env.step_mdp(td)
    assert set(td.keys(True)) == keys
    names = {"label", "words", "at", "done", "terminated", "truncated"} | ({"more"} if form == "nested" else set())
    assert set(after.keys()) == names
    assert after["at"].tolist() == [[1], [2], [1]]
    assert after["label"].tolist() == [0, 1, 2]
    assert rows(after, "words") == ["a", "b", "c"]
    assert after.device == state.device
    assert after.batch_size == torch.Size([3])
    if form == "named":
        assert after.names == ["row"]
    if form == "nested":
        assert set(after["more"].keys()) == {"inner", "added"}
        assert set(td["more"].keys()) == {"inner"}
        after["more", "inner"] = torch.zeros(3)
        assert td["more", "inner"].tolist() == [1, 1, 1]
    after["words"] = ["x", "y", "z"]
    after["at"] = torch.zeros(3, 1)
    assert rows(td, "words") == ["a", "b", "c"]
    assert td["next", "at"].tolist() == [[1], [2], [1]]


def test_rows_still_going_are_marked_when_another_row_ends_the_rollout():
    """Every row of a rollout that says `set_truncated` ends, of its own or cut."""
    rollout = Walk().rollout(9, walk_by(1, 1, 2), set_truncated=True)
    last = rollout["next"][:, -1]
    assert last["terminated"].any()
    assert not last["terminated"].all()
    assert last["truncated"].tolist() == (~last["terminated"]).tolist()
    assert last["done"].all()


def test_a_copy_that_was_pickled_goes_on_with_the_same_random_numbers():
    env = Walk().append_transform(StepCounter())
    env.set_seed(3)
    copied = pickle.loads(pickle.dumps(env))
    assert copied.generator is copied.base_env.generator
    state = env.reset()
    assert copied.rand_action(state.copy())["action"].tolist() == env.rand_action(state.copy())["action"].tolist()
