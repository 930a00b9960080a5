"""The page about tools says what is so."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="its last examples are of Linux")
def test_the_examples_of_the_page_run() -> None:
    page = Path(__file__).parents[2] / "docs" / "tools.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted >= 10
    assert failed == 0
