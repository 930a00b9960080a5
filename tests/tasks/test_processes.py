"""Rewards in processes: the same verdicts, nobody held up, a limit that holds, and nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.concurrency.ends import gone, there

from ramet import check_task
from ramet.concurrency import Processes
from ramet.errors import ConfigError, RewardError
from ramet.tasks import Judge, Task, in_processes, rescore, weighted
from ramet.tasks.file import load_reward
from ramet.tasks.processes import InProcesses
from ramet.types import Outcome, OutcomeKind, Sample, StopReason


def sample(completion: str = "4", **fields: Any) -> Sample:
    row = {"prompt": "2+2=", "answer": "4"}
    made = Sample("2+2=", completion, (1,), (2,), row, StopReason.EOS, group=0, member=0)
    return dataclasses.replace(made, **fields)


@pytest.fixture
def made() -> Iterator[Callable[..., InProcesses]]:
    """Make rewards that are closed after the test."""
    all_: list[InProcesses] = []

    def make(score: Any, processes: int = 1) -> InProcesses:
        all_.append(in_processes(score, processes))
        return all_[-1]

    yield make
    for reward in all_:
        reward.close()


def running(reward: InProcesses) -> Processes:
    assert reward._running is not None
    return reward._running


def pids(reward: InProcesses) -> list[int]:
    return [process.pid for process in running(reward)._open]


def hangs(flag: Path) -> Callable[[Sample], float]:
    """Return a reward that says that it has begun, and then holds its interpreter for hours at some samples."""
    import re  # of this function: it is all that the process has to import

    def score(sample: Sample) -> float:
        if sample.completion == "hang":
            flag.touch()
            re.match(r"(a+)+$", "a" * 40 + "b")
        return float(sample.completion == "4")

    return score


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        True,
        None,
        {"right": 1.0, "short": -0.5},
        np.float32(0.5),
        Outcome.scored(2.0, {"a": 2.0}),
        Outcome.abstained("a tie"),
        Outcome.timed_out("late"),
    ],
)
def test_what_a_reward_returns_comes_back_unchanged(value: Any, made: Callable[..., InProcesses]) -> None:
    found = asyncio.run(made(lambda sample: value)(sample()))
    assert (found, type(found)) == (value, type(value))


def test_a_reward_sees_the_sample_as_it_is(made: Callable[..., InProcesses]) -> None:
    class State:
        def __init__(self, seen: set[str]) -> None:
            self.seen = seen

    def score(sample: Sample) -> dict[str, float]:
        assert isinstance(sample.state, State)  # the very class, though it is of this test
        assert isinstance(sample.stop, StopReason)
        assert (sample.prompt_tokens, sample.row["answer"]) == ((1,), "4")
        return {"seen": float("apple" in sample.state.seen), "said": float(len(sample.messages))}

    given_ = sample(state=State({"apple"}), messages=({"role": "user", "content": "2+2="},))
    assert asyncio.run(made(score)(given_)) == {"seen": 1.0, "said": 1.0}


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from(["0.5", "-1", "none", "{'a': 1.0}", "raise", "late"]), max_size=6))
def test_outcomes_are_those_of_the_reward_itself(completions: list[str]) -> None:
    found = JUDGES[1]([sample(text, member=member) for member, text in enumerate(completions)])
    assert found == JUDGES[0]([sample(text, member=member) for member, text in enumerate(completions)])


def _verdicts() -> Callable[[Sample], Any]:
    def verdict(sample: Sample) -> Any:
        said: dict[str, Any] = {"0.5": 0.5, "-1": -1, "none": None, "{'a': 1.0}": {"a": 1.0}}
        if sample.completion == "late":
            raise TimeoutError("after a while")
        return said[sample.completion]

    return verdict


JUDGES = (Judge(_verdicts()), Judge(in_processes(_verdicts())))


@pytest.fixture(autouse=True, scope="module")
def _closing() -> Iterator[None]:
    yield
    JUDGES[1].close()


def test_an_error_comes_back_with_its_type_and_text(made: Callable[..., InProcesses]) -> None:
    class TwoReasons(Exception):  # can be pickled, and not be read again
        def __init__(self, one: str, other: str) -> None:
            super().__init__(f"{one} and {other}")

    class Holding(TimeoutError):
        def __init__(self) -> None:
            import threading

            super().__init__("a lock")
            self.lock = threading.Lock()  # can not be pickled

    def score(sample: Sample) -> float:
        errors: dict[str, BaseException] = {
            "two": TwoReasons("this", "that"),
            "lock": Holding(),
            "key": KeyError("answer"),
            "nan": ValueError("no number"),
        }
        if sample.completion == "odd":
            Outcome.scored(float("nan"))
        raise errors[sample.completion]

    reward = made(score)
    outcomes = Judge(reward)([sample(text) for text in ("two", "lock", "key", "nan")])
    assert outcomes == [
        Outcome.error("TwoReasons: this and that"),
        Outcome.timed_out("Holding: a lock"),
        Outcome.error("KeyError: 'answer'"),
        Outcome.error("ValueError: no number"),
    ]
    with pytest.raises(KeyError, match="answer"):
        asyncio.run(reward(sample("key")))
    with pytest.raises(RewardError, match=r"(?s)score.*score must be a finite number: found nan"):
        Judge(reward)([sample("odd")])


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_an_interrupt_goes_through_and_an_exit_names_the_reward(
    end: type[BaseException], made: Callable[..., InProcesses]
) -> None:
    def leaves(sample: Sample) -> float:
        raise end

    with pytest.raises(end if end is KeyboardInterrupt else RewardError) as raised:
        Judge(made(leaves))([sample()])
    assert end is KeyboardInterrupt or "leaves called sys.exit(), group 0" in str(raised.value)


@pytest.mark.parametrize("end", [GeneratorExit, asyncio.CancelledError])
def test_what_looks_like_an_end_of_a_coroutine_costs_its_own_sample(
    end: type[BaseException], made: Callable[..., InProcesses]
) -> None:
    def ends(sample: Sample) -> float:
        raise end

    (outcome,) = Judge(made(ends))([sample()])
    assert (outcome.kind, outcome.reason) == (OutcomeKind.ERROR, f"{end.__name__}: ")


def test_what_a_reward_prints_and_reads_disturbs_nobody(
    made: Callable[..., InProcesses], capfd: pytest.CaptureFixture[str]
) -> None:
    def score(sample: Sample) -> float:
        import sys

        print("a line of a reward")
        return float(sys.stdin.read() == "")

    assert asyncio.run(made(score)(sample())) == 1.0
    assert capfd.readouterr() == ("", "a line of a reward\n")


# ---------------------------------------------------------------- nobody is held up


def test_a_reward_that_hangs_holds_up_nobody(tmp_path: Path, made: Callable[..., InProcesses]) -> None:
    reward = made(hangs(tmp_path / "begun"), 2)
    judge = Judge(reward, seconds=3600)

    async def main() -> tuple[list[Outcome], int]:
        hanging = asyncio.ensure_future(judge.judged(sample("hang")))
        await asyncio.to_thread(there, tmp_path / "begun")
        (pid,) = pids(reward)
        others = await asyncio.gather(*(judge.judged(sample("4")) for _ in range(8)))
        assert not hanging.done()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        return others, pid

    others, pid = asyncio.run(main())
    assert [outcome.score for outcome in others] == [1.0] * 8
    assert gone(pid)
    assert judge([sample("4")])[0].score == 1.0


def test_a_reward_that_hangs_runs_into_its_limit_and_its_process_is_replaced(
    tmp_path: Path, made: Callable[..., InProcesses]
) -> None:
    """Those that wait for its process meanwhile have their own time yet."""
    judge = Judge(reward := made(hangs(tmp_path / "begun")), seconds=0.5)
    assert judge([sample("4")])[0].score == 1.0
    (pid,) = pids(reward)
    late, *others = judge([sample("hang"), *[sample("4")] * 8])
    assert late == Outcome.timed_out("TimeoutError: hangs.<locals>.score took longer than 0.5 s")
    assert [outcome.score for outcome in others] == [1.0] * 8
    assert gone(pid)
    assert pid not in pids(reward)


def test_a_process_that_dies_costs_the_sample_that_it_was_at(made: Callable[..., InProcesses]) -> None:
    def score(sample: Sample) -> float:
        import os

        if sample.completion == "exit":
            os._exit(3)
        if sample.completion == "kill":
            os.kill(os.getpid(), 9)
        return 1.0

    reward = made(score)
    outcomes = Judge(reward)([sample(text) for text in ("4", "exit", "4", "kill", "4")])
    assert [outcome.score for outcome in outcomes] == [1.0, None, 1.0, None, 1.0]
    name = reward.__qualname__
    assert outcomes[1] == Outcome.error(f"RuntimeError: the process of {name} ended with exit code 3")
    assert outcomes[3] == Outcome.error(f"RuntimeError: the process of {name} was ended by SIGKILL")


def test_a_process_that_dies_between_two_calls_costs_nobody(made: Callable[..., InProcesses]) -> None:
    reward = made(lambda sample: 1.0)
    assert asyncio.run(reward(sample())) == 1.0
    (pid,) = pids(reward)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert asyncio.run(reward(sample())) == 1.0
    assert pid not in pids(reward)


def test_several_event_loops_share_the_processes(made: Callable[..., InProcesses]) -> None:
    reward = made(lambda sample: float(len(sample.completion)), 2)
    found: dict[int, list[Any]] = {}

    async def several(number: int) -> list[Any]:
        return await asyncio.gather(*(reward(sample("x" * number)) for _ in range(5)))

    def loop(number: int) -> None:
        found[number] = asyncio.run(several(number))

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [float(number)] * 5 for number in range(4)}
    assert 1 <= len(pids(reward)) <= 2


# ---------------------------------------------------------------- how a reward gets there


FILE = """
import re
from ramet.tasks import in_processes
NUMBER = re.compile(r"\\d+")
class Found(Exception):
    pass
