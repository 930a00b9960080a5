"""A run that was broken off ends where the unbroken one does, and a run does what its settings and its data say."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from ramet import learner
from ramet.checkpoint import RunState, read_state
from ramet.config import Section, ServerConfig, TrainConfig, load, parse, settings
from ramet.errors import ConfigError, RunExists
from ramet.events import CheckpointWritten, Evaluated, Event, RunEnded, RunStarted, StepDone, WarmStartStep
from ramet.forest import Forest
from ramet.learner import Batch
from ramet.metrics import read
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.transformers import TransformersPolicy
from ramet.scoring.check import Choice, Engine
from ramet.trainer import Result, Trainer
from ramet.types import Completion, Draw, Outcome, Request, Sample

SRC = Path(__file__).resolve().parents[1] / "src"
TOKENIZER = tiny_tokenizer()
SHAPE = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 32, "context": 24}
PROMPTS = [f"{number}=" for number in range(3)]
HELD_OUT = ["7=", "8="]
BASE = """
threads = 1
steps = 5
rollout = { prompts_per_step = 2, group_size = 3, max_new_tokens = 3 }
optimizer = { learning_rate = 0.01, betas = [0.9, 0.95] }
evaluation = { every = 2, problems = 2 }
"""


def model(seed: int = 0) -> LlamaForCausalLM:
    return tiny_llama(TOKENIZER, seed=seed, **SHAPE)


def config(runs: Path, *overrides: str) -> TrainConfig:
    return parse(BASE, [f"runs='{runs}'", *overrides])


def low_ids(sample: Sample) -> float:
    """Something that a model without any knowledge earns now and then: small token ids."""
    return sum(token < 40 for token in sample.completion_tokens) / 3


def trainer(settings: TrainConfig, *, watcher: Callable[[Event], None] | None = None, resume: bool = False) -> Trainer:
    return Trainer(
        model(),
        PROMPTS,
        low_ids,
        held_out=HELD_OUT,
        tokenizer=TOKENIZER,
        config=settings,
        watcher=watcher,
        resume=resume,
    )


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a run's folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def what_a_run_left(folder: Path) -> dict[str, Any]:
    """All that must not depend on how often the run was broken off: weights, optimiser, logs, scores; no times."""
    [checkpoint] = (folder / "checkpoints").iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    timed = ("seconds", "tokens_per_second")
    return {
        "checkpoint": checkpoint.name,
        "weights": (checkpoint / "model.safetensors").read_bytes(),
        "reference": (folder / "reference" / "model.safetensors").read_bytes(),
        "state": (checkpoint / "state.json").read_text(encoding="utf-8"),
        "optimizer": str(torch.load(checkpoint / "optimizer.pt", weights_only=True)),
        "optimizer_values": [
            value.tolist()
            for state in torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
            for value in state.values()
        ],
        "metrics": [{k: v for k, v in line.items() if k not in timed} for line in read(folder / "metrics.jsonl")],
        "rollouts": (folder / "rollouts.jsonl").read_bytes(),
        "summary": {k: v for k, v in summary.items() if k != "seconds"},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare part by part, so that a failure names the part."""
    assert {name for name in expected if found[name] != expected[name]} == set()


def interrupt_after(*steps: int) -> Callable[[Event], None]:
    """A real Ctrl-C in the moment when each of these steps is done."""

    def watch(event: Event) -> None:
        if isinstance(event, StepDone) and event.step in steps:
            signal.raise_signal(signal.SIGINT)

    return watch


PAIRS = [a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in "0123456789abcdefghijklmnopqrstuvwxyz"]
"""Stops of two tokens each, of which a model without any knowledge says some now and then."""
CUT = [
    f"rollout.stop={json.dumps(PAIRS)}",
    "rollout.top_p=0.9",
    "rollout.min_p=0.05",
    "optimizer.gradient_checkpointing=true",
]

# ---------------------------------------------------------------- resume

