"""Which dim counts experts: of their weights, of what is made of these alone, of gradients and of counts of rows.

An axis that cuts tokens may cut that dim too, since tokens go where their experts are.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import CapturedGraph, Graph, InputKind, Node, OutputKind, Phase, TensorMeta, Value
from autopar.ir.layout import Kind, Placement
from autopar.ops.units import table_rules

Place = tuple[str, str]
"""(graph name, value name)."""
GROUPED, SOURCES = "autopar.grouped_mm.default", ("autopar.route.default", "autopar.grouped_outer.default")
"""What takes weights; what makes counts and gradients, experts first."""


def with_expert_dims(captured: CapturedGraph) -> CapturedGraph:
    """The same model whose metas say so."""
    if not any(node.op == GROUPED for graph in captured.graphs for node in graph.nodes):
        return captured
    metas = {(g.name, name): v.meta for g in captured.graphs for name, v in g.values().items()}
    wanted = {place: dim for g in captured.graphs for place, dim in _wanted(g, metas).items()}
    by_parameter = _of_parameters(captured, wanted)
    found = {place: dim for place, dim in wanted.items() if place in _weights(captured)}
    found |= {("top", i.value.name): by_parameter[i.target] for i in captured.top.inputs if i.target in by_parameter}
    for graph in (*(b.graph for b in captured.blocks), captured.top):
        _hand_on(captured, graph, metas, found)
    return replace(
        captured,
        top=_marked(captured.top, found),
        blocks=tuple(replace(b, graph=_marked(b.graph, found)) for b in captured.blocks),
        parameters=tuple(
            replace(p, meta=replace(p.meta, experts=by_parameter[p.name])) if p.name in by_parameter else p
            for p in captured.parameters
        ),
    )


def _wanted(graph: Graph, metas: dict[Place, TensorMeta]) -> dict[Place, int]:
    """Dims that become the experts' dim of a grouped product's matrices, last op first."""
    found: dict[Place, int] = {}
    for node in reversed(graph.nodes):
        if node.op == GROUPED:
            found[graph.name, node.refs[1]] = 0
        out = node.first
        dim = None if out is None or len(node.refs) != 1 else found.get((graph.name, out.name))
        if dim is not None:
            before = _through(node, metas[graph.name, node.refs[0]], dim, backwards=True)
            if before is not None:
                found[graph.name, node.refs[0]] = before
    return found


def _weights(captured: CapturedGraph) -> set[Place]:
    return {(g.name, i.value.name) for g in captured.graphs for i in g.inputs if i.kind is InputKind.PARAMETER}


def _of_parameters(captured: CapturedGraph, wanted: dict[Place, int]) -> dict[str, int]:
    """Parameter's name -> its experts' dim."""
    names = {i.value.name: i.target for i in captured.top.inputs if i.kind is InputKind.PARAMETER}
    found = {names[v]: dim for (g, v), dim in wanted.items() if g == captured.top.name and v in names}
    for node in captured.top.nodes:
        if node.block is not None:
            inner = captured.block(node.block.key).graph
            for ref, given in zip(node.refs, inner.inputs, strict=False):
                dim = wanted.get((inner.name, given.value.name))
                if dim is not None and ref in names and given.kind is InputKind.PARAMETER:
                    found[names[ref]] = dim
    return found


def _hand_on(captured: CapturedGraph, graph: Graph, metas: dict[Place, TensorMeta], found: dict[Place, int]) -> None:
    """What is made of marked values alone, and keeps the dim; what a block gives."""
    for node in graph.nodes:
        if node.block is not None:
            inner = captured.block(node.block.key).graph
            kind = OutputKind.OUTPUT if node.phase is Phase.FORWARD else OutputKind.GRADIENT
            ends = [o.value or "" for o in inner.outputs if o.kind is kind]
            pairs = zip(node.outputs, ends, strict=True)
            given = {o.name: dim for o, v in pairs if o is not None and (dim := found.get((inner.name, v))) is not None}
            found.update({(graph.name, name): dim for name, dim in given.items()})
            continue
        if node.op in SOURCES and node.first is not None:
            found[graph.name, node.first.name] = 0
            continue
        dims = {found.get((graph.name, ref)) for ref in node.refs}
        if len(dims) == 1 and len(node.outputs) == 1 and node.first is not None:
            dim = dims.pop()
            after = None if dim is None else _through(node, metas[graph.name, node.refs[0]], dim, backwards=False)
            if after is not None:
                found[graph.name, node.first.name] = after


def _through(node: Node, meta: TensorMeta, dim: int, *, backwards: bool) -> int | None:
    """Where an op of equal arguments has the dim `dim` of its result (its arguments), as its rules have it."""
    for rule in table_rules(node, (meta,) * len(node.refs)):
        into, out = rule.inputs[0], rule.outputs[0]
        if out is not None and _is(out if backwards else into, dim) and len(set(rule.inputs)) == 1:
            other = into if backwards else out
            return other.dim if other.kind is Kind.SHARD else None
    return None


def _is(placement: Placement, dim: int) -> bool:
    return placement.kind is Kind.SHARD and placement.dim == dim


def _marked(graph: Graph, dims: dict[Place, int]) -> Graph:
    def mark(value: Value) -> Value:
        dim = dims.get((graph.name, value.name))
        return value if dim is None else Value(value.name, replace(value.meta, experts=dim))

    return replace(
        graph,
        inputs=tuple(replace(i, value=mark(i.value)) for i in graph.inputs),
        nodes=tuple(replace(n, outputs=tuple(None if o is None else mark(o) for o in n.outputs)) for n in graph.nodes),
    )
