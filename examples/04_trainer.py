"""The same with `Trainer`: prompts, a reward and a model in, a better model and its run folder out.

Run it: `python examples/04_trainer.py`. Expected output (the machine's arithmetic may
change the numbers a little)::

    reward: 0.0 in the first step, 1.0 in the last
    held out, greedy: 0.0 -> 1.0
    the model is in runs/even-digits/checkpoints/step-000030
"""

from __future__ import annotations

import sys

from ramet import ModelConfig, OptimizerConfig, RolloutConfig, Sample, TrainConfig, Trainer
from ramet.events import StepDone


def reward(sample: Sample) -> float:
    """Return the share of the completion's tokens that are even digits."""
    even = sum(character in "02468" for character in sample.completion)
    return even / max(1, len(sample.completion_tokens))


def main(runs: str = "runs") -> None:
    """Train, and print how far it got."""
    config = TrainConfig(
        name="even-digits",
        runs=runs,
        steps=30,
        model=ModelConfig(name="tiny-llama", options={"hidden_size": 64, "layers": 2}),
        rollout=RolloutConfig(prompts_per_step=8, group_size=16, max_new_tokens=4),
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )
    prompts = [f"{number}=" for number in range(10)]
    held_out = [f"{number}=" for number in range(10, 20)]
    rewards: list[float] = []

    def watch(event: object) -> None:
        if isinstance(event, StepDone):
            rewards.append(event.metrics["reward"])

    result = Trainer("tiny-llama", prompts, reward, held_out=held_out, config=config, watcher=watch).train()
    scores = result.summary["held_out"]
    print(f"reward: {rewards[0]:.1f} in the first step, {rewards[-1]:.1f} in the last")
    print(f"held out, greedy: {scores['before']['greedy']['score']:.1f} -> {scores['after']['greedy']['score']:.1f}")
    print(f"the model is in {result.checkpoint}")


if __name__ == "__main__":
    main(*sys.argv[1:])
