"""What a collective costs: latency and volume by link level (α-β).

For a group of n devices inside one link level of latency α (µs a message) and bandwidth β (bytes per µs that one device
sends while all do), with V = `nbytes`, the bytes that one device holds on the *larger* side of the step:

    all-reduce       2(n−1)α + 2(n−1)/n · V/β    V: the tensor, whole on this axis, before as after
    all-gather        (n−1)α +  (n−1)/n · V/β    V: after the step
    reduce-scatter    (n−1)α +  (n−1)/n · V/β    V: before the step
    all-to-all        (n−1)α +  (n−1)/n · V/β    V: the device's own piece, before as after
    slice            2·(V/n) over memory bandwidth: the piece is read and written; V: before

(ring and pairwise algorithms: Thakur et al. 2005, the same terms as NCCL's src/graph/tuning.cc.) A slice of the leading
dim is a view and costs 0.

A group that spans levels, n = n₀·n₁·… with n₀ members inside each innermost unit, n₁ such units, and so on, does the
inner part first: all-gather = Σ_l (n_l−1)α_l + (n_l−1)/n_l · V/(n₀⋯n_{l−1})/β_l, likewise the others, and all-reduce
twice that. So 8 devices of a node share its links for one group's traffic. A group with one member per node has n₀ = 1
and pays the slow level alone. An all-to-all sends V/n to each of the n₀⋯n_{l−1}·(n_l−1) members that level l leads to.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.cost_model.device import memory_bytes_per_us
from autopar.ir.cluster import ClusterSpec, LinkLevel
from autopar.ir.graph import ITEM_BYTES, TensorMeta
from autopar.ir.layout import Kind, Layout, divides
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Collective, ReshardStep, plan_reshard

CollectivePrice = Callable[[Collective, float, str], float]


def spans(axis: str, mesh: Mesh, cluster: ClusterSpec) -> tuple[tuple[int, LinkLevel], ...]:
    """(members, level) pairs of an axis's group, innermost first; the members multiply to the axis's size.

    An axis whose `level` differs from what the cluster says of its size and stride is priced whole at its own level,
    and so is one that does not fill the units it touches.
    """
    size, stride, level = mesh.axis(axis).size, mesh.stride(axis), mesh.axis(axis).level
    at_level = ((size, cluster.levels[level]),)
    if level != cluster.level_of(size, stride):
        return at_level
    found: list[tuple[int, LinkLevel]] = []
    left, inside = size, 1
    for link in cluster.levels:
        inside *= link.size
        members = min(left, max(1, inside // stride))
        if left % members or (inside > stride and inside % stride):
            return at_level
        if members > 1:
            found.append((members, link))
        left, stride = left // members, stride * members
    return tuple(found) if left == 1 else at_level


def collective_us(collective: Collective, nbytes: float, axis: str, mesh: Mesh, cluster: ClusterSpec) -> float:
    """µs of one collective on `axis`; `nbytes`: what one device holds on the larger side (module docstring)."""
    if collective is Collective.SLICE:
        return _copy_us(nbytes / mesh.axis(axis).size, cluster)
    return _priced(collective, nbytes, spans(axis, mesh, cluster))


def _priced(collective: Collective, nbytes: float, groups: tuple[tuple[int, LinkLevel], ...]) -> float:
    match collective:
        case Collective.ALL_REDUCE:
            return 2 * _ring_us(nbytes, groups)
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return _ring_us(nbytes, groups)
        case Collective.ALL_TO_ALL:
            return _exchange_us(nbytes, groups)
        case _:
            raise AssertionError(collective)


def _ring_us(nbytes: float, groups: tuple[tuple[int, LinkLevel], ...]) -> float:
    """Σ_l (n_l−1)α_l + (n_l−1)/n_l · V/(n₀⋯n_{l−1})/β_l."""
    total = 0.0
    for n, link in groups:
        total += (n - 1) * link.latency_us + (n - 1) / n * nbytes / link.bytes_per_us
        nbytes /= n
    return total


def _exchange_us(nbytes: float, groups: tuple[tuple[int, LinkLevel], ...]) -> float:
    """Σ_l (n₀⋯n_{l−1})(n_l−1) · (α_l + V/n/β_l)."""
    total, nearer = 0.0, 1
    piece = nbytes / math.prod(n for n, _ in groups)
    for n, link in groups:
        total += nearer * (n - 1) * (link.latency_us + piece / link.bytes_per_us)
        nearer *= n
    return total


def _copy_us(nbytes: float, cluster: ClusterSpec) -> float:
    """Read and write `nbytes` on the slowest device."""
    return max(2 * nbytes / memory_bytes_per_us(group.device) for group in cluster.groups)


def local_bytes(meta: TensorMeta, layout: Layout, mesh: Mesh) -> float:
    """Bytes of one device's piece of a tensor of global `meta`."""
    parts = 1
    for axis, placement in zip(mesh.axes, layout.placements, strict=True):
        if placement.kind is Kind.SHARD:
            parts *= axis.size
    return math.prod(meta.shape) * ITEM_BYTES[meta.dtype] / parts


def is_view_slice(meta: TensorMeta, step: ReshardStep, mesh: Mesh) -> bool:
    """True if a slice leaves a contiguous piece: every dim before the cut one has size 1 on the device."""
    before = dict.fromkeys(range(step.dim), 1)
    for axis, placement in zip(mesh.axes, step.before.placements, strict=True):
        if placement.dim in before:
            before[placement.dim] *= axis.size
    return all(meta.shape[dim] == parts for dim, parts in before.items())


def price_reshard(meta: TensorMeta, before: Layout, after: Layout, mesh: Mesh, price: CollectivePrice) -> float:
    """Σ over `plan_reshard(before, after)` of `price(collective, bytes, axis)`.

    inf where there is no way, and where a layout on the way does not divide the shape: it could not be emitted.
    """
    steps = plan_reshard(before, after)
    if steps is None:
        return math.inf
    total = 0.0
    for step in steps:
        if not (divides(step.before, meta.shape, mesh) and divides(step.after, meta.shape, mesh)):
            return math.inf
        if step.collective is Collective.SLICE and is_view_slice(meta, step, mesh):
            continue
        larger = max(local_bytes(meta, step.before, mesh), local_bytes(meta, step.after, mesh))
        total += price(step.collective, larger, step.axis)
    return total


def reshard_us(meta: TensorMeta, before: Layout, after: Layout, mesh: Mesh, cluster: ClusterSpec) -> float:
    """µs to bring a tensor of *global* `meta` from one layout to another; inf if there is no way."""
    return price_reshard(
        meta,
        before,
        after,
        mesh,
        lambda collective, nbytes, axis: collective_us(collective, nbytes, axis, mesh, cluster),
    )
