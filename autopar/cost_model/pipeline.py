"""Choices for the whole model -> what each part of it costs under each, for the assignment to pipeline stages.

The parts are the model's ends and its blocks, in the order of their calls (`ends`). A part's times are those of one
micro-batch, its bytes those of one instance. One choice gives one column of every part; columns of different choices
may stand beside each other if what passes between the parts has the same layouts under both (`boundary`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cost_model.build import Priced, When
from autopar.cost_model.ends import BLOCKS, FIRST, LAST, Ends
from autopar.cost_model.later import Mode
from autopar.cost_model.moments import fixed_bytes
from autopar.cost_model.wiring import SlotKind, Wire
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph, Phase
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.problem import conversions
from autopar.ir.stages import Column, Run, Stage, StageProblem, in_flight

Choice = tuple[int, ...]


COMPUTE, COMMUNICATION, RECOMPUTE, UPDATE, JOINING = (
    "compute", "communication", "recompute", "optimizer", "gradients and weights"
)  # fmt: skip
"""Kinds of time; `JOINING`: of what is made, and joined over ranks, once a step."""


@dataclass
class Amounts:
    """What one part of the model costs, all its instances together.

    `us`: by when and what; bytes are `resident` by kind, `saved` of one micro-batch, and of one instance at a time
    `working` and `remade`.
    """

    us: defaultdict[tuple[When, str], float] = field(default_factory=lambda: defaultdict(float))
    resident: Counter[str] = field(default_factory=Counter)
    saved: int = 0
    working: int = 0
    remade: int = 0

    def column(self, name: str, count: int) -> Column:
        """Of one of so many instances."""
        us = {when: sum(us for (then, _), us in self.us.items() if then is when) / count for when in When}
        return Column(
            name=name, forward_us=us[When.FORWARD], backward_us=us[When.BACKWARD], finish_us=us[When.ONCE],
            saved_bytes=-(-self.saved // count), resident_bytes=-(-self.resident.total() // count),
            transient_bytes=self.working + self.remade,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parts:
    """A priced problem cut into the model's parts.

    Attributes:
        runs: (part, instances that follow one another), in model order: the first end, blocks, the last end.
        homes: per slot the parts that it is in, at least one.
    """

    captured: CapturedGraph
    priced: Priced
    runs: tuple[tuple[str, int], ...]
    homes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, captured: CapturedGraph, priced: Priced) -> Parts:
        """From the order of the top graph's calls."""
        runs = ((FIRST, 1), *block_runs(captured), (LAST, 1))
        return cls(captured, priced, runs, _homes(captured, priced))

    def home_of_wire(self, wire: Wire) -> str:
        """The part that pays for a tensor's conversions."""
        graph = wire.names[0][0]
        if any(b.key == graph for b in self.captured.blocks):
            return graph
        return self.homes[wire.producer][0]

    def amounts(self, choice: Choice) -> dict[str, Amounts]:
        """What each part costs under a choice."""
        found = {part: Amounts() for part in (FIRST, LAST, *(b.key for b in self.captured.blocks))}
        _add_times(self, choice, found)
        _add_bytes(self, choice, found)
        return found

    def columns(self, choice: Choice, name: str) -> dict[str, Column]:
        """The same of one instance of each."""
        return {part: sums.column(name, self.instances(part)) for part, sums in self.amounts(choice).items()}

    def instances(self, part: str) -> int:
        """How many of a part the model has."""
        return next((len(b.instances) for b in self.captured.blocks if b.key == part), 1)

    def boundary(self, choice: Choice) -> tuple[int, ...]:
        """What a choice says about tensors that pass from part to part, and about parameters that several hold."""
        found = []
        for index, wire in enumerate(self.priced.wiring.wires):
            value = self.priced.problem.values[index]
            crossing = [r.slot for r in wire.readers if self.homes[r.slot] != self.homes[wire.producer]]
            if wire.of_parameter or self.priced.wiring.slots[wire.producer].kind is SlotKind.STORAGE:
                if len(self.homes[wire.producer]) > 1:
                    found.append(choice[wire.producer])
            elif crossing:
                found.append(value.made[choice[wire.producer]])
                found += [choice[slot] for slot in crossing]
        return tuple(found)