VARIANTS = {
    "plain": [],
    "updates": ["optimizer.updates_per_step=3", "optimizer.epochs_per_step=2", "checkpoint.every=2"],
    "kl in the loss": ["kl.coefficient=0.1", "kl.unbiased=true", "optimizer.schedule=linear", "checkpoint.every=1"],
    "kl in the reward": [
        "kl.coefficient=0.1",
        "kl.place=reward",
        "loss.importance_cap=2.0",
        "optimizer.warmup_steps=3",
    ],
    "shuffled": ["control.shuffle_rewards=true", "evaluation.every=1", "advantage.kind=leave_one_out"],
    "a support, stops and layers run again": [*CUT, "kl.coefficient=0.1", "checkpoint.every=2"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_interrupted_after_any_steps_ends_as_the_unbroken_one(variant: str, tmp_path: Path) -> None:
    """Three prompts, two a step: the breaks after steps 1 and 2 lie inside one epoch, that after 3 at its end."""
    changes = VARIANTS[variant]
    trainer(config(tmp_path / "whole", *changes)).train()
    expected = what_a_run_left(tmp_path / "whole" / "run")
    patterns = [(1,), (2, 3), (1, 2, 4), (5,)] if variant == "plain" else [(2, 3)]
    for number, breaks in enumerate(patterns):
        broken = config(tmp_path / str(number), *changes)
        result = trainer(broken, watcher=interrupt_after(*breaks)).train()
        while result.interrupted:
            result = trainer(broken, watcher=interrupt_after(*breaks), resume=True).train()
        assert_same(what_a_run_left(broken.folder), expected)


@pytest.mark.parametrize(("checkpoints", "evaluations"), [(1, 2), (2, 1)])
def test_whatever_a_kill_leaves_at_any_event_resumes_to_the_same_end(
    checkpoints: int, evaluations: int, tmp_path: Path
) -> None:
    changes = ["steps=4", f"checkpoint.every={checkpoints}", f"evaluation.every={evaluations}"]
    settings = config(tmp_path / "run", *changes)
    copies: list[Path] = []

    def copy(event: Event) -> None:
        if list(settings.folder.glob("checkpoints/step-*")):
            copies.append(tmp_path / f"{len(copies)} {type(event).__name__}")
            shutil.copytree(settings.folder, copies[-1] / "run")

    trainer(settings, watcher=copy).train()
    expected = what_a_run_left(settings.folder)
    assert len(copies) >= 4
    for left in copies if checkpoints == 1 else copies[::2]:
        trainer(config(left, *changes), resume=True).train()
        assert_same(what_a_run_left(left / "run"), expected)


def test_a_kill_in_the_middle_of_a_line_or_an_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    """Half a line, and rollouts of an evaluation whose scores were not yet written, are made anew."""
    settings = config(tmp_path, "checkpoint.every=1")
    trainer(settings).train()
    expected = what_a_run_left(settings.folder)
    rollouts = settings.folder / "rollouts.jsonl"
    lines = (settings.folder / "metrics.jsonl").read_text(encoding="ascii").splitlines(keepends=True)
    assert json.loads(lines[-1])["when"] == "after"
    (settings.folder / "metrics.jsonl").write_text("".join(lines[:-1]), encoding="ascii")
    rollouts.write_bytes(rollouts.read_bytes()[:-5])
    trainer(settings, resume=True).train()
    assert_same(what_a_run_left(settings.folder), expected)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path)
    first = trainer(settings).train()
    before = files(first.folder)
    again = trainer(settings, resume=True).train()
    assert again == first
    assert files(again.folder) == before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("optimizer.weight_decay=0.5", "optimizer.weight_decay"),
        ("seed=1", "seed"),
        ("rollout.group_size=4", "rollout.group_size"),
    ],
)
def test_a_run_goes_on_with_the_settings_it_was_started_with(change: str, key: str, tmp_path: Path) -> None:
    trainer(config(tmp_path, "steps=2")).train()
    before = files(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"^{key} was .* when the run was started"):
        trainer(config(tmp_path, "steps=3", change), resume=True).train()
    assert files(tmp_path / "run") == before
    trainer(config(tmp_path, "steps=3", "checkpoint.every=1"), resume=True).train()
    assert load(tmp_path / "run" / "config.toml").steps == 3


