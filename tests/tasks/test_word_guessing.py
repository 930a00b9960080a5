"""The word game: hints by hand and by a slow rule, the turns, and the end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.checking import Shown, StandIn, check_task
from ramet.errors import ConfigError
from ramet.tasks import Judge, Task
from ramet.tasks.word_guessing import hint, word_guessing
from ramet.tasks.words import WORDS
from ramet.types import Episode, Sample, StopReason


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [
        ("lamp", "lamp", "===="),
        ("palm", "lamp", "+=++"),
        ("ruin", "lamp", "----"),
        ("stops", "spots", "=+=+="),
        ("eerie", "green", "+++--"),
        ("allow", "label", "+++--"),
        ("geese", "green", "=+=--"),
    ],
)
def test_hints_worked_out_by_hand(guess: str, word: str, marks: str) -> None:
    assert hint(guess, word) == marks


WORD = st.text(alphabet="abc", min_size=4, max_size=4)


@settings(deadline=None, max_examples=200)
@given(WORD, WORD)
def test_a_letter_is_marked_as_often_as_the_word_has_it(guess: str, word: str) -> None:
    marks = hint(guess, word)
    for letter in "abc":
        marked = sum(mark != "-" for mark, own in zip(marks, guess, strict=True) if own == letter)
        assert marked == min(guess.count(letter), word.count(letter))
        own = [mark for mark, at in zip(marks, guess, strict=True) if at == letter and mark != "="]
        assert own == sorted(own)  # "+" comes before "-": marked from left to right
    assert [mark == "=" for mark in marks] == [a == b for a, b in zip(guess, word, strict=True)]


def said(task: Task, word: str, *guesses: str) -> list[Any]:
    """Play guesses on a word; return the replies."""
    row = {"prompt": task.train[0]["prompt"], "answer": word}
    episode = Episode(row, [], random.Random(0))
    replies = []
    for guess in guesses:
        episode.messages.append({"role": "assistant", "content": guess})
        episode.turns += 1
        assert task.reply is not None
        replies.append(task.reply(episode))
    return replies


def test_the_text_form_hints_on_a_line_of_its_own_and_ends_with_the_word() -> None:
    task = word_guessing(guesses=4)
    assert task.train[0]["prompt"] == "4:"
    assert said(task, "lamp", "palm", " LAMP\n") == ["\n+=++\n", None]
    assert said(task, "lamp", "a", "palms", "pa1m") == ["\n?\n"] * 3
    assert said(task, "lamp", "palm", "palm", "palm", "palm")[-1] is None, (
        "the last guess ends it, and is no truncation"
    )
    assert task.max_turns == 4


def test_the_chat_form_says_the_rules_and_what_is_left() -> None:
    task = word_guessing(form="chat", guesses=3, letters=5)
    (message,) = task.train[0]["prompt"]
    assert "5 letters" in message["content"]
    assert "3 guesses" in message["content"]
    first, second = said(task, "spots", "stops", "no word")
    assert first == "stops: =+=+=\nYou have 2 guesses left."
    assert second == "That is no word of 5 letters.\nYou have 1 guess left."


def test_the_last_guess_counts() -> None:
    task = word_guessing()
    row = task.train[0]
    for completion, expected in ((row["answer"], 1.0), (f" {row['answer'].upper()} ", 1.0), ("", 0.0), ("zzzz", 0.0)):
        sample = Sample(row["prompt"], completion, (), (), row, StopReason.EOS, group=0, member=0)
        assert Judge(task.score)([sample])[0].score == expected


async def plays(task: Task, row: Any) -> Shown:
    assert task.player is not None
    with StandIn(task) as stand_in:
        return await stand_in.alone(row, task.player)


def test_the_reference_agrees_with_all_hints_and_wins() -> None:
    import asyncio

    task = word_guessing(guesses=4)
    lengths = []
    for row in task.held_out:
        shown = asyncio.run(plays(task, row))
        assert shown.written[-1] == row["answer"]
        for later, guess in enumerate(shown.written[:-1], 1):
            for after in shown.written[later:]:
                assert hint(guess, after) == hint(guess, row["answer"])
        lengths.append(len(shown.written))
    assert max(lengths) <= 4
    assert min(lengths) < max(lengths)


def test_words_are_held_out_whatever_the_seed() -> None:
    one, other = word_guessing(seed=0), word_guessing(seed=1, train_size=20)
    assert one.held_out == other.held_out
    assert {row["answer"] for row in one.held_out}.isdisjoint(row["answer"] for row in one.train)
    assert other.train != one.train[:20]
    assert word_guessing(held_out_size=5).held_out == one.held_out[:5]
    assert len(one.train) + len(one.held_out) == len(WORDS[4])


def test_the_words_are_words() -> None:
    for length, words in WORDS.items():
        assert len(words) > 100
        assert all(len(word) == length and word.isascii() and word.islower() and word.isalpha() for word in words)
        assert list(words) == sorted(set(words))


def test_chance_is_that_of_different_guesses() -> None:
    assert word_guessing(guesses=6).chance == pytest.approx(6 / len(WORDS[4]))
    assert word_guessing(guesses=1000).chance == 1.0
    assert word_guessing(held_out_size=0).chance is None


@pytest.mark.parametrize("form", ["text", "chat"])
def test_the_task_is_proved(form: str) -> None:
    report = check_task(word_guessing(form=form), build=lambda seed: word_guessing(seed=seed, form=form))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"letters": 2}, "letters: expected a whole number from 3 on"),
        ({"letters": 6}, "at most 5"),
        ({"letters": [4, 4]}, "at most once"),
        ({"guesses": 0}, "guesses"),
        ({"form": 3}, "form"),
        ({"held_out_size": 5000}, "training words are more than"),
        ({"train_size": 5000}, "5000 training words are more than"),
        ({"train_size": 0}, "train_size"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        word_guessing(**options)
