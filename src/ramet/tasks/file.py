"""Prompts and a reward of your own, from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramet.errors import ConfigError
from ramet.prompts import read_rows, refuse_shared
from ramet.tasks.named import load
from ramet.tasks.task import Reward, Task


def file(prompts: str | Path, reward: str, *, held_out: str | Path | None = None) -> Task:
    """Make a task of JSONL rows and a reward, "package.module:function" or "path/to/file.py:function".

    Where every row has a string in the column "answer", that is its reference answer. Raises `DataError` for rows that
    are none and for a held-out prompt that is trained on as well, `ConfigError` for a reward that can not be found.
    """
    function = load_reward(reward)
    train = read_rows(prompts)
    test = [] if held_out is None else read_rows(held_out)
    refuse_shared(train, test)
    answered = all(isinstance(row.get("answer"), str) for row in (*train, *test))
    return Task("file", train, test, function, answer=_answer if answered else None)


def load_reward(name: str) -> Reward:
    """Return the function that "package.module:function" or "path/to/file.py:function" names; see `named.load`."""
    found = load(name, "reward")
    if not callable(found):
        raise ConfigError(f'the reward "{name}" must be a function: found {type(found).__name__}')
    reward: Reward = found
    return reward


def _answer(row: Mapping[str, Any]) -> str:
    return str(row["answer"])
