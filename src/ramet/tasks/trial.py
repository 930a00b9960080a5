"""Episodes of a task that are played by functions in place of a model: to prove the task, and for a look at it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ramet.tasks.task import Row, Task
from ramet.tools.toolbox import Toolbox
from ramet.types import Episode, Message, Sample, StopReason

Writer: TypeAlias = Callable[[Episode], str]
"""What stands for the model: it returns what is written next."""


class Trial:
    """One episode, turn by turn, without a model and without tokens: a text stands for its UTF-8 bytes.

    `broken` says what raised, and what it raised; the episode has then ended.
    """

    def __init__(
        self, task: Task, toolbox: Toolbox | None, row: Row, number: int, write: Writer, seed: int = 0
    ) -> None:
        prompt = row["prompt"]
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        self.episode = Episode(row, messages, random.Random(f"{seed}: {number}"))
        self.ended = False
        self.broken = ""
        self.written: list[str] = []
        self._task, self._toolbox, self._number, self._write = task, toolbox, number, write
        self._begun = False
        self._stop = StopReason.EOS

    async def turn(self) -> None:
        """Play one turn, with what comes back."""
        doing = "begin"
        try:
            if not self._begun:
                self._begun = True
                if self._task.begin is not None:
                    self.episode.state = await _awaited(self._task.begin(self.episode.row, self.episode.rng))
            doing = "the player"
            text = self._write(self.episode)
            doing = "the turn"
            message = self._taken(text)
            doing = "the tools" if message.get("tool_calls") else "reply"
            answers = await self._answers(message)
        except Exception as error:  # whatever a task's functions raise is what a trial wants to know
            self.broken = f"{doing} raised {type(error).__name__}: {error}"
            self.ended = True
            self._stop = StopReason.ERROR
            return
        if answers is None:
            self.ended = True
            return
        self.episode.messages.extend(answers)
        if self.episode.turns >= self._task.max_turns:
            self.ended = True
            self._stop = StopReason.TURNS

    async def play(self) -> Trial:
        """Play to the end."""
        while not self.ended:
            await self.turn()
        return self

    def sample(self) -> Sample:
        """Return the episode as a reward sees it."""
        row = self.episode.row
        return Sample(
            prompt=row["prompt"],
            completion=self.written[-1] if self.written else "",
            prompt_tokens=tuple(str(row["prompt"]).encode()),
            completion_tokens=tuple("".join(self.written).encode("utf-8", "surrogatepass")),
            row=row,
            stop=self._stop,
            group=self._number,
            member=0,
            messages=tuple(self.episode.messages),
            state=self.episode.state,
        )

    def transcript(self) -> list[tuple[str, str]]:
        """Return who said what, for a comparison with another trial."""
        said = [(str(message["role"]), repr(message.get("content"))) for message in self.episode.messages]
        return [*said, ("stop", self.broken or self._stop.value)]

    def _taken(self, text: str) -> Message:
        if not isinstance(text, str):
            raise TypeError(f"expected text: found {type(text).__name__}")
        turn = self.episode.turns
        plain: Message = {"role": "assistant", "content": text}
        message = plain if self._toolbox is None else self._toolbox.read_turn(text, turn)
        self.written.append(text)
        self.episode.turns += 1
        self.episode.messages.append(message)
        return message

    async def _answers(self, message: Message) -> list[Message] | None:
        calls = message.get("tool_calls")
        if calls and self._toolbox is not None:
            return await self._toolbox.run(calls, self.episode)
        if self._task.reply is None:
            return None
        value = await _awaited(self._task.reply(self.episode))
        if value is None:
            return None
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        found = [value] if isinstance(value, Mapping) else value
        if not isinstance(found, Sequence) or not found or not all(_is_message(one) for one in found):
            raise TypeError(f"expected text, a message, several, or None: found {value!r:.80}")
        return list(found)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
