"""The functions of a conversation's task: what fails, hangs, blocks or is cut costs its own row."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.envs.chat_templates import assistant, user
from tests.envs.test_chat import HISTORY, MODES, say
from tests.envs.test_chat_task import ROWS, begun, on, right, step, task_of

from ramet.envs.chat import ChatEnv
from ramet.envs.chat_calls import Caller, Work
from ramet.errors import RewardError
from ramet.ragged import rows
from ramet.tasks import Task
from ramet.tasks.replies import CHARACTERS, WrongReply
from ramet.tasks.verdicts import Raised
from ramet.types import Episode, OutcomeKind, Sample

HANGING = 0.5
"""Seconds that what hangs may take."""


# ---------------------------------------------------------------- failures, async functions, tools


def test_a_function_that_raises_costs_its_own_row() -> None:
    def reply(episode: Episode) -> str:
        if episode.text == "boom":
            raise KeyError("lost")
        if episode.text == "late":
            raise TimeoutError("slow")
        return "more"

    env, td = begun("tokens", task_of(reply), count=4)
    found = step(env, td, "tokens", "boom", "late", "fine", "")
    kinds = [None if one is None else one.kind for one in rows(found, "outcome")]
    assert kinds == [OutcomeKind.ERROR, OutcomeKind.TIMED_OUT, None, None]
    assert rows(found, "outcome")[0].reason == "reply: KeyError: 'lost'"
    assert found["truncated"].flatten().tolist() == [True, True, False, False]
    assert found["terminated"].flatten().tolist() == [False] * 4
    assert found["reward"].flatten().tolist() == [0.0] * 4


def test_a_begin_that_raises_ends_its_row_with_the_first_step() -> None:
    def begin(row: Any, rng: random.Random) -> None:
        if row["answer"] == "4":
            raise OSError("gone")

    env, td = begun("text", task_of(begin=begin))
    assert td["done"].tolist() == [[False], [False]]
    found = step(env, td, "text", "x", "4")
    assert [one and one.kind for one in rows(found, "outcome")] == [None, OutcomeKind.ERROR]
    assert found["truncated"].tolist() == [[False], [True]]
    assert len(rows(found, HISTORY)[1]) == 1


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_what_a_reply_does_to_the_messages_changes_nothing_that_is_judged(mode: Any) -> None:
    judged: list[list[str]] = []

    def reply(episode: Episode) -> str | None:
        told = None if episode.turns == 2 else "more"
        episode.messages[0]["content"] = "changed"
        episode.messages.pop()
        return told

    def score(sample: Sample) -> float:
        judged.append([message["content"] for message in sample.messages])
        return float(sample.completion == "5")

    env, td = begun(mode, task_of(reply, score=score), count=1)
    first = rows(td, HISTORY)[0][0]["content"]
    found = step(env, step(env, td, mode, "4"), mode, "5")
    assert judged == [[first, "4", "more", "5"]]
    assert [message["content"] for message in rows(found, HISTORY)[0]] == judged[0]
    assert found["reward"].item() == 1.0


def test_a_score_that_raises_costs_its_own_row() -> None:
    def score(sample: Sample) -> float:
        return 1 / (sample.completion != "2")

    env, td = begun("history", task_of(score=score))
    found = step(env, td, "history", "2", "4")
    assert [one.kind for one in rows(found, "outcome")] == [OutcomeKind.ERROR, OutcomeKind.SCORED]
    assert found["terminated"].tolist() == [[True], [True]]
    assert found["reward"].tolist() == [[0.0], [1.0]]


def test_a_reply_that_is_no_reply_is_a_mistake_of_the_program() -> None:
    env, td = begun("history", task_of(lambda episode: 7))
    with pytest.raises(WrongReply, match=r"of the task 'sums': expected text.*found 7 of type int"):
        env.step(say(td, "history", ["1", "2"]))


def test_async_functions_run_together() -> None:
    """All rows are in the reply at once: each waits until the last has come."""
    waiting: list[str] = []
    everybody = asyncio.Event()

    async def reply(episode: Episode) -> str | None:
        waiting.append(episode.text)
        if len(waiting) == 3:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 20)
        return None

    async def score(sample: Sample) -> float:
        await asyncio.sleep(0)
        return float(len(sample.completion))

    env, td = begun("tokens", task_of(reply, score=score), count=3)
    found = step(env, td, "tokens", "a", "bb", "")
    assert sorted(waiting) == ["", "a", "bb"]
    assert found["reward"].flatten().tolist() == [1.0, 2.0, 0.0]
    env.close()
    env.close()


def test_tools_are_run_and_answer_before_the_reply_is_asked() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    asked: list[str] = []

    def reply(episode: Episode) -> str | None:
        asked.append(episode.text)
        return None

    task = Task("sums", ROWS, ROWS, right, reply=reply, tools=[add], max_turns=3)
    for mode in MODES:
        env, td = begun(mode, task)
        call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
        after = on(env, td, mode, call, "4")
        assert after["done"].tolist() == [[False], [True]]
        answer = rows(after, HISTORY)[0][-1]
        assert (answer["role"], answer["content"]) == ("tool", "2")
        last = step(env, after, mode, "2", "")
        assert last["reward"].tolist() == [[1.0], [0.0]]
        assert asked == ["4", "2"]
        asked.clear()
        env.close()


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("name", ["tool_seconds", "score_seconds", "reply_seconds"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_a_limit_is_a_finite_number_of_seconds(name: str, seconds: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a finite number of seconds above 0: found"):
        ChatEnv(**{name: seconds})
    with pytest.raises(ValueError, match=name):
        ChatEnv.from_dataloader(["a"], **{name: seconds})
    ChatEnv(**{name: 1})


def test_a_tool_may_not_be_without_a_limit() -> None:
    with pytest.raises(ValueError, match="tool_seconds must be a finite number of seconds above 0: found None"):
        ChatEnv(tool_seconds=None)  # type: ignore[arg-type]
    ChatEnv(score_seconds=None, reply_seconds=None)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_score_that_hangs_costs_its_own_row(kind: str) -> None:
    over = threading.Event()

    def score(sample: Sample) -> float:
        if sample.completion == "2":
            over.wait(60)
        return 1.0

    async def later(sample: Sample) -> float:
        if sample.completion == "2":
            await asyncio.sleep(60)
        return 1.0

    task = task_of(score=score if kind == "sync" else later)
    env, td = begun("tokens", task, score_seconds=HANGING)
    found = step(env, td, "tokens", "2", "4")
    over.set()
    late, scored = rows(found, "outcome")
    assert late.kind is OutcomeKind.TIMED_OUT
    assert "took longer than 0.5 s" in late.reason
    assert (scored.kind, scored.score) == (OutcomeKind.SCORED, 1.0)
    assert found["reward"].tolist() == [[0.0], [1.0]]
    assert found["terminated"].tolist() == [[True], [True]]
    env.close()


@pytest.mark.parametrize("where", ["begin", "reply"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_function_that_hangs_costs_its_own_row(where: str, kind: str) -> None:
    over = threading.Event()

    def wait(name: str) -> None:
        if name == "1+1?" and kind == "sync":
            over.wait(60)

    async def sleep(name: str, value: Any) -> Any:
        if name == "1+1?":
            await asyncio.sleep(60)
        return value

    def begin(row: Any, rng: Any) -> Any:
        name = row["prompt"] if where == "begin" else ""
        wait(name)
        return "state" if kind == "sync" else sleep(name, "state")

    def reply(episode: Episode) -> Any:
        name = episode.row["prompt"] if where == "reply" else ""
        wait(name)
        return "more" if kind == "sync" else sleep(name, "more")

    env, td = begun("text", task_of(reply, begin=begin), reply_seconds=HANGING)
    found = step(env, td, "text", "x", "y")
    over.set()
    late, other = rows(found, "outcome")
    assert (late.kind, late.reason) == (OutcomeKind.TIMED_OUT, f"{where}: TimeoutError: it took longer than 0.5 s")
    assert other is None
    assert rows(found, "episode")[1].state == "state"
    assert rows(found, HISTORY)[1][1:] == [assistant("y"), user("more")]
    assert found["truncated"].tolist() == [[True], [False]]
    env.close()


def test_replies_that_block_run_together_where_they_have_a_limit() -> None:
    """Each waits until all have come, which none would survive alone."""
    everybody = threading.Barrier(3)

    def reply(episode: Episode) -> str | None:
        everybody.wait(20)
        return None

    env, td = begun("history", task_of(reply), count=3, reply_seconds=30.0)
    assert step(env, td, "history", "a", "b", "c")["terminated"].flatten().tolist() == [True] * 3
    env.close()


def test_without_a_limit_functions_run_in_turn_in_the_thread_that_calls() -> None:
    seen: list[tuple[str, threading.Thread]] = []

    def reply(episode: Episode) -> str | None:
        seen.append((episode.text, threading.current_thread()))
        return None

    env, td = begun("history", task_of(reply), count=3)
    step(env, td, "history", "a", "b", "c")
    assert seen == [(text, threading.current_thread()) for text in "abc"]


def test_a_tool_that_hangs_is_answered_and_the_others_go_on() -> None:
    over = threading.Event()

    def look(seconds: float) -> str:
        """Look around."""
        if seconds:
            over.wait(60)
        return "all quiet"

    for limit in (None, 20.0):
        env, td = begun("history", task_of(tools=[look]), count=2, tool_seconds=HANGING, reply_seconds=limit)
        call = '<tool_call>{"name": "look", "arguments": {"seconds": %s}}</tool_call>'
        found = step(env, td, "history", call % 1, call % 0)
        answers = [talk[-1]["content"] for talk in rows(found, HISTORY)]
        assert answers == ["error: timed out after 0.5 s", "all quiet"]
        env.close()
    over.set()


def test_states_of_functions_in_threads_are_closed_once() -> None:
    closed: list[str] = []

    class Open:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    env, td = begun("history", task_of(begin=lambda row, rng: Open(row["prompt"])), count=1, reply_seconds=20.0)
    step(env, td, "history", "2")
    assert closed == ["1+1?"]
    env.close()
    assert closed == ["1+1?"]


@pytest.mark.parametrize("limit", [None, 20.0])
def test_ctrl_c_while_states_are_made_closes_those_that_are_there(limit: float | None) -> None:
    """The first row's state is there when Ctrl-C comes; the second is still being made."""
    closed: list[str] = []

    class Open:
        def close(self) -> None:
            closed.append("one")

    async def begin(row: Any, rng: random.Random) -> Open:
        if row["prompt"] == ROWS[1]["prompt"]:
            await asyncio.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(60)
        return Open()

    env = ChatEnv(task=task_of(begin=begin), reply_seconds=limit)
    with pytest.raises(KeyboardInterrupt):
        env.reset(TensorDict({"prompt_index": torch.arange(2)}, [2]))
    env.close()
    assert closed == ["one"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [None, 20.0])
