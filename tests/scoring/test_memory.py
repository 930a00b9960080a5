"""The memory there is, what a token needs of it, and how many tokens fit: with injected numbers, and measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scoring import zoo
from torch import nn

from ramet.errors import ModelError
from ramet.scoring import score
from ramet.scoring.budget import LOGIT_BYTES, needs_of, tokens_that_fit
from ramet.scoring.counting import counted_saved, counted_tokens, own_storages
from ramet.scoring.halves import LOGITS
from ramet.scoring.memory import Memory, Needs, cpu_memory, tokens_in

GIB = 2**30


def machine(root: Path, *, groups: str = "", files: dict[str, str] | None = None) -> tuple[Path, Path]:
    """Write the files of a machine with 16 GiB, of which 10 are free; return /proc and /sys/fs/cgroup."""
    proc, folder = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 12 kB\nMemAvailable: 10485760 kB\nHugePages: 0\n")
    (proc / "self/cgroup").write_text(groups)
    for name, text in (files or {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, folder


def test_without_groups_the_machine_is_what_there_is(tmp_path: Path) -> None:
    assert cpu_memory(*machine(tmp_path)) == Memory(16 * GIB, 10 * GIB)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        # version 2: what was read and can be dropped is not used
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": str(4 * GIB),
                "a/b/memory.current": str(3 * GIB),
                "a/b/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            Memory(4 * GIB, 2 * GIB),
        ),
        # the smallest limit counts, wherever above it stands; "max" is none
        (
            "0::/a/b\n",
            {"a/b/memory.max": "max\n", "a/memory.max": str(2 * GIB), "a/memory.current": str(GIB)},
            Memory(2 * GIB, GIB),
        ),
        # in a container, the path is that of the host and the root is the group
        (
            "0::/of/the/host\n",
            {"memory.max": str(8 * GIB), "memory.current": str(7 * GIB)},
            Memory(8 * GIB, GIB),
        ),
        # version 1, where a huge number is no limit
        (
            "4:cpu,memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": str(6 * GIB),
                "memory/x/memory.usage_in_bytes": str(5 * GIB),
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
            },
            Memory(6 * GIB, GIB),
        ),
        # a group that is over its limit has nothing free
        ("0::/\n", {"memory.max": str(GIB), "memory.current": str(2 * GIB)}, Memory(GIB, 0)),
        ("broken\n", {}, Memory(16 * GIB, 10 * GIB)),
    ],
)
def test_limits_of_control_groups_count(tmp_path: Path, groups: str, files: dict[str, str], expected: Memory) -> None:
    assert cpu_memory(*machine(tmp_path, groups=groups, files=files)) == expected


def test_a_system_that_says_little_has_all_its_memory_free(tmp_path: Path) -> None:
    memory = cpu_memory(tmp_path / "none", tmp_path / "none")
    assert memory.free == memory.total > 0


@pytest.mark.parametrize(
    ("memory", "needs", "expected"),
    [
        (Memory(1000, 1000), Needs(1.0, 0), 256),  # 500 fit
        (Memory(1000, 1000), Needs(1.0, 245), 128),  # 255 fit
        (Memory(1000, 1000), Needs(1.0, 244), 256),  # 256 fit
        (Memory(1000, 100), Needs(1.0, 0), 64),  # scarce
        (Memory(1000, 1000), Needs(3.0, 0), 128),  # 166 fit
        (Memory(1000, 1000), Needs(501.0, 0), 1),  # one at least
        (Memory(1000, 1000), Needs(1.0, 2000), 1),
    ],
)
def test_tokens_in_memory_by_hand(memory: Memory, needs: Needs, expected: int) -> None:
    assert tokens_in(memory, needs) == expected


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 10**12), st.floats(0.01, 1.0), st.floats(1.0, 1e6), st.integers(0, 10**11), st.floats(0.1, 1.0))
def test_what_fits_fits_and_twice_as_much_does_not(
    total: int, free: float, token: float, fixed: int, fraction: float
) -> None:
    memory, needs = Memory(total, int(total * free)), Needs(token, fixed)
    found = tokens_in(memory, needs, fraction=fraction)
    room = min(fraction * memory.total, memory.free)
    assert found == 1 or found * token + fixed <= room
    assert 2 * found * token + fixed > room - token
    assert found.bit_count() == 1


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        tokens_in(Memory(1, 1), Needs(1.0, 0), fraction=fraction)


# ---------------------------------------------------------------- measured


def test_each_storage_is_counted_once_and_weights_not_at_all() -> None:
    """A layer keeps its input [3, 4]; exp keeps its output [3, 5], which the second layer keeps as well."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with counted_saved(own_storages(model)) as saved:
        found = model[1](model[0](torch.ones(3, 4)).exp())
    assert sum(saved.values()) == 4 * (3 * 4 + 3 * 5)
    assert found.requires_grad


