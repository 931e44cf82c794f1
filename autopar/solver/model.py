"""Formulation section 1 as a mixed-integer linear model, block of arrays by block of arrays.

    x[o,s] ∈ {0,1},  Σ_s x[o,s] = 1                                              _add_choices
    made[t,p] = Σ_{s: o(t) under s gives p} x[o(t),s]                            _Reader (node = producer)
    wants[t,k,q] = Σ_{s: k under s takes q} x[k,s]                               _Reader (node = consumer)
    f[t,k,p,q] >= 0:  Σ_q f = made[t,p]   and   Σ_p f = wants[t,k,q]             _transport
    g[t,p,q] >= f[t,k,p,q] for all k                                             _shared_conversions
    minimise Σ c·x + Σ r[t,p,q]·g[t,p,q]                                         _add_choices, _pay
    h_g >= H_g - K_g,  h_g >= 0                                                  _add_groups
    Σ bytes·x + Σ bytes·u + fixed <= limit,  u[t,q] >= wants[t,k,q]              _add_moments
    Σ c·x + Σ r·g + Σ h <= a time, where memory is what is minimised             add_time_limit

Nothing is written that is not needed. A conversion that costs nothing has no g; with one consumer (or one consumer that
can want q) f itself carries the price; an infinite conversion has no variable. If the producer gives one layout,
f[t,k,p,q] = wants[t,k,q]; if consumer k takes one layout, f[t,k,p,q] = made[t,p], and as no f can exceed made[t,p] the
shared g[t,p,q] is made[t,p] too; if k is the producer itself, f[t,k,p,q] is the sum of the strategies that give p and
take q. None of these has f variables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.ir.problem import Moment, Problem, ProblemValue
from autopar.solver.linear import Floats, Ints, LinearBuilder, LinearModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowColumns:
    """Columns of f[value, consumer position] (or of g, then position is -1) over layouts p × q; -1: no column."""

    value: int
    position: int
    columns: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionColumns:
    """Columns of u[value, q] for the layouts that the consumers at `positions` want; -1: no column."""

    value: int
    positions: tuple[int, ...]
    columns: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class PaidColumns:
    """Column columns[i] pays for the conversion made[i] -> wanted[i] of values[i]; those in overlap groups aren't here.

    A column may stand here more than once.
    """

    columns: Ints
    values: Ints
    made: Ints
    wanted: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemModel:
    """A linear model and where the problem's decisions lie in it.

    Attributes:
        node_start: columns node_start[n] .. node_start[n + 1] are x[n, :].
        paid: which columns carry the prices of conversions.
        group_columns: h_g.
        moment_rows: row of each moment, or -1 where no choice can break it.
        moment_scale: bytes in one unit of the moment's row.
    """

    linear: LinearModel
    node_start: Ints
    flows: tuple[FlowColumns, ...]
    versions: tuple[VersionColumns, ...]
    paid: PaidColumns
    group_columns: Ints
    moment_rows: tuple[int, ...]
    moment_scale: tuple[float, ...]
    excess_column: int = -1


def build_model(problem: Problem, *, least_memory: bool = False, within_us: float = math.inf) -> ProblemModel:
    """Write `problem` as arrays.

    With `least_memory` the objective is one column e, in units of `moment_scale`, with
    Σ bytes·x + Σ bytes·u + fixed - e <= limit at every moment: the excess over the limits. Of times it is only asked
    that they are `within_us` together.
    """
    work = _Work(problem)
    work.add_choices()
    work.add_groups()
    for index in range(len(problem.values)):
        work.add_value(index)
    work.add_moments(least_memory=least_memory)
    if within_us < math.inf:
        work.add_time_limit(within_us)
    return work.finish(least_memory=least_memory)


def point_of(problem: Problem, model: ProblemModel, choice: tuple[int, ...]) -> Floats:
    """The column values that stand for `choice`: a start for a MIP, and a test of the model."""
    point = np.zeros(model.linear.columns)
    point[model.node_start[:-1] + np.array(choice, dtype=np.int64)] = 1.0
    for flow in model.flows:
        value = problem.values[flow.value]
        made = value.made[choice[value.producer]]
        readers = value.consumers if flow.position < 0 else (value.consumers[flow.position],)
        for reader in readers:
            column = flow.columns[made, reader.wants[choice[reader.node]]]
            if column >= 0:
                point[column] = 1.0
    for version in model.versions:
        consumers = problem.values[version.value].consumers
        for k in version.positions:
            point[version.columns[consumers[k].wants[choice[consumers[k].node]]]] = 1.0
    for column in model.group_columns:
        point[column] = max(0.0, -_row_excess(model.linear, point, column))
    return point


def choice_of(model: ProblemModel, point: Floats) -> tuple[tuple[int, ...], bool]:
    """The largest x of every node (the first of equals), and whether every x is whole."""
    picks, whole = [], True
    for first, last in zip(model.node_start[:-1], model.node_start[1:], strict=True):
        x = point[first:last]
        pick = int(np.argmax(np.round(x, 6)))
        picks.append(pick)
        whole = whole and bool(x[pick] > 1 - 1e-6)
    return tuple(picks), whole


def _row_excess(linear: LinearModel, point: Floats, group_column: int) -> float:
    """K_g - H_g at `point`: the activity of the group's row without h_g (its only entry in that column)."""
    row = linear.index[linear.start[group_column]]
    columns = np.repeat(np.arange(linear.columns), np.diff(linear.start))
    inside = linear.index == row
    inside[linear.start[group_column]] = False
    return float(linear.value[inside] @ point[columns[inside]])


