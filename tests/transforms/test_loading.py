"""Rows of a loader at the reset of an environment: each one, in order, as often as it is repeated."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from ramet.envs.check import check_env_specs
from ramet.envs.llm import LLMEnv
from ramet.errors import DataError
from ramet.models.tiny import tiny_tokenizer
from ramet.ragged import as_padded_tensor, pad, rows
from ramet.specs import Composite, NonTensor, Unbounded
from ramet.transforms.loading import DataLoadingPrimer
from ramet.transforms.tokenizer import Tokenizer

LETTERS = list("abcdefg")
IDS = [torch.tensor(ids) for ids in ([1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [])]
IDS[-1] = IDS[-1].long()


def text_env(loader, env_batch=None, **options):
    return LLMEnv(eos_token_id=9, batch_size=env_batch).append_transform(DataLoadingPrimer(loader, **options))


def token_env(loader, env_batch=None, env_options=None, **options):
    env = LLMEnv(from_text=False, eos_token_id=9, batch_size=env_batch, **(env_options or {}))
    return env.append_transform(DataLoadingPrimer(loader, **options))


def lists(td, key="tokens"):
    return [row.tolist() for row in rows(td, key)]


def partial(env, td, flags):
    return env.reset(td.copy().set("_reset", torch.tensor(flags)))


class Again:
    """A loader that can be iterated again, and has neither length nor items by number."""

    def __init__(self, items, batch_size=None):
        self.items = items
        if batch_size is not None:
            self.batch_size = batch_size

    def __iter__(self):
        return iter(self.items)


# What a loader may be, and what its items may be.


class Stream(IterableDataset):
    def __iter__(self):
        return ({"text": c} for c in "abc")


LOADERS = {
    "a list of strings": lambda: list("abc"),
    "a tuple of mappings": lambda: tuple({"text": c} for c in "abc"),
    "something that is iterated again": lambda: Again(list("abc")),
    "a torch DataLoader of strings": lambda: DataLoader(list("abc"), batch_size=2),
    "a torch DataLoader of rows": lambda: DataLoader([{"text": c} for c in "abc"], batch_size=None),
    "a torch DataLoader of mappings": lambda: DataLoader([{"text": c} for c in "abc"], batch_size=2),
    "a torch DataLoader with a batch_sampler": lambda: DataLoader(list("abc"), batch_sampler=[[0, 1], [2]]),
    "a torch DataLoader of a stream": lambda: DataLoader(Stream(), batch_size=2),
    "TensorDicts": lambda: [TensorDict({"text": c}) for c in "abc"],
    "TensorDicts with a batch": lambda: [TensorDict({"text": NonTensorStack(*"abc")}, [3])],
    "a TensorDict": lambda: TensorDict({"text": NonTensorStack(*"abc")}, [3]),
    "batches of strings": lambda: [["a", "b"], ["c"]],
    "batches of columns": lambda: [{"text": ["a", "b"]}, {"text": ["c"]}],
    "a function that makes a generator": lambda: lambda: iter("abc"),
    "a function that makes a list": lambda: lambda: list("abc"),
    "a loader that says batch_size 0": lambda: Again(list("abc"), 0),
    "a loader that says batch_size 2": lambda: Again([["a", "b"], ["c"]], 2),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_any_loader_fills_any_batch_in_order(kind, size):
    """Rows are buffered and re-batched: the loader's batch and the environment's are independent; epochs follow."""
    env = text_env(LOADERS[kind](), size, batch_size=size)
    found = [text for _ in range(4) for text in rows(env.reset(), "text")]
    assert found == list(itertools.islice(itertools.cycle("abc"), 4 * max(size, 1)))


def test_a_datasets_dataset_gives_rows_whatever_is_in_them():
    """Its columns of lists are values of rows; token lists become tensors."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "tokens": [[1, 2], [3]], "words": [["x", "y"], ["z"]]})
    env = text_env(data, 2, stack_method="as_nested_tensor")
    td = env.reset()
    assert (list(td["text"]), lists(td)) == (["a", "b"], [[1, 2], [3]])
    assert td.get("words").tolist() == [["x", "y"], ["z"]]
    assert list(text_env(data.to_iterable_dataset(), 3).reset()["text"]) == ["a", "b", "a"]
    state = env.transform.state_dict()
    assert state["_extra_state"]["row"]["index"] == 1


def test_a_generator_is_read_once():
    """All of its rows come, then it raises at once, naming what it is and how many it gave."""
    env = text_env(iter("abcd"), 2)
    assert list(env.reset()["text"]) + list(env.reset()["text"]) == list("abcd")
    with pytest.raises(DataError, match=r"str_.*iterator.*exhausted: it gave 4"):
        env.reset()


def test_an_endless_source_works():
    """Nothing asks for its end."""
    td = token_env(torch.tensor([i]) for i in itertools.count()).reset(TensorDict(batch_size=[3]))
    assert lists(td) == [[0], [1], [2]]


@pytest.mark.parametrize("loader", [[], (), Again([]), lambda: iter(()), iter(()), DataLoader([]), [[]]], ids=str)
def test_an_empty_loader_raises_at_once_and_names_the_loader(loader):
    """It never hangs."""
    with pytest.raises(DataError, match=r"the loader .*(empty|exhausted).*gave 0"):
        text_env(loader).reset()


def test_a_re_iterable_loader_starts_its_next_epoch():
    """Also in the middle of a batch; the numbers of the rows go on."""
    td = text_env(Again(list("ab")), 5).reset()
    assert list(td["text"]) == list("ababa")
    assert td["group_id"].tolist() == [0, 1, 2, 3, 4]


def test_a_function_that_makes_iterators_is_called_for_each_epoch_and_another_once():
    """What can be iterated again is kept."""
    made = []

    def generator():
        made.append(0)
        return iter("ab")

    assert list(text_env(generator, 5).reset()["text"]) == list("ababa")
    assert len(made) == 3
    made.clear()
    text_env(lambda: made.append(0) or list("ab"), 5).reset()
    assert len(made) == 1


def test_tuples_and_lists_are_zipped_with_data_keys_strictly():
    """A single key takes the item as its column."""
    pairs = [("a", 1), ("b", 2)]
    td = text_env(pairs, 2, data_keys=["text", "label"]).reset()
    assert (list(td["text"]), td["label"].tolist()) == (["a", "b"], [1, 2])
    td = text_env(DataLoader(pairs, batch_size=2), 2, data_keys=["text", "label"]).reset()
    assert (list(td["text"]), td["label"].tolist()) == (["a", "b"], [1, 2])
    assert list(text_env([("a", "b")], 2, data_keys=["text"]).reset()["text"]) == ["a", "b"]
    assert lists(token_env([[1, 2], [3, 4]], data_keys=["tokens"]).reset()) == [[1, 2]]
    td = text_env([{"text": "a", "other": 1}], data_keys=["text"]).reset()
    assert td["text"] == "a"
    assert "other" not in td


@pytest.mark.parametrize("bare", ["tokens", ("agent", "ids")])
def test_a_bare_item_goes_under_the_observation_of_the_environment_else_data(bare):
    """Also where a Tokenizer stands between, that turns text into the observation before the reset."""
    td = token_env(IDS, 2, {"token_key": bare}, stack_method="as_nested_tensor").reset()
    assert [row.tolist() for row in td[bare].unbind()] == [[1, 2, 3], [4]]
    assert list(DataLoadingPrimer(LETTERS)(TensorDict(batch_size=[2]))["data"]) == ["a", "b"]
    td = LLMEnv(str_key="question", eos_token_id=9).append_transform(DataLoadingPrimer(LETTERS)).reset()
    assert td["question"] == "a"
    tokenizer = Tokenizer(["query"], ["tokens"], tokenizer=tiny_tokenizer(), call_before_reset=True)
    env = LLMEnv(from_text=False, eos_token_id=2, batch_size=2).append_transform(tokenizer)
    td = env.append_transform(DataLoadingPrimer(["2+2=", "7"])).reset()
    assert (list(td["query"]), lists(td)) == (["2+2=", "7"], [[6, 76, 6, 84], [11]])
    with pytest.raises(DataError, match=r"(?s)row 0 .*gives text without a name.*call_before_reset"):
        token_env(LETTERS).reset()


