"""A warm start imitates reference answers, stops where it is told to, and touches no held-out row."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaForCausalLM

from ramet.assembly import playing_of
from ramet.config import TrainConfig, parse
from ramet.errors import ConfigError, ModelError
from ramet.events import Event, WarmStarted, WarmStartStep
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.transformers import TransformersPolicy
from ramet.prompts import Prompts
from ramet.tasks import Judge, Task
from ramet.tasks.problems import exact_match, reference_answer
from ramet.types import Sample, Sampling
from ramet.warm_start import split_rows, warm_start

TOKENIZER = tiny_tokenizer()
ROWS = [{"prompt": f"{number}>", "answer": str(number)} for number in range(8)]
HELD_OUT = [{"prompt": "9>", "answer": "9"}]


def config(*overrides: str) -> TrainConfig:
    text = """
    steps = 0
    rollout = { max_new_tokens = 3 }
    optimizer = { learning_rate = 1.0, betas = [0.9, 0.95] }
    warm_start = { batch_rows = 6, learning_rate = 0.01, max_steps = 4, check_every = 2, check_problems = 2 }
    """
    return parse(text, overrides)


def task(reward: Any = exact_match) -> Task:
    return Task("copy", ROWS, HELD_OUT, reward, answer=reference_answer)


def model() -> LlamaForCausalLM:
    return tiny_llama(TOKENIZER, hidden_size=32, layers=1, heads=2, intermediate_size=32, context=16)


def start(
    net: LlamaForCausalLM, settings: TrainConfig, given: Task | None = None
) -> tuple[WarmStarted, list[WarmStartStep]]:
    given, events = given or task(), list[Event]()
    done = warm_start(
        net, TOKENIZER, given, given.train, settings,
        prompts_of=lambda rows: Prompts(rows, TOKENIZER, seed=settings.seed),
        play=playing_of(given, TransformersPolicy(net), net, TOKENIZER, Judge(given.score), settings),
        sampling=Sampling(3), watcher=events.append,
    )  # fmt: skip
    return done, [event for event in events if isinstance(event, WarmStartStep)]


def cross_entropy(net: LlamaForCausalLM, rows: list[dict[str, str]]) -> torch.Tensor:
    """The mean over the answers' tokens, eos included, each row alone."""
    losses = []
    for row in rows:
        prompt = TOKENIZER(row["prompt"])["input_ids"]
        answer = [*TOKENIZER(row["answer"], add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
        logits = net(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses.append(F.cross_entropy(logits, torch.tensor(answer), reduction="none"))
    return torch.cat(losses).mean()


def test_a_step_is_a_step_of_adamw_on_the_cross_entropy_of_the_answers() -> None:
    """Six rows are left to imitate, and a batch holds all six: the order does not matter.

    float32: the loss within 1e-5, the weights within 2e-4, a fiftieth of the rate that they move by.
    """
    net, other = model(), model()
    _, events = start(net, config("warm_start.max_steps=1"))
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    loss = cross_entropy(other, ROWS[2:])
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    optimizer.step()
    assert events[0].loss == pytest.approx(loss.item(), abs=1e-5)
    for name, value in net.state_dict().items():
        # AdamW's first step is lr * g / (|g| + eps): where g is nearly 0, rounding decides.
        torch.testing.assert_close(value, other.state_dict()[name], atol=2e-4, rtol=0)


def test_the_micro_batch_does_not_change_what_is_learned() -> None:
    """The loss of both steps within 1e-4, relative and absolute, float32: the second is that of moved weights."""
    nets = [model(), model()]
    losses = []
    for net, tokens in zip(nets, (8192, 8), strict=True):
        _, events = start(net, config("warm_start.max_steps=2", f"optimizer.micro_batch_tokens={tokens}"))
        losses.append([event.loss for event in events])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_it_learns_what_every_answer_is_and_stops_when_the_validation_score_is_reached() -> None:
    rows = [{"prompt": row["prompt"], "answer": "7"} for row in ROWS]
    settings = config("warm_start.max_steps=200", "warm_start.until=0.5", "warm_start.check_every=5")
    done, events = start(model(), settings, Task("sevens", rows, [], exact_match, answer=reference_answer))
    assert done.steps < 200
    assert done.score is not None
    assert done.score >= 0.5
    assert done.steps % 5 == 0
    assert [event.step for event in events] == list(range(1, done.steps + 1))
    assert [event.step for event in events if event.score is not None] == list(range(5, done.steps + 1, 5))
    assert all(event.score < 0.5 for event in events[:-1] if event.score is not None)
    assert events[-1].loss < events[0].loss / 2


def test_without_a_target_all_steps_are_taken_and_the_last_is_scored() -> None:
    done, events = start(model(), config("warm_start.max_steps=3"))
    assert done.steps == 3
    assert [event.score is not None for event in events] == [False, True, True]
    assert done.score == events[-1].score


def test_no_steps_change_nothing() -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    done, events = start(net, config("warm_start.max_steps=0"))
    assert (done, events) == (WarmStarted(0, None), [])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_learning_rate_rises_over_the_warmup() -> None:
    """After one step of AdamW each weight has moved by at most the rate: 1/4 of it with 4 warm-up steps.

    Relative 1e-3: AdamW's eps, and float32.
    """
    moved = []
    for warmup in (0, 4):
        net = model()
        start(net, config("warm_start.max_steps=1", f"warm_start.warmup_steps={warmup}"))
        pairs = zip(net.state_dict().values(), model().state_dict().values(), strict=True)
        moved.append(max((new - old).abs().max().item() for new, old in pairs))
    assert moved[0] == pytest.approx(0.01, rel=1e-3)
    assert moved[1] == pytest.approx(0.0025, rel=1e-3)


def test_validation_rows_are_not_imitated_and_held_out_rows_are_not_touched() -> None:
    answered: list[str] = []
    judged: list[str] = []

    def answer(row: Mapping[str, Any]) -> str:
        answered.append(row["prompt"])
        return str(row["answer"])

    def reward(sample: Sample) -> float:
        judged.append(sample.row["prompt"])
        return 0.0

    start(model(), config(), Task("copy", ROWS, HELD_OUT, reward, answer=answer))
    assert set(answered) == {row["prompt"] for row in ROWS[2:]}
    assert set(judged) == {row["prompt"] for row in ROWS[:2]}


def test_a_validation_without_any_score_counts_as_none_reached() -> None:
    done, _ = start(model(), config("warm_start.until=0.5", "warm_start.max_steps=2"), task(lambda sample: None))
    assert done == WarmStarted(2, 0.0)


def test_async_answers_are_awaited() -> None:
    """One step from the same weights: the loss is that of the sync answers, to the bit."""

    async def answer(row: Mapping[str, Any]) -> str:
        await asyncio.sleep(0)
        return reference_answer(row)

    given: Any = answer
    settings = config("warm_start.max_steps=1")
    _, events = start(model(), settings, Task("copy", ROWS, HELD_OUT, exact_match, answer=given))
    assert [event.loss for event in events] == [event.loss for event in start(model(), settings)[1]]


@pytest.mark.parametrize(
    ("answer", "why"),
    [(lambda row: 7, "TypeError: expected text: found int"), (lambda row: row["gone"], "KeyError: 'gone'")],
)
def test_an_answer_that_fails_or_is_no_text_names_its_row(answer: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"of the task copy, and that of the training row 0 failed: {why}"):
        start(model(), config(), Task("copy", ROWS, HELD_OUT, exact_match, answer=answer))


def test_a_task_without_reference_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match="task none has no reference answers"):
        split_rows(Task("none", ROWS, [], exact_match), ROWS, config().warm_start)  # type: ignore[arg-type]


@pytest.mark.parametrize(("problems", "enough"), [(7, True), (8, False), (64, False)])
def test_a_row_must_be_left_to_imitate(problems: int, enough: bool) -> None:
    settings = config(f"warm_start.check_problems={problems}").warm_start
    assert settings is not None
    if enough:
        assert split_rows(task(), ROWS, settings) == (ROWS[:7], ROWS[7:])
    else:
        with pytest.raises(ConfigError, match=f"check_problems = {problems} leaves none of 8 training rows"):
            split_rows(task(), ROWS, settings)


def test_a_gradient_that_is_not_finite_ends_it_with_the_weights_untouched() -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.lm_head.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(ModelError, match=r"gradient is (nan|inf).*was not taken"):
        start(net, config())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
