"""Merge a node into the only reader of its value, where the numbers prove that it costs nothing.

Nodes o and n, joined by values that o makes and only n reads, become one node whose strategies are pairs (a, b):

    cost[a,b] = c_o[a] + c_n[b] + Σ r[made(a), wants(b)]        (r of an overlap group is taken from the pair's cover)

This is exact for any pair of nodes. It is worth while if dominance (dominance.py) leaves few pairs: for each a only
those b that no other b' can stand for, for each b only those a. An op that computes in the layout that it is given, and
whose conversion is never cheaper before it than after, is left with one b for each a (a *follower*); a parameter that
one op reads is left with one storage layout for each b unless memory speaks for several.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.problem import Consumer, Moment, NodeBytes, Problem, ProblemNode, ProblemValue
from autopar.solver.dominance import Worst, worst_growth
from autopar.solver.linear import Bools, Floats, Ints
from autopar.solver.reduction import Reduction, unchanged
from autopar.solver.view import View

GROWTH = 3.0
"""A pair may have so many times the strategies of the larger node. More strategies, but far fewer transport columns:
10 blocks with memory, 21 947 columns: 19 181 at 1.0, 14 221 at 2, 6 924 at 3, 7 293 at 5; the MIP of 17 blocks
takes 12.4 s at 1.0 and 5.2 s at 3 (processor seconds)."""
LARGEST = 2**20  # entries of the largest table that a merge may look at


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Nodes `first` (o) and `second` (n), the values that vanish between them, and the pairs (a, b) that stay."""

    first: int
    second: int
    values: tuple[int, ...]
    group: int | None
    a: Ints
    b: Ints
    cost: Floats
    cover: Floats


def merge_pairs(problem: Problem) -> Reduction:
    """One round: every node takes part in at most one merge, first come first served in the order of the values."""
    view = View(problem)
    busy: set[int] = set()
    pairs = []
    for value in problem.values:
        readers = {c.node for c in value.consumers}
        if len(readers) != 1 or value.producer in readers or value.producer in busy or readers & busy:
            continue
        pair = _worth_merging(view, value.producer, readers.pop())
        if pair is not None:
            busy |= {pair.first, pair.second}
            pairs.append(pair)
    return _rewritten(problem, view, pairs) if pairs else unchanged(problem)


def _worth_merging(view: View, first: int, second: int) -> _Pair | None:
    """The merge of two nodes, or None if it would leave more strategies than the larger of them has."""
    if len(view.cost[first]) * len(view.cost[second]) * max(len(view.cost[first]), len(view.cost[second])) > LARGEST:
        return None
    values = tuple(
        v
        for v in view.values_of[first]
        if view.problem.values[v].producer == first
        and view.problem.values[v].consumers
        and all(c.node == second for c in view.problem.values[v].consumers)
    )
    group = _common_group(view, first, second, values)
    if group is _MANY:
        return None
    cost = view.cost[first][:, None] + view.cost[second][None, :]
    cover = view.cover[first][:, None] + view.cover[second][None, :]
    for v in values:
        paid = _paid(view, v, second)
        if view.problem.values[v].group is None:
            cost = cost + paid
        else:
            cost = np.where(np.isinf(paid), np.inf, cost)
            cover = cover - np.where(np.isinf(paid), 0.0, paid)
    left_out = frozenset(values)
    alive = np.isfinite(cost)
    held_second = view.held[second] + _folded_bytes(view, second, left_out)
    for axis, node, held in ((1, second, held_second), (0, first, view.held[first])):
        _drop_stood_for(
            alive, cost, cover, axis, group, worst_growth(view, node, left_out), held[view.moments_of[node]]
        )
    if not 0 < alive.sum() <= GROWTH * max(alive.shape):
        return None
    a, b = np.nonzero(alive)
    return _Pair(
        first=first, second=second, values=values, group=group, a=a, b=b, cost=cost[a, b], cover=cover[a, b]
    )  # fmt: skip


_MANY = -1


def _common_group(view: View, first: int, second: int, values: tuple[int, ...]) -> int | None:
    """The one overlap group that the pair's cover belongs to, None for none, `_MANY` if there would be two."""
    groups = {view.group[first], view.group[second], *(view.problem.values[v].group for v in values)} - {None}
    return groups.pop() if len(groups) == 1 else _MANY if groups else None


def _paid(view: View, value: int, second: int) -> Floats:
    """[a, b]: Σ r over the distinct layouts that `second` wants of the value."""
    made, price = view.made[value], view.price[value]
    paid = np.zeros((len(made), len(view.cost[second])))
    for position, reader in enumerate(view.readers[value]):
        fresh = np.ones(len(reader.wants), dtype=bool)
        for earlier in view.readers[value][:position]:
            fresh &= earlier.wants != reader.wants
        paid += np.where(fresh[None, :], price[made][:, reader.wants], 0.0)
    return paid