def test_a_tokenizer_tokenises_what_the_primer_gives():
    """Text and tokens are both there, and repeats are alike."""
    env = LLMEnv(eos_token_id=2, batch_size=3)
    keys = (["text"], ["tokens"], ["text_response"], ["tokens_response"])
    env = env.append_transform(Tokenizer(*keys, tokenizer=tiny_tokenizer()))
    env = env.append_transform(DataLoadingPrimer(["2+2=", "7"], repeats=2))
    td = env.reset()
    assert lists(td) == [[6, 76, 6, 84]] * 2 + [[11]]
    td = partial(env, td, [False, False, True])
    assert (list(td["text"]), lists(td)) == (["2+2=", "2+2=", "7"], [[6, 76, 6, 84]] * 2 + [[11]])
    check_env_specs(env)


def test_mappings_inside_rows_are_nested_entries_where_they_hold_tensors_or_known_keys():
    """And one entry otherwise."""
    row = {"text": "a", "seen": {"ids": torch.tensor([1])}, "meta": {"source": "x"}}
    td = text_env([row]).reset()
    assert td["seen", "ids"].tolist() == [1]
    assert td.get("meta").data == {"source": "x"}
    td = token_env([{"agent": {"tokens": [1, 2]}}], None, {"token_key": ("agent", "tokens")}).reset()
    assert td["agent", "tokens"].tolist() == [1, 2]
    assert td["agent", "attention_mask"].tolist() == [True, True]


def test_auto_batch_size_false_infers_no_batch_from_the_data():
    """What would be a batch of two rows is one."""
    matrix = torch.tensor([[1, 2], [3, 4]])
    assert DataLoadingPrimer([{"x": matrix}])(TensorDict())["x"].tolist() == [1, 2]
    assert DataLoadingPrimer([{"x": matrix}], auto_batch_size=False)(TensorDict())["x"].tolist() == [[1, 2], [3, 4]]
    given = TensorDict({"x": matrix}, [2])
    assert DataLoadingPrimer([given], auto_batch_size=False)(TensorDict())["x"].tolist() == [1, 2]


def test_an_empty_list_beside_lists_of_numbers_is_an_empty_tensor():
    """In the first row too, however few rows the first reset draws; no row is lost by looking."""
    data = [{"text": "a", "ids": []}, {"text": "b", "ids": [1, 2]}, {"text": "c", "ids": []}]
    for loader in (data, Again(data), lambda: iter(data), DataLoader(data, batch_size=2, collate_fn=list)):
        for counts in ([3], [1, 1, 1]):
            primer = DataLoadingPrimer(loader)
            tds = [primer(TensorDict(batch_size=[count])) for count in counts]
            assert [row for td in tds for row in lists(td, "ids")] == [[], [1, 2], []]
            assert [text for td in tds for text in td["text"]] == ["a", "b", "c"]
    td = DataLoadingPrimer(iter([{"n": []}, {"n": [0.5]}]))(TensorDict())
    assert (td["n"].dtype, td["n"].shape) == (torch.float32, (0,))
    specs = DataLoadingPrimer(data).transform_observation_spec(Composite())
    assert (specs["ids"].dtype, specs["ids"].shape) == (torch.int64, (-1,))
    env = token_env([{"tokens": []}, {"tokens": [1]}], 2, stack_method="as_nested_tensor")
    assert lists(env.reset()) == [[], [1]]


def test_empty_lists_beside_other_lists_or_alone_stay_what_they_are():
    """They are no tensors."""
    for data in ([{"n": []}, {"n": ["x", "y"]}], [{"n": []}, {"n": []}], [{"n": []}, {"n": "x"}]):
        env = text_env([{"text": "a", **row} for row in data])
        assert [env.reset()["n"] for _ in range(2)] == [row["n"] for row in data]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_lists_that_the_default_collate_fn_turned_into_columns_are_rows_again(size):
    """Whether they are as long as the batch or not; numbers, strings, lists in mappings and bare lists."""
    data = [
        {"text": c, "ids": [i, i + 1], "words": [c, c * 2], "in": {"n": [[i, 3], [4]]}} for i, c in enumerate("abc")
    ]
    primer = DataLoadingPrimer(DataLoader(data, batch_size=size), batch_size=3, stack_method="as_nested_tensor")
    td = primer(TensorDict())
    assert (list(td["text"]), lists(td, "ids")) == (["a", "b", "c"], [[0, 1], [1, 2], [2, 3]])
    assert td.get("words").tolist() == [["a", "aa"], ["b", "bb"], ["c", "cc"]]
    assert td.get(("in", "n")).tolist() == [[[i, 3], [4]] for i in range(3)]
    bare = DataLoadingPrimer(DataLoader([[1, 2], [3, 4], [5, 6]], batch_size=size))
    assert lists(bare(TensorDict(batch_size=[3])), "data") == [[1, 2], [3, 4], [5, 6]]
    pairs = DataLoader([("a", [1, 2]), ("b", [3, 4]), ("c", [5, 6])], batch_size=size)
    assert lists(DataLoadingPrimer(pairs, data_keys=["t", "ids"], batch_size=3)(TensorDict()), "ids") == [
        [1, 2], [3, 4], [5, 6]
    ]  # fmt: skip


def test_empty_lists_that_the_default_collate_fn_lost_are_refused_by_its_name():
    """And what to do instead is said, and works."""
    data = [{"text": c, "ids": []} for c in "ab"]
    with pytest.raises(DataError, match=r"(?s)'ids'.*default collate_fn.*empty list.*collate_fn=list"):
        DataLoadingPrimer(DataLoader(data, batch_size=2))(TensorDict())


def test_a_list_of_mappings_or_tensordicts_is_a_batch_of_rows():
    """As a collate_fn that leaves the rows alone gives it; their lists are their own."""
    data = [{"text": c, "ids": list(range(n))} for c, n in zip("abc", (2, 0, 1), strict=True)]
    td = DataLoadingPrimer(DataLoader(data, batch_size=2, collate_fn=list), batch_size=3)(TensorDict())
    assert (list(rows(td, "text")), lists(td, "ids")) == (["a", "b", "c"], [[0, 1], [], [0]])
    td = DataLoadingPrimer([data], data_keys=["text"])(TensorDict(batch_size=[3]))
    assert (list(td["text"]), td.get("ids", None)) == (["a", "b", "c"], None)
    td = DataLoadingPrimer([[TensorDict({"n": torch.tensor(i)}) for i in range(2)]])(TensorDict(batch_size=[2]))
    assert td["n"].tolist() == [0, 1]
    chat = [{"role": "user", "content": "hi"}]
    assert DataLoadingPrimer([chat], data_keys=["chat"], auto_batch_size=False)(TensorDict())["chat"] == chat
    with pytest.raises(DataError, match="rows of an item must have the same keys"):
        DataLoadingPrimer([[{"a": 1}, {"b": 1}]])(TensorDict())


def test_data_specs_without_data_keys_are_of_the_key_that_a_bare_item_gets():
    """One spec, for the one column."""
    spec = Unbounded((-1,), dtype=torch.int64)
    td = DataLoadingPrimer([torch.tensor([1], dtype=torch.int32)], data_specs=[spec])(TensorDict())
    assert (td["data"].dtype, td["data"].tolist()) == (torch.int64, [1])
    assert token_env([torch.tensor([1])], data_specs=[spec]).reset()["tokens"].tolist() == [1]
    env = text_env(["a"], data_specs=[NonTensor(example_data="an example")])
    assert env.full_observation_spec["text"].example_data == "an example"
    with pytest.raises(ValueError, match="one spec for each of data_keys"):
        DataLoadingPrimer(["a"], data_specs=[spec, spec])(TensorDict())


