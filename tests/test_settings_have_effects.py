"""Every setting changes what a run does, in the place that it is about and in none before it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ramet.checkpoint import checkpoints
from ramet.config import TrainConfig, parse, settings
from ramet.errors import ConfigError, DataError, PromptTooLong, TooManyFailures
from ramet.events import Event, WarmStartStep
from ramet.metrics import read
from ramet.models.tiny import CHARACTERS, tiny_llama, tiny_tokenizer
from ramet.policies.decoding import CachedSteps, SharedSteps
from ramet.policies.transformers import TransformersPolicy
from ramet.rollouts import Turns
from ramet.scoring.check import at_rest
from ramet.tasks import Task
from ramet.trainer import Trainer
from ramet.types import Completion, Episode, Request, Sample

TOKENIZER = tiny_tokenizer()
SHAPE = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 32, "context": 24}
PROMPTS = [f"{number}=" for number in range(3)]
HELD_OUT = ["7=", "8="]
STOP = [*"abcdefghijklmnopqrstuvwxyz"]
BASE = f"""
threads = 1
steps = 1
rollout = {{ prompts_per_step = 2, group_size = 3, max_new_tokens = 3, stop = {json.dumps(STOP)} }}
optimizer = {{ learning_rate = 0.01 }}
"""
"""A third of the tokens is a stop, so that completions differ in length, and what divides by lengths shows."""

SHOWN: set[str] = set()
"""Settings whose effect some test in this file shows."""
Test = TypeVar("Test", bound=Callable[..., None])


def shows(*keys: str) -> Callable[[Test], Test]:
    SHOWN.update(keys)
    return lambda test: test


def config(runs: Path, *overrides: str) -> TrainConfig:
    return parse(BASE, [f"runs='{runs}'", *overrides])


def recipe(runs: Path, *overrides: str) -> TrainConfig:
    shape = ", ".join(f"{key} = {value}" for key, value in SHAPE.items())
    return parse(
        BASE
        + f"""
    model = {{ name = "tiny-llama", device = "cpu", options = {{ {shape} }} }}
    task = {{ name = "sorting", options = {{ lengths = 2, train_size = 9, held_out_size = 2 }} }}
    """,
        [f"runs='{runs}'", *overrides],
    )


def low_ids(sample: Sample) -> float:
    return sum(token < 40 for token in sample.completion_tokens) / 3


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


@dataclass
class Passes:
    """What was run, and by whom.

    The policy is at its "prefill" or its "decode", the "learner" has a gradient, the "scorer" has none. `bodies` holds
    who, how many paths ran at once, and their distinct tokens; `layers` who ran a layer, in the backward pass too, and
    `logits` whose logits had which dtype. What finds out how a model is run is left out.
    """

    bodies: list[tuple[str, int, int]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    logits: list[tuple[str, torch.dtype]] = field(default_factory=list)

    def clear(self) -> None:
        for found in (self.bodies, self.layers, self.logits):
            found.clear()

    def shapes(self, *names: str) -> list[tuple[int, int]]:
        """Paths and tokens of the passes of these."""
        return [(paths, tokens) for who, paths, tokens in self.bodies if who in names]


def paths_of(positions: torch.Tensor) -> int:
    """How many paths a row of tokens holds, depth first: each ends where the next position is not one further."""
    return 1 + int((positions[1:] != positions[:-1] + 1).sum())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Who ran the model: told by what is running, the policy's steps, a check of the model, or anything else."""
    found, running = Passes(), [""]

    def who() -> str:
        return running[-1] or ("learner" if torch.is_grad_enabled() else "scorer")

    def named(owner: type, method: str, name: str) -> None:
        plain = getattr(owner, method)

        def call(self: Any, *given: Any) -> Any:
            running.append(name)
            try:
                return plain(self, *given)
            finally:
                running.pop()

        monkeypatch.setattr(owner, method, call)

    def watched(
        owner: type[torch.nn.Module], begins: Callable[[str, dict[str, Any]], None], ends: Callable[[str, Any], None]
    ) -> None:
        plain = owner.forward

        @functools.wraps(plain)
        def forward(self: torch.nn.Module, *given: Any, **options: Any) -> Any:
            if who() == "check":
                return plain(self, *given, **options)
            begins(who(), options)
            output = plain(self, *given, **options)  # which a layer that is run again does not come back from
            ends(who(), output)
            return output

        monkeypatch.setattr(owner, "forward", forward)

    @contextlib.contextmanager
    def resting(model: torch.nn.Module) -> Iterator[None]:
        running.append("check")
        try:
            with at_rest(model):
                yield
        finally:
            running.pop()

    def nothing(*_: Any) -> None:
        pass

    def body(name: str, options: dict[str, Any]) -> None:
        ids = options["input_ids"]
        assert len(ids) == 1  # one row, however many paths
        paths = ids.shape[1] if name == "decode" else paths_of(options["position_ids"][0])
        found.bodies.append((name, paths, ids.shape[1]))

    for steps in (SharedSteps, CachedSteps):
        named(steps, "first", "prefill")
        named(steps, "next", "decode")
    monkeypatch.setattr("ramet.scoring.check.at_rest", resting)
    monkeypatch.setattr("ramet.scoring.budget.at_rest", resting)
    watched(LlamaModel, body, nothing)
    watched(LlamaDecoderLayer, lambda name, _: found.layers.append(name), nothing)
    watched(LlamaForCausalLM, nothing, lambda name, output: found.logits.append((name, output.logits.dtype)))
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every request that reaches a policy."""
    found: list[Request] = []
    plain = TransformersPolicy.complete

    def complete(self: TransformersPolicy, requests: Sequence[Request]) -> Iterator[Completion]:
        found.extend(requests)
        return plain(self, requests)

    monkeypatch.setattr(TransformersPolicy, "complete", complete)
    return found


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The turns of the requests that reach a policy together."""
    found: list[list[int]] = []
    plain = TransformersPolicy.complete

    def complete(self: TransformersPolicy, requests: Sequence[Request]) -> Iterator[Completion]:
        found.append([request.draw.turn for request in requests])
        return plain(self, requests)

    monkeypatch.setattr(TransformersPolicy, "complete", complete)
    return found


