"""The penalty for leaving a reference: a Gaussian policy on a control task, tokens in every layout, replayed data."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
    set_interaction_type,
)
from tensordict.nn.probabilistic import InteractionType
from torch import nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence

from ramet import ragged
from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase
from ramet.envs.llm import LLMEnv
from ramet.errors import RewardError
from ramet.ragged import Ragged
from ramet.specs import Bounded, Composite, NonTensor, Unbounded
from ramet.transforms import Compose, KLRewardTransform, RewardSum, StepCounter
from ramet.transforms.placement import share, subtract


class PointMass(EnvBase):
    """A mass in the plane, pushed by a force: it is to rest at the origin, and the episode ends when it is far away."""

    def __init__(self, batch_size=(), reward_dtype=torch.float32, **options):
        super().__init__(batch_size=batch_size, **options)
        self.observation_spec = Composite({"observation": Unbounded((*batch_size, 4))}, shape=batch_size)
        self.action_spec = Unbounded((*batch_size, 2))
        self.reward_spec = Unbounded((*batch_size, 1), dtype=reward_dtype)
        self.done_spec = Composite(shape=batch_size)

    def _reset(self, td):
        state = torch.randn((*td.batch_size, 4), generator=self.generator)
        return TensorDict({"observation": state}, td.batch_size)

    def _step(self, td):
        state, force = td["observation"], td["action"]
        speed = state[..., 2:] + 0.1 * force.float()
        place = state[..., :2] + 0.1 * speed
        reward = -place.square().sum(-1, keepdim=True) - 0.1 * force.square().sum(-1, keepdim=True)
        next_td = {
            "observation": torch.cat([place, speed], -1),
            "reward": reward.to(self.reward_spec.dtype),
            "terminated": place.norm(dim=-1, keepdim=True) > 5,
        }
        return TensorDict(next_td, td.batch_size)


def joint(loc, scale):
    return Independent(Normal(loc, scale), 1)


def gaussian(seed=0, distribution=joint, **names):
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4), NormalParamExtractor())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    sample = ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["action"],
        distribution_class=distribution,
        return_log_prob=True,
        default_interaction_type="random",
        **names,
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(net, ["observation"], ["loc", "scale"]), sample).eval()


def moved(actor, by=0.5):
    """Change the weights in place, as an optimizer does."""
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(by)
    return actor


class Fixed:
    """A reference that is no module: log-probs as they are in the TensorDict under "reference"."""

    log_prob_key, in_keys = "log_probs", ("tokens_response",)

    def __init__(self, mask_key=None):
        self.mask_key = mask_key

    def log_prob(self, td):
        if isinstance(td, LazyStackedTensorDict):
            return Ragged.from_rows(ragged.rows(td, "reference")).jagged()
        return td["reference"]


def transform(coef=1.0, **options):
    return KLRewardTransform(Fixed(options.pop("mask_key", None)), coef, action_key="tokens_response", **options)


def token_td(current, reference, reward, size, **more):
    response = torch.zeros_like(current, dtype=torch.int64)
    next_td = TensorDict({} if reward is None else {"reward": reward}, size)
    entries = {"tokens_response": response, "log_probs": current, "reference": reference, "next": next_td}
    return TensorDict({**entries, **more}, size)


def jagged(rows, column=False):
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    made = Ragged.from_rows(tensors)
    return (Ragged(made.values[:, None], made.offsets) if column else made).jagged()


# A Gaussian policy in closed form.


def test_the_expected_penalty_is_the_exact_kl_of_two_gaussians():
    """Log-ratios of Gaussians are quadratic: Gauss-Hermite nodes give their mean without any noise."""
    actor = gaussian().double()
    kl_reward = KLRewardTransform(actor, 0.7, action_key="action")
    moved(actor, 0.1)
    state = torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=torch.float64)
    with torch.no_grad():
        now = actor.get_dist(TensorDict({"observation": state}, []))
        frozen = kl_reward.functional_actor.get_dist(TensorDict({"observation": state}, []))
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    x, y = torch.meshgrid(torch.tensor(nodes), torch.tensor(nodes), indexing="ij")
    weight = torch.outer(torch.tensor(weights), torch.tensor(weights)).flatten() / (2 * math.pi)
    action = now.base_dist.loc + now.base_dist.scale * torch.stack([x.flatten(), y.flatten()], -1)
    td = TensorDict(
        {
            "observation": state.expand(25, 4),
            "action": action,
            "action_log_prob": now.log_prob(action),
            "next": TensorDict({"reward": torch.full((25, 1), 2.0, dtype=torch.float64)}, [25]),
        },
        [25],
    )
    reward = kl_reward(td)["next", "reward"]
    exact = kl_divergence(now, frozen)
    assert exact > 0.1
    torch.testing.assert_close((weight * reward.squeeze(-1)).sum(), 2.0 - 0.7 * exact)


def test_pushing_the_policy_away_lowers_the_reward_on_average():
    """And the further, the lower; at the reference itself nothing is taken."""
    means = []
    for by in (0.0, 0.1, 0.3):
        actor = gaussian()
        kl_reward = KLRewardTransform(actor, action_key="action")
        moved(actor, by)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            td = actor(TensorDict({"observation": torch.zeros(2000, 4)}, [2000]))
        means.append(kl_reward(td.set("next", TensorDict({}, [2000])))["next", "reward"].mean().item())
    assert means[0] == 0.0
    assert means[0] > means[1] > means[2]


@pytest.mark.parametrize("size", [(), (3,), (2, 3)])
def test_a_gaussian_policy_in_an_environment(size):
    """The reward of each step is the environment's less the log-ratio; reset writes zeros under the new key."""
    actor = gaussian()
    env = PointMass(size).append_transform(KLRewardTransform(actor, 0.5, out_keys=["reward_kl"]))
    reference = copy.deepcopy(actor)
    moved(actor)
    assert env.observation_spec["reward_kl"] == Unbounded((*size, 1))
    assert env.reward_keys == ["reward"]
    reset = env.reset()
    assert reset["reward_kl"].shape == (*size, 1)
    assert not reset["reward_kl"].any()
    with torch.no_grad():
        td = env.rollout(4, actor)
    assert td.batch_size == (*size, 4)
    expected = td["next", "reward"] - 0.5 * (td["action_log_prob"] - reference.log_prob(td.copy()))[..., None].detach()
    torch.testing.assert_close(td["next", "reward_kl"], expected)
    assert (td["next", "reward_kl"] != td["next", "reward"]).all()
    assert td["reward_kl"][..., 1:, :].equal(td["next", "reward_kl"][..., :-1, :])
    assert "loc" in td  # the actor's own, not the reference's
    assert not torch.equal(td["loc"], reference(td.copy())["loc"])


