"""Reinforcement learning of language models over a forest of shared prefixes.

The names below stand in the order of the flow; each is loaded when it is first used, so that `import ramet` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ramet.chat import ChatTemplate, Conversation
    from ramet.checking import check_task
    from ramet.config import (
        AdvantageConfig,
        CheckpointConfig,
        EvaluationConfig,
        KLConfig,
        LossConfig,
        ModelConfig,
        OptimizerConfig,
        RolloutConfig,
        ServerConfig,
        TrainConfig,
    )
    from ramet.envs.chat import ChatEnv
    from ramet.envs.check import check_env_specs
    from ramet.envs.env import EnvBase, TransformedEnv
    from ramet.envs.hashing import LLMHashingEnv
    from ramet.envs.llm import LLMEnv
    from ramet.episodes import collect_episodes
    from ramet.errors import RametError
    from ramet.forest import Forest, MCTSForest, SipHash
    from ramet.policies.person import PersonPolicy
    from ramet.policies.policy import Actor, Policy
    from ramet.policies.reference import ReferencePolicy
    from ramet.policies.scoring import TransformersScorer
    from ramet.policies.scripted import ScriptedPolicy
    from ramet.policies.server import ServerPolicy
    from ramet.policies.transformers import TransformersPolicy
    from ramet.prompts import Prompts
    from ramet.ragged import as_nested_tensor, as_padded_tensor, compact, pad, rows
    from ramet.rollouts import collect
    from ramet.scoring import Scores, in_file, score, without_adapter
    from ramet.specs import Bounded, Categorical, Composite, NonTensor, Unbounded
    from ramet.tasks import Judge, JudgeModel, Task, format_reward, in_processes, length_reward, weighted
    from ramet.tools import MCPServer, Tool, python_tool, tool
    from ramet.trainer import Result, Trainer
    from ramet.transforms import (
        Compose,
        DataLoadingPrimer,
        KLRewardTransform,
        RewardSum,
        StepCounter,
        TensorDictPrimer,
        Tokenizer,
        Transform,
    )
    from ramet.types import Draw, Episode, Kind, Outcome, Sample, Sampling, StopReason, Support, ToolCall

_PLACES = {
    "ramet.types": (
        "Sample",
        "Outcome",
        "StopReason",
        "Kind",
        "Sampling",
        "Support",
        "Draw",
        "Episode",
        "ToolCall",
    ),
    "ramet.errors": ("RametError",),
    "ramet.prompts": ("Prompts",),
    "ramet.specs": ("Composite", "NonTensor", "Unbounded", "Bounded", "Categorical"),
    "ramet.ragged": ("rows", "pad", "compact", "as_nested_tensor", "as_padded_tensor"),
    "ramet.transforms": (
        "Transform",
        "Compose",
        "TensorDictPrimer",
        "DataLoadingPrimer",
        "Tokenizer",
        "StepCounter",
        "RewardSum",
        "KLRewardTransform",
    ),
    "ramet.envs.env": ("EnvBase", "TransformedEnv"),
    "ramet.envs.llm": ("LLMEnv",),
    "ramet.envs.hashing": ("LLMHashingEnv",),
    "ramet.envs.check": ("check_env_specs",),
    "ramet.tasks": (
        "Task",
        "Judge",
        "JudgeModel",
        "format_reward",
        "in_processes",
        "length_reward",
        "weighted",
    ),
    "ramet.policies.policy": ("Policy", "Actor"),
    "ramet.policies.transformers": ("TransformersPolicy",),
    "ramet.policies.scripted": ("ScriptedPolicy",),
    "ramet.policies.scoring": ("TransformersScorer",),
    "ramet.rollouts": ("collect",),
    "ramet.forest": ("Forest", "MCTSForest", "SipHash"),
    "ramet.scoring": ("score", "Scores", "without_adapter", "in_file"),
    "ramet.config": (
        "TrainConfig",
        "ModelConfig",
        "RolloutConfig",
        "AdvantageConfig",
        "LossConfig",
        "KLConfig",
        "OptimizerConfig",
        "EvaluationConfig",
        "CheckpointConfig",
        "ServerConfig",
    ),
    "ramet.envs.chat": ("ChatEnv",),
    "ramet.chat": (
        "ChatTemplate",
        "Conversation",
    ),
    "ramet.tools": (
        "MCPServer",
        "Tool",
        "python_tool",
        "tool",
    ),
    "ramet.policies.person": ("PersonPolicy",),
    "ramet.policies.reference": ("ReferencePolicy",),
    "ramet.policies.server": ("ServerPolicy",),
    "ramet.episodes": ("collect_episodes",),
    "ramet.checking": ("check_task",),
    "ramet.trainer": ("Trainer", "Result"),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "Actor",
    "AdvantageConfig",
    "Bounded",
    "Categorical",
    "ChatEnv",
    "ChatTemplate",
    "CheckpointConfig",
    "Compose",
    "Composite",
    "Conversation",
    "DataLoadingPrimer",
    "Draw",
    "EnvBase",
    "Episode",
    "EvaluationConfig",
    "Forest",
    "Judge",
    "JudgeModel",
    "KLConfig",
    "KLRewardTransform",
    "Kind",
    "LLMEnv",
    "LLMHashingEnv",
    "LossConfig",
    "MCPServer",
    "MCTSForest",
    "ModelConfig",
    "NonTensor",
    "OptimizerConfig",
    "Outcome",
    "PersonPolicy",
    "Policy",
    "Prompts",
    "RametError",
    "ReferencePolicy",
    "Result",
    "RewardSum",
    "RolloutConfig",
    "Sample",
    "Sampling",
    "Scores",
    "ScriptedPolicy",
    "ServerConfig",
    "ServerPolicy",
    "SipHash",
    "StepCounter",
    "StopReason",
    "Support",
    "Task",
    "TensorDictPrimer",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "TrainConfig",
    "Trainer",
    "Transform",
    "TransformedEnv",
    "TransformersPolicy",
    "TransformersScorer",
    "Unbounded",
    "as_nested_tensor",
    "as_padded_tensor",
    "check_env_specs",
    "check_task",
    "collect",
    "collect_episodes",
    "compact",
    "format_reward",
    "in_file",
    "in_processes",
    "length_reward",
    "pad",
    "python_tool",
    "rows",
    "score",
    "tool",
    "weighted",
    "without_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'ramet' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