def observed(given: TrainConfig, passes: Passes, asked: list[Request], held_out: Sequence[str] = ()) -> dict[str, Any]:
    """Make a run and return what it did, in the order in which one thing leads to the next."""
    passes.clear()
    asked.clear()
    model = tiny_llama(TOKENIZER, **SHAPE)
    trainer = Trainer(model, PROMPTS, low_ids, held_out=held_out or None, tokenizer=TOKENIZER, config=given)
    result = trainer.train()
    lines = read(result.folder / "metrics.jsonl")
    steps = [line for line in lines if "when" not in line]
    records = [line for line in read(result.folder / "rollouts.jsonl") if line["when"] == "train"]
    return {
        "rollouts": [(record["step"], record["group"], record["member"]) for record in records],
        "policy passes": passes.shapes("prefill", "decode"),
        "completions": [record["completion_tokens"] for record in records],
        "scores": [record["score"] for record in records],
        "advantages": [record["advantage"] for record in records],
        "trained on": [line["trained_on"] for line in steps],
        "learner passes": passes.shapes("learner"),
        "learner layers": passes.layers.count("learner"),
        "rate": [line["learning_rate"] for line in steps],
        "loss": [line.get("loss") for line in steps],
        "weights": torch.cat([value.flatten() for value in model.state_dict().values()]).tolist(),
        "checkpoints": [path.name for path in checkpoints(result.folder / "checkpoints")],
        "evaluations": [
            (line["when"], line["step"], line["held_out"]["greedy"]["problems"]) for line in lines if "when" in line
        ],
    }