# Batch sizes.


def test_batch_size_rules():
    """None takes the loader's or (); 0 is (); an int n is (n,); groups let it grow."""
    loader = DataLoader(LETTERS, batch_size=3)
    assert DataLoadingPrimer(loader).batch_size == (3,)
    assert DataLoadingPrimer(loader, batch_size=0).batch_size == ()
    assert DataLoadingPrimer(LETTERS).batch_size == ()
    assert DataLoadingPrimer(LETTERS, batch_size=[2]).batch_size == (2,)
    assert DataLoadingPrimer(LETTERS, batch_size=2, repeats=3, group_repeats=True).batch_size == (6,)
    assert DataLoadingPrimer(LETTERS, repeats=3, group_repeats=True).batch_size == (3,)
    assert DataLoadingPrimer(LETTERS, batch_size=2, repeats=3).batch_size == (2,)
    with pytest.raises(TypeError, match="0 or 1d"):
        DataLoadingPrimer(LETTERS, batch_size=(2, 2))


def test_on_an_unbatched_environment_a_reset_draws_as_many_rows_as_its_batch():
    """Three for [3]; one, without batch, for none; a rollout from there is [3, 3]."""
    env = token_env(IDS[:4], stack_method="as_nested_tensor")
    td = env.reset(TensorDict(batch_size=[3]))
    assert (td.batch_size, lists(td)) == ((3,), [[1, 2, 3], [4], [5, 6]])
    assert env.reset().batch_size == ()
    assert env.rollout(3, auto_reset=False, tensordict=td).batch_size == (3, 3)


@pytest.mark.parametrize("loader", [LETTERS, DataLoader(LETTERS, batch_size=2)])
def test_on_an_unbatched_environment_a_reset_without_a_batch_draws_the_primers(loader):
    """Said by the primer, or by the loader; a TensorDict with a batch has its own."""
    env = text_env(loader, batch_size=2 if loader is LETTERS else None)
    assert list(env.reset()["text"]) == ["a", "b"]
    assert list(env.reset(TensorDict(batch_size=[3]))["text"]) == ["c", "d", "e"]
    assert list(env.reset(TensorDict())["text"]) == ["f", "g"]
    check_env_specs(env)


def test_an_environment_of_another_batch_size_is_refused_where_the_primer_was_given_its_own():
    """A size that was only the loader's gives way."""
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\).*batch_size=2"):
        text_env(LETTERS, 3, batch_size=2)
    assert list(text_env(DataLoader(LETTERS, batch_size=2), 3).reset()["text"]) == ["a", "b", "c"]


# Repeats.


def test_each_row_comes_r_times_in_a_row_with_its_number_and_its_repeat():
    """Twice each; without group_repeats groups straddle resets."""
    env = text_env(LETTERS, 3, repeats=2)
    first, second = env.reset(), env.reset()
    assert list(first["text"]) + list(second["text"]) == list("aabbcc")
    assert first["group_id"].tolist() + second["group_id"].tolist() == [0, 0, 1, 1, 2, 2]
    assert first["repeat_index"].tolist() + second["repeat_index"].tolist() == [0, 1, 0, 1, 0, 1]
    assert first["group_id"].dtype == first["repeat_index"].dtype == torch.int64


def test_group_repeats_gives_whole_groups_and_refuses_a_batch_without_room_for_them():
    """The batch is n*r."""
    env = text_env(LETTERS, 4, batch_size=2, repeats=2, group_repeats=True)
    assert list(env.reset()["text"]) == list("aabb")
    env = text_env(LETTERS, repeats=2, group_repeats=True)
    with pytest.raises(ValueError, match=r"whole groups of 2.*3 rows"):
        env.reset(TensorDict(batch_size=[3]))
    assert list(env.reset(TensorDict(batch_size=[2]))["text"]) == ["a", "a"]
    assert list(env.reset()["text"]) == ["b", "b"]
    assert DataLoadingPrimer(LETTERS, group_repeats=True).batch_size == ()


def test_a_partial_reset_may_straddle_groups_and_no_copy_is_dropped_for_it():
    """What follows starts in the middle of the group."""
    env = text_env(LETTERS, 4, batch_size=2, repeats=2, group_repeats=True)
    td = partial(env, env.reset(), [True, False, False, False])
    assert list(td["text"]) == list("cabb")
    assert list(env.reset()["text"]) == list("cdde")


@settings(deadline=None, max_examples=30)
@given(
    repeats=st.integers(1, 4),
    size=st.integers(1, 4),
    loader_batch=st.integers(1, 3),
    masks=st.lists(st.integers(1, 15), min_size=1, max_size=6),
    method=st.sampled_from([None, "as_nested_tensor", "as_padded_tensor"]),
)
def test_the_order_is_the_loaders_and_each_row_comes_exactly_r_times_for_any_mix_of_resets(
    repeats, size, loader_batch, masks, method
):
    """Rows that are not named stay; the named ones take the next rows, in row order."""
    env = token_env([IDS[:4][i : i + loader_batch] for i in range(0, 4, loader_batch)], size, repeats=repeats,
                    stack_method=method)  # fmt: skip
    stream = (ids.tolist() for ids in itertools.cycle(IDS[:4]) for _ in range(repeats))
    td = env.reset()
    expected = [next(stream) for _ in range(size)]
    for bits in masks:
        flags = [bool(bits >> row & 1) for row in range(size)]
        if any(flags):
            td = partial(env, td, flags)
            expected = [next(stream) if flag else old for flag, old in zip(flags, expected, strict=True)]
        assert lists(td) == expected


# Ways to stack.


@pytest.mark.parametrize("method", [None, "as_nested_tensor", "as_padded_tensor", as_padded_tensor])
def test_stack_methods_give_their_layout_and_partial_resets_keep_it(method):
    """Lazy stack, jagged, padded: each row its own, after a step and a partial reset too."""
    data = [{"tokens": ids, "answer": str(len(ids)), "level": len(ids)} for ids in IDS]
    env = token_env(data, 3, stack_method=method)
    td = env.reset()
    assert isinstance(td, LazyStackedTensorDict) is (method is None)
    if method is not None:
        assert td["tokens"].is_nested is (method == "as_nested_tensor")
    if method is as_padded_tensor:
        return  # a function makes no mask: rows can not be told from padding
    assert lists(td) == [[1, 2, 3], [4], [5, 6]]
    td = env.step_mdp(env.step(td.set("tokens_response", torch.tensor([[1], [1], [1]]))))
    td = partial(env, td, [False, True, True])
    assert lists(td) == [[1, 2, 3, 1], [7, 8, 9, 10], []]
    assert lists(td, "attention_mask") == [[True] * 4, [True] * 4, []]
    assert [row["answer"] for row in td.unbind(0)] == ["3", "4", "0"]
    assert td["level"].tolist() == [3, 4, 0]
    assert isinstance(td, LazyStackedTensorDict) is (method is None)


def test_rows_without_ragged_tensors_are_an_ordinary_tensordict():
    """Which reads as the lazy stack does."""
    td = text_env([{"text": c, "level": i} for i, c in enumerate("abc")], 2).reset()
    assert not isinstance(td, LazyStackedTensorDict)
    assert [(row["text"], row["level"].item()) for row in td.unbind(0)] == [("a", 0), ("b", 1)]


def test_unknown_stack_method():
    """It is refused by that name; a function must make a batch of the rows."""
    with pytest.raises(ValueError, match="Unknown stack_method 'nested'"):
        DataLoadingPrimer(LETTERS, stack_method="nested")
    with pytest.raises(TypeError, match=r"must make of 2 TensorDicts one of batch size \(2,\): found .*\(3,\)"):
        text_env(LETTERS, 2, stack_method=lambda tds: TensorDict({}, [3])).reset()


