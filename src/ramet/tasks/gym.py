"""The procedural datasets of reasoning-gym as tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ramet.errors import ConfigError, nearest
from ramet.tasks.options import flag, one_of, options_of, text, whole
from ramet.tasks.random_states import RandomStates
from ramet.tasks.task import Task
from ramet.types import Sample

TEMPLATE = "Q: {question}\nA: {answer}"
FULL = 0.99  # of a right answer; some datasets give a little less than 1 for a right one in an unusual form
TRIES = 8  # entries looked at for each distinct problem wanted


def gym(
    dataset: str,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    train_size: int = 2000,
    held_out_size: int = 200,
    examples: int = 2,
    form: str = "text",
    template: str | None = None,
    system: str | None = None,
    exact: bool = True,
) -> Task:
    """Make a task of a dataset of the package reasoning-gym; `options` are the dataset's own.

    The form "text" shows `examples` worked examples and then the question, each written as `template` says (by default
    "Q: {question}" and "A: {answer}" on two lines) and separated by line breaks; the prompt ends before the answer and
    the spaces that lead to it, so that what the template has after the answer stands in the examples alone. The form
    "chat" is messages: `system` if there is one, each example as a turn of user and assistant, the question as the
    user's.

    Held-out problems and examples are always the same ones; `seed` chooses the training problems. All are distinct by
    their question. Each row has "prompt", "answer" and "entry", the dataset's own record.

    The reward is the dataset's `score_answer` for the stripped completion, cut to as many lines as the reference answer
    has. `exact` makes it 1.0 or 0.0, for datasets give partial credit even to a wrong answer. `chance` is the share of
    the most frequent reference answer among the held-out ones. Raises `ConfigError` without the package, for an unknown
    dataset or option, and where there are fewer distinct problems than asked for.
    """
    name = f"reasoning-gym:{dataset}"
    whole("train_size", train_size, low=1)
    whole("held_out_size", held_out_size, low=0)
    whole("examples", examples, low=0)
    write, lead = _form(one_of("form", form, ("text", "chat")), template, system)
    make = _maker(dataset, dict(options or {}))
    seen: set[str] = set()
    shown, _ = _distinct(make, "examples", examples, seen, name)
    if not all(isinstance(entry["answer"], str) for entry in shown):
        raise ConfigError(f"{name} has no reference answers to show as examples", hint="set task.options.examples = 0")
    test, _ = _distinct(make, "held out", held_out_size, seen, name)
    train, scorer = _distinct(make, f"train {seed}", train_size, seen, name)

    def rows(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"prompt": write(shown, entry), "answer": entry["answer"], "entry": entry} for entry in entries]

    reward = ScoreAnswer(scorer, flag("exact", exact))
    answered = all(isinstance(entry["answer"], str) for entry in (*train, *test))
    if answered and reward.of(train[0]["answer"], train[0]) < FULL:
        raise ConfigError(f"{name}: the dataset does not accept its own answer {train[0]['answer']!r}")
    answers = Counter(entry["answer"] for entry in test) if answered else Counter()
    return Task(
        name,
        rows(train),
        rows(test),
        reward,
        answer=(lambda row: lead + str(row["answer"])) if answered else None,
        chance=max(answers.values()) / len(test) if answers else None,
    )


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """The reward: what `dataset` says of a completion, rounded to right or wrong if `exact`.

    A completion that the dataset's scorer can not read, so that it raises, is a wrong answer like any other.
    """

    dataset: Any
    exact: bool

    def __call__(self, sample: Sample) -> float:
        """Return the score of the completion for the row's "entry"."""
        return self.of(sample.completion, sample.row["entry"])

    def of(self, completion: str, entry: Mapping[str, Any]) -> float:
        """Return the score of the completion's first lines, as many as the reference answer has."""
        answer = completion.strip()
        if isinstance(entry["answer"], str):
            count = max(1, len(entry["answer"].strip().splitlines()))
            answer = "\n".join(answer.splitlines()[:count]).strip()
        try:
            score = float(self.dataset.score_answer(answer, entry))
        except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
            score = 0.0
        return float(score >= FULL) if self.exact else score


