"""The proof of a task: what must be true of it, looked at one by one and reported in words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ramet.checking import repeating
from ramet.checking.repeating import GlobalStates
from ramet.checking.report import Finding, Report
from ramet.checking.stand_in import Limits, Shown, StandIn, Writer, shown_row
from ramet.checking.watch import Hung, watched
from ramet.checking.wrong import Tally, Wrong, wrong_answers
from ramet.tasks.task import Row, Task
from ramet.tools.toolbox import Toolbox
from ramet.types import Outcome, OutcomeKind, StopReason

WRONG = 8  # rows whose wrong answers are tried
TOGETHER = 4  # episodes that are played in turns, and one more
SHORT = 200  # characters of a text that is said in episodes in turns
CLOSE = 1e-6
_PLAYED = ("tools", "episodes", "scores", "reference", "wrong", "same score", "repeatable", "interleaved")
_PASSED = {
    "episodes": "nothing that a model may write makes begin, player or reply raise",
    "scores": "every verdict is a finite score or an abstention",
    "same score": "a sample that is scored twice has the same outcome",
}


def check_task(
    task: Task,
    *,
    episodes: int = 32,
    seed: int = 0,
    full: float = 1.0,
    build: Callable[[int], Task] | None = None,
    episode_seconds: float = 60.0,
    tool_seconds: float = 30.0,
    score_seconds: float = 60.0,
) -> Report:
    """Prove a task without a model, and report each check; a check that can not be made says why.

    Functions write what a model would, and the engine plays it (`ramet.episodes.play`).

    - rows: each has "prompt", text or messages; there are training rows.
    - apart: no held-out row is trained on (of a task of one turn: no prompt).
    - tools: their functions have valid schemas, and names of their own; none hangs.
    - episodes: `begin`, `player` and `reply` raise nothing, whatever the model writes, do not hang, and answer as they
      should; with tools, or where `reply` does not end an episode after its first turn, there are turns to read what
      comes back.
    - scores: every verdict is a finite score or an abstention, whatever the model writes; `score` does not hang.
    - reference: `player`, or else `answer`, earns `full` on `episodes` rows of both sides. Without it nothing is
      `proved`.
    - wrong: no wrong answer earns `full` that no task takes for right: nothing, rubbish, very long text, the reference
      answer with its last letter and digit spoilt. Of a kind that may be right by chance, at most half do: a refusal,
      the prompt, many numbers, the answer changed, cut in half or among others, the answers and the turns of other
      rows, the reference without its last turn, a player's turns spoilt.
    - same score: a sample that is scored twice has the same outcome.
    - repeatable: an episode that is played twice is the same, and changes no row.
    - interleaved: episodes that are played in turns are as they are alone.
    - random: the global random states of Python, numpy and torch stay as they are, in all of this.
    - seed: `build` gives the same rows for the same seed, twice and in another process, and the same held-out rows for
      another seed. Without `build` it is skipped.

    An episode may take `episode_seconds` before it is scored, a call of a tool `tool_seconds`, `score` `score_seconds`.
    What takes longer hangs: the finding says what, and what would be played after it is skipped. A function that is not
    async hangs in a thread, which is left to itself. (One that holds Python's own lock, as a regular expression may
    that never ends, can not be left.) `reward` parts that need the whole run, such as the number of tokens, see a
    text's bytes as its tokens, and one more at the end of a turn.

    >>> from ramet.tasks.arithmetic import arithmetic
    >>> check_task(arithmetic(digits=1, held_out_size=20)).passed
    True
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1: found {episodes}")
    states = GlobalStates()
    check = _Check(task, episodes, seed, full, Limits(episode_seconds, tool_seconds, score_seconds))
    rows = check.rows()
    findings = [rows]
    if rows.passed:
        findings += [check.apart(), *check.played()]
    findings.append(states.finding())
    findings.append(repeating.seeds(build, seed))
    return Report(task.name, tuple(findings))