def test_a_resumed_run_cuts_its_batches_as_it_did_before_whatever_fits_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is found out once and written down; a resumed run ends bit for bit the same, whatever fits by then."""
    cuts: list[list[list[int]]] = []
    plain = learner.micro_batches

    def recorded(*given: Any) -> Iterator[list[int]]:
        cuts.append(list(plain(*given)))
        return iter(cuts[-1])

    monkeypatch.setattr("ramet.learner.micro_batches", recorded)
    fits = {"whole": [12], "broken": [12, 1, 10_000], "roomy": [10_000]}
    left, made = {}, {}
    for name, budgets in fits.items():
        monkeypatch.setattr("ramet.trainer.token_budget", lambda *_, budgets=budgets: budgets.pop(0))
        given = config(tmp_path / name)
        cuts.clear()
        assert given.optimizer.micro_batch_tokens is None
        result = trainer(given, watcher=interrupt_after(1, 3) if name == "broken" else None).train()
        while result.interrupted:
            result = trainer(given, watcher=interrupt_after(1, 3), resume=True).train()
        left[name], made[name] = what_a_run_left(given.folder), list(cuts)
        settled = load(given.folder / "config.toml").optimizer.micro_batch_tokens
        assert settled == (10_000 if name == "roomy" else 12)
    assert_same(left["broken"], left["whole"])
    assert fits["broken"] == [1, 10_000]  # nobody asked again
    assert made["broken"] == made["whole"] != made["roomy"]  # and it would have mattered
    assert left["broken"]["weights"] != left["roomy"]["weights"]
    with pytest.raises(ConfigError, match=r"^optimizer\.micro_batch_tokens was 12 when the run was started"):
        trainer(config(tmp_path / "broken", "steps=6", "optimizer.micro_batch_tokens=13"), resume=True).train()


def test_what_fits_is_found_out_for_the_model_of_the_run(tmp_path: Path) -> None:
    """A power of two, the same for the same model as long as the memory is not short, and never for one that is set."""
    trainer(config(tmp_path / "a", "steps=0")).train()
    settled = load(tmp_path / "a" / "run" / "config.toml").optimizer.micro_batch_tokens
    assert settled is not None
    assert settled.bit_count() == 1
    assert settled >= 4096  # the model holds some 30 thousand weights
    trainer(config(tmp_path / "b", "steps=0", "optimizer.micro_batch_tokens=37")).train()
    assert load(tmp_path / "b" / "run" / "config.toml").optimizer.micro_batch_tokens == 37


def test_a_run_that_fails_before_its_first_step_leaves_no_folder_in_the_way(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, RunStarted):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(config(tmp_path), watcher=stop).train()
    assert not (tmp_path / "run").exists()


def test_a_run_that_can_not_find_out_what_fits_leaves_no_folder_and_one_that_is_refused_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail(*_: object) -> int:
        asked.append("what fits")
        raise MemoryError("nothing fits")

    monkeypatch.setattr("ramet.trainer.token_budget", fail)
    with pytest.raises(MemoryError):
        trainer(config(tmp_path)).train()
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(RunExists):
        trainer(config(tmp_path)).train()
    assert asked == ["what fits"]


def test_the_rollouts_of_a_step_that_fails_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the gradient")

    monkeypatch.setattr("ramet.trainer.update", fail)
    with pytest.raises(MemoryError):
        trainer(config(tmp_path)).train()
    trained = [line for line in read(tmp_path / "run" / "rollouts.jsonl") if line["when"] == "train"]
    assert [line["step"] for line in trained] == [1] * 6


def test_the_tokenizers_eos_ends_a_completion_as_the_models_does(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "!"
    made = Trainer(model(), PROMPTS, low_ids, tokenizer=tokenizer, config=config(tmp_path))
    assert made.policy.eos_ids == {TOKENIZER.eos_token_id, tokenizer.convert_tokens_to_ids("!")}


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    """Its evaluation at the old end is kept, rollouts and all, in the place of the one that a longer run has there."""
    trainer(config(tmp_path / "long", "steps=4")).train()
    trainer(config(tmp_path / "short", "steps=2")).train()
    folder = tmp_path / "short" / "run"
    old = [line for line in read(folder / "rollouts.jsonl") if line["when"] == "after"]
    trainer(config(tmp_path / "short", "steps=4"), resume=True).train()
    found, expected = what_a_run_left(folder), what_a_run_left(tmp_path / "long" / "run")
    [between] = [line for line in expected["metrics"] if line.get("when") == "during"]
    assert found.pop("metrics") == [
        {**line, "when": "after"} if line == between else line for line in expected.pop("metrics")
    ]
    del found["rollouts"], expected["rollouts"]
    assert_same(found, expected)
    rollouts = read(folder / "rollouts.jsonl")
    assert len(old) == 2 * len(HELD_OUT)
    assert [line for line in rollouts if (line["when"], line["step"]) == ("after", 2)] == old
    assert [line for line in rollouts if line not in old] == read(tmp_path / "long" / "run" / "rollouts.jsonl")


def from_recipe(runs: Path, *overrides: str) -> TrainConfig:
    shape = ", ".join(f"{key} = {value}" for key, value in SHAPE.items())
    text = (
        BASE
        + f"""
    model = {{ name = "tiny-llama", device = "cpu", options = {{ {shape} }} }}
    task = {{ name = "sorting", options = {{ lengths = 2, train_size = 9, held_out_size = 2 }} }}
    warm_start = {{ batch_rows = 2, max_steps = 3, check_every = 2, check_problems = 3, warmup_steps = 2 }}
    """
    )
    return parse(text, [f"runs='{runs}'", *overrides])


def test_a_run_with_a_warm_start_resumes_to_the_same_end_with_the_same_reference(tmp_path: Path) -> None:
    Trainer.from_config(from_recipe(tmp_path / "whole", "kl.coefficient=0.1")).train()
    broken = from_recipe(tmp_path / "broken", "kl.coefficient=0.1")
    events: list[Event] = []

    def watch(event: Event) -> None:
        events.append(event)
        interrupt_after(2)(event)

    assert Trainer.from_config(broken, watcher=watch).train().interrupted
    Trainer.from_config(broken, watcher=watch, resume=True).train()
    assert_same(what_a_run_left(broken.folder), what_a_run_left(tmp_path / "whole" / "run"))
    assert sum(isinstance(event, WarmStartStep) for event in events) == 3  # not again when resumed


def test_what_a_run_wrote_as_its_settings_makes_the_same_run(tmp_path: Path) -> None:
    settings = from_recipe(tmp_path / "a")
    Trainer.from_config(settings).train()
    again = load(settings.folder / "config.toml", [f"runs='{tmp_path / 'b'}'"])
    Trainer.from_config(again).train()
    assert_same(what_a_run_left(again.folder), what_a_run_left(settings.folder))


# ---------------------------------------------------------------- interrupts and failures in the middle


def test_the_second_ctrl_c_interrupts_at_once_and_the_last_whole_step_is_saved(tmp_path: Path) -> None:
    trainer(config(tmp_path / "whole")).train()
    settings, calls = config(tmp_path / "broken"), 0

    def impatient(sample: Sample) -> float:
        nonlocal calls
        calls += 1
        if calls == 4 + 2 * 6 + 1:  # before: two decodings of two problems; then two steps of six rollouts
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return low_ids(sample)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Trainer(model(), PROMPTS, impatient, held_out=HELD_OUT, tokenizer=TOKENIZER, config=settings).train()
    assert signal.getsignal(signal.SIGINT) is before
    assert calls > 16
    assert [path.name for path in (settings.folder / "checkpoints").iterdir()] == ["step-000002"]
    trainer(settings, resume=True).train()
    assert_same(what_a_run_left(settings.folder), what_a_run_left(tmp_path / "whole" / "run"))


@pytest.mark.parametrize(("call", "step"), [(3 * 2 + 1, 3), (3 * 2 + 2, 2)])
def test_a_failure_inside_an_update_never_saves_weights_between_two_steps(
    call: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates a step. Until the fourth step has moved a weight, the third is still there to be saved."""
    changes = ["optimizer.updates_per_step=2", "checkpoint.every=2"]
    trainer(config(tmp_path / "whole", *changes)).train()
    settings, calls, loss = config(tmp_path / "broken", *changes), 0, learner._loss

    def broken_loss(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("out of memory")
        return loss(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(learner, "_loss", broken_loss)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer(settings).train()
    assert [path.name for path in (settings.folder / "checkpoints").iterdir()] == [f"step-{step:06d}"]
    trainer(settings, resume=True).train()
    assert_same(what_a_run_left(settings.folder), what_a_run_left(tmp_path / "whole" / "run"))


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_failure_in_an_evaluation_loses_no_step(when: str, tmp_path: Path) -> None:
    trainer(config(tmp_path / "whole")).train()
    settings = config(tmp_path / "broken")
    asked = Counter[str]()

    def watch(event: Event) -> None:
        asked["steps"] += isinstance(event, StepDone)

    def reward(sample: Sample) -> float:
        held_out = sample.row["prompt"] in HELD_OUT
        if held_out and asked["steps"] == {"before": 0, "during": 2, "after": 5}[when]:
            return float("nan")
        return low_ids(sample)

    with pytest.raises(ValueError, match="expected a finite number"):
        Trainer(
            model(), PROMPTS, reward, held_out=HELD_OUT, tokenizer=TOKENIZER, config=settings, watcher=watch
        ).train()
    trainer(settings, resume=True).train()
    assert_same(what_a_run_left(settings.folder), what_a_run_left(tmp_path / "whole" / "run"))


def test_outside_the_main_thread_a_run_works_and_leaves_signals_alone(tmp_path: Path) -> None:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(trainer(config(tmp_path, "steps=1")).train()))
    thread.start()
    thread.join()
    assert [result.interrupted for result in results] == [False]


# ---------------------------------------------------------------- what is trained on


def test_every_prompt_comes_once_an_epoch_with_all_its_members(tmp_path: Path) -> None:
    trainer(config(tmp_path, "steps=6")).train()  # 12 groups of 3 prompts: four epochs
    records = [line for line in read(tmp_path / "run" / "rollouts.jsonl") if line["when"] == "train"]
    groups = {record["group"]: record["prompt"] for record in records}
    assert sorted(groups) == list(range(12))
    for epoch in range(4):
        assert sorted(groups[3 * epoch + place] for place in range(3)) == PROMPTS
    assert Counter((record["group"], record["member"]) for record in records) == Counter(
        {(group, member): 1 for group in range(12) for member in range(3)}
    )


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Forest, Batch]]:
    """What each update learns from."""
    found: list[tuple[Forest, Batch]] = []
    plain = learner.update

    def update(model: Any, optimizer: Any, forest: Forest, batch: Batch, settings: TrainConfig) -> dict[str, float]:
        found.append((forest, batch))
        return plain(model, optimizer, forest, batch, settings)

    monkeypatch.setattr("ramet.trainer.update", update)
    return found


