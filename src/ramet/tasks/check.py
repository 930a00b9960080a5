"""The proof of a task: what must be true of it, looked at one by one and reported in words."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ramet.errors import RewardError
from ramet.tasks import repeating
from ramet.tasks.judge import Judge
from ramet.tasks.repeating import Finding, GlobalStates
from ramet.tasks.task import Row, Task
from ramet.tasks.trial import Trial, Writer
from ramet.tools.toolbox import Toolbox
from ramet.types import Outcome, OutcomeKind

WRONG = 8  # rows whose wrong answers are tried
TOGETHER = 4  # episodes that are played in turns
SHORT = 200  # characters of a text that is said in episodes in turns
RUBBISH = "?? <|x|> \\boxed{ }} [(1/0 \u0000 \U0001f600 None"
CLOSE = 1e-6
_LONG = ("9" * 20_000, "(" * 5_000, "word " * 4_000)


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found, in order; `str` writes it for a terminal.

    >>> print(Report("sums", (Finding("rows", True, "all have a prompt"), Finding("tools", None, "there are none"))))
    task sums: proved
      passed   rows: all have a prompt
      skipped  tools: there are none
    """

    task: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True where no check failed."""
        return not any(finding.passed is False for finding in self.findings)

    def __str__(self) -> str:
        failed = sum(finding.passed is False for finding in self.findings)
        verdict = "proved" if not failed else f"{failed} of {len(self.findings)} checks failed"
        return "\n".join([f"task {self.task}: {verdict}", *(f"  {finding}" for finding in self.findings)])


def check_task(
    task: Task,
    *,
    episodes: int = 32,
    seed: int = 0,
    full: float = 1.0,
    build: Callable[[int], Task] | None = None,
) -> Report:
    """Prove a task without a model, and report each check; a check that can not be made says why.

    - rows: each has "prompt", text or messages; there are training rows.
    - apart: no held-out row is trained on (of a task of one turn: no prompt).
    - tools: their functions have valid schemas, and names of their own.
    - episodes: `begin`, `player` and `reply` raise nothing, whatever the model writes, and answer as they should.
    - scores: every verdict is a finite score or an abstention, whatever the model writes.
    - reference: `player`, or else `answer`, earns `full` on `episodes` rows of both sides.
    - wrong: nothing, rubbish, very long text, the reference with its last letter or digit spoilt and the answers of
      other rows do not (of the last, half may be right by chance).
    - same score: a sample that is scored twice has the same outcome.
    - repeatable: an episode that is played twice is the same.
    - interleaved: episodes that are played in turns are as they are alone.
    - random: the global random states of Python, numpy and torch stay as they are, in all of this.
    - seed: `build` gives the same rows for the same seed, twice and in another process, and the same held-out rows for
      another seed. Without `build` it is skipped.

    `reward` parts that need the whole run, such as the number of tokens, see a text's bytes as its tokens.

    >>> from ramet.tasks.arithmetic import arithmetic
    >>> check_task(arithmetic(digits=1, held_out_size=20)).passed
    True
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1: found {episodes}")
    states = GlobalStates()
    check = _Check(task, episodes, seed, full)
    rows = check.rows()
    findings = [rows]
    if rows.passed:
        findings += [check.apart(), *_run(check.played())]
    findings.append(states.finding())
    findings.append(repeating.seeds(build, seed))
    return Report(task.name, tuple(findings))


