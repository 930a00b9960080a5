"""The side of this project, in the interpreter that runs the benchmark. Started by `benchmarks/chat_env.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from chat_work import ANSWER, SYSTEM, queries, tokenizer, turns
from tensordict import NonTensorStack, TensorDict
from work import Loop, nothing, resets, serve

from ramet.envs.chat import ChatEnv
from ramet.ragged import rows
from ramet.tasks import Task


def chat(call: str, mode: Any, batch: int, count: int = 4, read: bool = False) -> Loop:
    """Reset, step, or step and reset; `read` reads all messages on the clock."""
    env = ChatEnv(input_mode=mode, batch_size=batch, tokenizer=tokenizer(), system_prompt=SYSTEM)
    given = queries(batch)
    if call == "reset":
        return resets(env, given.copy, _messages if read else nothing)
    return turns(env, lambda: env.reset(given.copy()), _policy(mode, batch), count, call)


def task(mode: Any, batch: int, count: int) -> Loop:
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


def _messages(td: Any) -> Any:
    return rows(td, ("history", "prompt"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve({"chat": chat, "task": task}, {name: version(name) for name in ("tensordict", "torch", "transformers")})
