"""The real vLLM on a CPU: its log-probs are the model's, before and after an update, and it may die in the middle."""

from __future__ import annotations

import asyncio
import copy
import math
from pathlib import Path

import pytest
import torch
from tests.servers.places import CONTEXT, Running, peaked, vllm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ramet.errors import ConfigError, ModelError, ServerError
from ramet.forest import Forest
from ramet.http import Retries
from ramet.models.tiny import tiny_tokenizer
from ramet.policies.policy import by_row
from ramet.policies.server import ServerPolicy
from ramet.policies.stops import StopWatch, decoder_of
from ramet.policies.transformers import TransformersPolicy
from ramet.scoring import score
from ramet.types import Completion, Draw, Kind, Request, Sampling, StopReason

pytestmark = [
    pytest.mark.servers,
    # The tests share a server: some of them meet what another one put there.
    pytest.mark.filterwarnings("ignore:.*has weights that another run put there"),
]
EXACT = 1e-4
"""How far a server's log-probs in float32 may lie from the model's, in nats; the largest seen is 2e-5."""
HASTY = Retries(count=0)


@pytest.fixture
def server(tiny_vllm: Running) -> Running:
    return tiny_vllm


def policy_for(server: Running, *, retries: Retries | None = None, outage: float = 600.0) -> ServerPolicy:
    return ServerPolicy(
        server.url, model="policy", tokenizer=tiny_tokenizer(), retries=retries, outage=outage, timeout=120.0
    )


def requests(sampling: Sampling, count: int = 8, *, seed: int = 0) -> list[Request]:
    prompts = [[1, 5 + row % 4, 76, 20, 9][: 3 + row % 3] for row in range(count)]
    return [Request(row, torch.tensor(prompts[row]), sampling, Draw(seed, row, 0)) for row in range(count)]


def furthest(model: PreTrainedModel, asked: list[Request], found: list[Completion]) -> float:
    """Return the largest distance between a server's log-prob and the trainer's score of the same token."""
    forest, sampling = Forest(), asked[0].sampling
    numbers = forest.plant([one.tokens for one in asked], groups=[0] * len(asked), members=list(range(len(asked))))
    forest.grow(
        numbers,
        [one.tokens for one in found],
        Kind.SAMPLED,
        log_probs=[one.log_probs for one in found],
        versions=[one.version for one in found],
    )
    support = None if sampling.support.whole else sampling.support
    with torch.no_grad():
        scored = score(model, forest, temperature=sampling.temperature, support=support).log_probs
    sampled = forest.sampled(numbers)
    return float((scored[sampled.index] - sampled.log_probs).abs().max())


def answers(policy: ServerPolicy, asked: list[Request]) -> list[Completion]:
    return by_row(policy.complete(asked), len(asked))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(32),
        Sampling(32, temperature=0.6),
        Sampling(32, temperature=1.5, top_p=0.8),
        Sampling(32, top_k=4),
        Sampling(32, temperature=0.8, top_k=6, top_p=0.7),
        Sampling(32, temperature=0.8, top_k=6, min_p=0.2),
    ],
)
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(server: Running, sampling: Sampling) -> None:
    policy = policy_for(server)
    facts = policy.check()
    assert (facts.tokens, facts.processed, facts.context, facts.precision) == (True, True, CONTEXT, "float32")
    policy.update(peaked(0))  # whatever other tests left there
    asked = requests(sampling)
    found = answers(policy, asked)
    assert sum(len(one.tokens) for one in found) > 100
    assert furthest(peaked(0), asked, found) < EXACT
    policy.close()


def test_updates_change_the_weights_and_versions_say_which(server: Running) -> None:
    policy, asked = policy_for(server), requests(Sampling(24))
    for version, seed in ((1, 1), (2, 2), (3, 1)):
        policy.update(peaked(seed))
        found = answers(policy, asked)
        assert {one.version for one in found} == {version}
        assert furthest(peaked(seed), asked, found) < EXACT
        assert furthest(peaked(3 - seed), asked, found) > 1
    policy.close()


