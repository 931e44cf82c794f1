"""Every tiny model: the captured graph, run whole, gives the model's own loss, gradients and buffers; folded or not."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.graph import InputKind, OutputKind
from autopar.ir.options import Options
from autopar.tracer import capture
from tests.models import NAMES, tiny
from tests.tracer.proof import check_equal, doubled

FOLDED = {
    "tower": 1, "gpt2": 1, "llama": 1, "qwen3": 1, "gemma2": 1, "opt": 1, "bert": 1, "roberta": 1, "albert": 1,
    "bart": 2, "whisper": 2, "vit": 1, "mixtral": 1, "deepseek_v3": 1, "mamba": 1, "convnext": 2,
}  # fmt: skip
ALWAYS_FLOAT32 = ("llama", "qwen3", "gemma2", "t5", "mixtral", "deepseek_v3", "mamba", "gpt2", "opt")
"""These cast to float32 inside, whatever their parameters are."""
UNFOLDED_TOO = ("tower", "gpt2", "bart", "convnext")


@pytest.mark.parametrize("name", NAMES)
def test_equals_eager(name: str) -> None:
    model, batch = tiny(name)
    captured = check_equal(model.double(), doubled(batch), tolerance=2e-6 if name in ALWAYS_FLOAT32 else 1e-10)
    if name in FOLDED:
        assert len(captured.blocks) == FOLDED[name]
    assert len({n.key for n in captured.top.nodes}) == len(captured.top.nodes)


@pytest.mark.parametrize("name", UNFOLDED_TOO)
def test_unfolded_equals_eager(name: str) -> None:
    model, batch = tiny(name)
    tolerance = 2e-6 if name in ALWAYS_FLOAT32 else 1e-10
    captured = check_equal(model.double(), doubled(batch), tolerance=tolerance, fold=False)
    assert not captured.blocks


def test_model_is_unchanged_and_capture_is_stable() -> None:
    model, batch = tiny("gru")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    attributes = {name: dict(m.__dict__) for name, m in model.named_modules()}
    first = capture(model, (), batch, options=Options())
    second = capture(model, (), batch, options=Options())
    assert first.hash == second.hash
    assert model.training and "forward" not in model.__dict__
    assert all(p is parameters[k] for k, p in model.named_parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(
        {k: id(v) for k, v in m.__dict__.items()} == {k: id(v) for k, v in attributes[n].items()}
        for n, m in model.named_modules()
    )


def test_meta_parameters_give_the_same_graph() -> None:
    model, batch = tiny("llama")
    real = capture(model, (), batch, options=Options())
    meta = capture(
        model.to("meta"),
        (),
        {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch.items()},
        options=Options(),
    )
    assert meta.hash == real.hash


def test_sources_paths_and_phases() -> None:
    model, batch = tiny("tower")
    captured = capture(model, (), batch, options=Options(fold_blocks=False))
    head = [n for n in captured.top.nodes if n.module_path == "head"]
    assert {n.phase.value for n in head} == {"forward", "backward"}
    assert all(n.source.startswith("tests/models.py:") for n in head)
    assert any(n.module_path == "layers.2.fc1" and n.op == "aten.addmm.default" for n in captured.top.nodes)


def test_bf16_casts_parameters_and_keeps_gradients_in_fp32() -> None:
    model, batch = tiny("llama")
    captured = capture(model, (), batch, options=Options(precision="bf16"))
    assert all(p.meta.dtype == "float32" for p in captured.parameters)
    for graph in captured.graphs:
        values = graph.values()
        of_parameter = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
        assert any(n.op == "aten._to_copy.default" and set(n.refs) & of_parameter for n in graph.nodes)
        for o in graph.outputs:
            if o.kind is OutputKind.GRADIENT and o.target in of_parameter and o.value is not None:
                assert values[o.value].meta.dtype == "float32"


def test_fp64_widens_everything() -> None:
    model, batch = tiny("convnet")
    captured = capture(model, (), batch, options=Options(precision="fp64"))
    metas = [v.meta.dtype for v in captured.top.values().values()]
    assert "float64" in metas and "float32" not in metas
    assert captured.signature.flatten((), batch)[0].dtype is torch.float64
