"""The stock side of a tree in `benchmarks/training_step.py`: its rows padded, through the model, as one batch.

The head runs behind the prompt alone (`logits_to_keep`), and the log-probs are gathered from a log-softmax: what one
writes with transformers and no more.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from step_work import Ask, Clock, Step, answer, memory, read_ask, repeat, resting, tree_tokens
from transformers import AutoModelForCausalLM


def tree(ask: Ask) -> tuple[list[Step], dict[str, Any]]:
    """Score the rows and go backward; the loss is minus the mean log-prob of the sampled tokens of all rows."""
    work, clock = ask.work, Clock()
    model: Any = AutoModelForCausalLM.from_pretrained(ask.folder, dtype=getattr(torch, ask.dtype)).eval()  # type: ignore[no-untyped-call]
    ids = torch.tensor(tree_tokens(work, model.config.vocab_size))
    mask, new = torch.ones_like(ids), ids[:, work.prompt :]

    def run(_: object) -> dict[str, float]:
        model.zero_grad(set_to_none=True)
        with clock.part("forward"):
            output = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=new.shape[1] + 1)
            log_probs = output.logits[:, :-1].log_softmax(-1).gather(-1, new[..., None]).squeeze(-1)
            loss = -log_probs.mean()
        with clock.part("backward"):
            loss.backward()
        return {"loss": float(loss)}

    steps, facts = repeat(ask.steps, lambda number: None, run, clock)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    steps[-1].facts = {**facts, "grad_norm": float(norm), "tokens": float(ids.numel())}
    model.zero_grad(set_to_none=True)
    return steps, {"resting": resting(), "largest": memory("VmHWM")}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    answer(*tree(read_ask()), packages=("torch", "transformers"))