def stage_problem(
    parts: Parts, choices: Sequence[Choice], cluster: ClusterSpec, pieces: Mesh, limit_bytes: int, chunks: int = 1
) -> StageProblem:
    """What is left to decide when each block's layouts are: which stage runs which blocks, each in which column.

    `choices`: with the same `boundary`. `pieces`: the mesh that cuts a tensor as micro-batches and ranks do.
    """
    load = parts.priced.load
    columns = [parts.columns(choice, str(k)) for k, choice in enumerate(choices)]
    runs = tuple(
        Run(name=part, count=count, columns=_distinct([c[part] for c in columns])) for part, count in parts.runs
    )
    schedule = "interleaved" if chunks > 1 else "1f1b"
    flying = in_flight(schedule, stages=load.stages, micro_batches=load.micro_batches, chunks=chunks)
    fixed = fixed_bytes(parts.captured, parts.priced.wiring)
    places = _devices(cluster, load.stages, limit_bytes)
    return StageProblem(
        name=parts.priced.problem.name,
        runs=runs,
        stages=tuple(
            Stage(limit_bytes=limit, fixed_bytes=fixed, in_flight=n, speed=speed)
            for n, (limit, speed) in zip(flying, places, strict=True)
        ),
        micro_batches=load.micro_batches,
        boundary_us=_boundary_us(parts, choices[0], cluster, pieces) if load.stages > 1 else 0.0,
        boundary_hidden=False,
        chunks=chunks,
    )


def block_runs(captured: CapturedGraph) -> list[tuple[str, int]]:
    """(block key, number of calls in a row), in the order of the forward."""
    runs: list[tuple[str, int]] = []
    for node in captured.top.nodes:
        if node.op == "autopar.block" and node.block is not None:
            if runs and runs[-1][0] == node.block.key:
                runs[-1] = (node.block.key, runs[-1][1] + 1)
            else:
                runs.append((node.block.key, 1))
    return runs


def _distinct(columns: list[Column]) -> tuple[Column, ...]:
    """Columns that differ in more than their name, the first of equals."""
    found: dict[Column, Column] = {}
    for column in columns:
        found.setdefault(replace(column, name=""), column)
    return tuple(found.values())


def _devices(cluster: ClusterSpec, stages: int, limit_bytes: int) -> list[tuple[int, float]]:
    """(bytes, speed factor) of each stage's devices; columns are priced on the slowest kind in the cluster.

    A stage that holds devices of several kinds runs as the slowest and holds as much as the smallest of them.
    """
    kinds = [i for i, g in enumerate(cluster.groups) for _ in range(g.count)]
    devices = [g.device for g in cluster.groups]
    slowest = min(_flops(d.peak_flops) for d in devices)
    each = len(kinds) // stages
    whole = limit_bytes == cluster.memory_bytes  # each kind may then be filled
    found = []
    for stage in range(stages):
        mine = [devices[i] for i in sorted(set(kinds[stage * each : (stage + 1) * each]))]
        memory = min(d.memory_bytes for d in mine)
        speed = slowest / min(_flops(d.peak_flops) for d in mine) if slowest else 1.0
        found.append((memory if whole else min(limit_bytes, memory), speed))
    return found


def _flops(peaks: dict[str, float]) -> float:
    """The fastest rate of a device."""
    return max(peaks.values(), default=0.0)


def _homes(captured: CapturedGraph, priced: Priced) -> tuple[tuple[str, ...], ...]:
    ends = Ends.of(captured, priced.wiring)
    blocks = {b.key for b in captured.blocks}
    readers: dict[int, set[str]] = {}
    for wire in priced.wiring.wires:
        readers.setdefault(wire.producer, set()).update(priced.wiring.slots[r.slot].graph for r in wire.readers)
    found: list[tuple[str, ...]] = []
    for i, slot in enumerate(priced.wiring.slots):
        if slot.graph in blocks:
            found.append((slot.graph,))
            continue
        inside = sorted(readers.get(i, set()) & blocks) if slot.kind is SlotKind.STORAGE else []
        here = (*inside, *(p for p in sorted(ends.parts[i]) if p != BLOCKS)) or (LAST,)
        found.append(here if priced.load.stages > 1 else here[:1])  # one stage holds one copy
    return tuple(found)


