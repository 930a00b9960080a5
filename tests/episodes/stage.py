"""A small stage: tokenizers, a template that writes tools, scripted answers, and `played` under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch
from tests.episodes import clock

from ramet.chat import ChatTemplate, PlainTemplate
from ramet.episodes import Played, Rules, Start, play
from ramet.models.tiny import tiny_tokenizer
from ramet.tasks.judge import Judge
from ramet.tasks.task import Task
from ramet.types import Completion, Request, Sampling, StopReason

TOKENIZER = tiny_tokenizer()
EOS = 2
PLAIN = PlainTemplate(TOKENIZER)
CHAT_TOKENIZER = tiny_tokenizer()
CHAT_TOKENIZER.chat_template = (
    "{% for tool in tools or [] %}+{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{% if message.role == 'devil' %}{{ raise_exception('no devils') }}{% endif %}"
    "{{ message.role }}:{{ message.content }}<eos>\n{% endfor %}assistant:"
)
CHAT = ChatTemplate(CHAT_TOKENIZER)
RULES = Rules(Sampling(64), seed=3)
CALL = '<tool_call>{"name": "look", "arguments": {"seconds": %s}}</tool_call>'


def ids(text: str) -> list[int]:
    """Return the ids of a text as a model samples them: nothing in front."""
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def saying(request: Request, text: str, stop: StopReason = StopReason.EOS, version: int = 0) -> Completion:
    """Return a completion that says `text`, an end behind it where it ended, each log-prob telling its place."""
    tokens = ids(text) + [EOS] * (stop is StopReason.EOS)
    log_probs = torch.tensor([-0.1 * (place + 1) for place in range(len(tokens))])
    return Completion(request.row, torch.tensor(tokens, dtype=torch.int64), log_probs, stop, version)


def script(*turns: str | Exception | StopReason) -> Callable[[Request], Coroutine[Any, Any, Completion]]:
    """Answer turn after turn: text, an error to raise, or a reason to have stopped with "cut"."""

    async def answer(request: Request) -> Completion:
        await asyncio.sleep(0)
        said = turns[request.draw.turn]
        if isinstance(said, Exception):
            raise said
        return saying(request, "cut", said) if isinstance(said, StopReason) else saying(request, said)

    return answer


def task(**parts: Any) -> Task:
    """Return a task without rows; its score is 1 unless `parts` says another."""
    return Task(**{"name": "t", "train": [], "held_out": [], "score": lambda sample: 1.0, "max_turns": 4, **parts})


def starts(*prompts: Any) -> list[Start]:
    """Return a start for each prompt, a group of its own."""
    return [Start({"prompt": prompt}, group=10 + number, prompt_index=number) for number, prompt in enumerate(prompts)]


def played(
    of: Task,
    answer: Callable[[Request], Coroutine[Any, Any, Completion]],
    begun: Sequence[Start] | None = None,
    *,
    template: PlainTemplate | ChatTemplate = PLAIN,
    rules: Rules = RULES,
    judge: Judge | None = None,
    **more: Any,
) -> list[Played]:
    """Play under a virtual clock; sync functions take no time."""
    begun = starts("go ") if begun is None else begun
    judge = Judge(of.score, threads=0) if judge is None else judge
    return clock.run(lambda: play(of, begun, answer, template, rules, judge=judge, call=clock.inline, **more))[0]


def contents(episode: Played) -> list[str]:
    """Return what was said, message by message."""
    return [str(message["content"]) for message in episode.sample.messages]


def of_kind(episode: Played, kind: Any, piece: int = 0) -> list[int]:
    """Return the tokens of one kind of a piece."""
    found = episode.pieces[piece]
    return [token for token, own in zip(found.tokens, found.kinds, strict=True) if own is kind]


Row = Mapping[str, Any]
