"""Many episodes under a virtual clock: what each would be alone, whatever the others do."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.episodes import clock
from tests.episodes.stage import CALL, CHAT, RULES, saying, task

from ramet.episodes import Gathered, Played, Rules, Start, into_forest, play
from ramet.forest import Forest
from ramet.policies.policy import Policy
from ramet.tasks.judge import Judge
from ramet.types import Completion, Episode, Kind, OutcomeKind, Request, Sample, Sampling, StopReason

How = Literal["well", "fails", "hangs"]
LIMIT = 40.1
TOOL_SECONDS = 7.25
FOREVER = 10.0**6
MOST = 4
HOWS: st.SearchStrategy[How] = st.sampled_from(["well", "well", "well", "well", "fails", "hangs"])
SECONDS = st.integers(0, 9).map(float)


@dataclass(frozen=True)
class Wait:
    """Something that takes a while and then goes well or fails, or that hangs."""

    seconds: float
    how: How

    async def __call__(self, what: str) -> None:
        await asyncio.sleep(FOREVER if self.how == "hangs" else self.seconds)
        if self.how == "fails":
            raise OSError(f"{what} fails")


@dataclass(frozen=True)
class Turn:
    """The model's turn, which calls a tool or says something, and what comes back of it."""

    answer: Wait
    calls: bool
    comes_back: Wait


@dataclass(frozen=True)
class Line:
    """All that happens to one row."""

    begin: Wait
    turns: tuple[Turn, ...]
    score: Wait


def _ended(turns: list[Turn]) -> tuple[Turn, ...]:
    """A line that is short of the turn limit ends by itself: not with a call."""
    last = dataclasses.replace(turns[-1], calls=turns[-1].calls and len(turns) == MOST)
    return (*turns[:-1], last)


WAITS = st.builds(Wait, SECONDS, HOWS)
LINES = st.builds(
    Line,
    WAITS,
    st.lists(st.builds(Turn, WAITS, st.booleans(), WAITS), min_size=1, max_size=MOST).map(_ended),
    st.builds(Wait, SECONDS, st.sampled_from(["well", "well", "fails"])),
)


@dataclass
class End:
    """How a line must end, worked out by hand: when its conversation and its judgement are over, and why."""

    stop: StopReason
    kind: OutcomeKind
    talked: float
    judged: float
    asked_at: list[float]


def expected(line: Line) -> End:
    """Play a line alone, with sums in place of a clock."""
    now, asked = 0.0, []

    def timed_out() -> End:
        return End(StopReason.TIMEOUT, OutcomeKind.TIMED_OUT, LIMIT, LIMIT, asked)

    def pass_by(wait: Wait) -> bool | None:
        """Let it pass; True where it went well, None where the limit came first."""
        nonlocal now
        now += FOREVER if wait.how == "hangs" else wait.seconds
        return None if now > LIMIT else wait.how == "well"

    def failed() -> End:
        return End(StopReason.ERROR, OutcomeKind.ERROR, now, now, asked)

    went = pass_by(line.begin)
    for turn in line.turns if went else ():
        asked.append(now)
        went = pass_by(turn.answer)
        if not went:
            break
        if turn.calls:  # what a tool does is answered as data
            now += min(TOOL_SECONDS, FOREVER if turn.comes_back.how == "hangs" else turn.comes_back.seconds)
            went = None if now > LIMIT else True
        else:
            went = pass_by(turn.comes_back)
        if not went:
            break
    if went is None:
        return timed_out()
    if not went:
        return failed()
    stop = StopReason.TURNS if line.turns[-1].calls else StopReason.EOS
    kind = OutcomeKind.SCORED if line.score.how == "well" else OutcomeKind.ERROR
    return End(stop, kind, now, now + line.score.seconds, asked)


@dataclass
class World:
    """The state of an episode; it is closed once."""

    number: int
    closed: int = 0

    def close(self) -> None:
        self.closed += 1


