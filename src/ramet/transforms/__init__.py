"""What is done to TensorDicts on their way into and out of an environment."""

from __future__ import annotations

from ramet.transforms.step_counter import StepCounter
from ramet.transforms.transform import Compose, Transform

__all__ = ["Compose", "StepCounter", "Transform"]
