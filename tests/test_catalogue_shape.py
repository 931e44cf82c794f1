"""Configurations read as transformers: the parameters that come out are the catalogue's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.catalogue.entries import entries
from autopar.catalogue.shape import known_types, transformer_of
from autopar.errors import UserError

KNOWN = [name for name, e in entries().items() if e.family.model_type in known_types()]


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_of_the_catalogue(name: str) -> None:
    """Norms and biases are left out, and BERT's poolers and type tables."""
    assert transformer_of(name).parameters == pytest.approx(entries()[name].row.parameters, rel=0.007)


def write(folder: Path, **config: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 10}


def test_a_config_file(tmp_path: Path) -> None:
    found = transformer_of(write(tmp_path, model_type="llama", **LLAMA))
    assert (found.layers, found.hidden, found.heads, found.key_value_heads, found.head_size) == (2, 64, 4, 4, 16)
    assert found.gated and found.causal and not found.tied and not found.dropout
    assert found.name == tmp_path.name


def test_names_and_defaults_of_other_types(tmp_path: Path) -> None:
    gpt = transformer_of(
        write(tmp_path, model_type="gpt2", n_embd=64, n_head=4, n_layer=2, vocab_size=10, resid_pdrop=0.0)
    )
    assert gpt.width == 256 and gpt.tied and not gpt.gated and not gpt.dropout
    bert = transformer_of(write(tmp_path, model_type="bert", hidden_dropout_prob=0.1, **LLAMA))
    assert not bert.causal and bert.dropout


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "doesn't know the layers of model type 'mamba'"),
        ({"model_type": "llama"}, "its config lacks hidden_size or n_embd or d_model"),
        ({"model_type": "llama", **LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0; wanted a whole number"),
        ({"hidden_size": 3}, "no model_type in it"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, config: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        transformer_of(write(tmp_path, **config))


def test_a_factory_is_code() -> None:
    with pytest.raises(UserError, match="predict reads a configuration, not code"):
        transformer_of("tests.models:mlp")
