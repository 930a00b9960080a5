"""From what a reward says to an outcome: every kind of verdict, and every kind of mistake."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import gc
import json
import math
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.errors import RewardError
from ramet.tasks import Judge, weighted
from ramet.tasks.task import Reopening
from ramet.tasks.verdicts import name_of
from ramet.types import Outcome, OutcomeKind, Sample, StopReason


def sample(completion: str = "4", *, group: int = 0, member: int = 0, prompt: Any = "2+2=") -> Sample:
    return Sample(prompt, completion, (1,), (2,), {"answer": "4"}, StopReason.EOS, group=group, member=member)


def verdict(value: Any) -> Outcome:
    (outcome,) = Judge(lambda _: value)([sample()])
    return outcome


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1.5, 1.5),
        (-2, -2.0),
        (True, 1.0),
        (False, 0.0),
        (fractions.Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.75), 0.75),
        (torch.tensor(True), 1.0),
    ],
)
def test_a_number_of_any_library_is_a_score(value: Any, score: float) -> None:
    outcome = verdict(value)
    assert outcome == Outcome.scored(score)
    assert type(outcome.score) is float


def test_none_abstains_and_says_whose_verdict_it_was() -> None:
    def undecided(sample: Sample) -> None:
        return None

    (outcome,) = Judge(undecided)([sample()])
    assert outcome.kind is OutcomeKind.ABSTAINED
    assert "undecided" in outcome.reason


def test_named_rewards_are_added_up_and_kept() -> None:
    outcome = verdict({"right": 1, "short": np.float64(0.25), "polite": torch.tensor(-0.5)})
    assert outcome.score == 0.75
    assert outcome.rewards == {"right": 1.0, "short": 0.25, "polite": -0.5}


@pytest.mark.parametrize("outcome", [Outcome.scored(2.0, {"a": 2.0}), Outcome.abstained("x"), Outcome.error("y")])
def test_an_outcome_stays_as_it_is(outcome: Outcome) -> None:
    assert verdict(outcome) == outcome


@pytest.mark.parametrize("half", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), fractions.Fraction(1, 2)])
def test_the_numbers_of_an_outcome_become_floats_that_a_file_can_hold(half: Any) -> None:
    for outcome in (verdict(Outcome.scored(half)), verdict(Outcome.scored(1.0, {"reward": half}))):
        assert json.dumps(dict(outcome.rewards)) == '{"reward": 0.5}'
        assert type(outcome.score) is float
    kept = verdict(Outcome(OutcomeKind.ABSTAINED, rewards={"part": half}, reason="a tie"))
    assert (json.dumps(dict(kept.rewards)), kept.reason) == ('{"part": 0.5}', "a tie")


def test_the_reason_of_an_outcome_becomes_text() -> None:
    assert verdict(Outcome.error(KeyError("answer"))).reason == "'answer'"  # type: ignore[arg-type]


scored: Callable[..., Outcome] = Outcome.scored  # of anything, as a program without types does


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: scored(math.nan), "found nan"),
        (lambda: scored(-math.inf), "found -inf"),
        (lambda: scored(10**400), "score must be a finite number"),
        (lambda: scored(np.float32("nan")), "found .*nan"),
        (lambda: scored(torch.tensor(math.nan)), "found .*nan"),
        (lambda: scored(torch.tensor([1.0, 2.0])), "score must be a finite number"),
        (lambda: scored(np.array([1.0, 2.0])), "score must be a finite number"),
        (lambda: scored("1.0"), "found '1.0'"),
        (lambda: scored(None), "a score exactly if it is scored"),
        (lambda: scored(decimal.Decimal(1)), "a finite score: .* of type Decimal"),
        (lambda: scored(1.0, {"a": math.inf}), "a must be a finite number: found inf"),
        (lambda: scored(1.0, {"a": decimal.Decimal(1)}), "for 'a'"),
        (lambda: scored(1.0, {1: 1.0}), r"names \(strings\)"),
        (lambda: Outcome(OutcomeKind.ERROR, 1.0), "a score exactly if it is scored"),
    ],
)
def test_an_outcome_that_can_not_be_stops_at_once(make: Callable[[], Outcome], found: str, asynchronous: bool) -> None:
    """As a bare number that is not finite does, and unlike what else goes wrong inside a reward."""

    def odd(sample: Sample) -> Outcome:
        return make()

    async def odd_too(sample: Sample) -> Outcome:
        return make()

    with pytest.raises(RewardError, match=f"(?s)reward .*odd.*, group 3, member 2: .*{found}.*'five'"):
        Judge(odd_too if asynchronous else odd)([sample("five", group=3, member=2)])


def test_an_outcome_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ValueError, match="score must be a finite number: found nan"):
        Outcome.scored(math.nan)
    with pytest.raises(ValueError, match="exactly if it is scored: found scored, None"):
        Outcome(OutcomeKind.SCORED)


def test_an_exception_that_is_returned_is_no_reward() -> None:
    with pytest.raises(RewardError, match="of type KeyError"):
        verdict(KeyError("answer"))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (math.nan, "found nan"),
        (math.inf, "found inf"),
        (-math.inf, "found -inf"),
        (10**400, "found inf"),
        (torch.tensor(math.nan), "found nan"),
        ("1.0", "'1.0' of type str"),
        (b"1", "of type bytes"),
        (1j, "of type complex"),
        (decimal.Decimal("0.5"), "of type Decimal"),
        (object, "of type type"),
        ([1.0], "found a list of 1"),
        ((1.0, 2.0), "found a tuple of 2"),
        ({1.0}, "found a set of 1"),
        (np.array([1.0]), "of type ndarray"),
        (torch.tensor([1.0, 2.0]), "of type Tensor"),
        ({}, "at least one"),
        ({1: 1.0}, "names (strings)"),
        ({"a": math.nan}, "a finite number for 'a'"),
        ({"a": None}, "a finite number for 'a'"),
        ({"a": [1.0]}, "found a list of 1"),
        ({"a": 1e308, "b": 1e308}, "a finite sum"),
    ],
)
def test_what_is_no_reward_stops_at_once_and_names_function_and_sample(value: Any, found: str) -> None:
    def odd(sample: Sample) -> Any:
        return value

    with pytest.raises(RewardError) as caught:
        Judge(odd)([sample("five", group=3, member=2)])
    message = str(caught.value)
    for part in (found, "odd", "group 3", "member 2", "five", "2+2=", "hint"):
        assert part in message


def test_the_error_shows_the_last_message_of_a_chat() -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how much is 2+2?"}]
    with pytest.raises(RewardError, match=r"how much is 2\+2"):
        Judge(lambda _: "x")([sample(prompt=chat)])  # type: ignore[arg-type, return-value]


def test_names_must_stay_the_same_for_the_life_of_a_judge() -> None:
    judge = Judge(lambda sample: {"a": 1.0} if sample.completion == "4" else {"a": 1.0, "b": 1.0})
    judge([sample("4")])
    with pytest.raises(RewardError, match=r"\['a'\]: found \['a', 'b'\]"):
        judge([sample("5")])


def test_a_reward_that_is_no_function_is_refused() -> None:
    with pytest.raises(RewardError, match="found float"):
        Judge(1.0)  # type: ignore[arg-type]


def test_a_reward_that_raises_costs_its_own_sample_alone() -> None:
    def fragile(sample: Sample) -> float:
        return 1.0 / len(sample.completion)

    first, second, third = Judge(fragile)([sample("a"), sample(""), sample("ab")])
    assert (first.score, second.score, third.score) == (1.0, None, 0.5)
    assert second.kind is OutcomeKind.ERROR
    assert "ZeroDivisionError: float division by zero" in second.reason


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_time_out_is_an_outcome_of_its_own(asynchronous: bool) -> None:
    def late(sample: Sample) -> float:
        raise TimeoutError("after 5 s")

    async def late_too(sample: Sample) -> float:
        async with asyncio.timeout(0):
            await asyncio.sleep(60)
        return 1.0

    (outcome,) = Judge(late_too if asynchronous else late)([sample()])
    assert outcome.kind is OutcomeKind.TIMED_OUT
    assert outcome.reason.startswith("TimeoutError")


async def slow_length(sample: Sample) -> float:
    if sample.completion == "fail":
        raise LookupError("no judge today")
    if sample.completion == "cancel":
        raise asyncio.CancelledError
    await asyncio.sleep(0)
    return float(len(sample.completion))


def mixed(sample: Sample) -> Any:
    return slow_length(sample) if sample.member % 2 else -1.0


def check_mixed() -> None:
    texts = ["x", "four", "fail", "fail", "y", "cancel", "z", "ab"]
    outcomes = Judge(mixed)([sample(text, member=i) for i, text in enumerate(texts)])
    assert [outcome.score for outcome in outcomes] == [-1.0, 4.0, -1.0, None, -1.0, None, -1.0, 2.0]
    assert outcomes[3] == Outcome.error("LookupError: no judge today")
    assert outcomes[5].kind is OutcomeKind.ERROR


def test_async_and_sync_verdicts_keep_their_places() -> None:
    check_mixed()


def test_a_judge_works_inside_a_running_event_loop() -> None:
    async def main() -> None:
        check_mixed()

    asyncio.run(main())


def test_async_rewards_run_together() -> None:
    """Each waits until all have begun: one after another they would wait for ever."""
    begun: list[int] = []

    async def reward(sample: Sample) -> float:
        begun.append(sample.member)
        async with asyncio.timeout(10):
            while len(begun) < 5:
                await asyncio.sleep(0)
        return 1.0

    outcomes = Judge(reward)([sample(member=i) for i in range(5)])
    assert [outcome.score for outcome in outcomes] == [1.0] * 5


def test_rewards_may_share_what_is_bound_to_an_event_loop() -> None:
    """A semaphore is bound to the loop in which somebody first waits for it: another loop would refuse it."""
    seats = asyncio.Semaphore(1)

    async def seated(sample: Sample) -> float:
        async with seats:
            await asyncio.sleep(0)
        return 1.0

    judge = Judge(seated)
    scores = [[outcome.score for outcome in judge([sample(), sample()])] for _ in range(3)]

    async def main() -> list[float | None]:
        return [outcome.score for outcome in judge([sample(), sample()])]

    scores.append(asyncio.run(main()))
    judge.close()
    assert scores == [[1.0, 1.0]] * 4


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ramet judge"]


def test_a_judge_works_again_after_it_was_closed() -> None:
    judge, loops = Judge(slow_length), set(threads())
    judge.close()  # nothing to close is no mistake
    for _ in range(2):
        assert judge([sample("four")])[0].score == 4.0
        assert len(set(threads()) - loops) == 1
        judge.close()
        judge.close()
        assert not set(threads()) - loops


def test_closing_ends_what_the_rewards_left_running() -> None:
    ended = []

    async def idle() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def reward(sample: Sample) -> float:
        left.append(asyncio.create_task(idle()))
        await asyncio.sleep(0)
        return 1.0

    left: list[asyncio.Task[None]] = []
    judge = Judge(reward)
    assert judge([sample()])[0].score == 1.0
    assert not ended
    judge.close()
    assert ended == [True]


def test_a_judge_that_nobody_closes_takes_its_thread_with_it() -> None:
    known = set(threads())
    judge = Judge(slow_length)
    judge([sample()])
    (own,) = set(threads()) - known
    gone = weakref.ref(judge)
    del judge
    gc.collect()
    assert gone() is None
    own.join(timeout=30)
    assert not own.is_alive()


def test_a_program_that_closes_no_judge_ends_in_silence() -> None:
    program = """
