"""What holds of the adapter where TorchRL is not installed; `tests/large/test_torchrl.py` runs it with TorchRL."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_without_torchrl_the_error_names_the_extra(monkeypatch):
    """In place of a module that is not there."""
    for name in [name for name in sys.modules if name.startswith("ramet.adapters")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrl", None)
    with pytest.raises(ImportError, match=r"needs TorchRL: pip install 'ramet\[torchrl\]'"):
        importlib.import_module("ramet.adapters.torchrl")


def test_the_rest_of_ramet_does_not_need_torchrl(monkeypatch):
    """The folder itself can be imported."""
    monkeypatch.setitem(sys.modules, "torchrl", None)
    assert importlib.import_module("ramet.adapters").__doc__
