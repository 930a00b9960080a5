"""Conversations beside `ramet.episodes`: of one task with the same answers, both show and keep the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.envs.chat_templates import FORGETS, tokenizer_with, user
from tests.envs.test_chat import HISTORY, TOKENIZER, ids, say
from tests.episodes.stage import CHAT_TOKENIZER

from ramet.chat import ChatTemplate, PlainTemplate, Template
from ramet.envs.chat import ChatEnv
from ramet.episodes import Played, Rules, Start, play_episodes
from ramet.policies.policy import Policy
from ramet.policies.scripted import ScriptedPolicy
from ramet.ragged import Ragged, rows
from ramet.tasks import Judge, Task, build_task
from ramet.types import Draw, Episode, Request, Sample, Sampling

EOS = int(TOKENIZER.eos_token_id)
SEED = 5
NEVER = "no such word"
TASKS = {
    "word_guessing": {"guesses": 3},
    "calculator": {},
    "textarena:GuessTheNumber-v0": {"train_size": 2, "held_out_size": 1},
    "textarena:TowerOfHanoi-v0": {"train_size": 2, "held_out_size": 1},
}


def reference(task: Task, row: Any) -> list[str]:
    """What the task's own player writes, turn by turn."""
    assert task.player is not None
    env = ChatEnv(task=task, rows=[row])
    env.set_seed(SEED)
    td = env.reset(TensorDict({"prompt_index": torch.tensor([0])}, [1]))
    said: list[str] = []
    while not bool(td["done"].all()):
        (one,) = rows(td, "episode")
        said.append(task.player(Episode(row, rows(td, HISTORY)[0], one.rng, one.state, one.turns)))
        td = env.step_mdp(env.step(say(td, "history", said[-1:])))
    env.close()
    return said


def by_episodes(
    task: Task, policy: Policy, starts: Sequence[Start], template: Any, sampling: Sampling
) -> list[tuple[list[int], Played]]:
    """Each episode's last piece of tokens, and the episode."""
    judge = Judge(task.score)
    played = play_episodes(task, policy, starts, template=template, rules=Rules(sampling, SEED), judge=judge)
    judge.close()
    return [(list(one.pieces[-1].tokens), one) for one in played]


def by_environment(
    task: Task, policy: Policy, starts: Sequence[Start], template: Template, sampling: Sampling
) -> list[tuple[list[int], Sample, Any]]:
    """Each row's tokens, sample and outcome at its end."""
    samples: dict[int, Sample] = {}

    def score(sample: Sample) -> Any:
        samples[sample.group] = sample
        return task.score(sample)

    watched = dataclasses.replace(task, score=score)
    env = ChatEnv(
        input_mode="tokens", tokenizer=template.tokenizer, template=template, task=watched,  # type: ignore[attr-defined]
        rows=[start.row for start in starts], stop_ids=sampling.stop_ids,
    )  # fmt: skip
    env.set_seed(SEED)
    columns = {
        "prompt_index": torch.arange(len(starts)),
        "group_id": torch.tensor([start.group for start in starts]),
        "repeat_index": torch.tensor([start.member for start in starts]),
    }
    td = env.reset(TensorDict(columns, [len(starts)]))
    turn = 0
    while not bool(td["done"].all()):
        live = [row for row, done in enumerate(td["done"].flatten().tolist()) if not done]
        prompts = rows(td, ("tokens", "prompt"))
        requests = [Request(row, prompts[row], sampling, Draw(SEED, starts[row].group, 0, turn)) for row in live]
        said = {completion.row: completion for completion in policy.complete(requests)}
        nothing = torch.zeros(0, dtype=torch.int64)
        answers = [said[row].tokens if row in said else nothing for row in range(len(starts))]
        td["tokens", "response"] = Ragged.from_rows(answers).jagged()
        td["stop_reason"] = [said[row].stop.value if row in said else "eos" for row in range(len(starts))]
        td = env.step_mdp(env.step(td.set("_step", ~td["done"])))
        turn += 1
    env.close()
    tokens = [row.tolist() for row in rows(td, ("tokens", "prompt"))]
    return list(zip(tokens, [samples[start.group] for start in starts], rows(td, "outcome"), strict=True))


def compare(task: Task, scripts: Sequence[Sequence[list[int]]], data: Sequence[Any], template: Any, limit: int) -> None:
    sampling = Sampling(limit, stop_ids=(EOS,))
    starts = [Start(row, group=number, prompt_index=number) for number, row in enumerate(data)]
    policy = ScriptedPolicy(lambda request: scripts[request.draw.prompt][request.draw.turn], eos_token_id=EOS)
    wanted = by_episodes(task, policy, starts, template, sampling)
    found = by_environment(task, policy, starts, template, sampling)
    for (tokens, played), (own_tokens, sample, outcome) in zip(wanted, found, strict=True):
        assert own_tokens == tokens
        assert outcome == played.outcome
        assert dataclasses.replace(sample, state=None) == dataclasses.replace(played.sample, state=None)


@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("as_messages", [False, True], ids=["text", "messages"])
def test_a_shipped_task_of_several_turns_is_the_same_episode(name: str, chat: bool, as_messages: bool) -> None:
    """As its own player plays it, with ends that are written, and with answers that never end it."""
    if name.startswith("textarena"):
        pytest.importorskip("textarena")
    task = build_task(name, TASKS[name])
    data = [dict(row) for row in task.train[:2]]
    if as_messages:
        data = [
            {**row, "prompt": [user(row["prompt"])] if isinstance(row["prompt"], str) else row["prompt"]}
            for row in data
        ]
    right = [[*ids(text), EOS] for text in reference(task, data[0])] if task.player is not None else []
    scripts = [[*right, *[[*ids("4"), EOS]] * 40], [[*ids(NEVER), EOS] if turn % 2 else ids("?") for turn in range(40)]]
    compare(task, scripts, data, ChatTemplate(CHAT_TOKENIZER) if chat else PlainTemplate(TOKENIZER), 400)


@pytest.mark.parametrize("prompt", ["1+1?", [user("1+1?")]], ids=["text", "messages"])
@pytest.mark.parametrize("limit", [1, 2, 3, 20])
def test_a_limit_that_cuts_a_turn_ends_the_episode_as_it_does_there(prompt: Any, limit: int) -> None:
    def reply(episode: Episode) -> str | None:
        return None if episode.text == "end" else f"again {episode.rng.random():.3f}"

    task = Task("t", [], [], lambda sample: float(len(sample.completion)), reply=reply, max_turns=3)
    scripts = [
        [[*ids("a"), EOS], [*ids("end"), EOS]],
        [ids("a"), ids("a!b"), [EOS]],
        [[EOS], ids("abc"), []],
        [[], [], []],
    ]
    for template in (PlainTemplate(TOKENIZER), ChatTemplate(CHAT_TOKENIZER), ChatTemplate(tokenizer_with(FORGETS))):
        compare(task, scripts, [{"prompt": prompt, "n": number} for number in range(4)], template, limit)
