"""The field cases' exact comparison: a small model under forced layouts beside one device.

`same` is EQ of the cases: loss, every output that takes part, all gradients, and parameters and AdamW state after three
steps, on every rank; in float64 to 1e-10, or in float32 to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options
from autopar.ir.plan import Plan, mesh_of
from autopar.runtime.comm import Communicator
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from autopar.verification import VerifyReport

RANKS = (1, 2, 3, 4)
PRECISIONS: tuple[Literal["fp64", "fp32"], ...] = ("fp64", "fp32")
T = TypeVar("T")


def strategies(ranks: int) -> dict[str, dict[str, int]]:
    """Every strategy that the product names, as pins."""
    found = {
        "dp": {"dp": ranks, "zero": 0}, "zero3": {"dp": ranks, "zero": 3}, "tp": {"tp": ranks},
        "cp": {"dp": 1, "cp": ranks, "tp": 1},
    }  # fmt: skip
    for a in range(2, ranks):
        if ranks % a == 0:
            b = ranks // a
            found |= {f"dp{a}tp{b}": {"dp": a, "tp": b}, f"dp{a}cp{b}": {"dp": a, "cp": b, "tp": 1}}
    return found


def same(model: nn.Module, inputs: Any, ranks: int, *, pins: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """The plan followed, after asserting EQ on in-process ranks. `pins` forces axes and layouts."""
    plan, report = compared(model, inputs, ranks, pins=pins, **options)
    assert report.ok, str(report)
    return plan


def compared(
    model: nn.Module, inputs: Any, ranks: int, *, pins: Mapping[str, Any] | None = None,
    graph: CapturedGraph | None = None, precision: Literal["fp64", "fp32"] = "fp64", **options: Any,
) -> tuple[Plan, VerifyReport]:  # fmt: skip
    """(plan, report), in float64 unless told otherwise. `graph`: the model's, captured before with `wide` inputs."""
    model, inputs = to_precision(model, precision), wide(inputs, precision)
    asked = Options(pins=dict(pins or {}), precision=precision, **options)
    graph = graph or api.capture(model, inputs, options=asked)
    plan = api.plan_captured(graph, load_cluster(f"rtx3090:{ranks}"), options=asked)
    return plan, api.verify(model, inputs, options=asked, plan=plan, captured=graph)


def same_everywhere(
    model: nn.Module, inputs: Any, ranks: tuple[int, ...] = RANKS, *, precisions: tuple[Any, ...] = PRECISIONS,
    only: Callable[[str], bool] = lambda _: True,
) -> None:  # fmt: skip
    """EQ under every named strategy, from one capture for each precision."""
    for precision in precisions:
        graph = captured(model, inputs, precision)
        for n in ranks:
            for name, pins in strategies(n).items():
                if only(name):
                    _, report = compared(model, inputs, n, pins=pins, graph=graph, precision=precision)
                    assert report.ok, f"{name} on {n} ranks in {precision}: {report}"


def captured(model: nn.Module, inputs: Any, precision: Literal["fp64", "fp32", "bf16"] = "fp64") -> CapturedGraph:
    """The model's graph, for `compared` and `planned`."""
    given = wide(inputs, precision)
    return api.capture(to_precision(model, precision), given, options=Options(precision=precision))


def planned(graph: CapturedGraph, ranks: int, pins: Mapping[str, Any], precision: str = "fp64") -> Plan:
    """The plan under these pins."""
    options = Options(pins=dict(pins), precision=precision)  # type: ignore[arg-type]
    return api.plan_captured(graph, load_cluster(f"rtx3090:{ranks}"), options=options)


def on_ranks(
    graph: CapturedGraph, plan: Plan, model: nn.Module, work: Callable[[ParallelModule], T], *, source: Any = None
) -> list[T]:
    """`work(module)` on in-process ranks; their results in rank order. `source`: emitted text other than the plan's."""
    made = source or api.emit_captured(graph, plan)

    def rank(rt: Communicator) -> T:
        return work(ParallelModule(graph, plan, made, model, rt))

    return run_threads(mesh_of(plan), rank)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name, zeros where there is none; collective on a compiled module."""
    if not isinstance(module, ParallelModule):
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    kept = {n: p.detach().clone() for n, p in module.named_parameters()}
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        found = module.full_state_dict()
        for n, p in module.named_parameters():
            p.copy_(kept[n])
    return {n: found[n] for n in kept}


def agree(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    """Assert that tensors agree relative to the largest entry of all wanted."""
    assert set(found) == set(wanted)
    scale = max(float(w.abs().max()) for w in wanted.values() if w.numel())
    for name, w in wanted.items():
        if w.numel():
            error = float((found[name] - w).abs().max()) / scale
            assert error <= tolerance, f"{name} differs by {error:.1e}"


def to_precision(model: nn.Module, precision: str) -> nn.Module:
    """The model in the dtype that its parameters are stored in."""
    return model.double() if precision == "fp64" else model.float()


def wide(tree: Any, precision: str = "fp64") -> Any:
    """Floating tensors as float64, or as float32 for the other precisions."""
    if isinstance(tree, Tensor):
        kind = torch.float64 if precision == "fp64" else torch.float32
        return tree.to(kind) if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return {k: wide(v, precision) for k, v in tree.items()}
    return tuple(wide(v, precision) for v in tree) if isinstance(tree, tuple) else tree


def unequal(*shape: int, seed: int = 0) -> Tensor:
    """Random values whose scale grows along the first dim, so that no two shards have equal statistics."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    return x * (1 + torch.arange(shape[0])).view(-1, *(1,) * (len(shape) - 1)) if shape else x