@pytest.mark.parametrize("out", [None, ["reward_kl"]])
@pytest.mark.parametrize("locked", [True, False])
def test_the_environment_keeps_its_contract(out, locked):
    """Checked with random actions: a policy's log-probs are written by a transform before."""
    actor = gaussian()
    size = (3,) if locked else ()
    env = PointMass(size, batch_locked=locked)
    env = env.append_transform(WritesLogProbs(actor)).append_transform(KLRewardTransform(actor, out_keys=out))
    check_env_specs(env)
    if not locked:
        check_env_specs(env, tensordict=TensorDict({}, [2]))


class WritesLogProbs(StepCounter):
    """Lets random actions have log-probs."""

    def __init__(self, actor):
        super().__init__()
        self.__dict__["actor"] = actor

    def _inv_call(self, td):
        with torch.no_grad():
            return td.set("action_log_prob", self.actor.log_prob(td.copy()))


def test_in_compose_and_with_what_comes_after():
    """The penalised reward is what the next transform sees."""
    actor = gaussian()
    kl_reward = KLRewardTransform(actor)
    moved(actor)
    env = PointMass((2,)).append_transform(Compose(StepCounter(3), kl_reward, RewardSum()))
    assert kl_reward.action_key == "action"
    with torch.no_grad():
        td = env.rollout(10, actor)
    assert td.batch_size == (2, 3)
    torch.testing.assert_close(td["next", "episode_reward"], td["next", "reward"].cumsum(1))
    bare = KLRewardTransform(moved(gaussian()), action_key="action")
    composed = Compose(bare)(td.clone())
    torch.testing.assert_close(composed["next", "reward"], td["next", "reward"])


def test_a_partial_step_and_a_partial_reset_leave_rows_alone():
    """Rows that are not stepped get no reward, rows that are not reset keep what they had."""
    actor = gaussian()
    env = PointMass((2,)).append_transform(KLRewardTransform(actor, out_keys=["reward_kl"]))
    moved(actor)
    with torch.no_grad():
        state = env.step_mdp(env.step(actor(env.reset())))
        before = state["reward_kl"].clone()
        assert before.all()
        reset = env.reset(state.copy().set("_reset", torch.tensor([True, False])))
        assert reset["reward_kl"].tolist() == [[0.0], before[1].tolist()]
        stepped = env.step(actor(state).set("_step", torch.tensor([True, False])))["next"]
    assert stepped["reward_kl"][1] == before[1]
    assert stepped["reward"][1] == 0
    assert stepped["reward_kl"][0] != before[0]


def test_as_a_module_and_on_replayed_data():
    """Time-batched, dense or lazily stacked, with "next" or flat: the same numbers."""
    actor = gaussian()
    kl_reward = KLRewardTransform(actor, action_key="action", out_keys=["r"])
    moved(actor)
    with torch.no_grad():
        lazy = PointMass((2,)).rollout(3, actor)
    dense = lazy.contiguous() if hasattr(lazy, "contiguous") else lazy
    one_by_one = torch.stack([kl_reward(step.copy())["next", "r"] for step in lazy.unbind(1)], 1)
    assert one_by_one.shape == (2, 3, 1)
    torch.testing.assert_close(kl_reward(dense.copy())["next", "r"], one_by_one)
    torch.testing.assert_close(kl_reward(lazy)["next", "r"], one_by_one)
    flat = dense.exclude("next").set("reward", dense["next", "reward"])
    torch.testing.assert_close(kl_reward(flat)["r"], one_by_one)
    rows = dense.reshape(6)[torch.tensor([4, 0])]
    torch.testing.assert_close(kl_reward(rows)["next", "r"], one_by_one.reshape(6, 1)[torch.tensor([4, 0])])


def test_log_probs_of_the_numbers_of_an_action_are_summed():
    """A Normal that was not made Independent gives one for each number: they are of one action."""
    actor, whole_actor = gaussian(distribution=Normal), gaussian()
    pair = [KLRewardTransform(a, action_key="action") for a in (actor, whole_actor)]
    observation = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, -1.0]])
    with torch.no_grad():
        td = moved(actor)(TensorDict({"observation": observation}, [2]))
        assert td["action_log_prob"].shape == (2, 2)
        td["next"] = TensorDict({"reward": torch.ones(2, 1)}, [2])
        other = td.copy().set("action_log_prob", td["action_log_prob"].sum(-1))
    got, expected = pair[0](td)["next", "reward"], pair[1](other.set("next", td["next"].clone()))["next", "reward"]
    assert got.shape == (2, 1)
    assert (expected != 1).all()
    bare = KLRewardTransform(gaussian(), action_key="action")(
        other.set("next", TensorDict({"reward": torch.ones(2, 1)}, [2]))
    )["next", "reward"]
    torch.testing.assert_close(got, bare)


@pytest.mark.parametrize("aggregate", [True, False])
def test_a_composite_distribution_is_asked_as_a_whole(aggregate):
    """Its log-prob is a number for each row, or an entry for each of its actions, of which one is named."""
    params = ("params", "action", "loc"), ("params", "action", "scale")
    with set_composite_lp_aggregate(aggregate):
        sample = ProbabilisticTensorDictModule(
            ["params"],
            ["action"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"action": joint}},
            return_log_prob=True,
            default_interaction_type="random",
        )
        net = TensorDictModule(nn.Sequential(nn.Linear(4, 4), NormalParamExtractor()), ["observation"], list(params))
        actor = ProbabilisticTensorDictSequential(net, sample)
        kl_reward = KLRewardTransform(actor, action_key="action")
        td = actor(TensorDict({"observation": torch.ones(2, 4)}, [2])).detach()
        dist = actor.get_dist(td.copy())
        moved(actor)
        td = actor(td).detach()
        td["next"] = TensorDict({"reward": torch.ones(2, 1)}, [2])
        found = kl_reward(td)["next", "reward"]
    expected = 1 - td[kl_reward.sample_log_prob_key] + dist.dists["action"].log_prob(td["action"]).detach()
    torch.testing.assert_close(found.squeeze(-1), expected)


# Which log-probs.


def test_a_log_prob_key_that_is_given_is_the_one_used():
    """Though the actor has one of its own."""
    kl_reward = KLRewardTransform(gaussian(), log_prob_key="mine", action_key="action")
    assert kl_reward.sample_log_prob_key == "mine"
    td = gaussian()(TensorDict({"observation": torch.zeros(1, 4)}, [1])).detach()
    td["mine"] = td["action_log_prob"] + 3.0
    td["next"] = TensorDict({"reward": torch.zeros(1, 1)}, [1])
    assert kl_reward(td)["next", "reward"].item() == pytest.approx(-3.0, abs=1e-6)


