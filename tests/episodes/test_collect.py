"""Many episodes for a caller who waits: what comes back, in what order, and what ends it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.episodes.stage import CALL, CHAT, CHAT_TOKENIZER, EOS, PLAIN, TOKENIZER, ids, saying, task

from ramet.episodes import EventLoop, Played, Rules, Start, WrongReply, collect_episodes, play_episodes, starts_of
from ramet.errors import ConfigError, ModelError, RewardError
from ramet.forest import Forest
from ramet.policies.policy import Policy
from ramet.policies.scripted import ScriptedPolicy
from ramet.prompts import Prompts
from ramet.tasks.judge import Judge
from ramet.tasks.replies import CHARACTERS
from ramet.types import Completion, Episode, OutcomeKind, Request, Sample, Sampling, StopReason

RULES = Rules(Sampling(8), seed=0)


def _echo() -> ScriptedPolicy:
    """Say the last token again, and end."""
    return ScriptedPolicy(lambda request: [int(request.tokens[-1]), EOS], eos_token_id=EOS)


def test_a_batch_of_prompts_becomes_a_forest_in_its_order() -> None:
    prompts = Prompts(["ab", "cd", "ef"], TOKENIZER, seed=5)
    td = prompts.batch(4, 3, group_size=2)
    arrived: list[int] = []

    async def reply(episode: Episode) -> str | None:
        if episode.turns == 2:
            return None
        await asyncio.sleep(0)
        arrived.append(episode.turns)
        return "?"

    forest = Forest()
    found = collect_episodes(
        task(reply=reply, score=lambda sample: float(len(sample.completion))),
        _echo(),
        starts_of(td, prompts.rows),
        sampling=Sampling(8),
        seed=0,
        template=PLAIN,
        judge=Judge(lambda sample: float(len(sample.completion))),
        forest=forest,
    )
    assert found is forest
    assert [(r.group, r.member, r.prompt_index) for r in forest.rollouts] == list(
        zip(td["group_id"].tolist(), td["repeat_index"].tolist(), td["prompt_index"].tolist(), strict=True)
    )
    for number, rollout in enumerate(forest.rollouts):
        prompt = prompts.rows[rollout.prompt_index]["prompt"]
        assert forest.path(number).tolist() == [1, *ids(prompt + prompt[-1]), EOS, *ids("??"), EOS]
        assert rollout.outcome is not None
        assert rollout.outcome.score == 1.0
        assert rollout.stop is StopReason.EOS
    assert len(arrived) == 6


def test_a_tokenizer_with_a_chat_template_takes_tools_and_text_alike() -> None:
    async def look(seconds: float) -> str:
        """Look."""
        return "seen"

    def speak(request: Request) -> list[int]:
        said = "ok" if "seen" in TOKENIZER.decode(request.tokens.tolist()) else CALL % 1
        return [*ids(said), EOS]

    begun = [Start({"prompt": [{"role": "user", "content": "look"}]}, 0), Start({"prompt": "text"}, 1)]
    tools, text = play_episodes(
        task(tools=[look]),
        ScriptedPolicy(speak, eos_token_id=EOS),
        begun,
        template=CHAT,
        rules=Rules(Sampling(200), 0),
    )
    assert tools.sample.completion == "ok"
    assert text.stop is StopReason.EOS
    assert [message["role"] for message in text.sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert CHAT_TOKENIZER.decode(text.pieces[0].tokens).endswith("\nseen\nok<eos>")
    [plain] = play_episodes(task(), _echo(), begun[1:], template=CHAT, rules=RULES)
    assert plain.pieces[0].tokens == [*CHAT_TOKENIZER("text")["input_ids"], *ids("t"), EOS]


def test_a_policy_with_answers_of_its_own_is_asked_row_by_row() -> None:
    class Served(Policy):
        most = 0
        under_way = 0

        def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
            raise AssertionError("not needed")

        async def answer(self, request: Request) -> Completion:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0.001)
            self.under_way -= 1
            return saying(request, "x", version=3)

    served = Served()
    found = play_episodes(task(), served, [Start({"prompt": "a"}, g) for g in range(5)], template=PLAIN, rules=RULES)
    assert served.most == 5
    assert [episode.pieces[0].versions for episode in found] == [[-1, -1, 3, 3]] * 5


def test_in_lockstep_a_turn_is_completed_for_all_rows_that_go_on() -> None:
    """Replies take 0 to 60 ms, in another order each turn; a row ends after each turn but the first."""
    asked: list[list[int]] = []

    class Kept(Policy):
        def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
            asked.append([request.draw.prompt for request in requests])
            return _echo().complete(requests)

    async def reply(episode: Episode) -> str | None:
        number = int(episode.row["number"])
        await asyncio.sleep(0.02 * ((number + episode.turns) % 4))
        return "?" if episode.turns <= number else None

    begun = [Start({"prompt": "a", "number": number}, group=number) for number in range(4)]
    lockstep = Rules(Sampling(8), seed=0, lockstep=True)
    found = play_episodes(task(reply=reply, max_turns=5), Kept(), begun, template=PLAIN, rules=lockstep)
    assert asked == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    assert [episode.stop for episode in found] == [StopReason.EOS] * 4


def test_lockstep_is_refused_for_a_policy_that_answers_row_by_row() -> None:
    class Served(Policy):
        async def answer(self, request: Request) -> Completion:
            raise AssertionError("not asked")

        complete = answer  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="Served answers each row by itself"):
        collect_episodes(
            task(), Served(), [Start({"prompt": "a"}, 0)], sampling=Sampling(8), seed=0, template=PLAIN, lockstep=True
        )


def test_sync_functions_run_at_once_in_threads_that_end() -> None:
    everybody = threading.Barrier(12, timeout=30)

    def reply(episode: Episode) -> str | None:
        everybody.wait()  # which no one passes before all twelve are here
        return None

    before = threading.active_count()
    found = play_episodes(
        task(reply=reply), _echo(), [Start({"prompt": "a"}, g) for g in range(12)], template=PLAIN, rules=RULES
    )
    assert [episode.outcome for episode in found] == [None] * 12
    assert _settles(before)


def _settles(threads: int) -> bool:
    """Wait for threads to come to their end; they were told to."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith("ramet"):
            thread.join(10)
    return threading.active_count() <= threads


