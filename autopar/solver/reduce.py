"""Exact reductions: each takes a problem and gives a smaller one with the same optimum, and the way back.

drop_impossible     strategies that no finite conversion can serve
drop_dominated      strategies that another can always stand for           dominance.py
merge_pairs         a node and the only reader of its value, where that leaves no more strategies    merge.py
drop_unused_layouts rows and columns of a reshard table that nobody makes or wants
drop_slack_moments  moments that no choice can break, or that a neighbour implies
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.ir.problem import Consumer, Moment, Problem, ProblemValue, VersionBytes
from autopar.solver.dominance import no_worse, worst_growth
from autopar.solver.linear import Bools, Ints
from autopar.solver.merge import merge_pairs
from autopar.solver.model import most_bytes
from autopar.solver.reduction import Reduction, changed_tables, keep_strategies
from autopar.solver.view import View

ROUNDS = 12


def reduce_problem(problem: Problem, *, keep_moments: bool = False) -> Reduction | None:
    """All of them, until nothing changes; None if some node has no strategy left, so that no choice is finite.

    With `keep_moments` a moment stays even if it can't be broken: its bytes are wanted, not only its limit.
    """
    whole = drop_impossible(problem)
    if whole is None:
        return None
    if not keep_moments:
        whole = whole.then(drop_slack_moments(whole.problem))
    whole = whole.then(drop_dominated(whole.problem))
    for _ in range(ROUNDS):
        merged = merge_pairs(whole.problem)
        if len(merged.problem.nodes) == len(whole.problem.nodes):
            break
        whole = whole.then(merged)
        whole = whole.then(drop_dominated(whole.problem))
    return whole.then(drop_unused_layouts(whole.problem))


def drop_impossible(problem: Problem) -> Reduction | None:
    """Drop strategies with a read that only infinite conversions could serve; None if a node is left without any."""
    view = View(problem)
    alive = [np.ones(len(c), dtype=bool) for c in view.cost]
    changed = True
    while changed:
        changed = False
        for index, value in enumerate(problem.values):
            finite, made = np.isfinite(view.price[index]), view.made[index]
            for reader in view.readers[index]:
                changed |= _serve(finite, made, alive[value.producer], reader.wants, alive[reader.node])
                if reader.node == value.producer:
                    changed |= _strike(alive[reader.node], finite[made, reader.wants])
    if not all(a.any() for a in alive):
        return None
    return keep_strategies(problem, [[int(s) for s in np.flatnonzero(a)] for a in alive])


def _serve(finite: Bools, made: Ints, makes: Bools, wants: Ints, reads: Bools) -> bool:
    """Strike strategies at both ends of a read that no strategy left at the other end can serve."""
    given: Bools = np.zeros(len(finite), dtype=bool)
    given[made[makes]] = True
    changed = _strike(reads, np.any(finite[given], axis=0)[wants])
    taken: Bools = np.zeros(len(finite), dtype=bool)
    taken[wants[reads]] = True
    return _strike(makes, np.any(finite[:, taken], axis=1)[made]) or changed


def _strike(alive: Bools, good: Bools) -> bool:
    """Clear `alive` where not `good`; whether anything changed."""
    bad = alive & ~good
    alive &= good
    return bool(bad.any())


def drop_dominated(problem: Problem) -> Reduction:
    """Drop every strategy that one left can always stand for; of equals the lowest stays."""
    view = View(problem)
    kept = []
    for node in range(len(problem.nodes)):
        if len(view.cost[node]) == 1:
            kept.append([0])
            continue
        stands = no_worse(view, node, worst_growth(view, node))
        np.fill_diagonal(stands, False)
        alive = np.ones(len(stands), dtype=bool)
        for a in reversed(range(len(stands))):
            alive[a] = not (stands[a] & alive).any()
        kept.append([int(s) for s in np.flatnonzero(alive)])
    if all(len(k) == len(n.cost_us) for k, n in zip(kept, problem.nodes, strict=True)):
        return changed_tables(problem, problem)
    return keep_strategies(problem, kept)


def drop_unused_layouts(problem: Problem) -> Reduction:
    """Drop rows and columns of reshard tables that nobody makes or wants, and values that nobody reads."""
    values: list[ProblemValue] = []
    place: dict[int, int] = {}
    layouts_of: dict[int, list[int]] = {}
    for index, value in enumerate(problem.values):
        if not value.consumers:
            continue
        used = sorted({*value.made, *(q for c in value.consumers for q in c.wants)})
        place[index], layouts_of[index] = len(values), used
        values.append(_only_layouts(value, used))
    moments = tuple(
        replace(
            moment,
            versions=tuple(
                VersionBytes(
                    value=place[v.value], consumers=v.consumers, bytes=tuple(v.bytes[q] for q in layouts_of[v.value])
                )
                for v in moment.versions
                if v.consumers
            ),
        )
        for moment in problem.moments
    )
    return changed_tables(problem, replace(problem, values=tuple(values), moments=moments))


def _only_layouts(value: ProblemValue, used: list[int]) -> ProblemValue:
    if len(used) == len(value.reshard_us):
        return value
    new = {q: i for i, q in enumerate(used)}
    return replace(
        value,
        made=tuple(new[p] for p in value.made),
        consumers=tuple(Consumer(node=c.node, wants=tuple(new[q] for q in c.wants)) for c in value.consumers),
        reshard_us=tuple(tuple(value.reshard_us[p][q] for q in used) for p in used),
    )


def drop_slack_moments(problem: Problem) -> Reduction:
    """Drop moments that no choice can break, and those that hold no more than the one before or after, term by term."""
    left = [m for m in problem.moments if most_bytes(problem, m) + m.fixed_bytes > m.limit_bytes]
    kept: list[Moment] = []
    for position, moment in enumerate(left):
        later = left[position + 1] if position + 1 < len(left) else None
        if (kept and _implies(kept[-1], moment)) or (later and _implies(later, moment)):
            continue
        kept.append(moment)
    return changed_tables(problem, replace(problem, moments=tuple(kept)))


def _implies(strong: Moment, weak: Moment) -> bool:
    """Whatever fits `strong` fits `weak`: every term of `weak` is in `strong` with at least its bytes."""
    if strong.limit_bytes - strong.fixed_bytes > weak.limit_bytes - weak.fixed_bytes:
        return False
    held = {h.node: h.bytes for h in strong.nodes}
    versions = {(v.value, v.consumers): v.bytes for v in strong.versions}
    if len({h.node for h in weak.nodes}) < len(weak.nodes) or len(held) < len(strong.nodes):
        return False
    if len({(v.value, v.consumers) for v in weak.versions}) < len(weak.versions) or len(versions) < len(
        strong.versions
    ):
        return False
    return all(h.node in held and _covers(held[h.node], h.bytes) for h in weak.nodes) and all(
        (key := (v.value, v.consumers)) in versions and _covers(versions[key], v.bytes) for v in weak.versions
    )


def _covers(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return all(m >= b for m, b in zip(more, less, strict=True))