@dataclass(slots=True)
class _Check:
    task: Task
    episodes: int
    seed: int
    full: float
    limits: Limits
    faults: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in _PASSED})
    changed: str = ""
    made: dict[str, Finding] = field(default_factory=dict)
    wrote: dict[int, tuple[Row, list[str]]] = field(default_factory=dict)
    """What the reference wrote, by the identity of the row; the row is kept so that no other takes its identity."""

    def rows(self) -> Finding:
        train, held_out = self.task.train, self.task.held_out
        for side, rows in (("training", train), ("held-out", held_out)):
            for number, row in enumerate(rows):
                fault = repeating.fault_of(row)
                if fault:
                    return Finding("rows", False, f"{side} row {number} {fault}")
        if not len(train):
            return Finding("rows", False, "there is no training row")
        return Finding("rows", True, f"{len(train)} training and {len(held_out)} held-out rows have a prompt")

    def apart(self) -> Finding:
        if not len(self.task.held_out):
            return Finding("apart", None, "there are no held-out rows")
        hidden = self.task.reply is not None or self.task.begin is not None  # the prompt is not the whole problem
        key = repeating.key_of if hidden else lambda row: repeating.key_of({"prompt": row["prompt"]})
        trained = set(map(key, self.task.train))
        shared = [number for number, row in enumerate(self.task.held_out) if key(row) in trained]
        if shared:
            found = f"{len(shared)} of {len(self.task.held_out)} held-out rows are trained on, the first is {shared[0]}"
            return Finding("apart", False, found)
        return Finding("apart", True, f"no held-out {'row' if hidden else 'prompt'} is trained on")

    def played(self) -> list[Finding]:
        """Play episodes of all kinds and return what they show."""
        tools = self._tools()
        if tools.passed is False:
            return [tools]
        hung = None
        with StandIn(self.task, seed=self.seed, limits=self.limits) as stand_in:
            try:
                watched(lambda: self._play(stand_in), self.limits.longest, lambda: stand_in.doing)
            except Hung as error:
                hung = error
        found = {"tools": tools, **self.made}
        for name, passed in _PASSED.items():
            faults = self.faults[name]
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            if faults or hung is None:
                found[name] = Finding(name, not faults, faults[0] + more if faults else passed)
        if hung is not None:
            before = [f"before that, {fault}" for fault in self.faults.get(hung.check, [])[:1]]
            found[hung.check] = Finding(hung.check, False, "; ".join([hung.found, *before]))
            for name in _PLAYED:
                found.setdefault(name, Finding(name, None, f"not looked at: {hung.found.partition(':')[0]}"))
        return [found[name] for name in _PLAYED]

    async def _play(self, stand_in: StandIn) -> None:
        self.made["reference"] = await self._reference(stand_in)
        self.made["wrong"] = await self._wrong(stand_in)
        await self._together(stand_in)

    def _tools(self) -> Finding:
        if not self.task.tools:
            return Finding("tools", None, "there are none")
        try:
            toolbox = Toolbox(self.task.tools)
            toolbox.close()
            written = [json.dumps(schema) for schema in toolbox.schemas]
        except (TypeError, ValueError) as error:
            return Finding("tools", False, str(error))
        silent = [name for name, tool in toolbox.tools.items() if not tool.description.strip()]
        if silent:
            return Finding("tools", False, f"{silent[0]} does not say what it does: give it a docstring")
        return Finding("tools", True, f"{len(written)} with a schema: {', '.join(toolbox.tools)}")

    async def _reference(self, stand_in: StandIn) -> Finding:
        if _reference_of(self.task) is None:
            return Finding("reference", None, "there are no reference answers")
        chosen = self._chosen(self.episodes)
        for number, row in enumerate(chosen):
            shown = await self._shown_reference(stand_in, row, number)
            if not self._is_full(shown.outcome):
                earned = shown.broken or _verdict(shown.outcome)
                found = f"{shown_row(row)}: {shown.written[-1:]!r:.120} earns {earned}"
                return Finding("reference", False, found)
        return Finding("reference", True, f"the reference answers of {len(chosen)} rows earn {self.full:g}")

    async def _shown_reference(self, stand_in: StandIn, row: Row, number: int) -> Shown:
        """Play the reference of a row, and remember what it wrote."""
        write = _reference_of(self.task)
        assert write is not None
        shown = self._noted(await stand_in.alone(row, write, number))
        self.wrote[id(row)] = row, shown.written
        return shown

    async def _wrong(self, stand_in: StandIn) -> Finding:
        tally, chosen = Tally(), self._chosen(min(WRONG, self.episodes))
        if _reference_of(self.task) is not None:
            for number, row in enumerate(chosen):
                if id(row) not in self.wrote:
                    await self._shown_reference(stand_in, row, number)
        for number, row in enumerate(chosen):
            for wrong in self._wrong_answers(row):
                shown = self._noted(await stand_in.alone(row, wrong.write, number))
                earned = ""
                if self._is_full(shown.outcome):
                    assert shown.outcome is not None
                    earned = f"{shown_row(row)}: {shown.written[-1]!r:.120} earns {shown.outcome.score:g}"
                tally.count(wrong, earned)
                if tally.surely:
                    return Finding("wrong", False, tally.surely)
        return Finding("wrong", *tally.verdict(self.full))

    def _wrong_answers(self, row: Row) -> Iterator[Wrong]:
        own = self.wrote.get(id(row), (row, []))[1]
        others = [written for key, (_, written) in self.wrote.items() if key != id(row)]
        stateless = self.task.begin is None
        return wrong_answers(row, own, others, by_player=self.task.player is not None, stateless=stateless)

    async def _together(self, stand_in: StandIn) -> None:
        """Play the same episodes alone, again, and in turns; two of them are of one row."""
        rows = self._chosen(TOGETHER)
        numbers = [*range(len(rows)), 0]
        rows = [*rows, rows[0]]
        writers = [self._mixed(place) for place in range(len(rows))]
        plays = list(zip(rows, writers, numbers, strict=True))
        alone = [self._noted(await stand_in.alone(*play)) for play in plays]
        again = [self._noted(await stand_in.alone(*play)) for play in plays]
        parted = _parted(alone, again)
        changed = self.changed or parted
        if changed:
            self.made["repeatable"] = Finding("repeatable", False, changed)
            self.made["interleaved"] = Finding("interleaved", None, "episodes differ when they are played alone")
            return
        found = f"{len(rows)} episodes that are played twice are the same"
        self.made["repeatable"] = Finding("repeatable", True, found)
        turns = [self._noted(shown) for shown in await stand_in.in_turns(rows, writers, numbers)]
        parted = _parted(alone, turns)
        for first, second in zip(alone, turns, strict=True):
            if not parted and not self.faults["same score"] and first.outcome != second.outcome:
                verdicts = f"{_verdict(first.outcome)} alone, {_verdict(second.outcome)} in turns"
                parted = f"{shown_row(first.row)}: {verdicts}"
        found = parted or f"{len(rows)} episodes in turns are as they are alone"
        self.made["interleaved"] = Finding("interleaved", not parted, found)

    def _mixed(self, place: int) -> Writer:
        """Return the reference for every second episode, and for the others one that is wrong in a way of its own."""
        right = _reference_of(self.task)
        if right is not None and place % 2 == 0:
            return right
        answers = [wrong for row in self._chosen(TOGETHER) for wrong in self._wrong_answers(row)]
        texts = [wrong.turns[-1] for wrong in answers if len(wrong.turns[-1]) < SHORT]
        return lambda episode: texts[(5 * place + episode.turns) % len(texts)]

    def _noted(self, shown: Shown) -> Shown:
        """Note what is wrong with an episode, and return it."""
        said, outcome = f"{shown_row(shown.row)}: {shown.written[-1:]!r:.120}", shown.outcome
        if shown.changed and not self.changed:
            changed = "a function changed its copy of the row"
            self.changed = f"{said}: {changed}: what it writes there is lost after the call, the state keeps it"
        cut = shown.played is not None and shown.played.stop is StopReason.TURNS
        if cut and self.task.reply is not None and self.task.max_turns == 1 and not self.faults["episodes"]:
            self.faults["episodes"].append(_unread("reply"))
        if shown.broken:
            self.faults["episodes"].append(f"{shown_row(shown.row)}: {shown.broken}, after {shown.written[-1:]!r:.120}")
        elif shown.no_reward:
            self.faults["scores"].append(shown.no_reward)
        elif outcome is not None and outcome.kind.failed:
            self.faults["scores"].append(f"{said} is judged {_verdict(outcome)}")
        elif outcome != shown.again:
            self.faults["same score"].append(f"{said} earns {_verdict(outcome)} and then {_verdict(shown.again)}")
        return shown

    def _is_full(self, outcome: Outcome | None) -> bool:
        return outcome is not None and outcome.score is not None and outcome.score >= self.full - CLOSE

    def _chosen(self, count: int) -> list[Row]:
        """Return up to `count` rows, half of them held out, spread over each side."""
        held_out = _spread(self.task.held_out, count // 2)
        return [*held_out, *_spread(self.task.train, count - len(held_out))]


def _reference_of(task: Task) -> Writer | None:
    if task.player is not None:
        return task.player
    answer = task.answer
    return None if answer is None else lambda episode: answer(episode.row)


def _unread(by: str) -> str:
    return f"the model never reads what {by} says, for its only turn is over: set max_turns, which is 1, to 2 or more"


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    count = min(count, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def _verdict(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no outcome"
    return f"{outcome.score:g}" if outcome.kind is OutcomeKind.SCORED else f"{outcome.kind.value} ({outcome.reason})"


def _parted(first: Sequence[Shown], second: Sequence[Shown]) -> str:
    """Say where episodes went another way the second time; "" where they did not."""
    for one, other in zip(first, second, strict=True):
        pairs: Iterable[tuple[object, object]] = itertools.zip_longest(one.transcript(), other.transcript())
        for was, is_ in pairs:
            if was != is_:
                return f"{shown_row(one.row)}: {was!r:.160} becomes {is_!r:.160}"
    return ""
