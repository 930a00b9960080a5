"""What tests of processes wait for: that one is gone, that a file is there."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def gone(pid: int) -> bool:
    """Wait until there is no such process."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # it has ended, and only its parent has not asked yet
        time.sleep(0.01)
    return False


def there(path: Path) -> None:
    """Wait until there is such a file."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.005)


def children_of(parent: int) -> list[int]:
    """Return the processes that a process has started, and that are still there."""
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread ended: another has its children now
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
            return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        if not Path(f"/proc/{parent}").exists():
            return []
