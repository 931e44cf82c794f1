"""A choice that fits, by paying for memory: the Lagrangian of the moments, at prices about those of the relaxation.

The LP with limits mixes choices of neighbouring prices: one that needs too much memory and one that needs less. With
the bytes of every moment in the objective, at the LP's own price times a factor a little above 1, and the limits left
out, the relaxation is mostly integral, and is the second of these. It is a point of the lower hull of time over memory.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.problem import Problem, evaluate
from autopar.solver.backends import Backend
from autopar.solver.linear import LinearAnswer
from autopar.solver.model import ProblemModel, build_model, choice_of

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
