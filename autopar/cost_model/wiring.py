"""Who makes which tensor and who reads it, with blocks tied: the skeleton of the problem, the same for every mesh.

A *slot* is one choice of the problem: an op, an input's layout, an output's layout, or how a class of parameters is
stored. A *wire* is one tensor between slots. The op of a block that n instances run is one slot of count n; its wires
count n times. Tensors at the top level that join the same slots in the same way are one wire with a count.

Parameters: all parameters that meet the same block input share one storage slot (formulation 1, reduction a), and so do
tied weights. A parameter gives two wires, one read in the forward and one in the backward, since its conversions are
done again in the backward. Its gradient is a wire read by its storage slot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from autopar.ir.graph import CapturedGraph, Graph, GraphInput, InputKind, Node, OutputKind, Phase, TensorMeta


class SlotKind(Enum):
    OP = "op"
    INPUT = "input"
    OUTPUT = "output"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One choice. `name`: op node name, input value name, output position, or first parameter's name.

    `parameters` are the names of a storage slot's class; `count` how many times a step runs or holds it.
    """

    kind: SlotKind
    graph: str
    name: str
    count: int
    node: Node | None = None
    parameters: tuple[str, ...] = ()
    meta: TensorMeta | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.graph}:{self.name}"


@dataclass(frozen=True, slots=True)
class Reader:
    """`position` counts the tensor arguments of an op (`Node.refs`); 0 for other slots."""

    slot: int
    position: int
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A tensor. `position` counts the producer's outputs.

    `names`: the (graph, value) pairs it stands for; `count`: how many times a step converts it; `saved_count`: how many
    copies wait for the backward if it reads it; `of_parameter`: made by a storage slot.
    """

    producer: int
    position: int
    phase: Phase
    readers: tuple[Reader, ...]
    meta: TensorMeta
    names: tuple[tuple[str, str], ...]
    count: int
    saved_count: int
    of_parameter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """All slots and wires of a captured model."""

    slots: tuple[Slot, ...]
    wires: tuple[Wire, ...]
    storage_of: dict[str, int]
    unused_parameters: tuple[str, ...]


def stays(wiring: Wiring, wire: Wire) -> bool:
    """True of what is there throughout: parameters, and what the model is called with."""
    maker = wiring.slots[wire.producer]
    return wire.of_parameter or (maker.kind is SlotKind.INPUT and maker.graph == "top" and wire.phase is Phase.FORWARD)


@dataclass
class _Open:
    """Slots and producers found so far."""

    slots: list[Slot] = field(default_factory=list)
    made_by: dict[tuple[str, str], tuple[int, int, Phase]] = field(default_factory=dict)
    input_slot: dict[tuple[str, str], int] = field(default_factory=dict)
    readers: dict[tuple[str, str], list[Reader]] = field(default_factory=dict)

    def add(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def read(self, graph: str, value: str, slot: int, position: int, phase: Phase) -> None:
        self.readers.setdefault((graph, value), []).append(Reader(slot, position, phase))


def wire(captured: CapturedGraph) -> Wiring:
    """Slots and wires of a captured model."""
    calls = _calls(captured)
    open_ = _Open()
    storage_of, class_of = _storage_slots(captured, calls, open_)
    metas = {(g.name, v.name): v.meta for g in captured.graphs for v in g.values().values()}
    for graph in captured.graphs:
        count = 1 if graph is captured.top else len(calls[graph.name])
        _input_slots(graph, count, class_of, open_)
        _op_slots(graph, count, open_)
    _block_outputs(captured, open_)
    for graph in captured.graphs:
        _readers(graph, captured, class_of, open_)
    used = {i.target for i in captured.top.inputs if i.kind is InputKind.PARAMETER}
    return Wiring(
        slots=tuple(open_.slots),
        wires=_wires(captured, calls, open_, metas),
        storage_of=storage_of,
        unused_parameters=tuple(p.name for p in captured.parameters if p.name not in used),
    )


def _calls(captured: CapturedGraph) -> dict[str, list[Node]]:
    """Forward calls of each block, in order."""
    calls: dict[str, list[Node]] = {b.key: [] for b in captured.blocks}
    for node in captured.top.nodes:
        if node.op == "autopar.block" and node.block is not None:
            calls[node.block.key].append(node)
    return calls


def _own_inputs(graph: Graph) -> list[GraphInput]:
    return [i for i in graph.inputs if i.kind is not InputKind.TANGENT]


def _storage_slots(
    captured: CapturedGraph, calls: dict[str, list[Node]], open_: _Open
) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """One slot per class of parameters. Returns slot by parameter name, and slot by (graph, input value name)."""
    parameter_of = {i.value.name: i.target for i in captured.top.inputs if i.kind is InputKind.PARAMETER}
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(key: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for name in parameter_of:
        root(("top", name))
    for block in captured.blocks:
        for call in calls[block.key]:
            for own, ref in zip(_own_inputs(block.graph), call.refs, strict=True):
                if own.kind is InputKind.PARAMETER:
                    parent[root((block.key, own.value.name))] = root(("top", ref))
    members: dict[tuple[str, str], list[str]] = {}
    for value, name in parameter_of.items():
        members.setdefault(root(("top", value)), []).append(name)
    metas = {p.name: p.meta for p in captured.parameters}
    storage_of: dict[str, int] = {}
    slot_at: dict[tuple[str, str], int] = {}
    for key, names in members.items():
        slot_at[key] = open_.add(_storage_slot(tuple(names), metas[names[0]]))
        storage_of.update(dict.fromkeys(names, slot_at[key]))
    return storage_of, {here: slot_at[root(here)] for here in list(parent)}


def _storage_slot(names: tuple[str, ...], meta: TensorMeta) -> Slot:
    return Slot(kind=SlotKind.STORAGE, graph="top", name=names[0], count=len(names), parameters=names, meta=meta)


def _input_slots(graph: Graph, count: int, class_of: dict[tuple[str, str], int], open_: _Open) -> None:
    for own in graph.inputs:
        here = (graph.name, own.value.name)
        phase = Phase.BACKWARD if own.kind is InputKind.TANGENT else Phase.FORWARD
        slot = class_of.get(here)
        if slot is None:
            slot = open_.add(
                Slot(kind=SlotKind.INPUT, graph=graph.name, name=own.value.name, count=count, meta=own.value.meta)
            )
            open_.input_slot[here] = slot
        open_.made_by[here] = (slot, 0, phase)


def _op_slots(graph: Graph, count: int, open_: _Open) -> None:
    for node in graph.nodes:
        if node.block is not None:
            continue
        slot = open_.add(Slot(kind=SlotKind.OP, graph=graph.name, name=node.name, count=count, node=node))
        for position, out in enumerate(node.outputs):
            if out is not None:
                open_.made_by[(graph.name, out.name)] = (slot, position, node.phase)


def _block_outputs(captured: CapturedGraph, open_: _Open) -> None:
    """What a block call makes at the top is made by the slot inside; a parameter's gradient by its storage slot."""
    for node in captured.top.nodes:
        if node.block is None:
            continue
        graph = captured.block(node.block.key).graph
        kind = OutputKind.OUTPUT if node.phase is Phase.FORWARD else OutputKind.GRADIENT
        own = {i.value.name: i for i in graph.inputs}
        inner = [o for o in graph.outputs if o.kind is kind]
        for out, made in zip(node.outputs, inner, strict=True):
            if out is None or made.value is None:
                continue
            if kind is OutputKind.GRADIENT and own[made.target].kind is InputKind.PARAMETER:
                slot, position, _ = open_.made_by[(graph.name, made.target)]
            else:
                slot, position, _ = open_.made_by[(graph.name, made.value)]
            open_.made_by[("top", out.name)] = (slot, position, node.phase)


