"""Every kind of bad input has one clear error, says what to do, and loses nothing that was done before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from ramet.checkpoint import checkpoints, newest_checkpoint, read_state
from ramet.config import TrainConfig, parse
from ramet.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PromptTooLong,
    RametError,
    RewardError,
    RunExists,
    TooManyFailures,
)
from ramet.events import Event, StepDone
from ramet.metrics import read
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.tasks import Task
from ramet.trainer import Trainer
from ramet.types import Sample

TOKENIZER = tiny_tokenizer()
PROMPTS = ["1=", "2=", "3="]
SHAPE = "hidden_size = 32, layers = 1, heads = 2, intermediate_size = 32"
BASE = """
threads = 1
steps = 3
rollout = { prompts_per_step = 2, group_size = 2, max_new_tokens = 4 }
optimizer = { learning_rate = 0.01 }
"""


def model(context: int = 16) -> LlamaForCausalLM:
    return tiny_llama(TOKENIZER, hidden_size=32, layers=1, heads=2, intermediate_size=32, context=context)


def config(runs: Path, *overrides: str) -> TrainConfig:
    return parse(BASE, [f"runs='{runs}'", *overrides])


def fine(sample: Sample) -> float:
    return float(len(sample.completion_tokens))


def trainer(runs: Path, *overrides: str, **changes: Any) -> Trainer:
    given: dict[str, Any] = {"model": model(), "prompts": PROMPTS, "reward": fine, "tokenizer": TOKENIZER}
    given |= {"config": config(runs, *overrides), **changes}
    return Trainer(given.pop("model"), given.pop("prompts"), given.pop("reward"), **given)


def empty_file(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    path.write_text("\n", encoding="utf-8")
    return path


def shrunk() -> LlamaForCausalLM:
    net = model()
    net.resize_token_embeddings(50)
    return net


LONG = ["1=", "22222222222222222=", "3="]  # 19 tokens with the one that begins a text
CHAT = [[{"role": "user", "content": "1"}]]

BEFORE_ANYTHING: dict[str, tuple[Callable[[Path], object], type[RametError], str]] = {
    "no prompts": (lambda f: trainer(f, prompts=[]), DataError, "the list of prompts is empty"),
    "an empty file": (lambda f: trainer(f, prompts=empty_file(f)), DataError, r"empty\.jsonl is empty"),
    "an empty iterator": (lambda f: trainer(f, prompts=iter(())), DataError, "is empty: expected at least one prompt"),
    "nothing held out": (lambda f: trainer(f, held_out=[]), DataError, "the list of prompts is empty"),
    "no file": (lambda f: trainer(f, prompts=f / "none.jsonl"), DataError, r"no prompts at .*none\.jsonl"),
    "a row without prompt": (lambda f: trainer(f, prompts=["1=", {"q": "2"}]), DataError, r"row 1 .*columns \['q'\]"),
    "a prompt in both": (lambda f: trainer(f, held_out=["9=", "2="]), DataError, "1 of the 2 .* the first is row 1"),
    "a prompt over the context": (lambda f: trainer(f, prompts=LONG), PromptTooLong, "row 1: .*19 tokens.*limit of 12"),
    "a held-out prompt over it": (lambda f: trainer(f, held_out=LONG[1:2]), PromptTooLong, "row 0: .*limit of 12"),
    "a limit over the context": (
        lambda f: trainer(f, "rollout.prompt_limit=99", prompts=LONG),
        PromptTooLong,
        "limit of 15",
    ),
    "all prompts dropped": (
        lambda f: trainer(f, "rollout.too_long=drop", prompts=LONG[1:2]),
        DataError,
        "all 1 prompts are longer than the limit of 12",
    ),
    "no room for a prompt": (
        lambda f: trainer(f, "rollout.max_new_tokens=16"),
        ConfigError,
        "max_new_tokens = 16 leaves no prompt room in the model's 16 tokens",
    ),
    "messages without template": (lambda f: trainer(f, prompts=CHAT), DataError, "row 0: .*no chat template"),
    "an empty stop": (lambda f: trainer(f, "rollout.stop=['']"), ConfigError, "'' is 0 tokens"),
    "a stop that no text holds": (
        lambda f: trainer(f, "rollout.stop=['aé']"),
        ConfigError,
        "'aé' is 2 tokens .*no text",
    ),
    "an unbiased KL of a cut distribution": (
        lambda f: config(f, "kl.coefficient=0.1", "kl.unbiased=true", "rollout.top_p=0.9"),
        ConfigError,
        "whole distributions only: found rollout.top_p",
    ),
    "samples of one token": (lambda f: config(f, "rollout.top_k=1"), ConfigError, "top_k = 1 teaches nothing"),
    "no tokens in a pass": (lambda f: config(f, "optimizer.micro_batch_tokens=0"), ConfigError, "micro_batch_tokens"),
    "an unknown key": (lambda f: config(f, "rollout.group_sise=3"), ConfigError, "unknown key rollout.group_sise"),
    "a small vocabulary": (lambda f: trainer(f, model=shrunk()), ModelError, "ids up to .*the model has 50 embeddings"),
    "another's tokenizer by name": (
        lambda f: trainer(f, model=saved(f), tokenizer=larger_tokenizer()),
        ModelError,
        "the model has .* embeddings",
    ),
    "no tokenizer": (lambda f: trainer(f, tokenizer=None), ModelError, "given without a tokenizer"),
    "no such model": (lambda f: trainer(f, model=str(f / "none")), ModelError, "none"),
    "two names for a model": (
        lambda f: trainer(f, 'model={name="smollm2"}', model="tiny-llama"),
        ConfigError,
        "given the model 'tiny-llama', and model.name is 'smollm2'",
    ),
    "a shape for a model that is there": (
        lambda f: trainer(f, f'model={{name="tiny-llama", options={{{SHAPE}}}}}'),
        ConfigError,
        "model.options is for loading a model by name",
    ),
    "another precision": (
        lambda f: trainer(f, 'model={name="tiny-llama", dtype="bfloat16"}'),
        ConfigError,
        "model.dtype is 'bfloat16', and the model that was given has 'float32'",
    ),
    "no function": (lambda f: trainer(f, reward=1.0), RewardError, "must be a function of a sample: found float"),
    "too few rows for a warm start": (
        lambda f: Trainer.from_config(from_task(f, "warm_start.check_problems=5")),
        ConfigError,
        "check_problems = 5 leaves none of 5 training rows",
    ),
    "a warm start without answers": (
        lambda f: trainer(f, "warm_start={}"),
        ConfigError,
        "task fine has no reference answers",
    ),
    "no section for a model": (
        lambda f: Trainer.from_config(config(f)),
        ConfigError,
        r"needs the sections \[model\] and \[task\]: there is no \[model\] and \[task\]",
    ),
}


def from_task(runs: Path, *overrides: str) -> TrainConfig:
    text = (
        BASE
        + f"""
    model = {{ name = "tiny-llama", device = "cpu", options = {{ {SHAPE} }} }}
    task = {{ name = "sorting", options = {{ lengths = 2, train_size = 5, held_out_size = 2 }} }}
    """
    )
    return parse(text, [f"runs='{runs}'", *overrides])


def saved(folder: Path) -> str:
    model().save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    return str(folder / "model")


def larger_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<one more>"])
    return tokenizer


@pytest.mark.parametrize("case", BEFORE_ANYTHING)
def test_what_can_not_be_trained_with_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    make, kind, message = BEFORE_ANYTHING[case]
    with pytest.raises(kind, match=message) as raised:
        make(tmp_path)
    assert type(raised.value) is kind
    assert not (tmp_path / "run").exists()


def test_the_nearest_known_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean rollout\.group_size\?"):
        config(tmp_path, "rollout.group_sise=3")


@pytest.mark.parametrize(
    ("policy", "cut"),
    [("drop", set()), ("keep_end", {(6,) * 11 + (84,)}), ("keep_start", {(1,) + (6,) * 11})],
)
def test_a_prompt_over_the_context_is_dropped_or_cut_where_that_is_declared(
    policy: str, cut: set[tuple[int, ...]], tmp_path: Path
) -> None:
    """12 of the 16 tokens are a prompt's; id 1 begins a text, 5 is "1", 6 is "2", 84 is "="."""
    seen: set[tuple[int, ...]] = set()

    def reward(sample: Sample) -> float:
        seen.add(sample.prompt_tokens)
        return fine(sample)

    trainer(tmp_path, f"rollout.too_long={policy}", prompts=LONG, reward=reward).train()
    assert seen == {(1, 5, 84), (1, 7, 84)} | cut


