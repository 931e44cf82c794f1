"""What a reduction returns: a smaller problem with the same optimum, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.ir.problem import Consumer, NodeBytes, Problem, ProblemNode

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """`problem` has the optimum of the problem that was reduced.

    Node n of the original takes strategy pick[n][choice[node[n]]], where `choice` is of the reduced problem.
    """

    problem: Problem
    node: tuple[int, ...]
    pick: tuple[tuple[int, ...], ...]

    def lift(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """The original's choice."""
        return tuple(pick[choice[node]] for node, pick in zip(self.node, self.pick, strict=True))

    def then(self, later: Reduction) -> Reduction:
        """This reduction followed by one of its own problem."""
        node = tuple(later.node[n] for n in self.node)
        pick = tuple(
            tuple(mine[s] for s in later.pick[n]) for n, mine in zip(self.node, self.pick, strict=True)
        )  # fmt: skip
        return Reduction(problem=later.problem, node=node, pick=pick)


def unchanged(problem: Problem) -> Reduction:
    """The reduction that does nothing."""
    return changed_tables(problem, problem)


def changed_tables(before: Problem, after: Problem) -> Reduction:
    """Nodes and strategies stay; only values or moments differ."""
    return Reduction(
        problem=after,
        node=tuple(range(len(before.nodes))),
        pick=tuple(tuple(range(len(n.cost_us))) for n in before.nodes),
    )


def keep_strategies(problem: Problem, kept: list[list[int]]) -> Reduction:
    """Only the strategies `kept[n]` of every node n stay."""
    nodes = tuple(
        ProblemNode(
            name=n.name, cost_us=_only(n.cost_us, k), cover_us=_only(n.cover_us, k) if n.cover_us else (), group=n.group
        )
        for n, k in zip(problem.nodes, kept, strict=True)
    )
    values = tuple(
        replace(
            v,
            made=_only(v.made, kept[v.producer]),
            consumers=tuple(Consumer(node=c.node, wants=_only(c.wants, kept[c.node])) for c in v.consumers),
        )
        for v in problem.values
    )
    moments = tuple(
        replace(m, nodes=tuple(NodeBytes(node=h.node, bytes=_only(h.bytes, kept[h.node])) for h in m.nodes))
        for m in problem.moments
    )
    return Reduction(
        problem=replace(problem, nodes=nodes, values=values, moments=moments),
        node=tuple(range(len(nodes))),
        pick=tuple(tuple(k) for k in kept),
    )


def _only(entries: tuple[T, ...], kept: list[int]) -> tuple[T, ...]:
    return tuple(entries[s] for s in kept)
