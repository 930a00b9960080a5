"""`LLMEnv.from_dataloader`: an environment, a primer, and a tokenizer if one is given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch.utils.data import DataLoader

from ramet.envs.check import check_env_specs
from ramet.envs.llm import LLMEnv
from ramet.errors import DataError
from ramet.models.tiny import tiny_tokenizer
from ramet.ragged import Ragged, rows
from ramet.specs import Bounded, NonTensor, Unbounded

TOKENIZER = tiny_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
TEXTS = ["ab", "c", "defg"]


def ids_of(text: str) -> list[int]:
    return [int(i) for i in TOKENIZER(text, add_special_tokens=False)["input_ids"]]


def make(loader: Any = TEXTS, **options: Any) -> Any:
    return LLMEnv.from_dataloader(loader, **{"eos_token_id": EOS, **options})


def tokens_of(td: TensorDictBase, key: Any = "tokens") -> list[list[int]]:
    return [row.tolist() for row in rows(td, key)]


class Doubled(LLMEnv):
    """An environment that hears each action twice."""

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        said: Any = td.get(self.action_key)
        return super()._step(td.copy().set(self.action_key, torch.cat([said, said], -1)))


# Text and tokens.


@pytest.mark.filterwarnings("ignore:eos_token_id")
@pytest.mark.parametrize("tokenizer", [None, TOKENIZER], ids=["no tokenizer", "tokenizer"])
@pytest.mark.parametrize("from_text", [True, False])
@pytest.mark.parametrize("batch_size", [None, 0, 1, 2])
def test_an_environment_of_a_loader_keeps_its_contract(tokenizer: Any, from_text: bool, batch_size: Any) -> None:
    text = from_text or tokenizer is not None
    loader = TEXTS if text else [torch.tensor(ids_of(part)) for part in TEXTS]
    env = make(
        loader,
        tokenizer=tokenizer,
        from_text=from_text,
        batch_size=batch_size,
        vocab_size=100,
        stack_method=None if text else "as_padded_tensor",
        has_attention=text,
        eos_token_id=None if from_text and tokenizer is None else EOS,
    )
    assert env.batch_size == env.base_env.batch_size == torch.Size([batch_size] if batch_size else [])
    check_env_specs(env)


def test_with_a_tokenizer_the_rollout_holds_text_and_tokens() -> None:
    env = make(tokenizer=TOKENIZER, batch_size=2)
    assert env.action_keys == ["tokens_response"]
    assert env.action_spec == Bounded(0, len(TOKENIZER) - 1, (2, -1), None, torch.int64)

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("tokens_response", torch.tensor([[14, 15], [16, 17]]))

    td = env.rollout(2, policy)
    assert td.batch_size == (2, 2)
    assert rows(td[:, -1], ("next", "text")) == ["ababab", "ccdcd"]
    assert tokens_of(td[:, -1], ("next", "tokens")) == [ids_of("ababab"), ids_of("ccdcd")]
    assert rows(td, "text_response") == ["ab", "ab", "cd", "cd"]


@pytest.mark.parametrize(
    ("options", "is_jagged", "masked"),
    [
        ({}, False, True),
        ({"stack_method": "as_padded_tensor"}, False, True),
        ({"stack_method": "as_nested_tensor"}, True, True),
        ({"has_attention": False}, True, False),
    ],
)
@pytest.mark.parametrize("from_text", [True, False])
def test_tokens_are_padded_with_a_mask_or_jagged(
    options: dict[str, Any], is_jagged: bool, masked: bool, from_text: bool
) -> None:
    env = make(tokenizer=TOKENIZER, batch_size=3, from_text=from_text, **options)
    td = env.reset()
    assert td["tokens"].is_nested == is_jagged
    assert ("attention_mask" in td) == masked
    assert tokens_of(td) == [ids_of(text) for text in TEXTS]
    td["tokens_response"] = Ragged.from_rows(
        [torch.tensor([14]), torch.tensor([15, 16]), torch.tensor([], dtype=torch.int64)]
    ).jagged()
    expected = [[*ids_of("ab"), 14], [*ids_of("c"), 15, 16], ids_of("defg")]
    assert tokens_of(env.step(td)["next"]) == expected


def test_right_a_tokenizer_without_from_text_tokenises_prompts_at_reset_only() -> None:
    calls: list[list[str]] = []

    class Counting:
        def __call__(self, texts: list[str], **options: Any) -> Any:
            calls.append(texts)
            return TOKENIZER(texts, **options)

        def batch_decode(self, *args: Any, **options: Any) -> Any:
            raise AssertionError("nothing is decoded")

    env = make(tokenizer=Counting(), from_text=False, batch_size=2)
    td = env.reset()
    assert env.action_keys == ["tokens_response"]
    assert rows(td, "text") == ["ab", "c"]
    td["tokens_response"] = torch.tensor([[EOS], [17]])
    td, state = env.step_and_maybe_reset(td)
    assert tokens_of(td["next"]) == [[14, 15, EOS], [16, 17]]
    assert tokens_of(state) == [ids_of("defg"), [16, 17]]
    assert rows(state, "text") == ["defg", "c"]
    assert calls == [["ab", "c"], ["defg"]]


def test_a_tokenizer_without_from_text_gives_rewards_and_flags_for_each_token() -> None:
    env = make(tokenizer=TOKENIZER, from_text=False, batch_size=2, assign_reward=True, assign_done=True)
    check_env_specs(env)
    td = env.reset()
    td["tokens_response"] = torch.tensor([[EOS, 3], [17, 3]])
    td = env.step(td)["next"]
    assert td["reward"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert td["tokens_data", "done"].tolist() == [[True, False], [False, False]]


def test_the_next_prompt_comes_where_a_row_ended() -> None:
    """In text and tokens, with rows that go on untouched."""
    env = make(tokenizer=TOKENIZER, batch_size=2)
    answers = iter([[[EOS], [14]], [[15], [15]], [[16], [16]]])

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("tokens_response", torch.tensor(next(answers)))

    td = env.rollout(3, policy, break_when_any_done=False)
    assert [rows(td[:, t], "text") for t in range(3)] == [["ab", "c"], ["defg", "ca"], ["defgb", "cab"]]
    assert tokens_of(td[:, 2]) == [ids_of("defgb"), ids_of("cab")]
    assert td["group_id"][:, -1].tolist() == [2, 1]


def test_a_name_is_a_tokenizer_too(tmp_path: Any) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    assert tokens_of(make(tokenizer=str(tmp_path), batch_size=2).reset()) == [ids_of("ab"), ids_of("c")]


def test_vocab_size_bounds_the_action_of_a_tokenizer_too() -> None:
    env = make(tokenizer=TOKENIZER, vocab_size=128)
    assert env.action_spec == env.observation_spec["tokens"] == Bounded(0, 127, (-1,), None, torch.int64)
    assert make(tokenizer=TOKENIZER, from_text=False).action_spec == Unbounded((-1,), None, torch.int64)


# Keys.


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER], ids=["no tokenizer", "tokenizer"])
def test_right_a_loader_of_bare_strings_feeds_the_environments_own_key(tokenizer: Any) -> None:
    env = make(tokenizer=tokenizer, str_key=("obs", "words"), action_key=("act", "words"), batch_size=2)
    td = env.reset()
    assert rows(td, ("obs", "words")) == ["ab", "c"]
    td["tokens_response"] = torch.tensor([[14], [15]])
    if tokenizer is None:
        td[("act", "words")] = NonTensorStack("a", "b")
    td = env.step(td)
    assert rows(td["next"], ("obs", "words")) == ["aba", "cb"]
    assert rows(td, ("act", "words")) == ["a", "b"]


def test_right_a_loader_of_bare_tensors_feeds_the_environments_own_key() -> None:
    loader = [torch.tensor([1, 2]), torch.tensor([3])]
    env = make(
        loader, from_text=False, token_key="observation", action_key="action", has_attention=False, batch_size=2,
        stack_method="as_nested_tensor",
    )  # fmt: skip
    td = env.reset()
    assert tokens_of(td, "observation") == [[1, 2], [3]]
    assert tokens_of(env.step(td.set("action", torch.tensor([[7], [8]])))["next"], "observation") == [[1, 2, 7], [3, 8]]


def test_right_bare_strings_for_an_environment_of_tokens_go_under_its_text_key() -> None:
    env = make(tokenizer=TOKENIZER, from_text=False, token_key=("obs", "tokens"), str_key="prompt", batch_size=2)
    td = env.reset()
    assert rows(td, "prompt") == ["ab", "c"]
    assert tokens_of(td, ("obs", "tokens")) == [ids_of("ab"), ids_of("c")]


def test_other_columns_of_the_rows_survive() -> None:
    loader = [{"text": text, "answer": text * 2, "id": torch.tensor(i)} for i, text in enumerate(TEXTS)]
    env = make(loader, tokenizer=TOKENIZER, batch_size=3)
    td = env.rollout(2)
    assert rows(td[:, -1].get("next"), "answer") == [text * 2 for text in TEXTS]
    assert td["next", "id"].tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("from_text", [True, False])
def test_with_a_tokenizer_the_mask_is_beside_the_tokens(from_text: bool) -> None:
    message = r"token_key='tokens' beside it, under 'attention_mask'.*found attention_key='mask'"
    with pytest.raises(ValueError, match=message):
        make(tokenizer=TOKENIZER, attention_key="mask", from_text=from_text)
    with pytest.raises(ValueError, match=r"\('obs', 'ids'\).*\('obs', 'attention_mask'\).*'attention_mask'"):
        make(tokenizer=TOKENIZER, token_key=("obs", "ids"), attention_key="attention_mask", from_text=from_text)
    env = make(
        tokenizer=TOKENIZER,
        token_key=("obs", "ids"),
        attention_key=("obs", "attention_mask"),
        from_text=from_text,
        batch_size=2,
    )
    assert env.reset()["obs", "attention_mask"].tolist() == [[True, True], [False, True]]


def test_without_a_tokenizer_the_mask_may_be_anywhere() -> None:
    loader = [{"tokens": torch.tensor([0, 1]), "mask": torch.tensor([False, True])}]
    env = make(loader, from_text=False, attention_key="mask", batch_size=1)
    td = env.step(env.reset().set("tokens_response", torch.tensor([[5]])))
    assert td["next", "mask"].tolist() == [[False, True, True]]


# Batches.


def test_the_batch_size_is_that_of_the_primer() -> None:
    dataloader: Any = DataLoader(TEXTS, batch_size=3)  # type: ignore[arg-type]
    assert make(dataloader).batch_size == (3,)
    assert make(dataloader, batch_size=2).batch_size == (2,)
    assert make(dataloader, batch_size=0).batch_size == ()
    assert make(TEXTS).batch_size == ()
    assert make(TEXTS, batch_size=2, repeats=3).batch_size == (6,)
    assert make(TEXTS, batch_size=2, repeats=3, group_repeats=False).batch_size == (2,)


def test_repeats_come_in_groups_by_default() -> None:
    env = make(tokenizer=TOKENIZER, batch_size=2, repeats=2)
    td = env.reset()
    assert rows(td, "text") == ["ab", "ab", "c", "c"]
    assert tokens_of(td) == [ids_of(text) for text in ("ab", "ab", "c", "c")]
    assert td["group_id"].tolist() == [0, 0, 1, 1]
    assert td["repeat_index"].tolist() == [0, 1, 0, 1]


def test_an_environment_without_a_batch_takes_any_number_of_rows() -> None:
    env = make(tokenizer=TOKENIZER)
    assert env.rollout(3).batch_size == (3,)
    first = env.reset(TensorDict(batch_size=[3]))
    assert rows(first, "text") == ["c", "defg", "ab"]
    assert env.rollout(3, auto_reset=False, tensordict=first).batch_size == (3, 3)


def generator() -> Iterator[str]:
    yield from TEXTS


@pytest.mark.parametrize("kind", ["list", "DataLoader", "dataset", "generator", "callable", "mappings"])
def test_loaders_of_every_kind(kind: str) -> None:
    loaders: dict[str, Any] = {
        "list": TEXTS,
        "DataLoader": DataLoader(TEXTS, batch_size=2),  # type: ignore[arg-type]
        "dataset": Dataset.from_dict({"text": TEXTS}),
        "generator": generator(),
        "callable": generator,
        "mappings": [{"text": text} for text in TEXTS],
    }
    env = make(loaders[kind], tokenizer=TOKENIZER, batch_size=3)
    td = env.reset()
    assert rows(td, "text") == TEXTS
    assert tokens_of(td) == [ids_of(text) for text in TEXTS]


def test_an_empty_loader_says_so() -> None:
    with pytest.raises(DataError, match="empty"):
        make([], tokenizer=TOKENIZER).reset()


# The class, and what is said.


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER], ids=["no tokenizer", "tokenizer"])
def test_right_called_on_a_subclass_it_returns_that_subclass(tokenizer: Any) -> None:
    loader = TEXTS if tokenizer else [torch.tensor([1]), torch.tensor([2])]
    env = Doubled.from_dataloader(loader, tokenizer=tokenizer, from_text=False, batch_size=2, eos_token_id=EOS)
    assert type(env.base_env) is Doubled
    td = env.reset()
    before = tokens_of(td)
    td["tokens_response"] = torch.tensor([[7], [8]])
    assert tokens_of(env.step(td)["next"]) == [[*before[0], 7, 7], [*before[1], 8, 8]]


def test_right_nothing_is_warned_of_but_a_missing_eos() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tokenizer=TOKENIZER, batch_size=2).reset()
        with pytest.raises(UserWarning, match="eos_token_id"):
            LLMEnv.from_dataloader(TEXTS, tokenizer=TOKENIZER)


def test_example_data_is_the_example_of_the_text() -> None:
    spec: Any = make(example_data="an example").observation_spec["text"]
    assert isinstance(spec, NonTensor)
    assert spec.example_data == "an example"


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rewards in text": ({"assign_reward": True}, ValueError, "from_text"),
    "flags in text": ({"assign_done": True, "tokenizer": TOKENIZER}, ValueError, "from_text"),
    "two dimensions": ({"batch_size": (2, 3)}, TypeError, "0 or 1d"),
    "a stack method": ({"stack_method": "as_list"}, ValueError, "Unknown stack_method"),
    "repeats": ({"repeats": 0}, ValueError, "repeats"),
    "a tokenizer that is none": ({"tokenizer": 3}, TypeError, "tokenizer must be one of transformers'"),
    "text and tokens under one key": ({"tokenizer": TOKENIZER, "token_key": "text"}, ValueError, "need a key each"),
    "both actions under one key": (
        {"tokenizer": TOKENIZER, "action_key": "tokens_response"},
        ValueError,
        "need a key each: found 'tokens_response'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_what_it_says(case: str) -> None:
    options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make(**options)