def test_an_error_of_the_stack_method_loses_no_row():
    """The next reset gives the rows that it would have given."""
    fail = [True]

    def method(tds):
        if fail:
            raise OSError(fail.pop())
        return lazy_stack(tds)

    env = text_env(LETTERS, 2, stack_method=method)
    with pytest.raises(OSError, match="True"):
        env.reset()
    assert [row["text"] for row in env.reset().unbind(0)] == ["a", "b"]


def test_a_mask_is_made_of_ones_where_the_environment_has_one_and_never_from_values():
    """Zeros among the tokens are real; padding is not."""
    env = token_env([torch.tensor([0, 0]), torch.tensor([0])], 2, stack_method="as_padded_tensor")
    td = env.reset()
    assert td["attention_mask"].tolist() == [[True, True], [False, True]]
    assert lists(td) == [[0, 0], [0]]
    other = token_env(IDS[:2], 2, {"attention_key": "real"}, stack_method="as_padded_tensor").reset()
    assert other["real"].tolist() == [[True] * 3, [False, False, True]]


def test_a_mask_of_the_rows_is_used_as_it_is():
    """HF masks of ones and zeros become bool, as the environment's spec says."""
    row = {"tokens": torch.tensor([7, 8, 0]), "attention_mask": torch.tensor([1, 1, 0])}
    td = token_env([row], 2, stack_method="as_padded_tensor").reset()
    assert td["attention_mask"].tolist() == [[True, True, False]] * 2
    with pytest.raises(DataError, match=r"row 0 .*'attention_mask': expected bool"):
        token_env([{**row, "attention_mask": torch.tensor([1, 2, 0])}]).reset()


def test_without_a_mask_in_the_environment_none_is_made_and_padded_rows_stay_left_padded():
    """Mixed widths are padded to the wider."""
    env = token_env(IDS, 2, {"has_attention": False}, stack_method="as_padded_tensor")
    td = env.reset()
    assert td["tokens"].tolist() == [[1, 2, 3], [0, 0, 4]]
    assert "attention_mask" not in td
    assert partial(env, td, [True, False])["tokens"].tolist() == [[0, 5, 6], [0, 0, 4]]
    assert partial(env, td, [False, True])["tokens"].tolist() == [[0, 1, 2, 3], [7, 8, 9, 10]]


# Partial resets.


def test_a_reset_mask_with_no_true_is_a_runtime_error():
    """By these words."""
    primer = DataLoadingPrimer(LETTERS)
    td = primer(TensorDict(batch_size=[2])).set("_reset", torch.tensor([False, False]))
    with pytest.raises(RuntimeError, match=r"reset must have at least one True value\."):
        primer(td)
    with pytest.raises(RuntimeError, match=r"reset must have at least one True value\."):
        text_env(LETTERS, 2).reset(td)


def test_partial_reset_pulls_exactly_as_many_rows_as_the_mask_names_in_row_order():
    """Masks of shape (B,) and (B, 1); foreign keys survive."""
    env = text_env(LETTERS, 3)
    td = env.reset().set("mine", torch.tensor([5, 6, 7]))
    td = partial(env, td, [True, False, True])
    assert list(td["text"]) == ["d", "b", "e"]
    assert td["group_id"].tolist() == [3, 1, 4]
    td = partial(env, td, [[False], [True], [False]])
    assert list(td["text"]) == ["d", "f", "e"]
    assert td["mine"].tolist() == [5, 6, 7]
    assert td["done"].tolist() == [[False]] * 3


def test_a_partial_reset_of_what_was_never_reset_is_refused_and_loses_nothing():
    """There are no rows to keep."""
    env = text_env(LETTERS, 2)
    with pytest.raises(KeyError, match="'text' is missing: a partial reset keeps the rows"):
        env.reset(TensorDict({"_reset": torch.tensor([True, False])}, [2]))
    assert list(env.reset()["text"]) == ["a", "b"]


def test_a_rollout_loads_the_next_prompt_where_a_row_ended():
    """The others go on."""

    def policy(td):
        td["tokens_response"] = torch.where(td["group_id"] == 0, 9, 1)[:, None]

    env = token_env(IDS[:4], 2, stack_method="as_padded_tensor")
    td = env.rollout(2, policy, break_when_any_done=False)
    assert lists(td) == [[1, 2, 3], [5, 6], [4], [4, 1]]
    assert td["group_id"].tolist() == [[0, 2], [1, 1]]
    assert td["next", "group_id"].tolist() == [[0, 2], [1, 1]]


# Specs.


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("method", [None, "as_nested_tensor", "as_padded_tensor"])
def test_the_environment_keeps_its_specs(size, method):
    """`check_env_specs` with strings, tokens, labels."""
    data = [{"text": "a", "level": 1, "meta": {"x": 1}}, {"text": "b", "level": 2, "meta": {}}]
    with pytest.warns(UserWarning, match="eos_token_id"):
        env = LLMEnv(eos_token_id=None, batch_size=size)
    check_env_specs(env.append_transform(DataLoadingPrimer(data, repeats=2, stack_method=method)))
    check_env_specs(token_env([{"tokens": ids, "level": len(ids)} for ids in IDS], size, stack_method=method))


def test_specs_hold_exactly_the_keys_that_come_and_looking_at_them_loses_no_row():
    """Rows that vary in length have -1."""
    data = [{"text": "a", "tokens": [1, 2], "grid": torch.zeros(1, 2, 3), "level": 0.5, "meta": None}]
    env = text_env([*data, {**data[0], "text": "b"}], 2, auto_batch_size=False)
    spec = env.observation_spec
    assert set(spec.leaves()) == {"text", "tokens", "grid", "level", "meta", "group_id", "repeat_index"}
    assert spec["tokens"] == Unbounded((2, -1), dtype=torch.int64)
    assert spec["grid"] == Unbounded((2, -1, 2, 3))
    assert spec["level"] == Unbounded((2,))
    assert [row["text"] for row in env.reset().unbind(0)] == ["a", "b"]


def test_data_specs_primers_and_example_data_override_what_is_read_off_the_first_row():
    """Of one row, or of the batch that a Composite says."""
    pairs = [("a", [1, 2]), ("b", [3, 4])]
    keys = ["text", "ids"]
    env = text_env(
        pairs, 2, data_keys=keys, data_specs=[NonTensor(example_data="x"), Unbounded((2,), dtype=torch.int32)]
    )
    assert env.observation_spec["ids"] == Unbounded((2, 2), dtype=torch.int32)
    assert env.observation_spec["text"].example_data == "x"
    td = env.reset()
    assert (td["ids"].tolist(), td["ids"].dtype) == ([[1, 2], [3, 4]], torch.int32)
    primers = Composite({"ids": Unbounded((2, -1), dtype=torch.int64)}, shape=(2,))
    env = text_env(pairs, 2, data_keys=keys, primers=primers, example_data="an example")
    assert env.observation_spec["text"].example_data == "an example"
    assert env.observation_spec["ids"] == Unbounded((2, -1), dtype=torch.int64)
    with pytest.raises(DataError, match=r"specs for \['other'\], which the rows do not have"):
        text_env(LETTERS, primers={"other": Unbounded(())}).reset()
    with pytest.raises(ValueError, match="one spec for each of data_keys"):
        text_env(pairs, data_keys=keys, data_specs=[Unbounded(())]).reset()


def test_a_spec_never_lies_about_the_datas_keys():
    """A later row with other keys is refused by name; nothing before it is lost, and it is not skipped."""
    env = text_env([{"text": "a"}, {"text": "b", "label": 1}], 1)
    assert list(env.reset()["text"]) == ["a"]
    for _ in range(2):
        with pytest.raises(DataError, match=r"row 1 of .* has other keys than row 0: missing \[\], more \['label'\]"):
            env.reset()
    with pytest.raises(DataError, match=r"row 1 .*missing \['text'\]"):
        text_env([{"text": "a"}, {}], 2).reset()
    with pytest.raises(DataError, match=r"\['group_id'\], which the primer writes"):
        text_env([{"text": "a", "group_id": 3}]).reset()


