"""A toolbox runs all calls at once, each with a time-out, and answers every failure as data."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import gc
import json
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from ramet.tools import BadCall, Tool, Toolbox
from ramet.types import Episode, ToolCall

EPISODE = Episode({"word": "fir"}, [], random.Random(0))


def answers(tools: Sequence[Any], calls: Sequence[Any], **options: Any) -> list[str]:
    """Run calls, and return what the model is told."""

    async def main() -> list[str]:
        async with Toolbox(tools, **options) as box:
            return [message["content"] for message in await box.run(calls, EPISODE)]

    return asyncio.run(main())


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def later(word: str) -> str:
    """Say a word later."""
    await asyncio.sleep(0)
    return word


def test_answers_are_tool_messages_in_the_order_of_the_calls() -> None:
    async def main() -> list[Any]:
        async with Toolbox([add, later]) as box:
            turn = box.read_turn("[add(a=1), later(word='x'), add(a='y')]")
            return await box.run(turn["tool_calls"], EPISODE)

    fault = "error: add can not take these arguments: a: Input should be a valid integer"
    first, second, third = asyncio.run(main())
    assert first == {"role": "tool", "name": "add", "content": "2", "tool_call_id": "c00000000"}
    assert second == {"role": "tool", "name": "later", "content": "x", "tool_call_id": "c00000001"}
    assert third["content"].startswith(fault)


def test_schemas_are_what_templates_take() -> None:
    (schema,) = Toolbox([add]).schemas
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["required"] == ["a"]
    assert json.loads(json.dumps(schema)) == schema


def test_a_template_writes_the_turn_and_the_answers() -> None:
    from ramet.chat import ChatTemplate
    from ramet.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
        "{% endfor %}"
    )
    box = Toolbox([add])
    turn = box.read_turn('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>?</tool_call>')
    messages = [turn, *asyncio.run(box.run(turn["tool_calls"][:1], EPISODE))]
    assert ChatTemplate(tokenizer).render(messages, box.schemas) == 'add;assistant:[add{"a": 1}][unknown{}]tool:2'
    box.close()


@dataclasses.dataclass
class Point:
    x: int


def test_what_is_no_text_is_written_as_json() -> None:
    values = {"none": None, "many": {"a": [1, 2.5, True]}, "point": Point(3), "text": "é", "inf": float("inf")}

    def get(name: str) -> Any:
        """Get."""
        return values[name]

    calls = [ToolCall("get", {"name": name}) for name in values]
    assert answers([get], calls) == ["null", '{"a":[1,2.5,true]}', '{"x":3}', "é", "Infinity"]


def _raise(error: BaseException) -> Any:
    raise error


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("says nothing")


FAILURES: list[tuple[BaseException, str]] = [
    (ValueError("no such city"), "error: ValueError: no such city"),
    (KeyError("x"), "error: KeyError: 'x'"),
    (StopIteration(), "error: StopIteration"),
    (SystemExit(3), "error: SystemExit: 3"),
    (asyncio.CancelledError(), "error: CancelledError"),
    (TimeoutError(), "error: TimeoutError"),
    (Mute(), "error: Mute"),
]


@pytest.mark.parametrize(("error", "said"), FAILURES, ids=lambda value: type(value).__name__)
def test_what_a_tool_raises_is_answered(error: BaseException, said: str) -> None:
    def fail() -> str:
        """Fail."""
        return _raise(error)  # type: ignore[no-any-return]

    async def fail_later() -> str:
        """Fail later."""
        return _raise(error)  # type: ignore[no-any-return]

    found = answers([fail, fail_later], [ToolCall("fail", {}), ToolCall("fail_later", {})])
    assert found[0] == said
    assert found[1] == ("error: RuntimeError: coroutine raised StopIteration" if "Stop" in said else said)


def test_calls_that_can_not_be_made_are_answered() -> None:
    calls = [ToolCall("ad", {}), BadCall("?", "no JSON"), {"function": {"name": "add", "arguments": "{"}}]
    unknown, bad, broken = answers([add], calls)
    assert unknown == 'error: there is no tool "ad": did you mean "add"? known: add'
    assert bad == "error: the call can not be read: no JSON"
    assert broken.startswith("error: the call can not be read: the arguments are no JSON")


def test_long_answers_are_cut_and_say_so() -> None:
    def write(count: int) -> str:
        """Write."""
        return "é" * count

    calls = [ToolCall("write", {"count": count}) for count in (5, 6)]
    assert answers([write], calls, characters=5) == ["ééééé", "ééééé\n[cut: the first 5 of 6 characters]"]


def test_half_characters_become_question_marks() -> None:
    def odd() -> str:
        """Return what no tokenizer takes."""
        return "a\ud800b"

    assert answers([odd], [ToolCall("odd", {})]) == ["a?b"]


def test_64_functions_that_wait_for_one_another_all_run_at_once() -> None:
    barrier = threading.Barrier(64)
    meeting: list[asyncio.Barrier] = []

    def wait() -> int:
        """Wait for the others."""
        barrier.wait(20)
        return 1

    async def wait_async() -> int:
        """Wait for the others."""
        await meeting[0].wait()
        return 1

    async def main(box: Toolbox, name: str) -> list[str]:
        meeting.append(asyncio.Barrier(64))
        rows = await asyncio.gather(*(box.run([ToolCall(name, {})], EPISODE) for _ in range(64)))
        return [row[0]["content"] for row in rows]

    box = Toolbox([wait, wait_async], timeout=20)
    assert asyncio.run(main(box, "wait")) == ["1"] * 64
    meeting.clear()
    assert asyncio.run(main(box, "wait_async")) == ["1"] * 64  # a toolbox outlives an event loop
    box.close()


def test_the_calls_of_one_turn_run_at_once() -> None:
    """They wait for one another: one after the other, the first would run into its time-out."""
    barrier = threading.Barrier(3)

    def wait() -> int:
        """Wait for the others."""
        return 1 if barrier.wait(5) >= 0 else 0

    assert answers([wait], [ToolCall("wait", {})] * 3, timeout=5) == ["1"] * 3


def test_a_call_that_is_late_is_answered_and_holds_up_no_other() -> None:
    never, cleaned = threading.Event(), []

    def block() -> str:
        """Block."""
        never.wait(30)
        return "late"

    async def hang() -> str:
        """Hang."""
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)
        return "late"

    calls = [ToolCall("block", {}), ToolCall("hang", {}), ToolCall("add", {"a": 1})]
    late = "error: timed out after 0.05 s"
    assert answers([block, hang, add], calls, timeout=0.05)[:2] == [late, late]
    assert cleaned == [True]
    never.set()


def test_a_tool_that_ignores_that_it_is_cancelled_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramet.tools.toolbox.GRACE", 0.01)

    async def main() -> str:
        release = asyncio.Event()

        async def stubborn() -> str:
            """Go on, whatever happens."""
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return "late"

        async with Toolbox([stubborn], timeout=0.01) as box:
            (answer,) = await box.run([ToolCall("stubborn", {})], EPISODE)
            assert len(box._strays) == 1
            release.set()
            await asyncio.wait(set(box._strays))
            return str(answer["content"])

    assert asyncio.run(main()) == "error: timed out after 0.01 s"


@pytest.mark.parametrize("name", ["hang", "block"])
def test_a_cancellation_from_outside_is_not_swallowed(name: str) -> None:
    begun, never = threading.Event(), threading.Event()
    ended: list[str] = []

    async def hang() -> str:
        """Hang."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hang")
        return "late"

    def block() -> str:
        """Block."""
        begun.set()
        never.wait(30)
        return "late"

    async def main() -> None:
        async with Toolbox([hang, block]) as box:
            run = asyncio.ensure_future(box.run([ToolCall(name, {})], EPISODE))
            await asyncio.to_thread(begun.wait)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            never.set()

    asyncio.run(main())
    assert ended == (["hang"] if name == "hang" else [])


