"""Strategies and a cluster -> the problem as plain numbers, with the way back.

Every choice of a slot becomes a strategy of a problem node; every wire a value whose conversions are priced by the same
planner that code generation emits. Counts of tied blocks are folded into every number.

Memory is summed where it is largest: after the forward, when all saved activations wait for the backward, with the
working set of one of the largest ops beside it. Parameters, gradients and optimizer state are counted throughout; for
programs that run, also what the model is called with and gives back, and the optimizer's update at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from autopar.cost_model.ends import Ends
from autopar.cost_model.lasting import (
    HeldNode,
    HeldPart,
    HeldPrices,
    add_held,
    gradient_wires,
    lasting_slots,
    lasting_wires,
)
from autopar.cost_model.later import Asked, LaterNode, LaterPart, LaterPrices, add_later
from autopar.cost_model.live import LOOP_COPIES
from autopar.cost_model.sums import reduces, waiting_sums
from autopar.cost_model.wiring import Reader, Slot, SlotKind, Wire, Wiring, stays
from autopar.errors import CompilerError
from autopar.ir.graph import CapturedGraph, InputKind, Node, OutputKind, Phase, TensorMeta
from autopar.ir.layout import Layout, local_shape
from autopar.ir.load import WHOLE, Load
from autopar.ir.mesh import Mesh
from autopar.ir.options import RECOMPUTE, Options
from autopar.ir.problem import INFINITY, Consumer, Moment, NodeBytes, Problem, ProblemNode, ProblemValue, VersionBytes
from autopar.ir.strategy import Strategy, StrategyTable

WORKING_SETS = 3
"""How many of the largest ops get a memory moment of their own."""


class Prices(Protocol):
    """What the builder asks of the cost model, on one cluster and mesh. Metas are local, but for `reshard_us`."""

    def op_us(
        self, node: Node, strategy: Strategy, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...]
    ) -> tuple[float, float]:
        """(computation µs, communication inside the op µs)."""

    def reshard_us(self, meta: TensorMeta, before: Layout, after: Layout, stays: bool = False) -> float:
        """µs to convert a tensor of global `meta`, which `stays` anyway or goes; inf if impossible."""

    def steps_us(self, meta: TensorMeta, before: Layout, after: Layout, stays: bool = False) -> list[float]:
        """`reshard_us` by step."""

    def copy_us(self, nbytes: int) -> float:
        """µs to copy so many bytes on the device."""

    @property
    def updates_at_once(self) -> bool:
        """True if the optimizer updates all parameters together, not one after the other."""

    def optimizer_us(self, numel: int, dtype: str, state_bytes_per_parameter: int) -> float:
        """µs to update `numel` parameters."""

    def is_view(self, node: Node) -> bool:
        """True if the op's output shares its first input's storage."""


@dataclass(frozen=True, slots=True)
class WholeBytes:
    """Bytes of all instances on a mesh, before they are cut into stages: what the moments are made of.

    `resident`: (node, slot whose bytes they are, bytes per strategy); `working`: (slot, bytes per strategy); `saved`:
    versions that wait for the backward of one micro-batch.
    """

    resident: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    saved: tuple[VersionBytes, ...] = ()
    working: tuple[tuple[int, tuple[int, ...]], ...] = ()


class When(Enum):
    """When a step pays: in every micro-batch, there in the forward or the backward, or once."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ONCE = "once"


@dataclass(frozen=True, slots=True)
class Priced:
    """A problem and what its indices mean.

    Attributes:
        options: per slot (= problem node, the first of them), what its strategies are.
        compute_us: per slot and strategy, the part of the cost that is computation.
        layouts: per problem value, its layout indices (None: nothing there, nothing asked).
        wires: per problem value, index of its wire; None for one that holds no tensor.
        later: choices about what the backward finds of the forward, beyond the slots' own (`cost_model.later`).
        held: choices about what stays for all micro-batches of a step (`cost_model.lasting`).
        when: per problem value, when its conversions are paid.
        lasting: slots that run once a step.
    """

    problem: Problem
    wiring: Wiring
    mesh: Mesh
    options: tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...]
    compute_us: tuple[tuple[float, ...], ...]
    layouts: tuple[tuple[Layout | None, ...], ...]
    wires: tuple[int | None, ...]
    later: tuple[LaterNode, ...] = ()
    held: tuple[HeldNode, ...] = ()
    when: tuple[When, ...] = ()
    lasting: frozenset[int] = frozenset()
    load: Load = WHOLE
    whole_bytes: WholeBytes = WholeBytes()