def test_int32_tokens_keep_their_dtype_unless_the_spec_says_otherwise():
    """Under the environment's own key they become its int64; elsewhere they stay."""
    ids = torch.tensor([1, 2], dtype=torch.int32)
    td = token_env([{"tokens": ids, "other": ids}], stack_method="as_nested_tensor").reset()
    assert (td["tokens"].dtype, td["other"].dtype) == (torch.int64, torch.int32)
    td = token_env([ids], 2).reset()
    env = token_env([{"tokens": ids}], 1, stack_method="as_padded_tensor")
    td = env.step(env.reset().set("tokens_response", torch.tensor([[3]])))
    assert td["next", "tokens"].dtype is torch.int64
    with pytest.raises(DataError, match=r"row 0 .*'tokens': expected int64 tensor of shape \(any\), found float32"):
        token_env([ids.float()]).reset()


# Passing through.


def test_use_buffer_false_passes_loader_batches_as_they_are():
    """The tensors are the loader's own; another batch size and repeats are refused, and lose nothing."""
    batches = [
        {"tokens": torch.tensor([[1, 2], [3, 4]]), "text": ["a", "b"]},
        {"tokens": torch.tensor([[5]]), "text": ["c"]},
    ]
    env = token_env(batches, 2, use_buffer=False)
    td = env.reset()
    assert td["tokens"] is batches[0]["tokens"]
    assert (list(td["text"]), td["group_id"].tolist()) == (["a", "b"], [0, 1])
    with pytest.raises(ValueError, match="gives a batch of 1, and 2 rows are reset"):
        env.reset()
    td = partial(env, td, [False, True])
    assert td["tokens"].tolist() == [[1, 2], [0, 5]]
    assert td["group_id"].tolist() == [0, 2]
    assert text_env(["a"], use_buffer=False).reset()["text"] == "a"
    with pytest.raises(ValueError, match="no repeats"):
        DataLoadingPrimer(batches, use_buffer=False, repeats=2)


# Errors of the loader, starting over, resuming.


class Flaky:
    """Raises once, at one item, and goes on; or dies of it, as a generator does."""

    def __init__(self, items, at, dies):
        self.items, self.at, self.dies = items, at, dies

    def __iter__(self):
        return self._dying() if self.dies else self._living()

    def _dying(self):
        for i, item in enumerate(self.items):
            if i == self.at:
                self.at = None
                raise OSError("the disk")
            yield item

    def _living(self):
        outer, items = self, iter(self.items)

        class Living:
            count = 0

            def __iter__(self):
                return self

            def __next__(self):
                if self.count == outer.at:
                    outer.at = None
                    raise OSError("the disk")
                self.count += 1
                return next(items)

        return Living()


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_source_that_raises_in_the_middle_loses_no_row(dies, at):
    """The next reset goes on: with what was read before the error, and with what comes after it."""
    env = text_env(Flaky("abcde", at, dies), 3, repeats=2)
    found, errors = [], 0
    while len(found) < 12:
        try:
            found += list(env.reset()["text"])
        except OSError:
            errors += 1
    assert (errors, found) == (1, list("aabbccddeeaa"))


class Breaks(Dataset):
    """Raises once, when a row is asked for."""

    def __init__(self, at):
        self.at = at

    def __len__(self):
        return len(LETTERS)

    def __getitem__(self, i):
        if i == self.at:
            self.at = None
            raise OSError("the disk")
        return LETTERS[i]


@pytest.mark.filterwarnings("ignore:.*iterated again:UserWarning")
@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": 2, "shuffle": True}, {"batch_size": None}])
def test_an_error_in_a_torch_dataloader_loses_no_batch(at, options):
    """Its iterator goes on with the next batch: the epoch is read again up to the one that failed, in its order."""
    shuffles = options.get("shuffle", False)

    def loader(at):
        own = {"generator": torch.Generator().manual_seed(3)} if shuffles else {}
        return DataLoader(Breaks(at), **options, **own)

    primer, whole, resumed = (DataLoadingPrimer(loader(at), batch_size=0) for at in (at, None, None))
    found, errors = [], 0
    while len(found) < 10:
        try:
            found.append(primer(TensorDict())["data"])
        except OSError:
            errors += 1
    assert (errors, found) == (1, list(whole(TensorDict(batch_size=[10]))["data"]))
    resumed.load_state_dict(primer.state_dict())
    assert resumed(TensorDict())["data"] == primer(TensorDict())["data"] == whole(TensorDict())["data"]


def test_where_there_is_no_way_back_the_error_names_the_item_that_may_be_lost():
    """An iterator, that dies of it or not; an order that can not be had again."""

    def dying():
        yield "a"
        raise OSError("the disk")

    for loader, after in (
        (iter(DataLoader(Breaks(1), batch_size=1)), "c"),
        (dying(), "exhausted: it gave 1 items, raised OSError at item 1"),
    ):
        primer = DataLoadingPrimer(loader, batch_size=0)
        assert primer(TensorDict())["data"] == "a"
        with pytest.raises(OSError, match="the disk") as raised:
            primer(TensorDict())
        assert "may have lost item 1: it can be read once" in raised.value.__notes__[0]
        if after == "c":
            assert primer(TensorDict())["data"] == "c"
        else:
            with pytest.raises(DataError, match=after):
                primer(TensorDict())
    primer = DataLoadingPrimer(DataLoader(BreaksSecond(), sampler=RandomSampler(LETTERS), batch_size=1), batch_size=0)
    first = primer(TensorDict())["data"]
    with pytest.raises(OSError, match="the disk") as raised:
        primer(TensorDict())
    assert "may have lost item 1 of epoch 0: its RandomSampler draws" in raised.value.__notes__[0]
    assert len({first, *texts(primer, 5)}) == 6


class BreaksSecond(Breaks):
    """Raises when a row is asked for the second time."""

    def __init__(self):
        super().__init__(None)
        self.asked = 0

    def __getitem__(self, i):
        self.asked += 1
        if self.asked == 2:
            raise OSError("the disk")
        return LETTERS[i]


def test_reset_dataloader_starts_over_without_losing_or_doubling_a_row():
    """The epoch begins again at its first row; numbers go on; an iterator that was read refuses."""
    env = text_env(DataLoader(LETTERS, batch_size=3), 2, repeats=2)
    env.reset()
    partial(env, env.reset(), [True, False])
    env.transform.reset_dataloader()
    td = env.reset(), env.reset()
    assert [text for one in td for text in one["text"]] == list("aabb")
    assert td[0]["group_id"].tolist() == [3, 3]
    primer = DataLoadingPrimer(iter("abc"))
    primer.transform_observation_spec(Composite())
    primer.reset_dataloader()
    assert primer(TensorDict())["data"] == "a"
    with pytest.raises(DataError, match="read once: it can not start over"):
        primer.reset_dataloader()


def shuffled():
    return DataLoader(LETTERS, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))


def texts(primer, count):
    return list(primer(TensorDict(batch_size=[count]))["data"])


@pytest.mark.parametrize("dealt", [0, 4, 7, 12])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda primer: pickle.loads(pickle.dumps(primer))])
@pytest.mark.parametrize("kind", ["indexed", "iterated", "made", "in order", "shuffled"])
def test_a_copy_goes_on_where_the_primer_stands_with_a_loader_of_its_own(kind, copied, dealt):
    """Copied or pickled, at any point; drawing from one, and seeding it, leaves the other alone."""
    loader = letters if kind == "made" else SOURCES[kind]()
    primer, whole = DataLoadingPrimer(loader), DataLoadingPrimer(letters if kind == "made" else SOURCES[kind]())
    expected = texts(whole, dealt + 20)[dealt:]
    if dealt:
        texts(primer, dealt)
    other = copied(primer)
    assert texts(other, 3) == expected[:3]
    other.set_seed(5)
    texts(other, 10)
    assert texts(primer, 20) == expected