def test_without_a_log_prob_key_it_is_the_actors_own_or_sample_log_prob():
    """Found in any of its parts."""
    assert KLRewardTransform(gaussian()).sample_log_prob_key == "action_log_prob"
    assert KLRewardTransform(gaussian(log_prob_key=("a", "lp"))).sample_log_prob_key == ("a", "lp")
    assert KLRewardTransform(Fixed()).sample_log_prob_key == "log_probs"
    assert KLRewardTransform(TensorDictModule(nn.Identity(), ["x"], ["y"])).sample_log_prob_key == "sample_log_prob"


def test_in_keys_gain_the_actors():
    """So that it is known what the transform reads."""
    assert KLRewardTransform(gaussian()).in_keys == ["reward", "observation"]
    assert KLRewardTransform(gaussian()).out_keys == ["reward"]
    assert KLRewardTransform(gaussian(), in_keys="r", out_keys="q").out_keys == ["q"]
    assert KLRewardTransform(gaussian(), in_keys=[("a", "r")]).out_keys == [("a", "r")]


# The reference: frozen, moved, saved.


def test_the_frozen_copy_shares_nothing_with_the_actor():
    """An optimizer step on the actor changes no bit of the copy."""
    actor = gaussian()
    kl_reward = KLRewardTransform(actor, action_key="action")
    names = {name for name, _ in actor.named_parameters()}
    assert {name for name, _ in kl_reward.functional_actor.named_parameters()} == names
    live = {parameter.untyped_storage().data_ptr() for parameter in actor.parameters()}
    held = {parameter.untyped_storage().data_ptr() for parameter in kl_reward.parameters()}
    assert len(live) == len(held) == 4
    assert not live & held
    before = {name: value.clone() for name, value in kl_reward.state_dict().items()}
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    td = actor(TensorDict({"observation": torch.ones(3, 4)}, [3]))
    td["action_log_prob"].sum().backward()
    optimizer.step()
    assert any(not value.equal(before[f"functional_actor.{name}"]) for name, value in actor.named_parameters())
    for name, value in kl_reward.state_dict().items():
        assert value.equal(before[name]), name


def test_the_frozen_copy_follows_to():
    """In dtype and in device."""
    kl_reward = KLRewardTransform(gaussian(), action_key="action")
    kl_reward.to(torch.float64)
    assert {parameter.dtype for parameter in kl_reward.functional_actor.parameters()} == {torch.float64}
    assert kl_reward.frozen_params["module", "0", "module", "0", "weight"].dtype is torch.float64
    assert kl_reward.coef.dtype is torch.float64
    td = gaussian().double()(TensorDict({"observation": torch.zeros(2, 4).double()}, [2])).detach()
    td["next"] = TensorDict({"reward": torch.ones(2, 1)}, [2])
    reward = kl_reward(td)["next", "reward"]
    assert reward.dtype is torch.float32  # the reward's own
    assert reward.tolist() == [[1.0], [1.0]]
    kl_reward.to("meta")
    assert kl_reward.frozen_params["module", "0", "module", "0", "weight"].is_meta
    env = PointMass().append_transform(KLRewardTransform(gaussian()))
    env.to("meta")
    assert {parameter.device.type for parameter in env.transform.parameters()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_the_reference_runs_on_its_device_and_the_result_comes_back():
    """A policy on one device, its reference on another."""
    actor = gaussian()
    kl_reward = KLRewardTransform(actor, action_key="action", device="cuda")
    assert {parameter.device.type for parameter in kl_reward.functional_actor.parameters()} == {"cuda"}
    td = actor(TensorDict({"observation": torch.zeros(2, 4)}, [2])).detach()
    td["next"] = TensorDict({"reward": torch.ones(2, 1)}, [2])
    reward = kl_reward(td)["next", "reward"]
    assert reward.device.type == "cpu"
    torch.testing.assert_close(reward, torch.ones(2, 1))


def test_the_reference_sees_its_own_device():
    """What is not a module says by `device` where it runs; the result is back where the log-probs are."""
    seen = []

    class Elsewhere:
        log_prob_key, in_keys = "log_probs", ()

        def log_prob(self, td):
            seen.append(td["tokens_response"].device.type)
            return torch.zeros(2)

    kl_reward = KLRewardTransform(Elsewhere(), action_key="tokens_response", functional=False, device="meta")
    td = TensorDict({"tokens_response": torch.ones(2, 1), "log_probs": torch.ones(2), "next": {}}, [2])
    assert kl_reward(td)["next", "reward"].tolist() == [[-1.0], [-1.0]]
    assert seen == ["meta"]
    model = gaussian()
    KLRewardTransform(model, functional=False, device="meta")
    assert next(model.parameters()).is_meta


def test_the_frozen_copy_is_in_the_state_dict():
    """Under the actor's own names, and it comes back by load_state_dict."""
    actor = gaussian()
    kl_reward = KLRewardTransform(actor, 0.25)
    names = [f"functional_actor.{name}" for name in actor.state_dict()]
    assert sorted(kl_reward.state_dict()) == sorted(["coef", *names])
    other = KLRewardTransform(gaussian(seed=1))
    assert not torch.equal(other.state_dict()[names[0]], kl_reward.state_dict()[names[0]])
    other.load_state_dict(kl_reward.state_dict())
    assert all(value.equal(kl_reward.state_dict()[name]) for name, value in other.state_dict().items())
    assert other.coef == 0.25
    composed = Compose(StepCounter(), kl_reward).state_dict()
    assert f"transforms.1.{names[0]}" in composed


def test_copies_and_pickles_are_whole_and_apart():
    """A deepcopy or a pickle gives the same rewards, from weights of its own."""
    actor = moved(gaussian())
    kl_reward = KLRewardTransform(gaussian(), 0.5, action_key="action")
    td = actor(TensorDict({"observation": torch.ones(2, 4)}, [2])).detach()
    td["next"] = TensorDict({"reward": torch.ones(2, 1)}, [2])
    expected = kl_reward(td.clone())["next", "reward"]
    plain = KLRewardTransform(Fixed(), action_key="a")
    assert pickle.loads(pickle.dumps(plain)).action_key == "a"
    module = KLRewardTransform(TensorDictModule(nn.Linear(1, 1), ["x"], ["y"]))
    for name, value in pickle.loads(pickle.dumps(module)).state_dict().items():
        assert value.equal(module.state_dict()[name])
    other = copy.deepcopy(kl_reward)
    torch.testing.assert_close(other(td.clone())["next", "reward"], expected)
    moved(kl_reward.functional_actor)
    torch.testing.assert_close(other(td.clone())["next", "reward"], expected)


@pytest.mark.parametrize("functional", [True, False])
def test_no_gradient_ever_reaches_the_reference_through_the_reward(functional):
    """Nor the policy: a reward is data. The copy asks for none, and as given it is run without."""
    actor = gaussian()
    kl_reward = KLRewardTransform(actor, action_key="action", functional=functional)
    td = actor(TensorDict({"observation": torch.zeros(2, 4)}, [2]))
    assert td["action_log_prob"].requires_grad
    td["next"] = TensorDict({"reward": torch.zeros(2, 1)}, [2])
    assert not kl_reward(td)["next", "reward"].requires_grad
    assert all(not parameter.requires_grad for parameter in kl_reward.parameters())
    weight = torch.ones(1, requires_grad=True)
    td["next"] = TensorDict({"reward": weight.expand(2, 1)}, [2])
    kl_reward(td)["next", "reward"].sum().backward()  # the reward's own gradient is left as it is
    assert weight.grad.item() == 2.0
    assert all(parameter.grad is None for parameter in actor.parameters())


def test_requires_grad_makes_leaves_of_the_copy():
    """Descent on the reward's loss then reaches the reference, and never the actor's own parameters."""
    actor = gaussian()
    next(actor.parameters()).requires_grad_(False)
    kl_reward = KLRewardTransform(actor, action_key="action", requires_grad=True)
    leaves = list(kl_reward.functional_actor.parameters())
    assert len(leaves) == 4
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves)
    td = actor(TensorDict({"observation": torch.ones(2, 4)}, [2])).detach()
    td["next"] = TensorDict({"reward": torch.zeros(2, 1)}, [2])
    kl_reward(td)["next", "reward"].sum().backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)
    assert all(parameter.grad is None for parameter in actor.parameters())


