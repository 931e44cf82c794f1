"""The catalogue: sizes as published, inputs that give a loss, and one clear line for what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.catalogue.entries import entries, resolve
from autopar.catalogue.source import load_model
from autopar.errors import UserError

FAMILIES = {e.family.model_type: e.name for e in entries().values()}


@pytest.mark.parametrize("name", sorted(entries()))
def test_parameters_as_published(name: str) -> None:
    source = load_model(name)
    assert sum(p.numel() for p in source.model.parameters()) == entries()[name].row.parameters
    assert all(p.is_meta for p in source.model.parameters()), "no weights are allocated"
    assert source.model.training


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_tiny_gives_a_loss(name: str) -> None:
    source = load_model(name, tiny=True, device="cpu", seed=3)
    loss = source.model(**source.example_inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert "tiny config" in source.note
    again = load_model(name, tiny=True, device="cpu", seed=3)
    torch.testing.assert_close(again.model(**again.example_inputs).loss, loss)


def test_required_names() -> None:
    wanted = (
        "gpt2 gpt3-175b llama3-8b llama3-70b llama3-405b mixtral-8x7b deepseek-v3 bert-large t5-11b vit-huge resnet152"
    )
    assert set(wanted.split()) <= set(entries())
    assert all(e.row.source and e.row.global_batch > 0 for e in entries().values())


def test_sizes_asked_for() -> None:
    source = load_model("llama3-8b", seq=128, global_batch=6)
    assert source.example_inputs["input_ids"].shape == (6, 128)  # type: ignore[call-overload]
    assert source.tokens_per_batch == 6 * 128
    images = load_model("resnet50", global_batch=6)
    assert images.example_inputs["pixel_values"].shape == (6, 3, 224, 224)  # type: ignore[call-overload]
    assert images.tokens_per_batch == 6


def test_fp64() -> None:
    source = load_model("vit-base", tiny=True, device="cpu", precision="fp64")
    assert {p.dtype for p in source.model.parameters()} == {torch.float64}
    assert source.example_inputs["pixel_values"].dtype == torch.float64  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("lama3-8b", "unknown model 'lama3-8b'; closest: llama3-8b"),
        ("zzz", "see `autopar models`"),
        ("no/such/config.json", "no such file"),
        ("a b:c", "wanted package.module:factory"),
        ("nosuchmodule:factory", "cannot be imported: ModuleNotFoundError"),
        ("json:nothing", "json has no callable nothing"),
        ("builtins:dict", "returned dict; wanted a torch.nn.Module"),
        ("torch.nn:Identity", "no example inputs"),
    ],
)
def test_bad_models(model: str, words: str) -> None:
    with pytest.raises(UserError, match=None) as caught:
        load_model(model)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_sizes() -> None:
    with pytest.raises(UserError, match="--seq 4096: gpt2 has 1024 learned positions"):
        load_model("gpt2", seq=4096)
    with pytest.raises(UserError, match="--global-batch 0: wanted 1 or more"):
        load_model("gpt2", global_batch=0)


def test_config_file_and_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **entries()["gpt2"].family.tiny}
    (folder / "config.json").write_text(json.dumps(config))
    for given in (folder, folder / "config.json"):
        source = load_model(str(given), seq=8, global_batch=4)
        assert source.name == "my-gpt"
        assert source.example_inputs["labels"].shape == (4, 8)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "gpt2", ', "malformed JSON"),
        ("[1]", "no model_type"),
        ('{"model_type": "no-such-type"}', "transformers refuses it"),
        ('{"model_type": "dpr"}', "no class with a loss known"),
        ('{"model_type": "clip"}', "doesn't say what it is called with"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_model(str(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mymodels.py").write_text(
        "import torch\n"
        "def made(global_batch=2):\n    return torch.nn.Linear(3, 4), {'input': torch.ones(global_batch, 3)}\n"
        "def broken():\n    raise KeyError('oh')\n"
    )
    monkeypatch.chdir(tmp_path)
    source = load_model("mymodels:made", global_batch=5, precision="fp64")
    assert source.tokens_per_batch == 5
    assert source.example_inputs["input"].dtype == torch.float64  # type: ignore[call-overload]
    with pytest.raises(UserError, match="--seq: mymodels:made fixes its own inputs"):
        load_model("mymodels:made", seq=5)
    with pytest.raises(UserError, match=r"the factory failed: KeyError: 'oh' at .*mymodels\.py:5"):
        load_model("mymodels:broken")


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from autopar.catalogue.entries import resolve; resolve('gpt2'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert resolve("gpt2").entry is not None
