"""Code that a model wrote runs under limits: each is attacked here, and each attack fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tests.concurrency.ends import children_of

from ramet.tools import Toolbox, confined, python_tool, run_python
from ramet.tools import python as sandbox
from ramet.types import Episode, ToolCall

EPISODE = Episode({}, [], random.Random(0))

linux = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
pytestmark = linux


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Each test ends with the working folders gone and no process left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("ramet-*")) == []


def last(text: str) -> str:
    """Return the line in front of the exit code."""
    return text.splitlines()[-2]


def test_what_is_printed_comes_back() -> None:
    assert run_python("print('é', 1 + 1)\nimport sys\nprint('x', file=sys.stderr)") == "é 2\nx\n"
    assert run_python("") == ""


def test_an_error_is_shown_as_python_shows_it() -> None:
    shown = run_python("def f(x):\n    return 1 / x\n\nprint('begin')\nf(0)")
    assert shown == (
        'begin\nTraceback (most recent call last):\n  File "<code>", line 5, in <module>\n    f(0)\n'
        '  File "<code>", line 2, in f\n    return 1 / x\n           ~~^~~\nZeroDivisionError: division by zero\n'
        "[exit code 1]"
    )
    assert "SyntaxError: '(' was never closed\n[exit code 1]" in run_python("x = (")


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import sys; sys.exit(0)", ""),
        ("import sys; sys.exit(3)", "[exit code 3]"),
        ("import sys; sys.exit('no')", "no\n[exit code 1]"),
        ("import os; os._exit(7)", "[exit code 7]"),
        ("import os, signal; print('a', end=''); os.kill(os.getpid(), signal.SIGTERM)", "[ended by SIGTERM]"),
        ("import os; os.abort()", "[ended by SIGABRT]"),
        ("import os; os.kill(os.getpid(), 40)", "[ended by signal 40]"),
        ("input()", "EOFError: EOF when reading a line\n[exit code 1]"),
        ("raise KeyboardInterrupt", "[ended by SIGINT]"),
        ("print('\\ud800')", "\\ud800\n"),
    ],
)
def test_how_it_ended_is_said(code: str, ending: str) -> None:
    assert run_python(code).endswith(ending)
    assert ("[" in run_python(code)) == ("[" in ending)


def test_the_standard_library_works() -> None:
    code = """
import asyncio, base64, bisect, collections, copy, csv, dataclasses, datetime, decimal, enum, fractions, functools
import hashlib, heapq, io, itertools, json, math, operator, pathlib, pickle, queue, random, re, secrets, sqlite3
import statistics, string, struct, tempfile, textwrap, threading, time, types, typing, unicodedata, uuid, zlib
thread = threading.Thread(target=print, args=("thread",))
thread.start(); thread.join()
print(asyncio.run(asyncio.sleep(0.01, "loop")))
print(sqlite3.connect(":memory:").execute("select 1 + 1").fetchone())
with tempfile.TemporaryFile(dir=".") as file:
    file.write(b"x"); file.seek(0); print(file.read())
pathlib.Path("folder").mkdir(); pathlib.Path("folder/a").write_text("b"); print(pathlib.Path("folder/a").read_text())
pathlib.Path("folder/a").rename("c"); print(sorted(str(p) for p in pathlib.Path(".").iterdir()))
time.sleep(0.01)

@dataclasses.dataclass
class Point:
    x: int