def test_the_frozen_copy_has_no_dropout():
    """Also when the actor trains, and when the transform is told to."""
    actor = gaussian().train()
    kl_reward = KLRewardTransform(actor).train()
    assert kl_reward.training
    assert not any(module.training for module in kl_reward.functional_actor.modules())
    assert actor.training


def test_functional_false_uses_the_module_as_given():
    """It is not copied, moved or saved: what its owner does to it is seen."""
    actor = gaussian()
    kl_reward = KLRewardTransform(actor, functional=False, action_key="action")
    assert kl_reward.functional_actor is actor
    assert kl_reward.frozen_params is None
    assert list(kl_reward.state_dict()) == ["coef"]
    kl_reward.to(torch.float64)
    assert next(actor.parameters()).dtype is torch.float32
    td = gaussian()(TensorDict({"observation": torch.ones(2, 4)}, [2])).detach()
    td["next"] = TensorDict({"reward": torch.zeros(2, 1)}, [2])
    assert kl_reward(td.clone())["next", "reward"].tolist() == [[0.0], [0.0]]
    moved(actor)
    assert kl_reward(td.clone())["next", "reward"].all()


def test_a_module_without_log_prob_is_called_and_its_key_read():
    """Under the key of the log-probs, which the state itself does not show it."""
    module = TensorDictModule(lambda x: x - 1.0, ["x"], ["lp"])
    td = TensorDict({"x": torch.tensor([3.0, 5.0]), "lp": torch.tensor([0.0, 0.0]), "a": torch.zeros(2)}, [2])
    td["next"] = TensorDict({}, [2])
    kl_reward = KLRewardTransform(module, log_prob_key="lp", action_key="a", functional=False)
    assert kl_reward(td)["next", "reward"].tolist() == [[2.0], [4.0]]
    assert td["lp"].tolist() == [0.0, 0.0]
    silent = TensorDictModule(lambda x: x, ["x"], ["y"])
    with pytest.raises(TypeError, match=r"must give its log-probs.*'lp'"):
        KLRewardTransform(silent, log_prob_key="lp", action_key="a", functional=False)(td)


# Shapes.


def test_a_sequence_reward_is_never_paid_once_per_token():
    """With "last" it is on the last token, with "spread" it is divided: the sum is the reward once."""
    ones = torch.zeros(2, 3)
    for placement, expected in (("last", [[0, 0, 6], [0, 0, 3]]), ("spread", [[2, 2, 2], [1, 1, 1]])):
        td = token_td(ones, ones, torch.tensor([[6.0], [3.0]]), [2])
        reward = transform(placement=placement)(td)["next", "reward"]
        assert reward.shape == (2, 3, 1)
        assert reward.squeeze(-1).tolist() == expected
        assert reward.sum((1, 2)).tolist() == [6.0, 3.0]
    mask = torch.tensor([[True, True, False], [True, True, True]])
    for placement, expected in (("last", [[0, 6, 0], [0, 0, 3]]), ("spread", [[3, 3, 0], [1, 1, 1]])):
        td = token_td(ones, ones, torch.tensor([[6.0], [3.0]]), [2], real=mask)
        assert transform(placement=placement, mask_key="real")(td)["next", "reward"].squeeze(-1).tolist() == expected


ROW = torch.tensor([-1.0, -2.0])
TOKENS = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])


@pytest.mark.parametrize(
    ("current", "reward", "expected"),
    [
        (ROW, None, [[1.0], [2.0]]),
        (ROW, torch.ones(2, 1), [[2.0], [3.0]]),
        (ROW, torch.ones(2), [2.0, 3.0]),
        (ROW[:, None], torch.ones(2, 1), [[2.0], [3.0]]),
        (TOKENS, None, [[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]]),
        (TOKENS, torch.ones(2, 3), [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]),
        (TOKENS, torch.ones(2, 3, 1), [[[2.0], [3.0], [4.0]], [[5.0], [6.0], [7.0]]]),
        (TOKENS[..., None], torch.ones(2, 3), [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]),
        (TOKENS, torch.ones(2, 1), [[[1.0], [2.0], [4.0]], [[4.0], [5.0], [7.0]]]),
        (TOKENS, torch.ones(2, 1, dtype=torch.int64), [[[1.0], [2.0], [4.0]], [[4.0], [5.0], [7.0]]]),
        (TOKENS[:, :0], torch.ones(2, 1), [[], []]),
        (TOKENS[:, :0], None, [[], []]),
    ],
)
def test_the_output_has_the_rewards_shape_or_one_for_each_token(current, reward, expected):
    """A reference of log-prob 0, so that what is added is the number itself."""
    out = transform()(token_td(current, torch.zeros_like(current), reward, [2]))["next", "reward"]
    assert out.tolist() == expected
    assert out.dtype is torch.float32
    batched = token_td(
        *(None if x is None else x[:, None] for x in (current, torch.zeros_like(current), reward)), [2, 1]
    )
    again = transform()(batched)["next", "reward"]
    assert again.tolist() == [[row] for row in expected]


