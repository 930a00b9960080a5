"""Environments and transforms of ramet inside TorchRL: run by `test_torchrl.py`, where TorchRL is installed."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl import data as peer_data
from torchrl import envs as peer
from torchrl.collectors import Collector

from ramet.adapters.torchrl import as_torchrl_env, as_torchrl_transform, from_torchrl_spec, to_torchrl_spec
from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase
from ramet.envs.hashing import LLMHashingEnv
from ramet.envs.llm import LLMEnv
from ramet.models.tiny import tiny_tokenizer
from ramet.ragged import Ragged, rows
from ramet.specs import Bounded, Categorical, Composite, NonTensor, Spec, Unbounded
from ramet.transforms.entries import row_mask
from ramet.transforms.kl_reward import KLRewardTransform
from ramet.transforms.loading import DataLoadingPrimer
from ramet.transforms.reward_sum import RewardSum
from ramet.transforms.step_counter import StepCounter
from ramet.transforms.tokenizer import Tokenizer
from ramet.transforms.transform import Compose, Transform

EOS = 9
FLAGS = ("done", "terminated", "truncated")


TWO = {"batch_size": 2, "eos_token_id": EOS}
ROWS = [{"tokens": torch.full((n % 3 + 1,), n + 10), "answer": n} for n in range(9)]
TEXTS = [{"text": text, "answer": n} for n, text in enumerate(("1+1=", "12+1=", "5=", "100="))]


class Walk(EnvBase):
    """A row starts at a random place, walks on by 1 or 2 and ends at 5 or more; the reward is how far it went."""

    def __init__(self, batch_size=(3,), device=None):
        super().__init__(batch_size=batch_size, device=device)
        specs = {"at": Unbounded((*batch_size, 1), device, torch.int64), "map": Unbounded((*batch_size, 4), device)}
        self.observation_spec = Composite(specs, shape=batch_size, device=device)
        self.action_spec = Bounded(1, 2, (*batch_size, 1), device, torch.int64)
        self.reward_spec = Unbounded((*batch_size, 1), device)

    def _reset(self, td):
        at = torch.randint(3, (*td.batch_size, 1), generator=self.generator)
        return TensorDict({"at": at, "map": torch.ones(*td.batch_size, 4)}, td.batch_size)

    def _step(self, td):
        at = td["at"] + td["action"]
        out = {"at": at, "map": td["map"] * 2, "reward": td["action"].float(), "terminated": at >= 5}
        return TensorDict(out, td.batch_size)


class Prompts(Transform):
    """Prompt number n is n % 3 + 1 times the token n + 10; a reset takes the next ones, in row order."""

    def __init__(self, layout="padded"):
        super().__init__()
        self.layout, self.next = layout, 0

    def _reset_env_preprocess(self, td):
        mask = row_mask(td, "_reset")
        mask = torch.ones(td.batch_size, dtype=torch.bool) if mask is None else mask
        fresh = Ragged.from_rows([self._take() if flag else torch.zeros(0, dtype=torch.int64) for flag in mask])
        if "tokens" in td.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
            fresh = fresh.where(mask, Ragged.from_rows(rows(td, "tokens")))
        real = Ragged(torch.ones(len(fresh.values), dtype=torch.bool), fresh.offsets)
        if self.layout == "padded":
            tokens, attention = fresh.padded("left")
        else:
            tokens, attention = fresh.jagged(), real.jagged()
        return td.exclude("tokens", "attention_mask").update({"tokens": tokens, "attention_mask": attention})

    def _take(self):
        number, self.next = self.next, self.next + 1
        return torch.full((number % 3 + 1,), number + 10)


def answers(td):
    """Prompts of an odd number of tokens end at once; others never."""
    ends = [EOS if len(row) % 2 else 3 for row in rows(td, "tokens")]
    return td.set("tokens_response", torch.tensor([[4, end] for end in ends]))


def steps_of(td):
    """What each row held, before each action."""
    return [row.tolist() for row in rows(td, "tokens")]


def of_tokens(**options):
    return LLMEnv(from_text=False, eos_token_id=EOS, **options)


def of_text(**options):
    with pytest.warns(UserWarning, match="eos_token_id"):
        return LLMEnv(**options)


def primed(stack_method):
    return of_tokens(batch_size=2).append_transform(DataLoadingPrimer(ROWS, stack_method=stack_method))


def dense(tokens=((1, 2, 3), (4, 5, 6))):
    ids = torch.tensor(tokens)
    return TensorDict({"tokens": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}, ids.shape[:-1])


def padded():
    td = dense()
    td["attention_mask"][0, 0] = False
    return td


def jagged():
    tokens = Ragged.from_rows([torch.tensor([2, 3]), torch.tensor([4, 5, 6])])
    mask = Ragged(torch.ones(5, dtype=torch.bool), tokens.offsets)
    return TensorDict({"tokens": tokens.jagged(), "attention_mask": mask.jagged()}, [2])


def lazy():
    return lazy_stack([dense((2, 3)), dense((4, 5, 6))])


def text():
    return TensorDict({"text": NonTensorStack("a", "bc")}, [2])


ENVS = {
    "vectors": (Walk, None),
    "vectors, one row": (lambda: Walk(()), None),
    "vectors, two dimensions": (lambda: Walk((2, 2)), None),
    "vectors, on a device": (lambda: Walk(device="cpu"), None),
    "vectors, with a transform": (lambda: Walk().append_transform(StepCounter(2)), None),
    "dense tokens": (lambda: of_tokens(batch_size=2), dense),
    "padded tokens": (lambda: of_tokens(batch_size=2), padded),
    "bounded tokens": (lambda: of_tokens(batch_size=2, vocab_size=12), dense),
    "one row of tokens": (of_tokens, lambda: dense((1, 2))),
    "tokens of any batch": (of_tokens, padded),
    "tokens without a mask": (lambda: of_tokens(has_attention=False), lambda: dense().exclude("attention_mask")),
    "lazy rows of one length": (of_tokens, lambda: lazy_stack([dense((1, 2)), dense((3, 4))])),
    "rewards and flags of tokens": (lambda: of_tokens(batch_size=2, assign_reward=True, assign_done=True), dense),
    "rewards and flags of tokens, any batch": (lambda: of_tokens(assign_reward=True, assign_done=True), dense),
    "nested keys": (
        lambda: of_tokens(batch_size=2, token_key=("in", "tokens"), action_key=("out", "tokens")),
        lambda: TensorDict({"in": dense()}, [2]),
    ),
    "text": (lambda: of_text(batch_size=2), text),
    "one text": (of_text, lambda: TensorDict({"text": NonTensorData("a")})),
    "text of any batch": (of_text, text),
    "text with a transform": (lambda: of_text(batch_size=2).append_transform(StepCounter(2)), text),
    "hashed prefixes": (
        lambda: LLMHashingEnv(20),
        lambda: TensorDict({"observation": torch.tensor([[1, 2], [3, 4]])}, [2]),
    ),
    "one hashed prefix with text": (
        lambda: LLMHashingEnv(tokenizer=tiny_tokenizer()),
        lambda: TensorDict({"observation": NonTensorData("2+2=")}),
    ),
    "prompts from a loader, one row": (lambda: of_tokens().append_transform(DataLoadingPrimer(ROWS)), None),
    "padded prompts from a loader": (lambda: primed("as_padded_tensor"), None),
    "text prompts from a loader": (lambda: of_text(batch_size=2).append_transform(DataLoadingPrimer(TEXTS)), None),
    "text and tokens from a loader": (lambda: LLMEnv.from_dataloader(TEXTS, tokenizer=tiny_tokenizer(), **TWO), None),
    "tokens of text from a loader": (
        lambda: LLMEnv.from_dataloader(TEXTS, tokenizer=tiny_tokenizer(), from_text=False, **TWO),
        None,
    ),
    "prompts from a transform": (lambda: of_tokens(batch_size=2).append_transform(Prompts()), None),
}


@pytest.mark.parametrize("inside", [False, True], ids=["bare", "TransformedEnv"])
@pytest.mark.parametrize("name", ENVS)
def test_torchrls_own_check_passes(name, inside):
    """Given to its `check_env_specs` with a first state, or without where the environment needs none."""
    make, first = ENVS[name]
    env = as_torchrl_env(make())
    if inside:
        env = peer.TransformedEnv(env, peer.StepCounter(5, step_count_key="steps"))
    state = env.reset(None if first is None else first())
    peer.check_env_specs(env, tensordict=None if first is None else state)
    # The observations are TorchRL's state too, and what a step makes of a state it does not look at.
    next_td = env.rand_step(state.copy())["next"]
    assert env.observation_spec.is_in(next_td)
    assert env.full_done_spec.is_in(next_td)


@pytest.mark.parametrize("first", [jagged, lazy])
def test_rows_of_different_lengths_are_as_the_specs_say(first):
    """TorchRL's check raises where rows differ in length, whoever made them: each row is compared here."""
    env = as_torchrl_env(of_tokens(batch_size=2))
    td = env.rollout(3, auto_reset=False, tensordict=env.reset(first()))
    assert td.batch_size == (2, 3)
    for step in td.unbind(1):
        for state in (step, step["next"]):
            if isinstance(state, LazyStackedTensorDict):
                single = as_torchrl_env(of_tokens()).observation_spec
                assert all(single.is_in(row) for row in state.unbind(0))
            else:
                assert env.observation_spec.is_in(state)
    assert [len(row) for row in rows(td["next"], "tokens")] == [3, 4, 5, 4, 5, 6]


