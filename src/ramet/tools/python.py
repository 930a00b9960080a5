"""A tool that runs Python: in a process of its own, with limits on time, memory, files, network and processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ramet.concurrency import Threads
from ramet.tools.tool import Tool, tool

LIMITS = ("memory", "files", "network", "processes")
"""What a machine may be unable to enforce. Time and output always are."""

STARTUP = 60.0
"""How long an interpreter may take to start, in seconds."""

_CONFINED = Path(__file__).with_name("confined.py")


def python_tool(
    *,
    seconds: float = 5.0,
    memory: int = 256 * 2**20,
    output: int = 8_000,
    file_size: int = 16 * 2**20,
    at_once: int | None = None,
    unenforced: Collection[str] = (),
) -> Tool:
    r"""Make a tool `python(code: str) -> str` that runs code and answers what it prints, and how it ended.

    The code runs in a new interpreter with the standard library, an empty environment and an empty folder, which is
    removed afterwards. It ends after `seconds` of time (or of processor time), has `memory` bytes, may print `output`
    bytes and write files of `file_size` bytes each, in its folder alone. It reads no other files but Python's own, has
    no network, starts no process and signals none. At most `at_once` of these run at the same time (as many as there
    are processors); others wait, and their toolbox's time-out counts. One that is cancelled is ended.

    On Linux, Landlock and seccomp enforce it, without root. Raises `RuntimeError` where a machine can not: names of
    `LIMITS` in `unenforced` may then go without.

    >>> import asyncio
    >>> asyncio.run(python_tool().call({"code": "print(6 * 7)"}, None))
    '42\n'
    """
    asked = _Asked(seconds, memory, output, file_size, tuple(unenforced))
    threads = Threads(at_once or os.cpu_count() or 1, "ramet tool")
    _run(asked, "", threading.Event())  # so that a machine that can not says so now

    async def python(code: str) -> str:
        """Run Python code in a new process and return what it prints.

        Args:
            code: the program; print what you want to see
        """
        stop = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, _run, asked, code, stop)
        finally:  # cancelled or late: it ends now, or never begins
            stop.set()

    return tool(python)


def run_python(
    code: str,
    *,
    seconds: float = 5.0,
    memory: int = 256 * 2**20,
    output: int = 8_000,
    file_size: int = 16 * 2**20,
    unenforced: Collection[str] = (),
) -> str:
    """Run code once as `python_tool` does, and return what it prints and how it ended.

    >>> print(run_python("print(1); 1 / 0"))
    1
    Traceback (most recent call last):
      File "<code>", line 1, in <module>
        print(1); 1 / 0
                  ~~^~~
    ZeroDivisionError: division by zero
    [exit code 1]
    """
    return _run(_Asked(seconds, memory, output, file_size, tuple(unenforced)), code, threading.Event())


@dataclass(frozen=True, slots=True)
class _Asked:
    seconds: float
    memory: int
    output: int
    file_size: int
    unenforced: tuple[str, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds must be above 0: found {self.seconds}")
        for name in ("memory", "output", "file_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 byte: found {getattr(self, name)}")
        if isinstance(self.unenforced, str) or not set(self.unenforced) <= set(LIMITS):
            raise ValueError(f"unenforced must be some of {', '.join(LIMITS)}: found {self.unenforced}")


def _run(asked: _Asked, code: str, stop: threading.Event) -> str:
    folder = tempfile.mkdtemp(prefix="ramet-")
    remove = functools.partial(_remove, folder)
    atexit.register(remove)  # where Python ends while a tool still runs
    try:
        Path(folder, "code.py").write_bytes(code.encode("utf-8", "replace"))
        return _followed(*_start(asked, folder), asked, stop)
    finally:
        atexit.unregister(remove)
        remove()


def _start(asked: _Asked, folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the interpreter; return it, and where it says whether it is confined."""
    status, said = os.pipe()
    try:
        values = {
            "processor": math.ceil(asked.seconds + 0.5),
            "memory": asked.memory,
            "file_size": asked.file_size,
            "unenforced": asked.unenforced,
            "status": said,
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", str(_CONFINED), json.dumps(values)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PYTHONHASHSEED": "0"},  # sets have one order, in every run
            start_new_session=True,
            pass_fds=(said,),
        )
    except BaseException:
        os.close(status)
        raise
    finally:
        os.close(said)
    return process, status


