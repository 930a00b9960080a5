"""Environments: what answers to the tokens of a policy.

The transforms that are appended to them, the specs and what reads their results can be imported from here as well.
"""

from __future__ import annotations

from ramet.envs.chat import ChatEnv
from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase, TransformedEnv
from ramet.envs.hashing import LLMHashingEnv
from ramet.envs.llm import LLMEnv
from ramet.forest import Forest, MCTSForest, SipHash
from ramet.ragged import compact, pad, rows
from ramet.specs import Bounded, Categorical, Composite, NonTensor, Unbounded
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
    "Bounded",
    "Categorical",
    "ChatEnv",
    "Compose",
    "Composite",
    "DataLoadingPrimer",
    "EnvBase",
    "Forest",
    "KLRewardTransform",
    "LLMEnv",
    "LLMHashingEnv",
    "MCTSForest",
    "NonTensor",
    "RewardSum",
    "SipHash",
    "StepCounter",
    "TensorDictPrimer",
    "Tokenizer",
    "Transform",
    "TransformedEnv",
    "Unbounded",
    "as_nested_tensor",
    "as_padded_tensor",
    "check_env_specs",
    "compact",
    "pad",
    "rows",
]