def test_rows_that_an_update_meets_are_of_one_version_each(server: Running) -> None:
    policy, asked = policy_for(server), requests(Sampling(60), 400)

    async def play() -> list[Completion]:
        tasks = []
        update = asyncio.create_task(policy.update_async(peaked(2)))
        while not update.done():
            tasks.append(asyncio.create_task(policy.answer(asked[len(tasks)])))
            await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(policy.answer(asked[len(tasks)])))
        await update
        return list(await asyncio.gather(*tasks))

    policy.update(peaked(1))
    found = asyncio.run(play())
    for version, seed in ((1, 1), (2, 2)):
        mine = [one for one in found if one.version == version]
        assert mine
        assert furthest(peaked(seed), [asked[one.row] for one in mine], mine) < EXACT
    assert {one.version for one in found} == {1, 2}
    policy.close()


def test_rows_are_a_function_of_their_address_and_greedy_ones_are_those_of_the_process(server: Running) -> None:
    policy, asked = policy_for(server), requests(Sampling(20))
    policy.update(peaked(0))
    first = [one.tokens.tolist() for one in answers(policy, asked)]
    assert [one.tokens.tolist() for one in answers(policy, asked)] == first
    assert [one.tokens.tolist() for one in answers(policy, requests(Sampling(20), seed=1))] != first
    greedy = requests(Sampling(20, temperature=0.0))
    found = answers(policy, greedy)
    expected = by_row(TransformersPolicy(peaked(0)).complete(greedy), len(greedy))
    assert [(one.tokens.tolist(), one.stop) for one in found] == [(one.tokens.tolist(), one.stop) for one in expected]
    assert all(one.log_probs.isnan().all() for one in found)
    policy.close()


def test_rows_end_where_they_should_and_say_why(server: Running) -> None:
    policy, tokenizer = policy_for(server), tiny_tokenizer()
    policy.update(peaked(0))
    ids = tuple(tokenizer.convert_tokens_to_ids(["a", "7"]))
    sampling = Sampling(40, stop=("3", "x="), stop_ids=ids)
    found = answers(policy, requests(sampling, 64))
    eos = tokenizer.eos_token_id
    for one in found:
        watch, tokens = StopWatch(decoder_of(tokenizer), sampling.stop), one.tokens.tolist()
        seen = [watch.add(token) or token in (*ids, eos) for token in tokens]
        assert seen[:-1] == [False] * (len(tokens) - 1)
        assert seen[-1] is (one.stop is not StopReason.NEW_TOKENS)
        assert (tokens[-1] == eos) is (one.stop is StopReason.EOS)
        assert len(tokens) == 40 or one.stop is not StopReason.NEW_TOKENS
    assert {one.stop for one in found} >= {StopReason.EOS, StopReason.STOP}
    policy.close()


@pytest.mark.parametrize(
    ("length", "limit", "stop", "count"),
    [
        (CONTEXT - 8, 8, StopReason.NEW_TOKENS, 8),
        (CONTEXT - 8, 9, StopReason.CONTEXT, 8),
        (CONTEXT - 1, 9, StopReason.CONTEXT, 1),
        (CONTEXT, 9, StopReason.PROMPT_TOO_LONG, 0),
        (CONTEXT + 9, 9, StopReason.PROMPT_TOO_LONG, 0),
    ],
)
def test_limits_are_told_apart(server: Running, length: int, limit: int, stop: StopReason, count: int) -> None:
    policy = policy_for(server)
    asked = Request(0, torch.tensor([1] + [30] * (length - 1)), Sampling(limit, temperature=0.0), Draw(0, 0, 0))
    [found] = policy.complete([asked])
    if found.stop is not StopReason.EOS:
        assert (found.stop, len(found.tokens)) == (stop, count)
    blind = policy_for(server)
    facts = blind.check()
    blind._facts = type(facts)(True, "", True, None)  # as if the server did not say how much it holds
    if stop is StopReason.PROMPT_TOO_LONG and length > CONTEXT:
        [found] = blind.complete([asked])
        assert (found.stop, len(found.tokens)) == (stop, 0)


