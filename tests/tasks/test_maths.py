"""Mathematics from data: where rows come from, what a final answer is, and a comparison that can be stopped."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.concurrency import ends

from ramet.checking import check_task
from ramet.errors import ConfigError, DataError
from ramet.tasks import Judge, Task
from ramet.tasks import verifier as verifier_module
from ramet.tasks.maths import FinalAnswer, final_answer, maths
from ramet.tasks.verifier import Verifier
from ramet.types import Outcome, OutcomeKind, Sample, StopReason

pytest.importorskip("math_verify")

SUMS = [
    {"question": f"What is {a} plus {b}?", "answer": f"It is {a}+{b}=<<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"}
    for a in range(10, 14)
    for b in range(1000, 6000, 1000)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, SUMS)) + "\n", encoding="utf-8")
    return tmp_path


def sample(row: Any, completion: str) -> Sample:
    return Sample(row["prompt"], completion, (1,), (2,), row, StopReason.EOS, group=0, member=0)


def score(task: Task, answer: str, completion: str) -> float | None:
    (outcome,) = Judge(task.score)([sample({"prompt": "", "answer": answer}, completion)])
    return outcome.score


def test_rows_of_a_file_are_split_by_the_question_and_ordered_by_the_seed(folder: Path) -> None:
    one, other = (maths(data=str(folder / "sums.jsonl"), held_out_size=5, seed=seed) for seed in (0, 1))
    assert (len(one.train), len(one.held_out)) == (15, 5)
    assert one.held_out == other.held_out
    assert one.train != other.train
    assert sorted(row["question"] for row in one.train) == sorted(row["question"] for row in other.train)
    row = one.held_out[0]
    assert row["answer"].isdigit()
    assert row["solution"].endswith(f"#### {row['answer']}")
    assert row["prompt"][0]["content"].startswith(row["question"] + "\n")
    assert maths(data=str(folder / "sums.jsonl"), held_out_size=5, train_size=3).train == one.train[:3]


def test_the_reference_answer_is_the_solution_in_a_box_without_the_notes(folder: Path) -> None:
    task = maths(data=str(folder / "sums.jsonl"), held_out_size=5)
    assert task.answer is not None
    assert task.answer({"solution": SUMS[0]["answer"], "answer": "1010"}) == "It is 10+1000=1010.\n\\boxed{1010}"
    assert task.answer({"solution": "1010", "answer": "1010"}) == "\\boxed{1010}"
    assert task.answer({"solution": r"so \boxed{7}", "answer": "7"}) == "so \\boxed{7}\n\\boxed{7}"


@pytest.mark.parametrize("form", ["chat", "text"])
def test_the_task_is_proved(folder: Path, form: str) -> None:
    def build(seed: int) -> Task:
        return maths(data=str(folder / "sums.jsonl"), held_out_size=5, form=form, seed=seed)

    report = check_task(build(0), build=build)
    assert report.passed, str(report)


def test_forms_and_columns(folder: Path) -> None:
    rows = [{"q": "2+2?", "a": 4}, {"q": "3+3?", "a": "6"}]
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given: dict[str, Any] = {"data": str(folder / "own.jsonl"), "question": "q", "answer": "a", "held_out_size": 0}
    (first, _) = sorted(maths(**given, form="text").train, key=lambda row: str(row["question"]))
    assert first["prompt"] == "Question: 2+2?\nAnswer:"
    assert (first["answer"], first["solution"]) == ("4", "4")
    chat = maths(**given, system="Be brief.", template="{question} {curly}").train[0]["prompt"]
    assert [message["role"] for message in chat] == ["system", "user"]
    assert chat[1]["content"].endswith("? {curly}")


def test_a_folder_that_datasets_has_saved_with_splits_and_without(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": datasets.Dataset.from_list(SUMS[:12]), "test": datasets.Dataset.from_list(SUMS[12:])}
    datasets.DatasetDict(parts).save_to_disk(str(folder / "splits"))
    task = maths(data=str(folder / "splits"))
    assert (len(task.train), len(task.held_out)) == (12, 8)
    assert [row["question"] for row in task.held_out] == [row["question"] for row in SUMS[12:]]
    parts["train"].save_to_disk(str(folder / "whole"))
    alone = maths(data=str(folder / "whole"), held_out_size=2)
    assert (len(alone.train), len(alone.held_out)) == (10, 2)
    both = maths(data=str(folder / "whole"), held_out=str(folder / "splits"))
    assert (len(both.train), len(both.held_out)) == (12, 8)
    with pytest.raises(ConfigError, match=r'has no split "trian"(.|\n)*did you mean "train"'):
        maths(data=str(folder / "splits"), split="trian")


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("42", r"So it is \boxed{42}.", 1.0),
        ("42", r"\boxed{42.0}", 1.0),
        ("42", r"\boxed{41}", 0.0),
        ("42", r"\boxed{41} I mean \boxed{42}", 1.0),
        ("1250", r"\boxed{1,250}", 1.0),
        ("42", "6*7 = 42", 1.0),
        ("42", "42 is more than 41", 0.0),
        ("42", "#### 42\nQ: what else is 7?", 1.0),
        ("42", "####", 0.0),
        ("42", "", 0.0),
        ("42", "no idea", 0.0),
        ("1/2", r"\boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0.0),
        ("x+1", r"\boxed{1+x}", 1.0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
        (r"\sqrt{8}", r"\boxed{" + "x" * 2000 + "}", 0.0),
        ("42", r"\boxed{\frac{}{", 0.0),
        ("42", "9" * 5000, 0.0),
    ],
)
def test_final_answers_say_the_same(folder: Path, answer: str, completion: str, expected: float) -> None:
    assert score(maths(data=str(folder / "sums.jsonl"), held_out_size=0), answer, completion) == expected


def test_a_box_alone_counts_if_asked_for(folder: Path) -> None:
    task = maths(data=str(folder / "sums.jsonl"), held_out_size=0, boxed_only=True)
    assert [score(task, "42", text) for text in (r"\boxed{42}", "42", "#### 42")] == [1.0, 0.0, 0.0]
    assert final_answer("#### 42", boxed_only=True) is None


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    made = Verifier(seconds=1.0)
    yield made
    made.close()


def test_a_comparison_that_takes_too_long_is_ended_and_the_next_one_works(verifier: Verifier) -> None:
    assert asyncio.run(verifier.same("2", "x^2-x^2+2"))
    with pytest.raises(TimeoutError, match="longer than 1 s"):
        asyncio.run(verifier.same("1", HANGS))
    assert asyncio.run(verifier.same("2", "4/2"))


def test_an_answer_that_takes_for_ever_holds_up_no_other(folder: Path) -> None:
    """What sympy makes of it has no end: here it is cancelled once the others have their scores."""
    task = maths(data=str(folder / "sums.jsonl"), held_out_size=0, seconds=3600.0)
    judge = Judge(task.score, seconds=3600)

    async def main() -> list[Outcome]:
        boxes = [f"\\boxed{{{answer}}}" for answer in (HANGS, r"\frac{2}{4}", "x+1", r"2\sqrt{2}")]
        samples = (sample({"prompt": "", "answer": RIGHT[place]}, box) for place, box in enumerate(boxes))
        hangs, *others = samples
        hanging = asyncio.ensure_future(judge.judged(hangs))
        found = await asyncio.gather(*map(judge.judged, others))
        assert not hanging.done()
        hanging.cancel()
        return found

    assert [outcome.score for outcome in asyncio.run(main())] == [1.0, 0.0, 1.0]
    judge.close()
    assert isinstance(task.score, FinalAnswer)
    assert task.score.verifier._running is None


HANGS = "10^{10^{10^{10}}} - 7^{9^{9^{9}}} + 3"
RIGHT = ("1", "1/2", "x+2", r"\sqrt{8}")


def test_a_time_out_of_a_comparison_is_an_outcome_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(self: Verifier, right: str, found: str) -> bool:
        raise TimeoutError("math-verify took longer")

    monkeypatch.setattr(Verifier, "same", late)
    task = maths(data=str(folder / "sums.jsonl"), held_out_size=0)
    (outcome,) = Judge(task.score)([sample({"prompt": "", "answer": "x"}, r"\boxed{y}")])
    assert outcome.kind is OutcomeKind.TIMED_OUT


def test_threads_may_compare_at_once(verifier: Verifier) -> None:
    found: dict[int, bool] = {}

    def compare(number: int) -> None:
        found[number] = asyncio.run(verifier.same(f"{number}/7", f"\\frac{{{number}}}{{7}}"))

    asyncio.run(verifier.same("1", "1"))
    threads = [threading.Thread(target=compare, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(range(1, 9), True)


def test_the_process_ends_with_what_started_it() -> None:
    made = Verifier()
    assert asyncio.run(made.same("1/2", "0.5"))
    running = made._running
    assert running is not None
    (process,) = running._open
    del running
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert process._popen.returncode is not None
    second = Verifier()
    second.close()
    second.close()


def test_the_process_ends_with_python() -> None:
    program = (
        "import asyncio, runpy\n"  # the module alone: its package takes seconds to load
        f"v = runpy.run_path({verifier_module.__file__!r})['Verifier']()\n"
        "assert asyncio.run(v.same('1/2', '0.5'))\n[p] = v._running._open\nprint(p.pid)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert ends.gone(int(done.stdout))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": "none.jsonl"}, DataError, r"no data at none\.jsonl"),
        ({"data": "torn.jsonl"}, DataError, "line 2 is not JSON"),
        ({"data": "list.jsonl"}, DataError, "line 1: expected an object"),
        ({"data": "empty.jsonl"}, DataError, "is empty"),
        ({"question": "problem"}, DataError, 'has no column "problem"'),
        ({"answer": "solution"}, DataError, 'has no column "solution"'),
        ({"data": "odd.jsonl"}, DataError, 'expected text or a number in "answer"'),
        ({"data": "blank.jsonl"}, DataError, "no final answer"),
        ({"held_out": "sums.jsonl"}, DataError, "held-out prompts are trained on"),
        ({"held_out_size": 100}, ConfigError, "no row is left to train on"),
        ({"template": "{q}"}, ConfigError, "template: expected {question}"),
        ({"form": "prose"}, ConfigError, "form"),
        ({"form": "text", "system": "x"}, ConfigError, '"chat" only'),
        ({"seconds": 0}, ConfigError, "seconds"),
        ({"boxed_only": 1}, ConfigError, "boxed_only"),
    ],
)
def test_what_can_not_be_built_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "torn.jsonl").write_text('{"question": "a", "answer": "b"}\n{', encoding="utf-8")
    (folder / "list.jsonl").write_text("[1]\n", encoding="utf-8")
    (folder / "empty.jsonl").write_text("\n", encoding="utf-8")
    (folder / "odd.jsonl").write_text('{"question": "a", "answer": ["b"]}\n', encoding="utf-8")
    (folder / "blank.jsonl").write_text('{"question": "a", "answer": "x #### "}\n', encoding="utf-8")
    with pytest.raises(error, match=message):
        maths(**{"data": "sums.jsonl", **options})


def test_without_the_packages_the_error_says_how_to_get_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ramet\[tasks\]'"):
        maths(data=str(folder / "sums.jsonl"))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'ramet\[data\]'"):
        maths(data="some/data-set")