# setting, what it is changed to, what is set on both sides, what differs: all that comes before the first is the same
EFFECTS: list[tuple[str, str, list[str], list[str]]] = [
    ("seed", "1", [], ["policy passes", "completions"]),
    ("steps", "2", [], ["rollouts", "weights"]),
    ("rollout.prompts_per_step", "1", [], ["rollouts", "weights"]),
    ("rollout.group_size", "2", [], ["rollouts", "weights"]),
    ("rollout.max_new_tokens", "2", [], ["policy passes", "completions"]),
    ("rollout.rows_per_batch", "2", [], ["policy passes"]),
    ("rollout.temperature", "0.3", [], ["completions", "weights"]),
    ("rollout.top_k", "2", [], ["policy passes", "completions", "weights"]),
    ("rollout.top_p", "0.3", [], ["completions", "weights"]),
    ("rollout.min_p", "0.5", [], ["completions", "weights"]),
    ("rollout.stop", "[]", [], ["policy passes", "completions"]),
    ("rollout.truncated", "drop", [], ["advantages", "trained on", "weights"]),
    ("control.shuffle_rewards", "true", [], ["advantages", "weights"]),
    ("advantage.kind", "group_mean_std", [], ["advantages", "loss"]),
    ("advantage.kind", "leave_one_out", [], ["advantages", "loss"]),
    ("loss.kind", "policy_gradient", [], ["loss"]),
    ("loss.reduction", "grpo", [], ["loss", "weights"]),
    ("loss.reduction", "dr_grpo", [], ["loss", "weights"]),
    ("loss.clip_low", "0.9", ["optimizer.epochs_per_step=3"], ["loss", "weights"]),
    ("loss.clip_high", "0", ["optimizer.epochs_per_step=3"], ["loss", "weights"]),
    ("loss.importance_cap", "0.5", [], ["loss"]),
    # The first step starts at the reference: a penalty shows in the second.
    ("kl.coefficient", "1", ["steps=2"], ["loss", "weights"]),
    ("kl.estimator", "k2", ["steps=2", "kl.coefficient=1"], ["loss", "weights"]),
    ("kl.estimator", "k1", ["steps=2", "kl.coefficient=1", "kl.unbiased=true"], ["loss", "weights"]),
    ("kl.unbiased", "true", ["steps=2", "kl.coefficient=1"], ["weights"]),
    ("kl.place", "reward", ["steps=2", "kl.coefficient=1"], ["advantages", "loss", "weights"]),
    ("kl.place", "both", ["steps=2", "kl.coefficient=1"], ["advantages", "loss", "weights"]),
    ("optimizer.learning_rate", "0.02", [], ["rate", "weights"]),
    ("optimizer.warmup_steps", "2", ["steps=2", "optimizer.learning_rate=1e-6"], ["rate", "weights"]),
    ("optimizer.schedule", "linear", ["steps=2"], ["rate", "weights"]),
    ("optimizer.betas", "[0.5, 0.999]", ["steps=2"], ["weights"]),
    ("optimizer.betas", "[0.9, 0.5]", ["steps=2"], ["weights"]),
    ("optimizer.weight_decay", "0.5", [], ["weights"]),
    ("optimizer.gradient_clip", "1e-9", [], ["weights"]),
    ("optimizer.updates_per_step", "2", [], ["learner passes", "weights"]),
    ("optimizer.epochs_per_step", "2", [], ["learner passes", "weights"]),
    ("optimizer.micro_batch_tokens", "12", [], ["learner passes"]),
    ("optimizer.gradient_checkpointing", "true", [], ["learner layers"]),
    ("checkpoint.every", "1", ["steps=2", "checkpoint.keep=5"], ["checkpoints"]),
    ("checkpoint.keep", "2", ["steps=2", "checkpoint.every=1"], ["checkpoints"]),
    ("evaluation.every", "1", ["steps=2"], ["evaluations"]),
    ("evaluation.problems", "1", [], ["evaluations"]),
]
SHOWN.update(key for key, *_ in EFFECTS)
WITHOUT: dict[tuple[str, ...], dict[str, Any]] = {}
"""Runs that several settings are compared with, by what is set in them."""


@pytest.mark.parametrize(("key", "value", "both", "differs"), EFFECTS, ids=[f"{key}={v}" for key, v, *_ in EFFECTS])
def test_a_setting_changes_what_it_is_about_and_nothing_that_comes_before(
    key: str, value: str, both: list[str], differs: list[str], tmp_path: Path, passes: Passes, asked: list[Request]
) -> None:
    """Compared exactly: with equal settings a run is the same bit for bit."""
    held_out = HELD_OUT if key.startswith("evaluation.") else []
    of = (*held_out, *both)
    if of not in WITHOUT:
        WITHOUT[of] = observed(config(tmp_path, "name=plain", *both), passes, asked, held_out)
    without, found = WITHOUT[of], observed(config(tmp_path, *both, f"{key}={value}"), passes, asked, held_out)
    names = list(without)
    assert [name for name in differs if without[name] == found[name]] == []
    first = names.index(differs[0])
    if held_out:  # the evaluations themselves are played by the policy
        first = names.index("policy passes")
    assert {name for name in names[:first] if without[name] != found[name]} == set()


# ---------------------------------------------------------------- how large the effect is


