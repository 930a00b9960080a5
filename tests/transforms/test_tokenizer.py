"""Text and tokens side by side: tokens are authoritative, text is derived from them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ramet.envs.check import check_env_specs
from ramet.envs.env import EnvBase
from ramet.envs.llm import LLMEnv
from ramet.models.tiny import tiny_tokenizer
from ramet.ragged import Ragged, Text, read_text, rows
from ramet.specs import Bounded, Categorical, Composite, NonTensor, Unbounded
from ramet.transforms import Compose, StepCounter, Tokenizer
from ramet.transforms.token_rows import decode_rows
from ramet.transforms.transform import Transform

CORPUS = ["the cat sat on the mat", "héllo wörld, 日本語 と 🙂🙃", "2+2=4 and 10-7=3", "Was it a cat I saw?"] * 4
EOS = 2


def wrapped(tokenizer: Any, pad: str | None = None) -> PreTrainedTokenizerFast:
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token=pad
    )
    return made


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE as of GPT-2, with pad == eos: any text has tokens, and a character may have several."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>"
    )
    return made


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    """Words and pieces of words ("##t") as of BERT."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>", "</s>", "<pad>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer, "<pad>")


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """Pieces that say with a sign whether a space is before them, as of sentencepiece: alone, the first loses it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer, "</s>")


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Pieces as of Llama 2: what has none is bytes, a run of which is shown whole or broken throughout."""
    alphabet = ["<unk>", "</s>", "▁", "a", "b", "▁a", "▁b", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(alphabet)},
        merges=[("▁", "a"), ("▁", "b"), ("a", "b")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(parts)
    return wrapped(tokenizer, "</s>")


ALL: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "characters": tiny_tokenizer,
    "byte_level": byte_level,
    "word_pieces": word_pieces,
    "metaspace": metaspace,
    "byte_fallback": byte_fallback,
}
each_tokenizer = pytest.mark.parametrize("name", ALL)
each_padding = pytest.mark.parametrize("padding", [True, False], ids=["padded", "jagged"])


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def prompts(*texts: str) -> TensorDict:
    return TensorDict({"text": NonTensorStack(*texts)}, [len(texts)])


def jagged(*ids: list[int]) -> torch.Tensor:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in ids]).jagged()


def text_env(tokenizer: Any, eos: int = 99_999, batch_size: int | None = None, **options: Any) -> Any:
    transform = Tokenizer(["text"], ["tokens"], ["text_response"], ["tokens_response"], tokenizer=tokenizer, **options)
    return LLMEnv(eos_token_id=eos, batch_size=batch_size).append_transform(transform)


def tokens_of(td: TensorDictBase, key: Any = "tokens") -> list[list[int]]:
    return [row.tolist() for row in rows(td, key)]


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.encoded, self.decoded = tokenizer, [], 0
        self.pad_token_id = tokenizer.pad_token_id

    def __call__(self, texts: Any, **options: Any) -> Any:
        self.encoded.append(list(texts))
        return self.tokenizer(texts, **options)

    def batch_decode(self, *args: Any, **options: Any) -> Any:
        self.decoded += 1
        return self.tokenizer.batch_decode(*args, **options)

    def __len__(self) -> int:
        return len(self.tokenizer)


# Outside an environment.


@each_tokenizer
def test_the_tokens_are_those_of_the_tokenizer_padded_on_the_left(name: str) -> None:
    tokenizer = ALL[name]()
    texts = ["the cat", "a", "", "2+2=4 and the mat"]
    td = Tokenizer(["text"], ["tokens"], tokenizer=tokenizer)(prompts(*texts))
    expected = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    assert td["tokens"].dtype is torch.int64
    assert td["attention_mask"].dtype is torch.bool
    assert torch.equal(td["tokens"], expected["input_ids"])
    assert torch.equal(td["attention_mask"], expected["attention_mask"].bool())
    assert rows(td, "text") == texts


def test_without_a_pad_token_padding_is_zero() -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.pad_token = None
    td = Tokenizer(["text"], ["tokens"], tokenizer=tokenizer)(prompts("a", "cat saw"))
    assert td["tokens"][0, 0] == 0
    assert tokenizer.pad_token is None


@each_tokenizer
def test_right_both_ways_keep_ragged_rows(name: str) -> None:
    tokenizer = ALL[name]()
    texts = ["the cat", "a", "", "2+2=4 and the mat"]
    transform = Tokenizer(["text"], ["tokens"], ["said"], ["tokens"], tokenizer=tokenizer, padding=False)
    td = transform(prompts(*texts))
    assert td["tokens"].is_nested
    assert tokens_of(td) == [ids_of(tokenizer, text) for text in texts]
    assert [row.tolist() for row in rows(td, "attention_mask", mask="attention_mask")] == [
        [True] * len(ids_of(tokenizer, text)) for text in texts
    ]
    assert rows(transform.inv(td), "said") == [tokenizer.decode(ids_of(tokenizer, text)) for text in texts]


TEXT = st.text(st.sampled_from("ab cé日🙂"), max_size=8)


@settings(deadline=None, max_examples=30)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), name=st.sampled_from(list(ALL)), padding=st.booleans())
def test_right_text_to_tokens_to_text_never_gains_a_character_from_padding(
    texts: list[str], name: str, padding: bool
) -> None:
    """In a batch, a row comes back as it does alone; and byte by byte, which knows every text, as it was."""
    tokenizer = ALL[name]()
    transform = Tokenizer(
        ["text"], ["tokens"], ["back"], ["tokens"], tokenizer=tokenizer, padding=padding, skip_special_tokens=False
    )
    back = rows(transform.inv(transform(prompts(*texts))), "back")
    assert back == [tokenizer.decode(ids_of(tokenizer, text)) for text in texts]
    if name == "byte_level":
        assert back == texts


def test_right_padding_is_never_decoded_whatever_id_it_has() -> None:
    tokenizer = copy.deepcopy(byte_level())
    for pad in ("a", "</s>"):  # a letter that is in the text, and the end
        tokenizer.pad_token = pad
        transform = Tokenizer(
            ["text"], ["tokens"], ["back"], ["tokens"], tokenizer=tokenizer, skip_special_tokens=False
        )
        td = transform(prompts("banana", "a"))
        assert not td["attention_mask"].all()
        assert rows(transform.inv(td), "back") == ["banana", "a"]


