"""The numbers game: make a target from a few numbers."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ramet.errors import ConfigError
from ramet.tasks.expressions import NoExpression, work_out
from ramet.tasks.options import flag, one_of, whole
from ramet.tasks.problems import drawn, whole_numbers
from ramet.tasks.task import Task
from ramet.types import Sample

TRIES = 10_000  # draws for one problem
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_WORDS = {
    False: "Each number may be used at most once.",
    True: "Each number must be used exactly once.",
}


def countdown(
    *,
    seed: int = 0,
    numbers: int | Sequence[int] = (3, 4),
    largest: int = 99,
    largest_target: int = 999,
    use_all: bool = False,
    form: str = "text",
    train_size: int = 2000,
    held_out_size: int = 200,
) -> Task:
    """Make a task of problems like "3 7 25 50: 82=" with answers like "7+25+50": an expression that makes the target.

    The expression may use `+ - * /`, brackets, and each of the numbers at most once; with `use_all`, exactly once. It
    is parsed and worked out in exact fractions, never evaluated; one that makes the target earns 1.0, anything else
    0.0. `numbers` are how many a problem may have, 2 to 6; they are from 1 to `largest`, the target from 1 to
    `largest_target`. Every problem has a solution in whole numbers, which is the reference answer.

    The form "text" is that one line, answered by the expression alone. The form "chat" says the rules in a message of
    the user's, and reads what stands between the last `<answer>` and `</answer>`.

    Held-out problems are always the same ones; `seed` chooses the training problems. Each row has "prompt", "answer",
    "numbers", "target" and "difficulty", how many numbers there are. Raises `ConfigError` for an option that makes no
    sense.

    >>> task = countdown(train_size=2, held_out_size=1)
    >>> task.held_out[0]["prompt"], task.answer(task.held_out[0])
    ('37 37 58: 132=', '58+37+37')
    """
    counts = whole_numbers("numbers", list(numbers) if isinstance(numbers, tuple) else numbers, low=2, high=6)
    whole("largest", largest, low=1)
    whole("largest_target", largest_target, low=1)
    chat = one_of("form", form, ("text", "chat")) == "chat"
    flag("use_all", use_all)

    def make(rng: random.Random) -> dict[str, Any]:
        return _problem(rng, rng.choice(counts), largest, largest_target, use_all=use_all, chat=chat)

    train, held_out = drawn("countdown", make, seed=seed, train_size=train_size, held_out_size=held_out_size)
    return Task("countdown", train, held_out, MakesTheTarget(use_all, chat), answer=lambda row: _written(row, chat))


@dataclass(frozen=True, slots=True)
class MakesTheTarget:
    """The reward: 1.0 for an expression over the row's "numbers" that is worth its "target", else 0.0.

    `use_all` wants each number exactly once, otherwise it is at most once; `tagged` reads what stands between the last
    `<answer>` and `</answer>` of a completion, otherwise all of it.

    >>> right = MakesTheTarget(use_all=False, tagged=False)
    >>> row = {"numbers": [3, 7, 25, 50], "target": 82}
    >>> right.of("(3 + 7) * 8 + 2", row), right.of("25 + 50 + 7", row)
    (0.0, 1.0)
    """

    use_all: bool
    tagged: bool

    def __call__(self, sample: Sample) -> float:
        """Return the score of what the model wrote last."""
        return self.of(sample.completion, sample.row)

    def of(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score of a completion for a row."""
        if self.tagged:
            found = _TAGGED.findall(completion)
            completion = found[-1] if found else ""
        try:
            value, used = work_out(completion)
        except NoExpression:
            return 0.0
        missing = Counter(row["numbers"])
        missing.subtract(used)
        allowed = all(left == 0 if self.use_all else left >= 0 for left in missing.values())
        return float(allowed and value == Fraction(row["target"]))


def _problem(
    rng: random.Random, count: int, largest: int, largest_target: int, *, use_all: bool, chat: bool
) -> dict[str, Any]:
    """Draw numbers, and an expression over them whose value lies in the range."""
    for _ in range(TRIES):
        numbers = [rng.randint(1, largest) for _ in range(count)]
        used = count if use_all else rng.randint(2, count)
        value, expression = _expression(rng, rng.sample(numbers, used))
        if value <= largest_target:
            break
    else:
        raise ConfigError(
            f"countdown: {TRIES} draws made no target up to {largest_target} from {count} numbers up to {largest}",
            hint="raise task.options.largest_target, or lower largest or numbers",
        )
    numbers.sort()
    prompt: Any = f"{' '.join(map(str, numbers))}: {value}="
    if chat:
        said = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        prompt = [
            {
                "role": "user",
                "content": f"Make {value} from the numbers {said} with + - * / and brackets. {_WORDS[use_all]} "
                "Write the expression alone between <answer> and </answer>.",
            }
        ]
    return {"prompt": prompt, "answer": expression, "numbers": numbers, "target": value, "difficulty": count}


def _expression(rng: random.Random, numbers: list[int]) -> tuple[int, str]:
    """Join numbers by random operations until one is left; each value on the way is a whole number above zero."""
    parts = [(number, str(number), True) for number in numbers]  # value, text, and whether the text needs no brackets
    while len(parts) > 1:
        (a, left, alone), (b, right, single) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        signs = "+*" if a == b else "+-*" if a % b or b == 1 else "+-*/"
        sign = rng.choice(signs)
        if sign == "-" and a < b:
            (a, left, alone), (b, right, single) = (b, right, single), (a, left, alone)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
        left = left if alone or sign == "+" else f"({left})"
        right = right if single or sign == "+" else f"({right})"
        parts.append((value, f"{left}{sign}{right}", False))
    return parts[0][0], parts[0][1]


def _written(row: Mapping[str, Any], chat: bool) -> str:
    return f"<answer>{row['answer']}</answer>" if chat else str(row["answer"])
