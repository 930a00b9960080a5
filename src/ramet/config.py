"""A run's settings: one frozen tree, read from TOML, with overrides from the command line.

Every key is read by something, and an unknown one is an error that names the nearest known one. TOML has no null: a key
that may be None is None where it is absent.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ramet import toml
from ramet.errors import ConfigError

Scalar: TypeAlias = bool | int | float | str


class Section(BaseModel):
    """A table of the file: frozen, without coercion, and without room for keys that nothing reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which model is trained, where and in what precision."""

    name: str = Field(
        min_length=1, description='"tiny-llama" (made from `options`), "smollm2", or a transformers name or folder.'
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Precision of the weights.")
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description='"auto": a GPU where there is one.'
    )
    autocast: Literal["", "bfloat16", "float16"] = Field(
        default="", description='Precision of the matrix products over float32 weights; "" leaves them in float32.'
    )
    attention: str | None = Field(
        default=None, description="transformers' attn_implementation, e.g. \"eager\"; absent: the library's choice."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a transformers name.")
    options: dict[str, int | float | str] = Field(
        default_factory=dict, description='Shape of "tiny-llama": hidden_size, layers, heads and so on.'
    )


class TaskConfig(Section):
    """What is asked, and how an answer is judged."""

    name: str = Field(
        min_length=1, description='"arithmetic", "reasoning-gym:DATASET", or "file": your own prompts and reward.'
    )
    options: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict, description="Passed to the task's builder, which refuses what it does not know."
    )
    prompts: str | None = Field(
        default=None, description='"file" only: JSONL of prompts, relative to the working folder.'
    )
    held_out: str | None = Field(default=None, description='"file" only: JSONL of prompts never trained on.')
    reward: str | None = Field(
        default=None, description='"file" only: the reward, "package.module:function" or "path/to/file.py:function".'
    )


class WarmStartConfig(Section):
    """Supervised steps on the task's reference answers before reinforcement learning; without the section, none."""

    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the learning rate rises from 0.")
    batch_rows: int = Field(default=32, ge=1, description="Reference answers in each step.")
    learning_rate: float = Field(default=1e-3, gt=0, description="Step size of the supervised optimiser.")
    max_steps: int = Field(default=1000, ge=0, description="Stop here at the latest.")
    until: float | None = Field(default=None, description="Stop when the greedy validation score reaches this.")
    check_every: int = Field(default=50, ge=1, description="Steps between two validation scores.")
    check_problems: int = Field(default=64, ge=1, description="Problems in each validation score.")


class RolloutConfig(Section):
    """What is sampled in each step."""

    prompts_per_step: int = Field(default=8, ge=1, description="Groups in each step.")
    group_size: int = Field(default=8, ge=1, description="Completions of each prompt.")
    max_new_tokens: int = Field(ge=1, description="Limit of a completion, the token that ends it included.")
    temperature: float = Field(default=1.0, gt=0, description="Of the samples trained on, and of their scoring.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion; each must be one token.")
    prompt_limit: int | None = Field(
        default=None, ge=1, description="Most tokens of a prompt; absent: what the model holds."
    )
    too_long: Literal["refuse", "drop", "keep_end", "keep_start"] = Field(
        default="refuse", description="A prompt over the limit is refused, dropped or cut."
    )
    max_failed_fraction: float = Field(
        default=0.25, ge=0, le=1, description="The run stops when more of a step's rollouts than this fail."
    )
    truncated: Literal["score", "drop"] = Field(
        default="score", description="What becomes of rollouts that a limit ended."
    )
    rows_per_batch: int | None = Field(default=None, ge=1, description="Rows generated at once; absent: all of a step.")


class AdvantageConfig(Section):
    """How much better than its group a rollout was."""

    kind: Literal["group_mean", "group_mean_std", "leave_one_out"] = Field(
        default="group_mean", description="Baseline, and whether its spread divides. leave_one_out has no spread."
    )


class LossConfig(Section):
    """What is minimised."""

    kind: Literal["policy_gradient", "clipped"] = Field(default="clipped", description="The objective of each token.")
    reduction: Literal["grpo", "dr_grpo", "dapo"] = Field(default="dapo", description="From token losses to one.")
    clip_low: float = Field(default=0.2, ge=0, lt=1, description='"clipped" only: the ratio is cut below 1 - clip_low.')
    clip_high: float = Field(default=0.2, ge=0, description='"clipped" only: the ratio is cut above 1 + clip_high.')
    importance_cap: float | None = Field(
        default=None,
        gt=0,
        description="Cap of the weights that correct sampler against trainer; absent: none.",
    )


class KLConfig(Section):
    """The pull towards the reference, which is the model before the first step."""

    coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the penalty; 0 measures the KL and leaves it at that."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="How the KL of a token is estimated.")
    place: Literal["loss", "reward", "both"] = Field(default="loss", description='Where it enters; "both" pays twice.')
    unbiased: bool = Field(
        default=False, description="In the loss: the exact gradient of a sequence's KL, what follows a token included."
    )


