"""The memory of a lowered program against the storages that are alive while its emitted module runs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import unwrap
from autopar.runtime.threads import run_threads
from autopar.verification import objective
from tests.cost_model.helpers import cluster
from tests.cost_model.test_replay import planned
from tests.models import tiny


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage from when it is first seen until it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def see(self, tensor: Any) -> None:
        """Count a tensor's storage, once."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known and storage.nbytes():
            size = -(-storage.nbytes() // ROUND_CPU) * ROUND_CPU
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self.see(tensor)
        return out


def measured(captured: Any, plan: Any, model: torch.nn.Module, batch: dict[str, Any]) -> list[int]:
    """The peak of each rank over one forward and backward; parameters, buffers and inputs counted from the start."""
    source = api.emit_captured(captured, plan)

    def rank(rt: Communicator) -> int:
        module = ParallelModule(captured, plan, source, model, rt)
        live = LiveBytes()
        for tensor in (*map(unwrap, module.parameters()), *map(unwrap, module.buffers()), *batch.values()):
            live.see(tensor)
        with live:
            objective(module(**batch)).backward()  # type: ignore[no-untyped-call]
        return live.peak

    return run_threads(mesh_of(plan), rank, timeout_s=120)


def test_the_counter_counts() -> None:
    with LiveBytes() as live:
        x = torch.ones(1000)
        y = x.view(10, 100)
        assert live.now == 4032  # 4000 in units of 64; the view is the same storage
        del x
        assert live.now == 4032
        z = y + 1
        del y, z
    assert (live.now, live.peak) == (0, 8064)


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
    found = program_memory(captured, program, 0, rounding=ROUND_CPU, together=False)
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
    found = program_memory(captured, program, 8, rounding=1, together=together)
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
        with LiveBytes() as live:
            for parameter in model.parameters():
                live.see(parameter.data)
                live.see(parameter.grad)
            for state in optimizer.state.values():
                for tensor in state.values():
                    live.see(tensor)
            before = live.now
            optimizer.step()
        self.peak = live.peak - before


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
    with LiveBytes() as live:
        live.see(x)
        Plain(on, 0, torch.device("cpu")).convert(x, before, after, meta.shape)
    assert live.peak == sum(sizes) + staging_bytes(step, 2, *sizes)


class Plain(Communicator):
    """Nobody to talk to: one new tensor for each result, as process groups have it."""

    def _reduce(self, x: torch.Tensor, axis: str, largest: bool) -> torch.Tensor:
        return x.clone()

    def _gather(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return torch.zeros(self.size(axis), *x.shape)

    def _scatter(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return torch.zeros(x.shape[1:])

    def _exchange(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return torch.zeros_like(x)


def test_the_plans_memory_is_the_programs() -> None:
    captured, plan = planned("gpt2", 2, {"tp": 2})
    program = codegen.lower(captured, plan, mesh_of(plan))
    found = program_memory(captured, program, 8, rounding=ROUND_CPU, together=False)
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
