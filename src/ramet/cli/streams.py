"""Which stream is for what."""

from __future__ import annotations

import contextlib
import sys


def prints_aside() -> contextlib.AbstractContextManager[object]:
    """Return a context in which what a user's functions print goes to stderr: stdout is for what was asked for.

    A program that they start writes where it likes.
    """
    return contextlib.redirect_stdout(sys.stderr)
