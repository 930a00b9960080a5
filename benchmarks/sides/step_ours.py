"""Our side of `benchmarks/training_step.py`: the parts that `Trainer` is made of, in its order."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from step_work import SEED, Ask, Clock, Step, Work, answer, held, memory, read_ask, repeat, resting, reward, texts
from step_work import tree_tokens as rows_of
from tensordict import TensorDict

from ramet.assembly import reference_of
from ramet.config import TrainConfig
from ramet.config.sections import AdvantageConfig, KLConfig, LossConfig, OptimizerConfig, RolloutConfig
from ramet.envs.llm import LLMEnv
from ramet.forest import Forest
from ramet.learner import prepare, update
from ramet.models import load_model
from ramet.policies.transformers import TransformersPolicy
from ramet.prompts import Prompts
from ramet.rollouts import collect, judge_rollouts, samples_of
from ramet.scoring import score
from ramet.tasks.judge import Judge
from ramet.types import Key, Kind, Sample, Sampling


def config_of(work: Work, *, steps: int, saving: bool) -> TrainConfig:
    """Return the settings that say the same as those of the peer; all others are the defaults."""
    # One tree at a time, or what is as large: more at once would be no faster and would hold more.
    tree = work.prompt + work.rows // work.prompts * work.segment
    given: dict[str, Any] = {
        "learning_rate": 1e-6,
        "gradient_checkpointing": saving,
        "micro_batch_tokens": max(512, tree),
    }
    return TrainConfig(
        seed=SEED,
        steps=steps,
        rollout=RolloutConfig(
            prompts_per_step=work.prompts, group_size=work.rows // work.prompts, max_new_tokens=work.segment
        ),
        advantage=AdvantageConfig(kind="group_mean_std"),
        loss=LossConfig(kind="clipped", reduction="grpo"),
        kl=KLConfig(coefficient=0.04, estimator="k3", place="loss"),
        optimizer=OptimizerConfig(**given),
    )


def train(ask: Ask) -> tuple[list[Step], dict[str, Any]]:
    """Take steps as the trainer does, each with prompts of its own."""
    work, clock = ask.work, Clock()
    model, tokenizer = load_model(ask.folder, dtype=ask.dtype)
    config = config_of(work, steps=ask.steps + 1, saving=ask.saving)
    model.save_pretrained("reference")  # as the trainer does; the working folder is gone when the process ends
    reference = reference_of(model, Path("reference"))
    judge, env = Judge(_reward), LLMEnv(from_text=False, eos_token_id=-1)
    policy = TransformersPolicy(model, eos_ids=[], rows_per_batch=work.rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.learning_rate, weight_decay=0.0, fused=True)
    clock.hook(optimizer)
    sampling = Sampling(max_new_tokens=work.segment)
    steps: list[Step] = []
    facts: list[dict[str, float]] = []

    def ready(number: int) -> tuple[int, Prompts, TensorDict]:
        rows = [{"prompt": text} for text in texts(tokenizer, work.prompts, work.length_at(number), seed=SEED + number)]
        prompts = Prompts(rows, tokenizer, seed=SEED)
        td = prompts.first(work.prompts, group_size=work.rows // work.prompts)
        if work.together:
            td[Key.GROUP], td[Key.MEMBER] = torch.zeros_like(td[Key.GROUP]), torch.arange(work.rows)
        return number, prompts, td

    def run(given: tuple[int, Prompts, TensorDict]) -> None:
        number, prompts, td = given
        with clock.part("generation"):
            forest = collect(env, policy, td, sampling=sampling, seed=SEED + number)
        with clock.part("judging"):
            numbers = range(len(forest.rollouts))
            judge_rollouts(forest, samples_of(forest, numbers, prompts, tokenizer), numbers, judge)
        with clock.part("reference"):  # a batch that gets one update is scored by the reference alone
            batch = prepare(model, reference, forest, config, step=number + 1)
        with clock.part("update"):
            logged = update(model, optimizer, forest, batch, config)
            optimizer.zero_grad(set_to_none=True)
        policy.version += 1
        facts.append({**logged, "tokens": float(len(batch.sampled.index)), "mean_log_prob": float(batch.start.mean())})

    steps, _ = repeat(ask.steps, ready, run, clock)
    for step, fact in zip(steps, facts, strict=True):
        step.parts["forward and backward"] = step.parts["update"] - step.parts["optimiser"]
        step.facts = fact
    optimizer.zero_grad(set_to_none=True)  # on both sides gradients are no part of what rests
    about: dict[str, Any] = {"resting": resting(), "largest": memory("VmHWM")}
    return steps, about | held(model, getattr(reference, "model", reference), optimizer) | {
        "prefill": _prefill(work, policy, env, ready)
    }


def _reward(sample: Sample) -> float:
    return reward(list(sample.completion_tokens))


def _prefill(work: Work, policy: TransformersPolicy, env: LLMEnv, ready: Any) -> float:
    """Return the seconds of one token each: the prefill and one draw."""
    steps, _ = repeat(
        2,
        lambda number: ready(100 + number)[2],
        lambda td: collect(env, policy, td, sampling=Sampling(max_new_tokens=1), seed=0),
    )
    seconds: list[float] = [step.seconds for step in steps[1:]]
    return min(seconds)


def tree(ask: Ask) -> tuple[list[Step], dict[str, Any]]:
    """Score a tree and go backward; the loss is minus the mean log-prob of the sampled tokens of all rows."""
    work, clock = ask.work, Clock()
    model, _ = load_model(ask.folder, dtype=ask.dtype)
    if ask.saving:
        raise SystemExit("trees are measured without recomputation")
    forest = Forest()
    rows = [torch.tensor(row) for row in rows_of(work, model.config.vocab_size)]
    numbers = forest.plant([r[: work.prompt] for r in rows], groups=[0] * len(rows), members=list(range(len(rows))))
    for at in range(work.prompt, len(rows[0]), work.segment):
        parts = [row[at : at + work.segment] for row in rows]
        nothing = [torch.zeros(len(part)) for part in parts]
        forest.grow(numbers, parts, Kind.SAMPLED, log_probs=nothing, versions=[0] * len(rows))
    index = forest.sampled(numbers).index

    def run(_: object) -> dict[str, float]:
        model.zero_grad(set_to_none=True)
        with clock.part("forward"):
            loss = -score(model, forest).log_probs[index].mean()
        with clock.part("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return {"loss": float(loss)}

    steps, facts = repeat(ask.steps, lambda number: None, run, clock)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    steps[-1].facts = {**facts, "grad_norm": float(norm), "tokens": float(len(forest.tokens))}
    model.zero_grad(set_to_none=True)
    return steps, {"resting": resting(), "largest": memory("VmHWM")}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asked = read_ask()
    answer(*(tree if asked.work.scored_only else train)(asked), packages=("torch", "transformers"))
