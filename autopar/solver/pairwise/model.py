"""What the methods work on: nodes, tables of pairs, and loads on rows of time, each row with its own room.

A `PairwiseProblem` becomes one here (`model_of`), or comes back from the native reductions as a smaller one. In both a
load (n, first, last, amounts) takes amounts[s(n)] of the room of rows first .. last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import UserError
from autopar.solver.linear import Floats, Ints
from autopar.solver.pairwise.problem import FORBIDDEN, PairwiseProblem

LARGEST_TABLE = 1 << 16  # combinations of an edge over more than two nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PairwiseModel:
    """Forbidden costs are inf. A choice costs `constant` more than these arrays say.

    Attributes:
        start: strategies of node n are start[n] .. start[n + 1] of `cost`.
        ends: edges × (a, b), a != b; the tables follow each other, a's strategy slowest.
        load_node, load_rows: per load the node and (first row, row after the last).
        amounts: of the loads, one per strategy of its node each.
        room: per row, what all loads together may take.
    """

    start: Ints
    cost: Floats
    ends: Ints
    tables: Floats
    load_node: Ints
    load_rows: Ints
    amounts: Floats
    room: Floats
    constant: int = 0

    @property
    def nodes(self) -> int:
        return len(self.start) - 1

    def table_start(self) -> Ints:
        """Table of edge e: table_start[e] .. table_start[e + 1] of `tables`."""
        sizes = np.diff(self.start)
        return ends_of(sizes[self.ends[:, 0]] * sizes[self.ends[:, 1]])

    def load_start(self) -> Ints:
        """Amounts of load k: load_start[k] .. load_start[k + 1]."""
        return ends_of(np.diff(self.start)[self.load_node])

    def used(self, picked: Ints) -> Floats:
        """Per row, what a choice takes."""
        amount = self.amounts[self.load_start()[:-1] + picked[self.load_node]] if len(self.load_node) else np.zeros(0)
        change = np.zeros(len(self.room) + 1)
        np.add.at(change, self.load_rows[:, 0], amount)
        np.add.at(change, self.load_rows[:, 1], -amount)
        return np.cumsum(change)[:-1]

    def cost_of(self, picked: Ints) -> float:
        """What a choice costs, the constant not in it."""
        sizes = np.diff(self.start)
        a, b = self.ends[:, 0], self.ends[:, 1]
        nodes = self.cost[self.start[:-1] + picked].sum()
        return float(nodes + self.tables[self.table_start()[:-1] + picked[a] * sizes[b] + picked[b]].sum())


def ends_of(lengths: Ints) -> Ints:
    """0, and the sum of the lengths up to each."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def as_pairs(problem: PairwiseProblem) -> PairwiseProblem:
    """The same with edges over two different nodes only; nodes that stand for the rest follow the problem's own.

    An edge over one node or over a, b, c, ... becomes a node with a strategy for each combination that is allowed,
    tied to the edge's nodes by tables of 0 and FORBIDDEN.

    Raises:
        UserError: an edge has too many combinations.
    """
    if (np.diff(problem.edge_start) == 2).all():
        pairs = problem.edge_nodes.reshape(-1, 2)
        if (pairs[:, 0] != pairs[:, 1]).all():
            return problem
    sizes = np.diff(problem.start)
    costs, usages, new_sizes = [problem.cost], [problem.usage], [sizes]
    edges: list[tuple[int, int]] = []
    tables: list[Ints] = []
    nodes = problem.nodes
    for e in range(problem.edges):
        over = problem.edge_nodes[problem.edge_start[e] : problem.edge_start[e + 1]]
        table = problem.tables[problem.table_start[e] : problem.table_start[e + 1]]
        if len(over) == 2 and over[0] != over[1]:
            edges.append((int(over[0]), int(over[1])))
            tables.append(table)
            continue
        if len(table) > LARGEST_TABLE:
            raise UserError(f"edge {e} over {len(over)} nodes has {len(table)} combinations; at most {LARGEST_TABLE}")
        picks = np.stack(np.unravel_index(np.arange(len(table)), tuple(sizes[over])), axis=1)
        distinct, first = np.unique(over, return_index=True)
        same = (picks == picks[:, first[np.searchsorted(distinct, over)]]).all(axis=1)
        kept = np.flatnonzero(same & (table < FORBIDDEN))
        if not len(kept):  # nothing allowed: one strategy that isn't
            kept = np.flatnonzero(same)[:1]
        costs.append(table[kept])
        usages.append(np.zeros(len(kept), dtype=np.int64))
        new_sizes.append(np.array([len(kept)], dtype=np.int64))
        for n, position in zip(distinct.tolist(), first.tolist(), strict=True):
            tie = np.where(picks[kept, position][:, None] == np.arange(sizes[n]), 0, FORBIDDEN)
            edges.append((nodes, n))
            tables.append(tie.ravel())
        nodes += 1
    pair_ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    extra = nodes - problem.nodes
    return replace(
        problem,
        start=ends_of(np.concatenate(new_sizes)), cost=np.concatenate(costs), usage=np.concatenate(usages),
        intervals=np.concatenate([problem.intervals, np.zeros((extra, 2), dtype=np.int64)]),
        edge_start=np.arange(0, 2 * len(pair_ends) + 1, 2), edge_nodes=pair_ends.ravel(),
        table_start=ends_of(np.array([len(t) for t in tables], dtype=np.int64)),
        tables=np.concatenate(tables) if tables else np.zeros(0, dtype=np.int64),
    )  # fmt: skip


def model_of(problem: PairwiseProblem) -> PairwiseModel:
    """Of a problem with pairs only: a row for each time at which something starts and nothing else before an end."""
    first, last = problem.intervals[:, 0], problem.intervals[:, 1]
    live = np.flatnonzero(first < last)
    starts, ends = np.unique(first[live]), np.unique(last[live])
    following = np.append(starts[1:], np.iinfo(np.int64).max)
    next_end = np.append(ends, np.iinfo(np.int64).max)[np.searchsorted(ends, starts, side="right")]
    times = starts[next_end <= following]
    rows = np.stack([np.searchsorted(times, first[live]), np.searchsorted(times, last[live])], axis=1)
    sizes = np.diff(problem.start)[live]
    picked = np.repeat(problem.start[:-1][live] - ends_of(sizes)[:-1], sizes) + np.arange(sizes.sum())
    return PairwiseModel(
        start=problem.start, cost=_priced(problem.cost), ends=problem.edge_nodes.reshape(-1, 2),
        tables=_priced(problem.tables), load_node=live, load_rows=rows,
        amounts=problem.usage[picked].astype(np.float64), room=np.full(len(times), float(problem.limit)),
    )  # fmt: skip


def _priced(costs: Ints) -> Floats:
    return np.where(costs >= FORBIDDEN, math.inf, costs.astype(np.float64))
