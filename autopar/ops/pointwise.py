"""Element by element ops that DTensor has no (or a partial) rule for. All other pointwise ops are DTensor's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import Node
from autopar.ir.layout import P, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import Metas, OpEntry, Rules, broadcast_cut, each_out, out_shape


def pointwise(linear: bool = False) -> Rules:
    """Every dim of the output may be cut, arguments with it where they aren't broadcast. `linear`: sums stay sums."""

    def rules(node: Node, metas: Metas) -> Iterator[Rule]:
        out = out_shape(node)
        for d in range(len(out)):
            yield Rule(each_out(node, S(d)), tuple(broadcast_cut(m.shape, out, d) for m in metas))
        if linear:
            yield Rule(each_out(node, P), (P,) * len(metas))

    return rules


_NONLINEAR = OpEntry(rules=pointwise())

POINTWISE: Mapping[str, OpEntry] = {
    "aten.copy.default": OpEntry(rules=pointwise()),
    "aten.fill.Tensor": _NONLINEAR,
    "aten.fill.Scalar": _NONLINEAR,
    "aten.masked_fill.Tensor": _NONLINEAR,
    "aten.softplus_backward.default": _NONLINEAR,
    "prims.convert_element_type.default": _NONLINEAR,
}
