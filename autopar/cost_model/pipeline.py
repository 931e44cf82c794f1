"""A priced problem -> the same in parts that pipeline stages hold, and the devices of the stages.

The parts are the model's ends and its blocks, in the order of their calls (`ends`). A part's times are those of one
micro-batch, its bytes those that micro-batches in flight, or the whole step, hold of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.cost_model.build import Priced, When
from autopar.cost_model.ends import BLOCKS, FIRST, LAST, Ends
from autopar.cost_model.moments import fixed_bytes
from autopar.cost_model.wiring import SlotKind
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph, Phase
from autopar.ir.layout import Layout, local_shape
from autopar.ir.parts import Amount, Paid, PartedProblem, Term, Tie
from autopar.ir.stages import Stage

COMPUTE, COMMUNICATION, RECOMPUTE, UPDATE, JOINING = (
    "compute", "communication", "recompute", "optimizer", "gradients and weights"
)  # fmt: skip
"""Kinds of time; `JOINING`: of what is made, and joined over ranks, once a step."""
ACTIVATIONS, WORKING, REMADE = "activations", "working set", "made again"
"""Kinds of bytes, beside those of `moments`."""


def parted(captured: CapturedGraph, priced: Priced, ends: Ends) -> PartedProblem:
    """Where the numbers of a problem that was built for stages or micro-batches belong."""
    runs = ((FIRST, 1), *block_runs(captured), (LAST, 1))
    names = tuple(dict.fromkeys(name for name, _ in runs))
    instances = {b.key: len(b.instances) for b in captured.blocks}
    homes = tuple(tuple(names.index(p) for p in here) for here in homes_of(captured, priced, ends))
    return PartedProblem(
        problem=priced.problem,
        parts=names,
        counts=tuple(instances.get(name, 1) for name in names),
        homes=(
            *homes,
            *(homes[n.slot] for n in priced.later),
            *(homes[n.slot] for n in priced.held),
        ),
        runs=tuple((names.index(name), count) for name, count in runs),
        terms=(*_times(priced, homes), *_bytes(priced, homes), *_passed(captured, priced, homes)),
        paid=tuple(_paid(captured, priced, homes, names)),
        ties=tuple(_ties(priced, homes)),
        fixed_bytes=fixed_bytes(captured, priced.wiring),
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


def homes_of(captured: CapturedGraph, priced: Priced, ends: Ends) -> tuple[tuple[str, ...], ...]:
    """Of each slot the parts that it is in, at least one; several hold a parameter that each of them reads."""
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


Homes = tuple[tuple[int, ...], ...]


def _times(priced: Priced, homes: Homes) -> Iterator[Term]:
    for i, slot in enumerate(priced.wiring.slots):
        cost = priced.problem.nodes[i].cost_us
        if slot.kind is SlotKind.STORAGE:
            yield Term(i, homes[i], Amount.ONCE, UPDATE, cost)
        elif i in priced.lasting:
            yield Term(i, homes[i][:1], Amount.ONCE, JOINING, cost)
        elif slot.node is not None:
            amount, work = Amount(slot.node.phase.value), priced.compute_us[i]
            inner = tuple(c - w for c, w in zip(cost, work, strict=True))
            yield Term(i, homes[i][:1], amount, COMPUTE, work)
            if any(inner):
                yield Term(i, homes[i][:1], amount, COMMUNICATION, inner)
    for chosen in priced.later:
        cost = priced.problem.nodes[chosen.node].cost_us
        if any(cost):
            yield Term(chosen.node, homes[chosen.slot][:1], Amount.BACKWARD, RECOMPUTE, cost)


def _bytes(priced: Priced, homes: Homes) -> Iterator[Term]:
    for held in priced.whole_bytes.resident:
        if any(held.bytes):
            yield Term(held.node, homes[held.slot], Amount.RESIDENT, held.kind, held.bytes)
    for chosen in priced.later:
        if any(chosen.kept_bytes):
            yield Term(chosen.node, homes[chosen.slot][:1], Amount.SAVED, ACTIVATIONS, chosen.kept_bytes)
        if any(chosen.made_bytes):
            yield Term(chosen.node, homes[chosen.slot][:1], Amount.REMADE, REMADE, chosen.made_bytes)
    for node, sizes in priced.whole_bytes.working:
        yield Term(node, homes[node][:1], Amount.WORKING, WORKING, sizes)


def _passed(captured: CapturedGraph, priced: Priced, homes: Homes) -> Iterator[Term]:
    """What one block hands to the next."""
    first = next((n for n in captured.top.nodes if n.op == "autopar.block"), None)
    names = {(captured.top.name, o.name) for o in first.outputs if o} if first is not None else set()
    for wire in priced.wiring.wires:
        if wire.phase is Phase.FORWARD and names & set(wire.names):
            item = wire.meta.nbytes // max(1, wire.meta.numel)
            sizes = []
            for pick in priced.options[wire.producer]:
                layout = pick if isinstance(pick, Layout) else pick.outputs[wire.position]
                shape = local_shape(wire.meta.shape, layout, priced.pieces, wire.meta.units) if layout else (0,)
                sizes.append(math.prod(shape) * item)
            yield Term(wire.producer, homes[wire.producer][:1], Amount.PASSED, "passed", tuple(sizes))


def _paid(captured: CapturedGraph, priced: Priced, homes: Homes, names: tuple[str, ...]) -> Iterator[Paid]:
    blocks = {b.key for b in captured.blocks}
    for number, index in enumerate(priced.wires):
        if index is None:
            continue
        wire, when = priced.wiring.wires[index], priced.when[number]
        graph = wire.names[0][0]
        part = names.index(graph) if graph in blocks else homes[wire.producer][0]
        yield Paid(number, part, Amount(when.value), JOINING if when is When.ONCE else COMMUNICATION)


def _ties(priced: Priced, homes: Homes) -> Iterator[Tie]:
    for index, wire in enumerate(priced.wiring.wires):
        crossing = [r.slot for r in wire.readers if homes[r.slot] != homes[wire.producer]]
        if wire.of_parameter or priced.wiring.slots[wire.producer].kind is SlotKind.STORAGE:
            if len(homes[wire.producer]) > 1:
                yield Tie(wire.producer, tuple(range(len(priced.options[wire.producer]))))
        elif crossing:
            yield Tie(wire.producer, priced.problem.values[index].made)
            for slot in crossing:
                yield Tie(slot, tuple(range(len(priced.options[slot]))))


def stages_of(cluster: ClusterSpec, stages: int, limit_bytes: int) -> tuple[Stage, ...]:
    """The devices of each stage, with nothing in flight; times are priced on the slowest kind in the cluster.

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
        found.append(Stage(limit_bytes=memory if whole else min(limit_bytes, memory), speed=speed))
    return tuple(found)


def _flops(peaks: dict[str, float]) -> float:
    """The fastest rate of a device."""
    return max(peaks.values(), default=0.0)