@shows("runs", "name")
def test_a_run_lies_in_its_folder(tmp_path: Path) -> None:
    given = config(tmp_path / "x", "name=y", "steps=0")
    Trainer(tiny_llama(TOKENIZER, **SHAPE), PROMPTS, low_ids, tokenizer=TOKENIZER, config=given).train()
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("metrics.jsonl")] == [Path("x/y/metrics.jsonl")]


@shows("rollout.rows_per_batch", "optimizer.micro_batch_tokens")
def test_batches_are_no_larger_than_their_limits(tmp_path: Path, passes: Passes, asked: list[Request]) -> None:
    """Filled in order: what comes first in a pass would have been too much for the one before."""
    changes = ["rollout.rows_per_batch=2", "optimizer.micro_batch_tokens=12", "rollout.group_size=4", "rollout.stop=[]"]
    given = config(tmp_path, *changes)
    observed(given, passes, asked)
    assert max(rows for rows, _ in passes.shapes("decode")) == 2
    assert len(passes.shapes("prefill")) == 8 / 2
    assert max(tokens for _, tokens in passes.shapes("learner")) <= 12
    records = [line for line in read(given.folder / "rollouts.jsonl") if line["when"] == "train"]
    expected: list[set[tuple[int, ...]]] = []
    for record in records:
        path = [*TOKENIZER(record["prompt"])["input_ids"], *record["completion_tokens"]]
        prefixes = {tuple(path[: end + 1]) for end in range(len(path))}
        if not expected or len(expected[-1] | prefixes) > 12:
            expected.append(set())
        expected[-1] |= prefixes
    assert len(passes.shapes("learner")) == len(expected)
    assert 1 < len(expected) < len(records)


@shows("optimizer.gradient_checkpointing")
def test_gradient_checkpointing_runs_each_layer_again_in_the_backward_pass_to_the_same_weights(
    tmp_path: Path, passes: Passes, asked: list[Request]
) -> None:
    plain = observed(config(tmp_path / "a"), passes, asked)
    found = observed(config(tmp_path / "b", "optimizer.gradient_checkpointing=true"), passes, asked)
    assert plain["learner layers"] == len(plain["learner passes"]) * SHAPE["layers"]
    assert found["learner layers"] == 2 * plain["learner layers"]
    assert found["learner passes"] == plain["learner passes"]
    assert found["weights"] == pytest.approx(plain["weights"], rel=0, abs=1e-6)


@shows("rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.min_p")
@pytest.mark.parametrize(
    "changes",
    [["temperature=0.3"], ["top_k=5"], ["top_p=0.7"], ["min_p=0.3"], ["temperature=2", "top_k=20", "top_p=0.9"]],
)
def test_what_is_sampled_from_a_distribution_is_scored_under_it(changes: list[str], tmp_path: Path) -> None:
    """The sampler's and the learner's log-probs differ by 1e-5 at most, float32."""
    given = config(tmp_path, *(f"rollout.{change}" for change in changes))
    Trainer(tiny_llama(TOKENIZER, **SHAPE), PROMPTS, low_ids, tokenizer=TOKENIZER, config=given).train()
    [line] = read(given.folder / "metrics.jsonl")
    assert line["mismatch_max"] < 1e-5


@shows("rollout.stop")
def test_a_stop_ends_a_completion_and_is_its_last_token(tmp_path: Path) -> None:
    given = config(tmp_path, "rollout.group_size=12")
    Trainer(tiny_llama(TOKENIZER, **SHAPE), PROMPTS, low_ids, tokenizer=TOKENIZER, config=given).train()
    ids = {TOKENIZER.convert_tokens_to_ids(stop) for stop in STOP}
    records = read(given.folder / "rollouts.jsonl")
    assert {record["stop"] for record in records} >= {"stop", "new_token_limit"}
    for record in records:
        *before, last = record["completion_tokens"]
        assert ids.isdisjoint(before)
        assert (last in ids) == (record["stop"] == "stop")


@shows("rollout.stop")
def test_a_stop_of_several_tokens_ends_a_completion_with_the_token_that_completes_it(tmp_path: Path) -> None:
    """Two letters in a row: some of the 60 completions hold them, and only at their ends."""
    stops = [a + b for a in STOP for b in STOP]
    shape = [f"rollout.stop={json.dumps(stops)}", "rollout.group_size=30", "rollout.max_new_tokens=6"]
    given = config(tmp_path, *shape)
    Trainer(tiny_llama(TOKENIZER, **SHAPE), PROMPTS, low_ids, tokenizer=TOKENIZER, config=given).train()
    records = [record for record in read(given.folder / "rollouts.jsonl") if record["when"] == "train"]
    assert {record["stop"] for record in records} >= {"stop", "new_token_limit"}
    for record in records:
        tokens = record["completion_tokens"]
        held = [any(stop in TOKENIZER.decode(part) for stop in stops) for part in (tokens[:-1], tokens)]
        assert held[0] is False
        if record["stop"] != "eos":  # whose own text holds some
            assert held[1] == (record["stop"] == "stop")


