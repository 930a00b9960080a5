"""A checkpoint is whole or not there, whatever happens while it is written, and it holds everything bit for bit."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from ramet import checkpoint
from ramet.checkpoint import (
    RunState,
    checkpoints,
    load_optimizer,
    load_weights,
    newest_checkpoint,
    read_state,
    save_checkpoint,
    save_model,
)
from ramet.errors import CheckpointError
from ramet.models.tiny import tiny_llama, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
NO_ROOM = OSError(28, "No space left on device")


def model(seed: int = 0, **changes: int) -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 32, "context": 24, **changes}
    return tiny_llama(TOKENIZER, seed=seed, **shape)


def trained(seed: int = 0) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    """A model after one step of AdamW, so that the optimiser has a state."""
    net = model(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(input_ids=torch.tensor([[1, 5, 6]])).logits.square().mean().backward()
    optimizer.step()
    return net, optimizer


def save(folder: Path, step: int, *, keep: int = 1) -> Path:
    net, optimizer = trained(step)
    return save_checkpoint(folder, RunState(step, 3 * step, step), net, TOKENIZER, optimizer, keep=keep)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_a_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process, which no fixture survives; return how it ended (negative: by that signal)."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------- what is in it


def test_weights_optimizer_and_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    net, optimizer = trained()
    path = save_checkpoint(tmp_path, RunState(3, 12, 5), net, TOKENIZER, optimizer)
    assert path == tmp_path / "step-000003"
    assert read_state(path) == RunState(step=3, position=12, version=5)
    other, other_optimizer = trained(seed=1)
    load_weights(path, other)
    load_optimizer(path, other_optimizer)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())
    for found, expected in zip(
        other_optimizer.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_precisions_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    net, other = model(), model(seed=1)
    for each in (net, other):
        torch.nn.Module.to(each, dtype)
    save_model(tmp_path / "reference", net, TOKENIZER)
    load_weights(tmp_path / "reference", other)
    assert {value.dtype for value in other.state_dict().values()} == {dtype}
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())


def test_transformers_opens_it_and_says_the_same(tmp_path: Path) -> None:
    net, optimizer = trained()
    path = save_checkpoint(tmp_path, RunState(1, 1, 1), net, TOKENIZER, optimizer)
    opened, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer("12+3=", return_tensors="pt")["input_ids"]
    assert ids.tolist() == TOKENIZER("12+3=", return_tensors="pt")["input_ids"].tolist()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    said, expected = opened.generate(ids, **options), net.generate(ids, **options)
    assert said.tolist() == expected.tolist()
    assert said.shape[1] > ids.shape[1]
    assert tokenizer.decode(said[0]) == TOKENIZER.decode(expected[0])


@pytest.mark.parametrize(("keep", "kept"), [(1, [12]), (2, [9, 12]), (9, [3, 6, 9, 12])])
def test_the_newest_are_kept(keep: int, kept: list[int], tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        save(tmp_path, step, keep=keep)
    assert names(tmp_path) == [f"step-{step:06d}" for step in kept]
    assert newest_checkpoint(tmp_path).name == "step-000012"


def test_the_newest_is_the_one_with_the_highest_number_beyond_six_digits_too(tmp_path: Path) -> None:
    save(tmp_path, 999_999, keep=2)
    save(tmp_path, 1_000_000, keep=2)
    assert newest_checkpoint(tmp_path).name == "step-1000000"


# ---------------------------------------------------------------- a full disk, at each stage


def no_room() -> None:
    raise NO_ROOM


def at_call(call: int, function: Callable[..., Any], happens: Callable[[], None]) -> Callable[..., Any]:
    """Return `function`, but that `happens` at its call number `call`, from 1 on."""
    calls = 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            happens()
        return function(*given, **named)

    return counted


STAGES: dict[str, tuple[Any, str, int]] = {
    "the folder": (Path, "mkdir", 2),  # the first makes the parent
    "the weights": (transformers.modeling_utils, "safe_save_file", 1),
    "the tokenizer": (type(TOKENIZER), "save_pretrained", 1),
    "the optimiser": (torch, "save", 1),
    "the state": (Path, "write_text", 1),
    "forcing the first file to disk": (os, "fsync", 1),
    "forcing the third file to disk": (os, "fsync", 3),
    "the rename": (Path, "rename", 1),
}
"""Where something happens: in which call of which function. What the calls before it wrote is there."""


def let_happen(stage: str, happens: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    where, name, call = STAGES[stage]
    patch.setattr(where, name, at_call(call, getattr(where, name), happens))


@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_is_an_error_and_leaves_the_checkpoint_before_as_it_was(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path, 1)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        let_happen(stage, no_room, patch)
        with pytest.raises(CheckpointError, match=r"step 2 can not be written to .*No space left on device"):
            save(tmp_path, 2)
    assert contents(tmp_path) == before
    assert names(tmp_path) == [old.name]
    assert newest_checkpoint(tmp_path) == old
    assert save(tmp_path, 2) == newest_checkpoint(tmp_path)  # room was made
    assert names(tmp_path) == ["step-000002"]


def test_an_error_after_the_rename_leaves_both_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = checkpoint._force_to_disk

    def fail_on_the_parent(folder: Path, *, inside: bool = True) -> None:
        if not inside:
            raise NO_ROOM
        forced(folder)

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "_force_to_disk", fail_on_the_parent)
    with pytest.raises(CheckpointError):
        save(tmp_path, 2)
    assert [read_state(path).step for path in checkpoints(tmp_path)] == [1, 2]


@pytest.mark.parametrize("limit", [100, 20_000, 60_000])
def test_what_the_three_libraries_say_of_a_full_disk_is_one_error(limit: int, tmp_path: Path) -> None:
    """No file may grow beyond `limit` bytes: too few for the config, for the weights, for the optimiser's state."""
    old = save(tmp_path, 1)
    before = contents(tmp_path)
    sizes = {name: len(content) for name, content in before.items()}
    assert sizes["step-000001/config.json"] > 100
    assert sizes["step-000001/model.safetensors"] in range(20_000, 60_000)
    assert sizes["step-000001/optimizer.pt"] > 60_000

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match="step 2 can not be written"):
            save(tmp_path, 2)

    assert in_a_child(write) == 0
    assert contents(tmp_path) == before
    assert newest_checkpoint(tmp_path) == old