# ---------------------------------------------------------------- rewards


def broken_after(calls: int, value: Any) -> Callable[[Sample], Any]:
    """A reward that says `value` from one call on."""
    made = 0

    def my_reward(sample: Sample) -> Any:
        nonlocal made
        made += 1
        if made <= calls:
            return fine(sample)
        if isinstance(value, Exception):
            raise value
        return value

    return my_reward


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "a finite number.*found nan"),
        (math.inf, "a finite number.*found inf"),
        ([1.0, 2.0], "one value for one sample: found a list of 2"),
        ("good", "found 'good' of type str"),
        ({"a": math.nan}, "a finite number for 'a'"),
        (torch.zeros(2), "of type Tensor"),
    ],
)
def test_a_reward_that_is_none_stops_at_once_with_a_checkpoint_of_the_last_whole_step(
    value: Any, message: str, tmp_path: Path
) -> None:
    """Four rollouts a step: the third of the second step."""
    with pytest.raises(RewardError, match=message) as raised:
        trainer(tmp_path, reward=broken_after(6, value)).train()
    assert "my_reward, group 3, member 0" in str(raised.value)
    assert "completion: " in str(raised.value)
    assert read_state(newest_checkpoint(tmp_path / "run" / "checkpoints")).step == 1
    trainer(tmp_path, resume=True).train()
    assert weights(tmp_path) == weights_of_a_whole_run(tmp_path / "whole")