def test_tokens_are_counted_where_they_enter_the_model() -> None:
    model = zoo.named("GPT-2").build()
    with counted_tokens(model) as count:
        model(torch.zeros(2, 7, dtype=torch.int64))
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    model(torch.zeros(2, 7, dtype=torch.int64))
    assert count.total == 17


@pytest.mark.parametrize("name", ["Llama", "LFM2"])
def test_needs_are_those_of_a_larger_forest(name: str) -> None:
    """What is measured on a small tree is, within a quarter, what each token of a larger one keeps."""
    model, forest = zoo.named(name).build(), zoo.two_level_forest(prompt=60)
    needs = needs_of(model, training=True, gradient_checkpointing=False)
    with counted_tokens(model) as tokens, counted_saved(own_storages(model)) as saved:
        scores = score(model, forest)
        kept = sum(saved.values())
    assert scores.log_probs.requires_grad
    assert kept == pytest.approx(needs.token * tokens.total, rel=0.25)


def deep(layers: int) -> nn.Module:
    config = zoo.llama()
    config.num_hidden_layers = layers
    model: nn.Module = type(zoo.named("Llama").build())(config)
    return model.eval()


def test_needs_grow_with_layers_in_training_alone() -> None:
    few, many = deep(2), deep(8)
    ratios = {}
    for training, checkpointing in ((True, False), (True, True), (False, False)):
        needs = [
            needs_of(model, training=training, gradient_checkpointing=checkpointing).token for model in (few, many)
        ]
        ratios[training, checkpointing] = needs[1] / needs[0]
    assert 3.5 < ratios[True, False] < 4.1
    assert 1.0 <= ratios[True, True] < 2.0  # a layer keeps its input alone
    assert 0.9 < ratios[False, False] < 1.1
    assert needs_of(many, training=True, gradient_checkpointing=True).token < 0.5 * (
        needs_of(many, training=True, gradient_checkpointing=False).token
    )


def test_tokens_that_fit_by_hand() -> None:
    """What is planned for is half of the memory, less the head's softmax, gradients and the moments of Adam."""
    model = deep(2)
    needs = needs_of(model, training=True, gradient_checkpointing=False)
    assert needs.fixed >= LOGIT_BYTES * LOGITS
    added = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    total = 2 * (needs.fixed + added + int(1024 * needs.token) + 1)
    assert tokens_that_fit(model, memory=Memory(total, total)) == 1024
    assert tokens_that_fit(model, memory=Memory(total - 1000, total)) == 512
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert tokens_that_fit(model, memory=Memory(total - 2 * added, total)) == 1024
    assert tokens_that_fit(deep(8), training=False, memory=Memory(total, total)) >= 1024


def test_a_frozen_model_is_measured_as_if_it_were_trained_and_stays_frozen() -> None:
    free, frozen = deep(3), deep(3)
    frozen.requires_grad_(False)
    found = [needs_of(model, training=False, gradient_checkpointing=False) for model in (free, frozen)]
    assert found[0] == found[1]
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_a_model_that_does_not_tell_its_vocabulary_can_not_be_measured() -> None:
    with pytest.raises(ModelError, match="vocabulary"):
        tokens_that_fit(nn.Linear(2, 2))


def test_without_gradient_score_runs_no_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forest = zoo.named("Llama").build(), zoo.two_level_forest()
    with torch.no_grad():
        whole = score(model, forest)
    monkeypatch.setattr(sys.modules["ramet.scoring.score"], "tokens_that_fit", lambda *_, **__: 64)
    with torch.no_grad():
        cut = score(model, forest)
    assert cut.tokens_computed > whole.tokens_computed
    torch.testing.assert_close(cut.log_probs, whole.log_probs, rtol=0, atol=1e-5, equal_nan=True)
    assert score(model, forest).tokens_computed == whole.tokens_computed  # the backward pass needs all of it at once
