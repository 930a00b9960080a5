"""A policy behind a server: what is sent, what is made of the answer, and what it says when it can not."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.policies import scripted_server as scripted
from tests.policies.scripted_server import CONTEXT, MODEL, Script, ScriptedServer, Seen, changed, says

from ramet.errors import ConfigError, ModelError, ServerError
from ramet.http import Retries
from ramet.models.tiny import tiny_tokenizer
from ramet.policies.policy import by_row
from ramet.policies.server import ServerPolicy
from ramet.policies.server.facts import ServerFacts
from ramet.policies.server.requests import text_body
from ramet.types import Completion, Draw, Message, Request, Sampling, StopReason

AT_ONCE = Retries(count=2, first=0.0, longest=0.0)
QUESTION = ({"role": "user", "content": "2+2?"},)
NO_IDS: Script = says({"error": {"message": "prompt must be a string"}}, 400)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted.served() as running:
        yield running


@pytest.fixture
def texts(server: ScriptedServer) -> ScriptedServer:
    """A server that takes no token ids."""
    server.checks["/v1/completions"] = NO_IDS
    return server


def policy_for(server: ScriptedServer, **options: object) -> ServerPolicy:
    return ServerPolicy(server.url, model=MODEL, retries=AT_ONCE, timeout=5.0, **options)  # type: ignore[arg-type]


def request(
    sampling: Sampling | None = None,
    *,
    row: int = 0,
    tokens: list[int] | None = None,
    messages: tuple[Message, ...] | None = QUESTION,
) -> Request:
    prompt = torch.tensor([1, 5, 6] if tokens is None else tokens, dtype=torch.int64)
    return Request(row, prompt, sampling or Sampling(8), Draw(3, 4, row, 5), messages)


def ask(policy: ServerPolicy, asked: Request | None = None) -> Completion:
    return asyncio.run(policy.answer(asked or request()))


def test_a_server_of_tokens_gives_ids_and_log_probs(server: ScriptedServer) -> None:
    policy = policy_for(server)
    assert policy.trains
    found = ask(policy, request(row=7))
    assert (found.row, found.tokens.tolist(), found.stop, found.version) == (7, [5, 6, 2], StopReason.EOS, 0)
    assert found.log_probs.tolist() == [-0.5, -1.5, -0.25]
    assert (found.tokens.dtype, found.log_probs.dtype, found.text) == (torch.int64, torch.float32, None)


def test_every_setting_is_sent_so_that_no_default_of_the_server_applies(server: ScriptedServer) -> None:
    sampling = Sampling(8, temperature=0.5, stop_ids=(7, 9), top_k=3, min_p=0.25, stop=("END", "\n"))
    ask(policy_for(server), request(sampling))
    [seen] = server.asked()
    seed = seen.body.pop("seed")
    assert 0 <= seed < 2**53
    assert seen.body == {
        "model": MODEL,
        "prompt": [1, 5, 6],
        "max_tokens": 8,
        "n": 1,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.25,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["END", "\n"],
        "stop_token_ids": [7, 9],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": False,
    }


def test_the_seed_is_a_function_of_the_address_alone(server: ScriptedServer) -> None:
    policy = policy_for(server)
    for row, tokens in ((0, [1]), (1, [1]), (0, [1, 2, 3])):
        ask(policy, request(row=row, tokens=tokens))
    seeds = [seen.body["seed"] for seen in server.asked()]
    assert seeds[0] == seeds[2] != seeds[1]


@pytest.mark.parametrize(
    ("said", "sampling", "stop"),
    [
        ({"finish_reason": "stop"}, Sampling(8), StopReason.EOS),
        ({"finish_reason": "stop", "stop_reason": 2}, Sampling(8, stop_ids=(2,)), StopReason.STOP),
        ({"finish_reason": "stop", "stop_reason": 2}, Sampling(8, stop_ids=(3,)), StopReason.EOS),
        ({"finish_reason": "stop", "stop_reason": "x"}, Sampling(8, stop=("x",)), StopReason.STOP),
        ({"finish_reason": "length"}, Sampling(3), StopReason.NEW_TOKENS),
        ({"finish_reason": "length"}, Sampling(4), StopReason.CONTEXT),
    ],
)
def test_the_end_is_told(server: ScriptedServer, said: dict[str, object], sampling: Sampling, stop: StopReason) -> None:
    server.next(changed(**said))
    assert ask(policy_for(server), request(sampling)).stop is stop


@pytest.mark.parametrize(
    ("length", "limit", "stop"),
    [
        (CONTEXT - 4, 3, StopReason.NEW_TOKENS),
        (CONTEXT - 3, 3, StopReason.NEW_TOKENS),
        (CONTEXT - 3, 4, StopReason.CONTEXT),
        (CONTEXT, 4, StopReason.PROMPT_TOO_LONG),
        (CONTEXT + 1, 4, StopReason.PROMPT_TOO_LONG),
    ],
)
def test_no_more_is_asked_for_than_the_context_holds(
    server: ScriptedServer, length: int, limit: int, stop: StopReason
) -> None:
    server.next(changed(finish_reason="length"))
    found = ask(policy_for(server), request(Sampling(limit), tokens=[1] * length))
    assert found.stop is stop
    assert len(found.tokens) == (0 if stop is StopReason.PROMPT_TOO_LONG else 3)
    assert [seen.body["max_tokens"] for seen in server.asked()] == [3] * (stop is not StopReason.PROMPT_TOO_LONG)


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_finds_the_prompt_too_long_is_believed(server: ScriptedServer, status: int) -> None:
    server.always["/v1/models"] = says({"data": [{"id": MODEL}]})
    server.next(says({"error": {"message": "This model's maximum context length is 16 tokens."}}, status))
    found = ask(policy_for(server), request(tokens=[1] * 99))
    assert (found.stop, len(found.tokens), len(found.log_probs)) == (StopReason.PROMPT_TOO_LONG, 0, 0)


def test_greedy_tokens_have_no_log_probs_and_empty_completions_are_legal(server: ScriptedServer) -> None:
    policy = policy_for(server)
    assert ask(policy, request(Sampling(8, temperature=0.0))).log_probs.isnan().tolist() == [True] * 3
    server.next(changed(token_ids=[], logprobs={"token_logprobs": []}))
    found = ask(policy)
    assert (found.tokens.shape, found.log_probs.shape) == ((0,), (0,))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(tokens=[]), "row 0 has no tokens"),
        (request(Sampling(8, temperature=0.005)), "takes a temperature of 0.005 for 0.01"),
        (request(Sampling(8, top_p=0.9, min_p=0.1)), "found 0.1 and 0.9"),
    ],
)
def test_rows_that_would_be_sampled_otherwise_are_refused(server: ScriptedServer, asked: Request, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ask(policy_for(server), asked)
    with pytest.raises(ModelError, match=words):
        list(policy_for(server).complete([asked]))
    assert server.asked() == []


@pytest.mark.parametrize(
    "top", [[{"a": -0.5, "b": -1.5}], [{"a": -1.0, "b": -1.0}], [{"a": 0.0}], [], None, [{"a": "b"}]]
)
def test_raw_log_probs_are_taken_only_where_they_are_those_of_what_was_sampled(
    server: ScriptedServer, top: list[dict[str, float]] | None
) -> None:
    async def check(seen: Seen, writer: asyncio.StreamWriter) -> None:
        answer = scripted.completion(seen)
        answer["choices"][0]["logprobs"]["top_logprobs"] = top
        await says(answer)(seen, writer)

    server.checks["/v1/completions"] = check
    policy = policy_for(server)
    assert not policy.check().processed
    assert ask(policy).log_probs.tolist() == [-0.5, -1.5, -0.25]
    assert ask(policy, request(Sampling(8, temperature=0.0))).log_probs.isnan().all()
    for sampling in (
        Sampling(8, temperature=0.5),
        Sampling(8, top_k=5),
        Sampling(8, top_p=0.9),
        Sampling(8, min_p=0.1),
    ):
        with pytest.raises(ModelError, match="--logprobs-mode processed_logprobs"):
            ask(policy, request(sampling))


def test_log_probs_of_tokens_that_were_cut_away_tell_a_processed_server(server: ScriptedServer) -> None:
    assert policy_for(server).check() == ServerFacts(True, "", True, CONTEXT)


def test_a_server_of_texts_says_so_once_and_serves_for_evaluation(texts: ScriptedServer) -> None:
    policy = policy_for(texts, tokenizer=tiny_tokenizer())
    with pytest.warns(UserWarning, match="gives text and neither token ids nor log-probs: .*must be a string"):
        assert not policy.trains
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ask(policy)
        policy.check()
    assert found.text == "four"
    assert found.tokens.tolist() == tiny_tokenizer()("four", add_special_tokens=False)["input_ids"]
    assert found.log_probs.isnan().tolist() == [True] * len(found.tokens)
    assert (found.stop, found.version) == (StopReason.EOS, 0)


def test_calls_go_to_a_server_of_texts_as_its_api_writes_them() -> None:
    """Arguments as JSON text, and a call that could not be read without what was found wrong with it."""
    read = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    bad = {
        "type": "function", "id": "c2", "function": {"name": "add", "arguments": {}}, "error": "no JSON", "text": "{",
    }  # fmt: skip
    turn: Message = {"role": "assistant", "content": None, "tool_calls": [read, bad]}
    answer: Message = {"role": "tool", "name": "add", "content": "1", "tool_call_id": "c1"}
    asked = Request(0, torch.tensor([1]), Sampling(8), Draw(0, 0, 0), (*QUESTION, turn, answer))
    [*_, written, told] = text_body(MODEL, asked)["messages"]
    assert written == {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"type": "function", "id": "c2", "function": {"name": "add", "arguments": "{}"}},
        ],
    }
    assert told == answer


def test_words_are_sent_to_a_server_of_texts(texts: ScriptedServer) -> None:
    policy = ServerPolicy(texts.url + "/v1", model=MODEL, api="text", tokenizer=tiny_tokenizer(), retries=AT_ONCE)
    tool = {"type": "function", "function": {"name": "add"}}
    sampling = Sampling(8, temperature=0.5, top_p=0.9, stop=("END",), stop_ids=(2,))
    asked = Request(0, torch.tensor([1]), sampling, Draw(0, 0, 0), QUESTION, (tool,))
    with pytest.warns(UserWarning, match="its text alone was asked for"):
        ask(policy, asked)
    [seen] = texts.asked("/v1/chat/completions")
    del seen.body["seed"]
    assert seen.body == {
        "model": MODEL,
        "messages": [*QUESTION],
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "tools": [tool],
        "stream": False,
    }


@pytest.mark.filterwarnings("ignore:.*gives text and neither")
@pytest.mark.parametrize("listed", [True, False])
def test_a_bad_moment_of_a_server_that_lists_its_models_is_left_to_the_rows(
    texts: ScriptedServer, listed: bool
) -> None:
    texts.checks["/v1/chat/completions"] = says({"error": "too busy"}, 503)
    if not listed:
        texts.always["/v1/models"] = says({"error": "no such page"}, 404)
    policy = policy_for(texts, tokenizer=tiny_tokenizer())
    if listed:
        assert ask(policy).text == "four"
        return
    with pytest.raises(ServerError, match="too busy"):
        ask(policy)


@pytest.mark.filterwarnings("ignore:.*gives text and neither")
class TestTexts:
    """What is made of texts."""

    def answer(self, texts: ScriptedServer, answer: object, sampling: Sampling | None = None) -> Completion:
        texts.next(says(answer), path="/v1/chat/completions")
        return ask(policy_for(texts, tokenizer=tiny_tokenizer()), request(sampling))

    def said(self, **parts: object) -> dict[str, object]:
        return scripted.chat(Seen("POST", "", {}, {"model": MODEL}), **parts)  # type: ignore[arg-type]

    def test_calls_are_written_back_into_the_text(self, texts: ScriptedServer) -> None:
        calls = [
            {"function": {"name": "add", "arguments": '{"a": 1}'}},
            {"function": {"name": "é", "arguments": {"b": "ü"}}},
            {"function": {"name": "broken", "arguments": '{"a": '}},
            {"function": {"name": "none", "arguments": ""}},
        ]
        found = self.answer(
            texts, self.said(message={"content": None, "tool_calls": calls}, finish_reason="tool_calls")
        )
        assert found.text is not None
        lines = found.text.replace("<tool_call>\n", "").split("\n</tool_call>")
        assert [json.loads(lines[number]) for number in (0, 1, 3)] == [
            {"name": "add", "arguments": {"a": 1}},
            {"name": "é", "arguments": {"b": "ü"}},
            {"name": "none", "arguments": {}},
        ]
        assert lines[2].strip() == '{"name": "broken", "arguments": {"a": }'

    def test_ends_are_told_by_the_count_of_tokens(self, texts: ScriptedServer) -> None:
        assert self.answer(texts, self.said(finish_reason="length"), Sampling(3)).stop is StopReason.NEW_TOKENS
        assert self.answer(texts, self.said(finish_reason="length"), Sampling(9)).stop is StopReason.CONTEXT
        without = {**self.said(finish_reason="length"), "usage": None}
        assert self.answer(texts, without, Sampling(9)).stop is StopReason.NEW_TOKENS

    def test_a_longer_name_of_the_model_is_its_own(self, texts: ScriptedServer) -> None:
        assert self.answer(texts, {**self.said(), "model": f"{MODEL}-2026-01-01"}).text == "four"
        with pytest.raises(ServerError, match="found one of 'other'"):
            self.answer(texts, {**self.said(), "model": "other"})

    @pytest.mark.parametrize(
        ("parts", "words"),
        [
            ({"message": {"content": [1]}}, r"whose content is text, found \[1\]"),
            ({"message": {"tool_calls": {}}}, "calls in a list, found {}"),
            ({"message": {"tool_calls": ["add"]}}, "calls with the name of a function, found 'add'"),
            ({"finish_reason": "content_filter"}, "found 'content_filter'"),
        ],
    )
    def test_what_is_no_message_is_refused(self, texts: ScriptedServer, parts: dict[str, object], words: str) -> None:
        with pytest.raises(ServerError, match=words):
            self.answer(texts, self.said(**parts))

    def test_an_empty_message_is_an_empty_completion(self, texts: ScriptedServer) -> None:
        found = self.answer(texts, self.said(message={"content": None}))
        assert (found.text, found.tokens.tolist(), found.stop) == ("", [], StopReason.EOS)

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            (request(messages=None), "row 0 has no messages, and the server takes no tokens"),
            (request(Sampling(8, top_k=4)), "samples with top_k, for which"),
            (request(Sampling(8, top_k=4, min_p=0.5)), "samples with top_k and min_p, for which"),
        ],
    )
    def test_what_has_no_words_is_refused(self, texts: ScriptedServer, asked: Request, words: str) -> None:
        with pytest.raises(ModelError, match=words):
            ask(policy_for(texts, tokenizer=tiny_tokenizer()), asked)


def test_text_without_a_tokenizer_is_refused(texts: ScriptedServer) -> None:
    policy = policy_for(texts)
    for _ in range(2):
        with pytest.raises(ConfigError, match="there is no tokenizer to turn it into tokens"):
            ask(policy)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (NO_IDS, "completes no token ids: .*status 400: prompt must be a string"),
        (says({"choices": []}), "completions have no choices"),
        (says({"choices": [{"text": "a"}]}), "completions have no token_ids"),
        (says({"choices": [{"token_ids": [1], "logprobs": None}]}), "completions have no log-probs"),
        (
            says({"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}]}),
            "completions have 1 log-probs for 2 tokens",
        ),
    ],
)
def test_tokens_that_were_asked_for_must_be_there(server: ScriptedServer, script: Script, words: str) -> None:
    server.checks["/v1/completions"] = script
    with pytest.raises(ServerError, match=words):
        policy_for(server, api="tokens").check()
    with pytest.warns(UserWarning, match="can not be trained on"):
        assert not policy_for(server, tokenizer=tiny_tokenizer()).trains


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_lets_nobody_in_is_no_server_of_texts(server: ScriptedServer, status: int) -> None:
    server.checks["/v1/completions"] = says({"error": "no"}, status)
    with pytest.raises(ServerError, match=f"status {status}"):
        policy_for(server, tokenizer=tiny_tokenizer()).check()


def test_a_model_that_is_not_served_is_named_with_those_that_are(server: ScriptedServer) -> None:
    server.checks["/v1/completions"] = says({"error": {"message": "no model gpt"}}, 404)
    with pytest.raises(ServerError, match="no model gpt; it serves served"):
        ServerPolicy(server.url, model="gpt", tokenizer=tiny_tokenizer(), retries=AT_ONCE).check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "other"}, "was asked for 'served' and answers as 'other'"),
        ({"choices": [{"token_ids": [3, 30], "logprobs": {"token_logprobs": [-1, -1]}}]}, "samples token 30, and"),
    ],
)
def test_another_model_is_found_out_at_the_start(
    server: ScriptedServer, changes: dict[str, object], words: str
) -> None:
    async def check(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await says({**scripted.completion(seen), **changes})(seen, writer)

    server.checks["/v1/completions"] = check
    for api in ("auto", "tokens"):
        with pytest.raises(ServerError, match=words):
            policy_for(server, vocabulary=30, api=api).check()


def test_another_tokenizer_is_found_out_at_the_start(server: ScriptedServer) -> None:
    """Where the server says how it tokenises, as vLLM does."""
    own = tiny_tokenizer()
    asked: list[object] = []

    def tokenises(change: dict[int, int]) -> Script:
        async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
            asked.append({key: seen.body[key] for key in ("model", "add_special_tokens")})
            ids = own(seen.body["prompt"], add_special_tokens=False)["input_ids"]
            await says({"tokens": [change.get(token, token) for token in ids]})(seen, writer)

        return script

    policy = policy_for(server, tokenizer=own)
    server.always["/tokenize"] = tokenises({})
    assert policy.check().tokens
    server.always["/tokenize"] = tokenises({own.convert_tokens_to_ids("q"): 80})
    with pytest.raises(ConfigError, match=r"has another tokenizer than this run: .*, \[80, .* at 7, and this run"):
        policy.check()
    with pytest.raises(ConfigError, match="has another tokenizer"):
        ask(policy)
    assert asked[0] == {"model": MODEL, "add_special_tokens": False}
    for silent in (says({}), says([1]), says({"error": "x"}, 404), says({"error": {"code": [1]}})):
        server.always["/tokenize"] = silent
        assert policy.check().tokens


def test_a_list_of_models_that_is_missing_or_odd_is_no_fault(server: ScriptedServer) -> None:
    for script in (says({}, 404), says({}), says({"data": None}), says([1]), says({"data": [1, {"id": MODEL}]})):
        server.always["/v1/models"] = script
        assert policy_for(server).check() == ServerFacts(True, "", True, None)


def test_no_more_rows_are_under_way_than_allowed_and_all_are_answered(server: ScriptedServer) -> None:
    async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.005)
        await scripted.good(seen, writer)

    server.always["/v1/completions"] = slow
    policy = policy_for(server, concurrency=3)
    found = by_row(policy.complete([request(row=row) for row in range(20)]), 20)
    assert [one.row for one in found] == list(range(20))
    assert server.most == 3


def test_rows_come_in_the_order_in_which_they_finish(server: ScriptedServer) -> None:
    first = threading.Event()

    async def held(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.get_running_loop().run_in_executor(None, first.wait)
        await scripted.good(seen, writer)

    async def by_prompt(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (held if seen.body["prompt"] == [1] else scripted.good)(seen, writer)

    server.always["/v1/completions"] = by_prompt
    order = []
    for found in policy_for(server).complete([request(tokens=[1]), request(row=1), request(row=2)]):
        order.append(found.row)
        if len(order) == 2:
            first.set()
    assert sorted(order[:2]) == [1, 2]
    assert order[2] == 0


def test_no_rows_ask_nothing(server: ScriptedServer) -> None:
    assert list(policy_for(server).complete([])) == []
    assert server.seen == []


def test_the_health_check_runs_once_for_all_rows(server: ScriptedServer) -> None:
    list(policy_for(server).complete([request(row=row) for row in range(5)]))
    assert len([seen for seen in server.seen if seen.probe]) == 1


def test_one_policy_serves_many_loops_one_after_another_and_at_once(server: ScriptedServer) -> None:
    policy = policy_for(server)
    for _ in range(3):
        ask(policy)
    threads = [threading.Thread(target=ask, args=(policy,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(server.asked()) == 7
    ask(policy)
    assert len(policy._here) == 1  # loops that ended are forgotten


def test_sync_forms_inside_a_loop_say_what_to_await(server: ScriptedServer) -> None:
    policy = policy_for(server)

    async def inside() -> None:
        with pytest.raises(RuntimeError, match=r"await check_async\(\) in its place"):
            policy.check()
        assert (await policy.check_async()).tokens
        assert policy.trains

    asyncio.run(inside())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "expected http://HOST:PORT"),
        ("ftp://host", "found 'ftp://host'"),
        ("http://", "expected http://HOST:PORT"),
        ("http://host/v1?key=1", "expected http://HOST:PORT"),
        ("http://me:secret@host", "found a name and a password in it"),
        ("http://host:port", "expected http://HOST:PORT"),
        ("http://host:70000", "a port from 1 to 65535, found 70000"),
        ("http://host:0/v1", "a port from 1 to 65535, found 0"),
    ],
)
def test_what_is_no_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        ServerPolicy(url, model=MODEL)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api": "words"}, 'expected "auto", "tokens" or "text"'),
        ({"concurrency": 0}, "a whole number from 1 on, found 0"),
        ({"concurrency": True}, "a whole number from 1 on, found True"),
        ({"timeout": 0}, "seconds above 0, found 0"),
        ({"timeout": float("nan")}, "seconds above 0, found nan"),
        ({"outage": -1.0}, "seconds from 0 on, found -1.0"),
        ({"outage": float("inf")}, "seconds from 0 on, found inf"),
        ({"api_key": "key\n"}, "printable ASCII"),
        ({"api": "text"}, "needs a tokenizer"),
    ],
)
def test_options_that_can_not_be_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerPolicy("http://127.0.0.1:1", model=MODEL, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"count": -1}, {"count": 1.5}, {"first": -1.0}, {"first": 9.0, "longest": 1.0}])
def test_retries_that_can_not_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="found"):
        Retries(**wrong)  # type: ignore[arg-type]
