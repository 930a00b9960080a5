"""Rows in, tokens and groups out: nothing is lost, cut or merged in silence."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ramet.errors import ConfigError, DataError, PromptTooLong
from ramet.models.tiny import tiny_tokenizer
from ramet.prompts import Prompts, read_rows, tokenize_prompt
from ramet.ragged import Ragged

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def texts(prompts: Prompts, td: Any) -> list[str]:
    rows = Ragged.from_jagged(td["tokens"]).rows()
    return [str(tokenizer().decode(row, skip_special_tokens=True)) for row in rows]


# ------------------------------------------------------------------ rows


def test_strings_messages_and_mappings_are_rows_and_other_columns_travel() -> None:
    entry = {"question": "?", "weights": [1, 2]}
    rows = read_rows(["a", CHAT, {"prompt": "b", "entry": entry, "n": None}, {"messages": CHAT, "level": 3}])
    assert rows[0] == {"prompt": "a"}
    assert rows[1] == {"prompt": CHAT}
    assert rows[2]["entry"] is entry
    assert rows[2]["n"] is None
    assert rows[3] == {"messages": CHAT, "prompt": CHAT, "level": 3}


def test_any_iterable_is_read_once() -> None:
    assert [row["prompt"] for row in read_rows(str(i) for i in range(3))] == ["0", "1", "2"]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_jsonl_file_is_read_line_by_line(tmp_path: Path, kind: Any) -> None:
    file = tmp_path / "p.jsonl"
    lines = [json.dumps("plain"), "", json.dumps({"prompt": "Grüße\n", "x": 1}, ensure_ascii=False), json.dumps(CHAT)]
    file.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    assert read_rows(kind(file)) == [{"prompt": "plain"}, {"prompt": "Grüße\n", "x": 1}, {"prompt": CHAT}]


def test_a_dataset_is_read_with_its_columns() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    assert read_rows(dataset) == [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    with pytest.raises(DataError, match=r"DatasetDict with the keys \['test', 'train'\](.|\n)*choose one split"):
        read_rows(datasets.DatasetDict({"train": dataset, "test": dataset}))


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([], ["list of prompts is empty"]),
        (["a", 3], ["row 1", "found int"]),
        (["a", "2\ud800="], ["row 1", "the lone surrogate '\\ud800' at character 1"]),
        ([[{"role": "user", "content": "\udc00"}]], ["row 0", "the lone surrogate '\\udc00' at character 0"]),
        ([{"question": "a"}], ["row 0", "the columns ['question']"]),
        ([{"prompt": None}], ["row 0", '"prompt" of type NoneType']),
        ([{"prompt": []}], ["row 0", '"prompt" of type list']),
        ([[{"content": "no role"}]], ["row 0", "found list"]),
        ({"prompt": "a"}, ["found a dict with the keys ['prompt']", "into a list"]),
        (7, ["found a int"]),
    ],
)
def test_what_is_no_row_is_refused_by_number(rows: Any, parts: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(rows)
    for part in parts:
        assert part in str(caught.value)


def test_a_bad_file_is_refused_by_name_and_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompts at .*none\.jsonl"):
        read_rows(tmp_path / "none.jsonl")
    empty, torn, latin = tmp_path / "empty.jsonl", tmp_path / "torn.jsonl", tmp_path / "latin.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    torn.write_text('"a"\n{"prompt": "b"\n', encoding="utf-8")
    latin.write_bytes('"a"\n"ü"\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        read_rows(empty)
    for file in (torn, latin):
        with pytest.raises(DataError, match=f"{file.name}, line 2 is not JSON"):
            read_rows(file)


# ------------------------------------------------------------------ tokens


@settings(deadline=None, max_examples=40)
@given(st.text("0123456789+- =abc\n", min_size=1))
def test_text_gets_the_tokenizers_own_special_tokens(text: str) -> None:
    ids = tokenize_prompt(tokenizer(), text, "row 0")
    assert ids == tokenizer()(text)["input_ids"]
    assert ids[0] == tokenizer().bos_token_id
    assert tokenizer().decode(ids[1:]) == text


def test_messages_go_through_the_chat_template_up_to_the_answer() -> None:
    own = tiny_tokenizer()
    own.chat_template = TEMPLATE
    ids = tokenize_prompt(own, [{"role": "system", "content": "s"}, *CHAT], "row 0")
    assert own.decode(ids, skip_special_tokens=True) == "[system]s[user]hi[assistant]"


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(DataError, match="row 1: the prompt is a list of messages"):
        Prompts(["a", CHAT], tokenizer())


def test_an_empty_prompt_is_the_beginning_of_text_or_an_error() -> None:
    assert tokenize_prompt(tokenizer(), "", "row 0") == [tokenizer().bos_token_id]
    silent = tiny_tokenizer()
    silent.backend_tokenizer.post_processor = None
    assert tokenize_prompt(silent, "", "row 0") == [silent.bos_token_id]
    silent.bos_token = None
    with pytest.raises(DataError, match="row 4: the prompt is empty"):
        tokenize_prompt(silent, "", "row 4")


# ------------------------------------------------------------------ too long


def test_a_prompt_over_the_limit_is_refused_by_default() -> None:
    with pytest.raises(PromptTooLong, match="row 1: the prompt has 7 tokens, over the limit of 3") as caught:
        Prompts(["ab", "abcdef"], tokenizer(), limit=3)
    assert "keep_end" in str(caught.value)


def test_a_prompt_at_the_limit_stays_whole() -> None:
    assert len(Prompts(["ab"], tokenizer(), limit=3).tokens[0]) == 3


@pytest.mark.parametrize(
    ("too_long", "kept", "dropped"),
    [("drop", ["<bos>ab"], 1), ("keep_end", ["<bos>ab", "def"], 0), ("keep_start", ["<bos>ab", "<bos>ab"], 0)],
)
def test_a_declared_policy_cuts_or_drops(too_long: Any, kept: list[str], dropped: int) -> None:
    prompts = Prompts(["ab", {"prompt": "abcdef", "x": 1}], tokenizer(), limit=3, too_long=too_long)
    assert [tokenizer().decode(tokens) for tokens in prompts.tokens] == kept
    assert prompts.dropped == dropped
    assert len(prompts) == len(prompts.rows) == len(kept)


def test_dropped_rows_leave_rows_and_tokens_in_step() -> None:
    rows = [{"prompt": "x" * n, "n": n} for n in (9, 1, 8, 2)]
    prompts = Prompts(rows, tokenizer(), limit=4, too_long="drop")
    assert [row["n"] for row in prompts.rows] == [1, 2]
    assert [len(tokens) for tokens in prompts.tokens] == [2, 3]


def test_when_nothing_is_left_it_is_an_error() -> None:
    with pytest.raises(DataError, match="all 2 prompts are longer than the limit of 2"):
        Prompts(["abc", "abcd"], tokenizer(), limit=2, too_long="drop")


def test_an_unknown_policy_is_refused_before_it_is_needed() -> None:
    with pytest.raises(ConfigError, match="keep_start, found 'cut'"):
        Prompts(["a"], tokenizer(), too_long="cut")  # type: ignore[arg-type]


# ------------------------------------------------------------------ groups


def test_equal_prompts_stay_separate_groups() -> None:
    td = Prompts(["same", "same", "same"], tokenizer()).batch(0, 3, group_size=2)
    assert td["group_id"].tolist() == [0, 0, 1, 1, 2, 2]
    assert td["repeat_index"].tolist() == [0, 1, 0, 1, 0, 1]
    assert sorted(td["prompt_index"].tolist()) == [0, 0, 1, 1, 2, 2]
    assert td.batch_size == torch.Size([6])


def test_a_batch_holds_the_tokens_of_the_rows_that_it_names() -> None:
    prompts = Prompts([{"prompt": f"{i}" * (i + 1), "i": i} for i in range(5)], tokenizer(), seed=3)
    td = prompts.batch(1, 3, group_size=2)
    assert td["tokens"].dtype == torch.int64
    assert texts(prompts, td) == [prompts.rows[i]["prompt"] for i in td["prompt_index"].tolist()]


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 7), st.integers(0, 2**40), st.integers(0, 30), st.lists(st.integers(1, 5), min_size=1, max_size=5)
)
def test_resuming_anywhere_equals_the_unbroken_stream(rows: int, seed: int, start: int, counts: list[int]) -> None:
    prompts = Prompts([str(i) for i in range(rows)], tokenizer(), seed=seed)
    whole = prompts.batch(start, sum(counts))
    indices, groups, position = [], [], start
    for count in counts:
        part = Prompts([str(i) for i in range(rows)], tokenizer(), seed=seed).batch(position, count)
        indices += part["prompt_index"].tolist()
        groups += part["group_id"].tolist()
        position += count
    assert indices == whole["prompt_index"].tolist()
    assert groups == whole["group_id"].tolist() == list(range(start, position))


def test_the_batch_at_the_end_of_an_epoch_goes_on_into_the_next() -> None:
    prompts = Prompts([str(i) for i in range(5)], tokenizer(), seed=1)
    seen = [i for position in range(0, 20, 4) for i in prompts.batch(position, 4)["prompt_index"].tolist()]
    assert sorted(seen) == sorted([*range(5)] * 4)
    assert all(sorted(seen[first : first + 5]) == [*range(5)] for first in range(0, 20, 5))


def test_the_first_are_in_the_order_of_the_data_whatever_the_seed() -> None:
    for seed in range(3):
        prompts = Prompts(["a", "b", "c"], tokenizer(), seed=seed)
        assert texts(prompts, prompts.first(2, group_size=2)) == ["a", "a", "b", "b"]
        td = prompts.first(10)
        assert texts(prompts, td) == ["a", "b", "c"]
        assert td["group_id"].tolist() == td["prompt_index"].tolist() == [0, 1, 2]
