"""What a collective costs among a group of devices: latency and volume by link level (α-β), by algorithm.

For a group of n devices inside one link level of latency α (µs a message) and bandwidth β (bytes per µs that one
device sends while all do), with V the bytes that one device holds on the *larger* side:

    all-gather, reduce-scatter   ring      (n−1)α + (n−1)/n · V/β
    all-reduce, least of         ring      twice that
                                 tree      2·⌈log₂ n⌉·α + 2·V/β
                                 switch    2α + 2(n−1)/n · V/β′     where the level's switches reduce, at β′
    all-to-all                   pairwise  (n−1)α + (n−1)/n · V/β
    send to the next                       α + V/β             of the outermost level: some rank's next is across it

(Thakur et al. 2005; the same terms as NCCL's src/graph/tuning.cc. β is what a large all-reduce measures as
bus bandwidth.)

A group that spans levels, n = n₀·n₁·… with n₀ members inside each innermost unit, n₁ such units and so on, moves what
crosses level l over the links of all n₀⋯n_{l−1} members of a unit at once: V(n_l−1)/n_l /(n₀⋯n_{l−1}) for each. Levels
work at the same time, so the slowest bounds the volume; latencies add up. So 8 devices of a node share its links for
one group's traffic, and a group with one member in each node pays the slow level alone. An all-to-all sends V/n to
each of the n₀⋯n_{l−1}·(n_l−1) members that level l leads to.
"""

from __future__ import annotations

import math

from autopar.ir.cluster import ClusterSpec, LinkLevel
from autopar.ir.reshard import Collective

Levels = tuple[tuple[int, LinkLevel], ...]
"""(members, level), innermost first; the members multiply to the group's size. Levels with one member are left out."""


def group_levels(size: int, stride: int, cluster: ClusterSpec) -> Levels:
    """The levels of a group of `size` devices, `stride` ranks apart.

    A group that does not fill the units it touches is priced whole at the level that it must cross.
    """
    whole = ((size, cluster.levels[cluster.level_of(size, stride)]),) if size > 1 else ()
    found: list[tuple[int, LinkLevel]] = []
    left, inside = size, 1
    for link in cluster.levels:
        inside *= link.size
        members = min(left, max(1, inside // stride))
        if left % members or (inside > stride and inside % stride):
            return whole
        if members > 1:
            found.append((members, link))
        left, stride = left // members, stride * members
    return tuple(found) if left == 1 else whole


def group_us(collective: Collective, nbytes: float, levels: Levels) -> float:
    """µs of one collective; `nbytes`: what one device holds on the larger side. Not for SLICE, which sends nothing."""
    match collective:
        case Collective.ALL_REDUCE:
            return min(2 * _ring_us(nbytes, levels), _tree_us(nbytes, levels), _switch_us(nbytes, levels))
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return _ring_us(nbytes, levels)
        case Collective.ALL_TO_ALL:
            return _exchange_us(nbytes, levels)
        case Collective.SEND:
            return send_us(nbytes, levels)
        case _:
            raise AssertionError(collective)


def send_us(nbytes: float, levels: Levels) -> float:
    """µs of `nbytes` from one device to another: α + V/β of the outermost level."""
    return levels[-1][1].latency_us + nbytes / levels[-1][1].bytes_per_us if levels else 0.0


def _ring_us(nbytes: float, levels: Levels) -> float:
    """Σ_l (n_l−1)α_l + max_l (n_l−1)/n_l · V/(n₀⋯n_{l−1})/β_l."""
    latency, volume = 0.0, 0.0
    for n, link in levels:
        latency += (n - 1) * link.latency_us
        volume = max(volume, (n - 1) / n * nbytes / link.bytes_per_us)
        nbytes /= n
    return latency + volume


def _tree_us(nbytes: float, levels: Levels) -> float:
    """2·Σ_l ⌈log₂ n_l⌉·α_l + 2·max_l V/(n₀⋯n_{l−1})/β_l: up and down double trees, all links at work."""
    latency, volume = 0.0, 0.0
    for n, link in levels:
        latency += math.ceil(math.log2(n)) * link.latency_us
        volume = max(volume, nbytes / link.bytes_per_us)
        nbytes /= n
    return 2 * (latency + volume)


def _switch_us(nbytes: float, levels: Levels) -> float:
    """2α + 2(n−1)/n · V/β′ inside one level whose switches reduce; else inf."""
    if len(levels) != 1 or not levels[0][1].switch_bytes_per_us:
        return math.inf
    n, link = levels[0]
    return 2 * link.latency_us + 2 * (n - 1) / n * nbytes / link.switch_bytes_per_us


def _exchange_us(nbytes: float, levels: Levels) -> float:
    """Σ_l (n₀⋯n_{l−1})(n_l−1)·α_l + max_l (n₀⋯n_{l−1})(n_l−1)·V/n/β_l."""
    latency, volume, nearer = 0.0, 0.0, 1
    piece = nbytes / math.prod(n for n, _ in levels)
    for n, link in levels:
        peers = nearer * (n - 1)
        latency += peers * link.latency_us
        volume = max(volume, peers * piece / link.bytes_per_us)
        nearer *= n
    return latency + volume
