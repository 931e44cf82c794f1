"""Real models under random plans of the real table: losses, gradients and three AdamW steps equal eager's (fp64)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar import api
from autopar.codegen import check_program, emit, lower
from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.program import Source
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from autopar.sharding import build_table
from autopar.tracer import capture
from tests.codegen.hand import mesh
from tests.codegen.table_plan import random_plan
from tests.models import tiny

WIDE = Options(precision="fp64")


@lru_cache
def case(name: str) -> tuple[nn.Module, dict[str, Any], CapturedGraph]:
    model, batch = tiny(name)
    model = model.double()
    batch = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
    captured = capture(model, (), batch, options=WIDE, model_name=name)
    return model, batch, captured


def built(captured: CapturedGraph, axes: dict[str, int], seed: int) -> tuple[Plan, Source]:
    on = mesh(**axes)
    plan = random_plan(captured, on, build_table(captured, on, WIDE), seed)
    program = lower(captured, plan)
    check_program(program, plan)
    return plan, emit(program)


CASES = [
    ("mlp", {"dp": 1}, 3), ("mlp", {"dp": 2}, 3), ("mlp", {"tp": 3}, 3), ("mlp", {"dp": 2, "tp": 2}, 3),
    ("mlp", {"free": 3}, 6),
    ("tower", {"free": 2}, 3), ("llama", {"dp": 1}, 1), ("llama", {"dp": 2}, 1), ("llama", {"tp": 3}, 1),
    ("bart", {"free": 2}, 1), ("gpt2", {"tp": 2}, 1), ("gpt2", {"dp": 2, "tp": 2}, 1), ("convnet", {"dp": 3}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "axes", "seeds"), CASES, ids=[f"{n}-{a}" for n, a, _ in CASES])
def test_same_training(name: str, axes: dict[str, int], seeds: int) -> None:
    model, batch, captured = case(name)
    for seed in range(seeds):
        plan, source = built(captured, axes, seed)
        report = api.verify_source(captured, plan, source, model, batch, timeout_s=120)
        assert report.ok, f"seed {seed}: {report}"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(12, 24), nn.Linear(24, 12), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Dropping(nn.Module):
    """Equal blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


def test_dropout_draws_the_same_under_every_plan() -> None:
    """The same masks for one rank and for many; other masks for other instances, steps and seeds."""
    torch.manual_seed(0)
    model, x = Dropping().double(), torch.randn(12, 12, dtype=torch.float64)
    captured = capture(model, (x,), {}, options=WIDE)
    assert captured.blocks

    def losses(axes: dict[str, int], seed: int) -> list[float]:
        plan, source = built(captured, axes, seed)
        assert source.text.count("    rt.instance = Layer_") == 1 and '    rt.instance = ""\n    return' in source.text

        def run(rt: Communicator) -> list[float]:
            module = ParallelModule(captured, plan, source, model, rt)
            return [module(x).item() for _ in range(2)]

        on = mesh(**axes)
        ranks = [run(Alone(on, torch.device("cpu")))] if on.size == 1 else run_threads(on, run, timeout_s=60)
        assert all(abs(a - b) < 1e-12 for r in ranks for a, b in zip(r, ranks[0], strict=True))
        return ranks[0]

    alone = losses({"dp": 1}, 0)
    assert alone[0] != alone[1]
    for axes in ({"dp": 2}, {"tp": 3}, {"free": 2}):
        assert losses(axes, 1) == pytest.approx(alone, rel=1e-12)