from ramet.tasks.judge import Judge
from ramet.types import Sample, StopReason
async def reward(sample):
    return 1.0
judge = Judge(reward)
sample = Sample("2+2=", "4", (1,), (2,), {}, StopReason.EOS, group=0, member=0)
assert judge([sample])[0].score == 1.0
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("seconds", [None, 60.0])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_through_and_an_exit_names_the_reward(
    end: type[BaseException], asynchronous: bool, seconds: float | None
) -> None:
    def leaving(sample: Sample) -> float:
        if sample.completion == "end":
            raise end
        return 1.0

    async def leaving_too(sample: Sample) -> float:
        return leaving(sample)

    judge = Judge(leaving_too if asynchronous else leaving, seconds=seconds)
    expected = end if end is KeyboardInterrupt else RewardError
    with pytest.raises(expected) as raised:
        judge([sample(), sample("end", group=5, member=1), sample()])
    if end is SystemExit:
        first, hint = str(raised.value).splitlines()
        name = leaving_too if asynchronous else leaving
        assert first == f"reward {name.__qualname__} called sys.exit(), group 5, member 1: expected a value"
        assert hint.startswith("  hint: ")
    assert judge([sample()])[0].score == 1.0
    judge.close()


@pytest.mark.parametrize(("code", "call"), [(0, "sys.exit(0)"), (3, "sys.exit(3)"), ("no", "sys.exit('no')")])
def test_an_exit_is_named_with_its_code_and_its_part(code: object, call: str) -> None:
    def leaves(sample: Sample) -> float:
        sys.exit(code)  # type: ignore[arg-type]

    async def later(sample: Sample) -> float:
        return leaves(sample)

    for reward in (leaves, later):
        with pytest.raises(RewardError, match=re.escape(f"called {call}")):
            Judge(reward)([sample()])
        with pytest.raises(RewardError, match=re.escape(f"reward bad ({name_of(reward)}) called {call}")):
            Judge(weighted({"good": (lambda s: 1.0, 1.0), "bad": (reward, 1.0)}))([sample()])


