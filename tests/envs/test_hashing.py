"""The environment of one token a step: every prefix has one hash and one text, however it was reached."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from ramet.envs.check import check_env_specs
from ramet.envs.hashing import LLMHashingEnv
from ramet.errors import DataError
from ramet.forest.hashing import SipHash
from ramet.models.tiny import tiny_tokenizer
from ramet.ragged import Ragged, as_padded_tensor, pad, rows
from ramet.specs import Categorical, NonTensor, Unbounded
from ramet.transforms.loading import DataLoadingPrimer
from ramet.transforms.step_counter import StepCounter
from ramet.transforms.tokenizer import Tokenizer
from ramet.transforms.transform import Transform

LAYOUTS = ("dense", "left", "right", "jagged", "lazy")
RAGGED = ("left", "right", "jagged", "lazy")
PROMPTS = [[3, 1, 4], [1], [5, 9]]
VOCABULARY = 300


class Letters:
    """A tokenizer of Latin-1 characters that counts what it decodes."""

    vocab_size = VOCABULARY

    def __init__(self) -> None:
        self.decoded = 0

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]

    def batch_decode(self, batch: Sequence[Sequence[int]]) -> list[str]:
        self.decoded += sum(map(len, batch))
        return ["".join(map(chr, ids)) for ids in batch]


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8: one character may take four of them."""

    vocab_size = 256

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def batch_decode(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(ids).decode(errors="replace") for ids in batch]


def polynomial(pairs: Tensor) -> Tensor:
    """A hashing module of a user's own."""
    return pairs[:, 0] * 31 + pairs[:, 1] + 7


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def oracle(tokens: Sequence[int]) -> int:
    """The fold, from one hash of bytes after the other."""
    last = signed(SipHash().digest(b""))
    for token in tokens:
        message = last.to_bytes(8, "little", signed=True) + token.to_bytes(8, "little", signed=True)
        last = signed(SipHash().digest(message))
    return last


def batch(prompts: Sequence[Sequence[int]], layout: str, key: Any = "observation", mask: Any = "attention_mask") -> Any:
    """Put rows into a TensorDict; whatever is padding is 7, which is a token like any other."""
    cells = [torch.tensor(row, dtype=torch.int64) for row in prompts]
    if layout == "lazy":
        return lazy_stack([TensorDict({key: cell}) for cell in cells])
    ragged = Ragged.from_rows(cells)
    if layout == "jagged":
        return TensorDict({key: ragged.jagged()}, [len(cells)])
    if layout == "dense":
        return TensorDict({key: torch.stack(cells)}, [len(cells)])
    tokens, real = ragged.padded("left" if layout == "left" else "right", 7)
    return TensorDict({key: tokens, mask: real}, [len(cells)])


def prefixes(td: TensorDictBase) -> list[list[int]]:
    mask = "attention_mask" if layout_of(td) == "padded" else None
    return [row.tolist() for row in rows(td, "observation", mask=mask)]


def layout_of(td: TensorDictBase) -> str:
    if isinstance(td, LazyStackedTensorDict):
        return "lazy"
    if td["observation"].is_nested:
        return "jagged"
    return "padded" if td.get("attention_mask", None) is not None else "dense"


def hashes(td: TensorDictBase) -> list[int]:
    return list(td.get("hashing").reshape(-1).tolist())


def act(td: TensorDictBase, tokens: Sequence[int]) -> TensorDictBase:
    return td.copy().set("action", torch.tensor(tokens).view(*td.batch_size, 1))


def right(td: TensorDictBase, expected: Sequence[Sequence[int]]) -> None:
    """The observation, the hash and the text of each row are those of `expected`."""
    assert prefixes(td) == [list(row) for row in expected]
    assert hashes(td) == [oracle(row) for row in expected]
    assert td["hashing"].dtype is torch.int64
    assert td["hashing"].shape == (*td.batch_size, 1)
    assert list(rows(td, "text")) == ["".join(map(chr, row)) for row in expected]


def always(token: int) -> Callable[[TensorDictBase], TensorDictBase]:
    return lambda td: td.set("action", torch.full((*td.batch_size, 1), token))


# The hash.


@pytest.mark.parametrize("layout", RAGGED)
def test_the_hash_of_a_prefix_is_the_same_whether_it_was_given_at_reset_or_reached_by_steps(layout: str) -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.reset(batch(PROMPTS, layout))
    right(td, PROMPTS)
    expected = PROMPTS
    for tokens in ([2, 6, 0], [7, 7, 7], [299, 0, 1]):
        td = env.step_mdp(env.step(act(td, tokens)))
        expected = [[*row, token] for row, token in zip(expected, tokens, strict=True)]
        right(td, expected)
        right(env.reset(batch(expected, layout)), expected)


def test_dense_rows_without_a_mask_stay_dense() -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.step_mdp(env.step(act(env.reset(batch([[1, 2], [3, 4]], "dense")), [5, 6])))
    assert td["observation"].tolist() == [[1, 2, 5], [3, 4, 6]]
    right(td, [[1, 2, 5], [3, 4, 6]])