def letters():
    return iter(LETTERS)


def test_set_seed_on_a_copy_seeds_the_copy():
    """And gives the order that it gives in any other."""
    primer, fresh = DataLoadingPrimer(shuffled()), DataLoadingPrimer(shuffled())
    other = copy.deepcopy(primer)
    other.set_seed(11)
    fresh.set_seed(11)
    assert texts(other, 14) == texts(fresh, 14) != texts(primer, 14)


def test_an_environment_of_a_loader_can_be_copied_and_pickled_after_a_reset():
    """And goes on alike."""
    env = LLMEnv.from_dataloader(shuffled(), tokenizer=tiny_tokenizer(), eos_token_id=2, batch_size=2)
    env.reset()
    copies = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    expected = list(env.reset()["text"])
    assert [list(one.reset()["text"]) for one in copies] == [expected, expected]


def test_what_can_not_be_read_again_refuses_to_be_copied():
    """An iterator; a shuffle without a generator, in the middle of its epoch."""
    for clone in (copy.deepcopy, pickle.dumps):
        with pytest.raises(DataError, match="can be read once: it can not be copied or pickled"):
            clone(DataLoadingPrimer(iter(["a"])))
    primer = DataLoadingPrimer(DataLoader(LETTERS, sampler=RandomSampler(LETTERS)), batch_size=0)
    assert sorted(texts(copy.deepcopy(primer), 7)) == LETTERS
    primer(TensorDict())
    with pytest.raises(DataError, match="order that can not be had again"):
        copy.deepcopy(primer)


@pytest.mark.filterwarnings("ignore:.*iterated again:UserWarning")
def test_two_primers_over_one_shuffled_loader_have_each_their_own_order():
    """Whoever else draws from its generator: so a state that is loaded elsewhere goes on alike, over epochs."""
    loader = shuffled()
    one, two, other = DataLoadingPrimer(loader), DataLoadingPrimer(loader), DataLoadingPrimer(shuffled())
    for _ in range(4):
        texts(one, 2)
        texts(two, 3)
    other.load_state_dict(one.state_dict())
    loader.generator.manual_seed(8)
    mine, its = [], []
    for _ in range(5):
        mine += texts(one, 5)
        its += texts(two, 4)
    assert mine == texts(other, 25)
    assert [sorted(its[i : i + 7]) for i in (2, 9)] == [LETTERS, LETTERS]


def test_a_state_that_can_not_be_loaded_leaves_a_shuffle_as_it_was():
    """Its generator too."""
    primer, other = DataLoadingPrimer(shuffled()), DataLoadingPrimer(shuffled())
    other(TensorDict(batch_size=[4]))
    state = other.state_dict()
    state["_extra_state"]["row"]["print"] = "another"
    with pytest.warns(UserWarning, match="again"), pytest.raises(DataError, match="another row"):
        primer.load_state_dict(state)
    assert texts(primer, 14) == texts(DataLoadingPrimer(shuffled()), 14)


def test_text_of_any_code_points_has_a_state():
    """A lone surrogate too."""
    primer, other = (DataLoadingPrimer(["a\ud83d", "b"]) for _ in range(2))
    primer(TensorDict())
    other.load_state_dict(primer.state_dict())
    assert other(TensorDict())["data"] == "b"


SOURCES = {
    "indexed": lambda: LETTERS,
    "iterated": lambda: Again([["a", "b"], ["c"], ["d", "e", "f"]]),
    "made": lambda: lambda: iter(LETTERS),
    "in order": lambda: DataLoader(LETTERS, batch_size=3),
    "shuffled": shuffled,
}


@pytest.mark.filterwarnings("ignore:.*iterated again:UserWarning")
@settings(deadline=None, max_examples=40)
@given(kind=st.sampled_from(sorted(SOURCES)), before=st.lists(st.integers(1, 9), max_size=4), repeats=st.integers(1, 3),
       peek=st.booleans())  # fmt: skip
def test_resume_from_any_point_equals_the_unbroken_stream(kind, before, repeats, peek):
    """In the middle of a group, of a loader's batch, of an epoch."""
    one, other = (DataLoadingPrimer(SOURCES[kind](), repeats=repeats) for _ in range(2))
    for count in before:
        one(TensorDict(batch_size=[count]))
    if peek:
        one.transform_observation_spec(Composite())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for count in (1, 4, 30):
        mine, theirs = (primer(TensorDict(batch_size=[count])) for primer in (one, other))
        for key in ("data", "group_id", "repeat_index"):
            assert mine.get(key).tolist() == theirs.get(key).tolist()


def test_a_seed_that_is_set_in_the_middle_of_an_epoch_is_resumed_too():
    """It orders the epochs that follow."""
    one, other = (DataLoadingPrimer(shuffled(), batch_size=0) for _ in range(2))
    one(TensorDict(batch_size=[4]))
    one.set_seed(11)
    one(TensorDict(batch_size=[1]))
    with pytest.warns(UserWarning, match="again"):
        other.load_state_dict(one.state_dict())
    mine, theirs = (primer(TensorDict(batch_size=[20]))["data"] for primer in (one, other))
    assert list(mine) == list(theirs)
    assert sorted(list(mine)[2:9]) == LETTERS


def test_the_state_is_part_of_the_state_of_the_environments_transforms():
    """A Compose saves and loads it."""
    envs = [text_env(LETTERS, 2).append_transform(DataLoadingPrimer([{"other": i} for i in range(5)])) for _ in "ab"]
    envs[0].reset()
    envs[1].transform.load_state_dict(envs[0].transform.state_dict())
    td = envs[1].reset()
    assert (list(td["text"]), td["other"].tolist()) == (["c", "d"], [2, 3])


def test_a_state_that_can_not_be_loaded_leaves_all_as_it_was():
    """The primer goes on where it stood."""
    primer, other = DataLoadingPrimer(LETTERS, repeats=2), DataLoadingPrimer(list("uvwxyz"), repeats=2)
    primer(TensorDict(batch_size=[5]))
    other(TensorDict(batch_size=[3]))
    with pytest.raises(DataError, match="another row"):
        other.load_state_dict(primer.state_dict())
    td = other(TensorDict(batch_size=[3]))
    assert (list(td["data"]), td["repeat_index"].tolist()) == (["v", "w", "w"], [1, 0, 1])


def test_state_is_a_number_for_what_is_indexed_and_a_replay_that_says_so_for_the_rest():
    """And it can be saved."""
    primer = DataLoadingPrimer(LETTERS, repeats=2)
    primer(TensorDict(batch_size=[5]))
    state = primer.state_dict()["_extra_state"]
    assert (state["dealt"], state["row"]["index"]) == (5, 2)
    again = DataLoadingPrimer(Again(LETTERS))
    again(TensorDict(batch_size=[5]))
    with pytest.warns(UserWarning, match="iterated again, past 4 items"):
        again.load_state_dict(again.state_dict())


def test_a_one_shot_source_refuses_state():
    """To save and to load."""
    primer = DataLoadingPrimer(iter(LETTERS))
    with pytest.raises(DataError, match="read once: it has no state"):
        primer.state_dict()
    with pytest.raises(DataError, match="read once: it has no state"):
        primer.load_state_dict(DataLoadingPrimer(LETTERS).state_dict())


def test_a_shuffle_that_can_not_be_had_again_is_refused_not_resumed_at_a_wrong_row():
    """A sampler without a generator of its own; a loader that gives other rows than it did."""
    primer = DataLoadingPrimer(DataLoader(LETTERS, sampler=RandomSampler(LETTERS)))
    with pytest.raises(DataError, match=r"(?s)RandomSampler draws an order that can not be had again.*generator"):
        primer.state_dict()
    primer = DataLoadingPrimer(LETTERS)
    primer(TensorDict(batch_size=[3]))
    with pytest.raises(DataError, match="another row 0 in item 2 of epoch 0"):
        DataLoadingPrimer(list("xyz")).load_state_dict(primer.state_dict())
    with pytest.warns(UserWarning, match="again"), pytest.raises(DataError, match="it gave only 1"):
        DataLoadingPrimer(Again(["a"])).load_state_dict(primer.state_dict())


