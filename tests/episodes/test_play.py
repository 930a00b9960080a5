"""One episode: how it goes on, how it ends, and what is left of it where something fails."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import pytest
import torch
from tests.episodes import clock
from tests.episodes.stage import (
    CALL,
    CHAT,
    EOS,
    RULES,
    TOKENIZER,
    contents,
    ids,
    of_kind,
    played,
    saying,
    script,
    starts,
    task,
)

from ramet.episodes import Rules, Start, WrongReply, play
from ramet.errors import RewardError
from ramet.tasks.replies import as_messages
from ramet.tasks.task import rng_of
from ramet.tools.toolbox import Toolbox
from ramet.types import Completion, Episode, Kind, Message, OutcomeKind, Request, Sampling, StopReason


def _raise(error: Exception) -> NoReturn:
    raise error


# ---------------------------------------------------------------- how it goes on


def test_an_episode_of_one_turn_is_a_prompt_and_an_answer() -> None:
    [episode] = played(task(), script("yes"))
    assert episode.stop is StopReason.EOS
    assert episode.outcome is not None
    assert episode.outcome.score == 1.0
    [piece] = episode.pieces
    assert piece.tokens == [TOKENIZER.bos_token_id, *ids("go "), *ids("yes"), EOS]
    assert piece.kinds == [Kind.PROMPT] * 4 + [Kind.SAMPLED] * 4
    assert piece.log_probs[4:] == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    sample = episode.sample
    assert (sample.prompt, sample.completion) == ("go ", "yes")
    assert sample.prompt_tokens + sample.completion_tokens == tuple(piece.tokens)
    assert (sample.group, sample.member, sample.stop) == (10, 0, StopReason.EOS)
    assert contents(episode) == ["go ", "yes"]


@pytest.mark.parametrize(
    "said",
    [
        "no ",
        {"role": "user", "content": "no "},
        [{"role": "user", "content": "n"}, {"role": "user", "content": "o "}],
    ],
)
def test_what_the_environment_replies_is_read_and_never_trained_on(said: Any) -> None:
    def reply(episode: Episode) -> Any:
        return said if episode.text == "a" else None

    [episode] = played(task(reply=reply), script("a", "b"))
    assert of_kind(episode, Kind.SAMPLED) == [*ids("a"), EOS, *ids("b"), EOS]
    assert of_kind(episode, Kind.ENVIRONMENT) == ids("no ")
    assert episode.sample.completion == "b"
    assert episode.sample.completion_tokens == (*ids("a"), EOS, *ids("b"), EOS)
    assert episode.stop is StopReason.EOS


def test_a_reply_sees_the_episode_as_it_is() -> None:
    seen: list[tuple[int, str, list[str], Any]] = []

    def reply(episode: Episode) -> str | None:
        seen.append((episode.turns, episode.text, [m["content"] for m in episode.messages], episode.state))
        episode.state += 1
        return None if episode.turns == 2 else "?"

    [episode] = played(task(reply=reply, begin=lambda row, rng: len(row["prompt"])), script("a", "b"))
    assert seen == [(1, "a", ["go ", "a"], 3), (2, "b", ["go ", "a", "?", "b"], 4)]
    assert episode.sample.state == 5


def _rewrites(messages: list[Message]) -> None:
    for message in messages:
        message["content"] = "changed"


@pytest.mark.parametrize("change", [list.clear, list.pop, _rewrites, lambda found: found.append(dict(found[0]))])
def test_what_a_reply_does_to_the_messages_changes_no_token_and_nothing_that_is_judged(
    change: Callable[[list[Message]], None],
) -> None:
    def reply(episode: Episode) -> str | None:
        change(episode.messages)
        return "?" if episode.turns == 1 else None

    [episode] = played(task(reply=reply), script("a", "b"))
    assert episode.pieces[0].tokens == [1, *ids("go a"), EOS, *ids("?b"), EOS]
    assert [message["content"] for message in episode.sample.messages] == ["go ", "a", "?", "b"]


@pytest.mark.parametrize("kind", ["async", "object", "lambda"])
def test_functions_of_a_task_may_be_async(kind: str) -> None:
    async def reply(episode: Episode) -> str | None:
        await asyncio.sleep(1)
        return None if episode.turns == 2 else "?"

    class Replying:
        async def __call__(self, episode: Episode) -> str | None:
            return await reply(episode)

    functions: dict[str, Callable[[Episode], Any]] = {
        "async": reply,
        "object": Replying(),
        "lambda": lambda episode: reply(episode),
    }
    [episode] = played(task(reply=functions[kind]), script("a", "b"))
    assert contents(episode) == ["go ", "a", "?", "b"]


def test_requests_carry_the_address_of_their_draws_and_the_conversation_in_words() -> None:
    asked: list[Request] = []

    async def answer(request: Request) -> Completion:
        asked.append(request)
        return saying(request, "a")

    begun = [Start({"prompt": "go "}, group=7, member=2, prompt_index=5)]
    played(task(reply=lambda episode: "?", max_turns=2), answer, begun)
    assert [dataclasses.astuple(request.draw) for request in asked] == [(3, 7, 2, 0), (3, 7, 2, 1)]
    assert [request.tokens.tolist() for request in asked] == [[1, *ids("go ")], [1, *ids("go a"), EOS, *ids("?")]]
    assert [len(request.messages or ()) for request in asked] == [1, 3]
    assert {request.tools for request in asked} == {()}


def test_members_of_a_group_meet_the_same_world_whatever_runs_beside_them() -> None:
    def begin(row: Any, rng: random.Random) -> list[float]:
        return [rng.random()]

    def reply(episode: Episode) -> str | None:
        episode.state.append(episode.rng.random())
        return None if episode.turns == 3 else "?"

    begun = [Start({"prompt": "x"}, group, member, prompt_index=group) for group in (0, 1) for member in (0, 1)]
    found = played(task(begin=begin, reply=reply), script("a", "b", "c"), begun)
    states = [episode.sample.state for episode in found]
    rng = rng_of(3, 0)
    assert states[0] == states[1] == [rng.random() for _ in range(4)]
    assert states[2] == states[3] != states[0]
    [alone] = played(task(begin=begin, reply=reply), script("a", "b", "c"), begun[2:3])
    assert alone.sample.state == states[2]


# ---------------------------------------------------------------- tools


async def look(seconds: float, episode: Episode) -> str:
    """Look for a while."""
    await asyncio.sleep(seconds)
    return f"seen after {episode.turns}"


def test_calls_are_answered_before_the_model_goes_on() -> None:
    asked: list[Request] = []

    async def answer(request: Request) -> Completion:
        asked.append(request)
        return saying(request, CALL % 1 if request.draw.turn == 0 else "done")

    messages = [{"role": "user", "content": "look"}]
    rules = dataclasses.replace(RULES, sampling=Sampling(200))
    [episode] = played(task(tools=[look]), answer, starts(messages), template=CHAT, rules=rules)
    assert [message["role"] for message in episode.sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.sample.messages[2]["content"] == "seen after 1"
    assert of_kind(episode, Kind.SAMPLED) == [*ids(CALL % 1), EOS, *ids("done"), EOS]
    assert "tool:seen after 1" in TOKENIZER.decode(of_kind(episode, Kind.ENVIRONMENT))
    assert TOKENIZER.decode(of_kind(episode, Kind.PROMPT)).startswith("+look\n")
    assert [tool["function"]["name"] for tool in asked[0].tools] == ["look"]
    assert episode.sample.completion == "done"


def test_tools_run_after_the_last_turn_and_then_the_limit_ends_it() -> None:
    def begin(row: Any, rng: random.Random) -> list[str]:
        return []

    async def submit(text: str, episode: Episode) -> str:
        """Hand in."""
        episode.state.append(text)
        return "thanks"

    call = '<tool_call>{"name": "submit", "arguments": {"text": "42"}}</tool_call>'
    [episode] = played(
        task(tools=[submit], begin=begin, max_turns=1),
        script(call),
        starts([{"role": "user", "content": "?"}]),
        template=CHAT,
        rules=dataclasses.replace(RULES, sampling=Sampling(200)),
    )
    assert episode.sample.state == ["42"]
    assert episode.stop is StopReason.TURNS
    assert contents(episode)[-1] == "thanks"
    assert of_kind(episode, Kind.ENVIRONMENT) == []  # the model never read it


def test_tools_that_are_open_already_are_used_and_stay_open() -> None:
    class Box:
        schemas = ()
        closed = 0

        def read_turn(self, text: str, turn: int = 0) -> Any:
            return {"role": "assistant", "content": text, "tool_calls": [turn] if turn == 0 else []}

        async def run(self, calls: Any, episode: Episode) -> Any:
            return [{"role": "tool", "content": f"got {calls}"}]

        def close(self) -> None:
            self.closed += 1

    box = Box()
    [episode] = played(task(), script("a", "b"), toolbox=box)
    assert contents(episode) == ["go ", "a", "got [0]", "b"]
    assert box.closed == 0


def test_tools_of_the_task_are_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Toolbox] = []

    class Counted(Toolbox):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(sys.modules["ramet.episodes.play"], "Toolbox", Counted)
    begun = starts([{"role": "user", "content": "?"}])
    played(task(tools=[look]), script("a"), begun, template=CHAT)
    assert len(closed) == 1
    with pytest.raises(RewardError):
        played(task(tools=[look], score=lambda sample: "good"), script("a"), begun, template=CHAT)
    assert len(closed) == 2


# ---------------------------------------------------------------- how it ends


def test_the_turn_limit_ends_it_unless_the_reply_did() -> None:
    [on] = played(task(reply=lambda episode: "?", max_turns=2), script("a", "b"))
    assert on.stop is StopReason.TURNS
    assert contents(on) == ["go ", "a", "?", "b", "?"]
    assert on.pieces[0].tokens[-2:] == [*ids("b"), EOS]
    [over] = played(task(reply=lambda episode: "?" if episode.turns < 2 else None, max_turns=2), script("a", "b"))
    assert over.stop is StopReason.EOS
    [fewer] = played(task(reply=lambda episode: "?"), script("a"), rules=dataclasses.replace(RULES, max_turns=1))
    assert fewer.stop is StopReason.TURNS


@pytest.mark.parametrize("reason", [StopReason.NEW_TOKENS, StopReason.CONTEXT, StopReason.TIMEOUT])
def test_a_cut_answer_ends_it_and_is_not_replied_to(reason: StopReason) -> None:
    [episode] = played(task(reply=lambda episode: _raise(AssertionError())), script(reason))
    assert episode.stop is reason
    assert episode.outcome is not None
    assert episode.outcome.kind is OutcomeKind.SCORED
    assert of_kind(episode, Kind.SAMPLED) == ids("cut")


def test_a_prompt_over_a_limit_is_never_cut() -> None:
    for rules in (Rules(Sampling(8), 0, prompt_limit=3), Rules(Sampling(8), 0, context=4)):
        [episode] = played(task(), script(AssertionError()), rules=rules)
        assert episode.stop is StopReason.PROMPT_TOO_LONG
        assert episode.sample.prompt_tokens == (1, *ids("go "))
        assert episode.sample.completion_tokens == ()
    [fits] = played(task(), script("ab"), rules=Rules(Sampling(8), 0, prompt_limit=4))
    assert fits.stop is StopReason.EOS


def test_the_context_ends_a_conversation_that_grew_over_it() -> None:
    rules = Rules(Sampling(8), 0, context=10)
    [episode] = played(task(reply=lambda episode: "long "), script("a", AssertionError()), rules=rules)
    assert len(episode.pieces[0].tokens) == 11
    assert episode.stop is StopReason.CONTEXT


def test_the_context_leaves_an_answer_only_so_much_room() -> None:
    async def answer(request: Request) -> Completion:
        limit = request.sampling.max_new_tokens
        return saying(request, "abcdefgh"[:limit], StopReason.NEW_TOKENS)

    [near] = played(task(), answer, rules=Rules(Sampling(8), 0, context=7))
    assert (near.stop, near.sample.completion) == (StopReason.CONTEXT, "abc")
    [far] = played(task(), answer, rules=Rules(Sampling(8), 0, context=12))
    assert (far.stop, far.sample.completion) == (StopReason.NEW_TOKENS, "abcdefgh")


def test_a_context_that_the_policy_knows_is_a_context_after_the_first_turn() -> None:
    async def answer(request: Request) -> Completion:
        if request.draw.turn:
            return Completion(request.row, torch.zeros(0).long(), torch.zeros(0), StopReason.PROMPT_TOO_LONG, 0)
        return saying(request, "a")

    [episode] = played(task(reply=lambda episode: "?"), answer)
    assert episode.stop is StopReason.CONTEXT
    [first] = played(task(), script(StopReason.PROMPT_TOO_LONG))
    assert first.stop is StopReason.PROMPT_TOO_LONG


def test_a_turn_that_found_no_room_is_no_turn() -> None:
    async def answer(request: Request) -> Completion:
        return Completion(request.row, torch.zeros(0).long(), torch.zeros(0), StopReason.PROMPT_TOO_LONG, 0)

    [episode] = played(task(), answer)
    assert contents(episode) == ["go "]
    assert (episode.stop, episode.sample.completion) == (StopReason.PROMPT_TOO_LONG, "")


@pytest.mark.parametrize("where", ["begin", "answer", "reply", "tool"])
def test_a_time_limit_ends_what_hangs_and_says_where(where: str) -> None:
    async def hang(*_: Any) -> Any:
        await asyncio.sleep(10**6)

    async def wait(episode: Episode) -> str:
        """Wait."""
        await asyncio.sleep(10**6)
        return ""

    parts: dict[str, Any] = {"begin": {"begin": hang}, "reply": {"reply": hang}, "tool": {"tools": [wait]}}
    call = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
    [episode] = played(
        task(**parts.get(where, {})),
        hang if where == "answer" else script(call, "b"),
        starts([{"role": "user", "content": "?"}]),
        template=CHAT,
        rules=dataclasses.replace(RULES, sampling=Sampling(200), time_limit=5.0, tool_seconds=100.0),
    )
    assert episode.stop is StopReason.TIMEOUT
    assert episode.outcome is not None
    assert episode.outcome.kind is OutcomeKind.TIMED_OUT
    named = {"answer": "the policy", "tool": "the tools"}.get(where, where)
    assert episode.outcome.reason == f"{named}: the episode took over 5 s"


def test_text_without_tokens_ends_as_the_server_said() -> None:
    async def answer(request: Request) -> Completion:
        tokens = ids("good") + [EOS] * (request.draw.turn > 0)
        nothing = torch.full((len(tokens),), torch.nan)
        text = "good\u00e9" if request.draw.turn else "good"
        return Completion(request.row, torch.tensor(tokens), nothing, StopReason.EOS, 0, text=text)

    [episode] = played(task(reply=lambda episode: "?", max_turns=2), answer)
    assert contents(episode) == ["go ", "good", "?", "good\u00e9", "?"]
    assert episode.sample.completion == "good\u00e9"
    assert episode.pieces[0].tokens == [1, *ids("go good?good"), EOS]


def test_a_stop_is_part_of_what_was_said_where_it_is_text() -> None:
    """A stop string that is one token is looked for by its id: what was said is the same, and a special token none."""
    stop = ids(";")[0]

    async def answer(request: Request) -> Completion:
        return saying(request, "ab;", StopReason.STOP)

    [with_id] = played(task(), answer, rules=dataclasses.replace(RULES, sampling=Sampling(8, stop_ids=(stop,))))
    assert contents(with_id) == ["go ", "ab;"]
    [with_text] = played(task(), answer, rules=dataclasses.replace(RULES, sampling=Sampling(8, stop=(";",))))
    assert contents(with_text) == ["go ", "ab;"]
    assert with_id.pieces == with_text.pieces

    async def special(request: Request) -> Completion:
        tokens = torch.tensor([*ids("ab"), EOS])
        return Completion(request.row, tokens, torch.zeros(3), StopReason.STOP, 0)

    [with_special] = played(task(), special, rules=dataclasses.replace(RULES, sampling=Sampling(8, stop_ids=(EOS,))))
    assert contents(with_special) == ["go ", "ab"]


class _Made(Mapping[str, Any]):
    """A row that makes its prompt anew each time it is asked for it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getitem__(self, key: str) -> Any:
        if key != "prompt":
            raise KeyError(key)
        return [{"role": "user", "content": str(self._number)}]

    def __iter__(self) -> Iterator[str]:
        return iter(["prompt"])

    def __len__(self) -> int:
        return 1


