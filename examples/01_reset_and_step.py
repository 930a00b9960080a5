"""Reset and step an environment by hand: rows of tokens in, rows of tokens out.

Run it: `python examples/01_reset_and_step.py`. Expected output::

    reset: [5, 6, 7] and [8]
    step 1: [5, 6, 7, 10] and [8, 10, 11], terminated [False, False]
    step 2: [5, 6, 7, 10, 2] and [8, 10, 11], terminated [True, False]
    the column that the environment does not own is still there: [40, 41]
"""

from __future__ import annotations

import torch
from tensordict import TensorDict

import ramet
from ramet import LLMEnv
from ramet.ragged import Ragged

EOS = 2


def jagged(*rows: list[int]) -> torch.Tensor:
    """Put rows of different lengths into one tensor."""
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows]).jagged()


def main() -> None:
    """Step two prompts twice; the second time the first row says eos and the other one nothing."""
    env = LLMEnv(from_text=False, eos_token_id=EOS)
    prompts = TensorDict({"tokens": jagged([5, 6, 7], [8]), "answer": torch.tensor([40, 41])}, batch_size=[2])

    td = env.reset(prompts)
    first, second = (row.tolist() for row in ramet.rows(td, "tokens"))
    print(f"reset: {first} and {second}")

    for step, response in enumerate([jagged([10], [10, 11]), jagged([EOS], [])], start=1):
        td["tokens_response"] = response  # what a policy does
        td = env.step_mdp(env.step(td))  # the state after the step, with the columns of the one before
        first, second = (row.tolist() for row in ramet.rows(td, "tokens"))
        print(f"step {step}: {first} and {second}, terminated {td['terminated'].flatten().tolist()}")

    print(f"the column that the environment does not own is still there: {td['answer'].tolist()}")


if __name__ == "__main__":
    main()