@pytest.mark.parametrize("layout", RAGGED)
@settings(deadline=None, max_examples=10)
@given(
    prompts=st.lists(st.lists(st.integers(0, 299), max_size=4), min_size=1, max_size=7),
    added=st.lists(st.integers(0, 299), max_size=3),
)
def test_any_rows_however_long_have_the_hash_of_their_tokens(
    layout: str, prompts: list[list[int]], added: list[int]
) -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.reset(batch(prompts, layout))
    for token in added:
        td = env.step_mdp(env.step(act(td, [token] * len(prompts))))
    right(td, [[*row, *added] for row in prompts])


def test_the_hash_of_a_prefix_is_the_same_alone_or_in_a_batch() -> None:
    env = LLMHashingEnv(VOCABULARY)
    alone = [env.reset(TensorDict({"observation": torch.tensor(row)}, [])) for row in PROMPTS]
    assert [td["hashing"].tolist() for td in alone] == [[oracle(row)] for row in PROMPTS]
    stepped = [env.step(act(td, [8]))["next"] for td in alone]
    together = env.step(act(env.reset(batch(PROMPTS, "jagged")), [8, 8, 8]))["next"]
    assert [td["hashing"].item() for td in stepped] == hashes(together)
    assert [td["observation"].tolist() for td in stepped] == prefixes(together)


def test_the_hash_of_a_prefix_is_the_same_in_int32_or_int64() -> None:
    env = LLMHashingEnv(VOCABULARY)
    for layout in LAYOUTS:
        wide = batch([[1, 2], [3, 4]], layout)
        narrow = wide.apply(lambda value: value.to(torch.int32) if value.dtype is torch.int64 else value)
        td = env.reset(narrow)
        assert hashes(td) == [oracle([1, 2]), oracle([3, 4])], layout
        td = env.step(td.set("action", torch.tensor([[5], [6]], dtype=torch.int32)))
        assert hashes(td["next"]) == [oracle([1, 2, 5]), oracle([3, 4, 6])], layout
        assert all(row.dtype is torch.int64 for row in rows(td, ("next", "observation"))), layout


