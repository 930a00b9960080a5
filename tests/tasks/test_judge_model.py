"""A judge behind an endpoint, against a server that misbehaves by script."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.episodes.clock import run

from ramet.errors import ConfigError
from ramet.http import Endpoint, TransientError
from ramet.tasks import Judge, JudgeModel, judge_model, weighted
from ramet.types import Outcome, OutcomeKind, Sample, StopReason

pytest.importorskip("httpx")
TEMPLATE = "Asked: {prompt}\nAnswered: {completion}\nRight: {row[answer]}\nWrite Score: N, from 0 to 10."


class Server:
    """Answers each request with the next of `script`: a text, a status, a body, or seconds to wait."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.at_once = self.most = 0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with lock:
                    outer.at_once += 1
                    outer.most = max(outer.most, outer.at_once)
                    outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                    outer.headers.append((self.path, self.headers.get("Authorization")))
                    answer = outer.script.pop(0) if outer.script else "Score: 5"
                try:
                    self._answer(answer)
                finally:
                    with lock:
                        outer.at_once -= 1

            def _answer(self, answer: Any) -> None:
                if isinstance(answer, float):
                    time.sleep(answer)
                    answer = "Score: 5"
                if answer == "hang up":
                    self.close_connection = True
                    return
                status = answer if isinstance(answer, int) else 200
                message = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
                body = answer if isinstance(answer, bytes) else json.dumps(message).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # it was not waited for
                    pass

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def sample(completion: str = "4", prompt: Any = "2+2=") -> Sample:
    messages = ({"role": "user", "content": "2+2="}, {"role": "assistant", "content": completion})
    row = {"answer": "four {braces}"}
    return Sample(prompt, completion, (1,), (2,), row, StopReason.EOS, group=0, member=0, messages=messages)


def model(server: Server, template: str = TEMPLATE, **options: Any) -> JudgeModel:
    return JudgeModel(server.url, "judge-1", template, **{"best": 10.0, "pause": 0.001, **options})


def judged(reward: Any, *samples: Sample) -> list[Outcome]:
    judge = Judge(reward)
    try:
        return judge(samples or [sample()])
    finally:
        judge.close()


def test_the_question_is_filled_in_and_the_last_score_counts(server: Server) -> None:
    server.script = ["At first Score: 2, but then\n**Score:** 7.5"]
    (outcome,) = judged(model(server, key="secret", temperature=0.5, max_tokens=9), sample("{4}"))
    assert outcome.kind is OutcomeKind.SCORED
    assert (outcome.score, outcome.rewards) == (0.75, {"reward": 0.75})
    assert outcome.reason.endswith("**Score:** 7.5")
    (asked,) = server.asked
    said = "Asked: 2+2=\nAnswered: {4}\nRight: four {braces}\nWrite Score: N, from 0 to 10."
    assert asked == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": said}],
        "temperature": 0.5,
        "max_tokens": 9,
    }
    assert server.headers == [("/v1/chat/completions", "Bearer secret")]


def test_a_conversation_is_written_out(server: Server) -> None:
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2="}]
    judged(model(server, "{prompt}|{conversation}"), sample(prompt=prompt))
    assert server.asked[0]["messages"][0]["content"] == "system: be brief\n\nuser: 2+2=|user: 2+2=\n\nassistant: 4"


@pytest.mark.parametrize("verdict", ["It is good.", "", "Score: 11", "Score: -1", "Score: high", "Score: 1.2.3"])
def test_a_verdict_that_can_not_be_read_abstains(server: Server, verdict: str) -> None:
    server.script = [verdict]
    (outcome,) = judged(model(server))
    assert outcome.kind is OutcomeKind.ABSTAINED
    assert "the judge's verdict has" in outcome.reason
    assert len(server.asked) == 1


def test_a_verdict_of_another_form_is_read_as_one_says(server: Server) -> None:
    server.script = ["YES", "NO", "maybe"]
    words = {"YES": 1.0, "NO": 0.0}
    outcomes = judged(model(server, best=1.0, read=words.get, concurrency=1), *[sample() for _ in range(3)])
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0, None]


@pytest.mark.parametrize("trouble", [500, 503, 429, 408, "hang up", b"no json", b"{}", b'{"choices": []}'])
def test_trouble_is_tried_again(server: Server, trouble: Any) -> None:
    server.script = [trouble, trouble, "Score: 10"]
    assert judged(model(server, retries=2))[0].score == 1.0
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("trouble", "tries", "reason"),
    [
        (500, 3, "says 500"),
        ("hang up", 3, "RemoteProtocolError"),
        (b"{}", 3, "no chat completion"),
        (401, 1, "says 401"),
        (404, 1, "says 404"),
    ],
)
def test_an_endpoint_that_fails_is_an_environment_error(server: Server, trouble: Any, tries: int, reason: str) -> None:
    server.script = [trouble] * 5
    first, second = judged(model(server, retries=2, concurrency=1), sample(), sample())
    assert first.kind is OutcomeKind.ERROR
    assert reason in first.reason
    assert "secret" not in first.reason
    assert len(server.asked) >= tries
    assert second.kind is OutcomeKind.ERROR or second.score == 0.5