@shows("rollout.prompt_limit", "rollout.too_long")
def test_a_prompt_over_the_limit_is_refused_dropped_or_cut(tmp_path: Path, asked: list[Request]) -> None:
    """`<bos>1=` has three tokens, `<bos>234=` five."""

    def prompts_with(*overrides: str) -> set[str]:
        asked.clear()
        given = config(tmp_path / str(len(list(tmp_path.iterdir()))), *overrides)
        model = tiny_llama(TOKENIZER, **SHAPE)
        Trainer(model, ["1=", "234="], low_ids, tokenizer=TOKENIZER, config=given).train()
        return {str(TOKENIZER.decode(request.tokens)) for request in asked}

    assert prompts_with() == {"<bos>1=", "<bos>234="}
    assert prompts_with("rollout.prompt_limit=5") == {"<bos>1=", "<bos>234="}
    with pytest.raises(PromptTooLong):
        prompts_with("rollout.prompt_limit=4")
    assert prompts_with("rollout.prompt_limit=4", "rollout.too_long=drop") == {"<bos>1="}
    assert prompts_with("rollout.prompt_limit=4", "rollout.too_long=keep_end") == {"<bos>1=", "234="}
    assert prompts_with("rollout.prompt_limit=4", "rollout.too_long=keep_start") == {"<bos>1=", "<bos>234"}


@shows("rollout.max_failed_fraction")
def test_failures_end_a_run_where_they_are_more_than_is_allowed(tmp_path: Path) -> None:
    """One member of three fails."""

    def reward(sample: Sample) -> float:
        return 1 / (sample.member - 1)

    for fraction in (0.3, 0.4):
        given = config(tmp_path / str(fraction), f"rollout.max_failed_fraction={fraction}")
        trainer = Trainer(tiny_llama(TOKENIZER, **SHAPE), PROMPTS, reward, tokenizer=TOKENIZER, config=given)
        if fraction < 1 / 3:
            with pytest.raises(TooManyFailures):
                trainer.train()
        else:
            trainer.train()


@shows("threads")
def test_the_threads_are_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    for overrides in (["threads=3"], ["threads=none"]):
        given = config(tmp_path, *overrides)
        Trainer(tiny_llama(TOKENIZER, **SHAPE), PROMPTS, low_ids, tokenizer=TOKENIZER, config=given)
    assert found == [3]


# ---------------------------------------------------------------- the model


@shows("model.autocast")
@pytest.mark.parametrize("named", [True, False], ids=["by name", "handed over"])
def test_autocast_is_of_the_policy_the_learner_and_the_reference(named: bool, tmp_path: Path, passes: Passes) -> None:
    for autocast, dtype in {"": torch.float32, "bfloat16": torch.bfloat16}.items():
        passes.clear()
        change = f"model.autocast='{autocast}'"
        if named:
            trainer = Trainer.from_config(
                recipe(tmp_path / autocast, change, "warm_start={check_problems=2,max_steps=1}")
            )
        else:
            model = tiny_llama(TOKENIZER, **SHAPE)
            given = config(tmp_path / autocast, "model={name='LlamaForCausalLM'}", change)
            trainer = Trainer(model, PROMPTS, low_ids, tokenizer=TOKENIZER, config=given)
        trainer.train()
        assert set(passes.logits) == {(who, dtype) for who in ("prefill", "decode", "learner", "scorer")}
        assert trainer.model.dtype is torch.float32


@shows("model.dtype")
def test_the_weights_and_all_passes_have_the_dtype(tmp_path: Path, passes: Passes) -> None:
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        passes.clear()
        trainer = Trainer.from_config(recipe(tmp_path / name, f"model.dtype={name}"))
        trainer.train()
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {dtype}
        assert {found for _, found in passes.logits} == {dtype}