def test_batch_size_device_keys_and_the_environment_inside():
    """They are those of the ramet environment."""
    inside = Walk(device="cpu")
    env = as_torchrl_env(inside)
    assert env.ramet_env is inside
    assert (env.batch_size, env.device, env.batch_locked) == (torch.Size([3]), torch.device("cpu"), True)
    assert (env.action_keys, env.reward_keys, sorted(env.done_keys)) == (["action"], ["reward"], sorted(FLAGS))
    assert not as_torchrl_env(of_tokens()).batch_locked
    moved = as_torchrl_env(Walk()).to("cpu")
    assert moved.device == moved.ramet_env.device == moved.observation_spec["at"].device == torch.device("cpu")
    assert moved.rollout(2).device == torch.device("cpu")


@pytest.mark.parametrize(
    "how", [{}, {"break_when_any_done": False}, {"break_when_all_done": True, "break_when_any_done": False}]
)
@pytest.mark.parametrize("inside", [False, True], ids=["bare", "TransformedEnv"])
def test_a_rollout_is_that_of_ramet(how, inside):
    """In the three ways to go on after the end of a row."""

    def policy(td):
        return td.set("action", td["at"] % 2 + 1)

    own = Walk()
    own.set_seed(5)
    expected = own.rollout(7, policy, **how)
    env = as_torchrl_env(Walk())
    if inside:
        env = peer.TransformedEnv(env, peer.RewardSum())
    env.set_seed(5)
    found = env.rollout(7, policy, **how)
    assert found.batch_size == expected.batch_size
    going = ~expected["done"]
    for key in ("at", "map", "action", *FLAGS):
        assert torch.equal(found[key][going[..., 0]], expected[key][going[..., 0]]), key
    for key in ("at", "map", "reward", *FLAGS):
        assert torch.equal(found["next", key][going[..., 0]], expected["next", key][going[..., 0]]), key


