"""What a newcomer tries first: strings and tokens from loaders, without a batch and with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

import ramet
from ramet.envs import DataLoadingPrimer, LLMEnv

STRINGS = ["a string", "another string", "a third string", "the last string"]
ROWS = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5, 6]), torch.tensor([7])]


def check_flags(rollout: TensorDictBase, size: tuple[int, ...]) -> None:
    assert rollout.batch_size == size
    for flag in ("done", "terminated", "truncated"):
        for td in (rollout, rollout["next"]):
            assert td[flag].shape == (*size, 1)
            assert td[flag].dtype is torch.bool
            assert not td[flag].any()


@pytest.mark.filterwarnings("ignore:eos_token_id")
def test_strings_one_by_one_and_three_together() -> None:
    env = LLMEnv(from_text=True, str_key="observation", action_key="action").append_transform(
        DataLoadingPrimer(STRINGS, example_data="a string!")
    )
    rollout = env.rollout(3)
    check_flags(rollout, (3,))
    assert ramet.rows(rollout, "observation")[0] == "a string"
    said = ramet.rows(rollout, "action")
    assert ramet.rows(rollout, ("next", "observation"))[-1] == "a string" + "".join(said)

    first = env.reset(TensorDict(batch_size=[3]))
    assert ramet.rows(first, "observation") == STRINGS[1:]
    rollout = env.rollout(3, auto_reset=False, tensordict=first)
    check_flags(rollout, (3, 3))
    assert ramet.rows(rollout[:, 0], "observation") == STRINGS[1:]


@pytest.mark.filterwarnings("ignore:eos_token_id")
@pytest.mark.parametrize(
    ("stack_method", "lazy"), [(None, True), ("as_padded_tensor", False), ("as_nested_tensor", False)]
)
def test_tokens_one_by_one_and_three_together(stack_method: Any, lazy: bool) -> None:
    env = LLMEnv(from_text=False, token_key="observation", action_key="action", has_attention=False).append_transform(
        DataLoadingPrimer(ROWS, stack_method=stack_method)
    )
    env.set_seed(0)
    rollout = env.rollout(3)
    check_flags(rollout, (3,))
    assert ramet.rows(rollout, "observation")[0].tolist() == [1, 2]
    assert [len(row) for row in ramet.rows(rollout, ("next", "observation"))] == [3, 4, 5]

    first = env.reset(TensorDict(batch_size=[3]))
    assert isinstance(first, LazyStackedTensorDict) == lazy
    rollout = env.rollout(3, auto_reset=False, tensordict=first)
    check_flags(rollout, (3, 3))
    lengths = [len(row) for row in ramet.rows(rollout[:, 2], ("next", "observation"))]
    assert lengths == ([6] * 3 if stack_method == "as_padded_tensor" else [4, 6, 4])
