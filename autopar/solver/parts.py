"""Linear models of a problem in parts: the least that parts take at prices of memory, and choices at such prices.

The *parts' relaxation* is the LP of the problem without what ties one part to another: each part then has the least of
its own. `priced` solves it where the bytes of a stage cost something, and yields a `PriceBound`, which holds for any
choice of the model, on any stage; `room.price_of_room` finds the best price. `choice_at` solves the whole problem, ties
included, at prices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from autopar.ir.parts import Amount, Choice, PartedProblem
from autopar.ir.problem import Problem, ProblemValue, evaluate
from autopar.solver.backends import backend_named
from autopar.solver.linear import Bools, Floats, Ints, LinearModel
from autopar.solver.model import ProblemModel, build_model, choice_of
from autopar.solver.search import find_choice
from autopar.solver.session import Session, with_row

SLACK = 1e-7
"""Relative: what an LP's optimum may miss by the solver's tolerances."""
MIXED_GAP = 1e-3
"""Relative: how well a choice between two others is chosen."""
FORBIDDEN_US = 1e15
"""Keeps the local search from a strategy."""
UNITS = 2**17
"""A memory row is written in this part of its room, so that the tolerance of 1e-6 is less than a byte of 100 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceBound:
    """What no choice goes below: for one instance of each part

        busy_weight · busy_us + once_weight · finish_us
        + saved_price · saved + resident_price · resident + remade_price · remade >= least

    with `least` in µs, prices in µs per byte.
    """

    busy_weight: float = 1.0
    once_weight: float = 0.0
    saved_price: float = 0.0
    resident_price: float = 0.0
    remade_price: float = 0.0
    least: tuple[float, ...]

    def scaled(self, factor: float) -> PriceBound:
        """Of a micro-batch of `factor` as many rows, where fewer rows take no less time each.

        What is saved and made again shrinks with them; what is resident, or done once, doesn't.
        """
        return replace(
            self, once_weight=factor * self.once_weight, resident_price=factor * self.resident_price,
            least=tuple(factor * us for us in self.least),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A bound at a price of a stage's bytes, and what the relaxation's point takes there of time and of bytes."""

    price: float
    us: float
    bytes: float
    bound: PriceBound


@dataclass(frozen=True, slots=True)
class Held:
    """What a stage holds: instances of each part, and the micro-batches in flight there; `room_bytes` for it."""

    instances: tuple[int, ...]
    in_flight: float
    room_bytes: float


Weights = Mapping[tuple[int, Amount], float]
"""(part, amount) -> weight in an objective, of one instance."""


class PartsModel:
    """The linear model of a problem in parts, and what every column takes in each part, by amount.

    `like`: models of other problems. One of the same form, which differs in its numbers only, shares its arrays and its
    LPs, which then start where they ended for that problem.
    """

    def __init__(self, parted: PartedProblem, like: Iterable[PartsModel] = ()) -> None:
        self.parted = parted
        same = next((m for m in like if _same_form(m.parted, parted)), None)
        self._shared: _Shared = same._shared if same is not None else _Shared(parted)
        self.model: ProblemModel = self._shared.model
        self._takes = self._vectors()
        self._forbidden: Ints = np.zeros(0, dtype=np.int64)
        self._smallest = self._smallest_transients()

    @property
    def form(self) -> int:
        """Of models that share their arrays the same."""
        return id(self._shared)

    def free(self, once_weight: float = 0.0) -> PriceBound:
        """With memory for nothing."""
        return self.priced(Held((1,) * len(self.parted.parts), 1.0, 0.0), once_weight, 0.0).bound

    def priced(self, held: Held, once_weight: float, price: float, *, busy: float = 1.0) -> Priced:
        """The parts' relaxation where a byte of a stage's memory costs so many µs; of bytes alone if `busy` is 0."""
        weights = self._stage_weights(held, once_weight, price, busy)
        every = {p: float(n or 1) for p, n in enumerate(held.instances)}
        mine = {p: float(n) for p, n in enumerate(held.instances) if n}
        own = self._shared.own
        point = own.session.solve(self._cost(_times(weights, every), apart=True)[own.columns]).point
        bound = PriceBound(
            busy_weight=busy, once_weight=once_weight, saved_price=weights.get((0, Amount.SAVED), 0.0),
            resident_price=weights.get((0, Amount.RESIDENT), 0.0), remade_price=weights.get((0, Amount.REMADE), 0.0),
            least=(math.inf,) * len(every) if point is None else self._shares(weights, point),
        )  # fmt: skip
        if point is None:  # the parts have no choice at all
            return Priced(price=price, us=math.inf, bytes=math.inf, bound=bound)
        times, sizes = self._stage_weights(held, once_weight, 0.0, 1.0), self._stage_weights(held, 0.0, 1.0, 0.0)
        us, size = (
            float(self._cost(_times(w, mine), apart=True)[own.columns] @ point) for w in (times, sizes)
        )  # fmt: skip
        return Priced(price=price, us=us, bytes=size, bound=bound)

    def room_of(self, held: Held) -> float:
        """Bytes for what is saved and resident, and made again by the mean of its instances."""
        return max(
            1.0, held.room_bytes - max((self._smallest[p] for p, n in enumerate(held.instances) if n), default=0.0)
        )

    def _stage_weights(self, held: Held, once: float, price: float, busy: float) -> Weights:
        # What is made again in one instance at a time is at least its mean over all of them.
        return self._weights(once, price * held.in_flight, price, price / sum(held.instances), busy=busy)

    def choice_at(self, weights: Weights) -> Choice | None:
        """A choice for the whole model that is best at these weights, or near it where the LP isn't whole."""
        counted = _times(weights, {p: float(n) for p, n in enumerate(self.parted.counts)})
        self._shared.whole.forbid(self._forbidden)
        answer = self._shared.whole.solve(self._cost(counted))
        if answer.point is None:
            return None
        choice, whole = choice_of(self.model, answer.point)
        weighed = None
        if not whole:
            weighed = self._weighed(counted)
            choice = find_choice(weighed, start=choice)
        return choice if evaluate(weighed or self.parted.problem, choice).feasible else None

    def agree_with(self, choice: Choice) -> None:
        """Look from now on only at choices whose parts may stand beside those of this one."""
        start = self.model.node_start
        other = [
            start[tie.node] + s
            for tie in self.parted.ties
            for s, key in enumerate(tie.keys)
            if key != tie.keys[choice[tie.node]]
        ]
        self._forbidden = np.unique(np.array(other, dtype=np.int64))

    def choice_between(
        self, smaller: Choice, faster: Choice, part: int, in_flight: float, room_bytes: float, once_weight: float
    ) -> Choice | None:
        """The fastest for `part` of what lies between two choices, within these bytes for one instance of it.

        Where the two agree, and outside the part, nothing is changed.
        """
        start, linear = self.model.node_start, self.model.linear
        upper = linear.upper.copy()
        for node, (a, b) in enumerate(zip(smaller, faster, strict=True)):
            if a == b or part not in self.parted.homes[node]:
                upper[start[node] : start[node + 1]] = 0.0
                upper[start[node] + b] = 1.0
        times = {part: 1.0}
        cost = self._cost(_times(self._weights(once_weight), times))
        sizes = self._cost(_times(self._weights(0.0, in_flight, 1.0, 1.0, busy=0.0), times))
        scale = UNITS / room_bytes
        model = with_row(replace(linear, cost=cost, upper=upper), sizes * scale, UNITS)
        answer = backend_named("highs").mip(model, None, MIXED_GAP)
        if answer.point is None:
            return None
        choice, _ = choice_of(self.model, answer.point)
        return choice if evaluate(self.parted.problem, choice).feasible else None

    def smallest_transient(self, part: int) -> float:
        """Bytes that an op of the part works on at the least."""
        return self._smallest[part]

    def least_passed(self) -> float:
        """Bytes from one stage to the next at the least."""
        return sum(min(t.sizes) for t in self.parted.terms if t.amount is Amount.PASSED)

    def _weights(
        self, once: float, saved: float = 0.0, resident: float = 0.0, remade: float = 0.0, *, busy: float = 1.0
    ) -> Weights:
        each = {
            Amount.FORWARD: busy, Amount.BACKWARD: busy, Amount.ONCE: once,
            Amount.SAVED: saved, Amount.RESIDENT: resident, Amount.REMADE: remade,
        }  # fmt: skip
        return {(p, a): w for p in range(len(self.parted.parts)) for a, w in each.items() if w}

    def _vectors(self) -> dict[tuple[int, Amount], Floats]:
        """(part, amount) -> per column what it takes, for one instance."""
        parted, start = self.parted, self.model.node_start
        found: dict[tuple[int, Amount], Floats] = {}

        def of(part: int, amount: Amount) -> Floats:
            if (part, amount) not in found:
                found[part, amount] = np.zeros(self.model.linear.columns)
            return found[part, amount]

        for term in parted.terms:
            if term.amount is not Amount.WORKING:
                for part in term.parts:
                    of(part, term.amount)[start[term.node] : start[term.node + 1]] += term.sizes
        paid = self.model.paid
        key = {p.value: (p.part, p.amount) for p in parted.paid}
        ends = np.flatnonzero(np.diff(paid.values, prepend=-1, append=-1))
        for first, last in pairwise(ends):
            index = int(paid.values[first])
            here = slice(int(first), int(last))
            price = np.array(parted.problem.values[index].reshard_us)
            if index in key:
                np.add.at(of(*key[index]), paid.columns[here], price[paid.made[here], paid.wanted[here]])
        for (part, amount), taken in found.items():
            if amount is not Amount.REMADE:
                taken /= parted.counts[part]
        return found

    def _cost(self, weights: Weights, *, apart: bool = False) -> Floats:
        """Per column. `apart`: without what one part pays for choices of another."""
        cost = np.zeros(self.model.linear.columns)
        for key, weight in weights.items():
            taken = self._takes.get(key)
            if taken is not None and weight:
                cost += weight * taken * self._shared.of_part[key[0]] if apart else weight * taken
        return cost

    def _shares(self, weights: Weights, point: Floats) -> tuple[float, ...]:
        """Of each part what a point of the parts' relaxation takes, less what the solver may have missed."""
        found = []
        for part in range(len(self.parted.parts)):
            mine = {key: w for key, w in weights.items() if key[0] == part}
            found.append(float(self._cost(mine, apart=True)[self._shared.own.columns] @ point) * (1 - SLACK))
        return tuple(found)

    def _smallest_transients(self) -> list[float]:
        """The largest of the ops' smallest working sets."""
        found = [0.0] * len(self.parted.parts)
        for term in self.parted.terms:
            if term.amount is Amount.WORKING:
                for part in term.parts:
                    found[part] = max(found[part], min(term.sizes))
        return found

    def _weighed(self, weights: Weights) -> Problem:
        """The problem with weighted costs, for the local search."""
        parted, start = self.parted, self.model.node_start
        own = np.zeros(self.model.linear.columns)
        for term in parted.terms:
            for part in term.parts:
                weight = weights.get((part, term.amount), 0.0) / parted.counts[part]
                if weight and term.amount is not Amount.WORKING:
                    own[start[term.node] : start[term.node + 1]] += weight * np.array(term.sizes)
        own[self._forbidden] = FORBIDDEN_US
        nodes = tuple(
            replace(n, cost_us=tuple(own[start[i] : start[i + 1]].tolist())) for i, n in enumerate(parted.problem.nodes)
        )
        values = list(parted.problem.values)
        for paid in parted.paid:
            weight = weights.get((paid.part, paid.amount), 0.0) / parted.counts[paid.part]
            table = tuple(
                tuple(us if math.isinf(us) else weight * us for us in row) for row in values[paid.value].reshard_us
            )
            values[paid.value] = replace(values[paid.value], reshard_us=table)
        return replace(parted.problem, nodes=nodes, values=tuple(values))


class _Shared:
    """What problems of the same form share."""

    def __init__(self, parted: PartedProblem) -> None:
        self.model: ProblemModel = build_model(parted.problem)
        self.of_part = [self._columns_of(parted, part) for part in range(len(parted.parts))]

    @cached_property
    def own(self) -> _Own:
        """The parts' relaxation: rows that reach beyond a part are left out."""
        return _restricted(self.model.linear, self.of_part)

    @cached_property
    def whole(self) -> Session:
        """The relaxation of the problem."""
        return Session(self.model.linear)

    def _columns_of(self, parted: PartedProblem, part: int) -> Bools:
        """Columns of the part's own nodes, and of conversions between them."""
        model = self.model
        inside = np.array([part in homes for homes in parted.homes])
        mask = np.zeros(model.linear.columns, dtype=bool)
        mask[: model.node_start[-1]] = np.repeat(inside, np.diff(model.node_start))
        for flow in model.flows:
            value = parted.problem.values[flow.value]
            readers = [value.consumers[flow.position].node] if flow.position >= 0 else []
            if inside[[value.producer, *readers]].all():
                mask[flow.columns[flow.columns >= 0]] = True
        return mask


def _same_form(a: PartedProblem, b: PartedProblem) -> bool:
    """True if only numbers differ: their linear models have the same rows and columns."""
    ours, theirs = a.problem, b.problem
    if ours is theirs and a.homes == b.homes:
        return True
    if (a.homes, len(ours.nodes), len(ours.values)) != (b.homes, len(theirs.nodes), len(theirs.values)):
        return False
    if any(len(m.cost_us) != len(n.cost_us) for m, n in zip(ours.nodes, theirs.nodes, strict=True)):
        return False
    return all(_same_conversions(v, w) for v, w in zip(ours.values, theirs.values, strict=True))


def _same_conversions(a: ProblemValue, b: ProblemValue) -> bool:
    """True if the same ones exist, and the same ones are free."""
    if a is b:
        return True
    if (a.producer, a.made, a.consumers) != (b.producer, b.made, b.consumers):
        return False
    return a.reshard_us == b.reshard_us or _kinds(a.reshard_us) == _kinds(b.reshard_us)


@lru_cache(maxsize=20_000)
def _kinds(table: tuple[tuple[float, ...], ...]) -> tuple[int, ...]:
    """0 of what is free, 2 of what can't be."""
    return tuple((us > 0) + (us == math.inf) for row in table for us in row)


@dataclass(frozen=True, slots=True)
class _Own:
    """A part of a linear model: which of its columns."""

    session: Session
    columns: Bools


def _times(weights: Weights, times: Mapping[int, float]) -> Weights:
    return {key: w * times[key[0]] for key, w in weights.items() if key[0] in times}


def _restricted(linear: LinearModel, masks: Sequence[Bools]) -> _Own:
    """The columns of the masks, and the rows that lie in one of them."""
    column = np.repeat(np.arange(linear.columns), np.diff(linear.start))
    every = np.bincount(linear.index, minlength=linear.rows)
    kept_rows = np.zeros(linear.rows, dtype=bool)
    for mask in masks:
        inside = np.bincount(linear.index[mask[column]], minlength=linear.rows)
        kept_rows |= (inside == every) & (every > 0)
    columns: Bools = np.logical_or.reduce(masks)
    entries = columns[column] & kept_rows[linear.index]
    place = np.cumsum(kept_rows) - 1
    counts = np.bincount(column[entries], minlength=linear.columns)[columns]
    linear = LinearModel(
        cost=linear.cost[columns], lower=linear.lower[columns], upper=linear.upper[columns],
        integer=linear.integer[columns], row_lower=linear.row_lower[kept_rows], row_upper=linear.row_upper[kept_rows],
        start=np.concatenate([[0], np.cumsum(counts)]), index=place[linear.index[entries]], value=linear.value[entries],
    )  # fmt: skip
    return _Own(Session(linear), columns)
