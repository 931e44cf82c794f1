"""The memory of a lowered program against the storages that are alive while its emitted module runs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar import api, codegen
from autopar.cost_model.live import ROUND, ROUND_CPU, STATE, program_memory, save_memory
from autopar.ir.plan import mesh_of
from autopar.runtime.comm import Communicator
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import unwrap
from autopar.runtime.threads import run_threads
from autopar.verification import objective
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


def measured(captured: Any, plan: Any, name: str) -> list[int]:
    """The peak of each rank over one forward and backward; parameters, buffers and inputs counted from the start."""
    model, batch = tiny(name)
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
    found = program_memory(captured, program, 8, rounding=ROUND_CPU)
    state = dict(found.contributors)[STATE]
    peaks = measured(captured, plan, name)
    assert all(abs(found.peak_bytes - state - p) <= 0.04 * p for p in peaks), (found.peak_bytes - state, peaks)
    assert sum(size for _, size in found.contributors) == found.peak_bytes


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
