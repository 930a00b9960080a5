"""Why an episode ended: each limit is a truncation of its own, an end is none."""

from __future__ import annotations

import pytest

from ramet.types import StopReason

LIMITS = {StopReason.NEW_TOKENS, StopReason.CONTEXT, StopReason.PROMPT_TOO_LONG, StopReason.TURNS, StopReason.TIMEOUT}
ENDS = {StopReason.EOS, StopReason.STOP, StopReason.ERROR}


@pytest.mark.parametrize("reason", StopReason, ids=lambda reason: reason.name)
def test_a_limit_is_a_truncation_and_an_end_is_none(reason: StopReason) -> None:
    assert reason in LIMITS | ENDS
    assert reason.truncated is (reason in LIMITS)


def test_each_limit_says_which_it_is() -> None:
    assert sorted(reason.value for reason in LIMITS) == [
        "context_limit",
        "new_token_limit",
        "prompt_too_long",
        "timeout",
        "turn_limit",
    ]
