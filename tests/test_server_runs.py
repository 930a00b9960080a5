"""Runs whose samples come from a server: here a stand-in, a copy of the model that gets its weights when told to."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PreTrainedModel

from ramet.checkpoint import newest_checkpoint
from ramet.config import TrainConfig, parse
from ramet.errors import ConfigError, ModelError, ServerError, ServerGone, TooManyFailures
from ramet.metrics import read
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.server import ServerPolicy
from ramet.policies.server.facts import ServerFacts
from ramet.policies.transformers import TransformersPolicy
from ramet.rollouts import Turns
from ramet.tasks import Task
from ramet.trainer import Trainer
from ramet.types import Completion, Episode, Request, Sample

TOKENIZER = tiny_tokenizer()
URL = "http://127.0.0.1:9"
WORDY = "['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', '1', '2', '3', '4', '5', '6', '7']"


RUNNING = threading.Lock()


class StandIn(ServerPolicy):
    """A server in the process: it samples from a copy of the model, one row at a time."""

    tokens = True
    pushed: list[int]

    def check(self) -> ServerFacts:
        return ServerFacts(tokens=self.tokens, reason="it is a stand-in")

    async def answer(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        with RUNNING:  # the loops of several steps may ask at once
            [answer] = self._copied.complete([request])
        return answer

    def update(self, model: PreTrainedModel, *, version: int | None = None, tolerance: float | None = None) -> None:
        assert version is not None
        if not hasattr(self, "pushed"):
            self.pushed = []
        self.pushed.append(version)
        self._copied = TransformersPolicy(copy.deepcopy(model), eos_ids=[TOKENIZER.eos_token_id], tokenizer=TOKENIZER)
        self._copied.version = self.version = version


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramet.assembly.ServerPolicy", StandIn)


def config(runs: Path, *overrides: str) -> TrainConfig:
    text = f"""
    steps = 4
    threads = 1
    rollout = {{ max_new_tokens = 3, prompts_per_step = 2, group_size = 3, stop = {WORDY} }}
    optimizer = {{ learning_rate = 0.01 }}
    loss = {{ importance_cap = 5.0 }}
    """
    return parse(text, [f"runs='{runs}'", *overrides])


SERVER = f"server={{url='{URL}', model='tiny'}}"


def net() -> LlamaForCausalLM:
    return tiny_llama(TOKENIZER, hidden_size=32, layers=1, heads=2, intermediate_size=32, context=64)


def reply(episode: Episode) -> str | None:
    return None if episode.turns == 2 else "+"


def low_ids(sample: Sample) -> float:
    return sum(token < 40 for token in sample.completion_tokens) / 6


def trainer(given: TrainConfig, **options: Any) -> Trainer:
    rows = [{"prompt": f"{number}="} for number in range(5)]
    task = Task("talk", rows, [{"prompt": "9="}], low_ids, reply=reply, max_turns=2)
    return Trainer.from_task(net(), task, tokenizer=TOKENIZER, config=given, **options)


def left(folder: Path) -> tuple[list[Mapping[str, Any]], bytes]:
    weights = newest_checkpoint(folder / "checkpoints") / "model.safetensors"
    return read(folder / "rollouts.jsonl"), weights.read_bytes()


def test_a_run_behind_a_server_is_the_run_in_the_process(tmp_path: Path) -> None:
    """The same rollouts and, to the bit, the same weights; the sampler's log-probs, which batches round, are unused."""
    plain = "loss.importance_cap=none"
    here = trainer(config(tmp_path / "here", plain)).train()
    there = trainer(config(tmp_path / "there", plain, SERVER))
    assert left(there.train().folder) == left(here.folder)
    assert isinstance(there.server, StandIn)
    assert there.server.pushed == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("staleness", [1, 2])
