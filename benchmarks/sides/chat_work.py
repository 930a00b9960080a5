"""What both sides share of conversations: prompts, template, and the turns of an episode as a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from work import Loop, byte_tokenizer

SYSTEM = "Be brief."
ANSWER = "It is the third one."
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Any:
    """Make the tokenizer of both sides: bytes, and a chat template."""
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    return made


def queries(batch: int) -> TensorDict:
    """Make prompts of one length, all different: the peer's mode "tokens" takes no others."""
    return TensorDict({"query": [f"Question {row:04d}: which of them?" for row in range(batch)]}, [batch])


def turns(
    env: Any, start: Callable[[], Any], act: Callable[[Any], Any], count: int, call: str, joined: bool = False
) -> Loop:
    """Time `count` turns after each reset, by `env.step` or `env.step_and_maybe_reset`.

    `act` is outside the clock, unless `joined`.
    """
    state: list[Any] = []
    seen: list[None] = []

    def ready() -> Any:
        if len(seen) % count == 0:
            state[:] = [start()]
        elif call == "step":
            state[:] = [env.step_mdp(state[0])]
        seen.append(None)
        return state[0] if joined else act(state[0])

    def run(td: Any) -> Any:
        td = act(td) if joined else td
        if call == "step":
            stepped = env.step(td)
            state[:] = [stepped]
        else:
            stepped, after = env.step_and_maybe_reset(td)
            state[:] = [after]
        return stepped

    return Loop(ready, run, count, warm=count <= 8)