def test_a_seed_fixes_what_the_environment_draws():
    """Through the wrapper and through TorchRL's own."""
    for env in (as_torchrl_env(Walk((20,))), peer.TransformedEnv(as_torchrl_env(Walk((20,))), peer.StepCounter())):
        env.set_seed(3)
        first, second = env.reset()["at"], env.reset()["at"]
        env.set_seed(3)
        assert torch.equal(env.reset()["at"], first)
        assert not torch.equal(first, second)


@pytest.mark.parametrize("inside", [False, True], ids=["bare", "TransformedEnv"])
def test_a_partial_reset_touches_only_its_rows(inside):
    """And foreign keys survive it; a `TransformedEnv` of TorchRL blanks them in the rows that are reset."""
    env = as_torchrl_env(Walk())
    env = peer.TransformedEnv(env, peer.StepCounter()) if inside else env
    state = env.reset(TensorDict({"label": torch.arange(3)}, [3]))
    state["action"] = torch.full((3, 1), 2)
    state = env.step_mdp(env.step(state))
    assert state["map"].tolist() == [[2.0] * 4] * 3
    state["_reset"] = torch.tensor([[False], [True], [False]])
    again = env.reset(state)
    assert again["map"].tolist() == [[2.0] * 4, [1.0] * 4, [2.0] * 4]
    assert again["label"].tolist() == [0, 0 if inside else 1, 2]
    assert "_reset" not in again.keys()  # noqa: SIM118