def test_one_row_without_a_batch():
    """A state alone is a row."""
    td = token_td(TOKENS[0], torch.zeros(3), torch.tensor([1.0]), [])
    assert transform()(td)["next", "reward"].tolist() == [[1.0], [2.0], [4.0]]
    td = token_td(torch.tensor(-1.0), torch.tensor(0.0), torch.tensor([1.0]), [])
    assert transform()(td)["next", "reward"].tolist() == [2.0]


def oracle(current, reference, reward, coef, placement):
    """Row by row and token by token."""
    out = []
    for b, (mine, theirs) in enumerate(zip(current, reference, strict=True)):
        row = []
        for t, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            paid = 0.0
            if reward is not None and isinstance(reward[b], list):
                paid = reward[b][t]
            elif reward is not None:
                paid = reward[b] / len(mine) if placement == "spread" else reward[b] * (t == len(mine) - 1)
            row.append(paid - coef * (p - q))
        out.append(row)
    return out


numbers = st.floats(-5, 5, width=32)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.lists(st.tuples(numbers, numbers, numbers), max_size=4), min_size=1, max_size=4),
    kind=st.sampled_from(["none", "sequence", "token", "token column"]),
    placement=st.sampled_from(["last", "spread"]),
    layout=st.sampled_from(["jagged", "jagged column", "room", "lazy", "padded left", "padded right"]),
    coef=st.sampled_from([1.0, 0.25]),
)
def test_every_layout_gives_the_rows_of_the_plain_loop(rows, kind, placement, layout, coef):
    """Rows of any length, none included, whatever they are stored in."""
    current, reference, tokens = ([[cell[i] for cell in row] for row in rows] for i in range(3))
    reward = {"none": None, "sequence": [float(b + 1) for b in range(len(rows))]}.get(kind, tokens)
    expected = oracle(current, reference, reward, coef, placement)
    td, options, size = layouts(layout, current, reference, reward, kind)
    out = transform(coef, placement=placement, **options)(td)
    if options:
        found = [row[m].flatten().tolist() for row, m in zip(out["next", "reward"], td["real"], strict=True)]
    else:
        found = [row.flatten().tolist() for row in ragged.rows(out, ("next", "reward"))]
        of_a_row = layout == "lazy" and all(len(row) == 1 for row in rows)  # (B, 1) may be of a row: so it is read here
        dims = 1 if kind == "token" and not of_a_row else 2
        assert {row.dim() for row in ragged.rows(out, ("next", "reward"))} == {dims}
    assert len(found) == size
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    if layout.startswith("jagged") or layout == "room":
        assert out["next", "reward"].is_nested


def layouts(layout, current, reference, reward, kind):
    size = len(current)
    column = kind == "token column"
    rewards = None
    if layout == "lazy":
        parts = []
        for b in range(size):
            cell = None if reward is None else torch.tensor(reward[b]).reshape(-1, *([1] if column else []))
            mine, theirs = torch.tensor(current[b]), torch.tensor(reference[b])
            parts.append(token_td(mine, theirs, cell, []))
        return lazy_stack(parts, 0), {}, size
    if kind == "sequence":
        rewards = torch.tensor(reward)[:, None].double()
    if layout.startswith("padded"):
        side = layout.split()[1]
        mine, mask = Ragged.from_jagged(jagged(current)).padded(side, math.nan)
        theirs, _ = Ragged.from_jagged(jagged(reference)).padded(side, math.nan)
        if reward is not None and rewards is None:
            rewards, _ = Ragged.from_jagged(jagged(reward)).padded(side, 0)
            rewards = rewards[..., None] if column else rewards
        one = mine.shape == (size, 1)  # (B, 1) may be of a row: here it is of a token
        return (
            token_td(mine[..., None] if one else mine, theirs, rewards, [size], real=mask),
            {"mask_key": "real"},
            size,
        )
    mine, theirs = jagged(current, layout == "jagged column"), jagged(reference)
    if layout == "room":
        wide = [[*row, 99.0, 99.0] for row in current]
        held = Ragged.from_jagged(jagged(wide))
        mine = Ragged(held.values, held.offsets, held.lengths - 2).jagged()
    if reward is not None and rewards is None:
        rewards = jagged(reward, column)
    return token_td(mine, theirs, rewards, [size]), {}, size


def test_mismatched_shapes_are_refused_for_every_row_with_both_shapes_named():
    """Also where the first row fits, and where the total does."""
    fits, other = jagged([[1.0], [1.0, 2.0], [3.0]]), jagged([[1.0], [1.0], [2.0, 3.0]])
    with pytest.raises(ValueError, match=r"'log_probs' and the reference's.*row 1 of 3.*2 and 1 tokens.*2 rows differ"):
        transform()(token_td(fits, other, None, [3]))
    with pytest.raises(ValueError, match=r"'reward' and the log-probs.*row 1 of 3.*\(1,\) and \(2,\)"):
        transform()(token_td(fits, fits, other, [3]))
    with pytest.raises(ValueError, match="row 0 of 3: found 2 and 1 tokens"):
        transform()(token_td(fits, fits, torch.ones(3, 2).double(), [3]))
    dense = torch.zeros(3, 2)
    for reward in (torch.ones(3, 3), torch.ones(3, 2, 2), torch.ones(3, 1, 1)):
        size = ", ".join(map(str, reward.shape))
        with pytest.raises(ValueError, match=rf"'reward'.*\({size}\).*\(3, 2\)"):
            transform()(token_td(dense, dense, reward, [3]))
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(3, 3\)"):
        transform()(token_td(dense, torch.zeros(3, 3), None, [3]))
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(3\)"):
        transform()(token_td(dense[:, 0], dense[:, 0], torch.ones(3, 3), [3]))
    with pytest.raises(ValueError, match=r"must have the shape \(3,\) or \(3, 'T'\).*\(3, 2, 2\)"):
        transform()(token_td(torch.zeros(3, 2, 2), torch.zeros(3, 2, 2), None, [3]))


def test_a_missing_reward_counts_as_zero():
    """One for each row, or for each token."""
    td = token_td(ROW, torch.zeros(2), None, [2])
    assert transform(2.0)(td)["next", "reward"].tolist() == [[2.0], [4.0]]
    td = token_td(jagged([[-1.0], [-2.0, -3.0]]), jagged([[0.0], [0.0, 0.0]]), None, [2])
    out = transform(2.0)(td)["next", "reward"]
    assert out.is_nested
    assert [row.tolist() for row in out.unbind()] == [[[2.0]], [[4.0], [6.0]]]
    same = token_td(ROW, ROW, None, [2])
    assert str(transform()(same)["next", "reward"].tolist()) == "[[0.0], [0.0]]"  # and not -0.0


