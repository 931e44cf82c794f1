"""Plans drawn from a real strategy table: the first whole strategies, or random ones that fit together."""

from __future__ import annotations

import random

from autopar.codegen.layouts import block_parameters
from autopar.ir.graph import CapturedGraph, Graph, InputKind, Node, OutputKind
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan, PlanStrategy
from autopar.ir.reshard import plan_reshard
from autopar.ir.strategy import Strategy, StrategyTable
from tests.codegen.hand import F, plan, replace_conversions


def classes(captured: CapturedGraph) -> dict[str, str]:
    """Parameter -> the parameter whose storage it shares (all instances of a block's parameter)."""
    names = [i.target for i in captured.top.inputs if i.kind is InputKind.PARAMETER]
    parent = {n: n for n in names}

    def root(n: str) -> str:
        return n if parent[n] == n else root(parent[n])

    for rows in block_parameters(captured).values():
        for row in rows:
            for a, b in zip(rows[0], row, strict=True):
                parent[root(names[b])] = root(names[a])
    return {n: root(n) for n in names}


class _StuckError(Exception):
    """A sum was drawn where its reader takes none and no conversion helps."""


def random_plan(captured: CapturedGraph, mesh: Mesh, table: StrategyTable, seed: int) -> Plan:
    """Any strategy of each op that its arguments can be converted for."""
    for attempt in range(50):
        try:
            return _drawn(captured, mesh, table, random.Random(1000 * seed + attempt))
        except _StuckError:
            continue
    raise AssertionError("no random plan fits")


def _drawn(captured: CapturedGraph, mesh: Mesh, table: StrategyTable, draw: random.Random) -> Plan:
    whole = plan(captured, mesh, lambda g, n: None)
    shared = classes(captured)
    common: dict[str, list[Layout]] = {}
    for name, root in shared.items():
        mine = list(table.storage[name])
        common[root] = [x for x in common.get(root, mine) if x in mine]
    picked = {root: draw.choice(options) for root, options in common.items()}
    for name, root in shared.items():
        whole.parameters[name] = _stored(whole, name, picked[root])
    for graph in captured.graphs:
        rows = whole.inputs.setdefault(graph.name, {})
        for own in graph.inputs:
            if own.kind is not InputKind.PARAMETER:
                options = [x for x in table.inputs[graph.name][own.value.name] if not x.partial]
                rows[f"{own.kind.value}:{own.target}"] = str(draw.choice(options))
    ends: dict[tuple[str, str], Layout] = {}
    for graph in (*[b.graph for b in captured.blocks], captured.top):
        _pick(captured, graph, whole, table, draw, ends, picked, shared)
    for position, out in enumerate(captured.top.outputs):
        if out.kind is not OutputKind.GRADIENT:
            whole.outputs["top"][str(position)] = str(draw.choice(table.outputs["top"][position]))
    return replace_conversions(captured, whole, mesh)


def _stored(made: Plan, name: str, layout: Layout) -> object:
    import msgspec

    return msgspec.structs.replace(made.parameters[name], layout=str(layout))


def _pick(
    captured: CapturedGraph,
    graph: Graph,
    made: Plan,
    table: StrategyTable,
    draw: random.Random,
    ends: dict[tuple[str, str], Layout],
    picked: dict[str, Layout],
    shared: dict[str, str],
) -> None:
    """One strategy per op of a graph, in order; `ends`: what blocks' outputs and gradients are made in."""
    from tests.codegen.hand import _arrival

    layouts = {i.value.name: _arrival(captured, graph, i, made, table.mesh) for i in graph.inputs}
    parameters = {i.value.name: i for i in graph.inputs if i.kind is InputKind.PARAMETER}
    for n in graph.nodes:
        if n.block is not None:
            inner = captured.block(n.block.key).graph
            kind = OutputKind.OUTPUT if n.phase is F else OutputKind.GRADIENT
            outs = [o for o in inner.outputs if o.kind is kind]
            layouts.update(
                {
                    o.name: ends[(inner.name, f"{kind.value}{e.target}")]
                    for o, e in zip(n.outputs, outs, strict=True)
                    if o
                }
            )
            continue
        fits = [s for s in table.nodes[graph.name][n.name] if _fits(n, s, layouts)]
        if not fits:
            raise _StuckError(n.name)
        chosen = draw.choice(fits)
        made.strategies[graph.name][n.key] = PlanStrategy(
            inputs=[str(x) for x in chosen.inputs], outputs=["" if x is None else str(x) for x in chosen.outputs],
            tags=list(chosen.tags), us=1.0,
        )  # fmt: skip
        layouts.update({o.name: x for o, x in zip(n.outputs, chosen.outputs, strict=True) if o and x})
    for out in graph.outputs:
        if out.value:
            ends[(graph.name, f"{out.kind.value}{out.target}")] = layouts[
                out.target if out.target in parameters else out.value
            ]


def _fits(n: Node, s: Strategy, layouts: dict[str, Layout]) -> bool:
    return all(plan_reshard(layouts[r], want) is not None for r, want in zip(n.refs, s.inputs, strict=True))