class OptimizerConfig(Section):
    """AdamW, and how a step's rollouts are spread over its updates."""

    learning_rate: float = Field(gt=0, description="Step size after the warm-up.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), strict=False, description="Decay of the two running means."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the learning rate rises from 0.")
    schedule: Literal["constant", "linear"] = Field(
        default="constant",
        description="After the warm-up: stay, or fall in a straight line towards 0 at the last step.",
    )
    gradient_clip: float = Field(default=1.0, gt=0, description="Largest norm of a gradient.")
    updates_per_step: int = Field(default=1, ge=1, description="Minibatches that a step's rollouts are cut into.")
    epochs_per_step: int = Field(default=1, ge=1, description="Passes over a step's rollouts.")
    micro_batch_tokens: int = Field(
        default=8192, ge=1, description="Most tokens in a forward pass: memory, not results."
    )

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("expected two numbers from 0 up to but without 1")
        return betas


class EvaluationConfig(Section):
    """Scores on held-out problems, greedy and at temperature 1."""

    every: int = Field(default=0, ge=0, description="Steps between two evaluations; 0: only before and after.")
    problems: int = Field(default=100, ge=1, description="Held-out problems in each evaluation, the same each time.")


class CheckpointConfig(Section):
    """What is kept to continue from."""

    every: int = Field(default=50, ge=0, description="Steps between two checkpoints; 0: only at the end.")
    keep: int = Field(default=1, ge=1, description="Newest checkpoints kept.")


class ControlConfig(Section):
    """Experiments that should not learn."""

    shuffle_rewards: bool = Field(default=False, description="Deal the rewards out at random: nothing is learned.")


