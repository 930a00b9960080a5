"""math-verify in a process of its own, for it can take for ever, and only a process can be stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import subprocess
import sys
import threading
import weakref

from ramet.errors import ConfigError

LONGEST = 1000
"""Characters of an answer that is still compared: a longer one is wrong."""

START = 60.0  # seconds that the process may take to begin, which imports sympy

# It runs on its own, so that it loads neither torch nor anything else of ramet.
_PROGRAM = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
def read(text):
    return parse("$" + text + "$", kinds, parsing_timeout=None) or parse(text, kinds, parsing_timeout=None)
answers, sys.stdout = sys.stdout, sys.stderr
print("ready", file=answers, flush=True)
for line in sys.stdin:
    right, found = json.loads(line)
    try:
        same = bool(verify(read(right), read(found), timeout_seconds=None))
    except Exception:
        same = False
    print(json.dumps(same), file=answers, flush=True)
"""


class Verifier:
    """Compare mathematical answers with math-verify; a comparison may take `seconds`.

    The process is started with the first comparison, and again after one that took too long, which ends it. It ends
    with this object, with `close`, or with Python. Comparisons of several threads wait for each other.

    Raises `ConfigError` without the package math-verify.

    >>> verifier = Verifier()
    >>> verifier.same("1/2", "0.5"), verifier.same("1/2", "2")
    (True, False)
    >>> verifier.close()
    """

    def __init__(self, seconds: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the task maths needs the package math-verify", hint="pip install 'ramet[tasks]'")
        self.seconds = seconds
        self._lock = threading.Lock()
        self._running: _Process | None = None

    def same(self, right: str, found: str) -> bool:
        """Return whether `found` says the same as `right`, both LaTeX or plain.

        What can not be read is not the same, nor is what has more than `LONGEST` characters. Raises `TimeoutError`
        where the comparison took too long.
        """
        if len(found) > LONGEST:
            return False
        with self._lock:
            if self._running is None:
                self._running = _Process()
            answer = self._running.ask(json.dumps([right, found]), self.seconds)
            if answer is None:
                self._running.end()
                self._running = None
                raise TimeoutError(f"math-verify took longer than {self.seconds:g} s for {found[:80]!r}")
        return answer == "true"

    def close(self) -> None:
        """End the process; a later comparison starts another."""
        with self._lock:
            if self._running is not None:
                self._running.end()
                self._running = None


class _Process:
    def __init__(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._process = process
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_pump, args=(process, self._lines), name="ramet verifier", daemon=True)
        thread.start()
        self.end = weakref.finalize(self, _end, process, thread)
        if self._line(START) != "ready":
            self.end()
            raise RuntimeError("math-verify can not be started in a process of its own")

    def ask(self, line: str, seconds: float) -> str | None:
        """Return the answer, or None where there was none in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._line(seconds)

    def _line(self, seconds: float) -> str | None:
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None


def _pump(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.strip())
    lines.put(None)


def _end(process: subprocess.Popen[str], thread: threading.Thread) -> None:
    process.kill()
    process.wait()
    thread.join()  # it ends with the output of the process
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not written yet goes nowhere
            pipe.close()
