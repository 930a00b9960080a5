"""The peer's side: TorchRL, in an interpreter of its own. Started by `benchmarks/environments.py`.

Each layout is used as TorchRL's documentation uses it. `way="primer"`: `LLMEnv.from_dataloader`, whose states are lazy
stacks of rows. `way="given"`: a TensorDict that the user made is passed to `reset`, and stays as it is.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")

from chat_peer import chat
from tensordict import NonTensorStack, TensorDict, set_list_to_stack
from torchrl.data import MCTSForest
from torchrl.envs import LLMHashingEnv
from torchrl.envs.llm import LLMEnv
from work import (
    Actions,
    Loop,
    byte_actions,
    byte_prompts,
    byte_tokenizer,
    episode,
    nothing,
    padded_loader,
    padded_state,
    ragged_loader,
    resets,
    rollouts,
    serve,
    text_loader,
    text_state,
    writer,
)

_GROWING = ("observation", "text", ("next", "observation"), ("next", "text"))


def tokens(call: str, way: str, batch: int) -> Loop:
    """Reset or step padded tokens: the one layout of rows of different lengths that it steps as a batch."""
    actions, given = Actions(batch), _given(way, padded_state(batch))
    if way == "primer":
        env = LLMEnv.from_dataloader(
            padded_loader(batch), from_text=False, batch_size=(batch,), stack_method="as_padded_tensor"
        )
    else:
        env = LLMEnv(from_text=False, batch_size=(batch,))
    if call == "reset":
        return resets(env, given, nothing)
    return episode(env, lambda: env.reset(given()), writer("tokens_response", actions.tokens), nothing)


def text(call: str, way: str, batch: int, read: bool) -> Loop:
    """Reset or step strings."""
    actions, given, reading = Actions(batch), _given(way, text_state(batch)), _strings if read else nothing
    if way == "primer":
        env = LLMEnv.from_dataloader(text_loader(batch, batch), from_text=True, batch_size=(batch,))
    else:
        env = LLMEnv(from_text=True, batch_size=(batch,))
    if call == "reset":
        return resets(env, given, reading)
    act = writer("text_response", lambda: NonTensorStack(*actions.texts()))
    return episode(env, lambda: env.reset(given()), act, reading)


def rollout(layout: str, batch: int, steps: int) -> Loop:
    """Roll out; the states are plain TensorDicts, which it is quicker with than with those of its primer."""
    actions = Actions(batch)
    if layout == "text":
        env, td = LLMEnv(from_text=True, batch_size=(batch,)), text_state(batch)
        act = writer("text_response", lambda: NonTensorStack(*actions.texts()))
    else:
        env, td = LLMEnv(from_text=False, batch_size=(batch,)), padded_state(batch)
        act = writer("tokens_response", actions.tokens)
    return rollouts(env, lambda: env.reset(td.copy()), act, steps)


def hashing(way: str, batch: int, steps: int) -> Loop:
    """Play with text into a forest; read the last texts.

    `way="rollout"`: `env.rollout`, then each of its rows into the forest. `way="loop"`: as in the beam search tutorial,
    each step into the forest when it is taken.
    """
    env, prompts, actions = LLMHashingEnv(tokenizer=byte_tokenizer()), byte_prompts(batch), byte_actions(batch, steps)

    def ready() -> Any:
        forest = MCTSForest(observation_keys=["hashing"], action_keys=["action"], max_size=batch * steps + 1)
        return TensorDict({"observation": prompts.clone()}, [batch]), forest

    def in_a_loop(given: Any) -> Any:
        state, forest = env.reset(given[0]), given[1]
        for action in actions:
            stepped = env.step(state.set("action", action))
            forest.extend(stepped.exclude(*_GROWING))
            state = env.step_mdp(stepped)
        return forest, _strings(state)

    def by_rollout(given: Any) -> Any:
        state, forest = env.reset(given[0]), given[1]
        coming = iter(actions)
        played = env.rollout(steps, lambda td: td.set("action", next(coming)), auto_reset=False, tensordict=state)
        texts = _strings(played[:, -1].get("next"))
        played = played.exclude(*_GROWING)
        for row in range(batch):
            forest.extend(played[row])
        return forest, texts

    return Loop(ready, in_a_loop if way == "loop" else by_rollout, warm=False)


def loader(kind: str, prompts: int, repeats: int) -> Loop:
    """Draw `prompts` prompts through the primer, each `repeats` times, as one group batch."""
    options: dict[str, Any] = {"repeats": repeats, "group_repeats": True, "batch_size": (prompts,)}
    if kind == "strings":
        env = LLMEnv.from_dataloader(text_loader(512, prompts), from_text=True, **options)
    else:
        env = LLMEnv.from_dataloader(
            ragged_loader(512), from_text=False, stack_method=kind, has_attention=False, **options
        )
    return resets(env, nothing, nothing)


def _strings(td: Any) -> list[str]:
    return list(td["text"])


def _given(way: str, td: TensorDict) -> Callable[[], Any]:
    return nothing if way == "primer" else td.copy


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    set_list_to_stack(True).set()
    names = ("torchrl", "tensordict", "torch", "transformers")
    serve(
        {"tokens": tokens, "text": text, "rollout": rollout, "hashing": hashing, "loader": loader, "chat": chat},
        {name: version(name) for name in names},
    )
