"""Views and casts of parameters are made again in the backward instead of saved.

Otherwise a weight that is gathered for the forward would wait, whole, for the backward in the form of its transpose,
and storing it cut (ZeRO-3) would save nothing.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Graph, InputKind, Node, Phase, Value
from autopar.tracer.simplify import with_refs

_NAMES = "t permute view _unsafe_view unsqueeze squeeze expand alias detach _to_copy clone"
CHEAP = frozenset(f"aten.{name}.default" for name in _NAMES.split()) | {
    "aten.transpose.int",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "prims.convert_element_type.default",
}


def remake_parameter_views(graph: Graph) -> Graph:
    """The same graph, in which no backward op reads a forward view or cast of a parameter."""
    cheap: dict[str, Node] = {}
    roots = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD and node.op in CHEAP and len(node.refs) == 1 and len(node.outputs) == 1:
            ref, out = node.refs[0], node.outputs[0]
            if out is not None and (ref in roots or ref in cheap):
                cheap[out.name] = node
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.phase is Phase.BACKWARD:
            for ref in node.refs:
                _remake(ref, cheap, renamed, nodes)
            node = with_refs(node, renamed)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _remake(name: str, cheap: dict[str, Node], renamed: dict[str, str], nodes: list[Node]) -> None:
    """Append backward copies of the chain that makes `name`, once each."""
    if name not in cheap or name in renamed:
        return
    node = cheap[name]
    _remake(node.refs[0], cheap, renamed, nodes)
    renamed[name] = f"{name}_again"
    out = node.first
    assert out is not None
    copy = replace(
        with_refs(node, renamed), name=f"{node.name}_again", phase=Phase.BACKWARD, key=f"{node.key}/again",
        outputs=(Value(renamed[name], out.meta),),
    )  # fmt: skip
    nodes.append(copy)
