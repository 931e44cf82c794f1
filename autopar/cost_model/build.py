"""Strategies and a cluster -> the problem as plain numbers, with the way back.

Every choice of a slot becomes a strategy of a problem node; every wire a value whose conversions are priced by the same
planner that code generation emits. Counts of tied blocks are folded into every number; how often a step pays for them
is not, where it runs in micro-batches (`cost_model.pipeline`). What memory that takes, and when, is in `moments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autopar.cost_model.context import Choices, Context, Prices, trainable
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
from autopar.cost_model.moments import WholeBytes, kept_versions, moments_of, saved_readers, to_the_end, whole_bytes
from autopar.cost_model.sums import reduces, waiting_sums
from autopar.cost_model.wiring import Reader, Slot, SlotKind, Wire, Wiring, stays
from autopar.errors import CompilerError
from autopar.ir.graph import CapturedGraph, Phase
from autopar.ir.layout import Layout
from autopar.ir.load import Load
from autopar.ir.mesh import Mesh
from autopar.ir.options import RECOMPUTE, Options
from autopar.ir.places import joinable_values
from autopar.ir.problem import INFINITY, Consumer, Problem, ProblemNode, ProblemValue
from autopar.ir.strategy import Strategy, StrategyTable


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
        pieces: the mesh that cuts a tensor as small as a rank's piece of one micro-batch; without those, `mesh`.
    """

    problem: Problem
    wiring: Wiring
    mesh: Mesh
    pieces: Mesh
    options: Choices
    compute_us: tuple[tuple[float, ...], ...]
    layouts: tuple[tuple[Layout | None, ...], ...]
    wires: tuple[int | None, ...]
    later: tuple[LaterNode, ...]
    held: tuple[HeldNode, ...]
    when: tuple[When, ...]
    lasting: frozenset[int]
    load: Load
    whole_bytes: WholeBytes


def build_problem(
    captured: CapturedGraph,
    wiring: Wiring,
    table: StrategyTable,
    prices: Prices,
    options: Options,
    limit_bytes: int,
    *,
    load: Load | None = None,
    mesh: Mesh | None = None,
    once_prices: Prices | None = None,
    emitted: bool = False,
) -> Priced:
    """The problem of one mesh. Raises CompilerError where the table lacks a slot.

    `load` says how the step runs on it; None: as one program. With stages or micro-batches nothing is weighed and no
    moment is held against the limit: `cost_model.pipeline` says where everything belongs. `table` is then of a mesh
    whose `dp` is as many times longer as there are micro-batches (a rank's piece of one is what so many ranks would
    have of the whole batch); `mesh` is that of the devices, and `once_prices` are the prices on it. `emitted`: a
    program is made of the answer as it is, so that memory is counted to the end of the step, with what callers hold.
    """
    context = context_of(captured, wiring, table, prices, options, load=load, mesh=mesh, once_prices=once_prices)
    choices = tuple(_options(slot, context) for slot in wiring.slots)
    priced = [
        node_costs(i, slot, picks, context) for i, (slot, picks) in enumerate(zip(wiring.slots, choices, strict=True))
    ]
    values, layouts = [], []
    waiting = waiting_sums(wiring, choices) if options.reduce_dtype == "stored" else frozenset[int]()
    chosen = load is not None or RECOMPUTE in options.allow
    part = _later(wiring, choices, priced, context) if chosen else LaterPart()
    held = _held(wiring, choices, part, context) if load else HeldPart()
    kept = {c.wire for c in part.choices}
    for index, wire in enumerate(wiring.wires):
        gone = held.through.get(index, frozenset[int]())
        gone |= frozenset(saved_readers(wire, wiring, prices)) if index in kept else frozenset()
        readers = [r for i, r in enumerate(wire.readers) if i not in gone]
        asked = () if index in context.lasting_wires else part.asked.get(index, ())
        value, names = _value(index, wire, readers, asked, choices, context, waits=index in waiting)
        values.append(value)
        layouts.append(names)
    saved = () if chosen else kept_versions(wiring, tuple(layouts), context)
    whole = whole_bytes(wiring, choices, saved, held, context)
    moments = moments_of(wiring, whole, part.choices, context, limit_bytes) if load is None else ()
    if moments and emitted:
        moments = to_the_end(wiring, choices, whole, moments, context)
    problem = Problem(
        name=f"{captured.model_name} on {context.mesh}" + (f" ({load})" if load else ""),
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
        problem, wiring, context.mesh, table.mesh, choices, tuple(compute for _, compute in priced),
        (*layouts, *(names for _, names, _ in more)),
        (*range(len(values)), *(wire for wire, _, _ in more)),
        part.choices, held.choices,
        (*(_when(i, w, context) for i, w in enumerate(wiring.wires)), *(when for _, _, when in more)),
        context.lasting, load or Load(), whole,
    )  # fmt: skip


