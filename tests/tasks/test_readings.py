"""Where an answer stands: the last box that closes, the last number, and its exact value."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.tasks.readings import as_number, boxed, last_number


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{1} and \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{7} then \boxed{never closed", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{{}", None),
        ("boxed{3}", None),
        ("", None),
    ],
)
def test_the_last_box_that_closes(text: str, found: str | None) -> None:
    assert boxed(text) == found


def slow_boxed(text: str) -> str | None:
    """Try each box from the last one on, and count its braces to the end."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for at in range(begin, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[begin:at].strip()
    return slow_boxed(text[:start])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "x ", "\\", "boxed{"]), max_size=16).map("".join))
def test_a_box_is_the_one_that_counting_its_braces_finds(text: str) -> None:
    assert boxed(text) == slow_boxed(text)


def test_boxes_that_never_close_are_read_once() -> None:
    """Once for each box would be forty thousand million steps: a model that repeats itself would hold up all others."""
    assert boxed("\\boxed{" * 100_000) is None
    assert boxed("\\boxed{" * 100_000 + "7}") == "7"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("42", "42"),
        ("1, 2, 3", "3"),
        ("It costs $1,250.50.", "1,250.50"),
        ("that is -3", "-3"),
        ("100-58", "58"),
        ("= 100 - 58 = 42km", "42"),
        ("about 3/4 of it", "3/4"),
        ("in 12,34", "12"),  # no commas between thousands
        ("x2 is H2O", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_as_it_is_written(text: str, found: str | None) -> None:
    assert last_number(text) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        (" +42 ", 42),
        ("−3", -3),
        ("1,000,000", 1_000_000),
        ("$1,250.50", Fraction(2501, 2)),
        ("0.1", Fraction(1, 10)),
        ("007", 7),
        ("-3/4", Fraction(-3, 4)),
        ("1.5/0.5", None),
        ("1/0", None),
        ("1,00", None),
        ("1e3", None),
        ("", None),
        ("-", None),
        ("9" * 101, None),
    ],
)
def test_the_value_is_exact(text: str, value: object) -> None:
    assert as_number(text) == value


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="0123456789,.-/$ \\boxed{}x", max_size=40))
def test_any_text_can_be_read(text: str) -> None:
    boxed(text)
    found = last_number(text)
    assert found is None or found in text


@settings(deadline=None, max_examples=50)
@given(st.integers(-(10**9), 10**9))
def test_a_number_that_is_written_is_read(number: int) -> None:
    for text in (str(number), f"{number:,}"):
        assert as_number(text) == number
        found = last_number(f"so it is {text}.")
        assert found is not None
        assert as_number(found) == number