def test_every_token_carries_the_number_of_updates_before_it(
    tmp_path: Path, updates: list[tuple[Forest, Batch]]
) -> None:
    """One for each step, whatever the step's own updates; a run that goes on goes on counting."""
    changes = ["steps=4", "optimizer.updates_per_step=2"]
    trainer(config(tmp_path, *changes), watcher=interrupt_after(3)).train()
    assert read_state(tmp_path / "run" / "checkpoints" / "step-000003") == RunState(step=3, position=6, version=3)
    trainer(config(tmp_path, *changes), resume=True).train()
    assert read_state(tmp_path / "run" / "checkpoints" / "step-000004") == RunState(step=4, position=8, version=4)
    assert len(updates) == 4
    for step, (forest, batch) in enumerate(updates, start=1):
        assert set(batch.sampled.versions.tolist()) == {step - 1}
        assert set(forest.sampled(range(len(forest.rollouts))).versions.tolist()) == {step - 1}


def test_an_eos_is_trained_on_once_and_a_full_length_answer_has_its_own_tokens_alone(
    tmp_path: Path, updates: list[tuple[Forest, Batch]]
) -> None:
    """Half of the vocabulary ends a text, so that both happen: what was said is trained on, as it was said."""
    handed, eos = model(), set(range(50))
    handed.generation_config.eos_token_id = sorted(eos)
    settings = config(tmp_path, "steps=1", "rollout.group_size=12")
    Trainer(handed, PROMPTS, low_ids, tokenizer=TOKENIZER, config=settings).train()
    records = read(tmp_path / "run" / "rollouts.jsonl")
    [(forest, batch)] = updates
    assert batch.rollouts == list(range(24))
    full = 0
    for number, record in enumerate(records):
        trained = forest.tokens[batch.sampled.index[batch.sampled.row == number]].tolist()
        assert trained == record["completion_tokens"]
        assert forest.path(number).tolist() == [*TOKENIZER(record["prompt"])["input_ids"], *trained]
        assert eos.isdisjoint(trained[:-1])
        assert (trained[-1] in eos) == (record["stop"] == "eos")
        if record["stop"] != "eos":
            assert len(trained) == 3
            full += 1
    assert 0 < full < 24


