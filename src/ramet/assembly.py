"""From settings and what a user hands over to the parts of a run, each checked against the others."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ramet.chat import ChatTemplate, PlainTemplate
from ramet.config import ModelConfig, RolloutConfig, ServerConfig, TaskConfig, TrainConfig, checked
from ramet.envs.llm import LLMEnv
from ramet.episodes import Rules, Speech
from ramet.errors import ConfigError, DataError, ModelError, ServerError
from ramet.models import check_vocabulary, load_model, pick_device
from ramet.models.load import DTYPES, load_tokenizer
from ramet.policies.server import Retries, ServerPolicy
from ramet.policies.stops import decoder_of
from ramet.policies.transformers import TransformersPolicy, context_length, eos_ids_of
from ramet.rollouts import OneTurn, Turns
from ramet.scoring.in_file import InFile, in_file
from ramet.tasks import Judge, Task, build_task
from ramet.tools import Toolbox
from ramet.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def refuse_parts(model: object, task: object, config: object) -> None:
    """Raise `ModelError` or `ConfigError` where a run was given something else than a model, a task and settings."""
    if not isinstance(model, (str, Path, torch.nn.Module)):
        raise ModelError(
            f"expected a model: found {_described(model)}", hint="give a transformers model, its name or its folder"
        )
    if not isinstance(task, Task):
        hint = "a function that returns one is called first" if callable(task) else "Task(...) or build_task(NAME)"
        raise ConfigError(f"expected a ramet.Task: found {_described(task)}", hint=hint)
    refuse_no_config(config)
    if not len(task.train):
        raise DataError(
            f"the task {task.name} has no training rows: its list train is empty",
            hint="do its options, or a filter, leave nothing?",
        )
    tools_of(task)


def task_of(section: TaskConfig, seed: int) -> Task:
    """Build the task that a section of the settings names; raise `ConfigError` where there is none."""
    return build_task(
        section.name,
        section.options,
        seed=seed,
        prompts=section.prompts,
        held_out=section.held_out,
        reward=section.reward,
    )


def refuse_no_config(config: object) -> None:
    """Raise `ConfigError` for what is no `TrainConfig`."""
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"expected a TrainConfig: found {_described(config)}", hint="TrainConfig(...), or ramet.config.load(PATH)"
        )


def _described(value: object) -> str:
    return f"the function {value.__name__}" if inspect.isfunction(value) else f"{reprlib.repr(value)}"


def model_of(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    config: TrainConfig,
    *,
    kept: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelConfig]:
    """Load what is a name, check what is given, and say in a section of the configuration which model it is.

    `kept` is a folder in which a chat template was saved, which is read in the place of the one that the configuration
    names.

    Raises `ModelError` for a model or tokenizer that can not be had, do not fit together or are in a precision that
    can not be trained, `ConfigError` for a section `config.model` that speaks of another model.
    """
    if isinstance(model, (str, Path)):
        section = config.model or ModelConfig(name=str(model))
        if section.name != str(model):
            raise ConfigError(
                f"the trainer was given the model {str(model)!r}, and model.name is {section.name!r}",
                hint="name the same model twice, or leave the section [model] out",
            )
        if section.chat_template is not None and tokenizer is not None:
            raise ConfigError(
                "model.chat_template is for a tokenizer that is loaded by name: found one that is there already",
                hint="set the tokenizer's own chat_template, and leave model.chat_template out",
            )
        saved = None if kept is None else kept / "chat_template.jinja"
        loaded, own = load_model(
            section.name,
            dtype=section.dtype,
            device=pick_device(section.device),
            attention=section.attention,
            revision=section.revision,
            options=section.options,
            chat_template=saved if section.chat_template and saved and saved.is_file() else section.chat_template,
            seed=config.seed,
        )
        tokenizer = own if tokenizer is None else tokenizer
        check_vocabulary(loaded, tokenizer)
        return loaded, tokenizer, section
    origin = str(getattr(model, "name_or_path", ""))
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(origin)
        except ModelError as error:
            raise ModelError(
                f"the model was given without a tokenizer, and none is found for it: {error.message}",
                hint="give the tokenizer as well: Trainer(..., tokenizer=...)",
            ) from error
    check_vocabulary(model, tokenizer)
    model.eval()  # type: ignore[no-untyped-call]
    return model, tokenizer, _section_of(model, origin or type(model).__name__, config)


def _section_of(model: PreTrainedModel, name: str, config: TrainConfig) -> ModelConfig:
    """Describe a model that is there already; refuse settings that would have been for loading another."""
    for parameter_name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in DTYPES.values():
            raise ModelError(
                f"weights are trained in {' or '.join(DTYPES)}: found {parameter_name} in "
                f"{str(parameter.dtype).removeprefix('torch.')}",
                hint='give model.float(), and set model.autocast = "bfloat16" if it should be fast',
            )
    found = {"dtype": str(model.dtype).removeprefix("torch."), "device": model.device.type}
    given = config.model or ModelConfig(name=name)
    for key in ("attention", "revision", "options", "chat_template"):
        if getattr(given, key):
            raise ConfigError(
                f"model.{key} is for loading a model by name: found a {type(model).__name__} that is there already",
                hint=f"leave model.{key} out, or give the trainer the model's name",
            )
    for key, value in found.items():
        asked = getattr(given, key)
        if key in given.model_fields_set and asked != "auto" and asked.partition(":")[0] != value:
            raise ConfigError(
                f"model.{key} is {asked!r}, and the model that was given has {value!r}",
                hint=f"leave model.{key} out, or move the model",
            )
    # The whole tree is checked again, as it is when the run's config.toml is read back.
    tree = {**config.model_dump(exclude_none=True), "model": {**given.model_dump(exclude_none=True), **found}}
    section = checked(tree, where="the settings of the model that was given").model
    assert section is not None
    return section


def prompt_limit(model: PreTrainedModel, rollout: RolloutConfig) -> int | None:
    """Return the most tokens that a prompt may have, None for no limit: what is asked for and fits the model.

    Without a limit of its own, a prompt leaves room for a whole completion. Raises `ConfigError` where there is none.
    """
    context = context_length(model)
    if context is None:
        return rollout.prompt_limit
    if rollout.prompt_limit is not None:
        return min(rollout.prompt_limit, context - 1)
    if rollout.max_new_tokens >= context:
        raise ConfigError(
            f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no prompt room in the model's {context} tokens",
            hint="lower it, or say with rollout.prompt_limit how long prompts may be",
        )
    return context - rollout.max_new_tokens


def sampling_of(tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> Sampling:
    """Return how the samples that are trained on are drawn; raise `ConfigError` for a stop that no text can hold.

    A stop that is one token for `tokenizer` is looked for as that token, which is cheap; any other one in the text.
    """
    found = {stop: _token_of(tokenizer, stop) for stop in rollout.stop}
    return Sampling(
        rollout.max_new_tokens,
        rollout.temperature,
        stop_ids=tuple(token for token in found.values() if token is not None),
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop=tuple(stop for stop, token in found.items() if token is None),
    )


def _token_of(tokenizer: PreTrainedTokenizerBase, stop: str) -> int | None:
    """Return the token whose text is `stop`, None where it takes several."""
    ids = list(tokenizer(stop, add_special_tokens=False)["input_ids"])
    # Some tokenizers mark the start of a text: what counts is the string behind other text.
    before = list(tokenizer("=", add_special_tokens=False)["input_ids"])
    behind = list(tokenizer("=" + stop, add_special_tokens=False)["input_ids"])
    if len(ids) > 1 and behind[: len(before)] == before:
        ids = behind[len(before) :]
    text = decoder_of(tokenizer)
    if not ids or (stop not in text(ids) and stop not in text(behind)):
        raise ConfigError(
            f"rollout.stop: {stop!r} is {len(ids)} tokens ({ids}) for this tokenizer, and no text holds it",
            hint="choose another string, or leave it out and let eos end the completion",
        )
    return ids[0] if len(ids) == 1 else None


def policy_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> TransformersPolicy:
    """Return the policy that samples from `model` in the process."""
    rollout = config.rollout
    own_eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return TransformersPolicy(
        model,
        eos_ids=[*eos_ids_of(model), *own_eos],
        rows_per_batch=rollout.rows_per_batch or rollout.prompts_per_step * rollout.group_size,
        autocast=config.autocast_dtype,
        tokenizer=tokenizer,
    )


def server_of(section: ServerConfig, tokenizer: PreTrainedTokenizerBase) -> ServerPolicy:
    """Return the policy behind a server; raise `ConfigError` where the variable with its key is not there."""
    key = None
    if section.key_variable is not None:
        key = os.environ.get(section.key_variable)
        if key is None:
            raise ConfigError(
                f"server.key_variable names {section.key_variable}, and there is no such environment variable",
                hint=f"export {section.key_variable}=...",
            )
    return ServerPolicy(
        section.url,
        model=section.model,
        tokenizer=tokenizer,
        concurrency=section.concurrency,
        timeout=section.timeout_seconds,
        retries=Retries(section.retries),
        outage=section.outage_seconds,
        api_key=key,
        weights_folder=None if section.weights_folder is None else Path(section.weights_folder),
    )


def refuse_text_alone(server: ServerPolicy) -> None:
    """Raise `ModelError` for a server whose completions can not be trained on."""
    try:
        facts = server.check()
    except ServerError as error:
        error.hint = error.hint and error.hint.replace("api_key", "server.key_variable (in Python api_key)")
        raise
    if not facts.tokens:
        raise ModelError(
            f"a run needs the token ids and log-probs of what a server samples, and it gives text alone: "
            f"{facts.reason}",
            hint="use a server of tokens, such as vLLM: docs/servers.md says how it is started",
        )


def tools_of(task: Task) -> tuple[Mapping[str, Any], ...]:
    """Return the JSON schemas of a task's tools; raise `ConfigError` for one that is none, and two of one name."""
    try:
        with contextlib.closing(Toolbox(task.tools)) as toolbox:
            return tuple(toolbox.schemas)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the task {task.name}: one of its tools is none: {error}",
            hint="a tool is a function with typed parameters and a docstring, and has a name of its own",
        ) from error


