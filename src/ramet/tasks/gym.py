"""The procedural datasets of reasoning-gym as tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import io
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ramet.errors import ConfigError, nearest
from ramet.tasks.options import flag, one_of, options_of, text, whole
from ramet.tasks.random_states import RandomStates
from ramet.tasks.task import Task
from ramet.types import Sample

TEMPLATE = "Q: {question}\nA: {answer}"
FULL = (
    1.0 - 1e-6
)  # of a right answer: every dataset gives its own answers 1, some as a sum; less is for one that is close
TRIES = 8  # entries looked at for each distinct problem wanted
EXAMPLES = 2
ROWS = (2000, 200)  # training and held-out rows by default
FEWER: Mapping[str, tuple[int, int]] = {  # of the datasets that take from 3 milliseconds to a second for a problem
    **dict.fromkeys(
        (
            *("advanced_geometry", "codeio", "countdown", "game_of_life", "game_of_life_halting", "jugs", "rearc"),
            *("polynomial_equations", "polynomial_multiplication", "quantum_lock", "rubiks_cube", "sudoku"),
            *("simple_integration", "word_ladder"),
        ),
        (200, 50),
    ),
    **dict.fromkeys(("intermediate_integration", "puzzle24", "sokoban", "zebra_puzzles"), (60, 20)),
    **dict.fromkeys(("futoshiki", "knight_swap"), (20, 10)),
}
HASHED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
SCARCE = 2  # draws for each distinct held-out problem beyond which problems are few
KEPT = 5  # where they are few, one in so many is held out
PATIENCE, AGAIN = 2.0, 10.0  # seconds until a line says how far the rows are, and from one such line to the next
COMPOSITE = "composite"
MIX = 'set task.options.datasets = ["chain_sum", "gcd"]'
LOG = logging.getLogger(__name__)


def gym(
    dataset: str,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    train_size: int | None = None,
    held_out_size: int | None = None,
    examples: int | None = None,
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

    By default there are two examples where the dataset has reference answers, and 2,000 training and 200 held-out rows:
    200 and 50, 60 and 20 or 20 and 10 of the datasets in `FEWER`, which are slow. All are made at once; after two
    seconds a line of the log says how far that is. Where problems are so few that more than half of the draws for the
    default held-out rows repeat one, a fifth of those found is held out; and the default training rows are as many as
    eight draws for each give, which a line of the log says.

    Rows of the datasets in `HASHED` follow the hashes of strings: another process has the same ones where the
    environment sets PYTHONHASHSEED, and a line of the log says if it does not.

    The reward is the dataset's `score_answer` for the stripped completion, cut to as many lines as the reference answer
    has. `exact` makes it 1.0 or 0.0, for datasets give partial credit even to a wrong answer. `chance` is the share of
    the most frequent reference answer among the held-out ones. Raises `ConfigError` without the package, for an unknown
    dataset or option, and where there are fewer distinct problems than a size asks for.
    """
    name = f"reasoning-gym:{dataset}"
    for key, size, low in (
        ("train_size", train_size, 1),
        ("held_out_size", held_out_size, 0),
        ("examples", examples, 0),
    ):
        if size is not None:
            whole(key, size, low=low)
    write, lead = _form(one_of("form", form, ("text", "chat")), template, system)
    source = _Source(name, _maker(dataset, dict(options or {})))
    most_train, most_held_out = FEWER.get(dataset, ROWS)
    if dataset in HASHED and os.environ.get("PYTHONHASHSEED", "") in ("", "random"):
        LOG.warning("%s: its rows follow the hashes of strings: set PYTHONHASHSEED=0 for the same ones again", name)
    shown = _shown(source, examples)
    test = _held_out(source, held_out_size, most_held_out)
    train, scorer = _trained(source, f"train {seed}", train_size, most_train)

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
    _check_options(package, dataset, options, options_of(gym))
    if dataset == COMPOSITE:
        options = {**options, "datasets": _mixed(package, options.get("datasets"))}

    def make(seed: int, size: int) -> Any:
        try:
            return package.create_dataset(dataset, seed=seed, size=size, **options)
        except Exception as error:  # the package checks with assertions, and what they miss fails in any way
            raise ConfigError(
                f"reasoning-gym:{dataset} can not be made with {options}: {type(error).__name__}: {error}"
            ) from error

    return make


def _check_options(package: ModuleType, dataset: str, options: Mapping[str, Any], ours: list[str]) -> None:
    """Raise `ConfigError` for a dataset that there is not, and for an option that it has not."""
    known = package.factory.DATASETS
    if not isinstance(dataset, str) or dataset not in known:
        raise ConfigError(f'reasoning-gym has no dataset "{dataset}"', hint=nearest(str(dataset), known))
    fields = {each.name for each in dataclasses.fields(known[dataset][1])} - {"seed", "size"}
    for name in options:
        if name not in fields:
            hint = nearest(name, [*ours, *fields])
            raise ConfigError(f'the task reasoning-gym:{dataset} has no option "{name}"', hint=hint)


