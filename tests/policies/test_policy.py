"""The protocol: every row is answered once; and the policy as a function of TensorDicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from ramet import ragged
from ramet.errors import ModelError
from ramet.policies.policy import Actor, Policy, by_row
from ramet.types import Completion, Key, Request, Sampling, StopReason


def answer(row: int, *tokens: int) -> Completion:
    return Completion(row, torch.tensor(tokens, dtype=torch.int64), torch.zeros(len(tokens)), StopReason.EOS, 0)


class Recorder(Policy):
    """Answer in reverse order with the row's last token twice, and remember what was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        self.asked = list(requests)
        for request in reversed(requests):
            last = request.tokens[-1:]
            yield Completion(request.row, last.repeat(2), torch.full((2,), -0.5), StopReason.EOS, 3)


def jagged(*rows: list[int]) -> torch.Tensor:
    return ragged.Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows]).jagged()


def test_completions_are_put_in_the_order_of_their_rows() -> None:
    found = by_row(iter([answer(2, 7), answer(0, 5), answer(1, 6)]), 3)
    assert [completion.row for completion in found] == [0, 1, 2]
    assert by_row(iter([]), 0) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 0], "second answer to row 0"),
        ([0], r"no answer to rows \[1\]"),
        ([0, 2], "to row 2"),
        ([0, -1], "to row -1"),
    ],
)
def test_a_row_without_exactly_one_answer_is_an_error(rows: list[int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        by_row(iter([answer(row, 1) for row in rows]), 2)


def test_an_actor_writes_ragged_responses_beside_the_tokens() -> None:
    policy = Recorder()
    td = TensorDict({Key.TOKENS: jagged([1, 2, 3], [4])}, batch_size=[2])
    out = Actor(policy, Sampling(max_new_tokens=5), seed=9)(td)
    assert [row.tolist() for row in ragged.rows(out, Key.RESPONSE)] == [[3, 3], [4, 4]]
    assert [row.tolist() for row in ragged.rows(out, Key.LOG_PROBS)] == [[-0.5, -0.5]] * 2
    assert [request.tokens.tolist() for request in policy.asked] == [[1, 2, 3], [4]]
    assert [(r.draw.seed, r.draw.prompt, r.draw.member, r.draw.turn) for r in policy.asked] == [
        (9, 0, 0, 0),
        (9, 1, 0, 0),
    ]


def test_an_actor_takes_the_rows_address_from_group_member_and_turn() -> None:
    policy = Recorder()
    actor = Actor(policy, Sampling(max_new_tokens=5))
    td = TensorDict(
        {Key.TOKENS: jagged([1], [1], [1]), Key.GROUP: torch.tensor([7, 7, 8]), Key.MEMBER: torch.tensor([0, 1, 0])},
        batch_size=[3],
    )
    for turn in range(2):
        td = actor(td)
        assert [(r.draw.prompt, r.draw.member, r.draw.turn) for r in policy.asked] == [
            (7, 0, turn),
            (7, 1, turn),
            (8, 0, turn),
        ]


def test_an_actor_asks_for_no_row_that_is_done() -> None:
    policy = Recorder()
    td = TensorDict(
        {Key.TOKENS: jagged([1], [2], [3]), "done": torch.tensor([[False], [True], [False]])}, batch_size=[3]
    )
    out = Actor(policy, Sampling(max_new_tokens=5))(td)
    assert [row.tolist() for row in ragged.rows(out, Key.RESPONSE)] == [[1, 1], [], [3, 3]]
    assert [request.draw.prompt for request in policy.asked] == [0, 2]
    assert out[Key.STOP] == ["eos", None, "eos"], "and says why it stopped where it was asked"
    td["done"] = torch.ones(3, 1, dtype=torch.bool)
    assert [row.tolist() for row in ragged.rows(Actor(policy, Sampling(5))(td), Key.RESPONSE)] == [[], [], []]


def test_an_actor_takes_a_single_row() -> None:
    td = TensorDict({Key.TOKENS: torch.tensor([5, 6])}, batch_size=[])
    out = Actor(Recorder(), Sampling(max_new_tokens=5))(td)
    assert out[Key.RESPONSE].tolist() == [6, 6]
    assert out["turn"].shape == ()


def test_an_actor_takes_a_lazy_stack_of_rows_of_different_lengths() -> None:
    rows = [TensorDict({Key.TOKENS: torch.tensor(ids)}, []) for ids in ([1, 2, 3], [4])]
    policy = Recorder()
    out = Actor(policy, Sampling(max_new_tokens=5))(LazyStackedTensorDict(*rows))
    assert [row.tolist() for row in ragged.rows(out, Key.RESPONSE)] == [[3, 3], [4, 4]]
