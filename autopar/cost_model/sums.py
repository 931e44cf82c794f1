"""Which pending sums wait for a wider type: gradients in half precision of parameters that are wider.

Such a gradient is a wire that is read by a widening cast, or before that by an op of one float argument (a view, a
lookup's backward). To reduce it there would add up over ranks in half precision; so on such a wire a pending sum stays
one, and is reduced behind the cast, at twice the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_model.wiring import SlotKind, Wire, Wiring
from autopar.ir.graph import ITEM_BYTES, TensorMeta
from autopar.ir.layout import Kind, Layout
from autopar.ir.strategy import Strategy

Choices = Sequence[tuple[Strategy, ...] | tuple[Layout, ...]]
HALF = 2
"""Bytes of a float that holds no sum of many."""


def waiting_sums(wiring: Wiring, choices: Choices) -> frozenset[int]:
    """Indices of the wires on which a pending sum must stay one."""
    made: dict[int, list[int]] = {}
    read: dict[int, list[int]] = {}
    for index, wire in enumerate(wiring.wires):
        made.setdefault(wire.producer, []).append(index)
        for slot in {r.slot for r in wire.readers}:
            read.setdefault(slot, []).append(index)
    todo = [i for i, w in enumerate(wiring.wires) if _is_wide_gradient(w, wiring)]
    found: set[int] = set()
    while todo:
        maker = wiring.wires[todo.pop()].producer
        arguments = [i for i in read.get(maker, []) if "float" in wiring.wires[i].meta.dtype]
        if len(made[maker]) > 1 or not _keeps_sums(maker, choices[maker], [wiring.wires[i] for i in arguments]):
            continue
        only_here = [i for i in arguments if {r.slot for r in wiring.wires[i].readers} == {maker}]
        todo += [i for i in only_here if i not in found]
        found |= {i for i in only_here if _narrow(wiring.wires[i].meta)}
    return frozenset(found)


def reduces(before: Layout, after: Layout) -> bool:
    """True if a conversion reduces a pending sum on some axis."""
    ends = zip(before.placements, after.placements, strict=True)
    return any(p.kind is Kind.PARTIAL and q.kind is not Kind.PARTIAL for p, q in ends)


def _is_wide_gradient(wire: Wire, wiring: Wiring) -> bool:
    stored = all(wiring.slots[r.slot].kind is SlotKind.STORAGE for r in wire.readers)
    return stored and "float" in wire.meta.dtype and not _narrow(wire.meta)


def _keeps_sums(slot: int, picks: tuple[Strategy, ...] | tuple[Layout, ...], arguments: list[Wire]) -> bool:
    """True of an op that can make a pending sum of pending sums; in half precision, of one.

    `arguments`: the floats that it reads.
    """
    if len(arguments) > 1 and any(_narrow(w.meta) for w in arguments):
        return False
    positions = [r.position for w in arguments for r in w.readers if r.slot == slot]
    return any(isinstance(pick, Strategy) and _sum_to_sum(pick, positions) for pick in picks)


def _sum_to_sum(pick: Strategy, positions: list[int]) -> bool:
    """True if on some axis these arguments and the first result are pending sums."""
    layouts = [*(pick.inputs[i] for i in positions), *(x for x in pick.outputs[:1] if x is not None)]
    by_axis = zip(*(layout.placements for layout in layouts), strict=True)
    return any(all(p.kind is Kind.PARTIAL for p in placements) for placements in by_axis)


def _narrow(meta: TensorMeta) -> bool:
    return "float" in meta.dtype and ITEM_BYTES[meta.dtype] <= HALF