def test_an_outer_time_out_is_the_callers() -> None:
    async def hang() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return "late"

    async def main() -> None:
        async with Toolbox([hang]) as box:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await box.run([ToolCall("hang", {})], EPISODE)

    asyncio.run(main())


def test_context_variables_reach_threads() -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    def look() -> str:
        """Look."""
        return variable.get()

    async def main() -> str:
        variable.set("set")
        async with Toolbox([look]) as box:
            return str((await box.run([ToolCall("look", {})], EPISODE))[0]["content"])

    assert asyncio.run(main()) == "set"


def test_a_function_may_return_what_is_to_be_awaited() -> None:
    def call(arguments: Any, episode: Episode) -> Awaitable[str]:
        return later("x")

    assert answers([Tool("call", "", {"type": "object"}, call)], [ToolCall("call", {})]) == ["x"]


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert Toolbox([]).read_turn(text) == {"role": "assistant", "content": text}
    assert "tool_calls" in Toolbox([add]).read_turn(text)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": float("nan")}, {"characters": 0}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Toolbox([add], **options)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        Toolbox([add, add])


def test_closing_ends_the_threads_and_may_be_done_twice() -> None:
    box = Toolbox([add])
    asyncio.run(box.run([ToolCall("add", {"a": 1})] * 5, EPISODE))
    box.close()
    box.close()
    assert not any(thread.is_alive() for thread in box._threads._room.threads)
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(box.run([ToolCall("add", {"a": 1})], EPISODE))


def test_threads_end_with_the_toolbox_that_nobody_closes() -> None:
    box = Toolbox([add])
    asyncio.run(box.run([ToolCall("add", {"a": 1})], EPISODE))
    threads = list(box._threads._room.threads)
    gone = weakref.ref(box)
    del box
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def run_program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)


PROGRAM = """
import asyncio, threading
from ramet.tools import Toolbox
from ramet.types import ToolCall

def block() -> str:
    "Block."
    threading.Event().wait()
    return "late"

async def main():
    {body}

asyncio.run(main())
print("end")
"""


@pytest.mark.parametrize(
    "body",
    [
        "box = Toolbox([block], timeout=0.05); print(await box.run([ToolCall('block', {})], None))",
        "async with Toolbox([block], timeout=0.05) as box: print(await box.run([ToolCall('block', {})], None))",
    ],
)
def test_a_tool_that_never_ends_does_not_keep_python_from_ending(body: str) -> None:
    done = run_program(PROGRAM.format(body=body))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("end\n")
    assert "timed out" in done.stdout


def test_parallel_calls_of_one_turn_each_get_the_episode() -> None:
    def note(word: str, episode: Episode) -> str:
        """Note a word."""
        episode.state.append(word)
        return str(episode.row["n"])

    async def main() -> list[list[str]]:
        async with Toolbox([note]) as box:
            episodes = [Episode({"n": n}, [], random.Random(n), state=[]) for n in range(10)]
            calls = [ToolCall("note", {"word": word}) for word in "ab"]
            rows = await asyncio.gather(*(box.run(calls, episode) for episode in episodes))
            assert [sorted(episode.state) for episode in episodes] == [["a", "b"]] * 10
            return [[message["content"] for message in row] for row in rows]

    assert asyncio.run(main()) == [[str(n), str(n)] for n in range(10)]