def _add_times(parts: Parts, choice: Choice, found: dict[str, Amounts]) -> None:
    priced, homes = parts.priced, parts.homes
    load, wiring = priced.load, priced.wiring
    for i, slot in enumerate(wiring.slots):
        cost = priced.problem.nodes[i].cost_us[choice[i]]
        if slot.kind is SlotKind.STORAGE:
            for part in homes[i]:
                found[part].us[When.ONCE, UPDATE] += cost / load.once
        elif i in priced.lasting:
            found[homes[i][0]].us[When.ONCE, JOINING] += cost / load.once
        elif slot.node is not None:
            when, work = When(slot.node.phase.value), priced.compute_us[i][choice[i]]
            found[homes[i][0]].us[when, COMPUTE] += work / load.runs
            found[homes[i][0]].us[when, COMMUNICATION] += (cost - work) / load.runs
    for chosen in priced.later:
        cost = priced.problem.nodes[chosen.node].cost_us[choice[chosen.node]]
        found[homes[chosen.slot][0]].us[When.BACKWARD, RECOMPUTE] += cost / load.runs
    for number, index in enumerate(priced.wires):
        if index is None:
            continue
        value, when = priced.problem.values[number], priced.when[number]
        cost = sum(value.reshard_us[p][q] for p, q in conversions(value, choice))
        what, times = (JOINING, load.once) if when is When.ONCE else (COMMUNICATION, load.runs)
        found[parts.home_of_wire(wiring.wires[index])].us[when, what] += cost / times


def _add_bytes(parts: Parts, choice: Choice, found: dict[str, Amounts]) -> None:
    """Resident, saved and working bytes, as the problem's moments sum them before they are cut into stages."""
    priced, homes = parts.priced, parts.homes
    for held in priced.whole_bytes.resident:
        for part in homes[held.slot]:
            found[part].resident[held.kind] += held.bytes[choice[held.node]]
    for chosen in priced.later:
        at = choice[chosen.node]
        if chosen.wire is None:
            continue
        part_of = found[homes[chosen.slot][0]]
        if chosen.choices[at].mode is Mode.KEEP:
            part_of.saved += chosen.kept_bytes[at]
        else:
            part_of.remade += chosen.made_bytes[at]
    for version in priced.whole_bytes.saved:
        value = priced.problem.values[version.value]
        wanted = {value.consumers[k].wants[choice[value.consumers[k].node]] for k in version.consumers}
        found[homes[value.producer][0]].saved += sum(version.bytes[q] for q in wanted)
    for node, sizes in priced.whole_bytes.working:
        part_of = found[homes[node][0]]
        part_of.working = max(part_of.working, sizes[choice[node]])


def _boundary_us(parts: Parts, choice: Choice, cluster: ClusterSpec, pieces: Mesh) -> float:
    """µs to send what one block passes to the next, for one micro-batch, to the same place in the next stage."""
    first = next((n for n in parts.captured.top.nodes if n.op == "autopar.block"), None)
    if first is None:
        return 0.0
    priced = parts.priced
    names = {(parts.captured.top.name, o.name) for o in first.outputs if o}
    total = 0
    for wire in priced.wiring.wires:
        if wire.phase is Phase.FORWARD and names & set(wire.names):
            pick = priced.options[wire.producer][choice[wire.producer]]
            layout = pick if isinstance(pick, Layout) else pick.outputs[wire.position]
            if layout is not None:
                shape = local_shape(wire.meta.shape, layout, pieces, wire.meta.units)
                total += math.prod(shape) * (wire.meta.nbytes // max(1, wire.meta.numel))
    level = cluster.levels[cluster.level_of(priced.load.stages, priced.mesh.size)]
    return level.latency_us + total / level.bytes_per_us
