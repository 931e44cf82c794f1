"""The memory of a lowered program against the storages that are alive while its emitted module runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar import api, codegen
from autopar.cost_model.answer import with_memory
from autopar.cost_model.live import ROUND, ROUND_CPU, STATE, UPDATE, program_memory, save_memory, staging_bytes
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import local_shape, parse_layout
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import Options
from autopar.ir.plan import mesh_of
from autopar.ir.reshard import plan_reshard
from autopar.ir.timeline import StageMemory
from autopar.runtime.comm import Communicator
from autopar.runtime.held import Held
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import unwrap
from autopar.runtime.threads import run_threads
from autopar.verification import objective
from tests.cost_model.helpers import cluster
from tests.cost_model.test_replay import planned
from tests.models import tiny


def measured(captured: Any, plan: Any, model: torch.nn.Module, batch: dict[str, Any]) -> list[int]:
    """The peak of each rank over one forward and backward; parameters, buffers and inputs counted from the start."""
    source = api.emit_captured(captured, plan)

    def rank(rt: Communicator) -> int:
        module = ParallelModule(captured, plan, source, model, rt)
        live = Held()
        live.see((*map(unwrap, module.parameters()), *map(unwrap, module.buffers()), *batch.values()))
        with live:
            objective(module(**batch)).backward()  # type: ignore[no-untyped-call]
        return live.peak_bytes

    return run_threads(mesh_of(plan), rank, timeout_s=120)


def test_the_counter_counts() -> None:
    with Held() as live:
        x = torch.ones(1000)
        y = x.view(10, 100)
        assert live.now_bytes == 4032  # 4000 in units of 64; the view is the same storage
        del x
        assert live.now_bytes == 4032
        z = y + 1
        del y, z
    assert (live.now_bytes, live.peak_bytes) == (0, 8064)


def test_what_others_hold_is_left_out() -> None:
    given = torch.ones(1000)
    with Held() as live:
        live.leave_out([given])
        part = given[:500] + 0
        assert given.view(10, 100).sum() == 1000
        assert live.now_bytes == 2048
        live.see([given])
        assert live.now_bytes == 2048 + 4032
        live.leave_out([part])  # counted already
        assert live.now_bytes == 2048 + 4032
        del part
    assert (live.now_bytes, live.peak_bytes) == (4032, 2048 + 4032)


@pytest.mark.parametrize(
    ("name", "ranks", "pins"),
    [
        ("gpt2", 1, {}),
        ("gpt2", 2, {"tp": 2}),
        ("gpt2", 2, {"dp": 2, "zero": 3}),
        ("gpt2", 3, {"dp": 3}),
        ("llama", 4, {"dp": 2, "tp": 2}),
        ("gemma2", 2, {"tp": 2}),
    ],
)
def test_peak_is_what_is_alive(name: str, ranks: int, pins: dict[str, Any]) -> None:
    captured, plan = planned(name, ranks, pins)
    program = codegen.lower(captured, plan, mesh_of(plan))
    found = program_memory(captured, program, 0, rounding=ROUND_CPU, gpus=False)
    peaks = measured(captured, plan, *tiny(name))
    assert all(abs(found.peak_bytes - p) <= 0.04 * p for p in peaks), (found.peak_bytes, peaks)
    assert sum(size for _, size in found.contributors) == sum(found.kinds.values()) == found.peak_bytes


def test_contributors_and_rounding() -> None:
    captured, plan = planned("gpt2", 2, {"tp": 2})
    program = codegen.lower(captured, plan, mesh_of(plan))
    coarse, fine = (program_memory(captured, program, 8, rounding=r) for r in (ROUND, 1))
    assert coarse.peak_bytes > fine.peak_bytes
    owners = dict(fine.contributors)
    local = sum(p.bytes_per_device for p in plan.parameters.values())
    assert owners["parameters"] == local
    assert owners[STATE] == 2 * local  # two moments in fp32
    assert any(what.startswith("transformer.h.1.") for what in owners)
    more = program_memory(captured, program, 12, rounding=1)
    assert more.peak_bytes == fine.peak_bytes + local


def test_a_save_holds_the_whole_model_beside() -> None:
    captured, plan = planned("gpt2", 2, {"dp": 2, "zero": 3})
    program = codegen.lower(captured, plan, mesh_of(plan))
    found = save_memory(captured, program, 8, rounding=1)
    local = sum(p.bytes_per_device for p in plan.parameters.values())
    whole = sum(p.meta.nbytes for p in captured.parameters)
    kept = sum(b.meta.nbytes for b in captured.buffers)
    gathered = whole + sum(b.meta.nbytes for b in captured.buffers if b.persistent)
    assert found.peak_bytes == 3 * local + kept + gathered  # parameters and two moments, buffers
    assert found.at == "checkpoint save"
    shown = api.timeline_captured(captured, plan).memory
    assert [m.at for m in shown][1] == "checkpoint save"


@pytest.mark.parametrize(("together", "copies"), [(False, "one by one"), (True, "all at once")])
def test_the_update_is_the_peak_of_a_wide_model(together: bool, copies: str) -> None:
    """Hardly any activations: weights, gradients, two moments, and what AdamW makes beside them."""
    wide = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 128, bias=False))
    batch = (torch.randn(1, 256),)
    captured = api.capture(wide, batch)
    plan = api.plan_captured(captured, cluster((1, 1.0, 100.0)), options=Options())
    program = codegen.lower(captured, plan, mesh_of(plan))
    found = program_memory(captured, program, 8, rounding=1, gpus=together)
    first, both = 256 * 256 * 4, (256 * 256 + 256 * 128) * 4
    assert found.at == "optimizer"
    assert found.kinds[UPDATE] == (both if together else 2 * first), copies
    assert (found.kinds["parameters"], found.kinds["gradients"], found.kinds["optimizer"]) == (both, both, 2 * both)
    held = AdamWBytes(wide, together).peak
    assert found.kinds[UPDATE] == held


class AdamWBytes:
    """What torch's AdamW holds at most beside parameters, gradients and state."""

    def __init__(self, model: torch.nn.Module, together: bool) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=together)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with Held() as live:
            live.see(x for p in model.parameters() for x in (p.data, p.grad))
            live.see(x for state in optimizer.state.values() for x in state.values())
            before = live.now_bytes
            optimizer.step()
        self.peak = live.peak_bytes - before


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter", "all_to_all"])
def test_copies_for_collectives_are_those_that_are_made(what: str, dim: int) -> None:
    """The runtime's own cutting and joining, two ranks; an all-to-all from `dim` to the other."""
    on = Mesh(axes=(Axis(name="x", size=2),))
    part, whole, other = (parse_layout(f"x:{place}", on) for place in (f"S({dim})", "R", f"S({1 - dim})"))
    before, after = {
        "all_gather": (part, whole), "reduce_scatter": (parse_layout("x:P", on), part), "all_to_all": (part, other)
    }[what]  # fmt: skip
    (step,) = plan_reshard(before, after) or ()
    assert step.collective.value == what
    meta = TensorMeta((64, 96), "float32")
    sizes = [TensorMeta(local_shape(meta.shape, layout, on), meta.dtype).nbytes for layout in (before, after)]

    x = torch.ones(local_shape(meta.shape, before, on))
    with Held() as live:
        live.see([x])
        Plain(on, 0, torch.device("cpu")).convert(x, before, after, meta.shape)
    assert live.peak_bytes == sum(sizes) + staging_bytes(step, 2, *sizes, whole_sums=True)


