"""Strings that grow: joined as a list would be, decoded together, and held by a TensorDict like plain data."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tensordict
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from ramet.ragged import Ragged, Text, choose, read_text, rows
from ramet.ragged.text import text_of

fast = settings(deadline=None, max_examples=60)
WORDS = ["a", "bb", "c", "a"]


# The text itself.


def tokens(ids: list[list[int]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in ids])


def utf8(ids: list[list[int]]) -> list[str]:
    """Like the decoder of a byte-level tokenizer."""
    return [bytes(row).decode(errors="replace") for row in ids]


def words(ids: list[list[int]]) -> list[str]:
    """Like the decoder of sentencepiece: a space before each word but the first; 0 and 1 are special and not shown."""
    return ["".join(f" {i}" for i in row if i > 1)[1:] for row in ids]


def halves(character: str, rows: int = 1) -> tuple[Ragged, Ragged]:
    first, *rest = character.encode()
    return tokens([[first]] * rows), tokens([rest] * rows)


@st.composite
def parts(draw: Any) -> list[tuple[str, list[Any]]]:
    """What is appended, one after another, to a text of three rows."""
    string = st.text("xy ", max_size=2)
    byte = st.sampled_from([*"é€a".encode(), 0xFF])
    strings = st.tuples(st.just("strings"), st.lists(string, min_size=3, max_size=3))
    ids = st.tuples(st.just("bytes"), st.lists(st.lists(byte, max_size=3), min_size=3, max_size=3))
    number = st.integers(0, 4)
    other = st.tuples(st.just("words"), st.lists(st.lists(number, max_size=3), min_size=3, max_size=3))
    return draw(st.lists(st.one_of(strings, ids, ids, other, other), min_size=1, max_size=12))


def text_from(part: tuple[str, list[Any]]) -> Text:
    kind, values = part
    return Text.of(values) if kind == "strings" else Text.decoded(tokens(values), utf8 if kind == "bytes" else words)


def expected(appended: list[tuple[str, list[Any]]]) -> list[str]:
    """Join slowly: each row for itself, runs of tokens decoded as one list."""
    made = []
    for row in range(3):
        text, kind_before, run = "", "", []
        for kind, values in [*appended, ("end", [None] * 3)]:
            if kind == "strings" and not values[row]:
                continue
            if kind != kind_before:
                text += {"bytes": utf8, "words": words}.get(kind_before, lambda ids: ["".join(ids[0])])([run])[0]
                kind_before, run = kind, []
            run = [*run, *(values[row] if kind in ("bytes", "words") else [values[row]])]
        made.append(text)
    return made


@fast
@given(parts(), st.data())
def test_a_text_is_what_was_appended_whoever_read_it_before(appended, data):
    """Joined as by a slow loop that decodes each run of tokens at once, in whatever order the texts are read."""
    texts = [Text.of([""] * 3)]
    for part in appended:
        if data.draw(st.booleans()):
            texts[-1].tolist()
        texts.append(texts[-1].append(text_from(part)))
    for t in data.draw(st.permutations(range(len(texts)))):
        assert texts[t].tolist() == expected(appended[:t])


@fast
@given(parts(), parts(), parts())
def test_branches_never_mix(stem, left, right):
    """Two continuations of one text, read in turns."""
    base = Text.of([""] * 3)
    for part in stem:
        base = base.append(text_from(part))
    one = other = base
    for a, b in zip(left, right, strict=False):
        one, other = one.append(text_from(a)), other.append(text_from(b))
        one.tolist()
        other.tolist()
    n = min(len(left), len(right))
    assert one.tolist() == expected(stem + left[:n])
    assert other.tolist() == expected(stem + right[:n])
    assert base.tolist() == expected(stem)


@fast
@given(parts(), parts(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_rows_are_chosen(left, right, flags):
    """As from two lists; a row that ends within a character still does, and a text appended to a text is one."""
    one = other = Text.of([""] * 3)
    for part in left:
        one = one.append(text_from(part))
    for part in right:
        other = other.append(text_from(part))
    chosen = one.where(torch.tensor(flags), other).tolist()
    assert chosen == [a if flag else b for flag, a, b in zip(flags, expected(left), expected(right), strict=True)]
    assert one.only(torch.tensor(flags)).tolist() == [
        a if f else "" for f, a in zip(flags, expected(left), strict=True)
    ]
    nested = Text.of(["<"] * 3).append(one).append(Text.of(["|"] * 3)).append(other)
    assert nested.tolist() == [f"<{a}|{b}" for a, b in zip(expected(left), expected(right), strict=True)]


def test_a_character_across_two_actions_is_one():
    """Each half alone is none; a row without a second half keeps the mark of it."""
    first, second = halves("é", rows=2)
    text = Text.of(["a", "b"]).append(Text.decoded(first, utf8))
    assert text.tolist() == ["a\ufffd", "b\ufffd"]
    assert text.append(Text.decoded(second, utf8)).tolist() == ["aé", "bé"]
    some = Text.decoded(second, utf8).only(torch.tensor([True, False]))
    assert text.append(some).tolist() == ["aé", "b\ufffd"]
    assert text.append(Text.of(["", "c"])).append(Text.decoded(second, utf8)).tolist() == ["aé", "b\ufffdc\ufffd"]


def test_a_character_survives_that_another_row_is_reset():
    """The row that goes on is decoded with what it had."""
    first, second = halves("€", rows=2)
    text = Text.of(["a", "b"]).append(Text.decoded(first, utf8))
    mixed = Text.of(["x", "y"]).where(torch.tensor([False, True]), text)
    assert mixed.append(Text.decoded(second, utf8)).tolist() == ["a€", "y\ufffd\ufffd"]


def test_the_space_behind_known_tokens_is_kept():
    """Decoded alone, a word has none before it; behind those of the context it has, also with special ones between."""
    for between in ([], [0], [1] * 20):
        context = tokens([[5, *between], between])
        text = Text.of(["5", ""]).append(Text.decoded(tokens([[7], [8]]), words, context))
        assert text.tolist() == ["5 7", "8"]
        assert text.append(Text.decoded(tokens([[9], []]), words, context)).tolist() == ["5 7 9", "8"]
    assert Text.of(["5"]).append(Text.decoded(tokens([[7]]), words)).tolist() == ["57"]


def test_decoding_waits_until_the_text_is_read_and_sees_each_token_once():
    """Apart from a few before it that it is decoded with."""
    seen = []

    def counting(ids):
        seen.append(sum(map(len, ids)))
        return words(ids)

    text = Text.of([""])
    for step in range(50):
        text = text.append(Text.decoded(tokens([[2 + step] * 10]), counting))
    assert seen == []
    assert len(text.tolist()[0].split()) == 500
    assert sum(seen) < 560
    del seen[:]
    for step in range(50):
        text = text.append(Text.decoded(tokens([[2 + step] * 10]), counting))
        text.tolist()
    assert sum(seen) < 50 * 30


def test_texts_are_read_backwards_and_in_branches_without_decoding_all_again():
    """What was read is not decoded again, and what was not is halved again and again."""
    seen = []

    def counting(ids):
        seen.append(sum(map(len, ids)))
        return words(ids)

    texts = [Text.of([""])]
    for step in range(256):
        texts.append(texts[-1].append(Text.decoded(tokens([[2 + step]]), counting)))
    for n in reversed(range(257)):
        assert texts[n].tolist() == [" ".join(str(2 + step) for step in range(n))]
    assert sum(seen) < 256 * 40
    del seen[:]
    for n in (256, 255, 256):
        for answer in range(3):
            branch = texts[n].append(Text.decoded(tokens([[answer + 2]]), counting))
            assert branch.tolist()[0].split()[-1] == str(answer + 2)
    assert sum(seen) < 9 * 20


def test_tokens_may_be_overwritten_before_they_are_read():
    """As a policy does that reuses its memory."""
    ids = torch.tensor([[65, 66]])
    text = Text.decoded(Ragged.from_padded(ids), utf8)
    ids.zero_()
    assert text.tolist() == ["AB"]


def test_only_what_was_read_last_is_kept_joined():
    """A long episode whose texts are all read holds its parts, not each of its texts."""
    texts = [Text.of(["a" * 100])]
    for _ in range(20):
        texts.append(texts[-1].append(Text.of(["b" * 100])))
    assert [len(text.tolist()[0]) for text in texts] == [100 * (n + 1) for n in range(21)]
    assert [text._strings is not None for text in texts[1:]] == [False] * 19 + [True]


def test_ten_thousand_appends():
    """Read, copied, pickled and freed without recursion."""
    text = nested = Text.of(["", ""])
    for _ in range(10_000):
        text, nested = text.append(Text.of(["a", "bc"])), Text.of(["a", ""]).append(nested)
    assert [len(string) for string in text.tolist()] == [10_000, 20_000]
    assert [len(string) for string in nested.tolist()] == [10_000, 0]
    for again in (pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert again.tolist() == text.tolist()
    td = TensorDict({"text": text.entry()}, [2])
    assert pickle.loads(pickle.dumps(td))[1]["text"] == "bc" * 10_000
    del text, nested, td, again


def test_what_a_text_grew_by_is_known_without_reading_it():
    """By this part, in the rows of a mask or in all; not by another part, nor from another text."""
    calls = []

    def decode(ids):
        calls.append(ids)
        return utf8(ids)

    mask = torch.tensor([True, False])
    before = Text.decoded(tokens([[65], [66]]), decode)
    added, other = (Text.decoded(tokens(ids), decode) for ids in ([[67], [68]], [[69], []]))
    assert before.append(added).grew_by(before, added)
    assert before.append(added.only(mask)).grew_by(before, added, mask)
    assert not before.append(added.only(mask)).grew_by(before, added)
    assert not before.append(added.only(~mask)).grew_by(before, added, mask)
    assert not before.append(added).append(added).grew_by(before, added)
    assert not before.grew_by(before, added)
    assert calls == []
    assert not before.append(other).grew_by(before, added)
    assert before.append(Text.of(["C", "D"])).grew_by(before, added)
    assert before.append(Text.of(["C", ""])).grew_by(before, added, mask)
    assert not before.append(Text.of(["C", "D"])).grew_by(before, added, mask)
    two = Text.of(["C", ""]).append(Text.of(["", "D"]))
    assert before.append(two).grew_by(before, two)
    assert before.append(two).grew_by(before, added)
    assert not any(row[:1] in ([65], [66]) for ids in calls for row in ids)


@fast
@given(st.lists(st.lists(st.lists(st.integers(97, 122), max_size=4), min_size=2, max_size=2), min_size=1, max_size=8))
def test_parts_of_any_lengths_are_joined_row_by_row(appended):
    """As many tokens as there are in each row of each part, with room between rows or without."""
    text, expect = Text.of(["", ""]), ["", ""]
    for number, ids in enumerate(appended):
        part = tokens(ids)
        if number % 2:  # the same rows with room behind each
            part = Ragged(
                torch.cat([torch.tensor([*row, 0]) for row in ids]), (part.offsets + torch.arange(3)), part.lengths
            )
        text = text.append(Text.decoded(part, utf8))
        expect = [a + bytes(row).decode() for a, row in zip(expect, ids, strict=True)]
    assert text.tolist() == expect


def test_texts_of_other_numbers_of_rows_do_not_fit():
    with pytest.raises(ValueError, match="2 strings can not be appended to 1 strings"):
        Text.of(["a"]).append(Text.of(["b", "c"]))
    assert Text.of([]).append(Text.of([])).tolist() == []
    assert repr(Text.of(["a"])) == "Text(['a'])"
    assert len(Text.of(["a", "b"])) == 2


def test_what_is_returned_may_be_changed():
    """It is a copy."""
    text = Text.of(["a"])
    text.tolist().append("b")
    td = TensorDict({"text": text.entry()}, [1])
    td["text"].append("b")
    assert text.tolist() == ["a"]


# In a TensorDict: as plain non-tensor data.


def grown(strings: list[str], where: str | None = None) -> Any:
    return Text.of([string[:1] for string in strings]).append(Text.of([string[1:] for string in strings])).entry()


def held(entry: Any, **options: Any) -> TensorDict:
    return TensorDict({"a": torch.arange(4), "text": entry, "in": {"text": entry}}, [4], **options)


def seen(value: Any) -> Any:
    """Say all that can be told of a value from outside."""
    if isinstance(value, NonTensorStack):
        return ("stack", value.stack_dim, value.batch_size, value.device, value.tolist(), value.is_locked)
    if isinstance(value, NonTensorData):
        return ("data", value.batch_size, value.device, value.data)
    if isinstance(value, tensordict.TensorDictBase):
        kind = type(value).__name__, value.batch_size, value.device, value.is_locked
        return (*kind, {key: seen(value.get(key)) for key in sorted(value.keys())})
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    return [seen(item) for item in value] if isinstance(value, list | tuple) else value


def changed(td: TensorDict, change: Callable[[TensorDict], Any]) -> list[Any]:
    """Change a copy: it is changed, what it was copied from is not."""
    copied = td.copy()
    change(copied)
    return [td, copied]


def saved(td: TensorDict) -> Any:
    buffer = io.BytesIO()
    torch.save(td, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


OTHER = TensorDict({"a": torch.tensor(9), "text": "z", "in": {"text": "y"}}, [])
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda td: td,
    "item": lambda td: td["text"],
    "nested item": lambda td: td["in", "text"],
    "get": lambda td: td.get("text"),
    "clone": lambda td: td.clone(),
    "copy": lambda td: td.copy(),
    "copy.copy": lambda td: copy.copy(td),
    "copy.deepcopy": lambda td: copy.deepcopy(td),
    "clone of the entry": lambda td: td.get("text").clone(),
    "row": lambda td: td[1],
    "last row": lambda td: td[-1],
    "slice": lambda td: td[1:3],
    "stride": lambda td: td[::2],
    "index": lambda td: td[torch.tensor([3, 0])],
    "list": lambda td: td[[0, 2]],
    "mask": lambda td: td[torch.tensor([True, False, True, False])],
    "none": lambda td: td[None],
    "ellipsis": lambda td: td[..., 0],
    "index of the entry": lambda td: td.get("text")[2],
    "stack": lambda td: torch.stack([td, td.copy()], 0),
    "stack 1": lambda td: torch.stack([td, td.copy()], 1),
    "lazy_stack": lambda td: lazy_stack([td, td.copy()], 1),
    "lazy_stack, read": lambda td: lazy_stack([td, td.copy()], 1)["text"],
    "lazy_stack, row": lambda td: lazy_stack([td, td.copy()], 1)[1],
    "stack of entries": lambda td: torch.stack([td.get("text"), td.get("text")]),
    "cat": lambda td: torch.cat([td, td]),
    "cat of a slice": lambda td: torch.cat([td[:1], td]),
    "to": lambda td: td.to("cpu"),
    "to the meta device": lambda td: td.to("meta"),
    "to of the entry": lambda td: td.get("text").to("cpu"),
    "dtype of the entry": lambda td: td.get("text").to(torch.float32),
    "cpu": lambda td: td.cpu(),
    "expand": lambda td: td.expand(2, 4),
    "reshape": lambda td: td.reshape(2, 2),
    "view": lambda td: td.view(2, 2),
    "flatten": lambda td: td.reshape(2, 2).flatten(),
    "permute": lambda td: td.reshape(2, 2).permute(1, 0),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "unsqueeze 1": lambda td: td.unsqueeze(1),
    "squeeze": lambda td: td[:1].squeeze(0),
    "unbind": lambda td: td.unbind(0),
    "split": lambda td: td.split(3),
    "split of parts": lambda td: td.split([1, 3]),
    "chunk": lambda td: td.chunk(2),
    "gather": lambda td: td.get("a").gather(0, torch.tensor([0, 1])),
    "repeat_interleave": lambda td: td.get("a").repeat_interleave(2),
    "contiguous": lambda td: td.contiguous(),
    "to_tensordict": lambda td: td.to_tensordict(),
    "to_dict": lambda td: td.to_dict(),
    "tolist": lambda td: td.get("text").tolist(),
    "equal": lambda td: td == td.clone(),
    "not equal": lambda td: (td != td.clone()).get("text"),
    "equal to another": lambda td: td == torch.stack([OTHER] * 4),
    "keys": lambda td: sorted(map(str, td.keys(True, True, is_leaf=tensordict.is_leaf_nontensor))),
    "is_non_tensor": lambda td: tensordict.is_non_tensor(td.get("text")),
    "is_tensor_collection": lambda td: tensordict.is_tensor_collection(td.get("text")),
    "length": lambda td: (len(td.get("text")), td.get("text").shape, td.get("text").ndim, td.get("text").numel()),
    "names": lambda td: td.get("text").names,
    "iteration": lambda td: [row["text"] for row in td],
    "lock": lambda td: td.copy().lock_(),
    "lock and unlock": lambda td: td.copy().lock_().unlock_(),
    "select": lambda td: td.select("text", ("in", "text")),
    "exclude": lambda td: td.exclude("a"),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "apply": lambda td: td.apply(lambda x: x + 1),
    "rename": lambda td: td.copy().rename_key_("text", "other"),
    "pop": lambda td: td.copy().pop("text"),
    "set an item of a copy": lambda td: changed(td, lambda copied: copied.__setitem__(1, OTHER)),
    "set a mask of a copy": lambda td: changed(
        td.clone(), lambda copied: copied.__setitem__(torch.arange(4) > 1, td.clone()[:2])
    ),
    "set a key of a copy": lambda td: changed(td, lambda copied: copied.set("text", td.get(("in", "text")))),
    "assign to what was read": lambda td: changed(td.clone(), lambda copied: copied["text"].__setitem__(0, "q")),
    "update": lambda td: changed(td, lambda copied: copied.update(td)),
    "update with plain": lambda td: changed(td, lambda copied: copied.update({"text": NonTensorStack(*"wxyz")})),
    "update_": lambda td: changed(td.clone(), lambda copied: copied.update_(torch.stack([OTHER] * 4))),
    "update of the entry": lambda td: changed(
        td.clone(), lambda copied: copied.get("text").update(NonTensorStack(*"wxyz"))
    ),
    "copy_": lambda td: torch.stack([OTHER] * 4).clone().update(td),
    "set_": lambda td: td.clone().set_("text", NonTensorStack(*"wxyz")),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "pickle of the entry": lambda td: pickle.loads(pickle.dumps(td.get("text"))),
    "save": saved,
    "repr": lambda td: repr(td.get("text")),
    "repr of all": lambda td: repr(td).replace("Strings", "NonTensorStack"),
    "str": lambda td: str(td.get("text")),
    "from the type": lambda td: type(td.get("text"))(*[NonTensorData(x) for x in "ab"]),
    "maybe_to_stack": lambda td: td.get("text").maybe_to_stack(),
    "tree_map": lambda td: torch.utils._pytree.tree_map(lambda x: x, td),
    "memmap": lambda td: td.memmap(),
    "in a list": lambda td: td.get("text") in [1, 2],
}


def outcome(operation: Callable[[Any], Any], value: Any) -> Any:
    try:
        return seen(operation(value))
    except Exception as error:  # the same error, then
        return type(error), str(error).replace("Strings", "NonTensorStack").replace("String", "NonTensorData")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tensordict_does_with_it_what_it_does_with_plain_data(name, device):
    """The same result, or the same error, as with a `NonTensorStack` of the strings; and it is the same afterwards."""
    lazy, plain = held(grown(WORDS), device=device), held(NonTensorStack(*WORDS), device=device)
    assert text_of(lazy.get("text")) is not None
    assert outcome(OPERATIONS[name], lazy) == outcome(OPERATIONS[name], plain)
    assert seen(lazy) == seen(plain)


def test_it_is_carried_about_unread():
    """By what an environment and a rollout do with it."""
    td = held(grown(WORDS))
    after = td.copy()
    after.update(td)
    after.set("next", td.copy())
    assert td["text"] == WORDS
    steps = lazy_stack([td, after], 1)
    assert rows(steps[:, 0], "text") == WORDS
    for entry in (td.get("text"), after.get("text"), after.get(("next", "text")), steps[:, 1].get("text")):
        assert text_of(entry) is text_of(td.get("text")) is not None
    assert text_of(td.to("cpu").get("text")) is text_of(td.get("text"))


SINGLE: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda td: td,
    "item": lambda td: td["text"],
    "get": lambda td: td.get("text"),
    "data": lambda td: td.get("text").data,
    "clone": lambda td: td.clone(),
    "copy": lambda td: td.copy(),
    "copy.deepcopy": lambda td: copy.deepcopy(td),
    "clone of the entry": lambda td: td.get("text").clone(),
    "stack": lambda td: torch.stack([td, td.copy()], 0),
    "lazy_stack": lambda td: lazy_stack([td, td.copy()]),
    "lazy_stack, read": lambda td: lazy_stack([td, td.copy()])["text"],
    "stack of entries": lambda td: torch.stack([td.get("text"), td.get("text")]),
    "to": lambda td: td.to("cpu"),
    "to the meta device": lambda td: td.to("meta"),
    "to of the entry": lambda td: td.get("text").to("cpu"),
    "expand": lambda td: td.expand(2),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "contiguous": lambda td: td.contiguous(),
    "to_dict": lambda td: td.to_dict(),
    "tolist": lambda td: td.get("text").tolist(),
    "equal": lambda td: td == td.clone(),
    "entries": lambda td: [td.get("text") == td.get("text").clone(), td.get("text") != NonTensorData("q")],
    "is_non_tensor": lambda td: tensordict.is_non_tensor(td.get("text")),
    "shape": lambda td: (td.get("text").shape, td.get("text").ndim, td.get("text").batch_size),
    "lock": lambda td: td.copy().lock_(),
    "select": lambda td: td.select("text"),
    "apply": lambda td: td.apply(lambda x: x + 1),
    "set a key of a copy": lambda td: changed(td, lambda copied: copied.set("text", "q")),
    "update": lambda td: changed(td, lambda copied: copied.update(td)),
    "update with plain": lambda td: changed(td, lambda copied: copied.update({"text": "q"})),
    "update of the entry": lambda td: changed(td.clone(), lambda copied: copied.get("text").update(NonTensorData("q"))),
    "set data": lambda td: changed(td.clone(), lambda copied: setattr(copied.get("text"), "data", "q")),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "save": saved,
    "repr": lambda td: repr(td.get("text")),
    "from the type": lambda td: type(td.get("text"))("x"),
    "maybe_to_stack": lambda td: td.get("text").maybe_to_stack(),
    "memmap": lambda td: td.memmap(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", SINGLE)
def test_without_a_batch_too(name, device):
    """The same result, or the same error, as with `NonTensorData` of the string."""
    text = Text.of(["a"]).append(Text.of(["b"]))
    lazy = TensorDict({"a": torch.tensor(1), "text": text.entry(batch=False)}, [], device=device)
    plain = TensorDict({"a": torch.tensor(1), "text": NonTensorData("ab")}, [], device=device)
    assert text_of(lazy.get("text")) is text
    assert outcome(SINGLE[name], lazy) == outcome(SINGLE[name], plain)
    assert seen(lazy) == seen(plain)


# Read out of a TensorDict.


def test_a_text_is_found_unread():
    """In a TensorDict, under a nested key, without a batch, and where rows were put together."""
    text = Text.of(["a", "b"])
    td = TensorDict({"in": {"text": text.entry()}}, [2])
    assert read_text(td, ("in", "text")) is text
    single = Text.of(["a"])
    assert read_text(TensorDict({"text": single.entry(batch=False)}, []), "text") is single
    mixed = choose(torch.tensor([True, False]), text.entry(), Text.of(["c", "d"]).entry())
    assert read_text(TensorDict({"text": mixed}, [2]), "text").tolist() == ["a", "d"]
    assert text_of(mixed) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to_stack", [True, False])
@pytest.mark.parametrize("capture", [True, False])
def test_strings_are_read_in_every_form_whatever_the_global_flags(to_stack, capture):
    """A batch of equal strings stays a batch; one string for all rows is one for each; lists are one for each."""
    with tensordict.set_list_to_stack(to_stack), tensordict.set_capture_non_tensor_stack(capture):
        td = TensorDict({"plain": NonTensorStack("a", "a"), "in": {"text": NonTensorStack("a", "b")}}, [2])
        td["listed"] = ["a", "a"]
        td["shared"] = "aa"
        td["stacked"] = torch.stack([NonTensorData("a"), NonTensorData("a")])
        lazy = lazy_stack([TensorDict({"text": "a", "in": {"text": x}}, []) for x in "ab"])
        assert read_text(td, "plain").tolist() == read_text(td, "listed").tolist() == ["a", "a"]
        assert read_text(td, "stacked").tolist() == read_text(lazy, "text").tolist() == ["a", "a"]
        assert read_text(td, "shared").tolist() == ["aa", "aa"]
        assert read_text(td, ("in", "text")).tolist() == read_text(lazy, ("in", "text")).tolist() == ["a", "b"]
        assert read_text(TensorDict({"text": "a"}, []), "text").tolist() == ["a"]


def test_what_is_no_string_is_refused_with_key_row_and_type():
    td = TensorDict({"in": {"text": NonTensorStack(NonTensorData("a"), NonTensorData(3))}, "t": torch.zeros(2)}, [2])
    with pytest.raises(TypeError, match=r"\('in', 'text'\), row 1: expected str, found int"):
        read_text(td, ("in", "text"))
    with pytest.raises(TypeError, match="'t', row 0: expected str, found a tensor"):
        read_text(td, "t")
    lazy = lazy_stack([TensorDict({"t": torch.zeros(2)}, []), TensorDict({"t": torch.zeros(2)}, [])])
    with pytest.raises(TypeError, match="'t', row 0: expected str, found a tensor"):
        read_text(lazy, "t")
    with pytest.raises(KeyError, match="no entry 'nothing'"):
        read_text(td, "nothing")
    with pytest.raises(KeyError, match="no entry 'nothing'"):
        read_text(td, ("in", "nothing"))