@pytest.mark.parametrize("seconds", [None, 60.0])
@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError])
def test_what_looks_like_an_end_of_a_coroutine_costs_its_own_sample(
    error: type[BaseException], seconds: float | None
) -> None:
    def sync(sample: Sample) -> float:
        if sample.completion == "end":
            raise error
        return 1.0

    async def later(sample: Sample) -> float:
        await asyncio.sleep(0)
        return sync(sample)

    for reward in (sync, later, weighted({"a": (sync, 1.0)}), weighted({"a": (later, 1.0)})):
        judge = Judge(reward, seconds=seconds)
        samples = [sample("end"), sample()]
        kinds = [outcome.kind for outcome in judge(samples)]
        assert kinds == [OutcomeKind.ERROR, OutcomeKind.SCORED]
        outcome = asyncio.run(judge.judged(samples[0]))
        assert outcome.kind is OutcomeKind.ERROR
        assert error.__name__ in outcome.reason
        judge.close()


@pytest.mark.parametrize("seconds", [None, 60.0])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_changes_nothing_but_copies(asynchronous: bool, seconds: float | None) -> None:
    def greedy(sample: Sample) -> float:
        sample.row["seen"] = sample.row.get("seen", 0) + 1  # type: ignore[index]
        sample.row["deep"].append(1)
        sample.prompt[0]["content"] += "!"  # type: ignore[index]
        sample.messages[0]["content"] += "!"
        return float(sample.row["seen"] + len(sample.row["deep"]))

    async def later(sample: Sample) -> float:
        return greedy(sample)

    prompt = [{"role": "user", "content": "2+2?"}]
    row = {"prompt": prompt, "deep": []}
    given = [
        Sample(prompt, "4", (1,), (2,), row, StopReason.EOS, group=0, member=m, messages=(prompt[0],)) for m in (0, 1)
    ]
    judge = Judge(later if asynchronous else greedy, seconds=seconds)
    assert [outcome.score for outcome in [*judge(given), *judge(given)]] == [2.0] * 4
    assert row == {"prompt": [{"role": "user", "content": "2+2?"}], "deep": []}
    judge.close()