def test_each_episode_has_its_own_prompt_however_its_row_is_made() -> None:
    async def answer(request: Request) -> Completion:
        return saying(request, "a")

    begun = [Start(_Made(number), number) for number in range(6)]
    episodes = played(task(), answer, begun, template=CHAT)
    assert [contents(episode)[0] for episode in episodes] == ["0", "1", "2", "3", "4", "5"]


def test_an_empty_answer_and_an_empty_prompt_are_legal() -> None:
    async def answer(request: Request) -> Completion:
        return Completion(request.row, torch.zeros(0).long(), torch.zeros(0), StopReason.STOP, 0)

    [episode] = played(task(), answer, starts(""))
    assert episode.pieces[0].tokens == [TOKENIZER.bos_token_id]
    assert (episode.sample.completion, episode.stop) == ("", StopReason.STOP)


# ---------------------------------------------------------------- what fails


def _beginning(row: Any, rng: random.Random) -> None:
    raise ValueError("no world")


def _replying(episode: Episode) -> NoReturn:
    raise ValueError("no word")


@pytest.mark.parametrize(
    ("parts", "answers", "prompt", "reason"),
    [
        ({"begin": _beginning}, ("a",), "go ", "begin: ValueError: no world"),
        ({"reply": _replying}, ("a",), "go ", "reply: ValueError: no word"),
        ({}, (OSError("gone"),), "go ", "the policy: OSError: gone"),
        ({}, (StopReason.ERROR,), "go ", "the policy: RuntimeError: it gave no completion"),
        ({"reply": lambda episode: next(iter([]))}, ("a",), "go ", "reply: RuntimeError: "),
        ({"reply": lambda episode: _raise(asyncio.CancelledError())}, ("a",), "go ", "reply: CancelledError"),
        (
            {"reply": lambda episode: {"role": "devil", "content": "!"}},
            ("a",),
            [{"role": "user", "content": "go"}],
            "the messages of the reply: DataError: the chat template refuses",
        ),
        ({}, ("a",), 7, "the prompt: DataError: expected text or messages"),
    ],
)
def test_a_failure_costs_its_own_episode_and_says_why(
    parts: dict[str, Any], answers: tuple[Any, ...], prompt: Any, reason: str
) -> None:
    judged: list[Any] = []

    def score(sample: Any) -> float:
        judged.append(sample)
        return 1.0

    [episode] = played(task(score=score, **parts), script(*answers), starts(prompt), template=CHAT)
    assert episode.stop is StopReason.ERROR
    assert episode.outcome is not None
    assert episode.outcome.kind is OutcomeKind.ERROR
    assert episode.outcome.reason.startswith(reason)
    assert judged == []


