"""`ramet eval`: the numbers by hand, who may play, what is kept whatever happens, and what is refused."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ramet.cli import eval as eval_module
from ramet.cli import main as cli
from ramet.cli import players
from ramet.cli.eval import _Progress
from ramet.cli.play import read_line
from ramet.metrics import Interval, mean_pass_at_k, read, wilson

SRC = Path(__file__).resolve().parents[2] / "src"

# Each row says which of its samples are right, by member: "10" is right the first time and wrong the second.
TASKS = """
import asyncio

from ramet.tasks import Task
from ramet.types import Outcome

ROWS = [{"prompt": f"{number}?", "right": right, "level": level}
        for number, (right, level) in enumerate([("11", 2), ("10", 10), ("00", 10)])]


def by_member(sample):
    return float(sample.row["right"][sample.member])


def says(sample):
    print("judging")
    return by_member(sample)


def half_marks(sample):
    return 0.5 * by_member(sample)


def moody(sample):
    if sample.group == 1:
        return None if sample.member else Outcome.error("no judge")
    return by_member(sample)


def nonsense(sample):
    return "good" if sample.group == 2 else 1.0


def words(row):
    return "yes"


def reply(episode):
    return None if episode.text == "done" else episode.state["next"]


def begin(row, rng):
    return {"next": f"{row['prompt']} {rng.randrange(100)}"}


def player(episode):
    return "done" if episode.turns == 1 and episode.messages[-1]["content"] == episode.state["next"] else "go"


def ended_well(sample):
    return float(sample.completion == "done" and len(sample.messages) == 4)


def fails(episode):
    raise KeyError("gone")


async def hang(row, rng):
    if row["prompt"] == "2?":
        await asyncio.sleep(3600)