print(pickle.loads(pickle.dumps(Point(1))), __name__)
"""
    expected = "thread\nloop\n(2,)\nb'x'\nb\n['c', 'folder']\nPoint(x=1) __main__\n"
    assert run_python(code) == expected


def test_each_run_is_new_and_sees_nothing_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    code = "import os, sys; print(dict(os.environ), os.listdir('.'), sys.argv); open('left', 'w').close(); x = 1"
    assert run_python(code) == "{} [] ['code']\n"
    assert run_python(code) == "{} [] ['code']\n"
    assert "NameError" in run_python("print(x)")
    assert "No module named 'torch'" in run_python("import torch")
    assert "Permission denied" in run_python(f"open('/proc/{os.getpid()}/environ').read()")
    assert "s3cret" not in run_python("print(open('/proc/self/environ').read())")


def test_sets_have_one_order_in_every_run() -> None:
    assert len({run_python("print({'a', 'b', 'c', 'd', 'e'})") for _ in range(4)}) == 1


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os, time; os.close(1); os.close(2); time.sleep(60)",
        "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import atexit, time; atexit.register(time.sleep, 60)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        "import sys; sys.set_int_max_str_digits(0); print(10**10**9)",
        "import re; re.match('(a+)+b', 'a' * 60)",
    ],
)
def test_time_is_limited(code: str) -> None:
    assert run_python("print('begun')\n" + code, seconds=0.4) == "begun\n[stopped after 0.4 s]"


def test_processor_time_is_limited_too(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("while True: pass")
    with open(os.devnull, "w") as nowhere:
        asked = {"processor": 1, "memory": 2**30, "file_size": 2**20, "unenforced": [], "status": nowhere.fileno()}
        done = subprocess.run(
            [sys.executable, confined.__file__, json.dumps(asked)],
            cwd=tmp_path,
            timeout=60,
            check=False,
            pass_fds=[nowhere.fileno()],
        )
    assert done.returncode == -signal.SIGXCPU
    assert sandbox._ending(-signal.SIGXCPU, sandbox._Asked(1.0, 1, 1, 1, ())) == "[stopped after 1 s of processor time]"


@pytest.mark.parametrize("code", ["x = bytearray(10**9)", "x = []\nwhile True: x.append('x' * 10**6)"])
def test_memory_is_limited(code: str) -> None:
    assert run_python(code).endswith("MemoryError\n[exit code 1]")
    assert run_python("x = bytearray(50 * 10**6); print(len(x))", memory=2**28) == "50000000\n"


def test_output_is_limited() -> None:
    shown = run_python("while True: print('x' * 100)", output=1000)
    assert shown == ("x" * 100 + "\n") * 9 + "x" * 91 + "\n[stopped: it printed more than 1000 bytes]"
    assert run_python("print('x' * 999)", output=1000) == "x" * 999 + "\n"
    assert "more than 10 bytes" in run_python("import os\nwhile True: os.write(2, bytes(65536))", output=10)
    assert run_python("print('é' * 8)", output=5).startswith("éé�")


def test_no_process_is_started() -> None:
    for code in (
        "import os; os.fork()",
        "import os\nwhile True: os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.forkpty()",
    ):
        assert last(run_python(code)).startswith(("PermissionError", "OSError")), code
    assert run_python("import os; print(os.system('true') == 0)") == "False\n"
    assert "PermissionError" in run_python("import multiprocessing as m; m.get_context('fork').Process().start()")


@pytest.mark.parametrize("mode", ["w", "a", "x", "r+"])
def test_no_file_outside_is_written(mode: str, tmp_path: Path) -> None:
    target = tmp_path / "outside"
    if mode == "r+":
        target.write_text("kept")
    assert "PermissionError" in run_python(f"open({str(target)!r}, {mode!r}).write('evil')")
    assert not target.exists() or target.read_text() == "kept"


def test_nothing_outside_is_changed(tmp_path: Path) -> None:
    target = tmp_path / "outside"
    target.write_text("kept")
    target.chmod(0o640)
    before = target.stat()
    for call in (
        f"os.unlink({str(target)!r})",
        f"os.rename({str(target)!r}, 'mine')",
        f"os.rename('mine', {str(target)!r})",
        f"os.truncate({str(target)!r}, 0)",
        f"os.open({str(target)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.chmod({str(target)!r}, 0o777)",
        f"os.chown({str(target)!r}, 1, 1)",
        f"os.utime({str(target)!r}, (0, 0))",
        f"os.setxattr({str(target)!r}, 'user.a', b'b')",
        f"os.mkdir({str(tmp_path / 'new')!r})",
        f"os.symlink('/', {str(tmp_path / 'new')!r})",
        f"os.mkfifo({str(tmp_path / 'new')!r})",
        f"os.link({str(target)!r}, 'mine')",
        f"os.rmdir({str(tmp_path)!r})",
    ):
        assert last(run_python(f"import os\n{call}")).split(":")[0] in (
            "PermissionError",
            "OSError",
            "FileNotFoundError",
        )
    after = target.stat()
    assert (target.read_text(), after.st_mode, after.st_uid, after.st_mtime_ns, after.st_nlink) == (
        ("kept", before.st_mode, before.st_uid, before.st_mtime_ns, before.st_nlink)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


def test_a_file_of_python_is_not_emptied_by_opening_it() -> None:
    code = "import os, random; os.open(random.__file__, os.O_RDONLY | os.O_TRUNC)"
    assert "PermissionError" in run_python(code)
    assert Path(random.__file__).stat().st_size > 1000


def test_no_file_outside_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    for code in (
        f"print(open({str(secret)!r}).read())",
        f"import os; os.symlink({str(secret)!r}, 'link'); print(open('link').read())",
        f"import os; os.chdir({str(tmp_path)!r}); print(open('secret').read())",
        "print(open('../secret').read())",
        f"import os; print(os.listdir({str(tmp_path)!r}))",
        "print(open('/etc/passwd').read())",
        f"print(open({str(Path(pytest.__file__))!r}).read())",
        f"print(open({str(Path(sandbox.__file__))!r}).read())",
        f"import sqlite3; print(sqlite3.connect({str(secret)!r}).execute('select * from sqlite_master').fetchall())",
    ):
        shown = run_python(code)
        assert "s3cret" not in shown
        assert last(shown).split(":")[0] in ("PermissionError", "sqlite3.OperationalError"), code


def test_packages_that_are_installed_in_python_are_not_read() -> None:
    """Such as a task's own, with its answers."""
    folder = Path(os.__file__).parent / "site-packages"
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else []
    if not files:
        pytest.skip("this Python has no packages of its own")
    assert "PermissionError" in run_python(f"print(open({str(files[0])!r}).read())")


