"""What a run must remember, written whole or not at all.

A checkpoint is a folder `step-000040` that transformers opens (weights, config, tokenizer), with `optimizer.pt` and
`state.json` beside them. It is written under another name, forced to disk, and renamed: a kill or a full disk leaves
the one before it as it was. One that is dropped is renamed first, so that no half of it is taken for a whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ramet.config import TrainConfig
from ramet.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STATE = "state.json"
OPTIMIZER = "optimizer.pt"
REFERENCE = "reference"
UNFINISHED = ".unfinished-"
"""Begins the name of a folder that is being written or removed; what a kill leaves of them is swept away later."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The integers that a run resumes from: steps done, prompts dealt out, and the version of the weights."""

    step: int
    position: int
    version: int


def save_checkpoint(
    folder: Path,
    state: RunState,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    *,
    keep: int = 1,
) -> Path:
    """Write `folder/step-NNNNNN` and drop all but the newest `keep`; return the new folder.

    Raises `CheckpointError` where it can not be written, or is there already, with the earlier ones untouched.
    """
    target = folder / f"step-{state.step:06d}"
    if (target / STATE).is_file():
        raise CheckpointError(
            f"{target} is there already, and whole: it is not written over",
            hint="do two runs write to this folder? remove the checkpoint to write it anew",
        )

    def fill(unfinished: Path) -> None:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        torch.save(optimizer.state_dict(), unfinished / OPTIMIZER)
        (unfinished / STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")

    _write_whole(target, f"the checkpoint of step {state.step}", fill)
    for old in checkpoints(folder)[:-keep]:
        _drop(old)
    return target


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model once, whole or not at all: the reference of a run, which resuming needs bit for bit."""

    def fill(unfinished: Path) -> None:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)

    _write_whole(folder, "the reference model", fill)


def _write_whole(target: Path, what: str, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a folder under another name, force it to disk, and give it the name `target`."""
    unfinished = target.with_name(UNFINISHED + target.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left)
        unfinished.mkdir()
        fill(unfinished)
        _force_to_disk(unfinished)
        if target.exists():  # no whole one: something was begun there, and not by this function
            shutil.rmtree(target)
        unfinished.rename(target)
        _force_to_disk(target.parent, inside=False)
    except Exception as error:  # three libraries write here, and each has errors of its own for a full disk
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"{what} can not be written to {target.parent}: {type(error).__name__}: {error}",
            hint="make room or name another folder with `runs`; the checkpoints before it are whole",
        ) from error


def _drop(folder: Path) -> None:
    """Remove a checkpoint that is no longer kept; what can not be removed now is swept away with the next write."""
    aside = folder.with_name(UNFINISHED + "dropped-" + folder.name)
    with contextlib.suppress(OSError):
        folder.rename(aside)
        shutil.rmtree(aside)


def checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and (path / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest whole checkpoint in `folder`; raise `CheckpointError` where there is none."""
    found = checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"no checkpoint in {folder}: nothing to resume from",
            hint="is it the right run? one that stopped before a checkpoint starts anew when its folder is removed",
        )
    return found[-1]


def read_state(checkpoint: Path) -> RunState:
    """Read the integers of a checkpoint; raise `CheckpointError` where they are torn or unknown."""
    try:
        return RunState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / STATE} is not the state of a run: {error}") from error


FREE_ON_RESUME = (
    *("name", "runs", "steps", "threads", "evaluation", "checkpoint"),
    *("model.device", "rollout.max_failed_fraction"),
)
"""What may change when a run goes on; everything else would make it another run."""


def refuse_other_settings(before: TrainConfig, now: TrainConfig, *, free: Sequence[str] = ()) -> None:
    """Raise `ConfigError` where a run goes on with other settings than it was started with; `free` ones may change."""
    old, new = dict(_leaves(before.model_dump())), dict(_leaves(now.model_dump()))
    for key in sorted(old.keys() | new.keys()):
        may_change = any(key == allowed or key.startswith(f"{allowed}.") for allowed in (*FREE_ON_RESUME, *free))
        if not may_change and old.get(key) != new.get(key):
            raise ConfigError(
                f"{key} was {old.get(key)!r} when the run was started, and is {new.get(key)!r} now",
                hint=f"ramet train {now.folder} --resume goes on with the run's own settings; "
                "a run with others needs another name",
            )


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def load_weights(checkpoint: Path, model: PreTrainedModel) -> None:
    """Read a checkpoint's weights into `model`, bit for bit; raise `CheckpointError` where they are not all there."""
    kind: Any = type(model)
    try:
        saved, report = kind.from_pretrained(
            checkpoint, config=model.config, dtype=model.dtype, output_loading_info=True
        )
        for what in ("missing_keys", "unexpected_keys"):
            if report[what]:
                raise ValueError(f"{what.replace('_', ' ')}: {', '.join(sorted(report[what])[:3])}")
        model.load_state_dict(saved.state_dict())
    except Exception as error:  # torn files and other shapes are told by four libraries, each in its own way
        raise CheckpointError(
            f"{checkpoint} does not hold the weights of this {kind.__name__}: {error}",
            hint="is it a checkpoint of another run, or does [model] say something else than when it was written?",
        ) from error


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint's optimiser state into `optimizer`; raise `CheckpointError` where it is another's or torn."""
    try:
        # Through the CPU: each value goes where its parameter is, which may be another device than when it was written.
        optimizer.load_state_dict(torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True))
    except Exception as error:  # as above
        raise CheckpointError(f"{checkpoint / OPTIMIZER} does not fit this optimiser: {error}") from error


def _force_to_disk(folder: Path, *, inside: bool = True) -> None:
    for path in (*(folder.rglob("*") if inside else ()), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