@dataclass(frozen=True, slots=True)
class _Context:
    captured: CapturedGraph
    table: StrategyTable
    prices: Prices
    options: Options
    metas: Mapping[str, Mapping[str, TensorMeta]]
    pieces: dict[tuple[TensorMeta, Layout], TensorMeta]
    load: Load
    mesh: Mesh
    ends: Ends
    lasting: frozenset[int]
    lasting_wires: frozenset[int]
    once_prices: Prices
    stays: frozenset[int]

    def weight(self, slot: int) -> float:
        """How often a step pays for an op, as `Load` weighs it."""
        return self.load.once if slot in self.lasting else self.load.runs

    def convert_us(self, index: int, wire: Wire, before: Layout, after: Layout, *, once: bool) -> float:
        """A conversion of all instances. What micro-batches don't cut is priced on the devices' own mesh."""
        lasts = index in self.lasting_wires or once
        prices = self.once_prices if lasts else self.prices
        price = prices.reshard_us(wire.meta, before, after, index in self.stays)
        return price * wire.count * (self.load.once if once else self.load.runs)

    def piece(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        """Local meta of the device with the largest piece."""
        key = (meta, layout)
        found = self.pieces.get(key)
        if found is None:
            found = self.pieces[key] = TensorMeta(
                local_shape(meta.shape, layout, self.table.mesh, meta.units), meta.dtype
            )
        return found

    def stored(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        """Local meta of a parameter: micro-batches don't cut it."""
        return TensorMeta(local_shape(meta.shape, layout, self.mesh, meta.units), meta.dtype)


def build_problem(
    captured: CapturedGraph,
    wiring: Wiring,
    table: StrategyTable,
    prices: Prices,
    options: Options,
    limit_bytes: int,
    *,
    load: Load = WHOLE,
    mesh: Mesh | None = None,
    once_prices: Prices | None = None,
    emitted: bool = False,
) -> Priced:
    """The problem of one mesh. Raises CompilerError where the table lacks a slot.

    `load` says how the step runs on it. With micro-batches `table` is of a mesh whose `dp` is as many times longer as
    there are of them (a rank's piece of one micro-batch is what so many ranks would have of the whole batch); `mesh` is
    that of the devices, and `once_prices` are the prices on it. `emitted`: a program is made of the answer as it is, so
    that memory is counted to the end of the step, with what callers hold.
    """
    metas = {g.name: {name: v.meta for name, v in g.values().items()} for g in captured.graphs}
    lasting = lasting_slots(wiring) if load != WHOLE else frozenset[int]()
    context = _Context(
        captured, table, prices, options, metas, {}, load, mesh or table.mesh, Ends.of(captured, wiring), lasting,
        lasting_wires(wiring, lasting) | frozenset(gradient_wires(wiring) if load != WHOLE else ()),
        once_prices or prices, frozenset(i for i, w in enumerate(wiring.wires) if stays(wiring, w)),
    )  # fmt: skip
    choices = tuple(_options(slot, context) for slot in wiring.slots)
    priced = [_node(i, slot, picks, context) for i, (slot, picks) in enumerate(zip(wiring.slots, choices, strict=True))]
    values, layouts = [], []
    waiting = waiting_sums(wiring, choices)
    part = _later(wiring, choices, priced, context) if RECOMPUTE in options.allow else LaterPart()
    held = _held(wiring, choices, part, context) if load != WHOLE else HeldPart()
    kept = {c.wire for c in part.choices}
    for index, wire in enumerate(wiring.wires):
        gone = held.through.get(index, frozenset[int]())
        gone |= frozenset(saved_readers(wire, wiring, prices)) if index in kept else frozenset()
        readers = [r for i, r in enumerate(wire.readers) if i not in gone]
        asked = () if index in context.lasting_wires else part.asked.get(index, ())
        value, names = _value(index, wire, readers, asked, choices, context, waits=index in waiting)
        values.append(value)
        layouts.append(names)
    saved = () if RECOMPUTE in options.allow else _kept(wiring, tuple(layouts), context)
    whole = _whole(captured, wiring, choices, saved, held, context)
    moments = _moments(captured, wiring, whole, part.choices, context, limit_bytes)
    if moments and emitted:
        moments = _to_the_end(wiring, choices, whole, moments, context)
    problem = Problem(
        name=f"{captured.model_name} on {context.mesh}" + (f" ({load})" if load != WHOLE else ""),
        nodes=(*(node for node, _ in priced), *part.nodes, *held.nodes),
        values=(*values, *part.values, *held.values),
        moments=moments,
    )
    added: dict[int, tuple[int, tuple[Layout | None, ...], When]] = {
        v.value: (v.wire, v.layouts, When.BACKWARD) for v in part.read
    }
    added |= {v.value: (v.wire, v.layouts, When.ONCE if v.once else When(v.phase.value)) for v in held.read}
    more = [added.get(i, (None, (), When.BACKWARD)) for i in range(len(values), len(problem.values))]
    return Priced(
        problem, wiring, context.mesh, choices, tuple(compute for _, compute in priced),
        (*layouts, *(names for _, names, _ in more)),
        (*range(len(values)), *(wire for wire, _, _ in more)),
        part.choices, held.choices,
        (*(_when(i, w, context) for i, w in enumerate(wiring.wires)), *(when for _, _, when in more)),
        lasting, load, whole,
    )  # fmt: skip


def _when(index: int, wire: Wire, context: _Context) -> When:
    if index in context.lasting_wires:
        return When.ONCE
    return When.BACKWARD if wire.readers[0].phase is Phase.BACKWARD else When.FORWARD


def _held(
    wiring: Wiring, choices: tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...], part: LaterPart, context: _Context
) -> HeldPart:
    """What stays for all micro-batches of a step."""
    wires = wiring.wires
    prices = HeldPrices(
        convert_us=lambda i, p, q, once: context.convert_us(i, wires[i], p, q, once=once),
        bytes=lambda i, q: context.stored(wires[i].meta, q).nbytes * wires[i].count,
    )
    lasting = context.lasting_wires
    return add_held(
        wiring, choices, context.lasting, {i: a for i, a in part.asked.items() if i in lasting}, prices,
        nodes=len(wiring.slots) + len(part.nodes), values=len(wires) + len(part.values),
    )  # fmt: skip


def _later(
    wiring: Wiring,
    choices: tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...],
    priced: list[tuple[ProblemNode, tuple[float, ...]]],
    context: _Context,
) -> LaterPart:
    """What is kept for the backward, or made again there."""
    wires = wiring.wires

    def made(index: int, layout: Layout) -> int:
        return context.piece(wires[index].meta, layout).nbytes

    late = {
        i: found
        for i, wire in enumerate(wires)
        if i not in context.lasting_wires and (found := saved_readers(wire, wiring, context.prices))
    }
    prices = LaterPrices(
        again_us=lambda slot, s: priced[slot][0].cost_us[s],
        convert_us=lambda i, p, q: context.convert_us(i, wires[i], p, q, once=False),
        kept_bytes=lambda i, q: made(i, q) * wires[i].saved_count,
        made_bytes=made,
    )
    return add_later(wiring, choices, late, prices, context.lasting_wires)