def test_a_row_without_tokens_has_no_place_for_its_reward():
    """Its result is empty; the other rows have theirs."""
    empty = jagged([[], [0.0, 0.0], []])
    for placement, row in (("last", [[0.0], [3.0]]), ("spread", [[1.5], [1.5]])):
        td = token_td(empty, empty, torch.tensor([[7.0], [3.0], [7.0]]), [3])
        out = transform(placement=placement)(td)["next", "reward"]
        assert [part.tolist() for part in out.unbind()] == [[], row, []]
    nothing = jagged([[], []])
    assert [len(part) for part in transform()(token_td(nothing, nothing, None, [2]))["next", "reward"].unbind()] == [
        0,
        0,
    ]


def test_far_away_is_finite():
    """Log-ratios of 50 and more, on both sides, in half precision too."""
    current = torch.tensor([[-50.0, 0.0, -88.0]])
    for dtype in (torch.float32, torch.bfloat16):
        td = token_td(current.to(dtype), current.flip(1).to(dtype) * 0, torch.ones(1, 1), [1])
        out = transform(0.5)(td)["next", "reward"]
        assert out.squeeze(-1).tolist() == [[25.0, 0.0, 45.0]]
        assert out.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_reward_keeps_its_dtype_and_the_ratio_is_no_coarser_than_float32(dtype):
    """Half precision log-probs are subtracted as float32."""
    current, reference = torch.tensor([-100.0]).bfloat16(), torch.tensor([-0.375]).bfloat16()
    out = transform()(token_td(current, reference, torch.ones(1, 1, dtype=dtype), [1]))["next", "reward"]
    assert out.dtype is dtype
    assert out.item() == torch.tensor(100.625, dtype=dtype).item()


def test_padding_costs_nothing():
    """Whatever is in it: the reward there is what it was."""
    mask = torch.tensor([[False, True], [True, True]])
    current = torch.where(mask, TOKENS[:, :2], math.nan)
    for reward, expected in ((torch.full((2, 2), 0.5), [[0.5, 2.5], [4.5, 5.5]]), (None, [[0.0, 2.0], [4.0, 5.0]])):
        td = token_td(current, torch.zeros(2, 2), reward, [2], real=mask)
        assert transform(mask_key="real")(td)["next", "reward"].reshape(2, 2).tolist() == expected


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_shares_add_up_to_the_reward(flags):
    """Where there is a token at all, and only where there is one."""
    real = torch.tensor(flags)
    reward = torch.arange(1.0, len(flags) + 1)
    for placement in ("last", "spread"):
        placed = share(reward, real, placement)
        torch.testing.assert_close(placed.sum(1), torch.where(real.any(1), reward, 0.0))
        assert not placed[~real].any()
        assert ((placed != 0).sum(1) == (real.sum(1) if placement == "spread" else real.any(1))).all()


def test_one_token_may_be_a_row():
    """(B, 1) and (B, 1): the reward's shape is kept, unless it is known to be one of a row of tokens."""
    one, size = torch.ones(2, 1), torch.Size([2])
    assert subtract(one, one, size).shape == (2, 1)
    assert subtract(one, one, size, sequence=True).shape == (2, 1, 1)
    assert subtract(one, None, size, sequence=True).shape == (2, 1, 1)
    assert subtract(torch.ones(2), one, size, sequence=True).shape == (2, 1)


# Language models' environments.


def responses(layout, lengths):
    rows = [torch.full((n,), 5) for n in lengths]
    probs = [torch.full((n,), -1.0 - b) for b, n in enumerate(lengths)]
    if layout == "dense":
        return torch.stack(rows), torch.stack(probs)
    return Ragged.from_rows(rows).jagged(), Ragged.from_rows(probs).jagged()


class Zero(nn.Module):
    """A reference that is sure of everything."""

    in_keys, log_prob_key = ("tokens_response",), "log_probs"

    def log_prob(self, td):
        tokens = td["tokens_response"]
        return torch.zeros_like(tokens, dtype=torch.float32)


@pytest.mark.parametrize("assign_reward", [True, False])
@pytest.mark.parametrize("out", ["reward", "reward_kl"])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("width", [1, 3, 0])
def test_the_spec_of_a_reward_for_each_token_is_kept(assign_reward, out, size, width):
    """With one token and with none too: (B, T) where the environment's reward is, (B, T, 1) where it has none."""
    env = LLMEnv(from_text=False, eos_token_id=9, assign_reward=assign_reward, batch_size=size)
    env = env.append_transform(KLRewardTransform(Zero(), out_keys=[out]))
    owner = env.full_reward_spec if out == "reward" else env.observation_spec
    shape = (*env.batch_size, -1) if assign_reward else (*env.batch_size, -1, 1)
    assert owner[out] == Unbounded(shape)
    td = env.reset(TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2]))
    if out == "reward_kl":
        assert td[out].shape == ((2, 0) if assign_reward else (2, 0, 1))
        assert owner.expand(2)[out].is_in(td[out])
    td["tokens_response"], td["log_probs"] = responses("dense", [width, width])
    reward = env.step(td)["next", out]
    assert reward.flatten().tolist() == [1.0] * width + [2.0] * width
    assert owner.expand(2)[out].is_in(reward), reward.shape


@pytest.mark.parametrize("assign_reward", [True, False])
def test_jagged_in_is_jagged_out_in_an_environment(assign_reward):
    """Rows of different lengths, none included; on a rollout too, and a partial reset clears what it names."""
    env = LLMEnv(from_text=False, eos_token_id=9, assign_reward=assign_reward)
    env = env.append_transform(KLRewardTransform(Zero(), out_keys=["reward_kl"]))

    def policy(td):
        td["tokens_response"], td["log_probs"] = responses("jagged", [2, 0, 1])
        return td

    prompts = Ragged.from_rows([torch.tensor([1]), torch.tensor([2, 3]), torch.tensor([4])]).jagged()
    td = env.rollout(2, policy, tensordict=TensorDict({"tokens": prompts}, [3]))
    for step in td.unbind(1):
        reward = step["next", "reward_kl"]
        assert reward.is_nested
        assert [row.flatten().tolist() for row in reward.unbind()] == [[1.0, 1.0], [], [3.0]]
    state = env.step_mdp(td.unbind(1)[-1])
    again = env.reset(state.set("_reset", torch.tensor([True, False, False])))["reward_kl"]
    assert [row.flatten().tolist() for row in again.unbind()] == [[0.0, 0.0], [], [3.0]]
    stepped = env.step(policy(env.step_mdp(td.unbind(1)[-1])).set("_step", torch.tensor([False, False, True])))
    assert [row.flatten().tolist() for row in stepped["next", "reward_kl"].unbind()] == [[1.0, 1.0], [], [3.0]]


