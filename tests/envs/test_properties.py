"""What holds for any prompts and any answers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack

import ramet
from ramet.envs import LLMEnv, LLMHashingEnv
from ramet.forest.hashing import SipHash, fold, initial
from ramet.ragged import Ragged

TOKENS = st.lists(st.integers(1, 99), max_size=6)
ROWS = st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=4)
LAYOUTS = st.sampled_from(["padded", "jagged", "lazy"])


def state_of(prompts: list[list[int]], layout: str) -> TensorDictBase:
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    if layout == "lazy":
        return lazy_stack([TensorDict({"tokens": row, "attention_mask": torch.ones_like(row).bool()}) for row in rows])
    if layout == "jagged":
        ragged = Ragged.from_rows(rows)
        mask = Ragged(torch.ones_like(ragged.values).bool(), ragged.offsets)
        return TensorDict({"tokens": ragged.jagged(), "attention_mask": mask.jagged()}, [len(rows)])
    tokens, mask = Ragged.from_rows(rows).padded("left", 0)
    return TensorDict({"tokens": tokens, "attention_mask": mask}, [len(rows)])


def answered(td: TensorDictBase, answers: list[list[int]]) -> TensorDictBase:
    td, rows = td.copy(), [torch.tensor(answer, dtype=torch.int64) for answer in answers]
    if isinstance(td, TensorDict):
        return td.set("tokens_response", Ragged.from_rows(rows).jagged())
    for part, row in zip(td.unbind(0), rows, strict=True):
        part.set("tokens_response", row)
    return td


def observed(td: TensorDictBase) -> list[list[int]]:
    return [row.tolist() for row in ramet.rows(td.get("next"), "tokens")]


def make_env(**options: Any) -> LLMEnv:
    return LLMEnv(from_text=False, eos_token_id=0, **options)


@given(ROWS, LAYOUTS, st.booleans())
@settings(deadline=None, max_examples=60)
def test_stepping_one_state_twice_gives_two_independent_results(rows: Any, layout: str, again: bool) -> None:
    env = make_env()
    prompts, left, right = (list(column) for column in zip(*rows, strict=True))
    state = env.reset(state_of(prompts, layout))
    state = env.step_mdp(env.step(answered(state, [[7]] * len(rows))))  # a view of a buffer with room to grow
    one, other = env.step(answered(state, left)), env.step(answered(state, right))
    later = env.step(answered(env.step_mdp(one), right)) if again else None
    assert observed(one) == [[*prompt, 7, *answer] for prompt, answer in zip(prompts, left, strict=True)]
    assert observed(other) == [[*prompt, 7, *answer] for prompt, answer in zip(prompts, right, strict=True)]
    if later is not None:
        assert observed(later) == [[*prompt, 7, *a, *b] for prompt, a, b in rows]
    assert [row.tolist() for row in ramet.rows(state, "tokens")] == [[*prompt, 7] for prompt in prompts]


@given(st.lists(TOKENS, min_size=1, max_size=5), LAYOUTS, st.data())
@settings(deadline=None, max_examples=30)
def test_saving_a_few_rows_writes_only_their_live_tokens(prompts: Any, layout: str, data: Any) -> None:
    env = make_env()
    state = env.reset(state_of(prompts * 40, layout))
    for _ in range(3):
        state = env.step_mdp(env.step(answered(state, [[8] * 20] * len(state))))
    first = data.draw(st.integers(0, len(state) - 2))
    few = ramet.compact(lazy_stack([state[first], state[first + 1]]))  # tensordict 0.14 slices no jagged rows
    assert [row.tolist() for row in ramet.rows(few, "tokens")] == [
        [*(prompts * 40)[row], *[8] * 60] for row in (first, first + 1)
    ]
    live = sum(len(row) for row in ramet.rows(few, "tokens"))
    widest = 2 * max(len(row) for row in ramet.rows(state, "tokens"))  # padding is part of a padded row
    assert written(few) <= written(TensorDict({}, [2])) + 9 * max(live, widest) + 8000


def written(td: TensorDictBase) -> int:
    file = io.BytesIO()
    torch.save(td, file)
    return len(file.getvalue())


@given(st.lists(st.integers(0, 49), min_size=1, max_size=8), st.data())
@settings(deadline=None, max_examples=40)
def test_the_hash_of_a_prefix_does_not_depend_on_how_it_was_reached(prefix: list[int], data: Any) -> None:
    cut, place = data.draw(st.integers(0, len(prefix) - 1)), data.draw(st.integers(0, 2))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    env = LLMHashingEnv(vocab_size=50)
    expected = fold(torch.tensor([initial(SipHash())]), torch.tensor([prefix]))[0, -1].item()

    given_whole = env.reset(TensorDict({"observation": torch.tensor(prefix, dtype=dtype)}))
    assert given_whole["hashing"].tolist() == [expected]

    batch = torch.randint(50, (3, len(prefix)), generator=torch.Generator().manual_seed(cut))
    batch[place] = torch.tensor(prefix)
    state = env.reset(TensorDict({"observation": batch[:, :cut].to(dtype)}, [3]))
    for column in range(cut, len(prefix)):
        state = env.step_mdp(env.step(state.set("action", batch[:, column : column + 1])))
    assert state["hashing"][place].tolist() == [expected]


@pytest.mark.parametrize("layout", ["padded", "jagged", "lazy"])
def test_a_state_without_room_is_not_made_larger_by_compacting(layout: str) -> None:
    state = state_of([[1, 2, 3], [4]], layout)
    assert written(ramet.compact(state)) <= written(state) + 1000
