"""Datasets of reasoning-gym as tasks: the prompt's form, the split, and whose answers are right."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import logging
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ramet.errors import ConfigError
from ramet.tasks import Judge, Task, build_task
from ramet.types import Sample, StopReason

pytest.importorskip("reasoning_gym")

gym = importlib.import_module("ramet.tasks.gym")  # the module: the package's name is its function
GOLDEN = ["ca21dc2b9945d0b0", "ade993153d5a4275"]
SMALL = {"train_size": 30, "held_out_size": 12}
SUMS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def build(dataset: str = "chain_sum", *, seed: int = 0, **options: Any) -> Task:
    return build_task(f"reasoning-gym:{dataset}", {**SMALL, **options}, seed=seed)


def score(task: Task, row: Any, completion: str) -> float | None:
    sample = Sample(row["prompt"], completion, (1,), (2,), row, StopReason.EOS, group=0, member=0)
    (outcome,) = Judge(task.score)([sample])
    return outcome.score


def questions(rows: Any) -> list[str]:
    return [row["entry"]["question"] for row in rows]


@pytest.mark.parametrize(
    "dataset",
    [
        "chain_sum",
        "basic_arithmetic",
        "spell_backward",
        "letter_counting",
        "number_sorting",
        "word_sorting",
        "gcd",
        "products",
        "mini_sudoku",  # the answer has four lines
        "rotate_matrix",
    ],
)
@pytest.mark.parametrize("form", ["text", "chat"])
def test_reference_answers_earn_the_full_reward_and_others_do_not(dataset: str, form: str) -> None:
    task = build(dataset, form=form, train_size=5, held_out_size=3, examples=1)
    assert task.answer is not None
    for row in [*task.train, *task.held_out]:
        assert score(task, row, task.answer(row)) == 1.0
        assert score(task, row, f" {task.answer(row)} \n\nQ: what is more") == 1.0
        assert score(task, row, "no idea") == 0.0
        assert score(task, row, "") == 0.0


def test_the_text_form_shows_examples_and_ends_where_the_answer_begins() -> None:
    task = build(**SUMS, examples=2)
    row = task.train[0]
    lines = row["prompt"].split("\n")
    assert [line[:3] for line in lines] == ["Q: ", "A: ", "Q: ", "A: ", "Q: ", "A:"]
    assert lines[4] == "Q: " + row["entry"]["question"]
    assert task.answer is not None
    assert task.answer(row) == " " + row["answer"]
    shown = {line[3:] for line in (lines[0], lines[2])}
    assert len(shown) == 2
    assert shown.isdisjoint(questions([*task.train, *task.held_out]))
    assert all(other["prompt"].split("\n")[:4] == lines[:4] for other in [*task.train, *task.held_out])


@pytest.mark.parametrize(
    ("template", "end", "lead"),
    [
        ("{question} {answer}", "{question}", " "),
        ("{question}\n{answer}", "{question}\n", ""),
        ("<{question}>{answer}", "<{question}>", ""),
    ],
)
def test_a_template_writes_each_example_and_the_question(template: str, end: str, lead: str) -> None:
    task = build(**SUMS, examples=0, template=template)
    row = task.train[0]
    assert row["prompt"] == end.replace("{question}", row["entry"]["question"])
    assert task.answer is not None
    assert task.answer(row) == lead + row["answer"]
    one = build(**SUMS, examples=1, template=template).held_out[0]
    worked, final = one["prompt"][: -len(row["prompt"])], one["prompt"][-len(row["prompt"]) :]
    assert worked.endswith("\n")
    assert final == end.replace("{question}", one["entry"]["question"])


def test_what_a_template_has_after_the_answer_stands_in_the_examples_alone() -> None:
    task = build(**SUMS, examples=1, template="{question}\n{answer}.\n")
    parts = task.train[0]["prompt"].split("\n")
    assert parts[1].removesuffix(".").lstrip("-").isdigit()
    assert parts[1:3] == [parts[1].removesuffix(".") + ".", ""]
    assert parts[3:] == [task.train[0]["entry"]["question"], ""]


def test_the_chat_form_is_messages_with_examples_as_turns() -> None:
    row = build(**SUMS, form="chat", examples=1, system="Answer with a number.").train[0]
    roles = [message["role"] for message in row["prompt"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert row["prompt"][0]["content"] == "Answer with a number."
    assert row["prompt"][2]["content"].lstrip("-").isdigit()
    assert row["prompt"][3]["content"] == row["entry"]["question"]
    plain = build(**SUMS, form="chat", examples=0).train[0]
    assert [message["role"] for message in plain["prompt"]] == ["user"]


def test_no_question_is_both_trained_on_and_held_out_and_none_comes_twice() -> None:
    # Sums of two digits of one place: 200 problems, so that collisions are certain unless they are looked for.
    task = build(min_terms=2, max_terms=2, min_digits=1, max_digits=1, train_size=100, held_out_size=60)
    both = questions(task.train) + questions(task.held_out)
    assert (len(task.train), len(task.held_out)) == (100, 60)
    assert len(set(both)) == 160


def test_the_seed_changes_what_is_trained_on_and_nothing_else() -> None:
    one, other, again = build(seed=0), build(seed=1), build(seed=0)
    assert one.held_out == other.held_out == again.held_out
    assert one.train == again.train
    assert len(set(questions(one.train)) & set(questions(other.train))) <= 3
    assert questions(build(train_size=5).held_out) == questions(one.held_out)


def test_partial_credit_counts_only_if_asked_for() -> None:
    exact, partial = build(**SUMS), build(**SUMS, exact=False)
    row = exact.train[0]
    longer = row["answer"] + "00"  # the dataset rewards an answer that contains the right one
    assert score(exact, row, longer) == 0.0
    assert 0.1 < (score(partial, row, longer) or 0.0) < 0.99
    assert score(partial, row, row["answer"]) == 1.0


def test_an_answer_that_is_very_nearly_right_is_wrong() -> None:
    options = {"train_size": 2, "held_out_size": 1, "grid_size_x": 20, "grid_size_y": 20}
    exact, partial = build("game_of_life", **options), build("game_of_life", **options, exact=False)
    row = exact.train[0]
    near = row["answer"].removesuffix("]]")[:-1] + str(1 - int(row["answer"].removesuffix("]]")[-1])) + "]]"
    assert score(partial, row, near) == 399 / 400  # one cell of 400 is another
    assert (score(exact, row, near), score(exact, row, row["answer"])) == (0.0, 1.0)


def test_a_completion_that_the_scorer_can_not_read_is_wrong() -> None:
    task = build("prime_factorization", train_size=3, held_out_size=1)
    assert score(task, task.train[0], "two times three") == 0.0


def test_chance_is_the_share_of_the_most_frequent_answer() -> None:
    task = build("letter_counting", min_words=2, max_words=4, held_out_size=40, train_size=1)
    answers = [row["answer"] for row in task.held_out]
    assert task.chance == max(answers.count(answer) for answer in answers) / 40
    constant = max(answers, key=answers.count)
    assert sum(score(task, row, constant) or 0.0 for row in task.held_out) / 40 == task.chance


def test_the_rows_of_the_shipped_recipe_stay_the_same_ones() -> None:
    recipe = {**SUMS, "min_digits": 1, "examples": 0, "template": "{question}\nFinal answer: {answer}"}
    found = []
    for seed in (0, 1):
        task = build_task("reasoning-gym:chain_sum", recipe, seed=seed)
        assert (len(task.train), len(task.held_out)) == (2000, 200)
        rows = "\n".join(row["prompt"] + row["answer"] for row in [*task.held_out, *task.train])
        found.append(hashlib.blake2b(rows.encode(), digest_size=8).hexdigest())
    assert found == GOLDEN


def test_where_problems_are_few_the_default_rows_are_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    task, other, fewer = (
        build_task("reasoning-gym:coin_flip", options, seed=seed)
        for options, seed in (({}, 0), ({}, 1), ({"train_size": 20}, 0))
    )
    assert f"16000 draws gave {len(task.train)} distinct problems to train on, fewer than" in caplog.text
    assert len(caplog.records) == 2  # none of the one that asks for 20
    assert (len(task.held_out), len(fewer.train)) == (40, 20)
    assert 150 < len(task.train) < 2000
    both = questions([*task.train, *task.held_out])
    assert len(set(both)) == len(both)
    assert task.held_out == other.held_out == fewer.held_out
    assert fewer.train == task.train[:20]
    with pytest.raises(ConfigError, match=r"coin_flip: 16000 draws gave \d+ distinct problems .* 2000 are wanted"):
        build_task("reasoning-gym:coin_flip", {"train_size": 2000})


def test_of_very_few_problems_each_is_an_example_held_out_or_trained_on() -> None:
    task = build_task("reasoning-gym:chain_sum", {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1})
    asked = {f"State the final answer to the following arithmetic problem: {digit} =" for digit in range(10)}
    shown = {line.removeprefix("Q: ") for line in task.train[0]["prompt"].split("\n")[:4:2]}
    assert shown | set(questions([*task.train, *task.held_out])) == asked
    assert (len(shown), len(task.held_out), len(task.train)) == (2, 1, 7)
    with pytest.raises(ConfigError, match=r"no distinct problem to train on(.|\n)*examples or held_out_size"):
        build_task(
            "reasoning-gym:chain_sum",
            {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1, "examples": 2, "held_out_size": 8},
        )


def test_slow_datasets_have_fewer_rows_by_default() -> None:
    task = build_task("reasoning-gym:simple_integration")
    assert (len(task.train), len(task.held_out)) == (200, 50)
    assert set(gym.FEWER) | set(gym.HASHED) <= set(importlib.import_module("reasoning_gym.factory").DATASETS)
    more = build_task("reasoning-gym:simple_integration", {"train_size": 210})
    assert (len(more.train), len(more.held_out)) == (210, 50)


def test_what_lasts_longer_than_two_seconds_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(gym, "time", SimpleNamespace(monotonic=lambda: next(seconds)))  # a second for each draw
    build("number_sorting")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"reasoning-gym:number_sorting: making its rows takes long: {found}, {passed} s so far"
        for passed, found in (
            (2, "2 of 2 distinct problems (examples) in 2 draws"),
            (12, "10 of 12 distinct problems (held out) in 10 draws"),
            (22, "8 of 30 distinct problems (train 0) in 8 draws"),
            (32, "18 of 30 distinct problems (train 0) in 18 draws"),
            (42, "28 of 30 distinct problems (train 0) in 28 draws"),
        )
    ]


def test_a_draw_that_the_dataset_gives_up_is_passed_over() -> None:
    task = build_task("reasoning-gym:maze")  # "Could not find suitable path cell after 1000 attempts"
    assert (len(task.train), len(task.held_out)) == (2000, 200)


def test_where_all_draws_fail_the_error_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __getitem__(self, number: int) -> Any:
            raise RuntimeError(f"no problem {number}")

    monkeypatch.setattr(gym, "_maker", lambda dataset, options: lambda seed, size: Failing())
    with pytest.raises(ConfigError, match="240 draws, the last that failed with RuntimeError: no problem 239, gave 0"):
        build(examples=0, held_out_size=0)
    with pytest.raises(ConfigError, match="RuntimeError: no problem 15999, gave no distinct problem to train on"):
        build_task("reasoning-gym:chain_sum")


def test_what_a_dataset_prints_is_kept_from_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    build("bf", train_size=3, held_out_size=2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("hashing", "lines"), [(None, 1), ("random", 1), ("0", 0)])
def test_rows_that_follow_the_hashes_of_strings_are_told(
    hashing: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if hashing is not None:
        monkeypatch.setenv("PYTHONHASHSEED", hashing)
    build("ransom_note")
    build("chain_sum")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * lines
    assert caplog.text.count("set PYTHONHASHSEED=0") == lines


@pytest.mark.parametrize(
    "parts", [["gcd", "spell_backward"], [{"name": "gcd", "config": {"max_numbers": 2}}, {"name": "spell_backward"}]]
)
def test_a_composite_is_made_of_names_or_mappings(parts: list[Any]) -> None:
    task = build("composite", datasets=parts, examples=0)
    sources = [row["entry"]["metadata"]["source_dataset"] for row in task.train]
    assert set(sources) == {"gcd", "spell_backward"}
    assert task.answer is not None
    for row in [*task.train, *task.held_out]:
        assert score(task, row, task.answer(row)) == 1.0
        assert score(task, row, "no idea") == 0.0
    heavy = build("composite", datasets=["gcd", {"name": "spell_backward", "weight": 1e9}])
    assert {row["entry"]["metadata"]["source_dataset"] for row in heavy.train} == {"spell_backward"}


def numpy_state() -> bytes:
    state: Any = np.random.get_state()
    return bytes(state[1])


@pytest.mark.parametrize("dataset", ["pool_matrix", "list_functions"])
def test_datasets_that_draw_from_global_random_states_are_repeatable_and_leave_them_alone(dataset: str) -> None:
    python, numpy = random.getstate(), numpy_state()
    one = build(dataset, train_size=5, held_out_size=3, examples=0)
    assert random.getstate() == python
    assert numpy_state() == numpy
    random.random()
    assert questions(build(dataset, train_size=5, held_out_size=3, examples=0).train) == questions(one.train)


def test_a_dataset_without_reference_answers_has_no_examples() -> None:
    task = build("rush_hour", examples=0, train_size=3, held_out_size=2)
    assert task.answer is None
    assert task.chance is None
    assert build("rush_hour", train_size=3, held_out_size=2).train == task.train
    with pytest.raises(ConfigError, match=r"no reference answers(.|\n)*examples = 0"):
        build("rush_hour", examples=1)


@pytest.mark.parametrize(
    ("dataset", "options", "parts"),
    [
        ("chain_sums", {}, ['"chain_sums"', 'did you mean "chain_sum"?']),
        ("chain_sum", {"max_term": 2}, ['"max_term"', 'did you mean "max_terms"?', "min_digits", "train_size"]),
        ("chain_sum", {"trian_size": 2}, ['did you mean "train_size"?']),
        ("chain_sum", {"seed": 2}, ['"seed"']),
        ("chain_sum", {"size": 2}, ['"size"']),
        ("chain_sum", {"min_terms": 0}, ["chain_sum", "min_terms must be positive"]),
        ("chain_sum", {"min_terms": "x"}, ["chain_sum", "TypeError"]),
        ("composite", {}, ["composite", "at least one dataset", "nothing", 'datasets = ["chain_sum", "gcd"]']),
        ("composite", {"datasets": []}, ["at least one dataset", "nothing"]),
        ("composite", {"datasets": "gcd"}, ["at least one dataset", "'gcd'"]),
        ("composite", {"datasets": ["gdc"]}, ['"gdc"', 'did you mean "gcd"?']),
        ("composite", {"datasets": ["gcd", "gcd"]}, ["Duplicate"]),
        ("composite", {"datasets": [3]}, ["datasets[0]", "expected a name, found 3"]),
        ("composite", {"datasets": [{"name": 3}]}, ['no dataset "3"']),
        ("composite", {"datasets": [{"weight": 3}]}, ["datasets[0]", "expected a name"]),
        ("composite", {"datasets": [{"name": "gcd", "size": 3}]}, ["datasets[0]", "expected a name"]),
        ("composite", {"datasets": ["gcd", {"name": "lcm", "weight": 0}]}, ["datasets[1]", "weight above 0, found 0"]),
        ("composite", {"datasets": [{"name": "gcd", "config": 3}]}, ["datasets[0]", "config, found 3"]),
        ("composite", {"datasets": [{"name": "gcd", "config": {"seed": 3}}]}, ["reasoning-gym:gcd", '"seed"']),
        ("composite", {"datasets": ["composite"]}, ["datasets[0]", "composite itself"]),
        ("chain_sum", {"form": "prose"}, ["form", "text, chat", "'prose'"]),
        ("chain_sum", {"form": "chat", "template": "{question}{answer}"}, ["template", '"text" only']),
        ("chain_sum", {"system": "hello"}, ["system", '"chat" only']),
        ("chain_sum", {"template": "{question}"}, ["template", "{answer}"]),
        ("chain_sum", {"template": "{answer} {question}"}, ["template"]),
        ("chain_sum", {"template": 3}, ["template: expected a string"]),
        ("chain_sum", {"exact": 1}, ["exact: expected true or false"]),
        ("chain_sum", {"train_size": 0}, ["train_size"]),
        ("chain_sum", {"held_out_size": "many"}, ["held_out_size"]),
        ("chain_sum", {"examples": -1}, ["examples"]),
        (
            "chain_sum",
            {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1},
            ["distinct problems", "12 are wanted", "held_out_size"],
        ),
    ],
)
def test_what_can_not_be_built_is_refused_by_name(dataset: str, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_task(f"reasoning-gym:{dataset}", {**SMALL, **options})
    for part in parts:
        assert part in str(caught.value)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'ramet\[tasks\]'"):
        build()


def test_the_package_is_imported_only_when_a_task_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert build_task("arithmetic", {"digits": 1, "held_out_size": 3}).name == "arithmetic"
