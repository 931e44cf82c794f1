"""MEM rows of the field cases: what a plan says that its ranks hold is what they hold, counted by the life of storages.

Ranks are threads, each of which counts its own.
"""

from __future__ import annotations

import gc
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import api, launch, staging
from autopar.errors import InfeasibleError
from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options
from autopar.ir.plan import Plan, all_ranks, is_staged
from autopar.runtime.comm import Communicator
from autopar.runtime.held import UNIT_BYTES, Held
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import unwrap
from autopar.runtime.threads import run_threads
from tests.cases.lm import TinyLM, text
from tests.cost_model.helpers import cluster

WITHIN = 0.03


def lm(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return TinyLM(width=48, layers=4, heads=4, **more)


def planned(
    model: nn.Module, batch: dict[str, Tensor], pins: dict[str, Any], **more: Any
) -> tuple[CapturedGraph, Plan]:  # fmt: skip
    options = Options(pins=pins, **more)
    graph = api.capture(model, batch, options=options)
    devices = math.prod(pins.get(axis, 1) for axis in ("pp", "dp", "tp"))
    return graph, api.plan_captured(graph, cluster((devices, 1.0, 100.0)), options=options)


def on_ranks(model: nn.Module, graph: CapturedGraph, plan: Plan, work: Any) -> list[Any]:
    made: Any = staging.staged(graph, plan) if is_staged(plan) else api.emit_captured(graph, plan)

    def rank(rt: Communicator) -> Any:
        return work(made.module(model, rt) if is_staged(plan) else ParallelModule(graph, plan, made, model, rt))

    return run_threads(all_ranks(plan), rank)


def peaks(model: nn.Module, batch: dict[str, Tensor], graph: CapturedGraph, plan: Plan) -> list[int]:
    """Of each rank over two AdamW steps, the first with the making of the optimizer's state."""

    def work(module: Any) -> int:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        held = Held()
        held.see((*map(unwrap, module.parameters()), *module.buffers(), *batch.values()))
        with held:
            for _ in range(2):
                loss = module(**batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
        return held.peak_bytes

    return on_ranks(model, graph, plan, work)


SETTINGS: dict[str, dict[str, Any]] = {
    "data parallel": {"dp": 2, "zero": 0}, "ZeRO-3": {"dp": 2, "zero": 3}, "tensor parallel": {"tp": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_mem01_a_step_holds_what_its_plan_says(name: str) -> None:
    """Gathers, first gradients and the optimizer's first step counted; in float32 and with master weights."""
    for precision in ("fp32", "bf16"):
        graph, plan = planned(lm(), text(), SETTINGS[name], precision=precision)
        for peak in peaks(lm(), text(), graph, plan):
            assert peak == pytest.approx(plan.predicted.peak_memory_bytes, rel=WITHIN), precision


def test_mem02_activations_grow_as_predicted() -> None:
    """With rows and with their length, all kept or made again: the value, and the slope in rows."""
    for seq, allow in ((16, ()), (64, ()), (64, ("recompute",))):
        found = []
        for rows in (4, 8):
            batch, model = text(rows=rows, seq=seq), lm(seq=seq)
            limit = {"objective": "memory", "memory_slack": None} if allow else {}
            graph, plan = planned(model, batch, {"dp": 2, "zero": 3}, allow=allow, **limit)
            (peak, *_), said = peaks(model, batch, graph, plan), plan.predicted.peak_memory_bytes
            assert peak == pytest.approx(said, rel=WITHIN), (seq, allow, rows)
            found.append((peak, said))
        (few, few_said), (many, many_said) = found
        assert many - few == pytest.approx(many_said - few_said, rel=0.1), (seq, allow)


def test_mem04_uneven_stages_each_say_their_own() -> None:
    """Blocks 1 2 2 3, the embedding first and the head last: parameters of every stage exactly."""
    torch.manual_seed(0)
    model, batch = TinyLM(layers=8), text()
    pins = {"pp": 4, "dp": 1, "tp": 1, "stages": "1,2,2,3"}
    graph, plan = planned(model, batch, pins, micro_batches=4)
    found = on_ranks(model, graph, plan, lambda module: sum(p.numel() for p in module.parameters()))
    block = sum(p.numel() for p in model.blocks[0].parameters())
    first = model.embed.weight.numel() + model.places.weight.numel()
    last = model.head.weight.numel() + sum(p.numel() for p in model.norm.parameters())
    assert found == [first + block, 2 * block, 2 * block, last + 3 * block]
    said = [sum(p.bytes_per_device for p in plan.parameters.values() if p.stage == s) for s in range(4)]
    assert said == [4 * n for n in found]
    assert plan.predicted.peak_memory_bytes == max(s.peak_memory_bytes for s in plan.stages)


def test_mem05_state_of_the_first_step_is_in_the_budget() -> None:
    """All but the optimizer's state fits, and 5 %: no plan, before the run. Nearly all: one that cuts it, and keeps
    within."""
    model, batch = lm(), text(rows=4)
    graph, free = planned(model, batch, {"dp": 2, "zero": 0}, allow=())
    kinds = free.predicted.breakdown_bytes
    short = int((free.predicted.peak_memory_bytes - kinds["optimizer"]) * 1.05)
    with pytest.raises(InfeasibleError):
        api.plan_captured(
            graph, cluster((2, 1.0, 100.0)), options=Options(pins={"dp": 2, "zero": 0}, allow=(), memory_limit=short)
        )  # fmt: skip
    enough = int(0.9 * free.predicted.peak_memory_bytes)
    spread = api.plan_captured(
        graph, cluster((2, 1.0, 100.0)), options=Options(pins={"dp": 2}, allow=(), memory_limit=enough)
    )
    assert max(peaks(model, batch, graph, spread)) <= enough * (1 + WITHIN)


@pytest.mark.parametrize("ranks", [2, 4])
def test_mem07_more_devices_hold_less_each(ranks: int) -> None:
    """Parameters of each rank times ranks are the model's, but for what does not divide; building holds no more."""
    model, batch = lm(), text()
    graph, plan = planned(model, batch, {"dp": ranks, "zero": 3})
    whole = sum(p.numel() * 4 for p in model.parameters())
    largest = max(p.numel() * 4 for p in model.parameters())
    made = api.emit_captured(graph, plan)

    def rank(rt: Communicator) -> tuple[int, int]:
        gc.collect()
        with Held() as held:
            held.leave_out(model.parameters())
            module = ParallelModule(graph, plan, made, model, rt)
            return sum(unwrap(p).numel() * 4 for p in module.parameters()), held.peak_bytes

    for own, peak in run_threads(all_ranks(plan), rank):
        assert own * ranks == pytest.approx(whole, rel=0.05)
        assert peak <= own + largest + UNIT_BYTES * len(list(model.parameters()))


def plan_wide() -> tuple[int, int]:
    """(bytes of the plan's peak, of address space allowed beyond what is there) of one 8 GiB activation."""
    spare = 4 * 2**30
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + spare, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with torch.device("meta"):
        wide, x = nn.Sequential(nn.Linear(16384, 16384), nn.Tanh()), torch.empty(1, 131072, 16384)
    found = cluster((4, 1.0, 100.0), memory_bytes=2**40)
    return api.search(wide, found, example_inputs=(x,)).predicted.peak_memory_bytes, spare


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="how large a process is, as Linux says it")
def test_mem13_planning_allocates_no_full_tensor() -> None:
    """Four GiB of address space are enough for a plan whose ranks hold more. Seen to fail: a model that is no meta."""
    peak, spare = launch(plan_wide, 1, timeout_s=100)
    assert peak > spare


class Adapted(nn.Module):
    """A frozen product, and a trainable one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted() -> nn.Module:
    """A TinyLM in bfloat16, frozen, with float32 adapters in every attention, those of the first half frozen too."""
    model = lm().bfloat16().requires_grad_(False)
    for k, block in enumerate(model.blocks):
        attention = block.attention
        attention.q, attention.v = Adapted(attention.q), Adapted(attention.v)
        for part in (attention.q, attention.v):
            part.down.float().requires_grad_(k > 1)
            part.up.float().requires_grad_(k > 1)
    return model


@pytest.mark.parametrize(
    "pins",
    [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "dp": 1, "tp": 1}],
    ids=["zero3", "tp", "stages"],
)
def test_mem11_nothing_is_held_for_frozen_weights(pins: dict[str, Any]) -> None:
    """Frozen weights stay bfloat16, without gradient, state or master copy; bytes are the closed form."""
    model, batch = adapted(), text()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    stored = {n: str(p.dtype).removeprefix("torch.") for n, p in model.named_parameters()}
    graph, plan = planned(model, batch, pins, precision="bf16", micro_batches=3 if "pp" in pins else None)
    for name, p in plan.parameters.items():
        assert p.dtype == stored[name]
        assert p.optimizer_bytes_per_device == (2 * p.bytes_per_device if name in trained else 0)

    def work(module: Any) -> tuple[int, int, set[str]]:
        """(bytes held between two steps, the closed form, parameters of this rank)."""
        mine = dict(module.named_parameters())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        held = Held()
        held.see((*map(unwrap, mine.values()), *module.buffers()))
        last = torch.zeros(1)
        held.leave_out((*batch.values(), last))
        with held:
            loss = module(**batch)
            loss.backward()
            graded = {n for n, p in mine.items() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            del loss
            for axis in module.communicator.mesh.names:  # threads hold what they met with last
                module.communicator.all_reduce(last, axis)
            gc.collect()
        assert {n: str(p.dtype).removeprefix("torch.") for n, p in mine.items()} == {n: stored[n] for n in mine}
        assert graded == {n for n, p in mine.items() if p in optimizer.state} == trained & set(mine)
        form = 0
        for name, p in mine.items():
            moments = 2 * units(unwrap(p)) + UNIT_BYTES if name in trained else 0  # and a counter of steps
            form += units(unwrap(p)) + moments
        return held.now_bytes, form, set(mine)

    found = on_ranks(model, graph, plan, work)
    for now, form, _ in found:
        assert form <= now <= form + UNIT_BYTES  # threads hold the last number that they sent
    if "pp" in pins:
        assert sum(bool(names & trained) for _, _, names in found) == 1, "one stage has nothing to train"


def units(x: Tensor) -> int:
    """Its bytes as the counter has them."""
    return -(-x.numel() * x.element_size() // UNIT_BYTES) * UNIT_BYTES


def test_mem11_training_is_one_devices() -> None:
    for pins, micro in (({"dp": 2, "zero": 3}, None), ({"pp": 2, "dp": 1, "tp": 1}, 3)):
        model, batch = adapted(), text()
        graph, plan = planned(model, batch, pins, precision="bf16", micro_batches=micro)
        report = api.verify(model, batch, plan=plan, captured=graph, options=Options(precision="bf16"))
        assert report.ok, report
