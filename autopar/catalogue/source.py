"""MODEL on the command line -> a module without weights and a batch to call it with."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from autopar.catalogue.entries import TINY, Entry, InputKind, read_config, resolve
from autopar.catalogue.factory import Inputs, call_factory, count_tokens
from autopar.catalogue.inputs import DEFAULT_BATCH, Maker, checked_sequence, example_inputs
from autopar.errors import UserError
from autopar.ir.options import Precision

TINY_BATCH, TINY_SEQ = 12, 12
"""Divide by 1, 2, 3, 4 and 6."""

EXPERTS = {"meta": "grouped_mm", "cpu": "batched_mm"}
"""transformers' experts by device: neither loops over data; `grouped_mm` copies no weights, but has no float64."""

KINDS: tuple[tuple[str, InputKind], ...] = (
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForMaskedLM", "masked-lm"),
    ("ForImageClassification", "image-classification"),
    ("ForConditionalGeneration", "seq2seq-lm"),
)
"""Endings of transformers' class names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model to plan for.

    Attributes:
        example_inputs: the global batch, by keyword or by position.
        tokens_per_batch: tokens of one step, or samples where these are images.
        note: what a person should know about it, e.g. that it is a tiny stand-in; "" if nothing.
    """

    name: str
    model: nn.Module
    example_inputs: Inputs
    tokens_per_batch: int
    note: str = ""


def load_model(
    model: str,
    *,
    seq: int | None = None,
    global_batch: int | None = None,
    precision: Precision = "fp32",
    tiny: bool = False,
    device: Literal["meta", "cpu"] = "meta",
    seed: int = 0,
) -> ModelSource:
    """The model that `model` names, in training mode.

    Args:
        seq, global_batch: None takes the catalogue's defaults.
        precision: "fp64" makes the parameters float64. bf16 and fp16 keep float32 ones: the compiler casts.
        tiny: for a catalogue name, the family's tiny config instead, as NAME-tiny gives.
        device: "meta" allocates nothing; "cpu" draws weights and inputs from `seed`.

    Raises:
        UserError: unknown name, unreadable config, a factory that fails, a size that cannot be.
    """
    for option, value in (("--seq", seq), ("--global-batch", global_batch)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: wanted 1 or more")
    dtype = torch.float64 if precision == "fp64" else torch.float32
    named = resolve(model)
    if named.factory is not None:
        built, inputs = call_factory(model, *named.factory, seq=seq, global_batch=global_batch, dtype=dtype)
        return ModelSource(name=model, model=built, example_inputs=inputs, tokens_per_batch=count_tokens(inputs))
    make = Maker(device, seed, dtype)
    if named.config is not None:
        name, config, class_name = _read_config(named.config)
        built = _build(class_name, config, dtype, device, seed)
        return _with_inputs(name, built, _kind(class_name, config), seq, global_batch, make)
    assert named.entry is not None
    return _from_entry(named.entry, seq, global_batch, dtype, tiny or named.tiny, device, seed, make)


def _from_entry(
    entry: Entry,
    seq: int | None,
    batch: int | None,
    dtype: torch.dtype,
    tiny: bool,
    device: str,
    seed: int,
    make: Maker,
) -> ModelSource:
    family, row = entry.family, entry.row
    config = _transformers().AutoConfig.for_model(family.model_type, **(family.tiny if tiny else row.config))
    model = _build(family.class_, config, dtype, device, seed)
    seq = seq or (TINY_SEQ if tiny else row.seq) or None
    batch = batch or (TINY_BATCH if tiny else row.global_batch)
    note = f"tiny config of the same architecture ({_count(model):,} parameters)" if tiny else ""
    name = row.name + TINY if tiny else row.name
    return _with_inputs(name, model, family.inputs, seq, batch, make, note)


def _with_inputs(
    name: str, model: nn.Module, kind: InputKind, seq: int | None, batch: int | None, make: Maker, note: str = ""
) -> ModelSource:
    config: Any = model.config
    images = kind == "image-classification"
    seq = 1 if images else checked_sequence(config, seq)
    batch = batch or DEFAULT_BATCH
    try:
        inputs = example_inputs(kind, config, batch=batch, seq=seq, make=make)
    except AttributeError as error:
        hint = "give package.module:factory"
        raise UserError(f"model {name}: its config doesn't say what it is called with ({error}); {hint}") from None
    return ModelSource(name=name, model=model, example_inputs=inputs, tokens_per_batch=batch * seq, note=note)


def _build(class_name: str, config: Any, dtype: torch.dtype, device: str, seed: int) -> nn.Module:
    config.use_cache = False
    if _has_experts(config):
        config._experts_implementation = EXPERTS[device]
    model_class = getattr(_transformers(), class_name, None)
    if model_class is None:
        raise UserError(f"model class {class_name}: transformers has none of this name; give package.module:factory")
    if device != "meta":
        torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: nn.Module = model_class(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, 0) for name in ("num_local_experts", "n_routed_experts", "num_experts"))


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise UserError("this model needs transformers: pip install 'autopar[hf]'") from None


def _read_config(path: Path) -> tuple[str, Any, str]:
    """(name, config, class name) of a Hugging Face config file."""
    data = read_config(path)
    kind = data.pop("model_type")
    try:
        config = _transformers().AutoConfig.for_model(kind, **data)
    except Exception as error:
        raise UserError(f"model {path}: transformers refuses it ({_one_line(error)})") from None
    return path.resolve().parent.name, config, _class_name(path, kind, data)


def _class_name(path: Path, model_type: str, data: dict[str, Any]) -> str:
    """The class that trains: the first architecture named, if it has a loss, else one of its model type."""
    named = [str(a) for a in data.get("architectures") or ()]
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    mapped = [
        getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(model_type)
        for task in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION")
    ]
    for name in (*named, *mapped):
        if name and any(name.endswith(ending) for ending, _ in KINDS):
            return str(name)
    raise UserError(
        f"model {path}: no class with a loss known for {', '.join(named) or model_type}; give package.module:factory"
    )


def _kind(class_name: str, config: Any) -> InputKind:
    if hasattr(config, "num_mel_bins"):
        return "speech-seq2seq"
    return next(kind for ending, kind in KINDS if class_name.endswith(ending))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