def test_another_tokenizer_and_another_run_are_found_out(server: Running) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["foxes"])
    with pytest.raises(ConfigError, match="has another tokenizer than this run"):
        ServerPolicy(server.url, model="policy", tokenizer=other).check()
    first, second = policy_for(server), policy_for(server)
    first.update(peaked(1))
    second.update(peaked(2))
    asked = requests(Sampling(12))
    with pytest.raises(ServerError, match="weights that another run put there since"):
        asyncio.run(first.answer(asked[0]))
    assert furthest(peaked(2), asked, answers(second, asked)) < EXACT
    first.close()
    second.close()


def killed_in_the_middle(
    server: Running, policy: ServerPolicy, asked: list[Request], *, again: bool = False
) -> list[Completion]:
    """Let the server die after 6 rows, and start it `again`."""
    found = []
    for one in policy.complete(asked):
        found.append(one)
        if len(found) == 6:
            server.kill()
            if again:
                server.start(wait=False)
    return found


def test_a_server_that_is_killed_costs_the_rows_under_way_and_comes_back_with_the_right_weights(
    server: Running,
) -> None:
    hasty, patient = policy_for(server, retries=HASTY, outage=0.0), policy_for(server)
    hasty.update(peaked(1))
    asked = requests(Sampling(100), 128)  # twice as many as are under way at once
    answers(hasty, asked[:8])  # its first answers come late, and then many at once
    with pytest.warns(UserWarning, match="rows have no answer"):
        found = killed_in_the_middle(server, hasty, asked)
    lost = [one for one in found if one.stop is StopReason.ERROR]
    assert len(found) == 128
    assert 1 <= len(lost) <= 122
    assert all(len(one.tokens) == 0 for one in lost)
    with pytest.raises(ServerError, match="ConnectError"):
        hasty.check()

    server.start()  # with the weights of its folder
    found = answers(hasty, asked[:32])
    assert {one.version for one in found} == {1}
    assert furthest(peaked(1), asked[:32], found) < EXACT

    patient.update(peaked(2))
    found = killed_in_the_middle(server, patient, asked, again=True)
    assert {one.version for one in found} == {1}
    assert StopReason.ERROR not in {one.stop for one in found}
    found.sort(key=lambda one: one.row)
    assert furthest(peaked(2), asked, found) < EXACT
    hasty.close()
    patient.close()


def test_a_server_as_it_comes_serves_at_temperature_1_and_takes_no_weights(tiny_folder: Path) -> None:
    with vllm(tiny_folder, "--max-model-len", str(CONTEXT), trained=False, processed=False) as server:
        policy = policy_for(server)
        assert (policy.check().processed, policy.trains) == (False, True)
        asked = requests(Sampling(24))
        assert furthest(peaked(0), asked, answers(policy, asked)) < EXACT
        with pytest.raises(ModelError, match="--logprobs-mode processed_logprobs"):
            answers(policy, requests(Sampling(24, temperature=0.7)))
        with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
            policy.update(peaked(1))
        assert furthest(peaked(0), asked, answers(policy, asked)) < EXACT


def test_smollm2_is_served_and_updated() -> None:
    from ramet.models.load import load_model
    from ramet.models.smollm2 import smollm2_folder

    model, tokenizer = load_model("smollm2")
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    with vllm(smollm2_folder(), "--max-model-len", "512", "--max-num-seqs", "8") as server:
        policy = ServerPolicy(server.url, model="policy", tokenizer=tokenizer, timeout=240.0)
        asked = texts(tokenizer)
        for version, served in enumerate((model, changed, model)):
            if version:
                policy.update(served)
            found = answers(policy, asked)
            assert {one.version for one in found} == {version}
            assert furthest(served, asked, found) < 10 * EXACT
            assert all(math.isfinite(value) for one in found for value in one.log_probs.tolist())
        policy.close()


def texts(tokenizer: PreTrainedTokenizerBase) -> list[Request]:
    """Return rows that begin alike, so that what the server remembers of prompts matters."""
    start = "Let us add some numbers. Here is a list of what we know about sums and about how to write them down. "
    rows = [list(tokenizer(start * 3 + f"{row} + {row + 3} =")["input_ids"]) for row in range(6)]
    sampling = Sampling(24, temperature=0.9, top_p=0.95)
    return [Request(row, torch.tensor(ids), sampling, Draw(0, row, 0)) for row, ids in enumerate(rows)]