members = Task("members", ROWS, ROWS, by_member, answer=words, chance=0.25)
loud = Task("loud", ROWS, ROWS, says, answer=words)
halves = Task("halves", ROWS, ROWS, half_marks, answer=words)
mixed = Task("mixed", ROWS, ROWS, moody, answer=words)
wide = Task("wide", ROWS, ROWS, lambda sample: 10.0 * sample.group - 5.0, answer=words)
hanging = Task("hanging", ROWS, ROWS, by_member, answer=words, begin=hang)
broken = Task("broken", ROWS, ROWS, nonsense, answer=words)
mute = Task("mute", ROWS, ROWS, by_member)
talk = Task("talk", ROWS, ROWS, ended_well, begin=begin, reply=reply, max_turns=3, player=player)
unplayable = Task("unplayable", ROWS, ROWS, ended_well, reply=reply, max_turns=3, answer=words)
stumbling = Task("stumbling", ROWS, ROWS, ended_well, player=fails)
"""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the commands run."""
    (tmp_path / "mine.py").write_text(TASKS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(task: str, *words: str, typed: str = "") -> Result:
    return CliRunner().invoke(cli.main, ["eval", task, "--name", "e", *words], input=typed, prog_name="ramet")


def reference(task: str, *words: str) -> Result:
    return evaluate(f"mine.py:{task}", "--policy", "reference", *words)


def found(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def table(interval: Interval, problems: int) -> dict[str, Any]:
    return {**interval._asdict(), "problems": problems}


# ---------------------------------------------------------------- the numbers


def test_mean_and_pass_at_k_by_hand(at: Path) -> None:
    """Problems with 2, 1 and 0 of 2 right: means 1, 0.5 and 0; pass@1 the same, pass@2 1, 1 and 0."""
    summary = found(reference("members", "--samples", "2", "--json"))
    half = 4.302653 * 0.5 / 3**0.5
    assert summary["score"] == pytest.approx({"value": 0.5, "low": 0.5 - half, "high": 0.5 + half})
    assert summary["pass_at_k"]["1"] == {"value": 0.5, "low": 0.0, "high": 1.0, "problems": 3}
    assert summary["pass_at_k"]["2"] == table(Interval(2 / 3, *wilson(2, 3)), 3)
    counts = ("problems", "rollouts", "abstained", "failed", "truncated", "chance", "samples")
    assert [summary[name] for name in counts] == [3, 6, 0, 0, 0, 0.25, 2]


def test_what_a_task_prints_is_no_part_of_what_was_asked_for(at: Path) -> None:
    done = reference("loud", "--samples", "2", "--json")
    assert found(done)["rollouts"] == 6
    assert done.stderr.split().count("judging") == 6


def test_the_table_by_difficulty_is_in_the_order_of_the_numbers(at: Path) -> None:
    summary = found(reference("members", "--samples", "2", "--k", "2", "--json"))
    assert summary["by"]["column"] == "level"
    assert list(summary["by"]["levels"]) == ["2", "10"]
    assert summary["by"]["levels"]["10"]["pass_at_k"] == {"2": table(mean_pass_at_k([(2, 1), (2, 0)], 2), 2)}
    assert summary["by"]["levels"]["2"]["score"]["value"] == 1.0


def test_a_column_may_be_named(at: Path) -> None:
    assert list(found(reference("members", "--by", "right", "--json"))["by"]["levels"]) == ["00", "10", "11"]


def test_what_passes_can_be_said(at: Path) -> None:
    assert found(reference("halves", "--json"))["pass_at_k"]["1"]["value"] == 0.0
    assert found(reference("halves", "--pass-at", "0.5", "--json", "--name", "f"))["pass_at_k"]["1"]["value"] == 2 / 3


def test_rollouts_without_a_score_are_counted_and_left_out(at: Path) -> None:
    """Problem 1 has a failed and an abstained sample: two problems are left, of 1 and of 0."""
    summary = found(reference("mixed", "--samples", "2", "--json"))
    assert [summary[name] for name in ("problems", "rollouts", "abstained", "failed")] == [2, 6, 1, 1]
    assert summary["pass_at_k"]["1"]["problems"] == 2
    assert summary["score"]["value"] == 0.5


def test_the_tables_for_people(at: Path) -> None:
    done = reference("mixed", "--samples", "2")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "mixed, reference: 3 held-out problems, 2 samples of each"
    assert lines[2] == "score 0.500 (0.095 to 0.905) 2 of 3"
    assert lines[5] == "of 6 rollouts: 0 truncated, 1 abstained, 1 failed"
    assert lines[7] == "level problems score pass@1 pass@2 without a score"
    assert lines[8].endswith(" 0 of 2")
    assert lines[9].startswith("10 1 0.000")
    assert lines[9].endswith(" 2 of 4")
    assert "a rollout passes with a score of 1 or more" in lines[-2]
    assert lines[-1] == "rollouts: runs/e/rollouts.jsonl"
    assert done.stderr.splitlines() == [
        "6 of 6 episodes, mean score 0.500, 2 without a score",
        "warning: held-out rows are training rows as well, and a model trained on them knows them",
        "1 without a score: no judge",
        "1 without a score: moody returned None",
    ]


def test_scores_outside_0_and_1_are_cut_nowhere(at: Path) -> None:
    """-5, 5 and 15: a mean of 5 with a deviation of 10, and Student's 4.302653 of two degrees of freedom."""
    summary = found(reference("wide", "--json"))
    half = 4.302653 * 10 / math.sqrt(3)
    assert summary["score"]["value"] == 5.0
    assert [summary["score"][end] for end in ("low", "high")] == pytest.approx([5 - half, 5 + half], abs=1e-5)
    assert summary["pass_at_k"]["1"]["value"] == pytest.approx(2 / 3)


def test_where_nothing_has_a_score_it_says_why_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(
        "from ramet import Task\n"
        "def begin(row):\n    return {}\n"
        "def refused():\n    raise ValueError('boom')\n"
        "def reply(episode):\n    return 7\n"
        "rows = [{'prompt': '1', 'answer': '1'}]\n"
        "score = lambda sample: 1.0\n"
        "begun = Task('begun', rows, rows, score, answer=lambda row: '1', begin=begin)\n"
        "replied = Task('replied', rows, rows, score, player=lambda episode: '1', reply=reply, max_turns=2)\n"
        "untyped = Task('untyped', rows, rows, score, player=lambda episode: '1', tools=[lambda x: x])\n"
        "rowless = Task('rowless', rows, [7], score, answer=lambda row: '1')\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    unnamed = run.invoke(cli.main, ["eval", "broken.py", "--policy", "reference"])
    assert unnamed.exit_code == 2
    assert '":NAME" is missing: found the task "broken.py"' in unnamed.stderr
    failed = run.invoke(cli.main, ["eval", "broken.py:begun", "--policy", "reference", "--name", "a"])
    assert failed.exit_code == 1
    assert "1 without a score: begin: TypeError: begin() takes 1 positional argument" in failed.stderr
    for name, code, words in [
        ("replied", 1, "reply reply: expected text, a message"),
        ("untyped", 2, "one of its tools is none"),
        ("rowless", 2, "row 0 of held_out must be a mapping: found int"),
        ("refused", 2, "calling refused failed with ValueError: boom"),
    ]:
        done = run.invoke(cli.main, ["eval", f"broken.py:{name}", "--policy", "reference", "--name", name])
        assert done.exit_code == code, done.output
        assert words in done.stderr


# ---------------------------------------------------------------- what is kept


def test_every_rollout_is_kept_with_what_was_asked(at: Path) -> None:
    done = reference("members", "--samples", "2", "--problems", "2", "--seed", "5")
    assert done.exit_code == 0, done.output
    folder = at / "runs" / "e"
    records = read(folder / "rollouts.jsonl")
    assert sorted((line["group"], line["member"]) for line in records) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {line["when"] for line in records} == {"eval"}
    assert {line["completion"] for line in records} == {"yes"}
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    assert (config["eval"]["policy"], config["eval"]["samples"], config["eval"]["seed"]) == ("reference", 2, 5)
    assert config["task"]["name"] == "mine.py:members"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["rollouts"], summary["seed"]) == (4, 5)


def test_the_rollouts_of_an_evaluation_can_be_judged_again(at: Path) -> None:
    assert reference("members", "--samples", "2").exit_code == 0
    words = ["rescore", "runs/e", "--reward", "mine.py:half_marks", "--json"]
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 0, done.output
    [change] = json.loads(done.stdout)["rollouts"]
    assert (change["old"]["value"], change["new"]["value"], change["changed"]) == (0.5, 0.25, 3)


def test_a_mistake_in_the_reward_ends_it_and_keeps_what_was_played(at: Path) -> None:
    done = evaluate("mine.py:broken", "--policy", "person", typed="a\n\nb\n\nc\n\n")
    assert done.exit_code == 1
    assert "stopped after 2 of 3 episodes: runs/e/rollouts.jsonl\n" in done.stderr
    assert "error: reward nonsense, group 2" in done.stderr
    assert [line["score"] for line in read(at / "runs" / "e" / "rollouts.jsonl")] == [1.0, 1.0]
    assert not (at / "runs" / "e" / "summary.json").exists()


def test_ctrl_c_keeps_what_was_played(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["a", "", None])

    def read_lines() -> str:
        line = next(lines)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(players, "read_line", read_lines)
    done = evaluate("mine.py:members", "--policy", "person")
    assert done.exit_code == 130
    assert done.stdout == ""
    assert done.stderr.endswith("stopped after 1 of 3 episodes: runs/e/rollouts.jsonl\n")
    assert len(read(at / "runs" / "e" / "rollouts.jsonl")) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_keeps_what_was_played(number: signal.Signals, at: Path) -> None:
    """A real one, in a process of its own, while the last of three episodes hangs."""
    words = ["eval", "mine.py:hanging", "--policy", "reference", "--name", "e"]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ramet.cli.main", *words],
        env=environment, cwd=at, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    rollouts = at / "runs" / "e" / "rollouts.jsonl"
    try:
        while not rollouts.is_file() or len(rollouts.read_text(encoding="utf-8").splitlines()) < 2:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        process.send_signal(number)
        shown, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, shown) == (130, "")
    assert told == "stopped after 2 of 3 episodes: runs/e/rollouts.jsonl\n"
    assert sorted(line["group"] for line in read(rollouts)) == [0, 1]


def test_a_folder_in_which_nothing_was_written_goes(at: Path) -> None:
    done = evaluate("mine.py:members", "--policy", "person")
    assert done.exit_code == 130
    assert done.stderr.endswith("stopped before an episode had ended\n")
    assert list((at / "runs").iterdir()) == []


def test_a_folder_that_is_there_is_not_written_into(at: Path) -> None:
    assert reference("members").exit_code == 0
    done = reference("members")
    assert done.exit_code == 2
    assert done.stderr == "error: the folder runs/e is there already\nhint: give another --name, or remove the folder\n"


def test_a_folder_without_a_name_is_named_after_the_task(at: Path) -> None:
    words = ["eval", "mine.py:members", "--policy", "reference", "--runs", "other"]
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    [folder] = (at / "other").iterdir()
    assert folder.name.startswith("eval-members-20")


def test_two_that_begin_in_one_second_have_folders_of_their_own(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_module.time, "strftime", lambda form: "now")
    for _ in range(3):
        assert CliRunner().invoke(cli.main, ["eval", "mine.py:members", "--policy", "reference"]).exit_code == 0
    names = ["eval-members-now", "eval-members-now-2", "eval-members-now-3"]
    assert sorted(path.name for path in (at / "runs").iterdir()) == names


def test_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(eval_module.time, "monotonic", lambda: now[0])
    progress = _Progress(4)
    for seconds, score in ((1.0, None), (5.0, 1.0), (6.0, 0.0), (7.0, 0.5)):
        now[0] = seconds
        progress({"score": score})
    assert capsys.readouterr().err == (
        "2 of 4 episodes, mean score 1.000, 1 without a score\n4 of 4 episodes, mean score 0.500, 1 without a score\n"
    )


# ---------------------------------------------------------------- who plays


def test_the_reference_of_several_turns_sees_the_state_of_its_own_episode(at: Path) -> None:
    summary = found(reference("talk", "--samples", "3", "--json"))
    assert summary["score"]["value"] == 1.0
    said = [line["messages"][2]["content"] for line in read(at / "runs" / "e" / "rollouts.jsonl")]
    assert len(said) == 9
    assert len(set(said)) == 3  # the members of a group meet the same world


def test_a_task_without_a_reference_says_so(at: Path) -> None:
    done = reference("mute")
    assert (done.exit_code, done.stderr.splitlines()[0]) == (
        2,
        "error: the task mute has no reference to play: it has no answer",
    )
    assert "it has no player, and it takes several turns" in reference("unplayable").stderr
    assert not (at / "runs").exists()


def test_a_reference_that_fails_names_the_row(at: Path) -> None:
    done = reference("stumbling")
    assert done.exit_code == 1
    assert "the reference of the task stumbling failed at turn 1 of row 0: KeyError: 'gone'" in done.stderr


def test_a_person_plays_one_episode_after_the_other(at: Path) -> None:
    typed = "go\n\ndone\n\n" * 2
    done = evaluate("mine.py:talk", "--policy", "person", "--problems", "2", "--json", typed=typed)
    assert found(done)["score"]["value"] == 1.0
    shown = done.stderr
    assert shown.count("you:") == 4
    assert shown.index("  0?\n") < shown.index("row 1, sample 0") < shown.index("  1?\n")


def test_a_model_plays(at: Path) -> None:
    """A tiny model of random weights, 2 samples of 3 problems: as many rollouts, within the limit."""
    done = evaluate("mine.py:members", "--model", "tiny-llama", "--samples", "2", "--max-new-tokens", "3", "--json")
    summary = found(done)
    records = read(at / "runs" / "e" / "rollouts.jsonl")
    assert len(records) == 6
    assert all(1 <= len(line["completion_tokens"]) <= 3 for line in records)
    assert summary["truncated"] == sum(line["stop"] == "new_token_limit" for line in records)
    assert len({tuple(line["completion_tokens"]) for line in records}) > 3


def test_a_model_draws_what_the_seed_says(at: Path) -> None:
    said = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        words = ("--model", "tiny-llama", "--max-new-tokens", "3", "--seed", seed, "--name", name)
        assert evaluate("mine.py:members", *words).exit_code == 0
        records = read(at / "runs" / name / "rollouts.jsonl")
        said.append(sorted((line["group"], tuple(line["completion_tokens"])) for line in records))
    assert said[0] == said[1] != said[2]


def test_settings_reach_the_model(at: Path) -> None:
    words = ("--model", "tiny-llama", "--max-new-tokens", "2", "--temperature", "0")
    sets = ("--set", "model.options.layers=1", "--set", "rollout.max_turns=1", "--set", "model.device=cpu")
    done = evaluate("mine.py:talk", *words, *sets, "--json")
    assert found(done)["temperature"] == 0.0
    assert {line["decoding"] for line in read(at / "runs" / "e" / "rollouts.jsonl")} == {"greedy"}
    config = tomllib.loads((at / "runs" / "e" / "config.toml").read_text(encoding="utf-8"))
    assert config["model"]["options"] == {"layers": 1}


def test_the_folder_of_a_run_means_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in ("step-000002", "step-000010"):
        (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / step / "state.json").touch()
    newest = tmp_path / "run" / "checkpoints" / "step-000010"
    assert [players._newest(str(path)) for path in (tmp_path / "run", newest)] == [str(newest), str(newest)]
    assert players._newest("smollm2") == "smollm2"


class Served(BaseHTTPRequestHandler):
    """An OpenAI-compatible server of text that answers every chat with "yes", but for one that it fails."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": "no such thing"}})
        elif asked["messages"][-1]["content"] == "1?":
            self._send(400, {"error": {"message": "not this one"}})
        else:
            message = {"role": "assistant", "content": "yes"}
            self._send(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_of_text_plays_and_a_row_that_it_fails_costs_that_row(at: Path, url: str) -> None:
    summary = found(evaluate("mine.py:members", "--server", url, "--model", "m", "--json"))
    assert [summary[name] for name in ("policy", "problems", "failed")] == [f"m at {url}", 2, 1]
    records = {line["group"]: line for line in read(at / "runs" / "e" / "rollouts.jsonl")}
    assert (records[0]["completion"], records[0]["score"]) == ("yes", 1.0)
    assert (records[1]["stop"], records[1]["outcome"]) == ("error", "environment_error")
    assert "not this one" in records[1]["reason"]


def test_a_server_that_is_down_says_so_before_anything_is_played(at: Path, url: str) -> None:
    done = evaluate("mine.py:members", "--server", "http://127.0.0.1:9", "--model", "m")
    assert "hint: is a server there, and is the address of --server right?" in done.stderr
    assert done.exit_code == 1
    assert done.stderr.startswith("error: GET http://127.0.0.1:9/v1/models: ")
    assert not (at / "runs").exists()


class Elsewhere(Served):
    """No server of models: it lists none, and says of everything else what `status` and `body` are."""

    status, body = 501, "<html>\n" + "<p>no</p>" * 1000

    def do_GET(self) -> None:
        self._send(404, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.status, self.body)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(
    ("status", "body", "hint"),
    [
        (501, "<html>\n" + "<p>no</p>" * 1000, "is a server of models there"),
        (404, {}, "look at url and model"),
        (401, {"error": {"message": "who are you?"}}, "hint: give --api-key-from VARIABLE"),
        (200, {"hello": "you"}, "is a server of models there"),
    ],
)
def test_what_can_be_no_server_of_models_is_refused_before_anything_is_played(
    status: int, body: Any, hint: str, lists: bool, at: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some that list their models to everybody answer those who have a key."""
    if not lists:
        monkeypatch.setattr(Served, "do_GET", Elsewhere.do_GET)
    monkeypatch.setattr(Served, "do_POST", Elsewhere.do_POST)
    monkeypatch.setattr(Served, "status", status, raising=False)
    monkeypatch.setattr(Served, "body", body, raising=False)
    done = evaluate("mine.py:members", "--server", url, "--model", "m")
    assert done.exit_code == 1
    error, told = done.stderr.splitlines()
    assert error.startswith("error: this is no server of models")
    assert len(error) < 600
    assert hint in told
    assert not (at / "runs").exists()


def test_answers_that_are_all_empty_are_warned_of(at: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: Served) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": None}
        self._send(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    monkeypatch.setattr(Served, "do_POST", nothing)
    done = evaluate("mine.py:members", "--server", url, "--model", "m")
    assert "warning: every answer was empty" in done.stderr


def test_how_long_a_server_is_waited_for_can_be_set(at: Path, url: str) -> None:
    sets = ["--set", "server.outage_seconds=0", "--set", "server.retries=0"]
    assert evaluate("mine.py:members", "--server", url, "--model", "m", *sets).exit_code == 0
    kept = tomllib.loads((at / "runs" / "e" / "config.toml").read_text(encoding="utf-8"))
    assert (kept["server"]["outage_seconds"], kept["server"]["retries"]) == (0.0, 0)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nobody plays: expected --model"),
        (["--server", "http://x"], "expected --model (the name under which the server knows it)"),
        (["--policy", "reference", "--model", "m"], "--policy is for who plays without a model"),
        (["--policy", "reference", "--server", "http://x"], "--policy is for who plays without a model"),
        (["--model", "m", "--tokenizer", "t"], "--tokenizer is for --server"),
        (["--model", "m", "--api-key-from", "K"], "--api-key-from is for --server"),
        (["--policy", "reference", "--temperature", "0"], "--temperature is for models"),
        (["--policy", "person", "--max-new-tokens", "3"], "--max-new-tokens is for models"),
        (["--policy", "reference", "--k", "2"], "--k 2: pass@k takes from 1 to as many as there are samples"),
        (["--policy", "reference", "--k", "0"], "--k 0: pass@k takes from 1"),
        (["--policy", "reference", "--by", "levle"], 'row 0 has no column "levle"'),
        (["--policy", "reference", "--name", "../x"], "--name ../x: expected letters"),
        (["--policy", "reference", "--set", "rollout.top_k=3"], "rollout.top_k is not read here"),
        (["--model", "tiny-llama", "--set", "rollout.temperature=2"], "rollout.temperature is not read here"),
        (["--model", "tiny-llama", "--set", "steps=2"], "steps is not read here"),
        (["--model", "m", "--temperature", "0", "--samples", "2"], "at temperature 0 all 2 samples of a problem"),
        (["--server", "http://x", "--model", "m", "--api-key-from", "NO_SUCH_KEY"], "no such environment variable"),
    ],
)
def test_what_makes_no_sense_is_refused_in_two_lines(at: Path, words: list[str], message: str) -> None:
    done = evaluate("mine.py:members", *words)
    assert done.exit_code == 2, done.output
    error, hint = done.stderr.splitlines()
    assert message in error
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert not (at / "runs").exists() or not list((at / "runs").iterdir())


