"""One page about a run or an evaluation, in a file that needs no network: curves, scores, the rollouts to read.

All that a prompt, a model or a config says is shown as text. Should an escape be missed all the same, the page's
content security policy runs no script but its own two, which it names by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ramet import metrics
from ramet.errors import DataError
from ramet.viewer.rollouts import details, evaluated, finite_number, held_out, training
from ramet.viewer.summary import DECODINGS, Record, eval_rows, number, score_rows
from ramet.viewer.text import html_text

COLOURS = ("#3578d4", "#d4733a", "#3f9c6b", "#9a5bb8")
# What is drawn, by title: keys of a record of metrics.jsonl, and what each is called where there are several.
CURVES = {
    "Reward": {"reward": ""},
    "KL to the reference": {"kl": ""},
    "Entropy": {"entropy": ""},
    "Tokens per second": {"tokens_per_second": ""},
    "Tokens of an update": {
        "tokens_trained": "of the rows trained on",
        "tokens_computed": "computed, each prefix once",
    },
    "Sampler against trainer: KL": {"mismatch_kl": ""},
    "Sampler against trainer: largest log-ratio": {"mismatch_max": ""},
    "Gradient norm": {"grad_norm": ""},
    "Share of tokens clipped": {"clip_fraction": ""},
    "Share of rollouts without an end or a score": {"truncated": "truncated", "failed": "failed"},
}


@dataclass(frozen=True)
class Run:
    """What the folder of a run holds; what is missing is empty."""

    name: str
    config: str
    metrics: Sequence[Record]
    rollouts: Sequence[Record]
    summary: Record


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    Reads `config.toml`, `metrics.jsonl`, `rollouts.jsonl` and `summary.json`, of which any may be missing. Raises
    `DataError` where all are, or where one is malformed.
    """
    run = read_run(folder)
    # Written beside and moved into place: a reader sees the old page or the new one.
    partial = folder / "report.html.partial"
    partial.write_text(render(run), encoding="utf-8")
    os.replace(partial, folder / "report.html")
    return folder / "report.html"


def read_run(folder: Path) -> Run:
    """Read the folder of a run."""
    files = {name: folder / name for name in ("config.toml", "metrics.jsonl", "rollouts.jsonl", "summary.json")}
    if not any(path.is_file() for path in files.values()):
        hint = "give the folder that `ramet train` or `ramet eval` printed, e.g. runs/arithmetic"
        raise DataError(f"{folder} is no run: expected one of {', '.join(files)} in it", hint=hint)
    texts = {
        name: files[name].read_bytes().decode("utf-8", errors="backslashreplace") if files[name].is_file() else ""
        for name in ("config.toml", "summary.json")
    }
    lines = {
        name: metrics.read(files[name]) if files[name].is_file() else [] for name in ("metrics.jsonl", "rollouts.jsonl")
    }
    try:
        summary = json.loads(texts["summary.json"] or "{}")
    except json.JSONDecodeError as error:
        raise DataError(f"{files['summary.json']} is no valid JSON: {error}") from error
    if not isinstance(summary, dict):
        raise DataError(f"{files['summary.json']}: expected a JSON object, found {texts['summary.json'][:60]!r}")
    name = folder.resolve().name
    return Run(name, texts["config.toml"], lines["metrics.jsonl"], lines["rollouts.jsonl"], summary)