def _options(slot: Slot, context: _Context) -> tuple[Strategy, ...] | tuple[Layout, ...]:
    table = context.table
    try:
        match slot.kind:
            case SlotKind.OP:
                return table.nodes[slot.graph][slot.name]
            case SlotKind.INPUT:
                return table.inputs[slot.graph][slot.name]
            case SlotKind.OUTPUT:
                return table.outputs[slot.graph][int(slot.name)]
            case SlotKind.STORAGE:
                return _shared_storage(slot, table)
    except KeyError as error:
        raise CompilerError(f"the strategy table has no entry for {slot} ({error})") from None


def _shared_storage(slot: Slot, table: StrategyTable) -> tuple[Layout, ...]:
    """Layouts that every parameter of the class may be stored in."""
    first = table.storage[slot.parameters[0]]
    others = [set(table.storage[name]) for name in slot.parameters[1:]]
    shared = tuple(layout for layout in first if all(layout in other for other in others))
    if not shared:
        raise CompilerError(f"parameters {slot.parameters[:3]} must be stored alike, but have no layout in common")
    return shared


def _node(
    index: int, slot: Slot, picks: tuple[Strategy, ...] | tuple[Layout, ...], context: _Context
) -> tuple[ProblemNode, tuple[float, ...]]:
    if slot.kind is SlotKind.OP:
        compute, inner = _op_costs(index, slot, picks, context)
    elif slot.kind is SlotKind.STORAGE:
        compute, inner = _update_costs(slot, picks, context), (0.0,) * len(picks)
    else:
        compute = inner = (0.0,) * len(picks)
    cost = tuple(c + i for c, i in zip(compute, inner, strict=True))
    return ProblemNode(name=str(slot), cost_us=cost), compute


