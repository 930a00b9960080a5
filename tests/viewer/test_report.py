"""The page shows what the run holds, as text alone, in one file that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ramet.errors import DataError
from ramet.metrics import MetricsLog
from ramet.viewer.report import write_report
from ramet.viewer.rollouts import MOST_GROUPS
from ramet.viewer.text import visible

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "end of script": "</script><img src=x onerror=alert(2)>",
    "entity": "&amp; &lt;b&gt; <b>",
    "attribute": "\"' onmouseover='alert(3)' x=\"",
    "right to left": "abc\u202e\u2066def\u200f",
    "control": "nul \x00 escape \x1b[31m bell \x07 return \r",
    "surrogate": "lone \ud800",
    "comment": "<!-- <script> --> ]]> $body ${curves}",
    "long": "word " * 2000,
    "unbroken": "x" * 10_000,
    "other script": "שלום עולם\nsecond line\n\n  indented",
    "empty": "",
}
FEW_TAGS = {"html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "h4", "div", "script"}
MORE_TAGS = {"details", "summary", "pre", "span", "b", "p", "table", "thead", "tbody", "tr", "th", "td"}
FORM_TAGS = {"select", "option", "input"}


class Page(HTMLParser):
    """A page taken apart: its tags, attributes, the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


@pytest.fixture
def short_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for five megabytes of plotly.js."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")


def write_run(folder: Path, text: str = "2+2=") -> None:
    """Write a small run in which every string is `text`."""
    folder.mkdir(exist_ok=True)
    scores = {"greedy": {"score": 0.5, "low": 0.4, "high": 0.6, "problems": 10}, text: {"score": 0.25, "problems": 10}}
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.append({"step": 0, "held_out": scores})
        for step in range(1, 4):
            log.append({"step": step, "reward": step / 4, "kl": float("nan"), "rewards": {text: 1.0, "other": step}})
        log.append({"step": 3, "held_out": scores})
    with MetricsLog(folder / "rollouts.jsonl") as log:
        for when, step, score in (("before", 0, 0.0), ("after", 3, 1.0), ("train", 1, None)):
            for prompt in (text, [{"role": text, "content": text}]):
                log.append(
                    {
                        **{"when": when, "step": step, "group": 0, "member": 0, "prompt": prompt, "completion": text},
                        **{"score": score, "rewards": {text: 0.5, "format": 1.0}, "decoding": text, "stop": text},
                        **{"outcome": "scored" if score is not None else text, "reason": text},
                    }
                )
    summary = {"held_out": {"before": scores, "after": scores}, "chance": text, "seconds": 90.0}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "config.toml").write_bytes(f"# {text}".encode("utf-8", errors="surrogatepass"))


def curves(page: Page) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(page.texts["script"][0])
    return found


@pytest.mark.usefixtures("short_plotly")
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_is_shown_and_never_becomes_markup(text: str, tmp_path: Path) -> None:
    write_run(tmp_path, text)
    source = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(source)
    assert set(page.tags) <= FEW_TAGS | MORE_TAGS | FORM_TAGS
    assert page.tags.count("script") == 3
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "style")]
    # Six rollouts, whole, and their prompts: three as they are, of which those before and after share one.
    assert page.texts["pre"].count(visible(text)) == 6 + 2
    # Inside the script element that holds them, no character could end the element or start markup.
    assert not set(page.texts["script"][0]) & set("<>&")
    names = [trace["name"] for figure in curves(page) for trace in figure["data"] if "name" in trace]
    # plotly reads tags and entities in names, so these are escaped once for it.
    assert html.escape(visible(text)) in names
    assert not [name for name in names if "<" in name]


@pytest.mark.usefixtures("short_plotly")
def test_the_name_of_a_run_is_text_too(tmp_path: Path) -> None:
    folder = tmp_path / "a<b>&amp;"
    write_run(folder)
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert page.texts["title"] == ["a<b>&amp; - ramet"]
    assert page.texts["h1"] == ["a<b>&amp;"]


def test_the_page_carries_plotly_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    source = write_report(tmp_path).read_text(encoding="utf-8")
    head = source.partition("<main>")[0]
    scripts = re.findall(r"<script>(.*?)</script>", source, flags=re.DOTALL)
    assert len(scripts) == 2
    assert len(scripts[0]) > 1_000_000
    assert "default-src 'none'" in head
    for script in scripts:  # the policy lets these two run, by their hashes, and no others
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in head
    assert head.count("'sha256-") == 2
    assert not re.search(r"<(script|img|link|iframe)[^>]*\b(src|href)=", source.replace(scripts[0], ""))


