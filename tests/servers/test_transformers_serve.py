"""The real `transformers serve`: text in, text out, so that it serves for evaluation alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.servers.places import Running, transformers_serve

from ramet.errors import ServerError
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.policy import by_row
from ramet.policies.server import ServerPolicy
from ramet.types import Draw, Request, Sampling, StopReason

pytestmark = pytest.mark.servers
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(tokenizer, layers=2, initializer_range=0.2)
    model.generation_config.do_sample = True
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with transformers_serve(folder) as running:
        yield running


def request(row: int, sampling: Sampling) -> Request:
    messages = ({"role": "user", "content": f"{row}+1="},)
    return Request(row, torch.tensor([1, 6]), sampling, Draw(0, row, 0), messages)


def test_it_gives_text_and_says_so_and_may_be_killed(server: Running, folder: Path) -> None:
    policy = ServerPolicy(server.url, model=str(folder), tokenizer=tiny_tokenizer())
    with pytest.warns(UserWarning, match="gives text and neither token ids nor log-probs"):
        assert not policy.trains
    asked = [request(row, Sampling(12, temperature=0.8, top_p=0.9)) for row in range(6)]
    found = by_row(policy.complete(asked), 6)
    for one in found:
        assert one.text is not None
        assert one.tokens.tolist() == tiny_tokenizer()(one.text, add_special_tokens=False)["input_ids"]
        assert all(math.isnan(value) for value in one.log_probs.tolist())
        assert one.stop in (StopReason.NEW_TOKENS, StopReason.EOS)
    assert len({one.text for one in found}) > 1

    server.kill()
    server.start(wait=False)
    again = by_row(policy.complete(asked), 6)
    assert StopReason.ERROR not in {one.stop for one in again}


def test_it_can_not_be_trained_with(server: Running, folder: Path) -> None:
    with pytest.raises(ServerError, match=r"completes no token ids: .*Unexpected fields"):
        ServerPolicy(server.url, model=str(folder), api="tokens").check()


def test_it_says_which_model_it_serves(server: Running) -> None:
    policy = ServerPolicy(server.url, model="another", api="text", tokenizer=tiny_tokenizer())
    with pytest.warns(UserWarning, match="its text alone was asked for"):
        policy.check()
    with pytest.warns(UserWarning, match="no answer: .*pinned to"):
        found = list(policy.complete([request(0, Sampling(4))]))
    assert [one.stop for one in found] == [StopReason.ERROR]