def test_a_function_that_hangs_holds_up_nobody() -> None:
    judged: list[str] = []
    released = threading.Event()

    def reply(episode: Episode) -> str | None:
        if episode.row["prompt"] == "b":
            assert released.wait(60)
        return None

    def score(sample: Sample) -> float:
        judged.append(sample.prompt if isinstance(sample.prompt, str) else "")
        if sorted(judged) == ["a", "c"]:
            released.set()  # the others have been judged: it may go on
        return 1.0

    begun = [Start({"prompt": letter}, g) for g, letter in enumerate("abc")]
    found = play_episodes(task(reply=reply), _echo(), begun, template=PLAIN, rules=RULES, judge=Judge(score))
    assert [episode.stop for episode in found] == [StopReason.EOS] * 3
    assert judged[-1] == "b"


def test_each_episode_is_handed_over_as_soon_as_it_is_over() -> None:
    told: list[tuple[Any, float | None]] = []
    first = threading.Event()

    def ended(played: Played) -> None:
        told.append((played.start.row["prompt"], None if played.outcome is None else played.outcome.score))
        first.set()

    def reply(episode: Episode) -> str | None:
        if episode.row["prompt"] == "a":
            assert first.wait(60)  # until the other one was handed over
        return None

    begun = [Start({"prompt": letter}, g) for g, letter in enumerate("ab")]
    play_episodes(
        task(reply=reply), _echo(), begun, template=PLAIN, rules=RULES, judge=Judge(lambda s: 1.0), ended=ended
    )
    assert told == [("b", 1.0), ("a", 1.0)]

    def full(played: Played) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        play_episodes(task(), _echo(), begun, template=PLAIN, rules=RULES, ended=full)


def test_ctrl_c_cancels_what_runs_and_a_second_one_does_not_wait() -> None:
    stopped: list[str] = []
    released = threading.Event()

    async def reply(episode: Episode) -> str | None:
        if episode.row["prompt"] == "b":
            os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.append(episode.row["prompt"])
        return None

    begun = [Start({"prompt": letter}, g) for g, letter in enumerate("ab")]
    with pytest.raises(KeyboardInterrupt):
        play_episodes(task(reply=reply), _echo(), begun, template=PLAIN, rules=RULES)
    assert sorted(stopped) == ["a", "b"]

    async def deaf(episode: Episode) -> str | None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGINT)  # as somebody does who is tired of waiting
            while not released.is_set():
                await asyncio.sleep(0)
            stopped.append("deaf")
        return None

    with EventLoop() as loop:
        with pytest.raises(KeyboardInterrupt):
            play_episodes(task(reply=deaf), _echo(), begun[:1], template=PLAIN, rules=RULES, loop=loop)
        assert stopped[2:] == []
        released.set()
    assert stopped[2:] == ["deaf"]


