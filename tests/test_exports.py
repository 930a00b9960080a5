"""The names that `ramet` offers are frozen here: whoever adds or removes one says so by changing this list."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import ramet

NAMES = [
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


def test_the_exported_names_are_these() -> None:
    assert ramet.__all__ == NAMES
    assert dir(ramet) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_name_leads_to_something_that_is_described(name: str) -> None:
    found = getattr(ramet, name)
    assert inspect.getdoc(found)
    assert getattr(found, "__name__", name) == {"MCTSForest": "Forest"}.get(name, name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(str(ramet.__file__)).read_text(encoding="utf-8"))
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == NAMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainner'"):
        _ = ramet.Trainner


@pytest.mark.parametrize("module", ["envs", "transforms"])
def test_the_names_of_environments_and_transforms_are_in_their_packages_too(module: str) -> None:
    """Whoever knows them from elsewhere changes an import; each is the object that `ramet` offers."""
    package = importlib.import_module(f"ramet.{module}")
    assert set(package.__all__) <= set(NAMES)
    for name in package.__all__:
        assert getattr(package, name) is getattr(ramet, name)


def test_the_package_of_environments_has_all_that_goes_with_them() -> None:
    wanted = (
        "EnvBase TransformedEnv Transform LLMEnv LLMHashingEnv DataLoadingPrimer TensorDictPrimer Tokenizer Compose"
    )
    wanted += (
        " KLRewardTransform RewardSum StepCounter SipHash Forest MCTSForest as_nested_tensor as_padded_tensor rows"
    )
    wanted += " pad Composite NonTensor Unbounded Bounded Categorical check_env_specs"
    assert set(wanted.split()) <= set(importlib.import_module("ramet.envs").__all__)