def render(run: Run) -> str:
    """Return the page as HTML."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    here = resources.files("ramet.viewer")
    script = here.joinpath("report.js").read_text(encoding="utf-8")
    plotly = get_plotlyjs()
    figures = _figures(run)
    charts = "".join(
        f'<div class="card chart"><h3>{html_text(title)}</h3><div id="curve-{index}"></div></div>'
        for index, title in enumerate(figures)
    )
    sections = [
        _head(run),
        _scores(run.summary),
        f'<h2>Curves</h2><div class="charts">{charts}</div>' if charts else "",
        held_out(run.rollouts),
        evaluated(run.rollouts),
        training(run.rollouts),
        details("Settings", f"<pre>{html_text(run.config)}</pre>") if run.config else "",
    ]
    return Template(here.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        title=html_text(f"{run.name} - ramet"),
        policy=_policy(plotly, script),
        body="\n".join(section for section in sections if section),
        curves=_embedded(list(figures.values())),
        plotly=plotly,
        script=script,
    )


def _policy(*scripts: str) -> str:
    """Return the content security policy under which these scripts run and nothing else does."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def _embedded(value: Any) -> str:
    """Return JSON that can stand inside a script element: no character of it can end the element."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _head(run: Run) -> str:
    try:
        config = tomllib.loads(run.config)
    except tomllib.TOMLDecodeError:
        config = {}
    sections = {key: config[key] for key in ("task", "model", "eval") if isinstance(config.get(key), dict)}
    named = [sections.get("task", {}).get("name")]
    named.append(sections.get("eval", {}).get("policy") or sections.get("model", {}).get("name"))
    facts = [str(name) for name in named if name]
    steps = [step for record in run.metrics if (step := finite_number(record.get("step"))) is not None]
    facts += [f"{max(steps)} steps"] if steps else []
    seconds = run.summary.get("seconds")
    facts += [f"{seconds / 60:.1f} minutes"] if isinstance(seconds, (int, float)) else []
    return f'<h1>{html_text(run.name)}</h1><div class="soft">{html_text(", ".join(facts))}</div>'


def _scores(summary: Record) -> str:
    """Return the table of a run's scores before and after, or of an evaluation's."""
    rows: Sequence[Sequence[str]] = score_rows(summary)
    names: tuple[str, ...] = ("", "before", "after", "difference", "problems")
    title = "Held-out scores"
    if not rows:
        rows = eval_rows(summary)
        title, names = "Scores", ("", "score", "passed", "problems", "rollouts", "without a score")
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(f'<td data-name="{name}">{html_text(cell)}</td>' for name, cell in zip(names, row, strict=True))
        + "</tr>"
        for row in rows
    )
    chance = f"; chance is {number(summary['chance'])}" if summary.get("chance") is not None else ""
    return (
        f'<h2>{title}</h2><div class="card wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        f'</table></div><p class="soft">In brackets: 95% intervals{html_text(chance)}.</p>'
    )


def _figures(run: Run) -> dict[str, dict[str, Any]]:
    """Return plotly figures by title, those alone that have something to show.

    Titles are HTML of this page, not of plotly, which reads tags in its own titles and labels.
    """
    figures: dict[str, dict[str, Any]] = {}
    points = [(record.get("step"), record["held_out"]) for record in run.metrics if "held_out" in record]
    held_out = run.summary.get("held_out")
    if len(points) < 2 and isinstance(held_out, Mapping):
        last = run.metrics[-1].get("step") if run.metrics else 1
        points = [(0, held_out.get("before")), (last, held_out.get("after"))]
    for title, keys in CURVES.items():
        lines = [
            _line(name, [(record.get("step"), record[key]) for record in run.metrics if key in record], colour)
            for (key, name), colour in zip(keys.items(), COLOURS, strict=False)
        ]
        if drawn := [line for line in lines if line]:
            figures[title] = {"data": drawn, "layout": _layout(legend=len(keys) > 1)}
        if title == "Reward" and (bands := _bands(points)):
            figures["Held-out score, with 95% intervals"] = {"data": bands, "layout": _layout(legend=True)}
    if named := _named_rewards(run.metrics):
        figures["Rewards by name"] = {"data": named, "layout": _layout(legend=True)}
    return figures


def _named_rewards(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a line for each named reward; none where there is a single name, which is the reward itself."""
    tables = [
        (record.get("step"), record["rewards"]) for record in records if isinstance(record.get("rewards"), Mapping)
    ]
    names = list(dict.fromkeys(name for _, table in tables for name in table))
    lines = [
        _line(name, [(step, table.get(name)) for step, table in tables], COLOURS[index % len(COLOURS)])
        for index, name in enumerate(names)
    ]
    return [line for line in lines if line] if len(names) > 1 else []


def _line(name: str, points: Iterable[tuple[Any, Any]], colour: str) -> dict[str, Any] | None:
    """Return a trace through the points that have a step; None where no point has a value."""
    known = [(step, finite_number(value)) for step, value in points if finite_number(step) is not None]
    if all(value is None for _, value in known):
        return None
    return {
        "type": "scatter",
        "mode": "lines" if len(known) > 30 else "lines+markers",
        "name": _label(name),
        "x": [step for step, _ in known],
        "y": [value for _, value in known],
        "line": {"color": colour, "width": 2},
        "hovertemplate": "step %{x}: %{y:.4g}<extra></extra>",
    }


def _bands(points: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Return a line for each decoding, over the area of its intervals."""
    tables = [(step, table) for step, table in points if isinstance(table, Mapping)]
    traces = []
    for index, decoding in enumerate(dict.fromkeys(name for _, table in tables for name in table)):
        colour = COLOURS[index % len(COLOURS)]
        scores = [(step, table[decoding]) for step, table in tables if isinstance(table.get(decoding), Mapping)]
        line = _line(DECODINGS.get(decoding, decoding), [(step, score.get("score")) for step, score in scores], colour)
        ends = [(step, finite_number(score.get("low")), finite_number(score.get("high"))) for step, score in scores]
        whole = [(step, low, high) for step, low, high in ends if None not in (finite_number(step), low, high)]
        if line:
            area = {
                "type": "scatter",
                "x": [step for step, _, _ in whole] + [step for step, _, _ in reversed(whole)],
                "y": [high for _, _, high in whole] + [low for _, low, _ in reversed(whole)],
                "fill": "toself",
                "fillcolor": colour + "26",
                "line": {"width": 0},
                "mode": "lines",
                "hoverinfo": "skip",
                "showlegend": False,
            }
            traces += [area, line]
    return traces


def _layout(legend: bool) -> dict[str, Any]:
    return {
        "margin": {"l": 44, "r": 12, "t": 24 if legend else 8, "b": 36},
        "font": {"size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"rangemode": "tozero"},
    }


def _label(name: str) -> str:
    """Return a name for plotly, which reads tags and entities in it: escaped, so that it shows as it is."""
    return html_text(name)
