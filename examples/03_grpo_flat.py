"""GRPO in one flat file: everything that `Trainer` does, without it.

A transformer with random weights learns to answer in even digits. Run it: `python examples/03_grpo_flat.py`.

Expected output (the numbers in between depend on the machine's arithmetic)::

    step  1: reward 0.0
    ...
    step 30: reward 1.0
    before: '0=' -> 'oTKr'
    after:  '0=' -> '0000'
"""

from __future__ import annotations

import torch

from ramet import Forest, LLMEnv, Prompts, Sample, Sampling, TransformersPolicy, collect, score
from ramet.advantages import group_mean
from ramet.kl import kl
from ramet.losses import clipped, token_mean
from ramet.models import load_model
from ramet.rollouts import samples_of

STEPS, PROMPTS_PER_STEP, GROUP_SIZE = 30, 8, 16
SAMPLING = Sampling(max_new_tokens=4, temperature=1.0)
KL_COEFFICIENT = 0.001


def reward(sample: Sample) -> float:
    """Return the share of the completion's tokens that are even digits."""
    even = sum(character in "02468" for character in sample.completion)
    return even / max(1, len(sample.completion_tokens))


def main() -> None:
    """Train, and print the mean reward of each step."""
    # The parts: a model, prompts in a seeded order, an environment, a policy that samples from the model.
    model, tokenizer = load_model("tiny-llama", options={"hidden_size": 64, "layers": 2}, seed=0)
    reference, _ = load_model("tiny-llama", options={"hidden_size": 64, "layers": 2}, seed=0)
    prompts = Prompts([f"{number}=" for number in range(10)], tokenizer, seed=0)
    eos = tokenizer.eos_token_id
    env = LLMEnv(from_text=False, eos_token_id=eos)
    policy = TransformersPolicy(model, eos_ids=[eos])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def answer(step: int) -> tuple[Forest, list[Sample]]:
        # prompts -> env.reset -> policy -> env.step -> forest: every distinct prefix is stored once.
        td = prompts.batch(step * PROMPTS_PER_STEP, PROMPTS_PER_STEP, group_size=GROUP_SIZE)
        forest = collect(env, policy, td, sampling=SAMPLING, seed=0)
        return forest, samples_of(forest, range(len(forest.rollouts)), prompts, tokenizer)

    for step in range(STEPS):
        forest, samples = answer(step)
        if step == 0:
            before = samples[0]

        # Judge: one score a rollout, and how much better it is than the mean of its group (same prompt).
        scores = torch.tensor([reward(sample) for sample in samples])
        groups = torch.tensor([sample.group for sample in samples])
        advantages = group_mean(scores, groups, scale_by_std=True)

        # Score: log-probs of every sampled token, with gradient; those of the reference come without.
        scored = score(model, forest, temperature=SAMPLING.temperature, reference=reference)
        sampled = forest.sampled(range(len(forest.rollouts)))
        assert scored.reference_log_probs is not None
        current = scored.log_probs[sampled.index]
        anchor = scored.reference_log_probs[sampled.index]

        # Loss: here is where a reward enters. One update a batch, so the log-probs of its start are the current ones.
        per_token = clipped(current, current.detach(), advantages[sampled.row])
        per_token = per_token + KL_COEFFICIENT * kl(current, anchor, "k3")
        loss = token_mean(per_token, tokens=len(current))

        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        policy.version += 1  # from here on, sampled tokens come from other weights
        print(f"step {step + 1:2}: reward {scores.mean():.1f}")

    _, samples = answer(0)
    print(f"before: {before.prompt!r} -> {before.completion!r}")
    print(f"after:  {samples[0].prompt!r} -> {samples[0].completion!r}")


if __name__ == "__main__":
    main()
