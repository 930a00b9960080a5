"""TRL's side of `benchmarks/training_step.py`: its GRPOTrainer, timed from outside.

One optimiser step for each batch, exact on-policy: then TRL scores with the reference and trains, and does no third
forward pass. Its settings are its own but for what the table names: precision, lengths, group, KL, AdamW, and
`loss_type="grpo"` with rewards scaled within the group.

TRL wants groups of at least 2. In a work of different prompts (`together`) the batch is one group for both sides: its
sampler is told to repeat nothing, so that `num_generations` rows of as many prompts come, and all that it computes
with them is what it is for a group.

End of text is ignored by giving it an id that no token has. TRL would else cut completions there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from step_work import SEED, Ask, Clock, Meter, Step, answer, held, memory, read_ask, resting, reward, texts
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler


class Timed(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose parts are timed."""

    together = False

    def prepared(self, clock: Clock) -> None:
        """Take the clock, and ignore the end of text."""
        self.clock = clock
        self.mean_log_probs: list[float] = []
        self.eos_token_ids = [self.model.config.vocab_size]
        self.generation_config.eos_token_id = self.eos_token_ids
        self.generation_kwargs["eos_token_id"] = self.eos_token_ids

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if not self.together:
            return super()._get_train_sampler(dataset)
        return RepeatSampler(self.train_dataset, mini_repeat_count=1, batch_size=self.num_generations, shuffle=False)

    def _generate(self, *given: Any, **named: Any) -> Any:
        with self.clock.part("generation"):
            return super()._generate(*given, **named)

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        with self.clock.part("forward" if torch.is_grad_enabled() else "reference"):
            found = super()._get_per_token_logps_and_entropies(*given, **named)
        if torch.is_grad_enabled():
            self.mean_log_probs.append(float(found[0].detach().mean()))
        return found

    def _prepare_inputs(self, *given: Any, **named: Any) -> Any:
        with self.clock.part("making the batch"):
            return super()._prepare_inputs(*given, **named)

    def training_step(self, *given: Any, **named: Any) -> Any:
        """Time what is left of a step once the batch is made."""
        with self.clock.part("training step"):
            return super().training_step(*given, **named)


class Watch(TrainerCallback):
    """Measures each step from its begin to its end, when gradients are gone."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.meter, self.steps = clock, Meter(), list[Step]()

    def on_step_begin(self, *_: Any, **named: Any) -> None:
        """Start."""
        self.meter.start()

    def on_step_end(self, *_: Any, **named: Any) -> None:
        """Stop."""
        step = self.meter.stop(self.clock)
        parts = step.parts
        parts["forward and backward"] = parts.pop("training step") - parts["making the batch"]
        parts["judging"] = parts.pop("making the batch") - parts["generation"] - parts.get("reference", 0.0)
        self.steps.append(step)


def settings_of(ask: Ask, folder: str) -> GRPOConfig:
    """Return TRL's settings for a work."""
    work = ask.work
    return GRPOConfig(
        output_dir=folder,
        seed=SEED,
        max_steps=ask.steps + 1,
        per_device_train_batch_size=work.rows,
        gradient_accumulation_steps=1,
        num_generations=work.rows if work.together else work.rows // work.prompts,
        max_completion_length=work.segment,
        beta=0.04,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        gradient_checkpointing=ask.saving,
        bf16=False,
        use_cpu=True,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _judge(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward(tokens) for tokens in completion_ids]


@contextlib.contextmanager
def _trainer(ask: Ask, watch: Watch) -> Iterator[Timed]:
    tokenizer = AutoTokenizer.from_pretrained(ask.folder)
    model = AutoModelForCausalLM.from_pretrained(ask.folder, dtype=getattr(torch, ask.dtype))
    rows: list[str] = []
    for step in range(ask.steps + 1):
        rows += texts(tokenizer, ask.work.prompts, ask.work.length_at(step), seed=SEED + step)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            reward_funcs=_judge,
            args=settings_of(ask, folder),
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.together = ask.work.together
        trainer.prepared(watch.clock)
        yield trainer


def train(ask: Ask) -> tuple[list[Step], dict[str, Any]]:
    """Let TRL take its steps; return them with what it logs."""
    clock = Clock()
    watch = Watch(clock)
    with _trainer(ask, watch) as trainer:
        create = trainer.create_optimizer

        def created(*given: Any, **named: Any) -> Any:
            optimizer = create(*given, **named)
            clock.hook(optimizer)
            return optimizer

        trainer.create_optimizer = created
        trainer.train()
        logs = [line for line in trainer.state.log_history if "loss" in line]
        for step, line, mean in zip(watch.steps, logs, trainer.mean_log_probs, strict=True):
            kept = ("loss", "kl", "entropy", "grad_norm", "reward", "reward_std", "completions/min_length")
            step.facts = {name: float(line[name]) for name in kept} | {"mean_log_prob": mean}
            step.facts["tokens"] = line["completions/mean_length"] * ask.work.rows
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        trainer.model.zero_grad(set_to_none=True)  # on both sides gradients are no part of what rests
        about: dict[str, Any] = {"resting": resting(), "largest": memory("VmHWM")}
        return watch.steps, about | held(trainer.model, trainer.ref_model, optimizer)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    answer(*train(read_ask()), packages=("trl", "torch", "transformers"))