def test_a_text_without_a_batch() -> None:
    transform = Tokenizer(["text"], ["tokens"], ["back"], ["tokens"], tokenizer=byte_level())
    td = transform(TensorDict({"text": NonTensorData("cat")}, []))
    assert td["tokens"].tolist() == ids_of(byte_level(), "cat")
    assert td["attention_mask"].tolist() == [True] * len(td["tokens"])
    assert transform.inv(td)["back"] == "cat"


def test_batches_of_two_dimensions_and_rollouts() -> None:
    transform = Tokenizer(["text"], ["tokens"], ["back"], ["tokens"], tokenizer=byte_level())
    texts = [["a", "cat", ""], ["mat", "the", "on"]]
    td = TensorDict({"text": NonTensorStack(*[NonTensorStack(*row) for row in texts])}, [2, 3])
    td = transform(td)
    assert td["tokens"].shape == td["attention_mask"].shape == (2, 3, td["tokens"].shape[-1])
    assert transform.inv(td).get("back").tolist() == texts
    rollout = lazy_stack([prompts("a", "mat"), prompts("cat", "the")], 1)
    assert rows(transform.inv(transform(rollout)), "back") == ["a", "cat", "mat", "the"]
    jagged_rows = Tokenizer(["text"], ["tokens"], tokenizer=byte_level(), padding=False)
    with pytest.raises(ValueError, match=r"one dimension: found \(2, 3\); set padding=True"):
        jagged_rows(td)


@each_padding
def test_a_lazy_stack_of_rows(padding: bool) -> None:
    td = lazy_stack([TensorDict({"text": NonTensorData(text)}) for text in ("cat", "a")], 0)
    transform = Tokenizer(["text"], ["tokens"], ["back"], ["tokens"], tokenizer=byte_level(), padding=padding)
    td = transform(td)
    assert isinstance(td, LazyStackedTensorDict)
    assert tokens_of(td) == [ids_of(byte_level(), text) for text in ("cat", "a")]
    assert rows(transform.inv(td), "back") == ["cat", "a"]


def test_text_as_a_plain_list() -> None:
    transform = Tokenizer(["text"], ["tokens"], tokenizer=byte_level())
    td = TensorDict({}, [2]).set("text", NonTensorStack.from_list(["cat", "a"]))
    assert tokens_of(transform(td)) == [ids_of(byte_level(), text) for text in ("cat", "a")]


def test_nested_keys_have_the_mask_in_the_same_nest() -> None:
    transform = Tokenizer([("a", "text"), "text"], [("a", "ids"), "tokens"], tokenizer=byte_level())
    td = TensorDict({"text": NonTensorStack("cat", "a"), "a": {"text": NonTensorStack("", "mat")}}, [2])
    td = transform(td)
    assert [row.tolist() for row in rows(td, ("a", "ids"), mask=("a", "attention_mask"))] == [
        [],
        ids_of(byte_level(), "mat"),
    ]
    assert tokens_of(td) == [ids_of(byte_level(), text) for text in ("cat", "a")]


def test_special_tokens_of_prompts_are_added_on_demand_and_left_out_of_text() -> None:
    tokenizer = tiny_tokenizer()
    transform = Tokenizer(["text"], ["tokens"], ["back"], ["tokens"], tokenizer=tokenizer, add_special_tokens=True)
    td = transform(prompts("ab", ""))
    assert tokens_of(td) == [[1, 14, 15], [1]]
    assert rows(transform.inv(td), "back") == ["ab", ""]
    told = Tokenizer([], [], ["back"], ["tokens"], tokenizer=tokenizer, skip_special_tokens=False)
    assert rows(told.inv(td), "back") == ["<bos>ab", "<bos>"]


def test_additional_tokens_are_tokens_of_their_own_and_in_the_spec() -> None:
    tokenizer = copy.deepcopy(byte_level())
    size = len(tokenizer)
    transform = Tokenizer(["text"], ["tokens"], tokenizer=tokenizer, additional_tokens=["<think>", "<done>"])
    assert transform(prompts("<think>a<done>"))["tokens"].tolist() == [[size, *ids_of(tokenizer, "a"), size + 1]]
    spec = transform.transform_observation_spec(Composite(shape=(1,)))
    assert spec["tokens"] == Bounded(0, size + 1, (1, -1), None, torch.int64)


