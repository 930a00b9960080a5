"""What is done to TensorDicts on their way into and out of an environment."""

from __future__ import annotations

from ramet.ragged import as_nested_tensor, as_padded_tensor
from ramet.transforms.kl_reward import KLRewardTransform
from ramet.transforms.loading import DataLoadingPrimer
from ramet.transforms.primer import TensorDictPrimer
from ramet.transforms.reward_sum import RewardSum
from ramet.transforms.step_counter import StepCounter
from ramet.transforms.tokenizer import Tokenizer
from ramet.transforms.transform import Compose, Transform

__all__ = [
    "Compose",
    "DataLoadingPrimer",
    "KLRewardTransform",
    "RewardSum",
    "StepCounter",
    "TensorDictPrimer",
    "Tokenizer",
    "Transform",
    "as_nested_tensor",
    "as_padded_tensor",
]
