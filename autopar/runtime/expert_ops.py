"""Local forms of experts (`autopar.ops.experts` says who has which rows). Emitted code calls them through `local_ops`.

Where rows are exchanged, `order` has behind the slots of this rank's rows two more parts: how many of them go to each
rank, and how many rows come from each rank for each of this rank's experts. So the way back needs no further counts.
Counts are read by the host, once in `route` and once in every exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import autopar.ops.custom  # noqa: F401 (defines torch.ops.autopar)
from autopar.ir.cuts import chunk
from autopar.runtime.comm import Communicator

Axes = tuple[str, ...]


def route(rt: Communicator, index: Tensor, experts: int, cut: Axes, exchange: Axes) -> tuple[Tensor, Tensor]:
    """Where this rank's rows are: (ends of this rank's experts, order).

    Args:
        index: expert of each slot that this rank has, [..., k].
        cut: axes that cut experts, slowest first; `exchange`: that of them whose ranks have other tokens each, if any.
    """
    if not cut:
        ends, order = torch.ops.autopar.route.default(index, experts)
        return ends, order
    sizes = [rt.size(a) for a in cut]
    largest = experts
    for n in sizes:
        largest = chunk(largest, n)
    mine = rt.piece(experts, tuple(cut)).length
    flat = index.reshape(-1)
    if flat.is_meta:
        return _unknown(rt, flat, mine, cut, exchange)
    # Experts in pieces of one size (the last ones shorter, then padded here), by the ranks that have them.
    counts = torch.bincount(flat, minlength=math.prod(sizes) * largest)
    counts = _at_own(rt, counts.view(*sizes, largest), cut, exchange)  # [ranks of the exchange, largest]
    holder = _holder(rt, math.prod(sizes), sizes, cut, exchange, flat.device)[flat // largest]
    order = torch.argsort(torch.where(holder, flat, math.prod(sizes) * largest), stable=True)
    if len(exchange) == len(cut):  # all slots have a row
        send = counts
    else:
        send, order = counts, order[: int(counts.sum())]
    if not exchange:
        return _ends(send[:, :mine]), order
    taken = rt.exchange_counts(send, exchange[0])[:, :mine]
    return _ends(taken), torch.cat([order, send.sum(1), taken.reshape(-1)])


def _ends(counts: Tensor) -> Tensor:
    """counts: [sources, experts] -> [experts]."""
    return counts.sum(0).cumsum(0).to(torch.int32)


def _at_own(rt: Communicator, counts: Tensor, cut: Axes, exchange: Axes) -> Tensor:
    """Of [*sizes, experts] what this rank sends: [ranks of the exchange or 1, experts]."""
    place = tuple(slice(None) if a in exchange else rt.index(a) for a in cut)
    return counts[place].reshape(-1, counts.shape[-1])


def _holder(
    rt: Communicator, pieces: int, sizes: Sequence[int], cut: Axes, exchange: Axes, device: torch.device
) -> Tensor:
    """Of each piece of the experts whether this rank handles its rows: [pieces], bool."""
    found = torch.zeros(pieces, dtype=torch.bool, device=device).view(*sizes)
    found[tuple(slice(None) if a in exchange else rt.index(a) for a in cut)] = True
    return found.reshape(-1)


def _unknown(rt: Communicator, flat: Tensor, mine: int, cut: Axes, exchange: Axes) -> tuple[Tensor, Tensor]:
    """Without data: as if rows were spread evenly."""
    rows = chunk(flat.numel(), math.prod(rt.size(a) for a in cut if a not in exchange))
    more = 0
    for axis in exchange:
        more += rt.size(axis) * (mine + 1)
        rt.exchange_counts(flat.new_empty((rt.size(axis), mine), dtype=torch.int64), axis)
    return flat.new_empty((mine,), dtype=torch.int32), flat.new_empty((rows + more,), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Way:
    """One exchange of rows, read back from `order`.

    Attributes:
        order: slot of each row that leaves.
        give, take: rows to and from each rank of the axis.
        sorting: arrived rows, which come by rank, in order of their experts.
    """

    order: Tensor
    give: list[int]
    take: list[int]
    sorting: Tensor

    @classmethod
    def of(cls, rt: Communicator, ends: Tensor, order: Tensor, axis: str) -> _Way:
        """What `route` wrote."""
        ranks, experts = rt.size(axis), ends.shape[0]
        slots = order.shape[0] - ranks * (experts + 1)
        leaving, send, taken = torch.split(order, [slots, ranks, ranks * experts])
        if order.is_meta:
            even = [chunk(slots, ranks)] * ranks
            return cls(leaving, even, even, leaving.new_empty(sum(even)))
        expert = torch.arange(experts, device=order.device).repeat(ranks).repeat_interleave(taken)
        counts = torch.cat([send, taken.view(ranks, experts).sum(1)]).tolist()
        return cls(leaving, counts[:ranks], counts[ranks:], torch.argsort(expert, stable=True))


def spread(rt: Communicator, slots: Tensor, ends: Tensor, order: Tensor, exchange: Axes) -> Tensor:
    """Slots [..., k, H] -> this rank's rows [rows, H], by expert."""
    if not exchange:
        return _rows(slots, ends, order)
    way = _Way.of(rt, ends, order, exchange[0])
    rows = _rows(slots, ends, way.order)
    arrived = rt.exchange_rows(rows, exchange[0], way.give, way.take)
    return arrived[way.sorting]


def _rows(slots: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    if slots.is_meta:
        return slots.new_empty((order.numel(), slots.shape[-1]))
    found: Tensor = torch.ops.autopar.spread.default(slots, ends, order)
    return found


def collect(rt: Communicator, rows: Tensor, ends: Tensor, order: Tensor, size: Sequence[int], exchange: Axes) -> Tensor:
    """This rank's rows -> slots [*size, H] that it has; zeros where a slot's row is another rank's."""
    if exchange:
        way = _Way.of(rt, ends, order, exchange[0])
        rows = rt.exchange_rows(
            torch.empty_like(rows).index_copy_(0, way.sorting, rows), exchange[0], way.take, way.give
        )
        order = way.order
    slots, order = math.prod(size), order.reshape(-1)
    made = rows.new_empty if order.shape[0] == slots else rows.new_zeros
    return made((slots, rows.shape[1])).index_copy_(0, order, rows).view(*size, rows.shape[1])


def grouped_mm(rt: Communicator, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each row times its expert's matrix: [M, K], [E, K, N] -> [M, N]."""
    found: Tensor = torch.ops.autopar.grouped_mm.default(rows, weights, ends)
    return found


def grouped_outer(rt: Communicator, rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    """Sums over each expert's rows: [M, K], [M, N] -> [E, K, N]."""
    found: Tensor = torch.ops.autopar.grouped_outer.default(rows, grads, ends)
    return found
