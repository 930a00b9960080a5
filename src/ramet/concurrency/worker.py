"""The program of a process that calls one function again and again: see `processes`.

It is run by its path, and imports neither ramet nor anything else that the function does not need. On its standard
input it reads pickles: the module path, names of modules, the function, and one request after another; on its standard
output it writes one answer to each. What the function prints goes to the standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

Answer = tuple[bool, bytes | None, str, str, bool]
"""Whether it returned, what it returned or raised as a pickle, the error's name and text, whether it was a time-out."""


def main() -> None:
    """Serve until the input ends."""
    requests, answers = _streams()
    sys.path[:] = pickle.load(requests)
    try:
        for name in pickle.load(requests):
            importlib.import_module(name)
        function = pickle.loads(pickle.load(requests))
    except BaseException as error:  # for whoever waits
        _send(answers, _raised(error))
        return
    _send(answers, (True, None, "", "", False))
    while True:
        try:
            request = pickle.load(requests)
        except (EOFError, pickle.UnpicklingError):  # in the middle of a request where the other has died
            return
        with _ending_with(requests):
            answer = _answered(function, request)
        _send(answers, answer)


def _streams() -> tuple[BinaryIO, BinaryIO]:
    """Take the standard input and output for the talk with whoever started it, and leave others in their places."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, answers


def _send(answers: BinaryIO, answer: Answer) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        pickle.dump(answer, answers)
        answers.flush()


@contextlib.contextmanager
def _ending_with(requests: BinaryIO) -> Iterator[None]:
    """End this process if the one that started it dies meanwhile, whatever the function does: the kernel sees to it.

    On Linux the end of the input is then a signal that ends; elsewhere the process ends with its next request.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    import fcntl
    import select

    file = requests.fileno()
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_ASYNC)
    watch = select.poll()
    watch.register(file, select.POLLHUP)
    if watch.poll(0):  # it died before
        os._exit(1)
    try:
        yield
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)


def _answered(function: Callable[[Any], Any], request: bytes) -> Answer:
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    try:
        value = function(pickle.loads(request))
    except BaseException as error:  # for whoever waits, an exit included
        return _raised(error)
    try:
        return True, cloudpickle.dumps(value), "", "", False
    except Exception as error:
        kind = type(value).__name__
        text = f"it returned a {kind}, which can not be handed to another process: {type(error).__name__}: {error}"
        return _raised(TypeError(text))


def _raised(error: BaseException) -> Answer:
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    try:
        text = str(error)
    except Exception:  # an error that can not say what it is
        text = ""
    data: bytes | None
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)
    except BaseException:  # its name and its text are handed over alone
        data = None
    return False, data, type(error).__name__, text, isinstance(error, TimeoutError)


if __name__ == "__main__":
    main()
