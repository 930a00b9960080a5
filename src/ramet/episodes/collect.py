"""Many episodes at once, for a caller who waits: a policy, a task and where to start, and a forest comes back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from ramet.concurrency import EventLoop, Here
from ramet.episodes.gathered import PATIENCE, Gathered
from ramet.episodes.planting import into_forest
from ramet.episodes.play import play
from ramet.episodes.played import Played, Rules, Speech, Start
from ramet.errors import ConfigError
from ramet.forest import Forest
from ramet.policies.policy import Policy
from ramet.tasks.judge import Judge
from ramet.tasks.task import Task
from ramet.types import Completion, Request, Sampling


@runtime_checkable
class Answers(Protocol):
    """A policy that completes rows one by one in an event loop, as one behind a server does."""

    async def answer(self, request: Request) -> Completion:
        """Return the completion of one request."""
        ...


def play_episodes(
    task: Task,
    policy: Policy,
    starts: Sequence[Start],
    *,
    template: Speech,
    rules: Rules,
    judge: Judge | None = None,
    loop: EventLoop | None = None,
    ended: Callable[[Played], object] = lambda played: None,
) -> list[Played]:
    """Play an episode for each of `starts`, all at once, and return them in this order: see `play`.

    What is async runs in `loop` (None: one for this call), so that clients and semaphores may outlive the call. A
    policy without an `answer` of its own completes its batches in the thread that calls; what it raises is raised, and
    so is Ctrl-C, once all that was under way has been cancelled and has cleaned up. `ended` is handed each episode as
    soon as it is over, in the thread of the loop: what it was told of is not lost to what comes later. Of those that an
    error of the policy ended, which is the end of all, it is not told.

    Raises `ConfigError` for rules of lockstep with a policy that answers row by row.

    >>> from ramet.chat import PlainTemplate
    >>> from ramet.models.tiny import tiny_tokenizer
    >>> from ramet.policies.scripted import ScriptedPolicy
    >>> tokenizer = tiny_tokenizer()
    >>> rows = [{"prompt": "1+1="}]
    >>> def reply(episode):
    ...     return None if episode.turns == 2 else " sure?"
    >>> task = Task("sure", rows, [], lambda sample: float(sample.completion == "2"), reply=reply, max_turns=3)
    >>> [episode] = play_episodes(
    ...     task, ScriptedPolicy(lambda request: [6, 2], eos_token_id=2), [Start(rows[0], group=0)],
    ...     template=PlainTemplate(tokenizer), rules=Rules(Sampling(4), seed=0), judge=Judge(task.score))
    >>> [message["content"] for message in episode.sample.messages], episode.outcome.score, episode.stop.value
    (['1+1=', '2', ' sure?', '2'], 1.0, 'eos')
    """
    if rules.lockstep and isinstance(policy, Answers):
        raise ConfigError(
            f"lockstep is for a policy that completes batches: {type(policy).__name__} answers each row by itself",
            hint="leave lockstep out",
        )
    with contextlib.ExitStack() as opened:
        running = opened.enter_context(EventLoop("ramet episodes")) if loop is None else loop

        async def work(here: Here) -> list[Played]:
            if isinstance(policy, Answers):
                return await play(task, starts, policy.answer, template, rules, judge=judge, ended=ended)
            with Gathered(policy, start=here.start, patience=math.inf if rules.lockstep else PATIENCE) as gathered:
                gathered.expect(len(starts))

                def tell(played: Played) -> None:
                    if not gathered.broken:
                        ended(played)

                return await play(
                    task, starts, gathered.answer, template, rules, judge=judge, left=gathered.leave, ended=tell
                )

        return running.run(work)


def collect_episodes(
    task: Task,
    policy: Policy,
    starts: Sequence[Start],
    *,
    sampling: Sampling,
    seed: int,
    template: Speech,
    judge: Judge | None = None,
    max_turns: int | None = None,
    time_limit: float | None = None,
    tool_seconds: float = 30.0,
    context: int | None = None,
    prompt_limit: int | None = None,
    lockstep: bool = False,
    loop: EventLoop | None = None,
    forest: Forest | None = None,
) -> Forest:
    """Play an episode for each of `starts` and return the forest that holds them (a new one by default).

    The settings are those of `Rules`; `play_episodes` and `into_forest` are the two halves, for whoever wants to see
    the episodes as well. Rollouts stand in the order of `starts`, whichever ended first.
    """
    rules = Rules(
        sampling,
        seed,
        max_turns=max_turns,
        time_limit=time_limit,
        tool_seconds=tool_seconds,
        context=context,
        prompt_limit=prompt_limit,
        lockstep=lockstep,
    )
    forest = Forest() if forest is None else forest
    into_forest(play_episodes(task, policy, starts, template=template, rules=rules, judge=judge, loop=loop), forest)
    return forest