def test_set_seed_fixes_the_order_of_a_loader_with_a_generator():
    """From the first row, if none was dealt; global random state is left alone."""

    def first(seed, deal):
        primer = DataLoadingPrimer(DataLoader(LETTERS, shuffle=True, generator=torch.Generator()), batch_size=7)
        env = LLMEnv(eos_token_id=9, batch_size=7).append_transform(primer)
        for _ in range(deal):
            env.reset()
        env.set_seed(seed)
        return list(env.reset()["text"])

    before = torch.get_rng_state()
    assert first(1, 0) == first(1, 0) == first(1, 1)
    assert sorted(first(1, 0)) == LETTERS
    assert len({tuple(first(seed, 0)) for seed in range(5)}) > 1
    assert torch.equal(before, torch.get_rng_state())
    env = text_env(LETTERS, 2)
    env.set_seed(3)
    assert list(env.reset()["text"]) == ["a", "b"]


# What goes wrong.


def raises_(loader, **options):
    env = options.pop("env", LLMEnv(eos_token_id=9))
    env.append_transform(DataLoadingPrimer(loader, **options)).reset(TensorDict(batch_size=[2]))


FAULTS = [
    ("not iterable", lambda: raises_(3), TypeError, "expected an iterable of rows or a function that makes one, found"),
    ("a string", lambda: raises_("abc"), TypeError, "a single str: put it into a list"),
    ("a mapping", lambda: raises_({"train": LETTERS}), TypeError, "a single dict: put it into a list, or choose one"),
    ("a tensordict", lambda: raises_(TensorDict({"text": "a"})), TypeError, "without a batch dimension"),
    ("a bad function", lambda: raises_(lambda: 3), TypeError, "must make an iterable of rows: it made"),
    ("a number", lambda: raises_([3]), DataError, "row 0 of the loader .*: an item must be a mapping.*found a int"),
    ("tuples without keys", lambda: raises_([(torch.zeros(2, 2), 1)]), DataError, "name the columns .* by data_keys"),
    ("too few", lambda: raises_([("a",)], data_keys=["text", "n"]), DataError, "of 2 columns, .*: found 1 of them"),
    ("no columns", lambda: raises_([3], data_keys=["text", "n"]), DataError, "found a int"),
    ("key twice", lambda: raises_([3], data_keys=["a", "a"]), ValueError, "different keys"),
    ("missing key", lambda: raises_([{"a": 1}], data_keys=["text"]), DataError, r"no 'text', which.*has \['a'\]"),
    ("wrong type", lambda: raises_([{"text": 3}]), DataError, "row 0 of .*'text': expected str, found int64 tensor"),
    ("later type", lambda: raises_(["a", None]), DataError, "row 1 of the loader"),
    (
        "later dtype",
        lambda: raises_([{"text": "a", "n": 1}, {"text": "b", "n": 0.5}]),
        DataError,
        "row 1.*'n'.*float32",
    ),
    ("later shape", lambda: raises_([{"text": "a", "n": 1}, {"text": "b", "n": [1]}]), DataError, r"row 1.*'n'.*\(1\)"),
    ("names", lambda: raises_([{"text": "a", 3: 1}]), DataError, "keys of an item must be strings: found 3"),
    ("two dims", lambda: raises_([TensorDict({}, [2, 2])]), DataError, r"\(2, 2\)"),
    ("ragged batch", lambda: raises_(Again([{"a": [1], "b": [1, 2]}], 2)), DataError, "of one length: found"),
    ("repeats", lambda: raises_(LETTERS, repeats=0), ValueError, "at least 1, or None: found 0"),
    ("exhausted", lambda: raises_(iter("a")), DataError, "exhausted: it gave 1"),
    (
        "mask",
        lambda: DataLoadingPrimer(LETTERS)(TensorDict({"_reset": torch.ones(2)}, [2])),
        ValueError,
        "must be bool",
    ),
    ("batch", lambda: DataLoadingPrimer(LETTERS)(TensorDict(batch_size=[2, 2])), ValueError, "no or one batch dim"),
    ("negative", lambda: raises_(LETTERS, batch_size=-1), ValueError, "must not be negative"),
]


