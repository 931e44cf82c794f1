"""Gradients are added up in the type of their parameter: a cast to a wider type moves before the sum that it is of.

Under half precision a parameter is cast once and may be read several times: its gradient is wide(a + b). Over ranks a
and b may be cut in different ways, or be pending sums; as wide(a) + wide(b) each is reduced in the wide type. And
wide(narrow(x)) is x: what was summed up in the wide type stays there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopar.ir.graph import ITEM_BYTES, Graph, InputKind, Node, OutputKind, Phase, Ref, Value
from autopar.tracer.simplify import output_of, with_refs
from autopar.tracer.unflatten import RESHAPES

CAST, ADD = "aten._to_copy.default", "aten.add.Tensor"
VIEWS = RESHAPES | {"aten.t.default", "aten.transpose.int", "aten.permute.default"}


def widen_before_adding(graph: Graph) -> Graph:
    """The same graph with wide(a) + wide(b) for wide(a + b), and x for wide(narrow(x)), in gradients of parameters."""
    rewriter = _Rewriter(graph)
    wanted = _gradients(graph, rewriter.uses)
    for node in graph.nodes:
        if node.first is not None and node.first.name in wanted and rewriter.widens(node):
            rewriter.widen(node, node.refs[0], node.first)
        else:
            rewriter.nodes.append(node)
    nodes = (with_refs(n, rewriter.same) for n in rewriter.nodes if n.name not in rewriter.gone)
    outputs = tuple(output_of(o, rewriter.same) for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _gradients(graph: Graph, uses: Counter[str]) -> set[str]:
    """Values that are parameters' gradients, or are nothing but viewed to become one."""
    parameters = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
    found = {o.value for o in graph.outputs if o.kind is OutputKind.GRADIENT and o.target in parameters and o.value}
    for node in reversed(graph.nodes):
        if node.first is not None and node.first.name in found and node.op in VIEWS and uses[node.refs[0]] == 1:
            found.add(node.refs[0])
    return found


class _Rewriter:
    """Writes nodes in order.

    Attributes:
        gone: nodes that nothing reads any more.
        same: value -> the one that is read instead.
    """

    def __init__(self, graph: Graph) -> None:
        self.values = graph.values()
        self.taken = set(self.values) | {n.name for n in graph.nodes}
        self.uses = Counter(ref for n in graph.nodes for ref in n.refs)
        self.uses.update(o.value for o in graph.outputs if o.value is not None)
        backward = [n for n in graph.nodes if n.phase is Phase.BACKWARD]
        self.sums = {n.first.name: n for n in backward if n.first is not None and self._is_sum(n)}
        self.casts = {n.first.name: n for n in backward if n.op == CAST and n.first is not None}
        self.nodes: list[Node] = []
        self.same: dict[str, str] = {}
        self.gone: set[str] = set()

    def _is_sum(self, node: Node) -> bool:
        """a + b, neither broadcast nor of another type."""
        metas = {self.values[ref].meta for ref in node.refs} | {node.outputs[0].meta if node.outputs[0] else None}
        plain = node.op == ADD and len(node.args) == len(node.refs) == 2 and not node.kwargs
        return plain and len(metas) == 1

    def widens(self, node: Node) -> bool:
        """True of a cast of floats to wider ones."""
        if node.op != CAST or node.first is None:
            return False
        before, after = self.values[node.refs[0]].meta.dtype, node.first.meta.dtype
        return "float" in before and "float" in after and ITEM_BYTES[after] > ITEM_BYTES[before]

    def widen(self, cast: Node, ref: str, out: Value) -> None:
        """Write what makes `out` of the narrow `ref`."""
        summed, narrowed = self.sums.get(ref), self.casts.get(ref)
        if narrowed is not None and self.uses[ref] == 1 and self.values[narrowed.refs[0]].meta == out.meta:
            self.gone.add(narrowed.name)
            self.same[out.name] = narrowed.refs[0]
            return
        if summed is None or self.uses[ref] > 1:
            node = replace(cast, args=(Ref(ref), *cast.args[1:]), outputs=(out,))
            if out is not cast.first:
                node = replace(node, name=self._fresh(f"{cast.name}_{ref}"), key=f"{cast.key}/{ref}")
            self.nodes.append(node)
            return
        self.gone.add(summed.name)
        parts = [Value(self._fresh(f"{r}_wide"), out.meta) for r in summed.refs]
        for r, part in zip(summed.refs, parts, strict=True):
            self.widen(cast, r, part)
        name = self._fresh(f"{summed.name}_wide")
        added = replace(summed, name=name, key=f"{summed.key}/wide", args=tuple(Ref(p.name) for p in parts))
        self.nodes.append(replace(added, outputs=(out,)))

    def _fresh(self, wanted: str) -> str:
        name, k = wanted, 1
        while name in self.taken:
            name, k = f"{wanted}_{k}", k + 1
        self.taken.add(name)
        return name
