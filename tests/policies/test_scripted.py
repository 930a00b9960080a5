"""The scripted policy says what it is told to, and why it stopped."""

from __future__ import annotations

import pytest
import torch

from ramet.policies.scripted import ScriptedPolicy
from ramet.types import Draw, Request, Sampling, StopReason


def request(row: int = 0, *, limit: int = 3, stop_ids: tuple[int, ...] = ()) -> Request:
    return Request(row, torch.tensor([1, 5]), Sampling(limit, stop_ids=stop_ids), Draw(0, row, 0))


@pytest.mark.parametrize(
    ("script", "said", "stop"),
    [
        ([7, 2], [7, 2], StopReason.EOS),
        ([7, 8, 2], [7, 8, 2], StopReason.EOS),
        ([7, 8, 9, 2], [7, 8, 9], StopReason.NEW_TOKENS),
        ([7, 8, 9], [7, 8, 9], StopReason.NEW_TOKENS),
        ([7, 8, 4], [7, 8, 4], StopReason.STOP),
        ([4], [4], StopReason.STOP),
        ([7], [7], StopReason.STOP),
        ([], [], StopReason.STOP),
    ],
)
def test_the_script_is_said_up_to_the_limit(script: list[int], said: list[int], stop: StopReason) -> None:
    [answer] = ScriptedPolicy(lambda _: script, eos_token_id=2).complete([request(stop_ids=(4,))])
    assert (answer.tokens.tolist(), answer.stop) == (said, stop)
    assert answer.tokens.dtype == torch.int64
    assert answer.log_probs.tolist() == [0.0] * len(said)


def test_the_script_sees_each_request_and_the_version_is_the_policys() -> None:
    policy = ScriptedPolicy(lambda asked: [asked.row, int(asked.tokens[-1])])
    policy.version = 6
    answers = list(policy.complete([request(3), request(9)]))
    assert [(a.row, a.tokens.tolist(), a.version) for a in answers] == [(3, [3, 5], 6), (9, [9, 5], 6)]


def test_a_script_can_not_stop_at_a_text() -> None:
    asked = Request(5, torch.tensor([1]), Sampling(3, stop_ids=(4,), stop=("ab",)), Draw(0, 5, 0))
    with pytest.raises(
        ValueError, match=r"row 5: a script knows no texts, so it can not stop at \('ab',\): give stop_ids"
    ):
        list(ScriptedPolicy(lambda _: [4]).complete([asked]))
