"""The record of a large problem as flat arrays, and its referee.

Node n picks one strategy s(n) and is live in [first, last). With t_e the table of edge e over its nodes (first node's
strategy slowest) and L the usage limit:

    minimise   Σ_n cost[n, s(n)] + Σ_e t_e[s of its nodes]
    subject to Σ_{n live at t} usage[n, s(n)] <= L   at every time t

A cost of FORBIDDEN or more marks what must not be chosen. `ir.problem.Problem` says the same with a moment for each
time that holds all that is live: here that would be 10^8 numbers, so intervals stay intervals (docs/decisions/0006).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.linear import Ints

FORBIDDEN = 10**18


@dataclass(frozen=True, slots=True, kw_only=True)
class PairwiseProblem:
    """See the module's docstring. All arrays are of int64.

    Attributes:
        start: strategies of node n are start[n] .. start[n + 1] of `cost` and `usage`.
        intervals: nodes × (first, last).
        edge_start: nodes of edge e are edge_start[e] .. edge_start[e + 1] of `edge_nodes`.
        table_start: its table is table_start[e] .. table_start[e + 1] of `tables`.
    """

    name: str
    limit: int
    start: Ints
    intervals: Ints
    cost: Ints
    usage: Ints
    edge_start: Ints
    edge_nodes: Ints
    table_start: Ints
    tables: Ints

    @property
    def nodes(self) -> int:
        return len(self.start) - 1

    @property
    def edges(self) -> int:
        return len(self.edge_start) - 1

    def __str__(self) -> str:
        return (
            f"problem {self.name}: {self.nodes} nodes, {len(self.cost)} strategies, {self.edges} edges,"
            f" {len(self.tables)} edge costs, usage limit {self.limit}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What a choice costs and uses, said by the referee. `allowed`: no forbidden cost is in it."""

    cost: int
    peak_usage: int
    allowed: bool
    fits: bool


def price_choice(problem: PairwiseProblem, choice: Sequence[int]) -> Priced:
    """The referee: a choice priced from the problem's arrays alone, in whole numbers of any size.

    Raises:
        ValueError: the choice has not one strategy for each node, or one that its node doesn't have.
    """
    picked = np.asarray(choice, dtype=np.int64)
    sizes = np.diff(problem.start)
    if picked.shape != sizes.shape or (picked < 0).any() or (picked >= sizes).any():
        raise ValueError(f"{problem.name}: not a choice of one strategy for each of {problem.nodes} nodes")
    node_costs = problem.cost[problem.start[:-1] + picked]
    edge_costs = problem.tables[problem.table_start[:-1] + _places(problem, picked)]
    allowed = bool((node_costs < FORBIDDEN).all() and (edge_costs < FORBIDDEN).all())
    peak = _peak(problem, problem.usage[problem.start[:-1] + picked])
    cost = sum(node_costs.tolist()) + sum(edge_costs.tolist())
    return Priced(cost=cost, peak_usage=peak, allowed=allowed, fits=peak <= problem.limit)


def _places(problem: PairwiseProblem, picked: Ints) -> Ints:
    """Place of each edge's cost in its table: place = place * strategies + strategy, node by node."""
    sizes = np.diff(problem.start)
    place = np.zeros(problem.edges, dtype=np.int64)
    arity = np.diff(problem.edge_start)
    for k in range(int(arity.max(initial=0))):
        has = np.flatnonzero(arity > k)
        node = problem.edge_nodes[problem.edge_start[has] + k]
        place[has] = place[has] * sizes[node] + picked[node]
    return place


def _peak(problem: PairwiseProblem, used: Ints) -> int:
    """The most that is used at one time; a time's ends come before its starts."""
    events = [
        (int(time), sign, int(amount))
        for (first, last), amount in zip(problem.intervals.tolist(), used.tolist(), strict=True)
        if first < last
        for time, sign in ((first, 1), (last, 0))
    ]
    now = peak = 0
    for _, starts, amount in sorted(events):
        now += amount if starts else -amount
        peak = max(peak, now)
    return peak
