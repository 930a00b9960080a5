"""Mathematics from a data set: questions with a worked answer, as in GSM8K, or a plain one."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramet.errors import ConfigError, DataError, nearest
from ramet.prompts import refuse_shared
from ramet.tasks.options import flag, one_of, text, whole
from ramet.tasks.readings import as_number, boxed, last_number
from ramet.tasks.task import Reopening, Task
from ramet.tasks.verifier import Verifier
from ramet.types import Sample

GSM8K = "openai/gsm8k"
TEMPLATES: Mapping[str, str] = {
    "chat": "{question}\nReason step by step, and put the final answer into \\boxed{}.",
    "text": "Question: {question}\nAnswer:",
}
_MARK = "####"
_NOTE = re.compile(r"<<[^<>]*>>")


def maths(
    *,
    seed: int = 0,
    data: str = GSM8K,
    subset: str | None = None,
    split: str = "train",
    held_out: str | None = None,
    held_out_split: str = "test",
    question: str = "question",
    answer: str = "answer",
    form: str = "chat",
    template: str | None = None,
    system: str | None = None,
    boxed_only: bool = False,
    seconds: float = 5.0,
    train_size: int | None = None,
    held_out_size: int = 200,
) -> Task:
    r"""Make a task of a data set with the columns `question` and `answer`; the right final answer earns 1.0.

    `data` is a JSONL file, a folder that `datasets` has saved, or the name of a data set that it can load (`subset` is
    its configuration; GSM8K has "main", which is the default for it). The held-out rows are those of `held_out`, a
    second file or folder, or of the split `held_out_split` where there is one; else a keyed hash of the question holds
    out `held_out_size` of the rows. `seed` orders the training rows.

    An answer of the data ends in "#### 42" behind a worked solution, or in a `\boxed{}`, or is the final answer alone.
    A completion's is what its last `\boxed{}` holds; without one, unless `boxed_only`, what stands behind "####", or
    its last number. Numbers are compared exactly; anything else goes to math-verify, in processes of its own, for at
    most `seconds`: a comparison that takes longer is a time-out.

    The form "chat" asks in a message of the user's, after `system` if there is one, "text" in plain text; `template`
    says how, with {question} in it. Each row has "prompt", "question", "answer" (the final one) and "solution". Raises
    `ConfigError` without the packages that it needs, and `DataError` for rows that lack a column or an answer.
    """
    one_of("form", form, ("chat", "text"))
    flag("boxed_only", boxed_only)
    wording = TEMPLATES[form] if template is None else text("template", template)
    if "{question}" not in wording:
        raise ConfigError(f"task.options.template: expected {{question}} in it, found {wording!r}")
    if system is not None and (form != "chat" or not isinstance(system, str)):
        raise ConfigError('task.options.system: expected a string, read by the form "chat" only', hint="leave it out")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ConfigError(f"task.options.seconds: expected a number above 0, found {seconds!r}")
    whole("held_out_size", held_out_size, low=0)
    verifier = Verifier(float(seconds))

    def rows(found: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
        read = [_row(row, question, answer, f"row {number} of {where}") for number, row in enumerate(found)]
        return [{"prompt": _prompt(wording, row["question"], form, system), **row} for row in read]

    splits = _splits(data, subset)
    train = rows(_split_of(splits, split, data), data)
    if held_out is not None:
        test = rows(_split_of(_splits(held_out, None), held_out_split, held_out), held_out)
    elif held_out_split in splits and held_out_split != split:
        test = rows(splits[held_out_split], data)
    else:
        train.sort(key=lambda row: _hash("held out", row["question"]))
        test, train = train[:held_out_size], train[held_out_size:]
    test = test[:held_out_size]
    if not train:
        raise ConfigError(f"{data}: no row is left to train on", hint="lower task.options.held_out_size")
    refuse_shared(train, test)
    train.sort(key=lambda row: _hash(f"seed {seed}", row["question"]))
    train = train if train_size is None else train[: whole("train_size", train_size, low=1)]
    answers = Counter(row["answer"] for row in test)
    return Task(
        "maths",
        train,
        test,
        FinalAnswer(verifier, boxed_only),
        answer=_reference,
        chance=max(answers.values()) / len(test) if test else None,
    )


@dataclass(frozen=True, slots=True)
class FinalAnswer(Reopening):
    """The reward: 1.0 where the final answer of a completion says the same as the row's "answer", else 0.0."""

    verifier: Verifier
    boxed_only: bool = False

    async def __call__(self, sample: Sample) -> float:
        """Return the score of what the model wrote last; raise `TimeoutError` where it took too long to compare."""
        return await self.of(sample.completion, str(sample.row["answer"]))

    def close(self) -> None:
        """End the processes that compare; a later call starts others."""
        self.verifier.close()

    async def of(self, completion: str, right: str) -> float:
        """Return the score of a completion for an answer."""
        found = final_answer(completion, boxed_only=self.boxed_only)
        if found is None:
            return 0.0
        value, wanted = as_number(found), as_number(right)
        if value is not None and wanted is not None:
            return float(value == wanted)
        return float(found == right or await self.verifier.same(right, found))