def test_the_others_go_on() -> None:
    async def answer(request: Request) -> Completion:
        await asyncio.sleep(1)
        if request.row == 1:
            raise ConnectionError("the server is gone")
        return saying(request, f"I am {request.row}")

    found = played(task(), answer, starts("a", "b", "c"))
    assert [episode.stop for episode in found] == [StopReason.EOS, StopReason.ERROR, StopReason.EOS]
    assert [episode.start.group for episode in found] == [10, 11, 12]
    assert found[2].sample.completion == "I am 2"
    assert found[1].sample.prompt_tokens == (1, *ids("b"))  # what there was is kept


def test_each_episode_tells_once_that_it_asks_no_more_and_that_it_is_over() -> None:
    told: list[Any] = []

    async def answer(request: Request) -> Completion:
        await asyncio.sleep(request.row)
        if request.row == 1:
            raise ConnectionError("gone")
        return saying(request, "x")

    async def score(sample: Any) -> float:
        await asyncio.sleep(5)
        return 1.0

    def left() -> None:
        told.append(("left", asyncio.get_running_loop().time()))

    def ended(episode: Any) -> None:
        told.append((episode.start.row["prompt"], asyncio.get_running_loop().time()))

    played(task(score=score), answer, starts("a", "b", "c"), left=left, ended=ended)
    assert told == [("left", 0.0), ("left", 1.0), ("b", 1.0), ("left", 2.0), ("a", 5.0), ("c", 7.0)]