def _op_costs(
    index: int, slot: Slot, picks: tuple[Strategy, ...] | tuple[Layout, ...], context: _Context
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    node = slot.node
    assert node is not None
    metas = [context.metas[slot.graph][ref] for ref in node.refs]
    compute, inner = [], []
    piece = context.stored if index in context.lasting else context.piece
    weight = slot.count * context.weight(index)
    for pick in picks:
        assert isinstance(pick, Strategy)
        ins = tuple(piece(m, layout) for m, layout in zip(metas, pick.inputs, strict=True))
        outs = tuple(
            None if out is None or layout is None else piece(out.meta, layout)
            for out, layout in zip(node.outputs, pick.outputs, strict=True)
        )
        work, communication = context.prices.op_us(node, pick, ins, outs)
        compute.append(work * weight)
        inner.append(communication * weight)
    return tuple(compute), tuple(inner)


def _trainable(slot: Slot, context: _Context) -> bool:
    return any(p.requires_grad for p in context.captured.parameters if p.name in slot.parameters)


def _update_costs(slot: Slot, picks: tuple[Strategy, ...] | tuple[Layout, ...], context: _Context) -> tuple[float, ...]:
    assert slot.meta is not None
    if not _trainable(slot, context):
        return (0.0,) * len(picks)
    state = context.options.optimizer_bytes_per_parameter
    costs = []
    for pick in picks:
        assert isinstance(pick, Layout)
        piece = context.stored(slot.meta, pick)
        costs.append(slot.count * context.load.once * context.prices.optimizer_us(piece.numel, piece.dtype, state))
    return tuple(costs)


def _layout_of(pick: Strategy | Layout, position: int, *, output: bool) -> Layout:
    if isinstance(pick, Layout):
        return pick
    layout = pick.outputs[position] if output else pick.inputs[position]
    if layout is None:
        raise CompilerError(f"strategy {pick} has no layout at output {position}, which is read")
    return layout


def _value(
    index_of_wire: int,
    wire: Wire,
    readers: list[Reader],
    asked: tuple[Asked, ...],
    choices: tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...],
    context: _Context,
    *,
    waits: bool,
) -> tuple[ProblemValue, tuple[Layout | None, ...]]:
    """The wire's value for these readers, and its layouts. `waits`: no pending sum is reduced here."""
    made = [_layout_of(pick, wire.position, output=True) for pick in choices[wire.producer]]
    wants: list[tuple[Layout | None, ...]] = [
        tuple(_layout_of(pick, r.position, output=False) for pick in choices[r.slot]) for r in readers
    ]
    nodes = [*(r.slot for r in readers), *(a.node for a in asked)]
    wants += [a.wants for a in asked]
    names = tuple(dict.fromkeys([*made, *(layout for row in wants for layout in row)]))
    index = {layout: i for i, layout in enumerate(names)}
    wanted = {layout for row in wants for layout in row}
    table = [[0.0 if p == q else INFINITY for q in names] for p in names]
    once = index_of_wire in context.lasting_wires
    for p in dict.fromkeys(made):
        for q in wanted:
            if q is None:
                table[index[p]][index[q]] = 0.0
            elif p != q and not (waits and reduces(p, q)):
                table[index[p]][index[q]] = context.convert_us(index_of_wire, wire, p, q, once=once)
    value = ProblemValue(
        name=f"{wire.names[0][0]}:{wire.names[0][1]}"
        + (f":{wire.readers[0].phase.value}" if wire.of_parameter else ""),
        producer=wire.producer,
        made=tuple(index[layout] for layout in made),
        consumers=tuple(
            Consumer(node=node, wants=tuple(index[layout] for layout in row))
            for node, row in zip(nodes, wants, strict=True)
        ),
        reshard_us=tuple(map(tuple, table)),
    )
    return value, names


