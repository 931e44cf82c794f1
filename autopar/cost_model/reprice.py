"""A priced problem on other ranks that cut micro-batches into the same pieces: only what data-parallel ranks decide.

Two trials with as many tensor-parallel ranks and as many rows in a micro-batch choose from the same layouts and run
the same ops on the same pieces. What differs is what more or fewer data-parallel ranks wait for, what is done once a
step on their pieces, and what stays on each. The result is what `build_problem` would give (tests/test_pipelines.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.cost_model.build import Priced, When, node_costs, wires_of_a_step
from autopar.cost_model.context import Context
from autopar.cost_model.moments import WholeBytes, resident_bytes
from autopar.cost_model.wiring import SlotKind, stays
from autopar.ir.layout import Layout
from autopar.ir.load import Load
from autopar.ir.problem import ProblemNode


@dataclass(frozen=True, slots=True)
class _Alike:
    """Problem values with equal conversions, and those of them that change: (row, column, from, to).

    They are of one tensor, in the same layouts, as often, and `lasts` or not.
    """

    values: tuple[int, ...]
    wire: int
    lasts: bool
    pairs: tuple[tuple[int, int, Layout, Layout], ...]


class Repricer:
    """One priced problem, again and again in other contexts: what changes is looked for once."""

    def __init__(self, priced: Priced) -> None:
        self.priced = priced
        self.slots = tuple(
            i
            for i, slot in enumerate(priced.wiring.slots)
            if slot.kind is SlotKind.STORAGE or i in priced.lasting or _communicates(priced, i, slot.kind)
        )
        self.alike = _alike(priced, wires_of_a_step(priced.wiring, priced.lasting))

    def on(self, context: Context, load: Load) -> Priced:
        """The problem in another context: of the same pieces, with prices of other ranks."""
        priced, wiring = self.priced, self.priced.wiring
        nodes, compute = list(priced.problem.nodes), list(priced.compute_us)
        for i in self.slots:
            nodes[i], compute[i] = node_costs(i, wiring.slots[i], priced.options[i], context)
        for chosen in priced.later:
            again = nodes[chosen.slot].cost_us
            cost = tuple(
                again[c.strategy] if c.strategy >= 0 else us
                for c, us in zip(chosen.choices, nodes[chosen.node].cost_us, strict=True)
            )
            nodes[chosen.node] = ProblemNode(name=nodes[chosen.node].name, cost_us=cost)
        values = list(priced.problem.values)
        for alike in self.alike:
            table = self._table(alike, context)
            for index in alike.values:
                values[index] = replace(values[index], reshard_us=table)
        whole = WholeBytes(
            resident=resident_bytes(wiring, priced.options, priced.held, context),
            saved=priced.whole_bytes.saved, working=priced.whole_bytes.working,
        )  # fmt: skip
        problem = replace(
            priced.problem, name=f"{context.captured.model_name} on {context.mesh} ({load})", nodes=tuple(nodes),
            values=tuple(values),
        )  # fmt: skip
        return replace(
            priced, problem=problem, mesh=context.mesh, compute_us=tuple(compute), whole_bytes=whole, load=load,
            pieces=context.table.mesh,
        )  # fmt: skip

    def _table(self, alike: _Alike, context: Context) -> tuple[tuple[float, ...], ...]:
        table = [list(row) for row in self.priced.problem.values[alike.values[0]].reshard_us]
        wire = self.priced.wiring.wires[alike.wire]
        for i, j, p, q in alike.pairs:
            table[i][j] = context.convert_us(alike.wire, wire, p, q, once=alike.lasts)
        return tuple(map(tuple, table))


def _communicates(priced: Priced, slot: int, kind: SlotKind) -> bool:
    """True of an op of which some strategy has collectives inside."""
    return kind is SlotKind.OP and priced.problem.nodes[slot].cost_us != priced.compute_us[slot]


def _alike(priced: Priced, once: frozenset[int]) -> tuple[_Alike, ...]:
    """Values that have conversions between other layouts on `dp`, or of what lasts: those that are priced anew."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, (value, index) in enumerate(zip(priced.problem.values, priced.wires, strict=True)):
        if index is not None:
            wire, lasts = priced.wiring.wires[index], priced.when[number] is When.ONCE or index in once
            key = (
                wire.meta, wire.count, stays(priced.wiring, wire), lasts, priced.layouts[number], value.reshard_us
            )  # fmt: skip
            groups.setdefault(key, []).append(number)
    found = []
    for numbers in groups.values():
        first = numbers[0]
        wire_of, layouts, table = priced.wires[first], priced.layouts[first], priced.problem.values[first].reshard_us
        assert wire_of is not None
        lasts = priced.when[first] is When.ONCE or wire_of in once
        pairs = tuple(
            (i, j, p, q)
            for i, p in enumerate(layouts)
            for j, q in enumerate(layouts)
            if p is not None and q is not None and p != q and not math.isinf(table[i][j])
            if lasts or p.on("dp") != q.on("dp")
        )
        if pairs:
            found.append(_Alike(tuple(numbers), wire_of, lasts, pairs))
    return tuple(found)