def test_nobody_at_the_address_is_an_environment_error() -> None:
    reward = JudgeModel("http://127.0.0.1:9/v1", "judge", "{completion}", retries=1, pause=0.001)
    (outcome,) = judged(reward)
    assert outcome.kind is OutcomeKind.ERROR
    assert "ConnectError" in outcome.reason


def test_an_endpoint_that_takes_too_long_times_out(server: Server) -> None:
    server.script = [1.0, 1.0]
    (outcome,) = judged(model(server, timeout=0.05, retries=1))
    assert outcome.kind is OutcomeKind.TIMED_OUT
    assert "took longer than 0.05 s" in outcome.reason
    assert len(server.asked) == 2


def test_no_more_questions_at_once_than_allowed(server: Server) -> None:
    server.script = [0.02] * 12
    outcomes = judged(model(server, concurrency=3), *[sample(str(n)) for n in range(12)])
    assert [outcome.score for outcome in outcomes] == [0.5] * 12
    assert 1 <= server.most <= 3


def test_one_judge_serves_several_event_loops(server: Server) -> None:
    reward = model(server, concurrency=1)
    server.script = [0.01] * 4

    async def ask() -> list[Outcome]:
        return list(await asyncio.gather(reward(sample()), reward(sample())))

    for _ in range(2):
        assert [outcome.score for outcome in asyncio.run(ask())] == [0.5, 0.5]


class There(Endpoint):
    """An endpoint in the process, where nobody is from 10 s to 70 s on the clock of its loop."""

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if 10.0 <= asyncio.get_running_loop().time() < 70.0:
            raise TransientError("ConnectError: nobody there", sent=False)
        return {"choices": [{"message": {"content": "Score: 1"}}]}


@pytest.mark.parametrize(
    ("outage", "kind"), [(90.0, "scored"), (30.0, "environment_error"), (0.0, "environment_error")]
)
def test_a_judge_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch, outage: float, kind: str) -> None:
    """By all questions together, up to a limit of its own; past it, they are environment errors."""
    monkeypatch.setattr(judge_model, "Endpoint", There)
    reward = JudgeModel("http://127.0.0.1:9/v1", "judge", "{completion}", outage=outage)

    async def work() -> list[str]:
        assert (await reward(sample())).score == 1.0
        await asyncio.sleep(10.0)
        found = []
        for outcome in await asyncio.gather(*(reward(sample()) for _ in range(4)), return_exceptions=True):
            if isinstance(outcome, Outcome):
                found.append(outcome.kind.value)
            else:
                assert isinstance(outcome, ConnectionError)
                assert "the judge at http://127.0.0.1:9/v1/chat/completions failed: " in str(outcome)
                assert "nobody there" in str(outcome)
                found.append(OutcomeKind.ERROR.value)
        return found

    found, seconds = run(work)
    assert found == [kind] * 4
    assert seconds <= 10.0 + (75.0 if outage > 60 else outage + 10.0)


def test_a_question_that_is_too_early_by_its_status_is_asked_again(server: Server) -> None:
    server.script = [409, 425]
    (outcome,) = judged(model(server, retries=2))
    assert outcome.score == 0.5
    assert len(server.asked) == 3


def test_it_may_be_one_part_of_several(server: Server) -> None:
    server.script = ["Score: 10", "no verdict"]
    reward = weighted(
        {"judge": (model(server, concurrency=1), 0.5), "right": (lambda s: float(s.completion == "4"), 1.0)}
    )
    first, second = judged(reward, sample(), sample())
    assert (first.score, first.rewards) == (1.5, {"judge": 1.0, "right": 1.0})
    assert second.kind is OutcomeKind.ABSTAINED
    assert second.rewards == {"right": 1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"template": "{answer} {completion}"}, r"no field \{answer\}(.|\n)*\{completion\}"),
        ({"template": "{completion"}, "can not be read"),
        ({"template": "{}{completion}"}, "no field"),
        ({"template": "how good is it?"}, "neither"),
        ({"url": "127.0.0.1:80"}, "http://"),
        ({"best": 0}, "best"),
        ({"timeout": float("inf")}, "timeout"),
        ({"concurrency": 0}, "concurrency"),
        ({"retries": -1}, "retries"),
        ({"pause": -1.0}, "pause"),
        ({"outage": float("nan")}, "outage"),
        ({"max_tokens": 1.5}, "max_tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgeModel(**{"url": "http://127.0.0.1:9", "model": "m", "template": "{completion}", **given})


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match=r"pip install 'ramet\[server\]'"):
        JudgeModel("http://127.0.0.1:9", "m", "{completion}")