@pytest.mark.parametrize(("side", "kept"), [("right", "abc"), ("left", "cde")])
def test_max_length_cuts_prompts_on_the_side_of_the_tokenizer_and_the_text_stays(side: str, kept: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.truncation_side = side
    td = Tokenizer(["text"], ["tokens"], tokenizer=tokenizer, max_length=3)(prompts("abcde", "ab"))
    assert tokens_of(td) == [ids_of(tokenizer, kept), ids_of(tokenizer, "ab")]
    assert rows(td, "text") == ["abcde", "ab"]


def test_special_tokens_are_added_to_prompts_and_never_to_a_response() -> None:
    env = text_env(tiny_tokenizer(), add_special_tokens=True)
    td = env.step(env.reset(prompts("a")).set("text_response", NonTensorStack("b")))
    assert tokens_of(td, "tokens_response") == [[15]]
    assert tokens_of(td["next"]) == [[1, 14, 15]]


def test_without_max_length_nothing_is_cut() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 3
    assert tokens_of(Tokenizer(["text"], ["tokens"], tokenizer=tokenizer)(prompts("abcde"))) == [
        ids_of(tokenizer, "abcde")
    ]


def test_max_length_never_cuts_an_action() -> None:
    env = text_env(tiny_tokenizer(), max_length=2)
    td = env.reset(prompts("abcd"))
    td["text_response"] = NonTensorStack("efgh")
    td = env.step(td)
    assert tokens_of(td["next"]) == [ids_of(tiny_tokenizer(), "abefgh")]


def test_use_raw_nontensor_hands_over_the_entry_itself() -> None:
    seen: list[Any] = []

    class Raw:
        def __call__(self, texts: Any, **options: Any) -> dict[str, Any]:
            seen.append(texts)
            return {"input_ids": [[len(text)] for text in texts.tolist()]}

        def batch_decode(self, ids: list[list[int]], **options: Any) -> list[str]:
            return ["x" * row[0] for row in ids]

    transform = Tokenizer(["text"], ["tokens"], tokenizer=Raw(), use_raw_nontensor=True)
    assert transform(prompts("ab", "abc"))["tokens"].tolist() == [[2], [3]]
    assert isinstance(seen[0], NonTensorStack)
    spec = transform.transform_observation_spec(Composite(shape=(2,)))
    assert spec["tokens"] == Unbounded((2, -1), None, torch.int64)  # it does not say how many tokens there are


def test_missing_text_is_left_out_or_named() -> None:
    assert list(Tokenizer(["text"], ["tokens"], tokenizer=byte_level())(TensorDict({}, [2])).keys()) == []
    strict = Tokenizer(["text"], ["tokens"], ["said"], ["ids"], tokenizer=byte_level(), missing_tolerance=False)
    with pytest.raises(KeyError, match=r"'text', the text to tokenise, is missing: there are \['other'\]"):
        strict(TensorDict({"other": torch.zeros(2)}, [2]))
    with pytest.raises(KeyError, match="'ids', the tokens to decode"):
        strict.inv(TensorDict({}, [2]))


def test_a_name_loads_a_tokenizer(tmp_path: Any) -> None:
    byte_level().save_pretrained(tmp_path)
    td = Tokenizer(["text"], ["tokens"], tokenizer=str(tmp_path))(prompts("cat"))
    assert tokens_of(td) == [ids_of(byte_level(), "cat")]


def test_right_no_default_tokenizer_is_downloaded() -> None:
    with pytest.raises(TypeError, match="there is no default"):
        Tokenizer(["text"], ["tokens"], tokenizer=None)
    with pytest.raises(TypeError, match="tokenizer"):
        Tokenizer(["text"], ["tokens"])  # type: ignore[call-arg]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a key in place of keys": ({"in_keys": "text"}, TypeError, "in_keys must be a list of keys: found 'text'"),
    "no out keys": ({"out_keys": None}, TypeError, "out_keys must be a list of keys: found None"),
    "one key too many": ({"out_keys": ["a", "b"]}, ValueError, "each in key needs one out key"),
    "one key for both": ({"out_keys": ["text"]}, ValueError, "need a key each: found 'text'"),
    "one key for both on the way in": (
        {"in_keys_inv": ["said"], "out_keys_inv": ["said"]},
        ValueError,
        "need a key each: found 'said'",
    ),
    "no out key on the way in": ({"in_keys_inv": ["said"]}, ValueError, "each in key needs one out key"),
    "one out key twice": (
        {"in_keys": ["a", "b"], "out_keys": ["tokens", "tokens"]},
        ValueError,
        "found 'tokens' twice",
    ),
    "two masks under one key": (
        {"in_keys": ["a", "b"], "out_keys": ["x", "y"]},
        ValueError,
        "'y' and 'x' would share the key 'attention_mask'",
    ),
    "tokens under the key of the mask": ({"out_keys": ["attention_mask"]}, ValueError, "would share the key"),
    "no tokenizer": ({"tokenizer": 3}, TypeError, "tokenizer must be one of transformers'.*found int '3'"),
    "no length": ({"max_length": 0}, ValueError, "max_length must be at least 1, or None: found 0"),
    "a token in place of tokens": ({"additional_tokens": "<t>"}, TypeError, "additional_tokens must be a list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_at_construction_and_what_it_says(case: str) -> None:
    options, error, message = REFUSED[case]
    good = {"in_keys": ["text"], "out_keys": ["tokens"], "tokenizer": byte_level()}
    with pytest.raises(error, match=message):
        Tokenizer(**{**good, **options})


def td_of(**entries: Any) -> TensorDict:
    return TensorDict(entries, [2])


WRONG: dict[str, tuple[str, TensorDict, type[Exception], str]] = {
    "text that is a tensor": ("out", td_of(text=torch.zeros(2)), TypeError, "'text', row 0: expected str"),
    "text that is a number": ("out", td_of(text=NonTensorStack("a", 3)), TypeError, "'text', row 1: expected str"),
    "tokens that are text": (
        "in",
        td_of(ids=NonTensorStack("a", "b")),
        TypeError,
        r"'ids' must hold token ids.*\(2, 'n'\).*found",
    ),
    "tokens that are floats": ("in", td_of(ids=torch.zeros(2, 3)), TypeError, "found float32 tensor of shape"),
    "tokens that are flags": ("in", td_of(ids=torch.ones(2, 3).bool()), TypeError, "found bool tensor of shape"),
    "one token, not a row of them": ("in", td_of(ids=torch.tensor([3, 4])), TypeError, r"found int64 tensor.*\(2\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_in_a_tensordict_and_what_it_says(case: str) -> None:
    way, td, error, message = WRONG[case]
    transform = Tokenizer(["text"], ["tokens"], ["said"], ["ids"], tokenizer=byte_level())
    with pytest.raises(error, match=message):
        transform(td) if way == "out" else transform.inv(td)


def test_without_a_mask_rows_of_different_lengths_are_not_padded() -> None:
    transform = Tokenizer(["text"], ["tokens"], tokenizer=tiny_tokenizer(), return_attention_mask=False)
    assert "attention_mask" not in transform(prompts("ab", "cd"))
    with pytest.raises(
        ValueError, match=r"'tokens' have \[3, 1\] tokens.*return_attention_mask=True, or padding=False"
    ):
        transform(prompts("abc", "d"))


# In an environment.


@each_padding
@each_tokenizer
@pytest.mark.parametrize("size", [None, 2])
def test_an_environment_keeps_its_contract(name: str, padding: bool, size: int | None) -> None:
    env = text_env(ALL[name](), batch_size=size, padding=padding)
    check_env_specs(env)
    assert env.action_keys == ["tokens_response"]
    shape = (-1,) if size is None else (size, -1)
    bounded = Bounded(0, len(ALL[name]()) - 1, shape, None, torch.int64)
    assert env.action_spec == env.observation_spec["tokens"] == bounded
    assert env.observation_spec["attention_mask"] == Categorical(2, shape, None, torch.bool)


def test_right_the_prompt_is_tokenised_once_and_tokens_are_appended_as_they_are() -> None:
    """`[one token for each letter]` is not how the tokenizer writes "the", and it stays all the same."""
    tokenizer = byte_level()
    letters = [ids_of(tokenizer, letter)[0] for letter in "the"]
    assert letters != ids_of(tokenizer, "the")
    counting = Counting(tokenizer)
    env = text_env(counting)
    td = env.reset(prompts("a", "cat"))
    before = tokens_of(td)
    for _ in range(3):
        td["tokens_response"] = torch.tensor([letters, letters])
        td = env.step_mdp(env.step(td))
    assert tokens_of(td) == [row + letters * 3 for row in before]
    assert counting.encoded == [["a", "cat"]]
    assert counting.decoded == 0
    assert rows(td, "text") == ["athethethe", "catthethethe"]
    assert counting.decoded > 0


def test_right_a_response_that_comes_as_text_alone_is_tokenised_alone_once() -> None:
    """A "t" before "h" is another token than "th": what was said is not tokenised together with what is before it."""
    counting = Counting(byte_level())
    env = text_env(counting, add_special_tokens=True)
    td = env.reset(prompts("ca", ""))
    td["text_response"] = NonTensorStack("t th", "e cat")
    td = env.step(td)
    alone = [ids_of(byte_level(), text) for text in ("t th", "e cat")]
    assert tokens_of(td, "tokens_response") == alone
    assert tokens_of(td["next"]) == [ids_of(byte_level(), "ca") + alone[0], alone[1]]
    assert rows(td, ("next", "text")) == ["cat th", "e cat"]
    assert counting.encoded == [["ca", ""], ["t th", "e cat"]]


@each_padding
@each_tokenizer
def test_the_result_of_a_step_has_both_forms_of_the_action_and_the_next_state_neither(name: str, padding: bool) -> None:
    tokenizer = ALL[name]()
    env = text_env(tokenizer, padding=padding)
    said = [ids_of(tokenizer, text) for text in ("the cat", "a")]
    for key, action in (
        ("tokens_response", jagged(*said)),
        ("text_response", NonTensorStack("the cat", "a")),
    ):
        td = env.step(env.reset(prompts("on", "it")).set(key, action))
        assert tokens_of(td, "tokens_response") == said
        assert rows(td, "text_response")[0].strip() == "the cat"
        state = env.step_mdp(td)
        assert "tokens_response" not in state.keys()  # noqa: SIM118
        assert "text_response" not in state.keys()  # noqa: SIM118
        with pytest.raises(KeyError, match="tokens under 'tokens_response' or text under 'text_response'"):
            env.step(state)


@pytest.mark.parametrize("layout", ["dense", "jagged", "lazy", "masked", "int32"])
@each_padding
def test_actions_in_every_layout(layout: str, padding: bool) -> None:
    tokenizer = tiny_tokenizer()
    said = [[14, 15], [16, 17]] if layout in ("dense", "int32") else [[14, 15], [16]]
    key: Any = ("out", "tokens") if layout == "masked" else "tokens_response"
    transform = Tokenizer(["text"], ["tokens"], ["text_response"], [key], tokenizer=tokenizer, padding=padding)
    env = LLMEnv(eos_token_id=EOS).append_transform(transform)
    if layout == "masked":  # the end is looked for in "tokens_response"
        env.base_env.eos_token_id = None
    td: Any = env.reset(prompts("ab", "c"))
    if layout == "lazy":
        td = lazy_stack(list(td.unbind(0)), 0) if padding else lazy_rows(td)
        for row, ids in zip(td.unbind(0), said, strict=True):
            row.set(key, torch.tensor(ids))
    elif layout == "masked":  # padded on the right, by the end
        td.set(key, torch.tensor([[14, 15], [16, EOS]]))
        td.set(("out", "attention_mask"), torch.tensor([[True, True], [True, False]]))
    else:
        dtype = torch.int32 if layout == "int32" else torch.int64
        td.set(key, jagged(*said) if layout == "jagged" else torch.tensor(said, dtype=dtype))
    td = env.step(td)
    assert tokens_of(td["next"]) == [[14, 15, *said[0]], [16, *said[1]]]
    assert rows(td["next"], "text") == ["ab" + tokenizer.decode(said[0]), "c" + tokenizer.decode(said[1])]
    assert rows(td, "text_response") == [tokenizer.decode(ids) for ids in said]
    assert td["next", "done"].tolist() == [[False], [False]]


def lazy_rows(td: TensorDictBase) -> LazyStackedTensorDict:
    parts = zip(rows(td, "text"), tokens_of(td), strict=True)
    made = [
        TensorDict(
            {
                "text": NonTensorData(text),
                "tokens": torch.tensor(ids),
                "attention_mask": torch.ones(len(ids)).bool(),
            }
        )
        for text, ids in parts
    ]
    return lazy_stack(made, 0)  # type: ignore[return-value]


ANSWERS = st.lists(st.lists(st.integers(0, 60), max_size=3), min_size=2, max_size=2)


@settings(deadline=None, max_examples=25)
@given(
    texts=st.tuples(TEXT, TEXT),
    steps=st.lists(ANSWERS, min_size=1, max_size=4),
    name=st.sampled_from(list(ALL)),
    padding=st.booleans(),
)
def test_right_observations_extend_by_exactly_the_tokens_of_the_action(
    texts: tuple[str, str], steps: list[list[list[int]]], name: str, padding: bool
) -> None:
    tokenizer = ALL[name]()
    env = text_env(tokenizer, padding=padding)
    td = env.reset(prompts(*texts))
    expected = [ids_of(tokenizer, text) for text in texts]
    assert tokens_of(td) == expected
    for answers in steps:
        td["tokens_response"] = jagged(*answers)
        first, again = env.step(td), env.step(td)
        expected = [row + answer for row, answer in zip(expected, answers, strict=True)]
        assert tokens_of(first["next"]) == tokens_of(again["next"]) == expected
        td = env.step_mdp(first)
    assert tokens_of(td) == expected


@each_padding
@pytest.mark.parametrize("read", ["at the end", "at each step"])
def test_right_characters_split_over_actions_come_out_whole(padding: bool, read: str) -> None:
    tokenizer = byte_level()
    ids = [ids_of(tokenizer, text) for text in ("🙂日é", "日🙂a")]
    steps = max(map(len, ids))
    env = text_env(tokenizer, padding=padding)
    td = env.reset(prompts("é", ""))
    for step in range(steps):
        td["tokens_response"] = jagged(*[row[step : step + 1] for row in ids])
        td = env.step_mdp(env.step(td))
        if read == "at each step":
            rows(td, "text")
    assert rows(td, "text") == ["é🙂日é", "日🙂a"]


@each_padding
@pytest.mark.parametrize("name", ["metaspace", "word_pieces"])
def test_right_spaces_of_a_response_are_those_of_the_whole(name: str, padding: bool) -> None:
    """Decoded alone, " sat" loses its space; "##t" would keep its sign."""
    tokenizer = ALL[name]()
    texts, answer = ("the cat", "Was it a"), (" sat on the mat", " cat")
    whole = [ids_of(tokenizer, text + added) for text, added in zip(texts, answer, strict=True)]
    prompt = [ids_of(tokenizer, text) for text in texts]
    assert all(ids[: len(known)] == known for ids, known in zip(whole, prompt, strict=True))
    env = text_env(tokenizer, padding=padding)
    td = env.reset(prompts(*texts))
    rest = [ids[len(known) :] for ids, known in zip(whole, prompt, strict=True)]
    for step in range(max(map(len, rest))):
        td["tokens_response"] = jagged(*[row[step : step + 1] for row in rest])
        td = env.step_mdp(env.step(td))
    assert rows(td, "text") == [text + added for text, added in zip(texts, answer, strict=True)]


def test_the_text_action_of_tokens_has_its_space_too() -> None:
    tokenizer = metaspace()
    env = text_env(tokenizer)
    td = env.reset(prompts("the"))
    td["tokens_response"] = torch.tensor([ids_of(tokenizer, "the cat")[len(ids_of(tokenizer, "the")) :]])
    assert rows(env.step(td), "text_response") == [" cat"]


def test_tokens_after_a_response_in_text_know_what_is_before_them() -> None:
    tokenizer = metaspace()
    cat = ids_of(tokenizer, "the cat")[len(ids_of(tokenizer, "the")) :]
    env = text_env(tokenizer)
    td = env.reset(prompts("on"))
    td["text_response"] = NonTensorStack(" the")
    td = env.step_mdp(env.step(td))
    td["tokens_response"] = torch.tensor([cat])
    td = env.step_mdp(env.step(td))
    assert rows(td, "text") == ["on the cat"]


def test_text_beside_tokens_is_not_looked_at() -> None:
    env = text_env(tiny_tokenizer())
    td = env.reset(prompts("a"))
    td["tokens_response"], td["text_response"] = torch.tensor([[15]]), NonTensorStack("something else")
    assert rows(env.step(td)["next"], "text") == ["ab"]


@each_padding
@pytest.mark.parametrize("key", ["tokens_response", "text_response"])
def test_an_end_ends_the_row(padding: bool, key: str) -> None:
    """Given as tokens, and as text that names it."""
    tokenizer = byte_level()
    env = text_env(tokenizer, eos=tokenizer.eos_token_id, padding=padding)
    td = env.reset(prompts("cat", "a"))
    said = (jagged([5, 0], [6]), NonTensorStack("a</s>", "b"))[key == "text_response"]
    td = env.step(td.set(key, said))
    assert td["next", "terminated"].tolist() == [[True], [False]]
    assert tokens_of(td["next"])[0][-1] == tokenizer.eos_token_id
    assert rows(td["next"], "text")[0].endswith("</s>") == (key == "text_response")  # such as it was given


@each_padding
def test_a_partial_reset_tokenises_only_the_rows_that_it_names(padding: bool) -> None:
    counting = Counting(byte_level())
    env = text_env(counting, padding=padding)
    td = env.reset(prompts("a", "the cat", "mat"))
    td["tokens_response"] = torch.tensor([[5], [6], [7]])
    td = env.step_mdp(env.step(td))
    before = tokens_of(td)
    td = td.set("text", NonTensorStack("Was it a cat I saw?", "no", "no")).set(
        "_reset", torch.tensor([True, False, False])
    )
    counting.encoded.clear()
    td = env.reset(td)
    assert counting.encoded == [["Was it a cat I saw?"]]
    assert tokens_of(td) == [ids_of(byte_level(), "Was it a cat I saw?"), *before[1:]]
    if padding:
        assert torch.equal(td["attention_mask"].sum(1), torch.tensor([len(row) for row in tokens_of(td)]))
    td["tokens_response"] = torch.tensor([[5], [6], [7]])
    assert tokens_of(env.step(td)["next"])[1] == [*before[1], 6]


@each_padding
@pytest.mark.parametrize("key", ["tokens_response", "text_response"])
def test_rows_that_step_does_not_name_get_neither_text_nor_tokens(padding: bool, key: str) -> None:
    tokenizer = tiny_tokenizer()
    env = text_env(tokenizer, eos=EOS, padding=padding)
    td = env.reset(prompts("a", "bc", "def"))
    said = (jagged([14, 15], [16], [EOS]), NonTensorStack("ab", "c", "d"))[key == "text_response"]
    td = env.step(td.set(key, said).set("_step", torch.tensor([True, False, False])))
    assert tokens_of(td["next"]) == [ids_of(tokenizer, text) for text in ("aab", "bc", "def")]
    assert rows(td["next"], "text") == ["aab", "bc", "def"]
    assert td["next", "done"].tolist() == [[False]] * 3
    state = env.step_mdp(td)
    state["tokens_response"] = torch.tensor([[17], [17], [17]])
    td = env.step(state)
    assert tokens_of(td["next"]) == [ids_of(tokenizer, text) for text in ("aabd", "bcd", "defd")]
    assert rows(td["next"], "text") == ["aabd", "bcd", "defd"]


@each_padding
def test_no_row_is_stepped(padding: bool) -> None:
    env = text_env(tiny_tokenizer(), padding=padding)
    td = env.reset(prompts("a", "bc"))
    td["tokens_response"] = torch.tensor([[14, 15], [16, 17]])
    td = env.step(td.set("_step", torch.tensor([False, False])))
    assert tokens_of(td["next"]) == tokens_of(td)
    alone = env.reset(TensorDict({"text": NonTensorData("a")}, []))
    alone = env.step(alone.set("tokens_response", torch.tensor([14])).set("_step", torch.tensor([False])))
    assert alone["next", "tokens"].tolist() == alone["tokens"].tolist()


@each_padding
def test_rows_that_are_done_are_left_alone_until_all_are(padding: bool) -> None:
    tokenizer = tiny_tokenizer()
    env = text_env(tokenizer, eos=EOS, padding=padding)
    answers = iter([[[14, EOS], [15]], [[16], [17, 18]], [[19], [EOS]]])

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("tokens_response", jagged(*next(answers)))

    td = env.rollout(9, policy, break_when_any_done=False, break_when_all_done=True, tensordict=prompts("x", "yz"))
    assert td.batch_size == (2, 3)
    last = td[:, -1].get("next")
    assert tokens_of(last) == [
        [*ids_of(tokenizer, "x"), 14, EOS],
        [*ids_of(tokenizer, "yz"), 15, 17, 18, EOS],
    ]
    assert rows(last, "text") == ["xa", "yzbde"]


@each_padding
def test_a_random_rollout_and_one_that_starts_in_a_given_state(padding: bool) -> None:
    env = text_env(byte_level(), padding=padding).append_transform(StepCounter(4))
    env.set_seed(0)
    td = env.rollout(3, tensordict=prompts("a", "cat"))
    assert td.batch_size == (2, 3)
    assert all(len(row) == 1 for row in rows(td, "tokens_response"))
    whole = tokens_of(td[:, -1].get("next"))
    assert [row[:-3] for row in whole] == [ids_of(byte_level(), text) for text in ("a", "cat")]
    again = env.rollout(2, auto_reset=False, tensordict=env.step_mdp(td[:, -1]))
    assert again["next", "truncated"][:, -1].all()


def test_keys_may_be_nested_and_the_loader_of_an_environment_may_have_others() -> None:
    env = LLMEnv(str_key=("obs", "words"), action_key=("act", "words"), eos_token_id=EOS, batch_size=2)
    env = env.append_transform(
        Tokenizer([("obs", "words")], [("obs", "ids")], [("act", "words")], ["tokens_response"], tokenizer=byte_level())
    )
    check_env_specs(env)
    td = env.reset(TensorDict({"obs": {"words": NonTensorStack("a", "cat")}, "label": torch.arange(2)}, [2]))
    td["tokens_response"] = torch.tensor([[5], [6]])
    td = env.step(td)
    assert [len(row) for row in rows(td, ("next", "obs", "ids"), mask=("next", "obs", "attention_mask"))] == [
        2,
        1 + len(ids_of(byte_level(), "cat")),
    ]
    assert td["label"].tolist() == [0, 1]


def test_lazily_stacked_prompts_keep_text_and_tokens() -> None:
    counting = Counting(tiny_tokenizer())
    env = text_env(counting, padding=False)
    td = env.reset(lazy_stack([TensorDict({"text": NonTensorData(text)}) for text in ("ab", "c")], 0))
    for key, said in (("tokens_response", [[14, 15], [16]]), ("text_response", ["d", "efg"])):
        for row, part in zip(td.unbind(0), said, strict=True):
            row.set(key, torch.tensor(part) if key == "tokens_response" else NonTensorData(part))
        td = env.step_mdp(env.step(td))
    assert rows(td, "text") == ["ababd", "ccefg"]
    assert tokens_of(td) == [ids_of(tiny_tokenizer(), text) for text in ("ababd", "ccefg")]


@each_padding
def test_a_partial_reset_of_a_lazy_stack(padding: bool) -> None:
    counting = Counting(tiny_tokenizer())
    env = text_env(counting, padding=padding)
    td = env.reset(lazy_stack([TensorDict({"text": NonTensorData(text)}) for text in ("ab", "c")], 0))
    td.unbind(0)[0].set("text", NonTensorData("defg"))
    td = env.reset(td.set("_reset", torch.tensor([True, False])))
    assert tokens_of(td) == [ids_of(tiny_tokenizer(), text) for text in ("defg", "c")]
    assert counting.encoded == [["ab", "c"], ["defg"]]


def test_an_outer_transform_sees_the_tokens_before_the_step_and_after_it() -> None:
    seen: list[tuple[list[list[int]], list[list[int]]]] = []

    class Look(Transform):
        def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
            seen.append((tokens_of(td), tokens_of(next_td)))
            return next_td

    env = text_env(tiny_tokenizer()).append_transform(Look())
    td = env.reset(prompts("a", "b"))
    td["tokens_response"] = torch.tensor([[14], [15]])
    env.step(td.set("_step", torch.tensor([True, False])))
    assert seen == [([[14], [15]], [[14, 14], [15]])]


def test_an_environment_of_tokens_tokenises_its_prompts_at_reset_only() -> None:
    counting = Counting(tiny_tokenizer())
    for padding in (True, False):
        counting.encoded.clear()
        transform = Tokenizer(["text"], ["tokens"], tokenizer=counting, call_before_reset=True, padding=padding)
        env = LLMEnv(from_text=False, eos_token_id=EOS, batch_size=2).append_transform(transform)
        assert env.action_keys == ["tokens_response"]
        td = env.reset(prompts("ab", "c"))
        td["tokens_response"] = torch.tensor([[14], [EOS]])
        td = env.step_mdp(env.step(td))
        assert tokens_of(td) == [[14, 15, 14], [16, EOS]]
        assert rows(td, "text") == ["ab", "c"]
        td = env.reset(td.set("text", NonTensorStack("ab", "defg")).set("_reset", td["done"]))
        assert tokens_of(td) == [[14, 15, 14], ids_of(tiny_tokenizer(), "defg")]
        assert counting.encoded == [["ab", "c"], ["defg"]]
    with pytest.raises(KeyError, match="'tokens'"):
        env.reset(TensorDict({}, [2]))


class Talk(EnvBase):
    """An environment that answers: it echoes the last word, and begins a new page where one says "page"."""

    def __init__(self) -> None:
        super().__init__(batch_size=(2,))
        text = NonTensor((2,), example_data="a")
        self.observation_spec = Composite({"text": text, "hint": text}, shape=(2,))
        self.action_spec = Composite({"text_response": text}, shape=(2,))

    def _reset(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"text": NonTensorStack("ab", "c"), "hint": NonTensorStack("x", "y")}, [2])

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        said = zip(rows(td, "text"), rows(td, "text_response"), strict=True)
        text = ["new" if action == "page" else f"{text}{action}!{action}" for text, action in said]
        return TensorDict({"text": NonTensorStack(*text), "hint": NonTensorStack("xx", "z")}, [2])


@each_padding
def test_text_that_the_environment_adds_is_tokenised_at_the_seam_and_a_new_text_anew(padding: bool) -> None:
    counting = Counting(byte_level())
    transform = Tokenizer(
        ["text", ("b", "hint")[1]],
        [("obs", "tokens"), ("hints", "tokens")],
        ["text_response"],
        ["tokens_response"],
        tokenizer=counting,
        padding=padding,
    )
    env = Talk().append_transform(transform)
    check_env_specs(env)
    td = env.reset()
    words = [ids_of(byte_level(), word) for word in ("t", "page")]
    td["tokens_response"] = jagged(*words)
    td = env.step(td)
    one = ids_of(byte_level(), "ab") + words[0] + ids_of(byte_level(), "!t")
    assert tokens_of(td["next"], ("obs", "tokens")) == [one, ids_of(byte_level(), "new")]
    assert tokens_of(td["next"], ("hints", "tokens")) == [ids_of(byte_level(), hint) for hint in ("xx", "z")]


class Polite(LLMEnv):
    """An environment that thanks for every answer."""

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        next_td = super()._step(td)
        thanks = Text.of([" thanks"] * td.batch_size.numel())
        return next_td.set(self.str_key, read_text(next_td, self.str_key).append(thanks).entry())


class PoliteAtOnce(LLMEnv):
    """The same, with the answer and the thanks as one part."""

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        said = read_text(td, self.action_key).append(Text.of([" thanks"] * td.batch_size.numel()))
        text = read_text(td, self.str_key).append(said)
        return super()._step(td).set(self.str_key, text.entry())


@pytest.mark.parametrize("kind", [Polite, PoliteAtOnce])
@each_padding
@pytest.mark.parametrize("key", ["tokens_response", "text_response"])
def test_what_a_subclass_adds_to_the_text_is_tokenised_once_at_the_seam(
    padding: bool, key: str, kind: type[LLMEnv]
) -> None:
    counting = Counting(byte_level())
    transform = Tokenizer(
        ["text"], ["tokens"], ["text_response"], ["tokens_response"], tokenizer=counting, padding=padding
    )
    env = kind(eos_token_id=0).append_transform(transform)
    td = env.reset(prompts("a", "cat"))
    said, thanks = ids_of(byte_level(), "the"), ids_of(byte_level(), " thanks")
    expected = tokens_of(td)
    for turn in (1, 2):
        counting.encoded.clear()
        td[key] = torch.tensor([said, said]) if key == "tokens_response" else NonTensorStack("the", "the")
        td = env.step_mdp(env.step(td))
        expected = [row + said + thanks for row in expected]
        assert tokens_of(td) == expected
        assert rows(td, "text") == [text + "the thanks" * turn for text in ("a", "cat")]
        assert counting.encoded == [["the", "the"]] * (key == "text_response") + [[" thanks", " thanks"]]


def test_in_compose_both_ways_go_through_the_tokenizer() -> None:
    both = Compose(Tokenizer(["text"], ["tokens"], ["back"], ["tokens"], tokenizer=byte_level()), Transform())
    td = both(prompts("a", "cat"))
    assert tokens_of(td) == [ids_of(byte_level(), text) for text in ("a", "cat")]
    assert rows(both.inv(td), "back") == ["a", "cat"]
    assert "back" not in both.inv(prompts("a"))  # without tokens there is nothing to decode


def test_a_copy_of_an_environment_is_independent_and_pickles() -> None:
    env = text_env(byte_level())
    td = env.reset(prompts("a", "cat"))
    td["tokens_response"] = torch.tensor([[5], [6]])
    expected = tokens_of(env.step(td)["next"])
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert tokens_of(other.step(td.copy())["next"]) == expected


def test_observations_are_views_of_one_buffer() -> None:
    """What a step costs is what is appended: the tokens before are not copied."""
    for padding in (True, False):
        env = text_env(byte_level(), padding=padding)
        td = env.reset(prompts("the cat", "mat"))
        places = set()
        for _ in range(6):
            td["tokens_response"] = torch.tensor([[5], [6]])
            td = env.step_mdp(env.step(td))
            tokens: Any = td["tokens"]
            places.add((tokens.values() if tokens.is_nested else tokens).data_ptr())
        assert len(places) == 1


def test_a_step_without_tokens_says_so() -> None:
    env = text_env(byte_level())
    td = prompts("a", "b").set("tokens_response", torch.tensor([[5], [6]]))
    with pytest.raises(KeyError, match="step needs the tokens 'tokens'"):
        env.step(td)


@each_padding
def test_nothing_is_decoded_in_a_step_of_some_rows(padding: bool) -> None:
    counting = Counting(byte_level())
    env = text_env(counting, padding=padding)
    td = env.reset(prompts("a", "cat"))
    for _ in range(3):
        td["tokens_response"] = torch.tensor([[5], [6]])
        td = env.step_mdp(env.step(td.set("_step", torch.tensor([True, False]))))
    assert counting.decoded == 0
    assert counting.encoded == [["a", "cat"]]


class Answering(LLMEnv):
    """An environment that appends action and answer at once."""

    def _step_text(self, td: TensorDictBase, mask: Any) -> TensorDictBase:
        next_td = super()._step_text(td, mask)
        whole = Text.of([text + " at" for text in read_text(td, "text_response").tolist()])
        return next_td.set("text", read_text(td, "text").append(whole).entry())


def test_an_answer_that_is_appended_with_the_action_is_tokenised() -> None:
    tokenizer = byte_level()
    transform = Tokenizer(["text"], ["tokens"], ["text_response"], ["tokens_response"], tokenizer=tokenizer)
    env = Answering(eos_token_id=99_999).append_transform(transform)
    td = env.reset(prompts("the", "a"))
    td["tokens_response"] = torch.tensor([ids_of(tokenizer, " c")[:1]] * 2)
    td = env.step(td)
    added = [ids_of(tokenizer, " c")[:1] + ids_of(tokenizer, " at")] * 2
    assert tokens_of(td["next"]) == [a + b for a, b in zip(tokens_of(td), added, strict=True)]
    assert rows(td["next"], "text") == [text + rows(td, "text_response")[0] + " at" for text in ("the", "a")]


# How ids become strings.

OPTIONS = [
    None,
    {"skip_special_tokens": True},
    {"skip_special_tokens": False, "clean_up_tokenization_spaces": False},
    {"skip_special_tokens": True, "clean_up_tokenization_spaces": True},
]


def word_piece(clean_up: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of words, in whose text spaces stand before punctuation unless they are cleaned up."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[SEP]", "do", "n't", "go", ".", "##ing", "!"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]", clean_up_tokenization_spaces=clean_up
    )
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [lambda: word_piece(True), lambda: word_piece(False), byte_level, tiny_tokenizer])
def test_rows_are_decoded_as_the_tokenizer_does(make: Any, options: Any) -> None:
    tokenizer = make()
    ids = [[2, 3, 4, 5], [], [4, 6, 7, 1], [1, 2, 1], [0, 5, 7], [len(tokenizer) + 5, 2]]
    assert decode_rows(tokenizer, ids, options) == tokenizer.batch_decode(ids, **(options or {}))
    assert decode_rows(tokenizer, [], options) == []


def test_spaces_are_cleaned_up_where_the_tokenizer_does() -> None:
    assert decode_rows(word_piece(True), [[2, 3, 4, 5]]) == ["don't go."]
    assert decode_rows(word_piece(False), [[2, 3, 4, 5]]) == ["do n't go ."]


def test_a_tokenizer_with_a_way_of_its_own_is_asked() -> None:
    class Loud(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, token_ids: Any, **options: Any) -> str:
            return "loud"

    assert decode_rows(Loud(tokenizer_object=byte_level().backend_tokenizer), [[5], [6]]) == ["loud"] * 2
    replaced: Any = copy.copy(byte_level())
    replaced.batch_decode = lambda ids, **options: ["mine" for _ in ids]
    assert decode_rows(replaced, [[5]]) == ["mine"]
    counting = Counting(byte_level())
    assert decode_rows(counting, [[5]]) == byte_level().batch_decode([[5]])
    assert counting.decoded == 1


# The text is that of all tokens, decoded together.


def likely_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids among which characters of several tokens, broken ones, spaces, joined words and special tokens are common."""
    ids = {i for text in ("a b ab", "漢 €éa", "sat on") for i in ids_of(tokenizer, text)}
    ids |= {
        tokenizer.convert_tokens_to_ids(piece) for piece in ("<0xE6>", "<0x61>", "<0xFF>", "▁", "##t", "##at", "</s>")
    }
    return sorted(i for i in ids if isinstance(i, int))


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_right_the_text_is_that_of_all_tokens_decoded_together(name: str, data: st.DataObject) -> None:
    """Whoever reads when, in steps and resets of some rows, with special tokens shown or not."""
    tokenizer, skip = ALL[name](), data.draw(st.booleans())
    ids, known = likely_ids(tokenizer), [text for text in ("a", "ab a", "漢漢漢", "") if spelled(tokenizer, text)]
    env = text_env(tokenizer, padding=data.draw(st.booleans()), skip_special_tokens=skip)
    texts = [data.draw(st.sampled_from(known)) for _ in range(2)]
    td = env.reset(prompts(*texts))
    token_rows, seen = [ids_of(tokenizer, text) for text in texts], []
    for _ in range(data.draw(st.integers(1, 12))):
        said = data.draw(st.lists(st.lists(st.sampled_from(ids), max_size=6), min_size=2, max_size=2))
        flags = data.draw(st.sampled_from([(True, True), (True, True), (True, False), (False, True)]))
        if data.draw(st.integers(0, 9)) == 0:
            texts = [
                data.draw(st.sampled_from(known)) if flag else text for flag, text in zip(flags, texts, strict=True)
            ]
            td = env.reset(td.copy().set("text", NonTensorStack(*texts)).set("_reset", torch.tensor(flags)))
            token_rows = [
                ids_of(tokenizer, text) if flag else row
                for flag, text, row in zip(flags, texts, token_rows, strict=True)
            ]
        td = env.step_mdp(env.step(td.copy().set("tokens_response", jagged(*said)).set("_step", torch.tensor(flags))))
        token_rows = [row + new if flag else row for flag, new, row in zip(flags, said, token_rows, strict=True)]
        assert tokens_of(td) == token_rows
        seen.append((td, tokenizer.batch_decode(token_rows, skip_special_tokens=skip)))
        texts = seen[-1][1]
        if data.draw(st.booleans()):
            assert rows(td, "text") == texts
    for td, expected in data.draw(st.permutations(seen)):
        assert rows(td, "text") == expected


def spelled(tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    return bool(tokenizer.decode(ids_of(tokenizer, text)) == text)


def test_right_text_beside_tokens_is_replaced_by_that_of_the_tokens() -> None:
    env = text_env(tiny_tokenizer())
    td = env.reset(prompts("a", "b"))
    td["tokens_response"] = torch.tensor([[14], [15]])
    td = env.step(td.set("text_response", NonTensorStack("zz", "zz")))
    assert rows(td, "text_response") == ["a", "b"]
    assert rows(td["next"], "text") == ["aa", "bb"]


@pytest.mark.parametrize("texts", [("a", "b"), ("a", "bc")])
def test_rows_of_a_lazy_stack_without_masks_take_actions_of_any_length(texts: tuple[str, str]) -> None:
    """Whether the prompts happen to be of one length or not."""
    env = text_env(tiny_tokenizer(), padding=False, return_attention_mask=False)
    td = env.reset(lazy_stack([TensorDict({"text": NonTensorData(text)}) for text in texts], 0))
    td = env.step(td.set("tokens_response", jagged([14], [15, 16])))
    expected = [ids_of(tiny_tokenizer(), text) for text in texts]
    assert tokens_of(td["next"]) == [expected[0] + [14], expected[1] + [15, 16]]


def test_a_prompt_that_is_no_text_is_named_with_key_and_row() -> None:
    env = text_env(tiny_tokenizer())
    message = r"'text', row 1: expected text that can be encoded as UTF-8, found '\\ud83d' at character 1"
    with pytest.raises(ValueError, match=message):
        env.reset(prompts("a", "b\ud83d"))
    td = env.reset(prompts("a", "b"))
    with pytest.raises(ValueError, match=message):
        env.reset(td.copy().set("text", NonTensorStack("a", "b\ud83d")).set("_reset", torch.tensor([False, True])))
    with pytest.raises(ValueError, match="'text_response', row 0: expected text"):
        env.step(td.set("text_response", NonTensorStack("\ud83d", "b")))


def test_an_answer_behind_half_a_character_leaves_the_tokens_before_it_alone() -> None:
    """Also where the bytes of a prompt are shown as broken until the character behind them is complete."""
    tokenizer = byte_fallback()
    transform = Tokenizer(["text"], ["tokens"], ["text_response"], ["tokens_response"], tokenizer=tokenizer)
    env = Polite(eos_token_id=99_999).append_transform(transform)
    td = env.reset(prompts("漢漢"))
    before, half = tokens_of(td)[0], [tokenizer.convert_tokens_to_ids("<0xE6>")]
    td = env.step(td.set("tokens_response", torch.tensor([half])))
    after = tokens_of(td["next"])[0]
    assert after[: len(before) + 1] == before + half
    assert len(after) == len(before) + 1 + len(ids_of(tokenizer, " thanks"))
