"""A function that is called in processes of their own: it holds up nobody, and can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, MutableSet, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]

from ramet.concurrency.calls import by_threads
from ramet.concurrency.clock import standing
from ramet.concurrency.threads import Threads
from ramet.concurrency.worker import Answer

START = 120.0
"""How many seconds a process may take to begin, which imports what the function needs."""

_WORKER = Path(__file__).with_name("worker.py")


class NotLoaded(Exception):
    """The function can not be pickled, or not be loaded in another process."""


class Processes:
    """Call `function` with one argument at a time in up to `count` Python processes, from any event loop.

    They are started when they are needed: new interpreters, which run neither the user's main script nor anything but
    what the function imports. The function goes there as it is at the start, by cloudpickle: what belongs to an
    importable module is imported there, and everything else (lambdas, closures, what a script, a notebook or a file
    that was loaded by its path defines) is copied. A call that is cancelled ends its process, which the next call
    replaces. `name` is what errors call the function; `imports` are modules that the function imports itself, and that
    a process has before the first call.

    `close` ends the processes; they end with this object, and with Python, too. Raises `NotLoaded`.

    >>> doubling = Processes(lambda number: 2 * number, 1)
    >>> asyncio.run(doubling.call(doubling.pickled(21)))
    42
    >>> doubling.close()
    """

    def __init__(
        self, function: Callable[[Any], Any], count: int, name: str = "the function", imports: Sequence[str] = ()
    ) -> None:
        if count < 1:
            raise ValueError(f"there must be at least 1 process: found {count}")
        self._name, self._imports = name, tuple(imports)
        self._copied = _strangers()
        try:
            self._function = self.pickled(function)
        except Exception as error:  # whatever a __reduce__ raises
            raise NotLoaded(f"{name} can not be handed to another process: {_shown(error)}") from error
        self._threads = Threads(count, "ramet process")
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[_Process] = []
        self._open: set[_Process] = set()
        self._end = weakref.finalize(self, _end_all, self._open)

    def pickled(self, value: Any) -> bytes:
        """Return `value` as the processes read it; raise what its pickling raises."""
        with _by_value(self._copied):
            return cast("bytes", cloudpickle.dumps(value))

    async def call(self, argument: bytes) -> Any:
        """Return what the function returns for what was pickled, or raise what it raises.

        The time until a process is free and has begun does not count for a `Clock`. Raises `RuntimeError` where the
        process ends meanwhile.
        """
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[None] = loop.create_future()
        visit = _Visit(partial(loop.call_soon_threadsafe, _set, begun))
        work = asyncio.ensure_future(by_threads(self._threads)(partial(self._visited, visit, argument)))
        work.add_done_callback(_heard)
        try:
            with standing():
                waiting: set[asyncio.Future[Any]] = {work, begun}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return _value(await work)
        finally:
            visit.stop()
            work.cancel()

    def close(self) -> None:
        """End the processes, and the calls that they are at."""
        with self._lock:
            self._closed = True
        self._end()
        self._threads.shutdown()

    def _visited(self, visit: _Visit, argument: bytes) -> Answer:
        """Have a process answer; it stays for others unless it has ended, or must."""
        if visit.stopped:
            raise RuntimeError(f"the call of {self._name} was given up")
        process, stays = self._take(), False
        try:
            visit.enter(process)
            process.begin(self._imports, self._function)
            visit.begun()
            answer = process.ask(argument)
            stays = visit.leave()
            return answer
        except _Ended as error:
            raise RuntimeError(
                f"{self._name} was closed" if self._closed else f"the process of {self._name} {error}"
            ) from None
        finally:
            self._give_back(process, stays)

    def _take(self) -> _Process:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} was closed")
            while self._idle:
                process = self._idle.pop()
                if process.lives():
                    return process
                self._open.discard(process)
                process.end()
            process = _Process()
            self._open.add(process)
            return process

    def _give_back(self, process: _Process, stays: bool) -> None:
        with self._lock:
            if stays and not self._closed:
                self._idle.append(process)
                return
            self._open.discard(process)
        process.end()


class _Visit:
    """One call at its process, which may be stopped at any time."""

    def __init__(self, begun: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self.stopped = False
        self._begun = begun

    def enter(self, process: _Process) -> None:
        with self._lock:
            if self.stopped:
                raise _Ended("was not asked: the call was given up")
            self._process = process

    def begun(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._begun()

    def leave(self) -> bool:
        """Return whether the process may stay."""
        with self._lock:
            self._process = None
            return not self.stopped

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            if self._process is not None:
                self._process.kill()


class _Ended(Exception):
    """A process has ended, or gives no answer."""


class _Process:
    """An interpreter that runs `worker`: it is spoken to by one thread at a time, and may be ended by any."""

    def __init__(self) -> None:
        # In a session of its own: Ctrl-C is for whoever waits, and what it starts is ended with it.
        self._popen = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._begun = False
        self._life = threading.Lock()
        self._talk = threading.Lock()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def lives(self) -> bool:
        with self._life:
            return self._popen.poll() is None

    def begin(self, imports: tuple[str, ...], function: bytes) -> None:
        """Hand over the function, once; raise `NotLoaded` where it can not be loaded."""
        if self._begun:
            return
        self._write(list(sys.path), imports, function)
        assert self._popen.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            if not selector.select(START):
                raise _Ended(f"did not begin within {START:g} s")
        loaded, _, kind, text, _ = self._read()
        if not loaded:
            raise NotLoaded(f"it can not be loaded in another process: {kind}: {text}")
        self._begun = True

    def ask(self, argument: bytes) -> Answer:
        """Return the answer."""
        self._write(argument)
        return self._read()

    def _write(self, *values: Any) -> None:
        assert self._popen.stdin is not None
        with self._talk:
            try:
                for value in values:
                    pickle.dump(value, self._popen.stdin)
                self._popen.stdin.flush()
            except (OSError, ValueError):  # a pipe that is broken, or closed
                raise self._ended() from None

    def _read(self) -> Answer:
        assert self._popen.stdout is not None
        with self._talk:
            try:
                return cast("Answer", pickle.load(self._popen.stdout))
            except (EOFError, OSError, ValueError, pickle.UnpicklingError):
                raise self._ended() from None

    def _ended(self) -> _Ended:
        self.kill()  # it may have closed its pipes and go on
        with self._life:
            code = self._popen.wait()
        if code >= 0:
            return _Ended(f"ended with exit code {code}")
        with contextlib.suppress(ValueError):  # a real-time signal
            return _Ended(f"was ended by {signal.Signals(-code).name}")
        return _Ended(f"was ended by signal {-code}")

    def kill(self) -> None:
        """End it and what it has started; whoever talks to it is told."""
        with self._life:
            if self._popen.returncode is None:  # till it is waited for, its number is its own
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """End it, wait for it, and close its pipes."""
        self.kill()
        with self._life:
            self._popen.wait()
        if self._talk.acquire(timeout=5):  # whoever talks to it has been told by now
            for pipe in (self._popen.stdin, self._popen.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # what was not written yet goes nowhere
                    pipe.close()
            self._talk.release()


def _end_all(processes: MutableSet[_Process]) -> None:
    for process in list(processes):
        process.end()


def _heard(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()  # nobody may be waiting for it any more


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _value(answer: Answer) -> Any:
    """Return the value of an answer, or raise the error: where that can not be had, one of its name and text."""
    returned, data, kind, text, late = answer
    if returned:
        assert data is not None
        return pickle.loads(data)
    error = None
    if data is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(data)
            if type(error).__name__ != kind or str(error) != text:
                error = None
    raise error or type(kind, (TimeoutError if late else RuntimeError,), {})(text)


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------- what is imported, and what is copied


def _strangers() -> list[ModuleType]:
    """Return the modules that another process could not import, such as a file that was loaded by its path."""
    known: dict[str, bool] = {"__main__": True}  # cloudpickle copies it anyhow
    found = []
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root not in known:
            known[root] = root in sys.stdlib_module_names or _is_found(root)
        if not known[root] and isinstance(module, ModuleType) and module.__name__ == name:
            found.append(module)
    return found


def _is_found(root: str) -> bool:
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # some know modules of their own alone
            if finder.find_spec(root, None) is not None:
                return True
    return False


_registering = threading.Lock()


@contextlib.contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Have cloudpickle copy what is defined in `modules`."""
    with _registering:
        known = cloudpickle.list_registry_pickle_by_value()
        own = [module for module in modules if module.__name__ in sys.modules and module.__name__ not in known]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)
