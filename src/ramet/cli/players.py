"""Who plays in `ramet eval`: a model in the process, a server, a task's own reference, or a person."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

from ramet.cli.play import ROOM, read_line
from ramet.cli.stage import HOW_TO, Stage
from ramet.cli.train import quiet_libraries
from ramet.config import TrainConfig
from ramet.errors import ConfigError, ModelError, ServerError
from ramet.types import Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ramet.episodes import Rules, Speech
    from ramet.policies.policy import Policy
    from ramet.tasks import Task

Stand: TypeAlias = Literal["reference", "person"]


@dataclass(frozen=True, slots=True)
class Who:
    """Which policy was asked for: `model` alone, `server` with what it calls its `model`, or a `stand`-in."""

    model: str | None = None
    server: str | None = None
    stand: Stand | None = None
    tokenizer: str | None = None
    key_from: str | None = None

    def check(self) -> None:
        """Raise `ConfigError` unless one policy was asked for, and all of it."""
        if self.stand is not None and (self.model is not None or self.server is not None):
            raise ConfigError("--policy is for who plays without a model", hint="leave --model and --server out")
        if self.stand is None and self.model is None:
            also = " (the name under which the server knows it)" if self.server else ""
            raise ConfigError(
                f"nobody plays: expected --model{also}", hint="--model smollm2, --model FOLDER, or --policy reference"
            )
        if self.server is None and (self.tokenizer is not None or self.key_from is not None):
            name = "--tokenizer" if self.tokenizer is not None else "--api-key-from"
            raise ConfigError(f"{name} is for --server", hint=f"leave {name} out")

    @property
    def keys(self) -> tuple[str, ...]:
        """The settings that this policy reads."""
        always = tuple(f"rollout.{key}" for key in ("max_turns", "episode_seconds", "tool_seconds", "score_seconds"))
        if self.stand is not None:
            return always
        sampled = tuple(f"rollout.{key}" for key in ("top_k", "top_p", "min_p", "stop", "prompt_limit", "rewrites"))
        if self.server is not None:
            return (*always, *sampled)
        loaded = tuple(f"model.{key}" for key in ("dtype", "device", "autocast", "attention", "revision", "options"))
        return (*always, *sampled, "rollout.rows_per_batch", *loaded)

    @property
    def name(self) -> str:
        """What to call it."""
        return self.stand or f"{self.model}{f' at {self.server}' if self.server else ''}"


@dataclass(frozen=True, slots=True)
class Player:
    """A policy that is ready, and what goes with it: the task that it plays, its template and its rules.

    `row_of(row, group, member)` gives the row with which an episode starts; `at_once` is how many episodes are played
    at once, None for all; `close` gives back what the policy holds.
    """

    policy: Policy
    task: Task
    template: Speech
    rules: Rules
    row_of: Callable[[Mapping[str, Any], int, int], Mapping[str, Any]] = lambda row, group, member: row
    at_once: int | None = None
    close: Callable[[], None] = lambda: None


def player_of(who: Who, task: Task, config: TrainConfig, temperature: float) -> Player:
    """Make the policy that was asked for; a server is asked whether it is there and what it can do."""
    if who.stand is not None:
        return _stand_in(who.stand, task, config)
    if who.server is not None:
        return _server(who, task, config, temperature)
    return _model(task, config, temperature)


def _rules(config: TrainConfig, sampling: Sampling, context: int | None = None) -> Rules:
    from ramet.episodes import Rules

    rollout = config.rollout
    return Rules(
        sampling,
        config.seed,
        max_turns=rollout.max_turns,
        time_limit=rollout.episode_seconds,
        tool_seconds=rollout.tool_seconds,
        context=context,
        prompt_limit=rollout.prompt_limit,
    )


def _template(task: Task, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> Speech:
    from ramet.chat import ChatTemplate, PlainTemplate

    text = all(isinstance(row["prompt"], str) for row in (*task.train, *task.held_out))
    return PlainTemplate(tokenizer) if text else ChatTemplate(tokenizer, rewrites=config.rollout.rewrites)


def _model(task: Task, config: TrainConfig, temperature: float) -> Player:
    from ramet.assembly import sampling_of
    from ramet.models import load_model, pick_device
    from ramet.policies.transformers import TransformersPolicy, context_length, eos_ids_of

    quiet_libraries()
    section = config.model
    assert section is not None
    model, tokenizer = load_model(
        _newest(section.name),
        dtype=section.dtype,
        device=pick_device(section.device),
        attention=section.attention,
        revision=section.revision,
        options=section.options,
        seed=config.seed,
    )
    own_eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    policy = TransformersPolicy(
        model,
        eos_ids=[*eos_ids_of(model), *own_eos],
        rows_per_batch=config.rollout.rows_per_batch or 64,
        autocast=config.autocast_dtype,
        tokenizer=tokenizer,
    )
    sampling = dataclasses.replace(sampling_of(tokenizer, config.rollout), temperature=temperature)
    rules = _rules(config, sampling, context_length(model))
    return Player(policy, task, _template(task, tokenizer, config), rules)


def _newest(name: str) -> str:
    """Return the newest checkpoint where `name` is the folder of a run, else the name."""
    from ramet.checkpoint import newest_checkpoint

    checkpoints = Path(name) / "checkpoints"
    return str(newest_checkpoint(checkpoints)) if checkpoints.is_dir() else name


def _server(who: Who, task: Task, config: TrainConfig, temperature: float) -> Player:
    from ramet.assembly import sampling_of
    from ramet.chat import ChatTemplate
    from ramet.policies.person import script_tokenizer
    from ramet.policies.server import ServerPolicy
    from ramet.policies.server.retries import Retries

    assert who.server is not None
    assert who.model is not None
    tokenizer = script_tokenizer() if who.tokenizer is None else _tokenizer(who.tokenizer)
    key = None if who.key_from is None else _key(who.key_from)
    # Without the model's own tokenizer its ids mean nothing here: text goes in and out.
    api: Literal["auto", "text"] = "text" if who.tokenizer is None else "auto"
    policy = ServerPolicy(
        who.server, model=who.model, tokenizer=tokenizer, api=api, api_key=key, retries=Retries(count=1)
    )
    with contextlib.ExitStack() as opened:
        opened.callback(policy.close)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                facts = policy.check()
            except ServerError as error:
                error.hint = error.hint or "is a server there, and is the address of --server right?"
                raise
        policy.retries = Retries()  # more patient, now that the server is known to be there
        if api == "auto":
            for warning in said:
                _to_stderr(f"note: {warning.message}")
        if facts.tokens:
            template = _template(task, tokenizer, config)
            sampling = sampling_of(tokenizer, config.rollout)
        else:
            template, sampling = ChatTemplate(script_tokenizer()), _as_text(config)
        sampling = dataclasses.replace(sampling, temperature=temperature)
        rules = _rules(config, sampling, facts.context if facts.tokens else None)
        opened.pop_all()
    return Player(policy, task, template, rules, close=policy.close)


def _as_text(config: TrainConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(
        rollout.max_new_tokens,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
    )


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"transformers can not load a tokenizer from {name!r}: {error}",
            hint="give the folder of the model that the server serves",
        ) from error
    return found


def _key(variable: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--api-key-from {variable}: there is no such environment variable", hint="export it")
    return key


def _stand_in(stand: Stand, task: Task, config: TrainConfig) -> Player:
    from ramet.chat import ChatTemplate
    from ramet.policies.person import PersonPolicy, script_tokenizer
    from ramet.policies.reference import ReferencePolicy

    tokenizer = script_tokenizer()
    rules, template = _rules(config, Sampling(ROOM)), ChatTemplate(tokenizer)
    if stand == "reference":
        reference = ReferencePolicy(task, tokenizer)
        return Player(
            reference,
            reference.task,
            template,
            rules,
            row_of=lambda row, group, member: reference.row_of(row, group=group, member=member),
        )
    stage = Stage(read_line, _to_stderr)

    def ask(request: Request) -> str:
        nonlocal stage
        if request.draw.turn == 0:
            click.echo(f"\nrow {request.draw.prompt}, sample {request.draw.member}", err=True)
            stage = Stage(read_line, _to_stderr)
        return stage.ask(request)

    click.echo(HOW_TO, err=True)
    return Player(PersonPolicy(ask, tokenizer), task, template, rules, at_once=1)


def _to_stderr(line: str) -> None:
    click.echo(line, err=True)