# ---------------------------------------------------------------- a kill, at each stage


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_leaves_the_checkpoint_before_and_no_half_of_one(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path, 1)
    before = contents(old)

    def write() -> None:
        let_happen(stage, die, monkeypatch)  # in the child alone
        save(tmp_path, 2)

    assert in_a_child(write) == -signal.SIGKILL
    assert checkpoints(tmp_path) == [old]
    assert contents(old) == before
    new = save(tmp_path, 2)
    assert names(tmp_path) == [new.name]  # what the kill left has been swept away


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def half(folder: Path, **options: Any) -> None:
        (Path(folder) / "model.safetensors").unlink()
        die()

    def write() -> None:
        monkeypatch.setattr(shutil, "rmtree", half)
        save(tmp_path, 2)

    assert in_a_child(write) == -signal.SIGKILL
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002"]
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000003"]


# ---------------------------------------------------------------- what is no checkpoint


def test_a_whole_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="step-000001 is there already"):
        save(tmp_path, 1)
    assert contents(tmp_path) == before


def test_a_folder_that_is_none_is_not_taken_for_one_and_gives_way(tmp_path: Path) -> None:
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000009.bak").mkdir()
    (tmp_path / "step-000009.bak" / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        newest_checkpoint(tmp_path)
    save(tmp_path, 2)
    assert newest_checkpoint(tmp_path).name == "step-000002"


@pytest.mark.parametrize("text", ["", "{", '{"step": 1}', '{"step": 1, "position": 1, "version": 1, "more": 1}', "[]"])
def test_a_state_that_is_torn_or_unknown_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"state\.json is not the state of a run"):
        read_state(tmp_path)


def test_another_models_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step-000001 does not hold the weights of this LlamaForCausalLM"):
        load_weights(path, model(hidden_size=64))
    with pytest.raises(CheckpointError, match=r"step-000001 does not hold .*missing keys: model\.layers\.1"):
        load_weights(path, model(layers=2))
    save_model(tmp_path / "two", model(layers=2), TOKENIZER)
    with pytest.raises(CheckpointError, match=r"two does not hold .*unexpected keys: model\.layers\.1"):
        load_weights(tmp_path / "two", model())


def test_missing_and_torn_weights_are_named(tmp_path: Path) -> None:
    file = save(tmp_path, 1) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20_000])
    with pytest.raises(CheckpointError, match="step-000001 does not hold"):
        load_weights(file.parent, model())
    file.unlink()
    with pytest.raises(CheckpointError, match="step-000001 does not hold"):
        load_weights(file.parent, model())


def test_a_tensor_that_is_missing_is_named_and_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = save(tmp_path, 1)
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="norm"):
        load_weights(path, model())


def test_an_optimiser_that_is_torn_or_of_another_model_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    two = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(CheckpointError, match=r"optimizer\.pt does not fit"):
        load_optimizer(path, two)
    (path / "optimizer.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt does not fit"):
        load_optimizer(path, trained()[1])


def test_the_state_is_plain_json(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    assert json.loads((path / "state.json").read_text(encoding="utf-8")) == {"step": 4, "position": 12, "version": 4}