def _whole(
    captured: CapturedGraph,
    wiring: Wiring,
    choices: tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...],
    saved: tuple[VersionBytes, ...],
    held: HeldPart,
    context: _Context,
) -> WholeBytes:
    """What the moments are made of; `saved`: what waits for the backward, where no choice says what does."""
    storage = [i for i, s in enumerate(wiring.slots) if s.kind is SlotKind.STORAGE]
    largest = sorted(
        (-_whole_bytes(s.node, context, s.graph), i)
        for i, s in enumerate(wiring.slots)
        if s.kind is SlotKind.OP and s.node
    )[:WORKING_SETS]
    return WholeBytes(
        resident=(
            *((i, i, _state_bytes(i, choices[i], context, wiring).bytes) for i in storage),
            *((c.node, c.slot, c.bytes) for c in held.choices),
        ),
        saved=saved,
        working=tuple(
            (i, tuple(working_bytes(wiring.slots[i], pick, context) for pick in choices[i])) for _, i in largest
        ),
    )


def _moments(
    captured: CapturedGraph,
    wiring: Wiring,
    whole: WholeBytes,
    later: tuple[LaterNode, ...],
    context: _Context,
    limit_bytes: int,
) -> tuple[Moment, ...]:
    """The end of the forward on each stage whose memory is limited, with the working set of one of the largest ops."""
    if limit_bytes <= 0 or math.isinf(limit_bytes):
        return ()
    found = []
    for stage, where in context.ends.stages(context.load):
        part = context.ends.part(context.load, stage)
        held = [
            NodeBytes(node=node, bytes=part.share(sizes, slot, waits=False)) for node, slot, sizes in whole.resident
        ]
        for kept in later:
            if any(kept.kept_bytes) or any(kept.made_bytes):
                sizes = part.share(kept.kept_bytes, kept.slot, waits=True)
                made = kept.made_bytes if part.holds(kept.slot) else (0,) * len(sizes)
                held.append(NodeBytes(node=kept.node, bytes=tuple(k + m for k, m in zip(sizes, made, strict=True))))
        versions = tuple(
            replace(v, bytes=part.share(v.bytes, wiring.wires[v.value].producer, waits=True)) for v in whole.saved
        )
        base = Moment(
            name=f"end of forward{where}", limit_bytes=limit_bytes, fixed_bytes=fixed_bytes(captured, wiring),
            nodes=tuple(held), versions=versions,
        )  # fmt: skip
        working = [(i, sizes) for i, sizes in whole.working if part.holds(i)]
        found += [
            replace(base, name=f"at {wiring.slots[i].name}{where}", nodes=(*held, NodeBytes(node=i, bytes=sizes)))
            for i, sizes in working
        ] or [base]
    return tuple(found)


def _to_the_end(
    wiring: Wiring,
    choices: tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...],
    whole: WholeBytes,
    moments: tuple[Moment, ...],
    context: _Context,
) -> tuple[Moment, ...]:
    """With what callers hold, and the optimizer's update after all the others."""
    callers = _callers_bytes(wiring, choices, context)
    last = replace(
        moments[0], name="optimizer", versions=(),
        nodes=_added([(node, sizes) for node, _, sizes in whole.resident] + _update_bytes(wiring, choices, context)),
    )  # fmt: skip
    return tuple(replace(m, nodes=(*m.nodes, *callers)) for m in (*moments, last))


def _added(terms: list[tuple[int, tuple[int, ...]]]) -> tuple[NodeBytes, ...]:
    """(node, bytes per strategy), nodes that come twice added up."""
    found: dict[int, tuple[int, ...]] = {}
    for node, sizes in terms:
        found[node] = tuple(map(sum, zip(sizes, found.get(node, (0,) * len(sizes)), strict=True)))
    return tuple(NodeBytes(node=node, bytes=sizes) for node, sizes in found.items())


def _callers_bytes(
    wiring: Wiring, choices: tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...], context: _Context
) -> tuple[NodeBytes, ...]:
    """What the model is called with and gives back."""
    top, kinds = context.captured.top, (InputKind.INPUT, InputKind.CONSTANT, InputKind.TANGENT)
    names = {
        SlotKind.INPUT: {i.value.name for i in top.inputs if i.kind in kinds},
        SlotKind.OUTPUT: {str(i) for i, o in enumerate(top.outputs) if o.kind is OutputKind.OUTPUT},
    }
    found = []
    for i, slot in enumerate(wiring.slots):
        if slot.graph == "top" and slot.meta is not None and slot.name in names.get(slot.kind, ()):
            pieces = (context.piece(slot.meta, pick) for pick in choices[i] if isinstance(pick, Layout))
            found.append(NodeBytes(node=i, bytes=tuple(piece.nbytes for piece in pieces)))
    return tuple(found)


