"""A priced problem on other ranks that cut micro-batches into the same pieces: only what data-parallel ranks decide.

Two trials with as many tensor-parallel ranks and as many rows in a micro-batch choose from the same layouts and run
the same ops on the same pieces. What differs is what more or fewer data-parallel ranks wait for, what is done once a
step on their pieces, and what stays on each. The result is what `build_problem` would give (tests/test_pipelines.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.cost_model.build import Priced, When, node_costs
from autopar.cost_model.context import Context
from autopar.cost_model.moments import WholeBytes, resident_bytes
from autopar.cost_model.wiring import SlotKind
from autopar.ir.layout import Layout
from autopar.ir.load import Load
from autopar.ir.problem import ProblemNode, ProblemValue


def repriced(priced: Priced, context: Context, load: Load) -> Priced:
    """The problem in another context: of the same pieces, with prices of other ranks."""
    nodes, compute = list(priced.problem.nodes), list(priced.compute_us)
    for i, slot in enumerate(priced.wiring.slots):
        inner = slot.kind is SlotKind.OP and any(c != w for c, w in zip(nodes[i].cost_us, compute[i], strict=True))
        if slot.kind is SlotKind.STORAGE or i in priced.lasting or inner:
            nodes[i], compute[i] = node_costs(i, slot, priced.options[i], context)
    for chosen in priced.later:
        again = nodes[chosen.slot].cost_us
        cost = tuple(
            again[c.strategy] if c.strategy >= 0 else us
            for c, us in zip(chosen.choices, nodes[chosen.node].cost_us, strict=True)
        )
        nodes[chosen.node] = ProblemNode(name=nodes[chosen.node].name, cost_us=cost)
    values = tuple(
        _value(value, wire, layouts, when, priced, context)
        for value, wire, layouts, when in zip(
            priced.problem.values, priced.wires, priced.layouts, priced.when, strict=True
        )
    )
    whole = WholeBytes(
        resident=resident_bytes(priced.wiring, priced.options, priced.held, context),
        saved=priced.whole_bytes.saved, working=priced.whole_bytes.working,
    )  # fmt: skip
    problem = replace(
        priced.problem, name=f"{context.captured.model_name} on {context.mesh} ({load})", nodes=tuple(nodes),
        values=values,
    )  # fmt: skip
    return replace(
        priced, problem=problem, mesh=context.mesh, compute_us=tuple(compute), whole_bytes=whole, load=load,
        pieces=context.table.mesh,
    )  # fmt: skip


def _value(
    value: ProblemValue, index: int | None, layouts: tuple[Layout | None, ...], when: When, priced: Priced,
    context: Context,
) -> ProblemValue:  # fmt: skip
    """Conversions between other layouts on `dp`, and of what lasts, at the context's prices."""
    if index is None:
        return value
    wire, lasts = priced.wiring.wires[index], when is When.ONCE or index in context.lasting_wires
    on_data = [None if layout is None else layout.on("dp") for layout in layouts]
    table = [list(row) for row in value.reshard_us]
    for i, p in enumerate(layouts):
        for j, q in enumerate(layouts):
            if p is None or q is None or p == q or math.isinf(table[i][j]):
                continue
            if lasts or on_data[i] != on_data[j]:
                table[i][j] = context.convert_us(index, wire, p, q, once=lasts)
    return replace(value, reshard_us=tuple(map(tuple, table)))
