"""A run's settings: one frozen tree, read from TOML, with overrides from the command line.

Every key is read by something, and an unknown one is an error that names the nearest known one. A setting that another
one makes void is refused, unless it has its default. TOML has no null: a key that may be None is None where it is
absent.
"""

from __future__ import annotations

from ramet.config.reading import checked, dump, load, parse, settings
from ramet.config.sections import (
    AdvantageConfig,
    CheckpointConfig,
    ControlConfig,
    EvaluationConfig,
    KLConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    Section,
    ServerConfig,
    TaskConfig,
    TrainConfig,
    WarmStartConfig,
)

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "ControlConfig",
    "EvaluationConfig",
    "KLConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "Section",
    "ServerConfig",
    "TaskConfig",
    "TrainConfig",
    "WarmStartConfig",
    "checked",
    "dump",
    "load",
    "parse",
    "settings",
]