def _readers(graph: Graph, captured: CapturedGraph, class_of: dict[tuple[str, str], int], open_: _Open) -> None:
    op_slot = {(s.graph, s.name): i for i, s in enumerate(open_.slots) if s.kind is SlotKind.OP}
    for node in graph.nodes:
        if node.block is None:
            for position, ref in enumerate(node.refs):
                open_.read(graph.name, ref, op_slot[(graph.name, node.name)], position, node.phase)
            continue
        inner = captured.block(node.block.key).graph
        args = _own_inputs(inner) + [i for i in inner.inputs if i.kind is InputKind.TANGENT]
        for own, ref in zip(args, node.refs, strict=False):
            here = (inner.name, own.value.name)
            again = node.phase is Phase.BACKWARD and own.kind is not InputKind.TANGENT
            if here in open_.input_slot and not again:
                open_.read(graph.name, ref, open_.input_slot[here], 0, node.phase)
    for position, out in enumerate(graph.outputs):
        if out.value is None:
            continue
        if out.kind is OutputKind.GRADIENT:
            slot = class_of.get((graph.name, out.target))
            if slot is None and graph is captured.top:
                slot = _output_slot(graph, position, out.value, open_)
            if slot is not None:
                open_.read(graph.name, out.value, slot, 0, Phase.BACKWARD)
        elif graph is captured.top:
            open_.read(graph.name, out.value, _output_slot(graph, position, out.value, open_), 0, Phase.FORWARD)


def _output_slot(graph: Graph, position: int, value: str, open_: _Open) -> int:
    meta = graph.values()[value].meta
    return open_.add(Slot(kind=SlotKind.OUTPUT, graph="top", name=str(position), count=1, meta=meta))


def _wires(
    captured: CapturedGraph, calls: dict[str, list[Node]], open_: _Open, metas: dict[tuple[str, str], TensorMeta]
) -> tuple[Wire, ...]:
    counts = {"top": 1, **{key: len(nodes) for key, nodes in calls.items()}}
    feeders = _feeders(captured, calls)
    names: dict[tuple[int, int, tuple[Reader, ...], str], list[tuple[str, str]]] = {}
    phases: dict[tuple[int, int, tuple[Reader, ...], str], Phase] = {}
    for (graph, value), readers in open_.readers.items():
        slot, position, phase = open_.made_by[(graph, value)]
        parts = [readers]
        is_parameter = open_.slots[slot].kind is SlotKind.STORAGE and phase is Phase.FORWARD
        if is_parameter:
            parts = [[r for r in readers if r.phase is p] for p in Phase]
        for part in parts:
            if part:
                key = (slot, position, tuple(part), graph)
                names.setdefault(key, []).append((graph, value))
                phases[key] = phase
    found = []
    for key, pairs in names.items():
        slot, position, key_readers, graph = key
        count = len(pairs) * counts[graph]
        found.append(
            Wire(
                producer=slot,
                position=position,
                phase=phases[key],
                readers=key_readers,
                meta=metas[pairs[0]],
                names=tuple(pairs),
                count=count,
                saved_count=feeders.get(pairs[0], count),
                of_parameter=open_.slots[slot].kind is SlotKind.STORAGE and phases[key] is Phase.FORWARD,
            )
        )
    return tuple(found)


def _feeders(captured: CapturedGraph, calls: dict[str, list[Node]]) -> dict[tuple[str, str], int]:
    """How many distinct tensors feed each block input: a mask that all instances share is saved once."""
    distinct: Counter[tuple[str, str]] = Counter()
    for block in captured.blocks:
        for j, own in enumerate(_own_inputs(block.graph)):
            distinct[(block.key, own.value.name)] = len({call.refs[j] for call in calls[block.key]})
    return dict(distinct)
