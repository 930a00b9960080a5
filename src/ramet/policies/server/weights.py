"""The weights of a model in training, put into a vLLM that runs: a folder both can read, and a few calls in order."""

from __future__ import annotations

import copy
import math
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ramet.errors import ServerError
from ramet.http import Ask, RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEVELOPMENT = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment: docs/servers.md says how"
EXTENSION = "ramet_weights.Reloading"
"""What a vLLM on a CPU loads into its workers, from the folder `inside_vllm` beside this file."""
PLAIN, WITH_HEAD = "reload_weights", "reload_weights_and_head"
"""What loads weights in a worker of vLLM: its own method, and the one of the extension."""
EXACT, ROUGH = 1e-3, 0.1
"""How far log-probs may lie apart on average, in nats a token: both in float32, or one of them in less."""
BETWEEN = "ramet-loading"
"""The version that a server has while its weights are replaced: whatever goes wrong, it is nobody's."""


class WeightFiles:
    """Where weights are written for a server: the ones that it has are kept, for it may be started anew.

    `label` is what a server calls the weights in `folder`: no other run's are called so, and no other version's.
    """

    def __init__(self, place: Path | None) -> None:
        self.folder: Path | None = None
        self.label: str | None = None
        self._place = place
        self._run = secrets.token_hex(4)
        self._made: Path | None = None
        self._ends: weakref.finalize[[str, bool], WeightFiles] | None = None

    def next(self, version: int) -> tuple[Path, str]:
        """Return where to write the weights of `version`, and their label."""
        if self._made is None:
            if self._place is not None:
                self._place.mkdir(parents=True, exist_ok=True)
            self._made = Path(tempfile.mkdtemp(prefix=f"ramet-weights-{self._run}-", dir=self._place)).absolute()
            self._made.chmod(0o755)  # the server may run as another user
            self._ends = weakref.finalize(self, shutil.rmtree, str(self._made), True)
        number = secrets.token_hex(2)  # a version that is written twice has two folders
        return self._made / f"{version}-{number}", f"ramet-{self._run}-{version}-{number}"

    def of_others(self, label: str | None) -> bool:
        """Say whether weights of this name were put there by another run."""
        ours = (BETWEEN, f"ramet-{self._run}-")
        return label is not None and label.startswith("ramet-") and not label.startswith(ours)

    def keep(self, folder: Path, label: str) -> None:
        """Let these be the weights that the server has, and remove the ones before."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder, self.label = folder, label

    def remove(self) -> None:
        """Remove all that was written."""
        if self._ends is not None:
            self._ends()
        self.folder = self._made = self._ends = None


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write what `model` computes with into `folder` as safetensors; adapters are merged, in a copy."""
    from transformers.utils import logging

    whole: Any = model
    if hasattr(model, "merge_and_unload"):
        whole = copy.deepcopy(whole).merge_and_unload()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar for each step would stand across the run's own
    try:
        whole.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


async def load_weights(ask: Ask, folder: Path, label: str, method: str = PLAIN) -> None:
    """Make a vLLM compute with the weights in `folder`, and call them `label`; `method` is its workers'.

    Whatever runs there ends first; what it remembers of prompts is forgotten. Raises `ServerError`; the server's
    version is then `BETWEEN`, unless it could not be reached at all.
    """
    await called(ask, "/pause?mode=wait", {})
    try:
        await called(ask, "/update_weight_version", {"new_version": BETWEEN})
        await called(ask, "/collective_rpc", {"method": method, "kwargs": {"weights_path": str(folder)}})
        forgotten = await called(ask, "/reset_prefix_cache", {})
        if not (isinstance(forgotten, dict) and forgotten.get("success") is True):
            raise ServerError(f"the server still remembers prompts of the old weights: it answered {forgotten!r}")
        await called(ask, "/update_weight_version", {"new_version": label})
    finally:
        await called(ask, "/resume", {})


async def called(ask: Ask, path: str, body: Mapping[str, Any]) -> Any:
    """Call an endpoint that vLLM has in development mode alone."""
    try:
        return await ask("POST", path, body)
    except RefusedError as error:
        hint = DEVELOPMENT if error.status in (404, 405) else None
        raise ServerError(f"the server takes no weights: {error.message}", hint=hint) from error


async def label_of(ask: Ask) -> str | None:
    """Return what the server calls its weights, None where it has no names for them."""
    try:
        found = await ask("GET", "/weight_info", None)
    except RefusedError:
        return None
    label = found.get("weight_version") if isinstance(found, dict) else None
    return label if isinstance(label, str) else None


async def settings_of(ask: Ask) -> tuple[str | None, str]:
    """Return the dtype that a vLLM computes in, None where it does not say, and what its workers load weights by."""
    try:
        found = await ask("GET", "/server_info?config_format=json", None)
        settings = found["vllm_config"]
        extension = str(settings["parallel_config"]["worker_extension_cls"])
        dtype = str(settings["model_config"]["dtype"]).removeprefix("torch.")
    except (RefusedError, KeyError, TypeError):
        return None, PLAIN
    return dtype, WITH_HEAD if extension.endswith(EXTENSION) else PLAIN


@torch.no_grad()
def log_probs_of(model: PreTrainedModel, tokens: Sequence[int], start: int) -> list[float]:
    """Return the log-probs that `model` gives to `tokens` from `start` on, at temperature 1."""
    training = model.training
    model.eval()  # type: ignore[no-untyped-call]
    try:
        ids = torch.tensor([list(tokens)], device=model.device)
        logits = model(input_ids=ids).logits[0, start - 1 : -1].float()
    finally:
        model.train(training)
    return logits.log_softmax(-1).gather(-1, ids[0, start:, None]).squeeze(-1).tolist()  # type: ignore[no-any-return]


def compare(served: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    """Raise `ServerError` where log-probs of the same tokens lie further apart than `tolerance` on average."""
    apart = [abs(one - other) for one, other in zip(served, expected, strict=True)]
    mean = sum(apart) / max(len(apart), 1)
    if not (apart and mean <= tolerance and math.isfinite(mean)):
        raise ServerError(
            f"after the update the server's log-probs of {len(apart)} tokens lie {mean:.4g} nats from the model's, "
            f"on average: expected at most {tolerance:g}",
            hint="is it the same model, in a dtype of this precision? Then give update a tolerance. A vLLM on a CPU "
            f"needs --worker-extension-cls {EXTENSION} for a model with tied embeddings: see docs/servers.md",
        )


def tolerance_for(model: PreTrainedModel, precision: str | None) -> float:
    """Return how far a server's log-probs may lie from the model's: exact where both compute in float32."""
    return EXACT if precision == "float32" and model.dtype == torch.float32 else ROUGH
