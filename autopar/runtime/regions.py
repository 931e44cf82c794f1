"""What a graph says of its regions: which parameters get their gradient from regions alone, and what regions make.

Where such a parameter gets none from them, its `.grad` is None.

An expert that no token was sent to is left alone by the optimizer, weight decay included, as on one device.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import REGION, REGION_BACKWARD, Graph, Node, OutputKind, TensorMeta

Given = tuple[str, int]
"""(region key, position among what its backward gives)."""

LINEAR = frozenset({"aten.add.Tensor", "aten._to_copy.default", "prims.convert_element_type.default"})
"""What stands between a region's gradient and the parameter's: sums over uses, casts."""


def gradient_sources(graph: Graph) -> dict[str, frozenset[Given]]:
    """Parameter name -> all regions' gradients that its gradient is the sum of; others are left out."""
    made: dict[str, tuple[Node, int]] = {o.name: (n, k) for n in graph.nodes for k, o in enumerate(n.outputs) if o}
    targets = {i.value.name: i.target for i in graph.inputs}
    found = {}
    for out in graph.outputs:
        if out.kind is OutputKind.GRADIENT and out.value is not None:
            sources = _sources(out.value, made)
            if sources:
                found[targets[out.target]] = sources
    return found


def _sources(value: str, made: Mapping[str, tuple[Node, int]]) -> frozenset[Given] | None:
    """None where something else is part of it."""
    if value not in made:
        return None
    node, position = made[value]
    if node.op == REGION_BACKWARD:
        return frozenset({(node.args[0], position)})
    if node.op not in LINEAR:
        return None
    parts = [_sources(ref, made) for ref in node.refs]
    whole = [p for p in parts if p is not None]
    return frozenset(g for p in whole for g in p) if len(whole) == len(parts) else None


def region_metas(graph: Graph) -> list[tuple[str, tuple[TensorMeta, ...], tuple[TensorMeta, ...]]]:
    """(key, what its forward makes but for the token, what its backward makes) of each region's call."""
    made = {n.args[0]: n for n in graph.nodes if n.op == REGION}
    back = {n.args[0]: n for n in graph.nodes if n.op == REGION_BACKWARD}
    return [(key, _metas(n)[:-1], _metas(back[key]) if key in back else ()) for key, n in made.items()]


def _metas(node: Node) -> tuple[TensorMeta, ...]:
    return tuple(o.meta for o in node.outputs if o is not None)
