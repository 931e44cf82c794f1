"""Which dims hold rows in an order that is a rank's own, for all values of a captured model.

Such rows come from `autopar.route` and `autopar.spread`, and go on through whatever an expert is made of: an op that
keeps rows apart hands the mark on. What needs to know a row's place can't be cut there (`suits_unordered`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopar.errors import CaptureError
from autopar.ir.graph import CapturedGraph, Graph, InputKind, Node, OutputKind, Value
from autopar.ir.layout import Kind, Placement
from autopar.ir.strategy import Rule
from autopar.ops.entry import Metas
from autopar.ops.experts import ROUTED
from autopar.ops.indexing import OFFSET
from autopar.ops.lowering import is_random
from autopar.ops.units import table_rules

Place = tuple[str, str]
"""(graph name, value name)."""


@dataclass(frozen=True, slots=True)
class Mark:
    """`dims` of a value, in the order that the op `origin` made."""

    dims: frozenset[int]
    origin: Place


def with_unordered(captured: CapturedGraph) -> CapturedGraph:
    """The same model whose metas say so. Raises CaptureError where rows in two orders meet."""
    if not any(node.op in ROUTED for graph in captured.graphs for node in graph.nodes):
        return captured
    found = _Marks(captured).found()
    blocks = tuple(replace(b, graph=_marked(b.graph, found)) for b in captured.blocks)
    return replace(captured, top=_marked(captured.top, found), blocks=blocks)


def suits_unordered(rule: Rule, node: Node, metas: Metas) -> bool:
    """False of a rule that cuts rows in no order beside what is in order, or by their places."""
    if node.op in ROUTED:
        return True
    outs = [(p, o.meta) for p, o in zip(rule.outputs, node.outputs, strict=True) if p is not None and o is not None]
    cut = [(p.dim in m.unordered, m) for p, m in zip(rule.inputs, metas, strict=True) if p.kind is Kind.SHARD]
    made = [m.shape[p.dim] for p, m in outs if p.kind is Kind.SHARD and p.dim in m.unordered]
    if not made and not any(loose for loose, _ in cut):
        return True
    lengths = {m.shape[d] for m in metas for d in m.unordered}
    return all(loose for loose, _ in cut) and lengths >= set(made) and rule.tag != OFFSET and not is_random(node.op)


class _Marks:
    """Hands marks on until nothing changes: a block's inputs are its calls' arguments, wherever these come from."""

    def __init__(self, captured: CapturedGraph) -> None:
        self.captured = captured
        self.metas = {(g.name, name): v.meta for g in captured.graphs for name, v in g.values().items()}
        self.marks: dict[Place, Mark] = {}

    def found(self) -> dict[Place, tuple[int, ...]]:
        """Value -> its dims in no order."""
        before = -1
        while before != len(self.marks):
            before = len(self.marks)
            for graph in self.captured.graphs:
                for node in graph.nodes:
                    self._call(graph, node) if node.block is not None else self._step(graph, node)
        return {place: tuple(sorted(mark.dims)) for place, mark in self.marks.items() if mark.dims}

    def _step(self, graph: Graph, node: Node) -> None:
        given = {ref: self.marks[graph.name, ref] for ref in node.refs if (graph.name, ref) in self.marks}
        origin = self._origin(graph, node, given.values())
        if node.op in ROUTED:
            shapes = [() if o is None else o.meta.shape for o in node.outputs]
            which = zip(ROUTED[node.op], shapes, strict=True)
            dims: Iterable[Iterable[int]] = [
                _rows_of(k, shape) if loose else () for k, (loose, shape) in enumerate(which)
            ]
        elif given:
            metas = tuple(self.metas[graph.name, ref] for ref in node.refs)
            dims = _kept(node, metas, [given[r].dims if r in given else frozenset() for r in node.refs])
        else:
            return
        for value, mine in zip(node.outputs, dims, strict=False):
            if value is not None and (marked := frozenset(mine)):
                self.marks.setdefault((graph.name, value.name), Mark(marked, origin))

    def _origin(self, graph: Graph, node: Node, given: Iterable[Mark]) -> Place:
        origins = {mark.origin for mark in given}
        if len(origins) > 1:
            raise CaptureError(
                f"{node.source or node.key}: rows that two calls of autopar.route brought into order meet in "
                f"{node.op}; use the ends and the order of one"
            )
        return origins.pop() if origins else (graph.name, node.name)

    def _call(self, graph: Graph, node: Node) -> None:
        """A block's inputs and outputs are those of each call. The backward call takes the tangents last."""
        assert node.block is not None
        inner = self.captured.block(node.block.key).graph
        backward = node.phase.value == "backward"
        own = [i for i in inner.inputs if i.kind is not InputKind.TANGENT]
        last = [i for i in inner.inputs if i.kind is InputKind.TANGENT] if backward else []
        ends = [o for o in inner.outputs if o.kind is (OutputKind.GRADIENT if backward else OutputKind.OUTPUT)]
        pairs = [(ref, i.value.name) for ref, i in zip(node.refs, [*own, *last], strict=False)]
        pairs += [
            (out.name, end.value) for out, end in zip(node.outputs, ends, strict=True) if out is not None and end.value
        ]
        for outer, name in pairs:
            for a, b in (((graph.name, outer), (inner.name, name)), ((inner.name, name), (graph.name, outer))):
                if a in self.marks:
                    self.marks.setdefault(b, self.marks[a])


def _rows_of(position: int, shape: tuple[int, ...]) -> Iterable[int]:
    """The first dim; of `route`'s order, which is a list whatever its shape, all."""
    return range(len(shape)) if position == 1 else (0,)


def _kept(node: Node, metas: Metas, dims: list[frozenset[int]]) -> list[set[int]]:
    """Per output the dims that some rule cuts together with a marked one."""
    found: list[set[int]] = [set() for _ in node.outputs]
    for rule in table_rules(node, metas):
        if any(_is_cut(p, mine) for p, mine in zip(rule.inputs, dims, strict=False)):
            for out, placement in zip(found, rule.outputs, strict=False):
                if placement is not None and placement.kind is Kind.SHARD:
                    out.add(placement.dim)
    return found


def _is_cut(placement: Placement, dims: frozenset[int]) -> bool:
    return placement.kind is Kind.SHARD and placement.dim in dims


def _marked(graph: Graph, dims: dict[Place, tuple[int, ...]]) -> Graph:
    def mark(value: Value) -> Value:
        mine = dims.get((graph.name, value.name))
        return value if mine is None else Value(value.name, replace(value.meta, unordered=mine))

    return replace(
        graph,
        inputs=tuple(replace(i, value=mark(i.value)) for i in graph.inputs),
        nodes=tuple(replace(n, outputs=tuple(None if o is None else mark(o) for o in n.outputs)) for n in graph.nodes),
    )
