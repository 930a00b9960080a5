"""Rollouts as HTML: by prompt, before and after a training, by step, or as an evaluation played them; turn by turn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramet.viewer.summary import DECODINGS, Group, Record, groups, number, prompt_text
from ramet.viewer.text import html_text

MOST_GROUPS = 200


def held_out(rollouts: Sequence[Record]) -> str:
    """Return the held-out rollouts of before and after, side by side; nothing where there are none."""
    found = groups(rollouts)
    if not found:
        return ""
    choices = {"up": "better after", "down": "worse after", "same": "as before", "unscored": "unscored"}
    shown = "".join(map(_held_out_group, found[:MOST_GROUPS]))
    return f"<h2>Held-out prompts, before and after</h2>{_filter(choices)}{shown}{_left_out(len(found))}"


def evaluated(rollouts: Sequence[Record]) -> str:
    """Return the rollouts of an evaluation by prompt, the samples of one side by side; nothing where there are none."""
    found: dict[str, list[Record]] = {}
    for record in rollouts:
        if record.get("when") == "eval":
            found.setdefault(str(record.get("group")), []).append(record)
    if not found:
        return ""
    mean = _mean_score([record for records in found.values() for record in records])
    shown = "".join(_evaluated_group(records, mean) for records in list(found.values())[:MOST_GROUPS])
    choices = {"low": "below the mean", "unscored": "unscored"}
    return f"<h2>Rollouts</h2>{_filter(choices)}{shown}{_left_out(len(found))}"


def training(rollouts: Sequence[Record]) -> str:
    """Return the training rollouts by step and group, newest last."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in rollouts:
        if record.get("when") == "train":
            found.setdefault((str(record.get("step")), str(record.get("group"))), []).append(record)
    if not found:
        return ""
    shown = []
    for (step, _), records in list(found.items())[-MOST_GROUPS:]:
        prompt = prompt_text(records[0].get("prompt"))
        label = f'<span class="scores">step {html_text(step)}, mean {number(_mean_score(records))}</span>'
        columns = "".join(_rollout(record, f"member {record.get('member')}") for record in records)
        shown.append(details(prompt, f'<pre>{html_text(prompt)}</pre><div class="pair">{columns}</div>', label))
    return f"<h2>Training rollouts</h2>{''.join(shown)}{_left_out(len(found))}"


def details(title: str, inside: str, label: str = "", attributes: str = "") -> str:
    """Return a closed element that opens on a click; `title` is text, the rest is HTML."""
    short = " ".join(title.split())
    short = short if len(short) <= 120 else f"{short[:119]}\u2026"
    return (
        f'<details class="card"{attributes}><summary>{label}{html_text(short)}</summary>'
        f'<div class="inside">{inside}</div></details>'
    )


def _filter(choices: Mapping[str, str]) -> str:
    options = "".join(
        f'<option value="{value}">{text}</option>' for value, text in {"all": "all prompts", **choices}.items()
    )
    return (
        f'<div class="filter"><select id="change" aria-label="which prompts">{options}</select>'
        '<input id="words" type="search" placeholder="containing these words" aria-label="containing"></div>'
    )


def _held_out_group(group: Group) -> str:
    before, after = _mean_score(group.before), _mean_score(group.after)
    change = "same"
    if before is not None and after is not None and before != after:
        change = "up" if after > before else "down"
    unscored = any(record.get("score") is None for record in (*group.before, *group.after))
    label = f'<span class="scores {change}">{number(before)} &rarr; {number(after)}</span>'
    columns = "".join(
        f"<div>{''.join(_rollout(record, when) for record in records)}</div>"
        for when, records in (("before", group.before), ("after", group.after))
    )
    inside = f'<pre>{html_text(group.prompt)}</pre><div class="pair">{columns}</div>'
    marks = f"{change} unscored" if unscored else change
    return details(group.prompt, inside, label, f' data-change="{marks}"')


def _evaluated_group(records: Sequence[Record], mean: float | None) -> str:
    own, prompt = _mean_score(records), prompt_text(records[0].get("prompt"))
    marks = ["low"] if own is not None and mean is not None and own < mean else []
    marks += ["unscored"] if any(record.get("score") is None for record in records) else []
    kept = sorted(records, key=lambda record: str(record.get("member")).zfill(9))  # they are written as they end
    columns = "".join(_rollout(record, f"sample {record.get('member')}") for record in kept)
    inside = f'<pre>{html_text(prompt)}</pre><div class="pair">{columns}</div>'
    label = f'<span class="scores">{number(own)}</span>'
    return details(prompt, inside, label, f' data-change="{" ".join(marks)}"')


def _rollout(record: Record, title: str) -> str:
    # How an evaluation sampled is among its settings: it may have been at any temperature.
    decoding = None if record.get("when") == "eval" else record.get("decoding")
    facts = [title, DECODINGS.get(str(decoding), str(decoding)) if decoding else "", str(record.get("stop") or "")]
    if record.get("outcome") not in (None, "scored"):
        facts.append(f"{record.get('outcome')}: {record.get('reason') or 'no reason given'}")
    rewards = record.get("rewards")
    if isinstance(rewards, Mapping) and len(rewards) > 1:
        facts += [f"{name} {number(value)}" for name, value in rewards.items()]
    line = html_text(", ".join(fact for fact in facts if fact))
    said = "".join(_turns(record)) or f"<pre>{html_text(prompt_text(record.get('completion', '')))}</pre>"
    score = html_text(number(record.get("score")))
    return f'<div class="rollout"><h4><b>{score}</b> {line}</h4>{said}</div>'


def _turns(record: Record) -> Iterator[str]:
    """Yield what was said behind the prompt, message by message, each below who said it; nothing of a single turn."""
    prompt, messages = record.get("prompt"), record.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return
    for message in messages[len(prompt) if isinstance(prompt, list) else 1 :]:
        if not isinstance(message, Mapping):
            continue
        name = message.get("name")
        who = f"{message.get('role')}{f' ({name})' if name else ''}"
        content = message.get("content")
        calls = message.get("tool_calls")
        said = [prompt_text(content)] if content else []
        said += map(_call, calls if isinstance(calls, list) else ())
        text = "\n".join(said) or "(empty)"
        yield f'<div class="who">{html_text(who)}</div><pre>{html_text(text)}</pre>'


def _call(call: Any) -> str:
    """Return a call of a tool as it would be written in a program."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, Mapping):
        return f"calls {json.dumps(function, ensure_ascii=False, default=str)}"
    given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in arguments.items())
    return f"calls {function.get('name')}({given})"


def _left_out(total: int) -> str:
    if total <= MOST_GROUPS:
        return ""
    return f'<p class="soft">{MOST_GROUPS} of {total} prompts; all of them are in rollouts.jsonl.</p>'


def _mean_score(records: Sequence[Record]) -> float | None:
    scores = [score for record in records if (score := finite_number(record.get("score"))) is not None]
    return sum(scores) / len(scores) if scores else None


def finite_number(value: Any) -> float | None:
    """Return a number that is finite, None for anything else."""
    number_like = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if number_like and math.isfinite(value) else None
