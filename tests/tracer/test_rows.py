"""Equal layers in a row are traced as one op and put back by the converter: the graph is as if traced one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.tracer import capture as run_capture
from autopar.tracer.joint import trace
from tests.tracer.proof import check_equal


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor, scale: Tensor, *, gate: Tensor | None = None) -> Tensor:
        hidden = self.up(self.norm(x)).tanh() * scale
        return x + self.down(hidden if gate is None else hidden * gate)


class Deep(nn.Module):
    """`between(i, x, kept)` runs after each layer; what it keeps goes into the loss."""

    def __init__(self, count: int, between: Callable[[int, Tensor, list[Tensor]], Tensor], gate: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.gate = nn.Parameter(torch.randn(10)) if gate else None
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = torch.linspace(0.5, 1.5, 10)
        gate = None if self.gate is None else self.gate * 2
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = self.between(i, layer(x, scale, gate=gate), kept)
        return sum((k.pow(2).mean() for k in kept), x.pow(2).mean())


def keep(at: set[int]) -> Callable[[int, Tensor, list[Tensor]], Tensor]:
    def between(i: int, x: Tensor, kept: list[Tensor]) -> Tensor:
        if i in at:
            kept.append(x)
        return x

    return between


CASES = {
    "one row": (keep(set()), False, 1),
    "a result used again": (keep({2}), False, 2),
    "the last result used twice": (keep({5}), False, 1),
    "an op between": (lambda i, x, kept: x * 2 if i == 1 else x, False, 2),
    "a cut gradient, whose next layer is no block": (lambda i, x, kept: x.detach() if i == 3 else x, False, 2),
    "an input that needs a gradient": (keep(set()), True, 6),
    "all kept": (keep(set(range(6))), False, 6),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_is_traced_as_its_first_layer(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    between, gate, ops = CASES[case]
    torch.manual_seed(3)
    traced: list[int] = []

    def counting(*args: object) -> object:
        joint = trace(*args)
        traced.append(sum(str(n.target) == "autopar.block.default" for n in joint.module.graph.nodes))
        return joint

    monkeypatch.setattr(sys.modules[run_capture.__module__], "trace", counting)
    captured = check_equal(Deep(6, between, gate).double(), {"x": torch.randn(5, 6, dtype=torch.float64)})
    calls = [n.block.instance for n in captured.top.nodes if n.block and not n.op.endswith("backward")]
    assert calls == [f"layers.{i}" for i in range(6) if i != 4 or not case.startswith("a cut")]
    assert traced == [ops]


def test_every_layer_of_a_deep_model_gets_its_own_gradient() -> None:
    """`check_equal` sees a row put back in the wrong order, or an instance left out."""
    captured = check_equal(Deep(40, keep({20})).double(), {"x": torch.randn(3, 6, dtype=torch.float64)})
    backward = [n.block.instance for n in captured.top.nodes if n.block and n.op.endswith("backward")]
    assert backward == [f"layers.{i}" for i in reversed(range(40))]