@dataclass
class Theatre:
    """Plays lines with a task, tools and a policy that do what each line says, and keeps count of what is open."""

    lines: Sequence[Line]
    version: int = 0
    worlds: list[World] = field(default_factory=list)
    open: Counter[str] = field(default_factory=Counter)
    judged_at: dict[int, float] = field(default_factory=dict)
    versions: dict[tuple[int, int], int] = field(default_factory=dict)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def during(self, what: str, wait: Wait) -> None:
        """Wait, and count what is open meanwhile."""
        self.open[what] += 1
        try:
            await wait(what)
        finally:
            self.open[what] -= 1

    async def begin(self, row: Any, rng: random.Random) -> World:
        await self.during("begin", self.lines[row["number"]].begin)
        self.worlds.append(World(row["number"]))
        return self.worlds[-1]

    async def answer(self, request: Request) -> Completion:
        number, turn = request.row, request.draw.turn
        version = self.versions[number, turn] = self.version
        line = self.lines[number].turns[turn]
        await self.during("answer", line.answer)
        return saying(request, CALL % 0 if line.calls else f"turn {turn}", version=version)

    async def reply(self, episode: Episode) -> str | None:
        line = self.lines[episode.row["number"]]
        await self.during("reply", line.turns[episode.turns - 1].comes_back)
        return None if episode.turns == len(line.turns) else "go on"

    async def look(self, seconds: float, episode: Episode) -> str:
        """Look."""
        await self.during("tool", self.lines[episode.row["number"]].turns[episode.turns - 1].comes_back)
        return "seen"

    async def score(self, sample: Sample) -> float:
        await self.during("score", self.lines[sample.row["number"]].score)
        self.judged_at[sample.row["number"]] = self.now()
        return float(sample.row["number"])

    async def play(self, starts: Sequence[Start], **more: Any) -> list[Played]:
        async def look(seconds: float, episode: Episode) -> str:
            """Look."""
            return await self.look(seconds, episode)

        of = task(begin=self.begin, reply=self.reply, tools=[look], score=self.score, max_turns=MOST)
        rules = Rules(Sampling(200), 0, time_limit=LIMIT, tool_seconds=TOOL_SECONDS)
        more = {"answer": self.answer, **more}
        return await play(of, starts, template=CHAT, rules=rules, judge=Judge(of.score), call=clock.inline, **more)


