"""What stands for a model while a task is proved: functions write the turns, and the engine plays them as a model's."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from ramet.chat import ChatTemplate
from ramet.checking.repeating import key_of
from ramet.checking.turns import Turns
from ramet.checking.watch import Hung
from ramet.concurrency import Calls, Threads, by_threads
from ramet.episodes import Played, Rules, Start, WrongReply, play
from ramet.errors import RewardError
from ramet.policies.person import SCRIPT, typed
from ramet.policies.reference import as_text, noting
from ramet.tasks.copies import Marked, own
from ramet.tasks.judge import Judge
from ramet.tasks.task import Row, Task
from ramet.tools.toolbox import Toolbox
from ramet.types import Completion, Episode, Message, Outcome, OutcomeKind, Request, Sample, Sampling, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

Writer: TypeAlias = Callable[[Episode], str | Awaitable[str]]
"""What writes a turn in the place of a model, sync or async, as a task's `player` does."""

ROOM = 1_000_000
"""How many tokens a turn may have: nothing that is written here has as many."""
SHOWN = 60
"""How many characters of a prompt say which row it is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many seconds may be taken: by an episode before it is judged, by a call of a tool, and by `score`."""

    episode_seconds: float = 60.0
    tool_seconds: float = 30.0
    score_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("episode_seconds", "tool_seconds", "score_seconds"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be a finite number of seconds above 0: found {seconds}")

    @property
    def longest(self) -> float:
        """The longest of them."""
        return max(self.episode_seconds, self.tool_seconds, self.score_seconds)


@dataclass(slots=True)
class Shown:
    """One episode that was played: what was `written`, how it ended, and how it was judged, twice.

    `broken` says what raised, and what it raised ("" for nothing); `no_reward` why the reward is none. `changed` is
    True where a function changed the row that it was given.
    """

    row: Row
    written: list[str] = field(default_factory=list)
    played: Played | None = None
    again: Outcome | None = None
    broken: str = ""
    no_reward: str = ""
    changed: bool = False

    @property
    def outcome(self) -> Outcome | None:
        """What it was judged at first; None where it broke."""
        return None if self.played is None or self.broken else self.played.outcome

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said."""
        return () if self.played is None else self.played.sample.messages

    def transcript(self) -> list[tuple[str, str]]:
        """Return who said what, for a comparison with another episode."""
        said = [(str(message["role"]), repr(message.get("content"))) for message in self.messages]
        stop = "" if self.played is None else self.played.stop.value
        return [*said, ("stop", self.broken or stop)]


class StandIn:
    """Play episodes of `task` with what functions write: by `ramet.episodes.play`, over tokens that are bytes.

    Close it, or use it as a context; one event loop may use it. Raises `Hung` where something takes longer than
    `limits` say.

    >>> from ramet.tasks.arithmetic import arithmetic
    >>> task = arithmetic(digits=1, held_out_size=20)
    >>> with StandIn(task) as stand_in:
    ...     shown = asyncio.run(stand_in.alone(task.held_out[0], lambda episode: "5"))
    >>> shown.written, len(shown.messages), shown.outcome.score
    (['5'], 2, 0.0)
    """

    def __init__(self, task: Task, *, seed: int = 0, limits: Limits = Limits()) -> None:
        self._task = dataclasses.replace(task, begin=noting(task.begin, self._note, self._begins))
        self._seed, self._limits = seed, limits
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = SCRIPT
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self._judge = _Twice(task, limits.score_seconds, self._scoring)
        self._toolbox = Toolbox(task.tools, timeout=limits.tool_seconds) if task.tools else None
        self._threads = Threads(512)
        self._begun: dict[int, tuple[Any, random.Random]] = {}  # by the number of the start
        self.doing = "the task"
        """What runs, as far as it can be known."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and the tools; what hangs is left to itself."""
        self._judge.close()
        self._threads.shutdown(wait=False)
        if self._toolbox is not None:
            self._toolbox.close()

    def _scoring(self) -> None:
        self.doing = "score"

    async def alone(self, row: Row, write: Writer, number: int = 0) -> Shown:
        """Play one episode of a row; `number` is that of its prompt, of which its random numbers are a function."""
        (shown,) = await self._play([Start(row, group=number, prompt_index=number)], [write], None)
        return shown

    async def in_turns(self, rows: Sequence[Row], writers: Sequence[Writer], numbers: Sequence[int]) -> list[Shown]:
        """Play episodes at once, of which one goes on at a time: a turn of each, with what comes back, and again."""
        starts = [
            Start(row, group=number, member=member, prompt_index=number)
            for member, (row, number) in enumerate(zip(rows, numbers, strict=True))
        ]
        return await self._play(starts, writers, Turns(len(starts)))

    async def _play(self, starts: Sequence[Start], writers: Sequence[Writer], turns: Turns | None) -> list[Shown]:
        shown = [Shown(start.row) for start in starts]
        watched = [Marked(start.row, number) for number, start in enumerate(starts)]
        starts = [dataclasses.replace(start, row=row) for start, row in zip(starts, watched, strict=True)]
        place = _Place(self, starts, writers, shown, turns)
        seconds = self._limits.episode_seconds * len(starts)  # each waits for the others
        rules = Rules(Sampling(ROOM), self._seed, time_limit=seconds, tool_seconds=self._limits.tool_seconds)
        self._begun.clear()
        self._judge.second.clear()
        try:
            played = await play(
                self._task,
                starts,
                place.answer,
                self._template,
                rules,
                judge=self._judge,
                toolbox=self._toolbox,
                call=place.call,
                ended=place.ended,
            )
        except (WrongReply, RewardError, SystemExit) as error:  # which end all, and are one episode's here
            for one in shown:
                if isinstance(error, RewardError):
                    one.no_reward = error.message
                else:
                    one.broken = f"{self.doing} raised {type(error).__name__}: {error}"
                    if isinstance(error, WrongReply):
                        said = error.message
                        one.broken = said if said.startswith("begin ") else f"reply raised WrongReply: {error}"
            return shown
        for one, each, row in zip(shown, played, watched, strict=True):
            one.played, one.changed = each, any(key_of(copied) != key_of(row) for copied in row.copies)
            one.again = self._judge.second.get((each.start.group, each.start.member))
        place.look()
        return shown

    def _note(self, row: Row, rng: random.Random, state: Any) -> None:
        assert isinstance(row, Marked)
        self._begun[row.key] = state, rng

    def _begins(self) -> None:
        self.doing = "begin"


class _Place:
    """Where episodes are played together: who writes for them, and who is next."""

    def __init__(
        self,
        stand_in: StandIn,
        starts: Sequence[Start],
        writers: Sequence[Writer],
        shown: Sequence[Shown],
        turns: Turns | None,
    ) -> None:
        self._of, self._starts, self._writers, self._shown, self._turns = stand_in, starts, writers, shown, turns
        self._one_by_one, self._calls = asyncio.Lock(), Calls(self.call)
        self._waiting: set[int] = set()

    async def answer(self, request: Request) -> Completion:
        """Have the writer of the request's row write, when it is its turn."""
        number, of = request.row, self._of
        if self._turns is not None:
            self._waiting.add(number)
            await self._turns.take(number)
            self._waiting.discard(number)
        state, rng = of._begun[number]
        episode = Episode(own(self._starts[number].row), list(request.messages or ()), rng, state, request.draw.turn)
        of.doing = "the player"
        text = as_text(await self._calls(self._writers[number], episode))
        of.doing = "reply or a tool"
        self._shown[number].written.append(text)
        return typed(request, text, of._tokenizer)

    async def call(self, function: Callable[[], T], /) -> T:
        """Call a sync function in a thread, one after another, in the order in which they are asked for."""
        async with self._one_by_one:
            return await by_threads(self._of._threads)(function)

    def ended(self, played: Played) -> None:
        """Deal out the next turn."""
        if self._turns is not None:
            self._turns.leave()

    def look(self) -> None:
        """Note what broke; raise `Hung` where something took too long, for whoever did and did not wait for others."""
        hung = [n for n, shown in enumerate(self._shown) if _stop(shown) is StopReason.TIMEOUT]
        if hung:
            number = min(hung, key=lambda number: (number in self._waiting, number))
            doing, _, took = _reason(self._shown[number]).partition(": ")
            what = f"{_NAME_OF.get(doing, doing)} hung"
            raise Hung(_CHECK_OF.get(doing, "episodes"), self._about(number, what, took))
        limits, late_score = self._of._limits, self._of._judge.late
        for number, shown in enumerate(self._shown):
            late = f"error: timed out after {limits.tool_seconds:g} s"
            for message in shown.messages:
                if message["role"] == "tool" and message.get("content") == late:
                    took = f"a call took over {limits.tool_seconds:g} s"
                    raise Hung("tools", self._about(number, f"the tool {message.get('name')} hung", took))
            for outcome in (shown.outcome, shown.again):
                if outcome is not None and outcome.kind is OutcomeKind.TIMED_OUT and late_score in outcome.reason:
                    raise Hung("scores", self._about(number, "score hung", f"it took over {limits.score_seconds:g} s"))
            if _stop(shown) is StopReason.ERROR:
                doing, _, what = _reason(shown).partition(": ")
                shown.broken = f"{_NAME_OF.get(doing, doing)} raised {what}"

    def _about(self, number: int, what: str, took: str) -> str:
        shown = self._shown[number]
        return f"{what}: {shown_row(shown.row)}: {took}, after {shown.written[-1:]!r:.120}"


_NAME_OF = {"the policy": "the player", "the tools": "a tool"}
_CHECK_OF = {"the tools": "tools"}


class _Twice(Judge):
    """A judge that judges each sample a second time, while its state is still open, and remembers what it said then."""

    def __init__(self, task: Task, seconds: float, began: Callable[[], None]) -> None:
        super().__init__(task.score, seconds=seconds)
        self.late = f"took longer than {seconds:g} s"
        self.second: dict[tuple[int, int], Outcome] = {}
        self._began = began

    async def judged(self, sample: Sample) -> Outcome:
        """Return the first outcome."""
        self._began()
        first = await super().judged(sample)
        if not first.kind.failed:
            self.second[sample.group, sample.member] = await super().judged(sample)
        return first


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte of UTF-8, of which decoding gives the same text back.

    `<bos>` is 256 and begins a text, `<eos>` is 257; written out in a text, they are the bytes that they are.

    >>> byte_tokenizer()("a\u00e9")["input_ids"], byte_tokenizer().decode([97, 195, 169])
    ([256, 97, 195, 169], 'a\u00e9')
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    signs = {_sign(byte): byte for byte in range(256)}
    bos, eos = "<bos>", "<eos>"
    tokenizer = Tokenizer(models.BPE(vocab={**signs, bos: 256, eos: 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 256)])
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    return made


def _sign(byte: int) -> str:
    """Return the character by which byte-level tokenizers write a byte: itself where it can be seen, else a later one.

    >>> _sign(65), _sign(0), _sign(32)
    ('A', '\u0100', '\u0120')
    """
    unseen = [*range(33), *range(127, 161), 173]
    return chr(256 + unseen.index(byte)) if byte in unseen else chr(byte)


def shown_row(row: Row) -> str:
    """Say which row it is: by the end of its prompt."""
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    return f"the row {text[-SHOWN:]!r}"


def _stop(shown: Shown) -> StopReason | None:
    return None if shown.played is None else shown.played.stop


def _reason(shown: Shown) -> str:
    return "" if shown.played is None or shown.played.outcome is None else shown.played.outcome.reason
