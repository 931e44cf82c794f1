"""Two transposes in a row are none. Joint capture makes such pairs for every linear layer."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Graph, GraphOutput, Node, OutputKind, Ref

TRANSPOSE = "aten.t.default"


def cancel_transposes(graph: Graph) -> Graph:
    """The same graph, in which what reads t(t(x)) reads x; transposes that nothing reads any more are gone."""
    same: dict[str, str] = {}
    made_from: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = with_refs(node, same)
        if node.op == TRANSPOSE:
            (ref,), out = node.refs, node.outputs[0]
            assert out is not None
            if ref in made_from:
                same[out.name] = made_from[ref]
                continue
            made_from[out.name] = ref
        nodes.append(node)
    outputs = tuple(output_of(o, same) for o in graph.outputs)
    read = {ref for node in nodes for ref in node.refs} | {o.value for o in outputs if o.value is not None}
    kept = tuple(n for n in nodes if n.op != TRANSPOSE or n.outputs[0] is None or n.outputs[0].name in read)
    return replace(graph, nodes=kept, outputs=outputs)


def output_of(output: GraphOutput, same: dict[str, str]) -> GraphOutput:
    """`target` of a gradient names an input, which is never renamed."""
    if output.value is None or output.kind is OutputKind.BUFFER_UPDATE:
        return output
    return replace(output, value=same.get(output.value, output.value))


def with_refs(node: Node, names: dict[str, str]) -> Node:
    """The node reading the values that `names` maps its references to."""

    def walk(arg: object) -> object:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        if isinstance(arg, (tuple, list)):
            return tuple(walk(a) for a in arg)
        return arg

    if not any(ref in names for ref in node.refs):
        return node
    return replace(node, args=tuple(walk(a) for a in node.args), kwargs=tuple((k, walk(v)) for k, v in node.kwargs))
