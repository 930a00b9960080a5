"""One episode as a coroutine: the model's turn, tools or the environment's reply, the model's turn, and so on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from ramet.chat import ChatTemplate, Conversation, Piece, PlainTemplate, Template
from ramet.concurrency import Calling, Calls, Threads, by_threads, together
from ramet.episodes.keeper import Keeper
from ramet.episodes.played import Played, Rules, Speech, Start
from ramet.errors import DataError, ModelError, RametError, ServerGone
from ramet.tasks.copies import own
from ramet.tasks.judge import Judge
from ramet.tasks.replies import WrongReply, as_messages, left
from ramet.tasks.task import Begin, Task, rng_of
from ramet.tasks.verdicts import name_of
from ramet.tools.toolbox import Toolbox
from ramet.types import Completion, Draw, Episode, Kind, Message, Outcome, Request, Sample, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answering: TypeAlias = Callable[[Request], Coroutine[Any, Any, Completion]]
"""What completes one row: `Gathered.answer` of a model in the process, or `answer` of a server's policy."""


class Tools(Protocol):
    """What a model may call, as `ramet.tools.Toolbox` offers it."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """What a template is told of them."""

    def read_turn(self, text: str, turn: int = 0) -> Message:
        """Return what a model wrote as a message, the calls in it under "tool_calls"."""

    async def run(self, calls: Sequence[Any], episode: Episode) -> list[Message]:
        """Return a message for each call, in order."""

    def close(self) -> None:
        """End what runs for them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What all episodes that are played together share."""

    task: Task
    answer: Answering
    template: Template
    text_template: Template
    tokenizer: PreTrainedTokenizerBase
    rules: Rules
    toolbox: Tools | None
    judge: Judge | None
    call: Calls
    left: Callable[[], object]
    ended: Callable[[Played], object]
    openings: dict[int, tuple[object, Conversation]] = field(default_factory=dict)
    """Prompts, by their identity, and conversations as they begin: a group's members begin alike.

    The prompt is kept with it, so that no other object takes its identity.
    """

    @property
    def max_turns(self) -> int:
        """How many turns the model may take."""
        return self.task.max_turns if self.rules.max_turns is None else self.rules.max_turns


async def play(
    task: Task,
    starts: Sequence[Start],
    answer: Answering,
    template: Speech,
    rules: Rules,
    *,
    judge: Judge | None = None,
    toolbox: Tools | None = None,
    call: Calling | None = None,
    left: Callable[[], object] = lambda: None,
    ended: Callable[[Played], object] = lambda played: None,
) -> list[Played]:
    """Play one episode for each of `starts`, all at once, and return them in this order.

    An episode ends when `task.reply` returns None, or with the first answer that calls no tool where there is no reply;
    or at a limit, which its stop reason names. What fails costs its own episode: `StopReason.ERROR`, and an outcome
    that says why. An episode that did not fail is judged, as soon as it has ended. What `task.begin` returned is closed
    once after that, if it has a `close` method.

    Prompts that are text go on as text where `template` is one of a chat. `toolbox` are tools that are open already,
    and stay so (None: the task's own, for as long as this takes). Sync functions of the task run by `call`, each in a
    thread by default. `left` is told of each episode whose last turn has been taken, and `ended` is handed each
    as soon as it is judged and closed; what it raises ends all.

    Functions see copies of the row, so that what one changes there no other sees, nor the sample.

    Raises `WrongReply` where `task.reply` returns something else than text, messages or None, and `RewardError` where a
    reward is no reward, and each of them where a function calls `sys.exit`: mistakes in the program, which end all. So
    does `ServerGone`, of a policy whose server stays away.
    """
    # An episode waits for one function at a time, and once more for its state to close: none waits for a thread.
    threads = Threads(2 * max(1, len(starts)), "ramet episode")
    opened = Toolbox(task.tools, timeout=rules.tool_seconds) if toolbox is None and task.tools else None
    try:
        stage = Stage(
            task=task,
            answer=answer,
            template=template,
            text_template=PlainTemplate(template.tokenizer) if isinstance(template, ChatTemplate) else template,
            tokenizer=template.tokenizer,
            rules=rules,
            toolbox=toolbox if opened is None else opened,
            judge=judge,
            call=Calls(call or by_threads(threads)),
            left=left,
            ended=ended,
        )
        return await together([_OneEpisode(stage, number, start).play for number, start in enumerate(starts)])
    finally:
        if opened is not None:
            opened.close()
        threads.shutdown(wait=False)


class _OneEpisode:
    """One episode while it is played; `_doing` says in a few words what it is waiting for, for whoever reads why."""

    def __init__(self, stage: Stage, number: int, start: Start) -> None:
        self._stage, self._number, self._start = stage, number, start
        self._talk: Conversation | None = None
        self._last: Completion | None = None
        self._keeper = Keeper()
        self._episode = Episode(own(start.row), [], rng_of(stage.rules.seed, start.prompt_index))
        self._messages: list[
            Message
        ] = []  # what was said; those of `_episode` are the task's, whatever it does to them
        self._doing = "the prompt"

    async def play(self) -> Played:
        """Play to the end and judge."""
        try:
            try:
                stop, outcome = await self._to_its_end()
            finally:
                self._stage.left()
            sample = self._sample(stop)
            if outcome is None and self._stage.judge is not None:
                outcome = await self._stage.judge.judged(sample)
        finally:
            await self._keeper.close(self._stage.call)
        pieces = (Piece(),) if self._talk is None else tuple(self._talk.pieces)
        played = Played(self._start, pieces, stop, outcome, sample)
        self._stage.ended(played)
        return played

    async def _to_its_end(self) -> tuple[StopReason, Outcome | None]:
        """Play until it has ended; return why, and the outcome where it can not be judged."""
        limit = self._stage.rules.time_limit
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                return await self._turns(), None
        except (WrongReply, ServerGone):
            raise
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if clock.expired():
                return StopReason.TIMEOUT, Outcome.timed_out(f"{self._doing}: the episode took over {limit:g} s")
            said = error.message if isinstance(error, RametError) else str(error)
            reason = f"{self._doing}: {type(error).__name__}: {said}"
            timed_out = isinstance(error, TimeoutError)
            return StopReason.ERROR, Outcome.timed_out(reason) if timed_out else Outcome.error(reason)

    async def _turns(self) -> StopReason:
        stage, episode = self._stage, self._episode
        self._talk = talk = self._opened()
        self._say(talk.messages)  # the members of a group begin with the same ones
        if stage.task.begin is not None:
            self._doing = "begin"
            episode.state = await self._begun(stage.task.begin)
        for turn in range(stage.max_turns):
            full = self._over_a_limit(talk, turn)
            if full is not None:
                return full
            completion = await self._completion(talk, turn)
            if completion.stop.truncated and not len(completion.tokens):  # no turn was taken
                return completion.stop
            message = self._take(talk, completion)
            if completion.stop.truncated:
                return completion.stop
            replies = await self._replies(message)
            if replies is None:
                return completion.stop
            self._say(replies)
            if turn + 1 < stage.max_turns:
                self._doing = "the messages of the reply"
                talk.reply(replies)
        return StopReason.TURNS

    async def _begun(self, begin: Begin) -> Any:
        """Return what the episode has of its own, which is closed when it was judged."""
        try:
            return await self._stage.call(begin, own(self._start.row), self._episode.rng, made=self._keeper.keep)
        except SystemExit as error:
            raise left("begin", begin, error) from error

    def _opened(self) -> Conversation:
        """Begin the conversation; text goes on as text, for no template of a chat has a place for it."""
        prompt, openings = self._start.row.get("prompt"), self._stage.openings
        if id(prompt) in openings:
            return openings[id(prompt)][1].copy()
        template = self._stage.template
        if isinstance(prompt, str):
            template = self._stage.text_template
            messages: Sequence[Message] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, Sequence):
            messages = prompt
        else:
            raise DataError(f'expected text or messages as the "prompt" of the row: found {type(prompt).__name__}')
        schemas = () if self._stage.toolbox is None else self._stage.toolbox.schemas
        opened = Conversation(template, messages, schemas)
        openings[id(prompt)] = prompt, opened
        return opened.copy()

    def _over_a_limit(self, talk: Conversation, turn: int) -> StopReason | None:
        rules, length = self._stage.rules, len(talk.piece.tokens)
        if turn == 0 and rules.prompt_limit is not None and length > rules.prompt_limit:
            return StopReason.PROMPT_TOO_LONG
        if rules.context is not None and length >= rules.context:
            return StopReason.CONTEXT if turn else StopReason.PROMPT_TOO_LONG
        return None

    async def _completion(self, talk: Conversation, turn: int) -> Completion:
        """Ask for the model's next turn; its stop reason says which limit of the episode cut it."""
        self._doing = "the policy"
        rules, tokens = self._stage.rules, talk.piece.tokens
        sampling, cut = rules.sampling, False
        if rules.context is not None and rules.context - len(tokens) < sampling.max_new_tokens:
            sampling, cut = dataclasses.replace(sampling, max_new_tokens=rules.context - len(tokens)), True
        request = Request(
            self._number,
            torch.tensor(tokens, dtype=torch.int64),
            sampling,
            Draw(rules.seed, self._start.group, self._start.member, turn),
            messages=tuple(talk.messages),
            tools=tuple(talk.tools),
        )
        completion = await self._stage.answer(request)
        if len(completion.tokens) != len(completion.log_probs):
            raise ModelError(
                f"expected a log-prob (or NaN) for each token: found {len(completion.log_probs)} for "
                f"{len(completion.tokens)} tokens"
            )
        if completion.stop is StopReason.ERROR:
            raise RuntimeError("it gave no completion")
        if cut and completion.stop is StopReason.NEW_TOKENS:
            return dataclasses.replace(completion, stop=StopReason.CONTEXT)
        if turn and completion.stop is StopReason.PROMPT_TOO_LONG:
            return dataclasses.replace(completion, stop=StopReason.CONTEXT)
        return completion

    def _take(self, talk: Conversation, completion: Completion) -> Message:
        """Write down what the model sampled and return it as a message, the calls in it read where there are tools."""
        toolbox, said, turn = self._stage.toolbox, completion.text, self._episode.turns

        def read(text: str) -> Message:
            text = text if said is None else said  # where it is known better than its tokens tell
            return {"role": "assistant", "content": text} if toolbox is None else toolbox.read_turn(text, turn)

        message = talk.answer(
            completion.tokens.tolist(),
            completion.log_probs.tolist(),
            completion.version,
            ended=self._ended(completion),
            read=read,
        )
        self._last = completion
        self._episode.turns += 1
        self._say([message])
        return message

    def _say(self, messages: Sequence[Message]) -> None:
        """Write down what was said, once for the sample and once for the functions of the task."""
        self._messages.extend(own(list(messages)))
        self._episode.messages.extend(own(list(messages)))

    def _ended(self, completion: Completion) -> bool:
        """Say whether the last token ended the turn and is no part of what was said.

        A stop that is text, such as a line break, is part of it; a special token is not.
        """
        if not len(completion.tokens) or completion.stop not in (StopReason.EOS, StopReason.STOP):
            return False
        last = int(completion.tokens[-1])
        if completion.stop is StopReason.STOP:
            shown = self._stage.tokenizer.decode([last], skip_special_tokens=True)
            return last in self._stage.rules.sampling.stop_ids and not shown
        # A server of text alone may say that it ended, and give no token that did it.
        return completion.text is None or last == self._stage.tokenizer.eos_token_id

    async def _replies(self, message: Message) -> list[Message] | None:
        """Return what comes back: of the tools that were called, else of the environment; None ends the episode."""
        calls = message.get("tool_calls")
        self._episode.row = own(self._start.row)
        if self._stage.toolbox is not None and calls:
            self._doing = "the tools"
            return list(await self._stage.toolbox.run(calls, self._episode))
        reply = self._stage.task.reply
        if reply is None:
            return None
        self._doing = "reply"
        try:
            value = await self._stage.call(reply, self._episode)
        except SystemExit as error:
            raise left("reply", reply, error) from error
        return as_messages(value, name_of(reply))

    def _sample(self, stop: StopReason) -> Sample:
        pieces = [] if self._talk is None else self._talk.pieces
        sampled = [
            token
            for piece in pieces
            for token, kind in zip(piece.tokens, piece.kinds, strict=True)
            if kind is Kind.SAMPLED
        ]
        return Sample(
            prompt=self._start.row.get("prompt", ""),
            completion=self._said_last(),
            prompt_tokens=_prompt_of(pieces[0]) if pieces else (),
            completion_tokens=tuple(sampled),
            row=self._start.row,
            stop=stop,
            group=self._start.group,
            member=self._start.member,
            messages=tuple(self._messages),
            state=self._episode.state,
        )

    def _said_last(self) -> str:
        if self._last is None:
            return ""
        if self._last.text is not None:
            return self._last.text
        return str(self._stage.tokenizer.decode(self._last.tokens.tolist(), skip_special_tokens=True))


def _prompt_of(piece: Piece) -> tuple[int, ...]:
    first = next((place for place, kind in enumerate(piece.kinds) if kind is not Kind.PROMPT), len(piece.kinds))
    return tuple(piece.tokens[:first])
