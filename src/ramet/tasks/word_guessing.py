"""A word to be guessed over several turns, with a hint after each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ramet.errors import ConfigError
from ramet.tasks.options import one_of, whole
from ramet.tasks.problems import whole_numbers
from ramet.tasks.task import Reply, Task
from ramet.tasks.words import WORDS
from ramet.types import Episode, Message, Sample

PLACE, ELSEWHERE, ABSENT = "=+-"
NO_WORD = "?"


def word_guessing(
    *,
    seed: int = 0,
    letters: int | Sequence[int] = 4,
    guesses: int = 6,
    form: str = "text",
    train_size: int | None = None,
    held_out_size: int = 50,
) -> Task:
    """Make a task of hidden words, each to be guessed in at most `guesses` turns; the right word earns 1.0.

    After each wrong guess the environment says of each of its letters whether it stands in the right place ("="), is in
    the word elsewhere ("+") or is not, or not so often ("-"). What has another number of letters, or anything else in
    it, is answered by "?" and has cost a guess. The episode ends with the right guess or the last one; both are ends,
    and no truncation.

    In the form "text" the prompt is "4:" for a word of four letters, a guess the word alone, and the hint stands on a
    line of its own. In the form "chat" messages say the rules, the hint and how many guesses are left. Capitals and
    white space around a guess do not matter.

    `letters` are how many a word may have, some of 3, 4 and 5. The words are common English ones (`tasks.words`); the
    same ones are always held out, `seed` orders the others, of which the first `train_size` (None: all) are trained on.
    Each row has "prompt", "answer" and "difficulty", the number of letters. `chance` is the score of guessing different
    words blindly. Raises `ConfigError` for an option that makes no sense.

    >>> task = word_guessing()
    >>> len(task.train), len(task.held_out), task.held_out[0]
    (269, 50, {'prompt': '4:', 'answer': 'news', 'difficulty': 4})
    """
    lengths = whole_numbers("letters", list(letters) if isinstance(letters, tuple) else letters, low=3, high=5)
    whole("guesses", guesses, low=1)
    chat = one_of("form", form, ("text", "chat")) == "chat"
    words = [word for length in sorted(lengths) for word in WORDS[length]]
    random.Random("word_guessing: held out").shuffle(words)
    held_out, train = words[: whole("held_out_size", held_out_size, low=0)], words[held_out_size:]
    wanted = max(1, len(train)) if train_size is None else whole("train_size", train_size, low=1)
    if wanted > len(train):
        raise ConfigError(
            f"word_guessing: {held_out_size} held-out and {wanted} training words are more than the {len(words)} there "
            f"are of {' or '.join(map(str, lengths))} letters",
            hint="lower task.options.held_out_size or train_size, or allow more lengths",
        )
    random.Random(f"word_guessing: train {seed}").shuffle(train)

    def rows(chosen: list[str]) -> list[dict[str, Any]]:
        return [{"prompt": _prompt(w, guesses, chat), "answer": w, "difficulty": len(w)} for w in chosen]

    return Task(
        "word_guessing",
        rows(train[:wanted]),
        rows(held_out),
        score,
        answer=lambda row: str(row["answer"]),
        chance=_chance(held_out, words, guesses),
        reply=_reply(guesses, chat),
        max_turns=guesses,
        player=lambda episode: play(episode, words, guesses),
    )


def hint(guess: str, word: str) -> str:
    """Return a mark for each letter of `guess`: "=" right, "+" elsewhere in `word`, "-" not, or not so often.

    Of a letter that is guessed more often than the word has it, those in the right place are marked first, and then
    from left to right.

    >>> hint("stops", "spots"), hint("eerie", "green")
    ('=+=+=', '+++--')
    """
    left = Counter(letter for letter, own in zip(word, guess, strict=True) if letter != own)
    marks = ""
    for letter, own in zip(guess, word, strict=True):
        elsewhere = letter != own and left[letter] > 0
        left[letter] -= elsewhere
        marks += PLACE if letter == own else ELSEWHERE if elsewhere else ABSENT
    return marks


def score(sample: Sample) -> float:
    """Return 1.0 if the last guess is the row's "answer", else 0.0."""
    return float(_guess(sample.completion) == sample.row["answer"])


def play(episode: Episode, words: Sequence[str], guesses: int) -> str:
    """Return the first of `words` that agrees with all hints so far; the last guess is the word itself.

    So the reference always wins, and on the way does what a player can learn.
    """
    word = str(episode.row["answer"])
    if episode.turns >= guesses - 1:
        return word
    said = [_guess(str(message["content"])) for message in episode.messages if message["role"] == "assistant"]
    known = [(guess, hint(guess, word)) for guess in said if _fits(guess, word)]
    fitting = (other for other in words if len(other) == len(word))
    return next(other for other in fitting if all(hint(guess, other) == marks for guess, marks in known))


def _guess(text: str) -> str:
    return text.strip().lower()


def _fits(guess: str, word: str) -> bool:
    return len(guess) == len(word) and guess.isascii() and guess.isalpha()


def _prompt(word: str, guesses: int, chat: bool) -> str | list[Message]:
    if not chat:
        return f"{len(word)}:"
    rules = (
        f"Guess my word of {len(word)} letters; you have {guesses} guesses. Answer with one word and nothing else. I "
        f'mark each letter: "{PLACE}" is in the right place, "{ELSEWHERE}" is in the word elsewhere, "{ABSENT}" is not '
        "in the word."
    )
    return [{"role": "user", "content": rules}]


def _reply(guesses: int, chat: bool) -> Reply:
    def reply(episode: Episode) -> str | None:
        word, guess = str(episode.row["answer"]), _guess(episode.text)
        if guess == word or episode.turns >= guesses:
            return None
        fits = _fits(guess, word)
        marks = hint(guess, word) if fits else NO_WORD
        if not chat:
            return f"\n{marks}\n"
        left = guesses - episode.turns
        said = f"{guess}: {marks}" if fits else f"That is no word of {len(word)} letters."
        return f"{said}\nYou have {left} {'guess' if left == 1 else 'guesses'} left."

    return reply


def _chance(held_out: Sequence[str], words: Sequence[str], guesses: int) -> float | None:
    if not held_out:
        return None
    sizes: Mapping[int, int] = Counter(map(len, words))
    return sum(min(1.0, guesses / sizes[len(word)]) for word in held_out) / len(held_out)
