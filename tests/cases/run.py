"""The field cases' exact comparison: a small model under forced layouts beside one device.

`same` is EQ of the cases: loss, every output that takes part, all gradients, and parameters and AdamW state after three
steps, in float64 to 1e-10, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.ir.options import Options
from autopar.verification import VerifyReport

RANKS = (1, 2, 3, 4)


def same(model: nn.Module, inputs: Any, ranks: int, *, pins: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """The plan followed, after asserting EQ on in-process ranks. `pins` forces axes and layouts."""
    plan, report = compared(model, inputs, ranks, pins=pins, **options)
    assert report.ok, str(report)
    return plan


def compared(
    model: nn.Module, inputs: Any, ranks: int, *, pins: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Any, VerifyReport]:
    """(plan, report), in float64."""
    model, inputs = model.double(), wide(inputs)
    asked = Options(pins=dict(pins or {}), precision="fp64", **options)
    graph = api.capture(model, inputs, options=asked)
    plan = api.plan_captured(graph, load_cluster(f"rtx3090:{ranks}"), options=asked)
    return plan, api.verify(model, inputs, options=asked, plan=plan, captured=graph)


def wide(tree: Any) -> Any:
    """Floating tensors as float64."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return {k: wide(v) for k, v in tree.items()}
    return tuple(wide(v) for v in tree) if isinstance(tree, tuple) else tree


def unequal(*shape: int, seed: int = 0) -> Tensor:
    """Random values whose scale grows along the first dim, so that no two shards have equal statistics."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    return x * (1 + torch.arange(shape[0])).view(-1, *(1,) * (len(shape) - 1)) if shape else x
