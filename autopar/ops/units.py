"""Which rows of a dim a cut must keep together, for all dims of a captured model.

A view that merges [7 samples, 12 tokens] into 84 rows can take a cut of the 7 samples into 4 and 3 only if the 84 rows
are cut into 48 and 36: in units of 12. So dims that some rule cuts together form a class; where the class has no
parameter (whose pieces are torch's own), all of its dims are cut into as many units as its smallest input has rows.
A wrong guess here costs a conversion, never correctness: `sharding.expand` lets a rule cut only what is cut alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.ir.graph import CapturedGraph, Graph, InputKind, Node, OutputKind, TensorMeta, Value
from autopar.ir.layout import Kind, Placement
from autopar.ir.strategy import Rule
from autopar.ops.entry import Metas
from autopar.ops.experts import EXCHANGE, EXPERTS, OWN
from autopar.ops.pointwise import pointwise
from autopar.ops.table import TABLE

Dim = tuple[str, str, int]
"""(graph name, value name, dim)."""

_POINTWISE = pointwise()


def with_units(captured: CapturedGraph) -> CapturedGraph:
    """The same model whose metas say their units."""
    found = find_units(captured)
    if not found:
        return captured
    blocks = tuple(replace(b, graph=_marked(b.graph, found)) for b in captured.blocks)
    return replace(captured, top=_marked(captured.top, found), blocks=blocks)


def find_units(captured: CapturedGraph) -> dict[tuple[str, str], tuple[int, ...]]:
    """(graph name, value name) -> units, of those values that have a unit above 1."""
    classes = _Classes()
    metas = {(g.name, name): v.meta for g in captured.graphs for name, v in g.values().items()}
    for graph in captured.graphs:
        for node in graph.nodes:
            if node.block is None:
                _join_rules(classes, graph, node, tuple(metas[graph.name, r] for r in node.refs))
            else:
                _join_call(classes, captured, graph, node, metas)
        _join_gradients(classes, graph, metas)
    kinds = {(g.name, i.value.name): i.kind for g in captured.graphs for i in g.inputs}
    found: dict[tuple[str, str], list[int]] = {}
    for members in classes.members():
        sizes = {m: metas[m[:2]].shape[m[2]] for m in members}
        for (graph_name, value, dim), unit in _units(sizes, kinds, captured.top.name).items():
            mine = found.setdefault((graph_name, value), [1] * len(metas[graph_name, value].shape))
            mine[dim] = unit
    return {key: tuple(units) for key, units in found.items()}


def _units(sizes: dict[Dim, int], kinds: dict[tuple[str, str], InputKind], top: str) -> dict[Dim, int]:
    """Units above 1 of one class, given the sizes of its dims."""
    if len(set(sizes.values())) == 1 or any(kinds.get(m[:2]) is InputKind.PARAMETER for m in sizes):
        return {}
    given = [n for m, n in sizes.items() if m[0] == top and kinds.get(m[:2]) is InputKind.INPUT]
    count = min(given or sizes.values())
    return {m: n // count for m, n in sizes.items() if n > count and n % count == 0}


class _Classes:
    """Dims that are cut together (disjoint sets)."""

    def __init__(self) -> None:
        self.parent: dict[Dim, Dim] = {}

    def root(self, dim: Dim) -> Dim:
        """The dim that stands for the class."""
        at = dim
        while (up := self.parent.setdefault(at, at)) != at:
            at = up
        while (up := self.parent[dim]) != at:
            self.parent[dim], dim = at, up
        return at

    def join(self, dims: Iterable[Dim]) -> None:
        """Make one class of all of them."""
        first: Dim | None = None
        for dim in dims:
            root = self.root(dim)
            first = first or root
            self.parent[root] = first

    def members(self) -> list[list[Dim]]:
        """The classes of two dims and more."""
        found: dict[Dim, list[Dim]] = defaultdict(list)
        for dim in self.parent:
            found[self.root(dim)].append(dim)
        return [m for m in found.values() if len(m) > 1]


def _join_rules(classes: _Classes, graph: Graph, node: Node, metas: Metas) -> None:
    for rule in table_rules(node, metas):
        if rule.tag not in (EXCHANGE, OWN, EXPERTS):  # there it is experts that are cut, with no rows in common
            classes.join(_cut_dims(graph, node, rule, metas))


def table_rules(node: Node, metas: Metas) -> Iterable[Rule]:
    """The table's rules; of ops that only DTensor knows, those of a pointwise op if it may be one."""
    entry = TABLE.get(node.op)
    if entry is not None and entry.rules is not None:
        return entry.rules(node, metas)
    outs = {o.meta.shape for o in node.outputs if o is not None}
    if len(outs) != 1 or any(len(m.shape) > len(next(iter(outs))) for m in metas):
        return ()
    return _POINTWISE(node, metas)


def _cut_dims(graph: Graph, node: Node, rule: Rule, metas: Metas) -> Iterator[Dim]:
    """The dims that a rule cuts."""
    for name, meta, placement in zip(node.refs, metas, rule.inputs, strict=False):
        if _cuts(placement, meta.shape):
            yield graph.name, name, placement.dim
    for value, out in zip(node.outputs, rule.outputs, strict=False):
        if value is not None and out is not None and _cuts(out, value.meta.shape):
            yield graph.name, value.name, out.dim


def _cuts(placement: Placement, shape: tuple[int, ...]) -> bool:
    return placement.kind is Kind.SHARD and placement.dim < len(shape) and shape[placement.dim] > 1


def _join_call(
    classes: _Classes, captured: CapturedGraph, graph: Graph, node: Node, metas: dict[tuple[str, str], TensorMeta]
) -> None:
    """A block's inputs and outputs are those of each call. The backward call takes the tangents last."""
    assert node.block is not None
    inner = captured.block(node.block.key).graph
    backward = node.phase.value == "backward"
    own = [i for i in inner.inputs if i.kind is not InputKind.TANGENT]
    tangents = [i for i in inner.inputs if i.kind is InputKind.TANGENT] if backward else []
    pairs = [(ref, i.value.name) for ref, i in zip(node.refs, [*own, *tangents], strict=False)]
    kind = OutputKind.GRADIENT if backward else OutputKind.OUTPUT
    ends = [o for o in inner.outputs if o.kind is kind]
    pairs += [
        (out.name, end.value)
        for out, end in zip(node.outputs, ends, strict=True)
        if out is not None and end.value is not None
    ]
    for outer, name in pairs:
        for dim in range(len(metas[inner.name, name].shape)):
            classes.join([(inner.name, name, dim), (graph.name, outer, dim)])


def _join_gradients(classes: _Classes, graph: Graph, metas: dict[tuple[str, str], TensorMeta]) -> None:
    """A gradient is laid out like what it is the gradient of: a parameter's is stored as the parameter is."""
    for out in graph.outputs:
        if out.kind is OutputKind.GRADIENT and out.value is not None:
            for dim in range(len(metas[graph.name, out.value].shape)):
                classes.join([(graph.name, out.target, dim), (graph.name, out.value, dim)])


def _marked(graph: Graph, units: dict[tuple[str, str], tuple[int, ...]]) -> Graph:
    def mark(value: Value) -> Value:
        mine = units.get((graph.name, value.name))
        return value if mine is None else Value(value.name, replace(value.meta, units=mine))

    return replace(
        graph,
        inputs=tuple(replace(i, value=mark(i.value)) for i in graph.inputs),
        nodes=tuple(replace(n, outputs=tuple(None if o is None else mark(o) for o in n.outputs)) for n in graph.nodes),
    )
