"""Rewards of several parts: numbers by hand, and what becomes of a part that says nothing or fails."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.errors import ConfigError, RewardError
from ramet.tasks import Judge, format_reward, length_reward, weighted
from ramet.types import Outcome, OutcomeKind, Sample, StopReason


def sample(completion: str = "4", tokens: int = 1) -> Sample:
    return Sample("2+2=", completion, (1,), (7,) * tokens, {}, StopReason.EOS, group=0, member=0)


def judged(reward: Any, given: Sample | None = None) -> Outcome:
    (outcome,) = Judge(reward)([sample() if given is None else given])
    return outcome


def two(_: Sample) -> float:
    return 2.0


async def half(_: Sample) -> float:
    await asyncio.sleep(0)
    return 0.5


def silent(_: Sample) -> None:
    return None


def fails(_: Sample) -> float:
    raise LookupError("no dictionary")


async def fails_too(_: Sample) -> float:
    raise LookupError("no network")


async def late(_: Sample) -> float:
    raise TimeoutError("after 5 s")


def test_the_score_is_the_weighted_sum_and_the_log_shows_raw_parts() -> None:
    outcome = judged(weighted({"right": (two, 1.5), "form": (half, -0.5)}))
    assert outcome == Outcome(OutcomeKind.SCORED, 2.75, {"right": 2.0, "form": 0.5})
    assert judged(weighted({"right": (two, 0)})) == Outcome(OutcomeKind.SCORED, 0.0, {"right": 2.0})


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1))
def test_any_parts_and_weights(parts: dict[str, tuple[float, float]]) -> None:
    reward = weighted({name: (lambda _, own=value: own, weight) for name, (value, weight) in parts.items()})
    outcome = judged(reward)
    assert outcome.rewards == {name: value for name, (value, _) in parts.items()}
    assert outcome.score == pytest.approx(math.fsum(value * weight for value, weight in parts.values()), abs=1e-12)


def test_a_part_may_have_parts_of_its_own_or_be_weighted_itself() -> None:
    inner = weighted({"a": (two, 1.0), "b": (half, 2.0)})
    outcome = judged(weighted({"named": (lambda _: {"x": 1.0, "y": 2.0}, 0.5), "inner": (inner, 10.0)}))
    assert outcome.score == 0.5 * 3.0 + 10 * 3.0
    assert outcome.rewards == {
        "named": 3.0,
        "named.x": 1.0,
        "named.y": 2.0,
        "inner": 3.0,
        "inner.a": 2.0,
        "inner.b": 0.5,
    }


@pytest.mark.parametrize(
    ("other", "kind", "reason"),
    [
        (silent, OutcomeKind.ABSTAINED, r"other: other \(silent\) returned None"),
        (lambda _: Outcome.abstained("a tie"), OutcomeKind.ABSTAINED, "other: a tie"),
        (fails, OutcomeKind.ERROR, "other: LookupError: no dictionary"),
        (fails_too, OutcomeKind.ERROR, "other: LookupError: no network"),
        (late, OutcomeKind.TIMED_OUT, "other: TimeoutError: after 5 s"),
    ],
)
def test_a_part_without_a_score_decides_for_the_sample_and_the_others_are_logged(
    other: Any, kind: OutcomeKind, reason: str
) -> None:
    outcome = judged(weighted({"right": (two, 1.0), "other": (other, 0.0), "form": (half, 1.0)}))
    assert outcome.kind is kind
    assert outcome.score is None
    assert outcome.rewards == {"right": 2.0, "form": 0.5}
    assert re.fullmatch(reason, outcome.reason)


def test_an_error_comes_before_a_time_out_and_a_time_out_before_an_abstention() -> None:
    parts: dict[str, Any] = {"a": (silent, 1.0), "b": (late, 1.0), "c": (fails, 1.0)}
    assert judged(weighted(parts)).kind is OutcomeKind.ERROR
    del parts["c"]
    assert judged(weighted(parts)).kind is OutcomeKind.TIMED_OUT


def test_async_parts_run_together() -> None:
    begun: list[str] = []

    def waits(name: str) -> Any:
        async def part(_: Sample) -> float:
            begun.append(name)
            async with asyncio.timeout(10):
                while len(begun) < 2:
                    await asyncio.sleep(0)
            return 1.0

        return part

    assert judged(weighted({"a": (waits("a"), 1.0), "b": (waits("b"), 1.0)})).score == 2.0


@pytest.mark.parametrize("value", [math.nan, "1.0", [1.0], {"x": math.inf}])
def test_a_part_that_is_no_reward_stops_at_once_and_is_named(value: Any) -> None:
    reward = weighted({"right": (two, 1.0), "odd": (lambda _: value, 1.0)})
    with pytest.raises(RewardError, match="reward odd "):
        judged(reward)

    async def main() -> None:
        await Judge(reward).judged(sample())

    with pytest.raises(RewardError, match="reward odd "):
        asyncio.run(main())


def test_in_an_event_loop_sync_parts_run_in_a_thread_and_async_ones_in_the_loop() -> None:
    where: dict[str, threading.Thread] = {}

    def sync(_: Sample) -> float:
        where["sync"] = threading.current_thread()
        return 1.0

    async def other(_: Sample) -> float:
        where["async"] = threading.current_thread()
        return 1.0

    outcome = asyncio.run(Judge(weighted({"a": (sync, 1.0), "b": (other, 1.0)})).judged(sample()))
    assert outcome.score == 2.0
    assert where["async"] is threading.current_thread() is not where["sync"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "at least one"),
        ([], "at least one"),
        ({"": (two, 1.0)}, "expected names"),
        ({1: (two, 1.0)}, "expected names"),
        ({"a": two}, r"\(reward, weight\) for 'a'"),
        ({"a": (1.0, two)}, r"\(reward, weight\) for 'a'"),
        ({"a": (two, math.nan)}, "finite weight"),
        ({"a": (two, "1")}, "finite weight"),
        ({"a": (two, True)}, "finite weight"),
    ],
)
def test_parts_that_make_no_sense_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weighted(parts)


@pytest.mark.parametrize(
    ("longest", "soft", "tokens", "expected"),
    [
        (10, 4, 0, 0.0),
        (10, 4, 6, 0.0),
        (10, 4, 7, -0.25),
        (10, 4, 9, -0.75),
        (10, 4, 10, -1.0),
        (10, 4, 99, -1.0),
        (10, 0, 9, 0.0),
        (10, 0, 10, -1.0),
        (10, 10, 1, -0.1),
    ],
)
def test_the_length_reward_by_hand(longest: int, soft: int, tokens: int, expected: float) -> None:
    assert judged(length_reward(longest, soft), sample(tokens=tokens)).score == pytest.approx(expected)


@pytest.mark.parametrize(("longest", "soft"), [(0, 0), (10, -1), (10, 11), (1.5, 0), (10, True)])
def test_lengths_that_make_no_sense_are_refused(longest: Any, soft: Any) -> None:
    with pytest.raises(ConfigError, match="length_reward"):
        length_reward(longest, soft)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("  <think></think><answer>4</answer>\n", 1.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_reward_matches_the_whole(completion: str, expected: float) -> None:
    reward = format_reward(r"<think>.*</think>\s*<answer>.*</answer>")
    assert judged(reward, sample(completion)).score == expected
    assert judged(format_reward(re.compile("[a-z]+")), sample("abc")).score == 1.0


@pytest.mark.parametrize("pattern", ["(", "*", 3])
def test_what_is_no_expression_is_refused(pattern: Any) -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        format_reward(pattern)