def test_an_interrupt_of_the_waiting_cancels_the_rewards() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless(sample: Sample) -> float:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    def interrupt() -> None:
        begun.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    known = set(threads())
    judge = Judge(endless)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        judge([sample()])
    assert ended.wait(30)
    for thread in set(threads()) - known:
        thread.join(30)
    assert not set(threads()) - known


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cancelled_reward_costs_its_own_sample_alone(asynchronous: bool) -> None:
    async def itself(sample: Sample) -> float:
        if sample.completion == "cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await asyncio.sleep(0)
        return 1.0

    def inside(sample: Sample) -> float:
        return asyncio.run(itself(sample))

    first, second, third = Judge(itself if asynchronous else inside)([sample(), sample("cancel"), sample()])
    assert (first.score, third.score) == (1.0, 1.0)
    assert (second.kind, second.reason) == (OutcomeKind.ERROR, "CancelledError: ")


def test_what_an_async_reward_says_is_checked_too() -> None:
    async def wrong(sample: Sample) -> float:
        return math.nan

    with pytest.raises(RewardError, match="wrong"):
        Judge(wrong)([sample()])


def test_no_samples_have_no_outcomes() -> None:
    assert Judge(slow_length)([]) == []


@settings(deadline=None, max_examples=30)
@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.just("raise")), max_size=8))
def test_outcomes_come_in_the_order_of_the_samples(values: list[Any]) -> None:
    def reward(sample: Sample) -> float | None:
        value = values[sample.member]
        if value == "raise":
            raise ValueError("on purpose")
        return value  # type: ignore[no-any-return]

    judged: Callable[..., list[Outcome]] = Judge(reward)
    outcomes = judged([sample(member=i) for i in range(len(values))])
    kinds = {None: OutcomeKind.ABSTAINED, "raise": OutcomeKind.ERROR}
    assert [outcome.kind for outcome in outcomes] == [kinds.get(value, OutcomeKind.SCORED) for value in values]
    assert [outcome.score for outcome in outcomes] == [v if isinstance(v, float) else None for v in values]


