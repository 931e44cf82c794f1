"""What backwards in halves are of a step, before anything is chosen: in the fastest strategy of each op.

The shares are the model's, and the same on every stage: a stage problem weighs whole columns, and one choice for a
block hardly moves what part of its backward is of weights.
"""

from __future__ import annotations

import math

from autopar.cost_model.build import Priced
from autopar.ir.graph import CapturedGraph, Graph, InputKind, Phase
from autopar.ir.halves import late_nodes
from autopar.ir.stages import Halves


def halves_of(captured: CapturedGraph, priced: Priced) -> Halves:
    """Shares of time by price, and of what waits by size, all instances together."""
    late = {g.name: late_nodes(g) for g in captured.graphs}
    spent = {False: 0.0, True: 0.0}
    for i, slot in enumerate(priced.wiring.slots):
        least = min(priced.problem.nodes[i].cost_us)
        if slot.node is not None and i not in priced.lasting and math.isfinite(least):
            spent[slot.node.name in late[slot.graph]] += least
    calls = {b.key: len(b.instances) for b in captured.blocks}
    sizes = [(calls.get(g.name, 1), *_waiting_bytes(g, late[g.name])) for g in captured.graphs]
    saved, between = (sum(n * row[k] for n, *row in sizes) for k in range(2))
    whole = sum(spent.values())
    return Halves(spent[True] / whole if whole else 0.0, between / saved if saved else 1.0)


def _waiting_bytes(graph: Graph, late: frozenset[str]) -> tuple[int, int]:
    """(what the backward reads of the forward, what its second half reads of that and of the first)."""
    values = graph.values()
    forward = {i.value.name for i in graph.inputs if i.kind is InputKind.INPUT}
    forward |= {o.name for n in graph.nodes if n.phase is Phase.FORWARD for o in n.outputs if o is not None}
    backward = [n for n in graph.nodes if n.phase is Phase.BACKWARD]
    own = {o.name for n in backward if n.name in late for o in n.outputs if o is not None}
    own |= {i.value.name for i in graph.inputs if i.kind not in (InputKind.INPUT, InputKind.TANGENT)}
    read = {r for n in backward if n.block is None for r in n.refs}
    waits = {r for n in backward if n.name in late for r in n.refs} - own
    return sum(values[v].meta.nbytes for v in read & forward), sum(values[v].meta.nbytes for v in waits)
