"""The optimisation problem of one search as plain numbers: no torch, no graph, no mesh.

Each *node* picks one strategy. A *value* (a tensor) is made by one node in the layout that the node's strategy gives
and is read by consumers, each in the layout that the consumer's strategy wants. A conversion between two layouts is
paid once per value however many consumers share it. With s(n) the strategy chosen for node n, p(v) = made[s(producer)]
and q(v,k) = wants[s(k)]:

    step = Σ_n cost_us[n][s(n)]                                                    node_cost_us
         + Σ_v Σ_{q in the set of q(v,k), over consumers k} reshard_us[v][p(v)][q]  for values with no overlap group
         + Σ_g max(0, H_g - K_g)                                                   for each overlap group g

where H_g is the conversion time of the values that may hide in group g and K_g = Σ cover_us[n][s(n)] over the nodes of
g: computation that communication may run beside. (T >= K + E and T >= E + H of the formulation, less K + E, which the
first two lines hold.) Multiplicity of tied blocks is folded into every number.

Each memory *moment* is one point of the step at which bytes are summed and compared with a limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INFINITY = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemNode:
    """One choice. All tuples have one entry per strategy.

    Attributes:
        name: for people; unique.
        cost_us: time of the strategy, communication inside it included.
        cover_us: the part of it that communication of the node's overlap group may hide behind (zeros: none).
        group: index of the overlap group that `cover_us` belongs to, or None.
    """

    name: str
    cost_us: tuple[float, ...]
    cover_us: tuple[float, ...] = ()
    group: int | None = None

    def __post_init__(self) -> None:
        if not self.cost_us:
            raise ValueError(f"problem node {self.name} has no strategy")
        if self.cover_us and len(self.cover_us) != len(self.cost_us):
            raise ValueError(
                f"problem node {self.name}: {len(self.cover_us)} cover_us for {len(self.cost_us)} strategies"
            )
        if any(not math.isfinite(c) or c < 0 for c in self.cost_us):
            raise ValueError(f"problem node {self.name}: costs must be finite and not negative: {self.cost_us}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A reader of a value: `wants[s]` is the layout index that strategy s of `node` reads it in."""

    node: int
    wants: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemValue:
    """A tensor.

    Attributes:
        made: layout index that each strategy of `producer` gives.
        reshard_us: square table [p][q], 0 on the diagonal, `INFINITY` where no conversion exists.
        group: overlap group in which its conversions may hide, or None if they must be waited for.
    """

    name: str
    producer: int
    made: tuple[int, ...]
    consumers: tuple[Consumer, ...]
    reshard_us: tuple[tuple[float, ...], ...]
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBytes:
    """Bytes that node `node` holds under each of its strategies."""

    node: int
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionBytes:
    """Bytes held for the distinct layouts q in which the named consumers of `value` read it: Σ_q bytes[q].

    `consumers` are positions in `ProblemValue.consumers`.
    """

    value: int
    consumers: tuple[int, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of the step at which memory is summed: Σ node bytes + Σ version bytes + fixed <= limit."""

    name: str
    limit_bytes: int
    fixed_bytes: int = 0
    nodes: tuple[NodeBytes, ...] = ()
    versions: tuple[VersionBytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """See the module's docstring. `groups` is the number of overlap groups; `fixed_us` is paid whatever is chosen."""

    name: str
    nodes: tuple[ProblemNode, ...]
    values: tuple[ProblemValue, ...]
    moments: tuple[Moment, ...] = ()
    groups: int = 0
    fixed_us: float = 0.0

    def __str__(self) -> str:
        variables = sum(len(n.cost_us) for n in self.nodes)
        edges = sum(len(v.consumers) for v in self.values)
        return (
            f"problem {self.name}: {len(self.nodes)} nodes, {variables} strategies, {len(self.values)} values, "
            f"{edges} reads, {len(self.moments)} moments"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a choice costs, said by the referee. `used_bytes` has one entry per moment."""

    objective_us: float
    node_us: float
    reshard_us: float
    hidden_excess_us: float
    used_bytes: tuple[int, ...]
    feasible: bool


def check_problem(problem: Problem) -> None:
    """Raise ValueError where an index, a table size or a diagonal is wrong."""
    count = [len(n.cost_us) for n in problem.nodes]
    names = {n.name for n in problem.nodes}
    if len(names) != len(problem.nodes):
        raise ValueError(f"{problem.name}: node names repeat")
    for value in problem.values:
        layouts = len(value.reshard_us)
        readers = [(value.producer, value.made), *((c.node, c.wants) for c in value.consumers)]
        for node, layout_of in readers:
            if len(layout_of) != count[node]:
                raise ValueError(
                    f"{value.name}: {len(layout_of)} layouts for {count[node]} strategies of {problem.nodes[node].name}"
                )
            if any(not 0 <= i < layouts for i in layout_of):
                raise ValueError(f"{value.name}: layout index out of range in {problem.nodes[node].name}")
        if any(len(row) != layouts or row[i] != 0 for i, row in enumerate(value.reshard_us)):
            raise ValueError(f"{value.name}: reshard table is not square with a zero diagonal")
    for moment in problem.moments:
        for held in moment.nodes:
            if len(held.bytes) != count[held.node]:
                raise ValueError(f"moment {moment.name}: {len(held.bytes)} sizes for {problem.nodes[held.node].name}")
        for version in moment.versions:
            if len(version.bytes) != len(problem.values[version.value].reshard_us):
                raise ValueError(
                    f"moment {moment.name}: wrong number of sizes for {problem.values[version.value].name}"
                )


def used_bytes(problem: Problem, moment: Moment, choice: tuple[int, ...]) -> int:
    """Bytes summed at one moment under a choice."""
    total = moment.fixed_bytes + sum(held.bytes[choice[held.node]] for held in moment.nodes)
    for version in moment.versions:
        consumers = problem.values[version.value].consumers
        wanted = {consumers[k].wants[choice[consumers[k].node]] for k in version.consumers}
        total += sum(version.bytes[q] for q in wanted)
    return total


def conversions(value: ProblemValue, choice: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Distinct (from, to) layout pairs, from != to, that a choice pays for on this value."""
    made = value.made[choice[value.producer]]
    wanted = sorted({c.wants[choice[c.node]] for c in value.consumers})
    return tuple((made, q) for q in wanted if q != made)


def evaluate(problem: Problem, choice: tuple[int, ...]) -> Evaluation:
    """The referee: price a choice from the problem's tables alone. Knows nothing of solvers."""
    node_us = problem.fixed_us
    reshard_us = 0.0
    cover = [0.0] * problem.groups
    hidden = [0.0] * problem.groups
    for node, pick in zip(problem.nodes, choice, strict=True):
        node_us += node.cost_us[pick]
        if node.group is not None and node.cover_us:
            cover[node.group] += node.cover_us[pick]
    for value in problem.values:
        cost = sum(value.reshard_us[p][q] for p, q in conversions(value, choice))
        if value.group is None:
            reshard_us += cost
        else:
            hidden[value.group] += cost
    excess = sum(max(0.0, h - k) for h, k in zip(hidden, cover, strict=True))
    used = tuple(used_bytes(problem, moment, choice) for moment in problem.moments)
    fits = all(u <= m.limit_bytes for u, m in zip(used, problem.moments, strict=True))
    objective = node_us + reshard_us + excess
    return Evaluation(
        objective_us=objective,
        node_us=node_us,
        reshard_us=reshard_us,
        hidden_excess_us=excess,
        used_bytes=used,
        feasible=fits and math.isfinite(objective),
    )
