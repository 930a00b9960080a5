"""An environment of prompts from a loader: what `LLMEnv.from_dataloader` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ramet.envs.env import TransformedEnv
from ramet.specs import KeyPath
from ramet.transforms.entries import mask_of
from ramet.transforms.loading import DataLoadingPrimer
from ramet.transforms.tokenizer import Tokenizer
from ramet.types import Key

if TYPE_CHECKING:
    from ramet.envs.llm import LLMEnv


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of the environment, None where they are its defaults."""

    tokens: KeyPath | None
    text: KeyPath | None
    attention: KeyPath | None
    action: KeyPath | None
    reward: KeyPath

    def check(self) -> None:
        """Raise a ValueError for a mask that is not where a `Tokenizer` writes it."""
        tokens: KeyPath = Key.TOKENS if self.tokens is None else self.tokens
        beside = mask_of(tokens)
        if self.attention not in (None, beside):
            raise ValueError(
                f"a tokenizer writes the mask of token_key={tokens!r} beside it, under {beside!r}: "
                f"found attention_key={self.attention!r}; leave it out, or choose the token_key of its nest"
            )


def load(
    kind: type[LLMEnv],
    primer: DataLoadingPrimer,
    keys: Keys,
    *,
    tokenizer: Any,
    from_text: bool,
    device: torch.device | str | None,
    vocab_size: int | None,
    has_attention: bool,
    assign_reward: bool,
    assign_done: bool,
    eos_token_id: int | None,
) -> TransformedEnv:
    """Make an environment of the class `kind`, with a tokenizer if there is one, around it `primer`."""
    made = kind(
        token_key=keys.tokens,
        str_key=keys.text,
        attention_key=keys.attention,
        action_key=keys.action,
        reward_key=keys.reward,
        from_text=from_text,
        device=device,
        vocab_size=vocab_size,
        assign_reward=assign_reward,
        assign_done=assign_done,
        batch_size=primer.batch_size,
        has_attention=has_attention,
        eos_token_id=eos_token_id,
    )
    if tokenizer is None:
        return made.append_transform(primer)
    transform = Tokenizer(
        [made.str_key],
        [made.token_key],
        [made.action_key] if from_text else None,
        [Key.RESPONSE] if from_text else None,
        tokenizer=tokenizer,
        padding=has_attention and primer.stack_method != "as_nested_tensor",
        return_attention_mask=has_attention,
        call_before_reset=not from_text,
    )
    if vocab_size is not None:
        transform.vocab_size = vocab_size
    return made.append_transform(transform).append_transform(primer)