@shows("model.device")
@pytest.mark.parametrize(
    ("device", "gpu", "expected"), [("cuda:1", True, "cuda:1"), ("auto", True, "cuda"), ("auto", False, "cpu")]
)
def test_the_model_goes_to_the_device(
    device: str, gpu: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def to(self: LlamaForCausalLM, where: Any) -> LlamaForCausalLM:
        found.append(where)
        return self

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * gpu)
    monkeypatch.setattr(LlamaForCausalLM, "to", to)
    Trainer.from_config(recipe(tmp_path, f"model.device={device}"))
    assert [where for where in found if isinstance(where, str)] == [expected]


@shows("model.name", "model.attention", "model.revision", "model.dtype")
def test_a_pretrained_model_is_asked_for_as_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Any, ...]] = []
    model = tiny_llama(TOKENIZER, **SHAPE)

    def tokenizer_of(name: str, **named: Any) -> Any:
        found.append((name, named))
        return TOKENIZER

    def model_of(name: str, **named: Any) -> Any:
        found.append((name, named))
        return model

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer_of)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model_of)
    section = "{name='some/model', device='cpu', dtype='bfloat16', attention='eager', revision='v2'}"
    Trainer.from_config(recipe(tmp_path, f"model={section}"))
    Trainer.from_config(recipe(tmp_path, "model={name='some/model', device='cpu'}"))
    wanted = {"dtype": torch.bfloat16, "attn_implementation": "eager", "revision": "v2"}
    assert found == [
        ("some/model", {"revision": "v2"}),
        ("some/model", wanted),
        ("some/model", {}),
        ("some/model", {"dtype": torch.float32, "attn_implementation": None}),
    ]