def context_of(
    captured: CapturedGraph,
    wiring: Wiring,
    table: StrategyTable,
    prices: Prices,
    options: Options,
    *,
    load: Load | None = None,
    mesh: Mesh | None = None,
    once_prices: Prices | None = None,
) -> Context:
    """What numbers are worked out from; arguments as for `build_problem`."""
    metas = {g.name: {name: v.meta for name, v in g.values().items()} for g in captured.graphs}
    lasting = lasting_slots(wiring) if load else frozenset[int]()
    return Context(
        captured, table, prices, options, metas, {}, mesh or table.mesh, lasting,
        wires_of_a_step(wiring, lasting) if load else lasting_wires(wiring, lasting),
        once_prices or prices, frozenset(i for i, w in enumerate(wiring.wires) if stays(wiring, w)),
        _alone(captured, wiring) if load is not None and load.micro_batches > 1 else frozenset(),
    )  # fmt: skip


def _alone(captured: CapturedGraph, wiring: Wiring) -> frozenset[int]:
    """Wires of what micro-batches make one after the other."""
    free = joinable_values(captured.top)
    top = captured.top.name
    return frozenset(
        i for i, w in enumerate(wiring.wires) if not all(graph == top and name in free for graph, name in w.names)
    )


def wires_of_a_step(wiring: Wiring, lasting: frozenset[int]) -> frozenset[int]:
    """What is made once a step, and the gradients that the optimizer reads."""
    return lasting_wires(wiring, lasting) | frozenset(gradient_wires(wiring))


def _when(index: int, wire: Wire, context: Context) -> When:
    if index in context.lasting_wires:
        return When.ONCE
    return When.BACKWARD if wire.readers[0].phase is Phase.BACKWARD else When.FORWARD


def _held(wiring: Wiring, choices: Choices, part: LaterPart, context: Context) -> HeldPart:
    """What stays for all micro-batches of a step."""
    wires = wiring.wires
    prices = HeldPrices(convert_us=lambda i, p, q, once: context.convert_us(i, wires[i], p, q, once=once))
    lasting = context.lasting_wires
    return add_held(
        wiring, choices, context.lasting, {i: a for i, a in part.asked.items() if i in lasting}, prices,
        nodes=len(wiring.slots) + len(part.nodes), values=len(wires) + len(part.values),
    )  # fmt: skip


def _later(
    wiring: Wiring,
    choices: Choices,
    priced: list[tuple[ProblemNode, tuple[float, ...]]],
    context: Context,
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
    again = RECOMPUTE in context.options.allow
    return add_later(wiring, choices, late, prices, context.lasting_wires, again=again)


def _options(slot: Slot, context: Context) -> tuple[Strategy, ...] | tuple[Layout, ...]:
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


def node_costs(
    index: int, slot: Slot, picks: tuple[Strategy, ...] | tuple[Layout, ...], context: Context
) -> tuple[ProblemNode, tuple[float, ...]]:
    """A slot's node, and how much of its costs is computation."""
    if slot.kind is SlotKind.OP:
        compute, inner = _op_costs(index, slot, picks, context)
    elif slot.kind is SlotKind.STORAGE:
        compute, inner = _update_costs(slot, picks, context), (0.0,) * len(picks)
    else:
        compute = inner = (0.0,) * len(picks)
    cost = tuple(c + i for c, i in zip(compute, inner, strict=True))
    return ProblemNode(name=str(slot), cost_us=cost), compute


def _op_costs(
    index: int, slot: Slot, picks: tuple[Strategy, ...] | tuple[Layout, ...], context: Context
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    node = slot.node
    assert node is not None
    metas = [context.metas[slot.graph][ref] for ref in node.refs]
    compute, inner = [], []
    piece = context.stored if index in context.lasting else context.piece
    for pick in picks:
        assert isinstance(pick, Strategy)
        ins = tuple(piece(m, layout) for m, layout in zip(metas, pick.inputs, strict=True))
        outs = tuple(
            None if out is None or layout is None else piece(out.meta, layout)
            for out, layout in zip(node.outputs, pick.outputs, strict=True)
        )
        work, communication = context.prices.op_us(node, pick, ins, outs)
        compute.append(work * slot.count)
        inner.append(communication * slot.count)
    return tuple(compute), tuple(inner)


def _update_costs(slot: Slot, picks: tuple[Strategy, ...] | tuple[Layout, ...], context: Context) -> tuple[float, ...]:
    assert slot.meta is not None
    if not trainable(slot, context):
        return (0.0,) * len(picks)
    state = context.options.optimizer_bytes_per_parameter
    costs = []
    for pick in picks:
        assert isinstance(pick, Layout)
        piece = context.stored(slot.meta, pick)
        costs.append(slot.count * context.prices.optimizer_us(piece.numel, piece.dtype, state))
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
    choices: Choices,
    context: Context,
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