def test_files_are_limited_in_size() -> None:
    code = "file = open('a', 'wb', 0)\nwhile True: file.write(bytes(1000))"
    assert last(run_python(code, file_size=5000)) == "OSError: [Errno 27] File too large"
    assert "Too many open files" in run_python("x = [open('a', 'w') for _ in range(100)]")


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as drop:
        drop.bind(("127.0.0.1", 0))
        port, datagrams = listener.getsockname()[1], drop.getsockname()[1]
        for code in (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
            f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {datagrams}))",
            "import socket; socket.socket(socket.AF_UNIX)",
            "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}')",
            "import ctypes; raise PermissionError(ctypes.CDLL(None).socket(2, 1, 0))",
        ):
            assert "PermissionError" in run_python(code) or "Operation not permitted" in run_python(code), code
        assert select.select([listener, drop], [], [], 0) == ([], [], [])
    assert run_python("import socket; a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))") == "b'x'\n"


def test_this_process_gets_no_signal() -> None:
    heard: list[int] = []
    watched = (signal.SIGTERM, signal.SIGIO, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda found, _: heard.append(found)) for number in watched}
    parent = os.getpid()
    try:
        for code in (
            f"import os; os.kill({parent}, 15)",
            "import os; os.kill(os.getppid(), 15)",
            f"import os; os.killpg(os.getpgid({parent}), 15)",
            "import os; os.kill(-1, 10)",
            "import os; os.kill(0, 15)",
            f"import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {parent})",
            f"import fcntl, struct; fcntl.ioctl(1, 0x8901, struct.pack('i', {parent}))",
            f"import os, signal; signal.pidfd_send_signal(os.pidfd_open({parent}), 15)",
            f"import resource; resource.prlimit({parent}, resource.RLIMIT_CORE, (0, 0))",
            f"import os; os.setpriority(os.PRIO_PROCESS, {parent}, 19)",
            f"import os; os.sched_setaffinity({parent}, [0])",
        ):
            assert last(run_python(code)).startswith(("PermissionError", "OSError", "ProcessLookup")), code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == []


@pytest.mark.parametrize(
    "call",
    [
        "ptrace",
        "process_vm_readv",
        "mount",
        "unshare",
        "bpf",
        "io_uring_setup",
        "memfd_create",
        "setuid",
        "keyctl",
        "prctl",
    ],
)
def test_system_calls_that_no_program_needs_are_refused(call: str) -> None:
    numbers = {"ptrace": 101, "process_vm_readv": 310, "mount": 165, "unshare": 272, "bpf": 321, "io_uring_setup": 425}
    numbers |= {"memfd_create": 319, "setuid": 105, "keyctl": 250, "prctl": 157}
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86-64")
    code = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(%d, 0, 0, 0, 0), ctypes.get_errno())"
    assert run_python(code % numbers[call]) == "-1 1\n"


def test_the_limits_can_not_be_raised() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)"
    assert "not allowed" in run_python(code) or "PermissionError" in run_python(code)


def test_any_folder_is_removed() -> None:
    code = """
import os
os.symlink("/etc", "link")
os.mkdir("closed", 0)
os.makedirs("b/c"); open("b/c/d", "w").close(); open("b/-rf", "w").close()
for _ in range(1050):
    os.mkdir("a"); os.chdir("a")
open("end", "w").close()
"""
    assert run_python(code) == ""
    assert Path("/etc").is_dir()


