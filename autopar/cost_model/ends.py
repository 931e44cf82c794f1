"""Which part of the model is on which pipeline stage: what comes before the blocks, the blocks, what comes after them.

Of what is not in a block, all that a block reads belongs to the first stage, and in the backward all that reads what
the last call of a block's backward has made; the rest to the last stage. A parameter is where it is read: one that both
ends read (a tied embedding) is on both.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.wiring import SlotKind, Wiring
from autopar.ir.ends import before_blocks
from autopar.ir.graph import CapturedGraph

FIRST, BLOCKS, LAST = "first", "blocks", "last"


@dataclass(frozen=True, slots=True)
class Ends:
    """Of each slot the parts that it belongs to."""

    parts: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, captured: CapturedGraph, wiring: Wiring) -> Ends:
        """From the order of the top graph's nodes."""
        before = before_blocks(captured.top.nodes)
        parts: list[set[str]] = [set() for _ in wiring.slots]
        for i, slot in enumerate(wiring.slots):
            if slot.graph != captured.top.name:
                parts[i].add(BLOCKS)
            elif slot.kind is SlotKind.OP:
                parts[i].add(FIRST if slot.name in before else LAST)
            elif slot.kind is SlotKind.OUTPUT:
                parts[i].add(LAST)
        for wire in wiring.wires:
            maker = wiring.slots[wire.producer]
            if maker.graph == captured.top.name and maker.kind in (SlotKind.INPUT, SlotKind.STORAGE):
                parts[wire.producer] |= {p for r in wire.readers for p in parts[r.slot]}
        return cls(tuple(frozenset(p or {LAST}) for p in parts))