# ---------------------------------------------------------------- one sample inside a running event loop


def one(reward: Any, given: Sample | None = None, **options: Any) -> Outcome:
    return asyncio.run(Judge(reward, **options).judged(sample() if given is None else given))


@pytest.mark.parametrize("threads", [0, 1, 8])
@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (0.5, Outcome.scored(0.5)),
        (None, Outcome.abstained("judge returned None")),
        ({"a": 1.0, "b": 0.25}, Outcome.scored(1.25, {"a": 1.0, "b": 0.25})),
        (Outcome.error("gone"), Outcome.error("gone")),
        (KeyError("x"), Outcome.error("KeyError: 'x'")),
        (TimeoutError("late"), Outcome.timed_out("TimeoutError: late")),
        (asyncio.CancelledError(), Outcome.error("CancelledError: ")),
    ],
)
def test_a_verdict_in_a_loop_is_the_same_outcome_sync_or_async(value: Any, outcome: Outcome, threads: int) -> None:
    def judge(sample: Sample) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    async def judge_too(sample: Sample) -> Any:
        await asyncio.sleep(0)
        return judge(sample)

    for reward in (judge, judge_too, lambda s: judge_too(s)):
        found = one(reward, threads=threads)
        assert found.kind is outcome.kind
        assert (found.score, found.rewards) == (outcome.score, outcome.rewards)
        assert found.reason.split(" ")[1:] == outcome.reason.split(" ")[1:]  # but the function's name


def test_a_scorer_that_waits_holds_up_nobody() -> None:
    """It waits for what the loop does meanwhile: in the loop's own thread it would wait for ever."""
    ticks = threading.Event()

    def waits(sample: Sample) -> float:
        return 1.0 if ticks.wait(30) else 0.0

    async def main() -> list[Outcome]:
        judge = Judge(waits, threads=2)
        work = [asyncio.ensure_future(judge.judged(sample())) for _ in range(5)]
        await asyncio.sleep(0)
        ticks.set()
        return await asyncio.gather(*work)

    assert [outcome.score for outcome in asyncio.run(main())] == [1.0] * 5


def test_no_more_threads_than_allowed() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def counts(sample: Sample) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1
        return 1.0

    async def main() -> None:
        judge = Judge(counts, threads=3)
        await asyncio.gather(*(judge.judged(sample()) for _ in range(12)))

    asyncio.run(main())
    assert 1 <= most <= 3


