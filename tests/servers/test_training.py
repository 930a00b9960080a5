"""Runs of the trainer and of `ramet eval` against the real vLLM, which may be killed in the middle."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.servers.places import Running, peaked
from tests.servers.test_vllm import EXACT, furthest, requests
from transformers import AutoModelForCausalLM

from ramet.cli.main import main
from ramet.config import parse
from ramet.metrics import read
from ramet.models.tiny import tiny_tokenizer
from ramet.policies.policy import by_row
from ramet.policies.server import ServerPolicy
from ramet.tasks import Task
from ramet.trainer import Trainer
from ramet.types import Completion, Episode, Request, Sample, Sampling

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore:.*has weights that another run put there"),
]
STEPS, ROWS = 4, 16
STOPS = [*"abcdefghijklm0123456789+-=", "N", "O", "P"]
"""What ends a turn, so that most episodes have two."""
MISMATCH = 1e-3
"""How far the log-prob of any sampled token may lie from the trainer's, in nats."""


class Talks:
    """A task of two turns; `troubles` are called in the middle of a step, after so many first turns in all."""

    def __init__(self, troubles: Mapping[int, Any]) -> None:
        self.turns, self.lock, self.troubles = 0, threading.Lock(), dict(troubles)

    def reply(self, episode: Episode) -> str | None:
        if episode.turns == 2:
            return None
        with self.lock:
            self.turns += 1
            trouble = self.troubles.pop(self.turns, None)
        if trouble is not None:
            trouble()
        return "+1="

    def score(self, sample: Sample) -> float:
        return sum(token % 2 for token in sample.completion_tokens) / max(1, len(sample.completion_tokens))


class Watched:
    """A trainer behind the server, and every completion that came to it."""

    def __init__(self, server: Running, folder: Path, troubles: Mapping[int, Any], *overrides: str) -> None:
        text = f"""
        steps = {STEPS}
        threads = 1
        [rollout]
        max_new_tokens = 16
        prompts_per_step = 4
        group_size = {ROWS // 4}
        temperature = 0.9
        stop = {STOPS}
        [optimizer]
        learning_rate = 0.003
        [loss]
        importance_cap = 2.0
        [advantage]
        kind = "group_mean_std"
        [server]
        url = "{server.url}"
        model = "policy"
        concurrency = 8
        retries = 1
        timeout_seconds = 120.0
        """
        talks = Talks(troubles)
        rows = [{"prompt": f"{number}+{number % 7}="} for number in range(8)]
        task = Task("talks", rows, [], talks.score, reply=talks.reply, max_turns=2)
        config = parse(text, [f"runs='{folder}'", *overrides])
        self.trainer = Trainer.from_task(peaked(0), task, tokenizer=tiny_tokenizer(), config=config)
        self.completions: list[Completion] = []

    def train(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """Run to the end; return the lines of the steps."""
        assert self.trainer.server is not None
        plain = self.trainer.server.answer

        async def answer(request: Request) -> Completion:
            found = await plain(request)
            self.completions.append(found)
            return found

        monkeypatch.setattr(self.trainer.server, "answer", answer)
        self.result = self.trainer.train()
        return [dict(line) for line in read(self.result.folder / "metrics.jsonl") if "when" not in line]

    def rollouts(self) -> list[Mapping[str, Any]]:
        return [one for one in read(self.result.folder / "rollouts.jsonl") if one["when"] == "train"]


def assert_a_whole_run(run: Watched, steps: list[dict[str, Any]]) -> None:
    """All rollouts are there and scored, each token of the weights of its step, under the trainer's own log-probs."""
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in steps)
    assert max(line["mismatch_max"] for line in steps) < MISMATCH
    assert [line["staleness"] for line in steps] == [0] * STEPS
    assert [(one["outcome"], one["step"]) for one in run.rollouts()] == [
        ("scored", step) for step in range(1, STEPS + 1) for _ in range(ROWS)
    ]
    versions = [one.version for one in run.completions if len(one.tokens)]
    assert versions == sorted(versions)
    assert set(versions) == set(range(STEPS))
    assert all(one.log_probs.isfinite().all() for one in run.completions)


def test_a_run_trains_on_what_a_vllm_samples_which_ends_with_the_weights_of_the_checkpoint(
    tiny_vllm: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Watched(tiny_vllm, tmp_path, {})
    steps = run.train(monkeypatch)
    assert_a_whole_run(run, steps)
    with capsys.disabled():
        print("\nmismatch of each step, in nats:", *(f"{line['mismatch_max']:.2g}" for line in steps))
    saved = AutoModelForCausalLM.from_pretrained(run.result.checkpoint)
    asked = requests(Sampling(24))
    found = by_row(ServerPolicy(tiny_vllm.url, model="policy").complete(asked), len(asked))
    assert furthest(saved, asked, found) < EXACT
    assert furthest(peaked(0), asked, found) > 10 * EXACT


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_goes_on_behind_a_vllm_that_is_killed_in_the_middle_of_a_step_and_started_anew(
    tiny_vllm: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    staleness: int,
) -> None:
    def dies() -> None:
        tiny_vllm.kill()
        tiny_vllm.start(wait=False)  # with the weights of its folder, which are those of version 0

    run = Watched(tiny_vllm, tmp_path, {ROWS + 5: dies}, f"rollout.staleness={staleness}")
    steps = run.train(monkeypatch)
    if staleness:
        assert [line["step"] for line in steps] == [1, 2, 3, 4]
        assert max(line["mismatch_max"] for line in steps[:1]) < MISMATCH
        assert {one["outcome"] for one in run.rollouts()} == {"scored"}
        assert len(run.rollouts()) == STEPS * ROWS
        assert max(line["staleness"] for line in steps) <= staleness
    else:
        assert_a_whole_run(run, steps)
    said = [record.getMessage() for record in caplog.records if record.name == "ramet.http.outage"]
    assert len(said) == 2
    assert said[0].startswith(f"waiting for {tiny_vllm.url}, up to 600 s: ")
    assert said[1].startswith(f"{tiny_vllm.url} is back, after ")


def test_a_greedy_evaluation_by_token_ids_is_that_of_the_process(
    tiny_vllm: Running, tiny_folder: Path, tmp_path: Path
) -> None:
    policy = ServerPolicy(tiny_vllm.url, model="policy")
    policy.update(peaked(0))
    policy.close()
    shared = ["--temperature", "0", "--max-new-tokens", "12", "--problems", "12", "--runs", str(tmp_path)]

    def evaluated(name: str, *options: str) -> list[Mapping[str, Any]]:
        torch.set_num_threads(1)
        done = CliRunner().invoke(main, ["eval", "arithmetic", *shared, "--name", name, *options])
        assert done.exit_code == 0, done.output
        return read(tmp_path / name / "rollouts.jsonl")

    def content(records: list[Mapping[str, Any]]) -> list[Any]:
        keys = ("group", "member", "prompt_tokens", "completion_tokens", "score", "stop")
        return sorted([record[key] for key in keys] for record in records)

    there = evaluated("there", "--server", tiny_vllm.url, "--model", "policy", "--tokenizer", str(tiny_folder))
    here = evaluated("here", "--model", str(tiny_folder))
    assert content(there) == content(here)
    assert len(here) == 12
    assert any(len(record["completion_tokens"]) > 1 for record in here)
