"""Prompts and a reward of your own, from files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ramet.errors import ConfigError, nearest
from ramet.prompts import read_rows, refuse_shared
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
    """Return the function that "package.module:function" or "path/to/file.py:function" names.

    A file is run once each time it is named, under a module name of its own. Raises `ConfigError`.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise ConfigError(
            f'a reward is named "package.module:function" or "path/to/file.py:function": found "{name}"',
            hint="add a colon and the name of the function",
        )
    module = _run_file(Path(where), name) if where.endswith(".py") else _import(where, name)
    found = getattr(module, function, None)
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and _made_in(value, module)]
        raise ConfigError(
            f'the reward "{name}": {where} has no function "{function}"', hint=nearest(function, functions)
        )
    if not callable(found):
        raise ConfigError(f'the reward "{name}" must be a function: found {type(found).__name__}')
    reward: Reward = found
    return reward


def _import(where: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except Exception as error:  # a module of the user's may raise anything while it is imported
        raise ConfigError(
            f'the reward "{name}": importing {where} failed with {type(error).__name__}: {error}',
            hint="install it, put its folder into PYTHONPATH, or give the path of a .py file",
        ) from error


def _run_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f'the reward "{name}": no file at {path.absolute()}', hint="the path starts at the working folder"
        )
    module_name = f"ramet_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # as above
        del sys.modules[module_name]
        raise ConfigError(f'the reward "{name}": running {path} failed with {type(error).__name__}: {error}') from error
    return module


def _made_in(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _answer(row: Mapping[str, Any]) -> str:
    return str(row["answer"])
