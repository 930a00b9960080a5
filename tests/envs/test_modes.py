"""Every mode of `LLMEnv` with every other: refused, or equal to rows that are plain Python lists.

Each pair of modes is in `make test`, the full product in `make test-all`. The oracle holds a prompt and the answers of
each row in lists, and knows nothing of tensors, layouts, masks or batches.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

import ramet
from ramet.envs import LLMEnv
from ramet.models.tiny import tiny_tokenizer
from ramet.ragged import Ragged

AXES: dict[str, tuple[Any, ...]] = {
    "from_text": (True, False),
    "batch": ((), (1,), (3,)),
    "layout": ("dense", "padded", "jagged", "lazy"),
    "mask": (True, False),
    "eos": (True, False),
    "assign_reward": (True, False),
    "assign_done": (True, False),
    "tokenizer": (True, False),
    "repeats": (None, 2),
    "group_repeats": (True, False),
    "partial": (True, False),
    "zero": (True, False),
    "nested": (True, False),
}
Mode = dict[str, Any]
STACK = {"dense": "as_padded_tensor", "padded": "as_padded_tensor", "jagged": "as_nested_tensor", "lazy": None}
TOKENIZER = tiny_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
LONG_AND_SHORT = ("ab", "c", "defg", "hi", "jklmn")
EQUAL = ("abc", "def", "ghi", "jkl", "mno")


def ids_of(text: str) -> list[int]:
    return [int(i) for i in TOKENIZER(text, add_special_tokens=False)["input_ids"]]


@dataclass
class Row:
    """What a row must hold."""

    prompt: str
    answers: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return ids_of(self.prompt) + [token for answer in self.answers for token in answer]

    @property
    def text(self) -> str:
        return self.prompt + "".join(TOKENIZER.decode(answer, skip_special_tokens=True) for answer in self.answers)


@dataclass
class Keys:
    """Where a mode keeps what it has."""

    tokens: Any
    text: Any
    mask: Any
    action: Any
    response: Any
    reward: Any


def keys_of(mode: Mode) -> Keys:
    if not mode["nested"]:
        action = "text_response" if mode["from_text"] else "tokens_response"
        return Keys("tokens", "text", "attention_mask", action, "tokens_response", "reward")
    action = ("act", "said")
    response = "tokens_response" if mode["from_text"] else action
    return Keys(("obs", "ids"), ("obs", "words"), ("obs", "attention_mask"), action, response, ("agent", "reward"))


def prompts_of(mode: Mode) -> tuple[str, ...]:
    return EQUAL if mode["layout"] == "dense" else LONG_AND_SHORT


def make_env(mode: Mode) -> Any:
    keys, prompts = keys_of(mode), prompts_of(mode)
    bare = mode["from_text"] or mode["tokenizer"]
    loader: list[Any] = list(prompts) if bare else [torch.tensor(ids_of(prompt)) for prompt in prompts]
    with warnings.catch_warnings():
        if not mode["eos"]:
            warnings.filterwarnings("ignore", "eos_token_id", UserWarning)
        return LLMEnv.from_dataloader(
            loader,
            tokenizer=TOKENIZER if mode["tokenizer"] else None,
            token_key=keys.tokens,
            str_key=keys.text,
            attention_key=keys.mask,
            action_key=keys.action,
            reward_key=keys.reward,
            from_text=mode["from_text"],
            batch_size=mode["batch"],
            has_attention=mode["mask"],
            assign_reward=mode["assign_reward"],
            assign_done=mode["assign_done"],
            stack_method=STACK[mode["layout"]],
            repeats=mode["repeats"],
            group_repeats=mode["group_repeats"],
            eos_token_id=EOS if mode["eos"] else None,
        )


def stream_of(mode: Mode) -> Iterator[tuple[str, int, int]]:
    """Prompts in order, each as often as it is repeated, with the number of its group and its place in it."""
    prompts, repeats = prompts_of(mode), mode["repeats"] or 1
    for group in itertools.count():
        for repeat in range(repeats):
            yield prompts[group % len(prompts)], group, repeat


def answers_at(step: int, count: int, mode: Mode) -> list[list[int]]:
    """Two tokens for each row, and then one; nothing for the first row, or the last, where answers may be empty."""
    letters = ids_of("pqrstuvwxyz")
    if step == 0:
        answers = [letters[row : row + 2] for row in range(count)]
        if mode["zero"]:
            answers[count - 1 if mode["nested"] else 0] = []
        return answers
    answers = [[letters[-1 - row]] for row in range(count)]
    if mode["eos"]:
        answers[-1] = [EOS]
    return answers


def put(td: TensorDictBase, key: Any, answers: list[list[int]]) -> None:
    rows = [torch.tensor(answer, dtype=torch.int64) for answer in answers]
    if not td.batch_dims:
        td.set(key, rows[0])
    elif isinstance(td, LazyStackedTensorDict):
        for part, row in zip(td.unbind(0), rows, strict=True):
            part.set(key, row)
    elif len({len(row) for row in rows}) == 1:
        td.set(key, torch.stack(rows))
    else:
        td.set(key, Ragged.from_rows(rows).jagged())


def act(td: TensorDictBase, mode: Mode, answers: list[list[int]]) -> TensorDictBase:
    """Write answers as a policy of this mode does: tokens, and text where nothing makes it of them."""
    keys, td = keys_of(mode), td.copy()
    if not mode["from_text"] or mode["tokenizer"] or mode["eos"]:
        put(td, keys.response, answers)
    if mode["from_text"] and not mode["tokenizer"]:
        texts = [TOKENIZER.decode(answer, skip_special_tokens=True) for answer in answers]
        td.set(keys.action, texts if td.batch_dims else texts[0])
    return td


def has_tokens(mode: Mode) -> bool:
    return not mode["from_text"] or bool(mode["tokenizer"])


def has(td: TensorDictBase, key: Any) -> bool:
    try:
        ramet.rows(td, key)
    except KeyError:
        return False
    return True


def is_padded(td: TensorDictBase, key: Any) -> bool:
    if isinstance(td, LazyStackedTensorDict):
        return False
    value = td.get(key)
    return isinstance(value, Tensor) and not value.is_nested


def check_observation(td: TensorDictBase, mode: Mode, rows: list[Row]) -> None:
    keys = keys_of(mode)
    check_layout(td, mode)
    if has_tokens(mode):
        found = [row.tolist() for row in ramet.rows(td, keys.tokens, mask=keys.mask if mode["mask"] else None)]
        if mode["mask"] or not is_padded(td, keys.tokens):
            assert found == [row.tokens for row in rows]
        else:
            width = max(map(len, found))
            for observed, row in zip(found, rows, strict=True):
                assert observed[width - len(row.tokens) :] == row.tokens
                assert not any(observed[: width - len(row.tokens)])
        assert has(td, keys.mask) == mode["mask"]
    if mode["from_text"]:
        assert ramet.rows(td, keys.text) == [row.text for row in rows]


def check_layout(td: TensorDictBase, mode: Mode) -> None:
    """What comes out has the layout that was asked for: lazy stacks and jagged rows stay such."""
    if not has_tokens(mode) or not td.batch_dims:
        return
    lazy = mode["layout"] == "lazy" and not mode["tokenizer"]
    assert isinstance(td, LazyStackedTensorDict) == lazy
    if not lazy:
        ragged_by_tokenizer = mode["tokenizer"] and not mode["mask"]
        nested = mode["layout"] == "jagged" or ragged_by_tokenizer
        assert td.get(keys_of(mode).tokens).is_nested == nested


def check_groups(td: TensorDictBase, expected: list[tuple[str, int, int]]) -> None:
    assert td["group_id"].reshape(-1).tolist() == [group for _, group, _ in expected]
    assert td["repeat_index"].reshape(-1).tolist() == [repeat for _, _, repeat in expected]


def check_result(td: TensorDictBase, mode: Mode, answers: list[list[int]]) -> None:
    """Flags of shape [..., 1], rewards and flags for each token as long as the answers."""
    keys, size = keys_of(mode), tuple(td.batch_size)
    next_td = td.get("next")
    ended = [mode["eos"] and EOS in answer for answer in answers]
    for flag, expected in (("done", ended), ("terminated", ended), ("truncated", [False] * len(answers))):
        assert next_td[flag].shape == (*size, 1)
        assert next_td[flag].dtype is torch.bool
        assert next_td[flag].reshape(-1).tolist() == expected
    if mode["assign_reward"]:
        rewards = ramet.rows(next_td, keys.reward)
        assert [reward.tolist() for reward in rewards] == [[0.0] * len(answer) for answer in answers]
        assert all(reward.dtype is torch.float32 for reward in rewards)
    if mode["assign_done"]:
        for flag in ("done", "terminated"):
            marks = [mark.tolist() for mark in ramet.rows(next_td, ("tokens_data", flag))]
            assert marks == [[mode["eos"] and token == EOS for token in answer] for answer in answers]


def refused_at_construction(mode: Mode) -> bool:
    return mode["from_text"] and (mode["assign_reward"] or mode["assign_done"])


def refused_at_step(mode: Mode, td: TensorDictBase, answers: list[list[int]]) -> bool:
    """Without a mask, answers of different lengths do not fit a padded batch."""
    ragged_answers = len({len(answer) for answer in answers}) > 1
    return has_tokens(mode) and ragged_answers and not mode["mask"] and is_padded(td, keys_of(mode).tokens)


def play(mode: Mode) -> None:
    """Reset, step twice, each step twice over, reset a row, and compare every state with the lists."""
    if refused_at_construction(mode):
        with pytest.raises(ValueError, match="from_text"):
            make_env(mode)
        return
    env, stream = make_env(mode), stream_of(mode)
    td = env.reset()
    count = td.batch_size.numel()
    assert td.batch_size == env.batch_size
    dealt = [next(stream) for _ in range(count)]
    rows = [Row(prompt) for prompt, _, _ in dealt]
    check_observation(td, mode, rows)
    check_groups(td, dealt)
    for step in range(2):
        answers = answers_at(step, count, mode)
        acted = act(td, mode, answers)
        if refused_at_step(mode, td, answers):
            with pytest.raises(ValueError, match="without a mask"):
                env.step(acted)
            return
        first, again = env.step(acted), env.step(acted.copy())
        for row, answer in zip(rows, answers, strict=True):
            row.answers.append(answer)
        for result in (first, again):
            check_observation(result.get("next"), mode, rows)
            check_result(result, mode, answers)
        td = env.step_mdp(first)
        check_observation(td, mode, rows)
        check_groups(td, dealt)
    if mode["partial"]:
        check_partial_reset(env, td, mode, rows, dealt, stream)


def check_partial_reset(
    env: Any, td: TensorDictBase, mode: Mode, rows: list[Row], dealt: list[Any], stream: Iterator[Any]
) -> None:
    """The first row, or two others, begin anew; the rest stays, and what it is in the midst of goes on."""
    named = torch.zeros((*td.batch_size, 1), dtype=torch.bool)
    chosen = [1, len(rows) - 1] if mode["nested"] and len(rows) > 2 else [0]
    named.view(-1)[chosen] = True
    td = env.reset(td.copy().set("_reset", named))
    for row in chosen:
        dealt[row] = next(stream)
        rows[row] = Row(dealt[row][0])
    check_observation(td, mode, rows)
    check_groups(td, dealt)
    assert not td["done"].reshape(-1)[chosen].any()
    answers = [[token] for token in ids_of("pqrstuvwxyz")[: len(rows)]]
    td = env.step(act(td, mode, answers))
    for row, answer in zip(rows, answers, strict=True):
        row.answers.append(answer)
    check_observation(td.get("next"), mode, rows)
    check_result(td, mode, answers)


def runs(mode: Mode) -> bool:
    """Whether a mode is refused nowhere."""
    rows = (mode["batch"] or (1,))[0] * (mode["repeats"] or 1 if mode["group_repeats"] else 1)
    padded = has_tokens(mode) and not mode["mask"] and mode["layout"] in ("dense", "padded")
    return not refused_at_construction(mode) and not (padded and mode["zero"] and rows > 1)


def pairs_of(mode: Mode) -> set[Any]:
    return set(itertools.combinations(((name, mode[name]) for name in AXES), 2))


def pairs() -> list[Mode]:
    """Modes that hold each pair of values of two axes, in a mode that is refused nowhere if there is one."""
    everything = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    dice = random.Random(0)
    found: list[Mode] = []
    for pool in ([mode for mode in everything if runs(mode)], [mode for mode in everything if not runs(mode)]):
        pool = dice.sample(pool, 3000)
        missing = set().union(*map(pairs_of, pool)) - set().union(*map(pairs_of, found))
        if found:  # what is refused: the pairs that nothing else shows, and a few others
            found += pool[:12]
        else:
            found += pool[:60]  # beyond the pairs, whatever comes
        while missing:
            best = max(dice.sample(pool, 100), key=lambda mode: len(pairs_of(mode) & missing))
            missing -= pairs_of(best)
            found.append(best)
    return found


def name_of(mode: Mode) -> str:
    kind = "text" if mode["from_text"] else "tokens"
    flags = [name for name in AXES if mode[name] is True and name != "from_text"]
    return "-".join([kind, str(len(mode["batch"]) and mode["batch"][0]), mode["layout"], *flags])


@pytest.mark.parametrize("mode", pairs(), ids=name_of)
def test_each_pair_of_modes(mode: Mode) -> None:
    play(mode)


def test_the_pairs_are_all_there() -> None:
    modes = pairs()
    assert any(map(runs, modes))
    assert not all(map(runs, modes))
    found = set().union(*map(pairs_of, modes))
    for a, b in itertools.combinations(AXES, 2):
        assert {((a, x), (b, y)) for x in AXES[a] for y in AXES[b]} <= found


@pytest.mark.large
@pytest.mark.parametrize("layout", AXES["layout"])
@pytest.mark.parametrize("batch", AXES["batch"])
@pytest.mark.parametrize("from_text", AXES["from_text"])
def test_the_full_product_of_modes(from_text: bool, batch: tuple[int, ...], layout: str) -> None:
    rest = [name for name in AXES if name not in ("from_text", "batch", "layout")]
    for values in itertools.product(*(AXES[name] for name in rest)):
        mode = {"from_text": from_text, "batch": batch, "layout": layout, **dict(zip(rest, values, strict=True))}
        try:
            play(mode)
        except Exception as error:
            error.add_note(f"mode: {mode}")
            raise
