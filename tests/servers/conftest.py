"""One vLLM for all tests that need no other: they meet what another one put there, and put there what they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.places import CONTEXT, Running, peaked, vllm

from ramet.models.tiny import tiny_tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests last: other tests look at the processes that there are."""
    items.sort(key=lambda item: item.get_closest_marker("servers") is not None)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that the server is started with."""
    place = tmp_path_factory.mktemp("tiny")
    peaked(0).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="session")
def tiny_vllm(tiny_folder: Path) -> Iterator[Running]:
    """A vLLM that takes weights; whoever kills it starts it again."""
    with vllm(tiny_folder, "--max-model-len", str(CONTEXT), "--max-num-seqs", "16") as running:
        yield running
