"""Sentences of the contract that stand between the files of the other tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

import ramet
from ramet.envs import DataLoadingPrimer, KLRewardTransform, LLMEnv, LLMHashingEnv, StepCounter, check_env_specs
from ramet.forest import Forest
from ramet.models.tiny import tiny_tokenizer
from ramet.specs import Composite, NonTensor, Unbounded

EOS = 9


class Half(nn.Module):
    """A reference that gives each token a probability of 1/2."""

    in_keys, log_prob_key = ("tokens_response",), "log_probs"

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(0.5))

    def log_prob(self, td: TensorDictBase) -> torch.Tensor:
        return self.share.log().expand(td["tokens_response"].shape)


def of_tokens(**options: Any) -> LLMEnv:
    return LLMEnv(from_text=False, eos_token_id=EOS, **options)


@pytest.mark.parametrize("kind", ["tokens", "hashes", "text"])
@pytest.mark.parametrize("limit", ["counter", "set_truncated"])
def test_right_truncation_is_never_reported_as_termination(kind: str, limit: str) -> None:
    """The first row says the eos in the second step, the second row never does and is cut."""

    def policy(td: TensorDictBase) -> None:
        said = torch.tensor([[EOS if td["time"][0] else 1], [1]])
        td["tokens_response"], td["action"], td["text_response"] = said, said, ["a", "b"]
        td["time"] = td["time"] + 1

    given: dict[str, Any] = {"time": torch.zeros(2, dtype=torch.int64)}
    given |= {"text": ["x", "y"]} if kind == "text" else {}
    given |= dict.fromkeys(["tokens", "observation"], torch.tensor([[1, 2], [3, 4]]))
    given |= {"attention_mask": torch.ones(2, 2, dtype=torch.bool)}
    made = {"tokens": of_tokens, "hashes": lambda: LLMHashingEnv(10, eos_token_id=EOS)}
    env: Any = made[kind]() if kind in made else LLMEnv(eos_token_id=EOS)
    if limit == "counter":
        env = env.append_transform(StepCounter(3))
    td = env.rollout(
        3, policy, break_when_all_done=True, set_truncated=limit == "set_truncated", tensordict=TensorDict(given, [2])
    )
    last = td[:, -1]["next"]
    assert td.batch_size == (2, 3)
    assert last["terminated"].tolist() == [[True], [False]]
    assert last["truncated"].tolist() == [[False], [True]]
    assert last["done"].tolist() == [[True], [True]]


def test_right_zero_is_no_batch_in_the_environment_and_in_the_primer_alike() -> None:
    primer = DataLoadingPrimer(["a", "b"], batch_size=0)
    env = LLMEnv(batch_size=0, eos_token_id=EOS)
    assert env.batch_size == primer.batch_size == LLMEnv(eos_token_id=EOS).batch_size == torch.Size([])
    assert env.append_transform(primer).reset()["text"] == "a"


def test_a_device_is_where_everything_is() -> None:
    """Of the environment, its specs, what comes out of it, and of the rows of a loader."""
    env = of_tokens(device="cpu")
    cpu = torch.device("cpu")
    assert env.device == env.action_spec.device == cpu
    td = env.rollout(2, tensordict=TensorDict({"tokens": torch.tensor([[1]])}, [1]))
    assert td.device == td["next"].device == cpu
    loaded = LLMEnv.from_dataloader([torch.tensor([1, 2])], from_text=False, device="cpu", eos_token_id=EOS)
    assert loaded.device == loaded.reset().device == cpu
    with pytest.raises(RuntimeError, match="device"):
        of_tokens(device="nowhere")


def test_from_dataloader_hands_on_reward_key_and_primers() -> None:
    env = LLMEnv.from_dataloader(
        [{"tokens": torch.tensor([1, 2]), "level": 3}],
        from_text=False,
        assign_reward=True,
        reward_key=("judge", "points"),
        primers={"level": Unbounded((), dtype=torch.float32)},
        eos_token_id=EOS,
    )
    assert env.reward_keys == [("judge", "points")]
    assert env.observation_spec["level"] == Unbounded((), dtype=torch.float32)
    td = env.step(env.reset().set("tokens_response", torch.tensor([4, 5])))
    assert td["next", "judge", "points"].tolist() == [0.0, 0.0]
    assert td["level"].item() == 3.0


def test_the_parts_of_the_penalty_are_public() -> None:
    """The copy and its parameters, where the log-probs are, and the coefficient, a buffer that can be changed."""
    actor = Half()
    transform = KLRewardTransform(actor, coef=0.5, action_key="tokens_response")
    assert transform.sample_log_prob_key == "log_probs"
    assert transform.functional_actor is not actor
    assert transform.frozen_params is not None
    assert transform.frozen_params["share"].item() == 0.5
    assert not transform.frozen_params["share"].requires_grad
    assert dict(transform.named_buffers())["coef"].item() == 0.5
    transform.coef.fill_(2.0)
    td = TensorDict({"tokens_response": torch.tensor([[1]]), "log_probs": torch.zeros(1, 1)}, [1])
    assert transform(td)["reward"].item() == pytest.approx(-2 * 0.6931472)
    assert KLRewardTransform(actor, functional=False).frozen_params is None
    assert KLRewardTransform(actor, functional=False).functional_actor is actor


def test_a_penalty_begins_with_zeros_under_a_key_of_its_own() -> None:
    env = of_tokens().append_transform(KLRewardTransform(Half(), out_keys=["paid"]))
    td = env.reset(TensorDict({"tokens": torch.tensor([[1], [2]])}, [2]))
    assert td["paid"].shape == (2, 0, 1)
    td.update({"tokens_response": torch.tensor([[3, 4], [5, 6]]), "log_probs": torch.zeros(2, 2)})
    td = env.step_mdp(env.step(td))
    assert env.reset(td)["paid"].tolist() == [[[0.0], [0.0]]] * 2


def test_a_plot_shows_text_where_it_is_told_how() -> None:
    tokenizer = tiny_tokenizer()
    env = LLMHashingEnv(tokenizer=tokenizer)
    forest = Forest()
    forest.extend(env.rollout(1, lambda td: td.set("action", torch.tensor([8])), tensordict=env.make_tensordict("7=")))
    hover = forest.plot(decode=tokenizer.decode).data[-1].hovertext
    assert any("7=" in label for label in hover)
    assert not any("7=" in label for label in forest.plot().data[-1].hovertext)


def test_rows_and_pad_read_what_every_stack_method_gives_and_its_rollout() -> None:
    """Rows are the same in every layout."""
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    for method in (None, "as_padded_tensor", "as_nested_tensor"):
        env = LLMEnv.from_dataloader(prompts, from_text=False, batch_size=2, stack_method=method, eos_token_id=EOS)
        td = env.rollout(2, lambda td: td.set("tokens_response", torch.tensor([[5], [6]])))
        found = [row.tolist() for row in ramet.rows(td, ("next", "tokens"))]
        assert found == [[1, 2, 3, 5], [1, 2, 3, 5, 5], [4, 6], [4, 6, 6]], method
        padded, real = ramet.pad(td, ("next", "tokens"), "left", -1)
        assert padded.shape == real.shape == (2, 2, 5), method
        assert padded[1, 0].tolist() == [-1, -1, -1, 4, 6], method


def test_a_random_step_begins_an_episode_and_a_rollout_without_a_policy_draws_its_actions() -> None:
    env = LLMEnv.from_dataloader([torch.tensor([1, 2])], from_text=False, vocab_size=3, eos_token_id=-1)
    td = env.rand_step()
    assert td["tokens"].tolist() == [1, 2]
    assert td["next", "tokens"].tolist() == [1, 2, *td["tokens_response"].tolist()]
    env.set_seed(0)
    said = env.rollout(20)["tokens_response"].flatten()
    assert set(said.tolist()) == {0, 1, 2}
    env.set_seed(0)
    assert torch.equal(env.rollout(20)["tokens_response"].flatten(), said)


class Late(LLMEnv):
    """An environment that leaves its specs in the third step."""

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        next_td = super()._step(td)
        return next_td.set("tokens", next_td["tokens"].float()) if td["tokens"].shape[-1] > 2 else next_td


def test_max_steps_says_how_far_an_environment_is_checked() -> None:
    env = Late(from_text=False, eos_token_id=-1, batch_size=1)
    check_env_specs(env, max_steps=2)
    with pytest.raises(AssertionError, match=r"'tokens': expected .*int64.*found float32 tensor"):
        check_env_specs(env, max_steps=3)


def test_every_way_to_look_at_a_forest_takes_a_root() -> None:
    forest = Forest()
    steps = {"tokens": torch.tensor([[1, 2], [1, 3]]), "tokens_response": torch.tensor([[5], [6]])}
    next_td = TensorDict({"tokens": torch.tensor([[1, 2, 5], [1, 3, 6]])}, [2])
    forest.extend(TensorDict({**steps, "next": next_td}, [2]))
    root = torch.tensor([1, 3])
    assert list(forest.valid_paths()) == [(0, 0, 0), (0, 1, 0)]
    assert list(forest.valid_paths(root)) == [(0,)]
    assert forest.rollout_from_path((0,), root)["next", "tokens"].tolist() == [[1, 3, 6]]
    assert forest.to_string(root).splitlines() == ["() [1, 3]  visits 1", "  (0,) [6]  visits 1"]


def test_specs_expand_and_start_with_the_batch_of_their_composite() -> None:
    spec = Composite({"x": Unbounded((2, -1)), "note": NonTensor((2,), example_data="a")}, shape=(2,))
    larger = spec.expand(3, 2)
    assert (larger.shape, larger["x"].shape, larger["note"].shape) == ((3, 2), (3, 2, -1), (3, 2))
    assert larger.is_in(larger.rand())
    assert not larger.is_in(spec.rand())
    with pytest.raises(ValueError, match=r"'x' must start with the batch size \(2,\): found \(3,\)"):
        Composite({"x": Unbounded((3,))}, shape=(2,))


def test_a_random_string_is_the_example_and_another_type_does_not_fit() -> None:
    spec = NonTensor((2,), example_data="a")
    assert spec.rand().tolist() == spec.zero().tolist() == ["a", "a"]
    assert spec.is_in(["b", "c"])
    assert not spec.is_in(["b", 3])


def test_the_device_of_an_environment_is_where_its_results_are() -> None:
    env = LLMEnv(from_text=False, eos_token_id=9, device="cpu")
    assert env.device == torch.device("cpu")
    assert env.observation_spec["tokens"].device == torch.device("cpu")
    prompts = TensorDict({"tokens": torch.tensor([[1]])}, [1])
    assert prompts.device is None
    assert env.reset(prompts).device == torch.device("cpu")


def test_a_forest_finds_the_entries_of_a_rollout_by_itself() -> None:
    """The mask beside the tokens, log-probs under either name, the action of an environment of ids."""
    mask = torch.tensor([[False, True], [True, True]])
    steps = {
        "tokens": torch.tensor([[0, 2], [1, 3]]),
        "attention_mask": mask,
        "tokens_response": torch.tensor([[5], [6]]),
    }
    next_td = {"tokens": torch.tensor([[0, 2, 5], [1, 3, 6]]), "attention_mask": torch.cat([mask, mask[:, 1:]], 1)}
    for name in ("log_probs", "sample_log_prob"):
        forest = Forest()
        forest.extend(
            TensorDict({**steps, name: torch.tensor([[-1.0], [-2.0]]), "next": TensorDict(next_td, [2])}, [2])
        )
        assert [forest.path(number).tolist() for number in (0, 1)] == [[2, 5], [1, 3, 6]]
        assert [rollout.log_probs[-1] for rollout in forest.rollouts] == [-1.0, -2.0]
    ids = {"observation": torch.tensor([[1]]), "action": torch.tensor([[4]])}
    forest.extend(TensorDict({**ids, "next": TensorDict({"observation": torch.tensor([[1, 4]])}, [1])}, [1]))
    assert forest.path(2).tolist() == [1, 4]


def test_a_reset_without_a_tensordict_has_the_batch_of_the_environment() -> None:
    env = LLMEnv.from_dataloader(["a", "b"], batch_size=2, eos_token_id=2)
    assert env.reset().batch_size == (2,)
    assert env.reset(TensorDict({"kept": torch.arange(2)}, [2]))["kept"].tolist() == [0, 1]
