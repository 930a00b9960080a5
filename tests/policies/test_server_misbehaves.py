"""A server that misbehaves in every way that HTTP can, and what comes of each: another try, or the reason."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.policies import scripted_server as scripted
from tests.policies.scripted_server import MODEL, Script, ScriptedServer, changed, good, head, says, sends

from ramet.errors import ServerError
from ramet.http import Retries
from ramet.http import exchange as server_http
from ramet.http import retries as server_retries
from ramet.policies.server import ServerPolicy
from ramet.types import Completion, Draw, Request, Sampling, StopReason

AT_ONCE = Retries(count=2, first=0.0, longest=0.0)
RIGHT = ([5, 6, 2], [-0.5, -1.5, -0.25], StopReason.EOS)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted.served() as running:
        yield running


def policy_for(
    server: ScriptedServer, *, retries: Retries = AT_ONCE, timeout: float = 5.0, outage: float = 600.0
) -> ServerPolicy:
    return ServerPolicy(server.url, model=MODEL, retries=retries, timeout=timeout, outage=outage, vocabulary=30)


def request(row: int = 0, sampling: Sampling | None = None) -> Request:
    return Request(row, torch.tensor([1, 5, row]), sampling or Sampling(8), Draw(0, row, 0))


def ask(policy: ServerPolicy, asked: Request | None = None) -> Completion:
    return asyncio.run(policy.answer(asked or request()))


def content(found: Completion) -> tuple[list[int], list[float], StopReason]:
    return found.tokens.tolist(), found.log_probs.tolist(), found.stop


WHOLE = json.dumps({"model": MODEL, "choices": []}).encode()
CHUNKED = "Transfer-Encoding: chunked"

AGAIN: dict[str, Script] = {
    "closes before the status line": sends(),
    "closes in the status line": sends(b"HTTP/1.1 2"),
    "closes in the headers": sends(b"HTTP/1.1 200 OK\r\nContent-Type: appl"),
    "closes in the body": sends(head(length=1000) + WHOLE),
    "breaks the connection in the body": scripted.reset,
    "says no HTTP": sends(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "half a JSON": says(b'{"model": "served", "choices": [{"index": 0'),
    "no UTF-8": says(b'{"model": "\xff\xfe"}'),
    "JSON nested too deeply": says(b"[" * 100_000),
    "two answers in one": says(WHOLE + WHOLE),
    "a length that is too short": sends(head(length=10) + WHOLE),
    "a length that is no number": sends(head(more="Content-Length: many") + WHOLE),
    "two lengths": sends(head(length=5, more="Content-Length: 7") + WHOLE),
    "chunks that are none": sends(head(more=CHUNKED) + b"zz\r\nrubbish\r\n"),
    "chunks without an end": sends(head(more=CHUNKED) + b"5\r\nabcde\r\n"),
    "packed rubbish": says(b"rubbish", more="Content-Encoding: gzip"),
    "an error that passes, in a 200": says({"error": {"message": "busy", "code": 503}}),
    "gives the row up": changed(finish_reason="abort"),
    "never answers": scripted.silence,
    "drips": scripted.drip,
    **{f"status {status}": says({"error": "x"}, status) for status in (408, 425, 429, 500, 502, 503, 504)},
}


@pytest.mark.parametrize("name", AGAIN)
def test_what_may_pass_is_asked_again(server: ScriptedServer, name: str) -> None:
    server.next(AGAIN[name], AGAIN[name])
    found = ask(policy_for(server, timeout=0.25 if name in ("never answers", "drips") else 5.0))
    assert content(found) == RIGHT
    assert len(server.asked()) == 3


@pytest.mark.parametrize("name", AGAIN)
def test_what_does_not_pass_fails_after_the_last_try(server: ScriptedServer, name: str) -> None:
    server.next(*[AGAIN[name]] * 2)
    quick = 0.25 if name in ("never answers", "drips") else 5.0
    policy = policy_for(server, retries=Retries(count=1, first=0.0, longest=0.0), timeout=quick)
    with pytest.raises(ServerError, match=r"\(2 tries\)") as raised:
        ask(policy)
    assert f"{server.url}/v1/completions" in str(raised.value) or "answer of" in str(raised.value)
    assert len(server.asked()) == 2
    assert content(ask(policy)) == RIGHT  # and the server is used again


def logged(*values: object) -> Script:
    return changed(logprobs={"token_logprobs": list(values)})


@dataclass(frozen=True)
class Failure:
    """A script, and words of the message that it must lead to."""

    script: Script
    words: str


async def large(seen: scripted.Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(head(length=10**9))
    for _ in range(100):
        writer.write(b" " * 2**16)
        await writer.drain()


AT_LAST: dict[str, Failure] = {
    "another content": Failure(says(b"<html></html>", kind="text/html"), "expected application/json, found text/html"),
    "a stream": Failure(says(b"data: {}\n\n", kind="text/event-stream"), "found text/event-stream"),
    "nothing": Failure(says(b""), "expected an object, found None"),
    "a list": Failure(says([1]), r"expected an object, found \[1\]"),
    "an error in a 200": Failure(says({"error": {"message": "no such luck"}}), "status 200 with an error in it: no"),
    "no choices": Failure(says({"model": MODEL}), "expected one choice, found None"),
    "0 choices": Failure(says({"model": MODEL, "choices": []}), "expected one choice, found 0 of them"),
    "2 choices": Failure(says({"model": MODEL, "choices": [{}, {}]}), "expected one choice, found 2 of them"),
    "a choice of text": Failure(says({"model": MODEL, "choices": ["a"]}), "expected one choice"),
    "another model": Failure(says({"model": "other", "choices": [{}]}), "the model 'served', found one of 'other'"),
    "another prompt": Failure(changed(prompt_token_ids=[9]), r"the prompt that was sent, found another: \[9\]"),
    "no ids": Failure(changed(token_ids=None), "expected token_ids, found None"),
    "ids of text": Failure(changed(token_ids=["5", 6, 2]), "whole numbers as token ids, found '5' at 0"),
    "broken ids": Failure(changed(token_ids=[5, 6.5, 2]), "whole numbers as token ids, found 6.5 at 1"),
    "ids that are true": Failure(changed(token_ids=[5, 6, True]), "whole numbers as token ids, found True at 2"),
    "negative ids": Failure(changed(token_ids=[5, -1, 2]), "token ids from 0 to 29, found -1 at 1"),
    "unknown ids": Failure(changed(token_ids=[5, 30, 2]), "token ids from 0 to 29, found 30 at 1"),
    "huge ids": Failure(changed(token_ids=[5, 10**30, 2]), "token ids from 0 to 29, found 1000"),
    "more ids than asked for": Failure(changed(token_ids=[5] * 9), "expected at most 8 tokens, found 9"),
    "no log-probs": Failure(changed(logprobs=None), "log-probs of the tokens, found None"),
    "empty log-probs": Failure(changed(logprobs={}), "log-probs of the tokens, found {}"),
    "too few log-probs": Failure(logged(-1.0, -1.0), "one log-prob for each of 3 tokens, found 2"),
    "too many log-probs": Failure(logged(-1, -1, -1, -1), "one log-prob for each of 3 tokens, found 4"),
    "a missing log-prob": Failure(logged(-1.0, None, -1.0), "numbers as log-probs, found None at 1"),
    "a log-prob of text": Failure(logged(-1.0, -1.0, "-1"), "numbers as log-probs, found '-1' at 2"),
    "a log-prob that is true": Failure(logged(-1.0, -1.0, False), "numbers as log-probs, found False at 2"),
    "NaN": Failure(logged(math.nan, -1.0, -1.0), "finite log-probs that are not above 0, found nan at 0"),
    "infinity": Failure(logged(-1.0, math.inf, -1.0), "finite log-probs that are not above 0, found inf at 1"),
    "minus infinity": Failure(logged(-1.0, -math.inf, -1.0), "found -inf at 1"),
    "probability 0": Failure(logged(-1.0, -9999.0, -1.0), "found -9999.0 at 1"),
    "a huge number": Failure(logged(-1.0, -(10**400), -1.0), "found -1000"),
    "a positive log-prob": Failure(logged(-1.0, 0.5, -1.0), "found 0.5 at 1"),
    "no reason for the end": Failure(changed(finish_reason=None), 'an end by "stop" or "length", found None'),
    "another reason": Failure(changed(finish_reason="content_filter"), "found 'content_filter'"),
    "too large": Failure(large, "the answer is larger than 65536 bytes"),
    "a redirect": Failure(says({}, 307, more="Location: http://127.0.0.1:1/"), "a redirect to http://127.0.0.1:1/"),
    **{f"status {status}": Failure(says({"error": {"message": f"no {status}"}}, status), f"{status}: no {status}")
       for status in (400, 401, 403, 404, 405, 413, 422, 501, 505)},
}  # fmt: skip


@pytest.mark.parametrize("name", AT_LAST)
def test_what_can_not_pass_fails_at_once_and_says_why(
    server: ScriptedServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_http, "LARGEST", 2**16)
    server.next(AT_LAST[name].script)
    policy = policy_for(server)
    with pytest.raises(ServerError, match=AT_LAST[name].words):
        ask(policy)
    assert len(server.asked()) == 1
    assert content(ask(policy)) == RIGHT


@pytest.mark.parametrize("value", [0.0, 1e-4, -0.0])
def test_a_log_prob_just_above_0_is_rounding(server: ScriptedServer, value: float) -> None:
    server.next(logged(value, -1.0, -8999.0))
    assert ask(policy_for(server)).log_probs.tolist() == [0.0, -1.0, -8999.0]


def test_a_second_answer_on_the_wire_is_nobodys(server: ScriptedServer) -> None:
    """A server that answers one request twice leaves an answer behind, which must not be taken for the next one's."""

    async def twice(seen: scripted.Seen, writer: asyncio.StreamWriter) -> None:
        await changed(token_ids=[9, 9, 9])(seen, writer)
        await changed(token_ids=[8, 8, 8])(seen, writer)

    server.next(twice)
    policy = policy_for(server)
    assert ask(policy).tokens.tolist() == [9, 9, 9]
    assert content(ask(policy)) == RIGHT


