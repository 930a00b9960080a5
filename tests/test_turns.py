"""A run over a task of several turns: a tool, what the environment says, a warm start on whole episodes, a resume."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_trainer import assert_same, what_a_run_left
from torch.nn import functional
from transformers import LlamaForCausalLM

from ramet.assembly import playing_of, template_of
from ramet.checkpoint import newest_checkpoint
from ramet.config import RolloutConfig, TrainConfig, parse
from ramet.errors import ConfigError
from ramet.events import Event, WarmStartStep
from ramet.metrics import read
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.transformers import TransformersPolicy
from ramet.prompts import Prompts
from ramet.tasks import Judge, Task
from ramet.tasks.problems import exact_match
from ramet.trainer import Trainer
from ramet.types import Episode, Kind, Message, Sampling
from ramet.warm_start import warm_start

TOKENIZER = tiny_tokenizer()
# Each role has a mark of its own, and a turn ends with the token that the model ends it with.
TOKENIZER.chat_template = (
    "{% for m in messages %}{% if m.role == 'assistant' %}>{{ m.content }}<eos>{% else %}"
    "{{ '?' if m.role == 'user' else ':' }}{{ m.content }};{% endif %}{% endfor %}>"
)
EOS = TOKENIZER.eos_token_id


def double(number: str) -> str:
    """Double a digit."""
    return str(2 * int(number))


def rows(numbers: Sequence[int]) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": str(n)}], "number": str(n), "answer": str(2 * n)} for n in numbers]


def reference(episode: Episode) -> str:
    if not episode.turns:
        return f'[double(number="{episode.row["number"]}")]'
    return str(episode.messages[-1]["content"])


def task(**parts: Any) -> Task:
    defaults: dict[str, Any] = {"tools": [double], "max_turns": 3, "player": reference}
    return Task("double", rows(range(7)), rows([7, 8]), exact_match, **{**defaults, **parts})


def config(runs: Path, *overrides: str) -> TrainConfig:
    text = """
    steps = 3
    threads = 1
    rollout = { max_new_tokens = 24, prompts_per_step = 2, group_size = 3 }
    optimizer = { learning_rate = 0.01 }
    """
    return parse(text, [f"runs='{runs}'", *overrides])


def net() -> LlamaForCausalLM:
    return tiny_llama(TOKENIZER, hidden_size=32, layers=1, heads=2, intermediate_size=32, context=128)


def trainer(given: TrainConfig, **options: Any) -> Trainer:
    return Trainer.from_task(net(), options.pop("task", task()), tokenizer=TOKENIZER, config=given, **options)


def path_of(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The reference's whole episode as the template writes it, and the places of what the model writes in it."""
    call, answer = f'[double(number="{row["number"]}")]', row["answer"]
    tokens: list[int] = []
    sampled: list[int] = []
    for text, own in [(f"?{row['number']};>", False), (call, True), (f":{answer};>", False), (answer, True)]:
        ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], *([EOS] if own else [])]
        sampled += range(len(tokens), len(tokens) + len(ids)) if own else []
        tokens += ids
    return tokens, sampled


def test_a_warm_start_imitates_whole_episodes() -> None:
    """A step's loss is the mean cross-entropy of what the reference writes, in all its turns: within 1e-6."""
    given = parse(
        "steps = 0\nrollout = { max_new_tokens = 24 }\noptimizer = { learning_rate = 1.0 }\n"
        "warm_start = { batch_rows = 5, max_steps = 1, check_every = 1, check_problems = 2 }"
    )
    model, events = net(), list[Event]()
    play = playing_of(task(), TransformersPolicy(model, eos_ids=[EOS]), model, TOKENIZER, Judge(exact_match), given)
    losses = []
    for row in rows(range(2, 7)):
        tokens, sampled = path_of(row)
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
        places = torch.tensor(sampled)
        losses.append(functional.cross_entropy(logits[places - 1], torch.tensor(tokens)[places], reduction="none"))
    expected = float(torch.cat(losses).mean().detach())
    warm_start(
        model, TOKENIZER, task(), rows(range(7)), given, prompts_of=lambda kept: Prompts(kept, TOKENIZER),
        play=play, sampling=Sampling(24), watcher=events.append,
    )  # fmt: skip
    play.close()
    [step] = [event for event in events if isinstance(event, WarmStartStep)]
    assert step.loss == pytest.approx(expected, rel=1e-6)


def test_a_warm_start_refuses_a_reference_that_does_not_come_to_its_end(tmp_path: Path) -> None:
    warm = "warm_start={batch_rows=2,max_steps=1,check_problems=2}"
    with pytest.raises(ConfigError, match="ended by new_token_limit"):
        trainer(config(tmp_path, warm, "rollout.max_new_tokens=5")).train()
    with pytest.raises(ConfigError, match="has no reference answers"):
        trainer(config(tmp_path, warm), task=task(player=None))