@dataclass(frozen=True, slots=True)
class _Flow:
    """f[t,k,:,:] as (layout p, layout q, column) triples: one column each if own, else sums of x columns."""

    made: Ints
    wanted: Ints
    columns: Ints
    whole_producer: int = -1  # the only layout q that the consumer takes, or -1


class _Work:
    """The builder's state while one problem is written; used by `build_model` only."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.builder = LinearBuilder()
        self.node_start = np.zeros(0, dtype=np.int64)
        self.starts: list[int] = []
        self.choice_columns = np.zeros(0, dtype=np.int64)
        self.flows: list[FlowColumns] = []
        self.versions: dict[tuple[int, tuple[int, ...]], VersionColumns] = {}
        self.group_columns = np.zeros(0, dtype=np.int64)
        self.group_rows = np.zeros(0, dtype=np.int64)
        self.moment_rows: list[int] = []
        self.moment_scale: list[float] = []
        self.excess_column = -1
        self.paid: list[tuple[int, Ints, Ints, Ints]] = []

    def _paid(self) -> PaidColumns:
        sizes = [len(columns) for _, columns, _, _ in self.paid]
        joined = [np.concatenate([np.zeros(0, dtype=np.int64), *(p[i] for p in self.paid)]) for i in (1, 2, 3)]
        values = np.repeat(np.array([p[0] for p in self.paid], dtype=np.int64), sizes)
        return PaidColumns(columns=joined[0], values=values, made=joined[1], wanted=joined[2])

    def finish(self, *, least_memory: bool) -> ProblemModel:
        linear = self.builder.build(0.0 if least_memory else self.problem.fixed_us)
        if least_memory:
            linear.cost[:] = 0.0
            linear.cost[self.excess_column] = 1.0
            linear.lower[self.excess_column] = -math.inf
        return ProblemModel(
            linear=linear, node_start=self.node_start, flows=tuple(self.flows), versions=tuple(self.versions.values()),
            paid=self._paid(), group_columns=self.group_columns, moment_rows=tuple(self.moment_rows),
            moment_scale=tuple(self.moment_scale), excess_column=self.excess_column,
        )  # fmt: skip

    def add_time_limit(self, within_us: float) -> None:
        """Σ c·x + Σ r·g + Σ h <= the time left, in units of that limit."""
        cost = self.builder.cost()
        columns = np.flatnonzero(cost)
        scale = within_us or 1.0
        row = self.builder.add_rows(1, -math.inf, (within_us - self.problem.fixed_us) / scale)
        self.builder.add_entries(np.full(len(columns), row[0]), columns, cost[columns] / scale)

    def add_choices(self) -> None:
        """Binary x[o,s], Σ_s x[o,s] = 1, cost Σ c·x."""
        nodes = self.problem.nodes
        sizes = np.array([len(n.cost_us) for n in nodes], dtype=np.int64)
        self.node_start = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        cost = np.array([c for n in nodes for c in n.cost_us], dtype=float)
        columns = self.builder.add_columns(cost, upper=1.0, integer=True)
        rows = self.builder.add_rows(len(nodes), 1.0, 1.0)
        self.builder.add_entries(np.repeat(rows, sizes), columns, 1.0)
        self.starts, self.choice_columns = self.node_start.tolist(), columns

    def add_groups(self) -> None:
        """h_g >= H_g - K_g, h_g >= 0, written h_g + K_g - H_g >= 0; `_pay` puts H_g in."""
        count = self.problem.groups
        self.group_columns = self.builder.add_columns(np.ones(count))
        self.group_rows = self.builder.add_rows(count, 0.0, math.inf)
        self.builder.add_entries(self.group_rows, self.group_columns, 1.0)
        for index, node in enumerate(self.problem.nodes):
            if node.group is not None and node.cover_us:
                rows = np.full(len(node.cover_us), self.group_rows[node.group])
                self.builder.add_entries(rows, self._x(index), np.array(node.cover_us, dtype=float))

    def add_value(self, index: int) -> None:
        """Transport of one value to each of its readers, and the price of its conversions."""
        value = self.problem.values[index]
        price = np.array(value.reshard_us, dtype=float)
        positions = _distinct_consumers(value)
        flows = [self._transport(index, k, price) for k in positions]
        if len(flows) == 1:
            self._pay(index, price, flows[0].made, flows[0].wanted, flows[0].columns)
        elif flows:
            self._shared_conversions(index, flows, price)

    def _x(self, node: int) -> Ints:
        return self.choice_columns[self.starts[node] : self.starts[node + 1]]

    def _pay(self, index: int, price: Floats, made: Ints, wanted: Ints, columns: Ints) -> None:
        """Σ r·f into the objective, or into H_g if the conversion may hide."""
        each, group = price[made, wanted], self.problem.values[index].group
        paid = each > 0
        if group is None:
            self.builder.add_cost(columns[paid], each[paid])
            self.paid.append((index, columns[paid], made[paid], wanted[paid]))
        else:
            rows = np.full(int(paid.sum()), self.group_rows[group])
            self.builder.add_entries(rows, columns[paid], -each[paid])

    def _transport(self, index: int, position: int, price: Floats) -> _Flow:
        """f[t,k,p,q] >= 0: Σ_q f[t,k,p,q] = made[t,p] and Σ_p f[t,k,p,q] = wants[t,k,q]; or the x it equals."""
        value = self.problem.values[index]
        consumer = value.consumers[position]
        gives, made = _told_apart(value.made)
        takes, wants = _told_apart(consumer.wants)
        if consumer.node == value.producer:
            return self._fixed_flow(made, wants, self._x(consumer.node), price)
        if len(gives) == 1:
            return self._fixed_flow(np.full(len(wants), gives[0]), wants, self._x(consumer.node), price)
        if len(takes) == 1:
            flow = self._fixed_flow(made, np.full(len(made), takes[0]), self._x(value.producer), price)
            return _Flow(flow.made, flow.wanted, flow.columns, int(takes[0]))
        give, take = np.nonzero(np.isfinite(price[gives[:, None], takes]))
        p, q = gives[give], takes[take]
        columns = self.builder.add_columns(np.zeros(len(p)))
        self._marginal(gives, give, columns, made, self._x(value.producer))
        self._marginal(takes, take, columns, wants, self._x(consumer.node))
        self._remember(index, position, p, q, columns)
        return _Flow(p, q, columns)

    def _fixed_flow(self, made: Ints, wanted: Ints, columns: Ints, price: Floats) -> _Flow:
        """A flow that equals x columns: the infinite ones are forbidden."""
        finite = np.isfinite(price[made, wanted])
        self.builder.forbid(columns[~finite])
        return _Flow(made[finite], wanted[finite], columns[finite])

    def _marginal(self, layouts: Ints, of_flow: Ints, flow: Ints, of_strategy: Ints, x: Ints) -> None:
        """For every layout: Σ f over it - Σ x of the strategies that have it = 0. `of_flow`: places in `layouts`."""
        rows = self.builder.add_rows(len(layouts), 0.0, 0.0)
        self.builder.add_entries(rows[of_flow], flow, 1.0)
        self.builder.add_entries(rows[np.searchsorted(layouts, of_strategy)], x, -1.0)

    def _remember(self, index: int, position: int, p: Ints, q: Ints, columns: Ints) -> None:
        layouts = len(self.problem.values[index].reshard_us)
        table = np.full((layouts, layouts), -1, dtype=np.int64)
        table[p, q] = columns
        self.flows.append(FlowColumns(value=index, position=position, columns=table))

    def _shared_conversions(self, index: int, flows: list[_Flow], price: Floats) -> None:
        """g[t,p,q] >= f[t,k,p,q] for all k, where more than one consumer can want q; else f carries the price."""
        layouts = len(price)
        readers = np.zeros(layouts, dtype=np.int64)
        always = np.zeros(layouts, dtype=bool)
        for flow in flows:
            readers[np.unique(flow.wanted)] += 1
            if flow.whole_producer >= 0 and not always[flow.whole_producer]:
                always[flow.whole_producer] = True
                self._pay(index, price, flow.made, flow.wanted, flow.columns)
        for flow in flows:
            alone = (readers[flow.wanted] == 1) & ~always[flow.wanted]
            self._pay(index, price, flow.made[alone], flow.wanted[alone], flow.columns[alone])
        shared = [
            (f.made[keep], f.wanted[keep], f.columns[keep])
            for f in flows
            if (keep := (readers[f.wanted] > 1) & ~always[f.wanted] & (price[f.made, f.wanted] > 0)).any()
        ]
        if not shared:
            return
        pairs = np.unique(np.concatenate([p * layouts + q for p, q, _ in shared]))
        columns = self.builder.add_columns(np.zeros(len(pairs)))
        self._pay(index, price, pairs // layouts, pairs % layouts, columns)
        self._remember(index, -1, pairs // layouts, pairs % layouts, columns)
        for p, q, flow_columns in shared:
            own, place = np.unique(p * layouts + q, return_inverse=True)
            rows = self.builder.add_rows(len(own), 0.0, math.inf)
            self.builder.add_entries(rows, columns[np.searchsorted(pairs, own)], 1.0)
            self.builder.add_entries(rows[place], flow_columns, -1.0)

    def add_moments(self, *, least_memory: bool) -> None:
        """Σ bytes·x + Σ bytes·u + fixed <= limit at every moment that some choice could break."""
        for moment in self.problem.moments:
            terms = [(self._x(held.node), np.array(held.bytes, dtype=float)) for held in moment.nodes]
            terms += [t for v in moment.versions for t in self._version(v.value, v.consumers, v.bytes)]
            room = moment.limit_bytes - moment.fixed_bytes
            if not least_memory and most_bytes(self.problem, moment) <= room:
                self.moment_rows.append(-1)
                self.moment_scale.append(1.0)
                continue
            divisor = _divisor(moment)
            scale = max(divisor, moment.limit_bytes / 2**17)
            row = self.builder.add_rows(1, -math.inf, (room if least_memory else room // divisor * divisor) / scale)
            for columns, sizes in terms:
                self.builder.add_entries(np.full(len(columns), row[0]), columns, sizes / scale)
            self.moment_rows.append(int(row[0]))
            self.moment_scale.append(scale)
        if least_memory:
            self._add_excess()

    def _add_excess(self) -> None:
        """e >= (used - limit) / common scale at every moment."""
        self.excess_column = int(self.builder.add_columns(np.zeros(1))[0])
        scale = max(self.moment_scale, default=1.0)
        for row, own in zip(self.moment_rows, self.moment_scale, strict=True):
            self.builder.add_entries(np.array([row]), np.array([self.excess_column]), -scale / own)

    def _version(self, index: int, positions: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[Ints, Floats]]:
        """u[t,q] >= wants[t,k,q] for the named consumers; with one of them u is wants itself."""
        value = self.problem.values[index]
        held = np.array(sizes, dtype=float)
        if len({(value.consumers[k].node, value.consumers[k].wants) for k in positions}) == 1:
            consumer = value.consumers[positions[0]]
            return [(self._x(consumer.node), held[np.array(consumer.wants, dtype=np.int64)])]
        columns = self._version_columns(index, positions).columns
        kept = columns >= 0
        return [(columns[kept], held[kept])]

    def _version_columns(self, index: int, positions: tuple[int, ...]) -> VersionColumns:
        key = (index, positions)
        if key not in self.versions:
            value = self.problem.values[index]
            readers = sorted({(value.consumers[k].node, value.consumers[k].wants) for k in positions})
            layouts = np.unique(np.concatenate([np.array(w, dtype=np.int64) for _, w in readers]))
            table = np.full(len(value.reshard_us), -1, dtype=np.int64)
            table[layouts] = self.builder.add_columns(np.zeros(len(layouts)))
            for node, wants in readers:
                taken, place = np.unique(np.array(wants, dtype=np.int64), return_inverse=True)
                rows = self.builder.add_rows(len(taken), 0.0, math.inf)
                self.builder.add_entries(rows, table[taken], 1.0)
                self.builder.add_entries(rows[place], self._x(node), -1.0)
            self.versions[key] = VersionColumns(value=index, positions=positions, columns=table)
        return self.versions[key]


@lru_cache(maxsize=50_000)
def _told_apart(layouts: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Those that differ, in order, and all as they are."""
    every = np.array(layouts, dtype=np.int64)
    apart = np.unique(every)
    every.setflags(write=False)
    apart.setflags(write=False)
    return apart, every


def most_bytes(problem: Problem, moment: Moment) -> int:
    """No choice holds more than this at the moment (fixed bytes not counted)."""
    total = sum(max(held.bytes) for held in moment.nodes)
    for version in moment.versions:
        consumers = problem.values[version.value].consumers
        wanted = {q for k in version.consumers for q in consumers[k].wants}
        each = sum(max(version.bytes[q] for q in consumers[k].wants) for k in version.consumers)
        total += min(each, sum(version.bytes[q] for q in wanted))
    return total


def _distinct_consumers(value: ProblemValue) -> list[int]:
    """Positions of the consumers that differ; two reads by one node in the same layouts are one."""
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    for position, consumer in enumerate(value.consumers):
        seen.setdefault((consumer.node, consumer.wants), position)
    return list(seen.values())


def _divisor(moment: Moment) -> int:
    """Greatest common divisor of the moment's sizes: what is used is a multiple of it, so the room may be rounded down.

    One unit of the row is the divisor, or limit / 2^17 if that is larger: a solver's tolerance of 1e-6 is then less
    than one byte of a 100 GB limit.
    """
    sizes = [b for held in moment.nodes for b in held.bytes] + [b for v in moment.versions for b in v.bytes]
    return math.gcd(*sizes) or 1
