"""What a user names in a file or a package: "package.module:name" or "path/to/file.py:name"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ramet.errors import ConfigError, RametError, nearest


def load(name: str, what: str) -> Any:
    """Return what "package.module:name" or "path/to/file.py:name" names; `what` says in errors what it is to be.

    A file is run once each time it is named, under a module name of its own. Raises `ConfigError`.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise ConfigError(
            f'a {what} is named "package.module:function" or "path/to/file.py:function": found "{name}"',
            hint="add a colon and the name of the function" + (f": {name}:NAME" if name.endswith(".py") else ""),
        )
    module = _run_file(Path(where), name, what) if where.endswith(".py") else _import(where, name, what)
    found = getattr(module, function, None)
    if found is None:
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        functions = [key for key, value in public.items() if callable(value) and _made_in(value, module)]
        raise ConfigError(
            f'the {what} "{name}": {where} has no function "{function}"', hint=nearest(function, functions)
        )
    return found


def _import(where: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything while it is imported
        raise ConfigError(
            f'the {what} "{name}": importing {where} failed with {type(error).__name__}: {error}',
            hint="install it, put its folder into PYTHONPATH, or give the path of a .py file",
        ) from error


def _run_file(path: Path, name: str, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f'the {what} "{name}": no file at {path.absolute()}', hint="the path starts at the working folder"
        )
    module_name = f"ramet_{what}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # as above
        del sys.modules[module_name]
        if isinstance(error, RametError):  # a task that is none says what is wrong with it, and what to do
            raise ConfigError(f'the {what} "{name}": running {path}: {error.message}', hint=error.hint) from error
        raise ConfigError(f'the {what} "{name}": running {path} failed with {type(error).__name__}: {error}') from error
    return module


def _made_in(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__
