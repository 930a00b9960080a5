"""Wrong answers to a row: those that no task takes for right, and those that may be right by chance, kind by kind."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ramet.checking.stand_in import Writer
from ramet.tasks.task import Row
from ramet.types import Episode

RUBBISH = "?? <|x|> \\boxed{ }} [(1/0 \u0000 \U0001f600 None"
LONG = ("9" * 5_000, "(" * 2_000, "word " * 1_000)
LONG_TURNS = 2
"""In how many turns of an episode a very long text is said."""
REFUSAL = "I am sorry, but I can not help with that."
NUMBERS = " ".join(map(str, range(101)))
OTHERS = 3
"""How many other rows lend their answers."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong answer of a `kind`: turns, of which the last is said again where there are more.

    `surely` wrong answers never earn the full reward; of another kind, half may be right by chance.
    """

    kind: str
    turns: tuple[str, ...]
    surely: bool = False

    @property
    def write(self) -> Writer:
        """Return the function that writes it."""
        return self._turn

    def _turn(self, episode: Episode) -> str:
        text = self.turns[min(episode.turns, len(self.turns) - 1)]
        return text if episode.turns < LONG_TURNS else text[:100]


def wrong_answers(
    row: Row, right: Sequence[str], others: Sequence[Sequence[str]], *, by_player: bool, stateless: bool
) -> Iterator[Wrong]:
    """Yield wrong answers to a row.

    `right` are the turns that its reference wrote (none without one) and `others` those of other rows. Of a player, a
    turn may say the answer in many words, so that no way to spoil it is sure (`by_player`). Where an episode has a
    state of its own, what was done in earlier turns may be all that counts; where it has none (`stateless`), they are
    tried without the last.

    >>> found = wrong_answers({"prompt": "2+2="}, ["4"], [["7"]], by_player=False, stateless=True)
    >>> for wrong in list(found)[-4:-2]:
    ...     print(wrong.kind, wrong.turns)
    the reference with its last letter or digit spoilt ('#',)
    the reference with its last letter or digit changed ('5',)
    """
    prompt = row["prompt"]
    asked = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
    last = right[-1].strip() if right else None
    for text in ("", " \n", RUBBISH, *LONG):
        yield Wrong("nothing, rubbish or very long text", (text,), surely=True)
    for kind, text in (("a refusal", REFUSAL), ("the prompt", asked), ("all numbers from 0 to 100", NUMBERS)):
        if text.strip() != last:
            yield Wrong(kind, (text,))
    if not right:
        return
    unlike = [other for other in others if other and other[-1].strip() not in ("", last)][:OTHERS]
    spoilt, changed, half = tuple(map(_spoilt, right)), _changed(right[-1]), right[-1][: len(right[-1]) // 2]
    yield Wrong("the reference with its last letter or digit spoilt", spoilt, surely=not by_player)
    if changed.strip() != last:
        yield Wrong("the reference with its last letter or digit changed", (changed,))
    if half.strip() not in ("", last):
        yield Wrong("the first half of the reference", (half,))
    wrong = [other[-1] for other in unlike] or [text for text in [changed] if text.strip() != last]
    if wrong:
        yield Wrong("the right answer among wrong ones", ("\n".join((wrong[0], right[-1], wrong[-1])),))
    for other in unlike:
        yield Wrong("the answer of another row, at once", (other[-1],))
        if len(other) > 1:
            yield Wrong("the turns of another row", tuple(other))
    if len(right) > 1 and stateless:
        ends = {"nothing": "", "a refusal": REFUSAL, "a spoilt answer": spoilt[-1], "another answer": changed}
        for name, end in {**ends, "the turn before, again,": right[-2]}.items():
            if end.strip() != last:
                yield Wrong(f"the reference with {name} in place of its last turn", (*right[:-1], end))


@dataclass(slots=True)
class Tally:
    """How many wrong answers of each kind were tried, and how many of them earned the full reward."""

    tried: dict[str, int] = field(default_factory=dict)
    lucky: dict[str, list[str]] = field(default_factory=dict)
    surely: str = ""

    def count(self, wrong: Wrong, earned: str) -> None:
        """Count one; `earned` says what earned the full reward, "" for nothing."""
        self.tried[wrong.kind] = self.tried.get(wrong.kind, 0) + 1
        if earned and wrong.surely:
            self.surely = self.surely or f"{wrong.kind}: {earned}"
        elif earned:
            self.lucky.setdefault(wrong.kind, []).append(earned)

    def verdict(self, full: float) -> tuple[bool, str]:
        """Return whether that is sound, and why."""
        if self.surely:
            return False, self.surely
        for kind, earned in self.lucky.items():
            if 2 * len(earned) > self.tried[kind]:
                by_chance = f"{len(earned)} of {self.tried[kind]} earn {full:g}, and half may by chance"
                return False, f"{kind}: {by_chance}: {earned[0]}"
        lucky = sum(map(len, self.lucky.values()))
        right = f"; {lucky} earn it by chance, as half of a kind may" if lucky else ""
        return True, f"{sum(self.tried.values()) - lucky} wrong answers do not earn {full:g}{right}"


def _spoilt(text: str) -> str:
    """Return a text with its last letter and its last digit replaced by "#", or with one behind it without any.

    >>> _spoilt("42 km."), _spoilt("=")
    ('4# k#.', '=#')
    """
    places = {_last(text, str.isalpha), _last(text, str.isdigit)} - {None}
    return "".join("#" if at in places else sign for at, sign in enumerate(text)) if places else text + "#"


def _changed(text: str) -> str:
    """Return a text with the next digit in the place of its last one, or the next letter where it has no digit.

    >>> _changed("19 km"), _changed("jazz"), _changed("=")
    ('10 km', 'jaza', '=')
    """
    for signs in (string.digits, string.ascii_letters):
        place = _last(text, signs.__contains__)
        if place is not None:
            return f"{text[:place]}{_next(text[place])}{text[place + 1 :]}"
    return text


def _next(sign: str) -> str:
    signs = next(s for s in (string.digits, string.ascii_lowercase, string.ascii_uppercase) if sign in s)
    return signs[(signs.index(sign) + 1) % len(signs)]


def _last(text: str, fits: Callable[[str], bool]) -> int | None:
    return next((at for at in reversed(range(len(text))) if fits(text[at])), None)
