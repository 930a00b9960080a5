"""A function in processes: no script is run again, nothing is imported in vain, and everything ends with Python."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.concurrency.ends import gone, there

from ramet.concurrency import NotLoaded, Processes


def run_script(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


SCRIPT = """
import sys
import asyncio
from ramet.concurrency import Processes
from ramet.types import Sample, StopReason
print("the script runs")
WORDS = {"four"}
class State:
    right = "4"
def helper(text):
    return text in WORDS
def score(sample):
    assert isinstance(sample.state, State)
    return {"torch": "torch" in sys.modules, "right": sample.completion == sample.state.right, "word": helper("four")}
processes = Processes(score, 1)
given = Sample("2+2=", "4", (1,), (2,), {}, StopReason.EOS, group=0, member=0, state=State())
print(asyncio.run(processes.call(processes.pickled(given))))
"""


def test_a_script_without_a_guard_is_not_run_again_and_nothing_is_imported_in_vain(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = run_script(tmp_path / "script.py")  # nobody closes: it ends in silence all the same
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["the script runs", "{'torch': False, 'right': True, 'word': True}"]


ENDING = """
import asyncio, contextlib, sys, threading, time
from pathlib import Path
from ramet.concurrency import Processes
path = sys.argv[1]
def score_of(path):
    def score(argument):
        import os, re
        with open(path + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(path + ".new", path)
        re.match(r"(a+)+$", "a" * 40 + "b")
    return score
processes = Processes(score_of(path), 1)
async def main():
    with contextlib.suppress(RuntimeError):  # that the process was ended, where there is time to say so
        await processes.call(processes.pickled(None))
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
while not Path(path).exists():
    time.sleep(0.005)
if sys.argv[2] == "wait":
    time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_processes_end_with_python_whatever_they_do(tmp_path: Path, how: str) -> None:
    script, flag = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(ENDING, encoding="utf-8")
    if how == "end":
        done = run_script(script, str(flag), "end")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    elif not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells a process that computes that the other is gone")
    else:
        program = subprocess.Popen([sys.executable, str(script), str(flag), "wait"])
        there(flag)
        program.kill()
        program.wait()
    assert gone(int(flag.read_text()))


def test_a_number_of_processes_must_make_sense() -> None:
    with pytest.raises(ValueError, match="at least 1 process: found 0"):
        Processes(len, 0)


def test_a_function_that_can_not_be_pickled_or_loaded_is_refused() -> None:
    with pytest.raises(NotLoaded, match="mine can not be handed to another process: TypeError: cannot pickle"):
        Processes(sys.stdout.write, 1, "mine")
    processes = Processes(_Elsewhere(), 1)
    with pytest.raises(NotLoaded, match="can not be loaded in another process: ZeroDivisionError"):
        asyncio.run(processes.call(processes.pickled(1)))
    assert not processes._open
    processes.close()


class _Elsewhere:
    def __reduce__(self) -> tuple[object, ...]:
        return (divmod, (1, 0))

    def __call__(self, argument: object) -> None:
        raise AssertionError("unreachable")


def test_what_a_process_has_done_stays_there() -> None:
    seen: list[int] = []

    def note(number: int) -> list[int]:
        seen.append(number)
        return seen

    async def main() -> list[list[int]]:
        return [await processes.call(processes.pickled(number)) for number in range(3)]

    processes = Processes(note, 1)
    assert asyncio.run(main()) == [[0], [0, 1], [0, 1, 2]]
    assert seen == []
    processes.close()


def test_a_call_that_is_given_up_before_its_turn_ends_no_process(tmp_path: Path) -> None:
    begun, released = tmp_path / "begun", tmp_path / "released"

    def wait(name: str) -> int:
        import os
        import pathlib
        import time

        if name:
            pathlib.Path(name).touch()
            while not released.exists():
                time.sleep(0.005)
        return os.getpid()

    async def main() -> tuple[int, int]:
        first = asyncio.ensure_future(processes.call(processes.pickled(str(begun))))
        await asyncio.to_thread(there, begun)
        second = asyncio.ensure_future(processes.call(processes.pickled("")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        released.touch()
        return await first, await processes.call(processes.pickled(""))

    processes = Processes(wait, 1)
    one, other = asyncio.run(main())
    assert one == other
    processes.close()


def test_what_a_function_imports_is_there_before_it_is_called() -> None:
    def imported(name: str) -> bool:
        import sys

        return name in sys.modules

    async def main() -> list[bool]:
        return [await processes.call(processes.pickled(name)) for name in ("colorsys", "chunk", "ramet")]

    processes = Processes(imported, 1, imports=["colorsys"])
    assert asyncio.run(main()) == [True, False, False]
    processes.close()