def weights(runs: Path) -> bytes:
    return (newest_checkpoint(runs / "run" / "checkpoints") / "model.safetensors").read_bytes()


def weights_of_a_whole_run(runs: Path) -> bytes:
    trainer(runs).train()
    return weights(runs)


def test_a_reward_that_raises_costs_its_own_rollout_and_the_reason_is_written_down(tmp_path: Path) -> None:
    def picky(sample: Sample) -> float:
        if sample.group == 2 and sample.member == 1:
            raise KeyError("no answer here")
        return fine(sample)

    trainer(tmp_path, reward=picky).train()
    records = read(tmp_path / "run" / "rollouts.jsonl")
    [failed] = [record for record in records if record["outcome"] != "scored"]
    assert (failed["step"], failed["group"], failed["member"]) == (2, 2, 1)
    assert (failed["outcome"], failed["score"]) == ("environment_error", None)
    assert failed["reason"] == "KeyError: 'no answer here'"
    assert [line["failed"] for line in read(tmp_path / "run" / "metrics.jsonl")] == [0.0, 0.25, 0.0]


def test_too_many_failures_stop_the_run_with_a_checkpoint_from_which_it_goes_on_once_mended(tmp_path: Path) -> None:
    with pytest.raises(TooManyFailures, match=r"step 2: 50% .*allows 25%; .*: OSError: no network") as raised:
        trainer(tmp_path, reward=broken_after(6, OSError("no network"))).train()
    assert raised.value.hint is not None
    assert "my_reward" in raised.value.hint
    assert read_state(newest_checkpoint(tmp_path / "run" / "checkpoints")).step == 1
    trainer(tmp_path, resume=True).train()
    assert weights(tmp_path) == weights_of_a_whole_run(tmp_path / "whole")


def test_a_larger_allowed_fraction_lets_the_run_go_on(tmp_path: Path) -> None:
    everything_fails = broken_after(0, OSError("no network"))
    result = trainer(tmp_path, "rollout.max_failed_fraction=1", reward=everything_fails).train()
    assert [line["failed"] for line in read(result.folder / "metrics.jsonl")] == [1.0, 1.0, 1.0]


def test_a_failure_in_the_first_step_leaves_a_checkpoint_of_the_start(tmp_path: Path) -> None:
    with pytest.raises(RewardError):
        trainer(tmp_path, reward=broken_after(0, "bad")).train()
    assert read_state(newest_checkpoint(tmp_path / "run" / "checkpoints")).step == 0
    trainer(tmp_path, resume=True).train()
    assert weights(tmp_path) == weights_of_a_whole_run(tmp_path / "whole")


# ---------------------------------------------------------------- run folders


def test_a_run_folder_that_is_there_is_not_touched(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunExists, match="run is there already"):
        trainer(tmp_path).train()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_runs_that_is_a_file_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="can not be made"):
        trainer(tmp_path / "file").train()