@pytest.mark.usefixtures("short_plotly")
def test_curves_hold_what_the_metrics_say_and_those_without_a_value_are_not_drawn(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.texts["h3"] == ["Reward", "Held-out score, with 95% intervals", "Rewards by name"]
    reward, held_out, named = curves(page)
    assert (reward["data"][0]["x"], reward["data"][0]["y"]) == ([1, 2, 3], [0.25, 0.5, 0.75])
    band, line = held_out["data"][:2]
    assert (line["name"], line["x"], line["y"]) == ("greedy", [0, 3], [0.5, 0.5])
    assert (band["x"], band["y"], band["fill"]) == ([0, 3, 3, 0], [0.6, 0.6, 0.4, 0.4], "toself")
    assert [trace["y"] for trace in named["data"]] == [[1.0, 1.0, 1.0], [1, 2, 3]]


@pytest.mark.usefixtures("short_plotly")
def test_the_tokens_of_an_update_are_drawn_beside_those_that_were_computed(tmp_path: Path) -> None:
    """A step that trained on nothing has neither."""
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"step": 1, "tokens_trained": 96, "tokens_computed": 24})
        log.append({"step": 2, "trained_on": 0})
        log.append({"step": 3, "tokens_trained": 80, "tokens_computed": 40})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.texts["h3"] == ["Tokens of an update"]
    [figure] = curves(page)
    assert figure["layout"]["showlegend"] is True
    assert [(line["name"], line["x"], line["y"]) for line in figure["data"]] == [
        ("of the rows trained on", [1, 3], [96, 80]),
        ("computed, each prefix once", [1, 3], [24, 40]),
    ]
    [trained, computed] = figure["data"]
    assert trained["line"]["color"] != computed["line"]["color"]


@pytest.mark.usefixtures("short_plotly")
def test_scores_before_and_after_are_drawn_from_the_summary_where_the_metrics_have_none(tmp_path: Path) -> None:
    write_run(tmp_path)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.keep(lambda entry: entry["step"] < 0)
        log.append({"step": 7, "reward": 1.0})
    held_out = curves(Page(write_report(tmp_path).read_text(encoding="utf-8")))[1]
    assert held_out["data"][1]["x"] == [0, 7]


@pytest.mark.usefixtures("short_plotly")
def test_prompts_say_whether_they_went_up_or_down_and_which_lack_a_score(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "rollouts.jsonl") as log:
        for group, (before, after) in enumerate([(0, 1), (1, 0), (1, 1), (None, 1)]):
            for when, score in (("before", before), ("after", after)):
                log.append({"when": when, "step": 0, "group": group, "prompt": f"p{group}", "score": score})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    changes = [value for name, value in page.attributes if name == "data-change"]
    assert changes == ["up", "down", "same", "same unscored"]


@pytest.mark.usefixtures("short_plotly")
def test_a_long_run_shows_its_first_prompts_and_says_how_many_there_are(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "rollouts.jsonl") as log:
        for group in range(MOST_GROUPS + 5):
            log.append({"when": "before", "step": 0, "group": group, "prompt": f"p{group}", "completion": ""})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.tags.count("details") == MOST_GROUPS
    assert f"{MOST_GROUPS} of {MOST_GROUPS + 5} prompts; all of them are in rollouts.jsonl." in page.texts["p"]


@pytest.mark.usefixtures("short_plotly")
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "rollouts.jsonl", "summary.json"])
def test_any_one_file_is_enough(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "whole")
    run = tmp_path / "part"
    run.mkdir()
    (tmp_path / "whole" / name).rename(run / name)
    assert "part" in Page(write_report(run).read_text(encoding="utf-8")).texts["h1"]
    assert sorted(path.name for path in run.iterdir()) == sorted([name, "report.html"])


def test_a_folder_without_a_run_and_a_broken_summary_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run"):
        write_report(tmp_path)
    with pytest.raises(DataError, match="is no run"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"summary\.json is no valid JSON"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match=r"summary\.json"):
        write_report(tmp_path)