def _folded_bytes(view: View, second: int, values: frozenset[int]) -> Floats:
    """[moment, b]: bytes of the versions of the values that vanish."""
    total = np.zeros_like(view.held[second])
    for index in view.versions_of[second]:
        version = view.versions[index]
        if version.value in values:
            for position, reader in enumerate(version.readers):
                fresh = np.ones(len(reader.wants), dtype=bool)
                for earlier in version.readers[:position]:
                    fresh &= earlier.wants != reader.wants
                total += np.where(fresh[None, :], version.sizes[:, reader.wants], 0.0)
    return total


def _drop_stood_for(
    alive: Bools, cost: Floats, cover: Floats, axis: int, group: int | None, worst: Worst, held: Floats
) -> None:
    """Clear the pairs for which another pair, with the same strategy on the other axis, can stand."""
    if axis == 0:
        alive, cost, cover = alive.T, cost.T, cover.T
    fits: Bools = np.all(worst.grows_bytes + held[:, None, :] - held[:, :, None] <= 0, axis=0)
    safe = np.where(alive, cost, 0.0)
    grown = safe[:, None, :] - safe[:, :, None] + worst.wait_us[None]
    hide = {g: h[None] for g, h in worst.hide_us.items()}
    if group is not None:
        hide[group] = hide.get(group, 0.0) + cover[:, :, None] - cover[:, None, :]
    for more in hide.values():
        grown = grown + np.maximum(0.0, more)
    stands = (grown <= 0) & fits[None] & alive[:, None, :]
    # Of two that can stand for each other the lower stays. "Can" is meant up to rounding here, so that no ring of
    # three can drop all of itself: in a ring every link holds both ways up to rounding, and then it leads downwards.
    order = np.arange(len(fits))
    room = 1e-9 * (1.0 + safe.max(initial=0.0))
    mutual = (grown.transpose(0, 2, 1) <= room) & fits.T[None]
    stands &= ~mutual | (order[None, :] < order[:, None])[None]
    stands[:, order, order] = False
    alive &= ~stands.any(axis=2)


def _rewritten(problem: Problem, view: View, pairs: list[_Pair]) -> Reduction:
    """The problem with every pair as one node, in the place of the earlier of the two."""
    of_node = {node: pair for pair in pairs for node in (pair.first, pair.second)}
    heads = [n for n in range(len(problem.nodes)) if n not in of_node or n == min(of_node[n].first, of_node[n].second)]
    place = {n: i for i, n in enumerate(heads)}
    node_of, pick = [], []
    for n, node in enumerate(problem.nodes):
        pair = of_node.get(n)
        if pair is None:
            node_of.append(place[n])
            pick.append(tuple(range(len(node.cost_us))))
        else:
            node_of.append(place[min(pair.first, pair.second)])
            pick.append(tuple(int(s) for s in (pair.a if n == pair.first else pair.b)))
    gone = {v for pair in pairs for v in pair.values}
    new_value = {v: i for i, v in enumerate(v for v in range(len(problem.values)) if v not in gone)}
    values = tuple(_moved_value(problem.values[v], node_of, pick) for v in new_value)
    moments = tuple(_moved_moment(m, problem, node_of, pick, new_value) for m in problem.moments)
    nodes = tuple(_merged_node(problem, of_node[n]) if n in of_node else problem.nodes[n] for n in heads)
    merged = replace(problem, nodes=nodes, values=values, moments=moments)
    return Reduction(problem=merged, node=tuple(node_of), pick=tuple(pick))


def _merged_node(problem: Problem, pair: _Pair) -> ProblemNode:
    first, second = problem.nodes[pair.first], problem.nodes[pair.second]
    return ProblemNode(
        name=f"{first.name}+{second.name}",
        cost_us=tuple(pair.cost.tolist()),
        cover_us=tuple(pair.cover.tolist()) if pair.group is not None else (),
        group=pair.group,
    )


def _moved_value(value: ProblemValue, node_of: list[int], pick: list[tuple[int, ...]]) -> ProblemValue:
    return replace(
        value,
        producer=node_of[value.producer],
        made=tuple(value.made[s] for s in pick[value.producer]),
        consumers=tuple(
            Consumer(node=node_of[c.node], wants=tuple(c.wants[s] for s in pick[c.node])) for c in value.consumers
        ),
    )


def _moved_moment(
    moment: Moment, problem: Problem, node_of: list[int], pick: list[tuple[int, ...]], new_value: dict[int, int]
) -> Moment:
    """Versions of values that vanished become bytes of the reader's strategies."""
    held = [NodeBytes(node=node_of[h.node], bytes=tuple(h.bytes[s] for s in pick[h.node])) for h in moment.nodes]
    versions = []
    for version in moment.versions:
        if version.value in new_value:
            versions.append(replace(version, value=new_value[version.value]))
            continue
        consumers = [problem.values[version.value].consumers[k] for k in version.consumers]
        node = consumers[0].node
        sizes = tuple(sum(version.bytes[q] for q in {c.wants[s] for c in consumers}) for s in pick[node])
        held.append(NodeBytes(node=node_of[node], bytes=sizes))
    return replace(moment, nodes=tuple(held), versions=tuple(versions))