class Plain(Communicator):
    """Nobody to talk to: new tensors as the process group's of CPUs."""

    def _reduce(self, x: torch.Tensor, axis: str, largest: bool) -> torch.Tensor:
        return x.clone()

    def _gather(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return torch.zeros(self.size(axis), *x.shape)

    def _scatter(self, x: torch.Tensor, axis: str, own: bool) -> torch.Tensor:
        return (x if own else x.clone())[0].clone()

    def _exchange(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return torch.zeros_like(x)


def test_the_plans_memory_is_the_programs() -> None:
    captured, plan = planned("gpt2", 2, {"tp": 2})
    program = codegen.lower(captured, plan, mesh_of(plan))
    found = program_memory(captured, program, 8, rounding=ROUND_CPU, gpus=False)
    p = plan.predicted
    assert (p.peak_memory_bytes, p.memory_at, p.breakdown_bytes) == (found.peak_bytes, found.at, dict(found.kinds))
    assert plan.stages[0].peak_memory_bytes == found.peak_bytes
    assert list(p.memory_largest.items()) == list(found.contributors[:12])
    assert plan.solver.memory_bytes > 0
    assert api.timeline_captured(captured, plan).memory[0] == found
    assert f"peak at {found.at}" in str(plan)
    assert not [n for n in plan.notes if n.kind == "memory"]


def test_a_program_that_holds_more_than_allowed_is_noted() -> None:
    _, plan = planned("gpt2", 1, {})
    memory = StageMemory(stage=0, peak_bytes=2**30, at="optimizer", contributors=(("parameters", 2**30),))
    (note,) = (n for n in with_memory(plan, memory, 2**29).notes if n.kind == "memory")
    assert note.where == "optimizer"
    assert "1024 MiB at its peak, more than the 512 MiB allowed" in note.message
    assert not [n for n in with_memory(plan, memory, 2**30).notes if n.kind == "memory"]