def test_held_out_prompts_are_never_trained_on_and_share_no_random_numbers_with_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Draw] = []
    complete = TransformersPolicy.complete

    def recording(self: TransformersPolicy, requests: Sequence[Request]) -> Iterator[Completion]:
        drawn.extend(request.draw for request in requests if request.sampling.temperature > 0)
        return complete(self, requests)

    monkeypatch.setattr(TransformersPolicy, "complete", recording)
    trainer(config(tmp_path)).train()
    records = read(tmp_path / "run" / "rollouts.jsonl")
    trained = {record["prompt"] for record in records if record["when"] == "train"}
    assert trained == set(PROMPTS)
    assert {record["prompt"] for record in records if record["when"] != "train"} == set(HELD_OUT)
    counts = Counter(drawn)
    training = [draw for draw in counts if counts[draw] == 1]
    # Two held-out problems, drawn with the same numbers before, after steps 2 and 4, and after; five steps of six.
    assert sorted(count for count in counts.values() if count > 1) == [4, 4]
    assert len(training) == 30
    assert {draw.seed for draw in training}.isdisjoint(draw.seed for draw in counts if counts[draw] > 1)


def test_a_run_neither_reads_nor_writes_the_global_random_states(tmp_path: Path) -> None:
    def states() -> tuple[Any, ...]:
        kind, words, *rest = np.random.get_state(legacy=True)
        return torch.get_rng_state().tolist(), kind, np.asarray(words).tolist(), rest, random.getstate()

    before = states()
    trainer(config(tmp_path / "a")).train()
    Trainer.from_config(from_recipe(tmp_path / "w", "steps=1")).train()
    broken = config(tmp_path / "b")
    with torch.random.fork_rng():
        torch.rand(3)  # another state: what comes out must not change
        trainer(broken, watcher=interrupt_after(2)).train()
        between = torch.get_rng_state().tolist()
        trainer(broken, resume=True).train()
        assert torch.get_rng_state().tolist() == between
    assert states() == before
    assert_same(what_a_run_left(broken.folder), what_a_run_left(tmp_path / "a" / "run"))


def test_events_come_in_their_order(tmp_path: Path) -> None:
    events: list[Event] = []
    result = trainer(config(tmp_path, "steps=2", "evaluation.every=1"), watcher=events.append).train()
    assert [type(event) for event in events] == [
        *(RunStarted, Evaluated, StepDone, Evaluated, StepDone, CheckpointWritten, Evaluated, RunEnded)
    ]
    assert [event.when for event in events if isinstance(event, Evaluated)] == ["before", "during", "after"]
    assert isinstance(events[-1], RunEnded)
    assert events[-1].summary == result.summary
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-000002"


