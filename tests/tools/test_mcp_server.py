"""Tools of an MCP server: a real one over standard input and output, and ones that misbehave."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.concurrency.ends import children_of

pytest.importorskip("mcp")

from ramet.tools import MCPServer, Toolbox
from ramet.types import Episode, ToolCall

PROGRAM = str(Path(__file__).with_name("mcp_program.py"))
EPISODE = Episode({}, [], random.Random(0))


def ask(box: Toolbox, *calls: ToolCall) -> list[str]:
    return [message["content"] for message in asyncio.run(box.run(calls, EPISODE))]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ramet mcp"]


def children() -> Sequence[str]:
    """Return the processes that this one started and that still run."""
    return [str(pid) for pid in children_of(os.getpid())]


def test_its_tools_are_tools_from_any_event_loop() -> None:
    with MCPServer(sys.executable, [PROGRAM], {"SHOWN": "é"}, timeout=60) as server:
        box = Toolbox(server.tools(), timeout=30)
        assert {"add", "fail", "die", "hang"} <= set(box.tools)
        schema = box.tools["add"].schema
        assert (schema["type"], sorted(schema["properties"]), schema["required"]) == ("object", ["a", "b"], ["a", "b"])
        assert box.tools["add"].description == "Add two numbers."
        assert ask(box, ToolCall("add", {"a": 1, "b": 2}), ToolCall("env", {"name": "SHOWN"})) == ["3", "é"]
        assert ask(box, *[ToolCall("add", {"a": n, "b": n}) for n in range(20)]) == [str(2 * n) for n in range(20)]
        first, second = ask(box, ToolCall("fail", {}), ToolCall("add", {"a": "x"}))
        assert first.startswith("error: ")
        assert "fail" in first
        assert second.startswith("error: ")
        box.close()
    assert threads() == []
    assert children() == []
    assert ask(box, ToolCall("add", {"a": 1, "b": 2})) == [f"error: the MCP server {sys.executable} is closed"]
    server.close()


@pytest.mark.parametrize("code", [-32000, -32001, -32603])
def test_an_error_of_any_number_costs_its_own_call_and_the_program_goes_on(code: int) -> None:
    """The first is the number that the package itself gives to a connection that closed."""

    async def main() -> None:
        async with MCPServer(sys.executable, [PROGRAM], timeout=60) as server:
            box = Toolbox(server.tools(), timeout=60)
            before = children()
            calls = [ToolCall("number", {"code": code}), ToolCall("add", {"a": 1, "b": 2})]
            said = [message["content"] for message in await box.run(calls, EPISODE)]
            assert said == ["error: on purpose", "3"]
            assert children() == before
            box.close()

    asyncio.run(main())


def test_a_server_that_dies_or_hangs_costs_the_calls_alone() -> None:
    async def main() -> None:
        async with MCPServer(sys.executable, [PROGRAM], timeout=60) as server:
            slow, box = Toolbox(server.tools(), timeout=0.2), Toolbox(server.tools(), timeout=60)

            async def said(which: Toolbox, *names: str) -> list[str]:
                calls = [ToolCall(name, {"a": 1, "b": 2} if name == "add" else {}) for name in names]
                return [message["content"] for message in await which.run(calls, EPISODE)]

            assert await said(slow, "hang") == ["error: timed out after 0.2 s"]
            assert await said(box, "add") == ["3"]
            hung, dead = await said(box, "hang", "die")
            assert (hung, dead) == ("error: the server of hang has ended", "error: the server of die has ended")
            assert await said(box, "add", "add") == ["3", "3"]  # it was started anew, once
            assert len(children()) == 1

    asyncio.run(main())
    assert threads() == []
    assert children() == []


MUTE = "import sys\nfor line in sys.stdin: pass"


@pytest.mark.parametrize(
    ("program", "timeout", "said"),
    [
        ("import sys; sys.exit('nothing works')", 60, "does not start: .*\n  it wrote: nothing works"),
        (MUTE, 0.5, "does not start: no answer in 0.5 s"),
        ("import sys\nfor line in sys.stdin: print('no MCP', flush=True)", 0.5, "does not start: no answer in 0.5 s"),
    ],
)
def test_a_program_that_is_no_server_says_so(program: str, timeout: float, said: str) -> None:
    with pytest.raises(RuntimeError, match=said), MCPServer(sys.executable, ["-c", program], timeout=timeout):
        pass
    assert threads() == []
    assert children() == []


def test_what_is_no_message_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with MCPServer(sys.executable, [PROGRAM, "noisy"], timeout=60) as server:
        box = Toolbox(server.tools(), timeout=30)
        assert ask(box, ToolCall("add", {"a": 1, "b": 2})) == ["3"]
    assert "Failed to parse" in caplog.text


def test_a_program_that_is_not_there_says_so() -> None:
    server = MCPServer("no-such-program")
    with pytest.raises(RuntimeError, match="no-such-program does not start: FileNotFoundError"):
        server.open()
    with pytest.raises(RuntimeError, match="is not open"):
        server.tools()
    assert threads() == []


def test_opening_that_is_cancelled_leaves_nothing() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), MCPServer(sys.executable, ["-c", MUTE], timeout=30):
                pass

    asyncio.run(main())
    assert threads() == []
    assert children() == []


def test_arguments_are_a_list() -> None:
    with pytest.raises(TypeError, match="a list of strings"):
        MCPServer("python", "server.py")


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ValueError, match=r"pip install 'ramet\[mcp\]'"):
        MCPServer("python").open()
