"""The programs of a plan's stages as the work of its stages: what the simulator runs for a plan as it is emitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cost_model.prices import MeshPrices
from autopar.cost_model.replay import chain, kind_of, replay_once, replay_part
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph, Phase, TensorMeta
from autopar.ir.layout import Layout, local_shape, parse_layout
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.reshard import plan_reshard
from autopar.ir.staged import PartProgram, StagedProgram, schedule_of
from autopar.ir.work import COMPUTE, StageWork, Task, Tasks


def stage_works(
    captured: CapturedGraph, program: StagedProgram, plan: Plan, cluster: ClusterSpec, state_bytes: int
) -> list[list[StageWork]]:
    """`works[stage][chunk]`. `state_bytes`: that the optimizer keeps for each parameter.

    Memory is left out: that of stages is what the plan says.
    """
    schedule = schedule_of(program)
    work = _Works(captured, program, plan, cluster, state_bytes)
    found = [[work.part(schedule.part(s, c)) for c in range(schedule.chunks)] for s in range(schedule.stages)]
    last = found[schedule.place(schedule.parts - 1)[0]]
    last[-1] = replace(last[-1], end=(*work.once(program.last), *last[-1].end))
    return found


@dataclass
class _Works:
    captured: CapturedGraph
    program: StagedProgram
    plan: Plan
    cluster: ClusterSpec
    state_bytes: int

    def __post_init__(self) -> None:
        self.prices = MeshPrices(self.cluster, self.program.mesh)
        self.micro = MeshPrices(self.cluster, self.program.parts[0].main.mesh)
        self.metas = {p.name: p.meta for p in self.captured.parameters}
        self.trained = {p.name for p in self.captured.parameters if p.requires_grad}

    def part(self, index: int) -> StageWork:
        """One part of the model."""
        part = self.program.parts[index]
        sent = self._sent_bytes(index)
        level = self.cluster.levels[self.cluster.level_of(self.program.stages, self.program.mesh.size)]
        return replace(
            replay_part(self.captured, part.main, self.plan, self.micro),
            begin=tuple(self._begin(part)), sync=tuple(self._joined(part)), end=chain(self._updates(part)),
            send_us=level.latency_us + sent / level.bytes_per_us if sent else 0.0, send_bytes=sent,
        )  # fmt: skip

    def once(self, program: Program | None, times: int = 1) -> Tasks:
        """A program that runs once a step, so many times."""
        return () if program is None else replay_once(self.captured, program, self.plan, self.prices, times)

    def _begin(self, part: PartProgram) -> Iterator[Task]:
        """What micro-batches find: joined inputs, and weights as ops read them."""
        yield from self.once(part.first)  # type: ignore[misc]
        made = set()
        for weights in part.weights.values():
            yield from self.once(weights.program, len(weights.calls))  # type: ignore[misc]
            made |= {name for _, targets in weights.calls.values() for name in targets}
        for name, held in part.held.items():
            if name not in made:
                yield from self._converted(name, self._stored(name), held)

    def _joined(self, part: PartProgram) -> Iterator[Task]:
        """Sums of gradients, to how they are stored."""
        for name, layout in part.sums.items():
            before = Layout(self.program.mesh.names, tuple(layout.on(a) for a in self.program.mesh.names))
            yield from self._converted(name, before, self._stored(name))
        yield from self.once(part.after)  # type: ignore[misc]

    def _converted(self, name: str, before: Layout, after: Layout) -> Iterator[Task]:
        meta = self.metas[name]
        for step, us in zip(plan_reshard(before, after) or (), self.prices.steps_us(meta, before, after), strict=False):
            kind = kind_of(step.collective)
            stream = COMPUTE if kind == "copy" else f"comm:{step.axis}"
            yield Task(name=f"{name} {step}", kind=kind, us=us, stream=stream)

    def _updates(self, part: PartProgram) -> Iterator[Task]:
        for name in part.sums:
            if name in self.trained:
                shape = local_shape(self.metas[name].shape, self._stored(name), self.program.mesh)
                piece = TensorMeta(shape, self.metas[name].dtype)
                us = self.prices.optimizer_us(piece.numel, piece.dtype, self.state_bytes)
                yield Task(name=name, kind="optimizer", us=us, bytes=piece.nbytes)

    def _stored(self, name: str) -> Layout:
        return parse_layout(self.plan.parameters[name].layout, self.program.mesh)

    def _sent_bytes(self, index: int) -> int:
        """Of one micro-batch, to other parts in the forward."""
        total = 0
        for passed in self.program.passed:
            if passed.source == index and passed.phase is Phase.FORWARD:
                piece = self.program.pieces[passed.value]
                mesh = self.program.parts[index].main.mesh
                shape = local_shape(piece.meta.shape, piece.layout, mesh, piece.meta.units)
                total += TensorMeta(shape, piece.meta.dtype).nbytes * len(passed.targets)
        return total