@pytest.mark.parametrize(
    ("key", "option"),
    [("rollout.max_new_tokens", "--max-new-tokens"), ("rollout.temperature", "--temperature"), ("seed", "--seed")],
)
def test_a_key_that_is_an_option_here_names_the_option(key: str, option: str, at: Path) -> None:
    done = evaluate("mine.py:members", "--model", "tiny-llama", "--set", f"{key}=16")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"hint: give {option}"


@pytest.mark.parametrize("words", [["--k", "1,x"], ["--samples", "0"], ["--temperature", "-1"], ["--policy", "me"]])
def test_what_is_no_number_or_name_is_refused_by_its_option(at: Path, words: list[str]) -> None:
    done = evaluate("mine.py:members", "--policy", "reference", *words)
    assert done.exit_code == 2
    assert f"Invalid value for '{words[0]}'" in done.stderr


def test_a_hidden_character_in_a_name_is_spelled_out(at: Path) -> None:
    done = evaluate("mine.py:members", "--policy", "reference", "--by", "\x1b[31m")
    assert '"\\x1b[31m"' in done.stderr


def test_lines_come_from_a_pipe_without_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb"))
    assert [read_line(), read_line()] == ["a", "b"]
    with pytest.raises(EOFError):
        read_line()
    assert capsys.readouterr().out == ""


def test_a_folder_that_can_not_be_made_since_one_above_is_no_folder_is_told(at: Path) -> None:
    (at / "away").symlink_to(at / "no such disk")
    done = evaluate("mine.py:members", "--policy", "reference", "--problems", "1", "--runs", "away")
    assert done.exit_code == 2
    assert "the folder away/e can not be made" in done.output
