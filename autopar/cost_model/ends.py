"""Which part of the model is on which pipeline stage: what comes before the blocks, the blocks, what comes after them.

Of what is not in a block, all that a block reads belongs to the first stage, and in the backward all that reads what
the last call of a block's backward has made; the rest to the last stage. A parameter is where it is read: one that both
ends read (a tied embedding) is on both.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.wiring import SlotKind, Wiring
from autopar.ir.graph import CapturedGraph, Node, Phase

FIRST, BLOCKS, LAST = "first", "blocks", "last"


@dataclass(frozen=True, slots=True)
class Ends:
    """Of each slot the parts that it belongs to."""

    parts: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, captured: CapturedGraph, wiring: Wiring) -> Ends:
        """From the order of the top graph's nodes."""
        at = _part_of_top(captured.top.nodes)
        parts: list[set[str]] = [set() for _ in wiring.slots]
        for i, slot in enumerate(wiring.slots):
            if slot.graph != captured.top.name:
                parts[i].add(BLOCKS)
            elif slot.kind is SlotKind.OP:
                parts[i].add(at[slot.name])
            elif slot.kind is SlotKind.OUTPUT:
                parts[i].add(LAST)
        for wire in wiring.wires:
            maker = wiring.slots[wire.producer]
            if maker.graph == captured.top.name and maker.kind in (SlotKind.INPUT, SlotKind.STORAGE):
                parts[wire.producer] |= {p for r in wire.readers for p in parts[r.slot]}
        return cls(tuple(frozenset(p or {LAST}) for p in parts))


def _part_of_top(nodes: tuple[Node, ...]) -> dict[str, str]:
    """Name of each node of the top graph -> its part.

    Where nodes stand in a graph isn't where they are needed: casts of the head's weights come before the blocks.
    """
    calls = {phase: [i for i, n in enumerate(nodes) if n.block is not None and n.phase is phase] for phase in Phase}
    begin = min(calls[Phase.FORWARD], default=0)
    end = max(calls[Phase.BACKWARD], default=len(nodes))
    found = dict.fromkeys((n.name for n in nodes), LAST)
    maker = {out.name: n for n in nodes for out in n.outputs if out is not None}
    for call in calls[Phase.FORWARD]:
        for name in _before(nodes[call], maker, nodes[:begin]):
            found[name] = FIRST
    after = {out.name for i in calls[Phase.BACKWARD] for out in nodes[i].outputs if out is not None}
    for n in nodes[end + 1 :]:
        if after & set(n.refs):
            found[n.name] = FIRST
            after |= {out.name for out in n.outputs if out is not None}
    return found


def _before(call: Node, maker: dict[str, Node], earlier: tuple[Node, ...]) -> set[str]:
    """Names of the earlier nodes that a call reads from, directly or not."""
    allowed = {n.name for n in earlier if n.block is None}
    found: set[str] = set()
    todo = [call]
    while todo:
        for ref in todo.pop().refs:
            made = maker.get(ref)
            if made is not None and made.name in allowed and made.name not in found:
                found.add(made.name)
                todo.append(made)
    return found
