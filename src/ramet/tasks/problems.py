"""What the made-up tasks share: problems that are listed or drawn, split once and for all, and answered exactly."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ramet.errors import ConfigError
from ramet.tasks.options import whole
from ramet.tasks.task import Task
from ramet.types import Sample

POOL = 100_000
"""Where a task has more problems than this, so many are drawn: always the same ones."""


def numbered(total: int) -> Sequence[int]:
    """Return the numbers of the problems to list, rising: all of `total`, or a fixed draw of `POOL` of them."""
    return range(total) if total <= POOL else sorted(random.Random(0).sample(range(total), POOL))


def split(
    name: str,
    problems: Iterable[tuple[str, str]],
    *,
    seed: int,
    train_size: int | None,
    held_out_size: int,
) -> Task:
    """Make a task of (prompt, answer) pairs, each either trained on or held out, with exact matching as the reward.

    A keyed hash of the prompt decides: the `held_out_size` smallest are held out, whatever the seed and the other
    sizes. `seed` orders the others, of which the first `train_size` (None: all) are the training rows. `chance` is the
    larger of two scores on the held-out problems: a uniform guess among all answers that occur, and the one best
    constant answer; None without held-out problems. Raises `ConfigError` for sizes that the problems do not suffice
    for.
    """
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in dict(problems).items()]
    rows.sort(key=lambda row: _hash("held out", row["prompt"]))
    held_out, train = rows[: whole("held_out_size", held_out_size, low=0)], rows[held_out_size:]
    wanted = max(1, len(train)) if train_size is None else whole("train_size", train_size, low=1)
    if wanted > len(train):
        raise ConfigError(
            f"{name}: {held_out_size} held-out and {wanted} training problems are more than the {len(rows)} there are",
            hint="lower task.options.held_out_size or train_size, or allow more problems",
        )
    train.sort(key=lambda row: _hash(f"seed {seed}", row["prompt"]))
    chance = _chance([row["answer"] for row in rows], [row["answer"] for row in held_out])
    return Task(name, train[:wanted], held_out, exact_match, answer=reference_answer, chance=chance)


DRAWS = 20  # for each distinct problem that is wanted


def draw(
    name: str, make: Callable[[random.Random], dict[str, Any]], stream: str, count: int, seen: set[str]
) -> list[dict[str, Any]]:
    """Draw `count` problems, where there are too many to list, from a stream of random numbers of its own.

    A problem is a row, told from others by its "prompt", which is new to `seen` and added to it. The stream is a
    function of the two names alone: a larger `count` goes on where a smaller one ends. Raises `ConfigError` where
    `DRAWS` draws for each one, and a hundred more, are not enough.
    """
    rng = random.Random(f"{name}: {stream}")
    rows: list[dict[str, Any]] = []
    tries = DRAWS * count + 100
    for _ in range(tries):
        if len(rows) == count:
            break
        row = make(rng)
        key = repr(row["prompt"])
        if key not in seen:
            seen.add(key)
            rows.append(row)
    if len(rows) < count:
        raise ConfigError(
            f"{name}: {tries} draws gave {len(rows)} distinct problems ({stream}), {count} are wanted",
            hint="lower task.options.train_size or held_out_size, or allow more problems",
        )
    return rows


def drawn(
    name: str, make: Callable[[random.Random], dict[str, Any]], *, seed: int, train_size: int, held_out_size: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and held-out rows: the held-out ones are always the same, `seed` chooses what is trained on."""
    whole("train_size", train_size, low=1)
    whole("held_out_size", held_out_size, low=0)
    seen: set[str] = set()
    held_out = draw(name, make, "held out", held_out_size, seen)
    return draw(name, make, f"train {seed}", train_size, seen), held_out


def exact_match(sample: Sample) -> float:
    """Return 1.0 for a completion that, stripped of white space, is the row's "answer", else 0.0."""
    return float(sample.completion.strip() == sample.row["answer"])


def reference_answer(row: Mapping[str, Any]) -> str:
    """Return the row's "answer"."""
    return str(row["answer"])


def whole_numbers(name: str, value: Any, *, low: int, high: int) -> list[int]:
    """Return an option that is a whole number from `low` to `high`, or several different ones."""
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if not found or any(a == b for a, b in itertools.combinations(found, 2)):
        raise ConfigError(f"task.options.{name}: expected whole numbers, each at most once, found {value!r}")
    for number in found:
        if whole(name, number, low=low) > high:
            raise ConfigError(f"task.options.{name}: expected at most {high}, found {number}")
    return found


def _hash(key: str, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=key.encode(), digest_size=8).digest()


def _chance(answers: list[str], held_out: list[str]) -> float | None:
    if not held_out:
        return None
    return max(1 / len(set(answers)), max(Counter(held_out).values()) / len(held_out))