# ---------------------------------------------------------------- an evaluation


def eval_record(group: int, member: int, score: float | None, **more: Any) -> dict[str, Any]:
    kind = "abstained" if score is None else "scored"
    own = {"when": "eval", "step": 0, "group": group, "member": member, "prompt": f"question {group}"}
    return {**own, "completion": "4", "score": score, "outcome": kind, "reason": "", "stop": "eos", **more}


def write_evaluation(folder: Path) -> None:
    folder.mkdir()
    call = {"function": {"name": "double", "arguments": {"number": 3, "word": "<b>"}}}
    messages = [
        {"role": "user", "content": "question 1"},
        {"role": "assistant", "content": "I ask.", "tool_calls": [call]},
        {"role": "tool", "name": "double", "content": "6 </pre>"},
        {"role": "assistant", "content": ""},
    ]
    with MetricsLog(folder / "rollouts.jsonl") as log:
        log.append(eval_record(1, 1, None, reason="no <answer>", messages=messages))
        log.append(eval_record(0, 0, 1.0, messages=[]))
        log.append(eval_record(1, 0, -2.5, rewards={"right": -3.0, "short": 0.5}, messages=messages))
    ends = {"value": -0.75, "low": -9.0, "high": 7.5}
    part = {"score": ends, "pass_at_k": {"1": {**ends, "problems": 2}}, "problems": 2, "rollouts": 3}
    part |= {"abstained": 1, "failed": 0}
    summary = {**part, "by": {"column": "level", "levels": {"<easy>": {**part, "problems": 1}}}, "chance": None}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    settings = '[eval]\npolicy = "m at http://x"\n[task]\nname = "doubling"\n'
    (folder / "config.toml").write_text(settings, encoding="utf-8")


def test_an_evaluation_shows_its_scores_and_its_rollouts_by_prompt(tmp_path: Path, short_plotly: None) -> None:
    write_evaluation(tmp_path / "e")
    page = Page(write_report(tmp_path / "e").read_text(encoding="utf-8"))
    assert page.texts["h2"] == ["Scores", "Rollouts"]
    assert "doubling, m at http://x" in page.texts["div"]
    cells = page.texts["td"]
    interval = "-0.750 (-9.000 to 7.500)"
    assert cells[:6] == ["all", interval, f"pass@1 {interval}", "2", "3", "1 abstained, 0 failed"]
    assert cells[6] == "level <easy>"
    assert page.texts["option"] == ["all prompts", "below the mean", "unscored"]
    # In the order of the file; problem 1 lies below the mean of -0.75 and has a sample without a score.
    marks = [value for name, value in page.attributes if name == "data-change"]
    assert marks == ["low unscored", ""]


def test_a_conversation_is_read_turn_by_turn(tmp_path: Path, short_plotly: None) -> None:
    """Behind the prompt: who said what, the calls, what came back; the parts of the reward, or why there is none."""
    write_evaluation(tmp_path / "e")
    page = Page(write_report(tmp_path / "e").read_text(encoding="utf-8"))
    who = [text for text in page.texts["div"] if text in ("assistant", "tool (double)", "user")]
    assert who == ["assistant", "tool (double)", "assistant"] * 2
    turns = ['I ask.\ncalls double(number=3, word="<b>")', "6 </pre>", "(empty)"]
    assert page.texts["pre"][:8] == ["question 1", *turns, *turns, "question 0"]
    assert page.texts["pre"][8] == "4"  # of a single turn
    titles = page.texts["h4"]
    assert titles[0].strip() == "sample 0, eos, right -3.000, short 0.500"
    assert titles[1].strip() == "sample 1, eos, abstained: no <answer>"
    assert page.texts["b"][:2] == ["-2.500", "-"]


def test_a_run_that_was_made_longer_shows_the_evaluation_after_its_last_step(
    tmp_path: Path, short_plotly: None
) -> None:
    (tmp_path / "run").mkdir()
    with MetricsLog(tmp_path / "run" / "rollouts.jsonl") as log:
        for when, step, score in (("before", 0, 0.0), ("after", 2, 0.25), ("after", 4, 1.0)):
            log.append({**eval_record(0, 0, score), "when": when, "step": step})
    page = Page(write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert "0.000 \u2192 1.000" in page.texts["span"]
    assert page.texts["b"] == ["0.000", "1.000"]