def _update_bytes(
    wiring: Wiring, choices: tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...], context: _Context
) -> list[tuple[int, tuple[int, ...]]]:
    """Copies that AdamW's update holds: of all that trains, or of the largest parameter."""
    found = []
    for i, slot in enumerate(wiring.slots):
        if slot.kind is SlotKind.STORAGE and slot.meta is not None and _trainable(slot, context):
            copies = slot.count if context.prices.updates_at_once else LOOP_COPIES
            pieces = (context.stored(slot.meta, pick) for pick in choices[i] if isinstance(pick, Layout))
            found.append((i, tuple(copies * piece.nbytes for piece in pieces)))
    if context.prices.updates_at_once or not found:
        return found
    return [max(found, key=lambda update: max(update[1]))]


def _kept(
    wiring: Wiring, layouts: tuple[tuple[Layout | None, ...], ...], context: _Context
) -> tuple[VersionBytes, ...]:
    """All that the backward reads is kept, in the layouts that it is read in."""
    saved = []
    for i, wire in enumerate(wiring.wires):
        late = saved_readers(wire, wiring, context.prices)
        if late and i not in context.lasting_wires:
            pieces = [context.piece(wire.meta, layout).nbytes if layout is not None else 0 for layout in layouts[i]]
            saved.append(
                VersionBytes(value=i, consumers=late, bytes=tuple(piece * wire.saved_count for piece in pieces))
            )
    return tuple(saved)


def fixed_bytes(captured: CapturedGraph, wiring: Wiring) -> int:
    """Bytes of buffers and of parameters that no op reads."""
    unused = set(wiring.unused_parameters)
    return sum(b.meta.nbytes for b in captured.buffers) + sum(
        p.meta.nbytes for p in captured.parameters if p.name in unused
    )


def saved_readers(wire: Wire, wiring: Wiring, prices: Prices) -> tuple[int, ...]:
    """Positions of the readers for which a forward tensor waits until the backward. Parameters wait anyway.

    A view shares storage with what it was made from, which is counted where that waits too.
    """
    if wire.phase is not Phase.FORWARD or stays(wiring, wire):
        return ()
    return tuple(i for i, r in enumerate(wire.readers) if _waits(r, wiring, prices))


def _waits(reader: Reader, wiring: Wiring, prices: Prices) -> bool:
    return reader.phase is Phase.BACKWARD and wiring.slots[reader.slot].kind is SlotKind.OP


def _state_bytes(
    index: int, picks: tuple[Strategy, ...] | tuple[Layout, ...], context: _Context, wiring: Wiring
) -> NodeBytes:
    slot = wiring.slots[index]
    assert slot.meta is not None
    weight, gradient, state = state_bytes_per_parameter(slot, context.captured, context.options)
    per = (weight, 0 if context.lasting else gradient, state)  # a sum of gradients has a node of its own
    sizes = []
    for pick in picks:
        assert isinstance(pick, Layout)
        sizes.append(sum(per) * context.stored(slot.meta, pick).numel * slot.count)
    return NodeBytes(node=index, bytes=tuple(sizes))


def state_bytes_per_parameter(slot: Slot, captured: CapturedGraph, options: Options) -> tuple[int, int, int]:
    """(weight, gradient, optimizer) bytes of one element of a storage slot."""
    assert slot.meta is not None
    item = slot.meta.nbytes // max(1, slot.meta.numel) if slot.meta.numel else 0
    trains = any(p.requires_grad for p in captured.parameters if p.name in slot.parameters)
    return (item, item, options.optimizer_bytes_per_parameter) if trains else (item, 0, 0)


def _whole_bytes(node: Node | None, context: _Context, graph: str) -> int:
    assert node is not None
    metas = context.metas[graph]
    return sum(metas[r].nbytes for r in dict.fromkeys(node.refs)) + sum(o.meta.nbytes for o in node.outputs if o)


def working_bytes(slot: Slot, pick: Strategy | Layout, context: _Context) -> int:
    """Local bytes of the op's tensors."""
    assert slot.node is not None and isinstance(pick, Strategy)
    metas = context.metas[slot.graph]
    ins = {(ref, layout) for ref, layout in zip(slot.node.refs, pick.inputs, strict=True)}
    read = sum(context.piece(metas[ref], layout).nbytes for ref, layout in ins)
    made = sum(
        context.piece(o.meta, layout).nbytes
        for o, layout in zip(slot.node.outputs, pick.outputs, strict=True)
        if o is not None and layout is not None
    )
    return read + made
