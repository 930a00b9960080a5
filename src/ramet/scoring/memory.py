"""The memory that there is, and how many tokens of a pass fit into it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

FRACTION = 0.5
"""How much of the memory is planned for: the rest is for other processes, fragments, and what was not measured."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory of a device: all that this process may have, and what is free of it now."""

    total: int
    free: int


def memory_of(device: torch.device) -> Memory:
    """Return the memory of `device`; on a CPU the limits of the process's control groups count as memory.

    >>> memory = memory_of(torch.device("cpu"))
    >>> 0 < memory.free <= memory.total
    True
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What torch holds for later use is free to it.
        return Memory(total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return cpu_memory()


def cpu_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Return the memory of this machine, or of the smallest control group that this process is in.

    Where the system does not say what is free, all of it is.
    """
    try:
        lines = [line.split() for line in (proc / "meminfo").read_text().splitlines()]
        stated = {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if len(line) > 1}
        total, free = stated["MemTotal"], stated.get("MemAvailable", stated["MemTotal"])
    except (OSError, KeyError, ValueError):
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in _group_limits(proc, groups):
        total, free = min(total, limit), min(free, limit - used)
    return Memory(total, max(free, 0))


def _group_limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of each control group above this process, of version 2 and of version 1."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path may be that of the host, and then the root is the group itself.
        for group in (folder, *(above for above in folder.parents if above == root or root in above.parents)):
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None:
                yield limit, max((used or 0) - _stated(group / "memory.stat", names[2]), 0)


def _number(path: Path) -> int | None:
    """Read a whole number; None where there is no file or no limit ("max", or in version 1 a huge number)."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number < 2**60 else None


def _stated(path: Path, name: str) -> int:
    """Read a line of memory.stat: files that were read and may be dropped at once count as used, and are not."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(name + " "):
                return int(line.split()[1])
    return 0


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a pass needs: `token` for each token that it runs, and `fixed` whatever their number."""

    token: float
    fixed: int


def tokens_in(memory: Memory, needs: Needs, *, fraction: float = FRACTION) -> int:
    """Return how many tokens a pass may run, as a power of two: `fraction` of the whole memory, or of what is free.

    Rounded down so coarsely, it is the same number from run to run on one machine, as long as memory is not scarce.

    >>> tokens_in(Memory(total=2**30, free=2**30), Needs(token=1000, fixed=0))        # 2**29 / 1000 is 536870
    524288
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1: found {fraction}")
    room = min(fraction * memory.total, memory.free) - needs.fixed
    fitting = int(room // needs.token)
    return 2 ** (fitting.bit_length() - 1) if fitting >= 1 else 1