def test_a_run_plays_its_tools_and_keeps_what_was_said(tmp_path: Path) -> None:
    """After a warm start some episodes call the tool; their records hold the conversation, and only sampled tokens."""
    given = config(
        tmp_path,
        "warm_start={batch_rows=5,learning_rate=0.01,max_steps=150,check_every=10,until=0.5,check_problems=2}",
    )
    run = trainer(given)
    folder = run.train().folder
    records = read(folder / "rollouts.jsonl")
    called = [record for record in records if any(message["role"] == "tool" for message in record["messages"])]
    assert called
    for record in called:
        said = [message for message in record["messages"] if message["role"] == "assistant"]
        told = [message["content"] for message in record["messages"] if message["role"] == "tool"]
        calls = [call["function"] for message in said for call in message.get("tool_calls", [])]
        assert len(told) == len(calls)
        for call, answer in zip(calls, told, strict=True):
            if call["name"] == "double" and str(call["arguments"].get("number", "")).isdigit():
                assert answer == str(2 * int(call["arguments"]["number"]))
    assert all(line["failed"] == 0 for line in read(folder / "metrics.jsonl") if "failed" in line)


def test_only_what_was_sampled_is_trained_on(tmp_path: Path) -> None:
    """In the forest of a step, what the tool answers and the template's marks are the environment's."""
    run = trainer(config(tmp_path))
    forest, samples = run.play(run.prompts.first(3, group_size=2), run.prompts, sampling=Sampling(24, 1.0), seed=5)
    run.play.close()
    for rollout, sample in zip(forest.rollouts, samples, strict=True):
        kinds, tokens = rollout.kinds, forest.path(forest.rollouts.index(rollout)).tolist()
        sampled = [token for token, kind in zip(tokens, kinds.tolist(), strict=True) if kind == Kind.SAMPLED]
        assert tuple(sampled) == sample.completion_tokens
        assert set(rollout.versions[kinds == Kind.SAMPLED].tolist()) <= {0}
        assert set(rollout.versions[kinds != Kind.SAMPLED].tolist()) <= {-1}


def talk(episode: Episode) -> Message | None:
    return None if episode.rng.random() < 0.3 else {"role": "user", "content": str(episode.rng.randrange(10))}


@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_run_that_goes_on_ends_as_one_that_was_never_stopped(stopped_after: int, tmp_path: Path) -> None:
    """Weights to the bit, and every record; the environment's random numbers are the episode's own."""
    lockstep = "rollout.lockstep=true"
    wordy = "rollout.stop=['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', '1', '2', '3', '4', '5', '6', '7']"
    given = [
        config(tmp_path / name, wordy, lockstep, "checkpoint.every=1", "rollout.max_turns=4")
        for name in ("whole", "cut")
    ]
    spoken = task(reply=talk, tools=[], player=None)
    whole = trainer(given[0], task=spoken).train()

    class Enough(Exception):
        pass

    def stop(event: Event) -> None:
        if getattr(event, "step", 0) == stopped_after and type(event).__name__ == "CheckpointWritten":
            raise Enough

    with pytest.raises(Enough):
        trainer(given[1], task=spoken, watcher=stop).train()
    cut = trainer(given[1], task=spoken, resume=True).train()
    assert read(cut.folder / "rollouts.jsonl") == read(whole.folder / "rollouts.jsonl")
    files = [
        (newest_checkpoint(result.folder / "checkpoints") / "model.safetensors").read_bytes() for result in (whole, cut)
    ]
    assert files[0] == files[1]
    turns = [len(record["messages"]) for record in read(whole.folder / "rollouts.jsonl")]
    assert max(turns) > 3


def test_in_lockstep_the_same_seed_gives_the_same_bits_however_long_replies_take(tmp_path: Path) -> None:
    """Three runs, whose replies take no time, or 0 to 80 ms in another order each time."""
    left = []
    for name, step in (("at once", 0.0), ("now", 0.02), ("then", 0.04)):
        times = random.Random(name)

        async def reply(episode: Episode, step: float = step, times: random.Random = times) -> Message | None:
            await asyncio.sleep(step * times.randrange(3))
            return talk(episode)

        wordy = "rollout.stop=['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', '1', '2', '3', '4', '5', '6', '7']"
        given = config(tmp_path / name, wordy, "rollout.lockstep=true", "rollout.max_turns=4", "evaluation.every=2")
        trainer(given, task=task(reply=reply, tools=[], player=None)).train()
        left.append(what_a_run_left(given.folder))
    assert max(len(record["messages"]) for record in read(given.folder / "rollouts.jsonl")) > 3
    assert_same(left[1], left[0])
    assert_same(left[2], left[0])


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"reply": lambda episode: "?"}, "reply says"),
        ({"tools": [double]}, "tools answer"),
    ],
)
def test_a_run_warns_of_what_no_turn_is_left_to_read(
    parts: dict[str, Any], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = f"the task t has max_turns = 1: the model never reads what its {what}, for its only turn is over then"
    rows = [{"prompt": "2+2="}]
    settings = RolloutConfig(prompts_per_step=1, group_size=1, max_new_tokens=4)
    for turns, warned in ((1, True), (2, False)):
        caplog.clear()
        template_of(Task("t", rows, [], exact_match, max_turns=turns, **parts), TOKENIZER, settings)
        assert (said in [record.getMessage() for record in caplog.records]) is warned