def test_a_child_that_stays_behind_where_nothing_forbids_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(tempfile.mkdtemp()) / "confined.py"
    text = Path(confined.__file__).read_text(encoding="utf-8")
    program.write_text(
        text.replace(
            "def limit_system_calls() -> None:", "def limit_system_calls() -> None:\n    raise OSError('not here')"
        )
    )
    monkeypatch.setattr(sandbox, "_CONFINED", program)
    with pytest.raises(RuntimeError, match="network and processes: not here"):
        run_python("print(1)")
    with pytest.raises(RuntimeError, match="network and processes: not here"):
        python_tool(unenforced=["network"])
    code = "import os, time\npid = os.fork()\nif pid: print(pid)\nelse: time.sleep(60)"
    child = int(run_python(code, unenforced=["network", "processes"]))
    assert has_ended(child)


def test_files_that_can_not_be_confined_are_an_error_unless_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(tempfile.mkdtemp()) / "confined.py"
    text = Path(confined.__file__).read_text(encoding="utf-8")
    program.write_text(text.replace('"Landlock", 444, None', '"Landlock", 99999, None'))
    monkeypatch.setattr(sandbox, "_CONFINED", program)
    with pytest.raises(RuntimeError, match=r"files: .*Landlock: Function not implemented\n  hint: name what may"):
        python_tool()
    assert run_python("print(open('/etc/passwd').read() != '')", unenforced=["files"]) == "True\n"


def test_an_interpreter_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="it did not start"):
        run_python("print(1)")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        run_python("print(1)")


@pytest.mark.parametrize(
    "options", [{"seconds": 0}, {"seconds": float("inf")}, {"memory": 0}, {"output": 0}, {"unenforced": "files"}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        run_python("", **options)


def test_the_tool_answers_many_rows() -> None:
    async def main() -> list[str]:
        async with Toolbox([python_tool(seconds=2, at_once=2)]) as box:
            calls = [ToolCall("python", {"code": f"print({n} ** 2)"}) for n in range(6)]
            return [message["content"] for message in await box.run([*calls, ToolCall("python", {})], EPISODE)]

    *squares, fault = asyncio.run(main())
    assert squares == [f"{n * n}\n" for n in range(6)]
    assert fault == "error: python can not take these arguments: code: Field required"


def has_ended(pid: int) -> bool:
    """Wait for a process that is to end; a zombie has."""
    for _ in range(1000):
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_a_call_that_is_late_is_ended_and_one_that_waits_never_begins() -> None:
    async def main() -> list[str]:
        async with Toolbox([python_tool(seconds=60, at_once=1)], timeout=0.5) as box:
            calls = [ToolCall("python", {"code": "import time; time.sleep(60)"})] * 3
            answers = [message["content"] for message in await box.run(calls, EPISODE)]
            assert all(has_ended(pid) for pid in children_of(os.getpid()))
            quick = await Toolbox(list(box.tools.values()), timeout=30).run([ToolCall("python", {"code": ""})], EPISODE)
            return [*answers, quick[0]["content"]]

    assert asyncio.run(main()) == ["error: timed out after 0.5 s"] * 3 + [""]


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    program = "from ramet.tools import run_python; run_python('import time; time.sleep(60)', seconds=60)"
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(elsewhere)}) as parent:
        child = None
        while child is None:
            assert parent.poll() is None
            for pid in children_of(parent.pid):
                with contextlib.suppress(OSError):
                    if "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text():
                        child = pid
            time.sleep(0.01)
        parent.kill()
        assert has_ended(child)


def test_no_file_is_left_open() -> None:
    folder = f"/proc/{os.getpid()}/fd"
    before = len(os.listdir(folder))
    for code in ("print(1)", "1 / 0", "while True: print(1)"):
        run_python(code, output=100)
    assert len(os.listdir(folder)) == before


def test_the_numbers_of_system_calls_are_those_of_this_machine() -> None:
    """A few whose numbers are known from elsewhere."""
    table = {entry.split()[0]: entry.split()[1:] for entry in confined.SYSTEM_CALLS.replace("\n", " ").split(",")}
    assert (table["read"], table["openat"], table["clone"], table["fork" if "fork" in table else "exit"]) == (
        (["0", "63"], ["257", "56"], ["56", "220"], ["60", "93"])
    )
    forbidden = {
        "fork",
        "vfork",
        "execve",
        "execveat",
        "socket",
        "connect",
        "bind",
        "ptrace",
        "chmod",
        "truncate",
        "link",
    }
    assert forbidden.isdisjoint(table)