@pytest.mark.parametrize(("name", "call", "error", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_errors_say_what_was_expected_what_was_found_and_where(name, call, error, words):
    """Wrong keys, types, shapes, missing values, exhausted sources."""
    with pytest.raises(error, match="(?s)" + words):
        call()


def test_rows_are_moved_to_the_device():
    """Of the TensorDict, else of the primer."""
    td = DataLoadingPrimer([{"n": 1}], device="meta")(TensorDict(batch_size=[2]))
    assert td["n"].device.type == "meta"
    td = DataLoadingPrimer([{"n": 1}], device="meta")(TensorDict(batch_size=[2], device="cpu"))
    assert td["n"].tolist() == [1, 1]


def test_non_tensor_values_stay_what_they_are_row_by_row():
    """None, lists, messages."""
    chat = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    td = text_env([{"text": c, "chat": m, "none": None} for c, m in zip("ab", chat, strict=True)], 2).reset()
    assert td.get("chat").tolist() == chat
    assert isinstance(td[0].get("none"), NonTensorData)
    tokens, mask = pad(token_env(IDS, 2, stack_method="as_nested_tensor").reset(), "tokens", "right", -1)
    assert (tokens.tolist(), mask.int().tolist()) == ([[1, 2, 3], [4, -1, -1]], [[1, 1, 1], [1, 0, 0]])


def test_padded_tokens_are_realigned_with_their_mask_at_a_partial_reset():
    """The width is that of the longest row that is left."""
    env = token_env(IDS, 2, stack_method="as_padded_tensor")
    td = partial(env, env.reset(), [True, False])
    assert td["tokens"].tolist() == [[5, 6], [0, 4]]
    assert td["attention_mask"].tolist() == [[True, True], [False, True]]


def test_what_was_looked_at_before_the_primer_is_appended_is_read_again_for_the_environment():
    """Under its observation, with its mask."""
    primer = DataLoadingPrimer(IDS, stack_method="as_nested_tensor")
    assert "data" in primer.transform_observation_spec(Composite())
    td = LLMEnv(from_text=False, eos_token_id=9, batch_size=2).append_transform(primer).reset()
    assert lists(td) == [[1, 2, 3], [4]]
    assert lists(td, "attention_mask") == [[True] * 3, [True]]


# Rows are read and checked many at once.


@pytest.mark.parametrize("method", [None, "as_nested_tensor", "as_padded_tensor"])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_batches_of_any_kind_and_single_rows_are_dealt_alike(method, repeats, masked):
    """Dense, jagged, listed, of TensorDicts, of mappings, of single rows: all in one loader."""
    jagged = torch.nested.as_nested_tensor([torch.tensor([1]), torch.tensor([2, 3])], layout=torch.jagged)
    items = [
        {"tokens": torch.tensor([[1, 2], [3, 4]]), "name": ["a", "b"], "level": torch.tensor([0, 1])},
        {"tokens": torch.tensor([5]), "name": "c", "level": 2},
        {"tokens": [6, 7, 8], "name": "d", "level": torch.tensor(3)},
        {"tokens": [], "name": "e", "level": 4},
        TensorDict({"tokens": jagged, "name": NonTensorStack("f", "g"), "level": torch.tensor([5, 6])}, [2]),
        lazy_stack([TensorDict({"tokens": IDS[i], "name": "hi"[i], "level": 7 + i}) for i in range(2)]),
        {"tokens": [[9], [10, 11]], "name": ("j", "k"), "level": [9, 10]},
        {"tokens": torch.tensor([12], dtype=torch.int32), "name": "l", "level": 11},
    ]
    tokens = [[1, 2], [3, 4], [5], [6, 7, 8], [], [1], [2, 3], [1, 2, 3], [4], [9], [10, 11], [12]]
    env = token_env(Again(items), 5, {"has_attention": masked}, stack_method=method, repeats=repeats)
    if method == "as_padded_tensor" and not masked:
        tokens = None  # what is padding can not be told
    found = {"tokens": [], "name": [], "level": [], "attention_mask": []}
    for _ in range(2 * 12 * repeats // 5):
        td = env.reset()
        assert ("attention_mask" in td.keys()) is masked  # noqa: SIM118 (a TensorDict iterates over its rows)
        for key in ("tokens", "attention_mask") if masked else ("tokens",) if tokens else ():
            found[key] += lists(td, key)
        found["name"] += [row["name"] for row in td.unbind(0)]
        found["level"] += td["level"].tolist()
    count = len(found["name"])
    assert found["name"] == [c for c in "abcdefghijkl" * 2 for _ in range(repeats)][:count]
    assert found["level"] == [i for i in [*range(12)] * 2 for _ in range(repeats)][:count]
    if tokens:
        assert found["tokens"] == [ids for ids in tokens * 2 for _ in range(repeats)][:count]
        assert found["attention_mask"] == ([[True] * len(ids) for ids in found["tokens"]] if masked else [])


@pytest.mark.parametrize("method", ["as_nested_tensor", "as_padded_tensor"])
def test_a_dealt_batch_has_memory_of_its_own(method):
    """What is written into it reaches neither the loader nor the next epoch."""
    data = [{"tokens": torch.tensor([[1, 2], [3, 4]]), "level": torch.tensor([5, 6])}]
    env = token_env(data, 2, {"has_attention": False}, stack_method=method)
    td = env.reset()
    for key in ("tokens", "level"):
        value = td[key].values() if td[key].is_nested else td[key]
        value.fill_(0)
    td = env.reset()
    assert (lists(td), td["level"].tolist()) == ([[1, 2], [3, 4]], [5, 6])


@pytest.mark.parametrize("item", ["row", "batch"])
def test_rows_of_a_lazy_stack_have_each_their_own_memory(item):
    """Repeats too: to write one in place changes no other, nor the loader, nor where the state says it stands."""
    ids, square, n = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 1, 2), torch.tensor([5, 6])
    data = {"tokens": ids, "square": square, "n": n}
    whole = TensorDict(data, [2])
    loader = [whole] if item == "batch" else [{key: value[i] for key, value in data.items()} for i in range(2)]
    env = token_env(loader, 3, repeats=2)
    td = env.reset()
    for value in td[0].values():
        if isinstance(value, torch.Tensor) and value.dtype is torch.int64:
            value.add_(100)
    td[0]["square"].zero_()
    assert lists(td) == [[101, 102], [1, 2], [3, 4]]
    assert (td[1]["square"].tolist(), td[1]["n"].item(), td[2]["n"].item()) == ([[1, 1]], 5, 6)
    assert (ids.tolist(), n.tolist(), square.sum().item()) == ([[1, 2], [3, 4]], [5, 6], 4)
    env.transform.load_state_dict(env.transform.state_dict())
    assert lists(env.reset()) == [[3, 4], [1, 2], [1, 2]]


def test_a_row_that_is_refused_among_many_is_named_and_those_before_it_can_be_had():
    """It stays the next one."""
    primer = DataLoadingPrimer([{"n": 0}, {"n": 1}, {"n": "x"}, {"n": 3}])
    for count in (4, 1, 1, 1):
        td = TensorDict(batch_size=[count])
        if primer._stream.dealt < 2 and count == 1:
            assert primer(td)["n"].tolist() == [primer._stream.dealt - 1]
        else:
            with pytest.raises(DataError, match=r"row 2 of .*'n': expected int64 tensor of shape \(\), found"):
                primer(td)


def test_rows_that_differ_in_two_dimensions_come_one_by_one_and_make_no_batch():
    """A spec may allow them."""
    data = [{"grid": torch.ones(1, 2)}, {"grid": torch.ones(2, 1)}]
    options = {"primers": {"grid": Unbounded((-1, -1))}, "auto_batch_size": False}
    td = DataLoadingPrimer(data, **options)(TensorDict(batch_size=[2]))
    assert [row["grid"].shape for row in td.unbind(0)] == [(1, 2), (2, 1)]
    with pytest.raises(DataError, match=r"'grid': rows of the shapes \[\(1, 2\), \(2, 1\)\] make no batch"):
        DataLoadingPrimer(data, stack_method="as_padded_tensor", **options)(TensorDict(batch_size=[2]))


def test_rows_of_a_lazy_stack_that_have_other_keys_are_refused():
    """No column is dropped for it."""
    rows_ = lazy_stack([TensorDict({"text": "a"}), TensorDict({"text": "b", "more": torch.ones(())})])
    with pytest.raises(DataError, match=r"row 0 of .*same keys: found \[\['text'\], \['more', 'text'\]\]"):
        text_env([rows_], 2).reset()


def test_no_more_items_are_read_than_a_reset_needs():
    """Single rows one by one, a batch not twice."""
    read = []

    def items():
        for item in [{"n": 0}, {"n": 1}, {"n": torch.tensor([2, 3, 4])}, {"n": 5}]:
            read.append(0)
            yield item

    loader = items()
    primer = DataLoadingPrimer(loader, data_specs={"n": Unbounded((), dtype=torch.int64)})
    for count, total in ((1, 1), (1, 2), (2, 3), (1, 3), (1, 4)):
        primer(TensorDict(batch_size=[count]))
        assert len(read) == total


class Failing(LLMEnv):
    """An environment whose second reset fails."""

    resets = 0

    def _reset(self, td):
        self.resets += 1
        if self.resets == 2:
            raise OSError("the connection is gone")
        return super()._reset(td)


@pytest.mark.filterwarnings("ignore:eos_token_id")
@pytest.mark.parametrize("repeats", [None, 2])
@pytest.mark.parametrize("loader", [list("abcdef"), [{"text": ["a", "b", "c"]}, {"text": ["d", "e", "f"]}]])
def test_a_reset_that_fails_behind_the_primer_loses_no_row(loader, repeats):
    """What was dealt for it comes again, and where the next row stands is saved right."""
    primer = DataLoadingPrimer(loader, batch_size=2, repeats=repeats)
    env = Failing(batch_size=2).append_transform(primer)
    dealt = list(env.reset()["text"])
    with pytest.raises(OSError, match="gone"):
        env.reset()
    resumed = DataLoadingPrimer(loader, batch_size=2, repeats=repeats)
    other = LLMEnv(batch_size=2).append_transform(resumed)
    resumed.load_state_dict(primer.state_dict())
    assert list(other.reset()["text"]) == (["b", "b"] if repeats else ["c", "d"])
    with pytest.raises(ValueError, match="batch size"):
        env.reset(TensorDict(batch_size=[5]))
    dealt += [text for _ in range(2) for text in env.reset()["text"]]
    assert dealt == [row for row in "abcdef" for _ in range(repeats or 1)][:6]


@pytest.mark.filterwarnings("ignore:eos_token_id")
def test_rows_with_a_ragged_column_beside_text_are_stepped_in_part():
    """A lazy stack of rows with a tokenizer around them: rows that ended are left alone."""
    loader = [{"text": "a", "ids": torch.tensor([1])}, {"text": "b", "ids": torch.tensor([1, 2])}]
    env = LLMEnv.from_dataloader(loader, batch_size=2, tokenizer=tiny_tokenizer(), eos_token_id=2)
    rollout = env.rollout(3, lambda td: td.set("tokens_response", torch.tensor([[5], [2]])), break_when_all_done=True)
    assert rows(rollout, ("next", "text")) == ["a1", "a11", "a111", "b", "b", "b"]
