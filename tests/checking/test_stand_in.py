"""What stands for a model: bytes as tokens, calls of tools read as a model's are, and all that is open is closed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.checking import StandIn
from ramet.checking.stand_in import byte_tokenizer
from ramet.tasks import Task
from ramet.types import Episode, Sample, StopReason

TOKENIZER = byte_tokenizer()


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_a_token_is_a_byte_and_decoding_gives_the_text_back(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_are_none_where_they_are_written_out() -> None:
    text = "<eos><bos>"
    assert TOKENIZER(text)["input_ids"] == [256, *text.encode()]
    assert TOKENIZER.decode([256, 97, 257], skip_special_tokens=True) == "a"


def double(number: int) -> int:
    """Return twice a number."""
    return 2 * number


def test_a_reward_sees_the_bytes_of_all_turns_and_their_ends() -> None:
    def player(episode: Episode) -> str:
        heard = episode.messages[-1]
        return f"\u00e9 {heard['content']}" if episode.turns else "[double(number=21)]"

    seen: list[Sample] = []

    def score(sample: Sample) -> float:
        seen.append(sample)
        return 1.0

    row = {"prompt": "21?"}
    with StandIn(Task("t", [row], [], score, tools=(double,), max_turns=3)) as stand_in:
        shown = asyncio.run(stand_in.alone(row, player))
    first, second = seen
    assert first == second
    assert first.completion == "\u00e9 42"
    assert first.completion_tokens == (*b"[double(number=21)]", 257, *"\u00e9 42".encode(), 257)
    assert first.prompt_tokens == (256, *b"21?")
    assert [message["role"] for message in shown.messages] == ["user", "assistant", "tool", "assistant"]
    assert shown.played is not None
    assert shown.played.stop is StopReason.EOS


def test_what_broke_is_said_and_costs_its_own_episode() -> None:
    def reply(episode: Episode) -> Any:
        return 1 / 0 if episode.text == "a" else b"bytes" if episode.text == "b" else None

    row = {"prompt": "go"}
    with StandIn(Task("t", [row], [], lambda sample: 1.0, reply=reply, max_turns=2)) as stand_in:
        shown = [asyncio.run(stand_in.alone(row, lambda episode, said=said: said)) for said in "abc"]  # type: ignore[misc]
        silent = asyncio.run(stand_in.alone(row, lambda episode: 7))  # type: ignore[arg-type, return-value]
    assert shown[0].broken == "reply raised ZeroDivisionError: division by zero"
    assert shown[1].broken.startswith("reply raised WrongReply: reply ")
    assert (shown[2].broken, shown[2].outcome is None) == ("", False)
    assert silent.broken == "the player raised TypeError: expected text: found int"


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    row = {"prompt": "go"}
    stand_in = StandIn(Task("t", [row], [], lambda sample: 1.0, tools=(double,), max_turns=2))
    asyncio.run(stand_in.alone(row, lambda episode: "" if episode.turns else "[double(number=21)]"))
    stand_in.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
