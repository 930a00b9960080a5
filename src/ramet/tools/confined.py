"""Run code under limits that the kernel keeps: the inside of the process that `run_python` starts.

It imports nothing of ramet: it runs as a script, in an interpreter without site packages. First the process gives up
what the code must not have, for good; then it says so through the file descriptor that it was given; then it runs the
code. What can not be given up on this machine is an error, unless it may be left out.
"""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

# What a Python program needs of the kernel: name, number on x86-64, number on 64-bit ARM.
SYSTEM_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
close 3 57, close_range 436 436, lseek 8 62, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291,
fstatfs 138 44, statfs 137 43, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78,
getcwd 79 17, chdir 80 49, fchdir 81 50, getdents 78 -, getdents64 217 61, mkdir 83 -, mkdirat 258 34, rmdir 84 -,
unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, symlink 88 -, symlinkat 266 36,
ftruncate 77 46, fsync 74 82, fdatasync 75 83, flock 73 32, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -,
pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, sendto 44 206, recvfrom 45 207,
sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockopt 55 209, setsockopt 54 208, getsockname 51 204,
getpeername 52 205, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, sigaltstack 131 132,
restart_syscall 219 128, pause 34 -, futex 202 98, set_robust_list 273 99, rseq 334 293, set_tid_address 218 96,
exit 60 93, exit_group 231 94, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
nanosleep 35 101, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, alarm 37 -, setitimer 38 103,
getitimer 36 102, sched_yield 24 124, sched_getaffinity 204 123, getpid 39 172, gettid 186 178, getppid 110 173,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148,
getresgid 120 150, getpgrp 111 -, getpgid 121 155, getsid 124 156, uname 63 160, sysinfo 99 179, getrandom 318 278,
wait4 61 260, waitid 247 95, umask 95 166, membarrier 324 283, getcpu 309 168, sendfile 40 71,
copy_file_range 326 285, fadvise64 221 223, getrlimit 97 163, open 2 -, openat 257 56, clone 56 220, clone3 435 435,
kill 62 129, tgkill 234 131, prlimit64 302 261, socketpair 53 199, fcntl 72 25, ioctl 16 29
"""
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050001, 0x00050026  # allow, EPERM, ENOSYS (then the C library tries clone)
_CAPABILITIES = {"x86_64": 126, "aarch64": 91}

# Landlock's rights, bit by bit: https://docs.kernel.org/userspace-api/landlock.html
_EXECUTE, _WRITE, _READ, _LIST, _REFER, _TRUNCATE, _DEVICES = (1 << bit for bit in (0, 1, 2, 3, 13, 14, 15))
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICES

libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _system_call(what: str, number: int, *arguments: Any) -> int:
    values = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(what, libc.syscall(ctypes.c_long(number), *values))


def limit_resources(asked: Mapping[str, Any]) -> None:
    """Limit memory, processor time, the size of a file, open files; leave no core behind."""
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (asked["processor"], asked["processor"] + 1),
        resource.RLIMIT_FSIZE: (asked["file_size"], asked["file_size"]),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_AS: (asked["memory"], asked["memory"]),
    }
    for kind, pair in limits.items():
        resource.setrlimit(kind, pair)


def give_up_privileges() -> None:
    """Drop every capability, gain none, and end with the thread that started this process."""
    _checked("PR_SET_PDEATHSIG", libc.prctl(1, signal.SIGKILL, 0, 0, 0))
    _checked("PR_SET_NO_NEW_PRIVS", libc.prctl(38, 1, 0, 0, 0))
    machine = os.uname().machine
    if machine in _CAPABILITIES:
        header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
        _system_call("capset", _CAPABILITIES[machine], header, ctypes.create_string_buffer(24))


def limit_files(folder: str) -> None:
    """Let the process read Python and its libraries, write in `folder`, and see no other file, by Landlock."""
    abi = _system_call("Landlock", 444, None, 0, 1)
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    network, scoped = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("=QQQ", handled, network, scoped)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _system_call("Landlock", 444, ctypes.create_string_buffer(attributes), len(attributes), 0)
    for path, rights in [(folder, handled), *_readable()]:
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this machine
            continue
        here = rights & handled & (-1 if os.path.isdir(path) else _OF_FILES)
        _system_call("Landlock", 445, rules, 1, ctypes.create_string_buffer(struct.pack("=Qi", here, handle)), 0)
        os.close(handle)
    _system_call("Landlock", 446, rules, 0)
    os.close(rules)


def _readable() -> Iterator[tuple[str, int]]:
    """Yield what Python reads while it runs, without the packages that are installed in it."""
    library = os.path.dirname(os.__file__)
    yield library, _LIST
    for entry in os.scandir(library):
        if entry.name not in ("site-packages", "dist-packages"):
            yield entry.path, _READ | _LIST
    places = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", os.path.join(sys.base_prefix, "lib")]
    for place in filter(os.path.isdir, places):
        multiarch = os.path.join(place, f"{os.uname().machine}-linux-gnu")
        if os.path.isdir(multiarch):
            yield multiarch, _READ
        yield from ((entry.path, _READ) for entry in os.scandir(place) if ".so" in entry.name)
    for path in ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom"):
        yield path, _READ
    yield "/dev/null", _READ | _WRITE | _TRUNCATE


def limit_system_calls() -> None:
    """Refuse every system call but those of a program alone: no network, no new process, no signal to another."""
    machine = os.uname().machine
    if machine not in AUDIT or sys.byteorder != "little":
        raise OSError(f"the system calls of {machine} are not known here")
    column = 1 if machine == "x86_64" else 2
    entries = [entry.split() for entry in SYSTEM_CALLS.replace("\n", " ").split(",")]
    numbers = {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}
    rules = _conditions(os.getpid())
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, AUDIT[machine]), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    for name, number in numbers.items():
        rule = rules.get(name, [(_RETURN, 0, 0, _ALLOW)])
        program += [(_EQUAL, 0, len(rule), number), *rule]
    program.append((_RETURN, 0, 0, _REFUSE))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("=H6xQ", len(program), ctypes.addressof(code)))
    _checked("seccomp", libc.prctl(22, 2, header, 0, 0))


def _conditions(me: int) -> dict[str, list[tuple[int, int, int, int]]]:
    """Return what the system calls that depend on their arguments may be given, as a program each."""

    def argument(number: int, high: int = 0) -> tuple[int, int, int, int]:
        return (_LOAD, 0, 0, 16 + 8 * number + 4 * high)

    def one_of(values: list[int]) -> list[tuple[int, int, int, int]]:
        tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
        return [*tests, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]

    def no_truncation(number: int) -> list[tuple[int, int, int, int]]:  # of a file that is opened to be read
        test = [argument(number), (_AND, 0, 0, os.O_ACCMODE | os.O_TRUNC), (_EQUAL, 0, 1, os.O_TRUNC)]
        return [*test, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]

    nothing = [argument(2), (_EQUAL, 0, 2, 0), argument(2, 1), *one_of([0])]
    # A pair of streams: a datagram socket could send to any address.
    pair = [argument(0), (_EQUAL, 1, 0, 1), (_RETURN, 0, 0, _REFUSE), argument(1), (_AND, 0, 0, 15), *one_of([1])]
    return {
        "open": no_truncation(1),
        "openat": no_truncation(2),
        "clone": [argument(0), (_AND, 0, 0, 0x10000), *one_of([0x10000])],  # a thread, and no process
        "clone3": [(_RETURN, 0, 0, _UNKNOWN)],
        "kill": [argument(0), *one_of([me])],
        "tgkill": [argument(0), *one_of([me])],
        "prlimit64": nothing,  # which may read limits
        "socketpair": pair,
        # Not F_SETOWN and F_SETSIG, by which the kernel sends signals to others.
        "fcntl": [argument(1), *one_of([0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032])],
        "ioctl": [argument(1), *one_of([0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])],
    }


def confine(asked: Mapping[str, Any]) -> None:
    """Take every limit; raise `OSError`, which names what is not to be had, unless it is in `asked["unenforced"]`."""
    linux = sys.platform == "linux"
    steps = {
        ("memory",): lambda: limit_resources(asked),
        (): give_up_privileges if linux else lambda: None,
        ("files",): lambda: limit_files(os.getcwd()),
        ("network", "processes"): limit_system_calls,
    }
    for names, step in steps.items():
        try:
            if not linux and names not in ((), ("memory",)):
                raise OSError(f"there is no way known on {sys.platform}")
            step()
        except (OSError, ValueError) as error:
            if not set(names) <= set(asked["unenforced"]) or not names:
                raise OSError(f"{' and '.join(names) or 'privileges'}: {error}") from error


def main() -> None:
    """Read what is asked of the arguments, take the limits, say so, and run the code."""
    asked = json.loads(sys.argv[1])
    with open("code.py", encoding="utf-8") as file:
        code = file.read()
    os.unlink("code.py")
    try:
        confine(asked)
        said = "confined"
    except OSError as error:
        said = str(error)
    os.write(asked["status"], said.encode())
    os.close(asked["status"])
    if said == "confined":
        _run(code)


def _run(code: str) -> None:
    os.environ.clear()
    sys.argv[:] = ["code"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    linecache.cache["<code>"] = (len(code), None, code.splitlines(True), "<code>")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(code, "<code>", "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        sys.exit(1)


if __name__ == "__main__":
    main()
