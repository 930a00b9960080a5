"""Environments and transforms of ramet inside TorchRL: `pip install 'ramet[torchrl]'`.

`as_torchrl_env` and `as_torchrl_transform` make of an environment or a transform one that TorchRL takes for its own:
in `TransformedEnv`, `Compose`, `check_env_specs`, rollouts, collectors and replay buffers. Specs are translated by
`to_torchrl_spec` and `from_torchrl_spec`.
"""

from __future__ import annotations

try:
    import torchrl
except ImportError as error:
    raise ImportError("ramet.adapters.torchrl needs TorchRL: pip install 'ramet[torchrl]'") from error

from ramet.adapters.torchrl.env import as_torchrl_env
from ramet.adapters.torchrl.specs import from_torchrl_spec, to_torchrl_spec
from ramet.adapters.torchrl.transform import as_torchrl_transform

del torchrl

__all__ = ["as_torchrl_env", "as_torchrl_transform", "from_torchrl_spec", "to_torchrl_spec"]
