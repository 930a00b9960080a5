"""Environments: what answers to the tokens of a policy.

The transforms that are appended to them can be imported from here as well.
"""

from __future__ import annotations

from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase, TransformedEnv
from ramet.envs.hashing import LLMHashingEnv
from ramet.envs.llm import LLMEnv
from ramet.transforms import (
    Compose,
    DataLoadingPrimer,
    KLRewardTransform,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Tokenizer,
    Transform,
    as_nested_tensor,
    as_padded_tensor,
)

__all__ = [
    "Compose",
    "DataLoadingPrimer",
    "EnvBase",
    "KLRewardTransform",
    "LLMEnv",
    "LLMHashingEnv",
    "RewardSum",
    "StepCounter",
    "TensorDictPrimer",
    "Tokenizer",
    "Transform",
    "TransformedEnv",
    "as_nested_tensor",
    "as_padded_tensor",
    "check_env_specs",
]