def test_a_ragged_rollout_is_taken_step_by_step():
    """Replayed data whose steps do not stack, in place."""
    env = LLMEnv(from_text=False, eos_token_id=9)

    def policy(td):
        td["tokens_response"], td["log_probs"] = responses("jagged", [2, 1])
        return td

    td = env.rollout(3, policy, tensordict=TensorDict({"tokens": torch.tensor([[1], [2]]),
                                                       "attention_mask": torch.ones(2, 1).bool()}, [2]))  # fmt: skip
    out = KLRewardTransform(Zero(), action_key="tokens_response")(td)
    assert out is td
    assert [row.flatten().tolist() for row in ragged.rows(td, ("next", "reward"))] == [[1.0, 1.0]] * 3 + [[2.0]] * 3


def test_a_lazy_stack_of_rows_stays_one():
    """Each row has its own tokens; the reward is in each."""
    env = LLMEnv(from_text=False, eos_token_id=9)

    class PerRow(Fixed):
        def log_prob(self, td):
            return Ragged.from_rows([torch.zeros(len(r)) for r in ragged.rows(td, "tokens_response")]).jagged()

    env = env.append_transform(KLRewardTransform(PerRow(), out_keys=["kl"]))
    td = env.reset(lazy_stack([TensorDict({"tokens": torch.tensor(row)}, []) for row in ([1], [2, 3])], 0))
    for b, row in enumerate(td.unbind(0)):
        row["tokens_response"], row["log_probs"] = torch.full((b + 1,), 5), torch.full((b + 1,), -1.0 - b)
    out = env.step(td)["next"]
    assert [row.tolist() for row in ragged.rows(out, "kl")] == [[[1.0]], [[2.0], [2.0]]]


def test_text_actions_are_rows_of_tokens():
    """The environment's action is text, and the log-probs are of its tokens."""
    env = LLMEnv(eos_token_id=9).append_transform(KLRewardTransform(Zero(), action_key="text_response"))
    assert env.transform.action_key == "text_response"
    assert env.reward_spec == Unbounded((-1, 1))
    assert isinstance(env.full_action_spec["text_response"], NonTensor)
    td = env.reset(TensorDict({"text": ["a", "b"]}, [2]))
    td["text_response"] = ["x", "y"]
    td["tokens_response"], td["log_probs"] = responses("dense", [1, 1])
    assert env.step(td)["next", "reward"].tolist() == [[[1.0]], [[2.0]]]


# Errors.


class TwoActions(PointMass):
    def __init__(self):
        super().__init__()
        self.action_spec = Composite({"a": Unbounded((2,)), "b": Bounded(0, 1, (2,))})


def loose(register):
    actor = gaussian()
    if register:
        actor.register_buffer("bias", torch.ones(1, requires_grad=True))
    else:
        actor[0].scale = torch.ones(1, requires_grad=True)
    return actor