@shows("model.chat_template")
def test_messages_are_written_by_the_chat_template_of_a_file_which_the_run_keeps(tmp_path: Path) -> None:
    """A run goes on by its own copy, whatever has become of the file, and its checkpoints have it too."""
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}=", encoding="utf-8")
    row = {"prompt": [{"role": "user", "content": "3"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (tmp_path / "judge.py").write_text("def reward(sample):\n    return 0.25\n", encoding="utf-8")
    files = f"prompts='{tmp_path}/train.jsonl', reward='{tmp_path}/judge.py:reward'"
    task = f"task={{name='file', {files}}}"
    with pytest.raises(DataError, match="no chat template"):
        Trainer.from_config(recipe(tmp_path, task))
    given = [task, f"model.chat_template='{template}'", "rollout.prompts_per_step=1"]
    run = Trainer.from_config(recipe(tmp_path, *given))
    assert run.tokenizer.decode(run.prompts.batch(0, 1)["tokens"][0]) == "3="
    folder = run.train().folder
    template.unlink()
    again = Trainer.from_config(recipe(tmp_path, *given, "steps=2"), resume=True)
    assert again.tokenizer.chat_template == run.tokenizer.chat_template
    assert again.train().folder == folder
    [checkpoint] = checkpoints(folder / "checkpoints")
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template == run.tokenizer.chat_template


@shows("model.options", "task.name", "task.options")
def test_the_options_of_model_and_task_reach_their_builders(tmp_path: Path) -> None:
    made = Trainer.from_config(
        recipe(tmp_path, "model.options={layers=3,context=32}", "task.options={lengths=2,train_size=5,held_out_size=2}")
    )
    assert (made.model.config.num_hidden_layers, len(made.prompts), made.task.name) == (3, 5, "sorting")
    other = Trainer.from_config(recipe(tmp_path, "task={name='arithmetic'}"))
    assert other.task.name == "arithmetic"
    with pytest.raises(ConfigError, match="lenghts"):
        Trainer.from_config(recipe(tmp_path, "task.options={lenghts=2}"))


@shows("task.prompts", "task.held_out", "task.reward")
def test_the_files_of_a_task_are_read(tmp_path: Path) -> None:
    for name, rows in {"train": PROMPTS, "test": HELD_OUT}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "judge.py").write_text("def reward(sample):\n    return 0.25\n", encoding="utf-8")
    files = f"prompts='{tmp_path}/train.jsonl', held_out='{tmp_path}/test.jsonl', reward='{tmp_path}/judge.py:reward'"
    given = recipe(tmp_path, f"task={{name='file', {files}}}")
    Trainer.from_config(given).train()
    records = read(given.folder / "rollouts.jsonl")
    assert {record["prompt"] for record in records if record["when"] == "train"} <= set(PROMPTS)
    assert {record["prompt"] for record in records if record["when"] != "train"} == set(HELD_OUT)
    assert {record["score"] for record in records} == {0.25}


# ---------------------------------------------------------------- episodes of several turns


def conversations(given: TrainConfig, **parts: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    """Train on a task whose environment says "+" to everything, and return the episodes' records."""
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    defaults: dict[str, Any] = {"score": low_ids, "reply": lambda episode: "+", "max_turns": 3}
    trainer = Trainer.from_task(
        tiny_llama(TOKENIZER, **SHAPE),
        Task("talk", rows, [], **{**defaults, **parts}),
        tokenizer=TOKENIZER,
        config=given,
    )
    result = trainer.train()
    return trainer, [line for line in read(result.folder / "rollouts.jsonl") if line["when"] == "train"]


def always_stops(runs: Path, *overrides: str) -> TrainConfig:
    """Every token ends a turn, so that only the environment and the limits say how many there are."""
    return config(runs, "rollout.max_new_tokens=1", f"rollout.stop={json.dumps([*CHARACTERS.strip()])}", *overrides)


@shows("rollout.max_turns")
def test_an_episode_has_as_many_turns_as_are_set_or_as_the_task_says(tmp_path: Path) -> None:
    for number, (override, turns) in enumerate([("rollout.max_turns=none", 3), ("rollout.max_turns=2", 2)]):
        trainer, records = conversations(always_stops(tmp_path / str(number), override))
        assert trainer.config.rollout.max_turns == turns
        talks = [[message["role"] for message in record["messages"]] for record in records]
        whole = ["user", *["assistant", "user"] * turns]
        assert all(talk == whole[: len(talk)] for talk in talks)
        assert max(map(len, talks)) == len(whole)


@shows("rollout.episode_seconds", "rollout.tool_seconds", "rollout.score_seconds")
def test_what_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """A reply, a tool and a score that never end: what each limit does to the episode."""

    async def hangs(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def look(word: str) -> str:
        """Look a word up."""
        await asyncio.Event().wait()
        return word

    failing = "rollout.max_failed_fraction=1"
    _, slow = conversations(always_stops(tmp_path / "a", "rollout.episode_seconds=0.05", failing), reply=hangs)
    assert {record["stop"] for record in slow} <= {"timeout", "new_token_limit", "eos"}
    assert any(record["stop"] == "timeout" and record["outcome"] == "timed_out" for record in slow)
    _, silent = conversations(always_stops(tmp_path / "b", "rollout.score_seconds=0.05", failing), score=hangs)
    assert {record["outcome"] for record in silent} == {"timed_out"}
    given = always_stops(tmp_path / "c", "rollout.tool_seconds=0.05")
    made = Trainer.from_task(
        tiny_llama(TOKENIZER, **SHAPE), Task("look", [{"prompt": "1"}], [], low_ids, tools=[look]), config=given,
        tokenizer=TOKENIZER,
    )  # fmt: skip
    assert isinstance(made.play, Turns)
    assert made.play.rules.tool_seconds == 0.05


@shows("rollout.lockstep")
def test_a_row_goes_on_as_soon_as_it_can_or_with_the_others(tmp_path: Path, batches: list[list[int]]) -> None:
    """The first reply of all takes until another row has had its second turn; in lockstep, 50 ms."""
    together: dict[bool, list[list[int]]] = {}
    for lockstep in (False, True):
        batches.clear()
        replies: list[int] = []

        async def reply(episode: Episode, lockstep: bool = lockstep, replies: list[int] = replies) -> str | None:
            replies.append(episode.turns)
            if len(replies) == 1:
                await asyncio.sleep(0.05)
                while 2 not in replies and not lockstep:
                    await asyncio.sleep(0.001)
            return "+" if episode.turns == 1 else None

        given = always_stops(tmp_path / str(lockstep), "steps=1", f"rollout.lockstep={str(lockstep).lower()}")
        conversations(given, reply=reply, max_turns=2)
        together[lockstep] = list(batches)
    assert together[False][0] == [0] * len(together[False][0])
    assert len(together[False]) > 2
    assert together[True] == [together[False][0], [turn for batch in together[False][1:] for turn in batch]]


@shows("rollout.rewrites")
def test_a_template_that_rewrites_history_is_followed_or_not(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    # Every turn but the last is written with a mark in front.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '' if loop.last else '~' }}{{ m.content }};"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    rows = [{"prompt": [{"role": "user", "content": "1"}]}]
    found = {}
    for rewrites in ("follow", "keep"):
        task = Task("talk", rows, [], low_ids, reply=lambda episode: "+", max_turns=2)
        given = config(tmp_path / rewrites, f"rollout.rewrites={rewrites}")
        trainer = Trainer.from_task(tiny_llama(tokenizer, **SHAPE), task, tokenizer=tokenizer, config=given)
        forest, _ = trainer.play(
            trainer.prompts.first(1, group_size=12), trainer.prompts, sampling=trainer.sampling, seed=0
        )
        found[rewrites] = [rollout.part for rollout in forest.rollouts]
        trainer.play.close()
    assert max(found["follow"]) == 1
    assert max(found["keep"]) == 0


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.max_turns=2", "max_turns"),
        ("rollout.episode_seconds=2.0", "episode_seconds"),
        ("rollout.tool_seconds=2.0", "tool_seconds"),
        ("rollout.lockstep=true", "lockstep"),
        ("rollout.rewrites=keep", "rewrites"),
    ],
)
def test_settings_of_several_turns_are_void_for_a_task_of_one(tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.{key} is for tasks with replies or tools"):
        Trainer.from_config(recipe(tmp_path, override))


# ---------------------------------------------------------------- the warm start

WARM = {"batch_rows": 2, "max_steps": 3, "check_every": 2, "check_problems": 3}


def warmed(runs: Path, passes: Passes, asked: list[Request], **changes: float) -> dict[str, Any]:
    """Start warm, take no step, and return what was done."""
    passes.clear()
    asked.clear()
    events: list[Event] = []
    section = ", ".join(f"{key} = {value}" for key, value in {**WARM, **changes}.items())
    given = recipe(runs, "steps=0", "task.options.held_out_size=1", f"warm_start={{{section}}}")
    trainer = Trainer.from_config(given, watcher=events.append)
    trainer.train()
    steps = [event for event in events if isinstance(event, WarmStartStep)]
    return {
        "rows": [rows for rows, _ in passes.shapes("learner")],
        "first loss": steps[0].loss if steps else None,
        "checks": [event.step for event in steps if event.score is not None],
        # Before the run's own two evaluations of one problem each.
        "checked": len(asked) - 4 if steps else 0,
        "weights": torch.cat([value.flatten() for value in trainer.model.state_dict().values()]).tolist(),
    }


PLAIN = {"rows": [2, 2, 2], "checks": [2, 3], "checked": 6}


@shows(*(f"warm_start.{key}" for key in (*WARM, "until", "warmup_steps", "learning_rate")))
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("batch_rows", 4, {**PLAIN, "rows": [4, 4, 4]}),
        ("max_steps", 4, {"rows": [2] * 4, "checks": [2, 4], "checked": 6}),
        ("check_every", 1, {"rows": [2, 2, 2], "checks": [1, 2, 3], "checked": 9}),
        ("check_problems", 4, {**PLAIN, "checked": 8}),
        ("until", 0.0, {"rows": [2, 2], "checks": [2], "checked": 3}),
        ("warmup_steps", 3, PLAIN),
        ("learning_rate", 0.01, PLAIN),
    ],
)
def test_a_warm_start_does_what_its_settings_say(
    key: str, value: float, expected: dict[str, Any], tmp_path: Path, passes: Passes, asked: list[Request]
) -> None:
    """The scores are 0 so early, which is what `until = 0` waits for. The rate changes the weights alone."""
    plain = warmed(tmp_path / "a", passes, asked)
    found = warmed(tmp_path / "b", passes, asked, **{key: value})
    assert {name: plain[name] for name in PLAIN} == PLAIN
    assert {name: found[name] for name in PLAIN} == expected
    if key != "check_every":
        assert found["weights"] != plain["weights"]
    if key in ("warmup_steps", "learning_rate"):
        assert found["first loss"] == plain["first loss"]


# ---------------------------------------------------------------- a server

# Shown in test_server_runs.py, where a stand-in for a server is.
SHOWN.update(f"server.{key}" for key in ("url", "model", "concurrency", "timeout_seconds", "retries", "outage_seconds"))
SHOWN.update(("server.weights_folder", "server.key_variable", "rollout.staleness"))


# ---------------------------------------------------------------- none is forgotten


def test_every_setting_has_its_effect_shown_here() -> None:
    assert set(settings()) - SHOWN == set()
    assert SHOWN - set(settings()) == set()