class TrainConfig(Section):
    """All settings of a run; no `model` or `task` where the trainer is handed a model, prompts and a reward.

    >>> config = parse("steps = 3", ["rollout.max_new_tokens=8", "optimizer.learning_rate=1e-4", "kl.place=reward"])
    >>> config.steps, config.optimizer.learning_rate, config.kl.place, config.warm_start
    (3, 0.0001, 'reward', None)
    """

    name: str = Field(default="run", description="Folder of the run inside `runs`.")
    runs: str = Field(default="runs", min_length=1, description="Folder that holds the runs.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="All randomness is a function of it.")
    steps: int = Field(ge=0, description="Steps of reinforcement learning.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of torch; absent: its own choice.")
    model: ModelConfig | None = None
    task: TaskConfig | None = None
    warm_start: WarmStartConfig | None = None
    rollout: RolloutConfig
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    optimizer: OptimizerConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    control: ControlConfig = ControlConfig()

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError("expected letters, digits, '_', '-' and '.', not starting with '-' or '.'")
        return name

    @model_validator(mode="after")
    def _no_contradictions(self) -> TrainConfig:
        for message, hint in _contradictions(self):
            raise ConfigError(message, hint=hint)
        return self

    @property
    def folder(self) -> Path:
        """Where the run lives: `runs`/`name`."""
        return Path(self.runs) / self.name


def _contradictions(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield (message, hint) for each setting that another one makes void or impossible."""
    yield from () if config.model is None else _model_contradictions(config.model)
    yield from () if config.task is None else _task_contradictions(config.task)
    if config.kl.unbiased and config.kl.estimator == "k2":
        yield 'kl.unbiased needs kl.estimator "k1" or "k3": found "k2"', 'set kl.estimator = "k3", which has less noise'
    if config.kl.unbiased and config.kl.place == "reward":
        yield 'kl.unbiased is about the penalty in the loss: found kl.place = "reward"', "leave kl.unbiased out"
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    if config.optimizer.updates_per_step > rows:
        yield (
            f"optimizer.updates_per_step = {config.optimizer.updates_per_step} cuts the {rows} rollouts of a step "
            "(rollout.prompts_per_step x rollout.group_size) into more pieces than there are",
            f"set optimizer.updates_per_step to at most {rows}",
        )


def _model_contradictions(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.autocast and model.dtype != "float32":
        yield (
            f'model.autocast = "{model.autocast}" works over float32 weights: found model.dtype = "{model.dtype}"',
            'leave model.autocast out, or set model.dtype = "float32"',
        )
    if model.options and model.name != "tiny-llama":
        yield f'model.options shapes "tiny-llama" only: found model.name = "{model.name}"', "leave model.options out"
    if model.attention is not None and model.name == "tiny-llama":
        yield 'model.attention is for pretrained models: found model.name = "tiny-llama"', "leave model.attention out"
    if model.revision is not None and model.name in ("tiny-llama", "smollm2"):
        yield f'model.revision has no meaning for model.name = "{model.name}"', "leave model.revision out"


def _task_contradictions(task: TaskConfig) -> Iterator[tuple[str, str]]:
    for key in ("prompts", "held_out", "reward"):
        given = getattr(task, key) is not None
        if task.name == "file" and not given and key != "held_out":
            yield f'task.name = "file" needs task.{key}: found none', f"set task.{key}"
        if task.name != "file" and given:
            yield f'task.{key} is read by task.name = "file" only: found "{task.name}"', f"leave task.{key} out"


def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file, with `key=value` overrides on top.

    Raises `ConfigError`: no such file, no TOML, an unknown key, a wrong type or range, or settings that contradict.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="give the path of a TOML file") from error
    return parse(text, overrides, where=str(path))


def parse(text: str, overrides: Sequence[str] = (), where: str = "the text") -> TrainConfig:
    """Read TOML text, with `key=value` overrides on top; `where` names the text in errors.

    A value is written as in TOML, and may be a bare string. The bare word `none` empties a key that may be absent; a
    whole section is replaced by an inline table: `task={name="arithmetic"}`.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is no valid TOML: {error}") from error
    sources: dict[str, str] = {}
    for override in overrides:
        sources[toml.override(data, override)] = f'the override "{override}"'
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        raise _explain(error, data, where, sources) from error


def settings(section: type[Section] = TrainConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Return every key by its dotted name, in order, with pydantic's description, default and type.

    >>> settings()["kl.coefficient"].default
    0.0
    """
    found: dict[str, FieldInfo] = {}
    for key, field in section.model_fields.items():
        inner = _section(field)
        found.update({prefix + key: field} if inner is None else settings(inner, f"{prefix}{key}."))
    return found


def dump(config: TrainConfig) -> str:
    """Write TOML text that loads back to an equal config, defaults included."""
    return toml.dumps(config.model_dump(exclude_none=True))


def _section(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds, or None where it holds a value."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _explain(error: ValidationError, data: Mapping[str, Any], where: str, sources: Mapping[str, str]) -> ConfigError:
    """Turn pydantic's report into one message: what was expected, what was found, where, and what to do."""
    # Unknown keys come first: a misspelt key also shows up as a missing one.
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    first = faults[0]
    key, value = _locate(first["loc"], data)
    found_in = next((s for k, s in sources.items() if k == key or f"{k}.".startswith(f"{key}.")), None)
    found_in = found_in or next((s for k, s in sources.items() if key.startswith(f"{k}.")), where)
    others = list(dict.fromkeys(_locate(fault["loc"], data)[0] for fault in faults[1:]))
    more = f" (also wrong: {', '.join(other for other in others if other != key)})" if set(others) - {key} else ""
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, ConfigError):
        return ConfigError(f"{reason.message}, in {where}", hint=reason.hint)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown key {key} in {found_in}{more}", hint=_nearest(key))
    field = settings().get(key)
    about = None if field is None or not field.description else f"{key}: {field.description}"
    if first["type"] == "missing" and not isinstance(value, list):
        return ConfigError(f"{key} is missing in {where}{more}", hint=about or f"add a section [{key}]")
    same = [fault for fault in faults if _locate(fault["loc"], data)[0] == key]
    expected = " or ".join(dict.fromkeys(_expectation(fault) for fault in same))
    return ConfigError(f"{key}: expected {expected}, found {_show(value)} in {found_in}{more}", hint=about)


def _expectation(fault: ErrorDetails) -> str:
    """Return what pydantic expected, as words that follow "expected"."""
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "a section (a TOML table)"
    if fault["type"] == "missing":
        return "more items"
    text = str(fault.get("ctx", {}).get("error", fault["msg"]))
    text = re.sub(r"^(expected|\w+ should (be|have|match)) ", "", text)
    text = re.sub(r"^(greater|less) than", r"a number \g<0>", text)
    return text.replace("a valid integer", "an integer").replace("a valid ", "a ")


def _locate(loc: tuple[int | str, ...], data: Any) -> tuple[str, Any]:
    """Return the dotted key and the value that an error is about.

    pydantic ends some locations with the name of a type that it tried: what is not in the data is no key.
    """
    known = {*settings(), *TrainConfig.model_fields}
    keys: list[str] = []
    for part in loc:
        inside = isinstance(data, dict) and part in data
        if inside or (isinstance(data, list) and part in range(len(data))):
            data = typing.cast(Any, data)[part]
        elif ".".join([*keys, str(part)]) not in known:
            break
        keys.append(str(part))
    return ".".join(keys), data


def _show(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({names.get(type(value), type(value).__name__)})"


def _nearest(key: str) -> str:
    """Say which known key was probably meant, and which ones there are beside it."""
    known = list(settings())
    parent, _, leaf = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    beside = list(dict.fromkeys(name.removeprefix(prefix).split(".")[0] for name in known if name.startswith(prefix)))
    near = [prefix + name for name in difflib.get_close_matches(leaf, beside, n=1)]
    near = near or [name for name in known if difflib.get_close_matches(leaf, [name.rpartition(".")[2]], cutoff=0.8)]
    guess = f"did you mean {near[0]}? " if near else ""
    return f"{guess}known {f'in [{parent}]' if parent else 'at the top'}: {', '.join(beside)}"
