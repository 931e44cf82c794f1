"""Recomputation: where memory binds, forward tensors are made again in the backward; the numbers stay one device's."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import nn

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.live import program_memory
from autopar.errors import InfeasibleError
from autopar.ir.options import Options
from autopar.ir.plan import AGAIN
from tests.models import tiny


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        wide = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.3, self.training)
        return x + self.down(wide)


class Dropping(nn.Module):
    """Dropout on what is four times as wide as the rest: the first thing that is worth making again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(12) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@lru_cache(maxsize=2)
def captured(name: str):
    options = Options(precision="fp64")
    if name == "dropping":
        torch.manual_seed(0)
        model, batch = Dropping().double(), {"x": torch.randn(12, 6, 12, dtype=torch.float64)}
    else:
        model, batch = tiny(name)
        model = model.double()
        batch = {k: v.double() if hasattr(v, "dtype") and v.is_floating_point() else v for k, v in batch.items()}
    return model, batch, api.capture(model, batch, options=options, model_name=name)


def least(name: str, ranks: int, pins: dict):
    """The plan that keeps all, and the one that needs least."""
    graph = captured(name)[2]
    options = Options(precision="fp64", pins=pins, allow=())
    cluster = load_cluster(f"rtx3090:{ranks}")
    kept = api.plan_captured(graph, cluster, options=options)
    return kept, api.plan_captured(
        graph, cluster, options=replace(options, allow=("recompute",), objective="memory", memory_slack=None)
    )


def live_bytes(name: str, plan) -> int:
    graph = captured(name)[2]
    return program_memory(graph, api.codegen.lower(graph, plan), 8).peak_bytes


SLOW = pytest.mark.slow
CASES = [
    ("gpt2", 2, {"tp": 2}),
    ("llama", 3, {"dp": 3, "zero": 3}),
    ("convnext", 4, {"dp": 2, "tp": 2}),
    ("dropping", 3, {"dp": 3, "zero": 0}),
    ("dropping", 2, {"tp": 2}),
    pytest.param("t5", 2, {"tp": 2}, marks=SLOW),
    pytest.param("mixtral", 3, {"dp": 3, "zero": 3}, marks=SLOW),
    pytest.param("deepseek_v3", 4, {"dp": 2, "tp": 2}, marks=SLOW),
    pytest.param("mamba", 4, {"dp": 2, "tp": 2}, marks=SLOW),
    pytest.param("swin", 4, {"dp": 2, "tp": 2}, marks=SLOW),
]


@pytest.mark.parametrize(("name", "ranks", "pins"), CASES)
def test_the_same_numbers_in_less_memory(name, ranks, pins):
    model, batch, graph = captured(name)
    kept, plan = least(name, ranks, pins)
    assert plan.stages[0].recomputed_count > 0 and plan.predicted.breakdown_us["recompute"] > 0
    report = api.verify(model, batch, ranks=ranks, plan=plan, captured=graph)
    assert report.ok, str(report)
    assert live_bytes(name, plan) < live_bytes(name, kept)


def test_random_ops_draw_the_same_again():
    model, batch, graph = captured("dropping")
    _, plan = least("dropping", 3, {"dp": 3, "zero": 0})
    again = [key for kept in plan.later.values() for key, how in kept.items() if how == AGAIN]
    assert any("dropout" in key for key in again), again
    source = api.emit_captured(graph, plan)
    head, tail = source.text.split("_backward(", 1)
    assert "dropout.default/forward#0" in tail.split("\ndef ", 1)[0]
    text = head + "_backward(" + tail.replace("dropout.default/forward#0", "dropout.default/elsewhere#0", 1)
    assert not api.verify_source(graph, plan, replace(source, text=text), model, batch).ok


def test_it_is_there_where_memory_binds_and_only_there():
    _, _, graph = captured("gpt2")
    cluster = load_cluster("rtx3090:2")
    options = Options(precision="fp64", pins={"tp": 2})
    free = api.plan_captured(graph, cluster, options=options)
    assert not free.later and free.predicted.step_time_us == least("gpt2", 2, {"tp": 2})[0].predicted.step_time_us
    needed = api.plan_captured(
        graph, cluster, options=replace(options, objective="memory", memory_slack=None, allow=())
    )
    limit = int(0.9 * needed.solver.memory_bytes)
    with pytest.raises(InfeasibleError):
        api.plan_captured(graph, cluster, options=replace(options, allow=(), memory_limit=limit))
    plan = api.plan_captured(graph, cluster, options=replace(options, memory_limit=limit))
    assert plan.later and plan.solver.memory_bytes <= limit
    assert plan.predicted.step_time_us > free.predicted.step_time_us
    assert plan.explain("transformer.h.0.mlp.c_fc.weight").chosen


def test_a_plan_that_recomputes_is_saved_and_loaded(tmp_path):
    _, plan = least("dropping", 2, {"tp": 2})
    plan.save(tmp_path / "plan.json")
    assert api.Plan.load(tmp_path / "plan.json").later == plan.later
    assert str(plan)
