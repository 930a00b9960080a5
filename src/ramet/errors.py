"""Every error that ramet raises on purpose.

The tree::

    RametError
    ├── ConfigError        (ValueError)    a setting is unknown, of the wrong type, or contradicts another
    ├── DataError          (ValueError)    prompts or rows are missing, empty or malformed
    │   └── PromptTooLong                  a prompt does not fit and no cut was declared
    ├── ModelError         (ValueError)    a model or tokenizer can not do what is asked of it
    ├── ForestError        (ValueError)    tokens, log-probs and rollouts do not fit together
    ├── RewardError        (ValueError)    a reward is not finite, of the wrong type or of the wrong count
    ├── TooManyFailures    (RuntimeError)  more rollouts failed than the run allows
    ├── CheckpointError    (RuntimeError)  a checkpoint is missing, torn or of another run
    ├── ServerError        (RuntimeError)  a server gave no answer that can be used
    │   └── ServerGone                     a server stayed away for longer than it is waited for
    └── RunExists          (RuntimeError)  the folder of a new run is already there

Each message says what was expected, what was found, where, and what to do. `RametError.hint` holds the last part on its
own; `str(error)` shows it on a line of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RametError(Exception):
    """The root of the tree: `except RametError` catches what ramet raises on purpose, and nothing else.

    >>> print(RametError("no prompts in train.jsonl", hint="add at least one line"))
    no prompts in train.jsonl
      hint: add at least one line
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class ConfigError(RametError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class DataError(RametError, ValueError):
    """Prompts or rows are missing, empty or malformed."""


class PromptTooLong(DataError):
    """A prompt does not fit and no cut was declared."""


class ModelError(RametError, ValueError):
    """A model or tokenizer can not do what is asked of it."""


class ForestError(RametError, ValueError):
    """Tokens, log-probs and rollouts do not fit together."""


class RewardError(RametError, ValueError):
    """A reward is not finite, of the wrong type or of the wrong count."""


class TooManyFailures(RametError, RuntimeError):
    """More rollouts failed than the run allows."""


class CheckpointError(RametError, RuntimeError):
    """A checkpoint is missing, torn or of another run."""


class ServerError(RametError, RuntimeError):
    """A server gave no answer that can be used: it is down, too slow, refuses, or does not keep to the protocol."""


class ServerGone(ServerError):
    """A server stayed away for longer than it is waited for: this ends a run, and not a rollout."""


class RunExists(RametError, RuntimeError):
    """The folder of a new run is already there."""


def half_character(text: str) -> str:
    r"""Say where a text holds half of a character, of which no tokenizer and no file knows anything; "" where none.

    JSON may hold one, as an escape; it comes of text that was cut between the halves.

    >>> half_character("2+2="), half_character("2\ud800=")
    ('', "the lone surrogate '\\ud800' at character 1")
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the lone surrogate {text[error.start]!r} at character {error.start}"
    return ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say, for a hint, which known name was probably meant, and which ones there are.

    >>> nearest("digit", ["digits", "operations"])
    'did you mean "digits"? known: digits, operations'
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return (f'did you mean "{near[0]}"? ' if near else "") + f"known: {', '.join(names) or 'none'}"