def _mixed(package: ModuleType, parts: Any) -> list[Any]:
    """Return what the dataset "composite" mixes, from names, or mappings of a "name", a "weight" and a "config"."""
    if not isinstance(parts, list) or not parts:
        found = "nothing" if parts is None or parts == [] else repr(parts)
        raise ConfigError(
            f"reasoning-gym:{COMPOSITE} mixes at least one dataset: task.options.datasets has {found}", hint=MIX
        )
    made = []
    for number, given in enumerate(parts):
        part = {"name": given} if isinstance(given, str) else given
        if not isinstance(part, Mapping) or not {"name"} <= set(part) <= {"name", "weight", "config"}:
            raise ConfigError(f"task.options.datasets[{number}]: expected a name, found {given!r}", hint=MIX)
        name, weight, config = part["name"], part.get("weight", 1.0), part.get("config", {})
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ConfigError(f"task.options.datasets[{number}]: expected a weight above 0, found {weight!r}")
        if not isinstance(config, Mapping):
            raise ConfigError(f"task.options.datasets[{number}]: expected a mapping as its config, found {config!r}")
        if name == COMPOSITE:
            raise ConfigError(f"task.options.datasets[{number}] is {COMPOSITE} itself", hint=MIX)
        _check_options(package, name, config, [])
        made.append(package.composite.DatasetSpec(name, float(weight), dict(config)))
    return made


def _package() -> ModuleType:
    try:
        package = importlib.import_module("reasoning_gym")
        importlib.import_module("reasoning_gym.factory")
        importlib.import_module("reasoning_gym.composite")
    except ImportError as error:
        raise ConfigError(
            "tasks called reasoning-gym:DATASET need the package reasoning-gym", hint="pip install 'ramet[tasks]'"
        ) from error
    return package


@dataclass(slots=True)
class _Source:
    """Where entries come from: questions that were `seen` are passed over, and what lasts is told to the log."""

    name: str
    make: Callable[[int, int], Any]
    seen: set[str] = field(default_factory=set)
    begun: float = field(default_factory=lambda: time.monotonic())
    wait: float = field(default_factory=lambda: PATIENCE)

    def draw(self, stream: str, count: int) -> _Drawn:
        """Return up to `count` entries of a stream with new questions: fewer where the draws give no more."""
        seed = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=4).digest()) >> 1
        tries = max(1, TRIES * count)
        entries: list[_Entry] = []
        number, failed = 0, ""
        # A few datasets draw from the global random states, and a few print dots and remarks.
        with RandomStates(seed).lent(), contextlib.redirect_stdout(io.StringIO()):
            dataset = self.make(seed, tries)
            while number < tries and len(entries) < count:
                try:
                    entry = dataset[number]
                except Exception as error:  # some give up on a problem after many tries: the next one may do
                    failed = f", the last that failed with {type(error).__name__}: {error},"
                else:
                    if entry["question"] not in self.seen:
                        self.seen.add(entry["question"])
                        entries.append(entry)
                number += 1
                self._tell(f"{len(entries)} of {count} distinct problems ({stream}) in {number} draws")
        return _Drawn(entries, f"{number} draws{failed}", number > SCARCE * count, dataset)

    def exactly(self, stream: str, count: int) -> _Drawn:
        """Return `count` entries, or raise `ConfigError`."""
        drawn = self.draw(stream, count)
        if len(drawn.entries) < count:
            raise ConfigError(
                f"{self.name}: {drawn.draws} gave {len(drawn.entries)} distinct problems ({stream}), "
                f"{count} are wanted",
                hint="lower task.options.train_size or held_out_size, or widen the dataset's options",
            )
        return drawn

    def _tell(self, found: str) -> None:
        passed = time.monotonic() - self.begun
        if passed >= self.wait:
            self.wait = passed + AGAIN
            LOG.warning("%s: making its rows takes long: %s, %.0f s so far", self.name, found, passed)


@dataclass(frozen=True, slots=True)
class _Drawn:
    entries: list[_Entry]
    draws: str
    scarce: bool
    dataset: Any


def _shown(source: _Source, count: int | None) -> list[_Entry]:
    """Return the worked examples: by default none where there are no reference answers."""
    shown = (source.draw("examples", EXAMPLES) if count is None else source.exactly("examples", count)).entries
    if all(isinstance(entry["answer"], str) for entry in shown):
        return shown
    if count is not None:
        raise ConfigError(
            f"{source.name} has no reference answers to show as examples", hint="set task.options.examples = 0"
        )
    source.seen.clear()
    return []


def _held_out(source: _Source, count: int | None, most: int) -> list[_Entry]:
    """Return the held-out entries: by default `most`, or a fifth of what is found where problems are few.

    This looks at no training problem, so that they are the same for all seeds and sizes.
    """
    if count is not None:
        return source.exactly("held out", count).entries
    drawn = source.draw("held out", most)
    if not drawn.scarce:
        return drawn.entries
    kept = len(drawn.entries) // KEPT
    source.seen.difference_update(entry["question"] for entry in drawn.entries[kept:])
    return drawn.entries[:kept]


def _trained(source: _Source, stream: str, count: int | None, most: int) -> tuple[list[_Entry], Any]:
    """Return the training entries, by default `most` or as many as there are, and the dataset that scores."""
    drawn = source.exactly(stream, count) if count is not None else source.draw(stream, most)
    if not drawn.entries:
        raise ConfigError(
            f"{source.name}: {drawn.draws} gave no distinct problem to train on",
            hint="lower task.options.examples or held_out_size, or widen the dataset's options",
        )
    if count is None and len(drawn.entries) < most:
        LOG.warning(
            "%s: %s gave %d distinct problems to train on, fewer than the default of %d",
            source.name,
            drawn.draws,
            len(drawn.entries),
            most,
        )
    return drawn.entries, drawn.dataset
