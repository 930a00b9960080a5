"""Conversations on the peer's side: see `peer.py`.

Its environment takes the whole conversation from the policy, which is put together outside the clock, or on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from chat_work import ANSWER, SYSTEM, queries, tokenizer, turns
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from work import Loop, nothing, resets


def chat(call: str, mode: Any, batch: int, count: int = 4, joined: bool = False) -> Loop:
    """Reset, step, or step and reset; `joined` puts the conversation together on the clock."""
    env = ChatEnv(input_mode=mode, batch_size=(batch,), tokenizer=tokenizer(), system_prompt=SYSTEM)
    given = queries(batch)
    if call == "reset":
        return resets(env, given.copy, nothing)
    return turns(env, lambda: env.reset(given.copy()), _policy(mode, batch), count, call, joined)


def _policy(mode: str, batch: int) -> Callable[[Any], Any]:
    said = History.from_chats([[{"role": "assistant", "content": ANSWER}] for _ in range(batch)])
    ids = torch.tensor(tokenizer()(ANSWER)["input_ids"]).repeat(batch, 1)

    def act(td: Any) -> Any:
        talk = td.get(mode)
        if mode == "history":
            talk.full = talk.prompt.extend(said, inplace=False, dim=-1)
        elif mode == "text":
            talk.full = [text + ANSWER for text in talk.prompt]
        else:
            talk.full = torch.cat([talk.prompt, ids], -1)
        return td

    return act
