"""What a collective and a conversion cost on an axis of a mesh: `groups` has the formulas of what is sent.

`nbytes` of a collective is V, the bytes that one device holds on the larger side of the step: of an all-reduce the
tensor, whole on this axis; of an all-gather what is there after; of a reduce-scatter and a slice, before; of an
all-to-all the device's own piece. A slice reads and writes 2·(V/n) at memory bandwidth. It costs 0 where it can be a
view: a contiguous piece of what is there throughout, or at the begin of a longer conversion.

On a cluster with a profile a level's latency and volume are read off the measured curve of the collective in that
level, at the bytes that the level sees: the least time is the latency, what is above it the volume.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.cost_model.device import memory_bytes_per_us
from autopar.cost_model.groups import Levels, group_levels, group_us
from autopar.cost_model.measured import Measured, measured_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import ITEM_BYTES, TensorMeta
from autopar.ir.layout import Layout, fits, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Collective, ReshardStep, keeps_order, plan_reshard

CollectivePrice = Callable[[Collective, float, str], float]


def spans(axis: str, mesh: Mesh, cluster: ClusterSpec) -> Levels:
    """The levels of an axis's groups (`groups.group_levels`).

    An axis whose `level` differs from what the cluster says of its size and stride is priced whole at its own level.
    """
    size, stride, level = mesh.axis(axis).size, mesh.stride(axis), mesh.axis(axis).level
    if level != cluster.level_of(size, stride):
        return ((size, cluster.levels[level]),)
    return group_levels(size, stride, cluster)


def collective_us(collective: Collective, nbytes: float, axis: str, mesh: Mesh, cluster: ClusterSpec) -> float:
    """µs of one collective on `axis`; `nbytes`: what one device holds on the larger side (module docstring)."""
    factor = cluster.profile.factor(collective.value) if cluster.profile is not None else 1.0
    if collective is Collective.SLICE:
        return copy_us(nbytes / mesh.axis(axis).size, cluster) * factor
    groups = spans(axis, mesh, cluster)
    measured = measured_of(cluster.profile)
    found = _measured_us(collective, nbytes, groups, measured) if measured is not None and groups else None
    return (group_us(collective, nbytes, groups) if found is None else found) * factor


def _measured_us(collective: Collective, nbytes: float, levels: Levels, measured: Measured) -> float | None:
    """Composed of the levels' curves as `groups` composes its terms; None where a level has no curve."""
    whole, inside = math.prod(n for n, _ in levels), 1
    latency, volume = 0.0, 0.0
    for at, (n, link) in enumerate(levels):
        kinds: tuple[Collective, ...] = (collective,)
        seen, messages = nbytes / inside, 1
        if collective is Collective.ALL_TO_ALL:
            seen, messages = nbytes * inside * n / whole, inside
        elif collective is Collective.ALL_REDUCE and at < len(levels) - 1:
            kinds = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        moved = 0.0
        for kind in kinds:
            floor = measured.collective_us(kind.value, link.name, n, 0.0)
            us = measured.collective_us(kind.value, link.name, n, seen)
            if floor is None or us is None:
                return None
            latency, moved = latency + messages * floor, moved + us - floor
        volume, inside = max(volume, moved), inside * n
    return latency + volume


def copy_us(nbytes: float, cluster: ClusterSpec) -> float:
    """Read and write `nbytes` on the slowest device."""
    return max(2 * nbytes / memory_bytes_per_us(group.device) for group in cluster.groups)


class Pieces:
    """Of one tensor of *global* `meta` on a mesh: the shape of a device's piece, worked out once for each layout."""

    __slots__ = ("_shapes", "mesh", "meta")

    def __init__(self, meta: TensorMeta, mesh: Mesh) -> None:
        self.meta, self.mesh = meta, mesh
        self._shapes: dict[Layout, tuple[int, ...] | None] = {}

    def shape(self, layout: Layout) -> tuple[int, ...] | None:
        """Of the largest piece; None where the layout cuts a dim that isn't there."""
        try:
            return self._shapes[layout]
        except KeyError:
            meta = self.meta
            there = fits(layout, meta.shape)
            found = self._shapes[layout] = local_shape(meta.shape, layout, self.mesh, meta.units) if there else None
            return found


def step_bytes(meta: TensorMeta, step: ReshardStep, mesh: Mesh) -> float:
    """V of one step. Where pieces aren't equal, each is padded to the largest for the journey.

    So a gathered, scattered or sliced dim counts as (largest piece) · n; what is exchanged has the largest piece of the
    dim that it comes cut in, and all n padded pieces of the dim that it leaves cut in.
    """
    before, after = (local_shape(meta.shape, layout, mesh, meta.units) for layout in (step.before, step.after))
    return _step_bytes(meta, step, mesh, before, after)


def _step_bytes(
    meta: TensorMeta, step: ReshardStep, mesh: Mesh, before: tuple[int, ...], after: tuple[int, ...]
) -> float:
    item, n = ITEM_BYTES[meta.dtype], mesh.axis(step.axis).size
    match step.collective:
        case Collective.ALL_REDUCE:
            return float(math.prod(before) * item)
        case Collective.ALL_GATHER:
            return float(math.prod(before) * item * n)
        case Collective.ALL_TO_ALL:
            whole = before[step.to_dim]
            return float(math.prod(before) // whole * after[step.to_dim] * n * item) if whole else 0.0
        case _:
            return float(math.prod(after) * item * n)


def price_reshard(pieces: Pieces, before: Layout, after: Layout, price: CollectivePrice, stays: bool = False) -> float:
    """Σ over `plan_reshard(before, after)` of `price(collective, bytes, axis)`. `stays`: what is read is there anyway.

    inf where there is no way (of rows in no order, say), and where a layout on the way cuts a dim that isn't there.
    """
    steps = price_steps(pieces, before, after, price, stays)
    return math.inf if steps is None else sum(steps)


def price_steps(
    pieces: Pieces, before: Layout, after: Layout, price: CollectivePrice, stays: bool = False
) -> list[float] | None:
    """The prices of `plan_reshard(before, after)`'s steps; None where `price_reshard` is inf."""
    steps = plan_reshard(before, after) if keeps_order(before, after, pieces.meta.unordered) else None
    if steps is None:
        return None
    found = []
    for step in steps:
        old, new = pieces.shape(step.before), pieces.shape(step.after)
        if old is None or new is None:
            return None
        if step is steps[0] and (stays or len(steps) > 1) and _is_view_slice(step, old):
            found.append(0.0)
            continue
        found.append(price(step.collective, _step_bytes(pieces.meta, step, pieces.mesh, old, new), step.axis))
    return found


def _is_view_slice(step: ReshardStep, before: tuple[int, ...]) -> bool:
    """True of a slice that leaves a contiguous piece: every dim before the cut one has size 1 on the device."""
    return step.collective is Collective.SLICE and all(n == 1 for n in before[: step.dim])


def reshard_us(
    meta: TensorMeta, before: Layout, after: Layout, mesh: Mesh, cluster: ClusterSpec, stays: bool = False
) -> float:
    """µs to bring a tensor of *global* `meta` from one layout to another; inf if there is no way."""
    return price_reshard(
        Pieces(meta, mesh),
        before,
        after,
        lambda collective, nbytes, axis: collective_us(collective, nbytes, axis, mesh, cluster),
        stays,
    )
