"""Steps are counted, and an episode is cut at the limit without being ended."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from ramet.envs.check import check_env_specs
from ramet.envs.llm import LLMEnv
from ramet.transforms.step_counter import StepCounter


def answer(td):
    td["tokens_response"] = torch.tensor([[1], [9]]) if td["tokens"].shape[1] == 4 else torch.tensor([[1], [1]])


def test_the_limit_truncates_and_never_terminates():
    """A row that ends by itself on its last step has both flags; one that is cut is not terminated."""
    env = LLMEnv(from_text=False, eos_token_id=9).append_transform(StepCounter(3))
    prompt = TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2])
    td = env.rollout(10, answer, tensordict=prompt)
    assert td.batch_size == (2, 3)
    assert td["step_count"].squeeze(-1).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert td["next", "step_count"].squeeze(-1).tolist() == [[1, 2, 3], [1, 2, 3]]
    assert td["next", "truncated"].squeeze(-1).tolist() == [[False, False, True]] * 2
    assert td["next", "terminated"].squeeze(-1).tolist() == [[False] * 3, [False, False, True]]
    assert td["next", "done"].squeeze(-1).tolist() == [[False, False, True]] * 2


def test_the_count_starts_over_in_rows_that_are_reset():
    """And goes on in the others."""
    env = LLMEnv(from_text=False, eos_token_id=9).append_transform(StepCounter(3))
    state = env.reset(TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2]))
    for _ in range(2):
        state = env.step_mdp(env.rand_step(state))
    state["_reset"] = torch.tensor([False, True])
    assert env.reset(state)["step_count"].tolist() == [[2], [0]]


def test_no_limit_only_counts_and_keys_can_be_named():
    """The count and the flag go where they are told to."""
    env = LLMEnv(from_text=False, eos_token_id=9).append_transform(StepCounter(step_count_key="n"))
    td = env.rollout(4, tensordict=TensorDict({"tokens": torch.tensor([[1, 2]])}, [1]))
    assert td["next", "n"].flatten().tolist() == [1, 2, 3, 4]
    assert not td["next", "done"].any()
    cut = LLMEnv(from_text=False, eos_token_id=9).append_transform(StepCounter(1, truncated_key="cut"))
    next_td = cut.rand_step(cut.reset(TensorDict({"tokens": torch.tensor([[1, 2]])}, [1])))["next"]
    assert "cut" in cut.done_keys
    assert (next_td["cut"].item(), next_td["done"].item()) == (True, True)
    with pytest.raises(ValueError, match="at least 1: found 0"):
        StepCounter(0)


def test_a_cut_of_another_name_is_there_from_the_reset_on():
    env = LLMEnv(from_text=False, eos_token_id=0, batch_size=1).append_transform(StepCounter(2, truncated_key="cut"))
    check_env_specs(env)
    td = env.reset(TensorDict({"tokens": torch.tensor([[1]]), "attention_mask": torch.ones(1, 1).bool()}, [1]))
    assert td["cut"].tolist() == [[False]]