def stepped(**missing):
    env = PointMass((2,)).append_transform(KLRewardTransform(gaussian()))
    td = gaussian()(env.reset()).detach()
    return env.transform(td.exclude(*missing))


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: KLRewardTransform(gaussian(), in_keys=["a", "b"]), ValueError, r"in_keys must hold one key.*'a', 'b'"),
        (lambda: KLRewardTransform(gaussian(), in_keys=[]), ValueError, "in_keys must hold one key"),
        (lambda: KLRewardTransform(gaussian(), out_keys=["a", "b"]), ValueError, "out_keys must hold one key"),
        (lambda: KLRewardTransform(gaussian(), placement="first"), ValueError, "\"last\" or \"spread\": found 'first'"),
        (lambda: KLRewardTransform(gaussian(), torch.ones(2)), ValueError, r"coef must be one number.*\(2\)"),
        (lambda: KLRewardTransform(lambda td: td), TypeError, r"must be a module, or have log_prob\(td\)"),
        (lambda: KLRewardTransform(loose(True)), ValueError, "'bias' requires gradients and is no Parameter"),
        (lambda: KLRewardTransform(loose(False)), ValueError, "'module.0.scale' requires gradients and is no Param"),
        (lambda: KLRewardTransform(gaussian()).action_key, ValueError, "action_key is required"),
        (lambda: KLRewardTransform(gaussian())(TensorDict({"observation": torch.zeros(4)}, [])), ValueError,
         "action_key is required"),
        (lambda: TwoActions().append_transform(KLRewardTransform(gaussian())).reset(), ValueError,
         r"More than one action_key found: \['a', 'b'\]"),
        (lambda: stepped(action=1), RuntimeError, "the action 'action' is missing: there are .*'observation'"),
        (lambda: stepped(action_log_prob=1), KeyError, "'action_log_prob', are missing.*return_log_prob"),
        (lambda: KLRewardTransform(gaussian(), action_key=("x", "y"))(TensorDict({}, [])), RuntimeError,
         r"\('x', 'y'\)"),
        (lambda: transform(mask_key="real")(token_td(TOKENS, TOKENS, None, [2], real=torch.ones(2, 2))), ValueError,
         r"the mask 'real' and 'log_probs' do not fit.*\(2, 2\).*\(2, 3\)"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(act, error, message):
    """What was expected, found, and under which key."""
    with pytest.raises(error, match=message):
        act()


def test_a_tensor_that_wants_gradients_is_fine_where_nothing_is_copied():
    """`functional=False` copies nothing."""
    assert KLRewardTransform(loose(True), functional=False).functional is False


def test_an_action_key_that_is_given_picks_one_of_several():
    """Then the environment's number of actions does not matter."""
    env = TwoActions().append_transform(KLRewardTransform(gaussian(), action_key="a"))
    assert env.transform.action_key == "a"
    assert env.reset()["observation"].shape == (4,)


def test_whole_numbers_as_rewards_become_floats():
    """So does their spec."""
    env = PointMass((2,), reward_dtype=torch.int64).append_transform(KLRewardTransform(gaussian()))
    assert env.reward_spec.dtype is torch.float32
    with torch.no_grad():
        assert env.step(gaussian()(env.reset()))["next", "reward"].dtype is torch.float32


def squashed(loc, scale):
    return TransformedDistribution(joint(loc, scale), [TanhTransform(cache_size=1)])


def test_an_action_that_a_distribution_can_not_score_is_an_error_that_names_its_row():
    """A tanh gives exactly 1, whose place before it is not to be found again: no finite reward would be right."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), NormalParamExtractor())
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[10.0], [10.0], [0.0], [0.0]]).expand(4, 4))
    sample = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=squashed, return_log_prob=True
    )
    actor = ProbabilisticTensorDictSequential(TensorDictModule(net, ["observation"], ["loc", "scale"]), sample)
    observation = torch.zeros(3, 4)
    observation[1] = 1.0  # loc is 40, scale 1
    with set_interaction_type(InteractionType.RANDOM), torch.random.fork_rng():
        torch.manual_seed(0)
        td = actor(TensorDict({"observation": observation}, [3])).detach()
    assert (td["action"][1].abs() == 1).any()
    assert td["action_log_prob"].isfinite().all()  # the sampler remembers what it squashed
    td["next"] = TensorDict({"reward": torch.tensor([[1.0], [2.0], [3.0]])}, [3])
    own = f"'action_log_prob' is {float(td['action_log_prob'][1])} and the reference's is"
    with pytest.raises(RewardError, match="row 1, place .1.: " + own):
        KLRewardTransform(actor, action_key="action")(td.copy())
    assert td["next", "reward"].tolist() == [[1.0], [2.0], [3.0]]
    inside = td[[0, 2]]
    reward = KLRewardTransform(actor, action_key="action")(inside)["next", "reward"]
    torch.testing.assert_close(reward, torch.tensor([[1.0], [3.0]]), atol=1e-4, rtol=0)
    free = KLRewardTransform(actor, 0.0, action_key="action")(td.copy())
    assert free["next", "reward"].tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize("bad", [float("-inf"), float("inf"), float("nan")])
def test_a_log_prob_that_is_not_finite_is_named_in_any_layout(bad):
    """Dense and ragged, of the reference and of the policy; what is masked may be anything."""
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    wrong = [rows[0], torch.tensor([bad])]
    for current, reference in ((rows, wrong), (wrong, rows)):
        lp, ref = Ragged.from_rows(current).jagged(), Ragged.from_rows(reference).jagged()
        td = TensorDict({"tokens_response": lp.long(), "log_probs": lp, "reference": ref}, [2])
        with pytest.raises(RewardError, match=r"row 1, place \[1, 0\]: 'log_probs' is .* and the reference's is "):
            transform()(td)
        assert not transform(0.0)(td)["reward"].values().any()
    padded = {"log_probs": torch.tensor([[-1.0, -2.0], [-3.0, bad]]), "reference": -torch.ones(2, 2)}
    mask = torch.tensor([[True, True], [True, False]])
    td = TensorDict({**padded, "tokens_response": torch.ones(2, 2).long(), "m": mask}, [2])
    with pytest.raises(RewardError, match=r"row 1, place \[1, 1\]: 'log_probs' is .* and the reference's is -1.0"):
        transform()(td.copy())
    assert transform(mask_key="m")(td.copy())["reward"].squeeze(-1).tolist() == [[0.0, 1.0], [2.0, 0.0]]


@pytest.mark.parametrize("reward_dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_a_reward_of_any_dtype_is_a_number(reward_dtype):
    """Integers and flags become floats before anything is taken from them."""
    reward = torch.tensor([[1], [0]]).to(reward_dtype)
    td = token_td(torch.tensor([[-1.0], [-1.0]]), torch.tensor([[-1.5], [-0.5]]), reward, [2])
    assert transform()(td)["next", "reward"].flatten().tolist() == [0.5, 0.5]


def test_coef_is_never_rounded_to_a_shorter_dtype():
    """Whatever the weights are moved to, alone or inside others."""
    outer = nn.Sequential(Compose(KLRewardTransform(gaussian(), 0.3, action_key="action")))
    kl_reward = outer[0][0]
    for move in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to(torch.float8_e4m3fn)):
        move(outer)
        assert kl_reward.coef.dtype is torch.float32
        assert kl_reward.coef == torch.tensor(0.3)
        assert kl_reward.functional_actor[0].module[0].weight.dtype is not torch.float32
    outer.to(torch.bfloat16).to(torch.float64)
    assert float(kl_reward.coef) == float(torch.tensor(0.3))
    outer.load_state_dict(outer.state_dict())
    assert KLRewardTransform(gaussian(), torch.tensor(0.5, dtype=torch.float16)).coef.dtype is torch.float32


def test_several_log_probs_of_which_none_is_named_are_refused():
    """By their names, and by the argument that says which."""
    with set_composite_lp_aggregate(False):
        head = ProbabilisticTensorDictModule(
            ["params"],
            [("agents", "a"), ("agents", "b")],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"a": Normal, "b": Normal},
                "name_map": {"a": ("agents", "a"), "b": ("agents", "b")},
            },
            return_log_prob=True,
        )
        with pytest.raises(ValueError, match=r"several log-probs, .*'a_log_prob'.*'b_log_prob'.*log_prob_key="):
            KLRewardTransform(head, action_key=("agents", "a"))
        named = KLRewardTransform(head, log_prob_key=("agents", "a_log_prob"), action_key=("agents", "a"))
        assert named.sample_log_prob_key == ("agents", "a_log_prob")


class Holds(nn.Linear):
    def __init__(self, held):
        super().__init__(1, 1)
        self.held = held

    def log_prob(self, td):
        return td["x"]


@pytest.mark.parametrize(
    ("hold", "name"),
    [
        (lambda w: w, "held"),
        (lambda w: {"x": w}, "held.x"),
        (lambda w: [0, (w,)], "held.1.0"),
        (lambda w: {"x": [{"y": w}]}, "held.x.0.y"),
        (lambda w: [Holds(w)], "held.0.held"),
        (lambda w: TensorDict({"x": w}, []), "held.x"),
    ],
)
@pytest.mark.parametrize("leaf", [True, False])
def test_a_tensor_that_wants_gradients_is_found_in_any_container(hold, name, leaf):
    """A leaf, which a copy would silently part from its owner, as well as a result, which can not be copied."""
    tensor = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=f"the actor's tensor '{name}' requires gradients and is no Parameter"):
        KLRewardTransform(Holds(hold(tensor if leaf else tensor * 2)))
    held: list = [nn.Parameter(torch.ones(2)), torch.ones(2), nn.Linear(1, 1)]
    held.append(held)  # a container may hold itself
    assert KLRewardTransform(Holds(held)).functional_actor.held is not held


def test_an_actor_that_can_not_be_copied_is_refused_in_words():
    """A tensor where nobody looks."""

    class Box:
        pass

    box = Box()
    box.inside = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(ValueError, match=r"the actor can not be copied: .*; pass functional=False"):
        KLRewardTransform(Holds(box))
    assert KLRewardTransform(Holds(box), functional=False).functional_actor.held is box