def test_a_time_out_of_a_function_is_a_time_out() -> None:
    [episode] = played(task(reply=lambda episode: _raise(TimeoutError("slow"))), script("a"))
    assert episode.stop is StopReason.ERROR
    assert episode.outcome is not None
    assert (episode.outcome.kind, episode.outcome.reason) == (OutcomeKind.TIMED_OUT, "reply: TimeoutError: slow")


def test_log_probs_that_do_not_fit_are_refused() -> None:
    async def answer(request: Request) -> Completion:
        return Completion(request.row, torch.tensor([5, 6]), torch.tensor([-1.0]), StopReason.STOP, 0)

    [episode] = played(task(), answer)
    assert episode.outcome is not None
    assert "expected a log-prob (or NaN) for each token: found 1 for 2 tokens" in episode.outcome.reason
    assert len(episode.pieces[0].kinds) == len(episode.pieces[0].log_probs) == 4


@pytest.mark.parametrize("said", [5, [], [1], {"content": "x"}, {"role": 3}, b"x", (m for m in ()), {"a"}, True])
def test_a_reply_that_is_none_ends_all_and_names_the_function(said: Any) -> None:
    def wrong(episode: Episode) -> Any:
        return said if episode.row["prompt"] == "b" else None

    with pytest.raises(WrongReply, match=r"reply .*wrong: expected text, a message .* of type") as error:
        played(task(reply=wrong), script("x"), starts("a", "b"))
    assert isinstance(error.value, TypeError)


