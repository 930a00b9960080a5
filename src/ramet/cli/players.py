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
from ramet.errors import ConfigError, ServerError
from ramet.types import Request, Sampling

if TYPE_CHECKING:
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
        own_template = ("model.chat_template",)
        if self.server is not None:
            asked = ("concurrency", "timeout_seconds", "retries", "outage_seconds")
            server = tuple(f"server.{key}" for key in asked)
            return (*always, *sampled, *server, *(own_template if self.tokenizer is not None else ()))
        loaded = tuple(f"model.{key}" for key in ("dtype", "device", "autocast", "attention", "revision", "options"))
        return (*always, *sampled, "rollout.rows_per_batch", "rollout.lockstep", *loaded, *own_template)

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


def _model(task: Task, config: TrainConfig, temperature: float) -> Player:
    from ramet.assembly import model_of, policy_of, rules_of, sampling_of, template_of
    from ramet.policies.transformers import context_length

    quiet_libraries()
    assert config.model is not None
    newest = config.model.model_copy(update={"name": _newest(config.model.name)})
    model, tokenizer, _ = model_of(newest.name, None, config.model_copy(update={"model": newest}))
    policy = policy_of(model, tokenizer, config)
    sampling = dataclasses.replace(sampling_of(tokenizer, config.rollout), temperature=temperature)
    rules = rules_of(config, sampling, context=context_length(model), limit=config.rollout.prompt_limit)
    return Player(policy, task, template_of(task, tokenizer, config.rollout), rules)


def _newest(name: str) -> str:
    """Return the newest checkpoint where `name` is the folder of a run, else the name."""
    from ramet.checkpoint import newest_checkpoint

    checkpoints = Path(name) / "checkpoints"
    return str(newest_checkpoint(checkpoints)) if checkpoints.is_dir() else name


def _server(who: Who, task: Task, config: TrainConfig, temperature: float) -> Player:
    from ramet.assembly import rules_of, sampling_of, template_of
    from ramet.chat import ChatTemplate
    from ramet.http import Retries
    from ramet.models.load import load_tokenizer
    from ramet.policies.person import script_tokenizer
    from ramet.policies.server import ServerPolicy

    assert who.server is not None
    assert who.model is not None
    own = None if config.model is None else config.model.chat_template
    tokenizer = script_tokenizer() if who.tokenizer is None else load_tokenizer(who.tokenizer, chat_template=own)
    key = None if who.key_from is None else _key(who.key_from)
    # Without the model's own tokenizer its ids mean nothing here: text goes in and out.
    api: Literal["auto", "text"] = "text" if who.tokenizer is None else "auto"
    assert config.server is not None
    policy = ServerPolicy(
        who.server,
        model=who.model,
        tokenizer=tokenizer,
        api=api,
        concurrency=config.server.concurrency,
        timeout=config.server.timeout_seconds,
        api_key=key,
        retries=Retries(count=1),
        outage=config.server.outage_seconds,
    )
    with contextlib.ExitStack() as opened:
        opened.callback(policy.close)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                facts = policy.check()
            except ServerError as error:
                hint = error.hint or "is a server there, and is the address of --server right?"
                error.hint = hint.replace("api_key", "--api-key-from VARIABLE")
                raise
        policy.retries = Retries(config.server.retries)  # more patient, now that the server is known to be there
        if api == "auto":
            for warning in said:
                _to_stderr(f"note: {warning.message}")
        if facts.tokens:
            template = template_of(task, tokenizer, config.rollout)
            sampling = sampling_of(tokenizer, config.rollout)
        else:
            template, sampling = ChatTemplate(script_tokenizer()), _as_text(config)
        sampling = dataclasses.replace(sampling, temperature=temperature)
        context = facts.context if facts.tokens else None
        rules = rules_of(config, sampling, context=context, limit=config.rollout.prompt_limit)
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


def _key(variable: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--api-key-from {variable}: there is no such environment variable", hint="export it")
    return key


def _stand_in(stand: Stand, task: Task, config: TrainConfig) -> Player:
    from ramet.assembly import rules_of
    from ramet.chat import ChatTemplate
    from ramet.policies.person import PersonPolicy, script_tokenizer
    from ramet.policies.reference import ReferencePolicy

    tokenizer = script_tokenizer()
    rules = rules_of(config, Sampling(ROOM), context=None, limit=config.rollout.prompt_limit)
    template = ChatTemplate(tokenizer)
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