@pytest.mark.parametrize("error", [ModelError("NaN"), KeyboardInterrupt(), SystemExit(3)])
def test_what_the_policy_raises_is_raised_where_it_runs(error: BaseException) -> None:
    closed: list[str] = []

    class World:
        def close(self) -> None:
            closed.append("world")

    class Broken(Policy):
        def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
            assert threading.current_thread() is threading.main_thread()
            try:
                yield saying(requests[0], "x")
                raise error
            finally:
                closed.append("policy")

    begun = [Start({"prompt": "a"}, g) for g in range(3)]
    with EventLoop() as loop:
        with pytest.raises(type(error)):
            play_episodes(task(begin=lambda row, rng: World()), Broken(), begun, template=PLAIN, rules=RULES, loop=loop)
        assert sorted(closed) == ["policy", "world", "world", "world"]
        # and the loop is as good as before
        assert len(play_episodes(task(), _echo(), begun, template=PLAIN, rules=RULES, loop=loop)) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("where", "what"), [("begin", "begin"), ("reply", "reply"), ("score", "reward")])
def test_an_exit_in_a_function_ends_all_and_names_it(where: str, what: str, asynchronous: bool) -> None:
    def leave(*_: Any) -> Any:
        raise SystemExit(3)

    async def leave_too(*_: Any) -> Any:
        leave()

    of = task(**{where: leave_too if asynchronous else leave})
    begun = [Start({"prompt": "a"}, g) for g in range(3)]
    error = RewardError if where == "score" else WrongReply
    with pytest.raises(error, match=rf"^{what} .*\.leave(_too)? called sys.exit\(3\)"):
        play_episodes(of, _echo(), begun, template=PLAIN, rules=RULES, judge=Judge(of.score))


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["begin", "reply", "score"])
def test_what_looks_like_an_end_of_a_coroutine_costs_its_own_episode(
    where: str, asynchronous: bool, error: type[BaseException]
) -> None:
    def end(*_: Any) -> Any:
        raise error

    async def end_too(*_: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    of = task(**{where: end_too if asynchronous else end})
    begun = [Start({"prompt": "a"}, g) for g in range(3)]
    for played in play_episodes(of, _echo(), begun, template=PLAIN, rules=RULES, judge=Judge(of.score)):
        assert played.outcome is not None
        assert played.outcome.kind is OutcomeKind.ERROR
        assert error.__name__ in played.outcome.reason


def test_what_functions_change_in_a_row_lasts_for_their_call_alone() -> None:
    """Over 2 steps of 2 members: each call finds the row as it was dealt, and so do the log and the next step."""
    found: list[tuple[str, int]] = []

    def count(where: str, row: Any) -> None:
        row["deep"]["x"] += 1
        found.append((where, row["deep"]["x"]))

    def begin(row: Any, rng: Any) -> None:
        count("begin", row)

    async def reply(episode: Episode) -> str | None:
        count("reply", episode.row)
        episode.messages[0]["content"] += "!"
        return "?" if episode.turns < 2 else None

    def score(sample: Sample) -> float:
        count("score", sample.row)
        return float(sample.row["deep"]["x"])

    rows = [{"prompt": [{"role": "user", "content": "a"}], "deep": {"x": 0}}]
    of = task(begin=begin, reply=reply, score=score, max_turns=3)
    prompts = Prompts(rows, CHAT_TOKENIZER)
    for step in range(2):
        starts = starts_of(prompts.batch(step * 2, 1, group_size=2), prompts.rows)
        for played in play_episodes(of, _echo(), starts, template=CHAT, rules=RULES, judge=Judge(of.score)):
            assert played.outcome is not None
            assert played.outcome.score == 1.0
            assert played.sample.row["deep"] == {"x": 0}
    assert sorted(found) == [("begin", 1)] * 4 + [("reply", 1)] * 8 + [("score", 1)] * 4
    assert prompts.rows == [{"prompt": [{"role": "user", "content": "a"}], "deep": {"x": 0}}]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("x" * (CHARACTERS + 1), ": expected at most 1000000 characters: found 1000001"),
        (
            "2\ud800",
            ": expected text: found the lone surrogate '\\ud800' at character 1, half of a character that was cut",
        ),
    ],
)
def test_a_reply_that_fits_nowhere_costs_its_own_episode_and_is_not_tokenised(said: str, why: str) -> None:
    def reply(episode: Episode) -> str | None:
        return said if episode.row["long"] else None

    of = task(reply=reply)
    begun = [Start({"prompt": "a", "long": long}, g) for g, long in enumerate([True, False])]
    first, second = play_episodes(of, _echo(), begun, template=PLAIN, rules=RULES, judge=Judge(of.score))
    assert first.outcome is not None
    assert first.outcome.kind is OutcomeKind.ERROR
    assert first.outcome.reason.startswith("reply: DataError: reply ")
    assert first.outcome.reason.endswith(why)
    assert sum(len(piece.tokens) for piece in first.pieces) < 10
    assert second.outcome is not None
    assert second.outcome.kind is OutcomeKind.SCORED


