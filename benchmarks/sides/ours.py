"""The side of this project, in the interpreter that runs the benchmark. Started by `benchmarks/environments.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from chat_ours import chat, chat_task
from tensordict import NonTensorStack, TensorDict, lazy_stack
from work import (
    VOCABULARY,
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
    token_rows,
    token_state,
    writer,
)

from ramet.envs.hashing import LLMHashingEnv
from ramet.envs.llm import LLMEnv
from ramet.forest import Forest
from ramet.forest.hashing import prefix_hashes
from ramet.ragged import Ragged, rows


def tokens(call: str, way: str, batch: int, layout: str = "padded") -> Loop:
    """Reset or step tokens. `way="primer"` is for padded tokens."""
    actions, given = Actions(batch), _given(way, _token_td(layout, batch))
    env: Any
    if way == "primer":
        env = LLMEnv.from_dataloader(
            padded_loader(batch), from_text=False, batch_size=(batch,), stack_method="as_padded_tensor"
        )
    else:
        env = LLMEnv(from_text=False, batch_size=batch, has_attention=layout == "padded")
    if call == "reset":
        return resets(env, given, nothing)
    return episode(env, lambda: env.reset(given()), writer("tokens_response", actions.tokens), nothing)


def text(call: str, way: str, batch: int, read: bool) -> Loop:
    """Reset or step strings."""
    actions, given, reading = Actions(batch), _given(way, text_state(batch)), _strings if read else nothing
    env: Any
    if way == "primer":
        env = LLMEnv.from_dataloader(text_loader(batch, batch), from_text=True, batch_size=(batch,))
    else:
        env = LLMEnv(from_text=True, batch_size=batch)
    if call == "reset":
        return resets(env, given, reading)
    act = writer("text_response", lambda: NonTensorStack(*actions.texts()))
    return episode(env, lambda: env.reset(given()), act, reading)


def rollout(layout: str, batch: int, steps: int) -> Loop:
    """Roll out; jagged rows grow by 0, 1 or 2 tokens, all others by one token or word."""
    actions = Actions(batch)
    if layout == "text":
        env, td = LLMEnv(from_text=True, batch_size=batch), text_state(batch)
        act = writer("text_response", lambda: NonTensorStack(*actions.texts()))
    else:
        env, td = LLMEnv(from_text=False, batch_size=batch, has_attention=layout == "padded"), _token_td(layout, batch)
        make = (lambda: _uneven(actions)) if layout == "jagged" else actions.tokens
        act = writer("tokens_response", make)
    return rollouts(env, lambda: env.reset(td.copy()), act, steps)


def hashing(batch: int, steps: int) -> Loop:
    """Play with text, put the rollout into a forest, read the last texts."""
    env, prompts, actions = LLMHashingEnv(tokenizer=byte_tokenizer()), byte_prompts(batch), byte_actions(batch, steps)

    def run(td: TensorDict) -> Any:
        coming, forest = iter(actions), Forest()
        state = env.reset(td)
        played = env.rollout(steps, lambda td: td.set("action", next(coming)), auto_reset=False, tensordict=state)
        forest.extend(played)
        return forest, _strings(played[:, -1].get("next"))

    return Loop(lambda: TensorDict({"observation": prompts.clone()}, [batch]), run)


def prefixes(count: int, length: int) -> Loop:
    """Hash every prefix of `count` rows of `length` tokens."""
    values = torch.randint(0, VOCABULARY, (count * length,), generator=torch.Generator().manual_seed(4))
    offsets = torch.arange(count + 1) * length
    return Loop(values.clone, lambda given: prefix_hashes(given, offsets))


def loader(kind: str, prompts: int, repeats: int) -> Loop:
    """Draw `prompts` prompts through the primer, each `repeats` times, as one group batch."""
    options: dict[str, Any] = {"repeats": repeats, "group_repeats": True, "batch_size": (prompts,)}
    env: Any
    if kind == "strings":
        env = LLMEnv.from_dataloader(text_loader(512, prompts), from_text=True, **options)
    else:
        env = LLMEnv.from_dataloader(
            ragged_loader(512), from_text=False, stack_method=kind, has_attention=False, **options
        )
    return resets(env, nothing, nothing)


def _token_td(layout: str, batch: int) -> Any:
    if layout == "padded":
        return padded_state(batch)
    if layout == "dense":
        return token_state(token_rows(batch, ragged=False))
    if layout == "jagged":
        return TensorDict({"tokens": Ragged.from_rows(token_rows(batch)).jagged()}, [batch])
    return lazy_stack([TensorDict({"tokens": row}, []) for row in token_rows(batch)], 0)


def _uneven(actions: Actions) -> torch.Tensor:
    lengths = actions.tokens()[:, 0] % 3
    lengths[0] = 1
    values = torch.randint(1, VOCABULARY, (int(lengths.sum()),), generator=actions.generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return Ragged(values, offsets).jagged()


def _strings(td: Any) -> list[str]:
    return rows(td, "text")


def _given(way: str, td: Any) -> Callable[[], Any]:
    given: Callable[[], Any] = td.copy
    return nothing if way == "primer" else given


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    names = ("tensordict", "torch", "transformers")
    serve(
        {
            "tokens": tokens,
            "text": text,
            "rollout": rollout,
            "hashing": hashing,
            "loader": loader,
            "prefixes": prefixes,
            "chat": chat,
            "chat_task": chat_task,
        },
        {name: version(name) for name in names},
    )