def number(text):
    return NUMBER.search(text)
@in_processes
def score(sample):
    found = number(sample.completion)
    if sample.completion == "raise":
        raise Found("nothing")
    return float(found is not None and found[0] == sample.row["answer"])
def plain(sample):
    return float(number(sample.completion) is not None)
"""


@pytest.mark.parametrize("name", ["score", "plain"])
def test_a_reward_of_a_file_that_no_process_could_import(
    tmp_path: Path, name: str, made: Callable[..., InProcesses]
) -> None:
    (tmp_path / "own.py").write_text(FILE, encoding="utf-8")
    loaded: Any = load_reward(f"{tmp_path / 'own.py'}:{name}")
    judge = Judge(loaded if name == "score" else made(loaded))
    outcomes = judge([sample("it is 4"), sample("none"), sample("raise")])
    judge.close()
    assert [outcome.score for outcome in outcomes[:2]] == [1.0, 0.0]
    assert outcomes[2] == (Outcome.error("Found: nothing") if name == "score" else Outcome.scored(0.0))


def test_what_can_not_be_copied_stops_at_once_and_says_why(made: Callable[..., InProcesses]) -> None:
    lock = threading.Lock()

    def locked(sample: Sample) -> float:
        with lock:
            return 1.0

    class Elsewhere:
        def __reduce__(self) -> tuple[Any, ...]:
            return (int, ("x",))

        def __call__(self, sample: Sample) -> float:
            return 1.0

    with pytest.raises(RewardError, match=r"(?s)locked can not be handed .*cannot pickle '_thread.lock'.*hint: let it"):
        Judge(made(locked))([sample()])
    with pytest.raises(RewardError, match="can not be loaded in another process: ValueError: invalid literal"):
        Judge(made(Elsewhere()))([sample()])


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"state": threading.Lock()}, r"sample\.state \(a lock\)"),
        ({"row": {"prompt": "x", "held": threading.Lock()}}, r"sample\.row\['held'\] \(a lock\)"),
        ({"messages": ({"role": "user", "file": sys.stdout},)}, r"sample\.messages \(a tuple\)"),
    ],
)
def test_a_sample_that_can_not_be_handed_over_says_which_field(
    fields: dict[str, Any], part: str, made: Callable[..., InProcesses]
) -> None:
    (outcome,) = Judge(made(lambda sample: 1.0))([sample(**fields)])
    assert outcome.kind is OutcomeKind.ERROR
    assert re.match(f"TypeError: {part} can not be handed to another process: TypeError: cannot pickle", outcome.reason)


def test_what_a_reward_returns_must_be_picklable_too(made: Callable[..., InProcesses]) -> None:
    def score(sample: Sample) -> Any:
        import threading

        return threading.Lock()

    (outcome,) = Judge(made(score))([sample()])
    assert outcome.reason.startswith("TypeError: it returned a lock, which can not be handed to another process")


async def _late(sample: Sample) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("score", "processes", "message"),
    [
        (1.0, 2, "found float"),
        (_late, 2, "_late must be a sync function"),
        (in_processes(lambda sample: 1.0), 2, "must be a sync function"),
        (lambda sample: 1.0, 0, "from 1 on: found 0"),
        (lambda sample: 1.0, True, "found True"),
    ],
)
def test_what_makes_no_sense_is_refused(score: Any, processes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        in_processes(score, processes)


# ---------------------------------------------------------------- beginnings and ends


def test_nothing_is_started_before_the_first_call_and_a_closed_one_starts_again() -> None:
    reward = in_processes(lambda sample: 1.0)
    assert reward._running is None
    reward.close()  # nothing to close is no mistake
    for _ in range(2):
        assert asyncio.run(reward(sample())) == 1.0
        (pid,) = pids(reward)
        threads = [*running(reward)._threads._room.threads]
        reward.close()
        reward.close()
        assert gone(pid)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_judge_closes_what_it_has_opened(wrapped: bool) -> None:
    reward = in_processes(lambda sample: 1.0)
    judge = Judge(weighted({"one": (reward, 1.0), "two": (lambda sample: 0.0, 1.0)}) if wrapped else reward)
    for _ in range(2):
        assert judge([sample()])[0].score == 1.0
        (pid,) = pids(reward)
        judge.close()
        assert reward._running is None
        assert gone(pid)


def test_a_check_and_judging_again_leave_nothing_open() -> None:
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(10, 30)]
    reward = in_processes(lambda sample: float(sample.completion.strip() == sample.row["answer"]))
    report = check_task(Task("sums", rows[5:], rows[:5], reward, answer=lambda row: str(row["answer"])))
    assert report.passed, str(report)
    assert reward._running is None
    record = {
        "prompt": "10+1=", "completion": "11", "prompt_tokens": [1], "completion_tokens": [2], "stop": "eos",
        "row": {"answer": "11"}, "group": 0, "member": 0, "messages": [],
    }  # fmt: skip
    judge = Judge(reward)
    assert rescore([record], judge)[0]["score"] == 1.0
    judge.close()
    assert reward._running is None


def test_closing_ends_the_calls_that_are_under_way(tmp_path: Path, made: Callable[..., InProcesses]) -> None:
    reward = made(hangs(tmp_path / "begun"))

    async def main() -> list[Any]:
        works = [asyncio.ensure_future(reward(sample("hang"))) for _ in range(3)]
        await asyncio.to_thread(there, tmp_path / "begun")
        await asyncio.to_thread(reward.close)
        return await asyncio.gather(*works, return_exceptions=True)

    found = asyncio.run(main())
    assert [type(error) for error in found] == [RuntimeError] * 3
    assert all(str(error).endswith("score was closed") for error in found)


def test_the_processes_end_with_the_object() -> None:
    reward = in_processes(lambda sample: 1.0)
    assert asyncio.run(reward(sample())) == 1.0
    (pid,) = pids(reward)
    del reward
    gc.collect()
    assert gone(pid)


def test_ctrl_c_ends_what_runs(tmp_path: Path, made: Callable[..., InProcesses]) -> None:
    judge = Judge(reward := made(hangs(tmp_path / "begun")))

    def interrupt() -> None:
        there(tmp_path / "begun")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        judge([sample("hang")])
    assert all(gone(pid) for pid in pids(reward))
