"""What an op costs on one device, from its local shapes (roofline), and what the optimizer's update costs.

    us = max(floor + flops/F, bytes/M, floor)

F is the achieved rate for the dtype, M the achieved memory bandwidth, floor the least time of one kernel. The first
term makes the rate saturate with size x in flops: x/(floor + x/F) = F·x/(x + F·floor), half of F at x = F·floor, and
tiny matrices cost the floor (the (r∞, n½) form of Hockney and Jesshope 1981). Views and aliases cost 0.

On a cluster with a profile, what has a measured curve has that curve's time, views too (`cost_model.measured`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar import ops
from autopar.cost_model.device import flops_per_us, memory_bytes_per_us
from autopar.cost_model.measured import measured_of, work_of
from autopar.ir.cluster import ClusterSpec, Device
from autopar.ir.graph import ITEM_BYTES, Node, TensorMeta
from autopar.ir.profile import OPTIMIZER, op_class

FLOATS = frozenset(dtype for dtype in ITEM_BYTES if dtype.startswith(("float", "bfloat", "complex")))
PARAMETER_PASSES = 3
"""Passes over each parameter in an update: the parameter is read and written, its gradient is read."""
STATE_PASSES = 2
"""Passes over the optimizer's state (AdamW: two moments): read and written."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """Time, floating point operations and bytes moved of one op on one device.

    `source`: "measured" (on a curve of the profile), "calibrated" (a neighbouring or corrected curve, or this roofline
    on rates measured on the machine), "analytic" (on described rates), or "estimated" (a rate that is not described).
    """

    us: float
    flops: float
    bytes: float
    source: str


FREE = OpCost(0.0, 0.0, 0.0, "analytic")


def op_cost(
    node: Node, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...], cluster: ClusterSpec
) -> OpCost:
    """Cost of `node` on the slowest device of `cluster`; metas are local, `inputs` in the order of `node.refs`."""
    measured = measured_of(cluster.profile)
    view = ops.is_view(node.op)
    if view and measured is None:
        return FREE
    flops, moved = (0.0, 0) if view else (ops.flops(node, inputs, outputs), ops.moved_bytes(node, inputs, outputs))
    dtype = compute_dtype(inputs, outputs)
    if measured is not None:
        found = measured.op_us(work_of(node, inputs, outputs, flops, moved, dtype))
        if found is not None:
            return OpCost(found[0], flops, moved, found[1])
        if view:
            return FREE
    cost = max((roofline(flops, moved, dtype, group.device) for group in cluster.groups), key=lambda cost: cost.us)
    factor = cluster.profile.factor(op_class(node.op)) if cluster.profile is not None else 1.0
    return cost if factor == 1 else replace(cost, us=cost.us * factor, source="calibrated")


def compute_dtype(inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...]) -> str:
    """dtype whose rate counts: of the first floating tensor, else of the first tensor, else float32."""
    metas = [meta for meta in (*inputs, *outputs) if meta is not None]
    floats = [meta.dtype for meta in metas if meta.dtype in FLOATS]
    return floats[0] if floats else metas[0].dtype if metas else "float32"


def roofline(flops: float, moved: float, dtype: str, device: Device) -> OpCost:
    """max(floor + flops/F, bytes/M, floor) on one device."""
    rate, listed = flops_per_us(device, dtype)
    floor = device.kernel_floor_us
    us = max(floor + flops / rate, moved / memory_bytes_per_us(device))
    return OpCost(us, flops, moved, _source(device, listed or flops == 0))


def _source(device: Device, listed: bool) -> str:
    if not listed:
        return "estimated"
    return "calibrated" if device.source.startswith("measured") else "analytic"


def optimizer_us(numel: int, dtype: str, state_bytes_per_parameter: float, cluster: ClusterSpec) -> float:
    """µs to update `numel` parameters on the slowest device: the bytes that a fused AdamW moves over memory bandwidth.

    bytes = numel·(3·item + 2·state): parameter read and written, gradient read, state read and written. An optimizer of
    separate passes (`foreach=False, fused=False`) moves two to three times as much.
    """
    moved = numel * (PARAMETER_PASSES * ITEM_BYTES[dtype] + STATE_PASSES * state_bytes_per_parameter)
    measured = measured_of(cluster.profile)
    found = measured.optimizer_us(moved) if measured is not None else None
    if found is not None:
        return found
    factor = cluster.profile.factor(OPTIMIZER) if cluster.profile is not None else 1.0
    return max(moved / memory_bytes_per_us(group.device) for group in cluster.groups) * factor
