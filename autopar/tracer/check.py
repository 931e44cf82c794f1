"""What a capture promises, checked after each one."""

from __future__ import annotations

from autopar.errors import CompilerError
from autopar.ir.graph import CapturedGraph, Graph, InputKind, Node, OutputKind, Phase, Value


def check_graph(captured: CapturedGraph) -> None:
    """Raise CompilerError unless every graph is well formed and every block call fits its block."""
    blocks = {b.key: b.graph for b in captured.blocks}
    values = {graph.name: graph.values() for graph in captured.graphs}
    if len(blocks) != len(captured.blocks):
        raise CompilerError("two blocks have the same key")
    for graph in captured.graphs:
        _check_one(graph)
        for node in graph.nodes:
            if (node.block is not None) != node.op.startswith("autopar.block"):
                raise CompilerError(f"{graph.name}.{node.name}: op {node.op} and block {node.block} do not agree")
            if node.block is not None:
                if node.block.key not in blocks:
                    raise CompilerError(f"{graph.name}.{node.name}: no block {node.block.key}")
                block = blocks[node.block.key]
                _check_call(graph, node, block, values[graph.name], values[block.name])
        for i in graph.inputs:
            if i.kind is InputKind.CONSTANT and i.target not in captured.constants:
                raise CompilerError(f"{graph.name}: constant {i.target} is not among the constants")


def _check_one(graph: Graph) -> None:
    made = {i.value.name for i in graph.inputs}
    late = {i.value.name for i in graph.inputs if i.kind is InputKind.TANGENT}
    if len(made) != len(graph.inputs):
        raise CompilerError(f"{graph.name}: two inputs have one name")
    seen_backward = False
    for node in graph.nodes:
        seen_backward |= node.phase is Phase.BACKWARD
        if seen_backward and node.phase is Phase.FORWARD:
            raise CompilerError(f"{graph.name}.{node.name}: a forward node after a backward node")
        for ref in node.refs:
            if ref not in made:
                raise CompilerError(f"{graph.name}.{node.name} reads {ref}, which is not defined before it")
            if node.phase is Phase.FORWARD and ref in late:
                raise CompilerError(f"{graph.name}.{node.name} is forward and reads {ref} of the backward")
        for out in filter(None, node.outputs):
            if out.name in made:
                raise CompilerError(f"{graph.name}: value {out.name} is defined twice")
            made.add(out.name)
            if node.phase is Phase.BACKWARD:
                late.add(out.name)
    _check_outputs(graph, made, late)


def _check_outputs(graph: Graph, made: set[str], late: set[str]) -> None:
    for o in graph.outputs:
        if o.value is not None and o.value not in made:
            raise CompilerError(f"{graph.name}: output {o.kind.value} {o.target} = {o.value}, which no node makes")
        if o.kind is not OutputKind.GRADIENT and (o.value is None or o.value in late):
            raise CompilerError(f"{graph.name}: {o.kind.value} {o.target} is not made in the forward")


def _check_call(graph: Graph, node: Node, block: Graph, values: dict[str, Value], inner: dict[str, Value]) -> None:
    tangents = node.op == "autopar.block_backward"
    wanted = [i for i in block.inputs if i.kind is not InputKind.TANGENT]
    wanted += [i for i in block.inputs if i.kind is InputKind.TANGENT] if tangents else []
    if len(node.refs) != len(wanted):
        raise CompilerError(
            f"{graph.name}.{node.name}: {len(node.refs)} arguments, block {block.name} has {len(wanted)}"
        )
    for ref, i in zip(node.refs, wanted, strict=True):
        if values[ref].meta != i.value.meta:
            raise CompilerError(f"{graph.name}.{node.name}: {ref} is {values[ref].meta}, {i.value.name} {i.value.meta}")
    kind = OutputKind.GRADIENT if tangents else OutputKind.OUTPUT
    results = [o for o in block.outputs if o.kind is kind]
    metas = [None if o.value is None else inner[o.value].meta for o in results]
    if [None if o is None else o.meta for o in node.outputs] != metas:
        raise CompilerError(f"{graph.name}.{node.name}: its outputs are not those of block {block.name}")