@pytest.mark.parametrize("inside", [False, True], ids=["bare", "TransformedEnv"])
def test_a_step_mask_steps_only_its_rows(inside):
    """The other rows keep their state and get no reward."""
    env = as_torchrl_env(Walk())
    env = peer.TransformedEnv(env, as_torchrl_transform(StepCounter())) if inside else env
    state = env.reset()
    at = state["at"].clone()
    state["action"] = torch.full((3, 1), 2)
    state["_step"] = torch.tensor([True, False, True])
    next_td = env.step(state)["next"]
    assert (next_td["at"] - at).flatten().tolist() == [2, 0, 2]
    assert next_td["reward"].flatten().tolist() == [2.0, 0.0, 2.0]
    if inside:
        assert next_td["step_count"].flatten().tolist() == [1, 0, 1]


def test_an_environment_that_is_not_locked_takes_any_number_of_rows():
    """Three here, as the first state of a rollout."""
    env = as_torchrl_env(of_tokens())
    td = env.rollout(3, auto_reset=False, tensordict=env.reset(dense(((1, 2), (3, 4), (5, 6)))))
    assert td.batch_size == (3, 3)
    assert [row.tolist()[:2] for row in rows(td[:, 2], "tokens")] == [[1, 2], [3, 4], [5, 6]]
    assert [len(row) for row in rows(td[:, 2], "tokens")] == [4, 4, 4]


def test_flags_of_tokens_are_observations():
    """TorchRL would reset by them."""
    env = as_torchrl_env(of_tokens(batch_size=2, assign_done=True))
    assert sorted(env.done_keys) == sorted(FLAGS)
    state = env.reset(dense())
    state["tokens_response"] = torch.tensor([[EOS, 1], [1, 2]])
    next_td = env.step(state)["next"]
    assert next_td["tokens_data", "done"].tolist() == [[True, False], [False, False]]
    assert next_td["done"].tolist() == [[True], [False]]


# What two rows hold before each of 4 actions: prompt n is n % 3 + 1 times n + 10. The first row meets prompts of odd
# lengths, which end at once, and then an even one; the second one goes on for ever.
NONSTOP = [[10], [12, 12, 12], [13], [14, 14], *([11, 11] + [4, 3] * t for t in range(4))]


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_rows_that_ended_get_the_next_prompt(layout, place, wrapped):
    """With the prompts from inside ramet or from a transform of TorchRL; with TorchRL around: as a stack of rows."""
    env = of_tokens(batch_size=2)
    in_torchrl = wrapped or place == "outside"
    if place == "inside":
        env = as_torchrl_env(env.append_transform(Prompts(layout)), rows=in_torchrl)
    else:
        env = peer.TransformedEnv(as_torchrl_env(env, rows=True), as_torchrl_transform(Prompts(layout)))
    if wrapped:
        env = peer.TransformedEnv(env, peer.StepCounter())
    td = env.rollout(4, answers, break_when_any_done=False)
    assert td.batch_size == (2, 4)
    assert steps_of(td) == NONSTOP
    assert td["next", "terminated"].squeeze(-1).tolist() == [[True, True, True, False], [False] * 4]
    if wrapped:
        assert td["next", "step_count"].squeeze(-1).tolist() == [[1, 1, 1, 1], [1, 2, 3, 4]]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_collector_collects(wrapped):
    """Eight frames are four steps of two rows, and the next batch goes on where the last stopped."""
    env = as_torchrl_env(of_tokens(batch_size=2).append_transform(Prompts()), rows=wrapped)
    env = peer.TransformedEnv(env, peer.StepCounter(3)) if wrapped else env
    collector = Collector(env, answers, frames_per_batch=8, total_frames=16)
    first, second = list(collector)
    collector.shutdown()
    assert first.batch_size == second.batch_size == (2, 4)
    if wrapped:  # the second row is cut after three steps
        assert first["next", "truncated"].squeeze(-1).tolist() == [[False] * 4, [False, False, True, False]]
        assert steps_of(first) == [*NONSTOP[:7], [15, 15, 15]]
    else:
        assert steps_of(first) == NONSTOP
        assert steps_of(second)[4] == [11, 11] + [4, 3] * 4


def test_without_rows_a_transformed_env_can_not_mix_rows_of_different_lengths():
    """The error says what to do."""
    for layout, shapes in (("padded", r"\(2, 3\)\) with the others .*\(2, 4\)"), ("jagged", "ragged")):
        env = as_torchrl_env(of_tokens(batch_size=2).append_transform(Prompts(layout)))
        env = peer.TransformedEnv(env, peer.StepCounter())
        state = env.step_mdp(env.step(answers(env.reset())))
        state["_reset"] = torch.tensor([[False], [True]])
        with pytest.raises(RuntimeError, match=f"'tokens': some rows were reset.*{shapes}.*pass rows=True"):
            env.reset(state)