def _starts(lines: Sequence[object], groups: int = 2) -> list[Start]:
    """Return starts of the same prompt, in groups that lie mixed up."""
    prompt = [{"role": "user", "content": "go"}]
    return [
        Start({"prompt": prompt, "number": number}, group=50 - number % groups, member=number // groups, prompt_index=0)
        for number in range(len(lines))
    ]


def _check_tokens(played: Played, versions: dict[tuple[int, int], int], number: int) -> None:
    """Everything has one length, and sampled tokens alone have a log-prob and a version: of when they were made."""
    turn = -1
    for piece in played.pieces:
        assert len(piece.tokens) == len(piece.kinds) == len(piece.log_probs) == len(piece.versions)
        before = None
        for kind, log_prob, version in zip(piece.kinds, piece.log_probs, piece.versions, strict=True):
            turn += kind is Kind.SAMPLED and before is not Kind.SAMPLED
            before = kind
            if kind is Kind.SAMPLED:
                assert log_prob < 0
                assert version == versions[number, turn]
            else:
                assert log_prob != log_prob
                assert version == -1


@settings(deadline=None, max_examples=60)
@given(lines=st.lists(LINES, min_size=1, max_size=6), updates=st.lists(SECONDS, max_size=5))
def test_each_row_is_what_it_would_be_alone(lines: list[Line], updates: list[float]) -> None:
    theatre = Theatre(lines)
    moments: list[float] = []

    async def update() -> None:
        """Push new weights now and then, while rollouts are under way."""
        for pause in updates:
            await asyncio.sleep(pause + 0.05)
            theatre.version += 1
            moments.append(theatre.now())

    async def work() -> tuple[list[Played], float]:
        updating = asyncio.ensure_future(update())
        found = await theatre.play(starts)
        ended = theatre.now()
        await updating
        return found, ended

    starts = _starts(lines)
    (found, ended), _ = clock.run(work)
    ends = [expected(line) for line in lines]
    # The batch takes as long as its longest row, and each row is judged when it would be alone.
    assert ended == pytest.approx(max(end.judged for end in ends))
    for number, (episode, end) in enumerate(zip(found, ends, strict=True)):
        assert episode.start is starts[number]
        assert (episode.stop, episode.outcome.kind if episode.outcome else None) == (end.stop, end.kind)
        if end.kind is OutcomeKind.SCORED:
            assert theatre.judged_at[number] == pytest.approx(end.judged)
            assert episode.outcome == episode.outcome.scored(float(number))
        else:
            assert episode.outcome is not None
            assert episode.outcome.reason
        asked = [theatre.versions[number, turn] for turn in range(len(end.asked_at))]
        assert asked == [sum(moment < at + 1e-6 for moment in moments) for at in end.asked_at]
        _check_tokens(episode, theatre.versions, number)
    # What was opened is closed, each thing once.
    assert set(theatre.open.values()) <= {0}
    assert [world.closed for world in theatre.worlds] == [1] * len(theatre.worlds)


@settings(deadline=None, max_examples=25)
@given(lines=st.lists(LINES, min_size=1, max_size=5))
def test_the_forest_is_in_the_order_of_the_starts_and_has_a_row_for_each(lines: list[Line]) -> None:
    starts = _starts(lines)
    forest = Forest()
    found, _ = clock.run(lambda: Theatre(lines).play(starts))
    numbers = into_forest(found, forest)
    assert [(r.group, r.member) for r in forest.rollouts] == [(start.group, start.member) for start in starts]
    assert numbers == [[number] for number in range(len(starts))]
    for number, (rollout, episode) in enumerate(zip(forest.rollouts, found, strict=True)):
        piece = episode.pieces[0]
        assert forest.path(number).tolist() == piece.tokens
        assert rollout.kinds.tolist() == piece.kinds
        assert rollout.versions.tolist() == piece.versions
        assert rollout.log_probs.tolist() == pytest.approx(piece.log_probs, nan_ok=True)
        assert (rollout.stop, rollout.outcome) == (episode.stop, episode.outcome)
        sampled = [token for token, kind in zip(piece.tokens, piece.kinds, strict=True) if kind is Kind.SAMPLED]
        assert list(episode.sample.completion_tokens) == sampled


@settings(deadline=None, max_examples=40)
@given(lines=st.lists(LINES, min_size=1, max_size=5), at=st.integers(0, 45).map(float) | st.floats(0, 45))
def test_a_run_that_is_cancelled_leaves_nothing_behind(lines: list[Line], at: float) -> None:
    theatre = Theatre(lines)

    async def work() -> None:
        playing = asyncio.ensure_future(theatre.play(_starts(lines)))
        await asyncio.sleep(at)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    _, seconds = clock.run(work)  # which sees to it that no task is left
    assert seconds == pytest.approx(at)
    assert set(theatre.open.values()) <= {0}
    assert [world.closed for world in theatre.worlds] == [1] * len(theatre.worlds)


def test_as_many_rows_as_there_are_take_as_long_as_one() -> None:
    well = Wait(0.0, "well")
    turns = (Turn(Wait(1.0, "well"), True, Wait(3.0, "well")), Turn(Wait(1.0, "well"), False, well))
    lines = [Line(well, turns, Wait(2.0, "well"))] * 64
    _, seconds = clock.run(lambda: Theatre(lines).play(_starts(lines)))
    assert seconds == pytest.approx(7.0)


class Slow(Policy):
    """A model in the process: a batch takes a second a token, and each row comes when it is done."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.batches: list[tuple[float, list[int]]] = []

    def complete(self, requests: Sequence[Request]) -> Any:
        raise AssertionError("it is played by `decoding`")

    def decoding(self, gathered: Gathered) -> Any:
        """Return a `start` that runs a batch of `gathered` along the virtual clock."""

        def start(job: Any) -> None:
            loop, batch = job.args
            requests = [waiting.request for waiting in batch]
            self.batches.append((loop.time(), [request.row for request in requests]))
            lengths = [self.lengths[request.row] for request in requests]
            for place, (request, length) in enumerate(zip(requests, lengths, strict=True)):
                loop.call_later(length, _hand_out, batch[place], request)
            # Behind the last of them, which comes at the same time.
            loop.call_later(max(lengths), loop.call_soon, gathered._done, batch, RuntimeError("no answer"))

        return start


def _hand_out(waiting: Any, request: Request) -> None:
    if not waiting.future.done():
        waiting.future.set_result(saying(request, "x"))


def test_a_model_in_the_process_decodes_a_batch_while_tools_of_other_rows_run() -> None:
    """Rows 0 and 1 are short and call a tool of 3 s; row 2 takes 10 s: the tools are over when its batch is."""
    policy = Slow([1, 2, 10])
    replied: list[tuple[float, int]] = []

    async def reply(episode: Episode) -> str | None:
        await asyncio.sleep(3)
        replied.append((asyncio.get_running_loop().time(), episode.row["number"]))
        return None if episode.turns == 2 or episode.row["number"] == 2 else "?"

    async def work() -> list[Played]:
        gathered = Gathered(policy, start=lambda job: start(job))
        start = policy.decoding(gathered)
        gathered.expect(3)
        return await play(
            task(reply=reply),
            _starts(range(3)),
            gathered.answer,
            CHAT,
            RULES,
            call=clock.inline,
            left=gathered.leave,
        )

    found, seconds = clock.run(work)
    assert [episode.stop for episode in found] == [StopReason.EOS] * 3
    # The first batch is of all; the second goes in when the first is over and row 2 did not come back in time.
    assert [rows for _, rows in policy.batches] == [[0, 1, 2], [0, 1]]
    assert policy.batches[1][0] == pytest.approx(10.02)
    assert replied[:2] == [(4.0, 0), (5.0, 1)]
    assert seconds == pytest.approx(10.02 + 2 + 3)
