"""Feed an environment from a loader, keep what was played in a forest, and look at what it shares.

Run it: `python examples/05_prompts_from_a_loader.py`. Expected output::

    reset: ['2+2=', '2+2=', '3+5=', '3+5='] of groups [0, 0, 1, 1]
    played: ['2+2=4', '2+2=5', '3+5=8', '3+5=8'], ended [True, True, True, True]
    the forest holds 14 tokens for 4 rollouts of 24
    next prompts: ['7-6=', '7-6=', '2+2=', '2+2=']
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

import ramet
from ramet import Forest, LLMEnv
from ramet.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ANSWERS = iter("4588")


def policy(td: TensorDictBase) -> TensorDictBase:
    """Answer each row with a digit and the end of text; a model would look at td["tokens"]."""
    rows = [TOKENIZER(next(ANSWERS), add_special_tokens=False)["input_ids"] for _ in range(len(td))]
    td["tokens_response"] = torch.tensor([[*row, TOKENIZER.eos_token_id] for row in rows])
    return td


def main() -> None:
    """Play two groups of two, put them into a forest, and ask for the next prompts."""
    env = LLMEnv.from_dataloader(
        ["2+2=", "3+5=", "7-6="],
        tokenizer=TOKENIZER,
        batch_size=2,
        repeats=2,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    td = env.reset()
    print(f"reset: {ramet.rows(td, 'text')} of groups {td['group_id'].tolist()}")

    rollout = env.rollout(1, policy, auto_reset=False, tensordict=td)
    last = rollout["next"][:, -1]
    print(f"played: {ramet.rows(last, 'text')}, ended {last['done'].flatten().tolist()}")

    forest = Forest()
    numbers = forest.extend(rollout)
    length = sum(len(forest.path(number)) for number in numbers)
    print(f"the forest holds {len(forest.tokens)} tokens for {len(numbers)} rollouts of {length}")

    print(f"next prompts: {ramet.rows(env.reset(), 'text')}")


if __name__ == "__main__":
    main()