def test_a_list_of_messages_is_copied() -> None:
    said = [{"role": "user", "content": "x"}]
    found = as_messages(said, "f")
    assert found == said
    assert found is not said


def test_a_reward_that_is_none_ends_all() -> None:
    with pytest.raises(RewardError, match="expected"):
        played(task(score=lambda sample: "good"), script("x"), starts("a", "b"))


def test_nobody_judges_where_there_is_no_judge() -> None:
    [episode], _ = clock.run(lambda: play(task(), starts("a"), script("x"), CHAT, RULES, call=clock.inline))
    assert episode.outcome is None


# ---------------------------------------------------------------- what is closed


class World:
    """A state that counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("how", ["ends", "fails", "hangs", "is mistaken", "can not close", "is closed by a coroutine"])
def test_a_state_is_closed_once_after_it_was_judged(how: str) -> None:
    worlds: list[World] = []
    at_judgement: list[int] = []

    class Async(World):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(1)
            self.closed += 1

    class Stuck(World):
        def close(self) -> None:
            self.closed += 1
            raise OSError("stuck")

    def begin(row: Any, rng: random.Random) -> World:
        kinds = {"can not close": Stuck, "is closed by a coroutine": Async}
        worlds.append(kinds.get(how, World)())
        return worlds[-1]

    async def reply(episode: Episode) -> Any:
        if how == "fails":
            raise ValueError("no")
        if how == "hangs":
            await asyncio.sleep(10**6)
        return 5 if how == "is mistaken" else None

    def score(sample: Any) -> float:
        at_judgement.append(sample.state.closed)
        return 1.0

    of = task(begin=begin, reply=reply, score=score)
    rules = dataclasses.replace(RULES, time_limit=5.0)
    if how == "is mistaken":
        with pytest.raises(WrongReply):
            played(of, script("a"), starts("a", "b"), rules=rules)
    else:
        played(of, script("a"), starts("a", "b"), rules=rules)
    assert [world.closed for world in worlds] == [1, 1]
    assert at_judgement == ([0, 0] if how in ("ends", "can not close", "is closed by a coroutine") else [])


def test_cancelling_closes_what_was_opened() -> None:
    worlds: list[World] = []

    def begin(row: Any, rng: random.Random) -> World:
        worlds.append(World())
        return worlds[-1]

    async def answer(request: Request) -> Completion:
        await asyncio.sleep(10**6)
        raise AssertionError

    async def cancel() -> None:
        work = asyncio.ensure_future(
            play(task(begin=begin), starts("a", "b"), answer, CHAT, RULES, call=clock.inline, ended=ended.append)
        )
        await asyncio.sleep(3)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    ended: list[Any] = []
    clock.run(cancel)
    assert [world.closed for world in worlds] == [1, 1]
    assert ended == []  # a cancelled episode is none that failed


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_turns", 0), ("context", 0), ("prompt_limit", -1), ("time_limit", 0.0), ("tool_seconds", float("nan"))],
)
def test_rules_that_can_not_be_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be"):
        Rules(Sampling(1), 0, **{setting: value})