@pytest.mark.parametrize("there", [False, True])
def test_resuming_without_a_checkpoint_says_that_there_is_none(there: bool, tmp_path: Path) -> None:
    if there:
        (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*run/checkpoints"):
        trainer(tmp_path, resume=True).train()
    assert (tmp_path / "run").exists() == there


def test_resuming_with_fewer_steps_than_are_done_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    with pytest.raises(ConfigError, match=r"steps is 2, and .*step-000003 has 3 behind it"):
        trainer(tmp_path, "steps=2", resume=True).train()


def test_resuming_with_another_model_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    before = weights(tmp_path)
    other = tiny_llama(TOKENIZER, hidden_size=64, layers=1, heads=2, context=16)
    with pytest.raises(CheckpointError, match="does not hold the weights of this LlamaForCausalLM"):
        trainer(tmp_path, model=other, resume=True).train()
    assert weights(tmp_path) == before


def no_room(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def steps_then(step: int, then: Callable[[], None]) -> Callable[[Event], None]:
    def watch(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == step:
            then()

    return watch


@pytest.fixture
def full_disk() -> Iterator[tuple[pytest.MonkeyPatch, Callable[[], None]]]:
    """A patch to take back, and a function from which on no optimiser state can be written."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch, lambda: patch.setattr(torch, "save", no_room)


def test_a_full_disk_in_the_middle_of_a_run_leaves_the_checkpoint_before(
    full_disk: tuple[pytest.MonkeyPatch, Callable[[], None]], tmp_path: Path
) -> None:
    patch, fill = full_disk
    with pytest.raises(CheckpointError, match=r"step 2 can not be written .*No space left"):
        trainer(tmp_path, "checkpoint.every=1", watcher=steps_then(2, fill)).train()
    patch.undo()
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000001"]
    trainer(tmp_path, "checkpoint.every=1", resume=True).train()
    assert weights(tmp_path) == weights_of_a_whole_run(tmp_path / "whole")


def test_a_full_disk_does_not_hide_why_the_run_stopped(
    full_disk: tuple[pytest.MonkeyPatch, Callable[[], None]], tmp_path: Path
) -> None:
    reward = broken_after(4, "bad")
    with pytest.raises(RewardError, match="found 'bad'") as raised:
        trainer(tmp_path, reward=reward, watcher=steps_then(1, full_disk[1])).train()
    assert "No space left" in raised.value.__notes__[0]


def own_task() -> Task:
    return Task("own", [{"prompt": "1="}], [], fine)


@pytest.mark.parametrize(
    ("changes", "kind", "message", "hint"),
    [
        ({"task": own_task}, ConfigError, "a ramet.Task: found the function own_task", "called first"),
        ({"task": "arithmetic"}, ConfigError, "expected a ramet.Task: found 'arithmetic'", "build_task"),
        ({"config": {"steps": 1}}, ConfigError, "expected a TrainConfig: found {'steps': 1}", "TrainConfig(...)"),
        ({"model": None}, ModelError, "expected a model: found None", "its name or its folder"),
        ({"task": Task("own", [], [], fine)}, DataError, "the task own has no training rows", "options"),
        ({"task": Task("own", ["1"], [], fine, tools=[len])}, ConfigError, "one of its tools is none", "typed"),
    ],
)
def test_what_a_trainer_is_made_of_is_named_where_it_is_something_else(
    changes: dict[str, Any], kind: type[RametError], message: str, hint: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"model": model(), "task": own_task(), "config": config(tmp_path)} | changes
    with pytest.raises(kind) as raised:
        Trainer.from_task(given["model"], given["task"], config=given["config"], tokenizer=TOKENIZER)
    assert message in raised.value.message
    assert hint in str(raised.value.hint)


def test_the_other_ways_to_make_a_trainer_look_at_model_and_settings_too(tmp_path: Path) -> None:
    for settings in ({"steps": 1}, None):
        with pytest.raises(ConfigError, match="expected a TrainConfig: found"):
            Trainer(model(), PROMPTS, fine, config=settings, tokenizer=TOKENIZER)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected a TrainConfig: found"):
            Trainer.from_config(settings)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="expected a model: found None"):
        Trainer(None, PROMPTS, fine, config=config(tmp_path))  # type: ignore[arg-type]