def test_the_reference_is_the_model_before_the_first_step(tmp_path: Path) -> None:
    """So the first step's KL is 0, and the reference on disk is the model that was handed over."""
    handed = model()
    start = {name: value.clone() for name, value in handed.state_dict().items()}
    Trainer(handed, PROMPTS, low_ids, tokenizer=TOKENIZER, config=config(tmp_path, "steps=2")).train()
    kls = [line["kl"] for line in read(tmp_path / "run" / "metrics.jsonl")]
    assert abs(kls[0]) < 1e-6
    assert kls[1] > 1e-5
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "reference").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in start.items())
    assert any(not torch.equal(value, start[name]) for name, value in handed.state_dict().items())


@pytest.mark.parametrize(("schedule", "expected"), [("constant", [0.5, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.5])])
def test_the_learning_rate_is_a_function_of_the_step(schedule: str, expected: list[float], tmp_path: Path) -> None:
    changes = ["steps=4", "optimizer.warmup_steps=2", f"optimizer.schedule={schedule}", "optimizer.learning_rate=1.0"]
    Trainer(model(), PROMPTS, low_ids, tokenizer=TOKENIZER, config=config(tmp_path, *changes)).train()
    rates = [line["learning_rate"] for line in read(tmp_path / "run" / "metrics.jsonl")]
    assert rates == expected


def test_a_cut_distribution_with_stops_of_several_tokens_is_learned_under_gradient_checkpointing(
    tmp_path: Path,
) -> None:
    """All at once, to the end: samples are scored under what they were drawn from, stops end them, rewards go up."""
    changes = [*CUT, "steps=25", "rollout.group_size=8", "rollout.max_new_tokens=6", "optimizer.learning_rate=0.02"]
    settings = config(tmp_path, *changes)
    trainer(settings).train()
    steps = [line for line in read(settings.folder / "metrics.jsonl") if "when" not in line]
    assert max(line["mismatch_max"] for line in steps) < 1e-4
    assert all(0 < line["tokens_computed"] < line["tokens_trained"] for line in steps)
    first, last = (sum(line["reward"] for line in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.5
    records = [line for line in read(settings.folder / "rollouts.jsonl") if line["when"] == "train"]
    stopped = [record for record in records if record["stop"] == "stop"]
    assert stopped
    for record in stopped:
        said, before = (TOKENIZER.decode(record["completion_tokens"][:end]) for end in (None, -1))
        assert any(pair in said for pair in PAIRS)  # in the last token's own text, if that is a special one
        assert not any(pair in before for pair in PAIRS)
    assert any(TOKENIZER.decode(record["completion_tokens"][-2:]) in PAIRS for record in stopped)


# ---------------------------------------------------------------- what it takes


def chatty() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '=' if add_generation_prompt }}"
    return tokenizer


