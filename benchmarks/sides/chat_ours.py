"""Conversations on the side of this project: see `ours.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from chat_work import ANSWER, SYSTEM, queries, tokenizer, turns
from tensordict import NonTensorStack, TensorDict
from work import Loop, nothing, resets

from ramet.envs.chat import ChatEnv
from ramet.tasks import Task


def chat(call: str, mode: Any, batch: int, count: int = 4) -> Loop:
    """Reset, step, or step and reset."""
    env = ChatEnv(input_mode=mode, batch_size=batch, tokenizer=tokenizer(), system_prompt=SYSTEM)
    given = queries(batch)
    if call == "reset":
        return resets(env, given.copy, nothing)
    return turns(env, lambda: env.reset(given.copy()), _policy(mode, batch), count, call)


def chat_task(mode: Any, batch: int, count: int) -> Loop:
    """Step with a task that replies to each turn: a template writes around the reply."""
    row = {"prompt": "Question: which of them?"}
    asking = Task("asking", [row], [row], lambda sample: 1.0, reply=lambda episode: "Which?", max_turns=count + 1)
    env = ChatEnv(input_mode=mode, batch_size=batch, tokenizer=tokenizer(), system_prompt=SYSTEM, task=asking)
    given = TensorDict({"prompt_index": torch.zeros(batch, dtype=torch.int64)}, [batch])
    return turns(env, lambda: env.reset(given.copy()), _policy(mode, batch), count, "step")


def _policy(mode: str, batch: int) -> Callable[[Any], Any]:
    ids = torch.tensor(tokenizer()(ANSWER)["input_ids"]).repeat(batch, 1)

    def act(td: Any) -> Any:
        answer = ids.clone() if mode == "tokens" else NonTensorStack(*[ANSWER] * batch)
        return td.set((mode, "response"), answer)

    return act