def test_a_port_that_refuses_is_asked_again_and_costs_its_rows_alone() -> None:
    with scripted.served() as gone:
        policy = policy_for(gone, outage=0.0)
        assert content(ask(policy)) == RIGHT
    with pytest.warns(UserWarning, match=r"3 of 3 rows have no answer: POST .*ConnectError.*\(3 tries\)"):
        found = list(policy.complete([request(row) for row in range(3)]))
    assert sorted(one.row for one in found) == [0, 1, 2]
    assert [(*content(one), one.version) for one in found] == [([], [], StopReason.ERROR, 0)] * 3
    back = ScriptedServer(port=gone.port)
    with back:  # started anew at the same place
        assert content(ask(policy)) == RIGHT


def test_a_server_that_dies_in_the_middle_costs_the_rows_under_way_and_no_others(server: ScriptedServer) -> None:
    policy = policy_for(server, retries=Retries(count=0))
    policy.check()
    server.next(good, scripted.reset, good, scripted.reset, good)
    with pytest.warns(UserWarning, match="2 of 5 rows have no answer"):
        found = list(policy.complete([request(row) for row in range(5)]))
    ends = sorted(one.stop for one in found)
    assert ends == [StopReason.EOS] * 3 + [StopReason.ERROR] * 2
    assert sorted(one.row for one in found) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("after", "waits"),
    [
        (None, [1.0, 2.0, 4.0, 5.0]),
        ("3", [3.0, 3.0, 4.0, 5.0]),
        ("900", [5.0] * 4),
        ("soon", [1.0, 2.0, 4.0, 5.0]),
        ("-4", [1.0, 2.0, 4.0, 5.0]),
        ("nan", [1.0, 2.0, 4.0, 5.0]),
        ("Wed, 21 Oct 2015 07:28:00 GMT", [1.0, 2.0, 4.0, 5.0]),
        ("Wed, 21 Oct 2105 07:28:00 GMT", [5.0] * 4),
    ],
)
def test_waits_double_and_a_server_may_ask_for_longer_ones(
    server: ScriptedServer, after: str | None, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(server_retries, "sleep", sleep)
    monkeypatch.setattr(server_retries, "_spread", lambda *_: 0.0)
    more = "" if after is None else f"Retry-After: {after}"
    server.next(*[says({}, 429, more=more)] * 4)
    assert content(ask(policy_for(server, retries=Retries(count=4, first=1.0, longest=5.0)))) == RIGHT
    assert waited == waits


def test_waits_are_spread_by_the_address_of_the_row_alone(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(server_retries, "sleep", sleep)
    policy = policy_for(server, retries=Retries(count=1, first=1.0))
    for row in (0, 0, 1):
        server.next(says({}, 500), good)
        ask(policy, request(row))
    assert all(0.5 <= wait <= 1.0 for wait in waited)
    assert waited[0] == waited[1] != waited[2]


def contexts(folder: Path) -> ssl.SSLContext:
    """Return the side of a server whose certificate nobody signed but itself."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    kind = serialization.Encoding.PEM
    form, lock = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "pair.pem").write_bytes(key.private_bytes(kind, form, lock) + certificate.public_bytes(kind))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "pair.pem")
    return context


def test_a_certificate_that_nobody_signed_is_refused_at_once(tmp_path: Path) -> None:
    with scripted.served(contexts(tmp_path)) as server:
        with pytest.raises(ServerError, match="the server's certificate is not trusted") as raised:
            policy_for(server).check()
        assert raised.value.hint is not None
        assert server.seen == []


def test_a_server_without_tls_is_refused_at_once(server: ScriptedServer) -> None:
    policy = ServerPolicy(server.url.replace("http:", "https:"), model=MODEL, retries=AT_ONCE)
    with pytest.raises(ServerError, match="no secure connection") as raised:
        policy.check()
    assert raised.value.hint == "does the server speak http:// alone?"


def test_the_key_is_sent_and_never_shown(server: ScriptedServer) -> None:
    policy = ServerPolicy(server.url, model=MODEL, api_key="sesame", retries=AT_ONCE)
    server.next(says({"error": "who are you?"}, 401))
    with pytest.raises(ServerError, match=r"status 401: who are you\?") as raised:
        ask(policy)
    assert {seen.headers.get("authorization") for seen in server.seen} == {"Bearer sesame"}
    assert "sesame" not in str(raised.value)
    assert "sesame" not in repr(policy._http)


def test_nothing_stays_open_behind_a_caller_that_goes_away(server: ScriptedServer) -> None:
    before = threading.active_count()
    server.next(*[scripted.silence] * 2, good)
    policy = policy_for(server)
    policy.check()
    answers = policy.complete([request(row) for row in range(3)])
    assert content(next(answers)) == RIGHT
    answers.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert policy._gate.empty