def test_all_rows_may_end():
    """Each at its own step, as a stack of rows of different lengths."""
    env = peer.TransformedEnv(as_torchrl_env(of_tokens(batch_size=2), rows=True), as_torchrl_transform(StepCounter(3)))
    td = env.rollout(5, answers, break_when_all_done=True, break_when_any_done=False, tensordict=dense(((1,), (2,))))
    assert td.batch_size == (2, 1)
    td = env.rollout(5, answers, break_when_all_done=True, break_when_any_done=False, tensordict=lazy())
    assert td.batch_size == (2, 3)
    assert td["next", "terminated"].squeeze(-1)[:, -1].tolist() == [False, True]
    assert td["next", "truncated"].squeeze(-1)[:, -1].tolist() == [True, False]
    assert steps_of(td[:, -1]["next"]) == [[2, 3] + [4, 3] * 3, [4, 5, 6, 4, 9]]


def test_several_environments_run_as_one():
    """In TorchRL's `SerialEnv`."""
    env = peer.SerialEnv(2, lambda: as_torchrl_env(Walk(())))
    peer.check_env_specs(env)
    td = env.rollout(6, lambda td: td.set("action", torch.full((2, 1), 2)), break_when_any_done=False)
    assert td.batch_size == (2, 6)
    assert torch.equal(td["next", "at"], td["at"] + 2)
    env.close()


@pytest.mark.parametrize("method", [None, "as_padded_tensor", "as_nested_tensor"])
@pytest.mark.parametrize("place", ["inside", "inside, wrapped", "outside"])
def test_a_loader_fills_rows_that_ended(method, place):
    """The primer is inside ramet or a transform of TorchRL; answers come along with their prompts."""
    if place == "outside":
        env = as_torchrl_env(of_tokens(batch_size=2), rows=True)
        env = peer.TransformedEnv(env, as_torchrl_transform(DataLoadingPrimer(ROWS, stack_method=method)))
    else:
        env = as_torchrl_env(primed(method), rows=place != "inside")
        env = env if place == "inside" else peer.TransformedEnv(env, peer.StepCounter())
    td = env.rollout(4, answers, break_when_any_done=False)
    assert steps_of(td) == NONSTOP
    for step in (td, td["next"]):
        assert step["answer"].tolist() == step["group_id"].tolist() == [[0, 2, 3, 4], [1] * 4]
    collector = Collector(env, answers, frames_per_batch=8, total_frames=8)
    (batch,) = list(collector)
    collector.shutdown()
    assert batch["answer"][:, 0].tolist() == [5, 6]  # a collector begins by a reset


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_tokenizer_and_a_primer_work_together(place):
    """Text and tokens are in the rollout, and the tokens are those that were sampled."""
    parts = [
        Tokenizer(["text"], ["tokens"], ["text_response"], ["tokens_response"], tokenizer=tiny_tokenizer()),
        DataLoadingPrimer(TEXTS),
    ]
    env = LLMEnv(batch_size=2, eos_token_id=EOS)
    if place == "inside":
        env = as_torchrl_env(env.append_transform(parts[0]).append_transform(parts[1]), rows=True)
        env = peer.TransformedEnv(env, peer.StepCounter())
    else:
        env = peer.TransformedEnv(as_torchrl_env(env, rows=True), peer.Compose(*map(as_torchrl_transform, parts)))
    assert env.action_keys == ["tokens_response"]
    td = env.rollout(3, answers, break_when_any_done=False)
    encode = tiny_tokenizer().encode
    prompts = [encode(row["text"], add_special_tokens=False) for row in TEXTS]
    assert [len(prompt) for prompt in prompts] == [4, 5, 2, 4]
    first, second = [prompts[0] + [4, 3] * t for t in range(3)], [prompts[1], prompts[2], prompts[2] + [4, 3]]
    assert steps_of(td) == first + second
    texts = [tiny_tokenizer().decode(ids, skip_special_tokens=True) for ids in first + second]
    assert rows(td, "text") == texts
    assert texts[:2] + texts[3:5] == ["1+1=", "1+1=0", "12+1=", "5="]


