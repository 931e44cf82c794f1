"""MODEL on the command line -> the figures of its transformer, from its configuration alone. No torch here."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any

import msgspec

from autopar.catalogue.entries import read_config, resolve
from autopar.errors import UserError
from autopar.ir.transformer import Experts, Latent, Transformer

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim",),
    "width": ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_width": ("moe_intermediate_size", "intermediate_size"),
    "every": ("interleave_moe_layer_step", "decoder_sparse_step"),
}
"""What model types call each figure; the first that is there counts."""
USUAL_WIDTH = 4
"""Feed-forward width over hidden, where a config doesn't say."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of `transformers.toml`."""

    gated: bool = False
    tied: bool = False
    causal: bool = True
    positions: bool = False
    dropout: bool = False
    experts: bool = False


@functools.cache
def known_types() -> dict[str, Facts]:
    """Model type -> what its configuration leaves unsaid."""
    text = (resources.files("autopar.catalogue") / "transformers.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text)["types"], dict[str, Facts])


def transformer_of(model: str) -> Transformer:
    """The figures of what `model` names: a catalogue entry, a config.json or a model folder.

    Raises UserError for what is no transformer of equal layers, or whose configuration lacks a figure.
    """
    named = resolve(model)
    if named.factory is not None:
        raise UserError(
            f"model {model}: predict reads a configuration, not code; `autopar search {model} --pin …` does"
        )
    if named.entry is not None:
        family, row = named.entry.family, named.entry.row
        return transformer_from(model, family.model_type, family.tiny if named.tiny else row.config)
    assert named.config is not None
    data = read_config(named.config)
    return transformer_from(named.config.resolve().parent.name, str(data.pop("model_type")), data)


def transformer_from(name: str, model_type: str, config: dict[str, Any]) -> Transformer:
    """The figures of a configuration of `model_type`."""
    facts = known_types().get(model_type)
    if facts is None:
        raise UserError(
            f"model {name}: predict doesn't know the layers of model type {model_type!r}; "
            f"`autopar search {name} --pin …` prices any model; known: {', '.join(known_types())}"
        )
    get = _Getter(name, config)
    hidden, heads = get.number("hidden"), get.number("heads")
    expanded = int(config.get("expansion_ratio") or USUAL_WIDTH) * hidden
    one_for_all = config.get("multi_query") and not config.get("new_decoder_architecture")
    return Transformer(
        name=name,
        layers=get.number("layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=1 if one_for_all else get.number("key_value_heads", heads),
        head_size=get.number("head_size", hidden // heads),
        width=get.number("width", expanded),
        gated=facts.gated,
        vocabulary=get.number("vocabulary"),
        positions=get.number("positions", 0) if facts.positions else 0,
        tied=bool(config.get("tie_word_embeddings", facts.tied)),
        causal=facts.causal,
        dropout=_drops(config, facts),
        experts=_experts(get, config) if facts.experts else None,
        latent=_latent(get, config),
    )


class _Getter:
    """Reads figures by any of their names."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config

    def number(self, what: str, default: int | None = None) -> int:
        """A whole number of 1 or more; `default` where it is left out."""
        for key in NAMES.get(what, (what,)):
            value = self.config.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"model {self.name}: {key} is {value!r}; wanted a whole number of 1 or more")
            return value
        if default is None:
            raise UserError(f"model {self.name}: its config lacks {' or '.join(NAMES.get(what, (what,)))}")
        return default


def _drops(config: dict[str, Any], facts: Facts) -> bool:
    said = [v for k, v in config.items() if ("drop" in k) and isinstance(v, (int, float)) and not isinstance(v, bool)]
    return any(said) if said else facts.dropout


def _experts(get: _Getter, config: dict[str, Any]) -> Experts | None:
    count = get.number("experts", 0)
    if not count:
        return None
    width = get.number("expert_width")
    shared = config.get("shared_expert_intermediate_size") or int(config.get("n_shared_experts") or 0) * width
    return Experts(
        count=count,
        top_k=get.number("top_k"),
        width=width,
        shared_width=shared,
        dense_layers=int(config.get("first_k_dense_replace") or 0),
        every=get.number("every", 1),
    )


def _latent(get: _Getter, config: dict[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        query_rank=int(config.get("q_lora_rank") or 0),
        key_value_rank=get.number("kv_lora_rank"),
        rope=get.number("qk_rope_head_dim"),
        plain=get.number("qk_nope_head_dim"),
        value=get.number("v_head_dim"),
    )