def test_an_exit_in_a_function_ends_all_and_names_it(limit: float | None, asynchronous: bool) -> None:
    def leave(*_: Any) -> Any:
        raise SystemExit(3)

    async def leave_too(*_: Any) -> Any:
        leave()

    own = leave_too if asynchronous else leave
    env, td = begun("history", task_of(own), reply_seconds=limit)
    with pytest.raises(WrongReply, match=r"^reply .*leave(_too)? called sys.exit\(3\)"):
        step(env, td, "history", "a", "b")
    env.close()
    with pytest.raises(WrongReply, match=r"^begin .*leave(_too)? called sys.exit\(3\)"):
        begun("history", task_of(begin=own), reply_seconds=limit)
    env, td = begun("history", task_of(None, score=own), reply_seconds=limit)
    with pytest.raises(RewardError, match=r"^reward .*leave(_too)? called sys.exit\(3\)"):
        step(env, td, "history", "a", "b")
    env.close()


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [None, 20.0])
def test_what_looks_like_an_end_of_a_coroutine_costs_its_own_row(
    limit: float | None, asynchronous: bool, error: type[BaseException]
) -> None:
    def end(*_: Any) -> Any:
        raise error

    async def end_too(*_: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    own = end_too if asynchronous else end
    for of in (task_of(own), task_of(begin=own), task_of(None, score=own)):
        env, td = begun("history", of, reply_seconds=limit)
        found = step(env, td, "history", "a", "b")
        assert [one.kind for one in rows(found, "outcome")] == [OutcomeKind.ERROR] * 2
        assert all(error.__name__ in one.reason for one in rows(found, "outcome"))
        env.close()


def test_what_functions_change_in_a_row_lasts_for_their_call_alone() -> None:
    found: list[int] = []

    def count(row: Any) -> None:
        row["x"] = row.get("x", 0) + 1
        found.append(row["x"])

    def reply(episode: Episode) -> str | None:
        count(episode.row)
        return "?" if episode.turns < 2 else None

    def score(sample: Sample) -> float:
        count(sample.row)
        return 1.0

    of = task_of(reply, begin=lambda row, rng: count(row), score=score)
    before = [dict(row) for row in of.train]
    for _ in range(2):
        env, td = begun("history", of)
        step(env, step(env, td, "history", "a", "b"), "history", "a", "b")
        env.close()
    assert found == [1] * 16
    assert list(of.train) == before


def test_a_reply_that_fits_nowhere_costs_its_own_row() -> None:
    env, td = begun("history", task_of(lambda episode: "x" * (CHARACTERS + (episode.text == "long"))))
    found = step(env, td, "history", "long", "short")
    outcome, none = rows(found, "outcome")
    assert outcome.reason.endswith(": expected at most 1000000 characters: found 1000001")
    assert (outcome.kind, none) == (OutcomeKind.ERROR, None)
    assert found["truncated"].flatten().tolist() == [True, False]


def test_a_caller_returns_what_was_raised_and_calls_again_after_it_was_closed() -> None:
    for seconds in (None, 20.0):
        caller = Caller(seconds)
        for _ in range(2):
            one, none, bad = caller([Work(str.upper, ("a",)), None, Work(int, ("x",))])
            assert (one, none) == ("A", None)
            assert isinstance(bad, Raised)
            assert isinstance(bad.error, ValueError)
            assert caller([]) == []
            caller.close()