def test_samples_are_at_most_as_old_as_the_bound(tmp_path: Path, staleness: int) -> None:
    """Steps are sampled ahead, the first ones all from the first weights; nothing else changes its place."""
    run = trainer(config(tmp_path, SERVER, f"rollout.staleness={staleness}")).train()
    steps = [line for line in read(run.folder / "metrics.jsonl") if "when" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    ages = [line["staleness"] for line in steps]
    assert ages[0] == 0
    assert max(ages) <= staleness
    records = [record for record in read(run.folder / "rollouts.jsonl") if record["when"] == "train"]
    in_turn = read(trainer(config(tmp_path / "k0", SERVER)).train().folder / "rollouts.jsonl")
    plain = [record for record in in_turn if record["when"] == "train"]
    place = [(record["step"], record["group"], record["member"]) for record in records]
    assert place == [(record["step"], record["group"], record["member"]) for record in plain]
    assert [r for r in records if r["step"] == 1] == [r for r in plain if r["step"] == 1]


def test_a_server_of_text_alone_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "tokens", False)
    with pytest.raises(ModelError, match="gives text alone: it is a stand-in"):
        trainer(config(tmp_path / "runs", SERVER)).train()
    assert not (tmp_path / "runs").exists()


def test_the_settings_of_a_server_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Recorded(StandIn):
        def __init__(self, url: str, **options: Any) -> None:
            asked.update(url=url, **options)
            super().__init__(url, **options)

    monkeypatch.setattr("ramet.assembly.ServerPolicy", Recorded)
    monkeypatch.setenv("A_KEY", "secret")
    given = config(
        tmp_path, SERVER, "server.concurrency=3", "server.timeout_seconds=2.5", "server.retries=1",
        "server.outage_seconds=7.5",
        f"server.weights_folder='{tmp_path}'", "server.key_variable=A_KEY",
    )  # fmt: skip
    trainer(given)
    found = {
        key: asked[key] for key in ("url", "model", "concurrency", "timeout", "outage", "api_key", "weights_folder")
    }
    assert found == {
        "url": URL, "model": "tiny", "concurrency": 3, "timeout": 2.5, "outage": 7.5, "api_key": "secret",
        "weights_folder": tmp_path,
    }  # fmt: skip
    assert asked["retries"].count == 1
    with pytest.raises(ConfigError, match="names NO_KEY, and there is no such"):
        trainer(config(tmp_path, SERVER, "server.key_variable=NO_KEY"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.staleness=1"], "needs a server"),
        ([SERVER, "rollout.lockstep=true"], "a server completes rows as they come"),
        ([SERVER, "rollout.staleness=1", "loss.importance_cap=none"], "older"),
    ],
)
def test_staleness_wants_a_server_and_a_correction_and_lockstep_none(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, *overrides)