class Gaussian(torch.nn.Module):
    def __init__(self, loc):
        super().__init__()
        self.loc = torch.nn.Parameter(torch.tensor(loc))
        self.in_keys, self.log_prob_key = ["action"], "action_log_prob"

    def log_prob(self, td):
        return torch.distributions.Normal(self.loc, 1.0).log_prob(td["action"]).squeeze(-1)


class Push(Walk):
    """Walks by any number, and never ends."""

    def __init__(self):
        super().__init__((2,))
        self.action_spec = Unbounded((2, 1))

    def _step(self, td):
        out = {"at": td["at"], "map": td["map"], "reward": torch.ones(2, 1)}
        return TensorDict(out, td.batch_size)


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_the_reward_of_moving_away_from_a_reference(place):
    """Normals around 1 and around 0: at an action of 1 the log-ratio is 1/2, so the reward is 1 - 0.1 / 2."""
    parts = [KLRewardTransform(Gaussian(0.0), coef=0.1), RewardSum()]
    if place == "inside":
        env = as_torchrl_env(Push().append_transform(parts[0]).append_transform(parts[1]))
    else:
        env = peer.TransformedEnv(as_torchrl_env(Push()), peer.Compose(*map(as_torchrl_transform, parts)))

    def policy(td):
        td["action"] = torch.ones(2, 1)
        return td.set("action_log_prob", Gaussian(1.0).log_prob(td).detach())

    td = env.rollout(3, policy)
    assert torch.allclose(td["next", "reward"], torch.full((2, 3, 1), 0.95))
    assert torch.allclose(td["next", "episode_reward"][1].flatten(), torch.tensor([0.95, 1.9, 2.85]))
    buffer = peer_data.TensorDictReplayBuffer(storage=peer_data.LazyTensorStorage(6), batch_size=6)
    buffer.append_transform(as_torchrl_transform(KLRewardTransform(Gaussian(0.0), coef=0.1, action_key="action")))
    buffer.extend(td.reshape(-1).exclude(("next", "episode_reward")))
    assert torch.allclose(buffer.sample()["next", "reward"], torch.full((6, 1), 0.9))


class Given(Transform):
    """Shows twice the place, and takes a wish in place of the action."""

    def __init__(self):
        super().__init__(in_keys=["at"], out_keys=["twice"], in_keys_inv=["wish"], out_keys_inv=["action"])
        self.seed = None

    def set_seed(self, seed):
        self.seed = seed

    def _apply_transform(self, value):
        return value * 2

    def _inv_apply_transform(self, value):
        return value + 1

    def transform_observation_spec(self, spec):
        spec["twice"] = spec["at"]
        return spec

    def transform_action_spec(self, spec):
        del spec["action"]
        spec["wish"] = Categorical(2, (*spec.shape, 1))
        return spec

    def transform_consumed_keys(self, keys):
        return [*keys, "wish"]


def test_a_transform_maps_keys_and_specs_both_ways():
    """Observation, action and their specs, in `TransformedEnv` and in `Compose`."""
    for wrap in (lambda transform: transform, peer.Compose):
        env = peer.TransformedEnv(as_torchrl_env(Walk()), wrap(as_torchrl_transform(Given())))
        peer.check_env_specs(env)
        assert env.action_keys == ["wish"]
        assert env.full_action_spec["wish"] == peer_data.Categorical(2, (3, 1))
        state = env.reset()
        assert torch.equal(state["twice"], state["at"] * 2)
        state["wish"] = torch.tensor([[0], [1], [1]])
        td = env.step(state)
        assert td["next", "reward"].flatten().tolist() == [1.0, 2.0, 2.0]
        assert torch.equal(td["next", "twice"], td["next", "at"] * 2)


class Words(Transform):
    """Takes a wish in place of the action."""

    def _inv_call(self, td):
        if "wish" in td.keys():  # noqa: SIM118
            td["action"] = td["wish"] + 1
        return td

    def transform_consumed_keys(self, keys):
        return [*keys, "wish"]