def _followed(process: subprocess.Popen[bytes], status: int, asked: _Asked, stop: threading.Event) -> str:
    """Read what the process says until it ends or must; end whatever is left of it."""
    watch = _Watch(process, status, asked)
    try:
        stopped = watch.follow(stop)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        watch.close()
    if watch.status != b"confined":
        said = (watch.status or watch.output[-500:]).decode("utf-8", "replace").strip() or "it did not start"
        raise RuntimeError(
            f"the Python tool can not enforce its limits on this machine: {said}\n"
            f"  hint: name what may go without in unenforced: {', '.join(LIMITS)}"
        )
    text = watch.output[: asked.output].decode("utf-8", "replace")
    ending = stopped or _ending(process.returncode, asked)
    return text + "\n" * bool(text and ending and not text.endswith("\n")) + ending


class _Watch:
    """What a process writes, and when it ends."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, asked: _Asked) -> None:
        assert process.stdout is not None
        self.output, self.status = b"", b""
        self._process, self._asked = process, asked
        self._status = status
        self._selector = selectors.DefaultSelector()
        for file in (process.stdout.fileno(), status):
            self._selector.register(file, selectors.EVENT_READ)

    def follow(self, stop: threading.Event) -> str:
        """Return why the process must be stopped, or "" once it has ended."""
        self._deadline = time.monotonic() + STARTUP
        while True:
            left = self._deadline - time.monotonic()
            ended = self._ended()  # before a last look at what it wrote
            ready = self._ready(0 if ended else max(0, min(left, 0.05)))
            for file in ready:
                self._read(file)
            if len(self.output) > self._asked.output:
                return f"[stopped: it printed more than {self._asked.output} bytes]"
            if ended and not ready:
                return ""
            if not ended and (left <= 0 or stop.is_set()):
                return f"[stopped after {self._asked.seconds:g} s]"

    def _ready(self, seconds: float) -> list[int]:
        if self._selector.get_map():
            return [key.fd for key, _ in self._selector.select(seconds)]
        time.sleep(min(seconds, 0.005))  # it writes no more, and still runs
        return []

    def _read(self, file: int) -> None:
        data = os.read(file, 65536)
        if not data:
            self._selector.unregister(file)
        if file == self._status:
            self.status += data
            if not data:  # its time begins when it is confined
                self._deadline = time.monotonic() + self._asked.seconds
        else:
            self.output += data

    def _ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS
            return self._process.poll() is not None
        # Its number stays its own until it is waited for, so that none but its group is killed.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def close(self) -> None:
        self._selector.close()
        os.close(self._status)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _ending(code: int, asked: _Asked) -> str:
    if code == 0:
        return ""
    if code > 0:
        return f"[exit code {code}]"
    if -code == signal.SIGXCPU:
        return f"[stopped after {asked.seconds:g} s of processor time]"
    try:
        return f"[ended by {signal.Signals(-code).name}]"
    except ValueError:  # a real-time signal
        return f"[ended by signal {-code}]"


def _remove(folder: str) -> None:
    """Remove a folder whatever is in it: step by step, for code may make one that is deeper than any recursion."""
    with contextlib.suppress(FileNotFoundError):  # removed already, at the end of Python
        here = os.open(folder, os.O_RDONLY)
        try:
            path: list[tuple[str, list[str]]] = [("", _folders_left(here))]
            while path:
                name, folders = path[-1]
                if folders:
                    inner = folders.pop()
                    os.chmod(inner, 0o700, dir_fd=here)
                    here = _moved(here, inner)
                    path.append((inner, _folders_left(here)))
                    continue
                path.pop()
                if path:
                    here = _moved(here, "..")
                    os.rmdir(name, dir_fd=here)
        finally:
            os.close(here)
        os.rmdir(folder)


def _folders_left(here: int) -> list[str]:
    """Unlink what is no folder; return the names of those."""
    folders = []
    for entry in list(os.scandir(here)):
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.name)
        else:
            os.unlink(entry.name, dir_fd=here)
    return folders


def _moved(here: int, to: str) -> int:
    there = os.open(to, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=here)
    os.close(here)
    return there
