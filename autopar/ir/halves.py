"""Which ops of a backward only gradients of parameters need: they may wait until a stage has nothing else to do."""

from __future__ import annotations

from autopar.ir.graph import Graph, InputKind, OutputKind, Phase
from autopar.ir.staged import SUMMED


def late_nodes(graph: Graph) -> frozenset[str]:
    """Names of nodes that the second half of a backward runs: all that no gradient of an input is made of.

    Blocks' backwards have halves of their own; what the first of these reads is of the first here.
    """
    parameters = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
    todo = [
        o.value for o in graph.outputs
        if o.kind is OutputKind.GRADIENT and o.target not in parameters and not o.target.startswith(SUMMED)
    ]  # fmt: skip
    nodes = [n for n in graph.nodes if n.phase is Phase.BACKWARD]
    todo += [r for n in nodes if n.block is not None for r in n.refs]
    maker = {o.name: n for n in nodes for o in n.outputs if o is not None}
    early: set[str] = set()
    while todo:
        node = maker.get(todo.pop() or "")
        if node is not None and node.name not in early:
            early.add(node.name)
            todo += node.refs
    return frozenset(n.name for n in nodes if n.block is None and n.name not in early)
