"""Rollouts with a reward of your own, from a scripted policy: what comes back, and what a forest makes of it.

Run it: `python examples/02_rollouts_with_a_reward.py`. Expected output::

    2+3= | 5 | scored 1.0
    2+3= | 6 | scored 0.0
    2+3= |   | abstained None: the answer is empty
    9+9= | 18 | scored 1.0
    9+9= | 18 | scored 1.0
    9+9= | 19 | scored 0.0
    44 tokens in 6 rows, 19 of them distinct
"""

from __future__ import annotations

from ramet import Judge, LLMEnv, Outcome, Prompts, Sample, Sampling, ScriptedPolicy, collect
from ramet.models.tiny import tiny_tokenizer
from ramet.rollouts import judge_rollouts, samples_of
from ramet.types import Request

ROWS = [{"prompt": "2+3=", "answer": "5"}, {"prompt": "9+9=", "answer": "18"}]
ANSWERS = {0: ["5", "6", ""], 1: ["18", "18", "19"]}


def reward(sample: Sample) -> float | Outcome:
    """Compare with the data row, whose columns travel along; a reward may also say that it can not tell."""
    if not sample.completion:
        return Outcome.abstained("the answer is empty")
    return float(sample.completion == sample.row["answer"])


def main() -> None:
    """Play three members of each of two groups, and print what they earned."""
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id

    def script(request: Request) -> list[int]:
        answer = ANSWERS[request.draw.prompt][request.draw.member]
        return [*tokenizer(answer, add_special_tokens=False)["input_ids"], eos]

    prompts = Prompts(ROWS, tokenizer)
    env = LLMEnv(from_text=False, eos_token_id=eos)
    policy = ScriptedPolicy(script, eos_token_id=eos)
    forest = collect(env, policy, prompts.first(2, group_size=3), sampling=Sampling(max_new_tokens=4), seed=0)

    rollouts = range(len(forest.rollouts))
    samples = samples_of(forest, rollouts, prompts, tokenizer)
    judge_rollouts(forest, samples, rollouts, Judge(reward))
    for sample, rollout in zip(samples, forest.rollouts, strict=True):
        outcome = rollout.outcome
        assert outcome is not None
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"{sample.prompt} | {sample.completion:1} | {outcome.kind.value} {outcome.score}{reason}")
    total = sum(len(forest.path(number)) for number in rollouts)
    print(f"{total} tokens in {len(rollouts)} rows, {len(forest.tokens)} of them distinct")


if __name__ == "__main__":
    main()