def test_the_hash_of_a_prefix_is_the_same_in_any_process() -> None:
    program = """
import torch
from tensordict import TensorDict
from ramet.envs.hashing import LLMHashingEnv
from ramet.errors import DataError
env = LLMHashingEnv(300)
td = env.reset(TensorDict({"observation": torch.tensor([[3, 1]])}, [1]))
print(env.step(td.set("action", torch.tensor([[4]])))["next", "hashing"].item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == oracle([3, 1, 4])


def test_a_copy_sent_to_another_process_goes_on_where_it_was() -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.step_mdp(env.step(act(env.reset(batch(PROMPTS, "jagged")), [1, 2, 3])))
    for again in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        right(again.step(act(td, [4, 5, 6]))["next"], [[3, 1, 4, 1, 4], [1, 2, 5], [5, 9, 3, 6]])


def test_the_default_module_is_a_keyed_siphash() -> None:
    given = batch(PROMPTS, "jagged")
    default, keyed = LLMHashingEnv(9 + 1), LLMHashingEnv(9 + 1, hashing_module=SipHash(bytes(16)))
    assert hashes(default.reset(given)) == hashes(LLMHashingEnv(10, hashing_module=SipHash()).reset(given))
    assert not set(hashes(default.reset(given))) & set(hashes(keyed.reset(given)))


@pytest.mark.parametrize("layout", RAGGED)
def test_a_module_of_the_users_own_works_the_same_way(layout: str) -> None:
    """From (0, 0) it is 7; from h and x, 31 h + x + 7."""
    env = LLMHashingEnv(VOCABULARY, hashing_module=polynomial)
    td = env.reset(batch([[], [5]], layout))
    assert hashes(td) == [7, 7 * 31 + 5 + 7]
    td = env.step_mdp(env.step(act(td, [5, 1])))
    assert hashes(td) == [229, 229 * 31 + 1 + 7]
    assert hashes(env.reset(batch([[5], [5, 1]], layout))) == [229, 229 * 31 + 8]


def test_a_module_that_does_not_give_one_integer_a_row_is_refused() -> None:
    given = batch(PROMPTS, "jagged")
    with pytest.raises(TypeError, match=r"result of the hashing module must hold integers: found torch\.float32"):
        LLMHashingEnv(10, hashing_module=lambda pairs: pairs[:, 0].float()).reset(given)
    with pytest.raises(ValueError, match=r"must map \[1, 2\] to \[1\]: found \[1, 2\]"):
        LLMHashingEnv(10, hashing_module=lambda pairs: pairs).reset(given)


@pytest.mark.parametrize("layout", ["left", "right"])
def test_padding_is_never_hashed(layout: str) -> None:
    """Not even if it looks like a token: it is 7 here, and so is a token."""
    env = LLMHashingEnv(VOCABULARY)
    td = env.reset(batch([[7], [7, 7, 7]], layout))
    assert hashes(td) == [oracle([7]), oracle([7, 7, 7])]
    assert hashes(env.step(act(td, [7, 7]))["next"]) == [oracle([7, 7]), oracle([7, 7, 7, 7])]


def test_padding_inside_the_rows_of_a_lazy_stack_is_never_hashed() -> None:
    real = torch.tensor([False, True, True])
    row = TensorDict({"observation": torch.tensor([7, 7, 65]), "attention_mask": real})
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.reset(lazy_stack([row, TensorDict({"observation": torch.tensor([66]), "attention_mask": real[1:2]})]))
    assert hashes(td) == [oracle([7, 65]), oracle([66])]
    next_td = env.step(act(td, [7, 67]))["next"]
    assert hashes(next_td) == [oracle([7, 65, 7]), oracle([66, 67])]
    assert rows(next_td, "text") == ["\x07A\x07", "BC"]


# Prompts.


@pytest.mark.parametrize("layout", RAGGED)
def test_prompts_of_no_tokens_are_legal(layout: str) -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.reset(batch([[], [], []], layout))
    right(td, [[], [], []])
    right(env.step(act(td, [65, 66, 67]))["next"], [[65], [66], [67]])


def test_an_empty_row_of_no_batch_and_an_empty_batch_are_legal() -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.reset(TensorDict({"observation": torch.zeros(0, dtype=torch.int64)}, []))
    assert (td["hashing"].item(), td["text"]) == (oracle([]), "")
    assert env.step(act(td, [65]))["next", "text"] == "A"
    none = LLMHashingEnv(9).reset(TensorDict({"observation": torch.zeros(0, 4, dtype=torch.int64)}, [0]))
    assert none["hashing"].shape == (0, 1)


def test_make_tensordict_tokenises_and_resets() -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.make_tensordict("ab")
    assert td.batch_size == ()
    assert td["observation"].tolist() == [97, 98]
    assert (td["text"], td["hashing"].tolist(), td["done"].tolist()) == ("ab", [oracle([97, 98])], [False])
    td = env.make_tensordict(["ab", "c", ""])
    assert td.batch_size == (3,)
    right(td, [[97, 98], [99], []])
    right(env.make_tensordict(["", ""]), [[], []])


def test_prompts_of_one_length_are_dense_unless_an_eos_can_end_them_apart() -> None:
    assert layout_of(LLMHashingEnv(tokenizer=Letters()).make_tensordict(["ab", "cd"])) == "dense"
    assert layout_of(LLMHashingEnv(tokenizer=Letters()).make_tensordict(["ab", "c"])) == "jagged"
    assert layout_of(LLMHashingEnv(tokenizer=Letters(), eos_token_id=0).make_tensordict(["ab", "cd"])) == "jagged"


def test_strings_under_the_observation_key_are_tokenised_at_reset() -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    td = env.reset(TensorDict({"observation": NonTensorStack("ab", "c"), "label": torch.tensor([1, 2])}, [2]))
    right(td, [[97, 98], [99]])
    assert td["label"].tolist() == [1, 2]
    lazy = lazy_stack([TensorDict({"observation": text}) for text in ("ab", "c")])
    right(env.reset(lazy), [[97, 98], [99]])


def test_no_batch_is_locked() -> None:
    env = LLMHashingEnv(VOCABULARY)
    assert (env.batch_size, env.batch_locked) == ((), False)
    for size in (1, 2, 5):
        assert env.reset(batch([[1, 2]] * size, "dense"))["hashing"].shape == (size, 1)
    with pytest.raises(ValueError, match=r"of batch size \(B,\): found \(2, 3\)"):
        env.reset(TensorDict({"observation": torch.ones(2, 3, 4, dtype=torch.int64)}, [2, 3]))


# Text.


def hugging_face(kind: str) -> Any:
    if kind == "tiny":
        from ramet.models.tiny import tiny_tokenizer

        return tiny_tokenizer()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "bytes":  # as of GPT-2: a character outside of ASCII is several tokens
        made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:  # as of Llama: a space in front of each word, of which the first is not shown
        words = ["<unk>", *(f"\u2581{word}" for word in ("one", "two", "three", "four"))]
        made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


PAIRS = {"tiny": ["2+2=", "x"], "bytes": ["h\u00e9 \U0001f600", "na\u00efve"], "words": ["one two", "four"]}


@pytest.mark.parametrize("kind", PAIRS)
def test_hf_tokenizers_and_ragged_batches_work(kind: str) -> None:
    tokenizer = hugging_face(kind)
    env = LLMHashingEnv(tokenizer=tokenizer)
    assert env.vocab_size == len(tokenizer)
    td = env.make_tensordict(PAIRS[kind])
    expected = tokenizer(PAIRS[kind])["input_ids"]
    assert len(set(map(len, expected))) == 2
    for token in [*reversed(expected[0]), 1, 2]:
        assert prefixes(td) == expected
        assert hashes(td) == [oracle(row) for row in expected]
        assert rows(td, "text") == tokenizer.batch_decode(expected)
        td = env.step_mdp(env.step(act(td, [token, token])))
        expected = [[*row, token] for row in expected]


def test_text_starts_with_the_string_given_where_the_tokenizer_gives_it_back() -> None:
    env = LLMHashingEnv(tokenizer=hugging_face("bytes"))
    td = env.rollout(4, always(66), tensordict=env.make_tensordict("h\u00e9"))
    letter = env.tokenizer.decode([66])
    assert rows(td, "text") == ["h\u00e9" + letter * t for t in range(4)]


def test_text_shows_special_tokens() -> None:
    """So that two prefixes with one text have the same tokens, as far as the tokenizer tells them apart."""
    env = LLMHashingEnv(tokenizer=hugging_face("tiny"), eos_token_id=2)
    assert env.rollout(1, always(2), tensordict=env.make_tensordict("7"))["next", "text"] == ["<bos>7<eos>"]


@settings(deadline=None, max_examples=40)
@given(
    prompts=st.lists(st.binary(max_size=12), min_size=2, max_size=2),
    steps=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=24),
    read=st.sets(st.integers(0, 24)),
)
def test_text_is_the_decoding_of_all_tokens_whenever_it_is_read(
    prompts: list[bytes], steps: list[tuple[int, int]], read: set[int]
) -> None:
    """Bytes that are no text of UTF-8 included, and characters of which only the first bytes are there."""
    env = LLMHashingEnv(tokenizer=Bytes())
    td = env.reset(batch([list(prompt) for prompt in prompts], "jagged"))
    expected = [list(prompt) for prompt in prompts]
    for t, tokens in enumerate(steps):
        if t in read:
            assert rows(td, "text") == Bytes().batch_decode(expected)
        td = env.step_mdp(env.step(act(td, tokens)))
        expected = [[*row, token] for row, token in zip(expected, tokens, strict=True)]
    assert rows(td, "text") == Bytes().batch_decode(expected)


def test_text_is_decoded_incrementally() -> None:
    """Reading it at each of 100 steps decodes a bounded number of tokens a step, not all of the prefix again."""
    letters = Letters()
    env = LLMHashingEnv(tokenizer=letters)
    td = env.reset(batch([[65] * 1000] * 2, "dense"))
    assert letters.decoded == 0
    assert rows(td, "text") == ["A" * 1000] * 2
    counts: list[int] = []
    for _ in range(100):
        before = letters.decoded
        td = env.step_mdp(env.step(act(td, [66, 67])))
        assert letters.decoded == before  # nothing is decoded before it is read
        assert rows(td, "text")[1].endswith("AC" if not counts else "CC")
        counts.append(letters.decoded - before)
    assert max(counts) <= 2 * 40
    right(td, [[65] * 1000 + [66] * 100, [65] * 1000 + [67] * 100])


def test_text_goes_on_after_what_it_came_from_was_copied_cut_or_stored() -> None:
    """The third byte completes a character that began before the copy."""
    env = LLMHashingEnv(tokenizer=Bytes())
    td = env.reset(batch([[0xE2, 0x82], [0x41, 0xC3]], "dense"))
    copies: list[tuple[TensorDictBase, list[str]]] = [
        (td.clone(), ["\u20ac", "A\ufffd"]),
        (pickle.loads(pickle.dumps(td)), ["\u20ac", "A\ufffd"]),
        (td[:1], ["\u20ac"]),
        (td.exclude("text"), ["\u20ac", "A\ufffd"]),
    ]
    for state, expected in copies:
        action = torch.tensor([[0xAC], [0x42]])[: len(state)]
        next_td = env.step(state.set("action", action))["next"]
        assert [text[:2] for text in rows(next_td, "text")] == expected
    padded = env.reset(batch([[0xE2, 0x82], [0x41, 0x42, 0xC3]], "left")).clone()
    assert rows(env.step(act(padded, [0xAC, 0xA9]))["next"], "text") == ["\u20ac", "AB\u00e9"]


def test_text_output_says_whether_there_is_text() -> None:
    for env in (LLMHashingEnv(VOCABULARY), LLMHashingEnv(tokenizer=Letters(), text_output=False)):
        assert not env.text_output
        td = env.step(act(env.reset(batch(PROMPTS, "jagged")), [1, 1, 1]))
        assert td.get("text", None) is None
        assert td["next"].get("text", None) is None
    assert LLMHashingEnv(tokenizer=Letters()).text_output
    td = LLMHashingEnv(tokenizer=Letters(), text_output=False).make_tensordict("ab")
    assert td["observation"].tolist() == [97, 98]


# Steps.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eos_ends_a_row(layout: str) -> None:
    env = LLMHashingEnv(tokenizer=Letters(), eos_token_id=9)
    td = env.reset(batch([[9, 9], [1, 9]], layout))
    assert td["done"].tolist() == [[False], [False]]
    next_td = env.step(act(td, [9, 3]))["next"]
    assert next_td["terminated"].tolist() == next_td["done"].tolist() == [[True], [False]]
    assert next_td["truncated"].tolist() == [[False], [False]]


def test_without_an_eos_no_row_ends() -> None:
    env = LLMHashingEnv(3)
    td = env.reset(batch([[0]], "dense"))
    assert not any(env.step(act(td, [token]))["next", "done"].any() for token in range(3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stepping_one_td_twice_gives_two_independent_results(layout: str) -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    prompts = [[3, 1], [4, 1]]
    root = env.step_mdp(env.step(act(env.reset(batch(prompts, layout)), [5, 9])))
    first, second = (env.step(act(root, tokens)) for tokens in ([2, 6], [7, 8]))
    deeper = env.step(act(env.step_mdp(first), [1, 1]))
    right(second["next"], [[3, 1, 5, 7], [4, 1, 9, 8]])
    right(deeper["next"], [[3, 1, 5, 2, 1], [4, 1, 9, 6, 1]])
    right(first["next"], [[3, 1, 5, 2], [4, 1, 9, 6]])
    right(root, [[3, 1, 5], [4, 1, 9]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_does_not_write_into_what_it_is_given(layout: str) -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    given = batch([[3, 1], [4, 1]], layout)
    td = act(env.reset(given), [5, 9])
    keys = set(td.keys())
    env.step(td)
    assert set(td.keys()) == keys
    right(td, [[3, 1], [4, 1]])
    assert prefixes(given) == [[3, 1], [4, 1]]


@pytest.mark.parametrize("layout", RAGGED)
def test_a_partial_step_leaves_the_other_rows_alone(layout: str) -> None:
    env = LLMHashingEnv(tokenizer=Letters(), eos_token_id=9)
    td = env.step_mdp(env.step(act(env.reset(batch(PROMPTS, layout)), [9, 2, 2])))
    mask = torch.tensor([[False], [True], [False]])
    # What is under the action of a row that is not stepped may be anything.
    stepped = env.step(act(td, [-5, 9, 1000]).set("_step", mask))["next"]
    right(stepped, [[3, 1, 4, 9], [1, 2, 9], [5, 9, 2]])
    assert stepped["terminated"].tolist() == [[True], [True], [False]]
    again = env.step_mdp(env.step(act(env.step_mdp(env.step(act(td, [1, 9, 1]).set("_step", mask))), [6, 6, 6])))
    right(again, [[3, 1, 4, 9, 6], [1, 2, 9, 6], [5, 9, 2, 6]])


def test_a_partial_step_of_dense_rows_without_a_mask_is_refused() -> None:
    env = LLMHashingEnv(VOCABULARY)
    td = act(env.reset(batch([[1], [2]], "dense")), [3, 3]).set("_step", torch.tensor([True, False]))
    with pytest.raises(ValueError, match="pass the mask, or jagged tokens"):
        env.step(td)
    none = env.step(td.set("_step", torch.tensor([False, False])))["next"]
    assert none["observation"].tolist() == [[1], [2]]
    assert hashes(none) == [oracle([1]), oracle([2])]


@pytest.mark.parametrize("layout", RAGGED)
def test_rows_that_ended_are_left_alone_until_all_have(layout: str) -> None:
    env = LLMHashingEnv(tokenizer=Letters(), eos_token_id=9)
    script: Iterator[list[int]] = iter([[1, 9, 1], [2, 5, 9], [9, 5, 5], [5, 5, 5]])
    td = env.rollout(
        9,
        lambda td: td.set("action", torch.tensor(next(script)).view(3, 1)),
        break_when_all_done=True,
        tensordict=batch(PROMPTS, layout),
    )
    assert td.batch_size == (3, 3)
    right(td[:, -1]["next"], [[3, 1, 4, 1, 2, 9], [1, 9], [5, 9, 1, 9]])


@pytest.mark.parametrize("layout", RAGGED)
def test_a_partial_reset_touches_only_the_rows_it_names(layout: str) -> None:
    env = LLMHashingEnv(tokenizer=Letters(), eos_token_id=9)
    td = env.step_mdp(env.step(act(env.reset(batch(PROMPTS, layout)), [9, 9, 2])))
    # Another hash is put into a row, to see that it is the one kept.
    marked = td.copy().set("hashing", torch.where(torch.tensor([[True], [False], [False]]), 1, td["hashing"]))
    again = env.reset(marked.set("_reset", torch.tensor([[False], [True], [False]])))
    assert again["done"].tolist() == [[True], [False], [False]]
    assert hashes(again) == [1, oracle([1, 9]), oracle([5, 9, 2])]
    assert prefixes(again) == [[3, 1, 4, 9], [1, 9], [5, 9, 2]]
    assert again.get("_reset", None) is None
    none = env.reset(marked.set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
    assert (hashes(none), none["done"].tolist()) == (hashes(marked), td["done"].tolist())


class Prompts(Transform):
    """A plain primer: the rows that are reset get the next prompts."""

    def __init__(self, prompts: list[list[int]]) -> None:
        super().__init__()
        self.source = iter(prompts)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        mask = td.get("_reset", torch.ones(2, 1, dtype=torch.bool)).reshape(-1).tolist()
        old = rows(td, "observation") if td.get("observation", None) is not None else [None, None]
        new = [torch.tensor(next(self.source)) if flag else row for flag, row in zip(mask, old, strict=True)]
        return td.set("observation", Ragged.from_rows(new).jagged())


def test_rows_that_ended_go_on_with_the_next_prompt_of_a_primer() -> None:
    env = LLMHashingEnv(tokenizer=Letters(), eos_token_id=9).append_transform(Prompts([[1], [2, 2], [3, 3, 3]]))
    script = iter([[9, 4], [5, 5], [6, 6]])
    start = TensorDict({}, [2])
    td = env.rollout(
        3,
        lambda td: td.set("action", torch.tensor(next(script)).view(2, 1)),
        break_when_any_done=False,
        tensordict=start,
    )
    right(td[:, 0]["next"], [[1, 9], [2, 2, 4]])
    right(td[:, 1], [[3, 3, 3], [2, 2, 4]])
    right(td[:, 2]["next"], [[3, 3, 3, 5, 6], [2, 2, 4, 5, 6]])


def test_a_step_counter_truncates_and_does_not_terminate() -> None:
    env = LLMHashingEnv(tokenizer=Letters(), eos_token_id=9).append_transform(StepCounter(2))
    td = env.rollout(5, always(1), tensordict=batch(PROMPTS, "jagged"))
    assert td.batch_size == (3, 2)
    last = td[:, -1]["next"]
    assert last["truncated"].all()
    assert not last["terminated"].any()
    right(last, [[*row, 1, 1] for row in PROMPTS])


def test_foreign_keys_survive() -> None:
    env = LLMHashingEnv(VOCABULARY)
    given = batch(PROMPTS, "jagged").set("answer", NonTensorStack("x", "y", "z")).set("id", torch.arange(3))
    td = env.step_mdp(env.step(act(env.reset(given), [1, 1, 1])))
    assert list(td["answer"]) == ["x", "y", "z"]
    assert td["id"].tolist() == [0, 1, 2]
    assert td.get("action", None) is None


def test_set_seed_fixes_random_actions() -> None:
    env = LLMHashingEnv(1000)

    def play() -> list[int]:
        env.set_seed(3)
        return list(env.rollout(5, tensordict=batch([[1]], "dense"))["action"].flatten().tolist())

    first = play()
    assert first == play()
    assert len(set(first)) > 1
    assert all(0 <= token < 1000 for token in first)


def test_a_subclass_that_knows_of_no_mask_is_put_right() -> None:
    class Counting(LLMHashingEnv):
        def _reset(self, td: TensorDictBase) -> TensorDictBase:
            return super()._reset(td.exclude("_reset")).set("count", torch.zeros(*td.batch_size, 1))

        def _step(self, td: TensorDictBase) -> TensorDictBase:
            return super()._step(td.exclude("_step")).set("count", td["count"] + 1)

    env = Counting(VOCABULARY, eos_token_id=9)
    td = env.step_mdp(env.step(act(env.reset(batch(PROMPTS, "jagged")), [9, 9, 1])))
    mask = torch.tensor([True, False, False])
    stepped = env.step(act(td, [2, 2, 2]).set("_step", mask))["next"]
    assert stepped["count"].tolist() == [[2], [1], [1]]
    assert prefixes(stepped) == [[3, 1, 4, 9, 2], [1, 9], [5, 9, 1]]
    assert stepped["done"].tolist() == [[False], [True], [False]]
    again = env.reset(td.set("_reset", mask))
    assert again["count"].tolist() == [[0], [1], [1]]
    assert again["done"].tolist() == [[False], [True], [False]]


def test_an_append_costs_what_is_appended() -> None:
    """200 observations live in a few buffers, and lie in them one after the other."""
    for layout in ("dense", "jagged", "left"):
        env = LLMHashingEnv(VOCABULARY)
        td = env.rollout(200, always(1), tensordict=batch([[1, 2], [3, 4]], layout))
        seen = [step.get("observation") for step in td.unbind(-1)]
        storages = {(row.values() if row.is_nested else row).untyped_storage().data_ptr() for row in seen}
        assert len(storages) < 20, layout


# Specs and keys.


def test_specs_say_what_there_is() -> None:
    env = LLMHashingEnv(tokenizer=Letters())
    assert env.full_observation_spec.leaves() == ["observation", "hashing", "text"]
    assert env.observation_spec["observation"] == Categorical(VOCABULARY, (-1,))
    assert env.observation_spec["hashing"] == Unbounded((1,), dtype=torch.int64)
    assert isinstance(env.observation_spec["text"], NonTensor)
    assert env.action_keys == ["action"]
    assert env.action_spec == Categorical(VOCABULARY, (1,))
    assert env.reward_keys == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokenizer", [None, Letters()])
def test_the_environment_is_what_its_specs_say(layout: str, tokenizer: Any) -> None:
    env = LLMHashingEnv(None if tokenizer else VOCABULARY, tokenizer=tokenizer, eos_token_id=3)
    check_env_specs(env, tensordict=batch([[3, 1], [4, 1]], layout))
    check_env_specs(env, tensordict=TensorDict({"observation": torch.tensor([1, 2])}, []))


def test_keys_may_be_others_and_nested() -> None:
    env = LLMHashingEnv(tokenizer=Letters(), observation_key=("state", "ids"), text_key=("state", "words"))
    td = env.reset(batch([[65], [66, 67]], "left", ("state", "ids"), ("state", "attention_mask")))
    td = env.step_mdp(env.step(act(td, [68, 69])))
    assert [row.tolist() for row in rows(td, ("state", "ids"), mask=("state", "attention_mask"))] == [
        [65, 68],
        [66, 67, 69],
    ]
    assert rows(td, ("state", "words")) == ["AD", "BCE"]
    assert pad(td, ("state", "ids"), "right", 0, mask=("state", "attention_mask"))[0].tolist() == [
        [65, 68, 0],
        [66, 67, 69],
    ]
    assert hashes(td) == [oracle([65, 68]), oracle([66, 67, 69])]


def test_the_vocabulary_is_that_of_the_tokenizer_with_its_added_tokens() -> None:
    tokenizer = hugging_face("tiny")
    size = tokenizer.vocab_size
    tokenizer.add_tokens(["<tool>"])
    assert LLMHashingEnv(tokenizer=tokenizer).vocab_size == size + 1
    assert LLMHashingEnv(7, tokenizer=tokenizer).vocab_size == 7


# Errors.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "vocab_size is needed where there is no tokenizer"),
        ({"vocab_size": 10, "text_output": True}, ValueError, "text_output=True needs a tokenizer"),
        ({"vocab_size": "ten"}, TypeError, "vocab_size must be a whole number: found str 'ten'"),
        ({"vocab_size": True}, TypeError, "vocab_size must be a whole number"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1: found 0"),
        ({"vocab_size": 10, "eos_token_id": 10}, ValueError, "vocabulary, 0 to 9: found 10"),
        ({"vocab_size": 10, "eos_token_id": -1}, ValueError, "vocabulary, 0 to 9: found -1"),
        ({"vocab_size": 10, "observation_key": "hashing"}, ValueError, "key of its own"),
        ({"vocab_size": 10, "observation_key": "action"}, ValueError, "key of its own"),
        ({"tokenizer": Letters(), "text_key": "observation"}, ValueError, "key of its own"),
    ],
)
def test_arguments_that_can_not_be_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMHashingEnv(**arguments)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, RuntimeError, "reset requires a prompt: put tokens under 'observation'"),
        (TensorDict({"tokens": torch.ones(2, 3).long()}, [2]), RuntimeError, "requires a prompt"),
        (TensorDict({"observation": torch.ones(2, 3)}, [2]), TypeError, "integers: found float32 tensor"),
        (TensorDict({"observation": torch.ones(2, 3).bool()}, [2]), TypeError, "integers: found bool tensor"),
        (TensorDict({"observation": torch.ones(2).long()}, [2]), ValueError, r"\(2, 'L'\): found int64 tensor"),
        (TensorDict({"observation": torch.ones(2, 3, 1).long()}, [2]), ValueError, r"of shape \(2, 3, 1\)"),
        (TensorDict({"observation": torch.tensor([[1, 10]])}, [1]), ValueError, "0 to 9: found 10"),
        (TensorDict({"observation": torch.tensor([[1, -1]])}, [1]), ValueError, "0 to 9: found -1"),
        (TensorDict({"observation": NonTensorStack("a", "b")}, [2]), TypeError, "there is no tokenizer"),
        (batch([[3, 12], [1]], "jagged"), ValueError, "found 12; if the model knows more tokens, pass its vocab_size"),
        (batch([[3, 12], [1]], "lazy"), ValueError, "0 to 9: found 12"),
    ],
)
def test_prompts_that_can_not_be_are_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMHashingEnv(10).reset(given)


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (None, KeyError, "step needs an action 'action'"),
        (torch.ones(2, 1), TypeError, "integers: found float32 tensor"),
        (torch.ones(2, 1).bool(), TypeError, "integers: found bool tensor"),
        (NonTensorStack("a", "b"), TypeError, "integers: found non-tensor"),
        (torch.ones(2).long(), ValueError, r"\(2, 1\): found int64 tensor of shape \(2\)"),
        (torch.ones(2, 2).long(), ValueError, r"\(2, 1\): found int64 tensor of shape \(2, 2\)"),
        (torch.tensor([[1], [10]]), ValueError, "'action' must hold ids of the vocabulary, 0 to 9: found 10"),
        (torch.tensor([[-1], [1]]), ValueError, "found -1"),
    ],
)
def test_actions_that_can_not_be_are_refused(action: Any, error: type[Exception], message: str) -> None:
    env = LLMHashingEnv(10)
    td = env.reset(batch([[1], [2]], "dense"))
    if action is not None:
        td.set("action", action)
    with pytest.raises(error, match=message):
        env.step(td)


@pytest.mark.parametrize("key", ["observation", "hashing"])
def test_a_step_from_what_no_reset_made_is_refused(key: str) -> None:
    env = LLMHashingEnv(10)
    td = act(env.reset(batch([[1], [2]], "dense")), [3, 3])
    with pytest.raises(KeyError, match=f"step needs .*{key}.*: step what reset or step_mdp returned"):
        env.step(td.exclude(key))


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (7, TypeError, "a string or a list of strings: found 7"),
        (["a", 7], TypeError, "a string or a list of strings: found"),
        ([], ValueError, "at least one prompt"),
    ],
)
def test_strings_that_can_not_be_are_refused(prompts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMHashingEnv(tokenizer=Letters()).make_tensordict(prompts)
    with pytest.raises(TypeError, match="there is no tokenizer"):
        LLMHashingEnv(10).make_tensordict("a")


# Prompts out of a loader.


def holds(td: TensorDictBase, expected: list[list[int]]) -> None:
    assert prefixes(td) == expected
    assert hashes(td) == [oracle(row) for row in expected]


@pytest.mark.parametrize("method", [None, "as_nested_tensor", "as_padded_tensor", as_padded_tensor])
def test_rows_of_a_loader_have_the_hash_of_their_tokens_whatever_the_stack_method(method: Any) -> None:
    """Rows that are padded come with a mask, which no spec of the environment names, and keep it through a reset."""
    data = [{"observation": torch.tensor([7])}, {"observation": torch.tensor([3, 3])}]
    primer = DataLoadingPrimer(data, stack_method=method)
    env = LLMHashingEnv(9).append_transform(primer)
    td = env.reset(TensorDict(batch_size=[2]))
    holds(td, [[7], [3, 3]])
    padded = method not in (None, "as_nested_tensor")
    assert (td.get("attention_mask", None) is not None, "attention_mask" in env.full_observation_spec) == (
        padded,
        padded,
    )
    td = env.step_mdp(env.step(act(td, [1, 2])))
    holds(td, [[7, 1], [3, 3, 2]])
    holds(env.reset(td.set("_reset", torch.tensor([False, True]))), [[7, 1], [7]])
    check_env_specs(env)


def test_bare_strings_of_a_loader_are_prompts() -> None:
    """They go under the observation, where a reset takes strings; the specs stay those of tokens."""
    tokenizer = tiny_tokenizer()
    env = LLMHashingEnv(tokenizer=tokenizer).append_transform(DataLoadingPrimer(["1+1=", "10+1="]))
    alone = LLMHashingEnv(tokenizer=tokenizer)
    td = env.reset()
    assert td["observation"].tolist() == alone.make_tensordict("1+1=")["observation"].tolist()
    assert td["text"] == "<bos>1+1="
    assert hashes(env.reset(TensorDict(batch_size=[2]))) == hashes(alone.make_tensordict(["10+1=", "1+1="]))
    assert env.full_observation_spec["observation"].dtype is torch.int64
    rollout = env.rollout(3, always(5), break_when_any_done=False)
    assert list(rollout["next", "text"]) == ["<bos>10+1=1", "<bos>10+1=11", "<bos>10+1=111"]
    td = env.reset(TensorDict(batch_size=[2])).set("_reset", torch.tensor([False, True]))
    with pytest.raises(TypeError, match="needs rows that hold tokens already"):
        env.reset(td)
    with pytest.raises(DataError, match="of text the environment observes nothing"):
        LLMHashingEnv(9).append_transform(DataLoadingPrimer(["1+1="])).reset()


def test_strings_of_a_loader_go_to_the_tokenizer_where_there_is_one_before_the_reset() -> None:
    """Then some rows of a batch can be reset alone."""
    tokenizer = tiny_tokenizer()
    transform = Tokenizer(["text"], ["observation"], tokenizer=tokenizer, call_before_reset=True)
    env = LLMHashingEnv(tokenizer=tokenizer).append_transform(transform)
    env = env.append_transform(DataLoadingPrimer(["1+1=", "10+1="]))
    td = env.reset(TensorDict(batch_size=[2]))
    assert prefixes(td) == [[5, 76, 5, 84], [5, 4, 76, 5, 84]]
    td = env.reset(td.set("_reset", torch.tensor([False, True])))
    assert prefixes(td) == [[5, 76, 5, 84], [5, 76, 5, 84]]
    assert len(set(hashes(td))) == 1
