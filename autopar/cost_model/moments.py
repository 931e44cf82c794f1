"""The memory that a problem is held against: what waits, stays and is worked on, and the moments that sum it.

Memory is summed where it is largest: after the forward, when all saved activations wait for the backward, with the
working set of one of the largest ops beside it. Parameters, gradients and optimizer state are counted throughout; for
programs that run, also what the model is called with and gives back, and the optimizer's update at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar import ops
from autopar.cost_model.context import Choices, Context, Prices, trainable
from autopar.cost_model.lasting import HeldNode, HeldPart
from autopar.cost_model.later import LaterNode
from autopar.cost_model.live import LOOP_COPIES
from autopar.cost_model.wiring import Reader, Slot, SlotKind, Wire, Wiring, stays
from autopar.ir.graph import CapturedGraph, InputKind, Node, OutputKind, Phase, TensorMeta
from autopar.ir.layout import Layout
from autopar.ir.options import Options
from autopar.ir.problem import Moment, NodeBytes, VersionBytes
from autopar.ir.strategy import Strategy

WORKING_SETS = 3
"""How many of the largest ops get a memory moment of their own, of each graph where stages hold some of them."""


PARAMETERS, GRADIENTS, OPTIMIZER, COPIES = "parameters", "gradients", "optimizer", "weights as read"
"""Kinds of what is there all through a step; `COPIES`: beside the stored parameters (`lasting`)."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of `slot`, under each strategy of `node`, of one kind."""

    node: int
    slot: int
    kind: str
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WholeBytes:
    """Bytes of all instances on a mesh, before they are cut into stages: what the moments are made of.

    `working`: (slot, bytes per strategy); `saved`: versions that wait for the backward of one micro-batch.
    """

    resident: tuple[Resident, ...]
    saved: tuple[VersionBytes, ...]
    working: tuple[tuple[int, tuple[int, ...]], ...]

    def resident_by_node(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(node, slot whose bytes they are, bytes per strategy), all kinds together."""
        found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for held in self.resident:
            found.setdefault((held.node, held.slot), []).append(held.bytes)
        return [(*key, tuple(map(sum, zip(*sizes, strict=True)))) for key, sizes in found.items()]


def whole_bytes(
    wiring: Wiring,
    choices: Choices,
    saved: tuple[VersionBytes, ...],
    held: HeldPart,
    context: Context,
) -> WholeBytes:
    """What the moments are made of; `saved`: what waits for the backward, where no choice says what does."""
    names = [g.name for g in context.captured.graphs]
    together = [{name} for name in names] if held.nodes else [set(names)]  # stages hold some graphs each
    largest = [i for graphs in together for i in _largest_ops(wiring, graphs, context)]
    return WholeBytes(
        resident=resident_bytes(wiring, choices, held.choices, context),
        saved=saved,
        working=tuple(
            (i, tuple(working_bytes(wiring.slots[i], pick, context) for pick in choices[i])) for i in largest
        ),
    )


def resident_bytes(
    wiring: Wiring, choices: Choices, held: tuple[HeldNode, ...], context: Context
) -> tuple[Resident, ...]:
    """What stays all through a step."""
    found = []
    for i, slot in enumerate(wiring.slots):
        if slot.kind is SlotKind.STORAGE:
            found += _state_bytes(i, choices[i], context, wiring)
    for node in held:
        wire = wiring.wires[node.wire]
        sizes = tuple(
            0 if c.own and not node.gradient else context.stored(wire.meta, c.layout).nbytes * wire.count
            for c in node.choices
        )
        found.append(Resident(node.node, node.slot, GRADIENTS if node.gradient else COPIES, sizes))
    return tuple(found)


def _largest_ops(wiring: Wiring, graphs: set[str], context: Context) -> list[int]:
    """Slots of the ops of these graphs that work on most bytes."""
    found = sorted(
        (-_op_bytes(s.node, context, s.graph), i)
        for i, s in enumerate(wiring.slots)
        if s.kind is SlotKind.OP and s.node and s.graph in graphs
    )
    return [i for _, i in found[:WORKING_SETS]]


def moments_of(
    wiring: Wiring, whole: WholeBytes, later: tuple[LaterNode, ...], context: Context, limit_bytes: int
) -> tuple[Moment, ...]:
    """The end of the forward, with the working set of one of the largest ops."""
    if limit_bytes <= 0 or math.isinf(limit_bytes):
        return ()
    held = [NodeBytes(node=node, bytes=sizes) for node, _, sizes in whole.resident_by_node()]
    for kept in later:
        if any(kept.kept_bytes) or any(kept.made_bytes):
            sizes = tuple(k + m for k, m in zip(kept.kept_bytes, kept.made_bytes, strict=True))
            held.append(NodeBytes(node=kept.node, bytes=sizes))
    base = Moment(
        name="end of forward", limit_bytes=limit_bytes, fixed_bytes=fixed_bytes(context.captured, wiring),
        nodes=tuple(held), versions=whole.saved,
    )  # fmt: skip
    return tuple(
        replace(base, name=f"at {wiring.slots[i].name}", nodes=(*held, NodeBytes(node=i, bytes=sizes)))
        for i, sizes in whole.working
    ) or (base,)


def to_the_end(
    wiring: Wiring,
    choices: Choices,
    whole: WholeBytes,
    moments: tuple[Moment, ...],
    context: Context,
) -> tuple[Moment, ...]:
    """With what callers hold, and the optimizer's update after all the others."""
    callers = _callers_bytes(wiring, choices, context)
    resident = [(node, sizes) for node, _, sizes in whole.resident_by_node()]
    last = replace(
        moments[0], name="optimizer", versions=(),
        nodes=_added(resident + _update_bytes(wiring, choices, context)),
    )  # fmt: skip
    return tuple(replace(m, nodes=(*m.nodes, *callers)) for m in (*moments, last))


def _added(terms: list[tuple[int, tuple[int, ...]]]) -> tuple[NodeBytes, ...]:
    """(node, bytes per strategy), nodes that come twice added up."""
    found: dict[int, tuple[int, ...]] = {}
    for node, sizes in terms:
        found[node] = tuple(map(sum, zip(sizes, found.get(node, (0,) * len(sizes)), strict=True)))
    return tuple(NodeBytes(node=node, bytes=sizes) for node, sizes in found.items())


def _callers_bytes(wiring: Wiring, choices: Choices, context: Context) -> tuple[NodeBytes, ...]:
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


def _update_bytes(wiring: Wiring, choices: Choices, context: Context) -> list[tuple[int, tuple[int, ...]]]:
    """Copies that AdamW's update holds: of all that trains, or of the largest parameter."""
    found = []
    for i, slot in enumerate(wiring.slots):
        if slot.kind is SlotKind.STORAGE and slot.meta is not None and trainable(slot, context):
            copies = slot.count if context.prices.updates_at_once else LOOP_COPIES
            pieces = (context.stored(slot.meta, pick) for pick in choices[i] if isinstance(pick, Layout))
            found.append((i, tuple(copies * piece.nbytes for piece in pieces)))
    if context.prices.updates_at_once or not found:
        return found
    return [max(found, key=lambda update: max(update[1]))]


def kept_versions(
    wiring: Wiring, layouts: tuple[tuple[Layout | None, ...], ...], context: Context
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
    index: int, picks: tuple[Strategy, ...] | tuple[Layout, ...], context: Context, wiring: Wiring
) -> list[Resident]:
    """Weights, gradients and optimizer state of a storage slot. A sum over micro-batches has a node of its own."""
    slot = wiring.slots[index]
    assert slot.meta is not None
    weight, gradient, state = state_bytes_per_parameter(slot, context.captured, context.options)
    per = {PARAMETERS: weight, GRADIENTS: 0 if context.lasting else gradient, OPTIMIZER: state}
    numel = [context.stored(slot.meta, pick).numel * slot.count for pick in picks if isinstance(pick, Layout)]
    return [Resident(index, index, kind, tuple(each * n for n in numel)) for kind, each in per.items()]


def state_bytes_per_parameter(slot: Slot, captured: CapturedGraph, options: Options) -> tuple[int, int, int]:
    """(weight, gradient, optimizer) bytes of one element of a storage slot."""
    assert slot.meta is not None
    item = slot.meta.nbytes // max(1, slot.meta.numel) if slot.meta.numel else 0
    trains = any(p.requires_grad for p in captured.parameters if p.name in slot.parameters)
    return (item, item, options.optimizer_bytes_per_parameter) if trains else (item, 0, 0)


def _op_bytes(node: Node | None, context: Context, graph: str) -> int:
    assert node is not None
    metas = context.metas[graph]
    return sum(metas[r].nbytes for r in dict.fromkeys(node.refs)) + sum(o.meta.nbytes for o in node.outputs if o)


def working_bytes(slot: Slot, pick: Strategy | Layout, context: Context) -> int:
    """Local bytes of the op's tensors, and of what its local form holds beside them."""
    assert slot.node is not None and isinstance(pick, Strategy)
    metas = context.metas[slot.graph]
    ins = {(ref, layout) for ref, layout in zip(slot.node.refs, pick.inputs, strict=True)}
    read = sum(context.piece(metas[ref], layout).nbytes for ref, layout in ins)
    made = sum(
        context.piece(o.meta, layout).nbytes
        for o, layout in zip(slot.node.outputs, pick.outputs, strict=True)
        if o is not None and layout is not None
    )
    return read + made + (_beside_bytes(slot.node, pick, metas, context) if any(pick.tags) else 0)


def _beside_bytes(node: Node, pick: Strategy, metas: Mapping[str, TensorMeta], context: Context) -> int:
    wholes = tuple(metas[ref] for ref in node.refs)
    pieces = tuple(context.piece(meta, layout) for meta, layout in zip(wholes, pick.inputs, strict=True))
    outputs = tuple(
        None if o is None or layout is None else context.piece(o.meta, layout)
        for o, layout in zip(node.outputs, pick.outputs, strict=True)
    )
    call = ops.local_call(node, pick, context.table.mesh, pieces, outputs, wholes)
    return ops.held_bytes(call.function, call.args, pieces, context.table.mesh)
