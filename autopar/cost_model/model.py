"""The prices of one mesh of one cluster, each worked out once: what a search asks 50 000 times."""

from __future__ import annotations

from typing import Any, final

from autopar.cost_model.collectives import Pieces, collective_us, copy_us, price_reshard, price_steps
from autopar.cost_model.op_cost import OpCost, op_cost, optimizer_us
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Collective

Metas = tuple[TensorMeta | None, ...]


@final
class CostModel:
    """Remembers what it priced. Every collective is priced by `collective_us`, whichever way it is reached."""

    def __init__(self, cluster: ClusterSpec, mesh: Mesh, pieces: Mesh | None = None) -> None:
        """`pieces`: of the mesh that cuts tensors, where it isn't that of the devices (micro-batches)."""
        self.cluster = cluster
        self.mesh = mesh
        self.pieces = pieces or mesh
        self._forms: dict[int, tuple[Node, str]] = {}
        self._ops: dict[tuple[str, Metas, Metas], OpCost] = {}
        self._collectives: dict[tuple[str, float, str], float] = {}
        self._tensors: dict[TensorMeta, tuple[Pieces, dict[tuple[Layout, Layout, bool], float]]] = {}

    def op(self, node: Node, inputs: tuple[TensorMeta, ...], outputs: Metas) -> OpCost:
        """`op_cost` of local metas; equal ops with equal literal arguments and metas are priced once."""
        key = (self._form(node), inputs, outputs)
        found = self._ops.get(key)
        if found is None:
            found = self._ops[key] = op_cost(node, inputs, outputs, self.cluster)
        return found

    def collective_us(self, collective: Collective, nbytes: float, axis: str) -> float:
        """`collectives.collective_us` on an axis of this mesh."""
        key = (collective.value, nbytes, axis)
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = collective_us(collective, nbytes, axis, self.mesh, self.cluster)
        return found

    def reshard_us(self, meta: TensorMeta, before: Layout, after: Layout, stays: bool = False) -> float:
        """`collectives.reshard_us` of a *global* meta on this mesh."""
        if before is after:
            return 0.0
        known = self._tensors.get(meta)
        if known is None:
            known = self._tensors[meta] = (Pieces(meta, self.pieces), {})
        pieces, prices = known
        key = (before, after, stays)
        found = prices.get(key)
        if found is None:
            found = prices[key] = price_reshard(pieces, before, after, self.collective_us, stays)
        return found

    def steps_us(self, meta: TensorMeta, before: Layout, after: Layout, stays: bool = False) -> list[float]:
        """`reshard_us` by step; none where there is no way."""
        return price_steps(Pieces(meta, self.mesh), before, after, self.collective_us, stays) or []

    def copy_us(self, nbytes: float) -> float:
        """Reading and writing so many bytes."""
        return copy_us(nbytes, self.cluster)

    def optimizer_us(self, numel: int, dtype: str, state_bytes_per_parameter: float) -> float:
        """`op_cost.optimizer_us` on this cluster."""
        return optimizer_us(numel, dtype, state_bytes_per_parameter, self.cluster)

    def _form(self, node: Node) -> str:
        """The op with its literal arguments. Kept by identity, with the node itself so that its id is not reused."""
        found = self._forms.get(id(node))
        if found is None:
            literals = (_literals(node.args), tuple((name, _literals(arg)) for name, arg in node.kwargs))
            found = self._forms[id(node)] = (node, f"{node.op}{literals!r}")
        return found[1]


def _literals(tree: Any) -> Any:
    if isinstance(tree, Ref):
        return "%"
    if isinstance(tree, (tuple, list)):
        return tuple(map(_literals, tree))
    return tree
