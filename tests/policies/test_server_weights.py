"""Weights put into a running server: a scripted vLLM that computes with a real model, and fails where it is told to."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.policies import scripted_server as scripted
from tests.policies.scripted_server import MODEL, Script, ScriptedServer, Seen, says
from transformers import AutoModelForCausalLM, PreTrainedModel

from ramet.errors import ServerError
from ramet.http import Retries
from ramet.policies.policy import by_row
from ramet.policies.server import ServerPolicy
from ramet.policies.server.weights import BETWEEN, compare, log_probs_of, save_weights
from ramet.types import Completion, Draw, Request, Sampling, StopReason

AT_ONCE = Retries(count=1, first=0.0, longest=0.0)
CALLS = [
    "/pause",
    "/update_weight_version",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
]
NOT_THERE: Script = says({"detail": "Not Found"}, 404)


class FakeVLLM(ScriptedServer):
    """Answers as a vLLM in development mode does."""

    def start(self, model: PreTrainedModel) -> None:
        """Begin with the model that the server was started with."""
        self.weights, self.label, self.deaf, self.extension = model, "default", False, ""
        paths = {
            "/v1/completions": self.complete,
            "/weight_info": self.info,
            "/server_info": self.settings,
            "/pause": says({"status": "paused"}),
            "/resume": says({"status": "resumed"}),
            "/reset_prefix_cache": says({"success": True}),
            "/update_weight_version": self.rename,
            "/collective_rpc": self.reload,
        }
        self.always |= paths

    async def complete(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.001 * (seen.body["seed"] % 5))
        draws = random.Random(seen.body["seed"])
        tokens = [draws.randrange(3, 30) for _ in range(seen.body["max_tokens"])]
        prompt = seen.body["prompt"]
        found = log_probs_of(self.weights, [*prompt, *tokens], len(prompt))
        answer = scripted.completion(seen, token_ids=tokens, logprobs={"token_logprobs": found}, finish_reason="length")
        await says(answer)(seen, writer)

    async def info(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await says({"weight_version": self.label})(seen, writer)

    async def settings(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        parallel = {"worker_extension_cls": self.extension}
        settings = {"model_config": {"dtype": "torch.float32"}, "parallel_config": parallel}
        await says({"vllm_config": settings})(seen, writer)

    async def rename(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        self.label = seen.body["new_version"]
        await says({"success": True})(seen, writer)

    async def reload(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        assert self.label == BETWEEN
        if not self.deaf:
            self.weights = AutoModelForCausalLM.from_pretrained(seen.body["kwargs"]["weights_path"])
        await says({"results": [None]})(seen, writer)

    def calls(self) -> list[str]:
        """Return the paths of all calls but those of rows and checks."""
        paths = [seen.path.partition("?")[0] for seen in self.seen]
        return [path for path in paths if path not in ("/v1/completions", "/v1/models", "/weight_info", "/server_info")]


Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def models(tiny: Tiny) -> list[PreTrainedModel]:
    return [tiny("rotary", torch.float32, seed) for seed in range(3)]


@pytest.fixture
def server(models: list[PreTrainedModel]) -> Iterator[FakeVLLM]:
    with FakeVLLM() as running:
        running.start(models[0])
        yield running


@pytest.fixture
def policy(server: FakeVLLM, tmp_path: Path) -> Iterator[ServerPolicy]:
    made = ServerPolicy(server.url, model=MODEL, retries=AT_ONCE, timeout=5.0, weights_folder=tmp_path / "weights")
    yield made
    made.close()


def request(row: int = 0) -> Request:
    return Request(row, torch.tensor([1, 5, row % 7 + 3]), Sampling(6), Draw(0, row, 0))


def rows(policy: ServerPolicy, count: int = 4) -> list[Completion]:
    return by_row(policy.complete([request(row) for row in range(count)]), count)


def is_of(model: PreTrainedModel, found: Completion) -> bool:
    """Say whether the log-probs of a completion are those of `model`."""
    prompt = request(found.row).tokens.tolist()
    expected = log_probs_of(model, [*prompt, *found.tokens.tolist()], len(prompt))
    return bool(torch.allclose(found.log_probs, torch.tensor(expected), atol=1e-5))


def versions(found: list[Completion]) -> set[int]:
    return {one.version for one in found}


def test_an_update_changes_what_the_server_computes_and_the_version_of_what_follows(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    for number, model in enumerate(models):
        if number:
            policy.update(model)
        found = rows(policy)
        assert versions(found) == {number} == {policy.version}
        assert all(is_of(model, one) for one in found)
        assert not any(is_of(models[number - 1], one) for one in found)
    assert server.calls() == CALLS * 2


def test_the_caller_may_name_the_version(policy: ServerPolicy, models: list[PreTrainedModel]) -> None:
    policy.update(models[1], version=40)
    assert versions(rows(policy)) == {40}


def test_the_model_stays_in_the_mode_that_it_was_in(policy: ServerPolicy, models: list[PreTrainedModel]) -> None:
    models[1].train()
    policy.update(models[1])
    assert models[1].training


def test_rows_under_way_end_with_the_weights_that_they_began_with(
    policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    async def play() -> list[Completion]:
        await policy.check_async()
        tasks = []
        updates = asyncio.gather(*(policy.update_async(model) for model in models[1:]))
        while not updates.done():
            tasks.append(asyncio.create_task(policy.answer(request(len(tasks)))))
            await asyncio.sleep(0.002)
        tasks.append(asyncio.create_task(policy.answer(request(len(tasks)))))
        return list(await asyncio.gather(*tasks))

    found = asyncio.run(play())
    assert versions(found) == {0, 1, 2}
    assert all(is_of(models[one.version], one) for one in found)


def test_a_server_that_keeps_its_weights_is_found_out(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    server.deaf = True
    with pytest.raises(ServerError, match=r"after the update the server's log-probs of 32 tokens lie .* nats"):
        policy.update(models[1])
    assert policy.version == 0
    with pytest.raises(ServerError, match="an update failed half-way"):
        asyncio.run(policy.answer(request()))
    server.deaf = False
    policy.update(models[1])
    assert versions(rows(policy)) == {1}


def test_a_row_that_waited_for_a_first_update_which_failed_is_not_answered_by_nobodys_weights(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    async def play() -> None:
        await policy.check_async()
        server.deaf = True
        waiting: list[asyncio.Task[Completion]] = []

        async def asks_meanwhile(seen: Seen, writer: asyncio.StreamWriter) -> None:
            loop.call_soon_threadsafe(lambda: waiting.append(loop.create_task(policy.answer(request()))))
            await asyncio.sleep(0.01)
            await server.reload(seen, writer)

        loop = asyncio.get_running_loop()
        server.next(asks_meanwhile, path="/collective_rpc")
        with pytest.raises(ServerError, match="after the update"):
            await policy.update_async(models[1])
        with pytest.raises(ServerError, match="an update failed half-way"):
            await waiting[0]

    asyncio.run(play())


@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("fault", [says({"error": "broken"}, 500), NOT_THERE, scripted.reset])
def test_an_update_that_fails_at_any_step_leaves_the_version_before(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel], step: int, fault: Script
) -> None:
    policy.update(models[1])
    usual, path = server.always[CALLS[step]], CALLS[step]
    if step == 4:  # the second call of its path
        server.next(server.rename, fault, server.rename, fault, path=path)
    else:
        server.next(fault, fault, path=path)
    with pytest.raises(ServerError) as raised:
        policy.update(models[2])
    assert raised.value.hint is None or "VLLM_SERVER_DEV_MODE=1" in raised.value.hint
    server.scripts.clear()
    server.always[path] = usual
    found = rows(policy)
    assert versions(found) == {1}
    assert all(is_of(models[1], one) for one in found)


def test_an_update_that_fails_once_is_tried_again(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    server.next(scripted.reset, path="/collective_rpc")
    policy.update(models[1])
    assert all(is_of(models[1], one) for one in rows(policy))


def test_prompts_that_are_still_remembered_fail_the_update(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    server.always["/reset_prefix_cache"] = says({"success": False})
    with pytest.raises(
        ServerError, match=r"still remembers prompts of the old weights: it answered \{'success': False"
    ):
        policy.update(models[1])
    assert server.calls()[-1] == "/resume"


@pytest.mark.parametrize("version", [0, 1])
def test_a_server_that_was_started_anew_gets_its_weights_again(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel], version: int
) -> None:
    policy.update(models[1], version=version)  # 0: a run's first weights need not be those of the server
    server.start(models[0])  # with the weights that it is always started with
    found = rows(policy)
    assert versions(found) == {version}
    assert all(is_of(models[1], one) for one in found)
    assert server.calls() == CALLS * 2


def test_a_server_that_dies_and_comes_back_in_the_middle_answers_with_the_weights_of_the_version(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    policy.update(models[1])

    async def dies(seen: Seen, writer: asyncio.StreamWriter) -> None:
        server.start(models[0])
        await scripted.reset(seen, writer)

    server.next(server.complete, dies, server.complete)
    found = rows(policy, 12)
    assert versions(found) == {1}
    assert {one.stop for one in found} == {StopReason.NEW_TOKENS}
    late = [one for one in found if not is_of(models[1], one)]
    assert late == []


def test_a_server_outside_development_mode_takes_no_weights(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    server.always["/weight_info"] = NOT_THERE
    with pytest.raises(ServerError, match="takes no weights: it has no names for its weights") as raised:
        policy.update(models[1])
    assert raised.value.hint is not None
    assert "VLLM_SERVER_DEV_MODE=1" in raised.value.hint
    assert server.calls() == []
    assert all(is_of(models[0], one) for one in rows(policy))


def test_weights_of_another_run_are_told_unless_they_are_replaced(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    server.label = "ramet-other-7"
    with pytest.warns(UserWarning, match="has weights that another run put there, called 'ramet-other-7'"):
        rows(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows(policy)
        other = ServerPolicy(server.url, model=MODEL, retries=AT_ONCE)
        other.update(models[1])
        rows(other)
        other.close()


def test_two_runs_on_one_server_are_found_out_by_the_first_which_undoes_nothing(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    policy.update(models[1])
    other = ServerPolicy(server.url, model=MODEL, retries=AT_ONCE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.update(models[2])
    loads = len(server.asked("/collective_rpc"))
    with pytest.raises(ServerError, match="has weights that another run put there since, called 'ramet-"):
        asyncio.run(policy.answer(request()))
    with pytest.raises(ServerError, match="another run put there since") as raised:
        policy.update(models[0])
    assert raised.value.hint == "give each run a server of its own"
    assert len(server.asked("/collective_rpc")) == loads
    found = rows(other)
    assert all(is_of(models[2], one) for one in found)
    other.close()


def test_the_method_of_the_extension_is_used_where_it_is_loaded(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    policy.update(models[1])
    server.extension = "ramet_weights.Reloading"
    policy.check()
    policy.update(models[2])
    methods = [seen.body["method"] for seen in server.asked("/collective_rpc")]
    assert methods == ["reload_weights", "reload_weights_and_head"]


def test_only_the_weights_of_the_version_are_kept_and_close_removes_them(
    policy: ServerPolicy, models: list[PreTrainedModel], tmp_path: Path
) -> None:
    place = tmp_path / "weights"
    for model in models:
        policy.update(model)
        [folder] = place.iterdir()
        [version] = folder.iterdir()
        assert version.name.startswith(f"{policy.version}-")
    policy.close()
    assert list(place.iterdir()) == []
    policy.close()
    policy.update(models[0])  # a closed one may be used again
    assert len(list(place.iterdir())) == 1


def test_weights_are_removed_with_the_policy(server: FakeVLLM, models: list[PreTrainedModel], tmp_path: Path) -> None:
    made = ServerPolicy(server.url, model=MODEL, retries=AT_ONCE, weights_folder=tmp_path)
    made.update(models[1])
    assert len(list(tmp_path.iterdir())) == 1
    del made
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_merged_in_a_copy(models: list[PreTrainedModel], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(models[0], LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.eval()
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    save_weights(adapted, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in adapted.state_dict().items())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("served", "expected", "fits"),
    [
        ([-1.0, -2.0], [-1.0, -2.0], True),
        ([-1.0, -2.0], [-1.1, -2.1], True),
        ([-1.0, -2.0], [-1.0, -2.3], False),
        ([-1.0, -2.0], [-1.0, float("nan")], False),
        ([], [], False),
    ],
)
def test_log_probs_are_compared_by_their_mean_distance(served: list[float], expected: list[float], fits: bool) -> None:
    if fits:
        compare(served, expected, 0.11)
    else:
        with pytest.raises(ServerError, match=f"log-probs of {len(served)} tokens"):
            compare(served, expected, 0.11)


def test_log_probs_are_those_of_each_token_after_the_ones_before(models: list[PreTrainedModel]) -> None:
    tokens = [1, 5, 6, 7, 9]
    with torch.no_grad():
        logits = models[0](torch.tensor([tokens])).logits[0].double()
    expected = [float(logits[place - 1].log_softmax(-1)[tokens[place]]) for place in (2, 3, 4)]
    assert log_probs_of(models[0], tokens, 2) == pytest.approx(expected, abs=1e-5)


def test_a_closed_policy_has_nothing_to_give_a_server_that_was_started_anew(
    server: FakeVLLM, policy: ServerPolicy, models: list[PreTrainedModel]
) -> None:
    policy.update(models[1])
    policy.close()
    server.start(models[0])
    with pytest.raises(ServerError, match="the weights of this version were removed"):
        asyncio.run(policy.answer(request()))