def playing_of(
    task: Task,
    policy: TransformersPolicy | ServerPolicy,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    judge: Judge,
    config: TrainConfig,
) -> OneTurn | Turns:
    """Return how the run's episodes are played: at once where a task has one turn, else turn by turn.

    Behind a server every row goes its own way.

    Raises `DataError` for prompts of messages where the tokenizer has no chat template, and `ConfigError` where prompts
    of conversations were to be cut.
    """
    if isinstance(policy, TransformersPolicy) and not of_turns(task):
        # The policy ends rows at every eos id; the environment knows one. No token is -1.
        env = LLMEnv(from_text=False, eos_token_id=min(policy.eos_ids, default=-1))
        return OneTurn(env, policy, tokenizer, judge)
    rollout = config.rollout
    if rollout.too_long in ("keep_end", "keep_start"):
        raise ConfigError(
            f'rollout.too_long = "{rollout.too_long}" cuts prompts of tasks of one turn, in the process: a conversation'
            " begins with the whole of its prompt",
            hint='set it to "refuse" or "drop"',
        )
    rules = rules_of(
        config,
        sampling_of(tokenizer, rollout),
        context=context_length(model),
        limit=prompt_limit(model, rollout),
    )
    return Turns(task, policy, template_of(task, tokenizer, rollout), rules, judge)