def final_answer(completion: str, *, boxed_only: bool = False) -> str | None:
    r"""Return the final answer of a completion; None without one.

    >>> final_answer(r"6 * 7 = 42, so \boxed{42}."), final_answer("It is 42 km."), final_answer("#### 1,000\n")
    ('42', '42', '1,000')
    >>> final_answer("It is 42.", boxed_only=True) is None
    True
    """
    found = boxed(completion)
    if found is not None or boxed_only:
        return found
    if _MARK in completion:
        behind = completion.rpartition(_MARK)[2].strip()
        return behind.splitlines()[0].strip() if behind else None
    return last_number(completion)


def _row(row: Mapping[str, Any], question: str, answer: str, where: str) -> dict[str, Any]:
    for column in (question, answer):
        if column not in row:
            raise DataError(f'{where} has no column "{column}": found {sorted(map(str, row))}', hint="name the columns")
        if isinstance(row[column], bool) or not isinstance(row[column], (str, int, float)):
            raise DataError(f'{where}: expected text or a number in "{column}", found {row[column]!r:.80}')
    solution = str(row[answer]).strip()
    final = solution.rpartition(_MARK)[2].strip() if _MARK in solution else boxed(solution)
    final = solution if final is None else final
    if not final:
        raise DataError(f'{where} has no final answer in "{answer}": found {solution[-80:]!r}')
    return {"question": str(row[question]).strip(), "answer": final, "solution": solution}


def _prompt(wording: str, question: str, form: str, system: str | None) -> Any:
    asked = wording.replace("{question}", question)
    if form == "text":
        return asked
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": asked}]


def _reference(row: Mapping[str, Any]) -> str:
    r"""Return the solution, without GSM8K's notes for a calculator, and the final answer in a `\boxed{}`."""
    worked = str(row["solution"])
    worked = worked.rpartition(_MARK)[0] if _MARK in worked else worked if boxed(worked) is not None else ""
    worked = _NOTE.sub("", worked).strip()
    return f"{worked}\n\\boxed{{{row['answer']}}}" if worked else f"\\boxed{{{row['answer']}}}"


_WHOLE = ""  # the one split of data that has none


def _splits(data: str, subset: str | None) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return the rows of a file or a data set, by split."""
    if data.endswith((".jsonl", ".json")):
        return {_WHOLE: _json_rows(Path(data))}
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"the data set {data} needs the package datasets", hint="pip install 'ramet[data]'"
        ) from error
    try:
        if Path(data).is_dir():
            found = datasets.load_from_disk(data)
        else:
            found = datasets.load_dataset(data, "main" if subset is None and data == GSM8K else subset)
        return {name: list(found[name]) for name in found} if hasattr(found, "keys") else {_WHOLE: list(found)}
    except Exception as error:  # it may raise anything, a network's errors as well
        raise ConfigError(
            f"the data set {data} can not be loaded: {type(error).__name__}: {error}",
            hint="set task.options.data to a JSONL file, a folder that datasets has saved, or the name of a data set",
        ) from error


def _split_of(splits: Mapping[str, Sequence[Mapping[str, Any]]], split: str, data: str) -> Sequence[Mapping[str, Any]]:
    found = splits.get(split, splits.get(_WHOLE))
    if found is None:
        raise ConfigError(f'the data set {data} has no split "{split}"', hint=nearest(split, splits))
    if not found:
        raise DataError(f"{data} is empty: expected at least one row")
    return found


def _json_rows(path: Path) -> Sequence[Mapping[str, Any]]:
    if not path.is_file():
        raise DataError(f"no data at {path}: expected a JSONL file", hint="the path starts at the working folder")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise DataError(f"{path}, line {number} is not JSON in UTF-8: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object, found {row!r:.80}")
            rows.append(row)
    return rows


def _hash(key: str, question: str) -> bytes:
    return hashlib.blake2b(question.encode(), key=key.encode(), digest_size=8).digest()