def test_a_server_that_takes_no_weights_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step's weights are the trainer's by then: they are saved, and the run goes on from there."""
    plain = StandIn.update

    def breaks(self: StandIn, model: PreTrainedModel, *, version: int | None = None, **_: Any) -> None:
        if version == 3:
            raise ServerError("it is gone")
        plain(self, model, version=version)

    monkeypatch.setattr(StandIn, "update", breaks)
    given = config(tmp_path, SERVER)
    with pytest.raises(ServerError, match="gone"):
        trainer(given).train()
    assert newest_checkpoint(given.folder / "checkpoints").name == "step-000003"
    monkeypatch.setattr(StandIn, "update", plain)
    whole = trainer(config(tmp_path / "whole", SERVER)).train()
    assert left(trainer(given, resume=True).train().folder) == left(whole.folder)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_that_stays_away_ends_the_run_with_a_checkpoint_and_costs_no_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """In the process nobody waits: the error is the one that comes when the waiting is over."""
    plain = StandIn.answer

    async def away(self: StandIn, request: Request) -> Completion:
        if self.version == 2:
            raise ServerGone("the server has been away for 600 s")
        return await plain(self, request)

    monkeypatch.setattr(StandIn, "answer", away)
    given = config(tmp_path, SERVER, f"rollout.staleness={staleness}", "rollout.max_failed_fraction=0.0")
    with pytest.raises(ServerGone, match="away for 600 s"):
        trainer(given).train()
    done = int(newest_checkpoint(given.folder / "checkpoints").name.removeprefix("step-"))
    assert 2 <= done <= 2 + staleness
    monkeypatch.setattr(StandIn, "answer", plain)
    went_on = trainer(given, resume=True).train()
    records = [one for one in read(went_on.folder / "rollouts.jsonl") if one["when"] == "train"]
    assert [one["step"] for one in records] == [step for step in (1, 2, 3, 4) for _ in range(6)]
    assert {one["outcome"] for one in records} == {"scored"}


@pytest.mark.parametrize("staleness", [0, 1])
def test_rollouts_that_ran_out_of_time_in_an_outage_are_all_that_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """More of them than max_failed_fraction allows; where the server was there, they end the run."""
    plain = StandIn.answer

    async def away(self: StandIn, request: Request) -> Completion:
        if request.draw.prompt in (2, 3):  # the groups of the second step
            if noted:
                self._outage.count = 1
            raise TimeoutError  # as if its time were over
        return await plain(self, request)

    monkeypatch.setattr(StandIn, "answer", away)
    limits = ["rollout.max_failed_fraction=0.2", f"rollout.staleness={staleness}"]
    noted = True
    run = trainer(config(tmp_path / "there", SERVER, *limits)).train()
    records = [one for one in read(run.folder / "rollouts.jsonl") if one["when"] == "train"]
    found = {step: {one["outcome"] for one in records if one["step"] == step} for step in (1, 2, 3, 4)}
    assert found == {1: {"scored"}, 2: {"timed_out"}, 3: {"scored"}, 4: {"scored"}}
    noted = False
    with pytest.raises(TooManyFailures, match="step 2: 100% of the rollouts failed"):
        trainer(config(tmp_path / "not", SERVER, *limits)).train()


def test_an_outage_in_an_evaluation_ends_no_run_and_excuses_no_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = StandIn.answer

    async def away(self: StandIn, request: Request) -> Completion:
        if request.sampling.temperature == 0.0 and self.version == 0:
            self._outage.count = 1
            raise TimeoutError  # as if its time were over
        if broken and request.draw.prompt in (0, 1) and request.sampling.temperature:
            raise ValueError("no outage")
        return await plain(self, request)

    monkeypatch.setattr(StandIn, "answer", away)
    limit, broken = "rollout.max_failed_fraction=0.2", False
    run = trainer(config(tmp_path / "there", SERVER, limit)).train()
    (before,) = [line for line in read(run.folder / "metrics.jsonl") if line.get("when") == "before"]
    assert before["held_out"]["greedy"] == {
        "score": None, "low": None, "high": None, "problems": 0, "failed": 1, "abstained": 0,
    }  # fmt: skip
    broken, given = True, config(tmp_path / "not", SERVER, limit, "evaluation.problems=1")
    with pytest.raises(TooManyFailures, match=r"(step 1|sampled\)): 100% .* no outage"):
        trainer(given).train()


def test_prompts_of_conversations_are_not_cut(tmp_path: Path) -> None:
    """What is too long is refused or left out; a limit of the run's own holds for the conversation as well."""
    with pytest.raises(ConfigError, match="a conversation begins with the whole of its prompt"):
        trainer(config(tmp_path, "rollout.too_long=keep_end"))
    made = trainer(config(tmp_path, "rollout.prompt_limit=7"))
    assert isinstance(made.play, Turns)
    assert made.play.rules.prompt_limit == 7


def test_an_error_while_steps_are_sampled_ahead_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    def breaks(sample: Sample) -> float:
        return float("nan") if sample.group == 5 else 0.0  # the third step

    rows = [{"prompt": f"{number}="} for number in range(5)]
    task = Task("talk", rows, [], breaks, reply=reply, max_turns=2)
    given = config(tmp_path, SERVER, "rollout.staleness=2")
    with pytest.raises(ValueError, match="finite"):
        Trainer.from_task(net(), task, tokenizer=TOKENIZER, config=given).train()
    assert newest_checkpoint(given.folder / "checkpoints").name == "step-000002"
