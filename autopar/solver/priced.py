"""A choice that fits, by paying for memory: the Lagrangian of the moments, at prices about those of the relaxation.

The LP with limits mixes choices of neighbouring prices: one that needs too much memory and one that needs less. With
the bytes of every moment in the objective, at the LP's own price times a factor a little above 1, and the limits left
out, the relaxation is mostly integral, and is the second of these. It is a point of the lower hull of time over memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.problem import Problem, evaluate
from autopar.solver.backends import Backend, backend_named
from autopar.solver.linear import Floats, LinearAnswer, LinearModel, LinearStatus
from autopar.solver.model import ProblemModel, build_model, choice_of
from autopar.solver.search import find_choice

FACTORS = (1.001, 1.03, 1.15, 1.5, 3.0, 10.0)
"""Of the relaxation's prices, until a choice fits."""


def priced_choice(problem: Problem, model: ProblemModel, lp: LinearAnswer, solver: Backend) -> tuple[int, ...]:
    """A choice that fits, or () if none is found so. `lp`: the relaxation of `model`, the problem's own."""
    prices = _prices(problem, model, lp)
    if not any(prices) or any(m.versions and price for m, price in zip(problem.moments, prices, strict=True)):
        return ()
    for factor in FACTORS:
        free = _paying(problem, [factor * price for price in prices])
        own = build_model(free)
        answer = solver.lp(own.linear, None)
        if answer.point is None:
            return ()
        choice = choice_of(own, answer.point)[0]
        if evaluate(problem, choice).feasible:
            return choice
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Choices along the lower hull of time over memory.

    Attributes:
        bound_us: optimum of the relaxation with the limits; inf where even that can't fit.
        price_us_per_byte: what a byte more would save of it, all moments together.
        choices: one for each price tried, without repeats, the fastest first. They need not fit.
    """

    bound_us: float
    price_us_per_byte: float = 0.0
    choices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """A problem with its linear model and the answer of that: what `sweep` starts from."""

    problem: Problem
    model: ProblemModel
    lp: LinearAnswer

    @classmethod
    def of(cls, problem: Problem) -> Relaxation:
        """Solve the relaxation with the limits."""
        model = build_model(problem)
        return cls(problem=problem, model=model, lp=backend_named("highs").lp(model.linear, None))

    @property
    def bound_us(self) -> float:
        """No choice that fits costs less; inf where none can fit."""
        return math.inf if self.lp.status is LinearStatus.INFEASIBLE or self.lp.point is None else self.lp.bound


def sweep(relaxation: Relaxation, factors: Sequence[float]) -> Sweep:
    """Solve at `factors` times the relaxation's own prices of memory; at none where memory binds nothing.

    Moments must hold bytes of nodes only, or bind nothing.
    """
    problem, model, lp = relaxation.problem, relaxation.model, relaxation.lp
    if lp.point is None:
        return Sweep(bound_us=math.inf)
    prices = _prices(problem, model, lp)
    if not any(prices):
        choice = _whole_choice(replace(problem, moments=()), *choice_of(model, lp.point))
        return Sweep(bound_us=lp.bound, choices=(choice,) if choice else ())
    solver = backend_named("highs")
    free = _without_limits(model)
    found = []
    for factor in factors:
        paying = _paying(problem, [factor * price for price in prices])
        cost = free.cost.copy()
        cost[: model.node_start[-1]] += _node_costs(paying) - _node_costs(problem)
        answer = solver.lp(replace(free, cost=cost), None)
        if answer.point is not None:
            found.append(_whole_choice(paying, *choice_of(model, answer.point)))
    return Sweep(bound_us=lp.bound, price_us_per_byte=sum(prices), choices=tuple(dict.fromkeys(c for c in found if c)))


def _without_limits(model: ProblemModel) -> LinearModel:
    """The same rows, those of the moments without an upper end."""
    upper = model.linear.row_upper.copy()
    upper[[row for row in model.moment_rows if row >= 0]] = math.inf
    return replace(model.linear, row_upper=upper)


def _node_costs(problem: Problem) -> Floats:
    return np.array([c for n in problem.nodes for c in n.cost_us], dtype=float)


def _whole_choice(problem: Problem, choice: tuple[int, ...], whole: bool) -> tuple[int, ...]:
    """A choice of whole strategies near the relaxation's; () if none is found that is possible at all."""
    if not (whole and evaluate(problem, choice).feasible):
        choice = find_choice(problem, start=choice)
    return choice if evaluate(problem, choice).feasible else ()


def _prices(problem: Problem, model: ProblemModel, lp: LinearAnswer) -> list[float]:
    """µs per byte of each moment."""
    found = []
    for index in range(len(problem.moments)):
        row = model.moment_rows[index] if index < len(model.moment_rows) else -1
        dual = 0.0 if row < 0 or not len(lp.row_dual) else abs(float(lp.row_dual[row]))
        found.append(dual / model.moment_scale[index] if row >= 0 else 0.0)
    return found


def _paying(problem: Problem, prices: list[float]) -> Problem:
    """The problem without limits in which bytes cost."""
    more = [[0.0] * len(n.cost_us) for n in problem.nodes]
    for moment, price in zip(problem.moments, prices, strict=True):
        for held in moment.nodes if price else ():
            for s, size in enumerate(held.bytes):
                more[held.node][s] += price * size
    nodes = tuple(
        replace(n, cost_us=tuple(c + e for c, e in zip(n.cost_us, extra, strict=True)))
        for n, extra in zip(problem.nodes, more, strict=True)
    )
    return replace(problem, nodes=nodes, moments=())
