"""Scores that take wrong answers for right ones are found out, each by the check that is for it, and by that alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.checking import check_task
from ramet.checking.wrong import LONG, NUMBERS, REFUSAL, RUBBISH, Tally, Wrong, wrong_answers
from ramet.tasks import Task
from ramet.types import Episode, Sample

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5, 9) for b in range(5, 30, 6)]
ANSWERS = {row["answer"] for row in ROWS}


def right(sample: Sample) -> float:
    return float(sample.completion.strip() == sample.row["answer"])


def or_else(rule: Callable[[str, str], object]) -> Callable[[Sample], float]:
    """Return a score that is full for the right answer, and for what a rule of (completion, answer) lets pass."""
    return lambda sample: float(right(sample) == 1.0 or bool(rule(sample.completion, sample.row["answer"])))


BAD: dict[str, Callable[[Sample], float]] = {
    "everything": lambda sample: 1.0,
    "anything at all": or_else(lambda said, answer: said.strip()),
    "nothing": or_else(lambda said, answer: not said.strip()),
    "what contains the answer": or_else(lambda said, answer: answer in said),
    "a word that is the answer": or_else(lambda said, answer: answer in said.split()),
    "a line that is the answer": or_else(lambda said, answer: answer in said.splitlines()),
    "many numbers": or_else(lambda said, answer: len(said.split()) > 50 and answer in said.split()),
    "any number": or_else(lambda said, answer: said.strip().isdigit() and len(said) < 9),
    "an answer of some row": or_else(lambda said, answer: said in ANSWERS),
    "the beginning": or_else(lambda said, answer: said and answer.startswith(said)),
    "all but the last digit": or_else(lambda said, answer: said.isdigit() and said[:-1] == answer[:-1]),
    "a refusal": or_else(lambda said, answer: "sorry" in said),
    "the prompt": or_else(lambda said, answer: said.endswith("=")),
    "very long text": or_else(lambda said, answer: len(said) > 1000),
}


def sums(score: Callable[[Sample], float]) -> Task:
    return Task("sums", ROWS[:14], ROWS[14:], score)


def say(episode: Episode) -> str:
    return str(episode.row["answer"])


def failed(task: Task, episodes: int = 8) -> list[str]:
    return [f.name for f in check_task(task, episodes=episodes).findings if f.passed is False]


@pytest.mark.parametrize("name", BAD)
def test_a_score_that_is_too_kind_fails_with_an_answer_and_with_a_player_alone(name: str) -> None:
    task = sums(BAD[name])
    assert failed(replace(task, answer=lambda row: str(row["answer"]))) == ["wrong"]
    assert failed(replace(task, player=say)) == ["wrong"]


def test_a_score_that_is_right_passes() -> None:
    assert failed(replace(sums(right), answer=lambda row: str(row["answer"]))) == []
    assert failed(replace(sums(right), player=say)) == []


def double(number: int) -> str:
    """Return twice a number."""
    return str(2 * number)


TOOL_ROWS = [{"prompt": f"2*{n}=", "n": n, "answer": str(2 * n)} for n in range(101, 125)]


def call_and_copy(episode: Episode) -> str:
    if not episode.turns:
        return f"[double(number={episode.row['n']})]"
    return str(episode.messages[-1]["content"]).strip()


def called(sample: Sample) -> bool:
    return any(message["role"] == "tool" for message in sample.messages)


def heard(sample: Sample) -> bool:
    return any(message.get("content") == sample.row["answer"] for message in sample.messages)


TOOL_BAD: dict[str, Callable[[Sample], float]] = {
    "whatever is said after a call": lambda sample: float(called(sample)),
    "the answer of the tool, whatever is said": lambda sample: float(heard(sample)),
    "a call, or the answer": lambda sample: float("[double(" in sample.completion or right(sample) == 1.0),
    "something": lambda sample: float(right(sample) == 1.0 or sample.completion.strip() != ""),
    "the right one of several": lambda sample: float(sample.row["answer"] in sample.completion),
    "another row's": or_else(lambda said, answer: said in {row["answer"] for row in TOOL_ROWS}),
}


def with_tool(score: Callable[[Sample], float]) -> Task:
    return Task("twice", TOOL_ROWS[:20], TOOL_ROWS[20:], score, tools=(double,), max_turns=3, player=call_and_copy)


@pytest.mark.parametrize("name", TOOL_BAD)
def test_a_score_of_a_task_with_a_tool_that_is_too_kind_fails(name: str) -> None:
    assert failed(with_tool(TOOL_BAD[name])) == ["wrong"]


def test_a_tool_need_not_be_used_by_who_knows_the_answer() -> None:
    assert failed(with_tool(right)) == []


def test_where_what_was_done_is_all_that_counts_nothing_need_be_said() -> None:
    """A switch is turned by a tool; the last turn says "done", and is not judged."""

    def switch(number: int, episode: Episode) -> str:
        """Turn a switch on."""
        episode.state.append(number)
        return "on"

    def turn_and_say(episode: Episode) -> str:
        return "Done." if episode.turns else f"[switch(number={episode.row['n']})]"

    def begin(row: object, rng: random.Random) -> list[int]:
        return []

    def turned(sample: Sample) -> float:
        return float(sample.state == [sample.row["n"]])

    task = with_tool(turned)
    assert failed(replace(task, tools=(switch,), begin=begin, player=turn_and_say)) == []


def test_the_finding_says_how_many_may_be_right_by_chance() -> None:
    def even(sample: Sample) -> float:
        """Take any answer with the right last digit: an answer of another row has it now and then."""
        said = sample.completion.strip()
        return float(said.isdigit() and said[-1] == sample.row["answer"][-1] and len(said) < 9)

    task = replace(sums(right), player=say, score=even)
    (finding,) = [finding for finding in check_task(task, episodes=8).findings if finding.name == "wrong"]
    assert finding.passed is True
    assert "earn it by chance, as half of a kind may" in finding.detail
    task = replace(task, score=BAD["any number"])
    (finding,) = [finding for finding in check_task(task, episodes=8).findings if finding.name == "wrong"]
    assert "8 of 8 earn 1, and half may by chance" in finding.detail


def test_the_rule_is_counted_kind_by_kind() -> None:
    tally = Tally()
    for earned in ("one", "", "two", ""):
        tally.count(Wrong("odd", ("x",)), earned)
    for _ in range(20):
        tally.count(Wrong("even", ("x",)), "")
    assert tally.verdict(1.0) == (True, "22 wrong answers do not earn 1; 2 earn it by chance, as half of a kind may")
    tally.count(Wrong("odd", ("x",)), "three")
    assert tally.verdict(1.0) == (False, "odd: 3 of 5 earn 1, and half may by chance: one")
    tally.count(Wrong("rubbish", ("x",), surely=True), "four")
    assert tally.verdict(1.0) == (False, "rubbish: four")


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
TURNS = st.lists(TEXTS, min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(TURNS, st.lists(TURNS, max_size=4), st.booleans())
def test_no_wrong_answer_is_the_right_one(turns: list[str], others: list[list[str]], player: bool) -> None:
    row = {"prompt": "say it"}
    found = list(wrong_answers(row, turns, others, by_player=player, stateless=True))
    whole = [wrong for wrong in found if wrong.kind != "nothing, rubbish or very long text"]
    assert all(
        wrong.turns[-1].strip() != turns[-1].strip() for wrong in whole if not wrong.kind.startswith("the turns")
    )
    sure = [wrong.turns for wrong in found if wrong.surely]
    spoilt = next(wrong for wrong in found if wrong.kind.endswith("spoilt"))
    assert sure == [("",), (" \n",), (RUBBISH,), *((text,) for text in LONG), *([] if player else [spoilt.turns])]
    assert len(spoilt.turns) == len(turns)
    assert all(one != other for one, other in zip(spoilt.turns, turns, strict=True))


def test_without_a_reference_there_are_those_that_need_none() -> None:
    found = [wrong.turns for wrong in wrong_answers(ROWS[0], [], [], by_player=False, stateless=True)]
    assert found[-3:] == [(REFUSAL,), ("5+5=",), (NUMBERS,)]
    assert NUMBERS.split() == [str(number) for number in range(101)]


def test_long_texts_are_said_twice_in_an_episode_and_turns_are_said_in_order() -> None:
    long, turns = Wrong("long", ("9" * 5000,)), Wrong("turns", ("a", "b"))
    episode = Episode({}, [], random.Random(0))
    assert [turns.write(replace(episode, turns=turn)) for turn in range(4)] == ["a", "b", "b", "b"]
    assert [len(long.write(replace(episode, turns=turn))) for turn in range(4)] == [5000, 5000, 100, 100]
