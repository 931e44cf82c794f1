"""A choice for the whole model -> what each part of it costs, for the assignment to pipeline stages.

The parts are the model's ends and its blocks, in the order of their calls (`ends`). A part's times are those of one
micro-batch, its bytes those of one instance.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from autopar.cost_model.build import Priced, wire_weight
from autopar.cost_model.ends import BLOCKS, FIRST, LAST, Ends
from autopar.cost_model.wiring import SlotKind, Wire
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph, Phase
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.problem import conversions
from autopar.ir.stages import Column, Run, Stage, StageProblem, in_flight


@dataclass
class _Part:
    """Sums over all instances."""

    us: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    finish_us: float = 0.0
    resident: int = 0
    saved: int = 0
    transient: int = 0

    def column(self, name: str, count: int) -> Column:
        """Of one instance."""
        return Column(
            name=name, forward_us=self.us[Phase.FORWARD] / count, backward_us=self.us[Phase.BACKWARD] / count,
            saved_bytes=-(-self.saved // count), resident_bytes=-(-self.resident // count),
            transient_bytes=self.transient, finish_us=self.finish_us / count,
        )  # fmt: skip


def stage_problem(
    captured: CapturedGraph, priced: Priced, choice: tuple[int, ...], cluster: ClusterSpec, pieces: Mesh,
    limit_bytes: int,
) -> StageProblem:  # fmt: skip
    """What is left to decide when each block's layouts are: which stage runs which blocks."""
    parts = _parts(captured, priced, choice)
    runs = [Run(name=FIRST, count=1, columns=(parts[FIRST].column(FIRST, 1),))]
    counts = {b.key: len(b.instances) for b in captured.blocks}
    for key, count in block_runs(captured):
        runs.append(Run(name=key, count=count, columns=(parts[key].column(key, counts[key]),)))
    runs.append(Run(name=LAST, count=1, columns=(parts[LAST].column(LAST, 1),)))
    load = priced.load
    fixed = sum(b.meta.nbytes for b in captured.buffers)
    flying = in_flight("1f1b", stages=load.stages, micro_batches=load.micro_batches)
    return StageProblem(
        name=priced.problem.name,
        runs=tuple(runs),
        stages=tuple(Stage(limit_bytes=limit_bytes, fixed_bytes=fixed, in_flight=n) for n in flying),
        micro_batches=load.micro_batches,
        boundary_us=_boundary_us(captured, priced, choice, cluster, pieces) if load.stages > 1 else 0.0,
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


def _parts(captured: CapturedGraph, priced: Priced, choice: tuple[int, ...]) -> dict[str, _Part]:
    wiring, load = priced.wiring, priced.load
    ends = Ends.of(captured, wiring)
    parts = {name: _Part() for name in (FIRST, LAST, *(b.key for b in captured.blocks))}

    def where(slot: int) -> list[_Part]:
        found = wiring.slots[slot].graph
        if found in parts:
            return [parts[found]]
        readers = {wiring.slots[r.slot].graph for w in wiring.wires if w.producer == slot for r in w.readers}
        blocks = [parts[g] for g in sorted(readers) if g in parts]
        return blocks + [parts[p] for p in sorted(ends.parts[slot]) if p != BLOCKS]

    homes = [where(i) for i in range(len(wiring.slots))]
    for i, slot in enumerate(wiring.slots):
        cost = priced.problem.nodes[i].cost_us[choice[i]]
        if slot.kind is SlotKind.OP and slot.node is not None:
            homes[i][0].us[slot.node.phase] += cost / load.runs
        elif slot.kind is SlotKind.STORAGE:
            for part in homes[i]:
                part.finish_us += cost / load.once
    for chosen in priced.later:
        at = choice[chosen.node]
        part = homes[chosen.slot][0] if homes[chosen.slot] else parts[LAST]
        part.us[Phase.BACKWARD] += priced.problem.nodes[chosen.node].cost_us[at] / load.runs
        if chosen.wire is not None:
            part.saved += chosen.kept_bytes[at]
            part.transient += chosen.made_bytes[at]
    for number, index in enumerate(priced.wires):
        if index is None:
            continue
        wire, value = wiring.wires[index], priced.problem.values[number]
        cost = sum(value.reshard_us[p][q] for p, q in conversions(value, choice))
        part = _home_of_wire(wire, homes, parts)
        weight = wire_weight(wire, wiring, load)
        if weight == load.once and load.once != load.runs:
            part.finish_us += cost / weight
        else:
            late = number >= len(wiring.wires) or wire.readers[0].phase is Phase.BACKWARD
            part.us[Phase.BACKWARD if late else Phase.FORWARD] += cost / weight
    _bytes(priced, choice, homes)
    return parts


def _home_of_wire(wire: Wire, homes: list[list[_Part]], parts: dict[str, _Part]) -> _Part:
    graph = wire.names[0][0]
    if graph in parts:
        return parts[graph]
    readers = [part for r in wire.readers for part in homes[r.slot]]
    return (homes[wire.producer] or readers or [parts[LAST]])[0]


def _bytes(priced: Priced, choice: tuple[int, ...], homes: list[list[_Part]]) -> None:
    """Resident, saved and working bytes, as the problem's moments sum them before they are cut into stages."""
    for node, sizes in priced.whole_bytes.resident:
        for part in homes[node]:
            part.resident += sizes[choice[node]]
    for version in priced.whole_bytes.saved:
        value = priced.problem.values[version.value]
        wanted = {value.consumers[k].wants[choice[value.consumers[k].node]] for k in version.consumers}
        homes[value.producer][0].saved += sum(version.bytes[q] for q in wanted)
    working: Counter[int] = Counter()
    for node, sizes in priced.whole_bytes.working:
        working[id(homes[node][0])] = max(working[id(homes[node][0])], sizes[choice[node]])
    for part in {id(p): p for home in homes for p in home}.values():
        part.transient += working[id(part)]


def _boundary_us(
    captured: CapturedGraph, priced: Priced, choice: tuple[int, ...], cluster: ClusterSpec, pieces: Mesh
) -> float:
    """µs to send what one block passes to the next, for one micro-batch, to the same place in the next stage."""
    first = next((n for n in captured.top.nodes if n.op == "autopar.block"), None)
    if first is None:
        return 0.0
    names = {("top" if captured.top.name == "top" else captured.top.name, o.name) for o in first.outputs if o}
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
