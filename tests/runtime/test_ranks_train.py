"""Real processes: DTensor parameters, their gradients and optimizer state; the same training as one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from autopar.codegen import emit, lower
from autopar.ir.options import Options
from autopar.runtime.groups import communicator
from autopar.runtime.launch import launch
from autopar.runtime.module import ParallelModule
from autopar.sharding import build_table
from autopar.tracer import capture
from tests.codegen.hand import HID, Chain, chain, mesh, named_plan
from tests.codegen.table_plan import random_plan
from tests.models import tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(100)]


def _steps(
    module: torch.nn.Module, batch: dict[str, Any], fused: bool
) -> tuple[list[float], list[float], torch.optim.Optimizer]:
    """Losses and gradient norms of three AdamW steps with clipping."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        out = module(**batch)
        loss = out if isinstance(out, Tensor) else out[0]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, optimizer


def _same(a: Any, b: Any, tolerance: float) -> None:
    for x, y in zip(a, b, strict=True):
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        assert (x - y).abs().max() <= tolerance * max(1.0, float(y.abs().max())), (x, y)


def trains(kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        torch.manual_seed(0)
        plain, x = Chain(), torch.randn(HID, dtype=torch.float64)
        captured = chain()
        plan = named_plan(captured, kind, 2)
        rt = communicator(mesh(**{n: 2 for n in plan.mesh.axes}))
        module = ParallelModule(captured, plan, emit(lower(captured, plan)), plain, rt)
        first = module.first
        assert isinstance(first, DTensor) and isinstance(module.layers[0].linear.weight, DTensor)
        if kind == "zero3":
            assert first.placements == (Shard(0),) and first.to_local().shape == (6, 12)
        losses, norms, optimizer = _steps(module, {"x": x}, fused=kind == "tp")
        assert isinstance(first.grad, DTensor) and first.grad.placements == first.placements
        assert isinstance(optimizer.state[first]["exp_avg"], DTensor)
        wanted_losses, wanted_norms, _ = _steps(plain, {"x": x}, fused=False)
        _same(losses, wanted_losses, 1e-10)
        _same(norms, wanted_norms, 1e-10)
        full = module.full_state_dict()
        assert list(full) == list(plain.state_dict())
        _same(full.values(), plain.state_dict().values(), 1e-10)
        _same([module.state_dict()["first"].full_tensor()], [plain.first.detach()], 1e-10)
        module.load_full_state_dict({k: torch.zeros_like(v) for k, v in full.items()})
        assert not module.first.full_tensor().any()


def outputs_and_inputs() -> None:
    model, batch = tiny("mlp")
    captured = capture(model, (), batch, options=Options(), model_name="mlp")
    on = mesh(dp=2)
    table = build_table(captured, on, Options())
    plan = next(p for s in range(20) if (p := random_plan(captured, on, table, s)).outputs["top"]["1"] == "dp:S(0)")
    rt = communicator(on)
    module = ParallelModule(captured, plan, emit(lower(captured, plan)), copy.deepcopy(model), rt)
    loss, logits = module(**batch)
    wanted_loss, wanted_logits = model(**batch)
    assert not isinstance(loss, DTensor)
    _same(
        [loss.detach(), logits.full_tensor() if isinstance(logits, DTensor) else logits.detach()],
        [wanted_loss.detach(), wanted_logits.detach()],
        1e-5,
    )
    half = batch["x"].chunk(2)[rt.rank]
    laid = DTensor.from_local(half, rt.device_mesh, [Shard(0)])
    again, _ = module(x=laid, y=batch["y"])
    _same([again.detach()], [loss.detach()], 1e-6)


def everything() -> str:
    trains(("dp", "zero3", "tp"))
    outputs_and_inputs()
    return "done"


def test_two_processes_train_as_one() -> None:
    assert launch(everything, 2, timeout_s=90) == "done"
