"""What a run came to, as plain text: the scores before and after, and the rollouts of the same prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Record = Mapping[str, Any]
"""One line of `rollouts.jsonl`."""


class ScoreRow(NamedTuple):
    """One decoding's held-out scores, each with its 95% interval, ready to print."""

    decoding: str
    before: str
    after: str
    difference: str
    problems: str


class Group(NamedTuple):
    """The rollouts of one held-out prompt."""

    prompt: str
    before: list[Record]
    after: list[Record]


DECODINGS = {"greedy": "greedy", "sampled": "temperature 1"}


def score_rows(summary: Mapping[str, Any]) -> list[ScoreRow]:
    """Return one row for each decoding that was scored before or after; what was not is "-".

    >>> summary = {"held_out": {"before": {"greedy": {"score": 0.1, "low": 0.05, "high": 0.2, "problems": 100}}}}
    >>> score_rows(summary)
    [ScoreRow(decoding='greedy', before='0.100 (0.050 to 0.200)', after='-', difference='-', problems='100')]
    """
    held_out = _table(summary, "held_out")
    before, after, difference = _table(held_out, "before"), _table(held_out, "after"), _table(summary, "difference")
    rows = []
    for decoding in dict.fromkeys((*before, *after)):
        first, last, change = (_table(table, decoding) for table in (before, after, difference))
        problems = last.get("problems", first.get("problems"))
        rows.append(
            ScoreRow(
                DECODINGS.get(decoding, decoding),
                _interval(first, "score"),
                _interval(last, "score"),
                _interval(change, "value", signed=True),
                number(problems),
            )
        )
    return rows


def eval_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of an evaluation: all of it, and each level; nothing for the summary of a run.

    Each is its name, score, the chances to pass, problems, rollouts, and how many of those have no score.

    >>> eval_rows({"score": {"value": 2.5, "low": None, "high": None}, "pass_at_k": {}, "rollouts": 3, "problems": 2,
    ...            "abstained": 1, "failed": 0})
    [('all', '2.500', '', '2', '3', '1 abstained, 0 failed')]
    """
    if not isinstance(summary.get("score"), Mapping):
        return []
    by = _table(summary, "by")
    parts = {"all": summary}
    parts |= {f"{by.get('column')} {level}": _table(_table(by, "levels"), level) for level in _table(by, "levels")}
    return [
        (
            name,
            _interval(_table(part, "score"), "value"),
            ", ".join(f"pass@{k} {_interval(table, 'value')}" for k, table in _tables(part, "pass_at_k")),
            number(part.get("problems")),
            number(part.get("rollouts")),
            ", ".join(f"{number(part.get(why))} {why}" for why in ("abstained", "failed")),
        )
        for name, part in parts.items()
    ]


def groups(rollouts: Iterable[Record]) -> list[Group]:
    """Gather the rollouts from before and after the training by held-out prompt, in the order of the file.

    Two problems with equal text stay two, by their `group`. Of a run that was made longer, those after its last step
    count.
    """
    kept = list(rollouts)
    steps = [step for record in kept if record.get("when") == "after" and isinstance(step := record.get("step"), int)]
    found: dict[tuple[str, str], Group] = {}
    for record in kept:
        if record.get("when") == "after" and steps and record.get("step") != max(steps):
            continue
        when, prompt = record.get("when"), prompt_text(record.get("prompt"))
        if when in ("before", "after"):
            group = found.setdefault((str(record.get("group")), prompt), Group(prompt, [], []))
            (group.before if when == "before" else group.after).append(record)
    return list(found.values())


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text; messages get their role on a line above them.

    >>> print(prompt_text([{"role": "user", "content": "2+2="}]))
    [user]
    2+2=
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt):
        return "\n".join(f"[{message.get('role')}]\n{_plain(message.get('content'))}" for message in prompt)
    return _plain(prompt)


def number(value: Any, signed: bool = False) -> str:
    """Return a number for reading; "-" for none, and anything else as its text.

    >>> number(0.12345), number(100), number(None), number(float("nan")), number(0.5, signed=True)
    ('0.123', '100', '-', '-', '+0.500')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:{'+' if signed else ''}.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
    return _plain(value)


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table under `key`, empty where there is none."""
    inner = table.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _tables(table: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the tables in the table under `key`, each with its name."""
    return [(name, inner) for name, inner in _table(table, key).items() if isinstance(inner, Mapping)]


def _interval(scores: Mapping[str, Any], key: str, signed: bool = False) -> str:
    value, low, high = scores.get(key), scores.get("low"), scores.get("high")
    if low is None or high is None:
        return number(value, signed)
    return f"{number(value, signed)} ({number(low, signed)} to {number(high, signed)})"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