@pytest.mark.parametrize("batch", [False, True])
def test_a_reward_over_its_time_is_a_time_out_and_the_others_are_judged(batch: bool) -> None:
    released, cancelled = threading.Event(), []

    def slow(sample: Sample) -> float:
        if sample.completion == "slow":
            released.wait(30)
        return 1.0

    async def slow_too(sample: Sample) -> float:
        try:
            await asyncio.sleep(60 if sample.completion == "slow" else 0)
        except asyncio.CancelledError:
            cancelled.append(sample.completion)
            raise
        return 1.0

    async def main(judge: Judge) -> list[Outcome]:
        outcomes = list(await asyncio.gather(judge.judged(sample("slow")), judge.judged(sample("quick"))))
        await asyncio.sleep(0.01)
        assert cancelled == (["slow"] if reward is slow_too else []), "it is not left running until the loop ends"
        return outcomes

    for reward in (slow, slow_too):
        judge = Judge(reward, seconds=0.05, threads=1 if batch else 8)
        late, quick = judge([sample("slow"), sample("quick")]) if batch else asyncio.run(main(judge))
        judge.close()
        assert late.kind is OutcomeKind.TIMED_OUT
        assert "took longer than 0.05 s" in late.reason
        assert quick.score == 1.0
    released.set()
    assert cancelled == ["slow"]


def test_who_is_cancelled_while_it_is_judged_cancels_the_reward() -> None:
    ended = []

    async def endless(sample: Sample) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return 1.0

    async def main() -> None:
        work = asyncio.ensure_future(Judge(endless).judged(sample()))
        await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await asyncio.sleep(0)
        assert ended == [True]

    asyncio.run(main())


@pytest.mark.parametrize("threads", [0, 8])
def test_a_mistake_or_an_exit_in_a_loop_is_raised(threads: int) -> None:
    def leaves(sample: Sample) -> float:
        raise SystemExit(3)

    with pytest.raises(RewardError, match="group 0, member 0"):
        one(lambda _: math.nan, threads=threads)
    with pytest.raises(RewardError, match=r"leaves called sys.exit\(3\), group 0, member 0"):
        one(leaves, threads=threads)


def test_a_coroutine_of_a_reward_that_is_late_is_closed() -> None:
    """It is made in a thread, after the time is over: a warning that nobody awaited it would be an error here."""
    released = threading.Event()

    async def rest() -> float:
        return 1.0

    def slow(sample: Sample) -> Any:
        released.wait(30)
        return rest()

    async def main() -> Outcome:
        outcome = await Judge(slow, seconds=0.01).judged(sample())
        released.set()
        await asyncio.sleep(0.05)
        return outcome

    assert asyncio.run(main()).kind is OutcomeKind.TIMED_OUT
    gc.collect()


@pytest.mark.parametrize("options", [{"seconds": 0}, {"seconds": math.inf}, {"seconds": -1.0}, {"threads": -1}])
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be (above|at least) 0"):
        Judge(lambda _: 1.0, **options)


def test_closing_ends_the_threads_of_sync_rewards_and_a_later_call_has_others() -> None:
    def reward_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "ramet reward"}

    known = reward_threads()
    judge = Judge(lambda sample: 1.0, threads=2)
    for _ in range(2):
        assert asyncio.run(judge.judged(sample())).score == 1.0
        own = reward_threads() - known
        assert own
        judge.close()
        assert not any(thread.is_alive() for thread in own)


def test_a_reward_that_does_not_say_that_it_may_be_closed_is_left_alone() -> None:
    class Held:
        closed = False

        def __call__(self, sample: Sample) -> float:
            return 1.0

        def close(self) -> None:
            self.closed = True

    class Reopened(Held, Reopening):
        pass

    held, reopened = Held(), Reopened()
    for reward in (held, reopened):
        judge = Judge(reward)
        assert judge([sample()])[0].score == 1.0
        judge.close()
    assert (held.closed, reopened.closed) == (False, True)