def _run(work: repeating.Work) -> list[Finding]:
    """Run in an event loop; where one is running already, in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@dataclass(slots=True)
class _Check:
    task: Task
    episodes: int
    seed: int
    full: float
    broken: list[str] = field(default_factory=list)
    unscored: list[str] = field(default_factory=list)
    changing: list[str] = field(default_factory=list)

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

    async def played(self) -> list[Finding]:
        """Play episodes of all kinds and return what they show."""
        tools, toolbox = self._tools()
        if tools.passed is False:
            return [tools]
        judge = Judge(self.task.score)
        try:
            reference = await self._reference(toolbox, judge)
            wrong = await self._wrong(toolbox, judge)
            repeatable, interleaved = await self._together(toolbox, judge)
        finally:
            judge.close()
            if toolbox is not None:
                toolbox.close()
        return [
            tools,
            _finding("episodes", self.broken, "nothing that a model may write makes begin, player or reply raise"),
            _finding("scores", self.unscored, "every verdict is a finite score or an abstention"),
            reference,
            wrong,
            _finding("same score", self.changing, "a sample that is scored twice has the same outcome"),
            repeatable,
            interleaved,
        ]

    def _tools(self) -> tuple[Finding, Toolbox | None]:
        if not self.task.tools:
            return Finding("tools", None, "there are none"), None
        try:
            toolbox = Toolbox(self.task.tools)
            written = [json.dumps(schema) for schema in toolbox.schemas]
        except (TypeError, ValueError) as error:
            return Finding("tools", False, str(error)), None
        silent = [name for name, tool in toolbox.tools.items() if not tool.description.strip()]
        if silent:
            toolbox.close()
            return Finding("tools", False, f"{silent[0]} does not say what it does: give it a docstring"), None
        return Finding("tools", True, f"{len(written)} with a schema: {', '.join(toolbox.tools)}"), toolbox

    async def _reference(self, toolbox: Toolbox | None, judge: Judge) -> Finding:
        write = _reference_of(self.task)
        if write is None:
            return Finding("reference", None, "there are no reference answers")
        chosen = self._chosen(self.episodes)
        for number, row in enumerate(chosen):
            trial = await Trial(self.task, toolbox, row, number, write, self.seed).play()
            outcome = self._outcome(trial, judge)
            if outcome is None or outcome.score is None or outcome.score < self.full - CLOSE:
                earned = trial.broken or _verdict(outcome)
                return Finding("reference", False, f"{_shown(row)}: {trial.written[-1:]!r:.120} earns {earned}")
        return Finding("reference", True, f"the reference answers of {len(chosen)} rows earn {self.full:g}")

    async def _wrong(self, toolbox: Toolbox | None, judge: Judge) -> Finding:
        tried, others, lucky, example = 0, 0, 0, ""
        for number, row in enumerate(self._chosen(WRONG)):
            for text, by_chance in self._wrong_texts(row):
                trial = await Trial(self.task, toolbox, row, number, _saying(text), self.seed).play()
                outcome = self._outcome(trial, judge)
                tried, others = tried + 1, others + by_chance
                if outcome is None or outcome.score is None or outcome.score < self.full - CLOSE:
                    continue
                found = f"{_shown(row)}: {text!r:.120} earns {outcome.score:g}"
                if not by_chance:
                    return Finding("wrong", False, found)
                lucky, example = lucky + 1, example or found
        if 2 * lucky > others:
            return Finding("wrong", False, f"{lucky} of {others} answers of other rows earn it: {example}")
        right = f", {lucky} answers of other rows do" if lucky else ""
        return Finding("wrong", True, f"{tried - lucky} wrong answers do not earn {self.full:g}{right}")

    def _wrong_texts(self, row: Row) -> Iterator[tuple[str, bool]]:
        """Yield wrong answers, and whether each may be right by chance."""
        yield from ((text, False) for text in ("", " \n", RUBBISH, *_LONG))
        answer = self.task.answer
        if answer is None:
            return
        right = answer(row)
        yield _spoilt(right), False
        others = (answer(other) for other in self._chosen(4 * WRONG))
        yield from ((text, True) for text in itertools.islice((o for o in others if o.strip() != right.strip()), 3))

    async def _together(self, toolbox: Toolbox | None, judge: Judge) -> tuple[Finding, Finding]:
        """Play the same episodes alone, again, and in turns; two of them are of one row."""
        rows = self._chosen(TOGETHER)
        rows = [*rows, rows[0]]

        def trials() -> list[Trial]:
            return [Trial(self.task, toolbox, row, n, self._mixed(n), self.seed) for n, row in enumerate(rows)]

        alone = [await trial.play() for trial in trials()]
        outcomes = [self._outcome(trial, judge) for trial in alone]
        again = [await trial.play() for trial in trials()]
        for row, first, second in zip(rows, alone, again, strict=True):
            if first.transcript() != second.transcript():
                found = f"{_shown(row)}: {_first_difference(first, second)}"
                return (
                    Finding("repeatable", False, found),
                    Finding("interleaved", None, "episodes differ when they are played alone"),
                )
        repeatable = Finding("repeatable", True, f"{len(rows)} episodes that are played twice are the same")
        turns = trials()
        while any(not trial.ended for trial in turns):
            for trial in turns:
                if not trial.ended:
                    await trial.turn()
        for row, first, second in zip(rows, alone, turns, strict=True):
            if first.transcript() != second.transcript():
                return repeatable, Finding("interleaved", False, f"{_shown(row)}: {_first_difference(first, second)}")
        scored = [self._outcome(trial, judge) for trial in turns]
        differing = [n for n, pair in enumerate(zip(outcomes, scored, strict=True)) if pair[0] != pair[1]]
        if differing and not self.changing:
            n = differing[0]
            found = f"{_shown(rows[n])}: {_verdict(outcomes[n])} alone, {_verdict(scored[n])} in turns"
            return repeatable, Finding("interleaved", False, found)
        return repeatable, Finding("interleaved", True, f"{len(rows)} episodes in turns are as they are alone")

    def _mixed(self, number: int) -> Writer:
        """Return the reference for a few episodes, and for the others a player that is wrong in a way of its own."""
        right = _reference_of(self.task)
        if right is not None and number in (0, 2):
            return right
        texts = [text for row in self._chosen(TOGETHER) for text, _ in self._wrong_texts(row) if len(text) < SHORT]
        return lambda episode: texts[(5 * number + episode.turns) % len(texts)]

    def _outcome(self, trial: Trial, judge: Judge) -> Outcome | None:
        """Return the outcome of an episode, and note what is wrong with it."""
        if trial.broken:
            self.broken.append(f"{_shown(trial.episode.row)}: {trial.broken}, after {trial.written[-1:]!r:.120}")
            return None
        sample = trial.sample()
        try:
            (first,), (second,) = judge([sample]), judge([sample])
        except RewardError as error:
            self.unscored.append(error.message)
            return None
        if first.kind.failed:
            self.unscored.append(f"{_shown(sample.row)}: {sample.completion!r:.120} is judged {_verdict(first)}")
        elif first != second:
            self.changing.append(
                f"{_shown(sample.row)}: {sample.completion!r:.120} earns {_verdict(first)} and then {_verdict(second)}"
            )
        return first

    def _chosen(self, count: int) -> list[Row]:
        """Return up to `count` rows, half of them held out, spread over each side."""
        held_out = _spread(self.task.held_out, count // 2)
        return [*held_out, *_spread(self.task.train, count - len(held_out))]


def _saying(text: str) -> Writer:
    return lambda episode: text


def _reference_of(task: Task) -> Writer | None:
    if task.player is not None:
        return task.player
    answer = task.answer
    return None if answer is None else lambda episode: answer(episode.row)


def _finding(name: str, faults: list[str], passed: str) -> Finding:
    if not faults:
        return Finding(name, True, passed)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Finding(name, False, faults[0] + more)


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    count = min(count, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def _spoilt(text: str) -> str:
    """Return a text with its last letter or digit replaced, or with rubbish behind it where it has none."""
    place = next((at for at in reversed(range(len(text))) if text[at].isalnum()), None)
    return text + "#" if place is None else f"{text[:place]}#{text[place + 1 :]}"


def _shown(row: Row) -> str:
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    return f"the row {text[-60:]!r}"


def _verdict(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no outcome"
    return f"{outcome.score:g}" if outcome.kind is OutcomeKind.SCORED else f"{outcome.kind.value} ({outcome.reason})"


def _first_difference(first: Trial, second: Trial) -> str:
    pairs: Iterable[tuple[object, object]] = itertools.zip_longest(first.transcript(), second.transcript())
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{one!r:.160} becomes {other!r:.160}"
