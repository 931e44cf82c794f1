"""The prices that the problem builder asks for, on one cluster."""

from __future__ import annotations

from itertools import zip_longest
from typing import final

from autopar import ops
from autopar.cost_model.model import CostModel
from autopar.cost_model.wiring import Wiring
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph, Node, TensorMeta
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.strategy import Strategy


@final
class MeshPrices:
    """Prices on one mesh: op times by roofline, every collective by the same function."""

    def __init__(self, cluster: ClusterSpec, mesh: Mesh, pieces: Mesh | None = None) -> None:
        self._mesh = pieces or mesh
        self._model = CostModel(cluster, mesh, pieces)

    def op_us(
        self, node: Node, strategy: Strategy, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...]
    ) -> tuple[float, float]:
        """(computation µs, µs of the collectives inside the op, as far as nothing is computed meanwhile)."""
        us = self._model.op(node, inputs, outputs).us
        if not any(strategy.tags):
            return us, 0.0
        sent = [
            self._model.collective_us(collective, nbytes, axis)
            for collective, axis, nbytes in ops.inner_collectives(node, strategy, self._mesh, inputs, outputs)
        ]
        rounds = ops.rounds(node, strategy, self._mesh, inputs, outputs)
        if not rounds:
            return us, sum(sent)
        exposed = (max(0.0, there - times * us) for there, times in zip_longest(sent, rounds, fillvalue=0))
        return us * sum(rounds), sum(exposed)

    def reshard_us(self, meta: TensorMeta, before: Layout, after: Layout, stays: bool = False) -> float:
        """µs to convert a tensor of global `meta`, which `stays` anyway or goes; inf if impossible."""
        return self._model.reshard_us(meta, before, after, stays)

    def steps_us(self, meta: TensorMeta, before: Layout, after: Layout, stays: bool = False) -> list[float]:
        """`reshard_us` by step."""
        return self._model.steps_us(meta, before, after, stays)

    def copy_us(self, nbytes: int) -> float:
        """µs to copy so many bytes on the device."""
        return self._model.copy_us(nbytes)

    def optimizer_us(self, numel: int, dtype: str, state_bytes_per_parameter: int) -> float:
        """µs to update `numel` parameters."""
        return self._model.optimizer_us(numel, dtype, state_bytes_per_parameter)

    @property
    def updates_at_once(self) -> bool:
        """True if the optimizer updates all parameters together, as torch's does on GPUs."""
        return self._model.cluster.backend == "nccl"

    def is_view(self, node: Node) -> bool:
        """True if the op's output shares its first input's storage."""
        return ops.is_view(node.op)


def model_flops(captured: CapturedGraph, wiring: Wiring) -> float:
    """Floating point operations of one step, forward and backward, as captured (nothing recomputed)."""
    metas = {g.name: {name: v.meta for name, v in g.values().items()} for g in captured.graphs}
    total = 0.0
    for slot in wiring.slots:
        if slot.node is not None:
            inputs = tuple(metas[slot.graph][ref] for ref in slot.node.refs)
            outputs = tuple(None if o is None else o.meta for o in slot.node.outputs)
            total += slot.count * ops.flops(slot.node, inputs, outputs)
    return total