@pytest.mark.parametrize("place", ["ramet", "ramet, wrapped", "TorchRL"])
def test_what_a_step_used_up_is_gone(place):
    """No later step takes an old key for its own; a bare environment keeps the action that it made of another key."""
    if place == "TorchRL":
        env = peer.TransformedEnv(as_torchrl_env(Walk()), as_torchrl_transform(Words()))
    else:
        env = as_torchrl_env(Walk().append_transform(Words()))
        env = env if place == "ramet" else peer.TransformedEnv(env, peer.StepCounter())
    seen = []

    def policy(td):
        seen.append(sorted({"wish", "action"} & set(td.keys())))
        return td.set("wish", torch.ones(3, 1, dtype=torch.int64))

    for how in ({}, {"break_when_any_done": False}):
        td = env.rollout(2, policy, **how)
        assert seen == [[], []]
        assert td["next", "reward"].flatten().tolist() == [2.0] * 6
        if place == "ramet":
            assert td["action"].flatten().tolist() == [2] * 6
        seen.clear()


def test_a_transform_sees_its_parent():
    """With the transforms before it, in whatever place it has; none outside."""
    first, second = Given(), StepCounter(2)
    assert as_torchrl_transform(second).parent is None
    chain = Compose(first, second)
    env = peer.TransformedEnv(as_torchrl_env(Walk()), peer.StepCounter(step_count_key="steps"))
    env = env.append_transform(as_torchrl_transform(chain))
    env.rollout(2)
    assert (first.parent.batch_size, first.parent.device) == (torch.Size([3]), None)
    assert first.parent.full_observation_spec.leaves() == ["at", "map", "steps"]
    assert second.parent.full_observation_spec.leaves() == ["at", "map", "steps", "twice"]
    assert (first.parent.action_keys, second.parent.action_keys) == (["action"], ["wish"])
    assert first.parent.reward_spec == second.parent.reward_spec == Unbounded((3, 1), "cpu")
    assert second.parent.consumed_keys == ["action", "wish"]
    assert sorted(second.parent.done_keys) == sorted(FLAGS)


def test_step_counter_counts_as_torchrls_own_does():
    """On TorchRL's pendulum, through cuts and resets."""
    for make in (lambda: peer.StepCounter(3), lambda: as_torchrl_transform(StepCounter(3))):
        env = peer.TransformedEnv(peer.SerialEnv(2, peer.PendulumEnv), make())
        peer.check_env_specs(env)
        td = env.rollout(7, break_when_any_done=False)
        assert td["next", "step_count"].squeeze(-1).tolist() == [[1, 2, 3, 1, 2, 3, 1]] * 2
        assert td["next", "truncated"].squeeze(-1).tolist() == [[False, False, True] * 2 + [False]] * 2
        assert not td["next", "terminated"].any()
        assert torch.equal(td["next", "done"], td["next", "truncated"])


def test_specs_without_a_like_pass_through():
    """One-hot actions, and a range for each entry, stay what they are."""

    class Hot(peer.EnvBase):
        def __init__(self):
            super().__init__()
            low, high = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0])
            self.observation_spec = peer_data.Composite(x=peer_data.Bounded(low, high), shape=())
            self.action_spec = peer_data.OneHot(4)
            self.reward_spec = peer_data.Unbounded(1)

        def _reset(self, tensordict=None, **options):
            return self.observation_spec.rand()

        def _step(self, tensordict):
            flags = {flag: torch.zeros(1, dtype=torch.bool) for flag in ("done", "terminated")}
            return self.observation_spec.rand().update({"reward": torch.ones(1), **flags})

        def _set_seed(self, seed):
            pass

    env = peer.TransformedEnv(Hot(), as_torchrl_transform(StepCounter(2)))
    peer.check_env_specs(env)
    assert env.action_spec == peer_data.OneHot(4)
    assert env.observation_spec["x"] == Hot().observation_spec["x"]
    assert env.observation_spec["step_count"].shape == (1,)
    assert env.rollout(5)["next", "truncated"].flatten().tolist() == [False, True]


def test_the_state_stays_hidden_from_the_reset_of_torchrls_own_environments():
    """They might take it for the state to begin in."""

    class Drift(peer.EnvBase):
        def __init__(self):
            super().__init__(batch_size=(2,))
            self.observation_spec = peer_data.Composite(x=peer_data.Unbounded((2, 1)), shape=(2,))
            self.action_spec = peer_data.Unbounded((2, 1))
            self.reward_spec = peer_data.Unbounded((2, 1))

        def _reset(self, tensordict=None, **options):
            given = None if tensordict is None else tensordict.get("x", None)
            return TensorDict({"x": torch.zeros(2, 1) if given is None else given}, [2])

        def _step(self, tensordict):
            flags = {flag: torch.zeros(2, 1, dtype=torch.bool) for flag in ("done", "terminated")}
            return TensorDict({"x": tensordict["x"] + 1, "reward": torch.ones(2, 1), **flags}, [2])

        def _set_seed(self, seed):
            pass

    env = peer.TransformedEnv(Drift(), as_torchrl_transform(StepCounter()))
    state = env.step_mdp(env.rand_step(env.reset()))
    state["_reset"] = torch.tensor([[True], [False]])
    state = env.reset(state)
    assert state["x"].flatten().tolist() == [0.0, 1.0]
    assert state["step_count"].flatten().tolist() == [0, 1]


