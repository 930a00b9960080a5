"""The sections of a configuration and their settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ramet.config.contradictions import contradictions
from ramet.errors import ConfigError

if TYPE_CHECKING:
    import torch

Scalar: TypeAlias = bool | int | float | str


class _Explained(BaseModel):
    """A model whose keys are called with: a `ConfigError` says which is unknown, with the nearest, or what is wrong."""

    def __init__(self, /, **data: Any) -> None:
        """Make a section from its keys; raise `ConfigError` for an unknown one, with the nearest, and a wrong value."""
        try:
            super().__init__(**data)
        except ValidationError as error:
            from ramet.config.reading import explained_section

            raise explained_section(type(self), error, data) from error

    # So pydantic marks an `__init__` that it need not call for sections inside of others: those it reports together.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class Section(_Explained):
    """A table of the file: frozen, without coercion, and without room for keys that nothing reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which model is trained, where and in what precision."""

    name: str = Field(
        min_length=1, description='"tiny-llama" (made from `options`), "smollm2", or a transformers name or folder.'
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Precision of the weights. bfloat16 rounds away updates below 1/512 of a weight: at a learning "
        "rate of 1e-6 hardly any weight moves. To save time instead, keep float32 and set `autocast`.",
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description='"auto": a GPU where there is one.'
    )
    autocast: Literal["", "bfloat16"] = Field(
        default="", description='Precision of the matrix products over float32 weights; "" leaves them in float32.'
    )
    attention: str | None = Field(
        default=None, description="transformers' attn_implementation, e.g. \"eager\"; absent: the library's choice."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a transformers name.")
    options: dict[str, int | float | str] = Field(
        default_factory=dict, description='Shape of "tiny-llama": hidden_size, layers, heads and so on.'
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="Path of a Jinja file, relative to the working folder, in the place of the tokenizer's own chat "
        "template. A run keeps a copy with its weights, and goes on with that.",
    )


class TaskConfig(Section):
    """What is asked, and how an answer is judged."""

    name: str = Field(
        min_length=1,
        description='"sorting", "arithmetic", "countdown", "word_guessing", "calculator", "maths", '
        '"reasoning-gym:DATASET", "textarena:GAME", "file" (prompts and a reward of your own), or "path.py:NAME" '
        "(a task of your own).",
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
    group_size: int = Field(default=8, ge=1, description="Completions of each prompt, which are compared.")
    max_new_tokens: int = Field(ge=1, description="Limit of a completion, the token that ends it included.")
    temperature: float = Field(default=1.0, gt=0, description="Of the samples trained on, and of their scoring.")
    top_k: int | None = Field(
        default=None, ge=1, description="Sample, and score, among so many most probable tokens; absent: among all."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Among the fewest most probable ones that have this share together."
    )
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Among those at least this many times as probable as the most probable."
    )
    stop: list[str] = Field(
        default_factory=list,
        description="Strings that end a completion, with the token that completes one; a string that is one token of "
        "the model ends it as that token alone.",
    )
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
    max_turns: int | None = Field(
        default=None, ge=1, description="Most turns of the model in an episode; absent: what the task says."
    )
    episode_seconds: float = Field(
        default=600.0, gt=0, description="An episode of a task with replies or tools is given up after so long."
    )
    tool_seconds: float = Field(default=30.0, gt=0, description="A call of a tool is given up after so long.")
    score_seconds: float | None = Field(
        default=None,
        gt=0,
        description="A score is given up after so long; absent: as episode_seconds, and never for a task of one turn.",
    )
    lockstep: bool = Field(
        default=False,
        description="A model in the process completes a turn when all rows wait for it: on one machine the same seed "
        "gives the same bits, and the slowest tool holds up all. false: each row goes on as soon as it can, and which "
        "rows are completed together, on which the last digits depend, is a matter of time.",
    )
    staleness: int = Field(
        default=0,
        ge=0,
        description="With a server: how many steps old the weights may be by which rollouts are sampled, which are "
        "then sampled while the steps before are trained on. 0: sample, train, sample, train.",
    )
    rewrites: Literal["follow", "keep"] = Field(
        default="follow",
        description="Where a chat template writes earlier turns in another way later on: follow it, in a new part of "
        "the episode, or keep what the model saw.",
    )


class ServerConfig(Section):
    """A server that samples in place of the process; without the section, the model samples where it is trained."""

    url: str = Field(min_length=1, description="Where the server is, such as http://127.0.0.1:8000.")
    model: str = Field(min_length=1, description="What the server calls the model.")
    concurrency: int = Field(default=64, ge=1, description="Rows under way at once.")
    timeout_seconds: float = Field(default=600.0, gt=0, description="A request is given up after so long.")
    retries: int = Field(default=5, ge=0, description="How often a request that failed in passing is sent again.")
    outage_seconds: float = Field(
        default=600.0,
        ge=0,
        description="A server that was there and is away is waited for so long, and then the run ends; 0: not at all.",
    )
    weights_folder: str | None = Field(
        default=None,
        description="Where weights are written for the server, which must see it under the same name; absent: a "
        "temporary folder.",
    )
    key_variable: str | None = Field(
        default=None, description="Environment variable that holds the server's key; absent: no key."
    )


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
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="How the KL of a token is estimated in the loss; the reward always uses k1."
    )
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
        description="After the warm-up: stay, or fall in a straight line from learning_rate to "
        "learning_rate / (steps - warmup_steps) at the last step.",
    )
    gradient_clip: float = Field(default=1.0, gt=0, description="Largest norm of a gradient.")
    updates_per_step: int = Field(default=1, ge=1, description="Minibatches that a step's rollouts are cut into.")
    epochs_per_step: int = Field(default=1, ge=1, description="Passes over a step's rollouts.")
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens in a forward pass, each shared prefix counted once; absent: what fits into memory. It "
        "changes memory, and results by rounding alone.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Compute each layer again in the backward pass instead of keeping it: less memory."
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

    >>> config = TrainConfig(
    ...     steps=3, rollout=RolloutConfig(max_new_tokens=8), optimizer=OptimizerConfig(learning_rate=1e-4)
    ... )
    >>> config.rollout.group_size, config.kl.coefficient, config.warm_start
    (8, 0.0, None)
    """

    name: str = Field(default="run", description="Folder of the run inside `runs`.")
    runs: str = Field(default="runs", min_length=1, description="Folder that holds the runs.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="All randomness is a function of it.")
    steps: int = Field(ge=0, description="Steps of reinforcement learning.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of torch; absent: its own choice.")
    model: ModelConfig | None = None
    task: TaskConfig | None = None
    warm_start: WarmStartConfig | None = None
    server: ServerConfig | None = None
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
        for message, hint in contradictions(self):
            raise ConfigError(message, hint=hint)
        return self

    @property
    def folder(self) -> Path:
        """Where the run lives: `runs`/`name`."""
        return Path(self.runs) / self.name

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What `model.autocast` names; None where the matrix products keep the precision of the weights."""
        if self.model is None or not self.model.autocast:
            return None
        from ramet.models.load import DTYPES

        return DTYPES[self.model.autocast]