def jsonl(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": p[0]}) + "\n" for p in PROMPTS), encoding="utf-8")
    return path


def dataset(_: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([{"prompt": p, "answer": p[0]} for p in PROMPTS])


SOURCES: dict[str, Callable[[Path], Any]] = {
    "strings": lambda _: PROMPTS,
    "an iterator": lambda _: iter(PROMPTS),
    "messages": lambda _: [[{"role": "user", "content": p[0]}] for p in PROMPTS],
    "mappings": lambda _: [{"prompt": p, "answer": p[0]} for p in PROMPTS],
    "messages in mappings": lambda _: [
        {"messages": [{"role": "user", "content": p[0]}], "answer": p[0]} for p in PROMPTS
    ],
    "a JSONL path": lambda folder: str(jsonl(folder)),
    "a dataset": dataset,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_prompts_come_in_many_forms_and_their_other_columns_reach_the_reward(kind: str, tmp_path: Path) -> None:
    seen: list[Sample] = []

    def reward(sample: Sample) -> float:
        seen.append(sample)
        return low_ids(sample)

    prompts = SOURCES[kind](tmp_path)
    held_out = iter(HELD_OUT) if kind == "an iterator" else None
    settings = config(tmp_path, "steps=2", "evaluation.every=0")
    Trainer(model(), prompts, reward, tokenizer=chatty(), config=settings, held_out=held_out).train()
    trained = [sample for sample in seen if sample.row["prompt"] not in HELD_OUT]
    assert len(trained) == 12
    for sample in trained:
        ids = list(sample.prompt_tokens)
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        assert text in PROMPTS
        assert sample.prompt == (text if isinstance(sample.prompt, str) else [{"role": "user", "content": text[0]}])
        if "answer" in sample.row:
            assert sample.row["answer"] == text[0]
    assert ("answer" in trained[0].row) == (kind in ("mappings", "messages in mappings", "a JSONL path", "a dataset"))
    if kind == "an iterator":
        assert {sample.row["prompt"] for sample in seen} == {*PROMPTS, *HELD_OUT}


def test_a_model_comes_as_a_folder_or_as_an_object_with_its_tokenizer(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    named = config(tmp_path / "named", "steps=2", 'model={name="%s", device="cpu"}' % (tmp_path / "model"))
    Trainer(str(tmp_path / "model"), PROMPTS, low_ids, config=named, held_out=HELD_OUT).train()
    path = config(tmp_path / "path", "steps=2")
    Trainer(tmp_path / "model", PROMPTS, low_ids, config=path, held_out=HELD_OUT).train()
    given = config(tmp_path / "given", "steps=2")
    trainer(given).train()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    itself = config(tmp_path / "itself", "steps=2")  # the tokenizer is found where the model came from
    Trainer(loaded, PROMPTS, low_ids, config=itself, held_out=HELD_OUT).train()
    for other in (named, path, itself):
        assert_same(what_a_run_left(other.folder), what_a_run_left(given.folder))
    assert load(given.folder / "config.toml").model.name == "LlamaForCausalLM"  # type: ignore[union-attr]


async def later(sample: Sample) -> float:
    await asyncio.sleep(0)
    return low_ids(sample)


REWARDS: dict[str, tuple[Callable[[Sample], Any], set[str]]] = {
    "async": (later, {"reward"}),
    "a mapping": (lambda sample: {"ids": low_ids(sample), "nothing": 0.0}, {"ids", "nothing"}),
    "an outcome": (lambda sample: Outcome.scored(low_ids(sample), {"ids": low_ids(sample)}), {"ids"}),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_may_be_async_and_may_name_its_parts(kind: str, tmp_path: Path) -> None:
    reward, names = REWARDS[kind]
    Trainer(model(), PROMPTS, low_ids, tokenizer=TOKENIZER, config=config(tmp_path / "plain")).train()
    Trainer(model(), PROMPTS, reward, tokenizer=TOKENIZER, config=config(tmp_path / "other")).train()
    plain, other = (what_a_run_left(tmp_path / name / "run") for name in ("plain", "other"))
    assert other["weights"] == plain["weights"]
    assert set(other["metrics"][0]["rewards"]) == names


def test_a_rollout_that_the_reward_abstains_from_is_counted_and_not_trained_on(tmp_path: Path) -> None:
    """All rollouts of one step: then nothing moves, and the step is there all the same."""
    handed = model()
    start = {name: value.clone() for name, value in handed.state_dict().items()}
    settings = config(tmp_path, "steps=2")
    result = Trainer(handed, PROMPTS, lambda sample: None, tokenizer=TOKENIZER, config=settings).train()
    assert all(torch.equal(value, start[name]) for name, value in handed.state_dict().items())
    lines = read(result.folder / "metrics.jsonl")
    assert [(line["step"], line["abstained"], line["reward"]) for line in lines] == [(1, 1.0, None), (2, 1.0, None)]
    records = read(result.folder / "rollouts.jsonl")
    assert {(record["outcome"], record["score"], record["advantage"]) for record in records} == {
        ("abstained", None, 0.0)
    }


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda sample: None, "(no rollout has a score, 100% abstained, 0% failed)"),
        (lambda sample: 0.5, "(mean reward 0.500, 0% abstained, 0% failed)"),
    ],
)
def test_a_run_that_learns_nothing_says_so_once(
    reward: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = Trainer(model(), PROMPTS, reward, tokenizer=TOKENIZER, config=config(tmp_path, "steps=3")).train()
    [record] = caplog.records
    assert record.name == "ramet.trainer"
    assert record.getMessage().startswith("step 1 teaches nothing: ")
    assert said in record.getMessage()
    assert [line["flat_groups"] for line in read(result.folder / "metrics.jsonl")] == [1.0] * 3
    caplog.clear()
    trainer(config(tmp_path / "other", "steps=3")).train()
    assert caplog.records == []


def test_prompts_a_model_and_a_reward_take_no_more_than_fifteen_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
from ramet import OptimizerConfig, RolloutConfig, TrainConfig, Trainer

def reward(sample):
    return float(sample.completion.strip() == sample.row["answer"])

rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
config = TrainConfig(
    steps=1,
    rollout=RolloutConfig(prompts_per_step=2, group_size=2, max_new_tokens=2),
    optimizer=OptimizerConfig(learning_rate=1e-3),
)
result = Trainer("tiny-llama", rows[:18], reward, held_out=rows[18:], config=config).train()
"""
    assert len([line for line in script.splitlines() if line.strip()]) <= 15
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(script, names)
    assert names["result"].summary["held_out"]["after"]["greedy"]["problems"] == 2
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step-000001").is_dir()


@pytest.mark.parametrize("engine", ["flat", "rows"])
@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_without_a_pad_token_and_with_eos_as_pad_the_weights_are_the_same(
    pad: str | None, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of distinct tokens has no padding, and padded rows have some of their own."""
    monkeypatch.setattr("ramet.scoring.check.choice_of", lambda *_, **__: Choice(engine))
    other = tiny_tokenizer()
    other.pad_token = pad
    for name, tokenizer in {"pad": TOKENIZER, "other": other}.items():
        settings = config(tmp_path / name, "optimizer.micro_batch_tokens=20")
        # Prompts of different lengths, and eos among what earns something, so that padding has a part to play.
        prompts = ["1=", "22222222=", "333="]
        Trainer(model(), prompts, low_ids, tokenizer=tokenizer, config=settings).train()
    weights = [what_a_run_left(tmp_path / name / "run")["weights"] for name in ("pad", "other")]
    assert weights[0] == weights[1]


# ---------------------------------------------------------------- settings

READ_ELSEWHERE: dict[str, str] = {}
"""Keys that no run of the trainer reads, and who does: none."""


def test_every_setting_is_read_by_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        from_recipe(tmp_path / "a", "steps=1", "kl.coefficient=0.1", "loss.kind=clipped"),
        from_recipe(tmp_path / "b", "steps=1", "loss.kind=policy_gradient", "loss.importance_cap=2"),
    ]
    prefixes = {type(getattr(runs[0], key)): f"{key}." for key in TrainConfig.model_fields}
    prefixes = {kind: prefix for kind, prefix in prefixes.items() if issubclass(kind, Section)}
    prefixes |= {TrainConfig: "", ServerConfig: "server."}
    found: set[str] = set()
    plain = Section.__getattribute__

    def recording(self: Section, name: str) -> Any:
        if name in type(self).model_fields:
            found.add(prefixes[type(self)] + name)
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", recording, raising=False)
    for settings_of_run in runs:
        Trainer.from_config(settings_of_run).train()
    # A server is not asked for anything before a run begins, and its settings are read by then.
    Trainer.from_config(from_recipe(tmp_path / "c", "server={url='http://127.0.0.1:9', model='tiny'}"))
    monkeypatch.undo()
    assert set(settings()) - found - set(READ_ELSEWHERE) == set()
    assert not READ_ELSEWHERE.keys() & found


# ---------------------------------------------------------------- from the command line

REWARD = """
import time
from pathlib import Path

here = Path(__file__).parent

def reward(sample):
    if sample.group >= 2:  # the second step waits until it is told to go on
        (here / "waiting").touch()
        while not (here / "go").exists():
            time.sleep(0.01)
    return sum(token < 40 for token in sample.completion_tokens) / 3
"""


def until(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not there():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def test_ctrl_c_ends_the_command_with_130_after_the_running_step_and_resume_finishes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "judge.py").write_text(REWARD, encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text("".join(f'"{prompt}"\n' for prompt in PROMPTS), encoding="utf-8")
    shape = ", ".join(f"{key} = {value}" for key, value in SHAPE.items())
    text = (
        BASE
        + f"""
    model = {{ name = "tiny-llama", device = "cpu", options = {{ {shape} }} }}
    [task]
    name = "file"
    prompts = "{tmp_path / "prompts.jsonl"}"
    reward = "{tmp_path / "judge.py"}:reward"
    """
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "ramet.cli.main",
        "train",
        str(recipe),
        "--runs",
        str(tmp_path / "a"),
        "--name",
        "run",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until((tmp_path / "waiting").exists, process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)  # the signal arrives while the step is running
        (tmp_path / "go").touch()
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, told
    assert "stopped after step 2, checkpoint: " in told
    assert f"go on with: ramet train {tmp_path / 'a' / 'run'} --resume" in told
    assert [path.name for path in (tmp_path / "a" / "run" / "checkpoints").iterdir()] == ["step-000002"]

    from ramet.cli.train import run

    assert run(load(tmp_path / "a" / "run" / "config.toml"), resume=True) == 0
    assert run(load(recipe, [f"runs='{tmp_path / 'b'}'"])) == 0
    last = read(tmp_path / "b" / "run" / "metrics.jsonl")[-1]
    saved = f"{last['tokens_trained'] / last['tokens_computed']:.1f}x saved"
    told = capsys.readouterr().err
    assert f"{last['tokens_computed']} of {last['tokens_trained']} tokens computed ({saved})\n" in told
    assert "Tokens of an update" in (tmp_path / "b" / "run" / "report.html").read_text(encoding="utf-8")
    assert_same(what_a_run_left(tmp_path / "a" / "run"), what_a_run_left(tmp_path / "b" / "run"))
