"""One function turns (from layout, to layout) into collective steps. The cost model prices them, codegen emits them.

The steps leave the layouts' order of nested cuts intact: where several axes cut one dim, the faster axis is undone
before the slower one and redone after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from autopar.ir.layout import Kind, Layout, Placement, R


class Collective(Enum):
    """Steps that a device does with its neighbours along one mesh axis. SLICE needs no communication; SEND, to the next
    one, is no conversion but inside ops."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SLICE = "slice"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One step on one axis.

    Attributes:
        dim: the dim gathered, scattered or sliced; of an all-to-all, the dim that is whole afterwards (-1: none).
        to_dim: of an all-to-all, the dim that is cut afterwards (-1 otherwise).
        before, after: the tensor's layout around the step.
    """

    collective: Collective
    axis: str
    dim: int
    to_dim: int
    before: Layout
    after: Layout

    def __str__(self) -> str:
        dims = "" if self.dim < 0 else f", {self.dim}" if self.to_dim < 0 else f", {self.dim}->{self.to_dim}"
        return f"{self.collective.value}({self.axis}{dims})"


def _one_axis(before: Layout, axis: str, to: Placement) -> ReshardStep | None:
    """The step that changes only `axis`; None where nothing is to do. ValueError if there is no such step."""
    at = before.on(axis)
    if at == to:
        return None
    after = before.replace(axis, to)
    match at.kind, to.kind:
        case Kind.PARTIAL, Kind.REPLICATE:
            return ReshardStep(Collective.ALL_REDUCE, axis, -1, -1, before, after)
        case Kind.PARTIAL, Kind.SHARD:
            return ReshardStep(Collective.REDUCE_SCATTER, axis, to.dim, -1, before, after)
        case Kind.SHARD, Kind.REPLICATE:
            return ReshardStep(Collective.ALL_GATHER, axis, at.dim, -1, before, after)
        case Kind.SHARD, Kind.SHARD:
            return ReshardStep(Collective.ALL_TO_ALL, axis, at.dim, to.dim, before, after)
        case Kind.REPLICATE, Kind.SHARD:
            return ReshardStep(Collective.SLICE, axis, to.dim, -1, before, after)
        case _:
            raise ValueError(f"no conversion from {at} to {to} on axis {axis}")


def _inner_cut(layout: Layout, axis: str, dim: int) -> bool:
    """True if a faster axis than `axis` cuts `dim`: then `axis` can neither be undone nor made now."""
    i = layout.axes.index(axis)
    return any(p.kind is Kind.SHARD and p.dim == dim for p in layout.placements[i + 1 :])


def _cuts(placement: Placement, dim: int) -> bool:
    return placement.kind is Kind.SHARD and placement.dim == dim


def _blocked(now: Layout, after: Layout, axis: str) -> bool:
    """True if `axis` may not change yet: nested cuts are undone inside out and made outside in.

    So a faster axis must not cut a dim that this one touches, and a slower one must not have to change on it still."""
    at, to = now.on(axis), after.on(axis)
    if any(p.kind is Kind.SHARD and _inner_cut(now, axis, p.dim) for p in (at, to)):
        return True
    if to.kind is not Kind.SHARD:
        return False
    slower = range(now.axes.index(axis))
    ends = ((now.placements[i], after.placements[i]) for i in slower)
    return any(was != will and (_cuts(was, to.dim) or _cuts(will, to.dim)) for was, will in ends)


def keeps_order(before: Layout, after: Layout, unordered: tuple[int, ...]) -> bool:
    """True if no axis cuts one of these dims in one layout and does something else in the other."""
    ends = zip(before.placements, after.placements, strict=True)
    return all(p == q or not any(_cuts(x, d) for x in (p, q) for d in unordered) for p, q in ends)


@lru_cache(maxsize=200_000)
def plan_reshard(before: Layout, after: Layout) -> tuple[ReshardStep, ...] | None:
    """Steps from one layout to another, or None if there are none (nothing can become a partial sum).

    Order: slices first (they shrink what follows), then reductions, exchanges, gathers; inside a kind the faster axis
    first. A step that a faster axis on the same dim blocks waits; if all wait, the blocking axis is gathered first.
    """
    if before == after:
        return ()
    for at, to in zip(before.placements, after.placements, strict=True):
        if to.kind is Kind.PARTIAL and at.kind is not Kind.PARTIAL:
            return None
    order = {
        Collective.SLICE: 0,
        Collective.REDUCE_SCATTER: 1,
        Collective.ALL_REDUCE: 2,
        Collective.ALL_TO_ALL: 3,
        Collective.ALL_GATHER: 4,
    }
    steps: list[ReshardStep] = []
    now = before
    limit = 4 * len(before.axes)
    while now != after:
        ready: list[tuple[int, int, ReshardStep]] = []
        for i, axis in enumerate(now.axes):
            step = _one_axis(now, axis, after.on(axis))
            if step is not None and not _blocked(now, after, axis):
                ready.append((order[step.collective], -i, step))
        step = min(ready, key=lambda r: r[:2])[2] if ready else _unblock(now, after)
        steps.append(step)
        now = step.after
        assert len(steps) <= limit, f"no end on the way from {before} to {after}"
    return tuple(steps)


def _unblock(now: Layout, after: Layout) -> ReshardStep:
    """Gather the fastest axis that cuts a dim on which a slower axis still has to change."""
    for i in reversed(range(len(now.axes))):
        at = now.placements[i]
        if at.kind is not Kind.SHARD:
            continue
        for j in range(i):
            ends = (now.placements[j], after.placements[j])
            if ends[0] != ends[1] and any(p.kind is Kind.SHARD and p.dim == at.dim for p in ends):
                step = _one_axis(now, now.axes[i], R)
                assert step is not None
                return step
    raise AssertionError(f"no way from {now} to {after}")