_Entry = dict[str, Any]
_Write = Callable[[list[_Entry], _Entry], Any]


def _form(form: str, template: str | None, system: str | None) -> tuple[_Write, str]:
    """Return what writes a prompt from examples and an entry, and the spaces that lead to an answer."""
    if form == "chat":
        if template is not None:
            raise ConfigError(
                'task.options.template is read by the form "text" only: found "chat"', hint="leave it out"
            )
        first = [] if system is None else [{"role": "system", "content": text("system", system)}]

        def chat(shown: list[_Entry], entry: _Entry) -> list[dict[str, str]]:
            turns = [(("user", e["question"].strip()), ("assistant", e["answer"])) for e in shown]
            said = [*(part for turn in turns for part in turn), ("user", entry["question"].strip())]
            return [*first, *({"role": role, "content": content} for role, content in said)]

        return chat, ""
    if system is not None:
        raise ConfigError('task.options.system is read by the form "chat" only: found "text"', hint="leave it out")
    template = TEMPLATE if template is None else text("template", template)
    head, question, rest = template.partition("{question}")
    middle, answer, tail = rest.partition("{answer}")
    if not question or not answer:
        raise ConfigError(
            f"task.options.template: expected {{question}} and, after it, {{answer}}: found {template!r}",
            hint=f"the default is {TEMPLATE!r}",
        )

    def lines(shown: list[_Entry], entry: _Entry) -> str:
        worked = [head + e["question"].strip() + middle + e["answer"] + tail for e in shown]
        return "\n".join([*worked, (head + entry["question"].strip() + middle).rstrip(" ")])

    return lines, middle[len(middle.rstrip(" ")) :]


def _maker(dataset: str, options: dict[str, Any]) -> Callable[[int, int], Any]:
    """Return a function of (seed, size) that makes the dataset, with its options checked."""
    package = _package()
    known = package.factory.DATASETS
    if dataset not in known:
        raise ConfigError(f'reasoning-gym has no dataset "{dataset}"', hint=nearest(dataset, known))
    fields = {field.name for field in dataclasses.fields(known[dataset][1])} - {"seed", "size"}
    for name in options:
        if name not in fields:
            hint = nearest(name, [*options_of(gym), *fields])
            raise ConfigError(f'the task reasoning-gym:{dataset} has no option "{name}"', hint=hint)

    def make(seed: int, size: int) -> Any:
        try:
            return package.create_dataset(dataset, seed=seed, size=size, **options)
        except Exception as error:  # the package checks with assertions, and what they miss fails in any way
            raise ConfigError(
                f"reasoning-gym:{dataset} can not be made with {options}: {type(error).__name__}: {error}"
            ) from error

    return make


def _package() -> ModuleType:
    try:
        package = importlib.import_module("reasoning_gym")
        importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise ConfigError(
            "tasks called reasoning-gym:DATASET need the package reasoning-gym", hint="pip install 'ramet[tasks]'"
        ) from error
    return package


def _distinct(
    make: Callable[[int, int], Any], stream: str, count: int, seen: set[str], name: str
) -> tuple[list[_Entry], Any]:
    """Return `count` entries of a stream with questions that are new to `seen`, which learns them; and the dataset."""
    seed = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=4).digest()) >> 1
    tries = max(1, TRIES * count)
    entries: list[_Entry] = []
    with RandomStates(seed).lent():  # a few datasets draw from the global ones
        dataset = make(seed, tries)
        for number in range(tries):
            if len(entries) == count:
                break
            entry = dataset[number]
            if entry["question"] not in seen:
                seen.add(entry["question"])
                entries.append(entry)
    if len(entries) < count:
        raise ConfigError(
            f"{name}: {tries} draws gave {len(entries)} distinct problems ({stream}), {count} are wanted",
            hint="lower task.options.train_size or held_out_size, or widen the dataset's options",
        )
    return entries, dataset