def template_of(task: Task, tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> Speech:
    """Return how a task's conversations are written: as text where all its prompts are, else by the chat template.

    Warns of tools that nothing tells the model of, and of replies that no turn is left to read. Raises `DataError` for
    prompts of messages where the tokenizer has no chat template.
    """
    text = all(isinstance(row["prompt"], str) for row in (*task.train, *task.held_out))
    template: Speech = PlainTemplate(tokenizer) if text else ChatTemplate(tokenizer, rewrites=rollout.rewrites)
    offered = tools_of(task)
    if offered and not (isinstance(template, ChatTemplate) and template.shows(offered)):
        logging.getLogger(__name__).warning(
            "nothing tells the model which tools the task %s has: %s. The prompt has to, unless the model knows",
            task.name,
            "its prompts are text" if text else "the chat template leaves them out",
        )
    if task.max_turns == 1 and (task.reply is not None or task.tools):
        logging.getLogger(__name__).warning(
            "the task %s has max_turns = 1: the model never reads what its %s, for its only turn is over then",
            task.name,
            "reply says" if task.reply is not None else "tools answer",
        )
    return template


def rules_of(config: TrainConfig, sampling: Sampling, *, context: int | None, limit: int | None) -> Rules:
    """Return the limits of an episode: `context` tokens of the whole, `limit` of its prompt, None for no limit."""
    rollout = config.rollout
    return Rules(
        sampling,
        config.seed,
        max_turns=rollout.max_turns,
        time_limit=rollout.episode_seconds,
        tool_seconds=rollout.tool_seconds,
        context=context,
        prompt_limit=limit,
        lockstep=rollout.lockstep,
    )


def settled_turns(task: Task, rollout: RolloutConfig) -> RolloutConfig:
    """Return the settings with the number of turns that holds; refuse those that a task of one turn makes void."""
    if of_turns(task):
        return rollout.model_copy(update={"max_turns": rollout.max_turns or task.max_turns})
    fields = type(rollout).model_fields
    for key in ("max_turns", "episode_seconds", "tool_seconds", "lockstep", "rewrites"):
        if getattr(rollout, key) != fields[key].default:
            raise ConfigError(
                f"rollout.{key} is for tasks with replies or tools: the task {task.name} has one turn and neither",
                hint=f"leave rollout.{key} out",
            )
    return rollout


def score_limit(task: Task, rollout: RolloutConfig) -> float | None:
    """Return how many seconds a score may take: of a task of several turns, at the most as many as an episode."""
    limit = rollout.episode_seconds if of_turns(task) else None
    return limit if rollout.score_seconds is None else rollout.score_seconds


def of_turns(task: Task) -> bool:
    """Return whether an episode of `task` may have more than one turn."""
    return task.max_turns > 1 or task.reply is not None or task.begin is not None or bool(task.tools)


def reference_of(model: PreTrainedModel, folder: Path) -> PreTrainedModel | InFile:
    """Return the reference of a run: `model` as it is now and as `folder` holds it.

    On the CPU its weights stay in the file until they are used. On a GPU, and where the file holds them in another form
    than the model does, it is a frozen copy.
    """
    try:
        return in_file(model, folder)
    except ModelError as error:
        logging.getLogger(__name__).info("the reference is a copy in memory: %s", error)
        return frozen(model)


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` that nothing trains."""
    reference = copy.deepcopy(model)
    reference.eval()  # type: ignore[no-untyped-call]
    reference.requires_grad_(False)
    return reference
