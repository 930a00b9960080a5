"""A reference whose weights lie in a file: it scores as a frozen copy does, and holds nothing between two uses."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.scoring import zoo

from ramet.assembly import reference_of
from ramet.errors import ModelError
from ramet.scoring import in_file, score
from ramet.scoring.in_file import InFile


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 2", "Mamba"])
@pytest.mark.filterwarnings("ignore::ramet.scoring.check.PlainScoringWarning")
def test_it_scores_as_the_model_was(name: str, tmp_path: Path) -> None:
    """Tied weights and buffers included, and whatever becomes of the model."""
    model, forest = zoo.named(name).build(), zoo.two_level_forest()
    copied = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    reference = in_file(model, tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.ones_like(parameter))
    first = score(model, forest, reference=reference).reference_log_probs
    again = score(model, forest, reference=reference).reference_log_probs
    right = score(copied, forest).log_probs
    assert first is not None
    assert again is not None
    kept = ~right.isnan()
    torch.testing.assert_close(first[kept], right[kept].detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(first[kept], again[kept])
    assert not first.requires_grad
    assert float((score(model, forest).log_probs.detach()[kept] - first[kept]).abs().max()) > 1e-3


def test_it_holds_its_weights_only_while_it_is_lent(tmp_path: Path) -> None:
    model = zoo.named("Llama").build()
    model.save_pretrained(tmp_path)
    reference = in_file(model, tmp_path)
    with reference.lent() as lent:
        assert not any(parameter.is_meta or parameter.requires_grad for parameter in lent.parameters())
    with pytest.raises(ZeroDivisionError), reference.lent():
        _ = 1 / 0
    assert all(parameter.is_meta for parameter in reference.model.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    model = zoo.named("Llama").build()
    model.save_pretrained(tmp_path / "own")
    zoo.named("GPT-2").build().save_pretrained(tmp_path / "other")
    (tmp_path / "none").mkdir()
    moved = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(moved.parameters())).add_(1)
    for found, folder in ((model, "other"), (model, "none"), (moved, "own")):
        with pytest.raises(ModelError, match="hold"):
            in_file(found, tmp_path / folder)
    assert not isinstance(reference_of(moved, tmp_path / "own"), InFile)
    assert isinstance(reference_of(model, tmp_path / "own"), InFile)


def test_files_that_change_are_told(tmp_path: Path) -> None:
    model, forest = zoo.named("Llama").build(), zoo.two_level_forest()
    model.save_pretrained(tmp_path)
    reference = in_file(model, tmp_path)
    score(model, forest, reference=reference)
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="moved, removed or written again"):
        score(model, forest, reference=reference)
    (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
    assert score(model, forest, reference=reference).reference_log_probs is not None


def test_lent_within_itself(tmp_path: Path) -> None:
    """The weights stay for the outer one, and a tied weight is one parameter."""
    model, forest = zoo.named("Gemma 2").build(), zoo.two_level_forest()
    model.save_pretrained(tmp_path)
    reference = in_file(model, tmp_path)
    with reference.lent() as lent:
        score(model, forest, reference=reference)
        assert not any(parameter.is_meta for parameter in lent.parameters())
        assert len(list(lent.parameters())) == len(list(model.parameters()))
    assert all(parameter.is_meta for parameter in reference.model.parameters())
    assert len(list(reference.model.parameters())) == len(list(model.parameters()))


def test_a_second_thread_is_told_and_takes_nothing_away(tmp_path: Path) -> None:
    model, forest = zoo.named("Llama").build(), zoo.two_level_forest()
    model.save_pretrained(tmp_path)
    reference = in_file(model, tmp_path)
    right = score(reference, forest).log_probs
    told = zoo.while_it_runs(reference.model.get_submodule("model.layers.0"), lambda: score(reference, forest))
    found = score(reference, forest).log_probs
    assert [type(error) for error in told] == [ModelError]
    assert "another thread" in str(told[0])
    assert torch.equal(found.nan_to_num(1.0), right.nan_to_num(1.0))


def test_weights_that_are_no_numbers_are_the_same_ones(tmp_path: Path) -> None:
    model = zoo.named("Llama").build()
    with torch.no_grad():
        next(iter(model.parameters()))[0] = torch.nan
    model.save_pretrained(tmp_path)
    with in_file(model, tmp_path).lent() as lent:
        assert bool(next(iter(lent.parameters()))[0].isnan().all())


def test_a_torn_file_is_told(tmp_path: Path) -> None:
    model = zoo.named("Llama").build()
    model.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="can not be read as safetensors"):
        in_file(model, tmp_path)