def test_a_transform_works_on_replayed_data():
    """In a replay buffer, where there is no environment."""
    buffer = peer_data.TensorDictReplayBuffer(storage=peer_data.LazyTensorStorage(10), batch_size=4)
    transform = Given()
    transform.in_keys_inv, transform.out_keys_inv = [], []
    buffer.append_transform(as_torchrl_transform(transform))
    buffer.extend(TensorDict({"at": torch.arange(10)[:, None]}, [10]))
    sample = buffer.sample()
    assert torch.equal(sample["twice"], sample["at"] * 2)
    assert transform.parent is None


def test_a_clone_may_go_elsewhere():
    """A transform belongs to one environment; its clone to another."""
    transform = as_torchrl_transform(Compose(StepCounter(2), RewardSum()))
    one = peer.TransformedEnv(as_torchrl_env(Walk()), transform)
    other = peer.TransformedEnv(as_torchrl_env(Walk((1,))), transform.clone())
    for _ in range(2):
        assert one.rollout(2)["next", "step_count"].shape == (3, 2, 1)
        assert other.rollout(2)["next", "episode_reward"].shape == (1, 2, 1)
    for env, size in ((one, 3), (other, 1)):
        inner = env.transform.ramet_transform
        assert [part.parent.batch_size for part in (inner, inner[0], inner[1])] == [torch.Size([size])] * 3
    assert inner[1].parent.observation_spec.leaves() == ["at", "map", "step_count"]


def test_a_transform_is_a_module_and_is_seeded():
    """Its tensors move with TorchRL's module, and `set_seed` reaches it."""

    class Scale(Given):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

    transform = as_torchrl_transform(Scale())
    assert list(transform.state_dict()) == ["ramet_transform.scale"]
    assert transform.to(torch.float64).ramet_transform.scale.dtype is torch.float64
    transform.set_seed(4)
    assert transform.ramet_transform.seed == 4


@pytest.mark.parametrize(
    "spec",
    [
        Unbounded((2, -1), dtype=torch.int64),
        Unbounded((2,), "cpu"),
        Bounded(-1.0, 2.5, (2, 3)),
        Bounded(0, 7, (2, -1), dtype=torch.int64),
        Categorical(5, (2, 1)),
        Categorical(2, (2, 1), dtype=torch.bool),
        NonTensor((2,), example_data="a"),
        Composite({"x": Unbounded((2, 1)), "in": {"y": Categorical(3, (2,))}}, shape=(2,)),
    ],
    ids=str,
)
def test_specs_go_there_and_back(spec):
    """With shape, dtype, range and example; random values of one fit the other."""
    there = to_torchrl_spec(spec)
    assert there.shape == spec.shape
    assert isinstance(spec, Composite) or there.dtype == spec.dtype
    back = from_torchrl_spec(there)
    assert type(back) is type(spec)
    assert back.is_in(there.rand())
    assert there.is_in(spec.rand())
    assert str(back.to("cpu")) == str(spec.to("cpu"))


def test_a_spec_that_torchrl_does_not_know_is_named():
    """One of a kind of its own; a subclass of a known kind is of that kind."""

    class Even(Unbounded):
        pass

    class Stranger(Spec):
        shape, dtype, device = torch.Size(), None, None
        rand = zero = is_in = project = Spec.__repr__

        def __repr__(self):
            return "Stranger()"

    assert to_torchrl_spec(Even((2,))) == peer_data.Unbounded((2,))
    with pytest.raises(TypeError, match=r"TorchRL has no spec like Stranger\(\)"):
        to_torchrl_spec(Stranger())


def test_the_contract_of_ramet_holds_of_what_is_inside():
    """The environments of these checks are right themselves."""
    check_env_specs(Walk())
    check_env_specs(of_tokens(batch_size=2).append_transform(Prompts()))
