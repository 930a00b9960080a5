"""Loaded by vLLM into its workers, in its own environment: nothing of ramet can be imported here.

    PYTHONPATH=FOLDER_OF_THIS_FILE vllm serve ... --worker-extension-cls ramet_weights.Reloading

On a CPU, vLLM keeps a packed copy of the output head. Where the head is the embedding's own weight, `reload_weights`
leaves that copy as it was, and the head goes on computing with the old weights.
"""

from __future__ import annotations

from typing import Any


class Reloading:
    """Become a part of vLLM's worker, which has `reload_weights` and the model."""

    def reload_weights_and_head(self, weights_path: str) -> None:
        """Load the weights in a folder, and pack anew what only points at one of them."""
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        for layer in worker.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