def test_a_mistake_in_the_program_ends_all_with_its_own_error() -> None:
    with pytest.raises(WrongReply, match="expected text"):
        collect_episodes(
            task(reply=lambda episode: 5),
            _echo(),
            [Start({"prompt": "a"}, 0)],
            sampling=Sampling(8),
            seed=0,
            template=PLAIN,
        )


def test_nothing_to_play_is_an_empty_forest() -> None:
    forest = collect_episodes(task(), _echo(), [], sampling=Sampling(8), seed=0, template=PLAIN)
    assert forest.rollouts == []


def test_a_caller_inside_an_event_loop_may_call_it() -> None:
    """As in a notebook: the loop that runs there is not the one that is used."""

    async def cell() -> int:
        return len(play_episodes(task(), _echo(), [Start({"prompt": "a"}, 0)], template=PLAIN, rules=RULES))

    assert asyncio.run(cell()) == 1


def test_nothing_is_left_open() -> None:
    before = threading.active_count()
    for _ in range(3):
        play_episodes(
            task(reply=lambda episode: None), _echo(), [Start({"prompt": "a"}, 0)], template=PLAIN, rules=RULES
        )
    assert _settles(before)
    gc.collect()  # an unclosed loop would warn, and warnings are errors


def test_versions_are_those_of_the_weights_that_made_each_turn() -> None:
    policy = _echo()

    def reply(episode: Episode) -> str | None:
        policy.version += 1
        return None if episode.turns == 3 else "?"

    [episode] = play_episodes(task(reply=reply), policy, [Start({"prompt": "a"}, 0)], template=PLAIN, rules=RULES)
    forest = collect_episodes(
        task(reply=reply), policy, [Start({"prompt": "a"}, 0)], sampling=Sampling(8), seed=0, template=PLAIN
    )
    versions = [v for v in episode.pieces[0].versions if v >= 0]
    assert versions == [0, 0, 1, 1, 2, 2]
    assert forest.rollouts[0].versions.tolist() == [-1, -1, 3, 3, -1, 4, 4, -1, 5, 5]
    assert torch.equal(forest.sampled([0]).versions, torch.tensor([3, 3, 4, 4, 5, 5], dtype=torch.int32))


def test_what_a_reply_changes_in_the_messages_the_policy_never_sees() -> None:
    """The model is asked with what it has written, whatever a function writes over it."""
    asked: list[list[Any]] = []

    def write(request: Request) -> list[int]:
        asked.append([dict(message) for message in request.messages])
        return [*ids("yes"), EOS]

    def reply(episode: Episode) -> str | None:
        episode.messages[-1]["content"] = "CHANGED"
        return "go on" if episode.turns == 1 else None

    (one,) = play_episodes(
        task(reply=reply),
        ScriptedPolicy(write, eos_token_id=EOS),
        [Start({"prompt": "ab"}, 0)],
        template=PLAIN,
        rules=RULES,
    )
    assert [message["content"] for message in asked[1]] == ["ab", "yes", "go on"]
    assert one.sample.completion == "yes"
